//! What programs find under Python Accelerate's launcher, so that an unmodified program in Python finds it here.
//!
//! Settings that nobody said, and torchrun's names for the place of a rank, mean nothing to a program in Rust, so every program
//! gets them. What would change how a program in Rust runs only programs in Python get.

use std::collections::BTreeMap;
use std::ffi::OsString;

use accelerate_core::config::RunConfig;
use accelerate_core::environment::RESTART_COUNT_VARIABLE;
use serde::{Deserialize, Serialize};

use crate::config::{LaunchConfig, Program};
use crate::machine::Machine;

/// What a launch takes over from Python Accelerate's. The default is nothing but torchrun's names.
///
/// ```
/// use accelerate_core::config::{RunConfig, Sources};
/// use accelerate_launch::{LaunchConfig, Program, PythonStart};
/// let config = LaunchConfig::of_run(&RunConfig::resolve(Sources::default())?, Program::guess("train.py".as_ref()), 1);
/// assert_eq!(config.reference.unasked["ACCELERATE_MIXED_PRECISION"], "no");
/// assert_eq!(config.reference.python, Some(PythonStart::Alone { on_cpu: false }));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reference {
    /// Variables of settings that nobody has said ([`RunConfig::unasked_variables`]), and the one that says so of them.
    pub unasked: BTreeMap<String, String>,
    /// How that launcher would start this program; `None` for a program that is not in Python.
    pub python: Option<PythonStart>,
}

/// How Python Accelerate's launcher starts a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PythonStart {
    /// As one process that does not know of ranks.
    Alone {
        /// It stays on the CPU.
        on_cpu: bool,
    },
    /// By torchrun, as ranks, even if there is one only: sharding begins with a rank.
    Ranks,
    /// The same for DeepSpeed.
    RanksOfDeepSpeed,
}

impl Reference {
    pub(crate) fn of_run(run: &RunConfig, program: &Program, num_processes: usize) -> Self {
        let cluster = &run.cluster;
        let start = match (cluster.use_deepspeed, cluster.use_fsdp) {
            (true, _) => PythonStart::RanksOfDeepSpeed,
            (_, true) => PythonStart::Ranks,
            _ if num_processes > 1 || run.is_multi_gpu() => PythonStart::Ranks,
            _ => PythonStart::Alone { on_cpu: cluster.use_cpu },
        };
        Self { unasked: run.unasked_variables(num_processes), python: program.is_python().then_some(start) }
    }

    /// Does the program know of ranks although it is a single process?
    pub(crate) fn numbers_a_single_process(&self) -> bool {
        matches!(self.python, Some(PythonStart::Ranks | PythonStart::RanksOfDeepSpeed))
    }
}

/// The variables by which processes learn of restarts. Also one that is alone gets them where it may be restarted.
pub(crate) const OF_RESTARTS: [&str; 2] = [RESTART_COUNT_VARIABLE, "TORCHELASTIC_MAX_RESTARTS"];

/// torchrun's names for the place of a rank, beside those that [`plan`](crate::plan()) gives in any case. No agent serves a store,
/// so rank 0 does.
pub(crate) fn of_torchrun(config: &LaunchConfig, rank: usize) -> [(&'static str, String); 8] {
    [
        ("GROUP_WORLD_SIZE", config.num_machines.to_string()),
        ("ROLE_RANK", rank.to_string()),
        ("ROLE_WORLD_SIZE", config.num_processes.to_string()),
        ("ROLE_NAME", config.role.clone()),
        (OF_RESTARTS[0], config.restart_count.to_string()),
        (OF_RESTARTS[1], config.max_restarts.to_string()),
        ("TORCHELASTIC_RUN_ID", "none".to_owned()),
        ("TORCHELASTIC_USE_AGENT_STORE", "False".to_owned()),
    ]
}

/// What only programs in Python get: how libraries behave, and where modules are found. Variables that are set already stay.
pub(crate) fn of_python(config: &LaunchConfig, machine: &Machine) -> Vec<(&'static str, OsString)> {
    let mut variables: Vec<(&'static str, OsString)> = match config.reference.python {
        None | Some(PythonStart::Alone { on_cpu: false }) => Vec::new(),
        Some(PythonStart::Alone { on_cpu: true }) => {
            vec![("KMP_AFFINITY", "granularity=fine,compact,1,0".into()), ("KMP_BLOCKTIME", "1".into())]
        }
        Some(PythonStart::Ranks | PythonStart::RanksOfDeepSpeed) => {
            vec![("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1".into())]
        }
    };
    variables.retain(|(name, _)| !machine.set_variables.iter().any(|set| set == name));
    if config.reference.python == Some(PythonStart::RanksOfDeepSpeed)
        && let Some(folder) = &machine.working_folder
    {
        variables.push(("PYTHONPATH", with_folder(machine.python_path.clone(), folder)));
    }
    variables
}

/// The names of variables that a launch sets for programs in Python only where they are not set.
pub(crate) const UNLESS_SET: [&str; 3] = ["KMP_AFFINITY", "KMP_BLOCKTIME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"];

fn with_folder(path: Option<OsString>, folder: &std::path::Path) -> OsString {
    match path.filter(|path| !path.is_empty()) {
        Some(mut path) => {
            path.push(":");
            path.push(folder);
            path
        }
        None => folder.into(),
    }
}
