//! Values and objects of the program's own that are saved with the run.

use super::Accelerator;
use crate::error::{CheckpointError, Error, Result};
use crate::session::{Object, ObjectState, Stateful};
use serde::Serialize;
use serde::de::{self, Deserialize, DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A value of the program's own that [`Accelerator::save_state`] saves and [`Accelerator::load_state`] brings back. Made by
/// [`Accelerator::register_for_checkpointing`]. Clones are the same value.
#[derive(Debug, Default)]
pub struct Registered<T>(Arc<Mutex<T>>);

impl<T> Clone for Registered<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Registered<T> {
    /// The value, to look at or to change. Drop the guard before anything else asks for the value: a checkpoint that is saved or
    /// loaded waits for it, and so does a second `lock`, also on the same thread, as with any [`Mutex`].
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Serialize + DeserializeOwned + Send> Stateful for Registered<T> {
    fn state_dict(&self) -> Result<ObjectState> {
        let value = self.lock();
        let values = serde_json::to_value(&*value).map_err(Error::other)?;
        // Nobody wants to learn what is lost when the run is over.
        serde_json::from_value::<T>(values.clone()).map_err(|source| CheckpointError::NotInJson { source })?;
        if has_null(&values) {
            let as_it_is = rmp_serde::to_vec_named(&*value).map_err(Error::other)?;
            rmp_serde::from_slice::<Finite>(&as_it_is).map_err(|_| CheckpointError::NotFinite)?;
        }
        Ok(ObjectState { values, ..Default::default() })
    }

    fn load_state_dict(&self, state: &ObjectState) -> Result<()> {
        *self.lock() = serde_json::from_value(state.values.clone()).map_err(Error::other)?;
        Ok(())
    }
}

/// Is there a null? JSON writes it for infinities and NaN, and for an Option without a value.
fn has_null(values: &serde_json::Value) -> bool {
    use serde_json::Value;
    match values {
        Value::Null => true,
        Value::Array(items) => items.iter().any(has_null),
        Value::Object(items) => items.values().any(has_null),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

/// Any value in which all numbers are finite; nothing of it is kept.
struct Finite;

impl<'de> Deserialize<'de> for Finite {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for Finite {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("finite numbers")
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> std::result::Result<Self, E> {
        if number.is_finite() { Ok(self) } else { Err(E::invalid_value(de::Unexpected::Float(number), &self)) }
    }

    fn visit_bool<E>(self, _: bool) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_bytes<E>(self, _: &[u8]) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_unit<E>(self) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_none<E>(self) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> std::result::Result<Self, A::Error> {
        while items.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut items: A) -> std::result::Result<Self, A::Error> {
        while items.next_entry::<Self, Self>()?.is_some() {}
        Ok(self)
    }
}

impl Accelerator {
    /// Has a value of the program's own saved and loaded with the state of the run: anything that serde can write as JSON,
    /// such as the best loss so far (`register_for_checkpointing` of the reference). Register the same values in the same
    /// order before [`load_state`](Self::load_state). That of rank 0 goes on on ranks that a run did not have.
    ///
    /// [`register_stateful`](Self::register_stateful) does so for what has tensors.
    ///
    /// ```
    /// use accelerate::Accelerator;
    ///
    /// let folder = std::env::temp_dir().join(format!("accelerate-registered-{}", std::process::id()));
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let best_loss = accelerator.register_for_checkpointing(f64::MAX);
    /// *best_loss.lock() = 0.25;
    /// accelerator.save_state(&folder)?;
    /// *best_loss.lock() = 0.125;
    /// accelerator.load_state(&folder)?;
    /// assert_eq!(*best_loss.lock(), 0.25);
    /// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn register_for_checkpointing<T>(&self, value: T) -> Registered<T>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
    {
        let registered = Registered(Arc::new(Mutex::new(value)));
        self.register_stateful(Arc::new(registered.clone()));
        registered
    }

    /// Has an object of the program's own saved and loaded with the state of the run, tensors included. Where processes have other
    /// tensors, as many processes go on each with its own, and any other number with those of process 0.
    pub fn register_stateful(&self, object: Arc<dyn Stateful>) {
        self.session().register(Object::Registered(object));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;
    use std::collections::BTreeMap;

    fn saved<T: Serialize + DeserializeOwned + Send>(value: T) -> Result<serde_json::Value> {
        Ok(Registered(Arc::new(Mutex::new(value))).state_dict()?.values)
    }

    #[rstest]
    #[case(saved(Some(f64::INFINITY)))]
    #[case(saved(vec![None, Some(f32::NAN)]))]
    #[case(saved(BTreeMap::from([("best".to_owned(), (1u8, Some(f64::NEG_INFINITY)))])))]
    fn what_would_come_back_as_nothing_is_not_saved(#[case] saved: Result<serde_json::Value>) {
        assert!(saved.unwrap_err().is_checkpoint());
    }

    #[test]
    fn nothing_and_finite_numbers_are_saved() {
        assert_eq!(saved(None::<f64>).unwrap(), json!(null));
        assert_eq!(saved((Some(0.5), (), vec![None, Some("x".to_owned())])).unwrap(), json!([0.5, null, [null, "x"]]));
        assert_eq!(saved(BTreeMap::from([(1u64, None::<i8>)])).unwrap(), json!({ "1": null }));
    }
}
