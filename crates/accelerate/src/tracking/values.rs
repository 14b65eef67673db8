//! Values as programs give them.

use super::Value;
use crate::error::{Result, TrackingError};
use serde::Serialize;
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

/// What is logged under one name: anything that is [`IntoValue`].
#[derive(Debug)]
pub struct LogValue(Inner);

#[derive(Debug)]
enum Inner {
    Value(Value),
    /// Read only where a tracker gets it: to read it is to wait for the device.
    Tensor(Tensor),
}

impl LogValue {
    fn resolve(self, name: &str) -> Result<Value> {
        match self.0 {
            Inner::Value(value) => Ok(value),
            Inner::Tensor(tensor) => number(&tensor, name),
        }
    }
}

/// The number in a tensor of one element.
fn number(tensor: &Tensor, name: &str) -> Result<Value> {
    let kind = tensor.f_kind()?;
    if tensor.numel() != 1 || matches!(kind, Kind::ComplexHalf | Kind::ComplexFloat | Kind::ComplexDouble) {
        let (name, shape, kind) = (name.to_owned(), tensor.size(), format!("{kind:?}"));
        return Err(TrackingError::NotANumber { name, shape, kind }.into());
    }
    let element = tensor.f_detach()?.f_reshape([] as [i64; 0])?;
    Ok(match kind {
        Kind::Bool => Value::Bool(element.f_int64_value(&[])? != 0),
        Kind::Uint8 | Kind::Int8 | Kind::Int16 | Kind::Int | Kind::Int64 => Value::Int(element.f_int64_value(&[])?),
        _ => Value::Float(element.f_double_value(&[])?),
    })
}

/// What can be logged: numbers, booleans, texts, nothing, maps of them, and tensors of one element.
///
/// A tensor keeps its memory until the call; it is read only on processes whose trackers get it, so that the others do not wait for
/// their devices.
pub trait IntoValue {
    /// The value.
    fn into_value(self) -> LogValue;
}

impl IntoValue for LogValue {
    fn into_value(self) -> LogValue {
        self
    }
}

impl IntoValue for Tensor {
    fn into_value(self) -> LogValue {
        LogValue(Inner::Tensor(self))
    }
}

impl IntoValue for &Tensor {
    fn into_value(self) -> LogValue {
        LogValue(Inner::Tensor(self.shallow_clone()))
    }
}

macro_rules! into_value {
    ($($type:ty),* $(,)?) => {$(
        impl IntoValue for $type {
            fn into_value(self) -> LogValue {
                LogValue(Inner::Value(self.into()))
            }
        }
    )*};
}

into_value! {
    Value, bool, i8, i16, i32, i64, isize, u8, u16, u32, u64, usize, f32, f64, &str, String, serde_json::Value,
    Vec<(String, Value)>,
}

impl<T: Into<Value>> IntoValue for Option<T> {
    fn into_value(self) -> LogValue {
        LogValue(Inner::Value(self.into()))
    }
}

impl<K: Into<String>, V: Into<Value>, const N: usize> IntoValue for [(K, V); N] {
    fn into_value(self) -> LogValue {
        LogValue(Inner::Value(self.into()))
    }
}

/// Values by name, as a program gives them: [`values!`](crate::values), an array or a vector of pairs, a `BTreeMap`, or
/// [`Values::of`] a struct.
///
/// ```
/// use accelerate::tracking::Values;
/// use accelerate::values;
///
/// #[derive(serde::Serialize)]
/// struct Settings {
///     learning_rate: f64,
///     num_epochs: usize,
/// }
///
/// let one: Values = [("loss", 0.5)].into();
/// let several = values! { "loss" => 0.5, "epoch" => 3, "phase" => "warm-up" };
/// let config = Values::of(&Settings { learning_rate: 1e-3, num_epochs: 3 })?;
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Values(Vec<(String, LogValue)>);

impl Values {
    /// Every field of something that serde can write, such as the arguments of a program.
    ///
    /// # Errors
    /// It has no names, or serde cannot write it.
    pub fn of(fields: &impl Serialize) -> Result<Self> {
        let fields = serde_json::to_value(fields).map_err(|source| TrackingError::NotValues { source })?;
        match Value::from(fields) {
            Value::Map(fields) => Ok(fields.into()),
            other => Err(TrackingError::NoNames { found: other.kind() }.into()),
        }
    }

    /// Adds one value, and replaces one of the same name.
    pub fn insert(&mut self, name: impl Into<String>, value: impl IntoValue) {
        let (name, value) = (name.into(), value.into_value());
        match self.0.iter_mut().find(|(known, _)| *known == name) {
            Some(entry) => entry.1 = value,
            None => self.0.push((name, value)),
        }
    }

    /// What trackers are given: tensors are read.
    pub(super) fn resolve(self) -> Result<Vec<(String, Value)>> {
        let read = |(name, value): (String, LogValue)| value.resolve(&name).map(|value| (name, value));
        self.0.into_iter().map(read).collect()
    }
}

impl<K: Into<String>, V: IntoValue> FromIterator<(K, V)> for Values {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(values: I) -> Self {
        let mut collected = Self::default();
        values.into_iter().for_each(|(name, value)| collected.insert(name, value));
        collected
    }
}

impl<K: Into<String>, V: IntoValue, const N: usize> From<[(K, V); N]> for Values {
    fn from(values: [(K, V); N]) -> Self {
        values.into_iter().collect()
    }
}

impl<K: Into<String>, V: IntoValue> From<Vec<(K, V)>> for Values {
    fn from(values: Vec<(K, V)>) -> Self {
        values.into_iter().collect()
    }
}

impl<K: Into<String>, V: IntoValue> From<BTreeMap<K, V>> for Values {
    fn from(values: BTreeMap<K, V>) -> Self {
        values.into_iter().collect()
    }
}

/// Values of several kinds under their names, for [`Accelerator::log`](crate::Accelerator::log) and
/// [`Accelerator::init_trackers`](crate::Accelerator::init_trackers): `values! { "loss" => loss, "phase" => "warm-up" }`.
#[macro_export]
macro_rules! values {
    ($($name:expr => $value:expr),* $(,)?) => {{
        #[allow(unused_mut, reason = "there may be none")]
        let mut values = $crate::tracking::Values::default();
        $(values.insert($name, $value);)*
        values
    }};
}
