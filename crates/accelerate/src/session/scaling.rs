//! Scales of a model that computes in FP8, where they are made of the passes before: what a session asks of them, and where their
//! state is kept.

use super::PreparedParameters;
use crate::error::Result;
use serde_json::{Value, json};
use std::fmt;

/// The scales of all layers of a model.
pub(crate) trait Scaling: fmt::Debug + Send + Sync {
    /// After each backward pass. Collective.
    fn after_backward(&self) -> Result<()>;

    /// Before parameters are updated: largest values of a backward pass must have been taken over.
    ///
    /// # Errors
    /// A backward pass that nobody has told of.
    fn before_step(&self) -> Result<()>;

    /// What a run needs to go on to the bit. The same on all ranks.
    fn state(&self) -> Value;

    /// Takes over what [`state`](Self::state) gave. What is missing there begins anew.
    fn load_state(&self, state: &Value);
}

/// The key among the values of a model under which its scales are.
const SCALING: &str = "fp8";

impl PreparedParameters {
    /// What of the model's state is no tensor.
    pub(super) fn values(&self) -> Result<Value> {
        let mut values = self.engine.state()?;
        if let Some(scaling) = &self.scaling {
            if !values.is_object() {
                values = json!({});
            }
            values[SCALING] = scaling.state();
        }
        Ok(values)
    }

    /// Takes over the scales among such values, or begins with new ones where there are none.
    pub(super) fn load_scales(&self, values: &Value) {
        if let Some(scaling) = &self.scaling {
            scaling.load_state(values.get(SCALING).unwrap_or(&Value::Null));
        }
    }
}
