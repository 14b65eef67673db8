//! The questions of `accelerate config`: which ones come, in which order, and what comes of the answers.

use accelerate_core::config::{
    Answers, ConfigFile, FileFormat, Form, MachineFacts, PartialRunConfig, Question, Questionnaire, RunConfig, Sources,
};
use proptest::prelude::*;
use rstest::rstest;

const NO_GPU: MachineFacts = MachineFacts { num_gpus: 0, num_cores: 8 };
const FOUR_GPUS: MachineFacts = MachineFacts { num_gpus: 4, num_cores: 64 };

/// A conversation in which whatever is not in `said` gets the default: the questions in order, and the answers.
fn conversation(machine: MachineFacts, said: &[(&str, &str)]) -> (Vec<&'static str>, Questionnaire, Answers) {
    let questionnaire = Questionnaire::new(machine);
    let (mut asked, mut answers) = (Vec::new(), Answers::default());
    while let Some(question) = questionnaire.next(&answers).question {
        let text = said.iter().find(|(name, _)| *name == question.name).map_or("", |(_, text)| text);
        answers = questionnaire.answer(&answers, &question, text).unwrap();
        asked.push(question.name);
    }
    for (name, _) in said {
        assert!(asked.contains(name), "{name} was not asked: {asked:?}");
    }
    (asked, questionnaire, answers)
}

fn texts(questionnaire: &Questionnaire, answers: &Answers) -> Vec<String> {
    let said = questionnaire.settings(answers);
    said.into_iter().map(|(setting, text)| format!("{}={text}", setting.path)).collect()
}

/// The question of this name after `said`.
fn question(machine: MachineFacts, said: &[(&str, &str)], name: &str) -> (Questionnaire, Answers, Question) {
    let questionnaire = Questionnaire::new(machine);
    let mut answers = Answers::default();
    loop {
        let question = questionnaire.next(&answers).question.unwrap_or_else(|| panic!("{name} is not asked"));
        if question.name == name {
            return (questionnaire, answers, question);
        }
        let text = said.iter().find(|(name, _)| *name == question.name).map_or("", |(_, text)| text);
        answers = questionnaire.answer(&answers, &question, text).unwrap();
    }
}

/// Two replicas, each sharded over two processes.
const AXES: &str = "program=python machine_type=MULTI_GPU sharding=FSDP use_parallelism_config=yes \
                    parallelism_config.dp_replicate_size=2 parallelism_config.dp_shard_size=2";

const BEGIN: &str = "program compute_environment machine_type";

/// Every branch, in the order of Python Accelerate's questionnaire. `...` stands for the three questions at the beginning.
#[rstest]
#[case::one_process(NO_GPU, "", "... use_cpu dynamo_config.backend sharding mixed_precision")]
#[case::one_gpu(
    MachineFacts { num_gpus: 1, ..NO_GPU }, "",
    "... use_cpu dynamo_config.backend sharding gpu_ids mixed_precision"
)]
#[case::one_process_without_its_gpu(
    MachineFacts { num_gpus: 1, ..NO_GPU }, "use_cpu=yes",
    "... use_cpu num_cpu_threads_per_process dynamo_config.backend sharding mixed_precision"
)]
#[case::cpus(
    NO_GPU,
    "machine_type=MULTI_CPU",
    "... num_machines debug num_cpu_threads_per_process dynamo_config.backend sharding num_processes enable_cpu_affinity mixed_precision"
)]
#[case::one_of_several_cpus(
    NO_GPU,
    "machine_type=MULTI_CPU num_processes=1",
    "... num_machines debug num_cpu_threads_per_process dynamo_config.backend sharding num_processes mixed_precision"
)]
#[case::gpus(
    FOUR_GPUS,
    "",
    "... num_machines debug dynamo_config.backend sharding num_processes gpu_ids enable_cpu_affinity mixed_precision"
)]
#[case::gpus_of_another_machine(
    NO_GPU,
    "machine_type=MULTI_GPU num_processes=4",
    "... num_machines debug dynamo_config.backend sharding num_processes enable_cpu_affinity mixed_precision"
)]
#[case::machines(
    NO_GPU,
    "machine_type=MULTI_CPU num_machines=2 main_process_ip=10.0.0.1",
    "... num_machines machine_rank main_process_ip main_process_port debug num_cpu_threads_per_process dynamo_config.backend \
     sharding num_processes enable_cpu_affinity mixed_precision"
)]
#[case::dynamo_of_python(
    NO_GPU,
    "program=python dynamo_config.backend=inductor custom_dynamo=yes",
    "... use_cpu dynamo_config.backend custom_dynamo dynamo_config.mode dynamo_config.fullgraph dynamo_config.dynamic \
     dynamo_config.use_regional_compilation sharding mixed_precision"
)]
#[case::dynamo_of_python_as_it_is(
    NO_GPU,
    "program=python dynamo_config.backend=inductor",
    "... use_cpu dynamo_config.backend custom_dynamo sharding mixed_precision"
)]
#[case::deepspeed_file(
    FOUR_GPUS,
    "sharding=DEEPSPEED use_deepspeed_config=yes deepspeed_config.hf_ds_config=ds.json",
    "... num_machines debug dynamo_config.backend sharding use_deepspeed_config deepspeed_config.hf_ds_config \
     deepspeed_config.zero3_init_flag num_processes gpu_ids enable_cpu_affinity"
)]
#[case::deepspeed_stage_0(
    FOUR_GPUS,
    "sharding=DEEPSPEED deepspeed_config.zero_stage=0",
    "... num_machines debug dynamo_config.backend sharding use_deepspeed_config deepspeed_config.zero_stage \
     deepspeed_config.gradient_accumulation_steps deepspeed_config.gradient_clipping num_processes gpu_ids enable_cpu_affinity \
     mixed_precision"
)]
#[case::deepspeed_stage_2(
    FOUR_GPUS,
    "sharding=DEEPSPEED",
    "... num_machines debug dynamo_config.backend sharding use_deepspeed_config deepspeed_config.zero_stage \
     deepspeed_config.offload_optimizer_device deepspeed_config.gradient_accumulation_steps \
     deepspeed_config.gradient_clipping num_processes gpu_ids enable_cpu_affinity mixed_precision"
)]
#[case::deepspeed_stage_3_on_disks(
    FOUR_GPUS,
    "sharding=DEEPSPEED deepspeed_config.zero_stage=3 deepspeed_config.offload_optimizer_device=nvme \
     deepspeed_config.offload_param_device=nvme",
    "... num_machines debug dynamo_config.backend sharding use_deepspeed_config deepspeed_config.zero_stage \
     deepspeed_config.offload_optimizer_device deepspeed_config.offload_param_device deepspeed_config.offload_param_nvme_path \
     deepspeed_config.offload_optimizer_nvme_path deepspeed_config.gradient_accumulation_steps \
     deepspeed_config.gradient_clipping deepspeed_config.zero3_save_16bit_model deepspeed_config.zero3_init_flag num_processes \
     gpu_ids enable_cpu_affinity mixed_precision"
)]
#[case::deepspeed_of_python_on_one_process(
    NO_GPU,
    "program=python sharding=DEEPSPEED deepspeed_config.transformer_moe_cls_names=Experts",
    "... use_cpu dynamo_config.backend sharding use_deepspeed_config deepspeed_config.zero_stage \
     deepspeed_config.offload_optimizer_device deepspeed_config.gradient_accumulation_steps \
     deepspeed_config.gradient_clipping deepspeed_config.transformer_moe_cls_names num_processes mixed_precision"
)]
#[case::fsdp_2(
    NO_GPU,
    "machine_type=MULTI_CPU sharding=FSDP",
    "... num_machines debug num_cpu_threads_per_process dynamo_config.backend sharding fsdp_config.fsdp_version \
     fsdp_config.reshard_after_forward fsdp_config.cpu_offload fsdp_config.auto_wrap_policy \
     fsdp_config.transformer_cls_names_to_wrap fsdp_config.state_dict_type fsdp_config.activation_checkpointing \
     use_parallelism_config num_processes enable_cpu_affinity mixed_precision"
)]
#[case::fsdp_1(
    NO_GPU,
    "machine_type=MULTI_CPU sharding=FSDP fsdp_config.fsdp_version=1 fsdp_config.auto_wrap_policy=SIZE_BASED_WRAP",
    "... num_machines debug num_cpu_threads_per_process dynamo_config.backend sharding fsdp_config.fsdp_version \
     fsdp_config.sharding_strategy fsdp_config.cpu_offload fsdp_config.auto_wrap_policy fsdp_config.min_num_params \
     fsdp_config.backward_prefetch fsdp_config.state_dict_type fsdp_config.forward_prefetch \
     fsdp_config.sync_module_states fsdp_config.activation_checkpointing num_processes enable_cpu_affinity mixed_precision"
)]
#[case::fsdp_1_that_shards_nothing(
    NO_GPU,
    "machine_type=MULTI_CPU sharding=FSDP fsdp_config.fsdp_version=1 fsdp_config.sharding_strategy=NO_SHARD \
     fsdp_config.auto_wrap_policy=NO_WRAP",
    "... num_machines debug num_cpu_threads_per_process dynamo_config.backend sharding fsdp_config.fsdp_version \
     fsdp_config.sharding_strategy fsdp_config.auto_wrap_policy fsdp_config.activation_checkpointing num_processes \
     enable_cpu_affinity mixed_precision"
)]
#[case::fsdp_1_of_python(
    FOUR_GPUS,
    "program=python sharding=FSDP fsdp_config.fsdp_version=1 fsdp_config.cpu_ram_efficient_loading=no",
    "... num_machines debug dynamo_config.backend sharding fsdp_config.fsdp_version fsdp_config.sharding_strategy \
     fsdp_config.cpu_offload fsdp_config.auto_wrap_policy fsdp_config.transformer_cls_names_to_wrap \
     fsdp_config.backward_prefetch fsdp_config.state_dict_type fsdp_config.forward_prefetch fsdp_config.use_orig_params \
     fsdp_config.cpu_ram_efficient_loading fsdp_config.sync_module_states fsdp_config.activation_checkpointing num_processes \
     gpu_ids enable_cpu_affinity mixed_precision"
)]
#[case::fsdp_2_of_python(
    FOUR_GPUS,
    "program=python sharding=FSDP",
    "... num_machines debug dynamo_config.backend sharding fsdp_config.fsdp_version fsdp_config.reshard_after_forward \
     fsdp_config.cpu_offload fsdp_config.auto_wrap_policy fsdp_config.transformer_cls_names_to_wrap \
     fsdp_config.state_dict_type fsdp_config.cpu_ram_efficient_loading fsdp_config.activation_checkpointing \
     use_parallelism_config num_processes gpu_ids enable_cpu_affinity mixed_precision"
)]
#[case::axes_of_python(
    FOUR_GPUS,
    "program=python sharding=FSDP use_parallelism_config=yes parallelism_config.dp_shard_size=2 parallelism_config.cp_size=2",
    "... num_machines debug dynamo_config.backend sharding fsdp_config.fsdp_version fsdp_config.reshard_after_forward \
     fsdp_config.cpu_offload fsdp_config.auto_wrap_policy fsdp_config.transformer_cls_names_to_wrap \
     fsdp_config.state_dict_type fsdp_config.cpu_ram_efficient_loading fsdp_config.activation_checkpointing \
     use_parallelism_config parallelism_config.dp_replicate_size parallelism_config.dp_shard_size parallelism_config.tp_size \
     parallelism_config.cp_size parallelism_config.cp_comm_strategy num_processes gpu_ids enable_cpu_affinity mixed_precision"
)]
#[case::eight_bits_of_transformer_engine(
    NO_GPU,
    "program=python mixed_precision=fp8 fp8_config.backend=TE",
    "... use_cpu dynamo_config.backend sharding mixed_precision fp8_config.backend fp8_config.use_autocast_during_eval \
     fp8_config.margin fp8_config.interval fp8_config.fp8_format fp8_config.amax_history_len fp8_config.amax_compute_algo"
)]
#[case::eight_bits_of_torchao(
    NO_GPU,
    "program=python mixed_precision=fp8",
    "... use_cpu dynamo_config.backend sharding mixed_precision fp8_config.backend fp8_config.enable_fsdp_float8_all_gather \
     fp8_config.pad_inner_dim"
)]
#[case::eight_bits_of_ms_amp(
    NO_GPU,
    "program=python mixed_precision=fp8 fp8_config.backend=MSAMP",
    "... use_cpu dynamo_config.backend sharding mixed_precision fp8_config.backend fp8_config.opt_level"
)]
fn the_next_question_depends_on_the_answers_so_far(
    #[case] machine: MachineFacts,
    #[case] said: &str,
    #[case] wanted: &str,
) {
    let said: Vec<_> = said.split_whitespace().filter_map(|pair| pair.split_once('=')).collect();
    let (asked, ..) = conversation(machine, &said);
    assert_eq!(asked.join(" "), wanted.replace("...", BEGIN).split_whitespace().collect::<Vec<_>>().join(" "));
}

#[rstest]
#[case::nothing_but_defaults(
    NO_GPU,
    "",
    "compute_environment=LOCAL_MACHINE distributed_type=NO mixed_precision=no use_cpu=false dynamo_config.backend=no"
)]
#[case::gpus(
    FOUR_GPUS,
    "mixed_precision=bf16",
    "compute_environment=LOCAL_MACHINE distributed_type=MULTI_GPU mixed_precision=bf16 debug=false num_processes=4 num_machines=1 \
     gpu_ids=all enable_cpu_affinity=false dynamo_config.backend=no"
)]
#[case::gpus_of_two_machines(
    FOUR_GPUS,
    "num_machines=2 machine_rank=1 main_process_ip=ai-1",
    "compute_environment=LOCAL_MACHINE distributed_type=MULTI_GPU mixed_precision=no debug=false num_processes=8 num_machines=2 \
     machine_rank=1 main_process_ip=ai-1 main_process_port=29500 gpu_ids=all enable_cpu_affinity=false dynamo_config.backend=no"
)]
#[case::cpus(
    NO_GPU,
    "machine_type=MULTI_CPU sharding=FSDP",
    "compute_environment=LOCAL_MACHINE distributed_type=FSDP mixed_precision=no use_cpu=true debug=false num_processes=2 \
     num_machines=1 enable_cpu_affinity=false fsdp_config.fsdp_version=2 fsdp_config.reshard_after_forward=true \
     fsdp_config.auto_wrap_policy=TRANSFORMER_BASED_WRAP fsdp_config.activation_checkpointing=false \
     fsdp_config.cpu_offload=false fsdp_config.state_dict_type=SHARDED_STATE_DICT dynamo_config.backend=no"
)]
fn answers_become_settings(#[case] machine: MachineFacts, #[case] said: &str, #[case] wanted: &str) {
    let said: Vec<_> = said.split_whitespace().filter_map(|pair| pair.split_once('=')).collect();
    let (_, questionnaire, answers) = conversation(machine, &said);
    let wanted: Vec<_> = wanted.split_whitespace().collect();
    assert_eq!(texts(&questionnaire, &answers), wanted);
    assert!(questionnaire.resolve(&answers).is_ok());
}

/// What is wrong is said, with what to do instead; the same question then comes again.
#[rstest]
#[case(
    "",
    "compute_environment",
    "AMAZON_SAGEMAKER",
    "(your answers), which is refused: Amazon SageMaker is not available; write a file"
)]
#[case("", "compute_environment", "2", "must be one of LOCAL_MACHINE")]
#[case("", "machine_type", "TPU", "machine_type is TPU (your answer), which is refused: libtorch has no TPUs")]
#[case(
    "",
    "machine_type",
    "MULTI_NPU",
    "machine_type is \"MULTI_NPU\", but must be one of NO, MULTI_CPU, MULTI_GPU, or its number"
)]
#[case("", "machine_type", "0", "one of NO")]
#[case("", "machine_type", "5", "one of NO")]
#[case("machine_type=MULTI_CPU", "sharding", "MEGATRON_LM", "Megatron-LM is not available; choose FSDP or DEEPSPEED")]
#[case("machine_type=MULTI_CPU", "num_machines", "0", "at least 1")]
#[case("machine_type=MULTI_CPU", "num_machines", "two", "a whole number of at least 1")]
#[case("machine_type=MULTI_CPU num_machines=2", "machine_rank", "2", "less than the number of machines, 2")]
#[case("machine_type=MULTI_CPU num_machines=2", "main_process_ip", "", "there is no default; it is such as 10.0.0.1")]
#[case("machine_type=MULTI_CPU num_machines=2", "main_process_ip", "a b", "without spaces")]
#[case("machine_type=MULTI_CPU num_machines=2 main_process_ip=a", "main_process_port", "70000", "65535")]
#[case("machine_type=MULTI_CPU num_machines=2 main_process_ip=a", "main_process_port", "0", "more than 0")]
#[case(
    "machine_type=MULTI_CPU num_machines=2 main_process_ip=a",
    "num_processes",
    "3",
    "a multiple of the number of machines, 2"
)]
#[case("machine_type=MULTI_CPU", "num_cpu_threads_per_process", "99999999", "at most 65536")]
#[case("machine_type=MULTI_CPU", "debug", "perhaps", "yes or no")]
#[case("", "dynamo_config.backend", "inductor", "they need Python")]
#[case("", "dynamo_config.backend", "cudagraphs", "no NVIDIA GPU to capture graphs on")]
#[case("machine_type=MULTI_CPU", "dynamo_config.backend", "cudagraphs", "no NVIDIA GPU to capture graphs on")]
#[case(AXES, "parallelism_config.dp_shard_size", "1", "more than 1: replicas that nobody shards")]
#[case(
    "program=python machine_type=MULTI_GPU sharding=FSDP use_parallelism_config=yes parallelism_config.dp_shard_size=1",
    "parallelism_config.cp_size",
    "1",
    "more than 1: FSDP has nothing to shard over"
)]
#[case(AXES, "parallelism_config.tp_size", "0", "at least 1")]
#[case(AXES, "num_processes", "5", "but must be 4, which is the product of the sizes of all axes")]
#[case("program=python mixed_precision=fp8", "fp8_config.backend", "GPU", "one of AO, TE, MSAMP")]
#[case("mixed_precision=fp8", "fp8_config.backend", "MSAMP", "MS-AMP is not available")]
#[case("sharding=DEEPSPEED", "deepspeed_config.zero_stage", "4", "one of 0, 1, 2, 3")]
#[case("sharding=DEEPSPEED", "deepspeed_config.gradient_clipping", "-1", "at least 0")]
#[case("sharding=DEEPSPEED", "deepspeed_config.gradient_accumulation_steps", "0", "at least 1")]
#[case(
    "machine_type=MULTI_CPU sharding=FSDP fsdp_config.auto_wrap_policy=SIZE_BASED_WRAP",
    "fsdp_config.min_num_params",
    "0",
    "more than 0"
)]
#[case("machine_type=MULTI_GPU", "gpu_ids", "0,0", "different numbers")]
#[case("machine_type=MULTI_GPU", "gpu_ids", "first", "all, or different numbers")]
fn a_wrong_answer_gets_a_reason(#[case] said: &str, #[case] name: &str, #[case] text: &str, #[case] words: &str) {
    let machine = if name == "gpu_ids" { FOUR_GPUS } else { NO_GPU };
    let said: Vec<_> = said.split_whitespace().filter_map(|pair| pair.split_once('=')).collect();
    let (questionnaire, answers, question) = question(machine, &said, name);
    let error = questionnaire.answer(&answers, &question, text).unwrap_err();
    assert!(error.is_config() && error.to_string().contains(words), "{error}");
    assert_eq!(questionnaire.next(&answers).question, Some(question));
}

#[test]
fn answers_are_bounded_and_have_no_control_characters() {
    let (questionnaire, answers, question) =
        question(NO_GPU, &[("machine_type", "MULTI_CPU"), ("num_machines", "2")], "main_process_ip");
    for text in ["x".repeat(5000), "a\x07b".to_owned(), "a\nb".to_owned()] {
        let error = questionnaire.answer(&answers, &question, &text).unwrap_err().to_string();
        assert!(error.contains("at most 4096 bytes") && error.len() < 300, "{error}");
    }
}

/// A choice that contradicts the answers before is refused where it is made, and known to be before it is made.
#[test]
fn a_choice_that_contradicts_what_was_said_is_marked() {
    let said = [("sharding", "DEEPSPEED"), ("deepspeed_config.zero_stage", "3")];
    let (.., question) = question(NO_GPU, &said, "deepspeed_config.offload_param_device");
    let Form::Select { refused, .. } = question.form else { panic!("{question:?}") };
    assert!(matches!(&refused[..], [nvme] if nvme.why.contains("write \"nvme\" with its")), "{refused:?}");
    assert_eq!(refused[0].values, ["nvme"]);
    let questionnaire = Questionnaire::new(NO_GPU);
    let environment =
        questionnaire.answer(&Answers::default(), &questionnaire.next(&Answers::default()).question.unwrap(), "");
    let next = questionnaire.next(&environment.unwrap()).question.unwrap();
    let Form::Select { choices, refused, default } = next.form else { panic!("{next:?}") };
    assert_eq!((default, choices.len()), (0, 1));
    assert!(refused[0].why.starts_with("Amazon SageMaker is not available"), "{refused:?}");
}

/// Words that are refused for one reason are told together, and none of them is among those to choose from.
#[rstest]
#[case(NO_GPU, "", &["no", "eager", "ts", "aot_inductor"], 2)]
#[case(FOUR_GPUS, "", &["no", "eager", "ts", "aot_inductor", "cudagraphs"], 1)]
#[case(FOUR_GPUS, "machine_type=MULTI_CPU", &["no", "eager", "ts", "aot_inductor"], 2)]
fn compilers_that_cannot_be_had_are_told_with_the_reason(
    #[case] machine: MachineFacts,
    #[case] said: &str,
    #[case] wanted: &[&str],
    #[case] num_reasons: usize,
) {
    let said: Vec<_> = said.split_whitespace().filter_map(|pair| pair.split_once('=')).collect();
    let (.., question) = question(machine, &said, "dynamo_config.backend");
    let Form::Select { choices, refused, .. } = question.form else { panic!("{question:?}") };
    assert!(choices.iter().map(|choice| choice.value.as_str()).eq(wanted.iter().copied()), "{choices:?}");
    assert_eq!(refused.len(), num_reasons, "{refused:?}");
    assert!(refused.iter().any(|other| other.values.iter().any(|value| value == "inductor")), "{refused:?}");
}

/// Whoever goes back is asked the same question, and answers after it are gone.
#[test]
fn going_back_undoes_one_answer() {
    let (questionnaire, answers, question) = question(NO_GPU, &[("machine_type", "MULTI_CPU")], "debug");
    let more = questionnaire.answer(&answers, &question, "yes").unwrap();
    assert_eq!(more.get("debug"), Some("true"));
    let before = more.without_last().unwrap();
    assert_eq!((&before, before.get("debug")), (&answers, None));
    assert_eq!(questionnaire.next(&before).question, Some(question));
    assert_eq!(Answers::default().without_last(), None);
}

/// What is refused, or has no effect, is not asked but said, where the question would have come.
#[rstest]
#[case(
    "machine_type=MULTI_CPU num_machines=2 main_process_ip=a",
    "same_network rdzv_backend mpirun_config.mpirun_hostfile"
)]
#[case(
    "machine_type=MULTI_CPU num_machines=2 main_process_ip=a sharding=DEEPSPEED",
    "same_network rdzv_backend mpirun_config.mpirun_hostfile deepspeed_config.deepspeed_moe_layer_cls_names \
     deepspeed_config.deepspeed_multinode_launcher"
)]
#[case(
    "machine_type=MULTI_CPU sharding=FSDP",
    "mpirun_config.mpirun_hostfile fsdp_config.fsdp_cpu_ram_efficient_loading"
)]
#[case("program=python machine_type=MULTI_GPU sharding=FSDP", "")]
#[case("program=python mixed_precision=fp8 fp8_config.backend=TE", "fp8_config.fp8_override_linear_precision")]
fn what_is_not_asked_is_said(#[case] said: &str, #[case] wanted: &str) {
    let said: Vec<_> = said.split_whitespace().filter_map(|pair| pair.split_once('=')).collect();
    let (questionnaire, mut answers, mut passed) = (Questionnaire::new(NO_GPU), Answers::default(), Vec::new());
    loop {
        let next = questionnaire.next(&answers);
        passed.extend(next.passed);
        let Some(question) = next.question else { break };
        let text = said.iter().find(|(name, _)| *name == question.name).map_or("", |(_, text)| text);
        answers = questionnaire.answer(&answers, &question, text).unwrap();
    }
    let keys: Vec<_> = passed.iter().flat_map(|passed| &passed.keys).collect();
    assert_eq!(keys, wanted.split_whitespace().collect::<Vec<_>>());
    assert!(passed.iter().all(|passed| !passed.why.is_empty()));
}

/// Answers of every kind: words, places, defaults, numbers, and nonsense.
const TEXTS: [&str; 24] = [
    "",
    "",
    "",
    "1",
    "2",
    "3",
    "4",
    "0",
    "7",
    "yes",
    "no",
    "MULTI_CPU",
    "MULTI_GPU",
    "python",
    "FSDP",
    "DEEPSPEED",
    "nvme",
    "cpu",
    "SIZE_BASED_WRAP",
    "NO_SHARD",
    "bf16",
    "ds.json",
    "inductor",
    "none",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is answered, a default goes on, the end comes, and the file is one that is accepted.
    #[test]
    fn every_conversation_ends_in_a_file_that_is_accepted(
        picks in prop::collection::vec(0..TEXTS.len(), 60),
        num_gpus in 0_usize..9,
        num_cores in 0_usize..200,
    ) {
        let questionnaire = Questionnaire::new(MachineFacts { num_gpus, num_cores });
        let mut answers = Answers::default();
        let mut num_questions = 0;
        let mut picks = picks.into_iter();
        while let Some(question) = questionnaire.next(&answers).question {
            num_questions += 1;
            prop_assert!(num_questions < 60, "{answers:?}");
            prop_assert!(!question.why.is_empty() && !question.text.is_empty(), "{question:?}");
            let text = TEXTS[picks.next().unwrap_or(0)];
            let example = if matches!(question.form, Form::Text { default: None }) { "a" } else { "" };
            answers = match questionnaire.answer(&answers, &question, text) {
                Ok(answers) => answers,
                Err(reason) => {
                    prop_assert!(reason.is_config(), "{reason}");
                    questionnaire.answer(&answers, &question, example).map_err(|error| TestCaseError::fail(error.to_string()))?
                }
            };
        }
        let run = questionnaire.resolve(&answers).map_err(|error| TestCaseError::fail(error.to_string()))?;
        // What the run has is what was answered.
        for (setting, text) in questionnaire.settings(&answers) {
            let said = PartialRunConfig::of_texts(&[(setting, text)]).text(setting);
            prop_assert!(said.is_some(), "{}", setting.path);
        }
        prop_assert_eq!(run.cluster.num_machines, answers.get("num_machines").map_or(1, |text| text.parse().unwrap()));
    }
}

/// What a script in Python is told: the section of a file stands for the switch of the axes.
#[test]
fn axes_and_eight_bits_of_a_script_in_python_become_a_file_that_a_launch_takes() {
    let said = [
        ("program", "python"),
        ("machine_type", "MULTI_GPU"),
        ("sharding", "FSDP"),
        ("use_parallelism_config", "yes"),
        ("parallelism_config.tp_size", "2"),
        ("mixed_precision", "fp8"),
    ];
    let (_, questionnaire, answers) = conversation(NO_GPU, &said);
    let said = PartialRunConfig::of_texts(&questionnaire.settings(&answers));
    let text = ConfigFile::write(&said, FileFormat::Yaml);
    assert!(text.contains("  parallelism_config_tp_size: 2\n") && !text.contains("use_parallelism_config"), "{text}");
    let file = || Some(ConfigFile::read(&text, "run.yaml".as_ref()).unwrap());
    let run = RunConfig::resolve(Sources { file: file(), is_for_python: true, ..Default::default() }).unwrap();
    let variables = run.variables();
    for (name, wanted) in [
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true"),
        ("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2"),
        ("PARALLELISM_CONFIG_TP_SIZE", "2"),
        ("ACCELERATE_MIXED_PRECISION", "fp8"),
        ("ACCELERATE_FP8_BACKEND", "AO"),
    ] {
        assert_eq!(variables.get(name).map(String::as_str), Some(wanted), "{name} in {variables:?}");
    }
    assert_eq!(run.cluster.num_processes, Some(4));
    // A program of this library takes the same file.
    let run = RunConfig::resolve(Sources { file: file(), ..Default::default() }).unwrap();
    assert_eq!(run.fp8.backend, Some(accelerate_core::config::FP8BackendType::AO));
}

/// FSDP needs at least two processes to shard over, so without any of its own the default divides sequences.
#[test]
fn whoever_shards_over_one_process_divides_sequences_by_default() {
    let said = [
        ("machine_type", "MULTI_CPU"),
        ("sharding", "FSDP"),
        ("use_parallelism_config", "yes"),
        ("parallelism_config.dp_shard_size", "1"),
    ];
    let (_, questionnaire, answers) = conversation(NO_GPU, &said);
    assert_eq!(answers.get("parallelism_config.cp_size"), Some("2"));
    assert_eq!(questionnaire.resolve(&answers).unwrap().cluster.num_processes, Some(2));
}

/// Sizes of axes that two machines cannot start alike are not taken, and the default is one that they can.
#[test]
fn axes_fill_all_machines() {
    let questionnaire = Questionnaire::new(MachineFacts { num_gpus: 0, num_cores: 64 });
    let said = [
        ("machine_type", "MULTI_CPU"),
        ("num_machines", "6"),
        ("main_process_ip", "10.0.0.1"),
        ("sharding", "FSDP"),
        ("use_parallelism_config", "yes"),
        ("parallelism_config.dp_replicate_size", "2"),
        ("parallelism_config.dp_shard_size", "2"),
    ];
    let mut answers = Answers::default();
    while let Some(question) = questionnaire.next(&answers).question {
        if question.name == "parallelism_config.tp_size" {
            let reason = questionnaire.answer(&answers, &question, "1").unwrap_err().to_string();
            assert!(reason.contains("a multiple of 3, so that each of the 6 machines"), "{reason}");
        }
        let text = said.iter().find(|(name, _)| *name == question.name).map_or("", |(_, text)| text);
        answers = questionnaire.answer(&answers, &question, text).unwrap();
    }
    assert_eq!((answers.get("parallelism_config.tp_size"), answers.get("num_processes")), (Some("3"), Some("12")));
}
