//! Everything that was prepared, with its state.

use super::Engine;
use super::elsewhere::{StateReader, StateReaders};
use super::left_out::{KnownFingerprints, names_left_out};
use super::scaling::Scaling;
use crate::error::{NnError, Result, StateError};
use crate::nn::{Layout, Param, ParamStore, ShardedStateDict};
use accelerate_core::weight_files::listed;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use tch::Tensor;
use torch_ext::autograd::{gradient_of, set_gradient};

/// The state of one prepared object as it is saved: tensors by name, and all else as JSON.
///
/// ```
/// use accelerate::{Accelerator, nn::{Init, ParamStore}, optim::Sgd};
///
/// let accelerator = Accelerator::builder().cpu(true).build()?;
/// let store = ParamStore::new(accelerator.device());
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let _optimizer = accelerator.prepare(Sgd::new(&store, 0.1)?)?;
/// let states = accelerator.state_dict()?;
/// assert_eq!(states["optimizer"].values["param_groups"][0]["lr"], 0.1);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct ObjectState {
    /// By name. Copies, of this process's elements only where the object is sharded.
    pub tensors: BTreeMap<String, Tensor>,
    /// By the name of a parameter that is sharded, which of its elements are in `tensors`, flat.
    pub layouts: BTreeMap<String, Layout>,
    /// What is not a tensor.
    pub values: serde_json::Value,
}

impl ObjectState {
    /// The same tensors, in the same memory.
    pub(crate) fn shallow_clone(&self) -> Self {
        let tensors = self.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect();
        Self { tensors, layouts: self.layouts.clone(), values: self.values.clone() }
    }
}

/// Whatever has a state with which a run goes on (`Stateful` of `torch.distributed.checkpoint`).
///
/// No call is collective: each process gives and takes what it keeps itself.
pub trait Stateful: Send + Sync {
    /// Everything that is needed to go on later, as copies.
    ///
    /// # Errors
    /// Those of the object.
    fn state_dict(&self) -> Result<ObjectState>;

    /// As [`state_dict`](Self::state_dict), but the tensors may be those of the object itself: what is made of them is made
    /// before the object changes. Those of prepared objects whose state is offloaded are without memory. The default makes copies.
    ///
    /// # Errors
    /// Those of the object.
    fn state_views(&self) -> Result<ObjectState> {
        self.state_dict()
    }

    /// Those tensors of [`state_views`](Self::state_views) that are the object's own memory, by name. A checkpoint is read into
    /// them, and then given to [`take_state_dict`](Self::take_state_dict). None, unless the object says otherwise.
    ///
    /// # Errors
    /// Those of the object.
    fn state_places(&self) -> Result<BTreeMap<String, Tensor>> {
        Ok(BTreeMap::new())
    }

    /// Takes over what [`state_dict`](Self::state_dict) gave, on this process or on another one that held the same elements.
    ///
    /// # Errors
    /// The state does not fit; then nothing should have changed.
    fn load_state_dict(&self, state: &ObjectState) -> Result<()>;

    /// As [`load_state_dict`](Self::load_state_dict), but the object may keep the tensors, which nobody else has. The default
    /// copies them.
    ///
    /// # Errors
    /// As [`load_state_dict`](Self::load_state_dict).
    fn take_state_dict(&self, state: ObjectState) -> Result<()> {
        self.load_state_dict(&state)
    }

    /// Whether [`load_state_dict`](Self::load_state_dict) would take a state. Changes nothing, and copies no tensor. Where it is
    /// not known before, it is Ok, which is what it is unless the object says otherwise.
    ///
    /// # Errors
    /// The state does not fit.
    fn check_state_dict(&self, _state: &ObjectState) -> Result<()> {
        Ok(())
    }

    /// By the name of a parameter that is sharded, which of its elements this process keeps. Empty for whatever is whole.
    fn layouts(&self) -> BTreeMap<String, Layout> {
        BTreeMap::new()
    }
}

/// Before the name of a parameter, its gradient.
const HELD: &str = "grad.";
/// Before the name of a parameter, the gradient of this rank's batches.
const UNREDUCED: &str = "unreduced.";

/// The parameters of a prepared model and what keeps them in step.
#[derive(Debug)]
pub(crate) struct PreparedParameters {
    pub(crate) store: ParamStore,
    pub(crate) engine: Arc<dyn Engine>,
    /// Of a model that computes in FP8 with delayed scaling.
    pub(crate) scaling: Option<Arc<dyn Scaling>>,
    /// Those that refuse to be stepped by an optimizer that was not prepared.
    trained: Mutex<Vec<Param>>,
    /// Have ranks trained them without averaging gradients, so that each may have others?
    trained_alone: AtomicBool,
    fingerprints: Mutex<KnownFingerprints>,
}

impl PreparedParameters {
    /// A model that is only evaluated is nobody's concern.
    pub(crate) fn new(store: ParamStore, engine: Arc<dyn Engine>, evaluation_mode: bool) -> Self {
        let trained = if evaluation_mode { Vec::new() } else { store.parameters() };
        trained.iter().for_each(Param::enter_prepared_model);
        Self {
            store,
            engine,
            scaling: None,
            trained: Mutex::new(trained),
            trained_alone: AtomicBool::new(false),
            fingerprints: Mutex::default(),
        }
    }

    /// The same with scales that follow backward passes.
    pub(crate) fn with_scaling(self, scaling: Option<Arc<dyn Scaling>>) -> Self {
        let mut parameters = self;
        parameters.scaling = scaling;
        parameters
    }

    /// From now on each rank trains by itself.
    pub(crate) fn train_alone(&self) {
        self.trained_alone.store(true, Ordering::Relaxed);
    }

    /// Has this rank trained by itself at any time? Then the state of optimizers stays the rank's own.
    pub(crate) fn was_trained_alone(&self) -> bool {
        self.trained_alone.load(Ordering::Relaxed) || self.engine.has_stepped_alone()
    }

    /// Those of frozen parameters that have been computed.
    pub(super) fn known_fingerprints(&self) -> MutexGuard<'_, KnownFingerprints> {
        self.fingerprints.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The gradients that wait for a step on this rank, in their own memory: those that parameters hold, by `grad.` and the name of the
    /// parameter, and those that ranks have not reduced, by `unreduced.` and the name.
    pub(crate) fn gradients(&self) -> Result<BTreeMap<String, Tensor>> {
        let mut gradients = BTreeMap::new();
        for param in self.store.parameters() {
            if let Some(gradient) = gradient_of(&param.local())? {
                gradients.insert(format!("{HELD}{}", param.name()), gradient.f_detach()?);
            }
        }
        for (name, gradient) in self.engine.unreduced()? {
            gradients.insert(format!("{UNREDUCED}{name}"), gradient);
        }
        Ok(gradients)
    }

    /// Does each of these [`gradients`](Self::gradients) fit its parameter?
    pub(crate) fn takes_gradients(&self, saved: &BTreeMap<String, Tensor>) -> bool {
        let shapes = |param: &Param| {
            let held = (format!("{HELD}{}", param.name()), param.local().size());
            [held, (format!("{UNREDUCED}{}", param.name()), param.shape())]
        };
        let shapes: BTreeMap<String, Vec<i64>> = self.store.parameters().iter().flat_map(shapes).collect();
        saved.iter().all(|(name, gradient)| shapes.get(name) == Some(&gradient.size()))
    }

    /// Puts these [`gradients`](Self::gradients) in place of those that are there.
    pub(crate) fn load_gradients(&self, saved: &BTreeMap<String, Tensor>) -> Result<()> {
        self.engine.drop_unreduced(&|_| true)?;
        for param in self.store.parameters() {
            let local = param.local();
            let own = saved.get(&format!("{HELD}{}", param.name()));
            let own = own.map(|own| own.f_to_device(local.device())).transpose()?;
            set_gradient(&local, own.as_ref())?;
        }
        if saved.is_empty() {
            return Ok(());
        }
        let unreduced = saved.iter().filter_map(|(name, it)| Some((name.strip_prefix(UNREDUCED)?, it)));
        self.engine.reopen_window(&unreduced.collect())
    }

    /// From now on the parameters are as they were before `prepare`.
    pub(crate) fn release(&self) {
        let trained = std::mem::take(&mut *self.trained.lock().unwrap_or_else(PoisonError::into_inner));
        trained.iter().for_each(Param::leave_prepared_model);
    }
}

impl Drop for PreparedParameters {
    fn drop(&mut self) {
        self.release();
    }
}

impl Stateful for PreparedParameters {
    fn state_dict(&self) -> Result<ObjectState> {
        let ShardedStateDict { tensors, layouts } = self.store.sharded_state_dict()?;
        Ok(ObjectState { tensors, layouts, values: self.values()? })
    }

    fn state_views(&self) -> Result<ObjectState> {
        let ShardedStateDict { tensors, layouts } = self.store.sharded_state_views()?;
        Ok(ObjectState { tensors, layouts, values: self.values()? })
    }

    fn state_places(&self) -> Result<BTreeMap<String, Tensor>> {
        let resident = self.store.persistent().into_iter().filter(|param| !param.is_offloaded());
        resident.map(|param| Ok((param.name().to_owned(), param.local().f_detach()?))).collect()
    }

    fn load_state_dict(&self, state: &ObjectState) -> Result<()> {
        self.store.load_shards_but(&names_left_out(&state.values), &[shards_of(state)])?;
        self.engine.load_state(&state.values)?;
        self.load_scales(&state.values);
        Ok(())
    }

    fn check_state_dict(&self, state: &ObjectState) -> Result<()> {
        self.store.check_shards_but(&names_left_out(&state.values), &[shards_of(state)])
    }

    fn layouts(&self) -> BTreeMap<String, Layout> {
        let layout = |param: &Param| Some((param.name().to_owned(), param.shard_layout()?));
        self.store.persistent().iter().filter_map(layout).collect()
    }
}

impl StateReader for PreparedParameters {
    fn read_state(&self, wanted: &[(&str, &Tensor)]) -> Result<()> {
        let params: BTreeMap<String, Param> =
            self.store.persistent().into_iter().map(|param| (param.name().to_owned(), param)).collect();
        let _no_grad = tch::no_grad_guard();
        // A unit is loaded once for all of its parameters that are wanted one after the other.
        let (mut unit, mut _resident) = (None, None);
        for (name, place) in wanted {
            let Some(param) = params.get(*name) else {
                return Err(NnError::PartsMismatch { problems: vec![format!("there is no \"{name}\"")] }.into());
            };
            let own = param.unit().map(|member| member.unit);
            if unit.is_none() || unit != own {
                drop(_resident.take());
                (unit, _resident) = (own, param.load()?);
            }
            place.shallow_clone().f_copy_(&param.stored_values()?.f_view(&*place.size())?)?;
        }
        Ok(())
    }
}

fn shards_of(state: &ObjectState) -> ShardedStateDict {
    let ObjectState { tensors, layouts, .. } = state.shallow_clone();
    ShardedStateDict { tensors, layouts }
}

/// What a session asks of a prepared optimizer.
pub(crate) trait PreparedOptimizer: Stateful + StateReader {
    fn name(&self) -> &'static str;

    /// Tensors of its state with numbers in place of codes in blocks.
    fn dequantized(&self, tensors: BTreeMap<String, Tensor>) -> Result<BTreeMap<String, Tensor>>;

    /// Is one of these parameters among its own?
    fn trains_any_of(&self, params: &[Param]) -> bool;

    /// A backward pass of the accelerator's has run.
    fn gradients_made(&self);

    /// Has a step used the gradients, and no backward pass made new ones since?
    fn are_gradients_used(&self) -> bool;

    /// Are there gradients of a backward pass that no step has used?
    fn has_fresh_gradients(&self) -> bool;

    /// Divides its gradients by the loss scale, once in a training step; nothing without loss scaling.
    fn unscale(&self) -> Result<()>;

    /// Did the last step leave the parameters alone because of an overflow?
    fn step_was_skipped(&self) -> bool;

    /// Number of steps, skipped ones included.
    fn num_steps(&self) -> usize;
}

/// A prepared object. It is the program's own, and what the program has dropped or taken back is not prepared any more: an
/// optimizer that lived on in here would divide its gradients by the loss scale beside the one that was made after it.
#[derive(Clone)]
pub(crate) enum Object {
    Model(Weak<PreparedParameters>),
    Optimizer(Weak<dyn PreparedOptimizer>),
    Scheduler(Weak<dyn Stateful>),
    DataLoader(Weak<dyn Stateful>),
    /// The accelerator's, which nobody else can drop.
    GradScaler(Arc<dyn Stateful>),
    /// The user's own, kept for checkpoints.
    Registered(Arc<dyn Stateful>),
}

impl Object {
    fn kind(&self) -> &'static str {
        match self {
            Self::Model(_) => "model",
            Self::Optimizer(_) => "optimizer",
            Self::Scheduler(_) => "scheduler",
            Self::DataLoader(_) => "dataloader",
            Self::GradScaler(_) => "scaler",
            Self::Registered(_) => "custom_checkpoint",
        }
    }

    /// Which objects take over their states first: those of which a copy is small, so that they can have theirs back when a
    /// later one does not take its own; then optimizers; models last, for they know beforehand what they take.
    fn turn(&self) -> Turn {
        match self {
            Self::Model(_) => Turn::Model,
            Self::Optimizer(_) => Turn::Optimizer,
            _ => Turn::Small,
        }
    }

    /// The name of the object of this kind with this number, as the reference calls its file.
    fn name(&self, number: usize) -> String {
        match (self, number) {
            (Self::Registered(_), _) | (_, 1..) => format!("{}_{number}", self.kind()),
            (_, 0) => self.kind().to_owned(),
        }
    }

    /// `None` for one that is gone.
    fn stateful(&self) -> Option<Arc<dyn Stateful>> {
        match self {
            Self::Model(model) => Some(model.upgrade()?),
            Self::Optimizer(optimizer) => Some(optimizer.upgrade()?),
            Self::Scheduler(object) | Self::DataLoader(object) => object.upgrade(),
            Self::GradScaler(object) | Self::Registered(object) => Some(Arc::clone(object)),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Turn {
    Small,
    Optimizer,
    Model,
}

/// Prepared objects in the order of `prepare`. Each is kept alive only while it is looked at.
#[derive(Clone, Default)]
pub(crate) struct Objects(Arc<[Object]>);

impl Objects {
    pub(crate) fn models(&self) -> impl Iterator<Item = Arc<PreparedParameters>> {
        self.0.iter().filter_map(|object| match object {
            Object::Model(model) => model.upgrade(),
            _ => None,
        })
    }

    pub(crate) fn optimizers(&self) -> impl Iterator<Item = Arc<dyn PreparedOptimizer>> {
        self.0.iter().filter_map(|object| match object {
            Object::Optimizer(optimizer) => optimizer.upgrade(),
            _ => None,
        })
    }

    /// The models with their names, as [`Objects::state_dict`] has them.
    pub(crate) fn named_models(&self) -> impl Iterator<Item = (String, Arc<PreparedParameters>)> {
        numbered("model", self.models())
    }

    /// The optimizers with their names, as [`Objects::state_dict`] has them.
    pub(crate) fn named_optimizers(&self) -> impl Iterator<Item = (String, Arc<dyn PreparedOptimizer>)> {
        numbered("optimizer", self.optimizers())
    }

    /// With their names: the kind, and from the second of a kind on its number, as in `optimizer_1`.
    fn named(&self) -> BTreeMap<String, Arc<dyn Stateful>> {
        self.named_turns().into_iter().map(|(_, name, object)| (name, object)).collect()
    }

    fn named_turns(&self) -> Vec<(Turn, String, Arc<dyn Stateful>)> {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        let name = |object: &Object| {
            let stateful = object.stateful()?;
            let count = counts.entry(object.kind()).or_default();
            let name = object.name(*count);
            *count += 1;
            Some((object.turn(), name, stateful))
        };
        self.0.iter().filter_map(name).collect()
    }

    /// Makes numbers of the parts of optimizers' states that are codes in blocks, which end where a part does: whole tensors are made
    /// of numbers.
    pub(crate) fn dequantize_parts(&self, states: &mut BTreeMap<String, ObjectState>) -> Result<()> {
        for (name, optimizer) in self.named_optimizers() {
            let Some(ObjectState { tensors, layouts, .. }) = states.get_mut(&name) else { continue };
            let is_part = |key: &str| key.split_once('.').is_some_and(|(_, param)| layouts.contains_key(param));
            let (parts, whole): (BTreeMap<_, _>, BTreeMap<_, _>) =
                std::mem::take(tensors).into_iter().partition(|(key, _)| is_part(key));
            *tensors = optimizer.dequantized(parts).map_err(|error| error.context(name))?;
            tensors.extend(whole);
        }
        Ok(())
    }

    /// Which elements of sharded parameters each of them has, by name.
    pub(crate) fn layouts(&self) -> BTreeMap<String, BTreeMap<String, Layout>> {
        self.named().into_iter().map(|(name, object)| (name, object.layouts())).collect()
    }

    /// The same of models alone; null where no model is sharded.
    pub(crate) fn model_layouts(&self) -> serde_json::Value {
        let layouts = self.named_models().map(|(name, model)| (name, model.layouts()));
        let layouts: BTreeMap<_, _> = layouts.filter(|(_, layouts)| !layouts.is_empty()).collect();
        if layouts.is_empty() { serde_json::Value::Null } else { serde_json::json!(layouts) }
    }

    /// The states of all, by name.
    pub(crate) fn state_dict(&self) -> Result<BTreeMap<String, ObjectState>> {
        self.states(&BTreeSet::new(), |object| object.state_dict())
    }

    /// Those whose states may have tensors without memory.
    pub(crate) fn state_readers(&self) -> StateReaders {
        let models = self.named_models().map(|(name, model)| (name, model as Arc<dyn StateReader>));
        models.chain(self.named_optimizers().map(|(name, own)| (name, own as Arc<dyn StateReader>))).collect()
    }

    /// The states of all but those `without`, by name, in the memory of the objects themselves where they allow it.
    pub(crate) fn state_views(&self, without: &BTreeSet<String>) -> Result<BTreeMap<String, ObjectState>> {
        self.states(without, |object| object.state_views())
    }

    /// Into what a checkpoint is read where it lies, of all but those `without`, by the names of objects and tensors.
    pub(crate) fn state_places(
        &self,
        without: &BTreeSet<String>,
    ) -> Result<BTreeMap<String, BTreeMap<String, Tensor>>> {
        self.states(without, |object| object.state_places())
    }

    fn states<T>(
        &self,
        without: &BTreeSet<String>,
        of: impl Fn(&dyn Stateful) -> Result<T>,
    ) -> Result<BTreeMap<String, T>> {
        let state = |(name, object): (String, Arc<dyn Stateful>)| match of(&*object) {
            Ok(state) => Ok((name, state)),
            Err(error) => Err(error.context(name)),
        };
        self.named().into_iter().filter(|(name, _)| !without.contains(name)).map(state).collect()
    }

    /// Gives every object its state, or none, but for those `without`.
    ///
    /// # Errors
    /// States of other objects. Those of the objects, by name. Then nothing is changed.
    pub(crate) fn load_state_dict(
        &self,
        states: &BTreeMap<String, ObjectState>,
        without: &BTreeSet<String>,
    ) -> Result<()> {
        self.check_state_dict(states, without)?;
        self.in_turn(without, |name, object| states.get(name).map_or(Ok(()), |state| object.load_state_dict(state)))
    }

    /// The same with states that nobody else has: objects may keep their tensors, and the others are freed one after the other.
    pub(crate) fn take_state_dict(
        &self,
        mut states: BTreeMap<String, ObjectState>,
        without: &BTreeSet<String>,
    ) -> Result<()> {
        self.check_state_dict(&states, without)?;
        self.in_turn(without, |name, object| states.remove(name).map_or(Ok(()), |state| object.take_state_dict(state)))
    }

    fn check_state_dict(&self, states: &BTreeMap<String, ObjectState>, without: &BTreeSet<String>) -> Result<()> {
        let mut objects = self.named();
        objects.retain(|name, _| !without.contains(name));
        check_same_objects(objects.keys().map(String::as_str), states.keys().map(String::as_str))?;
        objects.into_iter().try_for_each(|(name, object)| {
            let checked = states.get(&name).map_or(Ok(()), |state| object.check_state_dict(state));
            checked.map_err(|error| error.context(name))
        })
    }

    /// Loads all objects, in their turns. Where one of them fails, those before it get back what they had.
    fn in_turn(
        &self,
        without: &BTreeSet<String>,
        mut load: impl FnMut(&str, &dyn Stateful) -> Result<()>,
    ) -> Result<()> {
        let mut objects = self.named_turns();
        objects.retain(|(_, name, _)| !without.contains(name));
        objects.sort_by_key(|(turn, ..)| *turn);
        let last_optimizer = objects.iter().rposition(|(turn, ..)| *turn == Turn::Optimizer);
        let mut undo = Vec::new();
        for (position, (turn, name, object)) in objects.iter().enumerate() {
            // Behind the last optimizer nothing fails any more, and a copy would cost as much memory as the object. What
            // cannot be saved now, such as an infinity, is no reason not to load.
            let before = match *turn == Turn::Model || Some(position) == last_optimizer {
                true => None,
                false => object.state_dict().ok(),
            };
            if let Err(error) = load(name, &**object) {
                take_back(undo);
                return Err(error.context(name));
            }
            undo.extend(before.map(|before| (object, before)));
        }
        Ok(())
    }
}

/// Objects of one kind with their names: the kind, and from the second on their number.
fn numbered<T>(kind: &str, objects: impl Iterator<Item = T>) -> impl Iterator<Item = (String, T)> {
    let name = move |number: usize| if number == 0 { kind.to_owned() } else { format!("{kind}_{number}") };
    objects.enumerate().map(move |(number, object)| (name(number), object))
}

/// Gives objects the states that they had. The error that led here is the one to report.
fn take_back(undo: Vec<(&Arc<dyn Stateful>, ObjectState)>) {
    for (object, before) in undo.into_iter().rev() {
        let _ = object.load_state_dict(&before);
    }
}

/// How long a list of names in a message may be.
const MOST_NAME_BYTES: usize = 500;

/// Fails unless the objects that were prepared are those of which there are states.
pub(crate) fn check_same_objects<'a>(
    prepared: impl Iterator<Item = &'a str>,
    saved: impl Iterator<Item = &'a str>,
) -> Result<()> {
    let (prepared, saved): (BTreeSet<&str>, BTreeSet<&str>) = (prepared.collect(), saved.collect());
    if prepared == saved {
        return Ok(());
    }
    let list = |names: BTreeSet<&str>| listed(names, MOST_NAME_BYTES);
    let (missing, unexpected) = (list(&prepared - &saved), list(&saved - &prepared));
    Err(StateError::OtherObjects { missing, unexpected }.into())
}

/// What a session has prepared. Replaced as a whole, so that a step borrows the list without copying it.
#[derive(Default)]
pub(super) struct Registry(Mutex<Objects>);

impl Registry {
    fn lock(&self) -> MutexGuard<'_, Objects> {
        // A shared pointer: whole after every statement, also where another thread panicked.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn objects(&self) -> Objects {
        self.lock().clone()
    }

    /// The places of objects that are gone go, too.
    pub(super) fn add(&self, object: Object) {
        let mut objects = self.lock();
        let still_there = objects.0.iter().filter(|object| object.stateful().is_some()).cloned();
        *objects = Objects(still_there.chain([object]).collect());
    }

    pub(super) fn clear(&self) -> Objects {
        std::mem::take(&mut *self.lock())
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.objects().named().into_keys()).finish()
    }
}
