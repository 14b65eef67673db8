//! The handle on one parameter or buffer.

use super::Float8Codes;
use super::activation_checkpointing::note_use;
use super::replicated::Replicated;
use super::storage::{Resident, Storage, UnitMember};
use super::{DeferWeightGrad, Init};
use crate::error::{NnError, Result};
use crate::group::Group;
use accelerate_core::layout::Layout;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use tch::{Kind, Tensor};

/// What a handle stands for in its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Learned; the only role whose gradients are synchronised and clipped.
    Parameter,
    /// State that is not learned, such as running statistics.
    Buffer { persistent: bool },
}

/// A handle on one named parameter or buffer of a [`ParamStore`](crate::nn::ParamStore).
///
/// Clones are the same parameter. A handle may be sent to and shared between threads.
///
/// ```
/// use accelerate::nn::{Init, ParamStore};
/// use accelerate::tch::{Device, Kind};
///
/// let store = ParamStore::new(Device::Cpu);
/// let scale = (store.root() / "head").param("scale", ([4], Init::Ones))?;
/// assert_eq!(scale.name(), "head.scale");
/// assert_eq!((scale.shape(), scale.kind()), (vec![4], Kind::Float));
/// assert!(scale.requires_grad());
///
/// scale.get()?.f_sum(Kind::Float)?.f_backward()?;
/// assert_eq!(scale.grad().map(|grad| grad.size()), Some(vec![4]));
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone)]
pub struct Param(Arc<Inner>);

/// A [`Param`] for those whom its storage holds: they do not keep it in turn.
#[derive(Clone)]
pub(crate) struct WeakParam(Weak<Inner>);

impl WeakParam {
    /// The parameter, if anybody still has it.
    pub(crate) fn upgrade(&self) -> Option<Param> {
        self.0.upgrade().map(Param)
    }
}

struct Inner {
    name: String,
    role: Role,
    // tch's Tensor may be sent but not shared, hence a mutex and not a read-write lock.
    storage: Mutex<Box<dyn Storage>>,
    storage_version: AtomicU64,
    num_prepared_models: AtomicUsize,
    num_unreduced: AtomicUsize,
    is_tied: AtomicBool,
}

impl Param {
    pub(crate) fn new(name: String, role: Role, tensor: Tensor) -> Self {
        Self::with_storage(name, role, Box::new(Replicated::new(tensor)))
    }

    pub(super) fn with_storage(name: String, role: Role, storage: Box<dyn Storage>) -> Self {
        Self(Arc::new(Inner {
            name,
            role,
            storage: Mutex::new(storage),
            storage_version: AtomicU64::new(0),
            num_prepared_models: AtomicUsize::new(0),
            num_unreduced: AtomicUsize::new(0),
            is_tied: AtomicBool::new(false),
        }))
    }

    // A storage has no half-changed state: a panic elsewhere does not spoil it.
    fn storage(&self) -> MutexGuard<'_, Box<dyn Storage>> {
        self.0.storage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tensor to compute with: in full, on the store's device. Gradients of a loss reach the parameter
    /// through it. No copy is made.
    ///
    /// Collective if the parameter is sharded: inside a forward pass once for each unit, outside of one at every call.
    ///
    /// # Errors
    /// Of a sharded parameter only: the unit could not be gathered, because a rank is gone or late, or because a shard
    /// could not be read from the disk.
    pub fn get(&self) -> Result<Tensor> {
        note_use(self);
        self.storage().materialize()
    }

    /// The tensor that a kernel computes with on this rank where several ranks compute the layer together (tensor parallelism): its
    /// slice of the parameter. Elsewhere the same as [`get`](Self::get).
    pub(crate) fn slice(&self) -> Result<Tensor> {
        note_use(self);
        self.storage().slice()
    }

    /// The full parameter as FP8 codes, where ranks with shards gather it as those.
    pub(crate) fn codes(&self) -> Result<Option<Float8Codes>> {
        note_use(self);
        self.storage().codes()
    }

    /// That slice as a parameter of its own, flat: what engines may shard.
    pub(crate) fn slice_param(&self) -> Option<Param> {
        self.storage().slice_param()
    }

    /// What this process owns of the parameter: what optimizers update and checkpoints write. The same
    /// tensor as [`get`](Self::get) unless the parameter is sharded. No copy is made. Where the shards of a model are
    /// offloaded to a disk it has no memory, and computing with it is an error.
    pub fn local(&self) -> Tensor {
        self.storage().local()
    }

    /// The full name, equal to PyTorch's state-dict key: `encoder.layer.0.attention.weight`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Sizes of the dims of the full tensor, also where this process owns only a shard.
    pub fn shape(&self) -> Vec<i64> {
        self.layout().shape().iter().map(|&size| size as i64).collect()
    }

    /// The full tensor, detached; a copy where ranks own shards. Collective there.
    pub(crate) fn full_tensor(&self) -> Result<Tensor> {
        self.storage().full_tensor()
    }

    /// Which elements of the full tensor this process owns: all, unless the parameter is sharded.
    ///
    /// ```
    /// # use accelerate::{nn::{Init, ParamStore}, tch::Device};
    /// let weight = ParamStore::new(Device::Cpu).root().param("weight", ([2, 3], Init::Zeros))?;
    /// assert!(weight.layout().is_full());
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn layout(&self) -> Layout {
        self.storage().layout()
    }

    /// The same where ranks own shards of it, and `None` where each has all of it.
    pub(crate) fn shard_layout(&self) -> Option<Layout> {
        let storage = self.storage();
        storage.group().map(|_| storage.layout())
    }

    /// The parameters that files and state dicts have in its place: itself, unless it is stored as several tensors.
    pub(crate) fn stored_as(&self) -> Vec<Param> {
        let several = self.storage().stored_as();
        several.unwrap_or_else(|| vec![self.clone()])
    }

    /// How many elements of each of these may not be divided; 0 for one that stays whole.
    pub(crate) fn piece_sizes(&self) -> Vec<usize> {
        self.storage().piece_sizes()
    }

    /// What a sharded parameter is gathered with, and its place in that.
    pub(crate) fn unit(&self) -> Option<UnitMember> {
        self.storage().unit()
    }

    /// All parameters of a sharded parameter's unit, in full and by member. They hold the memory of the unit until the last
    /// is dropped. Collective.
    pub(crate) fn full_unit(&self) -> Result<Vec<Tensor>> {
        self.storage().full_unit()
    }

    /// The ranks that own the other shards, if the parameter is sharded.
    pub(crate) fn shard_group(&self) -> Option<Group> {
        self.storage().group()
    }

    /// Who takes the gradient of a matrix that has not been computed, if anyone does.
    pub(super) fn defer_weight_grad(&self) -> Option<DeferWeightGrad> {
        self.storage().defer_weight_grad()
    }

    /// Two names of the tensor to compute with whose gradients become one before they reach it; `None` if the storage
    /// has no such.
    pub(super) fn two_uses(&self) -> Result<Option<[Tensor; 2]>> {
        note_use(self);
        self.storage().two_uses()
    }

    /// The element type.
    pub fn kind(&self) -> Kind {
        self.local().kind()
    }

    /// Number of elements of the full tensor, also where this process owns only a shard.
    pub fn numel(&self) -> usize {
        self.layout().full_numel()
    }

    /// Does a backward pass give this parameter a gradient? Buffers never get one.
    pub fn requires_grad(&self) -> bool {
        self.local().requires_grad()
    }

    /// Freezes (`false`) or unfreezes (`true`) the parameter.
    ///
    /// # Errors
    /// Unfreezing a tensor of integers, which cannot have a gradient; a change once ranks own shards of the parameter; unfreezing what
    /// was frozen when `prepare` made the model one of several ranks, whose gradients would be each rank's own.
    ///
    /// ```
    /// # use accelerate::{nn::{Init, ParamStore}, tch::Device};
    /// let store = ParamStore::new(Device::Cpu);
    /// let weight = store.root().param("weight", ([2], Init::Zeros))?;
    /// weight.set_requires_grad(false)?;
    /// assert!(store.trainable_parameters().is_empty());
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn set_requires_grad(&self, requires_grad: bool) -> Result<()> {
        if requires_grad && self.0.num_unreduced.load(Ordering::Relaxed) > 0 {
            return Err(NnError::UnreducedRequiresGrad { parameter: self.name().to_owned() }.into());
        }
        self.storage().set_requires_grad(requires_grad)
    }

    /// The gradient that backward passes have summed up so far, if there is one.
    pub fn grad(&self) -> Option<Tensor> {
        self.local().f_grad().ok().filter(Tensor::defined)
    }

    pub(crate) fn is_stored_as_several(&self) -> bool {
        self.storage().stored_as().is_some()
    }

    /// Is this state that is not learned, such as a running mean?
    pub fn is_buffer(&self) -> bool {
        matches!(self.0.role, Role::Buffer { .. })
    }

    /// Is it part of state dicts and weight files? Parameters always are, buffers by choice.
    pub fn is_persistent(&self) -> bool {
        self.0.role != (Role::Buffer { persistent: false })
    }

    /// Overwrites the values in place, casting element type and device. No gradient is recorded.
    ///
    /// # Errors
    /// A shape that cannot be broadcast to the parameter's.
    ///
    /// ```
    /// # use accelerate::{nn::{Init, ParamStore}, tch::{Device, Tensor}};
    /// let weight = ParamStore::new(Device::Cpu).root().param("weight", ([2], Init::Zeros))?;
    /// weight.copy_(&Tensor::from_slice(&[1.0f64, 2.0]))?;
    /// assert_eq!(weight.get()?.f_double_value(&[1])?, 2.0);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn copy_(&self, source: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.storage().overwrite(source)
    }

    /// Overwrites the elements of its [`layout`](Self::layout) with as many, in that order, casting element type and device.
    pub(crate) fn copy_shard_(&self, shard: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.storage().overwrite_shard(shard)
    }

    /// Are both handles on the same parameter? True for tied weights.
    pub fn is_same(&self, other: &Param) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn downgrade(&self) -> WeakParam {
        WeakParam(Arc::downgrade(&self.0))
    }

    /// Changes how the parameter is kept. Layers notice nothing.
    pub(crate) fn replace_storage(&self, storage: Box<dyn Storage>) -> Box<dyn Storage> {
        self.0.storage_version.fetch_add(1, Ordering::AcqRel);
        std::mem::replace(&mut *self.storage(), storage)
    }

    /// Loads what this process owns into memory, together with its unit, if it is elsewhere between uses.
    pub(crate) fn load(&self) -> Result<Option<Box<dyn Resident>>> {
        self.storage().load()
    }

    /// Does [`local`](Self::local) have memory only while somebody has [loaded](Self::load) it?
    pub(crate) fn is_offloaded(&self) -> bool {
        self.storage().is_offloaded()
    }

    /// Fills it, or its row `row`, now or once it has memory.
    pub(crate) fn initialise(&self, row: Option<i64>, init: Init) -> Result<()> {
        self.storage().initialise(row, init)
    }

    pub(crate) fn is_deferred(&self) -> bool {
        self.storage().is_deferred()
    }

    /// Does a device map say where it is kept?
    pub(crate) fn is_dispatched(&self) -> bool {
        self.storage().is_dispatched()
    }

    /// Is it where a device map says, and not in memory? Then it cannot be written to.
    pub(crate) fn is_kept_on_disk(&self) -> bool {
        let storage = self.storage();
        match storage.stored_as() {
            Some(parts) => parts.iter().any(Self::is_kept_on_disk),
            None => storage.is_dispatched() && storage.is_offloaded(),
        }
    }

    /// Is it trained where every rank holds all of it, whatever it is now?
    pub(crate) fn is_trained_when_replicated(&self) -> bool {
        self.storage().is_trained_when_replicated()
    }

    /// Freezes or unfreezes it. What is kept elsewhere is frozen as long as it is there.
    pub(crate) fn set_trained_when_replicated(&self, is_trained: bool) -> Result<()> {
        if is_trained && self.0.num_unreduced.load(Ordering::Relaxed) > 0 {
            return Err(NnError::UnreducedRequiresGrad { parameter: self.name().to_owned() }.into());
        }
        self.storage().set_trained_when_replicated(is_trained)
    }

    /// From now on every rank holds all of it.
    pub(crate) fn set_replicated(&self, full: Tensor) -> Result<()> {
        let full = full.f_set_requires_grad(self.is_trained_when_replicated())?;
        drop(self.replace_storage(Box::new(Replicated::new(full))));
        Ok(())
    }

    /// Do ranks own shards of it?
    pub(crate) fn is_sharded(&self) -> bool {
        self.storage().group().is_some_and(|group| group.world_size() > 1)
    }

    /// Does a model that `prepare` returned train it? Then its optimizer has to be prepared too.
    pub(crate) fn is_of_prepared_model(&self) -> bool {
        self.0.num_prepared_models.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn enter_prepared_model(&self) {
        self.0.num_prepared_models.fetch_add(1, Ordering::Relaxed);
    }

    /// Once for each [`enter_prepared_model`](Self::enter_prepared_model).
    pub(crate) fn leave_prepared_model(&self) {
        self.0.num_prepared_models.fetch_sub(1, Ordering::Relaxed);
    }

    /// From now on it belongs to a model of several ranks, which average the gradients of others and not this one's.
    pub(crate) fn enter_unreduced(&self) {
        self.0.num_unreduced.fetch_add(1, Ordering::Relaxed);
    }

    /// Once for each [`enter_unreduced`](Self::enter_unreduced).
    pub(crate) fn leave_unreduced(&self) {
        self.0.num_unreduced.fetch_sub(1, Ordering::Relaxed);
    }

    /// Has it a second name?
    pub(crate) fn is_tied(&self) -> bool {
        self.0.is_tied.load(Ordering::Relaxed)
    }

    pub(super) fn set_tied(&self) {
        self.0.is_tied.store(true, Ordering::Relaxed);
    }

    /// Counts how often [`replace_storage`](Self::replace_storage) was called: who keeps [`local`](Self::local) over
    /// steps must look.
    pub(crate) fn storage_version(&self) -> u64 {
        self.0.storage_version.load(Ordering::Acquire)
    }
}

impl fmt::Debug for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Param")
            .field("name", &self.0.name)
            .field("shape", &self.shape())
            .field("kind", &self.kind())
            .field("role", &self.0.role)
            .finish()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::checkpoint::{load_checkpoint_in_model, save_model_weights};
    use crate::nn::ParamStore;
    use tch::Device;

    struct Doubled(Tensor);

    impl Storage for Doubled {
        fn materialize(&self) -> Result<Tensor> {
            Ok(self.0.f_mul_scalar(2.0)?)
        }
        fn local(&self) -> Tensor {
            self.0.shallow_clone()
        }
    }

    #[test]
    fn a_replaced_storage_computes_with_its_own_tensor_and_optimizes_the_local_one() {
        let tensor = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let param = Param::new("weight".into(), Role::Parameter, tensor);
        let clone = param.clone();
        let local = param.local();
        param.replace_storage(Box::new(Doubled(local)));

        clone.get().unwrap().sum(Kind::Float).backward();

        assert_eq!(clone.get().unwrap().double_value(&[0]), 2.0);
        assert_eq!(clone.local().double_value(&[0]), 1.0);
        assert_eq!(param.grad().map(|grad| grad.double_value(&[0])), Some(2.0));
    }

    /// Codes of one byte and one scale: what a quantised parameter is stored as.
    struct Scaled {
        codes: Param,
        scale: Param,
    }

    impl Scaled {
        fn new(name: &str, tensor: &Tensor) -> Self {
            let scale = tensor.abs().max() / 127.0;
            let codes = (tensor / &scale).round().to_kind(Kind::Int8);
            let stored = |name: String, tensor| Param::new(name, Role::Buffer { persistent: true }, tensor);
            Self { codes: stored(name.to_owned(), codes), scale: stored(format!("{name}.scale"), scale) }
        }
    }

    impl Storage for Scaled {
        fn materialize(&self) -> Result<Tensor> {
            Ok(self.codes.get()?.f_mul(&self.scale.get()?)?)
        }
        fn local(&self) -> Tensor {
            self.codes.local()
        }
        fn stored_as(&self) -> Option<Vec<Param>> {
            Some(vec![self.codes.clone(), self.scale.clone()])
        }
    }

    fn quantised(values: [f32; 3]) -> ParamStore {
        let store = ParamStore::new(Device::Cpu);
        let path = store.root() / "proj";
        let weight = path.param("weight", Tensor::from_slice(&values).view([1, 3])).unwrap();
        path.param("bias", Tensor::from_slice(&[1f32])).unwrap();
        weight.set_requires_grad(false).unwrap();
        let full = weight.full_tensor().unwrap();
        weight.replace_storage(Box::new(Scaled::new(weight.name(), &full)));
        store
    }

    fn weight(store: &ParamStore) -> Vec<f32> {
        Vec::try_from(store.get("proj.weight").unwrap().get().unwrap().view(-1)).unwrap()
    }

    #[test]
    fn a_parameter_may_be_stored_as_several_tensors() {
        let store = quantised([1.0, -2.0, 127.0]);
        assert_eq!(weight(&store), [1.0, -2.0, 127.0]);
        assert_eq!(store.num_parameters(), 4);
        let state = store.state_dict().unwrap();
        let kinds: Vec<_> = state.iter().map(|(name, tensor)| (name, tensor.kind())).collect();
        let wanted = [("proj.weight", Kind::Int8), ("proj.weight.scale", Kind::Float), ("proj.bias", Kind::Float)];
        assert_eq!(kinds, wanted);

        // The same tensors go into another model, by value, from a file, and as shards.
        let folder = tempfile::tempdir().unwrap();
        save_model_weights(&store, folder.path(), &Default::default()).unwrap();
        let loaders: [&dyn Fn(&ParamStore); 3] = [
            &|other| drop(other.load_state_dict(&state, Default::default()).unwrap()),
            &|other| drop(load_checkpoint_in_model(other, folder.path(), &Default::default()).unwrap()),
            &|other| other.load_sharded_state_dict(&[store.sharded_state_dict().unwrap()]).unwrap(),
        ];
        for load in loaders {
            let other = quantised([4.0, 4.0, 8.0]);
            load(&other);
            assert_eq!(weight(&other), [1.0, -2.0, 127.0]);
        }

        // A tensor that is missing is told by its own name.
        let plain = ParamStore::new(Device::Cpu);
        (plain.root() / "proj").param("weight", Tensor::from_slice(&[1f32])).unwrap();
        let error = store.load_state_dict(&plain.state_dict().unwrap(), Default::default()).unwrap_err().to_string();
        assert!(error.contains("proj.weight.scale") && error.contains("[1, 3]"), "{error}");

        // Casts leave the codes and their scale alone, and a move takes both.
        store.to_kind(Kind::BFloat16).unwrap();
        assert_eq!(store.get("proj.bias").unwrap().kind(), Kind::BFloat16);
        assert_eq!(weight(&store), [1.0, -2.0, 127.0]);
        store.to_device(Device::Cpu).unwrap();
        assert_eq!(weight(&store), [1.0, -2.0, 127.0]);
    }

    #[test]
    fn handles_cross_threads() {
        fn is_send_and_sync<T: Send + Sync>() {}
        is_send_and_sync::<Param>();
        is_send_and_sync::<crate::nn::ParamStore>();
        is_send_and_sync::<crate::nn::Linear>();
    }
}
