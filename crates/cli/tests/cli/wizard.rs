//! `accelerate config` with questions, over plain lines: whole conversations, and the files that come of them.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use accelerate_core::config::ConfigFile;
use rstest::rstest;

use crate::support::{Finished, accelerate};

/// Answers to the questions, one per line, in a folder of their own without GPUs.
fn conversation(folder: &Path, flags: &[&str], lines: &[u8]) -> Finished {
    let mut command = accelerate();
    command.args(["config"]).args(flags).current_dir(folder).env("HF_HOME", folder.join("hf"));
    command.env("CUDA_VISIBLE_DEVICES", "").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // Whoever stops reading has said enough.
    let _ = child.stdin.take().unwrap().write_all(lines);
    child.wait_with_output().unwrap().into()
}

/// `a, b, c` as lines; the file is then `run.yaml`.
fn lines(answers: &str) -> Vec<u8> {
    let answers = answers.split(',').map(|answer| format!("{}\n", answer.trim()));
    (answers.collect::<String>() + "run.yaml\n").into_bytes()
}

/// Every branch. An answer between two commas without a word is the default.
#[rstest]
#[case::one_process(
    ", , , , , , ",
    "compute_environment: LOCAL_MACHINE\ndistributed_type: \"NO\"\ndynamo_config:\n  dynamo_backend: \"no\"\nmixed_precision: \"no\"\n\
     use_cpu: false\n"
)]
#[case::one_process_on_its_cpu(
    "rust, 1, NO, yes, 2, no, NO, bf16",
    "compute_environment: LOCAL_MACHINE\ndistributed_type: \"NO\"\ndynamo_config:\n  dynamo_backend: \"no\"\nmixed_precision: bf16\n\
     num_cpu_threads_per_process: 2\nuse_cpu: true\n"
)]
#[case::several_machines(
    ", , multi_cpu, 2, 1, ai-1, , yes, , ts, , 4, yes, ",
    "compute_environment: LOCAL_MACHINE\ndebug: true\ndistributed_type: MULTI_CPU\ndynamo_config:\n  dynamo_backend: ts\n\
     enable_cpu_affinity: true\nmachine_rank: 1\nmain_process_ip: ai-1\nmain_process_port: 29500\nmixed_precision: \"no\"\n\
     num_machines: 2\nnum_processes: 4\nuse_cpu: true\n"
)]
#[case::gpus_of_another_machine(
    ", , 3, , , , , 8, , fp16",
    "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: MULTI_GPU\ndynamo_config:\n  dynamo_backend: \"no\"\n\
     enable_cpu_affinity: false\nmixed_precision: fp16\nnum_machines: 1\nnum_processes: 8\n"
)]
#[case::fsdp_2(
    ", , MULTI_CPU, , , , , FSDP, , no, , , encoder.layer.*, , yes, , 2, , ",
    "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: FSDP\ndynamo_config:\n  dynamo_backend: \"no\"\n\
     enable_cpu_affinity: false\nfsdp_config:\n  fsdp_activation_checkpointing: true\n  \
     fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_offload_params: false\n  fsdp_reshard_after_forward: false\n  \
     fsdp_state_dict_type: SHARDED_STATE_DICT\n  fsdp_transformer_layer_cls_to_wrap: \"encoder.layer.*\"\n  fsdp_version: 2\nmixed_precision: \"no\"\nnum_machines: 1\n\
     num_processes: 2\nuse_cpu: true\n"
)]
#[case::fsdp_1(
    ", , MULTI_CPU, , , , , FSDP, 1, HYBRID_SHARD, yes, 2, 1000, 2, , yes, no, , 4, , bf16",
    "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: FSDP\ndynamo_config:\n  dynamo_backend: \"no\"\n\
     enable_cpu_affinity: false\nfsdp_config:\n  fsdp_activation_checkpointing: false\n  \
     fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_backward_prefetch: BACKWARD_POST\n  fsdp_forward_prefetch: true\n  \
     fsdp_min_num_params: 1000\n  fsdp_offload_params: true\n  fsdp_sharding_strategy: HYBRID_SHARD\n  \
     fsdp_state_dict_type: FULL_STATE_DICT\n  fsdp_sync_module_states: false\n  fsdp_version: 1\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 4\nuse_cpu: true\n"
)]
#[case::fsdp_of_a_script_in_python(
    "python, , MULTI_GPU, , , , FSDP, 2, , , , BertLayer, FULL_STATE_DICT, no, , , 2, , ",
    "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: FSDP\ndynamo_config:\n  dynamo_backend: \"no\"\n\
     enable_cpu_affinity: false\nfsdp_config:\n  fsdp_activation_checkpointing: false\n  \
     fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_cpu_ram_efficient_loading: false\n  fsdp_offload_params: false\n  \
     fsdp_reshard_after_forward: true\n  fsdp_state_dict_type: FULL_STATE_DICT\n  \
     fsdp_transformer_layer_cls_to_wrap: BertLayer\n  fsdp_version: 2\nmixed_precision: \"no\"\nnum_machines: 1\n\
     num_processes: 2\n"
)]
#[case::deepspeed_file(
    ", , MULTI_CPU, , , , , DEEPSPEED, yes, ds.json, yes, 2, ",
    "compute_environment: LOCAL_MACHINE\ndebug: false\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n  \
     zero3_init_flag: true\ndistributed_type: DEEPSPEED\ndynamo_config:\n  dynamo_backend: \"no\"\nenable_cpu_affinity: false\n\
     num_machines: 1\nnum_processes: 2\nuse_cpu: true\n"
)]
#[case::deepspeed_on_disks(
    ", , MULTI_CPU, , , , , DEEPSPEED, , 3, nvme, nvme, /a, /b, 4, 0.5, yes, , 2, , ",
    "compute_environment: LOCAL_MACHINE\ndebug: false\ndeepspeed_config:\n  gradient_accumulation_steps: 4\n  \
     gradient_clipping: 0.5\n  offload_optimizer_device: nvme\n  offload_optimizer_nvme_path: /b\n  offload_param_device: nvme\n  \
     offload_param_nvme_path: /a\n  zero3_init_flag: false\n  zero3_save_16bit_model: true\n  zero_stage: 3\n\
     distributed_type: DEEPSPEED\ndynamo_config:\n  dynamo_backend: \"no\"\nenable_cpu_affinity: false\nmixed_precision: \"no\"\n\
     num_machines: 1\nnum_processes: 2\nuse_cpu: true\n"
)]
#[case::dynamo_of_a_script_in_python(
    "python, , NO, , inductor, yes, 3, yes, , yes, , ",
    "compute_environment: LOCAL_MACHINE\ndistributed_type: \"NO\"\ndynamo_config:\n  dynamo_backend: inductor\n  \
     dynamo_mode: max-autotune\n  dynamo_use_dynamic: false\n  dynamo_use_fullgraph: true\n  \
     dynamo_use_regional_compilation: true\nmixed_precision: \"no\"\nuse_cpu: false\n"
)]
#[case::axes_and_8_bits_of_a_script_in_python(
    "python, , MULTI_GPU, , , , FSDP, , , , , , , , , yes, , 2, 2, , , , fp8, te, yes, 1, , E4M3, , max",
    "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: FSDP\ndynamo_config:\n  dynamo_backend: \"no\"\n\
     enable_cpu_affinity: false\nfp8_config:\n  fp8_amax_compute_algo: max\n  fp8_amax_history_len: 1024\n  fp8_backend: TE\n  \
     fp8_format: E4M3\n  fp8_interval: 1\n  fp8_margin: 1\n  fp8_use_autocast_during_eval: true\nfsdp_config:\n  \
     fsdp_activation_checkpointing: false\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  \
     fsdp_cpu_ram_efficient_loading: true\n  fsdp_offload_params: false\n  fsdp_reshard_after_forward: true\n  \
     fsdp_state_dict_type: SHARDED_STATE_DICT\n  fsdp_version: 2\nmixed_precision: fp8\nnum_machines: 1\nnum_processes: 4\n\
     parallelism_config:\n  parallelism_config_cp_size: 1\n  parallelism_config_dp_replicate_size: 1\n  \
     parallelism_config_dp_shard_size: 2\n  parallelism_config_tp_size: 2\n"
)]
#[case::going_back(
    ", , MULTI_CPU, 2, back, BACK, NO, , , , ",
    "compute_environment: LOCAL_MACHINE\ndistributed_type: \"NO\"\ndynamo_config:\n  dynamo_backend: \"no\"\nmixed_precision: \"no\"\n\
     use_cpu: false\n"
)]
#[case::wrong_answers_and_questions(
    "ruby, ?, rust, AMAZON_SAGEMAKER, , TPU, NO, , , , fp7, fp16, back, bf16",
    "compute_environment: LOCAL_MACHINE\ndistributed_type: \"NO\"\ndynamo_config:\n  dynamo_backend: \"no\"\nmixed_precision: bf16\n\
     use_cpu: false\n"
)]
fn answers_become_a_file(#[case] answers: &str, #[case] wanted: &str) {
    let folder = tempfile::tempdir().unwrap();
    let ended = conversation(folder.path(), &[], &lines(answers));
    ended.expect(0, &["This is the configuration:", "the configuration is in run.yaml"]);
    let written = fs::read_to_string(folder.path().join("run.yaml")).unwrap();
    assert_eq!(written, wanted, "{}", ended.stderr);
    assert!(ConfigFile::read(&written, Path::new("run.yaml")).is_ok());
    assert_eq!(ended.stdout, "");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing but the file is left");
}

#[test]
fn a_wrong_answer_is_asked_again_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let answers = "back, , AMAZON_SAGEMAKER, , TPU, MULTI_NPU, MULTI_CPU, zero, , maybe, , , , MEGATRON_LM, , 0, 2, , fp8, msamp, , , , , /, ";
    let ended = conversation(folder.path(), &[], &lines(answers));
    ended.expect(
        0,
        &[
            "Not taken: this is the first question.",
            "Amazon SageMaker is not available; write a file for LOCAL_MACHINE",
            "libtorch has no TPUs without Python; choose CPUs or NVIDIA GPUs",
            "machine_type is \"MULTI_NPU\", but must be one of NO, MULTI_CPU, MULTI_GPU, or its number",
            "num_machines is \"zero\", but must be a whole number of at least 1",
            "debug is \"maybe\", but must be yes or no",
            "Not taken: sharding is MEGATRON_LM (your answer), which is refused: Megatron-LM is not available",
            "num_processes is \"0\", but must be a whole number of at least 1",
            "which is refused: MS-AMP is not available",
            "Not taken: / is a folder",
            "  Not available: TPU (libtorch has no TPUs",
            "  Not available: MSAMP (MS-AMP is not available, and nobody keeps it any more",
        ],
    );
}

/// With every answer of a machine that lacks something, what is left out is said with the reason.
#[test]
fn what_is_not_asked_is_said_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let ended = conversation(folder.path(), &[], &lines(", , MULTI_CPU, 2, , ai-1, , , , , , , , , run.yaml"));
    ended.expect(
        0,
        &[
            "(same_network is not asked: each machine must reach",
            "(rdzv_backend is not asked: machines meet at",
            "(mpirun_config.mpirun_hostfile is not asked: start the program with mpirun itself",
        ],
    );
    let ended = conversation(folder.path(), &[], &lines(", , NO, yes, 4, , , "));
    ended.expect(1, &["Python Accelerate does not read a file with num_cpu_threads_per_process", "overwrite"]);
}

/// What is not text, has no end or ends too early is an error that names the question, and leaves no file.
#[rstest]
#[case::nothing("", "the input ended at the question program (What kind of program")]
#[case::in_the_middle(
    ",,MULTI_CPU,2,1",
    "the input ended at the question main_process_ip (What is the address of machine 0?)"
)]
#[case::before_the_place(",,,,,,,", "the input ended at the question config_file (Where shall the file be written?)")]
fn an_input_that_ends_too_early_names_the_question(#[case] answers: &str, #[case] words: &str) {
    let folder = tempfile::tempdir().unwrap();
    let input: String = answers.split_terminator(',').map(|answer| format!("{answer}\n")).collect();
    conversation(folder.path(), &[], input.as_bytes()).expect(1, &[words, "nothing was written", "--yes"]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn answers_that_are_no_text_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let endless = vec![b'x'; 1 << 17];
    conversation(folder.path(), &[], &endless)
        .expect(1, &["the question program cannot be asked", "more than 65536 bytes"]);
    let long = [&[b'x'; 5000][..], b"\n"].concat();
    conversation(folder.path(), &[], &long).expect(1, &["at most 4096 bytes"]);
    conversation(folder.path(), &[], b"\xff\xfe\n").expect(1, &["the answer is no text (UTF-8)"]);
    conversation(folder.path(), &[], b"\0\n").expect(1, &["without control characters"]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn yes_takes_all_defaults_and_replaces_nothing_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let default = folder.path().join("hf/accelerate/default_config.yaml");
    conversation(folder.path(), &["--yes"], b"").expect(0, &["the configuration is in"]);
    let written = fs::read_to_string(&default).unwrap();
    assert!(written.contains("distributed_type: \"NO\"\n"), "{written}");
    fs::write(&default, "mixed_precision: bf16\n").unwrap();
    conversation(folder.path(), &["-y"], b"").expect(1, &["exists already", "--overwrite"]);
    assert_eq!(fs::read_to_string(&default).unwrap(), "mixed_precision: bf16\n");
    conversation(folder.path(), &["--yes", "--overwrite"], b"").expect(0, &[]);
    assert_eq!(fs::read_to_string(&default).unwrap(), written);
    conversation(folder.path(), &["--yes", "--config-file", "run.json"], b"").expect(0, &["run.json"]);
    let json = fs::read_to_string(folder.path().join("run.json")).unwrap();
    assert!(json.starts_with("{\n") && json.contains("\"distributed_type\": \"NO\""), "{json}");
}

#[test]
fn a_file_that_is_there_is_replaced_only_when_somebody_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.yaml");
    fs::write(&path, "debug: true\n").unwrap();
    let defaults = "\n".repeat(7);
    // No, and another place.
    let ended = conversation(
        folder.path(),
        &["--config_file", "run.yaml"],
        format!("{defaults}\nperhaps\nno\n\nback\nother.yaml\n").as_bytes(),
    );
    ended.expect(0, &["There is such a file already", "must be yes or no", "the configuration is in other.yaml"]);
    assert_eq!(fs::read_to_string(&path).unwrap(), "debug: true\n");
    conversation(folder.path(), &["--config_file", "run.yaml"], format!("{defaults}\nyes\n").as_bytes()).expect(0, &[]);
    assert_eq!(fs::read(&path).unwrap(), fs::read(folder.path().join("other.yaml")).unwrap());
    let ended =
        conversation(folder.path(), &["--config_file", "run.yaml", "--overwrite"], format!("{defaults}\n").as_bytes());
    ended.expect(0, &[]);
    assert!(!ended.stderr.contains("already"), "{}", ended.stderr);
}

#[test]
fn the_last_question_can_be_gone_back_from() {
    let folder = tempfile::tempdir().unwrap();
    let ended = conversation(folder.path(), &[], b"\n\n\n\n\n\n\nback\nbf16\nrun.yaml\n");
    ended.expect(0, &[]);
    let written = fs::read_to_string(folder.path().join("run.yaml")).unwrap();
    assert!(written.contains("mixed_precision: bf16\n"), "{written}");
}

/// A program that gives the same line again and again learns nothing from the reason, and is not asked for ever.
#[rstest]
#[case::yes("y\n", "3 answers in a row to the question program (What kind of program will be started?) were not taken")]
#[case::that_names_the_valid_ones("y\n", "but must be one of rust, python, or its number in the list")]
#[case::questions("?\n", "to the question program (What kind of program will be started?) were not taken")]
#[case::no_text("\u{0}\n", "without control characters")]
#[case::back("back\n", "this is the first question")]
#[case::back_and_forth("rust\nback\n", "after 1000 lines the question program")]
fn lines_without_end_end_with_an_error(#[case] line: &str, #[case] words: &str) {
    let folder = tempfile::tempdir().unwrap();
    conversation(folder.path(), &[], line.repeat(2000).as_bytes()).expect(1, &["nothing was written", words]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// The file stays however often somebody says neither yes nor no, or takes the default, which is no.
#[rstest]
#[case::neither("perhaps\n", "must be yes or no")]
#[case::defaults("\n", "after 1000 lines")]
fn a_file_is_not_asked_about_for_ever(#[case] line: &str, #[case] words: &str) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("run.yaml"), "debug: true\n").unwrap();
    let input = "\n".repeat(8) + &line.repeat(2000);
    conversation(folder.path(), &["--config_file", "run.yaml"], input.as_bytes()).expect(1, &[words]);
    assert_eq!(fs::read_to_string(folder.path().join("run.yaml")).unwrap(), "debug: true\n");
}

/// Somebody who names a class of Python for a program of this library hears at once what will come of it.
#[test]
fn classes_of_python_are_warned_of_before_the_file_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let answers = lines(", , MULTI_CPU, , , , , FSDP, , no, , , BertLayer, , yes, , 2, , ");
    conversation(folder.path(), &[], &answers)
        .expect(0, &["\"BertLayer\" looks like a class of Python", "encoder.layer.*"]);
}
