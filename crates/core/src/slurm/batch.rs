//! The batch script of a run.

use crate::error::environment::EnvironmentErrorKind as Kind;
use crate::settings::shortened;
use crate::{Error, Result};
use std::fmt::Write as _;
use std::time::Duration;

/// A batch script to be written.
///
/// ```
/// use accelerate_core::slurm::BatchJob;
/// let job = BatchJob {
///     name: "train".to_owned(),
///     num_nodes: 2,
///     time: Some("1:00:00".to_owned()),
///     launch: "accelerate launch train".to_owned(),
///     ..Default::default()
/// };
/// assert!(job.script()?.contains("#SBATCH --nodes=2\n#SBATCH --time=1:00:00\n"));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchJob {
    /// What the job is called. Characters that a name cannot have become `_`.
    pub name: String,
    /// How many machines it gets.
    pub num_nodes: usize,
    /// How many processes there will be, if somebody has said it. They become tasks if they divide by the nodes.
    pub num_processes: Option<usize>,
    /// How many GPUs each machine has to have.
    pub gpus_per_node: Option<usize>,
    /// The longest time that it may take, as Slurm reads it: `1:00:00`.
    pub time: Option<String>,
    /// Where to queue it.
    pub partition: Option<String>,
    /// Queue it again when a machine fails, when it is preempted, and when its time is over before it is done.
    pub requeue: bool,
    /// How long before its end a program is told to save.
    pub stop_margin: Duration,
    /// More options of `sbatch`, each a whole one: `--account=lab`.
    pub options: Vec<String>,
    /// The command line that starts the processes, quoted for `bash`.
    pub launch: String,
}

/// Added to the margin, so that the script knows of the end before the ranks do.
const SOONER: Duration = Duration::from_secs(30);
/// What an option of a script may be made of. Slurm has its own rules for quotes in it.
const PLAIN: &str = "_-.,:@%+=/[]&|()*!~^";

impl BatchJob {
    /// The text of the script.
    ///
    /// # Errors
    ///
    /// [`Error::is_environment`]: a value that a line of options cannot hold.
    pub fn script(&self) -> Result<String> {
        let mut script = "#!/bin/bash\n# Written by `accelerate launch`. `sbatch` submits it.\n".to_owned();
        for option in self.all_options()? {
            // Writing to a string cannot fail, here and below.
            let _ = writeln!(script, "#SBATCH {option}");
        }
        script += END_TIME;
        let _ = match self.requeue {
            true => write!(script, "{}", REQUEUE.replace("LAUNCH", &self.launch)),
            false => writeln!(script, "exec {}", self.launch),
        };
        Ok(script)
    }

    fn all_options(&self) -> Result<Vec<String>> {
        let mut options = vec![format!("--job-name={}", job_name(&self.name)), format!("--nodes={}", self.num_nodes)];
        let tasks =
            self.num_processes.filter(|count| self.gpus_per_node.is_none() && count % self.num_nodes.max(1) == 0);
        if let Some(num_processes) = tasks {
            options.push(format!("--ntasks-per-node={}", num_processes / self.num_nodes.max(1)));
        }
        if let Some(num_gpus) = self.gpus_per_node {
            options.push(format!("--gpus-per-node={num_gpus}"));
        }
        for (flag, value) in [("--time", &self.time), ("--partition", &self.partition)] {
            if let Some(value) = value {
                options.push(format!(
                    "{flag}={}",
                    checked(flag, value, "what sbatch takes for it, without spaces and quotes")?
                ));
            }
        }
        options.push("--output=accelerate-%j.out".to_owned());
        options.push("--open-mode=append".to_owned());
        options.push(if self.requeue { "--requeue" } else { "--no-requeue" }.to_owned());
        if self.requeue {
            let seconds = self.stop_margin.saturating_add(SOONER).as_secs().min(u64::from(u16::MAX));
            options.push(format!("--signal=B:USR1@{seconds}"));
        }
        for option in &self.options {
            options.push(checked("--sbatch", option, "one whole option of sbatch, such as --account=lab")?.to_owned());
        }
        Ok(options)
    }
}

/// The value, if a line of options holds it as it is.
fn checked<'a>(flag: &'static str, value: &'a str, wanted: &'static str) -> Result<&'a str> {
    let is_plain = |character: char| character.is_ascii_alphanumeric() || PLAIN.contains(character);
    // Only an option begins with a dash, and it does.
    let is_dashed = value.starts_with('-') == (flag == "--sbatch");
    match !value.is_empty() && is_dashed && value.chars().all(is_plain) {
        true => Ok(value),
        false => Err(Error::new(Kind::BatchValue { flag, value: shortened(value), wanted })),
    }
}

/// The name with `_` for every character that Slurm does not take in one.
///
/// ```
/// assert_eq!(accelerate_core::slurm::job_name("a run"), "a_run");
/// ```
pub fn job_name(name: &str) -> String {
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "_-.".contains(character);
    let name: String = name.chars().map(|character| if is_plain(character) { character } else { '_' }).collect();
    if name.is_empty() { "accelerate".to_owned() } else { name }
}

/// Older versions of Slurm do not say it.
const END_TIME: &str = r#"
# When the allocation ends, for programs that ask `should_stop`.
if [ -z "$SLURM_JOB_END_TIME" ]; then
    end=$(squeue --noheader --job "$SLURM_JOB_ID" --format %e) && [ -n "$end" ] &&
        end=$(date --date "$end" +%s 2>/dev/null) && export SLURM_JOB_END_TIME=$end
fi

"#;

const REQUEUE: &str = r#"# Slurm sends SIGUSR1 some time before the end. The ranks are told, save and end; then the job is queued again.
is_over='' was_told=''
trap 'is_over=yes; was_told=yes; kill -USR1 "$launch"' USR1
# When the job is to end, Slurm signals this shell and the launch. If the shell ended now, the ranks would have no time to save.
trap 'was_told=yes' TERM
LAUNCH &
launch=$!
wait "$launch"
code=$?
# A signal ends the waiting, too.
while [ -n "$was_told" ] && { [ "$code" -eq 138 ] || [ "$code" -eq 143 ]; }; do
    was_told=''
    wait "$launch"
    code=$?
done
# Programs that do not ask `should_stop` are ended by the signal: 138.
if [ -n "$is_over" ] && { [ "$code" -eq 0 ] || [ "$code" -eq 138 ]; }; then
    if scontrol requeue "$SLURM_JOB_ID"; then
        echo "accelerate launch: the time of job $SLURM_JOB_ID is over; it is queued again" >&2
    else
        echo "accelerate launch: error: the time of job $SLURM_JOB_ID is over, and scontrol could not queue it again:" \
            "submit the script once more; the run goes on from its newest checkpoint" >&2
        exit 1
    fi
fi
exit "$code"
"#;
