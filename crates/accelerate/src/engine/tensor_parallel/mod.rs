//! Tensor parallelism: several ranks compute each layer together, and each has a slice of its weights.
//!
//! Method: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", arXiv 1909.08053.
//! A colwise layer has some output features on each rank, a rowwise layer behind it the same input features: one sum over ranks in
//! the forward pass, and one in the backward pass. Parameters that all ranks have get the same gradient on all of them.

mod cross_entropy;
mod kernels;
mod region;
mod storage;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use super::replicate::{check_same_model, copy_from};
use crate::error::{Result, StateError};
use crate::group::Group;
use crate::nn::{AnyLayer, Embedding, InnerPlace, Linear, LinearKernel, LinearLayer, Param, ParamStore};
use crate::session::DeviceMesh;
use accelerate_core::mesh::{Axis, Mesh};
use accelerate_core::tensor_parallel::{DividedLayer, LayerEntry, LayerKind, ParallelStyle, TensorParallelPlan};
use kernels::{Colwise, Divided, EmbeddingColwise, EmbeddingRowwise, Rowwise};
use region::Region;
pub(super) use region::{compare_numbers, hash_of};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use storage::{SliceStorage, Slices};
use tch::{Kind, Tensor};

/// A model whose layers several ranks compute together.
#[derive(Clone, Debug)]
pub(crate) struct TensorParallel {
    region: Region,
    /// Parameters that each rank has whole.
    whole: Vec<Param>,
    /// In so many steps their gradients are still to be compared.
    checks_left: Arc<AtomicUsize>,
}

/// A model that is built wrongly shows in its first steps.
const NUM_CHECKS: usize = 3;

impl TensorParallel {
    /// Divides the layers of a model over the ranks along [`Axis::Tp`], with the values of rank 0 of the job. `plan` is the program's,
    /// `own` the model's. `is_sharded`: the slices are sharded, too. Collective.
    ///
    /// # Errors
    /// Ranks with different models or plans; no plan at all; those of [`TensorParallelPlan::divide`]; a layer that is quantised, or
    /// computes with a kernel of the program's.
    pub(crate) fn start(
        mesh: &DeviceMesh,
        store: &ParamStore,
        (plan, own): (TensorParallelPlan, Option<&TensorParallelPlan>),
        is_sharded: bool,
    ) -> Result<Self> {
        let (job, tp_size) = (mesh.job(), mesh.shape().size(Axis::Tp));
        let layers = store.named_layers();
        let divided = divide(&layers, plan, own, tp_size);
        let divided = job.agree_on_success("prepare", divided)?;
        let description = format!("{divided:?}");
        let cure = "give all ranks the same parallelize_plan";
        job.agree("prepare of a tensor-parallel model", &description, cure)?;
        check_same_model(job, store)?;
        let region = Region::new(mesh.group(&[Axis::Tp])?)?;
        let slices = slices(&layers, &divided);
        // Of a model that is sharded, too, the ranks that divide a layer share their slices with others.
        let sharing = [Mesh::SHARD, &[Axis::Tp]].concat();
        let holders = if is_sharded { mesh.group(&sharing)? } else { region.group().clone() };
        let ranks = (region.clone(), holders);
        copy_from(job, store, 0)?;
        for param in store.parameters().iter().filter(|param| !param.is_deferred()) {
            divide_parameter(param, &param.local(), &slices, &ranks)?;
        }
        store.initialise_each(|param, full| {
            job.broadcast(&full, 0)?;
            match slices.contains_key(param.name()) {
                true => divide_parameter(param, &full, &slices, &ranks),
                false => param.set_replicated(full),
            }
        })?;
        for layer in &divided {
            set_kernel(&layers[layer.layer].1, layer, &region);
        }
        region.share_random_state(store.device())?;
        let whole = store.trainable_parameters().into_iter().filter(|param| param.slice_param().is_none()).collect();
        Ok(Self { region, whole, checks_left: Arc::new(AtomicUsize::new(NUM_CHECKS)) })
    }

    /// Before a forward pass of the model.
    pub(crate) fn begin_forward(&self) {
        self.region.begin_forward();
    }

    /// After one that has failed.
    pub(crate) fn abandon_forward(&self) {
        self.region.forget_input();
    }

    /// After one that has not. Collective.
    ///
    /// # Errors
    /// Ranks that have drawn different random numbers.
    pub(crate) fn end_forward(&self) -> Result<()> {
        self.region.forget_input();
        self.region.compare_draws()
    }

    /// Before the first steps: parameters that each rank has whole must have got the same gradients. They have not where such a layer
    /// stands between divided ones, and sees some features on each rank. Collective then.
    ///
    /// # Errors
    /// The first parameter whose gradients differ, on all ranks.
    pub(crate) fn check_gradients(&self) -> Result<()> {
        const TOLERANCE: f64 = 1e-2;
        let left = self.checks_left.load(Ordering::Relaxed);
        if left == 0 || self.whole.is_empty() {
            return Ok(());
        }
        self.checks_left.store(left - 1, Ordering::Relaxed);
        let _no_grad = tch::no_grad_guard();
        let group = self.region.group();
        // Shards of a unit with slices of different sizes begin at other elements.
        let layouts: Vec<String> = self.whole.iter().map(|param| param.layout().to_string()).collect();
        if group.disagreement("layouts of whole parameters", &layouts.join("; "))?.is_some() {
            return Ok(());
        }
        let norm = |param: &Param| match param.grad().filter(|grad| grad.numel() > 0 && !grad.is_sparse()) {
            Some(grad) => Ok(grad.f_to_kind(Kind::Double)?.f_norm()?.f_double_value(&[])?),
            None => Ok(0.0),
        };
        let norms = self.whole.iter().map(norm).collect::<Result<Vec<f64>>>();
        let norms = group.agree_on_success("norms of gradients", norms)?;
        let all = group.all_gather(&Tensor::f_from_slice(&norms)?)?;
        let all: Vec<Vec<f64>> = all.iter().map(|norms| Ok(Vec::<f64>::try_from(norms)?)).collect::<Result<_>>()?;
        let differs = |position: &usize| {
            let first = all[0][*position];
            all.iter().any(|norms| (norms[*position] - first).abs() > TOLERANCE * first.abs() + 1e-12)
        };
        match (0..self.whole.len()).find(differs) {
            Some(position) => {
                let parameter = self.whole[position].name().to_owned();
                let norms: Vec<String> = all.iter().map(|norms| format!("{:.3e}", norms[position])).collect();
                Err(StateError::DifferentGradients { parameter, norms: norms.join(", ") }.into())
            }
            None => Ok(()),
        }
    }
}

/// Which ranks have which features of each layer.
fn divide(
    layers: &[(String, AnyLayer)],
    plan: TensorParallelPlan,
    own: Option<&TensorParallelPlan>,
    tp_size: usize,
) -> Result<Vec<DividedLayer>> {
    let entries: Vec<LayerEntry> = layers.iter().map(|(path, layer)| entry(path, layer)).collect();
    let plan = match (plan.is_empty(), own) {
        (true, None) => return Err(StateError::NoTensorParallelPlan.into()),
        (true, Some(own)) => own.clone(),
        (false, Some(own)) => plan.with_units_of(own, &entries),
        (false, None) => plan,
    };
    let divided = plan.divide(&entries, tp_size)?;
    for layer in &divided {
        let (path, layer) = &layers[layer.layer];
        if let Some(obstacle) = obstacle(layer) {
            return Err(StateError::NotDivisible { path: path.clone(), obstacle }.into());
        }
    }
    Ok(divided)
}

fn entry(path: &str, layer: &AnyLayer) -> LayerEntry {
    let size = |size: i64| size.max(0) as usize;
    let (kind, sizes, weight) = match (layer, layer.linear()) {
        (AnyLayer::Embedding(Embedding { weight, .. }), _) => {
            let shape = weight.shape();
            let [rows, columns] = [0, 1].map(|dim| shape.get(dim).copied().map_or(0, size));
            (LayerKind::Embedding, [rows, columns], Some(weight.name().to_owned()))
        }
        (_, Some(linear)) => (LayerKind::Linear, linear.sizes().map(size), Some(linear.weight().name().to_owned())),
        _ => (LayerKind::Other(layer.kind()), [0, 0], None),
    };
    let entry = LayerEntry::new(path, kind, sizes);
    LayerEntry { weight: weight.unwrap_or_else(|| entry.weight.clone()), ..entry }
}

/// Why ranks cannot divide the layer, if they cannot.
fn obstacle(layer: &AnyLayer) -> Option<&'static str> {
    let (is_dense, is_merged) = match (layer, layer.linear()) {
        (AnyLayer::Embedding(embedding), _) => (embedding.kernel().is_dense(), false),
        (_, Some(linear)) => (linear.is_dense(), linear.inner_layers().is_none()),
        _ => (true, false),
    };
    if is_merged {
        return Some("adapters are merged into it");
    }
    if layer.params().iter().any(Param::is_stored_as_several) {
        return Some("its weight is quantised");
    }
    (!is_dense).then_some("it is computed by a kernel of its own")
}

/// By the name of a parameter.
fn slices(layers: &[(String, AnyLayer)], divided: &[DividedLayer]) -> HashMap<String, Slices> {
    let mut slices = HashMap::new();
    for own in divided {
        let layer = &layers[own.layer].1;
        let mut insert = |param: &Param, dim: usize| {
            let (parts, ranges) = (own.parts, own.slices.clone().into());
            slices.insert(param.name().to_owned(), Slices { dim, parts, ranges });
        };
        match (layer, layer.linear()) {
            (AnyLayer::Embedding(Embedding { weight, .. }), _) => insert(weight, own.size_index()),
            (_, Some(linear)) => {
                let dim = own.size_index();
                let mut insert_both = |weight: &Param, bias: Option<&Param>, is_transposed: bool| {
                    insert(weight, if is_transposed { 1 - dim } else { dim });
                    // The bias of a rowwise layer is added to the sum.
                    bias.filter(|_| own.style.is_colwise()).into_iter().for_each(|bias| insert(bias, 0));
                };
                insert_both(linear.weight(), linear.bias(), linear.is_transposed());
                for (place, inner) in divided_with(&linear, own.style) {
                    let is_transposed = place == InnerPlace::Instead && linear.is_transposed();
                    insert_both(&inner.weight, inner.bias.as_ref(), is_transposed);
                }
            }
            _ => {}
        }
    }
    slices
}

/// The layers within one of this style that are divided as that is. Between the two layers of an adapter are few features, which all
/// ranks have: with a colwise layer the second is divided, with a rowwise layer the first.
fn divided_with(linear: &LinearLayer, style: ParallelStyle) -> Vec<(InnerPlace, Linear)> {
    let mut inner = linear.inner_layers().unwrap_or_default();
    inner.retain(|(place, _)| match place {
        InnerPlace::First => style.is_rowwise(),
        InnerPlace::Last => style.is_colwise(),
        InnerPlace::Instead => true,
    });
    inner
}

fn divide_parameter(
    param: &Param,
    full: &Tensor,
    slices: &HashMap<String, Slices>,
    (region, holders): &(Region, Group),
) -> Result<()> {
    let Some(slices) = slices.get(param.name()) else { return Ok(()) };
    let storage = SliceStorage::new(param, full, slices.clone(), region, holders.clone())?;
    drop(param.replace_storage(Box::new(storage)));
    Ok(())
}

fn set_kernel(layer: &AnyLayer, own: &DividedLayer, region: &Region) {
    let is_transposed = layer.linear().is_some_and(|linear| linear.is_conv1d());
    let divided = Divided { region: region.clone(), slices: own.slices.clone().into(), is_transposed };
    if let AnyLayer::Embedding(embedding) = layer {
        match own.style {
            ParallelStyle::EmbeddingRowwise => embedding.set_kernel(Arc::new(EmbeddingRowwise(divided))),
            _ => embedding.set_kernel(Arc::new(EmbeddingColwise(divided))),
        }
        return;
    }
    let Some(linear) = layer.linear() else { return };
    let kernel = |divided: Divided| -> Arc<dyn LinearKernel> {
        if own.style.is_rowwise() {
            let splits_input = own.style == ParallelStyle::RowwiseSplitInput;
            return Arc::new(Rowwise { divided, splits_input });
        }
        let gathers_output = own.style == ParallelStyle::ColwiseGatherOutput;
        Arc::new(Colwise { divided, gathers_output, parts: own.parts })
    };
    for (place, inner) in divided_with(&linear, own.style) {
        let is_transposed = place == InnerPlace::Instead && is_transposed;
        inner.set_kernel(kernel(Divided { is_transposed, ..divided.clone() }));
    }
    linear.set_kernel(kernel(divided));
}
