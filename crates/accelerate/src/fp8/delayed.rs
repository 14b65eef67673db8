//! Delayed scaling: scales are made of the largest values of the passes before, and largest values of this pass are kept for the
//! next ones.
//!
//! Method: TransformerEngine, `pytorch/module/linear.py` and `pytorch/quantization.py`; what a scale is made of,
//! [`accelerate_core::fp8::ScalingState`] decides. TransformerEngine updates the scales of the forward pass at its end and those of
//! the backward pass at its end, with one collective each. Here both are updated at the end of the backward pass, with one
//! collective for all: what a segment of activation checkpointing computes twice is computed with the same scales then. It makes a
//! difference only where a second forward pass comes before the backward pass of the first.

use super::cast::Codes;
use super::product::{ProductOptions, Products};
use super::{check_input, computed_in, dense, rows, shaped_like, without_autocast};
use crate::error::{Fp8Error, Result};
use crate::group::{Group, ReduceOp};
use crate::nn::{DenseKernel, LinearKernel, Param, TrainingFlag};
use crate::session::Scaling;
use accelerate_core::fp8::{DelayedScaling, Float8, ScalingState};
use serde_json::{Map, Value};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Device, Kind, Tensor};
use torch_ext::autograd::is_grad_enabled;
use torch_ext::fp8::largest_number;
use torch_ext::function::apply_function;
use torch_ext::scalar;

/// The tensors of a layer that become codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Input,
    Weight,
    Gradient,
}

impl Role {
    const ALL: [Self; 3] = [Self::Input, Self::Weight, Self::Gradient];

    /// Its name in checkpoints.
    fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Weight => "weight",
            Self::Gradient => "grad_output",
        }
    }

    fn format(self, recipe: &DelayedScaling) -> Float8 {
        match self {
            Self::Input | Self::Weight => Float8::E4M3,
            Self::Gradient => recipe.gradient_format(),
        }
    }
}

/// What is remembered of one layer, and the largest values of the pass that is under way.
#[derive(Debug)]
pub(super) struct LayerScaling {
    path: String,
    tensors: Mutex<[Remembered; 3]>,
}

#[derive(Debug)]
struct Remembered {
    state: ScalingState,
    /// 0-d and Float, on the device.
    amax: Option<Tensor>,
}

impl LayerScaling {
    fn new(path: &str, amax_history_len: usize) -> Self {
        let remembered = || Remembered { state: ScalingState::new(amax_history_len), amax: None };
        Self { path: path.to_owned(), tensors: Mutex::new([remembered(), remembered(), remembered()]) }
    }

    fn lock(&self) -> MutexGuard<'_, [Remembered; 3]> {
        // Whole after every statement, also where another thread panicked.
        self.tensors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn scale(&self, role: Role) -> f32 {
        self.lock()[role as usize].state.scale()
    }

    /// Keeps the largest value of a tensor for the end of the pass.
    fn record(&self, role: Role, matrix: &Tensor) -> Result<()> {
        let found = largest_number(matrix)?;
        let mut tensors = self.lock();
        let kept = &mut tensors[role as usize].amax;
        *kept = Some(match kept.take() {
            Some(before) => before.f_maximum(&found)?,
            None => found,
        });
        Ok(())
    }
}

/// The scales of all layers of a model.
#[derive(Debug)]
pub(crate) struct DelayedScales {
    recipe: DelayedScaling,
    layers: Vec<Arc<LayerScaling>>,
    group: Group,
    device: Device,
}

impl DelayedScales {
    pub(super) fn new<'a>(
        recipe: DelayedScaling,
        paths: impl Iterator<Item = &'a str>,
        group: Group,
        device: Device,
    ) -> Self {
        let layers = paths.map(|path| Arc::new(LayerScaling::new(path, recipe.amax_history_len))).collect();
        Self { recipe, layers, group, device }
    }

    pub(super) fn layers(&self) -> &[Arc<LayerScaling>] {
        &self.layers
    }

    /// The largest values of this pass, over all ranks; zero where a layer was not used. Collective.
    fn take_amaxes(&self) -> Result<Vec<f32>> {
        let mut amaxes = Vec::with_capacity(Role::ALL.len() * self.layers.len());
        for layer in &self.layers {
            for remembered in layer.lock().iter_mut() {
                amaxes.push(match remembered.amax.take() {
                    Some(amax) => amax,
                    None => scalar::full(&[], 0, (Kind::Float, self.device))?,
                });
            }
        }
        let amaxes = Tensor::f_stack(&amaxes, 0)?;
        if self.group.world_size() > 1 {
            self.group.all_reduce(&amaxes, ReduceOp::Max)?;
        }
        Ok(Vec::try_from(&amaxes.f_to_device(Device::Cpu)?)?)
    }
}

impl Scaling for DelayedScales {
    fn after_backward(&self) -> Result<()> {
        if self.layers.is_empty() {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        let amaxes = self.take_amaxes()?;
        for (layer, amaxes) in self.layers.iter().zip(amaxes.chunks(Role::ALL.len())) {
            let mut tensors = layer.lock();
            for ((role, remembered), amax) in Role::ALL.into_iter().zip(tensors.iter_mut()).zip(amaxes) {
                remembered.state.update(&self.recipe, role.format(&self.recipe), *amax);
            }
        }
        Ok(())
    }

    fn before_step(&self) -> Result<()> {
        let is_pending = |layer: &&Arc<LayerScaling>| layer.lock()[Role::Gradient as usize].amax.is_some();
        match self.layers.iter().find(is_pending) {
            Some(layer) => Err(Fp8Error::OtherBackward { path: layer.path.clone() }.into()),
            None => Ok(()),
        }
    }

    fn state(&self) -> Value {
        let layer = |layer: &Arc<LayerScaling>| {
            let tensors = layer.lock();
            let states = Role::ALL.iter().zip(tensors.iter());
            let states = states.map(|(role, remembered)| (role.name().to_owned(), remembered.state.to_json()));
            (layer.path.clone(), Value::Object(states.collect()))
        };
        Value::Object(self.layers.iter().map(layer).collect::<Map<_, _>>())
    }

    fn load_state(&self, state: &Value) {
        let length = self.recipe.amax_history_len;
        for layer in &self.layers {
            let saved = state.get(&layer.path);
            for (role, remembered) in Role::ALL.into_iter().zip(layer.lock().iter_mut()) {
                let saved = saved.and_then(|saved| saved.get(role.name()));
                let saved = saved.and_then(|saved| ScalingState::of_json(saved, length));
                *remembered = Remembered { state: saved.unwrap_or_else(|| ScalingState::new(length)), amax: None };
            }
        }
    }
}

/// `x W^T + b` of codes, with scales of the passes before.
#[derive(Debug)]
pub(super) struct DelayedLinear {
    pub(super) recipe: DelayedScaling,
    pub(super) products: Products,
    pub(super) training: TrainingFlag,
    pub(super) scaling: Arc<LayerScaling>,
}

/// What the backward pass of a layer needs besides what is saved in the graph.
#[derive(Clone)]
struct Backward {
    recipe: DelayedScaling,
    products: Products,
    scaling: Arc<LayerScaling>,
    /// Of the forward pass, whose codes of the weight are made again.
    weight_scale: f32,
    /// Of the input and of the weight, which their gradients have, too.
    kinds: [Kind; 2],
}

impl Backward {
    fn options(&self, adds_fast: bool) -> ProductOptions<'_> {
        let pad_inner_dim = self.recipe.pad_inner_dim;
        ProductOptions { path: &self.scaling.path, pad_inner_dim, adds_fast }
    }

    /// The gradients of the input and of the weight, as far as they are `needed`.
    fn gradients(&self, gradient: &Tensor, saved: [&Tensor; 3], needed: [bool; 2]) -> Result<[Option<Tensor>; 2]> {
        let [x_data, x_scale, weight] = saved;
        let matrix = rows(gradient)?;
        self.scaling.record(Role::Gradient, &matrix)?;
        let format = self.recipe.gradient_format();
        let codes = Codes::delayed(&matrix, format, self.scaling.scale(Role::Gradient))?;
        let (kind, [x_kind, weight_kind]) = (gradient.f_kind()?, self.kinds);
        let of_input = || -> Result<Tensor> {
            let weight = Codes::delayed(weight, Float8::E4M3, self.weight_scale)?;
            let product = self.products.product(&codes, &weight, kind, self.options(false))?;
            Ok(shaped_like(&product, gradient)?.f_to_kind(x_kind)?)
        };
        let of_weight = || -> Result<Tensor> {
            let x = Codes { data: x_data.shallow_clone(), scale: x_scale.shallow_clone() };
            let product = self.products.product(&codes.transposed()?, &x, kind, self.options(false))?;
            Ok(product.f_to_kind(weight_kind)?)
        };
        Ok([needed[0].then(of_input).transpose()?, needed[1].then(of_weight).transpose()?])
    }
}

impl DelayedLinear {
    /// The output, and what is saved of the input: its codes and their scale.
    fn output(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, backward: &Backward) -> Result<[Tensor; 3]> {
        let codes = Codes::delayed(&rows(x)?, Float8::E4M3, self.scaling.scale(Role::Input))?;
        let weight = Codes::delayed(weight, Float8::E4M3, backward.weight_scale)?.transposed()?;
        let product = self.products.product(&codes, &weight, Kind::Float, backward.options(true))?;
        let kind = x.f_kind()?;
        let output = match bias {
            Some(bias) => product.f_add(&bias.f_to_kind(kind)?.f_to_kind(Kind::Float)?)?,
            None => product,
        };
        Ok([shaped_like(&output.f_to_kind(kind)?, x)?, codes.data, codes.scale])
    }
}

impl LinearKernel for DelayedLinear {
    fn linear(&self, input: &Tensor, weight: &Param, bias: Option<&Param>) -> Result<Tensor> {
        if !self.training.get() && !self.recipe.during_eval {
            return DenseKernel.linear(input, weight, bias);
        }
        check_input(&self.scaling.path, input, weight)?;
        if input.numel() == 0 {
            return DenseKernel.linear(input, weight, bias);
        }
        let (x, full) = (input.f_to_kind(computed_in(input)?)?, weight.get()?);
        let bias = bias.map(Param::get).transpose()?;
        if is_grad_enabled() {
            self.scaling.record(Role::Input, &x)?;
            self.scaling.record(Role::Weight, &full)?;
        }
        let backward = Backward {
            recipe: self.recipe,
            products: self.products,
            scaling: Arc::clone(&self.scaling),
            weight_scale: self.scaling.scale(Role::Weight),
            kinds: [x.f_kind()?, full.f_kind()?],
        };
        let (inputs, bias_kind) =
            ([&x, &full].into_iter().chain(&bias).collect::<Vec<_>>(), bias.as_ref().map(Tensor::f_kind).transpose()?);
        let for_backward = backward.clone();
        let output = apply_function(
            "DelayedFloat8Linear",
            &inputs,
            |context| {
                let [output, x_data, x_scale] =
                    without_autocast(&x, || self.output(&x, &full, bias.as_ref(), &backward))?;
                context.save_for_backward(&[&x_data, &x_scale, &full]);
                Ok(vec![output])
            },
            move |context, gradients| {
                let mut results: Vec<Option<Tensor>> = bias_kind.iter().map(|_| None).chain([None, None]).collect();
                let Some(Some(gradient)) = gradients.first() else { return Ok(results) };
                let saved = context.saved_tensors()?;
                let [x_data, x_scale, full] = &saved[..] else { return Err("three tensors were saved".into()) };
                let needed = [context.needs_input_grad(0), context.needs_input_grad(1)];
                let found =
                    without_autocast(gradient, || for_backward.gradients(gradient, [x_data, x_scale, full], needed))?;
                results.iter_mut().zip(found).for_each(|(place, found)| *place = found);
                if let (Some(kind), Some(place)) = (bias_kind, results.get_mut(2)) {
                    *place = Some(rows(gradient)?.f_sum_dim_intlist([0i64].as_slice(), false, kind)?);
                }
                Ok(results)
            },
        )?
        .swap_remove(0);
        Ok(output)
    }

    fn is_dense(&self) -> bool {
        true
    }

    fn replaced(&self) -> Option<Arc<dyn LinearKernel>> {
        dense()
    }
}
