//! The launches that are compared.

/// One launch, by both launchers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    /// Flags, separated by blanks. `PORT` stands for a free port.
    pub(super) flags: &'static str,
    /// A configuration file, if there is one.
    pub(super) file: &'static str,
    pub(super) program: Program,
    /// What both launchers inherit besides.
    pub(super) inherited: &'static [(&'static str, &'static str)],
    /// Launchers at the same time, each with its own `--machine_rank`.
    pub(super) num_machines: usize,
    /// What the launcher here says where it refuses the launch, though the reference does not.
    pub(super) refused: Option<&'static str>,
    /// Also start the reference's launcher in a process that begins with nothing, and find the same.
    pub(super) is_proved: bool,
}

/// How the program is named.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Program {
    Script,
    Module,
    Executable,
}

const fn flags(flags: &'static str) -> Case {
    let (file, program, inherited) = ("", Program::Script, &[]);
    Case { flags, file, program, inherited, num_machines: 1, refused: None, is_proved: false }
}

impl Case {
    const fn file(self, file: &'static str) -> Self {
        Self { file, ..self }
    }

    const fn program(self, program: Program) -> Self {
        Self { program, ..self }
    }

    const fn inherits(self, inherited: &'static [(&'static str, &'static str)]) -> Self {
        Self { inherited, ..self }
    }

    const fn machines(self, num_machines: usize) -> Self {
        Self { num_machines, ..self }
    }

    const fn refused(self, words: &'static str) -> Self {
        Self { refused: Some(words), ..self }
    }

    const fn proved(self) -> Self {
        Self { is_proved: true, ..self }
    }

    /// One line that tells it from all others.
    pub(super) fn name(&self) -> String {
        let mut words = vec![self.flags.to_owned()];
        words.extend(self.inherited.iter().map(|(name, value)| format!("{name}={value}")));
        words.extend((!self.file.is_empty()).then(|| format!("file: {}", self.file.trim().replace('\n', "; "))));
        words.extend((self.program != Program::Script).then(|| format!("{:?}", self.program).to_lowercase()));
        words.retain(|word| !word.is_empty());
        words.join(" | ")
    }
}

pub(super) const CASES: &[Case] = &[
    // One process, and several.
    flags("--num_processes 1").proved(),
    flags("--cpu"),
    flags("--cpu --num_processes 1"),
    flags("--num_processes 2"),
    flags("--cpu --num_processes 4"),
    flags("--multi_gpu --num_processes 2").proved(),
    flags("--multi_gpu --num_processes 4"),
    flags("--num_processes 1 --mixed_precision no"),
    flags("--num_processes 1 --mixed_precision bf16"),
    flags("--multi_gpu --num_processes 2 --mixed_precision fp16"),
    flags("--num_processes 1 --gradient_accumulation_steps 4"),
    flags("--multi_gpu --num_processes 2 --gradient_accumulation_steps 4"),
    flags("--num_processes 1 --debug"),
    flags("--multi_gpu --num_processes 2 --debug"),
    flags("--num_processes 1 --num_cpu_threads_per_process 2"),
    flags("--multi_gpu --num_processes 2 --num_cpu_threads_per_process 2"),
    flags("--num_processes 1 --enable_cpu_affinity"),
    flags("--multi_gpu --num_processes 2 --enable_cpu_affinity"),
    flags("--num_processes 1 --gpu_ids 0"),
    flags("--multi_gpu --num_processes 2 --gpu_ids 0,1"),
    flags("--multi_gpu --num_processes 2 --main_process_port PORT"),
    flags("--multi_gpu --num_processes 2 --main_process_ip 127.0.0.1"),
    flags("--multi_gpu --num_processes 2 --num_machines 2 --main_process_ip 127.0.0.1 --main_process_port PORT").machines(2),
    flags("--use_fsdp --num_processes 4 --num_machines 2 --main_process_ip 127.0.0.1 --main_process_port PORT").machines(2),
    // How the program is named.
    flags("--num_processes 1").program(Program::Module),
    flags("--multi_gpu --num_processes 2").program(Program::Module),
    flags("--num_processes 1").program(Program::Executable),
    flags("--use_fsdp --num_processes 2").program(Program::Executable),
    flags("--use_fsdp --num_processes 1").program(Program::Executable),
    flags("--use_deepspeed --num_processes 2").program(Program::Executable),
    flags("--cpu --num_processes 1").program(Program::Executable),
    flags("--num_processes 1 --gradient_accumulation_steps 4").program(Program::Executable),
    // What is there already.
    flags("--multi_gpu --num_processes 2").inherits(&[("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")]),
    flags("--multi_gpu --num_processes 2").inherits(&[("OMP_NUM_THREADS", "1")]),
    flags("--cpu --num_processes 1").inherits(&[("KMP_AFFINITY", "none")]),
    flags("--num_processes 1").inherits(&[("ACCELERATE_MIXED_PRECISION", "bf16")]),
    flags("--use_fsdp --num_processes 2").inherits(&[("FSDP_SHARDING_STRATEGY", "NO_SHARD")]),
    flags("--num_processes 1").inherits(&[("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")]),
    // Compilers.
    flags("--num_processes 1 --dynamo_backend no"),
    flags("--num_processes 1 --dynamo_backend inductor"),
    flags("--num_processes 1 --dynamo_backend eager --dynamo_mode reduce-overhead"),
    flags("--multi_gpu --num_processes 2 --dynamo_backend inductor --dynamo_use_fullgraph --dynamo_use_dynamic"),
    flags("--num_processes 1 --dynamo_backend aot_eager --dynamo_use_regional_compilation"),
    // FSDP.
    flags("--use_fsdp --num_processes 1"),
    flags("--use_fsdp --num_processes 2").proved(),
    flags("--use_fsdp --num_processes 4"),
    flags("--use_fsdp --num_processes 2 --mixed_precision bf16 --debug"),
    flags("--use_fsdp --num_processes 2 --gradient_accumulation_steps 4"),
    flags("--use_fsdp --num_processes 2 --dynamo_backend inductor"),
    flags("--use_fsdp --num_processes 2 --fsdp_sharding_strategy FULL_SHARD"),
    flags("--use_fsdp --num_processes 2 --fsdp_sharding_strategy SHARD_GRAD_OP"),
    flags("--use_fsdp --num_processes 2 --fsdp_sharding_strategy NO_SHARD"),
    flags("--use_fsdp --num_processes 2 --fsdp_sharding_strategy HYBRID_SHARD"),
    flags("--use_fsdp --num_processes 2 --fsdp_sharding_strategy HYBRID_SHARD_ZERO2"),
    flags("--use_fsdp --num_processes 2 --fsdp_sharding_strategy 2"),
    flags("--use_fsdp --num_processes 2 --fsdp_reshard_after_forward SHARD_GRAD_OP"),
    flags("--use_fsdp --num_processes 2 --fsdp_version 2"),
    flags("--use_fsdp --num_processes 2 --fsdp_version 2 --fsdp_reshard_after_forward false"),
    flags("--use_fsdp --num_processes 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"),
    flags(
        "--use_fsdp --num_processes 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \
         --fsdp_transformer_layer_cls_to_wrap BertLayer,Other",
    ),
    flags("--use_fsdp --num_processes 2 --fsdp_auto_wrap_policy SIZE_BASED_WRAP"),
    flags("--use_fsdp --num_processes 2 --fsdp_auto_wrap_policy SIZE_BASED_WRAP --fsdp_min_num_params 2000"),
    flags("--use_fsdp --num_processes 2 --fsdp_auto_wrap_policy NO_WRAP"),
    flags("--use_fsdp --num_processes 2 --fsdp_offload_params true"),
    flags("--use_fsdp --num_processes 2 --fsdp_backward_prefetch BACKWARD_PRE"),
    flags("--use_fsdp --num_processes 2 --fsdp_backward_prefetch BACKWARD_POST"),
    flags("--use_fsdp --num_processes 2 --fsdp_backward_prefetch NO_PREFETCH"),
    flags("--use_fsdp --num_processes 2 --fsdp_forward_prefetch true"),
    flags("--use_fsdp --num_processes 2 --fsdp_state_dict_type FULL_STATE_DICT"),
    flags("--use_fsdp --num_processes 2 --fsdp_state_dict_type SHARDED_STATE_DICT"),
    flags("--use_fsdp --num_processes 2 --fsdp_state_dict_type LOCAL_STATE_DICT"),
    flags("--use_fsdp --num_processes 2 --fsdp_use_orig_params false"),
    flags("--use_fsdp --num_processes 2 --fsdp_cpu_ram_efficient_loading false"),
    flags("--use_fsdp --num_processes 2 --fsdp_cpu_ram_efficient_loading false --fsdp_sync_module_states false"),
    flags("--use_fsdp --num_processes 2 --fsdp_activation_checkpointing true"),
    flags(
        "--use_fsdp --num_processes 2 --fsdp_activation_checkpointing true \
         --fsdp_activation_checkpointing_offload true",
    ),
    // DeepSpeed.
    flags("--use_deepspeed --num_processes 1"),
    flags("--use_deepspeed --num_processes 2"),
    flags("--use_deepspeed --num_processes 2 --mixed_precision bf16 --debug"),
    flags("--use_deepspeed --num_processes 2").program(Program::Module),
    flags("--use_deepspeed --num_processes 2 --zero_stage 0"),
    flags("--use_deepspeed --num_processes 2 --zero_stage 1"),
    flags("--use_deepspeed --num_processes 2 --zero_stage 3 --gradient_accumulation_steps 4"),
    flags("--use_deepspeed --num_processes 2 --gradient_clipping 1.0"),
    flags("--use_deepspeed --num_processes 2 --gradient_clipping 0.5"),
    flags("--use_deepspeed --num_processes 2 --offload_optimizer_device cpu"),
    flags("--use_deepspeed --num_processes 2 --zero_stage 3 --offload_optimizer_device cpu --offload_param_device cpu"),
    flags(
        "--use_deepspeed --num_processes 2 --zero_stage 3 --offload_optimizer_device nvme \
         --offload_optimizer_nvme_path /fast --offload_param_device nvme --offload_param_nvme_path /fast",
    ),
    flags("--use_deepspeed --num_processes 2 --zero_stage 3 --zero3_init_flag true"),
    flags("--use_deepspeed --num_processes 2 --zero_stage 3 --zero3_save_16bit_model true"),
    flags("--use_deepspeed --num_processes 2 --deepspeed_config_file zero.json"),
    flags("--use_deepspeed --num_processes 2 --zero_stage 3 --deepspeed_moe_layer_cls_names MixtralSparseMoeBlock"),
    flags("--use_deepspeed --num_processes 2 --dynamo_backend inductor"),
    // Files.
    flags("").file("distributed_type: 'NO'\nnum_processes: 1\nmixed_precision: bf16\n"),
    flags("").file("distributed_type: 'NO'\nnum_processes: 1\nuse_cpu: true\n"),
    flags("").file("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: fp16\ndebug: true\n"),
    flags("").file("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n"),
    flags("").file("distributed_type: MULTI_GPU\nnum_processes: 2\ndynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_use_dynamic: true\n"),
    flags("").file(
        "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: bf16\nfsdp_config:\n  \
         fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_backward_prefetch: BACKWARD_PRE\n  \
         fsdp_cpu_ram_efficient_loading: true\n  fsdp_forward_prefetch: false\n  fsdp_offload_params: false\n  \
         fsdp_sharding_strategy: FULL_SHARD\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n  \
         fsdp_sync_module_states: true\n  fsdp_use_orig_params: false\n",
    ),
    flags("").file(
        "distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\nfsdp_config:\n  fsdp_version: 2\n  \
         fsdp_reshard_after_forward: false\n  fsdp_ignored_modules: head\n",
    ),
    flags("").file(
        "distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: bf16\ndeepspeed_config:\n  \
         gradient_accumulation_steps: 2\n  gradient_clipping: 1.0\n  offload_optimizer_device: cpu\n  \
         offload_param_device: none\n  zero3_init_flag: false\n  zero_stage: 2\n",
    ),
    flags("--zero_stage 3").file("distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 2\n"),
    flags("").file("distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: zero.json\n"),
    // What several places say at once.
    flags("--multi_gpu").file("distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 1\n"),
    flags("--use_fsdp").file("distributed_type: MULTI_GPU\nnum_processes: 2\n"),
    flags("").file("distributed_type: MULTI_GPU\nnum_processes: 1\n"),
    flags("--multi_gpu --num_processes 2").file("distributed_type: 'NO'\nnum_processes: -1\nfp16: false\n"),
    flags("--num_processes 1 --num_processes 2 --multi_gpu"),
    flags("--num_processes 1").inherits(&[("WORLD_SIZE", "1")]),
    flags("--num_processes 2 --multi_gpu").inherits(&[("WORLD_SIZE", "1")]),
    flags("--mixed_precision no").file("distributed_type: 'NO'\nnum_processes: 1\nmixed_precision: bf16\n"),
    // What is told here, and goes without a word there.
    flags("--num_processes 1 --fsdp_version 2").refused("--use_fsdp"),
    flags("--num_processes 1 --zero_stage 2").refused("--use_deepspeed"),
    flags("").file("distributed_type: 'NO'\nnum_processes: 2\n").refused("distributed_type"),
];
