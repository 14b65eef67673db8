//! Runs that save a checkpoint at every step are killed at random moments and go on from the newest one, again and again. Every
//! loss has to be that of a run which nobody disturbed, to the bit.

use crate::attempt::numbers;
use crate::run::{Network, Run};
use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// What each run prints of each step: bits of the loss and of the learning rate.
pub(crate) type Losses = BTreeMap<u64, String>;

const FORMS: [&str; 6] = ["ddp", "async", "fp16", "full_shard", "shard_grad_op", "hybrid_shard"];
/// How long runs that nobody kills may take.
const TO_THE_END: Duration = Duration::from_secs(120);
/// How long everything may take to be over after a kill.
const AFTER_A_KILL: Duration = Duration::from_secs(30);

/// Who is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Rank,
    AllRanks,
    Launcher,
}

/// Kills so many times in all, and counts how often something was wrong.
pub(crate) fn kill(program: &Path, kills: u64, seed: u64) -> Result<u64> {
    let began = Instant::now();
    let (mut done, mut faults, mut undisturbed) = (0, 0, BTreeMap::new());
    let mut run_number = 0;
    while done < kills {
        let mut below = numbers(seed.wrapping_add(run_number));
        let form = FORMS[run_number as usize % FORMS.len()];
        let world_size = if form == "hybrid_shard" { 2 + 2 * below(2) } else { 1 + below(4) } as usize;
        run_number += 1;
        let expected = match undisturbed.get(&(form, world_size)) {
            Some(expected) => expected,
            None => {
                let losses = to_the_end(program, form, world_size)?;
                undisturbed.entry((form, world_size)).or_insert(losses)
            }
        };
        match killed_run(program, form, world_size, expected, (kills - done).min(12), &mut below) {
            Ok(killed) => done += killed,
            Err(error) => {
                faults += 1;
                done += 1;
                eprintln!("fault in run {run_number}, {form} on {world_size} ranks: {error:#}");
            }
        }
        println!("{done} of {kills} kills, {faults} faults, {} s", began.elapsed().as_secs());
    }
    Ok(faults)
}

fn start(program: &Path, form: &str, world_size: usize, folder: &Path) -> Result<Run> {
    let environment = [("ACCELERATE_USE_CPU", "true".to_owned()), ("CHECKPOINTED_FORM", form.to_owned())];
    Run::start(program, "checkpointed", world_size, folder, &environment, Network::OfTheMachine)
}

/// The losses of a run that nobody disturbs.
pub(crate) fn to_the_end(program: &Path, form: &str, world_size: usize) -> Result<Losses> {
    Ok(losses(&printed_to_the_end(program, form, world_size, tempfile::tempdir()?.path())?))
}

/// What a run prints that nobody disturbs and that goes on from what is in `folder`.
pub(crate) fn printed_to_the_end(program: &Path, form: &str, world_size: usize, folder: &Path) -> Result<String> {
    let mut run = start(program, form, world_size, folder)?;
    let status = run.end(TO_THE_END)?;
    ensure!(status.success(), "{form} on {world_size} ranks ends with {status} undisturbed:\n{}", run.printed());
    Ok(run.printed().to_owned())
}

/// One run, killed up to `most` times, and the number of kills.
fn killed_run(
    program: &Path,
    form: &str,
    world_size: usize,
    expected: &Losses,
    most: u64,
    below: &mut impl FnMut(u64) -> u64,
) -> Result<u64> {
    let folder = tempfile::tempdir()?;
    let (mut kills, mut farthest) = (0_u64, 0_u64);
    loop {
        let mut run = start(program, form, world_size, folder.path())?;
        let is_killed = kills < most && farthest < expected.len() as u64;
        let victim = [Victim::Rank, Victim::AllRanks, Victim::Launcher][below(3) as usize];
        let (rank, steps, delay) = (below(world_size as u64) as usize, below(4), Duration::from_micros(below(12_000)));
        let plan = format!("{victim:?} {rank}, {steps} steps after it began, {delay:?} later, after {kills} kills");
        if is_killed {
            kill_once(&mut run, victim, rank, world_size, steps, delay).context(plan.clone())?;
            kills += 1;
        }
        let status = run.end(if is_killed { AFTER_A_KILL } else { TO_THE_END })?;
        let printed = run.printed();
        ensure!(!printed.contains("panicked at"), "{plan}: there was a panic:\n{printed}");
        let found = losses(printed);
        // A step is printed before it is saved, and the one before was saved by then, or is being saved in the background:
        // at most one step is done again, or two.
        let first = found.keys().next().copied();
        let num_unsaved = u64::from(form == "async");
        ensure!(
            first.is_none_or(|first| first + num_unsaved >= farthest),
            "{plan}: it went on at {first:?}, and was at {farthest}:\n{printed}"
        );
        for (step, found) in found {
            let wanted = expected.get(&step);
            ensure!(wanted == Some(&found), "{plan}: step {step} is {found}, not {wanted:?}:\n{printed}");
            farthest = farthest.max(step);
        }
        if status.success() {
            ensure!(farthest == expected.len() as u64, "{plan}: the run ended after step {farthest}:\n{printed}");
            return Ok(kills);
        }
        ensure!(is_killed, "{plan}: nobody was killed, and the run ended with {status}:\n{printed}");
    }
}

fn kill_once(run: &mut Run, victim: Victim, rank: usize, world_size: usize, steps: u64, delay: Duration) -> Result<()> {
    let mut ranks = BTreeMap::new();
    while ranks.len() < world_size {
        let (process, rank) = run.wait_for("the numbers of the processes", |line| {
            let (_, rest) = line.split_once("process ")?;
            let (process, rank) = rest.split_once(" is rank ")?;
            Some((process.parse::<i32>().ok()?, rank.parse::<usize>().ok()?))
        })?;
        ranks.insert(rank, Pid::from_raw(process).context("a process has a number")?);
    }
    for _ in 0..steps {
        // A run that was nearly over ends before.
        let line = run
            .wait_for("a step", |line| (is_step(line) || line.contains("trained to the end")).then(|| is_step(line)))?;
        if !line {
            return Ok(());
        }
    }
    thread::sleep(delay);
    // Whoever has ended by now cannot be killed.
    let kill = |process: &Pid| {
        let _ = kill_process(*process, Signal::KILL);
    };
    match victim {
        Victim::Rank => ranks.get(&rank).into_iter().for_each(kill),
        Victim::AllRanks => ranks.values().for_each(kill),
        Victim::Launcher => run.signal_launcher(Signal::KILL)?,
    }
    Ok(())
}

pub(crate) fn is_step(line: &str) -> bool {
    line.contains(" loss ")
}

pub(crate) fn losses(printed: &str) -> Losses {
    let step = |line: &str| {
        let (_, rest) = line.split_once("step ")?;
        let (step, losses) = rest.split_once(' ')?;
        Some((step.parse().ok()?, losses.strip_prefix("loss ")?.to_owned()))
    };
    printed.lines().filter_map(step).collect()
}
