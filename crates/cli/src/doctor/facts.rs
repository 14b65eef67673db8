//! What is looked at on a machine. Nothing is judged here.

use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};

use accelerate_core::config::{ConfigFile, RunConfig, Sources};
use accelerate_launch::num_visible_gpus;
use accelerate_setup::Libtorch;
use rustix::process::{Resource, getrlimit};

use crate::config_file;
use crate::versions::version;

/// The port at which ranks meet where nobody says another.
pub(super) const DEFAULT_PORT: u16 = 29500;

/// What was seen. `None` is what could not be seen.
#[derive(Debug)]
pub(super) struct Facts {
    /// The libtorch of the project or of the cache, or why it cannot be used.
    pub(super) libtorch: Result<Option<Libtorch>, String>,
    /// Is there a project?
    pub(super) is_in_project: bool,
    /// The default configuration file, or why it cannot be read.
    pub(super) config: Result<Option<ConfigSeen>, String>,
    /// What the C++ compiler and Rust's say of their versions.
    pub(super) cpp: Version,
    pub(super) rustc: Version,
    pub(super) cargo: Version,
    pub(super) num_gpus: usize,
    /// The version of NVIDIA's driver.
    pub(super) driver: Option<String>,
    /// Two ends of a connection within this machine, or why there are none.
    pub(super) loopback: Result<(), String>,
    pub(super) default_port_is_free: bool,
    pub(super) shared_memory_bytes: Option<u64>,
    pub(super) ptrace_scope: Option<u32>,
    pub(super) open_files: Option<u64>,
    pub(super) num_cores: usize,
    pub(super) omp_num_threads: Option<String>,
    /// What the machine has left, and what this process's group may have.
    pub(super) available_bytes: Option<u64>,
    pub(super) cgroup_limit_bytes: Option<u64>,
}

/// What a program says of its version: `None` where there is none, and why it does not answer.
pub(super) type Version = Result<Option<String>, String>;

/// A configuration file, as far as it is judged.
#[derive(Debug)]
pub(super) struct ConfigSeen {
    pub(super) path: PathBuf,
    /// What a launch would refuse, and what it would warn of.
    pub(super) errors: Vec<String>,
    pub(super) num_warnings: usize,
}

impl Facts {
    /// Looks at this machine, and at the project that `folder` is in.
    pub(super) fn of_this_machine(folder: &Path) -> Facts {
        let variable = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
        Facts {
            libtorch: accelerate_setup::find(folder).map_err(|error| error.to_string()),
            is_in_project: accelerate_setup::project_root(folder).is_some(),
            config: default_config(),
            cpp: version(variable("CXX").unwrap_or_else(|| "c++".to_owned())),
            rustc: version("rustc"),
            cargo: version("cargo"),
            num_gpus: num_visible_gpus(Path::new("/dev"), variable("CUDA_VISIBLE_DEVICES").as_deref()),
            driver: read("/sys/module/nvidia/version"),
            loopback: connect().map_err(|error| error.to_string()),
            default_port_is_free: TcpListener::bind((Ipv4Addr::LOCALHOST, DEFAULT_PORT)).is_ok(),
            shared_memory_bytes: rustix::fs::statvfs("/dev/shm").ok().map(|found| found.f_blocks * found.f_frsize),
            ptrace_scope: read("/proc/sys/kernel/yama/ptrace_scope").and_then(|text| text.parse().ok()),
            // No limit is more than any number.
            open_files: Some(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)),
            num_cores: std::thread::available_parallelism().map_or(1, usize::from),
            omp_num_threads: variable("OMP_NUM_THREADS"),
            available_bytes: read("/proc/meminfo").and_then(|text| available_bytes(&text)),
            cgroup_limit_bytes: cgroup_limit_bytes(),
        }
    }
}

/// What `accelerate config validate` would say of the default file.
fn default_config() -> Result<Option<ConfigSeen>, String> {
    let Some(found) = config_file::find(None, &config_file::variable) else { return Ok(None) };
    let text = config_file::read(&found.path).map_err(|error| error.to_string())?;
    let (file, mut errors) = ConfigFile::read_all(&text, &found.path);
    let (others, warnings) = RunConfig::problems(Sources { file: Some(file), ..Default::default() });
    errors.extend(others);
    let errors = errors.iter().map(ToString::to_string).collect();
    Ok(Some(ConfigSeen { path: found.path, errors, num_warnings: warnings.len() }))
}

fn connect() -> std::io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    TcpStream::connect(listener.local_addr()?).map(drop)
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// The limit of version 2 or of version 1, as a container sees it. Without a limit, version 1 says a huge number.
fn cgroup_limit_bytes() -> Option<u64> {
    let places = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    places.iter().find_map(|path| read(path)?.parse().ok()).filter(|bytes| *bytes < 1 << 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_out_of_the_kernels_file() {
        assert_eq!(available_bytes("MemTotal: 9 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
        assert_eq!(available_bytes("MemAvailable: much kB\n"), None);
        assert_eq!(available_bytes(""), None);
    }
}
