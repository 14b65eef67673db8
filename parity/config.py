"""Configuration files by Python Accelerate: `read` says what each of them means, `write` writes some of its own, and
`to_fsdp2` converts them."""

import argparse
import json
from pathlib import Path

from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.config.default import write_basic_config
from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2

BASE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "mixed_precision": "no",
    "use_cpu": False,
    "debug": False,
}

# What a questionnaire may have heard.
ANSWERS = {
    "one_process": {"num_processes": 1},
    "cpus": {"distributed_type": "MULTI_CPU", "num_processes": 4, "use_cpu": True, "mixed_precision": "bf16"},
    "gpus": {"distributed_type": "MULTI_GPU", "num_processes": 8, "gpu_ids": "0,1,2,3,4,5,6,7", "debug": True},
    "gpu_of_a_number": {"num_processes": 1, "gpu_ids": "3", "mixed_precision": "fp16"},
    "machines": {
        "distributed_type": "MULTI_GPU",
        "num_processes": 16,
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "same_network": True,
        "rdzv_backend": "c10d",
    },
    "affinity": {"distributed_type": "MULTI_GPU", "num_processes": 2, "enable_cpu_affinity": True},
    "compiled": {
        "num_processes": 1,
        "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_fullgraph": True},
    },
    "fsdp1": {
        "distributed_type": "FSDP",
        "num_processes": 4,
        "fsdp_config": {
            "fsdp_version": 1,
            "fsdp_reshard_after_forward": "FULL_SHARD",
            "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
            "fsdp_min_num_params": 1000000,
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_use_orig_params": True,
        },
    },
    "fsdp2": {
        "distributed_type": "FSDP",
        "num_processes": 4,
        "mixed_precision": "bf16",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": False,
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        },
    },
    "deepspeed": {
        "distributed_type": "DEEPSPEED",
        "num_processes": 4,
        "deepspeed_config": {
            "zero_stage": 3,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "offload_optimizer_device": "cpu",
            "zero3_init_flag": True,
        },
    },
    "deepspeed_file": {
        "distributed_type": "DEEPSPEED",
        "num_processes": 4,
        "deepspeed_config": {"deepspeed_config_file": "zero3.json", "zero3_init_flag": False},
    },
    "fp8": {
        "distributed_type": "MULTI_GPU",
        "num_processes": 2,
        "mixed_precision": "fp8",
        "fp8_config": {"backend": "AO", "enable_fsdp_float8_all_gather": True, "pad_inner_dim": False},
    },
    "mpi": {
        "distributed_type": "MULTI_CPU",
        "num_processes": 4,
        "use_cpu": True,
        "mpirun_config": {"mpirun_hostfile": "hostfile"},
    },
    "axes": {
        "distributed_type": "FSDP",
        "num_processes": 8,
        "fsdp_config": {"fsdp_version": 2},
        "parallelism_config": {"parallelism_config_dp_replicate_size": 2, "parallelism_config_tp_size": 4},
    },
}


def meaning(path):
    """What the file at `path` says, or why it is no configuration of this machine."""
    try:
        config = load_config_from_file(path)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    if not isinstance(config, ClusterConfig):
        return {"error": "not for LOCAL_MACHINE"}
    return {"config": config.to_dict()}


def write(folder):
    """Writes every answer in both languages, and the file of a machine without questions."""
    for name, answers in ANSWERS.items():
        ClusterConfig(**{**BASE, **answers}).to_yaml_file(str(folder / f"{name}.yaml"))
        ClusterConfig(**{**BASE, **answers}).to_json_file(str(folder / f"{name}.json"))
    basic = folder / "default.yaml"
    basic.unlink(missing_ok=True)
    write_basic_config("bf16", str(basic))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["read", "write", "to_fsdp2"])
    parser.add_argument("paths", nargs="+", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "write":
        write(arguments.paths[0])
    elif arguments.what == "to_fsdp2":
        print(json.dumps({str(path): convert_config_to_fsdp2(json.loads(path.read_text())) for path in arguments.paths}))
    else:
        defaults = ClusterConfig(**{**BASE, "mixed_precision": None}).to_dict()
        print(json.dumps({"defaults": defaults, "files": {str(path): meaning(str(path)) for path in arguments.paths}}))


if __name__ == "__main__":
    main()
