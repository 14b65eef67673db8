//! Who does what: the main process, each machine's main process, everyone in turn.

use crate::error::Result;
use crate::messages;
use crate::state::{PartialState, SplitBetweenProcesses, SplitOptions};
use std::fmt;
use std::io::Write;

impl PartialState {
    /// Is this rank 0?
    pub fn is_main_process(&self) -> bool {
        self.process_index() == 0
    }

    /// Is this the first process of its machine?
    pub fn is_local_main_process(&self) -> bool {
        self.local_process_index() == 0
    }

    /// Is this the highest rank?
    pub fn is_last_process(&self) -> bool {
        self.process_index() + 1 == self.num_processes()
    }

    /// Returns when every process has called it; at once in a run of one. Collective.
    #[track_caller]
    pub fn wait_for_everyone(&self) -> Result<()> {
        let _called = crate::status::here();
        self.group().barrier()
    }

    /// Runs `function` on rank 0 and gives `None` elsewhere.
    pub fn on_main_process<T>(&self, function: impl FnOnce() -> T) -> Option<T> {
        self.is_main_process().then(function)
    }

    /// Runs `function` on the first process of each machine and gives `None` elsewhere.
    pub fn on_local_main_process<T>(&self, function: impl FnOnce() -> T) -> Option<T> {
        self.is_local_main_process().then(function)
    }

    /// Runs `function` on the highest rank and gives `None` elsewhere.
    pub fn on_last_process<T>(&self, function: impl FnOnce() -> T) -> Option<T> {
        self.is_last_process().then(function)
    }

    /// Runs `function` on rank `process_index` and gives `None` elsewhere.
    pub fn on_process<T>(&self, process_index: usize, function: impl FnOnce() -> T) -> Option<T> {
        (self.process_index() == process_index).then(function)
    }

    /// Runs `function` on the process with that number on each machine and gives `None` elsewhere.
    pub fn on_local_process<T>(&self, local_process_index: usize, function: impl FnOnce() -> T) -> Option<T> {
        (self.local_process_index() == local_process_index).then(function)
    }

    /// Runs `function` on rank 0 first and on the others when it is done: for a cache that one fills and all
    /// read. Collective; an error on rank 0 still lets the others start.
    #[track_caller]
    pub fn main_process_first<T>(&self, function: impl FnOnce() -> Result<T>) -> Result<T> {
        let _called = crate::status::here();
        self.one_first(self.is_main_process(), function)
    }

    /// As [`PartialState::main_process_first`], with the first process of each machine going first. Collective.
    #[track_caller]
    pub fn local_main_process_first<T>(&self, function: impl FnOnce() -> Result<T>) -> Result<T> {
        let _called = crate::status::here();
        self.one_first(self.is_local_main_process(), function)
    }

    fn one_first<T>(&self, first: bool, function: impl FnOnce() -> Result<T>) -> Result<T> {
        if first {
            let result = function();
            self.wait_for_everyone()?;
            result
        } else {
            self.wait_for_everyone()?;
            function()
        }
    }

    /// This process's share of `inputs`: equal parts in order, the first ranks taking one more where the
    /// number does not divide. [`SplitOptions::apply_padding`] evens them out.
    /// Vectors, tensors (along dim 0) and maps of them; a run of one gets everything.
    ///
    /// ```
    /// use accelerate::PartialState;
    ///
    /// let state = PartialState::new(&Default::default())?;
    /// assert_eq!(state.split_between_processes(&vec!["a", "b", "c"], Default::default())?, ["a", "b", "c"]);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn split_between_processes<T: SplitBetweenProcesses>(&self, inputs: &T, options: SplitOptions) -> Result<T> {
        inputs.split_for(self.process_index(), self.num_processes(), options)
    }

    /// Prints a line on the first process of each machine: what [`main_println!`](crate::main_println) calls. Where
    /// nobody reads standard output any more, or the disk behind it is full, the line is lost and the program goes on.
    ///
    /// ```
    /// # let state = accelerate::PartialState::new(&Default::default())?;
    /// accelerate::main_println!(state, "{} processes", state.num_processes());
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn print(&self, message: fmt::Arguments<'_>) {
        if self.is_local_main_process() {
            let mut stdout = std::io::stdout().lock();
            // A training run is worth more than a line of its output.
            if let Err(error) = writeln!(stdout, "{message}").and_then(|()| stdout.flush()) {
                messages::warn_once_of_lost_output(&error);
            }
        }
    }
}
