//! What the program and the session have of one optimizer or scheduler.

use crate::error::{Error, OptimError, Result};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// An object behind a lock that its own calls take, also while they run code of the user's.
pub(super) struct SharedObject<T> {
    /// What errors call it.
    what: &'static str,
    object: Mutex<T>,
}

impl<T> SharedObject<T> {
    pub(super) fn new(what: &'static str, object: T) -> Self {
        Self { what, object: Mutex::new(object) }
    }

    /// For calls of the program on the prepared object, which borrow it: who has the lock then is another thread that reads
    /// or replaces the state through the accelerator, and is waited for.
    pub(super) fn lock(&self) -> MutexGuard<'_, T> {
        // After a panic in a step the object is what it was without a lock around it.
        self.object.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For calls through the accelerator, which may come out of a call of the object's own: that one would wait for itself.
    pub(super) fn try_lock(&self, call: &'static str) -> Result<MutexGuard<'_, T>> {
        match self.object.try_lock() {
            Ok(object) => Ok(object),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(OptimError::InUse { call, what: self.what }.into()),
        }
    }

    pub(super) fn into_inner(self) -> T {
        self.object.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An optimizer or scheduler that could not be taken back, because another thread was just using it through the accelerator.
/// It holds the prepared object, which goes on as before ([`std::io::IntoInnerError`] does the same for writers).
///
/// ```
/// use accelerate::{Accelerator, nn::{Init, ParamStore}, optim::Sgd};
///
/// let accelerator = Accelerator::builder().cpu(true).build()?;
/// let store = ParamStore::new(accelerator.device());
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let optimizer = accelerator.prepare(Sgd::new(&store, 0.1)?)?;
/// match optimizer.into_inner() {
///     Ok(mut sgd) => accelerate::optim::Optimizer::step(&mut sgd)?,
///     // Nothing is lost: wait for the other thread, and ask again.
///     Err(in_use) => in_use.into_inner().step()?,
/// }
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct IntoInnerError<T> {
    what: &'static str,
    object: T,
}

impl<T> IntoInnerError<T> {
    pub(super) fn new(what: &'static str, object: T) -> Self {
        Self { what, object }
    }

    /// The prepared object.
    pub fn into_inner(self) -> T {
        self.object
    }
}

impl<T> fmt::Display for IntoInnerError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        OptimError::CannotTakeBack { what: self.what }.fmt(f)
    }
}

impl<T> fmt::Debug for IntoInnerError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IntoInnerError").field("what", &self.what).finish_non_exhaustive()
    }
}

impl<T> std::error::Error for IntoInnerError<T> {}

/// For `?`, which lets go of the object.
impl<T> From<IntoInnerError<T>> for Error {
    fn from(error: IntoInnerError<T>) -> Self {
        OptimError::CannotTakeBack { what: error.what }.into()
    }
}
