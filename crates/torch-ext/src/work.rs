//! An asynchronous operation of a process group.

use crate::border::{Handle, check};
use crate::error::{Error, Result};
use crate::process_group::limit;
use std::fmt;
use std::time::Duration;

unsafe extern "C" {
    fn te_work_wait(work: Handle, timeout_ms: i64) -> i32;
    fn te_work_is_completed(work: Handle, out: *mut bool) -> i32;
    fn te_work_source_rank(work: Handle, out: *mut i32) -> i32;
    fn te_work_free(work: Handle);
}

/// An operation in flight. Dropping it does not cancel the operation.
#[must_use = "the tensors may not be used before the work has been waited for"]
pub struct Work {
    handle: Handle,
    operation: &'static str,
}

// SAFETY: `c10d::Work` guards its state by a mutex and is counted atomically.
unsafe impl Send for Work {}
// SAFETY: as above.
unsafe impl Sync for Work {}

impl Work {
    pub(crate) fn start(operation: &'static str, call: impl FnOnce(*mut Handle) -> i32) -> Result<Self> {
        let mut out = std::ptr::null_mut();
        check(operation, call(&mut out))?;
        Ok(Self { handle: out, operation })
    }

    /// Blocks until the operation is done or has failed. `None` waits for the operation's own deadline.
    ///
    /// # Errors
    /// [`Error::is_timeout`] after the deadline, [`Error::is_connection`] when a peer went away.
    pub fn wait(self, timeout: Option<Duration>) -> Result<()> {
        // SAFETY: the handle is alive.
        check(self.operation, unsafe { te_work_wait(self.handle, limit(timeout)) })
    }

    /// Has the operation ended, well or badly?
    pub fn is_completed(&self) -> Result<bool> {
        let mut out = false;
        // SAFETY: the handle is alive.
        check(self.operation, unsafe { te_work_is_completed(self.handle, &mut out) })?;
        Ok(out)
    }

    /// Which rank sent what a completed `recv` from any rank received.
    pub fn source_rank(&self) -> Result<usize> {
        let mut out = 0;
        // SAFETY: the handle is alive.
        check(self.operation, unsafe { te_work_source_rank(self.handle, &mut out) })?;
        usize::try_from(out).map_err(|_| Error::invalid(self.operation, "the work has no source rank yet"))
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // SAFETY: this handle owns one reference and is dropped once.
        unsafe { te_work_free(self.handle) }
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("operation", &self.operation).finish()
    }
}
