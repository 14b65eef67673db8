//! Parameters that have no memory yet: what they will be is written down, and done once it is known who keeps them.
//!
//! Values are drawn in the order in which they would have been drawn at once, so the model is the same to the bit.

use super::param::Role;
use super::storage::Storage;
use super::{Init, Param, ParamStore};
use crate::error::{NnError, Result};
use accelerate_core::config::Callback;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use tch::{Device, Kind, Tensor};
use torch_ext::scalar;

/// What is still to be done, in order; shared by a store and its parameters.
#[derive(Clone, Debug, Default)]
pub(super) struct Initialisations(Arc<Mutex<Vec<Initialisation>>>);

/// A parameter, or one row of it, to be filled.
#[derive(Clone, Debug)]
struct Initialisation {
    parameter: String,
    row: Option<i64>,
    init: Init,
}

impl Initialisations {
    fn push(&self, initialisation: Initialisation) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(initialisation);
    }

    fn all(&self) -> Vec<Initialisation> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Forgets those of parameters that are not among `left`.
    fn retain(&self, left: &HashSet<String>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|step| left.contains(&step.parameter));
    }

    fn forget(&self, parameter: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|step| step.parameter != parameter);
    }
}

/// Fills a new parameter in place of its layer; gets its name. For `param_init_fn` of `FullyShardedDataParallelPlugin`.
///
/// ```
/// use accelerate::nn::{Linear, ModuleFn, ParamInitFn, ParamStore, init};
/// use accelerate::{Accelerator, FullyShardedDataParallelPlugin, tch::Tensor};
///
/// let ones = ParamInitFn::new(|_, tensor| init::ones_(tensor));
/// let plugin = FullyShardedDataParallelPlugin { param_init_fn: Some(ones.into()), ..Default::default() };
/// let accelerator = Accelerator::builder().cpu(true).fsdp_plugin(plugin).build()?;
/// let store = ParamStore::init_empty_weights(accelerator.device());
/// let linear = Linear::new(store.root(), 4, 2, Default::default())?;
/// let _model = accelerator.prepare(ModuleFn::new(&store, move |input: &Tensor| linear.forward(input)))?;
/// assert_eq!(store.state_dict()?.get("weight").unwrap().sum(None).double_value(&[]), 8.0);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone)]
pub struct ParamInitFn(Arc<InitFn>);

impl ParamInitFn {
    /// Wraps a function of name and tensor.
    pub fn new(param_init_fn: impl Fn(&str, &Tensor) -> Result<()> + Send + Sync + 'static) -> Self {
        Self(Arc::new(param_init_fn))
    }
}

impl From<ParamInitFn> for Callback {
    fn from(param_init_fn: ParamInitFn) -> Self {
        Self::new(param_init_fn)
    }
}

type InitFn = dyn Fn(&str, &Tensor) -> Result<()> + Send + Sync;

impl fmt::Debug for ParamInitFn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ParamInitFn")
    }
}

struct Deferred {
    parameter: String,
    /// Of the right shape, kind, device and wish for gradients, but a single NaN: computing with it shows, and libtorch
    /// refuses to write to it.
    placeholder: Tensor,
    initialisations: Initialisations,
}

impl Deferred {
    fn no_memory<T>(&self) -> Result<T> {
        Err(NnError::Deferred { parameter: self.parameter.clone() }.into())
    }
}

impl Storage for Deferred {
    fn materialize(&self) -> Result<Tensor> {
        Ok(self.placeholder.shallow_clone())
    }
    fn local(&self) -> Tensor {
        self.placeholder.shallow_clone()
    }
    fn full_tensor(&self) -> Result<Tensor> {
        self.no_memory()
    }
    fn overwrite(&self, _full: &Tensor) -> Result<()> {
        self.no_memory()
    }
    fn overwrite_shard(&self, _shard: &Tensor) -> Result<()> {
        self.no_memory()
    }
    fn initialise(&self, row: Option<i64>, init: Init) -> Result<()> {
        self.initialisations.push(Initialisation { parameter: self.parameter.clone(), row, init });
        Ok(())
    }
    fn is_deferred(&self) -> bool {
        true
    }
}

/// Overwrites a tensor, or its row `row`, with values that are drawn on the CPU whatever its device.
pub(super) fn fill(tensor: &Tensor, row: Option<i64>, init: Init) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let mut place = row.map_or_else(|| tensor.f_detach(), |row| tensor.f_detach()?.f_select(0, row))?;
    if place.device() == Device::Cpu {
        return init.apply(&place);
    }
    let drawn = place.f_empty_like()?.f_to(Device::Cpu)?;
    init.apply(&drawn)?;
    place.f_copy_(&drawn)?;
    Ok(())
}

impl ParamStore {
    /// An empty store whose parameters get no memory when layers are built (`accelerate.init_empty_weights`, `zero.Init`):
    /// [`Accelerator::prepare`](crate::Accelerator::prepare) fills them. Of a sharded model each process then keeps its
    /// shards only, and never holds more full parameters at once than a layer has.
    ///
    /// The model is the one that [`ParamStore::new`] would have given. Parameters made from tensors, and buffers, have their
    /// memory at once. Until `prepare` or [`materialize`](Self::materialize), all elements read as NaN, and loading without a device
    /// map or saving is an error.
    ///
    /// ```
    /// use accelerate::nn::{Linear, ModuleFn, ParamStore};
    /// use accelerate::{Accelerator, FullyShardedDataParallelPlugin, tch::Tensor};
    ///
    /// let builder = Accelerator::builder().cpu(true).fsdp_plugin(FullyShardedDataParallelPlugin::default());
    /// let accelerator = builder.build()?;
    /// let store = ParamStore::init_empty_weights(accelerator.device());
    /// let linear = Linear::new(store.root(), 4, 2, Default::default())?;
    /// assert!(store.state_dict().is_err());
    /// let _model = accelerator.prepare(ModuleFn::new(&store, move |input: &Tensor| linear.forward(input)))?;
    /// assert_eq!(store.state_dict()?.get("weight").unwrap().size(), [2, 4]);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn init_empty_weights(device: Device) -> Self {
        Self::with_initialisations(device, Kind::Float, Some(Initialisations::default()))
    }

    /// Fills parameters without memory by `param_init_fn`, which gets name and tensor, in place of what their layers do
    /// (`param_init_fn` of PyTorch's FSDP, which gets a module). It is called for one after the other in the order
    /// in which layers are done with them, on every process.
    ///
    /// ```
    /// use accelerate::nn::{Linear, ParamStore, init};
    /// use accelerate::tch::Device;
    ///
    /// let store = ParamStore::init_empty_weights(Device::Cpu);
    /// let linear = Linear::new(store.root(), 4, 2, Default::default())?;
    /// store.set_param_init_fn(|name, tensor| if name == "bias" { init::zeros_(tensor) } else { init::ones_(tensor) });
    /// store.materialize()?;
    /// assert_eq!(linear.weight.get()?.sum(None).double_value(&[]), 8.0);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn set_param_init_fn(&self, param_init_fn: impl Fn(&str, &Tensor) -> Result<()> + Send + Sync + 'static) {
        self.state().param_init_fn = Some(ParamInitFn::new(param_init_fn));
    }

    /// The same for what a plugin has, where the program has not set one for this store.
    pub(crate) fn default_param_init_fn(&self, param_init_fn: &ParamInitFn) {
        self.state().param_init_fn.get_or_insert_with(|| param_init_fn.clone());
    }

    /// Gives memory and values to parameters that have none; to those of a model that `prepare` never sees.
    ///
    /// # Errors
    /// The memory does not suffice; those of `param_init_fn`.
    ///
    /// ```
    /// use accelerate::nn::{Linear, ParamStore};
    /// use accelerate::tch::Device;
    ///
    /// let store = ParamStore::init_empty_weights(Device::Cpu);
    /// let linear = Linear::new(store.root(), 4, 2, Default::default())?;
    /// assert!(linear.weight.get()?.isnan().all().int64_value(&[]) == 1);
    /// store.materialize()?;
    /// assert!(linear.weight.get()?.isnan().any().int64_value(&[]) == 0);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn materialize(&self) -> Result<()> {
        self.initialise_each(|param, full| param.set_replicated(full))
    }

    /// A parameter has got its values in another way than by being initialised.
    pub(crate) fn forget_initialisation(&self, param: &Param) {
        if let Some(initialisations) = &self.state().initialisations {
            initialisations.forget(param.name());
        }
    }

    /// The names of parameters that have no memory.
    fn deferred_names(&self) -> HashSet<String> {
        let deferred = self.parameters().into_iter().filter(Param::is_deferred);
        deferred.map(|param| param.name().to_owned()).collect()
    }

    /// Makes the values of one parameter without memory after the other; `keep` decides what becomes of them. Values of those that
    /// have got memory by now, out of a file, are drawn and forgotten, so that the others are the same.
    pub(crate) fn initialise_each(&self, mut keep: impl FnMut(&Param, Tensor) -> Result<()>) -> Result<()> {
        let (to_do, init_fn) = {
            let state = self.state();
            let Some(initialisations) = &state.initialisations else { return Ok(()) };
            (initialisations.clone(), state.param_init_fn.clone())
        };
        let initialisations = if self.deferred_names().is_empty() { Vec::new() } else { to_do.all() };
        let mut left: HashMap<&str, usize> = HashMap::new();
        initialisations.iter().for_each(|step| *left.entry(&step.parameter).or_default() += 1);
        let mut under_way: HashMap<&str, Tensor> = HashMap::new();
        for Initialisation { parameter, row, init } in &initialisations {
            let Some(param) = self.get(parameter) else { continue };
            let steps = left.entry(parameter).or_default();
            *steps = steps.saturating_sub(1);
            let is_last = *steps == 0;
            // Processes with and without a function of their own go through parameters in the same order.
            if init_fn.is_some() && !is_last {
                continue;
            }
            let full = match under_way.remove(parameter.as_str()) {
                Some(full) => full,
                None => memory(&param)?,
            };
            match &init_fn {
                Some(ParamInitFn(init_fn)) => tch::no_grad(|| init_fn(parameter, &full))?,
                None => fill(&full, *row, *init)?,
            }
            if !is_last {
                under_way.insert(parameter, full);
            } else if param.is_deferred() {
                keep(&param, full)?;
            }
        }
        to_do.retain(&self.deferred_names());
        Ok(())
    }

    /// Registers a parameter without memory, if this store makes such.
    pub(super) fn insert_deferred(&self, name: &str, shape: &[i64], init: Init) -> Result<Option<Param>> {
        let (initialisations, kind, device) = {
            let state = self.state();
            let Some(initialisations) = state.initialisations.clone() else { return Ok(None) };
            (initialisations, state.kind, state.device)
        };
        let element = scalar::full(&[], f64::NAN, (kind, device))?;
        let placeholder = element.f_expand(shape, false)?.f_detach()?.f_set_requires_grad(true)?;
        let parameter = name.to_owned();
        let storage = Box::new(Deferred { parameter, placeholder, initialisations });
        let param = self.insert(Param::with_storage(name.to_owned(), Role::Parameter, storage))?;
        param.initialise(None, init)?;
        Ok(Some(param))
    }
}

fn memory(param: &Param) -> Result<Tensor> {
    let placeholder = param.local();
    Ok(Tensor::f_empty(placeholder.size(), (placeholder.f_kind()?, placeholder.device()))?)
}
