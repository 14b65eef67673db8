//! Full sharding: each rank keeps an equal shard of every unit, and gathers a unit only while it computes with it.
//!
//! A unit's parameters are the outputs of one node in the autograd graph, whose backward is the reduce-scatter of their
//! gradients. What operations save of an unsharded parameter is replaced by a token, so that the memory goes after the
//! last use in the forward pass and comes back by one more gather when the backward pass first needs it.
//!
//! Each concern has an owner, with its own state behind its own lock:
//!
//! - [`Units`]: shards, unsharded units and their memory, what passes see of them;
//! - [`Prefetcher`]: the order of use, and with it what is gathered ahead;
//! - [`GradientReducer`]: gradients on their way, and those that have not been reduced;
//! - [`Offloader`]: shards that are on a disk between uses;
//! - [`IssuedCollectives`]: what ranks compare to find out that they went different ways;
//! - [`ShardTransport`]: how bytes come from other ranks, sent or read out of their memory.
//!
//! Method: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023; Rajbhandari et
//! al., "ZeRO", SC 2020. PyTorch hangs this on modules; here it hangs on parameters ([`Storage`](crate::nn::Storage)), so any
//! code that asks for a parameter takes part.

mod buffers;
mod codes;
mod gather;
mod gradient;
mod issued;
mod offload;
mod parts;
mod prefetch;
mod reduce;
mod storage;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod tokens;
mod units;

use issued::IssuedCollectives;
use offload::{OffloadPlacement, Offloader};
use parts::shard_parts;
use prefetch::Prefetcher;
use reduce::{GradientReducer, ReductionRanks};
use storage::ShardedStorage;
use units::{Common, UnitState, Units};

use super::inventory::{dividable, inventory};
use super::replicate::{check_same_model, copy_from};
use super::{Engine, Start, TensorParallel};
use crate::error::{Error, Result, StateError};
use crate::group::{Group, ShardTransport};
use crate::messages;
use crate::nn::{Param, ParamStore, WeakParam, flat_elements};
use crate::session::{Concerns, ForwardScope, Join, Pass};
use accelerate_core::config::{FullyShardedSettings, MixedPrecision, ShardingStrategy};
use accelerate_core::mesh::{Axis, Mesh};
use accelerate_core::plan::{Inventory, Placement, Plan, Unit, plan_sharded};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use tch::{Device, Kind, Tensor};
use torch_ext::autograd::is_grad_enabled;
use torch_ext::saved_tensors::push_saved_tensor_hooks;
use torch_ext::scalar;

/// The engine of a sharded model; clones are the same one.
#[derive(Clone)]
pub(super) struct FullyShard(Arc<Inner>);

struct Inner {
    /// The ranks that read different rows: all of them, unless some divide each layer.
    data: Group,
    /// The ranks that have the other shards: all of them, or under a hybrid strategy those of a group.
    transport: ShardTransport,
    units: Arc<Units>,
    prefetcher: Prefetcher,
    reducer: Arc<GradientReducer>,
    offloader: Arc<Offloader>,
    issued: Arc<IssuedCollectives>,
    tensor_parallel: Option<TensorParallel>,
    /// Do unsharded parameters go before the backward pass?
    frees_after_forward: bool,
}

/// Name of a parameter -> its unit, and its place in that.
type Places = HashMap<String, (usize, usize)>;

impl FullyShard {
    /// Shards the parameters of `store`. Collective.
    pub(super) fn start(
        model: &Start<'_>,
        plugin: &FullyShardedSettings,
        mixed_precision: MixedPrecision,
    ) -> Result<Self> {
        let &Start { mesh, store, .. } = model;
        let plan = agree_on_plan(model, plugin, mixed_precision)?;
        let (data, params) = (mesh.group(Mesh::GRADIENTS)?, dividable(store));
        let group = mesh.group(Mesh::SHARD)?;
        let has_replicas = mesh.shape().num_replicas() > 1;
        let replicas = has_replicas.then(|| mesh.group(&[Axis::DpReplicate])).transpose()?;
        let device = params.first().map_or(Device::Cpu, |param| param.local().device());
        let placement = OffloadPlacement::new(mesh.job(), plugin.params_offload(), &plan, device)?;
        let is_on_device = matches!(placement, OffloadPlacement::Device);
        let stays_unsharded = plugin.keeps_full_parameters() || (group.world_size() == 1 && is_on_device);
        let shard_device = placement.device(device);
        let common = Common {
            rank: group.rank(),
            world_size: group.world_size(),
            device,
            shard_device,
            stays_unsharded,
            policy: plugin.precision(mixed_precision),
        };
        let units = new_units(&plan, &params, &common)?;
        // What peers read they compute with as it is.
        let can_read = plugin.direct_all_gather && is_on_device && units.iter().all(UnitState::is_readable);
        let shards = if can_read { units.iter().map(UnitState::shard).collect() } else { Vec::new() };
        let transport = ShardTransport::new(&group, shards)?;
        let ranks = ReductionRanks {
            data: data.clone(),
            replicas,
            replicated: replicated(&plan, &params),
            always_reduces: plugin.sharding_strategy == ShardingStrategy::OptimizerStateAndGradients,
        };
        let (places, members) = (places(&plan), members(&plan, &params));
        let units = Arc::new(Units::new(plan, params.iter().map(Param::shape).collect(), &common, units));
        let issued = Arc::new(IssuedCollectives::default());
        let reducer = GradientReducer::new(
            Arc::clone(&units),
            transport.clone(),
            Arc::clone(&issued),
            ranks,
            members,
            shard_device,
        );
        let engine = Self(Arc::new(Inner {
            data,
            transport,
            prefetcher: Prefetcher::new(plugin),
            reducer: Arc::new(reducer),
            offloader: Arc::new(Offloader::new(placement, Arc::clone(&units))),
            issued,
            tensor_parallel: model.tensor_parallel.cloned(),
            frees_after_forward: !stays_unsharded && plugin.frees_after_forward(),
            units,
        }));
        engine.shard_parameters(store, &places, plugin.sync_module_states)?;
        Ok(engine)
    }

    /// Keeps this rank's shards of all parameters, one after the other: a full parameter goes when its shard is there.
    /// Collective if parameters without memory are those of rank 0, or some are stored as several tensors.
    fn shard_parameters(&self, store: &ParamStore, places: &Places, sync_module_states: bool) -> Result<()> {
        for param in store.own_parameters().iter().filter(|param| !param.is_deferred()) {
            self.shard_parameter(param, &param.local(), places)?;
        }
        store.initialise_each(|param, full| {
            if sync_module_states {
                self.0.data.broadcast(&full, 0)?;
            }
            match places.contains_key(param.name()) {
                true => self.shard_parameter(param, &full, places),
                false => param.set_replicated(full),
            }
        })?;
        let stays_whole = self.0.units.stays_unsharded;
        if stays_whole { Ok(()) } else { shard_parts(self.0.transport.group(), store) }
    }

    /// Keeps this rank's shard of a parameter.
    fn shard_parameter(&self, param: &Param, full: &Tensor, places: &Places) -> Result<()> {
        let Some(&(unit, member)) = places.get(param.name()) else { return Ok(()) };
        let units = &self.0.units;
        let own = flat_elements(&full.f_detach()?, &units.layout(unit, member))?;
        let (mut local, is_last) = units.local_to_fill(unit, member);
        tch::no_grad(|| local.f_copy_(&own))?;
        drop(param.replace_storage(Box::new(ShardedStorage { engine: self.clone(), unit, member })));
        if is_last { self.0.offloader.store(unit) } else { Ok(()) }
    }

    /// Opens the time in which peers may read this rank's shards.
    fn open_shards(&self) -> Result<()> {
        self.0.transport.open(|| self.0.units.versions())
    }

    /// Closes it, before shards change.
    ///
    /// # Errors
    /// They have been changed already.
    fn close_shards(&self) -> Result<()> {
        let Some(opened) = self.0.transport.close()? else { return Ok(()) };
        let changed = self.0.units.versions()?.iter().zip(&opened).position(|(now, opened)| now != opened);
        match changed {
            Some(unit) => Err(StateError::ChangedWhileRead { unit: self.0.units.label(unit) }.into()),
            None => Ok(()),
        }
    }

    /// Before somebody changes parameters outside of a step.
    fn before_change(&self) -> Result<()> {
        self.close_shards()?;
        self.0.units.forget_arriving()
    }

    /// Fails on every rank unless all ranks have gathered and reduced the same units in the same order. Collective if
    /// anything was issued.
    fn check_order(&self) -> Result<()> {
        let Some(compared) = self.0.issued.compare(&self.0.data, &self.0.units)? else { return Ok(()) };
        // Everyone is here, so nobody reads shards any more.
        let closed = self.close_shards();
        compared.and(closed)
    }
}

impl Engine for FullyShard {
    fn enter_forward(&self) -> Result<ForwardScope> {
        // Of passes that ended in an error or a panic.
        self.0.units.release_all();
        self.0.units.forget_arriving()?;
        self.0.reducer.abandon_backward()?;
        self.close_shards()?;
        self.open_shards()?;
        self.0.units.begin_forward();
        if is_grad_enabled() {
            self.0.reducer.expect_own_gradients();
        }
        self.0.prefetcher.abandon();
        // Otherwise graphs keep the memory of this pass to themselves.
        if !self.0.frees_after_forward && !self.0.units.stays_unsharded {
            return Ok(None);
        }
        Ok(Some(push_saved_tensor_hooks(Rc::new(self.clone()))?))
    }

    fn leave_forward(&self, failure: Option<&Error>) -> Result<()> {
        self.0.units.end_forward();
        self.0.transport.end_pass();
        if self.0.frees_after_forward || !is_grad_enabled() {
            self.0.units.release_all();
        } else {
            // The graph holds the memory until the backward pass is over.
            self.0.units.drop_outputs();
        }
        // Ranks that have lost each other would only wait for the same deadline once more.
        if failure.is_some_and(|error| error.is_timeout() || error.is_peer_failure()) {
            return Ok(());
        }
        self.0.units.forget_arriving()?;
        if is_grad_enabled() && failure.is_none() {
            self.0.prefetcher.finish_forward(&self.0.units)?;
        }
        // With gradients the backward pass follows, which compares for both.
        if is_grad_enabled() { Ok(()) } else { self.check_order() }
    }

    fn after_backward(&self) -> Result<()> {
        self.0.units.forget_arriving()?;
        self.0.units.release_all();
        self.0.prefetcher.finish_backward();
        self.0.reducer.after_backward()?;
        self.check_order()
    }

    fn complete_gradients(&self) -> Result<()> {
        self.0.reducer.complete()
    }

    fn scale_unreduced(&self, factor: f64) -> Result<()> {
        self.0.reducer.each_unreduced(&|_| true, |gradient| {
            if let Some(gradient) = gradient {
                scalar::mul_(gradient, factor)?;
            }
            Ok(())
        })
    }

    fn drop_unreduced(&self, concerns: Concerns<'_>) -> Result<()> {
        self.0.reducer.each_unreduced(concerns, |gradient| {
            drop(gradient.take());
            Ok(())
        })
    }

    fn unreduced(&self) -> Result<Vec<(String, Tensor)>> {
        self.0.reducer.unreduced()
    }

    fn reopen_window(&self, unreduced: &BTreeMap<&str, &Tensor>) -> Result<()> {
        self.0.reducer.reopen_window(unreduced)
    }

    fn abandon_forward(&self) {
        self.0.units.end_forward();
        self.0.transport.end_pass();
        self.0.units.release_all();
    }

    fn before_step(&self) -> Result<()> {
        // What a pass that panicked has asked for would be taken for the values after the step.
        self.0.units.forget_arriving()?;
        self.complete_gradients()?;
        self.0.tensor_parallel.as_ref().map_or(Ok(()), TensorParallel::check_gradients)?;
        // Of backward passes that were not the accelerator's.
        self.check_order()?;
        self.close_shards()?;
        self.0.units.set_stale();
        Ok(())
    }

    fn set_gradient_sync(&self, sync: bool) -> bool {
        self.0.reducer.set_gradient_sync(sync)
    }

    fn trigger_sync_in_backward(&self) -> Result<()> {
        self.0.reducer.reduce_in_one_backward();
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

    fn follow(&self, _source: usize, _pass: Pass) -> Result<()> {
        Ok(())
    }

    fn plan(&self) -> Option<&Plan> {
        Some(&self.0.units.plan)
    }
}

impl fmt::Debug for FullyShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FullyShard").field("num_units", &self.0.units.len()).finish_non_exhaustive()
    }
}

/// Decides how the parameters of `store` are sharded, and makes them equal on all ranks. Collective: fails on all ranks if they
/// have different models, or if there is not enough memory on one.
fn agree_on_plan(model: &Start<'_>, plugin: &FullyShardedSettings, mixed_precision: MixedPrecision) -> Result<Plan> {
    let &Start { mesh, store, evaluation_mode, .. } = model;
    // Ranks that divide layers may have slices of different sizes.
    let data = &mesh.group(Mesh::GRADIENTS)?;
    if let Some(holder) = store.tensor_holder() {
        return Err(StateError::TensorsElsewhere { holder }.into());
    }
    check_same_model(data, store)?;
    let mut inventory = inventory(store);
    plugin.check_modules(&inventory)?;
    if plugin.precision(mixed_precision).param_dtype.is_none() {
        // All are gathered in their own element type, so none needs a unit of its own for it.
        inventory.parameters.iter_mut().for_each(|entry| entry.keeps_dtype = false);
    }
    if !evaluation_mode {
        inventory = plugin.kept(inventory, mixed_precision);
        warn_of_wider(mesh.job(), &inventory);
    }
    let plan = plan_sharded(&inventory, plugin, mesh.shape().data());
    let fits = plugin.max_memory.map_or(Ok(()), |bytes| Ok(plan.check_fits(bytes)?));
    mesh.job().agree_on_success("keeping a shard of the model", fits)?;
    if plugin.sync_module_states && data.world_size() > 1 {
        copy_from(data, store, 0)?;
    }
    Ok(plan)
}

/// Room for this rank's shards of all units.
fn new_units(plan: &Plan, params: &[Param], common: &Common) -> Result<Vec<UnitState>> {
    let new_unit = |content: &Unit| {
        let first = content.parameters[0];
        let is_widened = plan.inventory.parameters[first].original_element_bytes.is_some();
        let kind = if is_widened { Kind::Float } else { params[first].local().f_kind()? };
        UnitState::new(content, kind, common)
    };
    plan.units.iter().map(new_unit).collect()
}

/// The parameters of each unit, whose storages keep the engine.
fn members(plan: &Plan, params: &[Param]) -> Vec<Vec<WeakParam>> {
    let of_unit = |unit: &Unit| unit.parameters.iter().map(|&position| params[position].downgrade()).collect();
    plan.units.iter().map(of_unit).collect()
}

fn replicated(plan: &Plan, params: &[Param]) -> Vec<(Param, bool)> {
    let own = |(param, placement): (&Param, &Placement)| match placement {
        Placement::Shard { .. } => None,
        Placement::Replicate | Placement::Frozen => Some((param.clone(), *placement == Placement::Replicate)),
    };
    params.iter().zip(&plan.placements).filter_map(own).collect()
}

fn places(plan: &Plan) -> Places {
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
        messages::warning!("in mixed precision these parameters of 16 bits are kept and trained in float32: {names}");
    }
}
