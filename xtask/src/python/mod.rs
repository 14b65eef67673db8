//! The Python side of comparisons: torch from the installed libtorch, Accelerate in a folder of its own.
//!
//! torch is a gigabyte and is there already, so nothing is downloaded but Accelerate and the small
//! packages both need. The folder goes to the user's cache, and no other Python sees it.

mod stand_ins;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::libtorch;
use crate::{paths, process};

/// A Python with torch and Accelerate of the pinned versions.
#[derive(Debug)]
pub(crate) struct Environment {
    python: PathBuf,
    module_path: OsString,
    /// Stands in for CUDA libraries that torch insists on loading and a CPU run never calls.
    stand_ins: Option<PathBuf>,
    /// `torch 2.11.0+cu130, accelerate 1.15.0, …`, as the interpreter reports it.
    pub(crate) versions: String,
}

impl Environment {
    /// The environment, installed if it is not there, checked by importing both packages.
    pub(crate) fn ensure() -> Result<Environment> {
        let python = libtorch::python()?;
        let torch_home = libtorch::python_package_home()?;
        let requirements = Requirements::of_repository()?;
        let folder = ensure_packages(&python, &requirements)?;
        let module_path = std::env::join_paths([folder, torch_home.clone()])?;
        let mut environment = Environment { python, module_path, stand_ins: None, versions: String::new() };
        let stand_ins = paths::cache_folder()?.join(format!("cuda-stand-ins-{}", libtorch::VERSION));
        if stand_ins.is_dir() {
            environment.stand_ins = Some(stand_ins.clone());
        }
        let mut versions = environment.imported_versions();
        if versions.as_ref().is_err_and(|error| format!("{error:#}").contains("cannot open shared object file")) {
            eprintln!("Building stand-ins for the CUDA libraries that torch loads and a CPU run never calls");
            stand_ins::build(&torch_home, &stand_ins)?;
            environment.stand_ins = Some(stand_ins);
            versions = environment.imported_versions();
        }
        environment.versions = versions.context("Python cannot import torch and accelerate")?;
        environment.check_versions(&requirements)?;
        Ok(environment)
    }

    /// The same with Transformers of the pinned version, which is installed into a folder of its own: it brings packages that no
    /// other comparison needs.
    pub(crate) fn with_transformers() -> Result<Environment> {
        let mut environment = Environment::ensure()?;
        let folder = ensure_transformers(&environment.python)?;
        let others: Vec<PathBuf> = std::env::split_paths(&environment.module_path).collect();
        environment.module_path = std::env::join_paths(std::iter::once(folder).chain(others))?;
        const QUESTION: &str = "import transformers; print(transformers.__version__)";
        let version =
            process::read(environment.command().args(["-c", QUESTION])).context("Python cannot import transformers")?;
        environment.versions = format!("{}, transformers {}", environment.versions, version.trim());
        Ok(environment)
    }

    /// The same with TensorBoard of the pinned version, in a folder of its own, too.
    pub(crate) fn with_tensorboard() -> Result<Environment> {
        let mut environment = Environment::ensure()?;
        let folder = ensure_tensorboard(&environment.python)?;
        let others: Vec<PathBuf> = std::env::split_paths(&environment.module_path).collect();
        // Behind the others, which have packages of the same names.
        environment.module_path = std::env::join_paths(others.into_iter().chain([folder]))?;
        const QUESTION: &str = "import tensorboard; print(tensorboard.__version__)";
        let version =
            process::read(environment.command().args(["-c", QUESTION])).context("Python cannot import tensorboard")?;
        environment.versions = format!("{}, tensorboard {}", environment.versions, version.trim());
        Ok(environment)
    }

    /// The same with torchao of the pinned version, in a folder of its own.
    pub(crate) fn with_torchao() -> Result<Environment> {
        let mut environment = Environment::ensure()?;
        let folder = ensure_torchao(&environment.python)?;
        let others: Vec<PathBuf> = std::env::split_paths(&environment.module_path).collect();
        environment.module_path = std::env::join_paths(others.into_iter().chain([folder]))?;
        const QUESTION: &str = "import torchao; print(torchao.__version__)";
        let version =
            process::read(environment.command().args(["-c", QUESTION])).context("Python cannot import torchao")?;
        environment.versions = format!("{}, torchao {}", environment.versions, version.trim());
        Ok(environment)
    }

    /// `python` with this environment's modules; threads and devices as every comparison uses them.
    pub(crate) fn command(&self) -> Command {
        self.with_modules(&self.python)
    }

    pub(crate) fn python(&self) -> &Path {
        &self.python
    }

    /// Another program, which starts this Python: what it starts finds the same modules.
    pub(crate) fn with_modules(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env("PYTHONPATH", &self.module_path).env("ACCELERATE_USE_CPU", "true").env("OMP_NUM_THREADS", "1");
        // A user's own configuration of Accelerate must not change a comparison.
        command.env("HF_HOME", paths::target_folder().join("no-hugging-face-home"));
        if let Some(folder) = &self.stand_ins {
            command.env("LD_LIBRARY_PATH", folder);
        }
        command
    }

    /// `torchrun` for `num_processes` ranks on this machine, on a free port.
    ///
    /// `accelerate launch --cpu --num_processes 2` starts one process, so ranks are started by what
    /// `accelerate launch` itself calls when it starts several.
    pub(crate) fn torchrun(&self, num_processes: usize) -> Result<Command> {
        let mut command = self.command();
        command.args(["-m", "torch.distributed.run", "--nproc_per_node", &num_processes.to_string()]);
        command.args(["--master_addr", "127.0.0.1", "--master_port", &free_port()?.to_string()]);
        Ok(command)
    }

    fn imported_versions(&self) -> Result<String> {
        const QUESTION: &str = "import platform, torch, accelerate\n\
             print(f'torch {torch.__version__}, accelerate {accelerate.__version__}, Python {platform.python_version()}')";
        Ok(process::read(self.command().args(["-c", QUESTION]))?.trim().to_owned())
    }

    fn check_versions(&self, requirements: &Requirements) -> Result<()> {
        for (name, wanted) in [("torch", libtorch::VERSION), ("accelerate", &requirements.accelerate_version)] {
            let found = self.versions.split(", ").find_map(|part| part.strip_prefix(name)).unwrap_or_default().trim();
            if found.split('+').next() != Some(wanted) {
                bail!("the comparison needs {name} {wanted}, and this Python imports {name} {found}");
            }
        }
        Ok(())
    }
}

/// `parity/requirements.txt`.
#[derive(Debug)]
struct Requirements {
    text: String,
    accelerate_version: String,
}

impl Requirements {
    fn of_repository() -> Result<Requirements> {
        let path = paths::repository_root().join("parity/requirements.txt");
        let text = fs::read_to_string(&path).with_context(|| format!("could not read {}", path.display()))?;
        Requirements::parse(text)
    }

    fn parse(text: String) -> Result<Requirements> {
        let version = text.lines().find_map(|line| line.strip_prefix("accelerate=="));
        let accelerate_version = version.context("parity/requirements.txt does not pin accelerate")?.trim().to_owned();
        Ok(Requirements { text, accelerate_version })
    }

    fn lines(&self) -> impl Iterator<Item = &str> {
        self.text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
    }

    /// What pip installs with its dependencies: everything but [`apart`](Self::apart).
    fn others(&self) -> impl Iterator<Item = &str> {
        self.lines().filter(|line| !needs_torch(line))
    }

    /// What pip installs without its dependencies, which would bring torch again.
    fn apart(&self) -> impl Iterator<Item = &str> {
        self.lines().filter(|line| needs_torch(line))
    }
}

fn needs_torch(requirement: &str) -> bool {
    ["accelerate==", "bitsandbytes==", "peft=="].iter().any(|name| requirement.starts_with(name))
}

/// The folder with Accelerate and its small dependencies, for this Python.
fn ensure_packages(python: &Path, requirements: &Requirements) -> Result<PathBuf> {
    let tag = process::read(Command::new(python).args(["-c", "import sys; print(sys.implementation.cache_tag)"]))?;
    let cache = paths::cache_folder()?;
    let folder = cache.join(format!("{}-accelerate-{}", tag.trim(), requirements.accelerate_version));
    ensure_folder(python, folder, &requirements.text, |pip| {
        process::run(pip().args(requirements.others()))?;
        process::run(pip().arg("--no-deps").args(requirements.apart()))
    })
}

/// The folder with Transformers and all that it needs but torch, for this Python.
fn ensure_transformers(python: &Path) -> Result<PathBuf> {
    let path = paths::repository_root().join("parity/models/requirements.txt");
    let text = fs::read_to_string(&path).with_context(|| format!("could not read {}", path.display()))?;
    let tag = process::read(Command::new(python).args(["-c", "import sys; print(sys.implementation.cache_tag)"]))?;
    let folder = paths::cache_folder()?.join(format!("{}-transformers", tag.trim()));
    ensure_folder(python, folder, &text, |pip| process::run(pip().arg("--requirement").arg(&path)))
}

/// The folder with TensorBoard and what it needs to write and read files; not the server, which nobody starts.
fn ensure_tensorboard(python: &Path) -> Result<PathBuf> {
    let path = paths::repository_root().join("parity/tracking/requirements.txt");
    let text = fs::read_to_string(&path).with_context(|| format!("could not read {}", path.display()))?;
    let tag = process::read(Command::new(python).args(["-c", "import sys; print(sys.implementation.cache_tag)"]))?;
    let folder = paths::cache_folder()?.join(format!("{}-tensorboard", tag.trim()));
    ensure_folder(python, folder, &text, |pip| process::run(pip().arg("--no-deps").arg("--requirement").arg(&path)))
}

/// The folder with torchao, for this Python.
fn ensure_torchao(python: &Path) -> Result<PathBuf> {
    let path = paths::repository_root().join("parity/fp8/requirements.txt");
    let text = fs::read_to_string(&path).with_context(|| format!("could not read {}", path.display()))?;
    let tag = process::read(Command::new(python).args(["-c", "import sys; print(sys.implementation.cache_tag)"]))?;
    let folder = paths::cache_folder()?.join(format!("{}-torchao", tag.trim()));
    ensure_folder(python, folder, &text, |pip| process::run(pip().arg("--no-deps").arg("--requirement").arg(&path)))
}

/// A folder of packages, installed by `install` unless it is there and `requirements` are those that it was installed from.
fn ensure_folder(
    python: &Path,
    folder: PathBuf,
    requirements: &str,
    install: impl FnOnce(&dyn Fn() -> Command) -> Result<()>,
) -> Result<PathBuf> {
    let record = folder.join("requirements.txt");
    let is_current = || fs::read_to_string(&record).is_ok_and(|text| text == requirements);
    if is_current() {
        return Ok(folder);
    }
    libtorch::require_pip(python)?;
    let cache = paths::cache_folder()?;
    fs::create_dir_all(&cache).with_context(|| format!("could not create {}", cache.display()))?;
    let _lock = libtorch::lock(&folder.with_added_extension("lock"))?;
    if is_current() {
        return Ok(folder);
    }
    eprintln!("Installing packages of Python into {}", folder.display());
    let fresh = folder.with_added_extension("new");
    for old in [&fresh, &folder] {
        if old.exists() {
            fs::remove_dir_all(old).with_context(|| format!("could not remove {}", old.display()))?;
        }
    }
    install(&|| {
        let mut command = Command::new(python);
        command.args(["-m", "pip", "install", "--quiet", "--no-compile", "--upgrade", "--target"]).arg(&fresh);
        command.env("PIP_DISABLE_PIP_VERSION_CHECK", "1").env("PIP_ROOT_USER_ACTION", "ignore");
        command
    })?;
    fs::write(fresh.join("requirements.txt"), requirements)?;
    fs::rename(&fresh, &folder).with_context(|| format!("could not create {}", folder.display()))?;
    Ok(folder)
}

/// A port nobody listens on now. Someone may take it before it is used; a comparison then fails loudly.
pub(crate) fn free_port() -> Result<u16> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).context("no free port on 127.0.0.1")?;
    Ok(listener.local_addr()?.port())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn accelerate_is_pinned_and_installed_apart() {
        let text =
            "# why\nnumpy\n\naccelerate==1.15.0\nbitsandbytes==0.50.2\npeft==0.21.2\nsafetensors>=0.4.3\n".to_owned();
        let requirements = Requirements::parse(text).unwrap();
        assert_eq!(requirements.accelerate_version, "1.15.0");
        assert_eq!(requirements.others().collect::<Vec<_>>(), ["numpy", "safetensors>=0.4.3"]);
        assert_eq!(
            requirements.apart().collect::<Vec<_>>(),
            ["accelerate==1.15.0", "bitsandbytes==0.50.2", "peft==0.21.2"]
        );
        assert!(Requirements::parse("accelerate>=1\n".to_owned()).is_err());
    }

    #[test]
    fn the_repository_pins_what_it_compares_with() {
        assert_eq!(Requirements::of_repository().unwrap().accelerate_version, "1.15.0");
    }
}
