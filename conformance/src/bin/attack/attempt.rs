//! One attack: what is done to which run, and what has to be true afterwards.

use crate::run::{Network, Run};
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Signal, kill_process};
use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

/// How long ranks wait for one another.
const DEADLINE: Duration = Duration::from_secs(3);
/// The time that ranks give one another to explain a failure.
const EXPLAINING: Duration = Duration::from_secs(4);
/// Of runs that nothing is done to.
const TO_THE_END: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    KillRank,
    StopRank,
    RankFails,
    KillLauncher,
    InterruptLauncher,
    InterruptWithStoppedRank,
    Strangers,
    SilentNetwork,
}

impl Kind {
    pub(crate) const ALL: [Self; 8] = [
        Self::KillRank,
        Self::StopRank,
        Self::RankFails,
        Self::KillLauncher,
        Self::InterruptLauncher,
        Self::InterruptWithStoppedRank,
        Self::Strangers,
        Self::SilentNetwork,
    ];
}

#[derive(Clone, Debug)]
pub(crate) struct Attempt {
    pub(crate) kind: Kind,
    world_size: usize,
    is_sharded: bool,
    rank: usize,
    step: u64,
    /// Between the step and the attack.
    delay: Duration,
}

/// Numbers that look random and are the same for the same seed (Steele, Lea, Flood, "Fast splittable pseudorandom number
/// generators", OOPSLA 2014).
pub(crate) fn numbers(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed;
    move |below| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % below
    }
}

impl Attempt {
    /// Without `has_networks`, no network falls silent.
    pub(crate) fn plan(seed: u64, has_networks: bool) -> Self {
        let mut below = numbers(seed);
        let world_size = 2 + below(3) as usize;
        let kind = Kind::ALL[below(Kind::ALL.len() as u64) as usize];
        Self {
            kind: if kind == Kind::SilentNetwork && !has_networks { Kind::StopRank } else { kind },
            world_size,
            is_sharded: below(2) == 0,
            // Rank 0, which keeps the store, more often than the others.
            rank: if below(3) == 0 { 0 } else { below(world_size as u64) as usize },
            step: 1 + below(20),
            delay: Duration::from_micros(below(8000)),
        }
    }

    /// `slack`: how much later than it has to be everything may be over.
    pub(crate) fn carry_out(&self, program: &Path, slack: Duration) -> Result<()> {
        let temporary = tempfile::tempdir()?;
        let folder = temporary.path().join("model");
        std::fs::create_dir(&folder)?;
        let mut environment = vec![
            ("ACCELERATE_USE_CPU", "true".to_owned()),
            ("ACCELERATE_PROCESS_GROUP_TIMEOUT", DEADLINE.as_secs().to_string()),
            ("ATTACK_SHARDED", u8::from(self.is_sharded).to_string()),
        ];
        if self.kind == Kind::RankFails {
            environment.push(("ATTACK_FAILS", format!("{}:{}", self.rank, self.step)));
        }
        let network = if self.kind == Kind::SilentNetwork { Network::OfItsOwn } else { Network::OfTheMachine };
        let mut run = Run::start(program, "soak_train", self.world_size, &folder, &environment, network)?;
        let said = self.attack(&mut run, slack)?;
        ensure!(!said.contains("panicked at"), "there was a panic:\n{said}");
        self.check_saved(program, &folder)
    }

    /// Attacks the run, waits for its end, and returns what it printed.
    fn attack(&self, run: &mut Run, slack: Duration) -> Result<String> {
        let rank = self.rank;
        match self.kind {
            Kind::RankFails => {
                let _code = run.end(TO_THE_END)?;
                self.expect_named(run, &format!("rank {rank} (process"))?;
            }
            Kind::Strangers => {
                let port = run.wait_for("the port", |line| line.rsplit_once("port ")?.1.parse::<u16>().ok())?;
                let _connections = strangers(port);
                let status = run.end(TO_THE_END)?;
                ensure!(
                    status.success() && run.printed().contains("trained to the end"),
                    "{status}:\n{}",
                    run.printed()
                );
            }
            _ => self.strike(run, slack)?,
        }
        Ok(run.printed().to_owned())
    }

    /// At its step, a rank or the launcher gets a signal.
    fn strike(&self, run: &mut Run, slack: Duration) -> Result<()> {
        let rank = self.rank;
        let process = run.process_at(rank, self.step)?;
        thread::park_timeout(self.delay);
        match self.kind {
            Kind::KillRank => {
                kill_process(process, Signal::KILL)?;
                run.end(EXPLAINING + slack)?;
                self.expect_named(run, &format!("rank {rank} (process"))
            }
            Kind::StopRank => {
                kill_process(process, Signal::STOP)?;
                run.end(DEADLINE + slack)?;
                let store = "rank 0, which keeps the rendezvous store, does not answer";
                ensure!(
                    is_missed(rank, run.printed()) || rank == 0 && run.printed().contains(store),
                    "not named:\n{}",
                    run.printed()
                );
                Ok(())
            }
            Kind::SilentNetwork => {
                run.silence_network()?;
                run.end(DEADLINE + slack)?;
                let is_explained =
                    [" not made this call", "does not answer"].iter().any(|it| run.printed().contains(it));
                ensure!(is_explained, "nobody is named:\n{}", run.printed());
                Ok(())
            }
            Kind::KillLauncher => {
                run.signal_launcher(Signal::KILL)?;
                run.end(slack).map(drop)
            }
            Kind::InterruptLauncher | Kind::InterruptWithStoppedRank => {
                if self.kind == Kind::InterruptWithStoppedRank {
                    kill_process(process, Signal::STOP)?;
                }
                // Not SIGINT: whoever starts the attack in the background ignores it, and so does the launcher then.
                run.signal_launcher(Signal::TERM)?;
                let status = run.end(slack)?;
                let was_over = run.printed().contains("trained to the end");
                ensure!(was_over || status.code() == Some(128 + 15), "{status}:\n{}", run.printed());
                Ok(())
            }
            Kind::RankFails | Kind::Strangers => bail!("nobody is struck"),
        }
    }

    fn expect_named(&self, run: &Run, name: &str) -> Result<()> {
        let report = run.printed().lines().find_map(|line| line.strip_prefix("launcher: "));
        let report = report.with_context(|| format!("the launcher said nothing:\n{}", run.printed()))?;
        ensure!(report.starts_with(name), "wanted {name:?}, and the launcher said {report:?}:\n{}", run.printed());
        Ok(())
    }

    fn check_saved(&self, program: &Path, folder: &Path) -> Result<()> {
        let output = Command::new(program).args(["soak_check_saved", "--folder"]).arg(folder).output()?;
        ensure!(output.status.success(), "the folder is not whole: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }
}

/// Is the rank said to be missing, alone or with others that were still waiting for somebody else?
pub(crate) fn is_missed(rank: usize, text: &str) -> bool {
    let before = text.match_indices(" not made this call").map(|(end, _)| &text[..end]);
    let mut lists = before.filter_map(|before| before.rsplit("rank").next());
    let rank = rank.to_string();
    lists.any(|list| list.split(|letter: char| !letter.is_ascii_digit()).any(|number| number == rank))
}

/// Connections to the store that send nothing, nonsense, and what c10d's own store would understand.
fn strangers(port: u16) -> Vec<TcpStream> {
    let words: [&[u8]; 4] =
        [b"", b"GET / HTTP/1.1\r\n\r\n", &[0xff; 4096], &[0x86, 0x55, 0xf1, 0x3c, 0, 1, 0, 0, 0, 0]];
    let connect = |number: usize| {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
        // The store may hang up on it.
        let _ = stream.write_all(words[number % words.len()]);
        Some(stream)
    };
    (0..200).filter_map(connect).collect()
}
