//! Every key that a document may have, and what becomes of it (DeepSpeed's `docs/_pages/config-json.md` and
//! `runtime/{config,constants}.py`, `runtime/zero/{config,offload_config}.py`, `runtime/precision_config.py`).

use serde_json::Value;

/// What becomes of a key.
#[derive(Clone, Copy, Debug)]
pub(super) enum Standing {
    /// A typed field holds it.
    Honoured,
    /// Accepted, without effect, for this reason.
    Inert(&'static str),
    /// Not available, unless its value asks for nothing; and what to do instead.
    Refused(Off, &'static str),
}

/// Which value of a refused key asks for nothing.
#[derive(Clone, Copy, Debug)]
pub(super) enum Off {
    /// `null`, `false`, `{"enabled": false, ..}`, and objects of such values.
    Disabled,
    /// This value, which is what happens here anyway.
    Flag(bool),
    /// This number.
    Number(f64),
    /// This text.
    Text(&'static str),
}

impl Off {
    pub(super) fn covers(self, value: &Value) -> bool {
        match self {
            _ if value.is_null() => true,
            Self::Disabled => is_disabled(value),
            Self::Flag(wanted) => value.as_bool() == Some(wanted),
            Self::Number(wanted) => value.as_f64() == Some(wanted),
            Self::Text(wanted) => value.as_str().is_some_and(|text| text.eq_ignore_ascii_case(wanted)),
        }
    }
}

fn is_disabled(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Object(entries) => {
            entries.get("enabled") == Some(&Value::Bool(false)) || entries.values().all(is_disabled)
        }
        _ => false,
    }
}

pub(super) fn standing(key: &str) -> Option<Standing> {
    if HONOURED.contains(&key) {
        return Some(Standing::Honoured);
    }
    if let Some((_, why)) = INERT.iter().find(|(known, _)| *known == key) {
        return Some(Standing::Inert(why));
    }
    REFUSED.iter().find(|(known, ..)| *known == key).map(|&(_, off, instead)| Standing::Refused(off, instead))
}

/// The known key that `key` was probably meant to be: one that is typed almost so, or one of that name elsewhere.
pub(super) fn nearest(key: &str) -> Option<String> {
    // Longer words are no slip of the hand, and comparing them would take time.
    if key.len() > LONGEST_SLIP {
        return None;
    }
    let name = |key: &str| key.rsplit('.').next().unwrap_or_default().to_owned();
    let known = || HONOURED.iter().copied().chain(INERT.iter().map(|entry| entry.0));
    let is_near = |candidate: &&str| edits(candidate, key) <= 1 + key.len() / 12;
    // Keys of the plugin, which begin with such a word, are not those of the document.
    let bare = name(key);
    let bare = ["deepspeed_", "ds_", "zero_"].iter().find_map(|prefix| bare.strip_prefix(prefix)).unwrap_or(&bare);
    known()
        .filter(is_near)
        .min_by_key(|candidate| edits(candidate, key))
        .or_else(|| known().find(|candidate| name(candidate) == name(key)))
        .or_else(|| known().find(|candidate| name(candidate) == bare))
        .or_else(|| nearest_name(bare, known()))
        .map(str::to_owned)
}

/// The key whose own name is most like `name`, wherever it stands.
fn nearest_name<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    const ALIKE: f64 = 0.92;
    let scored = known.map(|key| (strsim::jaro_winkler(key.rsplit('.').next().unwrap_or(key), name), key));
    scored
        .filter(|(score, _)| *score > ALIKE)
        .max_by(|(first, _), (second, _)| first.total_cmp(second))
        .map(|best| best.1)
}

const LONGEST_SLIP: usize = 100;

/// Characters to insert, remove or replace until one text is the other.
fn edits(from: &str, to: &str) -> usize {
    let mut row: Vec<usize> = (0..=to.chars().count()).collect();
    for (line, have) in from.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], line + 1);
        for (column, want) in to.chars().enumerate() {
            let replaced = diagonal + usize::from(have != want);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row.last().copied().unwrap_or_default()
}

pub(super) const HONOURED: &[&str] = &[
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "communication_data_type",
    "data_types",
    "data_types.grad_accum_dtype",
    "zero_optimization",
    "zero_optimization.stage",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_param.nvme_path",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.mics_shard_size",
    "fp16",
    "fp16.enabled",
    "fp16.initial_scale_power",
    "fp16.loss_scale_window",
    "bf16",
    "bf16.enabled",
    "bfloat16",
    "bfloat16.enabled",
    "optimizer",
    "optimizer.type",
    "optimizer.params",
    "optimizer.params.lr",
    "optimizer.params.weight_decay",
    "optimizer.params.betas",
    "optimizer.params.eps",
    "optimizer.params.adam_w_mode",
    "optimizer.params.momentum",
    "optimizer.params.dampening",
    "optimizer.params.nesterov",
    "optimizer.params.alpha",
    "optimizer.params.centered",
    "scheduler",
    "scheduler.type",
    "scheduler.params",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.warmup_type",
    "scheduler.params.total_num_steps",
    "scheduler.params.warmup_min_ratio",
    "scheduler.params.cos_min_ratio",
];

const MODULES: &str = "here the modules of a model decide what is gathered, reduced and freed together";
const OFFLOAD: &str = "it tunes how DeepSpeed moves what is offloaded";
const PRINTING: &str = "it has DeepSpeed print something; Accelerator::profile measures, and the program prints";
const ANY_OPTIMIZER: &str = "every optimizer works with every stage";
const KERNEL: &str = "it chooses among kernels that compute the same";
const AT_ONCE: &str = "gradients are added up as soon as they are made in any case";
const CHECKS: &str = "it is about checks inside DeepSpeed";

const INERT: &[(&str, &str)] = &[
    ("steps_per_print", PRINTING),
    ("wall_clock_breakdown", PRINTING),
    ("memory_breakdown", PRINTING),
    ("dump_state", PRINTING),
    ("log_level", PRINTING),
    ("vocabulary_size", PRINTING),
    ("zero_allow_untested_optimizer", ANY_OPTIMIZER),
    ("zero_force_ds_cpu_optimizer", ANY_OPTIMIZER),
    ("disable_allgather", MODULES),
    ("aio", OFFLOAD),
    ("zero_optimization.contiguous_gradients", MODULES),
    ("zero_optimization.reduce_scatter", MODULES),
    ("zero_optimization.allgather_partitions", MODULES),
    ("zero_optimization.allgather_bucket_size", MODULES),
    ("zero_optimization.use_multi_rank_bucket_allreduce", MODULES),
    ("zero_optimization.overlap_comm", "whether communication overlaps with computation is decided by the engine"),
    ("zero_optimization.round_robin_gradients", MODULES),
    ("zero_optimization.sub_group_size", OFFLOAD),
    ("zero_optimization.stage3_model_persistence_threshold", MODULES),
    ("zero_optimization.stage3_max_live_parameters", MODULES),
    ("zero_optimization.stage3_max_reuse_distance", MODULES),
    ("zero_optimization.stage3_module_granularity_threshold", MODULES),
    ("zero_optimization.stage3_use_all_reduce_for_fetch_params", MODULES),
    ("zero_optimization.stage3_allgather_sequential", MODULES),
    ("zero_optimization.stage3_partition_stream_chunk_size", MODULES),
    ("zero_optimization.mics_hierarchical_params_gather", "each unit of a group of ranks is gathered in one message"),
    ("zero_optimization.memory_efficient_linear", "linear layers save their input and no more in any case"),
    ("zero_optimization.override_module_apply", "there is no Module.apply to override"),
    ("zero_optimization.log_trace_cache_warnings", CHECKS),
    ("zero_optimization.enable_sanity_checks", CHECKS),
    ("zero_optimization.offload_optimizer.buffer_count", OFFLOAD),
    ("zero_optimization.offload_optimizer.pin_memory", OFFLOAD),
    ("zero_optimization.offload_optimizer.pipeline_read", OFFLOAD),
    ("zero_optimization.offload_optimizer.pipeline_write", OFFLOAD),
    ("zero_optimization.offload_optimizer.fast_init", OFFLOAD),
    ("zero_optimization.offload_optimizer.convert_grad_on_cpu", OFFLOAD),
    ("zero_optimization.offload_optimizer.cpuadam_cores_perc", OFFLOAD),
    ("zero_optimization.offload_param.buffer_count", OFFLOAD),
    ("zero_optimization.offload_param.buffer_size", OFFLOAD),
    ("zero_optimization.offload_param.max_in_cpu", OFFLOAD),
    ("zero_optimization.offload_param.pin_memory", OFFLOAD),
    ("fp16.auto_cast", "what layers take in is cast by autocast in any case"),
    ("fp16.hysteresis", "as PyTorch's GradScaler does, each step that overflows lowers the scale"),
    ("fp16.consecutive_hysteresis", "as PyTorch's GradScaler does, each step that overflows lowers the scale"),
    ("fp16.min_loss_scale", "as PyTorch's GradScaler does, the scale falls as far as overflows ask"),
    ("fp16.fused_mode", KERNEL),
    ("bf16.immediate_grad_update", AT_ONCE),
    ("bfloat16.immediate_grad_update", AT_ONCE),
    ("optimizer.legacy_fusion", KERNEL),
    ("optimizer.params.torch_adam", KERNEL),
    ("optimizer.params.fused", KERNEL),
    ("optimizer.params.foreach", KERNEL),
    ("optimizer.params.set_grad_none", "zero_grad removes gradients"),
];

const STAGE_1_TO_3: &str = "remove it; the stages work without";
const QUANTISED: &str = "remove it; parameters and gradients travel as they are";
const MASTER: &str = "remove it; parameters stay in 32 bits and layers compute in fewer under autocast";
const MEAN: &str = "remove it; gradients are averaged over ranks in their own format";
const TRACKER: &str = "remove it, and log from the program";
const PARALLEL: &str = "remove it; ranks differ in data only";
const COMPRESSION: &str = "remove it; models are trained as they are";
const DATA: &str = "remove it; what a data set gives, and in which order, is decided by the DataLoader";
const CHECKPOINT: &str = "remove it; checkpoints are written by the accelerator, whole";
const COMPILE: &str = "remove it, and compile with dynamo_backend";

const REFUSED: &[(&str, Off, &str)] = &[
    ("amp", Off::Disabled, "set \"fp16\": {\"enabled\": true}"),
    (
        "torch_autocast",
        Off::Disabled,
        "set \"bf16\" or \"fp16\" to {\"enabled\": true}: layers compute under autocast then",
    ),
    ("seq_parallel_comm_data_type", Off::Text("fp32"), MEAN),
    ("prescale_gradients", Off::Disabled, MEAN),
    ("gradient_predivide_factor", Off::Number(1.0), MEAN),
    ("gradient_allreduce_op", Off::Text("mean"), MEAN),
    ("sparse_gradients", Off::Disabled, "remove it; gradients of embeddings travel dense"),
    ("managed_gradient_accumulation", Off::Flag(true), "remove it; Accelerator::accumulate manages it"),
    ("dataloader_drop_last", Off::Disabled, "set drop_last of the DataLoader"),
    ("graph_harvesting", Off::Disabled, COMPILE),
    ("compile", Off::Disabled, COMPILE),
    ("sequence_parallel_size", Off::Number(1.0), PARALLEL),
    ("tensor_parallel", Off::Disabled, PARALLEL),
    ("expert_parallel", Off::Disabled, PARALLEL),
    ("use_data_before_expert_parallelism", Off::Disabled, PARALLEL),
    ("pipeline", Off::Disabled, PARALLEL),
    ("msamp", Off::Disabled, MASTER),
    ("flops_profiler", Off::Disabled, "remove it, and call Accelerator::profile with with_flops"),
    ("comms_logger", Off::Disabled, "remove it, and call Accelerator::profile"),
    ("timers", Off::Disabled, "remove it, and call Accelerator::profile"),
    ("tensorboard", Off::Disabled, TRACKER),
    ("wandb", Off::Disabled, TRACKER),
    ("comet", Off::Disabled, TRACKER),
    ("csv_monitor", Off::Disabled, TRACKER),
    ("autotuning", Off::Disabled, "remove it, and look for a batch size with find_executable_batch_size"),
    ("elasticity", Off::Disabled, "remove it; batch sizes are those of the loaders, for any number of processes"),
    (
        "activation_checkpointing",
        Off::Disabled,
        "remove it, and call gradient_checkpointing_enable of the model's ParamStore",
    ),
    ("sparse_attention", Off::Disabled, "remove it; attention is what the model computes"),
    ("progressive_layer_drop", Off::Disabled, COMPRESSION),
    ("compression_training", Off::Disabled, COMPRESSION),
    ("quantize_training", Off::Disabled, COMPRESSION),
    ("weight_quantization", Off::Disabled, COMPRESSION),
    ("eigenvalue", Off::Disabled, COMPRESSION),
    ("hybrid_engine", Off::Disabled, "remove it; the model that trains is the one that generates"),
    ("curriculum_learning", Off::Disabled, DATA),
    ("data_efficiency", Off::Disabled, DATA),
    ("checkpoint", Off::Disabled, CHECKPOINT),
    ("nebula", Off::Disabled, CHECKPOINT),
    ("datastates_ckpt", Off::Disabled, CHECKPOINT),
    ("data_types.param_dtype", Off::Text("fp32"), MASTER),
    ("data_types.buffer_dtype", Off::Text("fp32"), MASTER),
    ("zero_optimization.cpu_offload", Off::Disabled, "write \"offload_optimizer\": {\"device\": \"cpu\"}"),
    ("zero_optimization.cpu_offload_param", Off::Disabled, "write \"offload_param\": {\"device\": \"cpu\"}"),
    ("zero_optimization.cpu_offload_use_pin_memory", Off::Disabled, "write \"pin_memory\" in the offload sections"),
    (
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        Off::Disabled,
        "write \"stage3_gather_16bit_weights_on_model_save\"",
    ),
    ("zero_optimization.load_from_fp32_weights", Off::Flag(true), "remove it; files hold what was trained, in 32 bits"),
    ("zero_optimization.elastic_checkpoint", Off::Disabled, CHECKPOINT),
    ("zero_optimization.pipeline_loading_checkpoint", Off::Disabled, CHECKPOINT),
    ("zero_optimization.legacy_stage1", Off::Disabled, STAGE_1_TO_3),
    ("zero_optimization.ignore_unused_parameters", Off::Flag(true), "remove it; unused parameters get no gradient"),
    ("zero_optimization.zenflow", Off::Disabled, STAGE_1_TO_3),
    ("zero_optimization.save_muon_momentum_buffer_in_memory", Off::Disabled, "remove it; there is no Muon"),
    (
        "zero_optimization.leaf_module",
        Off::Disabled,
        "name the modules in transformer_cls_names_to_wrap of a FullyShardedDataParallelPlugin",
    ),
    (
        "zero_optimization.zero_hpz_partition_size",
        Off::Number(1.0),
        "remove it; \"mics_shard_size\" keeps what is gathered within groups of ranks",
    ),
    ("zero_optimization.zero_quantized_weights", Off::Disabled, QUANTISED),
    ("zero_optimization.zero_quantized_nontrainable_weights", Off::Disabled, QUANTISED),
    ("zero_optimization.zero_quantized_gradients", Off::Disabled, QUANTISED),
    ("zero_optimization.zeropp_loco_param", Off::Disabled, QUANTISED),
    ("zero_optimization.offload_optimizer.ratio", Off::Number(1.0), "remove it; everything is offloaded, or nothing"),
    ("zero_optimization.offload_optimizer.super_offload", Off::Disabled, "remove it"),
    (
        "fp16.loss_scale",
        Off::Number(0.0),
        "write 0, for a scale that grows and shrinks, and where it begins in \"initial_scale_power\"",
    ),
    ("fp16.fp16_master_weights_and_grads", Off::Disabled, MASTER),
    ("bf16.check_grad_overflow", Off::Disabled, "remove it; the program can look at the norm of clip_grad_norm_"),
    ("bf16.bf16_master_weights_and_grads", Off::Disabled, MASTER),
    ("bf16.bf16_optimizer_states", Off::Disabled, "remove it, or use AdamW8bit"),
    ("bfloat16.check_grad_overflow", Off::Disabled, "remove it; the program can look at the norm of clip_grad_norm_"),
    ("bfloat16.bf16_master_weights_and_grads", Off::Disabled, MASTER),
    ("bfloat16.bf16_optimizer_states", Off::Disabled, "remove it, or use AdamW8bit"),
    ("optimizer.params.max_grad_norm", Off::Disabled, "set \"gradient_clipping\" at the top instead"),
    ("optimizer.params.amsgrad", Off::Disabled, "remove it; second moments are those of Adam"),
    ("optimizer.params.bias_correction", Off::Flag(true), "remove it; moments are corrected"),
    ("optimizer.params.maximize", Off::Disabled, "remove it, and negate the loss"),
    ("optimizer.params.capturable", Off::Disabled, "remove it; steps are not captured in CUDA graphs"),
    ("optimizer.params.differentiable", Off::Disabled, "remove it; steps are not differentiated"),
    ("optimizer.params.lr_decay", Off::Number(0.0), "remove it, and use a scheduler"),
    ("optimizer.params.initial_accumulator_value", Off::Number(0.0), "remove it; sums begin at 0"),
    (
        "scheduler.params.last_batch_iteration",
        Off::Number(-1.0),
        "remove it; a checkpoint says where a schedule stands",
    ),
];

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::DeepSpeedConfig;
    use serde_json::{Map, json};
    use std::collections::BTreeSet;

    #[test]
    fn a_key_has_one_standing() {
        let mut seen = BTreeSet::new();
        let all = HONOURED.iter().copied().chain(INERT.iter().map(|entry| entry.0)).chain(REFUSED.iter().map(|e| e.0));
        for key in all {
            assert!(seen.insert(key), "{key} is listed twice");
        }
    }

    /// A document in which `key` has that value, with types where parameters need one.
    fn document(key: &str, value: &Value, optimizer: &str) -> Map<String, Value> {
        let mut root = json!({});
        if key.starts_with("optimizer.") {
            root["optimizer"]["type"] = json!(optimizer);
        }
        if key.starts_with("scheduler.params") {
            let is_cosine = key.ends_with("ratio");
            root["scheduler"]["type"] = json!(if is_cosine { "WarmupCosineLR" } else { "WarmupDecayLR" });
            root["scheduler"]["params"]["total_num_steps"] = json!(10);
        }
        let mut place = &mut root;
        for part in key.split('.') {
            place = &mut place[part];
        }
        *place = value.clone();
        root.as_object().unwrap().clone()
    }

    #[test]
    fn what_is_honoured_is_read() {
        let wrong = json!([[]]);
        for key in HONOURED {
            let texts: Vec<String> = ["Adam", "SGD", "RMSprop"]
                .iter()
                .filter_map(|optimizer| DeepSpeedConfig::from_entries(&document(key, &wrong, optimizer)).err())
                .map(|error| error.to_string())
                .collect();
            let wanted = format!("\n  - {key} is [[]], but must be ");
            assert!(texts.iter().any(|text| text.contains(&wanted)), "{key}: {texts:?}");
        }
    }

    #[test]
    fn what_is_inert_is_listed_once() {
        for (key, why) in INERT {
            let config = DeepSpeedConfig::from_entries(&document(key, &json!(1), "Adam")).unwrap();
            let found: Vec<_> = config.inert_keys.iter().map(|inert| (inert.key.as_str(), inert.why)).collect();
            assert_eq!(found, [(*key, *why)]);
            let config = DeepSpeedConfig::from_entries(&document(key, &json!("auto"), "Adam")).unwrap();
            assert_eq!((config.inert_keys.len(), config.unfilled_autos), (0, vec![(*key).to_owned()]));
        }
    }

    #[test]
    fn what_is_refused_is_so_unless_it_asks_for_nothing() {
        for (key, off, instead) in REFUSED {
            let text = DeepSpeedConfig::from_entries(&document(key, &json!("x"), "Adam")).unwrap_err().to_string();
            assert!(text.contains(&format!("\n  - {key} is \"x\", which is not available: {instead}")), "{text}");
            let nothing = match off {
                Off::Disabled => json!({"enabled": false, "other": 1}),
                Off::Flag(flag) => json!(flag),
                Off::Number(number) => json!(number),
                Off::Text(text) => json!(text),
            };
            let config = DeepSpeedConfig::from_entries(&document(key, &nothing, "Adam")).unwrap();
            assert_eq!(config.inert_keys, [], "{key}");
        }
    }

    #[test]
    fn nothing_is_asked_for() {
        for (value, wanted) in [
            (json!(null), true),
            (json!(false), true),
            (json!({}), true),
            (json!({"a": false, "b": {"c": null}}), true),
            (json!({"enabled": false, "a": 1}), true),
            (json!({"enabled": true}), false),
            (json!({"a": 1}), false),
            (json!(true), false),
            (json!(0), false),
        ] {
            assert_eq!(Off::Disabled.covers(&value), wanted, "{value}");
        }
        assert!(!Off::Flag(true).covers(&json!(false)));
        assert!(!Off::Number(1.0).covers(&json!(2)));
        assert!(!Off::Text("fp32").covers(&json!("fp16")) && Off::Text("fp32").covers(&json!("FP32")));
    }

    #[test]
    fn edits_are_counted() {
        for (from, to, wanted) in
            [("", "abc", 3), ("stage", "stage", 0), ("stage", "stages", 1), ("kitten", "sitting", 3)]
        {
            assert_eq!((edits(from, to), edits(to, from)), (wanted, wanted), "{from} {to}");
        }
    }
}
