//! Adagrad.

use super::Optimizer;
use super::batches::{Batch, step_batches};
use super::handle::{GroupDefaults, GroupSettings, OptimizerHandle, ParamGroup, at_least_zero};
use super::state::{Loading, OptimizerState, save_groups, save_tensor};
use crate::error::Result;
use crate::nn::ParamStore;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};
use torch_ext::foreach;
use torch_ext::fused::{AdagradTensors, FusedAdagrad, fused_adagrad_};

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
/// (weight.get() * 5.0).sum(None).backward();
/// optimizer.step()?;
/// assert!((weight.get().double_value(&[0]) + 0.1).abs() < 1e-6);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct Adagrad {
    handle: OptimizerHandle,
    options: Options,
    /// Group by group, in the order of the parameters.
    sums: Vec<Option<SquaredSum>>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Options {
    lr_decay: f64,
    eps: f64,
    initial_accumulator_value: f64,
    maximize: bool,
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

    fn step_batch(&mut self, batch: &Batch, settings: GroupSettings) -> Result<()> {
        for (&slot, param) in batch.slots.iter().zip(batch.params()) {
            if self.sums[slot].is_none() {
                self.sums[slot] = Some(SquaredSum {
                    step: Tensor::f_zeros([0i64; 0], (Kind::Float, Device::Cpu))?,
                    sum: param.f_full_like(self.options.initial_accumulator_value)?,
                });
            }
        }
        let state = || batch.slots.iter().filter_map(|&slot| self.sums[slot].as_ref());
        let steps: Vec<&Tensor> = state().map(|s| &s.step).collect();
        let sums: Vec<&Tensor> = state().map(|s| &s.sum).collect();
        foreach::add_scalar_(&steps, 1.0)?;
        if batch.device == Device::Cpu {
            let config = FusedAdagrad {
                lr: settings.lr,
                lr_decay: self.options.lr_decay,
                weight_decay: settings.weight_decay,
                eps: self.options.eps,
                maximize: self.options.maximize,
            };
            let tensors = AdagradTensors {
                params: &batch.params(),
                grads: &batch.grads(),
                state_sums: &sums,
                state_steps: &steps,
                ..AdagradTensors::default()
            };
            return Ok(fused_adagrad_(&config, &tensors)?);
        }
        // libtorch has no fused kernel for GPUs.
        let (params, grads) = (batch.params(), batch.grads());
        for (i, step) in steps.iter().enumerate() {
            self.step_one(params[i], grads[i], sums[i], step, settings)?;
        }
        Ok(())
    }

    fn step_one(
        &self,
        param: &Tensor,
        grad: &Tensor,
        sum: &Tensor,
        step: &Tensor,
        settings: GroupSettings,
    ) -> Result<()> {
        let mut grad = if self.options.maximize { grad.f_neg()? } else { grad.shallow_clone() };
        if settings.weight_decay != 0.0 {
            grad = grad.f_add(&param.f_mul_scalar(settings.weight_decay)?)?;
        }
        let steps_before = step.f_double_value(&[])? - 1.0;
        let lr = settings.lr / (1.0 + steps_before * self.options.lr_decay);
        let sum = sum.shallow_clone().f_addcmul_(&grad, &grad)?;
        let scaled = grad.f_div(&sum.f_sqrt()?.f_add_scalar(self.options.eps)?)?.f_mul_scalar(lr)?;
        let _ = param.shallow_clone().f_sub_(&scaled)?;
        Ok(())
    }
}

impl Optimizer for Adagrad {
    fn step(&mut self) -> Result<()> {
        let handle = self.handle.clone();
        step_batches(&handle, |batch, settings| self.step_batch(batch, settings))
    }

    fn handle(&self) -> &OptimizerHandle {
        &self.handle
    }

    fn state_dict(&self) -> Result<OptimizerState> {
        let mut tensors = BTreeMap::new();
        for (param, state) in self.handle.params().zip(&self.sums) {
            if let Some(state) = state {
                save_tensor(&mut tensors, "step", param, &state.step)?;
                save_tensor(&mut tensors, "sum", param, &state.sum)?;
            }
        }
        Ok(OptimizerState { tensors, groups: save_groups(&self.handle, &self.options)? })
    }

    fn load_state_dict(&mut self, state: &OptimizerState) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut loading = Loading::new(&self.handle, state);
        let options = loading.options(self.options.clone());
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
        Ok(())
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
        at_least_zero("Adagrad", "lr_decay", self.options.lr_decay)?;
        at_least_zero("Adagrad", "eps", self.options.eps)?;
        let initial = self.options.initial_accumulator_value;
        at_least_zero("Adagrad", "initial_accumulator_value", initial)?;
        let defaults = GroupDefaults { lr: self.lr, weight_decay: self.weight_decay, momentum: None };
        let handle = OptimizerHandle::new("Adagrad", self.groups, defaults)?;
        let sums = handle.params().map(|_| None).collect();
        Ok(Adagrad { handle, options: self.options, sums })
    }
}
