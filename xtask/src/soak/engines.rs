//! `cargo xtask soak engines`: one program, built once, under every engine that starts processes on one machine.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;

use super::packages;
use crate::python::Environment;
use crate::{libtorch, paths, process};

/// Open MPI and MPICH, and what they load. The plugins of Debian's are built against Slurm.
const PACKAGES: [&str; 20] = [
    "openmpi-bin",
    "openmpi-common",
    "libopenmpi3",
    "libpmix2",
    "libevent-2.1-7",
    "libevent-core-2.1-7",
    "libevent-pthreads-2.1-7",
    "mpich",
    "hydra",
    "libmpich12",
    "libhwloc15",
    "libucx0",
    "libfabric1",
    "libpsm2-2",
    "libnuma1",
    "libltdl7",
    "libslurm38",
    "libmunge2",
    "libnl-3-200",
    "libnl-route-3-200",
];
const NUM_PROCESSES: usize = 3;

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// A built nlp_example to train with, in place of building it
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

impl Arguments {
    /// The program, which is built unless it is named.
    pub(super) fn program(&self) -> Result<PathBuf> {
        if let Some(program) = &self.program {
            return program.canonicalize().with_context(|| format!("there is no {}", program.display()));
        }
        libtorch::ensure()?;
        process::run(&mut process::cargo(&["build", "--release", "--package", "nlp_example"]))?;
        Ok(paths::release_binary("nlp_example"))
    }
}

pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let program = arguments.program()?;
    process::run(&mut process::cargo(&["build", "--package", "accelerate-cli"]))?;
    let output = paths::target_folder().join("soak-engines");
    let trained = |engine: &str, mut command: Command| {
        command.arg(&program).args(["--num_epochs", "1", "--output_dir"]).arg(&output);
        command.env("ACCELERATE_USE_CPU", "true").env("OMP_NUM_THREADS", "1");
        let (is_success, text) = process::run_and_read(&mut command)?;
        let result = text.lines().filter_map(result).next_back();
        match result.filter(|_| is_success) {
            Some(result) => Ok(result),
            None => bail!("under {engine} the training has not come to its end"),
        }
    };
    let mut ours = Command::new(paths::target_folder().join("debug/accelerate"));
    ours.args(["launch", "--cpu", "--num_processes", &NUM_PROCESSES.to_string()]);
    let wanted = trained("accelerate launch", ours)?;
    for (engine, command) in engines() {
        match command {
            Ok(command) => {
                let found = trained(engine, command)?;
                if found != wanted {
                    bail!("under {engine} the training comes to `{found}`, and under accelerate launch to `{wanted}`");
                }
                println!("{engine}: {found}");
            }
            Err(reason) => println!("{engine}: skipped, because {reason:#}"),
        }
    }
    Ok(())
}

/// `accuracy=... f1=...` of the last line, without how fast it was.
fn result(line: &str) -> Option<String> {
    let (numbers, _) = line.split_once(" samples_per_second=")?;
    Some(numbers.get(numbers.find("accuracy=")?..)?.to_owned())
}

fn engines() -> Vec<(&'static str, Result<Command>)> {
    let packages = || packages::ensure("mpi", &PACKAGES);
    let torchrun = || {
        let mut command = Environment::ensure()?.torchrun(NUM_PROCESSES)?;
        command.arg("--no_python");
        Ok(command)
    };
    let elastic = || {
        let mut command = Environment::ensure()?.command();
        command.args(["-m", "torch.distributed.run", "--nnodes", "1:1", "--rdzv_backend", "c10d"]);
        command.args(["--rdzv_endpoint", "127.0.0.1:0", "--nproc_per_node", &NUM_PROCESSES.to_string(), "--no_python"]);
        Ok(command)
    };
    vec![
        ("Open MPI", packages().map(|folder| mpi(&folder, "mpirun.openmpi", &OPEN_MPI))),
        ("MPICH", packages().map(|folder| mpi(&folder, "mpiexec.hydra", &[]))),
        ("torchrun", torchrun()),
        ("elastic torchrun", elastic()),
    ]
}

/// Root in a container, and fewer cores than processes, are as good as anything here.
const OPEN_MPI: [&str; 4] = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"];

fn mpi(folder: &Path, program: &str, flags: &[&str]) -> Command {
    let libraries = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/openmpi/lib"];
    let libraries: Vec<_> = libraries.iter().map(|name| folder.join(name).display().to_string()).collect();
    let mut command = Command::new(folder.join("usr/bin").join(program));
    command.env("OPAL_PREFIX", folder.join("usr")).env("LD_LIBRARY_PATH", libraries.join(":"));
    command.args(flags).args(["-n", &NUM_PROCESSES.to_string()]);
    command
}

#[cfg(test)]
mod tests {
    use super::result;

    #[test]
    fn the_result_of_a_training_is_what_does_not_depend_on_the_clock() {
        let line = "[rank 0] accuracy=0.7575 f1=0.7723 samples_per_second=358.4 world_size=3";
        assert_eq!(result(line).as_deref(), Some("accuracy=0.7575 f1=0.7723"));
        assert_eq!(result("epoch 1/1: loss=0.6850 accuracy=0.7575 f1=0.7723"), None);
    }
}
