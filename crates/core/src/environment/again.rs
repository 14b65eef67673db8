//! Whether the same command may be started again by something else than a person: a queue that puts a job back, a job of Kubernetes
//! with new pods, another launcher.

use super::{LAUNCH_ID_VARIABLE, Variables};

/// What each of them sets for what it starts.
const OF_STARTERS: [&str; 7] = [
    LAUNCH_ID_VARIABLE,
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "KUBERNETES_SERVICE_HOST",
    "PBS_JOBID",
    "LSB_JOBID",
];

/// Which variable says that something may start this command again; `None` if there is none, as in a person's shell.
///
/// ```
/// use accelerate_core::environment::started_again_by;
/// let in_job = |name: &str| (name == "SLURM_JOB_ID").then(|| "12".to_owned());
/// assert_eq!(started_again_by(&in_job), Some("SLURM_JOB_ID"));
/// assert_eq!(started_again_by(&|_| None), None);
/// ```
pub fn started_again_by(lookup: &dyn Fn(&str) -> Option<String>) -> Option<&'static str> {
    let variables = Variables { lookup };
    OF_STARTERS.into_iter().find(|name| variables.text(name).is_some())
}
