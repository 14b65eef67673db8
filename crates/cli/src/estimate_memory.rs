//! `accelerate estimate-memory`: what a model takes of memory, before anything is started.

mod error;
mod hub;
mod local;
mod report;
mod source;
mod weights;

use std::error::Error;
use std::path::PathBuf;

use accelerate_core::config::{
    DistributedDataParallelSettings, FullyShardedDataParallelPlugin, FullyShardedSettings, OffloadDevice,
    OffloadTarget, PartialRunConfig, RunConfig, ShardingStrategy, Sources, ZeroStage,
};
use accelerate_core::mesh::{Axis, Mesh};
use accelerate_core::plan::{
    EstimateDtype, Inventory, MicroBatch, Plan, RankSpeed, estimate_memory, parse_bandwidth, parse_flops,
    plan_data_parallel, plan_sharded,
};
use accelerate_core::settings::Setting;
use clap::{Arg, Args, value_parser};
use error::EstimateError;
use hub::HubSettings;
use report::{Activations, Facts};
use source::Model;

use crate::config_file::variable;
use crate::flags::size_above_zero;
use crate::print_message;
use crate::settings::{Selection, SettingFlags};

/// Show how much memory a model takes, to be loaded and to be trained, on one process or sharded over many.
///
/// The model is a .safetensors file, an index of several (model.safetensors.index.json), a folder with either, or the name of a
/// model on the Hugging Face Hub. What exists on this disk comes first, then the cache of the Hub, then the Hub; the command says
/// which it was. Only headers are read, so that the largest model takes milliseconds, or a few requests.
///
/// With --batch_size and --sequence_length it estimates activations as well, from the config.json beside the weights
/// (Korthikanti et al., 2022). The estimate is for transformers with one stack of layers, such as BERT and GPT-2, whose attention
/// keeps all of its scores; without these flags, activations are not counted.
///
/// With --plan it shows what `prepare` would do on --num_processes ranks, and what each rank has of parameters, gradients
/// and optimizer state in each phase of training. --memory checks that against what there is. --flops and --bandwidth tell how long
/// a step takes at least.
#[derive(Debug, Args)]
#[command(after_help = "Every flag may also be spelled with - instead of _.")]
#[command(after_long_help = "Examples:\n  \
    What it takes to load a model of the Hub, and to train it with Adam on one process:\n    \
      accelerate estimate-memory bert-base-cased --dtypes float32 float16\n  \
    The same with the activations of 32 rows of 512 tokens:\n    \
      accelerate estimate-memory bert-base-cased --batch_size 32 --sequence_length 512\n  \
    Whether four ranks with 24 GB each can train a model of this disk in float32, with a unit for each block:\n    \
      accelerate estimate-memory models/bert-base-cased --plan --num_processes 4 --dtypes float32 \\\n      \
        --fsdp_sharding_strategy FULL_SHARD --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --memory 24GB\n  \
    How long a step takes at least on four ranks of 312 TFLOP/s each, with a network of 100 Gbit/s:\n    \
      accelerate estimate-memory gpt2 --plan --num_processes 4 --dtypes bfloat16 --batch_size 16 \\\n      \
        --sequence_length 1024 --flops 312T --bandwidth 100Gbit\n  \
    What stays in memory if parameters and Adam's state are files on a fast disk, and what the disk must hold:\n    \
      accelerate estimate-memory models/bert-base-cased --plan --num_processes 4 --zero_stage 3 \\\n      \
        --offload_optimizer_device nvme --offload_param_device nvme\n  \
    What each axis of a mesh divides: four ranks compute each layer together, and pairs of those shard what each has. Without\n  \
    --num_processes there are as many ranks as the axes have:\n    \
      accelerate estimate-memory models/llama --plan --parallelism_config_tp_size 4 --parallelism_config_dp_shard_size 2\n\n\
    Variables: HF_ENDPOINT (another server), HF_HOME and HF_HUB_CACHE (the cache), HF_HUB_OFFLINE=1 (no network), HF_TOKEN\n\
    (sent to that server only), HF_HUB_DOWNLOAD_TIMEOUT (seconds for one request, 30 if it is not set), HTTPS_PROXY.\n\n\
    Every flag may also be spelled with - instead of _ (--num-processes).\n\n\
    Exit code: 0; 1 if the model cannot be read or does not fit into --memory; 2 for wrong flags.")]
pub(crate) struct Arguments {
    /// A .safetensors file, an index of several, a folder with either, or a model of the Hub (owner/name).
    #[arg(value_name = "MODEL")]
    model: PathBuf,

    /// Element types to estimate for: float32, float16, bfloat16, int8, int4.
    ///
    /// Without it: float32 float16 int8 int4. With --plan it is the one type to train in, and without it that of the
    /// files.
    #[arg(long, value_name = "DTYPE", num_args = 1..)]
    dtypes: Vec<EstimateDtype>,

    /// Accepted and without effect: sizes are in the headers of files, whatever library made them.
    #[arg(long = "library_name", alias = "library-name", value_name = "LIBRARY", value_parser = ["timm", "transformers"])]
    library_name: Option<String>,

    /// Accepted and without effect: no code of a model is ever run.
    #[arg(long = "trust_remote_code", alias = "trust-remote-code")]
    trust_remote_code: bool,

    /// Rows that each process computes with at once; activations are estimated for them.
    #[arg(
        long = "batch_size", alias = "batch-size", value_name = "ROWS", requires = "sequence_length",
        help_heading = ACTIVATIONS, value_parser = value_parser!(u64).range(1..)
    )]
    batch_size: Option<u64>,

    /// Tokens of each row.
    #[arg(
        long = "sequence_length", alias = "sequence-length", value_name = "TOKENS", requires = "batch_size",
        help_heading = ACTIVATIONS, value_parser = value_parser!(u64).range(1..)
    )]
    sequence_length: Option<u64>,

    /// Layers keep their inputs only, and are computed again in the backward pass.
    #[arg(
        long = "activation_checkpointing", alias = "activation-checkpointing", requires = "batch_size",
        help_heading = ACTIVATIONS
    )]
    activation_checkpointing: bool,

    /// Show what `prepare` would do, and the memory of each rank in each phase of training with Adam.
    #[arg(long)]
    plan: bool,

    #[command(flatten)]
    settings: SettingFlags<ForPlan>,

    /// Fail if the plan takes more than this on a rank, and say which plans do not. For example 24GB or 80GiB.
    #[arg(long, value_name = "SIZE", value_parser = size_above_zero, requires = "plan")]
    memory: Option<u64>,

    /// Say how long a step takes if each rank computes that many operations in a second: 312T, 1.5PFLOPS.
    ///
    /// A step computes 6 operations for each parameter and token, 8 with --activation_checkpointing. What data sheets promise is
    /// never reached: half of it is good.
    #[arg(long, value_name = "RATE", value_parser = parse_flops, requires_all = ["plan", "batch_size"])]
    flops: Option<f64>,

    /// What each rank can send in a second: 100Gbit or 12GB/s.
    #[arg(long, value_name = "RATE", value_parser = parse_bandwidth, requires = "flops")]
    bandwidth: Option<u64>,

    /// List every parameter, bucket and unit of the plan.
    #[arg(long, requires = "plan", conflicts_with = "json")]
    verbose: bool,

    /// Print JSON, with all sizes in bytes.
    #[arg(long)]
    json: bool,
}

/// The group of flags about activations.
const ACTIVATIONS: &str = "Activations";

impl Arguments {
    fn batch(&self) -> Option<MicroBatch> {
        let (batch_size, sequence_length) = (self.batch_size?, self.sequence_length?);
        Some(MicroBatch { batch_size, sequence_length, activation_checkpointing: self.activation_checkpointing })
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let model = Model::find(&arguments.model, || Ok(HubSettings::new(&variable)?))?;
    if let Some(explanation) = model.explanation(&arguments.model) {
        print_message(&format!("accelerate estimate-memory: {explanation}"));
    }
    let activations = match arguments.batch() {
        Some(batch) => Some(Activations { shape: model.transformer()?, batch }),
        None => None,
    };
    let plan = if arguments.plan { Some(plan(arguments, &model, activations.as_ref())?) } else { None };
    let speed = arguments.flops.map(|flops| RankSpeed { flops, bandwidth: arguments.bandwidth });
    let facts = Facts { model: &model, activations: activations.as_ref(), speed, available_bytes: arguments.memory };
    let text = match &plan {
        Some((mesh, plan)) if arguments.json => report::plan_as_json(mesh, plan, &facts)?,
        Some((mesh, plan)) => report::plan(mesh, plan, arguments.verbose, &facts),
        None => {
            let dtypes = if arguments.dtypes.is_empty() { &EstimateDtype::DEFAULT[..] } else { &arguments.dtypes };
            let estimates: Vec<_> = dtypes.iter().map(|&dtype| estimate_memory(&model.inventory, dtype)).collect();
            if arguments.json {
                report::estimates_as_json(estimates, &facts)?
            } else {
                report::estimates(&estimates, &facts)
            }
        }
    };
    crate::print_coloured(&text)?;
    match (plan, arguments.memory) {
        (Some((_, plan)), Some(available_bytes)) => Ok(plan.check_fits(available_bytes)?),
        _ => Ok(()),
    }
}

/// For the mesh that is planned, where ranks that compute layers together are one rank of the plan.
fn plan(
    arguments: &Arguments,
    model: &Model,
    activations: Option<&Activations>,
) -> Result<(Mesh, Plan), Box<dyn Error>> {
    let inventory = model.inventory.clone();
    let inventory = match arguments.dtypes.as_slice() {
        [] => inventory,
        [dtype] => {
            let wanted = dtype.float_type().ok_or(EstimateError::NotTrainable { dtype: *dtype })?;
            inventory.in_type(wanted)
        }
        several => return Err(EstimateError::SeveralTypes { dtypes: several.to_vec() }.into()),
    };
    let run = planned(PartialRunConfig::of_texts(&arguments.settings.said))?;
    // Ranks of a job on one machine, unless the groups are given.
    let num_ranks = run.cluster.num_processes.unwrap_or(1);
    let mesh = run.mesh(num_ranks, num_ranks)?;
    let inventory = match mesh.size(Axis::Tp) {
        1 => inventory,
        tp_size => model.tensor_parallel()?.first_slices(&inventory, tp_size)?,
    };
    let plugin = &run.fsdp;
    plugin.check()?;
    plugin.check_modules(&inventory)?;
    let data = mesh.data();
    let plan = match plugin.sharding_strategy {
        ShardingStrategy::NoShard => {
            plan_data_parallel(&inventory, &DistributedDataParallelSettings::default(), data.world_size())
        }
        _ => plan_sharded(&inventory, plugin, data),
    };
    let activation_bytes = activations.map_or(0, |known| known.bytes_on(&mesh, element_bytes(&inventory)).total());
    let plan = Plan { activation_bytes: usize::try_from(activation_bytes).unwrap_or(usize::MAX), ..plan };
    Ok((mesh, plan))
}

/// The run that flags describe. Without a number of processes there are as many as its axes have.
fn planned(said: PartialRunConfig) -> accelerate_core::Result<RunConfig> {
    let mut run = RunConfig::resolve(Sources::default())?;
    run.parallelism = said.parallelism.clone().into();
    let axes = &run.parallelism;
    let sizes = [axes.dp_replicate_size, axes.dp_shard_size, axes.cp_size, axes.sp_size, axes.tp_size];
    let num_ranks = sizes.into_iter().fold(1, usize::saturating_mul);
    run.cluster.num_processes = Some(said.cluster.num_processes.unwrap_or(num_ranks));
    run.cluster.use_fsdp = true;
    run.fsdp = fully_sharded(said);
    Ok(run)
}

/// Of what layers compute with: the widest type that parameters have, as narrow ones are made wider for it.
fn element_bytes(inventory: &Inventory) -> u64 {
    let floats = inventory.parameters.iter().filter(|parameter| parameter.is_floating_point());
    floats.map(|parameter| parameter.element_bytes as u64).max().unwrap_or(4).max(2)
}

/// What a plan depends on.
#[derive(Debug)]
struct ForPlan;

impl Selection for ForPlan {
    fn includes(setting: &Setting) -> bool {
        const FLAGS: [&str; 14] = [
            "num_processes",
            "parallelism_config_dp_replicate_size",
            "parallelism_config_dp_shard_size",
            "parallelism_config_cp_size",
            "parallelism_config_sp_size",
            "parallelism_config_tp_size",
            "fsdp_sharding_strategy",
            "zero_stage",
            "fsdp_auto_wrap_policy",
            "fsdp_transformer_layer_cls_to_wrap",
            "fsdp_min_num_params",
            "dp_shard_size",
            "offload_optimizer_device",
            "offload_param_device",
        ];
        setting.flag().is_some_and(|flag| FLAGS.contains(&flag))
    }

    fn adjust(flag: &str, argument: Arg) -> Arg {
        let argument = argument.requires("plan").help_heading("What is planned, with --plan");
        match flag {
            "zero_stage" => argument.conflicts_with("fsdp_sharding_strategy"),
            _ => argument,
        }
    }
}

/// What flags say of sharding: stages of ZeRO and offload go with the strategies of FSDP and its wrapping.
fn fully_sharded(said: PartialRunConfig) -> FullyShardedSettings {
    let of_stage = said.deepspeed.zero_stage.map(ZeroStage::fully_sharded_settings).unwrap_or_default();
    let plugin = FullyShardedDataParallelPlugin {
        sharding_strategy: said.fsdp.sharding_strategy.or(Some(of_stage.sharding_strategy)),
        auto_wrap_policy: said.fsdp.auto_wrap_policy.or(Some(of_stage.auto_wrap_policy)),
        offload_optimizer: said.deepspeed.offload_optimizer_device.and_then(target),
        offload_params: said.deepspeed.offload_param_device.and_then(target),
        ..said.fsdp
    };
    plugin.into()
}

/// A plan counts bytes and writes nothing, so that any folder does.
fn target(device: OffloadDevice) -> Option<OffloadTarget> {
    match device {
        OffloadDevice::None => None,
        OffloadDevice::Cpu => Some(OffloadTarget::Cpu),
        OffloadDevice::Nvme => Some(OffloadTarget::Nvme(".".into())),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{Cli, Command};
    use accelerate_core::config::AutoWrapPolicy;
    use clap::Parser;
    use rstest::rstest;

    fn parsed(flags: &str) -> Result<Arguments, clap::Error> {
        let words = ["accelerate", "estimate-memory", "model"].into_iter().chain(flags.split_whitespace());
        match Cli::try_parse_from(words)?.command {
            Command::EstimateMemory(arguments) => Ok(arguments),
            other => unreachable!("{other:?}"),
        }
    }

    fn of_strategy(sharding_strategy: ShardingStrategy) -> FullyShardedSettings {
        FullyShardedSettings { sharding_strategy, ..Default::default() }
    }

    fn wrapped(sharding_strategy: ShardingStrategy, auto_wrap_policy: AutoWrapPolicy) -> FullyShardedSettings {
        FullyShardedSettings { auto_wrap_policy, ..of_strategy(sharding_strategy) }
    }

    use AutoWrapPolicy::{NoWrap, SizeBasedWrap, TransformerBasedWrap};
    use ShardingStrategy::{FullShard, HybridShard, NoShard, OptimizerState, OptimizerStateAndGradients, ShardGradOp};

    #[rstest]
    #[case("--plan", of_strategy(FullShard))]
    #[case("--plan --fsdp_sharding_strategy shard_grad_op", of_strategy(ShardGradOp))]
    #[case("--plan --fsdp-sharding-strategy 3", of_strategy(NoShard))]
    #[case("--plan --zero_stage 0", of_strategy(NoShard))]
    #[case(
        "--plan --fsdp_sharding_strategy HYBRID_SHARD --dp_shard_size 4",
        FullyShardedSettings { dp_shard_size: Some(4), ..of_strategy(HybridShard) }
    )]
    #[case("--plan --zero_stage 1", wrapped(OptimizerState, TransformerBasedWrap))]
    #[case("--plan --zero_stage 2", wrapped(OptimizerStateAndGradients, TransformerBasedWrap))]
    #[case("--plan --zero-stage 3 --fsdp_auto_wrap_policy NO_WRAP", wrapped(FullShard, NoWrap))]
    #[case(
        "--plan --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap h.*,head",
        FullyShardedSettings {
            transformer_cls_names_to_wrap: vec!["h.*".into(), "head".into()],
            ..wrapped(FullShard, TransformerBasedWrap)
        }
    )]
    #[case(
        "--plan --fsdp_auto_wrap_policy SIZE_BASED_WRAP --fsdp_min_num_params 1000",
        FullyShardedSettings { min_num_params: Some(1000), ..wrapped(FullShard, SizeBasedWrap) }
    )]
    #[case(
        "--plan --offload_optimizer_device nvme --offload_param_device cpu",
        FullyShardedSettings {
            offload_optimizer: Some(OffloadTarget::Nvme(".".into())),
            offload_params: Some(OffloadTarget::Cpu),
            ..of_strategy(FullShard)
        }
    )]
    #[case("--plan --offload-optimizer-device none --offload-param-device none", of_strategy(FullShard))]
    fn flags_become_a_plugin(#[case] flags: &str, #[case] wanted: FullyShardedSettings) {
        let said = PartialRunConfig::of_texts(&parsed(flags).unwrap().settings.said);
        assert_eq!(fully_sharded(said), wanted);
    }

    #[rstest]
    #[case("--dtypes float64", "float64")]
    #[case("--plan --fsdp_sharding_strategy HALF_SHARD", "HALF_SHARD")]
    #[case("--dp_shard_size 2", "--plan")]
    #[case("--plan --zero_stage 4", "0, 1, 2, 3")]
    #[case("--plan --zero_stage 2 --fsdp_sharding_strategy 1", "--fsdp_sharding_strategy")]
    #[case("--plan --num_processes 0", "at least 1")]
    #[case("--plan --memory 80", "")]
    #[case("--plan --memory lots", "lots")]
    #[case("--plan --memory 0", "no room")]
    #[case("--plan --memory 0.5", "no room")]
    #[case("--plan --verbose --json", "--json")]
    #[case("--num_processes 2", "--plan")]
    #[case("--fsdp_sharding_strategy 1", "--plan")]
    #[case("--zero_stage 1", "--plan")]
    #[case("--fsdp_auto_wrap_policy NO_WRAP", "--plan")]
    #[case("--fsdp_transformer_layer_cls_to_wrap h", "--plan")]
    #[case("--fsdp_min_num_params 1", "--plan")]
    #[case("--offload_optimizer_device cpu", "--plan")]
    #[case("--offload_param_device cpu", "--plan")]
    #[case("--plan --offload_param_device disk", "one of none, cpu, nvme")]
    #[case("--memory 1GB", "--plan")]
    #[case("--verbose", "--plan")]
    #[case("--batch_size 2", "--sequence_length")]
    #[case("--sequence_length 2", "--batch_size")]
    #[case("--batch_size 0 --sequence_length 2", "0")]
    #[case("--activation_checkpointing", "--batch_size")]
    #[case("--batch_size 2 --sequence-length 2 --activation-checkpointing", "")]
    #[case("--flops 1T --batch_size 2 --sequence_length 2", "--plan")]
    #[case("--flops 1T --plan", "--batch_size")]
    #[case("--flops fast --plan --batch_size 2 --sequence_length 2", "312T")]
    #[case("--bandwidth 1GB/s --plan", "--flops")]
    #[case("--bandwidth 1 --flops 1T --plan --batch_size 2 --sequence_length 2", "100Gbit")]
    #[case("--bandwidth 1GB --flops 1T --plan --batch_size 2 --sequence_length 2", "")]
    #[case("--library_name keras", "timm")]
    #[case("--library-name timm --trust-remote-code", "")]
    fn wrong_flags_are_named(#[case] flags: &str, #[case] words: &str) {
        match parsed(flags) {
            Ok(_) => assert!(words.is_empty(), "{flags}"),
            Err(error) => {
                assert_eq!(error.exit_code(), 2);
                assert!(!words.is_empty() && error.to_string().contains(words), "{error}");
            }
        }
    }
}
