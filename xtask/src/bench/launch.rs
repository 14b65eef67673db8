//! The races of the command line: from the launcher's start to its end, and the size of its file.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use crate::python::Environment;
use crate::race::{Pair, Race, Races};
use crate::{paths, process, ranks};

/// How many ranks are started, where nothing else is said.
const NUM_PROCESSES: usize = 2;

/// How often torchrun may try to come back from the death of a rank, before its race is void.
const RIVAL_TRIES: usize = 10;

/// How long one of these may take. Those that come to an end take about half of it; others hang.
const RIVAL_LIMIT: Duration = Duration::from_secs(60);

/// How many ranks are many for one machine.
const MANY_PROCESSES: usize = 64;

/// The most that the file of the command may have without symbols, in MiB.
const MOST_MIB: f64 = 12.0;

/// Runs all of them for `rounds` rounds. Values are seconds, but for the size.
pub(super) fn races(environment: &Environment, rounds: usize, races: &mut Races) -> Result<()> {
    commands(environment, rounds, races)?;
    let noop = Launched { name: "launch_noop", program: "noop", goal: 0.01, num_processes: NUM_PROCESSES };
    let (program, few) = ("first_collective", NUM_PROCESSES);
    let collective = Launched { name: "launch_first_collective", program, goal: 0.05, num_processes: few };
    let many = Launched { name: "launch_first_collective_16", program, goal: 0.15, num_processes: 16 };
    races.add(noop.race(environment, rounds, |rank| format!("rank={rank} world_size={few}"))?);
    for launched in [collective, many] {
        let num_processes = launched.num_processes;
        // Ranks contribute 1, 2 and so on.
        let sum = num_processes * (num_processes + 1) / 2;
        let answer = |rank| format!("rank={rank} world_size={num_processes} sum={sum}.0");
        races.add(launched.race(environment, rounds, answer)?);
    }
    races.add(restart(environment, rounds)?);
    races.add(size()?);
    growth(rounds, races)
}

/// What 64 ranks take, over what they would if time and memory grew with the number of ranks from two on.
fn growth(rounds: usize, races: &mut Races) -> Result<()> {
    let (mut seconds, mut memory) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let (few, many) = (grown(NUM_PROCESSES)?, grown(MANY_PROCESSES)?);
        if round > 0 {
            let times = MANY_PROCESSES as f64 / NUM_PROCESSES as f64;
            seconds.push(Pair { ours: many.seconds, rival: few.seconds * times });
            memory.push(Pair { ours: many.mib, rival: few.mib * times });
        }
    }
    races.extend([
        Race { name: "launch_64_ranks", unit: "s", goal: 1.0, pairs: seconds },
        Race { name: "launch_64_ranks_memory", unit: "MiB", goal: 1.0, pairs: memory },
    ]);
    Ok(())
}

/// From the launcher's start to its end, and the memory of all ranks while all of them are connected.
struct Grown {
    seconds: f64,
    mib: f64,
}

fn grown(num_processes: usize) -> Result<Grown> {
    let mut command = ranks::launch(num_processes, &paths::release_binary("first_collective"));
    let started = Instant::now();
    let printed = process::read(command.arg("--memory"))?;
    let seconds = started.elapsed().as_secs_f64();
    let kib: Vec<f64> = ranks::marked(&printed, "memory_kib=").iter().filter_map(|kib| kib.parse().ok()).collect();
    ensure!(
        kib.len() == num_processes,
        "the race is void: not all of {num_processes} ranks told their memory:\n{printed}"
    );
    Ok(Grown { seconds, mib: kib.iter().sum::<f64>() / 1024.0 })
}

/// From the death of a rank until all ranks are in their loops again.
fn restart(environment: &Environment, rounds: usize) -> Result<Race> {
    const ONCE: [&str; 2] = ["--max_restarts", "1"];
    let (program, script) = (paths::release_binary("restart"), paths::repository_root().join("bench/rival/restart.py"));
    let mut pairs = Vec::new();
    for round in 0..=rounds {
        let ours = until_back(&process::read(&mut ranks::launch_with(NUM_PROCESSES, &ONCE, &program))?)?;
        let rival = rival_until_back(environment, &ONCE, &script)?;
        if round > 0 {
            pairs.push(Pair { ours, rival });
        }
    }
    Ok(Race { name: "launch_restart", unit: "s", goal: 0.25, pairs })
}

/// The same of torchrun, whose second attempt fails at times: its ranks connect to addresses of the first.
fn rival_until_back(environment: &Environment, flags: &[&str], script: &Path) -> Result<f64> {
    for _ in 0..RIVAL_TRIES {
        let mut rival = environment.torchrun(NUM_PROCESSES)?;
        let mut rival = process::within(RIVAL_LIMIT, rival.args(flags).arg(script));
        let (is_success, printed) = process::run_and_read(&mut rival)?;
        if is_success {
            return until_back(&printed);
        }
    }
    bail!("the race is void: torchrun has failed {RIVAL_TRIES} times to come back from the death of a rank")
}

/// Of what ranks have printed: how long after the kill the last of them had made a step again.
fn until_back(printed: &str) -> Result<f64> {
    let times = |mark: &str| -> Vec<f64> {
        ranks::marked(printed, mark).iter().filter_map(|rest| rest.rsplit_once("at=")?.1.parse().ok()).collect()
    };
    let (killed, back) =
        (times("killed "), (0..NUM_PROCESSES).map(|rank| times(&format!("in_loop rank={rank} restart=1 "))));
    let back: Vec<f64> = back.flatten().collect();
    let num_done = ranks::marked(printed, "done ").iter().filter(|rest| rest.ends_with("sum=20.0")).count();
    let last = back.iter().copied().fold(f64::MIN, f64::max);
    match killed[..] {
        [killed] if back.len() == NUM_PROCESSES && num_done == NUM_PROCESSES => Ok(last - killed),
        _ => bail!("the race is void: no rank was killed, or not all came back and were done:\n{printed}"),
    }
}

/// Help, and one process that a configuration file describes.
fn commands(environment: &Environment, rounds: usize, races: &mut Races) -> Result<()> {
    let folder = paths::target_folder().join("bench");
    fs::create_dir_all(&folder)?;
    let file = folder.join("launch.yaml");
    fs::write(&file, CONFIG_FILE)?;
    let file = file.to_string_lossy();
    let help = ["launch", "--help"];
    let one = ["launch", "--config_file", &file, "--no_python", "echo", "launched"];
    races.add(command(environment, rounds, "launch_help", &help, "--num_processes")?);
    races.add(command(environment, rounds, "launch_config_file", &one, "launched")?);
    Ok(())
}

/// What Python Accelerate's wizard writes for one process on the CPU.
const CONFIG_FILE: &str = "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: 'NO'\n\
    enable_cpu_affinity: false\nmachine_rank: 0\nmain_training_function: main\nmixed_precision: 'no'\n\
    num_machines: 1\nnum_processes: 1\nuse_cpu: true\n";

/// The same words for both commands; `answer` is in what both print.
fn command(environment: &Environment, rounds: usize, name: &'static str, words: &[&str], answer: &str) -> Result<Race> {
    let mut pairs = Vec::new();
    for round in 0..=rounds {
        let mut ours = Command::new(paths::release_binary("accelerate"));
        let ours = timed(ours.args(words), &[answer])?;
        let mut rival = environment.command();
        let rival = timed(rival.args(["-m", "accelerate.commands.accelerate_cli"]).args(words), &[answer])?;
        if round > 0 {
            pairs.push(Pair { ours, rival });
        }
    }
    Ok(Race { name, unit: "s", goal: 0.01, pairs })
}

/// The size of the command without symbols, over what it may have.
fn size() -> Result<Race> {
    let stripped = paths::target_folder().join("bench/accelerate-stripped");
    process::run(Command::new("strip").arg("-o").arg(&stripped).arg(paths::release_binary("accelerate")))?;
    let ours = fs::metadata(&stripped)?.len() as f64 / f64::from(1 << 20);
    Ok(Race { name: "launch_binary", unit: "MiB", goal: 1.0, pairs: vec![Pair { ours, rival: MOST_MIB }] })
}

/// Ranks that are started, print their answer and end.
struct Launched {
    name: &'static str,
    program: &'static str,
    goal: f64,
    num_processes: usize,
}

impl Launched {
    fn race(&self, environment: &Environment, rounds: usize, answer: impl Fn(usize) -> String) -> Result<Race> {
        let Self { name, program, goal, num_processes } = *self;
        let (binary, script) =
            (paths::release_binary(program), paths::repository_root().join(format!("bench/rival/{program}.py")));
        let answers: Vec<String> = (0..num_processes).map(answer).collect();
        let answers: Vec<&str> = answers.iter().map(String::as_str).collect();
        let mut pairs = Vec::new();
        // The first round of each side fills the page cache and is not counted.
        for round in 0..=rounds {
            let ours = timed(&mut ranks::launch(num_processes, &binary), &answers)?;
            let rival = timed(environment.torchrun(num_processes)?.arg(&script), &answers)?;
            if round > 0 {
                pairs.push(Pair { ours, rival });
            }
        }
        Ok(Race { name, unit: "s", goal, pairs })
    }
}

/// Runs the command and checks that it printed all of `answers`.
fn timed(command: &mut Command, answers: &[&str]) -> Result<f64> {
    let started = Instant::now();
    let printed = process::read(command)?;
    let seconds = started.elapsed().as_secs_f64();
    for answer in answers {
        ensure!(printed.contains(answer), "the race is void: nobody printed `{answer}`, but:\n{printed}");
    }
    Ok(seconds)
}

#[cfg(test)]
mod tests {
    use super::until_back;

    const PRINTED: &str = "[rank 0] in_loop rank=0 restart=0 at=10.0\n[rank 1] in_loop rank=1 restart=0 at=10.0\n\
        [rank 1] killed at=11.5\nin_loop rank=1 restart=1 at=12.25\nin_loop rank=0 restart=1 at=12.5\n\
        done rank=0 sum=20.0\ndone rank=1 sum=20.0\n";

    #[test]
    fn the_last_rank_that_is_back_counts() {
        assert_eq!(until_back(PRINTED).ok(), Some(1.0));
    }

    #[test]
    fn a_race_without_a_kill_or_with_a_rank_that_stays_away_is_void() {
        for gone in ["killed at=11.5", "in_loop rank=0 restart=1 ", "done rank=1 "] {
            assert!(until_back(&PRINTED.replace(gone, "")).is_err(), "{gone}");
        }
    }
}
