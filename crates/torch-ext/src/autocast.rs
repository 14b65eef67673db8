//! Autocast for any device and kind, with control of its cache.

use crate::border::check;
use crate::error::{Error, Result};
use crate::kinds::{device_type, kind_from_scalar_type, scalar_type};
use std::marker::PhantomData;
use tch::{Device, Kind};

unsafe extern "C" {
    fn te_autocast_is_enabled(device: i32, enabled: *mut bool) -> i32;
    fn te_autocast_set_enabled(device: i32, enabled: bool) -> i32;
    fn te_autocast_dtype(device: i32, kind: *mut i32) -> i32;
    fn te_autocast_set_dtype(device: i32, kind: i32) -> i32;
    fn te_autocast_is_cache_enabled() -> bool;
    fn te_autocast_set_cache_enabled(enabled: bool);
    fn te_autocast_increment_nesting();
    fn te_autocast_decrement_nesting() -> i32;
    fn te_autocast_clear_cache() -> i32;
}

/// Which operations run in lower precision: the counterpart of `torch.autocast`.
///
/// While a guard of [`Autocast::enter`] lives, matrix products, convolutions and the like on `device` compute
/// and return `kind`, and operations that need the range stay in 32 bits. It acts on the thread that entered it.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use torch_ext::Autocast;
/// let x = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
/// let autocast = Autocast { device: Device::Cpu, kind: Kind::BFloat16, enabled: true, cache_enabled: true };
/// let y = autocast.run(|| x.matmul(&x))?;
/// assert_eq!(y.kind(), Kind::BFloat16);
/// assert_eq!(x.matmul(&x).kind(), Kind::Float);
/// # Ok::<(), torch_ext::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Autocast {
    /// The kind of device whose operations are cast; its index does not matter.
    pub device: Device,
    /// The kind to compute in: `Half` or `BFloat16`.
    pub kind: Kind,
    /// `false` turns autocast off inside a scope that turned it on.
    pub enabled: bool,
    /// Whether weights that were cast once are kept cast until the outermost scope ends. Python's default is `true`.
    /// Turn it off where weights change inside the scope, or where their cast copies would take too much memory.
    pub cache_enabled: bool,
}

impl Autocast {
    /// A scope in which operations compute in the kinds that their operands have.
    pub const fn off(device: Device) -> Self {
        Self { device, kind: Kind::BFloat16, enabled: false, cache_enabled: true }
    }

    /// Starts the scope; it ends when the guard is dropped.
    ///
    /// # Errors
    /// `kind` is neither `Half` nor `BFloat16` while `enabled`, or the device knows no autocast.
    pub fn enter(&self) -> Result<AutocastGuard> {
        if self.enabled && !matches!(self.kind, Kind::Half | Kind::BFloat16) {
            return Err(Error::invalid(
                "Autocast::enter",
                format!("autocast computes in Half or BFloat16, not in {:?}; for 32 bits disable it", self.kind),
            ));
        }
        let device = device_type(self.device);
        let previous_enabled = is_autocast_enabled(self.device)?;
        let mut previous_dtype = 0;
        // SAFETY: plain values in and out; the settings belong to this thread.
        unsafe {
            check("Autocast::enter", te_autocast_dtype(device, &mut previous_dtype))?;
            let guard = AutocastGuard {
                device,
                previous_enabled,
                previous_dtype,
                previous_cache_enabled: te_autocast_is_cache_enabled(),
                this_thread: PhantomData,
            };
            te_autocast_increment_nesting();
            // From here on the guard undoes everything, also after an error.
            check("Autocast::enter", te_autocast_set_enabled(device, self.enabled))?;
            check("Autocast::enter", te_autocast_set_dtype(device, scalar_type(self.kind)))?;
            te_autocast_set_cache_enabled(self.cache_enabled);
            Ok(guard)
        }
    }

    /// Runs `body` inside the scope.
    ///
    /// # Errors
    /// As for [`Autocast::enter`].
    pub fn run<R>(&self, body: impl FnOnce() -> R) -> Result<R> {
        let _guard = self.enter()?;
        Ok(body())
    }
}

/// An autocast scope. Guards of one thread must be dropped in the reverse order of their making, as
/// scopes do by themselves: each restores the settings it found.
#[derive(Debug)]
#[must_use = "the scope ends when the guard is dropped"]
pub struct AutocastGuard {
    device: i32,
    previous_enabled: bool,
    previous_dtype: i32,
    previous_cache_enabled: bool,
    /// Autocast belongs to the thread.
    this_thread: PhantomData<*const ()>,
}

impl Drop for AutocastGuard {
    fn drop(&mut self) {
        // SAFETY: plain values; the values set here were read from libtorch, so it cannot refuse them.
        unsafe {
            if te_autocast_decrement_nesting() == 0 {
                te_autocast_clear_cache();
            }
            te_autocast_set_enabled(self.device, self.previous_enabled);
            te_autocast_set_dtype(self.device, self.previous_dtype);
            te_autocast_set_cache_enabled(self.previous_cache_enabled);
        }
    }
}

/// Whether autocast is on for a device on this thread.
///
/// ```
/// assert!(!torch_ext::autocast::is_autocast_enabled(tch::Device::Cpu)?);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn is_autocast_enabled(device: Device) -> Result<bool> {
    let mut enabled = false;
    // SAFETY: plain values in and out.
    check("is_autocast_enabled", unsafe { te_autocast_is_enabled(device_type(device), &mut enabled) })?;
    Ok(enabled)
}

/// The kind that autocast computes in on a device, whether it is on or not.
///
/// ```
/// assert_eq!(torch_ext::autocast::autocast_dtype(tch::Device::Cpu)?, tch::Kind::BFloat16);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn autocast_dtype(device: Device) -> Result<Kind> {
    let mut value = 0;
    // SAFETY: plain values in and out.
    check("autocast_dtype", unsafe { te_autocast_dtype(device_type(device), &mut value) })?;
    kind_from_scalar_type(value)
        .ok_or_else(|| Error::invalid("autocast_dtype", format!("tch has no kind for ScalarType {value}")))
}

/// Drops the cast copies of weights, for a program that changes weights inside an autocast scope.
///
/// ```
/// torch_ext::autocast::clear_autocast_cache()?;
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn clear_autocast_cache() -> Result<()> {
    // SAFETY: no arguments.
    check("clear_autocast_cache", unsafe { te_autocast_clear_cache() })
}

/// Whether cast copies of weights are kept within an autocast scope of this thread.
///
/// ```
/// assert!(torch_ext::autocast::is_cache_enabled());
/// ```
pub fn is_cache_enabled() -> bool {
    // SAFETY: no arguments.
    unsafe { te_autocast_is_cache_enabled() }
}

/// Sets whether cast copies of weights are kept, outside of what [`Autocast::cache_enabled`] sets for a scope.
///
/// ```
/// use torch_ext::autocast::{is_cache_enabled, set_cache_enabled};
/// set_cache_enabled(false);
/// assert!(!is_cache_enabled());
/// set_cache_enabled(true);
/// ```
pub fn set_cache_enabled(enabled: bool) {
    // SAFETY: a plain value.
    unsafe { te_autocast_set_cache_enabled(enabled) }
}
