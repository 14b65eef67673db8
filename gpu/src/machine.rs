//! What the machine is, for the report, and what a process of its own sees of it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use accelerate::Accelerator;
use accelerate::tch::{Cuda, Device};
use accelerate_launch::{Limits, ask};
use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

/// What a process of this program sees.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Probe {
    pub(crate) num_devices: i64,
    /// The device that an accelerator takes, as PyTorch writes it.
    pub(crate) device: String,
}

/// The machine, in the words of the programs that know it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) system: String,
    pub(crate) processor: String,
    pub(crate) gpu: String,
    pub(crate) driver: String,
    pub(crate) libtorch: String,
    pub(crate) python: String,
    pub(crate) commit: String,
    pub(crate) date: String,
}

const NO_GPU: &str = "none";

/// Prints a [`Probe`] of this process.
pub(crate) fn probe() -> Result<()> {
    let device = match Accelerator::builder().build()?.device() {
        Device::Cuda(index) => format!("cuda:{index}"),
        other => format!("{other:?}").to_lowercase(),
    };
    println!("{}", serde_json::to_string(&Probe { num_devices: Cuda::device_count(), device })?);
    Ok(())
}

/// What a process of `program` sees, with these variables; an error is what it says.
pub(crate) fn probe_of(program: &Path, variables: &[(&str, &str)]) -> Result<Probe> {
    let mut command = Command::new(program);
    command.arg("probe").envs(variables.iter().copied());
    // The first use of a GPU by a machine may take long.
    let limits = Limits { time: Some(Duration::from_secs(60)), ..Limits::default() };
    let output = ask(&mut command, limits)?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().next_back().unwrap_or_default();
    serde_json::from_str(last).with_context(|| format!("the probe printed {last:?}"))
}

impl Machine {
    /// Whether the driver's own program shows a GPU.
    pub(crate) fn has_gpu(&self) -> bool {
        self.gpu != NO_GPU
    }

    pub(crate) fn look(python: &Python, commit: Option<String>) -> Self {
        let unknown = || "unknown".to_owned();
        let line = |program: &str, arguments: &[&str]| {
            let limits = Limits { time: Some(Duration::from_secs(5)), ..Limits::default() };
            let output = ask(Command::new(program).args(arguments), limits).ok()?;
            let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            (output.status.success() && !text.is_empty()).then_some(text)
        };
        let gpu = |field: &str| line("nvidia-smi", &[&format!("--query-gpu={field}"), "--format=csv,noheader"]);
        let joined = |text: String| text.lines().collect::<Vec<_>>().join("; ");
        Self {
            system: line("uname", &["-srm"]).unwrap_or_else(unknown),
            processor: processor().unwrap_or_else(unknown),
            gpu: gpu("name,memory.total").map_or_else(|| NO_GPU.to_owned(), joined),
            driver: gpu("driver_version").map_or_else(|| "none".to_owned(), joined),
            libtorch: libtorch().unwrap_or_else(unknown),
            python: match python {
                Python::Found { versions, .. } => versions.clone(),
                Python::NotWanted => "none, as was asked for".to_owned(),
                Python::Unusable { reason } => format!("none that can be compared with: {reason}"),
            },
            commit: commit.unwrap_or_else(unknown),
            date: jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M:%S UTC").to_string(),
        }
    }
}

/// The Python whose numbers are compared with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Python {
    /// It imports what comparisons need.
    Found {
        program: PathBuf,
        versions: String,
    },
    /// `--python none`.
    NotWanted,
    Unusable {
        reason: String,
    },
}

/// What stands in the place of a Python where none is to be compared with.
pub(crate) const NO_PROGRAM: &str = "none";

impl Python {
    /// Asks a Python for its versions.
    pub(crate) fn ask(program: &Path) -> Self {
        const MARK: &str = "versions: ";
        const QUESTION: &str = "import platform, torch, accelerate\n\
             print(f'versions: torch {torch.__version__}, accelerate {accelerate.__version__}, Python \
             {platform.python_version()}')";
        if program == Path::new(NO_PROGRAM) {
            return Self::NotWanted;
        }
        let limits = Limits { time: Some(Duration::from_secs(60)), ..Limits::default() };
        let output = match ask(Command::new(program).args(["-c", QUESTION]), limits) {
            Ok(output) => output,
            Err(error) => return Self::Unusable { reason: format!("{} does not start: {error}", program.display()) },
        };
        let last_line =
            |bytes: &[u8]| String::from_utf8_lossy(bytes).lines().next_back().unwrap_or_default().to_owned();
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        // Packages may print something of theirs before and after.
        match printed.lines().find_map(|line| line.strip_prefix(MARK)) {
            Some(versions) if versions.starts_with("torch 2.11.") => {
                Self::Found { program: program.to_owned(), versions: versions.to_owned() }
            }
            Some(versions) => Self::Unusable { reason: format!("it has {versions}, and torch 2.11 is wanted") },
            None => Self::Unusable { reason: last_line(&output.stderr) },
        }
    }

    pub(crate) fn program(&self) -> Option<&Path> {
        match self {
            Self::Found { program, .. } => Some(program),
            Self::NotWanted | Self::Unusable { .. } => None,
        }
    }
}

fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'))?.1.trim();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Some(format!("{cores} cores of {name}"))
}

/// Where this process has libtorch from, and its version if the folder tells it.
fn libtorch() -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let path = maps
        .lines()
        .find_map(|line| line.split_whitespace().nth(5).filter(|path| path.ends_with("libtorch_cpu.so")))?;
    let home = Path::new(path).parent()?.parent()?;
    let version = std::fs::read_to_string(home.join("version.py")).ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("__version__ ="))?.trim().to_owned();
        Some(line.trim_matches(['\'', '"']).to_owned())
    });
    Some(version.unwrap_or_else(|| "of an unknown version".to_owned()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    /// Packages print when they are imported and at the end, and are missing; none of that makes comparisons vanish without a reason.
    #[test]
    fn a_python_is_known_by_what_it_says() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("python3");
        let said = |script: &str| {
            std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
            Python::ask(&program)
        };
        let versions = "torch 2.11.0, accelerate 1.15.0, Python 3.12";
        let found = said(&format!("echo hello; echo 'versions: {versions}'; echo bye"));
        assert_eq!(found, Python::Found { program: program.clone(), versions: versions.to_owned() });
        for (script, words) in [
            ("echo 'versions: torch 2.6.0'", "torch 2.11 is wanted"),
            (
                "echo hello; echo first >&2; echo \"ImportError: no accelerate\" >&2; exit 1",
                "ImportError: no accelerate",
            ),
        ] {
            let Python::Unusable { reason } = said(script) else { panic!("{script}") };
            assert!(reason.contains(words), "{reason}");
        }
        assert!(matches!(Python::ask(Path::new("no-such-python")), Python::Unusable { .. }));
        assert_eq!(Python::ask(Path::new("none")), Python::NotWanted);
    }
}
