//! Every flag of the reference's launcher, as its own parser lists them: it has its effect, or none for a reason, or is refused
//! for a reason. And every flag's setting from every source: its value, where it came from, and that processes find it.

use std::collections::{BTreeMap, BTreeSet};

use accelerate_core::config::settings;
use accelerate_core::settings::{Setting, Standing, ValueKind};
use serde_json::Value;

use crate::support::{Finished, accelerate, finished, launch};

/// A flag of the reference: its name, a value that asks for something ("" for a switch), its default there ("" for none), and
/// what has to stand beside it.
type Flag = (&'static str, &'static str, &'static str, &'static str);

const FSDP: &str = "--use_fsdp";
const FP8: &str = "--mixed_precision fp8";
const AXES: &str = "--use_parallelism_config";
const CONTEXT: &str = "--use_parallelism_config --parallelism_config_cp_size 2";
const SEQUENCE: &str = "--use_parallelism_config --parallelism_config_sp_size 2";
const HYBRID: &str = "--num_processes 2 --use_fsdp --fsdp_sharding_strategy HYBRID_SHARD";
const ZERO3: &str = "--use_deepspeed --zero_stage 3";
/// Only programs in Python can be compiled while they run.
const PYTHON: &str = "-m --dynamo_backend inductor";

const EFFECTIVE: &[Flag] = &[
    ("quiet", "", "", ""),
    ("cpu", "", "", ""),
    ("mixed_precision", "bf16", "", ""),
    ("num_processes", "3", "", ""),
    ("num_machines", "1", "", ""),
    ("num_cpu_threads_per_process", "2", "", ""),
    ("enable_cpu_affinity", "", "", ""),
    ("dynamo_backend", "eager", "", "-m"),
    ("dynamo_mode", "max-autotune", "default", PYTHON),
    ("dynamo_use_fullgraph", "", "", PYTHON),
    ("dynamo_use_dynamic", "", "", PYTHON),
    ("dynamo_use_regional_compilation", "", "", PYTHON),
    ("use_deepspeed", "", "", ""),
    ("use_fsdp", "", "", ""),
    ("gpu_ids", "all", "", ""),
    ("machine_rank", "0", "", ""),
    ("main_process_ip", "10.0.0.1", "", "--num_machines 2 --machine_rank 1 --num_processes 2"),
    ("main_process_port", "2000", "", "--num_processes 2"),
    ("tee", "3", "0", ""),
    ("log_dir", "logs", "", ""),
    ("role", "trainer", "default", "--num_processes 2"),
    ("max_restarts", "2", "0", ""),
    ("module", "", "", ""),
    ("no_python", "", "", ""),
    ("zero_stage", "1", "", "--use_deepspeed"),
    ("offload_optimizer_device", "cpu", "", ZERO3),
    ("offload_param_device", "cpu", "", ZERO3),
    ("offload_optimizer_nvme_path", "/n", "", ZERO3),
    ("offload_param_nvme_path", "/n", "", ZERO3),
    ("gradient_accumulation_steps", "2", "", ""),
    ("gradient_clipping", "0.5", "", "--use_deepspeed"),
    ("zero3_init_flag", "true", "", ZERO3),
    ("zero3_save_16bit_model", "true", "", ZERO3),
    ("fsdp_version", "2", "1", FSDP),
    ("fsdp_offload_params", "true", "false", FSDP),
    ("fsdp_min_num_params", "1000", "100000000", "--use_fsdp --fsdp_auto_wrap_policy SIZE_BASED_WRAP"),
    ("fsdp_sharding_strategy", "SHARD_GRAD_OP", "FULL_SHARD", FSDP),
    ("fsdp_reshard_after_forward", "false", "true", FSDP),
    ("fsdp_auto_wrap_policy", "NO_WRAP", "", FSDP),
    ("fsdp_transformer_layer_cls_to_wrap", "Block", "", "--use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"),
    ("fsdp_backward_prefetch", "BACKWARD_PRE", "", FSDP),
    ("fsdp_state_dict_type", "FULL_STATE_DICT", "", FSDP),
    ("fsdp_forward_prefetch", "true", "false", FSDP),
    ("fsdp_cpu_ram_efficient_loading", "false", "true", FSDP),
    ("fsdp_sync_module_states", "false", "true", "--use_fsdp --fsdp_cpu_ram_efficient_loading false"),
    ("fsdp_activation_checkpointing", "true", "false", FSDP),
    ("fsdp_activation_checkpointing_offload", "true", "", "--use_fsdp --fsdp_activation_checkpointing true"),
    ("use_parallelism_config", "", "", ""),
    ("parallelism_config_dp_replicate_size", "2", "1", AXES),
    ("parallelism_config_dp_shard_size", "2", "1", AXES),
    ("parallelism_config_tp_size", "2", "1", AXES),
    ("parallelism_config_cp_size", "2", "1", AXES),
    ("parallelism_config_cp_backend", "torch", "torch", CONTEXT),
    ("parallelism_config_cp_comm_strategy", "alltoall", "allgather", CONTEXT),
    ("parallelism_config_sp_size", "2", "1", AXES),
    ("parallelism_config_sp_backend", "deepspeed", "deepspeed", SEQUENCE),
    ("parallelism_config_sp_seq_length", "128", "", SEQUENCE),
    ("parallelism_config_sp_seq_length_is_variable", "true", "True", SEQUENCE),
    ("parallelism_config_sp_attn_implementation", "sdpa", "sdpa", SEQUENCE),
    ("fp8_backend", "ao", "", FP8),
    ("fp8_use_autocast_during_eval", "", "", FP8),
    ("fp8_margin", "1", "0", FP8),
    ("fp8_interval", "2", "1", FP8),
    ("fp8_format", "E4M3", "HYBRID", FP8),
    ("fp8_amax_history_len", "16", "1024", FP8),
    ("fp8_amax_compute_algo", "max", "most_recent", FP8),
    ("fp8_pad_inner_dim", "false", "true", FP8),
    ("fp8_enable_fsdp_float8_all_gather", "true", "", "--mixed_precision fp8 --use_fsdp"),
    ("debug", "", "", ""),
    ("rdzv_conf", "join_timeout=900", "", ""),
];

/// They change nothing, and that is said.
const WITHOUT_EFFECT: &[Flag] = &[
    ("same_network", "", "", ""),
    ("multi_gpu", "", "", ""),
    ("monitor_interval", "2", "0.1", ""),
    ("main_training_function", "train", "", ""),
    ("downcast_bf16", "", "", ""),
    ("fsdp_use_orig_params", "false", "true", FSDP),
];

const REFUSED: &[Flag] = &[
    ("tpu", "", "", ""),
    ("use_megatron_lm", "", "", ""),
    ("rdzv_backend", "etcd", "static", ""),
    ("tpu_cluster", "", "", ""),
    ("no_tpu_cluster", "", "", ""),
    ("tpu_use_sudo", "", "", ""),
    ("vm", "one", "", ""),
    ("env", "A=B", "", ""),
    ("deepspeed_multinode_launcher", "openmpi", "pdsh", "--use_deepspeed"),
    ("deepspeed_moe_layer_cls_names", "Experts", "", "--use_deepspeed"),
    ("megatron_lm_tp_degree", "2", "", ""),
    ("megatron_lm_use_custom_fsdp", "True", "", ""),
    ("megatron_lm_no_load_optim", "True", "", ""),
    ("megatron_lm_eod_mask_loss", "True", "", ""),
    ("megatron_lm_overlap_cpu_optimizer_d2h_h2d", "True", "", ""),
    ("megatron_lm_no_save_optim", "True", "", ""),
    ("megatron_lm_optimizer_cpu_offload", "True", "", ""),
    ("megatron_lm_use_precision_aware_optimizer", "True", "", ""),
    ("megatron_lm_decoder_last_pipeline_num_layers", "1", "", ""),
    ("megatron_lm_pp_degree", "2", "", ""),
    ("megatron_lm_num_micro_batches", "2", "", ""),
    ("megatron_lm_sequence_parallelism", "true", "", ""),
    ("megatron_lm_recompute_activations", "true", "", ""),
    ("megatron_lm_use_distributed_optimizer", "true", "", ""),
    ("megatron_lm_gradient_clipping", "2.0", "", ""),
    ("megatron_lm_recompute_granularity", "full", "", ""),
    ("megatron_lm_recompute_method", "block", "", ""),
    ("megatron_lm_recompute_num_layers", "1", "", ""),
    ("megatron_lm_attention_backend", "true", "", ""),
    ("megatron_lm_expert_model_parallel_size", "2", "", ""),
    ("megatron_lm_context_parallel_size", "2", "", ""),
    ("megatron_lm_attention_dropout", "0.1", "", ""),
    ("megatron_lm_hidden_dropout", "0.1", "", ""),
    ("megatron_lm_attention_softmax_in_fp32", "true", "", ""),
    ("megatron_lm_expert_tensor_parallel_size", "2", "", ""),
    ("megatron_lm_calculate_per_token_loss", "true", "", ""),
    ("megatron_lm_use_rotary_position_embeddings", "true", "", ""),
    ("fp8_backend", "msamp", "", ""),
    ("fp8_override_linear_precision", "(True, False, False)", "(False, False, False)", ""),
    ("fp8_opt_level", "O1", "O2", ""),
    ("aws_access_key_id", "key", "", ""),
    ("aws_secret_access_key", "key", "", ""),
    ("mpirun_hostfile", "hosts", "", ""),
];

/// Flags that the reference does not have.
const OWN: &[Flag] = &[
    ("hosts", "localhost", "", ""),
    ("hostfile", "hosts", "", ""),
    ("min_machines", "1", "", ""),
    ("ssh_command", "rsh", "", ""),
    ("connection_timeout", "60", "", ""),
    ("stop_at", "2030-01-31T18:00:00Z", "", ""),
    ("stop_margin", "30", "", ""),
    ("shutdown_grace_period", "60", "", ""),
    ("dp_shard_size", "2", "", HYBRID),
    ("fsdp_ignored_modules", "layers.*", "", FSDP),
    ("fp8_recipe_name", "rowwise", "", FP8),
];

/// These are files, or need one, which other tests write.
const FILES: [&str; 5] = [
    "config_file",
    "deepspeed_config_file",
    "deepspeed_hostfile",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
];

/// Where machines are started on from here, they have tests of their own.
const OF_MACHINES: [&str; 5] = ["hosts", "hostfile", "min_machines", "ssh_command", "connection_timeout"];

/// `accelerate launch` with this flag, which starts nothing.
fn told(flag: &str, value: &str, beside: &str) -> Finished {
    let mut command = accelerate();
    command.args(["launch", "--dry_run"]).args(beside.split_whitespace()).arg(format!("--{flag}"));
    if !value.is_empty() {
        command.arg(value);
    }
    command.arg("true");
    finished(command)
}

#[test]
fn the_list_of_the_references_flags_is_whole() {
    let lists = [EFFECTIVE, WITHOUT_EFFECT, REFUSED];
    let names: BTreeSet<_> = lists.iter().flat_map(|flags| flags.iter().map(|flag| flag.0)).chain(FILES).collect();
    // As many as its parser has, beside --help.
    assert_eq!(names.len(), 123);
    let own: Vec<_> = settings().filter_map(Setting::flag).filter(|flag| !names.contains(flag)).collect();
    assert_eq!(own, OWN.iter().map(|flag| flag.0).collect::<Vec<_>>());
}

#[test]
fn flags_of_the_reference_have_their_effect() {
    for (flag, value, _, beside) in EFFECTIVE {
        for spelling in [(*flag).to_owned(), flag.replace('_', "-")] {
            let told = told(&spelling, value, beside);
            told.expect(0, &[]);
            assert!(!told.stderr.contains("no effect"), "{flag}: {}", told.stderr);
        }
    }
}

#[test]
fn flags_of_the_reference_without_effect_say_so() {
    for (flag, value, _, beside) in WITHOUT_EFFECT {
        told(flag, value, beside).expect(0, &[&format!("(flag --{flag}), which has no effect: ")]);
    }
}

#[test]
fn flags_of_the_reference_that_are_refused_are_named_with_the_reason() {
    for (flag, value, _, beside) in REFUSED {
        for spelling in [(*flag).to_owned(), flag.replace('_', "-")] {
            let told = told(&spelling, value, beside);
            told.expect(2, &[&format!("--{flag}"), "is refused: "]);
            assert!(!told.stderr.contains("unexpected argument"), "{}", told.stderr);
        }
    }
}

/// A script may write down every default.
#[test]
fn defaults_of_the_reference_ask_for_nothing() {
    for (flag, _, default, beside) in EFFECTIVE.iter().chain(WITHOUT_EFFECT).chain(REFUSED) {
        if !default.is_empty() {
            let told = told(flag, default, beside);
            told.expect(0, &[]);
            assert!(!told.stderr.contains("no effect"), "{flag}: {}", told.stderr);
        }
    }
    let mut command = launch(2, &["--dry_run", "--rdzv_conf", ""]);
    command.arg("true");
    finished(command).expect(0, &[]);
}

/// Where a setting that only the launcher reads is seen by processes: variable, and the value for the one below.
const OF_THE_LAUNCHER: [(&str, &str, &str); 9] = [
    ("num_processes", "WORLD_SIZE", "4"),
    ("main_process_port", "MASTER_PORT", "4321"),
    ("gpu_ids", "CUDA_VISIBLE_DEVICES", "0,2"),
    ("num_cpu_threads_per_process", "OMP_NUM_THREADS", "7"),
    ("role", "ROLE_NAME", "trainer"),
    ("max_restarts", "TORCHELASTIC_MAX_RESTARTS", "2"),
    ("log_dir", "TORCHELASTIC_ERROR_FILE", "/logs"),
    ("tee", "", "3"),
    ("rdzv_backend", "", "static"),
];

/// What the processes of a launch would find.
fn environment(setting: &Setting, said: Option<(&str, &str)>) -> (BTreeMap<String, String>, Finished) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.yaml");
    let mut command = accelerate();
    let beside = match (said, setting.flag()) {
        // It needs a number of parameters, which is what is left out here.
        (None, Some("fsdp_min_num_params")) => "--num_processes 2 --use_fsdp",
        _ => beside(setting),
    };
    command.args(["launch", "--dry_run", "--json"]).args(beside.split_whitespace());
    match said {
        Some(("flag", _)) if setting.is_switch() => drop(command.arg(format!("--{}", setting.flag().unwrap()))),
        Some(("flag", value)) => drop(command.arg(format!("--{}", setting.flag().unwrap())).arg(value)),
        Some(("variable", value)) => drop(command.env(setting.variable().unwrap(), value)),
        Some((_, value)) => {
            let indent = if setting.section.is_empty() { String::new() } else { format!("{}:\n  ", setting.section) };
            std::fs::write(&path, format!("{indent}{}: \"{value}\"\n", setting.key())).unwrap();
            command.arg("--config_file").arg(&path);
        }
        None => {}
    }
    command.arg("true");
    let told = finished(command);
    assert_eq!(told.code, Some(0), "--{:?} {said:?}: {}", setting.flag(), told.stderr);
    let json: Value = serde_json::from_str(&told.stdout).unwrap();
    let first = json["ranks"][0]["environment"].as_object().unwrap().clone();
    (first.into_iter().map(|(name, value)| (name, value.as_str().unwrap().to_owned())).collect(), told)
}

/// What must be said so that the setting counts.
fn beside(setting: &Setting) -> &'static str {
    match (setting.flag().unwrap(), setting.section) {
        ("dp_shard_size", _) => HYBRID,
        ("fsdp_min_num_params", _) => "--num_processes 2 --use_fsdp --fsdp_auto_wrap_policy SIZE_BASED_WRAP",
        ("fsdp_transformer_layer_cls_to_wrap", _) => {
            "--num_processes 2 --use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
        }
        ("fsdp_activation_checkpointing_offload", _) => {
            "--num_processes 2 --use_fsdp --fsdp_activation_checkpointing true"
        }
        ("fsdp_sync_module_states", _) => "--num_processes 2 --use_fsdp --fsdp_cpu_ram_efficient_loading false",
        ("zero_stage", _) => "--num_processes 2 --use_deepspeed",
        (_, "fsdp_config") => "--num_processes 2 --use_fsdp",
        (_, "deepspeed_config") => "--num_processes 2 --use_deepspeed --zero_stage 3",
        ("dynamo_backend", _) => "--num_processes 2 -m",
        ("parallelism_config_sp_seq_length_is_variable", _) => {
            "--num_processes 2 --use_parallelism_config --parallelism_config_sp_seq_length 8"
        }
        (_, "fp8_config") => "--num_processes 2 --mixed_precision fp8",
        (_, "parallelism_config") => "--num_processes 2 --use_parallelism_config",
        (_, "dynamo_config") => "--num_processes 2 -m --dynamo_backend inductor",
        ("num_processes", _) => "",
        _ => "--num_processes 2",
    }
}

/// What two machines need besides, where only one of the two is the setting that is looked at.
fn sample(setting: &Setting) -> String {
    let flag = setting.flag().unwrap();
    let of_launcher = OF_THE_LAUNCHER.iter().find(|(known, ..)| *known == flag).map(|(.., value)| *value);
    let of_table = EFFECTIVE.iter().chain(OWN).find(|(known, ..)| *known == flag).map(|(_, value, ..)| *value);
    match (of_launcher.or(of_table), setting.kind) {
        (_, ValueKind::Bool) if setting.default().as_deref() == Some("true") => "false".to_owned(),
        (_, ValueKind::Bool) => "true".to_owned(),
        (Some(value), _) => value.to_owned(),
        (None, _) => panic!("no sample for --{flag}"),
    }
}

/// What is wrong with what the processes find of a setting that this source says; `None` if nothing is.
fn complaint(setting: &Setting, source: &str, value: &str, without: &BTreeMap<String, String>) -> Option<String> {
    let flag = setting.flag()?;
    let (with, told) = environment(setting, Some((source, value)));
    let of_launcher = OF_THE_LAUNCHER.iter().find(|(known, ..)| *known == flag).map(|(_, variable, _)| *variable);
    let is_right = match of_launcher {
        Some("") => told.stdout.contains("stdout.log"),
        Some(variable) => {
            let found = with.get(variable);
            found.is_some_and(|found| found.starts_with(value)) && found != without.get(variable)
        }
        // The environment is inherited, so a variable that says it already need not be set again.
        None if source == "variable" => {
            let found = with.get(&setting.variable()?);
            found.is_none_or(|found| found.eq_ignore_ascii_case(value))
        }
        None => {
            let variable = setting.variable()?;
            let origin = if source == "flag" { format!("\"flag\":\"--{flag}\"") } else { "run.yaml".to_owned() };
            let origins = with.get("ACCELERATE_CONFIG_ORIGINS").map(String::as_str).unwrap_or_default();
            let place = origins.split(&format!("\"{variable}\"")).nth(1).unwrap_or_default();
            let is_said = |found: &BTreeMap<String, String>| {
                found.get(&variable).is_some_and(|found| found.eq_ignore_ascii_case(value))
            };
            is_said(&with) && !is_said(without) && place.split('}').next().is_some_and(|place| place.contains(&origin))
        }
    };
    (!is_right).then(|| format!("--{flag} {value} by {source}: {with:?}\nwithout: {without:?}"))
}

/// Flag, variable and file say it, each with its place; without them nothing says it.
#[test]
fn every_flag_and_its_variable_and_key_reach_the_processes() {
    // These need each other, or a file, or are for the launcher alone, and have tests of their own; there is only one backend.
    let skipped = ["num_machines", "machine_rank", "main_process_ip", "rdzv_backend", "shutdown_grace_period"];
    let skipped: Vec<_> = skipped.into_iter().chain(FILES).chain(OF_MACHINES).collect();
    let mut checked = 0;
    let mut complaints = Vec::new();
    for setting in settings().filter(|setting| setting.standing() == Standing::Honoured) {
        if setting.flag().is_none_or(|flag| skipped.contains(&flag)) {
            continue;
        }
        let value = sample(setting);
        let (without, _) = environment(setting, None);
        checked += 1;
        complaints.extend(
            ["flag", "variable", "file"].iter().filter_map(|source| complaint(setting, source, &value, &without)),
        );
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n\n"));
    assert!(checked > 40, "only {checked} were looked at");
}

#[test]
fn settings_of_machines_reach_the_processes_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.yaml");
    std::fs::write(&path, "num_processes: 4\nnum_machines: 2\nmachine_rank: 1\nmain_process_ip: a\n").unwrap();
    let mut command = accelerate();
    command.args(["launch", "--config_file"]).arg(&path).args(["--no_prefix", "sh", "-c"]);
    command.arg("echo $RANK $GROUP_RANK $GROUP_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT");
    assert_eq!(finished(command).sorted_stdout(), ["2 1 2 a:29500", "3 1 2 a:29500"]);
}
