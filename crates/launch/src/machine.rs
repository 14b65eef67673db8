//! Facts about this machine and this process that a plan depends on, gathered in one place so that
//! planning itself stays pure.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use crate::placement;
use crate::plan::TerminalSize;
use crate::reference::UNLESS_SET;

/// What [`plan`](crate::plan()) needs to know about where it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Cores this process may use (affinity and container limits counted), at least 1.
    pub num_cores: usize,
    /// The numbers of the cores that this process may use.
    pub cores: Vec<usize>,
    /// For each NVIDIA GPU, in the order of the bus, the cores near it; empty where the machine does not say.
    pub gpu_cores: Vec<Vec<usize>>,
    /// `CUDA_VISIBLE_DEVICES` in the environment that the ranks inherit.
    pub cuda_visible_devices: Option<String>,
    /// Standard input is a terminal.
    pub stdin_is_terminal: bool,
    /// Standard output is a terminal.
    pub stdout_is_terminal: bool,
    /// Standard error is a terminal.
    pub stderr_is_terminal: bool,
    /// Size of the terminal behind standard error or output, if there is one.
    pub terminal_size: Option<TerminalSize>,
    /// `OMP_NUM_THREADS` in the environment that the ranks inherit, unless it is empty.
    pub omp_num_threads: Option<String>,
    /// `PYTHONUNBUFFERED` is set in the environment that the ranks inherit.
    pub pythonunbuffered_is_set: bool,
    /// Which of the variables that are set for programs in Python unless somebody has set them are set.
    pub set_variables: Vec<&'static str>,
    /// `PYTHONPATH` in the environment that the ranks inherit.
    pub python_path: Option<OsString>,
    /// The folder in which ranks are started.
    pub working_folder: Option<PathBuf>,
}

impl Machine {
    /// Looks at this machine and this process.
    ///
    /// ```
    /// assert!(accelerate_launch::Machine::probe().num_cores >= 1);
    /// ```
    pub fn probe() -> Self {
        let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        Self {
            num_cores: std::thread::available_parallelism().map_or(1, usize::from),
            cores: placement::cores_of_this_process(),
            gpu_cores: placement::cores_near_gpus(
                Path::new("/proc/driver/nvidia/gpus"),
                Path::new("/sys/bus/pci/devices"),
            ),
            cuda_visible_devices: std::env::var("CUDA_VISIBLE_DEVICES").ok(),
            stdin_is_terminal: std::io::stdin().is_terminal(),
            stdout_is_terminal: std::io::stdout().is_terminal(),
            stderr_is_terminal: std::io::stderr().is_terminal(),
            terminal_size: TerminalSize::of_this_process(),
            omp_num_threads: std::env::var_os("OMP_NUM_THREADS")
                .map(|value| value.to_string_lossy().into_owned())
                .filter(|value| !value.is_empty()),
            pythonunbuffered_is_set: is_set("PYTHONUNBUFFERED"),
            set_variables: UNLESS_SET.into_iter().filter(|name| is_set(name)).collect(),
            python_path: std::env::var_os("PYTHONPATH"),
            working_folder: std::env::current_dir().ok(),
        }
    }
}

/// How many NVIDIA GPUs the ranks will see: the device nodes `nvidia0`, `nvidia1`, ... in `device_folder`
/// (`/dev` on a real machine), narrowed by the value of `CUDA_VISIBLE_DEVICES`.
///
/// ```
/// let empty = std::path::Path::new("/dev/null");
/// assert_eq!(accelerate_launch::num_visible_gpus(empty, None), 0);
/// ```
pub fn num_visible_gpus(device_folder: &Path, cuda_visible_devices: Option<&str>) -> usize {
    let Ok(entries) = std::fs::read_dir(device_folder) else {
        return 0;
    };
    let num_nodes = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| {
            name.strip_prefix("nvidia")
                .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
        })
        .count();
    match cuda_visible_devices {
        None => num_nodes,
        // CUDA stops at the first entry it does not know; -1 is the customary one.
        Some(list) => list
            .split(',')
            .map(str::trim)
            .take_while(|entry| !entry.is_empty() && *entry != "-1")
            .count()
            .min(num_nodes),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(&[], None, 0)]
    #[case(&["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null", "nvidia"], None, 2)]
    #[case(&["nvidia0", "nvidia1"], Some(""), 0)]
    #[case(&["nvidia0", "nvidia1"], Some("1"), 1)]
    #[case(&["nvidia0", "nvidia1"], Some("0, 1"), 2)]
    #[case(&["nvidia0", "nvidia1"], Some("0,-1,1"), 1)]
    #[case(&["nvidia0"], Some("0,1,2,3"), 1)]
    #[case(&["nvidia0", "nvidia1"], Some("GPU-8932f937,MIG-x"), 2)]
    fn gpus_are_device_nodes_narrowed_by_the_variable(
        #[case] nodes: &[&str],
        #[case] variable: Option<&str>,
        #[case] expected: usize,
    ) {
        let folder = tempfile::tempdir().unwrap();
        for node in nodes {
            std::fs::write(folder.path().join(node), "").unwrap();
        }
        assert_eq!(num_visible_gpus(folder.path(), variable), expected);
    }
}
