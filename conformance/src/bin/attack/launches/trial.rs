//! One trial: a run is started, struck, and watched until it has come to its end in spite of it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitStatus;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::fewer::Saved;
use super::login;
use super::network::{Machines, address, network_of};
use super::plan::{Kind, Plan};
use super::strangers::Strangers;
use crate::attempt::is_missed;
use crate::checkpoints::{Losses, is_step, losses, to_the_end};
use crate::run::{Run, new_mark, words_of};

/// After how many seconds without a sign of life a machine is lost: where one falls silent, and else.
const SHORT_SILENCE: f64 = 2.0;
const LONG_SILENCE: f64 = 20.0;
/// How long ranks wait for one another in seconds: where one of them is stopped, and else.
const SHORT_PATIENCE: u64 = 3;
const LONG_PATIENCE: u64 = 30;
/// What it takes to find out that a machine is silent: a look more than those that have to find nothing.
const NOTICING: Duration = Duration::from_millis(2500);
/// The time that ranks give one another to explain a failure.
const EXPLAINING: Duration = Duration::from_secs(4);
/// What ending ranks takes when they do not end by themselves, on other machines, too.
const ENDING: Duration = Duration::from_secs(3);
/// Of whatever is not struck any more.
const TO_THE_END: Duration = Duration::from_secs(90);
/// By how much strangers may slow a run down until its first step.
const HINDRANCE: Duration = Duration::from_secs(1);
/// Known to strangers.
const MAIN_PORT: u16 = 29_500;
const RESTARTS: &str = "3";
const IS_RESTARTED: &str = "; restart 1 of 3 begins";

/// What has to follow.
#[derive(Debug)]
enum Aftermath {
    /// Nothing at all.
    Nothing,
    /// All ranks start again in time, and the reason begins with one of these words.
    Restart(Duration, Vec<String>),
    /// The launch is over in time, with this code if it has one. Another one goes on.
    End(Duration, Option<i32>),
}

/// What a run of so many ranks prints that nobody disturbs.
pub(super) fn undisturbed(program: &Path, world_size: usize) -> Result<Losses> {
    to_the_end(program, "ddp", world_size)
}

/// The time from the event to the next step, if the run had to start again or the event was there before it.
///
/// Long because each aftermath is told in the order in which it happens.
pub(super) fn carry_out(plan: &Plan, program: &Path, expected: &Losses, slack: Duration) -> Result<Option<Duration>> {
    let folder = tempfile::tempdir()?;
    let mark = new_mark(folder.path());
    // Strangers have one of their own.
    let num_machines = plan.ranks.len() + usize::from(plan.kind == Kind::Strangers);
    let machines = plan.is_on_machines().then(|| Machines::start(num_machines, &mark)).transpose()?;
    let trial = Trial { plan, program, folder: folder.path(), mark, machines, slack };
    if plan.kind.precedes_the_run() {
        return trial.under_difficulties(expected).map(Some);
    }
    let mut run = trial.launch(trial.folder)?;
    let ranks = trial.until_its_step(&mut run)?;
    thread::park_timeout(plan.after);
    let struck_at = Instant::now();
    let stopped = trial.strike(&run, &ranks)?;
    let mut printed = String::new();
    let mut saved = None;
    let next_step = match trial.aftermath(&ranks) {
        Aftermath::Nothing => {
            trial.relent(&stopped)?;
            let status = trial.end(&mut run, &[])?;
            ensure!(!run.printed().contains(IS_RESTARTED), "it was started again:\n{}", run.printed());
            expect_success(status, &run)?;
            None
        }
        Aftermath::Restart(within, names) => {
            if plan.kind == Kind::StopLauncher {
                trial.outlast_stopped_launcher(&mut run)?;
                cont(&stopped);
            }
            let deadline = Instant::now() + within + slack;
            let reason = run.wait_until("a restart", deadline, |line| {
                line.split_once(IS_RESTARTED).map(|(reason, _)| reason.to_owned())
            })?;
            let is_named = names.is_empty() || names.iter().any(|name| reason.contains(name.as_str()));
            ensure!(is_named, "the reason is {reason:?}, and wanted is one of {names:?}:\n{}", run.printed());
            trial.expect_missed(&run)?;
            trial.mend()?;
            // Everybody who could save has ended.
            saved = (plan.kind == Kind::LoseMachine).then(|| Saved::of(trial.folder)).transpose()?;
            let late = if plan.thaws_late { &stopped[..] } else { &[] };
            if late.is_empty() {
                cont(&stopped);
            }
            run.wait_for("the next step", goes_on)?;
            let next_step = struck_at.elapsed();
            let status = trial.end(&mut run, late)?;
            expect_success(status, &run)?;
            Some(next_step)
        }
        Aftermath::End(within, code) => {
            let deadline = Instant::now() + within + slack;
            let status = run.end_of_launcher(deadline)?;
            run.expect_nobody(deadline)?;
            ensure!(
                code.is_none() || status.code() == code,
                "it ended with {status}, not {code:?}:\n{}",
                run.printed()
            );
            printed = run.printed().to_owned();
            drop(run);
            run = trial.launch(trial.folder)?;
            run.wait_for("the next step", goes_on).with_context(|| format!("after this:\n{printed}"))?;
            let next_step = struck_at.elapsed();
            let status = trial.end(&mut run, &[])?;
            expect_success(status, &run)?;
            Some(next_step)
        }
    };
    printed += run.printed();
    match saved {
        Some(saved) => saved.check(plan, program, &printed, expected)?,
        None => check_losses(&printed, expected)?,
    }
    Ok(next_step)
}

fn expect_success(status: ExitStatus, run: &Run) -> Result<()> {
    ensure!(
        status.success() && run.printed().contains("trained to the end"),
        "it ended with {status}:\n{}",
        run.printed()
    );
    Ok(())
}

/// All losses are right up to the last one, whoever has computed them, and no step but the last before an event was made twice. A
/// line may be missing that was on its way when its machine or the launcher was lost; what follows depends on that step all the same.
fn check_losses(printed: &str, expected: &Losses) -> Result<()> {
    let last = check_losses_from(0, printed, expected)?;
    ensure!(last == expected.len() as u64, "the last step is {last}:\n{printed}");
    Ok(())
}

/// The same for what follows on step `last`; the step that it came to.
pub(super) fn check_losses_from(mut last: u64, printed: &str, expected: &Losses) -> Result<u64> {
    ensure!(!printed.contains("panicked at"), "there was a panic:\n{printed}");
    // The first rank of each machine says the same, at its own time.
    for (step, found) in printed.lines().filter(|line| line.starts_with("[rank 0] ")).flat_map(losses) {
        let wanted = expected.get(&step);
        ensure!(wanted == Some(&found), "step {step} is {found}, not {wanted:?}:\n{printed}");
        ensure!(last <= step, "step {step} follows on step {last}:\n{printed}");
        last = step;
    }
    Ok(last)
}

struct Trial<'a> {
    plan: &'a Plan,
    program: &'a Path,
    folder: &'a Path,
    mark: String,
    machines: Option<Machines>,
    slack: Duration,
}

impl Trial<'_> {
    /// A run that saves to `folder`.
    fn launch(&self, folder: &Path) -> Result<Run> {
        let Plan { kind, ranks, asks, .. } = self.plan;
        let this = std::env::current_exe()?;
        let mut command = match &self.machines {
            Some(machines) => {
                let mut command = machines.launcher_command();
                command.arg(this);
                let hosts = ranks.iter().enumerate().map(|(machine, count)| format!("{}:{count}", address(machine)));
                command.args(["--hosts", &hosts.collect::<Vec<_>>().join(",")]);
                command
            }
            None => std::process::Command::new(this),
        };
        let falls_silent = matches!(
            kind,
            Kind::StopLauncher
                | Kind::StopMachine
                | Kind::StopAgent
                | Kind::CutLink
                | Kind::ChokeLink
                | Kind::LoseMachine
        );
        let silence = if falls_silent { SHORT_SILENCE } else { LONG_SILENCE };
        let patience = if *kind == Kind::StopRank { SHORT_PATIENCE } else { LONG_PATIENCE };
        command.args(["--launch", &self.plan.world_size().to_string(), "--script", "checkpointed", "--program"]);
        command.arg(self.program).arg("--folder").arg(folder).args(["--max-restarts", RESTARTS]);
        command.args(["--connection-timeout", &silence.to_string()]);
        match kind {
            Kind::LoseMachine => drop(command.args(["--min-machines", &(ranks.len() - 1).to_string()])),
            Kind::Strangers => drop(command.args(["--main-port", &MAIN_PORT.to_string()])),
            _ => {}
        }
        command.env("ACCELERATE_USE_CPU", "true").env("ACCELERATE_PROCESS_GROUP_TIMEOUT", patience.to_string());
        command.env("CHECKPOINTED_SLOWNESS", slowness(*kind).to_string());
        command.env("CHECKPOINTED_FORM", "ddp").env("CHECKPOINTED_SILENT", if *asks { "nobody" } else { "all" });
        Run::watch(command, self.mark.clone())
    }

    /// Something is there before the run begins, which it has to come to its end in spite of. The time until its first step.
    fn under_difficulties(&self, expected: &Losses) -> Result<Duration> {
        let Plan { kind, ranks, rank, machine, rate, .. } = self.plan;
        let machines = self.machines()?;
        if *kind == Kind::SlowLinkThroughout {
            machines.slow_link(*machine, *rate)?;
            return self.one_without_restart(self.folder, expected);
        }
        let alone = self.one_without_restart(tempfile::tempdir()?.path(), expected)?;
        let main_process = SocketAddr::new(address(0).parse()?, MAIN_PORT);
        let world_size = self.plan.world_size();
        // A rank that the run has, or has not.
        let of_strangers = if self.plan.asks { (*rank, world_size) } else { (world_size, world_size + 1) };
        let strangers = Strangers::start(machines, ranks.len(), main_process, self.program, of_strangers)?;
        let among_them = self.one_without_restart(self.folder, expected)?;
        strangers.end()?.check()?;
        let most = alone + HINDRANCE + self.slack;
        ensure!(among_them <= most, "the first step came after {among_them:?}, and without strangers after {alone:?}");
        Ok(among_them)
    }

    fn one_without_restart(&self, folder: &Path, expected: &Losses) -> Result<Duration> {
        let began = Instant::now();
        let mut run = self.launch(folder)?;
        run.wait_for("the first step", |line| is_step(line).then_some(()))?;
        let first_step = began.elapsed();
        let status = self.end(&mut run, &[])?;
        ensure!(!run.printed().contains(IS_RESTARTED), "it was started again:\n{}", run.printed());
        expect_success(status, &run)?;
        check_losses(run.printed(), expected)?;
        Ok(first_step)
    }

    /// The processes of all ranks, once the step has been made.
    fn until_its_step(&self, run: &mut Run) -> Result<BTreeMap<usize, i32>> {
        let (mut ranks, mut has_come) = (BTreeMap::new(), false);
        while ranks.len() < self.plan.world_size() || !has_come {
            run.wait_for("the step of the event", |line| {
                if let Some((process, rank)) = process_of_rank(line) {
                    return Some(Ok((process, rank)));
                }
                losses(line).contains_key(&self.plan.step).then_some(Err(()))
            })
            .map(|found| match found {
                Ok((process, rank)) => drop(ranks.insert(rank, process)),
                Err(()) => has_come = true,
            })?;
        }
        Ok(ranks)
    }

    /// Does it, and returns the processes that are stopped now.
    fn strike(&self, run: &Run, ranks: &BTreeMap<usize, i32>) -> Result<Vec<i32>> {
        let Plan { kind, machine, time, fault, rate, .. } = *self.plan;
        let (signal, victims) = match kind {
            Kind::KillRank => (Signal::KILL, self.rank(ranks)?),
            Kind::StopRank => (Signal::STOP, self.rank(ranks)?),
            Kind::TerminateRank => (Signal::TERM, self.rank(ranks)?),
            Kind::KillLauncher => (Signal::KILL, vec![run.launcher()]),
            Kind::StopLauncher => (Signal::STOP, vec![run.launcher()]),
            Kind::TerminateLauncher => (Signal::TERM, vec![run.launcher()]),
            Kind::KillMachine => (Signal::KILL, self.on_machine(run)),
            Kind::StopMachine => (Signal::STOP, self.on_machine(run)),
            Kind::TerminateMachine => (Signal::TERM, self.on_machine(run)),
            Kind::KillAgent => (Signal::KILL, self.agent(run)?),
            Kind::StopAgent => (Signal::STOP, self.agent(run)?),
            Kind::TerminateAgent => (Signal::TERM, self.agent(run)?),
            Kind::KillLogin => (Signal::KILL, self.login(run)?),
            Kind::CutLink => {
                self.machines()?.break_link(machine, fault)?;
                return Ok(Vec::new());
            }
            Kind::InterruptLink => {
                self.machines()?.break_link(machine, fault)?;
                thread::park_timeout(time);
                self.machines()?.mend_link(machine)?;
                return Ok(Vec::new());
            }
            Kind::SlowLink => {
                self.machines()?.slow_link(machine, rate)?;
                thread::park_timeout(4 * time);
                self.machines()?.quicken_link(machine)?;
                return Ok(Vec::new());
            }
            Kind::ChokeLink => {
                self.machines()?.slow_link(machine, rate)?;
                return Ok(Vec::new());
            }
            Kind::LoseMachine => {
                // Nobody there tells what became of it.
                self.machines()?.break_link(machine, fault)?;
                (Signal::KILL, self.on_machine(run))
            }
            Kind::SlowLinkThroughout | Kind::Strangers => bail!("it was to be there before the run"),
        };
        for process in &victims {
            send(*process, signal);
        }
        Ok(if signal == Signal::STOP { victims } else { Vec::new() })
    }

    fn aftermath(&self, ranks: &BTreeMap<usize, i32>) -> Aftermath {
        let Plan { kind, rank, machine, asks, .. } = *self.plan;
        let is_on_machines = self.plan.is_on_machines();
        let there = |what: &str| format!("{}: {what}", address(machine));
        let ended_by = |rank: usize, signal: &str| {
            let process = ranks.get(&rank).copied().unwrap_or_default();
            let first = |machine: usize| self.plan.ranks[..=machine].iter().sum::<usize>();
            let machine = (0..self.plan.ranks.len()).find(|machine| rank < first(*machine)).unwrap_or_default();
            let on = if is_on_machines { format!(" on {}", address(machine)) } else { String::new() };
            format!("rank {rank}{on} (process {process}) was ended by {signal}")
        };
        let of_machine = |signal: &str| self.plan.ranks_of_machine().map(|rank| ended_by(rank, signal)).collect();
        let with = |mut words: Vec<String>, what: &str| {
            words.push(there(what));
            words
        };
        let broke = "the connection broke while ";
        let told = "somebody has told accelerate on that machine to stop";
        let silent = format!("it has said nothing for {SHORT_SILENCE} s while ");
        match kind {
            Kind::KillRank => Aftermath::Restart(ENDING, vec![ended_by(rank, "SIGKILL (9)")]),
            Kind::StopRank => {
                let noticing = Duration::from_secs(SHORT_PATIENCE) + EXPLAINING;
                Aftermath::Restart(noticing + ENDING, Vec::new())
            }
            Kind::TerminateRank if asks => Aftermath::End(ENDING, Some(0)),
            Kind::TerminateRank => Aftermath::Restart(ENDING, vec![ended_by(rank, "SIGTERM (15)")]),
            Kind::KillLauncher => Aftermath::End(ENDING, None),
            Kind::TerminateLauncher => Aftermath::End(ENDING, Some(128 + 15)),
            Kind::KillMachine if !is_on_machines => Aftermath::End(Duration::ZERO, None),
            Kind::TerminateMachine if !is_on_machines => Aftermath::End(ENDING, Some(128 + 15)),
            Kind::StopLauncher | Kind::StopMachine if !is_on_machines => Aftermath::Nothing,
            Kind::StopLauncher => {
                let words =
                    "accelerate on that machine has ended its ranks, because it heard nothing from here for 2 s";
                Aftermath::Restart(ENDING, vec![words.to_owned()])
            }
            Kind::KillMachine => Aftermath::Restart(ENDING, with(of_machine("SIGKILL (9)"), broke)),
            Kind::TerminateMachine => Aftermath::Restart(ENDING, with(of_machine("SIGTERM (15)"), told)),
            Kind::TerminateAgent => Aftermath::Restart(ENDING, vec![there(told)]),
            Kind::KillAgent | Kind::KillLogin => Aftermath::Restart(ENDING, vec![there(broke)]),
            Kind::StopMachine | Kind::StopAgent | Kind::CutLink | Kind::ChokeLink | Kind::LoseMachine => {
                Aftermath::Restart(NOTICING + ENDING, vec![there(&silent)])
            }
            Kind::InterruptLink | Kind::SlowLink | Kind::SlowLinkThroughout | Kind::Strangers => Aftermath::Nothing,
        }
    }

    /// Lets what is stopped on the only machine go on after a while.
    fn relent(&self, stopped: &[i32]) -> Result<()> {
        if !stopped.is_empty() {
            thread::park_timeout(self.plan.time);
            cont(stopped);
        }
        Ok(())
    }

    /// All machines end their ranks by themselves.
    fn outlast_stopped_launcher(&self, run: &mut Run) -> Result<()> {
        let deadline = Instant::now() + NOTICING + ENDING + self.slack;
        let machines = self.machines()?;
        let networks: Vec<_> = (0..self.plan.ranks.len()).map(|machine| machines.network(machine)).collect();
        loop {
            let remain = |process: &i32| networks.contains(&network_of(*process));
            let living: Vec<_> = run.living().into_iter().filter(remain).collect();
            if living.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("{living:?} live on machines that hear nothing of their launcher:\n{}", run.printed());
            }
            run.read_for(Duration::from_millis(5));
        }
    }

    fn mend(&self) -> Result<()> {
        match self.plan.kind {
            Kind::CutLink => self.machines()?.mend_link(self.plan.machine),
            Kind::ChokeLink => self.machines()?.quicken_link(self.plan.machine),
            _ => Ok(()),
        }
    }

    /// A rank that is stopped is missed by the others.
    fn expect_missed(&self, run: &Run) -> Result<()> {
        let rank = self.plan.rank;
        let store = "rank 0, which keeps the rendezvous store, does not answer";
        let is_said = is_missed(rank, run.printed()) || (rank == 0 && run.printed().contains(store));
        ensure!(self.plan.kind != Kind::StopRank || is_said, "rank {rank} is not named:\n{}", run.printed());
        Ok(())
    }

    /// Waits for the end of the run, lets what is stopped go on then, and expects that nobody is left.
    fn end(&self, run: &mut Run, stopped: &[i32]) -> Result<ExitStatus> {
        let status = run.end_of_launcher(Instant::now() + TO_THE_END)?;
        cont(stopped);
        run.expect_nobody(Instant::now() + NOTICING + ENDING + self.slack)?;
        Ok(status)
    }

    fn machines(&self) -> Result<&Machines> {
        self.machines.as_ref().context("there is one machine")
    }

    fn rank(&self, ranks: &BTreeMap<usize, i32>) -> Result<Vec<i32>> {
        Ok(vec![*ranks.get(&self.plan.rank).context("the rank has no process")?])
    }

    /// All processes of the machine that is struck: without others, of the run.
    fn on_machine(&self, run: &Run) -> Vec<i32> {
        let network = self.machines.as_ref().map(|machines| machines.network(self.plan.machine));
        let is_there = |process: &i32| network.as_ref().is_none_or(|network| network_of(*process) == *network);
        run.living().into_iter().filter(is_there).collect()
    }

    fn agent(&self, run: &Run) -> Result<Vec<i32>> {
        let mut found = self.on_machine(run);
        found.retain(|process| words_of(*process).iter().any(|word| word == "__accelerate_agent"));
        ensure!(found.len() == 1, "the machine has {} agents", found.len());
        Ok(found)
    }

    fn login(&self, run: &Run) -> Result<Vec<i32>> {
        let host = address(self.plan.machine);
        let mut found = run.living();
        found.retain(|process| words_of(*process).get(1..3) == Some(&[login::CLIENT.to_owned(), host.clone()]));
        ensure!(found.len() == 1, "the machine has {} logins", found.len());
        Ok(found)
    }
}

/// How many milliseconds a step takes longer than it has to: runs have to go on for as long as that which is to disturb them.
fn slowness(kind: Kind) -> u64 {
    match kind {
        Kind::StopLauncher | Kind::StopAgent => 700,
        Kind::InterruptLink | Kind::SlowLink | Kind::Strangers => 100,
        _ => 0,
    }
}

/// A run that had made its last step ends without another one.
fn goes_on(line: &str) -> Option<()> {
    (is_step(line) || line.contains("trained to the end")).then_some(())
}

/// `process 4711 is rank 2`
fn process_of_rank(line: &str) -> Option<(i32, usize)> {
    let (process, rank) = line.split_once("process ")?.1.split_once(" is rank ")?;
    Some((process.parse().ok()?, rank.parse().ok()?))
}

fn send(process: i32, signal: Signal) {
    if let Some(process) = Pid::from_raw(process) {
        // Whoever has ended by now needs no signal.
        let _ = kill_process(process, signal);
    }
}

fn cont(stopped: &[i32]) {
    stopped.iter().for_each(|process| send(*process, Signal::CONT));
}
