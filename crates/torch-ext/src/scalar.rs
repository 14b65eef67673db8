//! Operations between a tensor and a number, as errors where they fail.
//!
//! In `tch` 0.24 a failed `f_*` method that takes a number (`f_mul_scalar`, `f_fill_`, `f_full`, `f_clamp_`, ...) panics in
//! place of returning the error: its `Scalar` is dropped before the error is read, and the drop, which looks for an error of
//! its own, unwraps that one. So these are bound once more.
//!
//! Dtypes follow PyTorch: a whole number leaves the dtype as it is, a float makes the result of an integer tensor a float
//! one, and functions that end in `_` write into their tensor, whose dtype has to be able to hold the result. Everything is
//! recorded by autograd, unless it is off.

use crate::border::{Handle, adopt, check, handle};
use crate::error::{Error, Result};
use tch::{Device, Kind, Tensor};

/// A whole number or a float, as libtorch's `Scalar`.
///
/// ```
/// use torch_ext::scalar::Number;
/// assert_eq!((Number::from(2), Number::from(2.5)), (Number::Int(2), Number::Float(2.5)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// A whole number.
    Int(i64),
    /// A float.
    Float(f64),
}

impl From<i64> for Number {
    fn from(value: i64) -> Self {
        Self::Int(value)
    }
}

impl From<f64> for Number {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

impl Number {
    /// The number as a dtype holds it; `None` where it cannot. Floats and complex numbers hold every number, as near as they
    /// can; integers hold whole ones in their range; `Bool` holds 0 and 1.
    ///
    /// ```
    /// use tch::Kind;
    /// use torch_ext::scalar::Number;
    /// assert_eq!(Number::held_by(Kind::Int8, -1.0), Some(Number::Int(-1)));
    /// assert_eq!(Number::held_by(Kind::Half, 2.5), Some(Number::Float(2.5)));
    /// for (kind, value) in [(Kind::Uint8, -1.0), (Kind::Int64, 2.5), (Kind::Bool, 2.0), (Kind::Int, f64::NAN)] {
    ///     assert_eq!(Number::held_by(kind, value), None);
    /// }
    /// ```
    pub fn held_by(kind: Kind, value: f64) -> Option<Self> {
        let (low, end) = match kind {
            Kind::Bool => (0.0, 2.0),
            Kind::Uint8 | Kind::QUInt8 => (0.0, 256.0),
            Kind::Int8 | Kind::QInt8 => (-128.0, 128.0),
            Kind::Int16 => (-32768.0, 32768.0),
            Kind::Int | Kind::QInt32 => (-(2f64.powi(31)), 2f64.powi(31)),
            Kind::Int64 => (-(2f64.powi(63)), 2f64.powi(63)),
            _ => return Some(Self::Float(value)),
        };
        // Not a number is in no range.
        let is_held = value.fract() == 0.0 && (low..end).contains(&value);
        is_held.then_some(Self::Int(value as i64))
    }
}

/// Mirrors `Number` in shim/scalar.cpp.
#[repr(C)]
#[derive(Clone, Copy)]
struct Border {
    whole: i64,
    real: f64,
    is_whole: bool,
}

impl<N: Into<Number>> From<N> for Border {
    fn from(number: N) -> Self {
        match number.into() {
            Number::Int(whole) => Self { whole, real: 0.0, is_whole: true },
            Number::Float(real) => Self { whole: 0, real, is_whole: false },
        }
    }
}

unsafe extern "C" {
    fn te_scalar_add(tensor: Handle, value: Border, out: *mut Handle) -> i32;
    fn te_scalar_mul(tensor: Handle, value: Border, out: *mut Handle) -> i32;
    fn te_scalar_pow(tensor: Handle, exponent: Border, out: *mut Handle) -> i32;
    fn te_scalar_eq(tensor: Handle, value: Border, out: *mut Handle) -> i32;
    fn te_scalar_ne(tensor: Handle, value: Border, out: *mut Handle) -> i32;
    fn te_scalar_ge(tensor: Handle, value: Border, out: *mut Handle) -> i32;
    fn te_scalar_lt(tensor: Handle, value: Border, out: *mut Handle) -> i32;
    fn te_scalar_clamp_min(tensor: Handle, min: Border, out: *mut Handle) -> i32;
    fn te_scalar_clamp_max(tensor: Handle, max: Border, out: *mut Handle) -> i32;
    fn te_scalar_masked_fill(tensor: Handle, mask: Handle, value: Border, out: *mut Handle) -> i32;
    fn te_scalar_norm(tensor: Handle, p: Border, dim: i64, keepdim: bool, out: *mut Handle) -> i32;
    fn te_scalar_add_(tensor: Handle, value: Border) -> i32;
    fn te_scalar_mul_(tensor: Handle, value: Border) -> i32;
    fn te_scalar_div_(tensor: Handle, value: Border) -> i32;
    fn te_scalar_fill_(tensor: Handle, value: Border) -> i32;
    fn te_scalar_clamp_min_(tensor: Handle, min: Border) -> i32;
    fn te_scalar_clamp_(tensor: Handle, min: Border, max: Border) -> i32;
    fn te_scalar_lerp_(tensor: Handle, end: Handle, weight: Border) -> i32;
}

/// Runs one call over the border that makes a tensor.
fn made(operation: &'static str, call: impl FnOnce(*mut Handle) -> i32) -> Result<Tensor> {
    let mut out = std::ptr::null_mut();
    check(operation, call(&raw mut out))?;
    // SAFETY: a call that succeeds has handed a tensor over.
    Ok(unsafe { adopt(out) })
}

macro_rules! with_number {
    ($($(#[$documentation:meta])* $name:ident($number:ident) by $border:ident;)*) => {$(
        $(#[$documentation])*
        ///
        /// # Errors
        /// A dtype that has no such operation.
        pub fn $name(tensor: &Tensor, $number: impl Into<Number>) -> Result<Tensor> {
            let $number = Border::from($number);
            // SAFETY: the handle is borrowed from a tensor that lives through the call.
            made(concat!("scalar::", stringify!($name)), |out| unsafe { $border(handle(tensor), $number, out) })
        }
    )*};
}

macro_rules! in_place {
    ($($(#[$documentation:meta])* $name:ident($number:ident) by $border:ident;)*) => {$(
        $(#[$documentation])*
        ///
        /// # Errors
        /// A dtype that has no such operation, or cannot hold its result.
        pub fn $name(tensor: &Tensor, $number: impl Into<Number>) -> Result<()> {
            let $number = Border::from($number);
            // SAFETY: the handle is borrowed from a tensor that lives through the call.
            check(concat!("scalar::", stringify!($name)), unsafe { $border(handle(tensor), $number) })
        }
    )*};
}

with_number! {
    /// The tensor plus the number.
    add(value) by te_scalar_add;
    /// The tensor times the number.
    mul(value) by te_scalar_mul;
    /// The tensor to the power of the number.
    pow(exponent) by te_scalar_pow;
    /// Where the tensor is equal to the number.
    eq(value) by te_scalar_eq;
    /// Where the tensor is not equal to the number.
    ne(value) by te_scalar_ne;
    /// Where the tensor is at least the number.
    ge(value) by te_scalar_ge;
    /// Where the tensor is below the number.
    lt(value) by te_scalar_lt;
    /// The tensor, and `min` where it is below.
    clamp_min(min) by te_scalar_clamp_min;
    /// The tensor, and `max` where it is above.
    clamp_max(max) by te_scalar_clamp_max;
}

in_place! {
    /// Adds the number, in place.
    add_(value) by te_scalar_add_;
    /// Multiplies by the number, in place.
    mul_(value) by te_scalar_mul_;
    /// Divides by the number, in place. Integers cannot hold the result.
    div_(value) by te_scalar_div_;
    /// Overwrites every element, in place. A fraction in an integer tensor is cut off; [`Number::held_by`] tells.
    fill_(value) by te_scalar_fill_;
    /// Raises what is below `min` to it, in place.
    clamp_min_(min) by te_scalar_clamp_min_;
}

/// The tensor, and the number where the mask (`Bool`, of a shape that expands to the tensor's) is true.
///
/// # Errors
/// A mask of another dtype or of a shape that does not expand.
pub fn masked_fill(tensor: &Tensor, mask: &Tensor, value: impl Into<Number>) -> Result<Tensor> {
    let value = Border::from(value);
    // SAFETY: the handles are borrowed from tensors that live through the call.
    made("scalar::masked_fill", |out| unsafe { te_scalar_masked_fill(handle(tensor), handle(mask), value, out) })
}

/// The `p`-norm along one dim, which stays, of size 1, if `keepdim`.
///
/// # Errors
/// A dtype without norms; a dim that the tensor does not have.
pub fn norm(tensor: &Tensor, p: f64, dim: i64, keepdim: bool) -> Result<Tensor> {
    let p = Border::from(p);
    // SAFETY: the handle is borrowed from a tensor that lives through the call.
    made("scalar::norm", |out| unsafe { te_scalar_norm(handle(tensor), p, dim, keepdim, out) })
}

/// Moves every element into `min..=max`, in place. Where `min` is above `max`, everything becomes `max`; either of them not a
/// number makes all elements that, too.
///
/// # Errors
/// A dtype without order, such as a complex one.
pub fn clamp_(tensor: &Tensor, min: impl Into<Number>, max: impl Into<Number>) -> Result<()> {
    let (min, max) = (Border::from(min), Border::from(max));
    // SAFETY: the handle is borrowed from a tensor that lives through the call.
    check("scalar::clamp_", unsafe { te_scalar_clamp_(handle(tensor), min, max) })
}

/// Moves the tensor towards `end`, by the share `weight` of the way, in place.
///
/// # Errors
/// Another dtype or shape; integers.
pub fn lerp_(tensor: &Tensor, end: &Tensor, weight: f64) -> Result<()> {
    let weight = Border::from(weight);
    // SAFETY: the handles are borrowed from tensors that live through the call.
    check("scalar::lerp_", unsafe { te_scalar_lerp_(handle(tensor), handle(end), weight) })
}

/// A tensor of one number. As in PyTorch, a fraction in an integer dtype is cut off, and a negative number in `Uint8` wraps round;
/// [`Number::held_by`] tells.
///
/// ```
/// use tch::{Device, Kind};
/// let threes = torch_ext::scalar::full(&[2], 3, (Kind::Uint8, Device::Cpu))?;
/// assert_eq!(Vec::<u8>::try_from(&threes)?, [3, 3]);
/// assert!(torch_ext::scalar::full(&[2], 300, (Kind::Uint8, Device::Cpu)).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// A number out of the range of the dtype; no memory.
pub fn full(shape: &[i64], value: impl Into<Number>, options: (Kind, Device)) -> Result<Tensor> {
    let tensor = Tensor::f_empty(shape, options).map_err(|error| Error::invalid("scalar::full", error.to_string()))?;
    fill_(&tensor, value)?;
    Ok(tensor)
}
