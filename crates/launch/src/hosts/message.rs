//! What the launcher and the agents of a run tell each other: a JSON object on each line, and behind the line that announces
//! output the bytes themselves.
//!
//! An agent begins with a greeting and ends with how its ranks did. What a remote shell prints before and after, such as a message of the
//! day, is no message.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::time::Duration;

use accelerate_core::status::{LauncherName, RankSummary};
use serde::{Deserialize, Serialize};

use super::versions::Versions;
use crate::config::LaunchConfig;
use crate::error::Error;
use crate::failure::{Ended, Failure, StopTrouble, Survivor};
use crate::report::Source;
use crate::supervise::RankOutcome;

/// The first line of an agent, before its version.
pub(super) const GREETING: &str = "accelerate agent ";
/// Both sides have to be of one version, since neither the settings nor these messages are kept alike between versions.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// No line is longer: the order with all variables of a run, and the end of 4096 ranks, are much shorter.
pub(super) const LINE_LIMIT_BYTES: usize = 64 << 20;
/// Agents send what one read of a rank's output returns.
const OUTPUT_LIMIT_BYTES: usize = 1 << 20;
/// What remote shells print before the greeting.
const NOISE_LIMIT_BYTES: usize = 1 << 20;

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToAgent {
    /// Look whether these ranks can be started.
    Prepare(Box<Order>),
    /// Look whether the main process can be reached at this port, and whether the first machine's file is in the working folder.
    Reach {
        port: u16,
        beacon: Option<String>,
        /// Where ranks of the first machine would wait for those of the others.
        meets_at: Option<SocketAddr>,
    },
    /// To the first machine: look whether others can be reached at these addresses, where their ranks would meet those of others.
    ReachBack {
        addresses: Vec<SocketAddr>,
    },
    Start {
        port: u16,
    },
    /// Pass a signal on to the ranks.
    Signal {
        signal: i32,
    },
    /// All ranks of another machine have ended with code 0, this one among them.
    RankEnded {
        rank: usize,
    },
    /// The launcher is there.
    Beat,
    /// The launcher is about to be suspended, and says nothing until it goes on.
    Pause,
    /// Another machine has failed: end the ranks within the grace period.
    End,
}

/// The ranks of one machine.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Order {
    pub(super) config: LaunchConfig,
    /// The working folder of the launcher, which is that of the ranks.
    pub(super) folder: OsString,
    pub(super) has_preflight: bool,
    /// What the launcher calls the machine.
    pub(super) machine: String,
    /// Whose agent it is, as those read who ask the machine what runs there.
    pub(super) launcher: LauncherName,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum FromAgent {
    /// The agent is there.
    Beat,
    Prepared(Prepared),
    Reached {
        problem: Option<Problem>,
        /// Is the working folder that of the first machine? `None` where there is no telling.
        shares_folder: Option<bool>,
        /// Why the ranks of the first machine would not be reached, if so.
        misses_first: Option<String>,
        /// Where its own ranks would wait for those of others, if that is known and can be tried.
        meets_at: Option<SocketAddr>,
    },
    /// For each of the addresses why it is out of reach, if it is.
    ReachedBack {
        problems: Vec<Option<String>>,
    },
    /// As many bytes follow the line.
    Output {
        source: Source,
        num_bytes: usize,
    },
    Closed {
        source: Source,
    },
    RankFailed {
        rank: usize,
        ended: Ended,
        num_others: usize,
    },
    Notice {
        text: String,
    },
    /// Processes that it could not end.
    Survivors {
        survivors: Vec<Survivor>,
    },
    Ended(AgentEnd),
}

/// What an agent has found on its machine.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Prepared {
    pub(super) problems: Vec<Problem>,
    pub(super) warnings: Vec<String>,
    /// The port of the main process, from machine 0.
    pub(super) port: Option<u16>,
    /// Where ranks of machine 0 would wait for those of others, if that is known and can be tried.
    pub(super) meets_at: Option<SocketAddr>,
    /// How many GPUs the ranks will see.
    pub(super) num_gpus: usize,
    /// What the machines have to have in common.
    pub(super) versions: Versions,
    /// The name of a file in the working folder, from machine 0.
    pub(super) beacon: Option<String>,
    /// The clock of the machine, since 1970.
    pub(super) clock: Duration,
}

/// A reason not to start, with the exit code of a launch that ends for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Problem {
    pub(crate) text: String,
    pub(crate) exit_code: u8,
}

impl Problem {
    /// An error with its causes.
    pub(super) fn of(error: &Error) -> Self {
        let causes = std::iter::successors(std::error::Error::source(error), |cause| cause.source());
        let text = causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"));
        Self { text, exit_code: error.exit_code() }
    }
}

/// How the ranks of a machine ended.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum AgentEnd {
    Succeeded(Vec<RankOutcome>),
    Failed(Box<Failure>),
    /// The agent was told to end them.
    Stopped {
        /// What they were doing then.
        activities: Vec<RankSummary>,
        /// Those that had ended with code 0 before.
        had_ended: Vec<usize>,
        /// What went otherwise than it should.
        troubles: Vec<StopTrouble>,
    },
    /// They could not be started or watched.
    Problem(Problem),
}

impl AgentEnd {
    /// By one that says nothing of its ranks.
    pub(super) fn stopped() -> Self {
        Self::Stopped { activities: Vec::new(), had_ended: Vec::new(), troubles: Vec::new() }
    }
}

/// One message as a line.
pub(super) fn line(message: &impl Serialize) -> Vec<u8> {
    // These types always have a form in JSON: their maps have texts as keys. A line that is empty is an error where it is read.
    let mut line = serde_json::to_vec(message).unwrap_or_default();
    line.push(b'\n');
    line
}

/// Something that an agent has said, taken out of the bytes of its connection.
#[derive(Debug, PartialEq)]
pub(super) enum Said {
    /// What a remote shell says before the agent runs: a line.
    Noise(Vec<u8>),
    /// It runs, in this version.
    Greeting(String),
    Message(FromAgent),
    Output(Source, Vec<u8>),
}

/// Bytes of a connection that make no sense.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(super) enum Nonsense {
    #[error("it printed more than {NOISE_LIMIT_BYTES} bytes that are not of accelerate; remote shells must be silent")]
    Noise,
    #[error("it sent what is no message of accelerate ({reason}); something else writes to its output")]
    NoMessage { reason: String },
    #[error("it sent a message of more than {LINE_LIMIT_BYTES} bytes")]
    TooLong,
}

/// Takes messages out of bytes as they arrive.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    bytes: Vec<u8>,
    /// Where that begins which has not been taken.
    start: usize,
    /// Up to where there is no line end after that.
    searched: usize,
    has_greeted: bool,
    /// The agent has said how its ranks ended, which is the last that it says.
    has_ended: bool,
    num_noise_bytes: usize,
    /// The output that is announced and not complete.
    output: Option<(Source, usize)>,
}

impl Decoder {
    pub(super) fn has_greeted(&self) -> bool {
        self.has_greeted
    }

    /// Adds bytes. Take what they make up with [`next`](Self::next).
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.start);
        self.searched = self.searched.saturating_sub(std::mem::take(&mut self.start));
        self.bytes.extend_from_slice(bytes);
    }

    /// The next thing that is complete.
    pub(super) fn next(&mut self) -> Result<Option<Said>, Nonsense> {
        loop {
            if self.has_ended {
                // It is a remote shell's, and of no use to anybody.
                self.taken(self.bytes.len() - self.start);
                return Ok(None);
            }
            if let Some((source, num_bytes)) = self.output {
                if self.bytes.len() - self.start < num_bytes {
                    return Ok(None);
                }
                self.output = None;
                return Ok(Some(Said::Output(source, self.taken(num_bytes))));
            }
            let Some(line) = self.line()? else { return Ok(None) };
            if !self.has_greeted {
                let text = String::from_utf8_lossy(&line);
                // A shell may print without ending its line.
                if let Some((_, version)) = text.split_once(GREETING) {
                    self.has_greeted = true;
                    // Behind a terminal, lines end with two characters.
                    return Ok(Some(Said::Greeting(version.trim_end().to_owned())));
                }
                return Ok(Some(Said::Noise([line.as_slice(), b"\n"].concat())));
            }
            match serde_json::from_slice(&line) {
                Ok(FromAgent::Output { source, num_bytes }) if num_bytes <= OUTPUT_LIMIT_BYTES => {
                    self.output = Some((source, num_bytes));
                }
                Ok(FromAgent::Output { .. }) => return Err(Nonsense::TooLong),
                Ok(message) => {
                    self.has_ended = matches!(message, FromAgent::Ended(_));
                    return Ok(Some(Said::Message(message)));
                }
                Err(error) => return Err(Nonsense::NoMessage { reason: error.to_string() }),
            }
        }
    }

    /// Without its end.
    fn line(&mut self) -> Result<Option<Vec<u8>>, Nonsense> {
        let from = self.searched.max(self.start);
        let end = self.bytes[from..].iter().position(|&byte| byte == b'\n').map(|at| from + at);
        let length = end.unwrap_or(self.bytes.len()) - self.start;
        if !self.has_greeted && self.num_noise_bytes + length > NOISE_LIMIT_BYTES {
            return Err(Nonsense::Noise);
        }
        if length > LINE_LIMIT_BYTES {
            return Err(Nonsense::TooLong);
        }
        if end.is_none() {
            self.searched = self.bytes.len();
            return Ok(None);
        }
        let mut line = self.taken(length + 1);
        line.pop();
        if !self.has_greeted {
            // Empty lines count, too.
            self.num_noise_bytes += line.len() + 1;
        }
        Ok(Some(line))
    }

    fn taken(&mut self, num_bytes: usize) -> Vec<u8> {
        let end = self.start + num_bytes;
        let taken = self.bytes[self.start..end].to_vec();
        self.start = end;
        taken
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::report::Stream;
    use rstest::rstest;

    const SOURCE: Source = Source { rank: 5, local_rank: 1, stream: Stream::Stderr };

    fn all(decoder: &mut Decoder) -> Result<Vec<Said>, Nonsense> {
        std::iter::from_fn(|| decoder.next().transpose()).collect()
    }

    fn conversation() -> Vec<u8> {
        let output = b"a line\nhalf of {\"Ended\": \xff\n";
        let announced = FromAgent::Output { source: SOURCE, num_bytes: output.len() };
        let end = FromAgent::Ended(AgentEnd::stopped());
        [
            b"Welcome to b!\nnever turn it off$ accelerate agent 1.2\n".to_vec(),
            line(&announced),
            output.to_vec(),
            line(&end),
            b"Good bye! accelerate agent 1.3\n".to_vec(),
            b"no end of line".to_vec(),
        ]
        .concat()
    }

    /// However the bytes are cut, they mean the same.
    #[rstest]
    #[case(1)]
    #[case(7)]
    #[case(10_000)]
    fn messages_are_found_in_bytes_as_they_arrive(#[case] size: usize) {
        let mut decoder = Decoder::default();
        let mut said = Vec::new();
        for piece in conversation().chunks(size) {
            decoder.push(piece);
            said.extend(all(&mut decoder).unwrap());
        }
        let expected = [
            Said::Noise(b"Welcome to b!\n".to_vec()),
            Said::Greeting("1.2".to_owned()),
            Said::Output(SOURCE, b"a line\nhalf of {\"Ended\": \xff\n".to_vec()),
            Said::Message(FromAgent::Ended(AgentEnd::stopped())),
        ];
        assert_eq!(said, expected);
    }

    #[rstest]
    #[case::noise_without_end(&[b'x'; NOISE_LIMIT_BYTES + 1], "remote shells must be silent")]
    #[case::many_lines_of_noise(&[b'\n', b'x'].repeat(NOISE_LIMIT_BYTES + 1), "remote shells must be silent")]
    #[case::no_json(b"accelerate agent 1\nhello\n", "no message")]
    #[case::other_message(b"accelerate agent 1\n{\"Burn\":1}\n", "no message")]
    #[case::no_text(b"accelerate agent 1\n\xff\xfe\n", "no message")]
    #[case::huge_output(
        b"accelerate agent 1\n{\"Output\":{\"source\":{\"rank\":0,\"local_rank\":0,\"stream\":\"Stdout\"},\
          \"num_bytes\":18446744073709551615}}\n",
        "more than"
    )]
    fn what_is_no_conversation_is_refused(#[case] bytes: &[u8], #[case] words: &str) {
        let mut decoder = Decoder::default();
        decoder.push(bytes);
        let error = all(&mut decoder).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }

    /// Every byte of arguments, variables and paths arrives as it was.
    #[test]
    fn an_order_keeps_every_byte() {
        use std::os::unix::ffi::OsStringExt;
        let bytes = OsString::from_vec((1..=255).collect());
        let config = LaunchConfig {
            args: vec![bytes.clone(), "".into(), "'; $(x) \"\n".into()],
            environment: vec![("X".into(), bytes.clone())],
            log_dir: Some(bytes.clone().into()),
            ..LaunchConfig::new(crate::Program::PythonScript(bytes.clone().into()), 3)
        };
        let launcher = LauncherName { host: "head".to_owned(), process_id: 7, id: u64::MAX };
        let (config_sent, folder) = (config.clone(), bytes.clone());
        let order = Order {
            config: config_sent,
            folder,
            has_preflight: true,
            machine: "b".to_owned(),
            launcher: launcher.clone(),
        };
        let line = line(&ToAgent::Prepare(Box::new(order)));
        assert_eq!(line.iter().filter(|&&byte| byte == b'\n').count(), 1);
        match serde_json::from_slice(&line).unwrap() {
            ToAgent::Prepare(found) => {
                assert_eq!((found.config, found.folder), (config, bytes));
                assert_eq!((found.machine.as_str(), found.launcher), ("b", launcher));
            }
            other => unreachable!("{other:?}"),
        }
    }
}
