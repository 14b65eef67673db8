//! PowerSGD: gradient matrices travel as the product of two thin factors.
//!
//! Method: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression", arXiv 1905.13727; the order of
//! operations is that of PyTorch's `powerSGD_hook.py`, so that gradients are equal to its own.

use crate::error::{CheckpointError, Error, Result};
use crate::messages;
use crate::session::ObjectState;
use accelerate_core::config::PowerSGDState;
use accelerate_core::power_sgd::{BucketPlan, Matrices, Seeds, plan, square_side};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use tch::{Device, Kind, Tensor};
use torch_ext::{Generator, GradBucket, ProcessGroup, ReduceOp, scalar};

/// The hook's memory of one rank.
pub(super) struct PowerSgd {
    state: PowerSGDState,
    group: Arc<ProcessGroup>,
    /// Compress each bucket as one square matrix.
    batched: bool,
    seeds: Seeds,
    /// How many of them were used.
    num_seeds: u32,
    /// Reducing backward passes so far.
    iteration: u64,
    buckets: HashMap<usize, Memory>,
    elements_before: usize,
    elements_after: usize,
    next_report: u64,
}

/// What is kept of a bucket from one step to the next.
#[derive(Default)]
struct Memory {
    /// What compression lost, flat.
    error: Option<Tensor>,
    /// Memory for all factors P, flat: what is in it counts no more.
    p: Option<Tensor>,
    /// All factors Q, flat.
    q: Option<Tensor>,
}

/// Where a hook stands; by default at the beginning.
#[derive(Default)]
pub(super) struct Position {
    iteration: u64,
    num_seeds: u32,
    buckets: HashMap<usize, Memory>,
    /// Gradients are divided as they were.
    is_same: bool,
}

/// What a checkpoint has of a hook beside its tensors.
#[derive(Serialize, Deserialize)]
struct Saved {
    iteration: u64,
    num_seeds: u32,
    num_buckets: usize,
    /// What decided how the memory is divided.
    divided_by: String,
}

const ERROR: &str = "error";
const Q: &str = "q";

fn name_in_bucket(index: usize, name: &str) -> String {
    format!("bucket_{index}.{name}")
}

/// One batched product: `[batch, rows, columns]`, `[batch, rows, rank]`, `[batch, columns, rank]`.
struct Product {
    matrices: Tensor,
    p: Tensor,
    q: Tensor,
    /// Where the result goes, if `matrices` is a stack of copies.
    sources: Vec<Tensor>,
}

impl PowerSgd {
    pub(super) fn new(state: PowerSGDState, group: Arc<ProcessGroup>, batched: bool) -> Self {
        Self {
            seeds: Seeds::new(state.random_seed),
            num_seeds: 0,
            state,
            group,
            batched,
            iteration: 0,
            buckets: HashMap::new(),
            elements_before: 0,
            elements_after: 0,
            next_report: 0,
        }
    }

    /// All that a run needs to go on to the bit, in this object's own memory. `divided_by` says what decides how gradients are
    /// put into buckets.
    pub(super) fn state(&self, divided_by: &str) -> Result<ObjectState> {
        let mut tensors = BTreeMap::new();
        for (&index, memory) in &self.buckets {
            for (name, kept) in [(ERROR, &memory.error), (Q, &memory.q)] {
                tensors.extend(kept.as_ref().map(|kept| (name_in_bucket(index, name), kept.shallow_clone())));
            }
        }
        let saved = Saved {
            iteration: self.iteration,
            num_seeds: self.num_seeds,
            num_buckets: self.buckets.values().filter(|memory| memory.error.is_some() || memory.q.is_some()).count(),
            divided_by: self.divided_by(divided_by),
        };
        let values = serde_json::to_value(saved).map_err(Error::other)?;
        Ok(ObjectState { tensors, values, ..Default::default() })
    }

    fn divided_by(&self, buckets: &str) -> String {
        let PowerSGDState { matrix_approximation_rank, min_compression_rate, batch_tensors_with_same_shape, .. } =
            &self.state;
        format!(
            "{} processes, {buckets}, batched_power_sgd {}, matrix_approximation_rank {matrix_approximation_rank}, \
             min_compression_rate {min_compression_rate}, batch_tensors_with_same_shape {batch_tensors_with_same_shape}",
            self.group.world_size(),
            self.batched
        )
    }

    /// As new.
    pub(super) fn restart(&mut self) {
        self.go_on_from(Position::default(), false);
    }

    /// Reads a [`state`](Self::state). Where gradients are divided otherwise now, what was kept of them is of no use: errors and
    /// factors begin anew.
    ///
    /// Every rank decides the same: the values are those of all ranks.
    pub(super) fn read(
        &self,
        values: &serde_json::Value,
        tensors: &BTreeMap<String, Tensor>,
        divided_by: &str,
        device: Device,
    ) -> Result<Position> {
        let Saved { iteration, num_seeds, num_buckets, divided_by: saved } =
            serde_json::from_value(values.clone()).map_err(Error::other)?;
        let own = self.divided_by(divided_by);
        let is_same = saved == own;
        let buckets = if is_same { memory_of_buckets(num_buckets, tensors, device)? } else { HashMap::new() };
        if !is_same && num_buckets > 0 {
            let saved = accelerate_core::weight_files::shown(&saved);
            messages::warning!(
                "the errors and factors of the PowerSGD hook begin anew, because the checkpoint has those of {saved}, and \
                 here are {own}"
            );
        }
        Ok(Position { iteration, num_seeds, buckets, is_same })
    }

    /// Goes on from what was [`read`](Self::read). Where gradients are divided otherwise now, steps are counted on only if
    /// `is_settled`, that is if the next one has the buckets of all that follow.
    pub(super) fn go_on_from(&mut self, position: Position, is_settled: bool) {
        let Position { iteration, num_seeds, buckets, is_same } = position;
        (self.iteration, self.num_seeds) = if is_same || is_settled { (iteration, num_seeds) } else { (0, 0) };
        (self.buckets, self.next_report) = (buckets, 0);
        self.seeds = Seeds::new(self.state.random_seed);
        self.seeds.by_ref().take(self.num_seeds as usize).for_each(drop);
    }

    /// The mean over ranks of a bucket, flat; `None` is the plain mean, in the steps before compression begins.
    pub(super) fn reduce(&mut self, bucket: &GradBucket<'_>) -> Result<Option<Tensor>> {
        let iteration = self.iteration;
        self.iteration += u64::from(bucket.is_last);
        if iteration < self.state.start_power_sgd_iter {
            return Ok(None);
        }
        let _no_grad = tch::no_grad_guard();
        let reduced = if self.batched { self.reduce_as_square(bucket)? } else { self.reduce_by_layer(bucket)? };
        if bucket.is_last && iteration >= self.next_report {
            self.next_report = iteration + self.state.compression_stats_logging_frequency.max(1);
            let (before, after) = (self.elements_before, self.elements_after);
            let rate = before as f64 / after as f64;
            messages::info!("PowerSGD, step {iteration}: {before} elements became {after}, a rate of {rate:.2}");
        }
        Ok(Some(reduced))
    }

    fn reduce_by_layer(&mut self, bucket: &GradBucket<'_>) -> Result<Tensor> {
        let shapes: Vec<Vec<usize>> = bucket
            .gradients
            .iter()
            .map(|gradient| gradient.size().iter().map(|&size| size as usize).collect())
            .collect();
        let plan = plan(&shapes.iter().map(Vec::as_slice).collect::<Vec<_>>(), &self.state);
        let views = views(bucket.buffer, &shapes)?;
        self.compress(bucket.index, bucket.buffer, &views, &plan)?;
        Ok(bucket.buffer.shallow_clone())
    }

    fn reduce_as_square(&mut self, bucket: &GradBucket<'_>) -> Result<Tensor> {
        let elements = bucket.buffer.numel();
        let side = square_side(elements);
        let square = bucket.buffer.f_constant_pad_nd([0, (side * side - elements) as i64])?;
        // Always compressed, whatever it saves: that is what this variant is.
        let state = PowerSGDState { min_compression_rate: 0.0, ..self.state.clone() };
        let plan = plan(&[&[side, side]], &state);
        let view = square.f_view([side as i64, side as i64])?;
        self.compress(bucket.index, &square, &[view], &plan)?;
        Ok(square.f_narrow(0, 0, elements as i64)?)
    }

    /// Replaces `flat`, of which `gradients` are views, by its mean over ranks.
    fn compress(&mut self, index: usize, flat: &Tensor, gradients: &[Tensor], plan: &BucketPlan) -> Result<()> {
        self.elements_before += plan.elements_before();
        self.elements_after += plan.elements_after();
        let mut memory = self.buckets.remove(&index).unwrap_or_default();
        memory.check(index, flat.numel(), plan.q_elements())?;
        if let Some(error) = &memory.error {
            let _ = flat.shallow_clone().f_add_(error)?;
        }
        let original = if self.state.use_error_feedback { Some(flat.f_detach_copy()?) } else { None };

        let uncompressed: Vec<Tensor> =
            plan.uncompressed.iter().map(|&at| Ok(gradients[at].f_reshape(-1)?)).collect::<Result<_>>()?;
        let uncompressed = if uncompressed.is_empty() { None } else { Some(Tensor::f_cat(&uncompressed, 0)?) };
        let in_flight = match &uncompressed {
            Some(tensor) => Some(self.group.all_reduce(tensor, ReduceOp::Sum, None)?),
            None => None,
        };
        let (p_memory, q_memory, products) =
            self.low_rank_factors((memory.p.take(), memory.q.take()), flat, gradients, plan)?;
        for product in &products {
            product.p.shallow_clone().f_copy_(&product.matrices.f_bmm(&product.q)?)?;
        }
        if let (Some(tensor), Some(work)) = (&uncompressed, in_flight) {
            work.wait(None)?;
            self.unpack(tensor, gradients, plan)?;
        }
        if !products.is_empty() {
            // The factors P are orthogonalised next, so their sum does as well as their mean.
            self.group.all_reduce(&p_memory, ReduceOp::Sum, None)?.wait(None)?;
            for product in &products {
                orthogonalize(&product.p, self.state.orthogonalization_epsilon)?;
                let q = product.matrices.f_transpose(1, 2)?.f_bmm(&product.p)?;
                product.q.shallow_clone().f_copy_(&q)?;
            }
            self.group.all_reduce(&q_memory, ReduceOp::Sum, None)?.wait(None)?;
            scalar::div_(&q_memory, self.group.world_size() as i64)?;
            products.iter().try_for_each(Product::write_back)?;
        }
        memory.error = match original {
            Some(original) => Some(original.f_sub(flat)?),
            None => None,
        };
        if self.state.warm_start {
            (memory.p, memory.q) = (Some(p_memory), Some(q_memory));
        }
        self.buckets.insert(index, memory);
        Ok(())
    }

    fn unpack(&self, sum: &Tensor, gradients: &[Tensor], plan: &BucketPlan) -> Result<()> {
        // In place: what is a sum on entry is the mean from here on.
        scalar::div_(sum, self.group.world_size() as i64)?;
        let mean = sum;
        let mut start = 0;
        for &at in &plan.uncompressed {
            let gradient = &gradients[at];
            let elements = gradient.numel() as i64;
            gradient.shallow_clone().f_copy_(&mean.f_narrow(0, start, elements)?.f_view_as(gradient)?)?;
            start += elements;
        }
        Ok(())
    }

    /// The memory of all P and of all Q, with the products that are views into it; Q orthogonal, P to be filled.
    fn low_rank_factors(
        &mut self,
        (p, q): (Option<Tensor>, Option<Tensor>),
        flat: &Tensor,
        gradients: &[Tensor],
        plan: &BucketPlan,
    ) -> Result<(Tensor, Tensor, Vec<Product>)> {
        let fresh = q.is_none();
        let memory_for = |numel: usize| Tensor::f_empty([numel as i64], (flat.kind(), flat.device()));
        let p_memory = p.map_or_else(|| memory_for(plan.p_elements()), Ok)?;
        let q_memory = q.map_or_else(|| memory_for(plan.q_elements()), Ok)?;
        let (mut p_start, mut q_start) = (0, 0);
        let mut products = Vec::with_capacity(plan.compressed.len());
        for matrices in &plan.compressed {
            let [batch, rows, columns, rank] =
                [matrices.gradients.len(), matrices.rows, matrices.columns, matrices.rank].map(|size| size as i64);
            let p = p_memory.f_narrow(0, p_start, batch * rows * rank)?.f_view([batch, rows, rank])?;
            let q = q_memory.f_narrow(0, q_start, batch * columns * rank)?.f_view([batch, columns, rank])?;
            (p_start, q_start) = (p_start + batch * rows * rank, q_start + batch * columns * rank);
            products.push(Product::new(matrices, gradients, p, q)?);
        }
        if fresh && let Some(seed) = self.seeds.next() {
            self.num_seeds = self.num_seeds.saturating_add(1);
            let generator = Generator::new_cpu()?;
            generator.manual_seed(u64::from(seed))?;
            for product in &products {
                let random = Tensor::f_empty(product.q.size(), (flat.kind(), tch::Device::Cpu))?;
                generator.normal_(&random, 0.0, 1.0)?;
                product.q.shallow_clone().f_copy_(&random)?;
            }
        }
        for product in &products {
            orthogonalize(&product.q, self.state.orthogonalization_epsilon)?;
        }
        Ok((p_memory, q_memory, products))
    }
}

impl Memory {
    /// What a checkpoint says of a bucket may not be so.
    fn check(&self, index: usize, numel: usize, q_numel: usize) -> Result<()> {
        for (name, kept, wanted) in [(ERROR, &self.error, numel), (Q, &self.q, q_numel)] {
            if let Some(found) = kept.as_ref().map(Tensor::numel).filter(|found| *found != wanted) {
                let name = name_in_bucket(index, name);
                return Err(CheckpointError::OtherBucket { name, found, wanted }.into());
            }
        }
        Ok(())
    }
}

/// What a checkpoint has of the buckets of a rank, on the device of the gradients.
fn memory_of_buckets(
    num_buckets: usize,
    tensors: &BTreeMap<String, Tensor>,
    device: Device,
) -> Result<HashMap<usize, Memory>> {
    let kept = |index, name| {
        let kept = tensors.get(&name_in_bucket(index, name));
        kept.map(|kept| kept.f_to_device(device)?.f_reshape([-1])).transpose()
    };
    // Each has at least one tensor, so that no more of them are made than there are tensors.
    let mut buckets = HashMap::new();
    for index in 0..num_buckets {
        let memory = Memory { error: kept(index, ERROR)?, p: None, q: kept(index, Q)? };
        if memory.error.is_none() && memory.q.is_none() {
            let (name, found, wanted) = (name_in_bucket(index, ERROR), buckets.len(), num_buckets);
            return Err(CheckpointError::MissingBucket { name, found, wanted }.into());
        }
        buckets.insert(index, memory);
    }
    Ok(buckets)
}

impl fmt::Debug for PowerSgd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PowerSgd").field("iteration", &self.iteration).finish_non_exhaustive()
    }
}

impl Product {
    fn new(matrices: &Matrices, gradients: &[Tensor], p: Tensor, q: Tensor) -> Result<Self> {
        let shape = [matrices.rows as i64, matrices.columns as i64];
        let mut sources =
            matrices.gradients.iter().map(|&at| Ok(gradients[at].f_view(shape)?)).collect::<Result<Vec<_>>>()?;
        // A single matrix is written in place.
        let matrices = match &sources[..] {
            [single] => single.f_unsqueeze(0)?,
            several => Tensor::f_stack(several, 0)?,
        };
        if sources.len() == 1 {
            sources.clear();
        }
        Ok(Self { matrices, p, q, sources })
    }

    fn write_back(&self) -> Result<()> {
        let product = self.p.f_bmm(&self.q.f_transpose(1, 2)?)?;
        if self.sources.is_empty() {
            self.matrices.shallow_clone().f_copy_(&product)?;
        }
        for (at, source) in self.sources.iter().enumerate() {
            source.shallow_clone().f_copy_(&product.f_select(0, at as i64)?)?;
        }
        Ok(())
    }
}

/// The gradients of a flat buffer one by one.
fn views(flat: &Tensor, shapes: &[Vec<usize>]) -> Result<Vec<Tensor>> {
    let mut start = 0;
    shapes
        .iter()
        .map(|shape| {
            let sizes: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
            let elements: i64 = sizes.iter().product();
            let view = flat.f_narrow(0, start, elements)?.f_view(&sizes[..])?;
            start += elements;
            Ok(view)
        })
        .collect()
}

/// Makes the columns of each matrix of `[batch, rows, rank]` orthonormal, in place.
///
/// A column of zeros stays zero. PyTorch divides it by its norm, and the gradient becomes NaN.
fn orthogonalize(matrices: &Tensor, epsilon: f64) -> Result<()> {
    let rank = matrices.size3()?.2;
    if rank > 2 && !matches!(matrices.kind(), Kind::Half | Kind::BFloat16) {
        let (q, _) = Tensor::f_linalg_qr(matrices, "reduced")?;
        matrices.shallow_clone().f_copy_(&q)?;
        return Ok(());
    }
    for column in 0..rank {
        let mut vector = matrices.f_narrow(2, column, 1)?;
        let norm = scalar::add(&scalar::norm(&vector, 2.0, 1, true)?, epsilon)?;
        let zero = scalar::eq(&norm, 0.0)?;
        let _ = vector.f_div_(&scalar::masked_fill(&norm, &zero, 1.0)?)?;
        if column + 1 < rank {
            let mut rest = matrices.f_narrow(2, column + 1, rank - column - 1)?;
            let overlap = vector.f_mul(&rest)?.f_sum_dim_intlist([1].as_slice(), true, None::<Kind>)?;
            let _ = rest.f_sub_(&overlap.f_mul(&vector)?)?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use crate::{Accelerator, testing};
    use rstest::rstest;
    use serde_json::{Value, json};

    const BUCKETS: &str = "in one bucket";

    fn values(num_buckets: Value, num_seeds: Value, hook: &PowerSgd) -> Value {
        let divided_by = hook.divided_by(BUCKETS);
        json!({"iteration": 9, "num_seeds": num_seeds, "num_buckets": num_buckets, "divided_by": divided_by})
    }

    /// `named`: what a checkpoint has of bucket 0.
    #[rstest]
    #[case::a_bucket_is_missing(json!(2), json!(1), "error", "bucket_1.error")]
    #[case::more_buckets_than_there_can_be(json!(u64::MAX), json!(1), "error", "bucket_1.error")]
    #[case::nothing_that_is_known(json!(1), json!(1), "other", "bucket_0.error")]
    #[case::more_seeds_than_can_be_drawn(json!(1), json!(u64::MAX), "error", "expected u32")]
    #[case::no_number(json!("one"), json!(1), "error", "invalid type")]
    fn what_does_not_fit_is_refused(
        #[case] num_buckets: Value,
        #[case] num_seeds: Value,
        #[case] named: &str,
        #[case] words: &str,
    ) {
        testing::ranks(2, Accelerator::builder().cpu(true), |accelerator| {
            let group = accelerator.group().process_group().unwrap().clone();
            let hook = PowerSgd::new(PowerSGDState::default(), group, false);
            let tensors = BTreeMap::from([(name_in_bucket(0, named), Tensor::from_slice(&[1f32]))]);
            let saved = values(num_buckets.clone(), num_seeds.clone(), &hook);
            let error = hook.read(&saved, &tensors, BUCKETS, Device::Cpu).err().unwrap().to_string();
            assert!(error.contains(words), "{error}");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_bucket_of_another_size_is_an_error_and_no_wrong_sum() {
        let of = |numel: i64| Some(Tensor::zeros([numel], (Kind::Float, Device::Cpu)));
        for (error, q, words) in [(3, 2, "has 3 numbers as `bucket_7.error`"), (4, 5, "has 5 numbers as `bucket_7.q`")]
        {
            let memory = Memory { error: of(error), p: None, q: of(q) };
            let found = memory.check(7, 4, 2).unwrap_err().to_string();
            assert!(found.contains(words), "{found}");
        }
        Memory { error: of(4), p: None, q: of(2) }.check(7, 4, 2).unwrap();
    }
}
