//! Full sharding: each rank keeps an equal part of every unit, and gathers a unit only while it computes with it.
//!
//! A unit's parameters are the outputs of one node in the autograd graph, whose backward is the reduce-scatter of their
//! gradients. What operations save of a gathered parameter is replaced by a token, so that the memory goes after the
//! last use in the forward pass and comes back by one more gather when the backward pass first needs it.
//!
//! Method: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023; Rajbhandari et
//! al., "ZeRO", SC 2020. PyTorch hangs this on modules; here it hangs on parameters ([`Storage`]), so any code that
//! asks for a parameter takes part.

mod buffers;
mod gather;
mod gradient;
mod offload;
mod order;
mod reduce;
mod storage;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod tokens;
mod unit;
mod window;

use buffers::Buffers;
use offload::{Home, ReadAhead};
use order::{Order, Travel};
use reduce::Reducing;
use storage::Part;
use unit::UnitState;
use window::{Direct, Window};

use super::inventory::inventory;
use super::replicate::{check_same_model, copy_from};
use super::{Engine, Start};
use crate::error::{Error, Result, StateError};
use crate::group::Group;
use crate::nn::{Param, ParamStore};
use crate::session::{Concerns, ForwardScope, Join, Reduction};
use accelerate_core::config::{BackwardPrefetch, FullyShardedDataParallelPlugin, MixedPrecision, ShardingStrategy};
use accelerate_core::mesh::Axis;
use accelerate_core::plan::{Inventory, Placement, Plan, Unit, plan_sharded};
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Device, Kind, Tensor};
use torch_ext::autograd::is_grad_enabled;
use torch_ext::saved_tensors::push_saved_tensor_hooks;

/// The engine of a sharded model; clones are the same one.
#[derive(Clone)]
pub(super) struct Shard(Arc<Inner>);

struct Inner {
    /// All ranks.
    job: Group,
    /// The ranks that have the other parts: all of them, or under a hybrid strategy those of a group.
    group: Group,
    /// The ranks that have the same part, if there are others.
    replicas: Option<Group>,
    plan: Plan,
    /// Parameters that are whole on every rank, and whether they were to get gradients when the model was prepared.
    replicated: Vec<(Param, bool)>,
    /// Name of a parameter -> its unit, and its place in that.
    places: HashMap<String, (usize, usize)>,
    /// Sizes of the whole parameters, in the order of the inventory.
    shapes: Vec<Vec<i64>>,
    /// Where parameters are computed with.
    device: Device,
    home: Home,
    /// Where ranks read each other's parts out of memory.
    direct: Option<Direct>,
    /// Do gathered parameters go before the backward pass?
    frees_after_forward: bool,
    /// Are all gradients reduced in the backward pass that makes them, whoever asks to wait?
    always_reduces: bool,
    prefetch: Prefetch,
    state: Mutex<State>,
}

/// Which units are asked for before they are used.
struct Prefetch {
    forward: bool,
    backward: BackwardPrefetch,
    /// The order of forward passes may change.
    is_dynamic: bool,
}

struct State {
    units: Vec<UnitState>,
    buffers: Buffers,
    /// Storage of a gathered unit -> the unit.
    gathered: HashMap<usize, usize>,
    /// Gathered parameters never go.
    stays_whole: bool,
    phase: Phase,
    /// The unit that was asked for last in this forward pass.
    current: Option<usize>,
    /// Do backward passes reduce gradients over ranks?
    gradient_sync: bool,
    reducing: Reducing,
    forward_order: Order,
    backward_order: Order,
    /// While ranks may read each other's parts.
    window: Option<Window>,
    /// Of a model on a disk.
    read_ahead: Option<ReadAhead>,
    /// What travelled since ranks last compared: a gather and a reduce-scatter of equal sizes cannot be told from those of
    /// another unit by anyone else.
    travelled: Vec<Travel>,
    /// Gradients of [`Inner::replicated`] may not be averages yet.
    has_own_gradients: bool,
}

impl Prefetch {
    fn new(plugin: &FullyShardedDataParallelPlugin) -> Self {
        Self { forward: plugin.forward_prefetch, backward: plugin.backward_prefetch, is_dynamic: plugin.dynamic }
    }

    /// Is it an error if a forward pass uses units in another order than the one before?
    fn wants_one_order(&self) -> bool {
        (self.forward || self.backward != BackwardPrefetch::NoPrefetch) && !self.is_dynamic
    }
}

impl State {
    fn new(units: Vec<UnitState>, stays_whole: bool) -> Self {
        Self {
            units,
            buffers: Buffers::default(),
            gathered: HashMap::new(),
            stays_whole,
            phase: Phase::Other,
            current: None,
            gradient_sync: true,
            reducing: Reducing::default(),
            forward_order: Order::default(),
            backward_order: Order::default(),
            window: None,
            read_ahead: None,
            travelled: Vec::new(),
            has_own_gradients: false,
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Phase {
    /// In the forward pass of the prepared model.
    Forward,
    /// In a backward pass, or between passes.
    Other,
}

/// How often a unit's parameters and gradients travelled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) gathers: usize,
    pub(crate) reduce_scatters: usize,
}

impl Shard {
    /// Takes the parameters of `store` apart. Collective.
    pub(super) fn start(
        model: &Start<'_>,
        plugin: &FullyShardedDataParallelPlugin,
        mixed_precision: MixedPrecision,
    ) -> Result<Self> {
        let &Start { mesh, store, evaluation_mode, .. } = model;
        if let Some(holder) = store.tensor_holder() {
            return Err(StateError::TensorsElsewhere { holder }.into());
        }
        let job = mesh.job().clone();
        check_same_model(&job, store)?;
        let params = store.parameters();
        let mut inventory = inventory(store);
        plugin.check_modules(&inventory)?;
        if !evaluation_mode {
            inventory = plugin.kept(inventory, mixed_precision);
            warn_of_wider(&job, &inventory);
        }
        let plan = plan_sharded(&inventory, plugin, mesh.shape());
        check_memory(&job, &plan, plugin.max_memory)?;
        if plugin.sync_module_states && job.world_size() > 1 {
            copy_from(&job, store, 0)?;
        }
        let group = mesh.group(Axis::DpShard)?;
        let has_replicas = mesh.shape().num_replicas() > 1;
        let replicas = has_replicas.then(|| mesh.group(Axis::DpReplicate)).transpose()?;
        let device = params.first().map_or(Device::Cpu, |param| param.local().device());
        let home = Home::new(&job, plugin.params_offload(), &plan, device)?;
        let stays_whole = plugin.keeps_whole_parameters() || (group.world_size() == 1 && matches!(home, Home::Device));
        let policy = plugin.precision(mixed_precision);
        let new_unit = |content: &Unit| {
            let first = params[content.parameters[0]].local();
            let is_widened = plan.inventory.parameters[content.parameters[0]].original_element_bytes.is_some();
            let options = (if is_widened { Kind::Float } else { first.f_kind()? }, first.device());
            let members = content.parameters.iter().map(|&position| params[position].downgrade()).collect();
            UnitState::new(content, members, options, home.device(device), &group, stays_whole, policy)
        };
        let units = plan.units.iter().map(new_unit).collect::<Result<Vec<_>>>()?;
        let direct = if plugin.direct_all_gather { Direct::new(&group, &units, &home)? } else { None };
        let shard = Self(Arc::new(Inner {
            job,
            group,
            replicas,
            replicated: replicated(&plan, &params),
            places: places(&plan),
            shapes: params.iter().map(Param::shape).collect(),
            device,
            home,
            direct,
            frees_after_forward: !stays_whole && plugin.frees_after_forward(),
            always_reduces: plugin.sharding_strategy == ShardingStrategy::OptimizerStateAndGradients,
            prefetch: Prefetch::new(plugin),
            state: Mutex::new(State::new(units, stays_whole)),
            plan,
        }));
        shard.take_apart(store, plugin.sync_module_states)?;
        Ok(shard)
    }

    /// Keeps this rank's parts of all parameters, one after the other: a whole parameter goes when its part is there.
    /// Collective if parameters without memory are those of rank 0.
    fn take_apart(&self, store: &ParamStore, sync_module_states: bool) -> Result<()> {
        for param in store.parameters().iter().filter(|param| !param.is_deferred()) {
            self.take_over(param, &param.local())?;
        }
        store.initialise_each(|param, whole| {
            if sync_module_states {
                self.0.job.broadcast(&whole, 0)?;
            }
            match self.0.places.contains_key(param.name()) {
                true => self.take_over(param, &whole),
                false => param.set_replicated(whole),
            }
        })
    }

    /// Keeps this rank's part of a parameter.
    fn take_over(&self, param: &Param, whole: &Tensor) -> Result<()> {
        let Some(&(unit, member)) = self.0.places.get(param.name()) else { return Ok(()) };
        let part = self.unit(unit).part_of(member, self.0.group.rank());
        let own = whole.f_detach()?.f_reshape([-1])?.f_narrow(0, part.start as i64, part.len() as i64)?;
        let (mut local, is_last) = {
            let state = &mut self.lock().units[unit];
            state.num_missing -= 1;
            (state.locals[member].shallow_clone(), state.num_missing == 0)
        };
        tch::no_grad(|| local.f_copy_(&own))?;
        drop(param.replace_storage(Box::new(Part { shard: self.clone(), unit, member })));
        if is_last { self.put_away(unit) } else { Ok(()) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every statement leaves the state whole, so a panic elsewhere does not spoil it.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unit(&self, unit: usize) -> &Unit {
        &self.0.plan.units[unit]
    }

    /// How often each unit travelled so far, in the order of the plan.
    #[cfg(test)]
    pub(super) fn counts(&self) -> Vec<Counts> {
        self.lock().units.iter().map(|unit| unit.counts).collect()
    }
}

impl Engine for Shard {
    fn enter_forward(&self) -> Result<ForwardScope> {
        // Of passes that ended in an error or a panic.
        self.release_all();
        self.receive_what_is_left()?;
        self.abandon_backward()?;
        self.close_window()?;
        self.open_window()?;
        let mut state = self.lock();
        (state.phase, state.current) = (Phase::Forward, None);
        state.has_own_gradients |= is_grad_enabled();
        state.forward_order.abandon();
        state.backward_order.abandon();
        drop(state);
        // Otherwise graphs keep the memory of this pass to themselves.
        if !self.0.frees_after_forward && !self.lock().stays_whole {
            return Ok(None);
        }
        Ok(Some(push_saved_tensor_hooks(Rc::new(self.clone()))?))
    }

    fn leave_forward(&self, failure: Option<&Error>) -> Result<()> {
        self.lock().phase = Phase::Other;
        self.end_pass();
        if self.0.frees_after_forward || !is_grad_enabled() {
            self.release_all();
        } else {
            // The graph holds the memory until the backward pass is over.
            self.lock().units.iter_mut().for_each(|unit| unit.outputs = None);
        }
        // Ranks that have lost each other would only wait for the same deadline once more.
        if failure.is_some_and(|error| error.is_timeout() || error.is_peer_failure()) {
            return Ok(());
        }
        self.receive_what_is_left()?;
        if is_grad_enabled() && failure.is_none() {
            self.finish_forward_order()?;
        }
        // With gradients the backward pass follows, which compares for both.
        if is_grad_enabled() { Ok(()) } else { self.check_order() }
    }

    fn after_backward(&self) -> Result<()> {
        self.receive_what_is_left()?;
        self.release_all();
        self.lock().backward_order.finish();
        if self.lock().gradient_sync {
            self.average_replicated()?;
        } else {
            self.lock().has_own_gradients = true;
        }
        self.check_order()
    }

    fn complete_gradients(&self) -> Result<()> {
        self.reduce_what_is_left()?;
        if self.lock().has_own_gradients {
            self.average_replicated()?;
        }
        Ok(())
    }

    fn scale_unreduced(&self, concerns: Concerns<'_>, factor: &Tensor) -> Result<()> {
        self.each_unreduced(concerns, |gradient| {
            if let Some(gradient) = gradient {
                let _ = gradient.f_mul_(&factor.f_to_device(gradient.device())?)?;
            }
            Ok(())
        })
    }

    fn drop_unreduced(&self, concerns: Concerns<'_>) -> Result<()> {
        self.each_unreduced(concerns, |gradient| {
            drop(gradient.take());
            Ok(())
        })
    }

    fn abandon_forward(&self) {
        self.lock().phase = Phase::Other;
        self.end_pass();
        self.release_all();
    }

    fn before_step(&self) -> Result<()> {
        // What a pass that panicked has asked for would be taken for the values after the step.
        self.receive_what_is_left()?;
        self.complete_gradients()?;
        // Of backward passes that were not the accelerator's.
        self.check_order()?;
        self.close_window()?;
        let mut state = self.lock();
        if state.stays_whole {
            state.units.iter_mut().for_each(|unit| unit.is_stale = true);
        }
        Ok(())
    }

    fn set_gradient_sync(&self, sync: bool) -> bool {
        std::mem::replace(&mut self.lock().gradient_sync, sync || self.0.always_reduces)
    }

    fn trigger_sync_in_backward(&self) -> Result<()> {
        self.lock().gradient_sync = true;
        Ok(())
    }

    fn set_join(&self, join: Option<(Arc<Join>, usize)>) -> Result<()> {
        if join.is_none() {
            return Ok(());
        }
        let feature = "join_uneven_inputs of a sharded model".to_owned();
        let cure = "give all ranks as many batches: DataLoaderConfiguration.even_batches";
        Err(StateError::NotAvailable { feature, cure }.into())
    }

    fn follow(&self, _source: usize, _reduction: Reduction) -> Result<()> {
        Ok(())
    }

    fn plan(&self) -> Option<&Plan> {
        Some(&self.0.plan)
    }
}

impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shard").field("num_units", &self.0.plan.units.len()).finish_non_exhaustive()
    }
}

/// Fails on all ranks if the plan is too large for one of them. Collective.
fn check_memory(job: &Group, plan: &Plan, max_memory: Option<u64>) -> Result<()> {
    let own = max_memory.map_or(Ok(()), |bytes| plan.check_fits(bytes));
    let text = own.as_ref().map_or_else(ToString::to_string, |()| String::new());
    let texts = job.disagreement("prepare", &text)?.unwrap_or_default();
    own?;
    match texts.into_iter().enumerate().find(|(_, text)| !text.is_empty()) {
        Some((rank, reason)) => Err(StateError::PlanDoesNotFit { rank, reason }.into()),
        None => Ok(()),
    }
}

fn replicated(plan: &Plan, params: &[Param]) -> Vec<(Param, bool)> {
    let own = |(param, placement): (&Param, &Placement)| match placement {
        Placement::Shard { .. } => None,
        Placement::Replicate | Placement::Frozen => Some((param.clone(), *placement == Placement::Replicate)),
    };
    params.iter().zip(&plan.placements).filter_map(own).collect()
}

fn places(plan: &Plan) -> HashMap<String, (usize, usize)> {
    let members = |(unit, content): (usize, &Unit)| {
        let name = |&position: &usize| plan.inventory.parameters[position].name.clone();
        let names: Vec<String> = content.parameters.iter().map(name).collect();
        names.into_iter().enumerate().map(move |(member, name)| (name, (unit, member)))
    };
    plan.units.iter().enumerate().flat_map(members).collect()
}

/// Says which parameters are kept in another type than the program has given them.
fn warn_of_wider(job: &Group, inventory: &Inventory) {
    let widened = inventory.parameters.iter().filter(|entry| entry.original_element_bytes.is_some());
    let names: Vec<&str> = widened.map(|entry| entry.name.as_str()).collect();
    if job.rank() == 0 && !names.is_empty() {
        let names = names.join(", ");
        tracing::warn!("in mixed precision these parameters of 16 bits are kept and trained in float32: {names}");
    }
}
