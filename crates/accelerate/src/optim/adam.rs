//! Adam and AdamW.

use super::Optimizer;
use super::batches::{Batch, Batches};
use super::flat::{self, Steps};
use super::handle::{GroupDefaults, GroupSettings, OptimizerHandle, ParamGroup, at_least_zero, beta1s, check_betas};
use super::offloaded::{Elements, OffloadedState, OffloadedView, Plane, offload};
use super::state::{Loading, OptimizerState, SharedOptions, save_groups, save_layouts, save_tensor};
use crate::error::Result;
use crate::nn::ParamStore;
use accelerate_core::config::OffloadTarget;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use tch::{Device, Kind, Tensor};
use torch_ext::TensorVec;
use torch_ext::fused::{AdamTensors, FusedAdam, fused_adam_, fused_adamw_};

/// Adam with decoupled weight decay, as `torch.optim.AdamW(fused=True)`.
///
/// Each step first shrinks a parameter by `lr * weight_decay`, then moves it by
/// `lr * exp_avg / (sqrt(exp_avg_sq) + eps)`, both averages corrected for their start at zero
/// (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019). Defaults are PyTorch's:
/// betas (0.9, 0.999), eps 1e-8, weight decay 0.01.
///
/// State is made at a parameter's first step with a gradient: `exp_avg` and `exp_avg_sq` of its
/// shape and dtype, `step` a float scalar.
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::{AdamW, Optimizer}, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// let weight = store.root().param("weight", ([1], Init::Zeros))?;
/// let mut optimizer = AdamW::new(&store, 0.1)?;
/// (weight.get()? * 5.0).sum(None).backward();
/// optimizer.step()?;
/// optimizer.zero_grad()?;
/// // The first step has the length of the learning rate, whatever the gradient's size.
/// assert!((weight.get()?.double_value(&[0]) + 0.1).abs() < 1e-6);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct AdamW(Core);

/// Adam, as `torch.optim.Adam(fused=True)`: weight decay (default 0) is added to the gradient.
///
/// Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015. State as in [`AdamW`].
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::Adam, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([1], Init::Zeros))?;
/// let optimizer = Adam::builder(&store).lr(1e-4).betas((0.9, 0.98)).eps(1e-9).build()?;
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct Adam(Core);

/// Settings that all groups share, under the names PyTorch saves them by.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Options {
    betas: (f64, f64),
    eps: f64,
    amsgrad: bool,
    maximize: bool,
}

impl SharedOptions for Options {
    fn check(&self, owner: &'static str, momenta: &[f64]) -> Result<()> {
        at_least_zero(owner, "eps", self.eps)?;
        check_betas(owner, momenta, self.betas.1)
    }
}

#[derive(Debug)]
struct Moments {
    step: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    /// Only with amsgrad.
    max_exp_avg_sq: Option<Tensor>,
}

#[derive(Debug)]
struct Core {
    handle: OptimizerHandle,
    options: Options,
    decoupled: bool,
    /// Group by group, in the order of the parameters.
    moments: Vec<Option<Moments>>,
    batches: Batches<Lists>,
    /// Instead of the moments.
    offloaded: Option<OffloadedState>,
}

/// The moments of the parameters of one batch.
#[derive(Debug)]
struct Lists {
    steps: Steps,
    exp_avgs: TensorVec,
    exp_avg_sqs: TensorVec,
    /// Empty without amsgrad.
    max_exp_avg_sqs: TensorVec,
}

impl Core {
    fn step(&mut self, grad_factor: Option<f64>, found_inf: Option<&Tensor>) -> Result<()> {
        let Self { handle, options, decoupled, moments, batches, offloaded } = self;
        let Some(offloaded) = offloaded else {
            return batches.step(
                handle,
                |_| false,
                |slots, params, _| Lists::of(moments, slots, params, options.amsgrad),
                |batch, settings| step_batch(batch, settings, options, *decoupled, grad_factor, found_inf),
            );
        };
        // State that does not change need not move.
        if found_inf.map_or(Ok(0.0), |found_inf| found_inf.f_double_value(&[]))? != 0.0 {
            return Ok(());
        }
        offloaded.step(handle, |elements, settings| {
            let Elements { params, grads, state, steps } = elements;
            let none = TensorVec::with_capacity(0);
            let tensors = AdamTensors {
                params,
                grads,
                exp_avgs: &state[0],
                exp_avg_sqs: &state[1],
                max_exp_avg_sqs: state.get(2).unwrap_or(&none),
                state_steps: steps,
                grad_factor,
                demote_averages: true,
                ..AdamTensors::default()
            };
            update(&tensors, settings, options, *decoupled)
        })
    }

    fn step_unless(&mut self, found_inf: &Tensor) -> Result<()> {
        // Reading a CPU tensor waits for nobody, and then the kernels need not run at all.
        if found_inf.device() != Device::Cpu {
            return self.step(None, Some(found_inf));
        }
        if found_inf.f_double_value(&[])? == 0.0 { self.step(None, None) } else { Ok(()) }
    }

    fn params(&self) -> impl Iterator<Item = (usize, &crate::nn::Param)> {
        self.handle.params().enumerate()
    }

    /// The state, with what is offloaded as `of` has it.
    fn views(&self, of: OffloadedView) -> Result<OptimizerState> {
        let mut tensors = self.offloaded.as_ref().map_or(Ok(BTreeMap::new()), |own| of(own, &self.handle))?;
        for (slot, param) in self.params() {
            let Some(moments) = &self.moments[slot] else { continue };
            save_tensor(&mut tensors, "step", param, &moments.step)?;
            save_tensor(&mut tensors, "exp_avg", param, &moments.exp_avg)?;
            save_tensor(&mut tensors, "exp_avg_sq", param, &moments.exp_avg_sq)?;
            if let Some(max_exp_avg_sq) = &moments.max_exp_avg_sq {
                save_tensor(&mut tensors, "max_exp_avg_sq", param, max_exp_avg_sq)?;
            }
        }
        let mut groups = save_groups(&self.handle, &self.options)?;
        for group in &mut groups {
            let betas = serde_json::json!([group.momentum, self.options.betas.1]);
            group.options.insert("betas".to_string(), betas);
        }
        Ok(OptimizerState { tensors, groups, layouts: save_layouts(&self.handle) })
    }

    fn load(&mut self, mut loading: Loading<'_>) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        loading.expect_decoupled(self.decoupled);
        let options = loading.options(self.options.clone());
        if let Some(offloaded) = &mut self.offloaded {
            offloaded.load(&self.handle, loading, planes(options.amsgrad))?;
            self.options = options;
            self.moments.iter_mut().for_each(|moments| *moments = None);
            return Ok(());
        }
        let names: &[&str] = if options.amsgrad {
            &["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
        } else {
            &["step", "exp_avg", "exp_avg_sq"]
        };
        let mut moments = Vec::with_capacity(self.moments.len());
        for (_, param) in self.params() {
            let tensors = loading.tensors(param, names)?;
            moments.push(tensors.and_then(Moments::from_saved));
        }
        loading.finish()?;
        self.options = options;
        self.moments = moments;
        self.batches.clear();
        Ok(())
    }
}

fn step_batch(
    batch: &Batch<Lists>,
    settings: GroupSettings,
    options: &Options,
    decoupled: bool,
    grad_factor: Option<f64>,
    found_inf: Option<&Tensor>,
) -> Result<()> {
    let Lists { steps, exp_avgs, exp_avg_sqs, max_exp_avg_sqs } = &batch.state;
    let found_inf = flat::found_inf_beside(&batch.params, found_inf)?;
    steps.count()?;
    let tensors = AdamTensors {
        params: &batch.params,
        grads: &batch.grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        state_steps: &steps.each,
        grad_factor,
        found_inf: found_inf.as_ref(),
        ..AdamTensors::default()
    };
    update(&tensors, settings, options, decoupled)?;
    // The device skipped the update if it found an infinity; then the step does not count either.
    found_inf.map_or(Ok(()), |found_inf| steps.take_back(&found_inf))
}

fn update(tensors: &AdamTensors<'_>, settings: GroupSettings, options: &Options, decoupled: bool) -> Result<()> {
    let config = FusedAdam {
        lr: settings.lr,
        beta1: settings.momentum,
        beta2: options.betas.1,
        weight_decay: settings.weight_decay,
        eps: options.eps,
        amsgrad: options.amsgrad,
        maximize: options.maximize,
    };
    if decoupled {
        fused_adamw_(&config, tensors)?;
    } else {
        fused_adam_(&config, tensors)?;
    }
    Ok(())
}

/// The state of offloaded parameters besides their steps.
fn planes(amsgrad: bool) -> Vec<Plane> {
    let names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"];
    names.into_iter().take(if amsgrad { 3 } else { 2 }).map(|name| Plane { name, initial: 0.0 }).collect()
}

impl Lists {
    /// Makes the moments of parameters that have none yet.
    fn of(moments: &mut [Option<Moments>], slots: &[usize], params: &TensorVec, amsgrad: bool) -> Result<Self> {
        flat::begin(moments, slots, params, |params| Moments::zeros(params, amsgrad))?;
        let steps = Steps::of(moments, slots, |moments| &mut moments.step)?;
        let own = || slots.iter().filter_map(|&slot| moments[slot].as_ref());
        Ok(Self {
            steps,
            exp_avgs: own().map(|moments| &moments.exp_avg).collect(),
            exp_avg_sqs: own().map(|moments| &moments.exp_avg_sq).collect(),
            max_exp_avg_sqs: own().filter_map(|moments| moments.max_exp_avg_sq.as_ref()).collect(),
        })
    }
}

impl Moments {
    /// Those of some parameters of one type and device.
    fn zeros(params: &[Tensor], amsgrad: bool) -> Result<Vec<Self>> {
        let moments: Vec<_> = match amsgrad {
            true => {
                flat::full_like(params, 0.0)?.into_iter().map(|[mean, square, max]| (mean, square, Some(max))).collect()
            }
            false => flat::full_like(params, 0.0)?.into_iter().map(|[mean, square]| (mean, square, None)).collect(),
        };
        let begin = |(exp_avg, exp_avg_sq, max_exp_avg_sq): (Tensor, _, _)| {
            let step = Tensor::f_zeros([0i64; 0], (Kind::Float, exp_avg.device()))?;
            Ok(Self { step, exp_avg, exp_avg_sq, max_exp_avg_sq })
        };
        moments.into_iter().map(begin).collect()
    }

    /// Takes `step, exp_avg, exp_avg_sq[, max_exp_avg_sq]`.
    fn from_saved(tensors: Vec<Tensor>) -> Option<Self> {
        let mut tensors = tensors.into_iter();
        Some(Self {
            step: tensors.next()?,
            exp_avg: tensors.next()?,
            exp_avg_sq: tensors.next()?,
            max_exp_avg_sq: tensors.next(),
        })
    }
}

mod kind {
    /// What tells the two optimizers of this file apart.
    pub trait AdamKind: Sized {
        const NAME: &'static str;
        const DECOUPLED: bool;
        const WEIGHT_DECAY: f64;
        #[allow(private_interfaces, reason = "the trait is sealed by this private module")]
        fn from_core(core: super::Core) -> Self;
    }
}
use kind::AdamKind;

macro_rules! adam_kind {
    ($type:ident, decoupled: $decoupled:literal, weight_decay: $weight_decay:literal) => {
        impl AdamKind for $type {
            const NAME: &'static str = stringify!($type);
            const DECOUPLED: bool = $decoupled;
            const WEIGHT_DECAY: f64 = $weight_decay;
            #[allow(private_interfaces, reason = "the trait is sealed by a private module")]
            fn from_core(core: Core) -> Self {
                Self(core)
            }
        }

        impl $type {
            /// Trains every parameter of the store that requires a gradient, in one group.
            ///
            /// # Errors
            /// There is none, or `lr` is negative or not finite.
            pub fn new(store: &ParamStore, lr: f64) -> Result<Self> {
                Self::builder(store).lr(lr).build()
            }

            /// Chooses other settings than PyTorch's defaults; see [`AdamBuilder`].
            pub fn builder(store: &ParamStore) -> AdamBuilder<Self> {
                AdamBuilder::new(store)
            }
        }

        impl Optimizer for $type {
            fn step(&mut self) -> Result<()> {
                self.0.step(None, None)
            }
            fn step_with_factor(&mut self, grad_factor: f64) -> Result<()> {
                self.0.step(Some(grad_factor), None)
            }
            fn step_unless(&mut self, found_inf: &Tensor) -> Result<()> {
                self.0.step_unless(found_inf)
            }
            fn handle(&self) -> &OptimizerHandle {
                &self.0.handle
            }
            fn state_dict(&self) -> Result<OptimizerState> {
                self.state_views()?.into_copies()
            }
            fn state_views(&self) -> Result<OptimizerState> {
                self.0.views(OffloadedState::save)
            }
            fn state_outline(&self) -> Result<OptimizerState> {
                self.0.views(OffloadedState::outline)
            }
            fn read_state(&self, wanted: &[(&str, &Tensor)]) -> Result<()> {
                self.0.offloaded.as_ref().map_or(Ok(()), |own| own.read(&self.0.handle, wanted))
            }
            fn load_state_dict(&mut self, state: &OptimizerState) -> Result<()> {
                let handle = self.0.handle.clone();
                self.0.load(Loading::new(&handle, state))
            }
            fn take_state_dict(&mut self, state: OptimizerState) -> Result<()> {
                let handle = self.0.handle.clone();
                self.0.load(Loading::taking(&handle, &state))
            }
            fn offload_state(&mut self, target: &OffloadTarget) -> Result<()> {
                let planes = planes(self.0.options.amsgrad);
                let offloaded = OffloadedState::new(target, planes, true, &self.0.handle);
                offload(self, offloaded, |own| &mut own.0.offloaded)
            }
            fn is_state_offloaded(&self) -> bool {
                self.0.offloaded.is_some()
            }
        }
    };
}

adam_kind!(AdamW, decoupled: true, weight_decay: 0.01);
adam_kind!(Adam, decoupled: false, weight_decay: 0.0);

/// Settings of [`Adam`] and [`AdamW`].
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::{AdamW, Optimizer, no_decay}, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2, 2], Init::Zeros))?;
/// store.root().param("bias", ([2], Init::Zeros))?;
/// let optimizer = AdamW::builder(&store)
///     .lr(5e-5)
///     .weight_decay(0.1)
///     .param_groups(no_decay(&store, &["bias"]))
///     .build()?;
/// assert_eq!(optimizer.handle().num_groups(), 2);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct AdamBuilder<O> {
    groups: Vec<ParamGroup>,
    lr: f64,
    weight_decay: f64,
    options: Options,
    optimizer: PhantomData<O>,
}

impl<O: AdamKind> AdamBuilder<O> {
    fn new(store: &ParamStore) -> Self {
        Self {
            groups: vec![ParamGroup::new(store.trainable_parameters())],
            lr: 1e-3,
            weight_decay: O::WEIGHT_DECAY,
            options: Options { betas: (0.9, 0.999), eps: 1e-8, amsgrad: false, maximize: false },
            optimizer: PhantomData,
        }
    }

    settings! {
        /// Learning rate (default 0.001).
        lr: f64 => lr;
        /// How much of the averages of gradient and squared gradient each step keeps (default 0.9, 0.999).
        betas: (f64, f64) => options.betas;
        /// Added to the root of the squared average (default 1e-8).
        eps: f64 => options.eps;
        /// Weight decay (default 0.01 in AdamW, 0 in Adam).
        weight_decay: f64 => weight_decay;
        /// Divide by the largest squared average so far instead of the present one (default `false`).
        amsgrad: bool => options.amsgrad;
        /// Go up the gradient instead of down (default `false`).
        maximize: bool => options.maximize;
        /// Train these groups instead of all parameters of the store.
        param_groups: Vec<ParamGroup> => groups;
    }

    /// Checks the settings and makes the optimizer.
    ///
    /// # Errors
    /// A setting out of range, no parameters, or a parameter in two groups.
    pub fn build(self) -> Result<O> {
        self.options.check(O::NAME, &beta1s(self.options.betas.0, &self.groups))?;
        let defaults =
            GroupDefaults { lr: self.lr, weight_decay: self.weight_decay, momentum: Some(self.options.betas.0) };
        let handle = OptimizerHandle::new(O::NAME, self.groups, defaults)?;
        let moments = handle.params().map(|_| None).collect();
        Ok(O::from_core(Core {
            handle,
            options: self.options,
            decoupled: O::DECOUPLED,
            moments,
            batches: Batches::default(),
            offloaded: None,
        }))
    }
}
