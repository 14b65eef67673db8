//! `cargo xtask soak slurm`: the tests that need a Slurm, with one that is downloaded for them.

use anyhow::Result;

use super::engines::Arguments;
use super::packages;
use crate::process;

/// What two nodes and a controller are made of, besides what any Debian has.
const PACKAGES: [&str; 7] =
    ["slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libmunge2", "libhwloc15", "libnuma1"];

pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let folder = packages::ensure("slurm", &PACKAGES)?;
    let program = arguments.program()?;
    let mut tests = process::cargo(&["test", "--workspace", "--test", "cli"]);
    tests.args(["--", "slurm::", "--test-threads", "1"]);
    tests.env("ACCELERATE_TEST_SLURM", folder).env("ACCELERATE_TEST_PROGRAM", program);
    process::run(&mut tests)
}
