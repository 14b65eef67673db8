//! Adagrad.

use super::Optimizer;
use super::batches::{Batch, Batches};
use super::flat::{self, Steps};
use super::handle::{GroupDefaults, GroupSettings, OptimizerHandle, ParamGroup, at_least_zero};
use super::offloaded::{Elements, OffloadedState, OffloadedView, Plane, offload};
use super::state::{Loading, OptimizerState, SharedOptions, save_groups, save_layouts, save_tensor};
use crate::error::Result;
use crate::nn::ParamStore;
use accelerate_core::config::OffloadTarget;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};
use torch_ext::fused::{AdagradTensors, FusedAdagrad, fused_adagrad_};
use torch_ext::{TensorVec, scalar};

/// Adagrad, as `torch.optim.Adagrad(fused=True)`: steps get smaller where gradients were large.
///
/// Each step moves a parameter by `lr / (1 + (step - 1) * lr_decay) * gradient / (sqrt(sum) + eps)`,
/// where `sum` adds up the squared gradients (Duchi, Hazan and Singer, "Adaptive Subgradient Methods
/// for Online Learning and Stochastic Optimization", 2011). Weight decay is added to the gradient.
/// State: `sum` of the parameter's shape and dtype, `step` a float scalar.
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::{Adagrad, Optimizer}, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// let weight = store.root().param("weight", ([1], Init::Zeros))?;
/// let mut optimizer = Adagrad::new(&store, 0.1)?;
/// (weight.get()? * 5.0).sum(None).backward();
/// optimizer.step()?;
/// assert!((weight.get()?.double_value(&[0]) + 0.1).abs() < 1e-6);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct Adagrad {
    handle: OptimizerHandle,
    options: Options,
    /// Group by group, in the order of the parameters.
    sums: Vec<Option<SquaredSum>>,
    batches: Batches<Lists>,
    /// Instead of the sums.
    offloaded: Option<OffloadedState>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Options {
    lr_decay: f64,
    eps: f64,
    initial_accumulator_value: f64,
    maximize: bool,
}

impl SharedOptions for Options {
    fn check(&self, owner: &'static str, _momenta: &[f64]) -> Result<()> {
        at_least_zero(owner, "lr_decay", self.lr_decay)?;
        at_least_zero(owner, "eps", self.eps)?;
        at_least_zero(owner, "initial_accumulator_value", self.initial_accumulator_value)
    }
}

impl Options {
    /// The state of an offloaded parameter besides its steps.
    fn planes(&self) -> Vec<Plane> {
        vec![Plane { name: "sum", initial: self.initial_accumulator_value }]
    }
}

#[derive(Debug)]
struct SquaredSum {
    step: Tensor,
    sum: Tensor,
}

impl Adagrad {
    /// Trains every parameter of the store that requires a gradient. PyTorch's default rate is 0.01.
    ///
    /// # Errors
    /// There is none, or `lr` is negative or not finite.
    pub fn new(store: &ParamStore, lr: f64) -> Result<Self> {
        Self::builder(store).lr(lr).build()
    }

    /// Chooses other settings than PyTorch's defaults; see [`AdagradBuilder`].
    pub fn builder(store: &ParamStore) -> AdagradBuilder {
        AdagradBuilder {
            groups: vec![ParamGroup::new(store.trainable_parameters())],
            lr: 1e-2,
            weight_decay: 0.0,
            options: Options { lr_decay: 0.0, eps: 1e-10, initial_accumulator_value: 0.0, maximize: false },
        }
    }
}

/// The state of the parameters of one batch.
#[derive(Debug)]
struct Lists {
    steps: Steps,
    sums: TensorVec,
}

impl Lists {
    /// Makes the state of parameters that have none yet.
    fn of(sums: &mut [Option<SquaredSum>], slots: &[usize], params: &TensorVec, start: f64) -> Result<Self> {
        flat::begin(sums, slots, params, |params| {
            let begin = |[sum]: [Tensor; 1]| {
                Ok(SquaredSum { step: Tensor::f_zeros([0i64; 0], (Kind::Float, Device::Cpu))?, sum })
            };
            flat::full_like(params, start)?.into_iter().map(begin).collect()
        })?;
        let steps = Steps::of(sums, slots, |state| &mut state.step)?;
        Ok(Self { steps, sums: slots.iter().filter_map(|&slot| Some(&sums[slot].as_ref()?.sum)).collect() })
    }
}

fn step_batch(batch: &Batch<Lists>, settings: GroupSettings, options: &Options) -> Result<()> {
    let Lists { steps, sums } = &batch.state;
    steps.count()?;
    update(&batch.params, &batch.grads, sums, &steps.each, settings, options)
}

fn update(
    params: &TensorVec,
    grads: &TensorVec,
    sums: &TensorVec,
    steps: &TensorVec,
    settings: GroupSettings,
    options: &Options,
) -> Result<()> {
    if !params.is_empty() && params.get(0)?.device() != Device::Cpu {
        // libtorch has no fused kernel for GPUs.
        for (i, param) in params.iter().enumerate() {
            step_one(options, &param, &grads.get(i)?, &sums.get(i)?, &steps.get(i)?, settings)?;
        }
        return Ok(());
    }
    let config = FusedAdagrad {
        lr: settings.lr,
        lr_decay: options.lr_decay,
        weight_decay: settings.weight_decay,
        eps: options.eps,
        maximize: options.maximize,
    };
    let tensors = AdagradTensors { params, grads, state_sums: sums, state_steps: steps, ..AdagradTensors::default() };
    Ok(fused_adagrad_(&config, &tensors)?)
}

fn step_one(
    options: &Options,
    param: &Tensor,
    grad: &Tensor,
    sum: &Tensor,
    step: &Tensor,
    settings: GroupSettings,
) -> Result<()> {
    let mut grad = if options.maximize { grad.f_neg()? } else { grad.shallow_clone() };
    if settings.weight_decay != 0.0 {
        grad = grad.f_add(&scalar::mul(param, settings.weight_decay)?)?;
    }
    let steps_before = step.f_double_value(&[])? - 1.0;
    let lr = settings.lr / (1.0 + steps_before * options.lr_decay);
    let sum = sum.shallow_clone().f_addcmul_(&grad, &grad)?;
    let scaled = grad.f_div(&scalar::add(&sum.f_sqrt()?, options.eps)?)?;
    scalar::mul_(&scaled, lr)?;
    let _ = param.shallow_clone().f_sub_(&scaled)?;
    Ok(())
}

impl Adagrad {
    /// The state, with what is offloaded as `of` has it.
    fn views(&self, of: OffloadedView) -> Result<OptimizerState> {
        let mut tensors = self.offloaded.as_ref().map_or(Ok(BTreeMap::new()), |own| of(own, &self.handle))?;
        for (param, state) in self.handle.params().zip(&self.sums) {
            if let Some(state) = state {
                save_tensor(&mut tensors, "step", param, &state.step)?;
                save_tensor(&mut tensors, "sum", param, &state.sum)?;
            }
        }
        let groups = save_groups(&self.handle, &self.options)?;
        Ok(OptimizerState { tensors, groups, layouts: save_layouts(&self.handle) })
    }
}

impl Optimizer for Adagrad {
    fn step(&mut self) -> Result<()> {
        let Self { handle, options, sums, batches, offloaded } = self;
        if let Some(offloaded) = offloaded {
            return offloaded.step(handle, |Elements { params, grads, state, steps }, settings| {
                update(params, grads, &state[0], steps, settings, options)
            });
        }
        batches.step(
            handle,
            |_| false,
            |slots, params, _| Lists::of(sums, slots, params, options.initial_accumulator_value),
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
        self.views(OffloadedState::save)
    }

    fn state_outline(&self) -> Result<OptimizerState> {
        self.views(OffloadedState::outline)
    }

    fn read_state(&self, wanted: &[(&str, &Tensor)]) -> Result<()> {
        self.offloaded.as_ref().map_or(Ok(()), |own| own.read(&self.handle, wanted))
    }

    fn load_state_dict(&mut self, state: &OptimizerState) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut loading = Loading::new(&self.handle, state);
        let options = loading.options(self.options.clone());
        if let Some(offloaded) = &mut self.offloaded {
            offloaded.load(&self.handle, loading, options.planes())?;
            self.options = options;
            self.sums.iter_mut().for_each(|sum| *sum = None);
            return Ok(());
        }
        let mut sums = Vec::with_capacity(self.sums.len());
        for param in self.handle.params() {
            let saved = loading.tensors(param, &["step", "sum"])?;
            sums.push(match saved.map(<[Tensor; 2]>::try_from) {
                Some(Ok([step, sum])) => Some(SquaredSum { step: step.f_to_device(Device::Cpu)?, sum }),
                _ => None,
            });
        }
        loading.finish()?;
        self.options = options;
        self.sums = sums;
        self.batches.clear();
        Ok(())
    }

    fn offload_state(&mut self, target: &OffloadTarget) -> Result<()> {
        let offloaded = OffloadedState::new(target, self.options.planes(), true, &self.handle);
        offload(self, offloaded, |own| &mut own.offloaded)
    }

    fn is_state_offloaded(&self) -> bool {
        self.offloaded.is_some()
    }
}

/// Settings of [`Adagrad`].
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::Adagrad, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([1], Init::Zeros))?;
/// let optimizer = Adagrad::builder(&store).lr(0.05).initial_accumulator_value(0.1).build()?;
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct AdagradBuilder {
    groups: Vec<ParamGroup>,
    lr: f64,
    weight_decay: f64,
    options: Options,
}

impl AdagradBuilder {
    settings! {
        /// Learning rate (default 0.01).
        lr: f64 => lr;
        /// How fast the learning rate falls with the number of steps (default 0).
        lr_decay: f64 => options.lr_decay;
        /// Weight decay, added to the gradient (default 0).
        weight_decay: f64 => weight_decay;
        /// Added to the root of the sum of squares (default 1e-10).
        eps: f64 => options.eps;
        /// What the sum of squares starts from (default 0).
        initial_accumulator_value: f64 => options.initial_accumulator_value;
        /// Go up the gradient instead of down (default `false`).
        maximize: bool => options.maximize;
        /// Train these groups instead of all parameters of the store.
        param_groups: Vec<ParamGroup> => groups;
    }

    /// Checks the settings and makes the optimizer.
    ///
    /// # Errors
    /// A setting out of range, no parameters, or a parameter in two groups.
    pub fn build(self) -> Result<Adagrad> {
        self.options.check("Adagrad", &[])?;
        let defaults = GroupDefaults { lr: self.lr, weight_decay: self.weight_decay, momentum: None };
        let handle = OptimizerHandle::new("Adagrad", self.groups, defaults)?;
        let sums = handle.params().map(|_| None).collect();
        Ok(Adagrad { handle, options: self.options, sums, batches: Batches::default(), offloaded: None })
    }
}
