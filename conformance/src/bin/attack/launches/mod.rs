//! Runs with restarts are struck while they train: ranks, launchers, agents and whole machines get signals, machines are lost for
//! good, links between machines are cut or slow, and strangers connect. Nothing may be left of any, nothing may take longer than it
//! has to, who was struck has to be named, and every loss has to be that of a run which nobody disturbed, to the bit.

mod fewer;
pub(crate) mod login;
mod network;
mod plan;
pub(crate) mod strangers;
mod table;
mod trial;

use accelerate_launch::AgentCommand;
use anyhow::{Context, Result, ensure};
use network::Machines;
pub(crate) use plan::Kind;
use plan::{Places, Plan};
use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};
use table::Table;

/// How many trials lie between two lines where no terminal shows each of them.
const TRIALS_PER_LINE: u64 = 25;

/// What is to be done.
pub(crate) struct Soak<'a> {
    pub(crate) program: &'a Path,
    pub(crate) trials: u64,
    pub(crate) seed: u64,
    pub(crate) only: Option<u64>,
    /// What all of them do to their runs, if not something else each time.
    pub(crate) event: Option<Kind>,
    pub(crate) one_machine: bool,
    /// How much later than it has to be everything may be over.
    pub(crate) slack: Duration,
}

impl Soak<'_> {
    /// The number of trials in which something was wrong.
    pub(crate) fn run(&self) -> Result<u64> {
        let began = Instant::now();
        let places = self.places();
        let can_be_done = places.has_machines || !self.event.is_some_and(Kind::is_on_machines_only);
        ensure!(can_be_done, "this is done to runs on several machines, which cannot be made here");
        let (mut table, mut undisturbed) = (Table::default(), BTreeMap::new());
        let numbers = self.only.map_or(0..self.trials, |only| only..only + 1);
        let last = numbers.end - 1;
        for number in numbers {
            let plan = Plan::draw(self.seed.wrapping_add(number), places, self.event);
            let expected = match undisturbed.get(&plan.world_size()) {
                Some(expected) => expected,
                None => {
                    let losses = trial::undisturbed(self.program, plan.world_size())?;
                    undisturbed.entry(plan.world_size()).or_insert(losses)
                }
            };
            let result = trial::carry_out(&plan, self.program, expected, self.slack);
            if let Err(error) = &result {
                clear_line();
                eprintln!(
                    "fault in trial {number}, which `--seed {} --only {number}` repeats, {plan:?}: {error:#}",
                    self.seed
                );
            }
            table.add(plan.kind, result.ok());
            self.show(number + 1, &table, began.elapsed(), number == last);
        }
        clear_line();
        println!("{table}");
        Ok(table.faults())
    }

    fn places(&self) -> Places {
        if self.one_machine {
            return Places { has_machines: false, has_slow_links: false };
        }
        if let Some(obstacle) = Machines::obstacle() {
            println!("several machines: skipped, because {obstacle}");
            return Places { has_machines: false, has_slow_links: false };
        }
        let obstacle = Machines::obstacle_of_slow_links();
        if let Some(obstacle) = &obstacle {
            println!("slow links: skipped, because {obstacle}; links that are away for a moment take their place");
        }
        Places { has_machines: true, has_slow_links: obstacle.is_none() }
    }

    /// One line that is written again and again, or a line now and then.
    fn show(&self, done: u64, table: &Table, elapsed: Duration, is_last: bool) {
        let text = format!("{done} of {} trials, {} faults, {} s", self.trials, table.faults(), elapsed.as_secs());
        if std::io::stdout().is_terminal() {
            print!("\r{text}");
            // A closed terminal is no reason to stop.
            let _ = std::io::stdout().flush();
        } else if is_last || done.is_multiple_of(TRIALS_PER_LINE) {
            println!("{text}");
        }
    }
}

fn clear_line() {
    if std::io::stdout().is_terminal() {
        print!("\r\x1b[K");
        let _ = std::io::stdout().flush();
    }
}

/// The agents of `10.0.0.1:2,10.0.0.2:1`; `None` of no hosts.
pub(crate) fn agents(hosts: &[String]) -> Result<Option<Vec<AgentCommand>>> {
    let login = [std::env::current_exe()?.into_os_string(), login::CLIENT.into()];
    let agent = |host: &String| {
        let (name, number) = host.rsplit_once(':').with_context(|| format!("{host:?} has no number of processes"))?;
        Ok(AgentCommand::by_ssh(name, number.parse()?, &login))
    };
    let agents = hosts.iter().map(agent).collect::<Result<Vec<_>>>()?;
    Ok(Some(agents).filter(|agents| !agents.is_empty()))
}
