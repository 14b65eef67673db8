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
/// What Slurm can keep of it.
const LONGEST_LEAD_SECONDS: u64 = u16::MAX as u64;
/// What an option of a script may be made of. Slurm has its own rules for quotes in it.
const PLAIN: &str = "_-.,:@%+=/[]&|()*!~^";

impl BatchJob {
    /// The text of the script.
    ///
    /// # Errors
    ///
    /// [`Error::is_environment`]: a value that a line of options cannot hold; with `requeue`, a time that is not longer than what the job is
    /// told before its end, and one that Slurm cannot keep.
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

    /// How long before the end of its time the job is told. A job that was told as soon as it began would be queued again for ever.
    fn lead(&self) -> Result<Duration> {
        let lead = self.stop_margin.saturating_add(SOONER).as_secs();
        if lead > LONGEST_LEAD_SECONDS {
            return Err(Kind::LongLead { lead, most: LONGEST_LEAD_SECONDS }.into());
        }
        // An option of sbatch's own is behind the flag in the script, and holds.
        let of_option = self.options.iter().rev().find_map(|option| option.strip_prefix("--time="));
        let time = of_option.or(self.time.as_deref());
        // Slurm rounds the time up to minutes, and may signal a minute sooner than it is told.
        let is_short = |time: Duration| time.as_secs().next_multiple_of(60) <= lead + 60;
        match time.filter(|text| duration(text).is_some_and(is_short)) {
            Some(time) => Err(Kind::ShortTime { time: time.to_owned(), lead }.into()),
            None => Ok(Duration::from_secs(lead)),
        }
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
            options.push(format!("--signal=B:USR1@{}", self.lead()?.as_secs()));
        }
        for option in &self.options {
            options.push(checked("--sbatch", option, "one whole option of sbatch, such as --account=lab")?.to_owned());
        }
        Ok(options)
    }
}

/// A time as `sbatch` reads it: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or
/// days-hours:minutes:seconds. `None` for what only Slurm may understand, such as `UNLIMITED`.
fn duration(text: &str) -> Option<Duration> {
    let (days, rest) = text.split_once('-').map_or((None, text), |(days, rest)| (Some(days), rest));
    let numbers: Vec<u64> = rest.split(':').map(|number| number.parse().ok()).collect::<Option<_>>()?;
    let (hours, minutes, seconds) = match (days.is_some(), numbers.as_slice()) {
        (false, [minutes]) => (0, *minutes, 0),
        (false, [minutes, seconds]) => (0, *minutes, *seconds),
        (true, [hours]) => (*hours, 0, 0),
        (true, [hours, minutes]) => (*hours, *minutes, 0),
        (_, [hours, minutes, seconds]) => (*hours, *minutes, *seconds),
        _ => return None,
    };
    let days: u64 = days.map_or(Some(0), |days| days.parse().ok())?;
    let parts = [(days, 86_400), (hours, 3_600), (minutes, 60), (seconds, 1)];
    let total = parts.into_iter().try_fold(0_u64, |total, (count, each)| total.checked_add(count.checked_mul(each)?));
    // Slurm reads 0 as no limit.
    total.filter(|total| *total > 0).map(Duration::from_secs)
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
# `$!` is the launch from the moment it exists; a variable of its own could still be empty when the signal comes.
trap 'is_over=yes; was_told=yes; kill -USR1 "$!"' USR1
# When the job is to end, Slurm signals this shell and the launch. If the shell ended now, the ranks would have no time to save.
trap 'was_told=yes' TERM
LAUNCH &
wait "$!"
code=$?
# A signal ends the waiting, too.
while [ -n "$was_told" ] && { [ "$code" -eq 138 ] || [ "$code" -eq 143 ]; }; do
    was_told=''
    wait "$!"
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("30", Some(1_800))]
    #[case("1:30", Some(90))]
    #[case("2:00:01", Some(7_201))]
    #[case("1-2", Some(93_600))]
    #[case("1-2:3", Some(93_780))]
    #[case("1-2:3:4", Some(93_784))]
    #[case("0", None)]
    #[case("UNLIMITED", None)]
    #[case("1:2:3:4", None)]
    #[case("18446744073709551615", None)]
    fn times_are_read_as_sbatch_does(#[case] text: &str, #[case] seconds: Option<u64>) {
        assert_eq!(duration(text), seconds.map(Duration::from_secs));
    }

    #[rstest]
    #[case("2", 120, true, Some("told to save 150 s before"))]
    #[case("3", 120, true, Some("--time 3 is too short"))]
    #[case("3:01", 120, true, None)]
    #[case("4", 150, true, Some("told to save 180 s before"))]
    #[case("2", 120, false, None)]
    #[case("INFINITE", 120, true, None)]
    #[case("9-0", 100_000, true, Some("at most 65535 s"))]
    fn a_job_is_told_of_its_end_after_its_beginning(
        #[case] time: &str,
        #[case] margin: u64,
        #[case] requeue: bool,
        #[case] wanted: Option<&str>,
    ) {
        let stop_margin = Duration::from_secs(margin);
        let job = BatchJob { num_nodes: 1, time: Some(time.to_owned()), requeue, stop_margin, ..Default::default() };
        let error = job.script().err();
        assert_eq!(error.is_some(), wanted.is_some(), "{error:?}");
        let is_right = |(error, words): (&Error, &str)| error.is_environment() && error.to_string().contains(words);
        assert!(error.as_ref().zip(wanted).is_none_or(is_right), "{error:?}");
    }
}
