//! RMSprop.

use super::Optimizer;
use super::batches::{Batch, Batches};
use super::flat::{self, Steps};
use super::handle::{GroupDefaults, GroupSettings, OptimizerHandle, ParamGroup, at_least_zero};
use super::state::{Loading, OptimizerState, SharedOptions, save_groups, save_layouts, save_tensor};
use crate::error::Result;
use crate::nn::ParamStore;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};
use torch_ext::{TensorVec, foreach};

/// RMSprop, as `torch.optim.RMSprop`: gradients are divided by a running average of their size.
///
/// Each step moves a parameter by `lr * gradient / (sqrt(square_avg) + eps)`, where `square_avg` keeps
/// `alpha` of itself and takes `1 - alpha` of the squared gradient (Hinton, "Neural Networks for Machine
/// Learning", lecture 6e, 2012). With `centered`, the squared average of the gradient is taken off
/// `square_avg` (Graves, "Generating Sequences With Recurrent Neural Networks", 2013); with momentum,
/// the quotient enters a buffer and the buffer moves the parameter. Weight decay is added to the
/// gradient.
///
/// State is made at a parameter's first step with a gradient: `square_avg`, with momentum
/// `momentum_buffer`, with `centered` `grad_avg`, all of its shape and dtype, and `step`, a float scalar.
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::{Optimizer, RMSprop}, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// let weight = store.root().param("weight", ([1], Init::Zeros))?;
/// let mut optimizer = RMSprop::new(&store, 0.1)?;
/// (weight.get()? * 5.0).sum(None).backward();
/// optimizer.step()?;
/// // 0.1 * 5 / sqrt(0.01 * 25)
/// assert!((weight.get()?.double_value(&[0]) + 1.0).abs() < 1e-6);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct RMSprop {
    handle: OptimizerHandle,
    options: Options,
    /// Group by group, in the order of the parameters.
    averages: Vec<Option<Averages>>,
    /// Only with momentum, which a schedule may switch on later.
    momentum_buffers: Vec<Option<Tensor>>,
    batches: Batches<Lists>,
}

/// The averages of the parameters of one batch.
#[derive(Debug)]
struct Lists {
    steps: Steps,
    square_avgs: TensorVec,
    /// Empty without momentum.
    momentum_buffers: TensorVec,
    /// Empty unless centered.
    grad_avgs: TensorVec,
}

/// Settings that all groups share, under the names PyTorch saves them by.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Options {
    alpha: f64,
    eps: f64,
    centered: bool,
    maximize: bool,
}

impl SharedOptions for Options {
    fn check(&self, owner: &'static str, _momenta: &[f64]) -> Result<()> {
        at_least_zero(owner, "alpha", self.alpha)?;
        at_least_zero(owner, "eps", self.eps)
    }
}

#[derive(Debug)]
struct Averages {
    step: Tensor,
    square_avg: Tensor,
    /// Only if centered.
    grad_avg: Option<Tensor>,
}

impl Averages {
    fn zeros(params: &[Tensor], centered: bool) -> Result<Vec<Self>> {
        let averages: Vec<_> = match centered {
            true => flat::full_like(params, 0.0)?.into_iter().map(|[square, mean]| (square, Some(mean))).collect(),
            false => flat::full_like(params, 0.0)?.into_iter().map(|[square]| (square, None)).collect(),
        };
        let begin = |(square_avg, grad_avg)| {
            Ok(Self { step: Tensor::f_zeros([0i64; 0], (Kind::Float, Device::Cpu))?, square_avg, grad_avg })
        };
        averages.into_iter().map(begin).collect()
    }
}

impl RMSprop {
    /// Trains every parameter of the store that requires a gradient. PyTorch's default rate is 0.01.
    ///
    /// # Errors
    /// There is none, or `lr` is negative or not finite.
    pub fn new(store: &ParamStore, lr: f64) -> Result<Self> {
        Self::builder(store).lr(lr).build()
    }

    /// Chooses other settings than PyTorch's defaults; see [`RMSpropBuilder`].
    pub fn builder(store: &ParamStore) -> RMSpropBuilder {
        RMSpropBuilder {
            groups: vec![ParamGroup::new(store.trainable_parameters())],
            lr: 1e-2,
            weight_decay: 0.0,
            momentum: 0.0,
            options: Options { alpha: 0.99, eps: 1e-8, centered: false, maximize: false },
        }
    }
}

impl Lists {
    /// Makes the averages of parameters that have none yet.
    fn of(
        averages: &mut [Option<Averages>],
        momentum_buffers: &mut [Option<Tensor>],
        slots: &[usize],
        params: &TensorVec,
        settings: GroupSettings,
        centered: bool,
    ) -> Result<Self> {
        flat::begin(averages, slots, params, |params| Averages::zeros(params, centered))?;
        let has_momentum = 0.0 < settings.momentum;
        if has_momentum {
            flat::begin(momentum_buffers, slots, params, flat::zeros_like)?;
        }
        let steps = Steps::of(averages, slots, |averages| &mut averages.step)?;
        let own = || slots.iter().filter_map(|&slot| averages[slot].as_ref());
        let buffers = slots.iter().filter(|_| has_momentum).filter_map(|&slot| momentum_buffers[slot].as_ref());
        Ok(Self {
            steps,
            square_avgs: own().map(|averages| &averages.square_avg).collect(),
            momentum_buffers: buffers.collect(),
            grad_avgs: own().filter_map(|averages| averages.grad_avg.as_ref()).collect(),
        })
    }
}

fn step_batch(batch: &Batch<Lists>, settings: GroupSettings, options: &Options) -> Result<()> {
    let Options { alpha, eps, centered, maximize } = *options;
    let Lists { steps, square_avgs, momentum_buffers, grad_avgs } = &batch.state;
    let params = &batch.params;
    let adjusted = adjusted_gradients(batch, settings.weight_decay, maximize)?;
    let grads = adjusted.as_ref().unwrap_or(&batch.grads);
    steps.count()?;
    foreach::mul_scalar_(square_avgs, alpha)?;
    foreach::addcmul_(square_avgs, grads, grads, 1.0 - alpha)?;

    let roots = foreach::empty_like(square_avgs)?;
    foreach::copy_(&roots, square_avgs)?;
    if centered {
        foreach::lerp_(grad_avgs, grads, 1.0 - alpha)?;
        foreach::addcmul_(&roots, grad_avgs, grad_avgs, -1.0)?;
    }
    foreach::sqrt_(&roots)?;
    foreach::add_scalar_(&roots, eps)?;

    if 0.0 < settings.momentum {
        foreach::mul_scalar_(momentum_buffers, settings.momentum)?;
        foreach::addcdiv_(momentum_buffers, grads, &roots, 1.0)?;
        foreach::add_(params, momentum_buffers, -settings.lr)?;
    } else {
        foreach::addcdiv_(params, grads, &roots, -settings.lr)?;
    }
    Ok(())
}

/// The gradients as the update uses them: turned round to go up, and with weight decay. `None` if that is what they are;
/// the gradients themselves stay as they are.
fn adjusted_gradients(batch: &Batch<Lists>, weight_decay: f64, maximize: bool) -> Result<Option<TensorVec>> {
    if weight_decay == 0.0 && !maximize {
        return Ok(None);
    }
    let grads = foreach::empty_like(&batch.grads)?;
    foreach::copy_(&grads, &batch.grads)?;
    if maximize {
        foreach::mul_scalar_(&grads, -1.0)?;
    }
    if weight_decay != 0.0 {
        foreach::add_(&grads, &batch.params, weight_decay)?;
    }
    Ok(Some(grads))
}

impl Optimizer for RMSprop {
    fn step(&mut self) -> Result<()> {
        let Self { handle, options, averages, momentum_buffers, batches } = self;
        batches.step(
            handle,
            |_| false,
            |slots, params, settings| Lists::of(averages, momentum_buffers, slots, params, settings, options.centered),
            |batch, settings| step_batch(batch, settings, options),
        )
    }

    fn handle(&self) -> &OptimizerHandle {
        &self.handle
    }

    fn state_dict(&self) -> Result<OptimizerState> {
        self.state_views()?.into_copies()
    }

    fn state_views(&self) -> Result<OptimizerState> {
        let mut tensors = BTreeMap::new();
        for ((param, averages), momentum_buffer) in self.handle.params().zip(&self.averages).zip(&self.momentum_buffers)
        {
            let Some(averages) = averages else { continue };
            save_tensor(&mut tensors, "step", param, &averages.step)?;
            save_tensor(&mut tensors, "square_avg", param, &averages.square_avg)?;
            for (name, tensor) in [("momentum_buffer", momentum_buffer), ("grad_avg", &averages.grad_avg)] {
                if let Some(tensor) = tensor {
                    save_tensor(&mut tensors, name, param, tensor)?;
                }
            }
        }
        let groups = save_groups(&self.handle, &self.options)?;
        Ok(OptimizerState { tensors, groups, layouts: save_layouts(&self.handle) })
    }

    fn load_state_dict(&mut self, state: &OptimizerState) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut loading = Loading::new(&self.handle, state);
        let options = loading.options(self.options.clone());
        let mut averages = Vec::with_capacity(self.averages.len());
        let mut momentum_buffers = Vec::with_capacity(self.averages.len());
        for param in self.handle.params() {
            let saved = loading.tensors(param, if options.centered { &CENTERED } else { &CENTERED[..2] })?;
            // Whether there is a buffer depends on the momentum of the steps so far, not on the present one.
            momentum_buffers.push(match loading.has(param, "momentum_buffer") {
                true => loading.tensors(param, &["momentum_buffer"])?.and_then(|mut tensors| tensors.pop()),
                false => None,
            });
            averages.push(saved.and_then(Averages::from_saved));
        }
        loading.finish()?;
        for averages in averages.iter_mut().flatten() {
            averages.step = averages.step.f_to_device(Device::Cpu)?;
        }
        self.options = options;
        (self.averages, self.momentum_buffers) = (averages, momentum_buffers);
        self.batches.clear();
        Ok(())
    }
}

/// The states that every parameter has if the optimizer is centered; without, the first two.
const CENTERED: [&str; 3] = ["step", "square_avg", "grad_avg"];

impl Averages {
    /// Takes the tensors in the order of [`CENTERED`].
    fn from_saved(tensors: Vec<Tensor>) -> Option<Self> {
        let mut tensors = tensors.into_iter();
        Some(Self { step: tensors.next()?, square_avg: tensors.next()?, grad_avg: tensors.next() })
    }
}

/// Settings of [`RMSprop`].
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::RMSprop, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([1], Init::Zeros))?;
/// let optimizer = RMSprop::builder(&store).lr(1e-3).alpha(0.9).momentum(0.9).centered(true).build()?;
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct RMSpropBuilder {
    groups: Vec<ParamGroup>,
    lr: f64,
    weight_decay: f64,
    momentum: f64,
    options: Options,
}

impl RMSpropBuilder {
    settings! {
        /// Learning rate (default 0.01).
        lr: f64 => lr;
        /// How much of the average of squared gradients each step keeps (default 0.99).
        alpha: f64 => options.alpha;
        /// Added to the root of the average (default 1e-8).
        eps: f64 => options.eps;
        /// Weight decay, added to the gradient (default 0).
        weight_decay: f64 => weight_decay;
        /// How much of the momentum buffer each step keeps (default 0: no buffer at all).
        momentum: f64 => momentum;
        /// Divide by an estimate of the gradient's standard deviation instead of its size (default `false`).
        centered: bool => options.centered;
        /// Go up the gradient instead of down (default `false`).
        maximize: bool => options.maximize;
        /// Train these groups instead of all parameters of the store.
        param_groups: Vec<ParamGroup> => groups;
    }

    /// Checks the settings and makes the optimizer.
    ///
    /// # Errors
    /// A setting out of range, no parameters, or a parameter in two groups.
    pub fn build(self) -> Result<RMSprop> {
        self.options.check("RMSprop", &[])?;
        let defaults = GroupDefaults { lr: self.lr, weight_decay: self.weight_decay, momentum: Some(self.momentum) };
        let handle = OptimizerHandle::new("RMSprop", self.groups, defaults)?;
        let averages = handle.params().map(|_| None).collect();
        let momentum_buffers = handle.params().map(|_| None).collect();
        Ok(RMSprop { handle, options: self.options, averages, momentum_buffers, batches: Batches::default() })
    }
}
