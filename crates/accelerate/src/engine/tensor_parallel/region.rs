//! How activations and gradients travel where ranks compute a layer together.
//!
//! Each way there has another one back. Where an activation is the same on all ranks, so is its gradient.

use super::products::ProductOfTokens;
use super::tokens::Tokens;
use crate::error::{Result, StateError};
use crate::group::{Group, PeerProcess, ReduceOp, shape_text};
use crate::nn::{is_floating, while_checkpointing};
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hasher};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tch::{Device, Kind, Tensor};
use torch_ext::autograd::{is_grad_enabled, version};
use torch_ext::storage::tensor_id;
use torch_ext::{Generator, apply_function, scalar};

/// The ranks that divide the layers of a model. Clones are the same.
#[derive(Clone, Debug)]
pub(super) struct Region(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    group: Group,
    /// Each rank draws random numbers of its own, as processes do, and threads of one process do not.
    draws_alone: bool,
    /// Where the model is computed, once that is known.
    device: OnceLock<Device>,
    /// The next layer compares its input with that of the other ranks: it is the first of a forward pass.
    compares_input: AtomicBool,
    /// The last inputs of divided layers, the latest one last: queries, keys and values come from one, whose gradient has to travel
    /// once.
    entered: Mutex<Vec<Entered>>,
    /// Where ranks also divide the tokens between divided layers.
    tokens: Option<Tokens>,
}

/// A layer has one, and an adapter of it another one in between.
const NUM_ENTERED: usize = 2;

#[derive(Debug)]
struct Entered {
    input: Tensor,
    version: i64,
    /// Gradients of the output reach the input.
    is_recorded: bool,
    output: Tensor,
    /// A backward pass has gone through it, and its part of the graph is gone.
    is_used: Arc<AtomicBool>,
}

impl Region {
    /// Collective.
    pub(super) fn new(group: Group, divides_tokens: bool) -> Result<Self> {
        let processes = group.all_gather_bytes(PeerProcess::own().encode().as_bytes())?;
        let draws_alone = processes.iter().collect::<HashSet<_>>().len() == processes.len();
        let (compares_input, entered) = (AtomicBool::new(true), Mutex::default());
        let (device, tokens) = (OnceLock::new(), divides_tokens.then(Tokens::default));
        Ok(Self(Arc::new(Inner { group, draws_alone, device, compares_input, entered, tokens })))
    }

    pub(super) fn group(&self) -> &Group {
        &self.0.group
    }

    pub(super) fn tokens(&self) -> Option<&Tokens> {
        self.0.tokens.as_ref()
    }

    pub(super) fn rank(&self) -> usize {
        self.0.group.rank()
    }

    /// A forward pass begins.
    pub(super) fn begin_forward(&self) {
        self.forget_input();
        self.0.compares_input.store(true, Ordering::Relaxed);
        self.tokens().into_iter().for_each(Tokens::begin);
    }

    /// It has failed, or has ended: is what came last divided by its tokens?
    pub(super) fn end_forward(&self) -> bool {
        self.forget_input();
        self.tokens().is_some_and(Tokens::end)
    }

    /// It has ended.
    pub(super) fn forget_input(&self) {
        let forgotten = std::mem::take(&mut *self.entered());
        drop(forgotten);
    }

    fn entered(&self) -> MutexGuard<'_, Vec<Entered>> {
        // A list of values of their own: whole after every statement, also where another thread panicked.
        self.0.entered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails on all ranks unless the first divided layer of a forward pass gets the same input everywhere. Ranks that would draw other
    /// random numbers go on with those of the first of them. Collective once in a forward pass.
    pub(super) fn compare_input(&self, input: &Tensor) -> Result<()> {
        if !self.0.compares_input.swap(false, Ordering::Relaxed) || self.group().world_size() == 1 {
            return Ok(());
        }
        let records = is_grad_enabled();
        let gradient = if records && input.requires_grad() { "with" } else { "without" };
        let _no_grad = tch::no_grad_guard();
        let detached = input.f_detach()?;
        let is_floating = is_floating(input.f_kind()?);
        let content = if is_floating { 0 } else { hash_of(&detached)? };
        let own = format!("{} {content:016x} {gradient} gradient", shape_text(input));
        if let Some(texts) = self.group().disagreement("forward", &own)? {
            return Err(StateError::DifferentInputs { per_rank: self.group().per_rank(&texts) }.into());
        }
        if is_floating && let Some(per_rank) = compare_numbers(self.group(), &detached)? {
            return Err(StateError::DifferentInputs { per_rank }.into());
        }
        self.share_random_state(input.device())
    }

    /// From now on all ranks draw what the first of them draws. Collective where ranks are processes.
    pub(super) fn share_random_state(&self, device: Device) -> Result<()> {
        if !self.0.draws_alone {
            return Ok(());
        }
        let _ = self.0.device.set(device);
        let generator = Generator::default_for(device)?;
        let own = Vec::<u8>::try_from(generator.state()?)?;
        if self.group().disagreement("random state", &format!("{:016x}", hash_of_bytes(&own)))?.is_some() {
            let first = self.group().broadcast_bytes(&own, 0)?;
            generator.set_state(&Tensor::f_from_slice(&first)?)?;
        }
        Ok(())
    }

    /// Fails on all ranks if they have drawn different numbers in a forward pass that records gradients: where layers between divided
    /// ones have other sizes on each rank, dropout behind them has dropped other elements. Collective then, where ranks are processes.
    pub(super) fn compare_draws(&self) -> Result<()> {
        // No divided layer was used.
        let was_compared = !self.0.compares_input.load(Ordering::Relaxed);
        if !self.0.draws_alone || !is_grad_enabled() || !was_compared {
            return Ok(());
        }
        let device = self.0.device.get().copied().unwrap_or(Device::Cpu);
        let state = Vec::<u8>::try_from(Generator::default_for(device)?.state()?)?;
        match self.group().disagreement("end of forward", &format!("{:016x}", hash_of_bytes(&state)))? {
            None => Ok(()),
            Some(_) => Err(StateError::DifferentDraws.into()),
        }
    }

    /// An input that all ranks have; its gradient is the sum of all ranks' parts. Collective in the backward pass. Where each rank has
    /// some of its tokens, all of them: see [`enter_tokens`](Self::enter_tokens).
    pub(super) fn enter(&self, input: &Tensor) -> Result<Tensor> {
        if self.divides_tokens() {
            self.note_divided(false);
            return self.once(input, |is_used| self.enter_tokens(input, self.shares_of_parts(input)?, is_used));
        }
        self.compare_input(input)?;
        if !input.requires_grad() || !is_grad_enabled() {
            return Ok(input.shallow_clone());
        }
        self.once(input, |is_used| self.enter_whole(input, is_used))
    }

    /// The same with the product of the input and a slice of a colwise layer, `[out_features, in_features]`, where tokens travel beside
    /// it. `None` where they do not, or the input has been collected already. In a segment whose activations are computed again they do
    /// not: its input may have been collected before it, and would not be when it is computed again, so that other tensors were kept.
    pub(super) fn enter_with_product(
        &self,
        input: &Tensor,
        (matrix, bias): (&Tensor, Option<&Tensor>),
    ) -> Result<Option<Tensor>> {
        if !self.divides_tokens() || while_checkpointing() || !self.group().overlaps(input) {
            return Ok(None);
        }
        let mut product = None;
        let _full = self.once(input, |is_used| {
            let shares = self.shares_of_parts(input)?;
            let Some(beside) = ProductOfTokens::new(self, (input, matrix, bias), &shares)? else {
                return self.enter_tokens(input, shares, is_used);
            };
            let [full, of_full] = beside.of_gathered(input, (matrix, bias), is_used)?;
            product = Some(of_full);
            Ok(full)
        })?;
        self.note_divided(false);
        Ok(product)
    }

    fn enter_whole(&self, input: &Tensor, is_used: Arc<AtomicBool>) -> Result<Tensor> {
        let group = self.group().clone();
        let backward = move |gradient: Tensor| {
            is_used.store(true, Ordering::Relaxed);
            // The product that made it has made it anew, and nobody else has it.
            let sum = gradient.f_contiguous()?;
            group.all_reduce(&sum, ReduceOp::Sum)?;
            Ok(sum)
        };
        apply_to_one("TensorParallelInput", input, || Ok(input.f_detach()?), backward)
    }

    /// What `enter` makes of an input, once for all layers in a row that have the same one.
    fn once(&self, input: &Tensor, enter: impl FnOnce(Arc<AtomicBool>) -> Result<Tensor>) -> Result<Tensor> {
        let (id, version, is_recorded) = (tensor_id(input), version(input)?, is_grad_enabled());
        let is_same = |known: &Entered| {
            let is_input = tensor_id(&known.input) == id && known.version == version;
            is_input && (known.is_recorded || !is_recorded) && !known.is_used.load(Ordering::Relaxed)
        };
        if let Some(output) = self.entered_before(is_same) {
            return Ok(output);
        }
        let is_used = Arc::new(AtomicBool::new(false));
        let output = enter(Arc::clone(&is_used))?;
        let entered =
            Entered { input: input.shallow_clone(), version, is_recorded, output: output.shallow_clone(), is_used };
        let mut known = self.entered();
        known.push(entered);
        let forgotten = (NUM_ENTERED < known.len()).then(|| known.remove(0));
        drop(known);
        drop(forgotten);
        Ok(output)
    }

    /// What such an input has become; it is the latest one then.
    fn entered_before(&self, is_same: impl Fn(&Entered) -> bool) -> Option<Tensor> {
        let mut known = self.entered();
        let position = known.iter().position(is_same)?;
        let latest = known.remove(position);
        let output = latest.output.shallow_clone();
        known.push(latest);
        Some(output)
    }

    /// The sum of all ranks' parts of an output, which nobody else has; its gradient is the same on all ranks. Collective. Where ranks
    /// divide tokens, this rank's tokens of it.
    pub(super) fn sum(&self, part: &Tensor) -> Result<Tensor> {
        if self.divides_tokens() {
            return self.sum_tokens(part);
        }
        self.forget_input();
        let group = self.group();
        let forward = || {
            let sum = part.f_detach()?.f_contiguous()?;
            group.all_reduce(&sum, ReduceOp::Sum)?;
            Ok(sum)
        };
        apply_to_one("TensorParallelSum", part, forward, Ok)
    }

    /// All ranks' slices of a dim, of these sizes, one behind the other; each rank's slice of the gradient goes back. Collective.
    pub(super) fn gather(&self, own: &Tensor, dim: i64, slices: &[Range<usize>]) -> Result<Tensor> {
        self.forget_input();
        let Some(place) = slices.get(self.rank()).cloned() else { return Ok(own.shallow_clone()) };
        let backward = move |gradient: Tensor| Ok(gradient.f_narrow(dim, place.start as i64, place.len() as i64)?);
        apply_to_one("TensorParallelGather", own, || gather(self.group(), own, dim, slices), backward)
    }

    /// This rank's slice of the last dim of what all ranks have; the slices of the gradient are put together. Collective in the
    /// backward pass.
    pub(super) fn split(&self, full: &Tensor, slices: &[Range<usize>]) -> Result<Tensor> {
        let full = &if self.divides_tokens() { self.all_tokens(full)? } else { full.shallow_clone() };
        self.compare_input(full)?;
        let Some(place) = slices.get(self.rank()).cloned() else { return Ok(full.shallow_clone()) };
        let (group, slices) = (self.group().clone(), slices.to_vec());
        let forward = || Ok(full.f_narrow(-1, place.start as i64, place.len() as i64)?.f_contiguous()?);
        apply_to_one("TensorParallelSplit", full, forward, move |gradient| gather(&group, &gradient, -1, &slices))
    }
}

/// A node of the graph with one input and one output. `backward` gets the output's gradient and gives the input's; without the one, there
/// is none of the other.
pub(super) fn apply_to_one(
    name: &str,
    input: &Tensor,
    forward: impl FnOnce() -> Result<Tensor>,
    mut backward: impl FnMut(Tensor) -> Result<Tensor> + Send + 'static,
) -> Result<Tensor> {
    let outputs = apply_function(
        name,
        &[input],
        |context| {
            context.once_differentiable();
            Ok(vec![forward()?])
        },
        move |_, mut gradients| {
            let Some(gradient) = gradients.pop().flatten() else { return Ok(vec![None]) };
            Ok(vec![Some(backward(gradient)?)])
        },
    )?;
    Ok(outputs.into_iter().next().unwrap_or_else(Tensor::new))
}

/// All ranks' slices of a dim, which may differ in size. Collective.
pub(super) fn gather(group: &Group, own: &Tensor, dim: i64, slices: &[Range<usize>]) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let largest = slices.iter().map(ExactSizeIterator::len).max().unwrap_or(0) as i64;
    let dim = if dim < 0 { dim + own.dim() as i64 } else { dim };
    let mut padding = own.size();
    padding[dim as usize] = largest - padding[dim as usize];
    let sent = match padding[dim as usize] {
        0 => own.f_detach()?.f_contiguous()?,
        // Ranks send tensors of one shape.
        _ => Tensor::f_cat(&[own.f_detach()?, Tensor::f_zeros(&padding, (own.f_kind()?, own.device()))?], dim)?,
    };
    let all = group.all_gather(&sent)?;
    let parts = all.iter().zip(slices).map(|(part, slice)| part.f_narrow(dim, 0, slice.len() as i64));
    Ok(Tensor::f_cat(&parts.collect::<Result<Vec<_>, _>>()?, dim)?)
}

/// What each rank has, if ranks have other floating-point numbers in tensors of one shape: not if they differ in their last digits alone,
/// since kernels add up in no fixed order. Collective.
pub(in crate::engine) fn compare_numbers(group: &Group, input: &Tensor) -> Result<Option<String>> {
    const TOLERANCE: f64 = 1e-4;
    let flat = input.f_to_kind(Kind::Float)?.f_reshape([-1])?;
    let numel = flat.numel() as i64;
    // Rows in another order have the same sum, and other sums with a weight for each place.
    let places = Tensor::f_ones([numel], (Kind::Float, flat.device()))?.f_cumsum(0, Kind::Float)?;
    let weights = scalar::add(&scalar::mul(&places, 1.0 / numel.max(1) as f64)?, 1.0)?;
    let sums = [&flat, &flat.f_mul(&weights)?, &flat.f_abs()?].map(|values| values.f_sum(Kind::Double));
    let [sum, weighted, size] = sums;
    let own = Tensor::f_stack(&[sum?, weighted?, size?], 0)?.f_to(Device::Cpu)?;
    let all = group.all_gather(&own)?;
    let all: Vec<Vec<f64>> = all.iter().map(|sums| Ok(Vec::<f64>::try_from(sums)?)).collect::<Result<_>>()?;
    let near = |a: f64, b: f64, size: f64| a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= TOLERANCE * size;
    let is_same = |sums: &Vec<f64>| sums.iter().zip(&all[0]).all(|(a, b)| near(*a, *b, all[0][2]));
    if all.iter().all(is_same) {
        return Ok(None);
    }
    let texts: Vec<String> = all.iter().map(|sums| format!("{} of sum {:e}", shape_text(input), sums[0])).collect();
    Ok(Some(group.per_rank(&texts)))
}

pub(in crate::engine) fn hash_of(tensor: &Tensor) -> Result<u64> {
    let bytes = tensor.f_to(Device::Cpu)?.f_contiguous()?.f_reshape([-1])?.f_view_dtype(Kind::Uint8)?;
    Ok(hash_of_bytes(&Vec::<u8>::try_from(&bytes)?))
}

fn hash_of_bytes(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}
