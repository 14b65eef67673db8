//! Slurm's own commands: what they are asked, and what they say.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output};

use accelerate_core::files::{ShownPath, in_one_line};
use accelerate_core::slurm::Job;
use accelerate_launch::{Limits, ask, temporary_folder};

/// What Slurm could not do.
#[derive(Debug, thiserror::Error)]
pub(super) enum SlurmError {
    #[error(
        "{tool} cannot be run, and it is Slurm's: say --slurm on a machine where jobs are submitted, or --emit slurm to get the script"
    )]
    NoSlurm { tool: &'static str, source: accelerate_launch::Error },
    #[error(
        "sbatch was not waited for any longer, so it is not known whether the job is submitted; `squeue --me --name {name}` shows it, \
         and `scancel --me --name {name}` ends it"
    )]
    Unanswered { name: String, source: accelerate_launch::Error },
    #[error("Slurm has refused the job: {answer}")]
    Refused { answer: String },
    #[error("{tool} has failed: {answer}")]
    Failed { tool: &'static str, answer: String },
    #[error(
        "the script of the job cannot be written to {}, from where sbatch would read it; set TMPDIR to a folder in which this user \
         may make files", place.shown()
    )]
    Script { place: PathBuf, source: std::io::Error },
    #[error("Slurm does not know job {job} any more, so how it has ended is unknown; `sacct --jobs {job}` may tell")]
    Forgotten { job: String },
}

impl SlurmError {
    /// The signal by which this command was told to stop while it waited for Slurm.
    pub(super) fn stopped_by(&self) -> Option<i32> {
        match self {
            Self::NoSlurm { source, .. } | Self::Unanswered { source, .. } => source.stopped_by(),
            _ => None,
        }
    }

    /// As a shell's where the command is not there, or may not be run.
    pub(super) fn exit_code(&self) -> u8 {
        match self {
            Self::NoSlurm { source, .. } | Self::Unanswered { source, .. } => source.exit_code(),
            _ => 1,
        }
    }
}

/// Submits the script, and returns the number of the job.
pub(super) fn submit(script: &str) -> Result<String, SlurmError> {
    let written = tempfile::NamedTempFile::new_in(temporary_folder())
        .and_then(|mut file| file.write_all(script.as_bytes()).map(|()| file));
    let file = written.map_err(|source| SlurmError::Script { place: temporary_folder(), source })?;
    let output =
        asked("sbatch", Command::new("sbatch").arg("--parsable").arg(file.path())).map_err(|error| match error {
            // It may have handed the job over.
            SlurmError::NoSlurm { source, .. } if source.is_limit_passed() || source.is_interrupted() => {
                SlurmError::Unanswered { name: job_name(script).to_owned(), source }
            }
            other => other,
        })?;
    if !output.status.success() {
        return Err(SlurmError::Refused { answer: said(&output) });
    }
    let answer = String::from_utf8_lossy(&output.stdout);
    // On a cluster of clusters its name follows.
    let job = answer.trim().split(';').next().unwrap_or_default();
    match !job.is_empty() && job.bytes().all(|byte| byte.is_ascii_digit()) {
        true => Ok(job.to_owned()),
        false => Err(SlurmError::Failed { tool: "sbatch", answer: in_one_line(answer.trim()) }),
    }
}

/// As the options of a script say it, the last of them.
fn job_name(script: &str) -> &str {
    let mut last_first = script.lines().rev().filter_map(|line| line.strip_prefix("#SBATCH --job-name="));
    last_first.next().unwrap_or_default()
}

/// What Slurm knows of a job; `None` if it does not answer now, as while its controller starts again.
pub(super) fn look(job: &str) -> Result<Option<Job>, SlurmError> {
    let output = match asked("scontrol", Command::new("scontrol").args(["show", "job", job])) {
        Err(SlurmError::NoSlurm { source, .. }) if source.is_limit_passed() => return Ok(None),
        answered => answered?,
    };
    if output.status.success() {
        return Ok(Some(Job::parse(&String::from_utf8_lossy(&output.stdout))));
    }
    match said(&output).contains("Invalid job id") {
        true => Err(SlurmError::Forgotten { job: job.to_owned() }),
        false => Ok(None),
    }
}

/// Ends the job. One that is over already is left as it is.
pub(super) fn cancel(job: &str) -> Result<(), SlurmError> {
    let output = asked("scancel", Command::new("scancel").args(["--quiet", job]))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(SlurmError::Failed { tool: "scancel", answer: said(&output) }),
    }
}

fn asked(tool: &'static str, command: &mut Command) -> Result<Output, SlurmError> {
    ask(command, Limits::default()).map_err(|source| SlurmError::NoSlurm { tool, source })
}

/// What a command of Slurm complains of, in one line.
fn said(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    match text.trim() {
        "" => format!("it ended with {}", output.status),
        text => in_one_line(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_name_of_a_script_is_that_of_its_job() {
        let script = "#!/bin/bash\n#SBATCH --job-name=train\n#SBATCH --nodes=1\n#SBATCH --job-name=other\n";
        assert_eq!((job_name(script), job_name("")), ("other", ""));
    }
}
