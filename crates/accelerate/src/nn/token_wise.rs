//! Layers that compute each token by itself, so that ranks may divide the tokens.

use super::Param;
use crate::error::Result;
use std::fmt::{self, Debug};
use std::sync::{Arc, PoisonError, RwLock};
use tch::Tensor;

/// What goes around such a layer where ranks divide the tokens.
pub(crate) trait AroundTokens: Send + Sync + Debug {
    /// The layer's output for `input`; `layer` computes it.
    fn forward(&self, input: &Tensor, layer: &dyn Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor>;

    /// The same where the layer returns its input unchanged, such as a dropout in evaluation mode.
    fn identity(&self, input: &Tensor) -> Result<Tensor> {
        self.forward(input, &|input| Ok(input.shallow_clone()))
    }
}

/// A norm over features, or a dropout. It shares what goes around it with the layer that the model holds.
#[derive(Clone)]
pub struct TokenWise {
    pub(super) kind: &'static str,
    pub(super) params: Vec<Param>,
    around: Arc<RwLock<Option<Arc<dyn AroundTokens>>>>,
}

impl TokenWise {
    pub(super) fn new<'a>(kind: &'static str, params: impl IntoIterator<Item = &'a Option<Param>>) -> Self {
        Self { kind, params: params.into_iter().flatten().cloned().collect(), around: Arc::default() }
    }

    pub(crate) fn set_around(&self, around: Arc<dyn AroundTokens>) {
        let replaced = self.around.write().unwrap_or_else(PoisonError::into_inner).replace(around);
        drop(replaced);
    }

    pub(super) fn forward(&self, input: &Tensor, layer: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        // A shared pointer: whole after every statement, also where another thread panicked.
        let around = self.around.read().unwrap_or_else(PoisonError::into_inner).clone();
        around.map_or_else(|| layer(input), |around| around.forward(input, &layer))
    }
}

impl TokenWise {
    /// The output where the layer returns its input unchanged.
    pub(super) fn identity(&self, input: &Tensor) -> Result<Tensor> {
        let around = self.around.read().unwrap_or_else(PoisonError::into_inner).clone();
        around.map_or_else(|| Ok(input.shallow_clone()), |around| around.identity(input))
    }
}

impl Debug for TokenWise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(self.kind).field("params", &self.params).finish_non_exhaustive()
    }
}
