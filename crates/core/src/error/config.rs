//! What can be wrong with a configuration value.

use crate::settings::shortened;

#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigErrorKind {
    #[error(transparent)]
    DeepSpeed(#[from] super::deep_speed::DeepSpeedErrorKind),
    #[error("{:?} is not a {what}; the choices are {}", shortened(found), quoted(choices))]
    UnknownName { what: &'static str, found: String, choices: &'static [&'static str] },
    #[error("{name} is 0, but must be at least 1")]
    MustBePositive { name: &'static str },
    #[error("{name} is {found}, but must be {wanted}")]
    OutOfRange { name: &'static str, found: f64, wanted: &'static str },
    #[error(
        "{world_size} ranks do not fill groups of {shard_size}; let dp_shard_size divide the number of ranks (without it, a \
         group is the ranks of one machine)"
    )]
    IncompleteMesh { world_size: usize, shard_size: usize },
    #[error("{mesh} is not a mesh of {world_size} ranks; let the sizes of its axes multiply to the number of ranks")]
    MeshIsNotWorld { mesh: String, world_size: usize },
    #[error("{axis}_size is {}; give each axis one size of at least 1", if *is_named_twice { "said twice".to_owned() } else { size.to_string() })]
    MeshAxis { axis: &'static str, size: usize, is_named_twice: bool },
    #[error(
        "tp_size is {tp_size}, and tensor_parallel_degree is {degree}; both say how many ranks divide each layer: leave one of them out"
    )]
    TwoDegrees { tp_size: usize, degree: usize },
    #[error(
        "dp_shard_size is {dp_shard_size}, and nothing shards models; add --use_fsdp with another strategy than NO_SHARD, or leave it at 1"
    )]
    ShardsWithoutFsdp { dp_shard_size: usize },
    #[error(
        "{field} is {size}, and use_deepspeed is true; a DeepSpeed configuration does not know of ranks with the same rows: shard \
         by --use_fsdp, or leave out {field}"
    )]
    DeepSpeedWithAxis { field: &'static str, size: usize },
    #[error("{field} is {found:?}, and there is {wanted:?} alone; leave it out")]
    OneWord { field: &'static str, found: String, wanted: &'static str },
    #[error("gpu_ids is {}, but must be {wanted}", shortened(found))]
    GpuIds { found: String, wanted: &'static str },
    #[error(
        "sp_seq_length_is_variable is false, and sp_seq_length does not say how long sequences are; say it, or let them be variable"
    )]
    NoSequenceLength,
    #[error("{world_size} ranks do not fill groups of {degree}; let tensor_parallel_degree divide the number of ranks")]
    IncompleteDegree { world_size: usize, degree: usize },
    #[error("cp_size and sp_size are both above 1, and both divide the same sequences; leave one of them at 1")]
    TwoWaysToDivideSequences,
    #[error("{num_blocks} blocks of the model are too few for {num_stages} processes; start fewer processes")]
    FewBlocks { num_blocks: usize, num_stages: usize },
    #[error(
        "split_points has {num_points} points, and there are {num_stages} processes; give one point fewer than processes, each a block at \
         which the next process goes on"
    )]
    SplitPoints { num_points: usize, num_stages: usize },
    #[error(
        "split_points has {point:?}, which {}; give paths of blocks in their order, without the first",
        if *is_block { "comes before the point in front of it, or is the first block" } else { "is no block of the model" }
    )]
    SplitPoint { point: String, is_block: bool },
    #[error("{field} is on NVMe, but its folder is empty text; name a folder on that disk, for example /local_nvme")]
    NoFolder { field: &'static str },
    #[error(
        "{field} has {found:?}, but no module of the model has that path; there are {}. A Rust model has no classes: in place of \
         the name of one, give paths such as encoder.layer.*",
        known.join(", ")
    )]
    NoSuchModule { field: &'static str, found: String, known: Vec<String> },
    #[error(
        "{field} has {found:?}, but its options are rank0_only and offload_to_cpu, each true or false; leave it out"
    )]
    StateDictOption { field: &'static str, found: String },
    #[error("comm_state_option does not hold the options of PowerSGD: {source}")]
    PowerSgdOptions { source: serde_json::Error },
    #[error("mixed_precision_policy.{field} is not available; {cure}")]
    NotAvailable { field: &'static str, cure: &'static str },
    #[error("fp8_config.backend is MSAMP: {}", crate::config::no_msamp())]
    NoMsamp,
    #[error("fp8_format is E5M2, whose numbers have too few digits for weights and inputs; choose HYBRID or E4M3")]
    E5M2Everywhere,
    #[error("neither load_in_8bit nor load_in_4bit is set, so that nothing would be quantised; set one of them")]
    NeitherWidth,
    #[error("{first} and {second} contradict each other: {why}")]
    Contradiction { first: &'static str, second: &'static str, why: &'static str },
    #[error(
        "dynamo backend \"{backend}\" needs Python, which compiles models while they run; without it there are \"ts\" for \
         TorchScript files (nn::ScriptModule), \"aot_inductor\" for packages that were compiled ahead of time \
         (nn::AotInductorModule), and \"eager\" or \"no\" for no compiler"
    )]
    DynamoNeedsPython { backend: &'static str },
    #[error(
        "TorchDynamoPlugin.{field} is {found}, but backend \"{backend}\" has no use for it: {why}. Leave {field} out"
    )]
    DynamoSetting { field: &'static str, found: String, backend: &'static str, why: &'static str },
}

impl ConfigErrorKind {
    /// What the text calls the settings that it is about: their paths, or their fields where the record is known.
    pub(super) fn settings(&self) -> Vec<&str> {
        match self {
            Self::DeepSpeed(kind) => kind.settings(),
            Self::MustBePositive { name } | Self::OutOfRange { name, .. } => vec![name],
            Self::StateDictOption { field, .. } | Self::NoFolder { field } | Self::NoSuchModule { field, .. } => {
                vec![field]
            }
            Self::NeitherWidth => vec!["load_in_8bit", "load_in_4bit"],
            Self::Contradiction { first, second, .. } => vec![first, second],
            Self::UnknownName { what, .. } => vec![what],
            Self::PowerSgdOptions { .. } => vec!["comm_state_option"],
            Self::NotAvailable { .. } => vec!["mixed_precision_policy"],
            Self::DynamoNeedsPython { .. } => vec!["backend"],
            Self::DynamoSetting { field, .. } => vec![field, "backend"],
            Self::IncompleteMesh { .. } => vec!["dp_shard_size"],
            Self::TwoDegrees { .. } => vec!["tp_size", "tensor_parallel_degree"],
            Self::ShardsWithoutFsdp { .. } => vec!["dp_shard_size"],
            Self::DeepSpeedWithAxis { field, .. } | Self::OneWord { field, .. } => vec![field],
            Self::GpuIds { .. } => vec!["gpu_ids"],
            Self::NoSequenceLength => vec!["sp_seq_length_is_variable", "sp_seq_length"],
            Self::IncompleteDegree { .. } => vec!["tensor_parallel_degree"],
            Self::MeshIsNotWorld { .. }
            | Self::MeshAxis { .. }
            | Self::FewBlocks { .. }
            | Self::SplitPoints { .. }
            | Self::SplitPoint { .. } => Vec::new(),
            Self::NoMsamp => vec!["backend"],
            Self::E5M2Everywhere => vec!["fp8_format"],
            Self::TwoWaysToDivideSequences => vec!["cp_size", "sp_size"],
        }
    }
}

fn quoted(choices: &[&str]) -> String {
    choices.iter().map(|choice| format!("{choice:?}")).collect::<Vec<_>>().join(", ")
}
