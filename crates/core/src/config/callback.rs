//! Functions of a program as settings.

use crate::settings::{SettingValue, ValueKind};
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// A function of the program that a record carries to the engine that calls it. This crate does not know tensors, so it
/// does not know the function's type either; the engine asks for it by [`downcast_ref`](Self::downcast_ref).
///
/// ```
/// use accelerate_core::config::Callback;
/// let double: fn(u32) -> u32 = |number| 2 * number;
/// let callback = Callback::new(double);
/// assert_eq!(callback.downcast_ref::<fn(u32) -> u32>().map(|double| double(2)), Some(4));
/// assert!(callback.downcast_ref::<String>().is_none());
/// ```
#[derive(Clone)]
pub struct Callback(Arc<dyn Any + Send + Sync>);

impl Callback {
    /// A record's handle to `function`.
    pub fn new(function: impl Any + Send + Sync) -> Self {
        Self(Arc::new(function))
    }

    /// The function, if it has this type.
    pub fn downcast_ref<F: Any>(&self) -> Option<&F> {
        self.0.downcast_ref()
    }
}

impl fmt::Debug for Callback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a function of the program")
    }
}

/// Two are equal if they are the same function in memory.
impl PartialEq for Callback {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl SettingValue for Callback {
    const KIND: ValueKind = ValueKind::Text;

    fn read(_: &str) -> Option<Self> {
        None
    }

    fn write(&self) -> String {
        format!("{self:?}")
    }
}
