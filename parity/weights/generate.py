"""Writes weights as PyTorch and Accelerate save them, for the tests of what reads them without either.

Run with torch 2.11.0 and accelerate 1.15.0:  python parity/weights/generate.py
Outputs (committed), beside this file: folders of torch.distributed.checkpoint (`dcp_*`), files of torch.save (`*.bin`),
and expected.json. That says of each what tensors are in it: element type, shape, and the bytes in hexadecimal. For folders
that Accelerate's own `merge_fsdp_weights` can merge, they are what it has written.

Several ranks are several processes over Gloo, which this program starts itself.
"""

import json
import pathlib
import shutil
import tempfile
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

HERE = pathlib.Path(__file__).parent
REAL = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
# How many ranks save what.
WORLD_SIZES = {"fsdp": (1, 2, 3), "types": (1,), "flat": (2, 3), "nested": (2,)}
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]


def values(dtype, *shape):
    """Different values, of which no two bytes at the same place of neighbours are alike."""
    numel = int(torch.Size(shape).numel())
    counted = (torch.arange(numel, dtype=torch.float64) - numel // 2) * 1.25
    return counted.abs().to(dtype).reshape(shape) if not dtype.is_signed else counted.to(dtype).reshape(shape)


def described(state):
    def one(tensor):
        flat = tensor.detach().contiguous().reshape(-1)
        data = bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
        return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "data": data.hex()}

    return {name: one(tensor) for name, tensor in state.items()}


class Model(torch.nn.Module):
    """No number of ranks divides its sizes. The two names of its embedding are tied."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.inner = torch.nn.Linear(3, 5)
        self.head = torch.nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight


def distributed_states(mesh):
    """What is saved under each name. Every rank calls it."""
    # Every rank has all values, so that nothing is sent: Gloo does not know all types.
    split = lambda tensor, placement: distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
    shard = lambda tensor, dim: split(tensor, Shard(dim))
    torch.manual_seed(3)
    model = Model()
    fully_shard(model, mesh=mesh)
    dtypes = {str(dtype).removeprefix("torch."): values(dtype, 5) for dtype in REAL + WHOLE}
    return {
        # As save_fsdp_model does.
        "fsdp": {"model": model.state_dict()},
        "types": {**dtypes, "bool": torch.tensor([True, False]), "complex64": torch.tensor([1 + 2j])},
        "flat": {
            "columns": shard(values(torch.float32, 3, 5), 1),
            "fewer_rows_than_ranks": shard(values(torch.int64, 1, 2), 0),
            "replicated": split(values(torch.bfloat16, 2, 2), Replicate()),
            "plain": values(torch.float16, 3),
            "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 4),
        },
        # With what no tensor is, which Accelerate cannot merge into safetensors.
        "nested": {"optimizer": {"state": {"a.weight": {"exp_avg": shard(values(torch.float32, 4, 2), 0), "step": 3}}}},
    }


def rank_main(rank, world_size, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world_size}", rank=rank, world_size=world_size)
    for name, state in distributed_states(init_device_mesh("cpu", (world_size,))).items():
        target = HERE / f"dcp_{name}_{world_size}"
        # A path, and not a text, is noted in the metadata as an object.
        if world_size in WORLD_SIZES[name]:
            dcp.save(state, checkpoint_id=target if name == "flat" else str(target))
    dist.barrier()
    dist.destroy_process_group()


def merged(folder):
    """What Accelerate makes of a folder."""
    from accelerate.utils import merge_fsdp_weights
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as output:
        merge_fsdp_weights(str(folder), output)
        return load_file(f"{output}/model.safetensors")


def loaded(folder):
    """What torch makes of a folder with more than tensors, by the names without the outermost dictionary."""
    with tempfile.TemporaryDirectory() as output:
        dcp.format_utils.dcp_to_torch_save(str(folder), f"{output}/all.bin")
        state = torch.load(f"{output}/all.bin", weights_only=True)
    flat = {}

    def walk(path, value):
        if isinstance(value, torch.Tensor):
            flat[".".join(path)] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk([*path, key], inner)

    walk([], next(iter(state.values())))
    return flat


def bin_files():
    base = values(torch.float32, 4, 6)
    tied = torch.nn.Parameter(values(torch.float32, 3, 2))
    torch.manual_seed(3)
    dtypes = OrderedDict((str(dtype).removeprefix("torch."), values(dtype, 3)) for dtype in REAL + WHOLE)
    dtypes["bool"] = torch.tensor([True, False])
    dtypes["complex64"] = torch.tensor([1 + 2j])
    return {
        "dtypes.bin": dtypes,
        "views.bin": {
            "base": base,
            "transposed": base.T,
            "columns": base[:, 1:4],
            "every_other": base[::2],
            "expanded": base[0, :2].expand(3, 2),
            "scalar": base[1, 1],
            "empty": base[:0],
            "tied": tied,
            "tied_too": tied,
        },
        # With the versions of its modules as an attribute, and tied parameters.
        "model.bin": Model().state_dict(),
    }


def write_bin(name, state, expected, **options):
    torch.save(state, HERE / name, **options)
    expected[name] = described(state)


def write_sharded_bin(expected):
    state = Model().state_dict()
    names = list(state)
    weight_map = {}
    for number, part in enumerate([names[:2], names[2:]], 1):
        file = f"pytorch_model-{number:05}-of-00002.bin"
        torch.save({name: state[name] for name in part}, HERE / "sharded_bin" / file)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (HERE / "sharded_bin/pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2) + "\n")
    expected["sharded_bin"] = described(state)


def main():
    for old in HERE.glob("dcp_*"):
        shutil.rmtree(old)
    (HERE / "sharded_bin").mkdir(exist_ok=True)
    expected = {}
    with tempfile.TemporaryDirectory() as folder:
        for world_size in (1, 2, 3):
            torch.multiprocessing.spawn(rank_main, (world_size, folder), world_size)
    for folder in sorted(HERE.glob("dcp_*")):
        expected[folder.name] = described(loaded(folder) if "nested" in folder.name else merged(folder))
    for name, state in bin_files().items():
        write_bin(name, state, expected)
    torch.serialization.set_crc32_options(False)
    write_bin("no_checksums.bin", {"weight": values(torch.float32, 2)}, expected)
    torch.serialization.set_crc32_options(True)
    write_sharded_bin(expected)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(state)}" for name, state in expected.items())
    (HERE / "expected.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
