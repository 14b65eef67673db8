//! Data parallelism: every rank holds the whole model, `c10d::Reducer` averages gradients during backward.
//!
//! Method: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020;
//! the order of calls is that of `torch.nn.parallel.DistributedDataParallel`.

use super::gradient_sync::GradientSync;
use super::hooks::{self, SharedPowerSgd};
use super::{Alone, Engine, TensorParallel};
use crate::error::{Error, Result, StateError};
use crate::group::{Group, shape_text};
use crate::nn::{Param, ParamStore};
use crate::session::{Call, Join, ObjectState, Pass, Takeover, Visit};
use accelerate_core::config::{DistributedDataParallelSettings, FIRST_BUCKET_BYTES};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Device, Tensor};
use torch_ext::hooks::{HookHandle, register_post_accumulate_grad_hook};
use torch_ext::{ProcessGroup, Reducer, ReducerOptions};

/// The engine of a replicated model.
#[derive(Debug)]
pub(super) struct Replicate {
    group: Group,
    store: ParamStore,
    reducer: Mutex<Reducer>,
    power_sgd: Option<SharedPowerSgd>,
    kwargs: DistributedDataParallelSettings,
    /// The reducer has learned in which order gradients come, and adds up numbers in that order.
    knows_order: AtomicBool,
    _unreduced: Unreduced,
    /// Names in the order of the reducer's parameters.
    names: Vec<String>,
    /// Copied from rank 0 before the first forward pass after one that reduced.
    buffers: Vec<Param>,
    /// The last forward pass reduced, or there was none yet.
    buffers_are_due: AtomicBool,
    find_unused_parameters: bool,
    gradient_sync: GradientSync,
    /// An optimizer has stepped while gradients of this rank were not reduced.
    stepped_alone: AtomicBool,
    /// With `static_graph`, the first backward pass only records and is reduced at its end. This is `None` once that has happened.
    first_static_pass: Mutex<Option<GradientOrder>>,
    /// The communication hook, the program's or the one that reads memory, divides by the world size; without one the reducer does.
    has_hook: bool,
    /// The gradients of this rank are those of a window that is not complete yet.
    window_open: AtomicBool,
    join: Mutex<Option<(Arc<Join>, usize)>>,
    tensor_parallel: Option<TensorParallel>,
}

/// Parameters that were frozen when the model was prepared, which nothing reduces: while this is there they cannot be unfrozen.
#[derive(Debug)]
pub(super) struct Unreduced(Vec<Param>);

impl Unreduced {
    fn of(store: &ParamStore) -> Self {
        let frozen: Vec<Param> = store.parameters().into_iter().filter(|param| !param.requires_grad()).collect();
        frozen.iter().for_each(Param::enter_unreduced);
        Self(frozen)
    }
}

impl Drop for Unreduced {
    fn drop(&mut self) {
        self.0.iter().for_each(Param::leave_unreduced);
    }
}

/// The order in which gradients come in the first backward pass of a static graph. c10d's reducer learns an order in the second
/// one only; a run that is saved in between would go on with other buckets than it would have had.
#[derive(Debug)]
struct GradientOrder {
    recorded: Arc<Mutex<Recorded>>,
    hooks: Vec<HookHandle>,
}

#[derive(Debug, Default)]
struct Recorded {
    /// Positions of parameters.
    order: Vec<usize>,
    /// The backward pass that runs, or was the last one, has reached the model.
    has_come: bool,
}

impl GradientOrder {
    fn record(trainable: &[Param]) -> Result<Self> {
        let recorded: Arc<Mutex<Recorded>> = Arc::default();
        let hook = |(position, param): (usize, &Param)| {
            let recorded = Arc::clone(&recorded);
            register_post_accumulate_grad_hook(&param.local(), move |_| {
                let Recorded { order, has_come } = &mut *lock(&recorded);
                *has_come = true;
                // What counts is when a parameter's last gradient came, in the last of several micro-batches.
                order.retain(|&earlier| earlier != position);
                order.push(position);
                Ok(())
            })
        };
        let hooks = trainable.iter().enumerate().map(hook).collect::<Result<_, _>>()?;
        Ok(Self { recorded, hooks })
    }

    /// Has a gradient come since this was asked last?
    fn take_has_come(&self) -> bool {
        std::mem::take(&mut lock(&self.recorded).has_come)
    }

    /// All of `num_params` parameters, those without a gradient last.
    fn finish(mut self, num_params: usize) -> Vec<usize> {
        self.remove_hooks();
        let mut order = std::mem::take(&mut lock(&self.recorded).order);
        let without: Vec<usize> = (0..num_params).filter(|position| !order.contains(position)).collect();
        order.extend(without);
        order
    }

    fn remove_hooks(&mut self) {
        self.hooks.drain(..).for_each(|hook| hook.remove());
    }
}

impl Drop for GradientOrder {
    fn drop(&mut self) {
        self.remove_hooks();
    }
}

fn lock(recorded: &Mutex<Recorded>) -> MutexGuard<'_, Recorded> {
    // Both values are whole after every statement.
    recorded.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The keys of [`Engine::state`].
const GRADIENT_ORDER: &str = "gradient_order";
const BUFFERS_ARE_DUE: &str = "buffers_are_due";

/// What a rank may wait for that evaluates.
const EVALUATES_ALONE: &str = "the first evaluation after a training step begins with the buffers of rank 0, which all ranks \
                               copy together; a rank that evaluates alone calls the model within, (*model).forward(..), a \
                               method of accelerate::nn::Module";

/// What a pass through the model does besides computing.
#[derive(Clone, Copy)]
struct Work {
    /// There is a forward pass.
    forward: bool,
    /// It begins with the buffers of one rank.
    copies_buffers: bool,
    /// The backward pass reduces.
    reduces: bool,
}

impl Replicate {
    pub(super) fn start(
        group: &Group,
        store: &ParamStore,
        kwargs: &DistributedDataParallelSettings,
        tensor_parallel: Option<&TensorParallel>,
    ) -> Result<Arc<dyn Engine>> {
        let Some(process_group) = group.process_group() else {
            return Ok(Arc::new(Alone { tensor_parallel: tensor_parallel.cloned(), _unreduced: None }));
        };
        check_same_model(group, store)?;
        copy_from(group, store, 0)?;
        let trainable = store.trainable_parameters();
        let unreduced = Unreduced::of(store);
        if trainable.is_empty() {
            return Ok(Arc::new(Alone { tensor_parallel: tensor_parallel.cloned(), _unreduced: Some(unreduced) }));
        }
        let power_sgd = hooks::power_sgd(kwargs, process_group)?;
        let hook = (kwargs, power_sgd.as_ref());
        let reducer = new_reducer((group, process_group), &trainable, hook, Vec::new())?;
        Ok(Arc::new(Self {
            group: group.clone(),
            store: store.clone(),
            reducer: Mutex::new(reducer),
            power_sgd,
            kwargs: kwargs.clone(),
            knows_order: AtomicBool::new(false),
            _unreduced: unreduced,
            names: trainable.iter().map(|param| param.name().to_owned()).collect(),
            buffers: if kwargs.broadcast_buffers { store.buffers() } else { Vec::new() },
            buffers_are_due: AtomicBool::new(true),
            find_unused_parameters: kwargs.find_unused_parameters,
            gradient_sync: GradientSync::default(),
            stepped_alone: AtomicBool::new(false),
            first_static_pass: Mutex::new(kwargs.static_graph.then(|| GradientOrder::record(&trainable)).transpose()?),
            has_hook: !kwargs.comm_hook.is_none() || shares_memory(group, &trainable),
            window_open: AtomicBool::new(false),
            join: Mutex::new(None),
            tensor_parallel: tensor_parallel.cloned(),
        }))
    }

    /// Announces a pass to ranks that are out of batches; the rank whose buffers count.
    fn announce(&self, Work { forward, copies_buffers, reduces }: Work) -> Result<usize> {
        // The lock is not held through the collective: it guards two small values only.
        let join = self.join.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some((join, model)) = join else {
            if reduces {
                self.window_open.store(false, Ordering::Relaxed);
            }
            return Ok(0);
        };
        let reduction = reduces.then(|| join.next_reduction());
        let source = join.announce(Call::Pass(Pass { model, with_forward: forward, copies_buffers, reduction }))?;
        if let Some(reduction) = reduction {
            self.window_open.store(!reduction.ends_window, Ordering::Relaxed);
        }
        Ok(source)
    }

    /// What ranks do before a forward pass whether they have a batch or not.
    fn begin_forward(&self, source: usize, work: Work) -> Result<()> {
        if work.reduces {
            self.learn_order()?;
        }
        if work.copies_buffers {
            let buffers: Vec<Tensor> = self.buffers.iter().map(Param::local).collect();
            self.group.broadcast_coalesced(&buffers, source)?;
        }
        Ok(())
    }

    /// After the first reduction, has the reducer take on the order in which gradients came. Collective then.
    fn learn_order(&self) -> Result<()> {
        let learned = self.reducer().rebuild_buckets().map_err(|error| self.explain(error))?;
        self.knows_order.fetch_or(learned, Ordering::Relaxed);
        Ok(())
    }

    fn reducer(&self) -> MutexGuard<'_, Reducer> {
        // The reducer keeps its own state consistent; a panic elsewhere does not change that.
        self.reducer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn first_static_pass(&self) -> MutexGuard<'_, Option<GradientOrder>> {
        // The lock guards one value, which is whole at all times.
        self.first_static_pass.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What decides, beside their order, how gradients are put into buckets.
    fn divided_by(&self) -> String {
        let DistributedDataParallelSettings { bucket_cap_mb, comm_wrapper, find_unused_parameters, .. } = &self.kwargs;
        let numel: usize = self.store.trainable_parameters().iter().map(|param| param.local().numel()).sum();
        format!(
            "{numel} numbers of gradients, bucket_cap_mb {bucket_cap_mb}, comm_wrapper {comm_wrapper}, \
             find_unused_parameters {find_unused_parameters}"
        )
    }

    fn synchronises(&self) -> bool {
        self.gradient_sync.is_on()
    }

    /// Names the parameters that libtorch's text only numbers.
    fn explain(&self, error: torch_ext::Error) -> Error {
        let names: Vec<&str> = unused_indices(error.message())
            .into_iter()
            .filter_map(|index| self.names.get(index).map(String::as_str))
            .collect();
        if names.is_empty() {
            return self.group.explain_reducer(error);
        }
        let cure = match (self.kwargs.static_graph, self.find_unused_parameters) {
            // A static graph looks for them once.
            (true, _) => "set DistributedDataParallelKwargs.static_graph to false and find_unused_parameters to true",
            (false, false) => "set DistributedDataParallelKwargs.find_unused_parameters to true",
            (false, true) => "let all tensors that the loss is computed from be outputs of the model",
        };
        StateError::UnusedParameters { names: names.join(", "), cure, source: error }.into()
    }
}

impl Engine for Replicate {
    fn before_forward(&self, gradients_wanted: bool) -> Result<()> {
        let reduces = gradients_wanted && self.synchronises();
        let copies_buffers = !self.buffers.is_empty() && self.buffers_are_due.load(Ordering::Relaxed);
        if gradients_wanted && !reduces {
            self.window_open.store(true, Ordering::Relaxed);
        }
        if !reduces && !copies_buffers {
            return Ok(());
        }
        // The reducer's own collectives are libtorch's, so a rank that is elsewhere has to be found out before them.
        self.group.compare_call("forward", || format!("a model of {} parameters", self.names.len()))?;
        let work = Work { forward: true, copies_buffers, reduces };
        let source = self.announce(work)?;
        if reduces {
            self.reducer().prepare_for_forward().map_err(|error| self.explain(error))?;
        }
        self.begin_forward(source, work).map_err(|error| {
            let may_be_alone = !gradients_wanted && (error.is_timeout() || error.is_peer_failure());
            if may_be_alone { error.context(EVALUATES_ALONE) } else { error }
        })
    }

    fn after_forward(&self, gradients_wanted: bool, outputs: Visit<'_>) -> Result<()> {
        let reduces = gradients_wanted && self.synchronises();
        self.buffers_are_due.store(reduces, Ordering::Relaxed);
        if !reduces {
            return Ok(());
        }
        // Without a search for unused parameters the reducer expects all of them, and needs no outputs.
        let mut tensors = Vec::new();
        if self.find_unused_parameters {
            outputs(&mut |tensor| tensors.push(tensor.shallow_clone()));
        }
        self.reducer().prepare_for_backward(&tensors).map_err(|error| self.explain(error))
    }

    fn after_backward(&self) -> Result<()> {
        // The loss may be that of another model.
        let has_come = self.first_static_pass().as_ref().is_some_and(GradientOrder::take_has_come);
        if !self.gradient_sync.end_backward() || !has_come {
            return Ok(());
        }
        let Some(first) = self.first_static_pass().take() else { return Ok(()) };
        self.reducer().delay_all_reduce(&first.finish(self.names.len())).map_err(|error| self.explain(error))
    }

    fn before_step(&self) -> Result<()> {
        self.tensor_parallel.as_ref().map_or(Ok(()), TensorParallel::check_gradients)?;
        self.stepped_alone.fetch_or(self.window_open.load(Ordering::Relaxed), Ordering::Relaxed);
        self.reducer().check_finalized().map_err(|error| self.explain(error))
    }

    fn has_stepped_alone(&self) -> bool {
        self.stepped_alone.load(Ordering::Relaxed)
    }

    fn set_gradient_sync(&self, sync: bool) -> bool {
        self.gradient_sync.set(sync)
    }

    fn set_join(&self, join: Option<(Arc<Join>, usize)>) -> Result<()> {
        if join.is_some() && self.kwargs.static_graph {
            let feature = "join_uneven_inputs of a model with DistributedDataParallelKwargs.static_graph".to_owned();
            return Err(StateError::NotAvailable { feature, cure: "set static_graph to false" }.into());
        }
        *self.join.lock().unwrap_or_else(PoisonError::into_inner) = join;
        Ok(())
    }

    fn follow(&self, source: usize, pass: Pass) -> Result<()> {
        if pass.with_forward {
            let (copies_buffers, reduces) = (pass.copies_buffers, pass.reduction.is_some());
            self.begin_forward(source, Work { forward: true, copies_buffers, reduces })?;
            self.buffers_are_due.store(reduces, Ordering::Relaxed);
        } else if pass.reduction.is_some() {
            self.learn_order()?;
        }
        let Some(reduction) = pass.reduction else { return Ok(()) };
        let divisor = if self.has_hook { 1.0 } else { self.group.world_size() as f64 };
        let keep = !reduction.ends_window;
        let contribution = self.window_open.swap(keep, Ordering::Relaxed).then_some(reduction.rescale / divisor);
        self.reducer().shadow_backward(contribution, keep).map_err(|error| self.explain(error))
    }

    fn copy_from(&self, source: usize) -> Result<()> {
        copy_from(&self.group, &self.store, source)
    }

    /// The next step would learn the order, and take over rank 0's buffers; a run that goes on from here could not.
    fn before_save(&self) -> Result<()> {
        self.learn_order()?;
        // What the next forward pass would begin with.
        if !self.buffers.is_empty() && self.buffers_are_due.swap(false, Ordering::Relaxed) {
            let buffers: Vec<Tensor> = self.buffers.iter().map(Param::local).collect();
            self.group.broadcast_coalesced(&buffers, 0)?;
        }
        Ok(())
    }

    /// Names of parameters in the order in which their gradients lie in the buckets, which decides how sums are rounded on three
    /// and more ranks; and whether the next forward pass begins with rank 0's buffers. After [`before_save`](Engine::before_save) it does not.
    fn state(&self) -> Result<Value> {
        let mut state = Map::new();
        if self.knows_order.load(Ordering::Relaxed) {
            let order = self.reducer().order()?;
            let names: Value = order.iter().map(|&at| self.names[at].as_str()).collect();
            state.insert(GRADIENT_ORDER.to_owned(), names);
        }
        if !self.buffers.is_empty() && self.buffers_are_due.load(Ordering::Relaxed) {
            state.insert(BUFFERS_ARE_DUE.to_owned(), true.into());
        }
        Ok(if state.is_empty() { Value::Null } else { Value::Object(state) })
    }

    /// An order of other parameters counts as none: it would change no number but the last digits of sums.
    fn load_state(&self, state: &Value) -> Result<()> {
        let place = |name: &Value| self.names.iter().position(|own| Some(own.as_str()) == name.as_str());
        let order: Option<Vec<usize>> = state[GRADIENT_ORDER].as_array().and_then(|it| it.iter().map(place).collect());
        let is_order = |order: &Vec<usize>| {
            order.len() == self.names.len() && order.iter().collect::<HashSet<_>>().len() == self.names.len()
        };
        let order = order.filter(is_order);
        let knows_order = order.is_some();
        self.buffers_are_due.store(state[BUFFERS_ARE_DUE] == true, Ordering::Relaxed);
        let Some(process_group) = self.group.process_group() else { return Ok(()) };
        let mut reducer = self.reducer();
        let is_as_it_was = knows_order == self.knows_order.load(Ordering::Relaxed)
            && order.as_ref().is_none_or(|order| reducer.order().is_ok_and(|own| own == *order));
        if is_as_it_was {
            return Ok(());
        }
        let trainable = self.store.trainable_parameters();
        let hook = (&self.kwargs, self.power_sgd.as_ref());
        *reducer = new_reducer((&self.group, process_group), &trainable, hook, order.unwrap_or_default())?;
        // What it knows is of other buckets.
        self.power_sgd.iter().for_each(|power_sgd| hooks::lock(power_sgd).restart());
        self.knows_order.store(knows_order, Ordering::Relaxed);
        let first = self.kwargs.static_graph.then(|| GradientOrder::record(&trainable)).transpose()?;
        // Removing the hooks of the replaced one runs outside of the lock.
        let replaced = std::mem::replace(&mut *self.first_static_pass(), first);
        drop(replaced);
        Ok(())
    }

    fn hook_state(&self) -> Result<Option<ObjectState>> {
        let Some(power_sgd) = &self.power_sgd else { return Ok(None) };
        hooks::lock(power_sgd).state(&self.divided_by()).map(Some)
    }

    fn read_hook_state(&self, state: Option<&ObjectState>) -> Result<Takeover<'_>> {
        let Some(power_sgd) = &self.power_sgd else { return Ok(Box::new(|| ())) };
        let (divided_by, device) = (self.divided_by(), self.store.device());
        let read =
            |state: &ObjectState| hooks::lock(power_sgd).read(&state.values, &state.tensors, &divided_by, device);
        let saved = state.map(read).transpose()?;
        // The order of gradients may be part of what is loaded before this is called.
        let is_settled = || self.knows_order.load(Ordering::Relaxed);
        Ok(Box::new(move || hooks::lock(power_sgd).go_on_from(saved.unwrap_or_default(), is_settled())))
    }

    fn reopen_window(&self, _unreduced: &BTreeMap<&str, &Tensor>) -> Result<()> {
        self.window_open.store(true, Ordering::Relaxed);
        // Where unused parameters are looked for, those that the window has used already are no longer unused.
        let has_gradient = |(_, param): &(usize, Param)| param.grad().is_some();
        let trainable = self.store.trainable_parameters().into_iter().enumerate();
        let used: Vec<usize> = trainable.filter(has_gradient).map(|(position, _)| position).collect();
        self.reducer().mark_used(&used).map_err(|error| self.explain(error))
    }

    fn trigger_sync_in_backward(&self) -> Result<()> {
        if self.first_static_pass().is_some() {
            let feature = "trigger_sync_in_backward before the first reduced backward pass of a model with \
                           DistributedDataParallelKwargs.static_graph"
                .to_owned();
            return Err(StateError::NotAvailable { feature, cure: "set static_graph to false" }.into());
        }
        self.announce(Work { forward: false, copies_buffers: false, reduces: true })?;
        self.gradient_sync.turn_on_for_one_backward();
        // The reducer takes on the order of one pass: it has to do so before another pass records its own.
        self.learn_order()?;
        self.reducer().prepare_for_backward(&[]).map_err(|error| self.explain(error))
    }
}

/// A reducer that has its parameters in this order, or learns one.
fn new_reducer(
    (group, process_group): (&Group, &Arc<ProcessGroup>),
    trainable: &[Param],
    (kwargs, power_sgd): (&DistributedDataParallelSettings, Option<&SharedPowerSgd>),
    order: Vec<usize>,
) -> Result<Reducer> {
    let params: Vec<Tensor> = trainable.iter().map(Param::local).collect();
    let names: Vec<&str> = trainable.iter().map(Param::name).collect();
    let options = ReducerOptions {
        first_bucket_bytes: FIRST_BUCKET_BYTES as i64,
        bucket_bytes: kwargs.bucket_cap_bytes() as i64,
        find_unused_parameters: kwargs.find_unused_parameters,
        gradient_as_bucket_view: kwargs.gradient_as_bucket_view,
        static_graph: kwargs.static_graph,
        order,
    };
    let reducer = Reducer::new(&params, &names, process_group.clone(), &options)?;
    hooks::register(&reducer, group, kwargs, (power_sgd, shares_memory(group, trainable)))?;
    Ok(reducer)
}

/// Can ranks read each other's gradients? They have found out when they took over rank 0's parameters.
fn shares_memory(group: &Group, trainable: &[Param]) -> bool {
    group.reads_peers() && trainable.iter().all(|param| param.local().device() == Device::Cpu)
}

/// Fails on every rank, naming the first difference, unless all ranks built the same model.
pub(super) fn check_same_model(group: &Group, store: &ParamStore) -> Result<()> {
    let inventory: String = store
        .parameters()
        .iter()
        .chain(&store.buffers())
        .flat_map(Param::stored_as)
        .map(|param| format!("{} {}\n", param.name(), shape_text(&param.local())))
        .collect();
    let Some(inventories) = group.disagreement("prepare", &inventory)? else { return Ok(()) };
    let (rank, on_main, there) = difference_from_main(&inventories);
    Err(StateError::DifferentModels { rank, on_main, there }.into())
}

/// The first rank whose lines are not those of rank 0, and the first pair of lines that differ.
pub(super) fn difference_from_main(texts: &[String]) -> (usize, String, String) {
    let main = texts.first().map_or("", String::as_str);
    let difference =
        texts.iter().enumerate().find_map(|(rank, other)| first_difference(main, other).map(|(a, b)| (rank, a, b)));
    difference.unwrap_or_default()
}

fn first_difference(a: &str, b: &str) -> Option<(String, String)> {
    let (mut a, mut b) = (a.lines(), b.lines());
    loop {
        let (left, right) = (a.next(), b.next());
        if left.is_none() && right.is_none() {
            return None;
        }
        if left != right {
            let text = |line: Option<&str>| line.unwrap_or("nothing").to_owned();
            return Some((text(left), text(right)));
        }
    }
}

/// Parameters without memory are left out.
pub(super) fn copy_from(group: &Group, store: &ParamStore, source: usize) -> Result<()> {
    /// From here on a message of its own costs less than the memory for a copy.
    const LARGE_BYTES: usize = 4 << 20;
    let (large, small): (Vec<Tensor>, Vec<Tensor>) = store
        .parameters()
        .iter()
        .chain(&store.buffers())
        .filter(|param| !param.is_deferred())
        .flat_map(Param::stored_as)
        .map(|param| Ok(param.local().f_detach()?))
        .collect::<Result<Vec<Tensor>>>()?
        .into_iter()
        .partition(|tensor| {
            LARGE_BYTES <= tensor.numel() * tensor.kind().elt_size_in_bytes() && tensor.is_contiguous()
        });
    large.iter().try_for_each(|tensor| group.broadcast(tensor, source))?;
    group.broadcast_coalesced(&small, source)
}

/// The numbers after "did not receive grad for rank <r>:" in the reducer's message.
fn unused_indices(message: &str) -> Vec<usize> {
    let Some((_, rest)) = message.split_once("did not receive grad for rank ") else { return Vec::new() };
    let Some((_, numbers)) = rest.split_once(':') else { return Vec::new() };
    numbers.split_whitespace().map_while(|word| word.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_found_in_libtorchs_words() {
        for (message, expected) in [
            ("Parameter indices which did not receive grad for rank 0: 1 4\n In addition, you can", vec![1, 4]),
            ("did not receive grad for rank 12: 3", vec![3]),
            ("Connection closed by peer", vec![]),
        ] {
            assert_eq!(unused_indices(message), expected, "{message}");
        }
    }

    #[test]
    fn the_first_difference_is_shown() {
        assert_eq!(first_difference("a 1\nb 2\n", "a 1\nb 2\n"), None);
        assert_eq!(first_difference("a 1\n", "a 1\nb 2\n"), Some(("nothing".into(), "b 2".into())));
        assert_eq!(first_difference("a 1\n", "a 2\n"), Some(("a 1".into(), "a 2".into())));
    }
}
