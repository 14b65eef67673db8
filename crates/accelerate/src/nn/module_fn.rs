//! A model made of a closure: the bridge from `tch::nn` models and for small examples.

use super::{Module, ParamStore};
use crate::error::Result;
use crate::tensor_tree::TensorTree;
use std::fmt;
use std::marker::PhantomData;

/// A [`Module`] whose forward pass is a closure.
///
/// With [`ParamStore::from_var_store`] any model on a plain `tch::nn::VarStore` can be prepared; the
/// store shares the variables' storage, so training updates the model in place.
///
/// ```
/// use accelerate::nn::{Module, ModuleFn, ParamStore};
/// use accelerate::tch::{Device, Tensor, nn};
///
/// let variables = nn::VarStore::new(Device::Cpu);
/// let linear = nn::linear(variables.root(), 2, 1, Default::default());
/// let store = ParamStore::from_var_store(&variables)?;
/// let model = ModuleFn::new(&store, move |input: &Tensor| Ok(input.apply(&linear)));
/// assert_eq!(model.forward(&Tensor::from_slice2(&[[1f32, 2.0]]))?.size(), [1, 1]);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct ModuleFn<F, I, O> {
    store: ParamStore,
    forward: F,
    signature: PhantomData<fn(&I) -> O>,
}

impl<I, O, F: Fn(&I) -> Result<O>> ModuleFn<F, I, O> {
    /// A model over the parameters of `store`.
    pub fn new(store: &ParamStore, forward: F) -> Self
    where
        O: TensorTree,
    {
        Self { store: store.clone(), forward, signature: PhantomData }
    }
}

impl<I, O: TensorTree, F: Fn(&I) -> Result<O>> Module for ModuleFn<F, I, O> {
    type Input = I;
    type Output = O;

    fn forward(&self, input: &I) -> Result<O> {
        (self.forward)(input)
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }
}

impl<F, I, O> fmt::Debug for ModuleFn<F, I, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModuleFn").field("store", &self.store).finish_non_exhaustive()
    }
}
