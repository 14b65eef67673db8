//! The functions that a program's worker processes can run.

use super::call::Call;
use super::object::Object;
use crate::error::{LauncherError, Result};
use accelerate_core::environment::RESTART_COUNT_VARIABLE;
use accelerate_launch::{Helper, LaunchConfig, Program, helper};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};

/// Set in the process in which evcxr, Rust's kernel for notebooks, runs cells.
const RUNTIME_VARIABLE: &str = "EVCXR_IS_RUNTIME";

/// The exported function of [`workers!`](crate::workers), by which the kernel begins a worker process.
const ENTRY: &str = "accelerate_worker";

/// The right to launch the functions that [`workers!`](crate::workers) was given.
///
/// ```
/// fn train(epochs: usize) -> accelerate::Result<usize> {
///     Ok(epochs)
/// }
/// let workers = accelerate::workers![train];
/// assert!(format!("{workers:?}").contains("train"));
/// ```
#[derive(Debug)]
pub struct Workers {
    functions: Vec<&'static str>,
    /// Address of the exported function.
    entry: usize,
}

impl Workers {
    /// What [`workers!`](crate::workers) calls. In a worker process, it runs the function and does not return.
    #[doc(hidden)]
    pub fn begin(functions: WorkerFunctions, entry: usize) -> Self {
        helper::exit_if_asked();
        functions.run_if_worker();
        Self { functions: functions.0.iter().map(|function| function.name).collect(), entry }
    }

    /// Is there one function of this name?
    pub(super) fn check(&self, name: &'static str) -> Result<()> {
        match self.functions.iter().filter(|known| **known == name).count() {
            1 => Ok(()),
            0 => Err(LauncherError::UnknownFunction { name, known: self.functions.join(", ") }.into()),
            _ => Err(LauncherError::TwoFunctions { name }.into()),
        }
    }

    /// Says in `config` what is to be started.
    pub(super) fn settle(&self, config: &mut LaunchConfig) -> Result<()> {
        let object = Object::of(self.entry)
            .map_err(|source| LauncherError::System { action: "find the file of the function", source })?;
        config.args = std::env::args_os().skip(1).collect();
        config.hands_on_input = false;
        // The ranks see to their cores themselves, and tie themselves to this process: to start through a helper would be to load
        // libtorch twice.
        config.enable_cpu_affinity = false;
        match object {
            Object::Program => config.helper = Some(Helper { only_guards: true, ..Helper::this_executable() }),
            Object::Library(path) if std::env::var_os(RUNTIME_VARIABLE).is_some() => {
                // The kernel plays no roles of a helper.
                config.input = Some(format!("LOAD_AND_RUN {path} {ENTRY}\n").into_bytes());
            }
            Object::Library(path) => return Err(LauncherError::InLibrary { path }.into()),
        }
        Ok(())
    }

    /// What is run.
    pub(super) fn program() -> Program {
        Program::Executable("/proc/self/exe".into())
    }
}

/// The functions of [`workers!`](crate::workers), ready to be called with bytes.
#[doc(hidden)]
#[derive(Debug, Default)]
pub struct WorkerFunctions(Vec<Function>);

struct Function {
    name: &'static str,
    run: Box<Run>,
}

/// From the bytes of an argument to those of a result.
type Run = dyn Fn(&[u8]) -> Result<Vec<u8>, String>;

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// By what a function is called here and in the workers.
pub(super) fn name_of<F>(_: &F) -> &'static str {
    const {
        // Two functions with the same signature have pointers of the same type, and what a closure has captured stays here.
        assert!(
            size_of::<F>() == 0,
            "a function itself is wanted: no pointer to one, and no closure that captures variables"
        );
    }
    std::any::type_name::<F>()
}

impl WorkerFunctions {
    /// With one more function.
    #[must_use]
    pub fn with<F, A, O, E>(mut self, function: F) -> Self
    where
        F: Fn(A) -> Result<O, E> + 'static,
        A: DeserializeOwned,
        O: Serialize,
        E: fmt::Debug,
    {
        let name = name_of(&function);
        let run = move |bytes: &[u8]| {
            let args = rmp_serde::from_slice(bytes).map_err(|error| format!("what {name} was given: {error}"))?;
            let result = function(args).map_err(|error| format!("{error:?}"))?;
            rmp_serde::to_vec_named(&result).map_err(|error| format!("what {name} returned cannot be sent: {error}"))
        };
        self.0.push(Function { name, run: Box::new(run) });
        self
    }

    /// In a worker process, runs the function that it was started for, and ends the process with it. A function that asks for its
    /// `workers!` itself gets them, and is refused when it launches.
    pub fn run_if_worker(&self) {
        static IS_RUNNING: AtomicBool = AtomicBool::new(false);
        let Some(call) = Call::inherited() else { return };
        if call.is_over() {
            eprintln!("Error: the process that has started this one has ended");
            std::process::exit(1);
        }
        if !call.is_for_this_process() || IS_RUNNING.swap(true, Ordering::Relaxed) {
            return;
        }
        let tied = set_parent_process_death_signal(Some(Signal::KILL));
        // A launcher that ends from now on takes this process with it. One that has ended before is its parent no more.
        if !call.is_for_this_process() {
            std::process::exit(1);
        }
        let outcome = match tied {
            Ok(()) => std::panic::catch_unwind(AssertUnwindSafe(|| self.answer(&call))),
            Err(error) => Ok(Err(format!("this process cannot be tied to the one that has started it: {error}"))),
        };
        std::process::exit(match outcome {
            Ok(Ok(())) => 0,
            Ok(Err(text)) => {
                eprintln!("Error: {text}");
                1
            }
            // As after a panic of a `main`, and its message is written already.
            Err(_) => 101,
        });
    }

    fn answer(&self, call: &Call) -> Result<(), String> {
        let unsent = |error| format!("the process that has started this one cannot be reached: {error}");
        let (name, args) = call.function().map_err(unsent)?;
        let function = self.0.iter().find(|function| function.name == name);
        let function =
            function.ok_or_else(|| format!("this program has no function {name} for workers: {:?}", self.0))?;
        let result = (function.run)(&args)?;
        // A single process is not told of ranks, and one that is not started again is not told of attempts.
        let number = |name| std::env::var(name).ok().and_then(|number| number.parse().ok()).unwrap_or(0);
        call.answer(number("LOCAL_RANK"), number(RESTART_COUNT_VARIABLE), &result).map_err(unsent)
    }
}

/// Names the functions that processes of this program can be started for, and gives the [`Workers`] that launchers ask for.
///
/// In a program it stands at the beginning of `main`, once, with all functions: a process that was started for one of them runs it
/// here and ends. What stands before it is run in every such process. In a notebook it stands in the cell that launches.
///
/// Functions take one argument, which serde can write and read (a tuple for more, `()` for none), and return a `Result` of
/// which the value can be sent, too.
///
/// ```no_run
/// fn train(epochs: usize) -> accelerate::Result<f64> {
///     Ok(0.5 / epochs as f64)
/// }
///
/// fn evaluate(_: ()) -> Result<(), std::io::Error> {
///     Ok(())
/// }
///
/// fn main() -> accelerate::Result<()> {
///     let workers = accelerate::workers![train, evaluate];
///     accelerate::debug_launcher(&workers, train, 3, 2)?;
///     accelerate::debug_launcher(&workers, evaluate, (), 2)?;
///     Ok(())
/// }
/// ```
#[macro_export]
macro_rules! workers {
    ($($function:path),+ $(,)?) => {{
        fn functions() -> $crate::launchers::WorkerFunctions {
            $crate::launchers::WorkerFunctions::default()$(.with($function))+
        }
        let entry = $crate::launchers::exported_function!(accelerate_worker, || functions().run_if_worker());
        $crate::Workers::begin(functions(), entry)
    }};
}
