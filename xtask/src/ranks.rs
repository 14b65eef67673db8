//! Starting this project's own programs as several ranks, by this project's own launcher.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::{paths, process};

/// Builds the launcher and the programs of package `bench`.
pub(crate) fn build() -> Result<()> {
    process::run(&mut process::cargo(&["build", "--release", "--package", "accelerate-cli", "--package", "bench"]))
}

/// `accelerate launch` for `num_processes` ranks of `program` on this machine, one thread each.
pub(crate) fn launch(num_processes: usize, program: &Path) -> Command {
    launch_with(num_processes, &[], program)
}

/// The same with more flags.
pub(crate) fn launch_with(num_processes: usize, flags: &[&str], program: &Path) -> Command {
    let mut command = Command::new(paths::release_binary("accelerate"));
    command.args(["launch", "--cpu", "--num_processes", &num_processes.to_string(), "--main_process_port", "0"]);
    command.args(flags).arg(program).env("OMP_NUM_THREADS", "1");
    // A user's own default configuration file must not change what is measured or compared.
    command.env("HF_HOME", paths::target_folder().join("no-hugging-face-home"));
    command
}

/// What follows `mark` on each line that has it, whatever the launcher writes in front.
pub(crate) fn marked<'a>(printed: &'a str, mark: &str) -> Vec<&'a str> {
    printed.lines().filter_map(|line| line.split_once(mark).map(|(_, rest)| rest.trim())).collect()
}

#[cfg(test)]
mod tests {
    use super::marked;

    #[test]
    fn marked_lines_are_found_behind_a_prefix() {
        let printed = "[rank 0] report={\"a\": 1}\nnoise\nreport={\"a\": 2}\n";
        assert_eq!(marked(printed, "report="), ["{\"a\": 1}", "{\"a\": 2}"]);
        assert!(marked(printed, "absent=").is_empty());
    }
}
