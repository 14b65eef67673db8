//! Tensor parallelism: several ranks compute each layer together, and each has a slice of its weights.
//!
//! Method: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", arXiv 1909.08053.
//! A colwise layer has some output features on each rank, a rowwise layer behind it the same input features: one sum over ranks in
//! the forward pass, and one in the backward pass. Parameters that all ranks have get the same gradient on all of them.

mod cross_entropy;
mod kernels;
mod products;
mod region;
mod storage;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod tokens;

use super::replicate::{check_same_model, copy_from, difference_from_main};
use crate::error::{Error, Kind as ErrorKind, NnError, Result, StateError};
use crate::group::Group;
use crate::messages;
use crate::nn::{AnyLayer, Embedding, InnerPlace, Linear, LinearKernel, LinearLayer, Param, ParamStore};
use crate::session::DeviceMesh;
use accelerate_core::config::TensorParallelSettings;
use accelerate_core::mesh::{Axis, Mesh};
use accelerate_core::tensor_parallel::{DividedLayer, LayerEntry, LayerKind, ParallelStyle, TensorParallelPlan};
use kernels::{Colwise, Divided, EmbeddingColwise, EmbeddingRowwise, Rowwise};
use region::Region;
pub(super) use region::{compare_numbers, hash_of};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use storage::{SliceStorage, Slices, SummedGradientStorage};
use tch::{Kind, Tensor};
use tokens::{DropoutOfTokens, EmbeddingOfTokens, NormOfTokens, UnnamedDropout};

/// A model whose layers several ranks compute together.
#[derive(Clone, Debug)]
pub(crate) struct TensorParallel {
    region: Region,
    /// Parameters that each rank has whole, and whose gradients are still to be compared.
    to_compare: Arc<Mutex<Vec<Compared>>>,
}

/// A parameter that each rank has whole.
#[derive(Debug)]
struct Compared {
    param: Param,
    /// The parameter belongs to a layer, so that a plan can name it.
    is_of_layer: bool,
    /// In how many steps with a gradient that is not zero it is still to be compared.
    checks_left: usize,
    /// In how many steps with any gradient, at most.
    steps_left: usize,
}

/// A model that is built wrongly shows in its first steps.
const NUM_CHECKS: usize = 3;
/// One whose gradient is zero all the time is not compared for ever.
const MOST_STEPS: usize = 100;

impl TensorParallel {
    /// Divides the layers of a model over the ranks along [`Axis::Tp`], with the values of rank 0 of the job. `settings` have the
    /// program's plan, `own` is the model's. `is_sharded`: the slices are sharded, too. Collective.
    ///
    /// # Errors
    /// Ranks with different models or plans; no plan at all; those of [`TensorParallelPlan::divide`]; a layer that is quantised, or
    /// computes with a kernel of the program's.
    pub(crate) fn start(
        mesh: &DeviceMesh,
        store: &ParamStore,
        (settings, own): (&TensorParallelSettings, Option<&TensorParallelPlan>),
        is_sharded: bool,
    ) -> Result<Self> {
        let (job, tp_size) = (mesh.job(), mesh.shape().size(Axis::Tp));
        let layers = store.named_layers();
        let divided = divide(&layers, settings, own, tp_size);
        let divided = job.agree_on_success("prepare", divided)?;
        let plan: String = divided.iter().map(|own| described(&layers[own.layer].0, own)).collect();
        if let Some(plans) = job.disagreement("prepare of a tensor-parallel model", &plan)? {
            let (rank, on_main, there) = difference_from_main(&plans);
            return Err(StateError::DifferentPlans { rank, on_main, there }.into());
        }
        check_same_model(job, store)?;
        let divides_tokens = divided.iter().any(|layer| layer.style == ParallelStyle::SequenceParallel);
        let region = Region::new(mesh.group(&[Axis::Tp])?, divides_tokens)?;
        let parts = parts(&layers, &divided, divides_tokens);
        // Of a model that is sharded, too, the ranks that divide a layer share their slices with others.
        let sharing = [Mesh::SHARD, &[Axis::Tp]].concat();
        let holders = if is_sharded { mesh.group(&sharing)? } else { region.group().clone() };
        let ranks = (region.clone(), holders);
        copy_from(job, store, 0)?;
        for param in store.parameters().iter().filter(|param| !param.is_deferred()) {
            divide_parameter(param, &param.local(), &parts, &ranks)?;
        }
        store.initialise_each(|param, full| {
            job.broadcast(&full, 0)?;
            if !matches!(parts.get(param.name()), Some(Part::Slices(_))) {
                param.set_replicated(full.shallow_clone())?;
            }
            divide_parameter(param, &full, &parts, &ranks)
        })?;
        for layer in &divided {
            set_kernel(&layers[layer.layer].1, layer, &region);
        }
        if divides_tokens {
            let is_named = |place: usize| divided.iter().any(|layer| layer.layer == place);
            for (_, (path, layer)) in layers.iter().enumerate().filter(|(place, _)| !is_named(*place)) {
                if let (AnyLayer::TokenWise(dropout), "Dropout") = (layer, layer.kind()) {
                    dropout.set_around(Arc::new(UnnamedDropout { region: region.clone(), path: path.clone() }));
                }
            }
        }
        warn_of_parts(&layers, &divided);
        region.share_random_state(store.device())?;
        let of_layers: HashSet<String> =
            layers.iter().flat_map(|(_, layer)| layer.params()).map(|param| param.name().to_owned()).collect();
        let whole = store.trainable_parameters().into_iter().filter(|param| param.slice_param().is_none());
        let to_compare = whole.map(|param| {
            let is_of_layer = of_layers.contains(param.name());
            Compared::new(param, is_of_layer)
        });
        Ok(Self { region, to_compare: Arc::new(Mutex::new(to_compare.collect())) })
    }

    /// Before a forward pass of the model.
    pub(crate) fn begin_forward(&self) {
        self.region.begin_forward();
    }

    /// After one that has failed.
    pub(crate) fn abandon_forward(&self) {
        self.region.end_forward();
    }

    /// Says with a size that does not fit, in a forward pass, what ranks have.
    pub(crate) fn explain(&self, error: Error) -> Error {
        if !matches!(error.kind(), ErrorKind::Tensor(_) | ErrorKind::Nn(NnError::Forward { .. })) {
            return error;
        }
        let num_ranks = self.region.group().world_size();
        let tokens = match self.region.has_divided_tokens() {
            true => {
                ", and each rank has some tokens of what is between them, unless a layer gives all (output_layouts)"
            }
            false => "",
        };
        error.context(format!(
            "in a forward pass that {num_ranks} ranks compute together (if sizes do not fit: a colwise layer gives each rank some features, \
             which a rowwise layer takes; colwise_gather_output gives all, rowwise_split_input takes all; heads that do not divide evenly need \"unit\"{tokens})"
        ))
    }

    /// After one that has not. Collective.
    ///
    /// # Errors
    /// Ranks that have drawn different random numbers, or give some tokens each.
    pub(crate) fn end_forward(&self) -> Result<()> {
        let gives_some_tokens = self.region.end_forward();
        self.region.compare_draws()?;
        if gives_some_tokens { Err(StateError::OutputOfTokens.into()) } else { Ok(()) }
    }

    /// Before the first steps of each parameter that each rank has whole: all must have got the same gradient. They have not where such
    /// a layer stands between divided ones, and sees some features on each rank. Collective as long as some are still to be compared.
    ///
    /// # Errors
    /// The first parameter whose gradients differ, on all ranks.
    pub(crate) fn check_gradients(&self) -> Result<()> {
        let mut to_compare = self.to_compare.lock().unwrap_or_else(PoisonError::into_inner);
        // All ranks take the same parameters out of the list, so it becomes empty on all of them at once.
        if to_compare.is_empty() {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        let group = self.region.group();
        let gradients: Vec<Option<Tensor>> = to_compare.iter().map(|own| own.param.grad()).collect();
        let lines = to_compare.iter().zip(&gradients).map(|(own, gradient)| {
            let has_gradient = if gradient.is_some() { "a gradient" } else { "none" };
            format!("{}\t{has_gradient}\n", own.param.layout())
        });
        if let Some(texts) = group.disagreement("gradients of whole parameters", &lines.collect::<String>())? {
            return match first_without_gradient(&texts) {
                Some(place) => Err(to_compare[place].different("a gradient on some ranks only".to_owned())),
                // Shards of a unit with slices of different sizes begin at other elements.
                None => {
                    to_compare.clear();
                    Ok(())
                }
            };
        }
        let mut now: Vec<(&mut Compared, Tensor)> =
            to_compare.iter_mut().zip(gradients).filter_map(|(own, gradient)| Some((own, gradient?))).collect();
        if now.is_empty() {
            return Ok(());
        }
        let norm = |(_, grad): &(&mut Compared, Tensor)| match grad.numel() > 0 && !grad.is_sparse() {
            true => Ok(grad.f_to_kind(Kind::Double)?.f_norm()?.f_double_value(&[])?),
            false => Ok(0.0),
        };
        let norms = group.agree_on_success("norms of gradients", now.iter().map(norm).collect::<Result<Vec<f64>>>())?;
        let all = group.all_gather(&Tensor::f_from_slice(&norms)?)?;
        let all: Vec<Vec<f64>> = all.iter().map(|norms| Ok(Vec::<f64>::try_from(norms)?)).collect::<Result<_>>()?;
        for (position, (own, _)) in now.iter_mut().enumerate() {
            own.compare(&all.iter().map(|norms| norms[position]).collect::<Vec<f64>>())?;
        }
        drop(now);
        // What is sharded in the same way everywhere, and has no elements here, has none on the others either.
        to_compare.retain(|own| own.checks_left > 0 && own.steps_left > 0 && own.param.local().numel() > 0);
        Ok(())
    }
}

impl Compared {
    fn new(param: Param, is_of_layer: bool) -> Self {
        Self { param, is_of_layer, checks_left: NUM_CHECKS, steps_left: MOST_STEPS }
    }

    /// `norms` are those of all ranks, in a step in which it has a gradient.
    fn compare(&mut self, norms: &[f64]) -> Result<()> {
        const TOLERANCE: f64 = 1e-2;
        let first = norms.first().copied().unwrap_or(0.0);
        if norms.iter().any(|norm| (norm - first).abs() > TOLERANCE * first.abs() + 1e-12) {
            let norms: Vec<String> = norms.iter().map(|norm| format!("{norm:.3e}")).collect();
            return Err(self.different(norms.join(", ")));
        }
        // One that is part of no loss yet may have a gradient of zeros.
        self.checks_left -= usize::from(first != 0.0);
        self.steps_left -= 1;
        Ok(())
    }

    fn different(&self, norms: String) -> Error {
        let parameter = self.param.name().to_owned();
        match self.is_of_layer {
            true => StateError::DifferentGradients { parameter, norms }.into(),
            false => StateError::DifferentGradientsOfNoLayer { parameter, norms }.into(),
        }
    }
}

/// Of ranks that have the same parts of all parameters, the first parameter that has a gradient on some ranks only.
fn first_without_gradient(texts: &[String]) -> Option<usize> {
    let lines = |text: &String| -> Vec<(String, bool)> {
        let line = |line: &str| line.split_once('\t').map(|(layout, found)| (layout.to_owned(), found == "a gradient"));
        text.lines().filter_map(line).collect()
    };
    let ranks: Vec<_> = texts.iter().map(lines).collect();
    let first = ranks.first()?;
    let has_same_layouts = |other: &Vec<(String, bool)>| {
        other.len() == first.len() && other.iter().zip(first).all(|((one, _), (another, _))| one == another)
    };
    if !ranks.iter().all(has_same_layouts) {
        return None;
    }
    (0..first.len()).find(|&place| ranks.iter().any(|own| own[place].1 != first[place].1))
}

/// A divided layer in one line, as plans of ranks are compared.
fn described(path: &str, own: &DividedLayer) -> String {
    let DividedLayer { style, parts, slices, gathers_tokens, .. } = own;
    let parts = if *parts > 1 { format!(" of {parts} parts") } else { String::new() };
    let slices: Vec<String> = slices.iter().map(|slice| format!("{}..{}", slice.start, slice.end)).collect();
    let slices = if slices.is_empty() { String::new() } else { format!(", features {} by rank", slices.join(", ")) };
    let gathers = if *gathers_tokens { ", with all tokens" } else { "" };
    format!("{path}: {style}{parts}{slices}{gathers}\n")
}

/// Warns of queries, keys and values in one layer, which are three parts, where the plan has the default of two.
fn warn_of_parts(layers: &[(String, AnyLayer)], divided: &[DividedLayer]) {
    for own in divided.iter().filter(|own| own.style == ParallelStyle::PackedColwise && own.parts == 2) {
        let (path, layer) = &layers[own.layer];
        if let Some([outputs, inputs]) = layer.linear().map(|linear| linear.sizes())
            && outputs == 3 * inputs
        {
            messages::warning!(
                "the plan divides {path} as packed_colwise with 2 parts, and it has 3 times as many outputs as inputs: if these are \
                 queries, keys and values, say \"parts\": 3"
            );
        }
    }
}

/// Which ranks have which features of each layer.
fn divide(
    layers: &[(String, AnyLayer)],
    settings: &TensorParallelSettings,
    own: Option<&TensorParallelPlan>,
    tp_size: usize,
) -> Result<Vec<DividedLayer>> {
    let plan = TensorParallelPlan::from_json(&settings.parallelize_plan.clone().unwrap_or_default())?;
    let entries: Vec<LayerEntry> = layers.iter().map(|(path, layer)| entry(path, layer)).collect();
    let plan = plan.for_layers(own, &entries)?;
    let plan = if settings.sequence_parallelism { plan.with_sequence_parallelism(own)? } else { plan };
    let divided = plan.divide(&entries, tp_size)?;
    for layer in &divided {
        let (path, layer) = &layers[layer.layer];
        if let Some(obstacle) = obstacle(layer, plan.divides_sequence()) {
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
fn obstacle(layer: &AnyLayer, divides_tokens: bool) -> Option<&'static str> {
    if matches!(layer, AnyLayer::Embedding(embedding) if divides_tokens && embedding.has_adapters()) {
        return Some("it has adapters, which look up all tokens, and the plan divides those");
    }
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

/// What a rank has of a parameter, where that is not as on one rank.
enum Part {
    Slices(Slices),
    /// All of it, and a part of its gradient.
    SummedGradient,
}

/// By the name of a parameter.
fn parts(layers: &[(String, AnyLayer)], divided: &[DividedLayer], divides_tokens: bool) -> HashMap<String, Part> {
    let mut parts = HashMap::new();
    for own in divided {
        let layer = &layers[own.layer].1;
        let summed = match (own.style.is_whole(), layer.linear()) {
            (true, None) => layer.params(),
            (true, Some(linear)) => {
                let inner = linear.inner_layers().unwrap_or_default().into_iter();
                let inner = inner.flat_map(|(_, layer)| std::iter::once(layer.weight.clone()).chain(layer.bias));
                layer.params().into_iter().chain(inner).collect()
            }
            // What is added to the sum of all ranks is added to some tokens of it.
            (false, Some(linear)) if divides_tokens => of_some_tokens(&linear, own.style),
            (false, _) => Vec::new(),
        };
        let summed = summed.into_iter().filter(|param| !param.is_buffer());
        parts.extend(summed.map(|param| (param.name().to_owned(), Part::SummedGradient)));
        let mut insert = |param: &Param, dim: usize| {
            let (parts_of_dim, ranges) = (own.parts, own.slices.clone().into());
            let slices = Slices { dim, parts: parts_of_dim, ranges };
            parts.insert(param.name().to_owned(), Part::Slices(slices));
        };
        match (layer, layer.linear()) {
            _ if own.style.is_whole() => {}
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
    parts
}

/// Parameters of a divided layer that each rank has whole, and uses for some tokens where ranks divide them.
fn of_some_tokens(linear: &LinearLayer, style: ParallelStyle) -> Vec<Param> {
    let of_inner = |(place, inner): (InnerPlace, Linear)| {
        let Linear { weight, bias, .. } = inner;
        match place {
            InnerPlace::First => (style.is_colwise().then_some(weight), bias.filter(|_| style.is_colwise())),
            InnerPlace::Last => (style.is_rowwise().then_some(weight), bias.filter(|_| style.is_rowwise())),
            InnerPlace::Instead => (None, bias.filter(|_| style.is_rowwise())),
        }
    };
    let inner = linear.inner_layers().unwrap_or_default().into_iter().map(of_inner);
    let inner = inner.flat_map(|(weight, bias)| weight.into_iter().chain(bias));
    linear.bias().filter(|_| style.is_rowwise()).cloned().into_iter().chain(inner).collect()
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
    parts: &HashMap<String, Part>,
    (region, holders): &(Region, Group),
) -> Result<()> {
    match parts.get(param.name()) {
        None => {}
        Some(Part::Slices(slices)) => {
            let storage = SliceStorage::new(param, full, slices.clone(), region, holders.clone())?;
            drop(param.replace_storage(Box::new(storage)));
        }
        Some(Part::SummedGradient) => {
            drop(param.replace_storage(Box::new(SummedGradientStorage::new(param, region))));
        }
    }
    Ok(())
}

fn set_kernel(layer: &AnyLayer, own: &DividedLayer, region: &Region) {
    let is_transposed = layer.linear().is_some_and(|linear| linear.is_conv1d());
    let divided = Divided { region: region.clone(), slices: own.slices.clone().into(), is_transposed };
    if own.style.is_whole() {
        return set_around(layer, own, region);
    }
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

/// A layer that each rank has whole. One that sees some features on each rank computes as it always does.
fn set_around(layer: &AnyLayer, own: &DividedLayer, region: &Region) {
    if own.style != ParallelStyle::SequenceParallel {
        return;
    }
    let (region, gathers_tokens) = (region.clone(), own.gathers_tokens);
    match layer {
        AnyLayer::Embedding(embedding) => embedding.set_kernel(Arc::new(EmbeddingOfTokens { region, gathers_tokens })),
        AnyLayer::TokenWise(dropout) if layer.kind() == "Dropout" => {
            dropout.set_around(Arc::new(DropoutOfTokens { region, gathers_tokens }));
        }
        AnyLayer::TokenWise(norm) => norm.set_around(Arc::new(NormOfTokens::new(region, gathers_tokens))),
        _ => {}
    }
}
