//! The program itself, in one process and in two.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate_launch::{LaunchConfig, Program, Reporter, Source, Stream, launch};
use std::ffi::OsString;
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

/// What the ranks print. A single rank writes straight to the launcher's own streams, so it is started without one.
fn output_of(num_processes: usize, args: &[&str]) -> String {
    let args: Vec<OsString> = args.iter().map(Into::into).collect();
    if num_processes == 1 {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cv_example"));
        let output = command.args(&args).env("OMP_NUM_THREADS", "1").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return String::from_utf8(output.stdout).unwrap();
    }
    let mut printed = Printed::default();
    let program = Program::Executable(env!("CARGO_BIN_EXE_cv_example").into());
    let config = LaunchConfig {
        args,
        num_cpu_threads_per_process: Some(1),
        environment: [("ACCELERATE_USE_CPU".into(), "true".into())].into_iter().collect(),
        ..LaunchConfig::new(program, num_processes)
    };
    if let Err(error) = launch(&config, &mut printed) {
        panic!("{error}\n{:#?}", error.failure());
    }
    String::from_utf8(printed.0).unwrap()
}

/// Accuracies of the epochs.
fn accuracies(printed: &str) -> Vec<f64> {
    let values =
        printed.lines().filter_map(|line| line.split_once("accuracy=")?.1.split_whitespace().next()?.parse().ok());
    values.collect()
}

#[test]
fn it_learns_shapes_and_goes_on_from_what_it_has_saved() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (out, again) = (path("out"), path("again"));
    for num_processes in [1, 2] {
        let data =
            ["--num_train", "1200", "--num_validation", "101", "--batch_size", "8", "--cpu", "--num_epochs", "4"];
        let printed = output_of(num_processes, &[&data[..], &["--output_dir", &out]].concat());
        let learned = accuracies(&printed);
        assert!(learned.len() == 4 && learned[3] > 0.6, "{printed}");
        let old = ["--output_dir", &again, "--model_name_or_path", &out];
        let printed = output_of(num_processes, &[&data[..], &old[..]].concat());
        // The rate is as high as in the beginning, so the epochs between may be worse than what was saved.
        assert!(accuracies(&printed).last().is_some_and(|accuracy| *accuracy > 0.6), "{printed}");
    }
}
