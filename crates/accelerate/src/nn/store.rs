//! All parameters of a model by name.

use super::activation_checkpointing::{CheckpointOptions, CheckpointingSwitch};
use super::attention_kernel::{AttentionKernel, AttentionSlot};
use super::deferred::{Initialisations, ParamInitFn};
use super::init::is_floating;
use super::param::Role;
use super::{AnyLayer, LoadReport, LoadStateDictOptions, Param, Path, StateDict, match_names, memory_of};
use crate::error::{BigModelError, NnError, Result, WeightsError};
use crate::group::Group;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Device, Kind, Tensor};

/// The mode of a model, shared by its store and the layers that behave differently while training.
///
/// ```
/// use accelerate::{nn::ParamStore, tch::Device};
/// let store = ParamStore::new(Device::Cpu);
/// let training = store.training_flag();
/// store.eval();
/// assert!(!training.get());
/// ```
#[derive(Clone, Debug)]
pub struct TrainingFlag(Arc<AtomicBool>);

impl TrainingFlag {
    /// Is the model in training mode?
    pub fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The parameters and buffers of one model, in the order in which they were registered.
///
/// Clones are the same store. It begins in training mode.
///
/// ```
/// use accelerate::nn::{Linear, ParamStore};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// Linear::new(store.root() / "classifier", 8, 2, Default::default())?;
/// let names: Vec<_> = store.named_parameters().into_iter().map(|(name, _)| name).collect();
/// assert_eq!(names, ["classifier.weight", "classifier.bias"]);
/// assert_eq!(store.num_parameters(), 18);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ParamStore(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    training: TrainingFlag,
    attention: AttentionSlot,
    state: Mutex<State>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) device: Device,
    pub(super) kind: Kind,
    params: Vec<Param>,
    /// By path, in the order in which they were made.
    pub(super) layers: Vec<(String, AnyLayer)>,
    /// First names only.
    positions: HashMap<String, usize>,
    /// Further names of tied weights, to their first name.
    aliases: BTreeMap<String, String>,
    /// Who computes with the same tensors without asking a [`Param`] for them.
    tensor_holder: Option<&'static str>,
    /// Where parameters get no memory at first: what is to be done to them.
    pub(super) initialisations: Option<Initialisations>,
    pub(super) param_init_fn: Option<ParamInitFn>,
    /// Are layers checkpointed? Shared with those that can be, of which there are none if this is the only one.
    checkpointing: CheckpointingSwitch,
}

impl State {
    fn get(&self, name: &str) -> Option<&Param> {
        let first_name = self.aliases.get(name).map_or(name, String::as_str);
        self.positions.get(first_name).map(|&position| &self.params[position])
    }

    fn check_free(&self, name: &str) -> Result<()> {
        if name.is_empty() || name.split('.').any(str::is_empty) {
            return Err(NnError::MalformedName { name: name.to_owned() }.into());
        }
        if let Some(param) = self.get(name) {
            let (name, shape) = (name.to_owned(), param.shape());
            return Err(NnError::DuplicateName { name, shape }.into());
        }
        Ok(())
    }

    fn insert(&mut self, param: Param) -> Result<Param> {
        self.check_free(param.name())?;
        self.positions.insert(param.name().to_owned(), self.params.len());
        self.params.push(param.clone());
        Ok(param)
    }
}

impl ParamStore {
    /// An empty store whose parameters will live on `device` as 32-bit floats.
    pub fn new(device: Device) -> Self {
        Self::with_kind(device, Kind::Float)
    }

    /// An empty store whose parameters will be of element type `kind`: `torch.set_default_dtype`.
    ///
    /// ```
    /// use accelerate::nn::{Init, ParamStore};
    /// use accelerate::tch::{Device, Kind};
    /// let store = ParamStore::with_kind(Device::Cpu, Kind::Double);
    /// assert_eq!(store.root().param("scale", ([1], Init::Ones))?.kind(), Kind::Double);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn with_kind(device: Device, kind: Kind) -> Self {
        Self::with_initialisations(device, kind, None)
    }

    pub(super) fn with_initialisations(device: Device, kind: Kind, initialisations: Option<Initialisations>) -> Self {
        Self(Arc::new(Inner {
            training: TrainingFlag(Arc::new(AtomicBool::new(true))),
            attention: AttentionSlot::default(),
            state: Mutex::new(State {
                device,
                kind,
                params: Vec::new(),
                layers: Vec::new(),
                positions: HashMap::new(),
                aliases: BTreeMap::new(),
                tensor_holder: None,
                initialisations,
                param_init_fn: None,
                checkpointing: Arc::default(),
            }),
        }))
    }

    /// Who computes with the same tensors without asking a [`Param`] for them, if anyone does.
    pub(crate) fn tensor_holder(&self) -> Option<&'static str> {
        self.state().tensor_holder
    }

    pub(super) fn set_tensor_holder(&self, holder: &'static str) {
        self.state().tensor_holder = Some(holder);
    }

    /// The parameters of a model written for plain `tch`: names are kept and storage is shared, so updates
    /// through the store are seen by the model and the other way round.
    ///
    /// Trainable variables are parameters in the order of their creation; the others are buffers, by name.
    /// A variable registered under several names is one parameter under the first in alphabetical order, with
    /// the others as [aliases](Self::aliases).
    ///
    /// # Errors
    /// A name that is malformed.
    ///
    /// ```
    /// use accelerate::nn::ParamStore;
    /// use accelerate::tch::{Device, nn};
    ///
    /// let variables = nn::VarStore::new(Device::Cpu);
    /// let linear = nn::linear(variables.root() / "classifier", 4, 2, Default::default());
    /// let store = ParamStore::from_var_store(&variables)?;
    /// store.get("classifier.bias").unwrap().copy_(&linear.bs.as_ref().unwrap().ones_like())?;
    /// assert_eq!(linear.bs.unwrap().double_value(&[0]), 1.0);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn from_var_store(variables: &tch::nn::VarStore) -> Result<Self> {
        let store = Self::with_kind(variables.device(), variables.kind());
        store.set_tensor_holder("a tch::nn::VarStore");
        let variables = variables.variables_.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names: Vec<&String> = variables.named_variables.keys().collect();
        names.sort();
        // The store of tch keeps the order only in a list without names; the memory tells which is which.
        let mut names_by_memory: HashMap<_, Vec<&String>> = HashMap::new();
        for name in &names {
            names_by_memory.entry(memory_of(&variables.named_variables[*name])).or_default().push(name);
        }
        let mut taken: HashSet<&String> = HashSet::new();
        for variable in &variables.trainable_variables {
            let same = names_by_memory.get(&memory_of(&variable.tensor)).into_iter().flatten();
            // Empty tensors all have the same memory, none, and are not tied for that.
            let num_names = if variable.tensor.numel() == 0 { 1 } else { usize::MAX };
            let mut first: Option<Param> = None;
            for name in same.filter(|name| !taken.contains(**name)).take(num_names).collect::<Vec<_>>() {
                taken.insert(name);
                first = Some(match first {
                    Some(param) => store.insert_alias((*name).clone(), &param)?,
                    None => {
                        let tensor = variables.named_variables[*name].shallow_clone();
                        store.insert(Param::new((*name).clone(), Role::Parameter, tensor))?
                    }
                });
            }
        }
        for name in names.into_iter().filter(|name| !taken.contains(name)) {
            let tensor = variables.named_variables[name].shallow_clone();
            let role = Role::Buffer { persistent: true };
            store.insert(Param::new(name.clone(), role, tensor))?;
        }
        Ok(store)
    }

    // Every change is a single step, so a panic elsewhere does not spoil the state.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn check_free(&self, name: &str) -> Result<()> {
        self.state().check_free(name)
    }

    pub(crate) fn insert(&self, param: Param) -> Result<Param> {
        self.state().insert(param)
    }

    /// Forgets parameters that were made for a part of the model that is taken away. Handles on them stay valid.
    pub(crate) fn remove(&self, removed: &[Param]) {
        let mut state = self.state();
        let params = std::mem::take(&mut state.params);
        state.params = params.into_iter().filter(|param| !removed.iter().any(|gone| gone.is_same(param))).collect();
        state.positions =
            state.params.iter().enumerate().map(|(position, param)| (param.name().to_owned(), position)).collect();
    }

    pub(crate) fn insert_alias(&self, alias: String, param: &Param) -> Result<Param> {
        let mut state = self.state();
        state.check_free(&alias)?;
        if !state.get(param.name()).is_some_and(|own| own.is_same(param)) {
            let name = param.name().to_owned();
            return Err(NnError::ForeignAlias { alias, name }.into());
        }
        state.aliases.insert(alias, param.name().to_owned());
        param.set_tied();
        Ok(param.clone())
    }

    /// The place under which a model registers its layers.
    pub fn root(&self) -> Path {
        Path::root(self.clone())
    }

    /// Where parameters live.
    pub fn device(&self) -> Device {
        self.state().device
    }

    /// The element type of new parameters.
    pub fn kind(&self) -> Kind {
        self.state().kind
    }

    /// Training mode: dropout drops, batch normalisation learns its statistics.
    pub fn train(&self) {
        self.set_training(true);
    }

    /// Evaluation mode. It does not switch gradients off; that is [`tch::no_grad`].
    pub fn eval(&self) {
        self.set_training(false);
    }

    /// Training mode (`true`) or evaluation mode (`false`).
    pub fn set_training(&self, training: bool) {
        self.0.training.0.store(training, Ordering::Relaxed);
    }

    /// Is the model in training mode?
    pub fn is_training(&self) -> bool {
        self.0.training.get()
    }

    /// The mode as a value that layers keep.
    pub fn training_flag(&self) -> TrainingFlag {
        self.0.training.clone()
    }

    /// Computes the attention of the model in another way from now on: whatever calls
    /// [`ScaledDotProductAttention`](crate::nn::ScaledDotProductAttention), [`MultiheadAttention`](crate::nn::MultiheadAttention) among
    /// it. [`AttentionKernel`] has an example.
    pub fn set_attention_kernel(&self, kernel: Arc<dyn AttentionKernel>) {
        self.0.attention.set(kernel);
    }

    /// How attention is computed.
    pub fn attention_kernel(&self) -> Arc<dyn AttentionKernel> {
        self.0.attention.kernel()
    }

    pub(super) fn attention_slot(&self) -> AttentionSlot {
        self.0.attention.clone()
    }

    /// Does the model compute attention by the kernel of the store?
    pub(crate) fn uses_attention_kernel(&self) -> bool {
        self.0.attention.is_used()
    }

    /// From now on, layers in [`Checkpointed`](crate::nn::Checkpointed) compute their activations once more in the backward
    /// pass in place of keeping them (`gradient_checkpointing_enable` of Transformers).
    ///
    /// # Errors
    /// The model has no such layer.
    ///
    /// ```
    /// use accelerate::nn::{CheckpointOptions, Checkpointed, Linear, ParamStore};
    /// use accelerate::tch::Device;
    ///
    /// let store = ParamStore::new(Device::Cpu);
    /// assert!(store.gradient_checkpointing_enable(Default::default()).is_err());
    /// let block = Checkpointed::new(store.root(), |path| Linear::new(path, 2, 2, Default::default()))?;
    /// store.gradient_checkpointing_enable(CheckpointOptions { offload_to_cpu: true, ..Default::default() })?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn gradient_checkpointing_enable(&self, options: CheckpointOptions) -> Result<()> {
        let switch = self.checkpointing_switch();
        // One is the store's, one is here.
        if Arc::strong_count(&switch) <= 2 {
            return Err(NnError::NothingToCheckpoint.into());
        }
        *switch.lock().unwrap_or_else(PoisonError::into_inner) = Some(options);
        Ok(())
    }

    /// From now on, all layers keep their activations.
    pub fn gradient_checkpointing_disable(&self) {
        *self.checkpointing_switch().lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// What layers that can be checkpointed look at.
    pub(super) fn checkpointing_switch(&self) -> CheckpointingSwitch {
        Arc::clone(&self.state().checkpointing)
    }

    /// All parameters, frozen ones too, without buffers; tied weights once.
    pub fn parameters(&self) -> Vec<Param> {
        self.filtered(|param| !param.is_buffer())
    }

    /// The same, with this rank's slices in place of parameters whose layer several ranks compute together.
    pub(crate) fn own_parameters(&self) -> Vec<Param> {
        self.parameters().into_iter().map(|param| param.slice_param().unwrap_or(param)).collect()
    }

    /// The parameters that get a gradient: what an optimizer updates.
    pub fn trainable_parameters(&self) -> Vec<Param> {
        self.filtered(|param| !param.is_buffer() && param.requires_grad())
    }

    /// The buffers, persistent or not.
    pub fn buffers(&self) -> Vec<Param> {
        self.filtered(Param::is_buffer)
    }

    /// All parameters with their names.
    pub fn named_parameters(&self) -> Vec<(String, Param)> {
        self.parameters().into_iter().map(|param| (param.name().to_owned(), param)).collect()
    }

    /// All parameters and those buffers that are saved, in order, as the tensors that they are stored as.
    pub(crate) fn persistent(&self) -> Vec<Param> {
        self.filtered(Param::is_persistent).iter().flat_map(Param::stored_as).collect()
    }

    /// Parameters and buffers, persistent or not, in the order of their registration; tied weights once.
    pub(crate) fn parameters_and_buffers(&self) -> Vec<Param> {
        self.filtered(|_| true)
    }

    /// Can all of it be written to? What a device map keeps on a disk cannot.
    pub(crate) fn check_writable(&self) -> Result<()> {
        match self.filtered(Param::is_kept_on_disk).first() {
            Some(param) => {
                let (parameter, action) = (param.name().to_owned(), "written to");
                Err(BigModelError::Kept { parameter, action }.into())
            }
            None => Ok(()),
        }
    }

    /// Says where the model is computed, once parameters are where it is said for each.
    pub(crate) fn set_device(&self, device: Device) {
        self.state().device = device;
    }

    fn filtered(&self, wanted: impl Fn(&Param) -> bool) -> Vec<Param> {
        self.state().params.iter().filter(|param| wanted(param)).cloned().collect()
    }

    /// The parameter or buffer of this name, or of this alias.
    pub fn get(&self, name: &str) -> Option<Param> {
        self.state().get(name).cloned()
    }

    /// Further names of tied weights, each to the name under which the weight is kept.
    pub fn aliases(&self) -> BTreeMap<String, String> {
        self.state().aliases.clone()
    }

    /// Number of elements of all parameters, without buffers; tied weights once.
    pub fn num_parameters(&self) -> usize {
        self.parameters().iter().map(Param::numel).sum()
    }

    /// All parameters and persistent buffers. The tensors are detached but share their storage with the model:
    /// copy them to keep them. Of a sharded model they are copies, in full on every rank, and the call is collective.
    ///
    /// ```
    /// use accelerate::nn::{Linear, ParamStore};
    /// use accelerate::tch::Device;
    ///
    /// let store = ParamStore::new(Device::Cpu);
    /// Linear::new(store.root() / "proj", 2, 2, Default::default())?;
    /// assert_eq!(store.state_dict()?.names().collect::<Vec<_>>(), ["proj.weight", "proj.bias"]);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn state_dict(&self) -> Result<StateDict> {
        let entries = self.persistent().into_iter();
        let state: Result<StateDict> =
            entries.map(|param| Ok((param.name().to_owned(), param.full_tensor()?))).collect();
        Ok(state?.with_aliases(self.aliases()))
    }

    /// The ranks that own shards of the parameters, if the model is sharded.
    pub(crate) fn shard_group(&self) -> Option<Group> {
        self.parameters().iter().find_map(Param::shard_group)
    }

    /// Overwrites parameters and buffers by name, casting element types and devices.
    ///
    /// Tied weights may stand under any of their names. Nothing is changed unless everything fits. With
    /// `strict` false in the options, names that only one side has are reported instead; a wrong shape is an error always.
    ///
    /// # Errors
    /// Lists *all* missing, unexpected and mis-shaped names.
    ///
    /// ```
    /// use accelerate::nn::{Linear, LoadStateDictOptions, ParamStore, StateDict};
    /// use accelerate::tch::{Device, Tensor};
    ///
    /// let store = ParamStore::new(Device::Cpu);
    /// let layer = Linear::new(store.root() / "proj", 1, 1, Default::default())?;
    /// let found: StateDict = [("proj.bias".to_string(), Tensor::from_slice(&[7.0f32]))].into_iter().collect();
    /// let error = store.load_state_dict(&found, Default::default()).unwrap_err();
    /// assert!(error.to_string().contains("1 missing: proj.weight"));
    /// let report = store.load_state_dict(&found, LoadStateDictOptions { strict: false })?;
    /// assert_eq!(report.missing_keys, ["proj.weight"]);
    /// assert_eq!(layer.bias.unwrap().get()?.double_value(&[0]), 7.0);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn load_state_dict(&self, state: &StateDict, options: LoadStateDictOptions) -> Result<LoadReport> {
        let entries: Vec<(&str, &Tensor)> = state.iter().collect();
        let found: Vec<_> = entries.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.size())).collect();
        let (pairs, mismatch) = match_names(self, &found);
        if mismatch.is_fatal(options.strict) {
            return Err(WeightsError::StateDict { mismatch }.into());
        }
        self.check_writable()?;
        for (position, param) in pairs {
            param.copy_(entries[position].1)?;
        }
        let (missing_keys, unexpected_keys) = (mismatch.missing, mismatch.unexpected);
        Ok(LoadReport { missing_keys, unexpected_keys })
    }

    /// Overwrites all parameters and buffers by those of the same name in a `tch` store.
    ///
    /// # Errors
    /// Lists all names and shapes that differ.
    pub fn copy_from(&self, variables: &tch::nn::VarStore) -> Result<()> {
        self.load_state_dict(&variables.variables().into_iter().collect(), LoadStateDictOptions::default())?;
        Ok(())
    }

    /// Moves everything to another device in place: handles held by layers and optimizers stay valid.
    ///
    /// # Errors
    /// The device does not exist or its memory does not suffice.
    pub fn to_device(&self, device: Device) -> Result<()> {
        let stored = self.filtered(|_| true).iter().flat_map(Param::stored_as).collect();
        self.replace_data(stored, |tensor| tensor.f_to(device))?;
        self.state().device = device;
        Ok(())
    }

    /// Casts floating-point parameters and buffers in place; integers and quantised parameters stay.
    ///
    /// ```
    /// use accelerate::nn::{BatchNorm2d, ParamStore};
    /// use accelerate::tch::{Device, Kind};
    ///
    /// let store = ParamStore::new(Device::Cpu);
    /// let norm = BatchNorm2d::new(store.root(), 3, Default::default())?;
    /// store.to_kind(Kind::BFloat16)?;
    /// assert_eq!(norm.weight.unwrap().kind(), Kind::BFloat16);
    /// assert_eq!(norm.num_batches_tracked.unwrap().kind(), Kind::Int64);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn to_kind(&self, kind: Kind) -> Result<()> {
        // The scales of codes stay as exact as they are.
        let plain = self.filtered(|param| !param.is_stored_as_several());
        self.replace_data(plain, |tensor| match is_floating(tensor.f_kind()?) {
            true => tensor.f_to_kind(kind),
            false => Ok(tensor.shallow_clone()),
        })?;
        self.state().kind = kind;
        Ok(())
    }

    fn replace_data(
        &self,
        params: Vec<Param>,
        convert: impl Fn(&Tensor) -> Result<Tensor, tch::TchError>,
    ) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        if let Some(param) = self.filtered(|param| param.shard_group().is_some()).first() {
            // The shards are pieces of larger tensors, which would be left behind.
            return Err(NnError::ShardedData { parameter: param.name().to_owned() }.into());
        }
        if let Some(param) = self.filtered(Param::is_dispatched).first() {
            return Err(NnError::DispatchedData { parameter: param.name().to_owned() }.into());
        }
        for param in params {
            // The tensor object stays and its data change, as in torch.nn.Module.to: whoever holds it follows.
            let mut local = param.local();
            let converted = match param.is_deferred() {
                // One element, which stands for all.
                true => {
                    convert(&local.f_detach()?.f_as_strided([0i64; 0], [0i64; 0], 0)?)?.f_expand(local.size(), false)?
                }
                false => convert(&local.f_detach()?)?,
            };
            let grad = param.grad().map(|grad| convert(&grad)).transpose()?;
            local.f_set_data(&converted)?;
            if let (Some(mut old), Some(new)) = (param.grad(), grad) {
                old.f_set_data(&new)?;
            }
        }
        Ok(())
    }
}
