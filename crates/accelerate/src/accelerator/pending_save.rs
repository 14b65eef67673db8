//! Checkpoints that are written in the background.

use super::Accelerator;
use crate::checkpoint::{IoMode, PlannedSave, SaveProgress, remove_outdated_checkpoints};
use crate::error::{CheckpointError, Result};
use crate::group::Group;
use crate::messages;
use accelerate_core::checkpoint::Retention;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};

/// How far the thread that writes stands back where training needs the cores, on the scale of `nice`: about a thirtieth of a core
/// is left to it there, and all of one that is idle.
const NICENESS: i32 = 15;

/// Which automatically named checkpoints go once a new one counts.
#[derive(Debug)]
pub(super) struct Outdated {
    pub(super) folder: PathBuf,
    pub(super) newest: usize,
    pub(super) retention: Retention,
}

/// All that is left to do for a checkpoint once the state is known.
#[derive(Debug)]
pub(super) struct CheckpointSave {
    pub(super) save: PlannedSave,
    /// On the process that removes them.
    pub(super) outdated: Option<Outdated>,
}

impl CheckpointSave {
    pub(super) fn folder(&self) -> &Path {
        self.save.folder()
    }

    pub(super) fn progress(&self) -> SaveProgress {
        self.save.progress().clone()
    }

    /// From here on the objects may change.
    pub(super) fn copy_to_host(&mut self) -> Result<()> {
        self.save.copy_to_host()
    }

    /// Writes and commits, and makes room then. Collective.
    pub(super) fn write(self, group: &Group, mode: IoMode) -> Result<()> {
        self.save.write(group, mode)?;
        if let Some(Outdated { folder, newest, retention }) = self.outdated {
            remove_outdated_checkpoints(&folder, newest, retention);
        }
        Ok(())
    }
}

/// The save in the background, and how its processes reach each other. Dropped, it waits for the save.
#[derive(Debug, Default)]
pub(super) struct BackgroundSave(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Made when it is first needed.
    group: Option<Group>,
    /// One at a time.
    pending: Option<Pending>,
}

#[derive(Debug)]
struct Pending {
    folder: PathBuf,
    progress: SaveProgress,
    thread: JoinHandle<Result<()>>,
}

impl Pending {
    /// Waits for this process's part, and then for what `agree` waits for.
    fn wait(self, agree: impl FnOnce(Result<()>) -> Result<()>) -> Result<()> {
        let Self { folder, progress, thread } = self;
        progress.shown_while(|| {
            let result = thread.join().unwrap_or_else(|_| Err(CheckpointError::WriterPanicked.into()));
            agree(result.map_err(|error| error.context(format!("the checkpoint {} was not saved", folder.display()))))
        })
    }
}

impl BackgroundSave {
    // Whole after every statement, also where another thread panicked.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for BackgroundSave {
    fn drop(&mut self) {
        let pending = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).pending.take();
        if let Some(Err(error)) = pending.map(|pending| pending.wait(|result| result)) {
            messages::warning_here!("{error}");
        }
    }
}

impl Accelerator {
    /// Waits until the checkpoint that [`save_state_async`](Self::save_state_async) began is written and counts, if there is one.
    ///
    /// Collective.
    ///
    /// # Errors
    /// What kept it from being written, on any process. An error on every rank.
    #[track_caller]
    pub fn wait_for_save(&self) -> Result<()> {
        let _called = crate::status::here();
        let pending = self.0.background_save.lock().pending.take();
        match pending {
            Some(pending) => pending.wait(|result| self.group().agree_on_success("wait_for_save", result)),
            None => Ok(()),
        }
    }

    /// Is any process still writing the checkpoint that [`save_state_async`](Self::save_state_async) began? The same answer on every
    /// process.
    ///
    /// Collective.
    ///
    /// # Errors
    /// A process that does not answer.
    pub fn is_saving(&self) -> Result<bool> {
        let is_writing = |pending: &Pending| !pending.thread.is_finished();
        let own = self.0.background_save.lock().pending.as_ref().is_some_and(is_writing);
        let all = self.group().all_gather_bytes(&[own.into()])?;
        Ok(all.iter().flatten().any(|&is_writing| is_writing != 0))
    }

    /// Has the save written by a thread of its own. Collective the first time.
    pub(super) fn start_save(&self, save: CheckpointSave) -> Result<()> {
        let mut state = self.0.background_save.lock();
        let group = match &state.group {
            Some(group) => group.clone(),
            None => state.group.insert(self.group().side_group()?).clone(),
        };
        let (folder, progress) = (save.folder().to_owned(), save.progress());
        let (begin, may_begin) = mpsc::channel();
        let write = move || {
            // Where another process has no thread, this one would wait for it, and take part in its next save.
            if may_begin.recv().is_err() {
                return Ok(());
            }
            // Not a reason to write nothing where it is not allowed.
            let _ = rustix::process::setpriority_process(None, NICENESS);
            save.write(&group, IoMode::Direct)
        };
        let thread = thread::Builder::new().name("save_state".to_owned()).spawn(write);
        let thread = thread.map_err(|source| CheckpointError::NoThread { source }.into());
        let thread = self.group().agree_on_success("save_state_async", thread)?;
        // Fails only where the thread is gone, which whoever waits for it is told.
        let _ = begin.send(());
        state.pending = Some(Pending { folder, progress, thread });
        Ok(())
    }
}
