//! Stochastic gradient descent.

use super::Optimizer;
use super::batches::{Batch, Batches};
use super::flat;
use super::handle::{GroupDefaults, GroupSettings, OptimizerHandle, ParamGroup};
use super::state::{Loading, OptimizerState, SharedOptions, save_groups, save_layouts, save_tensor};
use crate::error::{OptimError, Result};
use crate::nn::ParamStore;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tch::{Device, Tensor};
use torch_ext::TensorVec;
use torch_ext::fused::{FusedSgd, SgdTensors, fused_sgd_};

/// Stochastic gradient descent, as `torch.optim.SGD(fused=True)`.
///
/// With momentum, each step follows `momentum * buffer + (1 - dampening) * gradient`; the first
/// gradient enters the buffer whole. Nesterov momentum looks one step ahead (Sutskever and others,
/// "On the importance of initialization and momentum in deep learning", 2013). Weight decay is added
/// to the gradient. Everything is off by default. State: `momentum_buffer`, only with momentum.
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::{Optimizer, Sgd}, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// let weight = store.root().param("weight", ([1], Init::Zeros))?;
/// let mut optimizer = Sgd::new(&store, 0.1)?;
/// (weight.get()? * 5.0).sum(None).backward();
/// optimizer.step()?;
/// assert!((weight.get()?.double_value(&[0]) + 0.5).abs() < 1e-6);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct Sgd {
    handle: OptimizerHandle,
    options: Options,
    /// Group by group, in the order of the parameters.
    buffers: Vec<Option<Tensor>>,
    batches: Batches<Momentum>,
}

/// The momentum buffers of the parameters of one batch; none without momentum.
#[derive(Debug)]
struct Momentum {
    buffers: TensorVec,
    /// The buffers hold nothing yet, and are not the optimizer's before the step has been taken.
    is_first_step: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Options {
    dampening: f64,
    nesterov: bool,
    maximize: bool,
}

impl SharedOptions for Options {
    fn check(&self, owner: &'static str, momenta: &[f64]) -> Result<()> {
        let Self { dampening, nesterov, .. } = *self;
        if !dampening.is_finite() {
            let (found, wanted) = (dampening, "a finite number");
            return Err(OptimError::Setting { owner, name: "dampening", found, wanted }.into());
        }
        if nesterov && dampening != 0.0 {
            let momentum = momenta.first().copied().unwrap_or(0.0);
            return Err(OptimError::Nesterov { momentum, dampening }.into());
        }
        Ok(())
    }
}

impl Sgd {
    /// Trains every parameter of the store that requires a gradient, without momentum.
    ///
    /// # Errors
    /// There is none, or `lr` is negative or not finite.
    pub fn new(store: &ParamStore, lr: f64) -> Result<Self> {
        Self::builder(store).lr(lr).build()
    }

    /// Chooses other settings than PyTorch's defaults; see [`SgdBuilder`].
    pub fn builder(store: &ParamStore) -> SgdBuilder {
        SgdBuilder {
            groups: vec![ParamGroup::new(store.trainable_parameters())],
            lr: 1e-3,
            weight_decay: 0.0,
            momentum: 0.0,
            options: Options { dampening: 0.0, nesterov: false, maximize: false },
        }
    }

    fn step_all(&mut self, found_inf: Option<&Tensor>) -> Result<()> {
        let Self { handle, options, buffers, batches } = self;
        // A skipped first step must not leave empty buffers behind that count as filled.
        let mut is_skipped = false;
        batches.step(
            handle,
            // The kernel treats a whole call as first step or as later step, so parameters that get their first gradient
            // later than others go in a call of their own.
            |slot| buffers[slot].is_none(),
            |slots, params, settings| Momentum::of(buffers, slots, params, settings),
            |batch, settings| {
                if batch.state.is_first_step
                    && let Some(found_inf) = found_inf
                {
                    is_skipped = found_inf.f_double_value(&[])? != 0.0;
                }
                if batch.state.is_first_step && is_skipped {
                    return Ok(());
                }
                step_batch(batch, settings, options, found_inf)
            },
        )?;
        if batches.iter().any(|batch| batch.state.is_first_step) {
            if !is_skipped {
                for batch in batches.iter().filter(|batch| batch.state.is_first_step) {
                    for (&slot, buffer) in batch.slots.iter().zip(batch.state.buffers.iter()) {
                        buffers[slot] = Some(buffer);
                    }
                }
            }
            batches.clear();
        }
        Ok(())
    }
}

impl Momentum {
    fn of(buffers: &[Option<Tensor>], slots: &[usize], params: &TensorVec, settings: GroupSettings) -> Result<Self> {
        if settings.momentum == 0.0 {
            return Ok(Self { buffers: TensorVec::with_capacity(0), is_first_step: false });
        }
        let saved: TensorVec = slots.iter().filter_map(|&slot| buffers[slot].as_ref()).collect();
        let is_first_step = saved.is_empty();
        let buffers = match is_first_step {
            true => flat::zeros_like(&params.iter().collect::<Vec<_>>())?.iter().collect(),
            false => saved,
        };
        Ok(Self { buffers, is_first_step })
    }
}

fn step_batch(
    batch: &Batch<Momentum>,
    settings: GroupSettings,
    options: &Options,
    found_inf: Option<&Tensor>,
) -> Result<()> {
    let config = FusedSgd {
        lr: settings.lr,
        momentum: settings.momentum,
        dampening: options.dampening,
        weight_decay: settings.weight_decay,
        nesterov: options.nesterov,
        maximize: options.maximize,
    };
    let found_inf = flat::found_inf_beside(&batch.params, found_inf)?;
    let tensors = SgdTensors {
        params: &batch.params,
        grads: &batch.grads,
        momentum_buffers: &batch.state.buffers,
        is_first_step: batch.state.is_first_step,
        grad_scale: None,
        found_inf: found_inf.as_ref(),
    };
    Ok(fused_sgd_(&config, &tensors)?)
}

impl Optimizer for Sgd {
    fn step(&mut self) -> Result<()> {
        self.step_all(None)
    }

    fn step_unless(&mut self, found_inf: &Tensor) -> Result<()> {
        if found_inf.device() != Device::Cpu {
            return self.step_all(Some(found_inf));
        }
        if found_inf.f_double_value(&[])? == 0.0 { self.step_all(None) } else { Ok(()) }
    }

    fn handle(&self) -> &OptimizerHandle {
        &self.handle
    }

    fn state_dict(&self) -> Result<OptimizerState> {
        self.state_views()?.into_copies()
    }

    fn state_views(&self) -> Result<OptimizerState> {
        let mut tensors = BTreeMap::new();
        for (param, buffer) in self.handle.params().zip(&self.buffers) {
            if let Some(buffer) = buffer {
                save_tensor(&mut tensors, "momentum_buffer", param, buffer)?;
            }
        }
        let groups = save_groups(&self.handle, &self.options)?;
        Ok(OptimizerState { tensors, groups, layouts: save_layouts(&self.handle) })
    }

    fn load_state_dict(&mut self, state: &OptimizerState) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut loading = Loading::new(&self.handle, state);
        let options = loading.options(self.options.clone());
        let mut buffers = Vec::with_capacity(self.buffers.len());
        for param in self.handle.params() {
            let saved = loading.tensors(param, &["momentum_buffer"])?;
            buffers.push(saved.and_then(|mut tensors| tensors.pop()));
        }
        loading.finish()?;
        self.options = options;
        self.buffers = buffers;
        self.batches.clear();
        Ok(())
    }
}

/// Settings of [`Sgd`].
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::Sgd, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([1], Init::Zeros))?;
/// let optimizer = Sgd::builder(&store).lr(0.1).momentum(0.9).nesterov(true).build()?;
/// let error = Sgd::builder(&store).nesterov(true).build().unwrap_err();
/// assert!(error.to_string().contains("momentum above 0"));
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct SgdBuilder {
    groups: Vec<ParamGroup>,
    lr: f64,
    weight_decay: f64,
    momentum: f64,
    options: Options,
}

impl SgdBuilder {
    settings! {
        /// Learning rate (default 0.001).
        lr: f64 => lr;
        /// How much of the buffer each step keeps (default 0: no buffer at all).
        momentum: f64 => momentum;
        /// How much less than the whole gradient enters the buffer (default 0).
        dampening: f64 => options.dampening;
        /// Weight decay, added to the gradient (default 0).
        weight_decay: f64 => weight_decay;
        /// Look one step ahead (default `false`).
        nesterov: bool => options.nesterov;
        /// Go up the gradient instead of down (default `false`).
        maximize: bool => options.maximize;
        /// Train these groups instead of all parameters of the store.
        param_groups: Vec<ParamGroup> => groups;
    }

    /// Checks the settings and makes the optimizer.
    ///
    /// # Errors
    /// A setting out of range, no parameters, a parameter in two groups, or Nesterov momentum without
    /// momentum or with dampening.
    pub fn build(self) -> Result<Sgd> {
        let (momentum, dampening) = (self.momentum, self.options.dampening);
        self.options.check("Sgd", &[momentum])?;
        // Only of a new optimizer: schedules may take the momentum of a running one to 0.
        if self.options.nesterov && momentum <= 0.0 {
            return Err(OptimError::Nesterov { momentum, dampening }.into());
        }
        let defaults = GroupDefaults { lr: self.lr, weight_decay: self.weight_decay, momentum: Some(momentum) };
        let handle = OptimizerHandle::new("Sgd", self.groups, defaults)?;
        let buffers = handle.params().map(|_| None).collect();
        Ok(Sgd { handle, options: self.options, buffers, batches: Batches::default() })
    }
}
