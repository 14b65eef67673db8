//! How models are passed to the accelerator's calls.

use super::PreparedModel;
use crate::error::{Result, StateError};
use crate::nn::{Module, Param, ParamStore};
use crate::session::Engine;
use std::fmt;
use std::sync::Arc;

/// A model as [`HasParameters`] shows it; opaque.
#[derive(Clone, Copy)]
pub struct ModelRef<'a> {
    store: &'a ParamStore,
    /// Of a prepared model.
    engine: Option<&'a Arc<dyn Engine>>,
}

impl<'a> ModelRef<'a> {
    /// What keeps the model in step.
    ///
    /// # Errors
    /// It is not a prepared one.
    pub(super) fn engine(self, call: &'static str) -> Result<&'a Arc<dyn Engine>> {
        self.engine.ok_or_else(|| StateError::NotPrepared { call }.into())
    }
}

impl fmt::Debug for ModelRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelRef").field("is_prepared", &self.engine.is_some()).finish_non_exhaustive()
    }
}

/// Whatever has parameters, for all calls that take a model: a model, prepared or not, its store, a tuple of references to
/// several of them, or a list of parameters.
///
/// What a call needs of it the call says: [`accumulate`](crate::Accelerator::accumulate) wants prepared models,
/// [`save_model`](crate::Accelerator::save_model) one model, [`clip_grad_norm_`](crate::Accelerator::clip_grad_norm_) any
/// parameters.
///
/// ```
/// use accelerate::{HasParameters, nn::{Init, ParamStore}, tch::Device};
///
/// let (first, second) = (ParamStore::new(Device::Cpu), ParamStore::new(Device::Cpu));
/// first.root().param("weight", ([2], Init::Zeros))?;
/// second.root().param("weight", ([3], Init::Zeros))?;
/// assert_eq!((&first, &second).trainable_parameters().len(), 2);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no parameters that are known here",
    label = "has no `HasParameters`",
    note = "a model, prepared or not, a `ParamStore`, a tuple of references to these, or a `Vec<Param>` has them; \
            a struct of layers becomes a model by `impl accelerate::nn::Module`"
)]
pub trait HasParameters {
    /// Calls `visit` with model after model; never for a list of parameters.
    fn for_each_model(&self, visit: &mut dyn FnMut(ModelRef<'_>));

    /// The parameters that get gradients.
    fn trainable_parameters(&self) -> Vec<Param> {
        let mut params = Vec::new();
        self.for_each_model(&mut |model| params.extend(model.store.trainable_parameters()));
        params
    }
}

impl HasParameters for ParamStore {
    fn for_each_model(&self, visit: &mut dyn FnMut(ModelRef<'_>)) {
        visit(ModelRef { store: self, engine: None });
    }
}

impl<M: Module> HasParameters for M {
    fn for_each_model(&self, visit: &mut dyn FnMut(ModelRef<'_>)) {
        visit(ModelRef { store: self.params(), engine: None });
    }
}

impl<M: Module> HasParameters for PreparedModel<M> {
    fn for_each_model(&self, visit: &mut dyn FnMut(ModelRef<'_>)) {
        visit(ModelRef { store: self.params(), engine: Some(self.shared_engine()) });
    }
}

macro_rules! tuple {
    ($($model:ident $index:tt),*) => {
        impl<$($model: HasParameters + ?Sized),*> HasParameters for ($(&$model,)*) {
            fn for_each_model(&self, visit: &mut dyn FnMut(ModelRef<'_>)) {
                $(self.$index.for_each_model(visit);)*
            }
        }
    };
}

tuple!(A 0);
tuple!(A 0, B 1);
tuple!(A 0, B 1, C 2);
tuple!(A 0, B 1, C 2, D 3);

impl HasParameters for [Param] {
    fn for_each_model(&self, _: &mut dyn FnMut(ModelRef<'_>)) {}

    fn trainable_parameters(&self) -> Vec<Param> {
        self.to_vec()
    }
}

impl HasParameters for Vec<Param> {
    fn for_each_model(&self, _: &mut dyn FnMut(ModelRef<'_>)) {}

    fn trainable_parameters(&self) -> Vec<Param> {
        self.clone()
    }
}

/// The store of the one model that `call` takes.
pub(super) fn single_store<P: HasParameters + ?Sized>(model: &P, call: &'static str) -> Result<ParamStore> {
    let (mut store, mut found) = (None, 0);
    model.for_each_model(&mut |model| {
        found += 1;
        store = Some(model.store.clone());
    });
    store.filter(|_| found == 1).ok_or_else(|| StateError::NotOneModel { call, found }.into())
}

/// Calls `visit` with what keeps each model in step.
///
/// # Errors
/// A model that is not a prepared one, or none at all.
pub(super) fn for_each_engine<P: HasParameters + ?Sized>(
    models: &P,
    call: &'static str,
    visit: &mut dyn FnMut(&Arc<dyn Engine>),
) -> Result<()> {
    let (mut outcome, mut found) = (Ok(()), 0);
    models.for_each_model(&mut |model| {
        found += 1;
        match model.engine(call) {
            Ok(engine) => visit(engine),
            Err(error) => outcome = Err(error),
        }
    });
    if found == 0 { Err(StateError::NotPrepared { call }.into()) } else { outcome }
}
