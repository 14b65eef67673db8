//! Lion.

use super::Optimizer;
use super::batches::Batches;
use super::flat;
use super::handle::{GroupDefaults, GroupSettings, OptimizerHandle, ParamGroup, beta1s, check_betas};
use super::offloaded::{Elements, OffloadedState, OffloadedView, Plane, offload};
use super::state::{Loading, OptimizerState, SharedOptions, save_groups, save_layouts, save_tensor};
use crate::error::Result;
use crate::nn::ParamStore;
use accelerate_core::config::OffloadTarget;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tch::Tensor;
use torch_ext::{TensorVec, foreach};

/// Lion: every entry moves by the learning rate, up or down; only the sign is learned.
///
/// Each step first shrinks a parameter by `lr * weight_decay`, then moves it by
/// `lr * sign(beta1 * exp_avg + (1 - beta1) * gradient)`, and only then lets `exp_avg` keep `beta2` of
/// itself and take `1 - beta2` of the gradient (Chen and others, "Symbolic Discovery of Optimization
/// Algorithms", 2023; order of arithmetic as in its authors' `lion_pytorch.py`). Their advice: a
/// learning rate 3 to 10 times smaller than AdamW's, and a weight decay as much larger.
///
/// State is made at a parameter's first step with a gradient: `exp_avg` of its shape and dtype, half of
/// what AdamW keeps.
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::{Lion, Optimizer}, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// let weight = store.root().param("weight", ([1], Init::Zeros))?;
/// let mut optimizer = Lion::new(&store, 0.1)?;
/// (weight.get()? * 5.0).sum(None).backward();
/// optimizer.step()?;
/// assert!((weight.get()?.double_value(&[0]) + 0.1).abs() < 1e-6);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct Lion {
    handle: OptimizerHandle,
    options: Options,
    /// Group by group, in the order of the parameters.
    exp_avgs: Vec<Option<Tensor>>,
    /// With the averages of the parameters.
    batches: Batches<TensorVec>,
    /// Instead of the averages.
    offloaded: Option<OffloadedState>,
}

/// The state of an offloaded parameter.
const EXP_AVG: Plane = Plane { name: "exp_avg", initial: 0.0 };

/// Settings that all groups share, under the names PyTorch saves such settings by.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Options {
    betas: (f64, f64),
}

impl SharedOptions for Options {
    fn check(&self, owner: &'static str, momenta: &[f64]) -> Result<()> {
        check_betas(owner, momenta, self.betas.1)
    }
}

impl Lion {
    /// Trains every parameter of the store that requires a gradient. The authors' default rate is 1e-4.
    ///
    /// # Errors
    /// There is none, or `lr` is negative or not finite.
    pub fn new(store: &ParamStore, lr: f64) -> Result<Self> {
        Self::builder(store).lr(lr).build()
    }

    /// Chooses other settings than the authors' defaults; see [`LionBuilder`].
    pub fn builder(store: &ParamStore) -> LionBuilder {
        LionBuilder {
            groups: vec![ParamGroup::new(store.trainable_parameters())],
            lr: 1e-4,
            weight_decay: 0.0,
            options: Options { betas: (0.9, 0.99) },
        }
    }
}

fn update(
    params: &TensorVec,
    grads: &TensorVec,
    exp_avgs: &TensorVec,
    settings: GroupSettings,
    beta2: f64,
) -> Result<()> {
    let beta1 = settings.momentum;
    foreach::mul_scalar_(params, 1.0 - settings.lr * settings.weight_decay)?;

    let updates = foreach::empty_like(params)?;
    foreach::copy_(&updates, exp_avgs)?;
    foreach::mul_scalar_(&updates, beta1)?;
    foreach::add_(&updates, grads, 1.0 - beta1)?;
    foreach::sign_(&updates)?;
    foreach::add_(params, &updates, -settings.lr)?;

    foreach::mul_scalar_(exp_avgs, beta2)?;
    Ok(foreach::add_(exp_avgs, grads, 1.0 - beta2)?)
}

/// Makes the averages of parameters that have none yet.
fn averages_of(exp_avgs: &mut [Option<Tensor>], slots: &[usize], params: &TensorVec) -> Result<TensorVec> {
    flat::begin(exp_avgs, slots, params, flat::zeros_like)?;
    Ok(slots.iter().filter_map(|&slot| exp_avgs[slot].as_ref()).collect())
}

impl Lion {
    /// The state, with what is offloaded as `of` has it.
    fn views(&self, of: OffloadedView) -> Result<OptimizerState> {
        let mut tensors = self.offloaded.as_ref().map_or(Ok(BTreeMap::new()), |own| of(own, &self.handle))?;
        for (param, exp_avg) in self.handle.params().zip(&self.exp_avgs) {
            if let Some(exp_avg) = exp_avg {
                save_tensor(&mut tensors, "exp_avg", param, exp_avg)?;
            }
        }
        let mut groups = save_groups(&self.handle, &self.options)?;
        for group in &mut groups {
            let betas = serde_json::json!([group.momentum, self.options.betas.1]);
            group.options.insert("betas".to_string(), betas);
        }
        Ok(OptimizerState { tensors, groups, layouts: save_layouts(&self.handle) })
    }
}

impl Optimizer for Lion {
    fn step(&mut self) -> Result<()> {
        let Self { handle, options, exp_avgs, batches, offloaded } = self;
        let beta2 = options.betas.1;
        if let Some(offloaded) = offloaded {
            return offloaded.step(handle, |Elements { params, grads, state, .. }, settings| {
                update(params, grads, &state[0], settings, beta2)
            });
        }
        batches.step(
            handle,
            |_| false,
            |slots, params, _| averages_of(exp_avgs, slots, params),
            |batch, settings| update(&batch.params, &batch.grads, &batch.state, settings, beta2),
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
            offloaded.load(&self.handle, loading, vec![EXP_AVG])?;
            self.options = options;
            self.exp_avgs.iter_mut().for_each(|exp_avg| *exp_avg = None);
            return Ok(());
        }
        let mut exp_avgs = Vec::with_capacity(self.exp_avgs.len());
        for param in self.handle.params() {
            exp_avgs.push(loading.tensors(param, &["exp_avg"])?.and_then(|mut tensors| tensors.pop()));
        }
        loading.finish()?;
        self.options = options;
        self.exp_avgs = exp_avgs;
        self.batches.clear();
        Ok(())
    }

    fn offload_state(&mut self, target: &OffloadTarget) -> Result<()> {
        let offloaded = OffloadedState::new(target, vec![EXP_AVG], false, &self.handle);
        offload(self, offloaded, |own| &mut own.offloaded)
    }

    fn is_state_offloaded(&self) -> bool {
        self.offloaded.is_some()
    }
}

/// Settings of [`Lion`].
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::Lion, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([1], Init::Zeros))?;
/// let optimizer = Lion::builder(&store).lr(3e-5).betas((0.95, 0.98)).weight_decay(0.1).build()?;
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct LionBuilder {
    groups: Vec<ParamGroup>,
    lr: f64,
    weight_decay: f64,
    options: Options,
}

impl LionBuilder {
    settings! {
        /// Learning rate (default 0.0001).
        lr: f64 => lr;
        /// How much of the average the update's sign listens to, and how much of it each step keeps
        /// (default 0.9, 0.99).
        betas: (f64, f64) => options.betas;
        /// Weight decay, apart from the gradient (default 0).
        weight_decay: f64 => weight_decay;
        /// Train these groups instead of all parameters of the store.
        param_groups: Vec<ParamGroup> => groups;
    }

    /// Checks the settings and makes the optimizer.
    ///
    /// # Errors
    /// A setting out of range, no parameters, or a parameter in two groups.
    pub fn build(self) -> Result<Lion> {
        let beta1 = self.options.betas.0;
        self.options.check("Lion", &beta1s(beta1, &self.groups))?;
        let defaults = GroupDefaults { lr: self.lr, weight_decay: self.weight_decay, momentum: Some(beta1) };
        let handle = OptimizerHandle::new("Lion", self.groups, defaults)?;
        let exp_avgs = handle.params().map(|_| None).collect();
        Ok(Lion { handle, options: self.options, exp_avgs, batches: Batches::default(), offloaded: None })
    }
}
