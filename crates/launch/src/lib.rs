#![doc = include_str!("../README.md")]

mod address;
mod cargo;
mod config;
mod elf;
mod error;
mod failure;
pub mod helper;
mod hosts;
mod line_prefix;
mod logs;
mod machine;
mod mixer;
mod outlet;
mod placement;
mod plan;
mod port;
mod process_stat;
mod program;
mod question;
mod reference;
mod report;
mod restart;
pub mod status;
mod stdin;
mod supervise;
mod tail;

pub use config::{Capture, Helper, LaunchConfig, LocalRanks, MAX_LOCAL_PROCESSES, Program};
pub use error::{Error, Result, exit_code_of_signal};
pub use failure::{Ended, Failure, MemoryPressure, OtherRank, Survivor, signal_name};
pub use hosts::{AGENT_SCRIPT, AgentCommand, Preflight, configs_of_machines, launch_on_machines};
pub use line_prefix::LinePrefix;
pub use logs::{LogFiles, temporary_folder};
pub use machine::{Machine, num_visible_gpus};
pub use placement::{core_list, core_numbers};
pub use plan::{Plan, RankCommand, Terminal, TerminalSize, plan, unusable_threads};
pub use port::PortReservation;
pub use program::{ProgramChoice, ProgramSearch, resolve_program};
pub use question::{Limits, ask, ask_and_watch};
pub use reference::{PythonStart, Reference};
pub use report::{
    Backlog, Leftover, Notice, Reporter, Silent, Source, Stream, TerminalOptions, TerminalReporter, write_patiently,
    write_within,
};
pub use restart::Restarts;
pub use stdin::Stdin;
pub use supervise::{Outcome, RankOutcome, StopSignals, supervise};

use accelerate_rendezvous::Secret;
use std::ffi::OsString;
use std::io;
use supervise::signals::Signals;
use supervise::{Part, supervise_with};

/// Starts every rank that `config` asks for on this machine, watches them until all have ended, and says
/// how it went.
///
/// Checks come first and touch nothing: counts, program, port. Then the ranks start together; their
/// output goes to `reporter` as it arrives. When one rank fails, the others are asked to end (`SIGTERM`)
/// and, after [`LaunchConfig::grace_period`], made to (`SIGKILL`). A `SIGINT`, `SIGTERM` or `SIGHUP` that
/// this process receives meanwhile is passed on to the ranks; a second one ends them at once.
///
/// With [`LaunchConfig::max_restarts`] all of this is done again after a rank has failed, with a new port and a new secret, unless it
/// failed by what would be the same the next time (exit codes 2, 126 and 127) or somebody has stopped it. A [`Notice::Restarting`]
/// tells when. What ranks have read from standard input before that is gone.
///
/// # Errors
///
/// - [`Error::is_invalid_configuration`]: counts that contradict each other;
/// - [`Error::is_program_not_found`], [`Error::is_program_not_executable`];
/// - [`Error::is_port_taken`]: [`LaunchConfig::main_process_port`] is in use on this machine;
/// - [`Error::is_log_unwritable`]: the folder or a file for the ranks' output cannot be made;
/// - [`Error::is_child_failed`]: a rank ended other than with code 0; [`Error::failure`] tells the story;
/// - [`Error::is_interrupted`]: this process was told to stop;
/// - [`Error::is_output_closed`]: nobody reads the output any more.
///
/// ```
/// use accelerate_launch::{LaunchConfig, Program, Silent, launch};
///
/// let config = LaunchConfig {
///     args: vec!["-c".into(), "exit $RANK".into()],
///     ..LaunchConfig::new(Program::Executable("sh".into()), 2)
/// };
/// let error = launch(&config, &mut Silent).unwrap_err();
/// assert!(error.is_child_failed());
/// assert_eq!((error.rank(), error.exit_code()), (Some(1), 1));
/// ```
pub fn launch(config: &LaunchConfig, reporter: &mut dyn Reporter) -> Result<Outcome> {
    restart::run(config, reporter, |config, signals, reporter| attempt(config, Part::of_launcher(), signals, reporter))
}

/// The same without restarts, for one whose restarts are made elsewhere, too: for a `part` of a run.
pub(crate) fn attempt(
    config: &LaunchConfig,
    part: Part,
    signals: &mut Signals,
    reporter: &mut dyn Reporter,
) -> Result<Outcome> {
    config.check()?;
    let machine = Machine::probe();
    let search = ProgramSearch::of_this_process();
    let command = resolve_program(&config.program, &search)?;
    // Held until the end: two launches on one machine never choose the same port.
    let port = PortReservation::for_config(config)?;
    let mut config = config.clone();
    config.environment.extend(secret(&config)?);
    config.log_dir = logs::make_folder(&config)?;
    let plan = plan(&config, &command, port.number(), &machine);
    let choice = ProgramChoice::between(&config.program, &command, &search).map(Notice::ProgramChosen);
    // Without --tee, only what programs themselves write of their errors is there.
    let logging = config.log_dir.clone().filter(|_| config.tee.any()).map(|folder| Notice::Logging { folder });
    // Once is enough.
    let is_first = config.restart_count == 0;
    for notice in choice.into_iter().chain(logging).filter(|_| is_first) {
        reporter.notice(&notice).map_err(Error::output_closed)?;
    }
    let main_process = address::AddressLookup::begin(&config);
    supervise_with(&plan, part, signals, reporter)
        .map_err(|error| error.with_address_problem(main_process.and_then(|lookup| lookup.problem())))
}

/// The variable by which the ranks of a run learn its secret, without which nobody takes part in it.
pub const SECRET_VARIABLE: &str = "ACCELERATE_RUN_SECRET";

/// A secret for ranks that are all started here. Those of several machines need the same one, so it comes from outside there.
fn secret(config: &LaunchConfig) -> Result<Option<(OsString, OsString)>> {
    let is_given = config.environment.iter().any(|(name, _)| name == SECRET_VARIABLE);
    if is_given || config.num_machines > 1 || config.num_processes == 1 {
        return Ok(None);
    }
    Ok(Some((SECRET_VARIABLE.into(), new_secret()?)))
}

fn new_secret() -> Result<OsString> {
    let random = Secret::random();
    random.map(Into::into).map_err(|error| Error::system("making the secret of the run", io::Error::other(error)))
}
