//! What is said about machines that cannot take part, or are lost.

use std::ffi::OsStr;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use accelerate_core::files::{ShownPath, in_one_line};
use accelerate_core::names::counted;

use super::AgentCommand;
use super::message::{Problem, VERSION};
use crate::failure::{Ended, LeftBehind};

/// Clocks further apart than this meet deadlines at different times.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(5);

pub(super) fn other_version(found: &str) -> Problem {
    failed(format!(
        "accelerate is of version {} there and of {VERSION} here; install the same version on all machines",
        in_one_line(found.trim())
    ))
}

/// Lines of the connecting program that are told with a machine that is left out.
const MOST_WORDS_OF_ONE_LEFT_OUT: usize = 3;

/// Something that no agent says at this time, or of these ranks.
pub(super) fn untrue(what: &str) -> Problem {
    failed(format!(
        "it sent {what}; no agent does, so look what runs as accelerate there, and whether it is the same as here"
    ))
}

pub(super) fn stopped_there() -> Problem {
    failed("somebody has told accelerate on that machine to stop".to_owned())
}

pub(super) fn heard_nothing(timeout: Duration) -> Problem {
    failed(format!(
        "accelerate on that machine has ended its ranks, because it heard nothing from here for {} s; if the network or this \
         launcher may be away for longer, raise --connection_timeout",
        timeout.as_secs_f64()
    ))
}

/// The other way round. What runs there ends when it notices, so there may be some time in which it does not.
pub(super) fn says_nothing(timeout: Duration, ranks: &Range<usize>) -> Problem {
    failed(format!(
        "it has said nothing for {} s while {}; look whether it is cut off, stopped or overloaded, and whether ranks are left there; \
         if it may be silent for longer, raise --connection_timeout",
        timeout.as_secs_f64(),
        were_running(ranks)
    ))
}

/// The program that connects, such as `ssh`, ended before the agent had said how its ranks did. `ranks` are those that were
/// started.
pub(super) fn broken(
    program: &OsStr,
    ended: Ended,
    has_greeted: bool,
    ranks: Option<Range<usize>>,
    last_words: &[String],
) -> Problem {
    let program = Path::new(Path::new(program).file_name().unwrap_or(program)).shown();
    let what = match (has_greeted, ended, ranks) {
        (false, Ended::Exited(255), _) => {
            format!("it could not be connected to ({program} {ended}); logging in must work without a question")
        }
        (false, ..) => format!(
            "accelerate did not start there ({program} {ended}); install this version at the same path, or where PATH of a \
             remote command leads"
        ),
        (true, _, Some(ranks)) => {
            format!("the connection broke while {} ({program} {ended})", were_running(&ranks))
        }
        (true, _, None) => format!("the connection broke before the start ({program} {ended})"),
    };
    failed(with_words(what, last_words))
}

/// What to do where the command that leads to the machines is not here. The nodes of a Slurm job are reached by `srun` and nothing else,
/// so there it takes another list of machines.
pub(super) fn without_command(program: &OsStr, agents: &[AgentCommand]) -> String {
    const MOST: usize = 4;
    if Path::new(program).file_name() != Some(OsStr::new("srun")) {
        return "install it, or name another one with --ssh_command".to_owned();
    }
    let hosts: Vec<_> =
        agents.iter().take(MOST).map(|agent| format!("{}:{}", agent.machine, agent.num_processes)).collect();
    let more = if agents.len() > MOST { ",..." } else { "" };
    format!(
        "start the launch where Slurm's commands are, or name the nodes of the job, which are reached by ssh then: --hosts {}{more}",
        hosts.join(",")
    )
}

/// Where ranks of a machine would wait for those of others, which another one does not reach.
pub(super) fn out_of_reach(from: &str, to: &str, address: SocketAddr, why: &str) -> Problem {
    failed(format!(
        "{from} does not reach {to} at {}, the address of that machine's own name, where its ranks would wait for others ({}); open the \
         ports of {to} to the other machines, let its name lead there to an address that they reach (/etc/hosts), or name an interface \
         there with GLOO_SOCKET_IFNAME",
        address.ip(),
        in_one_line(why)
    ))
}

/// What is done because of one machine to the ranks of the others.
pub(super) fn ending(because: &str, num_ranks: usize) -> String {
    format!("{because}; ending {} elsewhere", counted(num_ranks, "rank"))
}

/// A machine that cannot take part, where the others are enough.
pub(super) fn left_out(num_machines: usize, num_processes: usize, why: &str) -> String {
    let machines =
        if num_machines == 1 { "1 machine starts".to_owned() } else { format!("{num_machines} machines start") };
    // What ssh has said stands in lines below the reason, and a notice has one.
    let mut lines = why.lines().map(str::trim).filter(|line| !line.is_empty());
    let reason = lines.next().unwrap_or_default();
    let words: Vec<_> = lines.collect();
    // The last ones say why.
    let last = &words[words.len().saturating_sub(MOST_WORDS_OF_ONE_LEFT_OUT)..];
    let words = if last.is_empty() { String::new() } else { format!(" ({})", last.join(" | ")) };
    format!("left out, so {machines} {} without it, because {reason}{words}", counted(num_processes, "process"))
}

/// What keeps a machine from another attempt.
pub(super) fn goes_on(left: &LeftBehind) -> String {
    match left.survivors.first() {
        Some(survivor) => format!("process {} of an earlier attempt is still there", survivor.process_id),
        None => "it has not said that the ranks of an earlier attempt have ended".to_owned(),
    }
}

/// A machine that took too long before the start.
pub(super) fn silent(patience: Duration, last_words: &[String]) -> Problem {
    let seconds = patience.as_secs_f64();
    let what = format!(
        "it did not answer within {seconds} s; log in there by hand to see why, and raise --connection_timeout if it needs longer"
    );
    failed(with_words(what, last_words))
}

/// A machine that took too long to end its ranks.
pub(super) fn end_not_told(last_words: &[String]) -> Problem {
    let what = "it did not say in time that its ranks have ended; look whether some are left there";
    failed(with_words(what.to_owned(), last_words))
}

/// What the first machine saves is not found there. Both may be meant.
pub(super) fn other_folder(first: &str) -> String {
    format!(
        "its working folder has the same path as that of {first} and is another one, so what one machine saves there the others do \
         not find"
    )
}

/// GPUs that do not suit the processes: of this machine, and the most that any machine of the run has.
pub(super) fn gpus(num_gpus: usize, num_processes: usize, most: usize) -> Option<String> {
    match num_gpus {
        0 if most > 0 => {
            Some(format!("it has no visible GPU, and another machine has {most}; its processes compute on the CPU"))
        }
        1.. if num_processes > num_gpus => Some(format!(
            "its {num_processes} processes share {}; give it fewer processes, or look at CUDA_VISIBLE_DEVICES",
            counted(num_gpus, "visible GPU")
        )),
        _ => None,
    }
}

/// A clock that differs, if it matters.
pub(super) fn clock(theirs: Duration, ours: Duration) -> Option<String> {
    let (difference, how) = match theirs.checked_sub(ours) {
        Some(difference) => (difference, "ahead of"),
        None => (ours.saturating_sub(theirs), "behind"),
    };
    (difference > CLOCK_TOLERANCE).then(|| {
        let seconds = difference.as_secs();
        format!("its clock is {seconds} s {how} that of this machine; set both by NTP, or --stop_at comes at different times")
    })
}

fn were_running(ranks: &Range<usize>) -> String {
    match ranks.len() {
        0 | 1 => format!("rank {} was running", ranks.start),
        _ => format!("ranks {}-{} were running", ranks.start, ranks.end.saturating_sub(1)),
    }
}

fn failed(text: String) -> Problem {
    Problem { text, exit_code: 1 }
}

fn with_words(text: String, last_words: &[String]) -> String {
    last_words.iter().fold(text, |text, line| format!("{text}\n    {line}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::refused(255, false, None, "it could not be connected to (ssh exited with code 255)")]
    #[case::missing(127, false, None, "accelerate did not start there (ssh exited with code 127)")]
    #[case::lost(255, true, Some(4..6), "while ranks 4-5 were running (ssh exited with code 255)")]
    #[case::lost_early(255, true, None, "broke before the start")]
    fn a_connection_that_breaks_is_told_with_its_own_words(
        #[case] code: i32,
        #[case] has_greeted: bool,
        #[case] ranks: Option<Range<usize>>,
        #[case] words: &str,
    ) {
        let problem = broken(
            OsStr::new("/usr/bin/ssh"),
            Ended::Exited(code),
            has_greeted,
            ranks,
            &["Connection refused".to_owned()],
        );
        assert!(problem.text.contains(words) && problem.text.ends_with("\n    Connection refused"), "{problem:?}");
    }

    /// Another command of the same kind does not lead to the nodes of a job.
    #[rstest]
    #[case("ssh", 2, "install it, or name another one with --ssh_command")]
    #[case("srun", 2, "are reached by ssh then: --hosts n0:4,n1:4")]
    #[case("/usr/bin/srun", 6, "--hosts n0:4,n1:4,n2:4,n3:4,...")]
    fn a_command_that_is_not_here_has_a_cure(#[case] program: &str, #[case] num_machines: usize, #[case] words: &str) {
        let agents: Vec<_> = (0..num_machines).map(|number| AgentCommand::here(&format!("n{number}"), 4)).collect();
        let cure = without_command(OsStr::new(program), &agents);
        assert!(cure.ends_with(words), "{cure}");
    }

    #[test]
    fn one_is_singular() {
        assert_eq!(ending("it is gone", 1), "it is gone; ending 1 rank elsewhere");
        assert_eq!(left_out(1, 1, "x"), "left out, so 1 machine starts 1 process without it, because x");
        assert_eq!(left_out(2, 16, "x"), "left out, so 2 machines start 16 processes without it, because x");
    }

    #[test]
    fn a_machine_that_is_left_out_keeps_the_words_of_ssh() {
        let Problem { text, .. } = broken(
            OsStr::new("ssh"),
            Ended::Exited(255),
            false,
            None,
            &["kex_exchange: reset".to_owned(), "port 22: refused".to_owned()],
        );
        let told = left_out(1, 1, &text);
        let words = "logging in must work without a question (kex_exchange: reset | port 22: refused)";
        assert!(told.ends_with(words) && !told.contains('\n'), "{told}");
    }

    #[rstest]
    #[case(0, 4, 0, None)]
    #[case(4, 4, 4, None)]
    #[case(8, 4, 8, None)]
    #[case(0, 4, 8, Some("no visible GPU"))]
    #[case(2, 4, 8, Some("4 processes share 2"))]
    fn gpus_that_do_not_suit_are_told(
        #[case] own: usize,
        #[case] ranks: usize,
        #[case] most: usize,
        #[case] words: Option<&str>,
    ) {
        let found = gpus(own, ranks, most);
        assert_eq!(found.is_some(), words.is_some());
        assert!(found.unwrap_or_default().contains(words.unwrap_or_default()));
    }

    #[rstest]
    #[case(100, 104, None)]
    #[case(104, 100, None)]
    #[case(140, 100, Some("40 s ahead of"))]
    #[case(0, 100, Some("100 s behind"))]
    fn clocks_that_differ_are_told(#[case] theirs: u64, #[case] ours: u64, #[case] words: Option<&str>) {
        let found = clock(Duration::from_secs(theirs), Duration::from_secs(ours));
        assert_eq!(found.is_some(), words.is_some());
        assert!(found.unwrap_or_default().contains(words.unwrap_or_default()));
    }
}
