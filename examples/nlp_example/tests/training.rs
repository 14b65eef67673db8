//! The program itself, in one process and in two, with the options that change the loop.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate_launch::{LaunchConfig, Program, Reporter, Source, Stream, launch};
use rstest::rstest;
use std::fmt::Write;
use std::io;
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

/// Texts whose label is told by one of their words.
fn table(rows: usize) -> String {
    (0..rows).fold(String::from("sentence\tlabel\n"), |mut text, row| {
        let (word, label) = if row % 2 == 0 { ("good", 1) } else { ("bad", 0) };
        writeln!(text, "a {word} film number {row}\t{label}").unwrap();
        text
    })
}

/// What the ranks print. A single rank writes straight to the launcher's own streams, so it is started without one.
fn output_of(config: &LaunchConfig) -> Vec<u8> {
    if config.num_processes == 1 {
        let output = Command::new(env!("CARGO_BIN_EXE_nlp_example")).args(&config.args).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return output.stdout;
    }
    let mut printed = Printed::default();
    if let Err(error) = launch(config, &mut printed) {
        panic!("{:?}: {error}\n{:#?}", config.args, error.failure());
    }
    printed.0
}

/// What `accelerate launch --use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP` sets.
const FSDP: &[(&str, &str)] = &[("ACCELERATE_USE_FSDP", "true"), ("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")];
/// `--use_deepspeed --zero_stage 2`, with Adam's state on a disk.
const ZERO_2: &[(&str, &str)] = &[
    ("ACCELERATE_USE_DEEPSPEED", "true"),
    ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"),
    ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "nvme"),
    ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", env!("CARGO_TARGET_TMPDIR")),
];

#[rstest]
#[case::one_rank(1, &[], &[])]
#[case::two_ranks(2, &[], &[])]
#[case::accumulated(2, &["--gradient_accumulation_steps", "2"], &[])]
#[case::bf16(2, &["--mixed_precision", "bf16"], &[])]
#[case::split_batches(2, &["--split_batches"], &[])]
#[case::three_ranks_accumulated_bf16(3, &["--gradient_accumulation_steps", "3", "--mixed_precision", "bf16"], &[])]
#[case::sharded(2, &[], FSDP)]
#[case::sharded_bf16(3, &["--mixed_precision", "bf16"], FSDP)]
#[case::deep_speed(2, &[], ZERO_2)]
fn trains_saves_and_scores_the_same_when_read_back(
    #[case] num_processes: usize,
    #[case] options: &[&str],
    #[case] variables: &[(&str, &str)],
) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).into_os_string();
    std::fs::write(path("train.tsv"), table(70)).unwrap();
    std::fs::write(path("dev.tsv"), table(21)).unwrap();
    let mut args = vec!["--train_file".into(), path("train.tsv"), "--validation_file".into(), path("dev.tsv")];
    args.extend(["--output_dir".into(), path("out"), "--num_epochs".into(), "1".into()]);
    args.extend(["--batch_size".into(), "6".into(), "--cpu".into()]);
    args.extend(options.iter().map(Into::into));
    let program = Program::Executable(env!("CARGO_BIN_EXE_nlp_example").into());
    let config = LaunchConfig {
        args,
        num_cpu_threads_per_process: Some(1),
        environment: variables
            .iter()
            .chain(&[("ACCELERATE_USE_CPU", "true")])
            .map(|(name, value)| (name.into(), value.into()))
            .collect(),
        ..LaunchConfig::new(program, num_processes)
    };
    let printed = String::from_utf8(output_of(&config)).unwrap();
    let last = printed.lines().last().unwrap_or_default();
    let values: Vec<(&str, f64)> = last
        .split(' ')
        .map(|field| field.split_once('=').and_then(|(name, value)| Some((name, value.parse().ok()?))).expect(last))
        .collect();
    let names: Vec<&str> = values.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["accuracy", "f1", "samples_per_second", "world_size"], "{last}");
    assert_eq!(values[3].1, num_processes as f64);
    // Correct answers come in whole rows: more would mean that a filled-up row was counted.
    let correct = values[0].1 * 21.0;
    assert!((correct - correct.round()).abs() < 0.01, "{last}");

    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        assert!(folder.path().join("out").join(name).metadata().unwrap().len() > 0, "{name}");
    }
    let curve = std::fs::read_to_string(folder.path().join("out/loss.svg")).unwrap();
    assert!(curve.starts_with("<svg") && curve.trim_end().ends_with("</svg>"));
}

/// The last line of a run, without how fast it was.
fn scores(printed: &str) -> String {
    let last = printed.lines().last().unwrap_or_default();
    last.split(" samples_per_second").next().unwrap_or_default().to_owned()
}

/// With the default learning rate, and in sixty steps on any number of ranks.
#[rstest]
#[case::one_rank(1)]
#[case::two_ranks(2)]
fn one_epoch_is_enough_to_learn_what_a_word_tells(#[case] num_processes: usize) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).into_os_string();
    std::fs::write(path("train.tsv"), table(480)).unwrap();
    std::fs::write(path("dev.tsv"), table(21)).unwrap();
    let mut args = vec!["--train_file".into(), path("train.tsv"), "--validation_file".into(), path("dev.tsv")];
    args.extend(["--output_dir".into(), path("out"), "--cpu".into()]);
    args.extend(["--num_epochs", "1", "--batch_size", "8", "--split_batches"].map(Into::into));
    let config = LaunchConfig {
        args,
        num_cpu_threads_per_process: Some(1),
        environment: vec![("ACCELERATE_USE_CPU".into(), "true".into())],
        ..LaunchConfig::new(Program::Executable(env!("CARGO_BIN_EXE_nlp_example").into()), num_processes)
    };
    let printed = String::from_utf8(output_of(&config)).unwrap();
    assert_eq!(scores(&printed), "accuracy=1.0000 f1=1.0000", "{printed}");
}

/// Goes on in the middle of an epoch from what a longer run has saved, on as many processes and on others.
#[rstest]
#[case::one_rank(1, 1, true)]
#[case::two_ranks(2, 2, true)]
#[case::another_number_of_ranks(2, 1, false)]
fn a_run_that_is_resumed_ends_as_one_that_nobody_disturbed(
    #[case] before: usize,
    #[case] after: usize,
    #[case] is_exact: bool,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).into_os_string();
    std::fs::write(path("train.tsv"), table(70)).unwrap();
    std::fs::write(path("dev.tsv"), table(21)).unwrap();
    let run = |num_processes: usize, options: &[&str]| {
        let mut args = vec!["--train_file".into(), path("train.tsv"), "--validation_file".into(), path("dev.tsv")];
        args.extend(["--output_dir".into(), path("out"), "--batch_size".into(), "6".into(), "--cpu".into()]);
        let epochs = if options.contains(&"--num_epochs") { &[][..] } else { &["--num_epochs", "2"] };
        args.extend(epochs.iter().chain(&["--save_every", "4"]).chain(options).map(Into::into));
        let program = Program::Executable(env!("CARGO_BIN_EXE_nlp_example").into());
        let config = LaunchConfig {
            args,
            num_cpu_threads_per_process: Some(1),
            environment: vec![("ACCELERATE_USE_CPU".into(), "true".into())],
            ..LaunchConfig::new(program, num_processes)
        };
        String::from_utf8(output_of(&config)).unwrap()
    };
    assert!(run(before, &["--resume"]).contains("training begins"));
    let undisturbed = run(before, &[]);
    // The newest checkpoint is in the middle of the second epoch.
    let resumed = run(after, &["--resume"]);
    assert!(resumed.contains("goes on from") && !resumed.contains("epoch 1/2"), "{resumed}");
    if is_exact {
        assert_eq!(scores(&resumed), scores(&undisturbed));
    }
    // With no epoch left, it is only judged and saved.
    let judged = run(after, &["--resume", "--num_epochs", "1"]);
    assert!(!judged.contains("epoch 1/1") && scores(&judged).contains("accuracy"), "{judged}");
}

/// Rank 1 is killed once there is a checkpoint. The launcher starts both again, and nobody says `--resume`.
#[test]
fn a_run_that_is_restarted_ends_as_one_that_nobody_disturbed() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).into_os_string();
    std::fs::write(path("train.tsv"), table(70)).unwrap();
    std::fs::write(path("dev.tsv"), table(21)).unwrap();
    // The shell becomes the program, so the number is that of the rank.
    let script = "if [ $RANK$TORCHELASTIC_RESTART_COUNT$0 = 10disturbed ]; then \
                    ( until [ -e $1/checkpoints/checkpoint_0/checkpoint.manifest.json ]; do sleep 0.01; done; kill -9 $$ ) & \
                  fi; shift; exec \"$@\"";
    let run = |name: &str| {
        let mut args =
            vec!["-c".into(), script.into(), name.into(), path(name), env!("CARGO_BIN_EXE_nlp_example").into()];
        args.extend(["--train_file".into(), path("train.tsv"), "--validation_file".into(), path("dev.tsv")]);
        args.extend(["--output_dir".into(), path(name), "--batch_size".into(), "6".into(), "--cpu".into()]);
        args.extend(["--num_epochs", "4", "--save_every", "4"].map(Into::into));
        let config = LaunchConfig {
            args,
            max_restarts: 3,
            num_cpu_threads_per_process: Some(1),
            environment: vec![("ACCELERATE_USE_CPU".into(), "true".into())],
            ..LaunchConfig::new(Program::Executable("sh".into()), 2)
        };
        let mut printed = Printed::default();
        match launch(&config, &mut printed) {
            Ok(outcome) => (outcome.num_restarts, String::from_utf8(printed.0).unwrap()),
            Err(error) => panic!("{error}\n{:#?}", error.failure()),
        }
    };
    let [(none, undisturbed), (once, disturbed)] = ["undisturbed", "disturbed"].map(run);
    assert_eq!((none, once), (0, 1));
    assert!(disturbed.contains("goes on from"), "{disturbed}");
    assert_eq!(scores(&disturbed), scores(&undisturbed));
    // The mean of the last epoch's losses has four places of its own.
    let last_epoch = |printed: &str| printed.lines().rfind(|line| line.contains("epoch 4/4: loss=")).map(str::to_owned);
    assert!(last_epoch(&disturbed).is_some() && last_epoch(&disturbed) == last_epoch(&undisturbed), "{disturbed}");
}
