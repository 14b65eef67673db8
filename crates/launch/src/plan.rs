//! Deciding, without doing anything, what each rank is started with.

mod environment;

use std::ffi::OsString;
use std::time::Duration;

pub use environment::unusable_threads;

use crate::config::{Capture, Helper, LaunchConfig};
use crate::logs::LogFiles;
use crate::machine::Machine;
use crate::placement::cores_of_ranks;
use crate::stdin::Stdin;
use environment::environment;

/// One launch on this machine, ready to be carried out by [`supervise`](crate::supervise()).
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Count of all ranks of the run, on all machines.
    pub world_size: usize,
    /// The ranks of this machine in order of `local_rank`.
    pub ranks: Vec<RankCommand>,
    /// Output passes through the launcher.
    pub captured: bool,
    /// The only rank shares the launcher's process group, so that it owns the terminal: keys, debugger, job control.
    pub in_foreground: bool,
    /// Give the local main process a terminal of this size for those of its streams that end at one.
    pub terminal: Option<Terminal>,
    /// See [`LaunchConfig::grace_period`].
    pub grace_period: Duration,
    /// See [`LaunchConfig::shutdown_grace_period`].
    pub shutdown_grace_period: Duration,
    /// See [`LaunchConfig::helper`].
    pub helper: Option<Helper>,
    /// See [`LaunchConfig::dedicated_process`].
    pub dedicated_process: bool,
}

/// How one rank is started.
///
/// ```
/// use accelerate_launch::{LaunchConfig, Machine, Program, Stdin, plan};
/// let machine = Machine { stdin_is_terminal: false, ..Machine::probe() };
/// let config = LaunchConfig::new(Program::Executable("train".into()), 2);
/// let ranks = plan(&config, &["train".into()], 29500, &machine).ranks;
/// assert_eq!((&ranks[0].stdin, &ranks[1].stdin), (&Stdin::Inherited, &Stdin::Nothing));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankCommand {
    /// Rank among all ranks of all machines.
    pub rank: usize,
    /// Rank among those of this machine.
    pub local_rank: usize,
    /// Executable, then its arguments.
    pub command: Vec<OsString>,
    /// Variables to set on top of the inherited environment; `None` removes one.
    pub environment: Vec<(OsString, Option<OsString>)>,
    /// What the rank reads from.
    pub stdin: Stdin,
    /// The cores that it is kept on, in order; `None` for all that this process may use.
    pub cores: Option<Vec<usize>>,
    /// The files that its output is written to as well.
    pub log_files: LogFiles,
}

/// Which streams of the local main process are a terminal, and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terminal {
    /// Standard output is one.
    pub stdout: bool,
    /// Standard error is one.
    pub stderr: bool,
    /// Its size.
    pub size: TerminalSize,
}

/// Character cells of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Cells per line.
    pub columns: u16,
}

/// Decides the command and the environment of every rank of this machine. `command` is the resolved
/// program ([`resolve_program`](crate::resolve_program)), `main_process_port` the reserved port.
/// `config` has passed [`LaunchConfig::check`].
///
/// One process on one machine is not distributed: it gets no `RANK` family, and inherited ones are
/// removed, so that it behaves as if started by hand. The exception is a program in Python that is sharded: under Python
/// Accelerate's launcher it is rank 0 of one, without which it would not be sharded at all.
///
/// ```
/// use accelerate_launch::{LaunchConfig, Machine, Program, plan};
/// let config = LaunchConfig::new(Program::Executable("train".into()), 4);
/// let plan = plan(&config, &["bin/train".into()], 29501, &Machine::probe());
/// let environment = &plan.ranks[3].environment;
/// assert!(environment.contains(&("RANK".into(), Some("3".into()))));
/// assert!(environment.contains(&("MASTER_PORT".into(), Some("29501".into()))));
/// ```
pub fn plan(config: &LaunchConfig, command: &[OsString], main_process_port: u16, machine: &Machine) -> Plan {
    let num_local = config.num_local_processes();
    let captured = match config.capture {
        Capture::Always => true,
        // The last lines of an attempt tell why it failed. A process that somebody may type to keeps its terminal all the same.
        Capture::Automatic => {
            let may_be_restarted = config.max_restarts > 0 && !machine.stdin_is_terminal;
            num_local > 1 || config.tee.any() || may_be_restarted
        }
    };
    // At one terminal the two streams could not be told apart, and a file of each is asked for.
    let any_terminal = (machine.stdout_is_terminal || machine.stderr_is_terminal) && !config.tee.of(0).any();
    let cores = config.enable_cpu_affinity.then(|| cores_of_ranks(config, machine));
    let cores = |local_rank: usize| cores.as_ref().and_then(|cores| cores.get(local_rank)).cloned();
    let ranks: Vec<_> = (0..num_local)
        .map(|local_rank| RankCommand {
            rank: config.first_rank() + local_rank,
            local_rank,
            command: command.iter().chain(&config.args).cloned().collect(),
            environment: environment(
                config,
                local_rank,
                main_process_port,
                captured,
                machine,
                cores(local_rank).as_deref(),
            ),
            stdin: Stdin::of_rank(config, local_rank, machine),
            cores: cores(local_rank),
            log_files: LogFiles::of_rank(config, local_rank),
        })
        .collect();
    // Whoever reads from a terminal in another process group than the one in the foreground is stopped there by the kernel.
    let reads = ranks.iter().any(|rank| rank.stdin == Stdin::Inherited);
    Plan {
        world_size: config.world_size(),
        in_foreground: machine.stdin_is_terminal && (reads || !captured),
        ranks,
        captured,
        terminal: machine.terminal_size.filter(|_| captured && any_terminal).map(|size| Terminal {
            stdout: machine.stdout_is_terminal,
            stderr: machine.stderr_is_terminal,
            size,
        }),
        grace_period: config.grace_period,
        shutdown_grace_period: config.shutdown_grace_period,
        helper: config.helper.clone(),
        dedicated_process: config.dedicated_process,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::environment::tests::{MACHINE, config};
    use super::*;
    use accelerate_core::config::Tee;
    use accelerate_core::settings::SettingValue;
    use rstest::rstest;

    /// Files take the place of a terminal that both streams would share.
    #[rstest]
    #[case("0", 2, true, true)]
    #[case("3", 2, true, false)]
    #[case("1:3", 2, true, true)]
    #[case("0", 1, false, false)]
    #[case("2", 1, true, false)]
    fn output_that_is_copied_is_captured(
        #[case] tee: &str,
        #[case] num_processes: usize,
        #[case] captured: bool,
        #[case] terminal: bool,
    ) {
        let size = Some(TerminalSize { rows: 24, columns: 80 });
        let machine = Machine { stdout_is_terminal: true, terminal_size: size, ..MACHINE };
        let config = LaunchConfig { tee: Tee::read(tee).unwrap(), ..config(num_processes) };
        let plan = plan(&config, &["bin/train".into()], 1, &machine);
        assert_eq!((plan.captured, plan.terminal.is_some()), (captured, terminal));
    }

    #[rstest]
    #[case::never(0, false, false, false)]
    #[case::never(0, true, false, true)]
    #[case::perhaps(3, false, true, false)]
    #[case::somebody_may_type_to_it(3, true, false, true)]
    fn a_process_that_may_be_restarted_is_captured(
        #[case] max_restarts: usize,
        #[case] stdin_is_terminal: bool,
        #[case] captured: bool,
        #[case] in_foreground: bool,
    ) {
        let machine = Machine { stdin_is_terminal, ..MACHINE };
        let plan = plan(&LaunchConfig { max_restarts, ..config(1) }, &["bin/train".into()], 1, &machine);
        assert_eq!((plan.captured, plan.in_foreground), (captured, in_foreground));
    }

    /// Copies of its output are no reason to take it from the terminal, where it would be stopped as soon as it read.
    #[rstest]
    #[case::at_a_terminal(1, true, true, Stdin::Inherited, true)]
    #[case::elsewhere(1, false, true, Stdin::Inherited, false)]
    #[case::one_of_two(2, true, true, Stdin::Nothing, false)]
    #[case::without_input(1, true, false, Stdin::Nothing, false)]
    fn a_process_whose_output_is_copied_reads_in_the_foreground(
        #[case] num_processes: usize,
        #[case] stdin_is_terminal: bool,
        #[case] hands_on_input: bool,
        #[case] stdin: Stdin,
        #[case] in_foreground: bool,
    ) {
        let machine = Machine { stdin_is_terminal, ..MACHINE };
        let config = LaunchConfig { tee: Tee::read("3").unwrap(), hands_on_input, ..config(num_processes) };
        let plan = plan(&config, &["bin/train".into()], 1, &machine);
        assert_eq!((&plan.ranks[0].stdin, plan.captured, plan.in_foreground), (&stdin, true, in_foreground));
    }

    #[rstest]
    #[case(2, false, &[Stdin::Inherited, Stdin::Nothing], true, false)]
    #[case(2, true, &[Stdin::Nothing, Stdin::Nothing], true, false)]
    #[case(1, false, &[Stdin::Inherited], false, false)]
    #[case(1, true, &[Stdin::Inherited], false, true)]
    fn who_reads_and_who_owns_the_terminal(
        #[case] num_processes: usize,
        #[case] stdin_is_terminal: bool,
        #[case] expected: &[Stdin],
        #[case] captured: bool,
        #[case] in_foreground: bool,
    ) {
        let machine = Machine { stdin_is_terminal, ..MACHINE };
        let plan = plan(&config(num_processes), &["bin/train".into()], 1, &machine);
        assert_eq!(plan.ranks.iter().map(|rank| rank.stdin.clone()).collect::<Vec<_>>(), expected);
        assert_eq!((plan.captured, plan.in_foreground), (captured, in_foreground));
    }
}
