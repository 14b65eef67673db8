//! The program itself, in one process and in two, from scratch and from the folder that it has written.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate_launch::{LaunchConfig, Program, Reporter, Source, Stream, launch};
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::Command;

/// Keeps what the ranks print on standard output.
#[derive(Default)]
struct Printed(Vec<u8>);

impl Reporter for Printed {
    fn output(&mut self, source: Source, bytes: &[u8]) -> io::Result<()> {
        if source.stream == Stream::Stdout {
            self.0.extend_from_slice(bytes);
        }
        Ok(())
    }
}

/// What the ranks print. A single rank writes straight to the launcher's own streams, so it is started without one.
fn output_of(num_processes: usize, args: &[&str]) -> String {
    let args: Vec<OsString> = args.iter().map(Into::into).collect();
    if num_processes == 1 {
        let mut command = Command::new(env!("CARGO_BIN_EXE_causal_lm"));
        let output = command.args(&args).env("OMP_NUM_THREADS", "1").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return String::from_utf8(output.stdout).unwrap();
    }
    let mut printed = Printed::default();
    let program = Program::Executable(env!("CARGO_BIN_EXE_causal_lm").into());
    let config = LaunchConfig {
        args,
        num_cpu_threads_per_process: Some(1),
        environment: [("ACCELERATE_USE_CPU".into(), "true".into())].into_iter().collect(),
        ..LaunchConfig::new(program, num_processes)
    };
    if let Err(error) = launch(&config, &mut printed) {
        panic!("{args:?}: {error}\n{:#?}", error.failure(), args = config.args);
    }
    String::from_utf8(printed.0).unwrap()
}

/// Perplexities of the epochs.
fn perplexities(printed: &str) -> Vec<f64> {
    let values =
        printed.lines().filter_map(|line| line.split_once("perplexity=")?.1.split_whitespace().next()?.parse().ok());
    values.collect()
}

/// A text with something to learn: what follows a letter is always the same.
fn write_text(path: &Path, num_letters: usize) {
    let text: String = (0..num_letters).map(|at| char::from(b'a' + (at * 7 % 26) as u8)).collect();
    std::fs::write(path, text).unwrap();
}

#[test]
fn it_learns_samples_and_goes_on_from_what_it_has_saved() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    write_text(Path::new(&path("train.txt")), 6000);
    let (file, out, again) = (path("train.txt"), path("out"), path("again"));
    for (num_processes, model) in [(1, "gpt2"), (2, "llama")] {
        let data = ["--train_file", &file, "--block_size", "16", "--cpu", "--sample_tokens", "5"];
        let new = ["--model", model, "--num_epochs", "2", "--output_dir", &out];
        let printed = output_of(num_processes, &[&data[..], &new[..]].concat());
        let learned = perplexities(&printed);
        assert!(learned.len() == 2 && learned[1] < learned[0] && learned[1] < 4.0, "{model}: {printed}");
        assert_eq!(printed.matches("sample: ").count(), 2, "{model}: {printed}");

        let old = ["--model_name_or_path", &out, "--num_epochs", "1", "--output_dir", &again];
        let printed = output_of(num_processes, &[&data[..], &old[..]].concat());
        let found = perplexities(&printed);
        assert!(found.len() == 1 && found[0] < learned[1] * 1.2, "{model}: {learned:?} before, then {printed}");
    }
}

#[test]
fn adapters_are_trained_beside_codes_however_they_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    write_text(Path::new(&path("train.txt")), 3000);
    let (file, base, out) = (path("train.txt"), path("base"), path("adapter"));
    let data = ["--train_file", &file, "--block_size", "16", "--cpu", "--sample_tokens", "5", "--num_epochs", "1"];
    output_of(1, &[&data[..], &["--model", "llama", "--output_dir", &base]].concat());
    let weights = std::fs::read(path("base/model.safetensors")).unwrap();
    let mut all = Vec::new();
    // The same batches of all processes together, so the same perplexities.
    for (num_processes, batch_size, more) in [
        (1, "12", &["--load_in_4bit"][..]),
        (2, "6", &["--load_in_4bit"]),
        (2, "6", &["--load_in_4bit", "--use_fsdp"]),
        (3, "4", &["--load_in_4bit", "--use_fsdp", "--gradient_checkpointing"]),
        (2, "6", &["--use_fsdp", "--lora_alpha", "8", "--lora_dropout", "0.1"]),
    ] {
        let lora =
            ["--model_name_or_path", &base, "--output_dir", &out, "--lora_rank", "4", "--batch_size", batch_size];
        let printed = output_of(num_processes, &[&data[..], &lora, &["--learning_rate", "0.002"], more].concat());
        assert!(printed.contains("numbers are trained") && printed.contains("the adapter is in"), "{printed}");
        all.extend(perplexities(&printed));
        let saved = std::fs::read_to_string(path("adapter/adapter_config.json")).unwrap();
        assert!(saved.contains("\"r\": 4") && saved.contains("CAUSAL_LM"), "{saved}");
        assert!(!Path::new(&path("adapter/model.safetensors")).exists());
        std::fs::remove_dir_all(&out).unwrap();
    }
    assert_eq!(all.len(), 5, "{all:?}");
    for found in &all[1..4] {
        assert!((found - all[0]).abs() < 2e-3 * all[0], "{all:?}");
    }
    assert_eq!(std::fs::read(path("base/model.safetensors")).unwrap(), weights);
}

/// A pipe would be waited for, and a token that the model does not have is out of its table.
#[test]
fn files_that_never_end_and_tokens_beyond_the_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    for name in ["pipe.txt", "of_pipe/config.json", "tokens/tokenizer.json", "gap/none"] {
        std::fs::create_dir_all(Path::new(&path(name)).parent().unwrap()).unwrap();
    }
    for name in ["pipe.txt", "of_pipe/config.json", "tokens/tokenizer.json"] {
        assert!(Command::new("mkfifo").arg(path(name)).status().unwrap().success());
    }
    let sizes =
        r#"{"model_type": "gpt2", "vocab_size": 40, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 64}"#;
    ["tokens", "gap"].iter().for_each(|name| std::fs::write(path(&format!("{name}/config.json")), sizes).unwrap());
    let words = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"a": 4294967295, "[UNK]": 3}, "unk_token": "[UNK]"}}"#;
    std::fs::write(path("gap/tokenizer.json"), words).unwrap();
    let (pipe, of_pipe, tokens, gap) = (path("pipe.txt"), path("of_pipe"), path("tokens"), path("gap"));
    for (args, part) in [
        (&["--train_file", &pipe][..], "pipe.txt is a device or a pipe"),
        (&["--model_name_or_path", &of_pipe], "config.json is a device or a pipe"),
        (&["--model_name_or_path", &tokens], "tokenizer.json is a device or a pipe"),
        (&["--model_name_or_path", &gap], "numbers its tokens up to 4294967296, but the model has 40"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_causal_lm"));
        let output = command.args(args).args(["--cpu", "--output_dir", &path("out")]).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && message.contains(part), "{args:?}: {message}");
    }
}

#[test]
fn files_that_do_not_fit_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("short.txt"), "abc").unwrap();
    std::fs::write(path("tokens.bin"), [1u8; 64]).unwrap();
    std::fs::create_dir(path("model")).unwrap();
    std::fs::write(path("model/config.json"), r#"{"model_type": "bert"}"#).unwrap();
    let (short, tokens, model, out) = (path("short.txt"), path("tokens.bin"), path("model"), path("out"));
    let rows: [(&[&str], &str); 9] = [
        (&["--train_file", &short, "--validation_file", &short], "short.txt is too short"),
        (&["--train_file", &tokens], "give a --validation_file as well"),
        (&["--train_file", "absent.txt", "--validation_file", &short], "cannot read absent.txt"),
        (&["--model_name_or_path", &model], "the model_type \"bert\" does not continue texts here"),
        (&["--block_size", "1"], "wanted a whole number from 2"),
        (&["--load_in_4bit", "--model_name_or_path", &model], "add --lora_rank 16"),
        (&["--lora_rank", "4"], "give a trained one by --model_name_or_path"),
        (&["--lora_alpha", "4", "--model_name_or_path", &model], "of which there are none; add --lora_rank 16"),
        (&["--lora_rank", "0", "--model_name_or_path", &model], "wanted a whole number from 1"),
    ];
    for (args, part) in rows {
        let output =
            Command::new(env!("CARGO_BIN_EXE_causal_lm")).args(args).args(["--cpu", "--output_dir", &out]).output();
        let output = output.unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && message.contains(part), "{args:?}: {message}");
    }
}
