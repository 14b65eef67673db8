//! What can go wrong while the processes of a run find their place and each other.

use super::listed_ranks;
use accelerate_core::config::DynamoBackend;
use accelerate_core::names::DistributedType;
use accelerate_core::status::named_ranks;
use std::time::Duration;

#[derive(Debug, thiserror::Error)]
pub(crate) enum StateError {
    #[error("the working folder of this process cannot be used: {source}; start the program in one that exists")]
    NoWorkingFolder { source: std::io::Error },

    #[error(
        "this process cannot listen to the signals by which it is asked to end: {source}; without should_stop it needs no handlers"
    )]
    NoSignals { source: std::io::Error },

    #[error(
        "torch_device is \"{name}\" ({origin}), which is not a device of this machine; wanted \"cpu\", \"cuda\" or \
         \"cuda:<index>\" with an index below {cuda_devices}"
    )]
    UnknownDevice { name: String, origin: String, cuda_devices: usize },

    #[error(
        "InitProcessGroupKwargs.backend is \"{name}\", which cannot move tensors of {device}; wanted \"gloo\" for the \
         CPU, \"nccl\" or \"gloo\" for CUDA, or nothing for the one that fits"
    )]
    UnknownBackend { name: String, device: String },

    #[error(
        "InitProcessGroupKwargs.init_method is \"{found}\"; wanted \"env://\", \"tcp://<host>:<port>\" or \
         \"file:///<path on a file system that all ranks see>\""
    )]
    InitMethod { found: String },

    #[error(
        "DistributedDataParallelKwargs.comm_hook is a function that cannot be called with buckets of gradients; make it with \
         CommHook::new or CommHook::with_state"
    )]
    NoCommHook,

    #[error(
        "port {port}, at which the ranks were to meet, is taken by another program; choose another with \
         `accelerate launch --main_process_port <port>` (0 takes a free one) or MASTER_PORT"
    )]
    PortTaken { port: u16, source: Box<accelerate_rendezvous::Error> },

    #[error(
        "this process has met the other ranks of its run already, as rank {rank}, and ranks meet once; make further \
         accelerators from the first one: Accelerator::builder().build_from(&first)"
    )]
    HasMet { rank: usize },

    #[error("the ranks cannot meet")]
    Rendezvous { source: accelerate_rendezvous::Error },

    #[error(
        "rank {rank} is taken by {there}, and this is {own}; each process needs a RANK of its own, and a file for \
         init_method a new name for each run"
    )]
    RankTaken { rank: usize, own: String, there: String },

    #[error(
        "WORLD_SIZE is {world_size} on rank {rank}, and {others} on those that came before; it is the same on all ranks"
    )]
    OtherWorldSize { rank: usize, world_size: usize, others: String },

    #[error(
        "rank {ended} ended with exit code 0 before it met the others, and {} for it in init_process_group; every rank of a run makes \
         its Accelerator, so look for what ends rank {ended} before that",
        waiting_ranks(waiting)
    )]
    EndedBefore { ended: usize, waiting: Vec<usize> },

    #[error("another rank does not take part: {reason}")]
    RefusedElsewhere { reason: String },

    #[error(
        "rank 0 did not open {host}:{port} within {timeout:?}; it has not started, has ended, or MASTER_ADDR and \
         MASTER_PORT are not the same on all ranks"
    )]
    NobodyListens { host: String, port: u16, timeout: Duration, source: Box<accelerate_rendezvous::Error> },

    #[error("{call} was given a model that `prepare` has not returned; pass on what accelerator.prepare(model) gave")]
    NotPrepared { call: &'static str },

    #[error("{call} takes one model, but was given {found}; call it once for each model")]
    NotOneModel { call: &'static str, found: usize },

    #[error(
        "the saved states are not those of what this accelerator has: {}; prepare and register as many objects of each kind, in the \
         same order, before the states are loaded",
        other_objects(missing, unexpected)
    )]
    OtherObjects { missing: String, unexpected: String },

    #[error(
        "{} of {world_size} did not arrive within {timeout:?}; look at what was printed there, start all {world_size} processes, or \
         give them longer with --rdzv_conf join_timeout=SECONDS",
        listed_ranks(missing)
    )]
    NotArrived { missing: String, world_size: usize, timeout: Duration, source: torch_ext::Error },

    #[error(
        "{setting} is {found} for an accelerator that build_from makes among processes which have met already, on the devices \
         that they have; give it to the builder of the first accelerator, and leave it out here"
    )]
    MetAlready { setting: &'static str, found: String },

    #[error("two handlers of kind {kind} were given; give each kind at most once")]
    DuplicateHandler { kind: &'static str },

    #[error(
        "gradient_accumulation_steps is {steps} and gradient_accumulation_plugin.num_steps is {plugin}; give one of them"
    )]
    TwoAccumulationSettings { steps: usize, plugin: usize },

    #[error(
        "{dummy} stands for what a DeepSpeed configuration describes, but this accelerator has none; give it one \
         (AcceleratorBuilder::deepspeed_plugin), or prepare an optimizer or scheduler of accelerate::optim"
    )]
    DummyWithoutDeepSpeed { dummy: &'static str },

    #[error("the DeepSpeed configuration has no section \"{section}\" to make what is prepared of; write one")]
    NoDeepSpeedSection { section: &'static str },

    #[error(
        "the DummyScheduler was prepared before its DummyOptim, whose learning rate it drives; pass both to one call of \
         prepare, or the optimizer to an earlier one"
    )]
    SchedulerBeforeOptimizer,

    #[error(
        "gradient_accumulation_steps follows from train_batch_size and the batches of the loaders, as the DeepSpeed \
         configuration is written, but no loader was prepared; prepare it before the first step, or write \
         gradient_accumulation_steps or train_micro_batch_size_per_gpu into the configuration"
    )]
    OpenAccumulation,

    #[error(
        "GradScalerKwargs.{field} is {said} ({origin}), but the section fp16 of the DeepSpeed configuration makes it {configured}; \
         leave one of the two out, or let them agree"
    )]
    TwoLossScales { field: &'static str, said: String, origin: String, configured: String },
    #[error("this process cannot be kept on cores of its own (enable_cpu_affinity); leave the setting out")]
    Affinity { source: std::io::Error },
    #[error("the configuration file {} cannot be read", path.display())]
    ConfigFile { path: std::path::PathBuf, source: std::io::Error },

    #[error("dynamo_plugin and dynamo_backend are both given; give one of them")]
    TwoDynamoSettings,

    #[error(
        "dynamo backend \"{backend}\" is chosen, but the model is {found}; {cure}, prepare it with another accelerator, \
         or choose backend \"no\""
    )]
    NotCompiled { backend: DynamoBackend, found: &'static str, cure: &'static str },

    #[error(
        "dynamo backend \"cudagraphs\" captures work of a CUDA device, but this process computes on {device}; {cure}"
    )]
    GraphsWithoutCuda { device: String, cure: &'static str },

    #[error("{feature} is not part of this version; {cure}")]
    NotAvailable { feature: String, cure: &'static str },

    #[error(
        "DistributedDataParallel: parameters {names} got no gradient in the last backward pass, so their gradients cannot be averaged. Use them in the loss, freeze them before `prepare`, or {cure}"
    )]
    UnusedParameters { names: String, cure: &'static str, source: torch_ext::Error },

    #[error(
        "the models of the ranks differ, so they cannot be trained together: rank {rank} has {there} where rank 0 has \
         {on_main}. Build the same model on every rank"
    )]
    DifferentModels { rank: usize, on_main: String, there: String },

    #[error(
        "this model computes with the tensors of {holder}, not with those that Param::get gives, so its parameters cannot be \
         sharded; build it of the layers of accelerate::nn, or choose ShardingStrategy::NoShard"
    )]
    TensorsElsewhere { holder: &'static str },

    #[error(
        "\"{parameter}\" is sharded already: its model was prepared before. Keep what `prepare` returned then, or build the model \
         anew"
    )]
    AlreadySharded { parameter: String },

    #[error(
        "the parameters of {unit} were changed between the forward pass and the backward pass that needs them, so its gradients \
         would mix old and new values. Run the backward pass before the optimizer steps or weights are loaded"
    )]
    ChangedSinceForward { unit: String },

    #[error(
        "a forward pass used the units of a sharded model in the order {now}, the one before it in the order {before}, and \
         units are to be fetched ahead. Use them in one order, or set FullyShardedDataParallelPlugin.dynamic, or switch \
         forward_prefetch and backward_prefetch off"
    )]
    ChangedOrder { before: String, now: String },

    #[error(
        "the ranks used the units of a sharded model in different orders, so they gathered parts of different parameters: rank \
         {rank} {there} where rank 0 {on_main}. Nothing was updated. Compute with the same modules in the same order on \
         every rank"
    )]
    DifferentOrders { rank: usize, on_main: String, there: String },

    #[error(
        "parameters of {unit} were changed between a forward pass and its backward pass, while other ranks may have been reading them. Change them before the forward pass or after the backward pass"
    )]
    ChangedWhileRead { unit: String },

    #[error(
        "the codes of {unit} are here, and nobody has said with which scales; this is a fault of accelerate, please report it"
    )]
    NoScales { unit: String },

    #[error(
        "LocalSGD averages whole models, but the run is {distributed_type}, whose processes hold shards of one; use it \
         with data parallelism (NO, MULTI_CPU, MULTI_GPU)"
    )]
    LocalSgdKind { distributed_type: DistributedType },

    #[error(
        "ranks inside join_uneven_inputs make different calls: {per_rank}. All ranks that still have batches have to \
         make the same ones, and no collective but forward and backward passes and gather_for_metrics can be \
         followed by a rank that is out of batches; make other calls after join_uneven_inputs"
    )]
    StrayedInJoin { per_rank: String },

    #[error("the ranks begin different join_uneven_inputs ({per_rank}); give all of them the same models and settings")]
    DifferentJoins { per_rank: String },

    #[error("join_uneven_inputs is called inside of join_uneven_inputs; give all models to one call")]
    NestedJoin,

    #[error(
        "ranks cannot divide {path}, because {obstacle}; say \"replicate\" for it in parallelize_plan, or use data parallelism"
    )]
    NotDivisible { path: String, obstacle: &'static str },

    #[error(
        "ranks that compute one model together have to give it the same input, and they do not: {per_rank}. Prepare the data loader, \
         which gives them the same rows"
    )]
    DifferentInputs { per_rank: String },

    #[error(
        "ranks that compute one model together have drawn different random numbers in a forward pass, so dropout behind that drops other \
         elements on each: between divided layers one rank has more features than another, and something has drawn a number for each of \
         them. Let the sizes divide evenly, or draw nothing there; where the plan divides tokens, say sequence_parallel for dropouts"
    )]
    DifferentDraws,

    #[error(
        "the ranks divide the layers of the model by different plans: rank {rank} has {} where rank 0 has {}. Give all ranks the same \
         parallelize_plan", there.trim_end(), on_main.trim_end()
    )]
    DifferentPlans { rank: usize, on_main: String, there: String },

    #[error(
        "the dropout {path} gets some tokens on each rank, and parallelize_plan does not name it: its mask would not be that of one process, and \
         ranks would draw different numbers. Add \"{path}\": \"sequence_parallel\" to the plan"
    )]
    UnnamedDropout { path: String },

    #[error(
        "ranks that compute one model together got different gradients of {parameter}, which each of them has whole (norms by \
         rank: {norms}), and no plan can name it, because it is of no layer: use it where each rank has all features and all tokens, or \
         make it a parameter of a layer (Linear, Embedding, LayerNorm, RMSNorm), which a plan can name"
    )]
    DifferentGradientsOfNoLayer { parameter: String, norms: String },

    #[error(
        "ranks that compute one model together got different gradients of {parameter}, which each of them has whole (norms by \
         rank: {norms}): each sees some features or tokens. Where it sees some heads between divided layers, say replicated_with_grad_allreduce for it; \
         where the plan divides tokens, sequence_parallel; or gather the output in front of it (colwise_gather_output)"
    )]
    DifferentGradients { parameter: String, norms: String },

    #[error(
        "ranks divide the tokens of [.., tokens, features], which a table makes of indices [batch, tokens], with a batch of 1 for one text, and a layer got {found:?}"
    )]
    NoTokens { found: Vec<i64> },

    #[error(
        "each rank would give some tokens of the model's output alone; the last layers have to give all of them: say \
         {{\"style\": \"sequence_parallel\", \"output_layouts\": \"Replicate\"}} for the last norm, or colwise_gather_output for the head"
    )]
    OutputOfTokens,

    #[error(
        "the plan divides tokens among ranks, and a layer got other ones than those that were divided: {per_rank}. Either what is in front \
         of it is not in parallelize_plan (embedding_rowwise, rowwise or sequence_parallel), or it gives all tokens already \
         (output_layouts), or it stands between layers that divide features, which have all tokens, and sequence_parallel is not its \
         style, or the program has put tokens into other places"
    )]
    TokensNotDivided { per_rank: String },

    #[error(
        "{feature} is not available with tensor parallelism, where ranks have slices of one model; use data parallelism alone"
    )]
    NotWithTensorParallel { feature: &'static str },

    #[error(
        "prepare_pippy divides whole models into blocks, and found {what}; give it a model with its weights in memory, and data parallelism alone"
    )]
    NotPipelined { what: String },

    #[error(
        "the input of a pipelined model has tensors with {sizes:?} rows (dim 0); all of them need the same number, and at least one, because \
         they go through the processes in chunks of rows"
    )]
    PipelinedRows { sizes: Vec<i64> },

    #[error(
        "`{parameter}` belongs to a block that rank {rank} computes, and is only there; ask the pipelined model on all ranks"
    )]
    OnAnotherStage { parameter: String, rank: usize },

    #[error("{feature} is not available where ranks divide sequences (cp_size, sp_size); use data parallelism alone")]
    NotWithDividedSequences { feature: &'static str },

    #[error(
        "ranks divide sequences (cp_size, sp_size), and this model does not compute attention by nn::ScaledDotProductAttention or \
         nn::MultiheadAttention, so that its tokens would not see those of other ranks; let it call the former in place of libtorch's \
         scaled_dot_product_attention, or leave cp_size and sp_size at 1"
    )]
    NoAttentionKernel,

    #[error(
        "ranks divide sequences (cp_size, sp_size), and {path} is a {kind}, which mixes tokens of which each rank has some; leave cp_size \
         and sp_size at 1"
    )]
    MixesTokens { path: String, kind: &'static str },

    #[error(
        "ranks divide sequences (cp_size, sp_size), and the attention of this model is computed by a kernel of the program's own; leave \
         it at DenseAttention, or cp_size and sp_size at 1"
    )]
    OwnAttentionKernel,

    #[error(
        "{call} is called outside of maybe_context_parallel, where nobody knows which tokens of a sequence this rank has; call it in the \
         closure, on what is to leave it"
    )]
    OutsideDividedSequences { call: &'static str },

    #[error(
        "{call} is called with tensors that differ between ranks which divide sequences ({per_rank}), so they are some tokens of each \
         rank, of which most would be dropped; make whole sequences of them by Accelerator::gather_sequence within maybe_context_parallel"
    )]
    DifferentSequences { call: &'static str, per_rank: String },

    #[error(
        "{call} is called within maybe_context_parallel, where this rank has some tokens of each sequence; call it before or after, \
         with whole sequences, such as Accelerator::gather_sequence makes of outputs"
    )]
    WithinDividedSequences { call: &'static str },

    #[error(
        "buffer_seq_dims has {found} dims for {wanted} tensors; give one for each tensor, or none if it is 1 for all"
    )]
    SequenceDims { found: usize, wanted: usize },

    #[error(
        "a tensor of {found:?} {}; buffers that are divided together have their tokens along the dims that buffer_seq_dims names, which \
         are 1 by default",
        match wanted {
            Some(wanted) => format!("does not have the {wanted} tokens of the first one along dim {dim}"),
            None => format!("has no dim {dim}"),
        }
    )]
    OtherSequence { found: Vec<i64>, dim: i64, wanted: Option<i64> },

    #[error(
        "{found} tokens are given where this rank has {wanted} of a sequence of {length}; within maybe_context_parallel a model takes the \
         buffers that the closure is given"
    )]
    OtherTokens { found: i64, wanted: i64, length: i64 },

    #[error(
        "attention has dropout_p {dropout_p}, which ranks along cp cannot drop alike in both passes; set the dropout of attention to 0, or \
         divide sequences by sp_size"
    )]
    DropoutInRing { dropout_p: f64 },

    #[error("local_sgd_steps is 0, but must be at least 1: the number of steps between two averages")]
    NoLocalSteps,
}

impl StateError {
    pub(crate) fn is_timeout(&self) -> bool {
        match self {
            Self::NobodyListens { .. } | Self::NotArrived { .. } => true,
            Self::Rendezvous { source } => source.is_timeout(),
            _ => false,
        }
    }

    pub(crate) fn is_peer_failure(&self) -> bool {
        matches!(self, Self::EndedBefore { .. })
    }
}

fn waiting_ranks(ranks: &[usize]) -> String {
    format!("{} {}", named_ranks(ranks), if ranks.len() == 1 { "waits" } else { "wait" })
}

fn other_objects(missing: &str, unexpected: &str) -> String {
    let lacking = (!missing.is_empty()).then(|| format!("there is none of {missing}"));
    let extra = (!unexpected.is_empty()).then(|| format!("{unexpected} was neither prepared nor registered"));
    lacking.into_iter().chain(extra).collect::<Vec<_>>().join(", and ")
}
