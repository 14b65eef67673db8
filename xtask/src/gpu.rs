//! `cargo xtask gpu`: the bundle that is taken to machines with GPUs, and its run here.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::python::Environment;
use crate::{check_cuda, libtorch, paths, process};

/// Build the checks for GPUs as a bundle, and run it: on the GPU, or on the CPU as a rehearsal.
///
/// The bundle is the folder `target/gpu`: the program, built with the feature `cuda`, the script `run`, and the Python scripts that
/// checks compare with. It needs neither Rust nor a compiler where it runs, only libtorch 2.11.0 with CUDA: copy the folder to
/// a machine with a GPU and start `./run` there. `LIBTORCH` says where libtorch is; without it, it is that of the `python3` that is
/// active. The first build compiles everything once more, which takes minutes, and needs NVIDIA's header packages, which are
/// downloaded (0.2 GB).
///
/// Without a GPU the same checks run on the CPU over Gloo. That shows that the bundle starts, and that the checks are in order;
/// it shows nothing about a GPU. Arguments after `--` go to `run`: `cargo xtask gpu -- --list`, `cargo xtask gpu -- --only dropout`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Build the bundle and do not run it
    #[arg(long)]
    build_only: bool,
    /// Arguments of `run`
    #[arg(last = true)]
    run: Vec<String>,
}

/// What a bundle may weigh: it has to travel.
const MOST_BYTES: u64 = 55 << 20;

/// The program and the profile it is built in.
const PROGRAM: &str = "gpu-checks";
const PROFILE: &str = "bundle";

/// The script that starts the program on any machine.
const RUN: &str = include_str!("gpu/run.sh");

/// Without these in the program, kernels would not be there, or the program would not know of CUDA.
const NEEDED: [&str; 4] = ["libtorch_cpu.so", "libtorch_cuda.so", "libc10.so", "libc10_cuda.so"];

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    libtorch::ensure()?;
    let program = build()?;
    check_links(&process::read(Command::new("readelf").arg("-d").arg(&program))?)?;
    let folder = paths::target_folder().join("gpu");
    let bytes = pack(&program, &folder)?;
    check_size(bytes)?;
    println!("{}: {:.1} MiB of at most {}", folder.display(), bytes as f64 / MIB, MOST_BYTES >> 20);
    if arguments.build_only {
        return Ok(());
    }
    let mut run = command(&folder.join("run"))?;
    // The last one counts.
    run.args(["--output".as_ref(), folder.join("report").as_os_str()]).args(&arguments.run);
    process::run(&mut run)
}

const MIB: f64 = (1 << 20) as f64;

fn build() -> Result<PathBuf> {
    let headers = check_cuda::header_folders()?;
    let mut build = process::cargo(&["build", "--package", PROGRAM, "--features", "cuda", "--profile", PROFILE]);
    process::run(build.env("ACCELERATE_CUDA_INCLUDE", headers))?;
    Ok(paths::target_folder().join(PROFILE).join(PROGRAM))
}

/// Is everything linked that the program needs on a GPU, and nothing named by a path of this machine?
fn check_links(readelf: &str) -> Result<()> {
    let of = |tag: &str| -> Vec<String> {
        let lines = readelf.lines().filter(|line| line.contains(tag));
        lines.filter_map(|line| Some(line.split_once('[')?.1.strip_suffix(']')?.to_owned())).collect()
    };
    let needed = of("(NEEDED)");
    for name in NEEDED {
        ensure!(needed.iter().any(|other| other == name), "{PROGRAM} is not linked with {name}, but with {needed:?}");
    }
    let paths: Vec<String> = [of("(RUNPATH)"), of("(RPATH)"), needed].concat();
    match paths.iter().find(|path| path.contains('/')) {
        Some(path) => bail!("{PROGRAM} looks for libraries at {path}, which only this machine has"),
        None => Ok(()),
    }
}

fn check_size(bytes: u64) -> Result<()> {
    ensure!(
        bytes <= MOST_BYTES,
        "the bundle has {:.1} MiB, more than the {} that it may have; look at the dependencies of {PROGRAM}",
        bytes as f64 / MIB,
        MOST_BYTES >> 20
    );
    Ok(())
}

/// Fills the folder anew, but for the report of an earlier run. Returns the size of all that is to be copied.
fn pack(program: &Path, folder: &Path) -> Result<u64> {
    let scripts = folder.join("python");
    let _ = fs::remove_dir_all(&scripts);
    fs::create_dir_all(&scripts).with_context(|| format!("could not create {}", scripts.display()))?;
    copy(program, &folder.join(PROGRAM))?;
    let source = paths::repository_root().join("gpu/python");
    for entry in fs::read_dir(&source).with_context(|| format!("could not read {}", source.display()))? {
        let path = entry?.path();
        if let Some(name) = path.file_name().filter(|_| path.extension().is_some_and(|ending| ending == "py")) {
            copy(&path, &scripts.join(name))?;
        }
    }
    let run = folder.join("run");
    fs::write(&run, RUN).with_context(|| format!("could not write {}", run.display()))?;
    make_executable(&run)?;
    fs::write(folder.join("commit"), commit())?;
    bytes_of(folder)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    // A program that runs cannot be written to, but its name can be given to another file.
    let _ = fs::remove_file(to);
    fs::copy(from, to).map(drop).with_context(|| format!("could not copy {} to {}", from.display(), to.display()))
}

fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
}

/// Which sources the bundle was built from, for its reports.
fn commit() -> String {
    let git = |arguments: &[&str]| {
        process::read(Command::new("git").args(arguments).current_dir(paths::repository_root())).unwrap_or_default()
    };
    let changed = if git(&["status", "--porcelain"]).trim().is_empty() { "" } else { ", changed" };
    match git(&["rev-parse", "--short=12", "HEAD"]).trim() {
        "" => "unknown".to_owned(),
        commit => format!("{commit}{changed}"),
    }
}

fn bytes_of(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder).with_context(|| format!("could not read {}", folder.display()))? {
        let entry = entry?;
        if entry.file_name() == "report" {
            continue;
        }
        let metadata = entry.metadata()?;
        bytes += if metadata.is_dir() { bytes_of(&entry.path())? } else { metadata.len() };
    }
    Ok(bytes)
}

/// `run`, with what this machine lacks: the Python of the comparisons, and where there is no GPU stand-ins for the libraries that
/// libtorch's CUDA half is linked with.
fn command(run: &Path) -> Result<Command> {
    let home = libtorch::python_package_home()?;
    let python = Environment::ensure()?;
    let has_gpu = Path::new("/dev/nvidiactl").exists();
    let mut command = if has_gpu { Command::new(run) } else { python.with_modules(run) };
    command.env("LIBTORCH", home.join("torch")).env("PYTHON", python.python());
    // The checks decide themselves where they run, with as many threads as there are.
    command.env_remove("ACCELERATE_USE_CPU").env_remove("OMP_NUM_THREADS");
    if !has_gpu {
        // Where its compiler cannot link the stand-ins, Inductor would think that this processor has no vectors.
        command.env("TORCHINDUCTOR_VEC_ISA_OK", "1");
    }
    Ok(command)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A bundle whose program prints what `run` has given it.
    fn bundle() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let script = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            make_executable(&path).unwrap();
        };
        script("run", RUN);
        script(PROGRAM, "#!/bin/sh\necho \"$LD_LIBRARY_PATH|$*\"\n");
        fs::write(folder.path().join("commit"), "abc").unwrap();
        for home in ["torch", "other"] {
            fs::create_dir_all(folder.path().join(home).join("lib")).unwrap();
            for name in ["libtorch_cpu.so", "libtorch_cuda.so"] {
                fs::write(folder.path().join(home).join("lib").join(name), "").unwrap();
            }
        }
        // A Python whose torch is in the folder beside it.
        script("python3", "#!/bin/sh\necho \"$(dirname \"$0\")/torch\"\n");
        folder
    }

    /// Without the variables of this process that `run` looks at.
    fn started(folder: &Path) -> Command {
        let mut command = Command::new(folder.join("run"));
        command.env_remove("LIBTORCH").env_remove("LD_LIBRARY_PATH").env("PYTHON", folder.join("python3"));
        command
    }

    #[test]
    fn the_script_finds_the_torch_of_python_and_hands_arguments_on() {
        let folder = bundle();
        let printed = process::read(started(folder.path()).args(["--only", "two words"])).unwrap();
        let (libraries, arguments) = printed.trim().split_once('|').unwrap();
        assert_eq!(libraries, folder.path().join("torch/lib").to_str().unwrap());
        let python = folder.path().join("python3");
        assert!(arguments.contains(&format!("--python {} --commit abc", python.display())), "{arguments}");
        assert!(arguments.ends_with("--only two words"), "{arguments}");
    }

    #[test]
    fn a_libtorch_that_is_named_is_taken_and_paths_that_were_there_stay() {
        let folder = bundle();
        let named = folder.path().join("other");
        let printed =
            process::read(started(folder.path()).env("LIBTORCH", &named).env("LD_LIBRARY_PATH", "/before")).unwrap();
        assert!(printed.starts_with(&format!("{}/lib:/before|", named.display())), "{printed}");
    }

    #[test]
    fn the_script_says_what_is_missing() {
        let folder = bundle();
        let nothing = started(folder.path()).env("PYTHON", "no-such-python").output().unwrap();
        let said = String::from_utf8_lossy(&nothing.stderr).into_owned();
        assert!(!nothing.status.success() && said.contains("LIBTORCH"), "{said}");
        fs::remove_file(folder.path().join("torch/lib/libtorch_cuda.so")).unwrap();
        let without_cuda = started(folder.path()).output().unwrap();
        let said = String::from_utf8_lossy(&without_cuda.stderr).into_owned();
        assert!(!without_cuda.status.success() && said.contains("libtorch_cuda.so"), "{said}");
    }

    #[test]
    fn a_bundle_that_is_too_large_is_refused() {
        assert!(check_size(MOST_BYTES).is_ok());
        let message = check_size(MOST_BYTES + 1).unwrap_err().to_string();
        assert!(message.contains("55.0 MiB") && message.contains("dependencies"), "{message}");
    }

    #[test]
    fn files_in_folders_count_and_reports_do_not() {
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in [("program", 100), ("python/train.py", 20), ("report/report.txt", 3)] {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, vec![0; bytes]).unwrap();
        }
        assert_eq!(bytes_of(folder.path()).unwrap(), 120);
    }

    #[test]
    fn libraries_that_are_missing_and_paths_of_this_machine_are_found() {
        let line = |tag: &str, value: &str| format!(" 0x1 ({tag})   Shared library: [{value}]\n");
        let good: String = NEEDED.iter().map(|name| line("NEEDED", name)).collect();
        assert!(check_links(&good).is_ok());
        let message = check_links(&line("NEEDED", "libtorch_cpu.so")).unwrap_err().to_string();
        assert!(message.contains("not linked with libtorch_cuda.so"), "{message}");
        let message = check_links(&(good + &line("RUNPATH", "/somewhere/lib"))).unwrap_err().to_string();
        assert!(message.contains("/somewhere/lib"), "{message}");
    }
}
