//! In tests of this crate, an operation on the disk that fails or ends the process. Elsewhere, nothing.

#[cfg(test)]
pub(super) use planned::{Fault, num_steps, plan};
use std::io;

/// Comes before each operation that changes something on a disk.
#[cfg(not(test))]
pub(super) fn step() -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
pub(super) fn step() -> io::Result<()> {
    planned::step()
}

#[cfg(test)]
mod planned {
    use std::cell::Cell;
    use std::io;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(in crate::checkpoint) enum Fault {
        /// The operation fails as on a full disk.
        Fails,
        /// The process is killed before the operation.
        Kills,
    }

    thread_local! {
        static PLAN: Cell<Option<(u64, Fault)>> = const { Cell::new(None) };
        static STEPS: Cell<u64> = const { Cell::new(0) };
    }

    /// Has the operation of this number, counted from 0 on this thread from now on, fail or kill.
    pub(in crate::checkpoint) fn plan(fault: Option<(u64, Fault)>) {
        PLAN.set(fault);
        STEPS.set(0);
    }

    /// How many operations there have been on this thread since the plan.
    pub(in crate::checkpoint) fn num_steps() -> u64 {
        STEPS.get()
    }

    pub(super) fn step() -> io::Result<()> {
        let step = STEPS.replace(STEPS.get() + 1);
        match PLAN.get() {
            Some((number, Fault::Fails)) if number == step => Err(io::ErrorKind::StorageFull.into()),
            Some((number, Fault::Kills)) if number == step => {
                let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
                unreachable!("the process has been killed")
            }
            _ => Ok(()),
        }
    }
}
