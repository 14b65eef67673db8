//! Names that somebody else has chosen do not steer the terminal, and do not look like lines of this command.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rstest::rstest;
use serde_json::json;

use crate::checkpoint::folders::{Tensor, Values, write_checkpoint};
use crate::support::{accelerate, finished};

/// It would clear the screen, and begin a line of its own.
const HOSTILE: &str = "x\u{1b}[2J\nforged: error: y";
const SHOWN: &str = "x\\u{1b}[2J\\nforged: error: y";
/// As a word of a command that a shell reads.
const QUOTED: &str = "$'x\\x1b[2J\\x0aforged: error: y'";

#[track_caller]
fn check(folder: &Path, words: &[&str]) {
    let mut command = accelerate();
    command.args(words.iter().map(|word| word.replace("{}", HOSTILE))).current_dir(folder);
    // As at a terminal: nothing is filtered out of what is printed.
    command.env("CLICOLOR_FORCE", "1");
    let ended = finished(command);
    for text in [&ended.stdout, &ended.stderr] {
        assert!(!text.contains("\u{1b}[2J") && !text.contains("\nforged"), "{words:?}: {text}");
    }
    let all = ended.stdout.clone() + &ended.stderr;
    assert!(all.contains(SHOWN) || all.contains(QUOTED), "{words:?}: {ended:?}");
}

#[rstest]
#[case::program(&["launch", "{}"])]
#[case::program_by_path(&["launch", "./{}"])]
#[case::script(&["launch", "{}.py"])]
#[case::settings(&["launch", "--config_file", "{}", "true"])]
#[case::value(&["launch", "--mixed_precision", "{}", "true"])]
#[case::value_of_a_flag_with_effect(&["launch", "--use_deepspeed", "--deepspeed_config_file", "{}", "true"])]
#[case::flag(&["launch", "--{}", "true"])]
#[case::refused_flag(&["launch", "--megatron_lm_{}", "true"])]
#[case::seconds(&["launch", "--grace_period", "{}", "true"])]
#[case::plan(&["launch", "--dry_run", "--num_processes", "1", "true", "{}"])]
#[case::folder_of_output(&["launch", "--dry_run", "--num_processes", "1", "--log_dir", "{}", "--tee", "3", "true"])]
#[case::subcommand(&["{}"])]
#[case::checks(&["test", "--config_file", "{}"])]
#[case::program_of_the_test(&["test", "--program", "./{}"])]
#[case::env(&["env", "--config_file", "{}"])]
#[case::validate(&["config", "validate", "{}"])]
#[case::explain(&["config", "explain", "--config_file", "{}"])]
#[case::explain_a_file_as_a_program(&["config", "explain", "{}.yaml"])]
#[case::update(&["config", "update", "--config_file", "{}"])]
#[case::default(&["config", "default", "--config_file", "{}"])]
#[case::to_fsdp2(&["to-fsdp2", "--overwrite", "--config_file", "{}"])]
#[case::tpu(&["tpu-config", "--config_file", "{}"])]
#[case::commands_of_a_tpu(&["tpu-config", "--tpu_name", "a", "--tpu_zone", "b", "--command_file", "{}"])]
#[case::merge(&["merge-weights", "{}", "merged"])]
#[case::ls(&["checkpoint", "ls", "{}"])]
#[case::verify(&["checkpoint", "verify", "{}"])]
#[case::diff(&["checkpoint", "diff", "{}", "b"])]
#[case::tolerance(&["checkpoint", "diff", "a", "b", "--tolerance", "{}"])]
#[case::estimate(&["estimate-memory", "./{}"])]
#[case::memory(&["estimate-memory", "a", "--plan", "--memory", "{}"])]
#[case::new(&["new", "{}"])]
#[case::setup(&["setup", "--folder", "/proc/{}"])]
#[case::completions(&["completions", "{}"])]
#[case::man(&["man", "--out", "/proc/{}"])]
fn names_of_the_command_line_stay_in_their_line(#[case] words: &[&str]) {
    check(tempfile::tempdir().unwrap().path(), words);
}

/// Keys and values of files are other people's, too.
#[rstest]
#[case::key(r#"{"x\u001b[2J\nforged: error: y": 1}"#, &["config", "validate", "run.json"])]
#[case::key_of_a_launch(r#"{"x\u001b[2J\nforged: error: y": 1}"#, &["launch", "--config_file", "run.json", "true"])]
#[case::key_twice(
    r#"{"x\u001b[2J\nforged: error: y": 1, "x\u001b[2J\nforged: error: y": 1}"#,
    &["config", "validate", "run.json"]
)]
#[case::value(r#"{"mixed_precision": "x\u001b[2J\nforged: error: y"}"#, &["config", "validate", "run.json"])]
#[case::without_effect(
    r#"{"fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "x\u001b[2J\nforged: error: y"}}"#,
    &["config", "validate", "run.json"]
)]
#[case::explained(
    r#"{"fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "x\u001b[2J\nforged: error: y"}}"#,
    &["config", "explain", "--config_file", "run.json"]
)]
#[case::told_before_a_launch(
    r#"{"fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "x\u001b[2J\nforged: error: y"}}"#,
    &["launch", "--config_file", "run.json", "--num_processes", "1", "true"]
)]
#[case::changed(
    r#"{"main_training_function": "x\u001b[2J\nforged: error: y", "fp16": "x\u001b[2J\nforged: error: y"}"#,
    &["config", "validate", "run.json"]
)]
fn words_of_files_stay_in_their_line(#[case] text: &str, #[case] words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("run.json"), text).unwrap();
    check(folder.path(), words);
}

#[test]
fn what_a_message_says_of_a_file_that_is_there_stays_in_its_line() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(HOSTILE), "fp16: true\n").unwrap();
    for words in [&["config", "validate", "{}"][..], &["config", "update", "--config_file", "{}"]] {
        check(folder.path(), words);
    }
    fs::create_dir(folder.path().join("weights")).unwrap();
    fs::write(folder.path().join("weights").join(format!("{HOSTILE}.safetensors")), "").unwrap();
    check(folder.path(), &["merge-weights", "weights", "merged"]);
}

#[rstest]
#[case::program("launch nosuch", 127, "the program nosuch was not found in PATH; name a binary by its path")]
#[case::no_file("config validate none.yaml", 1, "there is no configuration file none.yaml; name one that exists")]
#[case::no_utf8("config validate latin.yaml", 1, "line 2 has bytes that are no text in UTF-8; write the file in")]
#[case::no_utf8_of_deepspeed(
    "launch --use_deepspeed --deepspeed_config_file latin.yaml true",
    2,
    "line 2 has bytes that are no text in UTF-8; write the file in"
)]
#[case::no_checkpoint("merge-weights none merged", 1, "there is no folder none; name the folder of a checkpoint")]
fn what_was_wanted_and_the_cure_are_said(#[case] line: &str, #[case] code: i32, #[case] words: &str) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("latin.yaml"), b"debug: true\nmain_process_ip: caf\xe9\n").unwrap();
    let mut command = accelerate();
    command.args(line.split_whitespace()).current_dir(folder.path());
    let ended = finished(command);
    ended.expect(code, &[words]);
    assert!(!ended.stderr.contains("os error"), "{}", ended.stderr);
}

/// What is no UTF-8 cannot be in JSON, and is not lost without a word.
#[test]
fn a_plan_says_what_is_no_utf8() {
    let other = std::ffi::OsStr::from_bytes(b"caf\xe9");
    let folder = tempfile::tempdir().unwrap();
    let own = folder.path().join(other);
    fs::create_dir(&own).unwrap();
    let plan = |flags: &[&str]| {
        let mut command = accelerate();
        command.args(["launch", "--dry_run", "--num_processes", "1"]).args(flags).args(["--log_dir", "logs"]);
        // Where files go is made absolute, by a folder that has no name in UTF-8.
        command.args(["--tee", "1", "true"]).args([other, "caf\u{e9}".as_ref()]).current_dir(&own);
        finished(command)
    };
    let found = plan(&["--json"]);
    found.expect(0, &[]);
    let json: serde_json::Value = serde_json::from_str(&found.stdout).unwrap();
    assert_eq!(json["command"][1], "caf\\xe9");
    assert_eq!(json["command"][2], "caf\u{e9}");
    assert_eq!(json["not_utf8"][0], "command[1]");
    let places = json["not_utf8"].as_array().unwrap();
    assert!(places.iter().any(|place| place == "ranks[0].log_files[0]"), "{places:?}");
    let text = plan(&[]).stdout;
    assert!(text.contains(" $'caf\\xe9' 'caf\u{e9}'\n"), "{text}");
}

/// Weights of two kinds in one folder, and files of which nothing says that they belong together.
#[test]
fn of_two_kinds_of_weights_the_one_that_is_merged_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let weights = crate::checkpoint::weight_file(&[("a", safetensors::Dtype::F32, vec![1], vec![0; 4])]);
    fs::write(folder.path().join("model.safetensors"), &weights).unwrap();
    fs::write(folder.path().join("pytorch_model.bin"), "anything").unwrap();
    let merge = |words: &[&str]| {
        let mut command = accelerate();
        command.args([&["merge-weights"], words].concat()).current_dir(folder.path());
        finished(command)
    };
    merge(&[".", "merged"]).expect(
        0,
        &["these are the weights of model.safetensors; there are others, which were not looked at: pytorch_model.bin"],
    );
    merge(&[".", "none", "--max_shard_size", "0"]).expect(2, &["0 bytes have no room for anything"]);

    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    fs::remove_file(folder.path().join("pytorch_model.bin")).unwrap();
    for name in ["one.safetensors", "two.safetensors"] {
        fs::write(folder.path().join(name), &weights).unwrap();
    }
    merge(&[".", "none"]).expect(1, &["no index that says which belong together: one.safetensors, two.safetensors"]);

    let two =
        [("a", safetensors::Dtype::F32, vec![1], vec![0; 4]), ("b", safetensors::Dtype::F32, vec![1], vec![0; 4])];
    fs::create_dir(folder.path().join("whole")).unwrap();
    fs::write(folder.path().join("whole/model.safetensors"), crate::checkpoint::weight_file(&two)).unwrap();
    let words = "are in 2 files of shards, which model.safetensors.index.json lists";
    merge(&["whole", "shards", "--max_shard_size", "4"]).expect(0, &[words]);
}

/// A value that is no UTF-8 is refused by name, and a variable that is none is told of.
#[test]
fn settings_that_are_no_utf8_are_not_lost_without_a_word() {
    let other = std::ffi::OsStr::from_bytes(b"caf\xe9");
    let mut command = accelerate();
    command.args(["launch", "--num_processes", "1", "--log_dir"]).arg(other).arg("true");
    finished(command).expect(2, &["--log_dir is caf\\xe9, which is no UTF-8"]);
    let mut command = accelerate();
    command.args(["launch", "--num_processes", "1", "true"]).env("ACCELERATE_MIXED_PRECISION", other);
    finished(command)
        .expect(0, &["the variable ACCELERATE_MIXED_PRECISION is caf\\xe9, which is no UTF-8 and has no effect"]);
}

/// Both spellings say the same of a number that cannot be.
#[rstest]
#[case("launch", "--num_processes", "-1")]
#[case("launch", "--log_dir", "-1")]
#[case("launch", "--grace_period", "-0.5")]
#[case("launch", "--config_file", "-1")]
#[case("estimate-memory", "--memory", "-1")]
#[case("estimate-memory", "--batch_size", "-1")]
#[case("estimate-memory", "--zero_stage", "-1")]
#[case("estimate-memory", "--flops", "-1")]
#[case("merge-weights", "--max_shard_size", "-1")]
fn a_negative_number_is_a_value_in_both_spellings(#[case] command: &str, #[case] flag: &str, #[case] number: &str) {
    let folder = tempfile::tempdir().unwrap();
    let ended = |words: &[&str]| {
        let mut accelerate = accelerate();
        accelerate.arg(command).args(words).args(["nowhere", "nothing"]).current_dir(folder.path());
        finished(accelerate)
    };
    let [apart, joint] = [ended(&[flag, number]), ended(&[&format!("{flag}={number}")])];
    assert_eq!((apart.code, &apart.stderr), (joint.code, &joint.stderr));
    assert!(!apart.stderr.contains("unexpected argument"), "{}", apart.stderr);
}

/// Nobody means a plan with such numbers.
#[rstest]
#[case(
    "estimate-memory m.safetensors --plan --num_processes 99999999999",
    2,
    "--num_processes is \"99999999999\", but must be a whole number from 1 to 1048576"
)]
#[case("estimate-memory m.safetensors --plan --memory 0", 2, "0 bytes have no room for anything")]
fn plans_that_make_no_sense_are_refused(#[case] line: &str, #[case] code: i32, #[case] words: &str) {
    let folder = tempfile::tempdir().unwrap();
    let weights = crate::checkpoint::weight_file(&[("a", safetensors::Dtype::F32, vec![1], vec![0; 4])]);
    fs::write(folder.path().join("m.safetensors"), weights).unwrap();
    let mut command = accelerate();
    command.args(line.split_whitespace()).current_dir(folder.path());
    finished(command).expect(code, &[words]);
}

/// What a checkpoint says of itself is whatever somebody has written.
#[rstest]
#[case::of_a_tensor(&[Tensor::f32("model", HOSTILE, &[1.0])], 0)]
#[case::of_an_object(&[Tensor::f32(HOSTILE, "a", &[1.0])], 0)]
#[case::of_both(&[Tensor::f32(HOSTILE, HOSTILE, &[1.0])], 0)]
#[case::of_values(&[Tensor::f32("model", "a", &[1.0])], 1)]
#[case::of_an_object_of_values(&[], 1)]
#[case::of_keys(&[Tensor::f32("model", "a", &[1.0])], 2)]
fn names_within_a_checkpoint_do_not_break_a_table(#[case] tensors: &[Tensor], #[case] kind: usize) {
    let folder = tempfile::tempdir().unwrap();
    let values = [
        Values::new(),
        Values::from([(HOSTILE, json!({ HOSTILE: [HOSTILE] })), ("model", json!(HOSTILE))]),
        Values::from([("scheduler", json!({ HOSTILE: HOSTILE })), ("custom_checkpoint_0", json!({ HOSTILE: 1 }))]),
    ];
    write_checkpoint(&folder.path().join("a"), 1, tensors, &values[kind]);
    let other = [Tensor::f32("model", "other", &[1.0])];
    write_checkpoint(&folder.path().join("b"), 2, &other, &Values::from([(HOSTILE, json!({ HOSTILE: 2 }))]));
    fs::write(folder.path().join("a").join(HOSTILE), "").unwrap();
    let lines = ["ls a", "ls a --tensors", "verify a", "diff a b", "diff b a", "diff a b --objects x", "convert a out"];
    for line in lines {
        let mut command = accelerate();
        command.arg("checkpoint").args(line.split(' ')).current_dir(folder.path()).env("CLICOLOR_FORCE", "1");
        let ended = finished(command);
        for text in [&ended.stdout, &ended.stderr] {
            let is_control = |letter: char| letter.is_control() && letter != '\n' && letter != '\u{1b}';
            assert!(!text.contains("\u{1b}[2J") && !text.contains("\nforged"), "{line}: {text}");
            assert!(!text.contains(is_control) && !ended.stderr.contains("panicked"), "{line}: {text}");
        }
    }
    let mut command = accelerate();
    command.args(["merge-weights", "a", "merged"]).current_dir(folder.path()).env("CLICOLOR_FORCE", "1");
    let ended = finished(command);
    assert!(!ended.stderr.contains("\nforged") && !ended.stderr.contains("\u{1b}[2J"), "{}", ended.stderr);
}

/// Names that nobody has in mind: as long as a file system allows, and no UTF-8.
#[rstest]
#[case::long(vec![b'x'; 255])]
#[case::long_letters("é".repeat(127).into_bytes())]
#[case::almost_long(vec![b'x'; 200])]
#[case::no_utf8(b"caf\xe9 \xff".to_vec())]
#[case::long_and_no_utf8(vec![b'\xe9'; 255])]
fn checkpoints_may_have_any_name(#[case] name: Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    let name = std::ffi::OsStr::from_bytes(&name);
    let own = folder.path().join("own").join(name);
    write_checkpoint(&own, 1, &[Tensor::f32("model", "a", &[1.0])], &Values::new());
    let run = |words: &[&Path]| {
        let mut command = accelerate();
        command.args(words).current_dir(folder.path());
        let ended = finished(command);
        ended.expect(0, &[]);
        ended
    };
    let [python, again, merged] = ["python", "again", "merged"].map(|place| Path::new(place).join(name));
    let word = Path::new;
    run(&[word("merge-weights"), &own, &merged]);
    run(&[word("checkpoint"), word("convert"), &own, &python]);
    run(&[word("checkpoint"), word("convert"), &python, &again]);
    run(&[word("checkpoint"), word("ls"), &own]);
    run(&[word("checkpoint"), word("verify"), &own, &again]);
    run(&[word("checkpoint"), word("diff"), &own, &again, word("--objects"), word("model")]);
    for place in [&python, &again, &merged] {
        let found: Vec<_> = fs::read_dir(folder.path().join(place).parent().unwrap()).unwrap().collect();
        assert_eq!(found.len(), 1, "nothing else is left: {found:?}");
    }
}
