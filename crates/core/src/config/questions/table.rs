//! The questions, in the order of Python Accelerate's questionnaire.
//!
//! What is not written here comes from the table of settings. Whoever makes a setting available that is refused today gets its
//! question without a change here.

use super::Known;
use super::known::{
    AXES, BACKEND, CONTEXT, CUSTOM_DYNAMO, DEEPSPEED_FILE, EFFICIENT_LOADING, FP8_BACKEND, FSDP_VERSION,
    HAS_DEEPSPEED_FILE, MACHINE_TYPE, MACHINE_TYPES, OPTIMIZER_DEVICE, PARAM_DEVICE, PRECISION, PROGRAM, REPLICATE,
    SHARD, SHARDING, STRATEGY, TENSOR, WRAP_POLICY, ZERO_STAGE, above_zero, at_most, context_size, gpu_ids, less_than,
    one_word, shard_size,
};
use super::row::{Row, own, setting};

/// All questions. Which of them come up, the conditions say.
pub(super) static ROWS: &[Row] = &[
    own(
        PROGRAM,
        "What kind of program will be started?",
        "A program of this library and a script in Python have other settings to choose from.",
    )
    .words(|_| vec![("rust", "a program of this library"), ("python", "a script with Hugging Face Accelerate")])
    .default(|_| "rust".to_owned()),
    setting(
        "compute_environment",
        "Where will the processes run?",
        "The file is for machines that you can log in to.",
    )
    .always_asked(),
    own(
        MACHINE_TYPE,
        "On what will the processes compute?",
        "It decides how many processes there are and how they talk to each other.",
    )
    .words(|_| MACHINE_TYPES.to_vec())
    .default(|known| if known.machine.num_gpus > 1 { "MULTI_GPU" } else { "NO" }.to_owned())
    .refuses(|_, text| (text == "TPU").then_some("libtorch has no TPUs without Python; choose CPUs or NVIDIA GPUs")),
    setting(
        "num_machines",
        "How many machines take part?",
        "With more than one, each of them has to know where rank 0 is.",
    )
    .when(Known::is_distributed),
    setting(
        "machine_rank",
        "Which of the machines is this one, counted from 0?",
        "The file of each machine has another number; --machine_rank goes before it.",
    )
    .when(Known::has_machines)
    .check(|known, text| less_than(text, known.number("num_machines"))),
    setting(
        "main_process_ip",
        "What is the address of machine 0?",
        "All machines find each other there, so all must be able to reach it.",
    )
    .when(Known::has_machines)
    .needed("10.0.0.1")
    .check(|_, text| one_word(text)),
    setting(
        "main_process_port",
        "Which port of machine 0 do they meet at?",
        "A firewall between the machines must let it through.",
    )
    .when(Known::has_machines)
    .default(|_| "29500".to_owned())
    .check(|_, text| above_zero(text)),
    setting(
        "same_network",
        "Are all machines in one local network?",
        "Machines in other networks meet by other means.",
    )
    .when(Known::has_machines),
    setting("rdzv_backend", "How do the machines find each other?", "Machines in other networks meet by other means.")
        .when(Known::has_machines),
    setting(
        "debug",
        "Shall every collective call be checked?",
        "It finds ranks that take different paths, and costs a little time at every call.",
    )
    .when(Known::is_distributed),
    setting(
        "use_cpu",
        "Shall the program stay on the CPU, even if there is a GPU?",
        "For comparisons, or where the GPU is somebody else's.",
    )
    .when(|known| known.is(MACHINE_TYPE, "NO")),
    setting(
        "mpirun_config.mpirun_hostfile",
        "Which file lists the hosts for mpirun?",
        "mpirun can start the processes of all machines.",
    )
    .when(Known::is_on_several_cpus),
    setting(
        "num_cpu_threads_per_process",
        "How many threads shall each process have?",
        "More threads than cores slow each other down; left empty, they share the cores evenly. \
            Python Accelerate's files have no such key.",
    )
    .when(Known::is_on_cpu)
    .check(|_, text| at_most(text, 1 << 16)),
    setting(
        BACKEND,
        "Which compiler do models go through?",
        "A compiled model runs faster, and takes time to compile.",
    )
    .refuses(Known::refuses_backend),
    own(CUSTOM_DYNAMO, "Do you want to choose how the compiler works?", "Its own defaults suit most models.")
        .confirm()
        .default(|_| "false".to_owned())
        .when(|known| known.is_for_python() && !known.is(BACKEND, "no")),
    setting("dynamo_config.mode", "How hard shall the compiler try?", "A compiler that tries harder takes longer.")
        .when(Known::has_custom_dynamo),
    setting(
        "dynamo_config.fullgraph",
        "Must each model be compiled as a whole?",
        "A model in pieces runs slower, and one that cannot be whole fails.",
    )
    .when(Known::has_custom_dynamo),
    setting(
        "dynamo_config.dynamic",
        "Shall one compiled model serve batches of all sizes?",
        "Batches of other sizes are compiled anew otherwise.",
    )
    .when(Known::has_custom_dynamo)
    .default(|_| "false".to_owned()),
    setting(
        "dynamo_config.use_regional_compilation",
        "Shall only the repeated blocks of a model be compiled?",
        "Blocks that repeat are compiled once.",
    )
    .when(Known::has_custom_dynamo),
    own(
        SHARDING,
        "How is the model divided over the processes?",
        "What does not fit into one process has to be divided; what fits is fastest whole.",
    )
    .words(Known::ways_to_shard)
    .default(|_| "NO".to_owned())
    .refuses(|_, text| (text == "MEGATRON_LM").then_some("Megatron-LM is not available; choose FSDP or DEEPSPEED")),
    own(
        HAS_DEEPSPEED_FILE,
        "Is there a DeepSpeed configuration in JSON?",
        "It then says everything that the next questions ask.",
    )
    .confirm()
    .default(|_| "false".to_owned())
    .when(Known::uses_deepspeed),
    setting(
        DEEPSPEED_FILE,
        "Which file is it?",
        "It is read when the program starts, from the folder in which that is done.",
    )
    .when(|known| known.is_yes(HAS_DEEPSPEED_FILE))
    .needed("ds_config.json"),
    setting(
        ZERO_STAGE,
        "What shall be sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too?",
        "The more is sharded, the less memory each process needs, and the more is sent.",
    )
    .when(Known::makes_deepspeed)
    .default(|_| "2".to_owned()),
    setting(
        OPTIMIZER_DEVICE,
        "Where shall the optimizer's state be between steps?",
        "The optimizer's state is the largest part, and is used once in a step.",
    )
    .when(|known| known.has_stage(1))
    .default(|_| "none".to_owned()),
    setting(
        PARAM_DEVICE,
        "Where shall parameters be while they are not used?",
        "It makes room for larger models, and every layer waits for its parameters.",
    )
    .when(|known| known.has_stage(3))
    .default(|_| "none".to_owned()),
    setting(
        "deepspeed_config.offload_param_nvme_path",
        "Which folder shall hold the parameters?",
        "It has to be on a fast disk of this machine.",
    )
    .when(|known| known.is(PARAM_DEVICE, "nvme"))
    .default(|_| "/nvme".to_owned()),
    setting(
        "deepspeed_config.offload_optimizer_nvme_path",
        "Which folder shall hold the optimizer's state?",
        "It has to be on a fast disk of this machine.",
    )
    .when(|known| known.is(OPTIMIZER_DEVICE, "nvme"))
    .default(|_| "/nvme".to_owned()),
    setting(
        "deepspeed_config.gradient_accumulation_steps",
        "How many micro-batches make one optimizer step?",
        "It makes batches larger than memory allows; the program must say the same number or none.",
    )
    .when(Known::makes_deepspeed)
    .default(|_| "1".to_owned()),
    setting(
        "deepspeed_config.gradient_clipping",
        "To which norm shall gradients be clipped (0 for none)?",
        "A single bad batch cannot throw the training off then.",
    )
    .when(Known::makes_deepspeed)
    .default(|_| "1.0".to_owned()),
    setting(
        "deepspeed_config.zero3_save_16bit_model",
        "Shall saved models have weights of 16 bits?",
        "Such files are half as large, and are enough to compute with.",
    )
    .when(|known| known.has_stage(3))
    .default(|_| "false".to_owned()),
    setting(
        "deepspeed_config.zero3_init_flag",
        "Does the program build its models without memory for their parameters?",
        "Models that fit into no process as a whole have to be built so.",
    )
    .when(|known| known.is_yes(HAS_DEEPSPEED_FILE) || known.has_stage(3))
    .default(|_| "false".to_owned()),
    setting(
        "deepspeed_config.transformer_moe_cls_names",
        "Which classes are layers with experts, separated by commas?",
        "DeepSpeed leaves the experts of these layers together; left empty, there are none.",
    )
    .when(Known::uses_deepspeed),
    setting(
        "deepspeed_config.multinode_launcher",
        "What starts the processes of the other machines?",
        "DeepSpeed can log in to the other machines.",
    )
    .when(Known::has_machines_of_deepspeed),
    setting(
        "deepspeed_config.hostfile",
        "Which file lists the machines?",
        "DeepSpeed starts a process on each slot of that list.",
    )
    .when(Known::has_machines_of_deepspeed),
    setting(
        "deepspeed_config.exclusion_filter",
        "Which machines of the list are left out?",
        "Left empty, none of them.",
    )
    .when(Known::has_machines_of_deepspeed),
    setting(
        "deepspeed_config.inclusion_filter",
        "Which machines of the list are used?",
        "Left empty, all of them.",
    )
    .when(Known::has_machines_of_deepspeed),
    setting(
        FSDP_VERSION,
        "Which version of FSDP?",
        "Version 2 asks less; in a program of this library both are the same engine.",
    )
    .when(Known::uses_fsdp)
    .words(|_| vec![("1", ""), ("2", "")])
    .default(|_| "2".to_owned()),
    setting(
        STRATEGY,
        "What shall be sharded?",
        "The more is sharded, the less memory each process needs, and the more is sent.",
    )
    .when(|known| known.is(FSDP_VERSION, "1"))
    .words(Known::strategies),
    setting(
        "fsdp_config.reshard_after_forward",
        "Shall gathered parameters be freed after the forward pass?",
        "Freed parameters make room, and are gathered twice in a step.",
    )
    .when(|known| known.is(FSDP_VERSION, "2"))
    .confirm()
    .default(|_| "true".to_owned()),
    setting(
        "fsdp_config.cpu_offload",
        "Shall shards be kept in the memory of the host?",
        "It makes room on the device, and every step waits for the host.",
    )
    .when(Known::uses_fsdp),
    setting(
        WRAP_POLICY,
        "What shall be gathered together?",
        "Smaller units need less memory at a time, and larger ones fewer messages.",
    )
    .when(Known::uses_fsdp)
    .default(|_| "TRANSFORMER_BASED_WRAP".to_owned()),
    setting(
        "fsdp_config.transformer_cls_names_to_wrap",
        "Which modules are the blocks, separated by commas?",
        "Left empty, the blocks are found by themselves. Programs of this library name paths, such as encoder.layer.*, and \
            scripts in Python name classes, such as BertLayer.",
    )
    .when(|known| known.is(WRAP_POLICY, "TRANSFORMER_BASED_WRAP")),
    setting(
        "fsdp_config.min_num_params",
        "From how many parameters on is a module a unit?",
        "Smaller units need less memory at a time, and larger ones fewer messages.",
    )
    .when(|known| known.is(WRAP_POLICY, "SIZE_BASED_WRAP"))
    .default(|_| "100000000".to_owned())
    .check(|_, text| above_zero(text)),
    setting(
        "fsdp_config.backward_prefetch",
        "When shall a backward pass ask for the next unit?",
        "What is asked for early has arrived when it is needed, and takes memory until then.",
    )
    .when(Known::gathers_in_version_1)
    .default(|_| "BACKWARD_PRE".to_owned()),
    setting(
        "fsdp_config.state_dict_type",
        "How shall states be saved?",
        "Shards are written by all processes at once; a full state can be loaded anywhere.",
    )
    .when(Known::has_parts)
    .words(Known::state_dict_types)
    .default(|known| if known.is(FSDP_VERSION, "1") { "FULL_STATE_DICT" } else { "SHARDED_STATE_DICT" }.to_owned()),
    setting(
        "fsdp_config.forward_prefetch",
        "Shall a forward pass ask for the next unit ahead?",
        "It helps where the processor is slow in asking, and takes memory.",
    )
    .when(Known::gathers_in_version_1),
    setting(
        "fsdp_config.use_orig_params",
        "Shall optimizers see the original parameters?",
        "Groups of parameters with settings of their own need it.",
    )
    .when(|known| known.is(FSDP_VERSION, "1")),
    setting(
        EFFICIENT_LOADING,
        "Shall only rank 0 load a pretrained model?",
        "Only one process then holds the whole model while it is loaded.",
    )
    .when(Known::uses_fsdp)
    .default(|_| "true".to_owned()),
    setting(
        "fsdp_config.sync_module_states",
        "Shall all ranks begin with the weights of rank 0?",
        "Models that were initialised at random differ from rank to rank otherwise.",
    )
    .when(|known| known.is(FSDP_VERSION, "1") && !known.is_yes(EFFICIENT_LOADING)),
    setting(
        "fsdp_config.activation_checkpointing",
        "Shall activations be computed again in the backward pass?",
        "It makes room for larger batches, and costs a third more time.",
    )
    .when(Known::uses_fsdp),
    setting(
        AXES,
        "Shall processes be laid out along several axes (ParallelismConfig)?",
        "Layers and sequences that are too large for one process can be divided, too.",
    )
    .when(|known| known.is(FSDP_VERSION, "2")),
    setting(REPLICATE, "How many replicas of the model shall there be?", "Replicas see other batches and average gradients.")
        .when(Known::has_axes)
        .check(|_, text| above_zero(text)),
    setting(SHARD, "How many processes shall shard each replica?", "FSDP needs at least two to shard over.")
        .when(Known::has_axes)
        .default(|known| known.default_num_processes().parse().unwrap_or(1).max(2_usize).to_string())
        .check(|known, text| shard_size(text, known.number(REPLICATE))),
    setting(TENSOR, "How many processes shall divide each layer?", "It helps where a single layer is too large.")
        .when(Known::has_axes)
        .default(|known| known.processes_for_machines().to_string())
        .check(|known, text| above_zero(text).and_then(|()| known.check_machines_of_axes(text))),
    setting(CONTEXT, "How many processes shall divide each sequence?", "It helps where sequences are very long.")
        .when(Known::has_axes)
        // Where nothing else is sharded over, sequences have to be divided.
        .default(|known| if known.number(SHARD) == 1 { "2" } else { "1" }.to_owned())
        .check(|known, text| context_size(text, known.number(SHARD))),
    setting(
        "parallelism_config.cp_comm_strategy",
        "How shall keys and values travel?",
        "An allgather sends all at once, and alltoall needs less memory.",
    )
    .when(|known| known.number(CONTEXT) > 1)
    .words(|_| vec![("allgather", ""), ("alltoall", "")]),
    setting(
        "num_processes",
        "How many processes shall be started, on all machines together?",
        "One for each GPU; on CPUs, processes share the cores.",
    )
    .when(|known| known.is_distributed() || known.uses_deepspeed())
    .default(Known::default_num_processes)
    .check(Known::check_num_processes),
    setting(
        "gpu_ids",
        "Which GPUs shall be used: all, or numbers such as 0,1?",
        "The others are left to other programs.",
    )
    .when(|known| known.machine.num_gpus > 0 && !known.is_on_cpu())
    .default(|_| "all".to_owned())
    .check(|_, text| gpu_ids(text)),
    setting(
        "enable_cpu_affinity",
        "Shall each process be kept on cores of its own?",
        "Memory that is near to a core is faster, so processes should stay where they are.",
    )
    .when(|known| known.number("num_processes") > 1),
    setting(
        PRECISION,
        "In which precision shall layers compute?",
        "16 bits take half the memory and are much faster on GPUs; bf16 needs no scaling of losses.",
    )
    .when(|known| !known.is_yes(HAS_DEEPSPEED_FILE)),
    setting(
        FP8_BACKEND,
        "Whose way to compute in FP8 shall be followed?",
        "A script in Python needs that library; a program of this library needs none.",
    )
    .when(|known| known.is(PRECISION, "fp8"))
    .words(|_| {
        vec![
            ("AO", "torchao: a scale is made of the tensor itself"),
            ("TE", "TransformerEngine: a scale is made of earlier passes"),
            ("MSAMP", "MS-AMP"),
        ]
    })
    .default(|_| "AO".to_owned()),
    setting(
        "fp8_config.recipe_name",
        "Which elements of a tensor shall have a scale together?",
        "With a scale for each row numbers are closer, and products slower.",
    )
    .when(|known| known.is(FP8_BACKEND, "AO") && !known.is_for_python()),
    setting(
        "fp8_config.use_autocast_during_eval",
        "Shall evaluation compute in FP8, too?",
        "Metrics are usually better without.",
    )
    .when(Known::uses_transformer_engine),
    setting("fp8_config.margin", "What margin shall scaling factors have?", "A larger one overflows less, and is coarser.")
        .when(Known::uses_transformer_engine),
    setting(
        "fp8_config.interval",
        "After how many steps is a scaling factor computed anew?",
        "Each time costs a little.",
    )
    .when(Known::uses_transformer_engine)
    .check(|_, text| above_zero(text)),
    setting(
        "fp8_config.fp8_format",
        "Which format shall FP8 numbers have?",
        "HYBRID has more digits forward (E4M3), and a larger range backward (E5M2).",
    )
    .when(Known::uses_transformer_engine)
    .words(|_| vec![("HYBRID", ""), ("E4M3", ""), ("E5M2", "")])
    .refuses(|known, text| {
        (text == "E5M2" && !known.is_for_python()).then_some("it has too few digits for weights; choose another one")
    }),
    setting(
        "fp8_config.amax_history_len",
        "Over how many steps are the largest values remembered?",
        "Scaling factors are made of them.",
    )
    .when(Known::uses_transformer_engine)
    .check(|_, text| above_zero(text)),
    setting(
        "fp8_config.amax_compute_algo",
        "Which of the remembered values counts?",
        "The largest is safer, and the most recent follows faster.",
    )
    .when(Known::uses_transformer_engine)
    .words(|_| vec![("most_recent", ""), ("max", "")]),
    setting(
        "fp8_config.override_linear_precision",
        "Which products of layers stay in more bits?",
        "The forward product, and those of the two gradients.",
    )
    .when(Known::uses_transformer_engine),
    setting(
        "fp8_config.opt_level",
        "Which level of MS-AMP?",
        "O2 keeps the optimizer's state in few bits, too.",
    )
    .when(|known| known.is(FP8_BACKEND, "MSAMP"))
    .words(|_| vec![("O1", ""), ("O2", "")]),
    setting(
        "fp8_config.enable_fsdp_float8_all_gather",
        "Shall FSDP gather parameters in FP8?",
        "Half as many bytes travel.",
    )
    .when(|known| known.is(FP8_BACKEND, "AO")),
    setting(
        "fp8_config.pad_inner_dim",
        "Shall inner dimensions be padded to multiples of 16?",
        "The kernels need it, and padding takes memory for a moment.",
    )
    .when(|known| known.is(FP8_BACKEND, "AO")),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::questions::row::setting_at;

    #[test]
    fn every_question_has_a_reason_and_every_path_a_setting() {
        for (place, row) in ROWS.iter().enumerate() {
            assert!(!row.why.is_empty() && row.why.ends_with('.'), "{}", row.name());
            assert!(row.text.ends_with('?'), "{} is asked by a question", row.name());
            assert!(ROWS[..place].iter().all(|before| before.name() != row.name()), "{} is there twice", row.name());
            let is_own = [PROGRAM, MACHINE_TYPE, SHARDING, CUSTOM_DYNAMO, HAS_DEEPSPEED_FILE].contains(&row.name());
            assert_eq!(setting_at(row.name()).is_none(), is_own, "{}", row.name());
        }
    }
}
