//! What is kept elsewhere while it is not in use: who asks for it, what contradicts it, what it leaves in memory.

use accelerate_core::config::*;
use accelerate_core::plan::*;
use rstest::rstest;

use ShardingStrategy::{
    FullShard, HybridShard, HybridShardZero2, NoShard, OptimizerState, OptimizerStateAndGradients, ShardGradOp,
};

const CPU: Option<OffloadTarget> = Some(OffloadTarget::Cpu);

fn nvme(path: &str) -> Option<OffloadTarget> {
    Some(OffloadTarget::Nvme(path.into()))
}

/// `cpu_offload`, `offload_optimizer`, `offload_params`; and where the state and the parameters are then.
#[rstest]
#[case(false, None, None, None, None)]
#[case(true, None, None, CPU, CPU)]
#[case(false, CPU, None, CPU, None)]
#[case(false, None, CPU, None, CPU)]
#[case(false, nvme("/o"), None, nvme("/o"), None)]
#[case(false, nvme("/o"), CPU, nvme("/o"), CPU)]
#[case(false, nvme("/o"), nvme("/p"), nvme("/o"), nvme("/p"))]
#[case(true, nvme("/o"), None, nvme("/o"), CPU)]
#[case(true, nvme("/o"), nvme("/p"), nvme("/o"), nvme("/p"))]
fn the_field_that_says_more_counts(
    #[case] cpu_offload: bool,
    #[case] offload_optimizer: Option<OffloadTarget>,
    #[case] offload_params: Option<OffloadTarget>,
    #[case] optimizer: Option<OffloadTarget>,
    #[case] params: Option<OffloadTarget>,
) {
    let all = FullyShardedSettings { cpu_offload, offload_optimizer, offload_params, ..Default::default() };
    for sharding_strategy in [FullShard, ShardGradOp, HybridShard, HybridShardZero2] {
        let plugin = FullyShardedSettings { sharding_strategy, ..all.clone() };
        plugin.check().unwrap();
        assert_eq!((plugin.optimizer_offload(), plugin.params_offload()), (optimizer.as_ref(), params.as_ref()));
        let json = serde_json::to_string(&FullyShardedDataParallelPlugin::from(plugin.clone())).unwrap();
        let read: FullyShardedDataParallelPlugin = serde_json::from_str(&json).unwrap();
        assert_eq!(FullyShardedSettings::from(read), plugin, "{json}");
        let plan = plan_sharded(&inventory(), &plugin, 2);
        let device =
            |target: &Option<OffloadTarget>| target.as_ref().map_or(OffloadDevice::None, OffloadTarget::device);
        assert_eq!((plan.optimizer_offload, plan.params_offload), (device(&optimizer), device(&params)));
    }
}

#[rstest]
#[case(
    FullShard,
    r#"{"activation_checkpointing_offload": true}"#,
    "activation_checkpointing_offload and activation_checkpointing false contradict each other: only layers that are \
     computed twice have inputs to offload"
)]
#[case(
    NoShard,
    r#"{"cpu_offload": true}"#,
    "cpu_offload and sharding_strategy contradict each other: parameters are unsharded"
)]
#[case(OptimizerState, r#"{"cpu_offload": true}"#, "cpu_offload and sharding_strategy contradict")]
#[case(OptimizerStateAndGradients, r#"{"cpu_offload": true}"#, "choose FULL_SHARD, SHARD_GRAD_OP or a hybrid strategy")]
#[case(NoShard, r#"{"offload_params": "cpu"}"#, "offload_params and sharding_strategy contradict")]
#[case(OptimizerState, r#"{"offload_params": "cpu"}"#, "offload_params and sharding_strategy contradict")]
#[case(
    OptimizerStateAndGradients,
    r#"{"offload_optimizer": {"nvme": "/o"}, "offload_params": {"nvme": "/p"}}"#,
    "offload_params and sharding_strategy contradict"
)]
#[case(
    NoShard,
    r#"{"offload_optimizer": "cpu"}"#,
    "offload_optimizer and sharding_strategy contradict each other: with NO_SHARD"
)]
#[case(
    FullShard,
    r#"{"offload_params": {"nvme": "/p"}}"#,
    "offload_params on NVMe and offload_optimizer elsewhere contradict each other: a step changes parameters block by block"
)]
#[case(FullShard, r#"{"offload_params": {"nvme": "/p"}, "offload_optimizer": "cpu"}"#, "put both on NVMe")]
#[case(ShardGradOp, r#"{"offload_params": {"nvme": "/p"}, "cpu_offload": true}"#, "offload_params on NVMe and")]
#[case(
    FullShard,
    r#"{"offload_optimizer": {"nvme": ""}}"#,
    "offload_optimizer is on NVMe, but its folder is empty text; name"
)]
#[case(
    FullShard,
    r#"{"offload_optimizer": {"nvme": "/o"}, "offload_params": {"nvme": ""}}"#,
    "offload_params is on NVMe, but"
)]
fn contradictions(#[case] sharding_strategy: ShardingStrategy, #[case] json: &str, #[case] message: &str) {
    let plugin: FullyShardedDataParallelPlugin = serde_json::from_str(json).unwrap();
    let error = FullyShardedSettings { sharding_strategy, ..plugin.into() }.check().unwrap_err();
    assert!(error.is_config() && error.to_string().contains(message), "{error}");
}

#[rstest]
#[case(OptimizerState, r#"{"offload_optimizer": {"nvme": "/o"}}"#)]
#[case(OptimizerStateAndGradients, r#"{"offload_optimizer": "cpu"}"#)]
#[case(NoShard, r#"{"cpu_offload": null, "activation_checkpointing_offload": null, "offload_params": null}"#)]
#[case(NoShard, r#"{"activation_checkpointing": true, "activation_checkpointing_offload": true}"#)]
fn no_contradictions(#[case] sharding_strategy: ShardingStrategy, #[case] json: &str) {
    let plugin: FullyShardedDataParallelPlugin = serde_json::from_str(json).unwrap();
    FullyShardedSettings { sharding_strategy, ..plugin.into() }.check().unwrap();
}

#[rstest]
#[case(r#""cpu""#, Ok(OffloadTarget::Cpu))]
#[case(r#"{"nvme": "/n"}"#, Ok(OffloadTarget::Nvme("/n".into())))]
#[case(r#""CPU""#, Err("unknown variant `CPU`, expected `cpu` or `nvme`"))]
#[case(r#""none""#, Err("unknown variant `none`"))]
#[case(r#""nvme""#, Err("invalid type: unit variant"))]
fn targets_in_files(#[case] json: &str, #[case] wanted: Result<OffloadTarget, &str>) {
    match (serde_json::from_str::<OffloadTarget>(json), wanted) {
        (Ok(found), Ok(wanted)) => {
            assert_eq!(found, wanted);
            assert_eq!(serde_json::to_string(&found).unwrap(), json.replace(": ", ":"));
        }
        (found, wanted) => {
            let text = found.unwrap_err().to_string();
            assert!(text.contains(wanted.unwrap_err()), "{text}");
        }
    }
}

/// 40 elements in the root and 120 in a block.
fn inventory() -> Inventory {
    let entry = |name: &str, size| ParameterEntry::new(name, &[size], "float32", 4);
    Inventory { parameters: vec![entry("embed.weight", 40), entry("h.0.weight", 120)] }
}

fn plugin(sharding_strategy: ShardingStrategy, state: &str, params: &str) -> FullyShardedSettings {
    let target = |device: &str| match device {
        "cpu" => CPU,
        "nvme" => nvme("/n"),
        _ => None,
    };
    FullyShardedSettings {
        sharding_strategy,
        offload_optimizer: target(state),
        offload_params: target(params),
        auto_wrap_policy: AutoWrapPolicy::TransformerBasedWrap,
        ..Default::default()
    }
}

/// Parameters, gradients, state, gathered units, loading; on NVMe.
#[rstest]
#[case(FullShard, 2, "", "", [320, 320, 640, 640, 800], 0)]
#[case(FullShard, 2, "cpu", "cpu", [320, 320, 640, 640, 800], 0)]
#[case(FullShard, 2, "nvme", "", [320, 320, 0, 640, 800], 640)]
#[case(FullShard, 2, "nvme", "cpu", [320, 320, 0, 640, 800], 640)]
#[case(FullShard, 2, "nvme", "nvme", [0, 320, 0, 640, 720], 960)]
#[case(ShardGradOp, 4, "nvme", "nvme", [0, 160, 0, 640, 680], 480)]
#[case::one_rank_reads_its_units(FullShard, 1, "nvme", "nvme", [0, 640, 0, 640, 960], 1920)]
#[case(OptimizerState, 2, "nvme", "", [640, 640, 0, 0, 1120], 640)]
fn what_is_on_nvme_is_not_in_memory(
    #[case] strategy: ShardingStrategy,
    #[case] world_size: usize,
    #[case] state: &str,
    #[case] params: &str,
    #[case] wanted: [usize; 5],
    #[case] on_nvme: usize,
) {
    let plan = plan_sharded(&inventory(), &plugin(strategy, state, params), world_size);
    let bytes = plan.bytes_per_rank();
    let RankBytes { parameters, gradients, optimizer_state, gathered_units, loading, .. } = bytes;
    assert_eq!([parameters, gradients, optimizer_state, gathered_units, loading], wanted);
    assert_eq!((bytes.on_nvme, bytes.nvme_blocks), (on_nvme, on_nvme), "small models are one block");
    for phase in Phase::ALL {
        assert_eq!(bytes.in_phase(*phase).nvme_blocks, on_nvme, "{phase}");
    }
    let in_memory = RankBytes { on_nvme: 0, nvme_blocks: 0, ..bytes };
    assert_eq!(bytes.peak().1, in_memory.peak().1 + on_nvme);
}

#[test]
fn of_what_ranks_have_whole_only_state_is_offloaded() {
    let plugin = FullyShardedSettings { ignored_modules: vec!["h".to_owned()], ..plugin(FullShard, "nvme", "nvme") };
    let bytes = plan_sharded(&inventory(), &plugin, 2).bytes_per_rank();
    assert_eq!((bytes.parameters, bytes.optimizer_state, bytes.on_nvme), (480, 0, 80 + 160 + 960));
}

#[test]
fn a_large_model_moves_in_blocks() {
    let weight = ParameterEntry::new("w", &[1 << 26], "float32", 4);
    let plan = plan_sharded(&Inventory { parameters: vec![weight] }, &plugin(FullShard, "nvme", ""), 2);
    let bytes = plan.bytes_per_rank();
    assert_eq!((bytes.on_nvme, bytes.nvme_blocks), (2 << 27, 16 << 19));
    assert_eq!(NVME_BLOCKS_BYTES, 16 << 19);
    let weight = ParameterEntry::new("w", &[1 << 26], "float32", 4);
    let both = plan_sharded(&Inventory { parameters: vec![weight] }, &plugin(FullShard, "nvme", "nvme"), 2);
    let bytes = both.bytes_per_rank();
    assert_eq!((bytes.on_nvme, bytes.nvme_blocks), (3 << 27, 2 * (16 << 19)), "each kind has blocks of its own");
}

#[test]
fn plans_that_fit_offload_as_much() {
    let parameters = (0..4).map(|i| ParameterEntry::new(&format!("h.{i}.w"), &[40], "float32", 4)).collect();
    let auto_wrap_policy = AutoWrapPolicy::NoWrap;
    let plugin = FullyShardedSettings { auto_wrap_policy, ..plugin(FullShard, "nvme", "nvme") };
    let text = plan_sharded(&Inventory { parameters }, &plugin, 2).check_fits(2000).unwrap_err().to_string();
    for words in [
        "FULL_SHARD on 2 ranks takes 2.56 KB",
        "\n  - FULL_SHARD on 4 ranks takes 1.92 KB",
        "\n  - FULL_SHARD on 2 ranks with auto_wrap_policy TRANSFORMER_BASED_WRAP takes 1.68 KB",
    ] {
        assert!(text.contains(words), "{words:?} is missing in\n{text}");
    }
}

#[test]
fn people_can_read_where_what_is() {
    let plan = plan_sharded(&inventory(), &plugin(FullShard, "nvme", "cpu"), 2);
    let head = "  optimizer state: on NVMe while not in use\n  parameters: in the host's memory while not in use\n";
    for text in [plan.to_string(), plan.summary().to_string()] {
        assert!(text.contains(head), "{text}");
    }
    let memory = "memory of each rank: 320 B parameters, 320 B gradients, 640 B gathered at once, 640 B blocks from and to \
                  NVMe; at most 2.56 KB (backward), without activations; on NVMe: 640 B\n";
    assert!(plan.to_string().ends_with(memory), "{plan}");
    let text = plan_sharded(&inventory(), &plugin(FullShard, "", ""), 2).to_string();
    assert!(!text.contains("NVMe") && !text.contains("host"), "{text}");
}

#[test]
fn plans_from_before_there_was_offload_are_read() {
    let plan = plan_sharded(&inventory(), &plugin(FullShard, "", ""), 2);
    let mut json = serde_json::to_value(&plan).unwrap();
    let entries = json.as_object_mut().unwrap();
    for key in ["optimizer_offload", "params_offload"] {
        assert_eq!(entries.remove(key), Some("none".into()));
    }
    assert_eq!(serde_json::from_value::<Plan>(json).unwrap(), plan);
}
