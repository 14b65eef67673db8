//! Stand-ins for the optimizer and the schedule that a DeepSpeed configuration describes.

use super::{Adagrad, Adam, AdamW, Lion, Optimizer, OptimizerHandle, OptimizerState, ParamGroup, RMSprop, Sgd};
use crate::error::Result;
use crate::nn::ParamStore;
use accelerate_core::config::{DeepSpeedOptimizer, OffloadTarget, OptimizerAlgorithm};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use tch::Tensor;

/// Stands for the optimizer of a DeepSpeed configuration (`DummyOptim` of the reference, `utils/deepspeed.py`): `prepare`
/// makes that one, over these parameters.
///
/// ```
/// use accelerate::nn::{Linear, ModuleFn, ParamStore};
/// use accelerate::optim::{DummyOptim, DummyScheduler};
/// use accelerate::{Accelerator, DeepSpeedPlugin, tch::Tensor};
///
/// let json = r#"{
///     "zero_optimization": {"stage": 1},
///     "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
///     "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 2, "total_num_steps": "auto"}}
/// }"#;
/// let plugin = DeepSpeedPlugin { hf_ds_config: Some(json.parse()?), ..Default::default() };
/// let accelerator = Accelerator::builder().cpu(true).deepspeed_plugin(plugin).build()?;
/// let store = ParamStore::new(accelerator.device());
/// let linear = Linear::new(store.root(), 2, 1, Default::default())?;
/// let optimizer = DummyOptim::new(&store).lr(5e-5);
/// let scheduler = DummyScheduler::new(&optimizer).total_num_steps(10);
/// let model = ModuleFn::new(&store, move |input: &Tensor| linear.forward(input));
///
/// let (model, mut optimizer, mut scheduler) = accelerator.prepare((model, optimizer, scheduler))?;
/// for _ in 0..3 {
///     accelerator.backward(&model.forward(&Tensor::from_slice(&[1f32, 2.0]))?.sum(None))?;
///     optimizer.step()?;
///     scheduler.step()?;
///     optimizer.zero_grad()?;
/// }
/// assert_eq!(scheduler.get_last_lr(), [5e-5]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "it does nothing before `prepare`"]
pub struct DummyOptim {
    groups: Vec<ParamGroup>,
    pub(crate) lr: Option<f64>,
    pub(crate) weight_decay: Option<f64>,
    /// The handle of what becomes of it.
    made: Arc<OnceLock<OptimizerHandle>>,
}

impl DummyOptim {
    /// For every parameter of the store that requires a gradient, in one group.
    pub fn new(store: &ParamStore) -> Self {
        let groups = vec![ParamGroup::new(store.trainable_parameters())];
        Self { groups, lr: None, weight_decay: None, made: Arc::default() }
    }

    /// The learning rate where the configuration says "auto". Default: that of the optimizer's type.
    pub fn lr(self, lr: f64) -> Self {
        Self { lr: Some(lr), ..self }
    }

    /// The weight decay where the configuration says "auto". Default 0.
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        Self { weight_decay: Some(weight_decay), ..self }
    }

    /// Train these groups instead of all parameters of the store.
    pub fn param_groups(self, groups: Vec<ParamGroup>) -> Self {
        Self { groups, ..self }
    }

    /// Makes the optimizer.
    pub(crate) fn make(self, optimizer: &DeepSpeedOptimizer) -> Result<Box<dyn Optimizer>> {
        let made = Arc::clone(&self.made);
        let optimizer = build(self.groups, optimizer)?;
        // Nobody else sets it: there is one dummy of each.
        let _ = made.set(optimizer.handle().clone());
        Ok(optimizer)
    }
}

fn build(groups: Vec<ParamGroup>, optimizer: &DeepSpeedOptimizer) -> Result<Box<dyn Optimizer>> {
    let DeepSpeedOptimizer { lr, weight_decay, algorithm, .. } = *optimizer;
    // The builders take a store for its parameters, which the groups replace.
    let store = ParamStore::new(tch::Device::Cpu);
    macro_rules! built {
        ($builder:expr) => {
            Box::new($builder.lr(lr).weight_decay(weight_decay).param_groups(groups).build()?)
        };
    }
    Ok(match algorithm {
        OptimizerAlgorithm::Adam { betas: [first, second], eps, decoupled_weight_decay: true } => {
            built!(AdamW::builder(&store).betas((first, second)).eps(eps))
        }
        OptimizerAlgorithm::Adam { betas: [first, second], eps, .. } => {
            built!(Adam::builder(&store).betas((first, second)).eps(eps))
        }
        OptimizerAlgorithm::Adagrad { eps } => built!(Adagrad::builder(&store).eps(eps)),
        OptimizerAlgorithm::Lion { betas: [first, second] } => {
            built!(Lion::builder(&store).betas((first, second)))
        }
        OptimizerAlgorithm::Sgd { momentum, dampening, nesterov } => {
            built!(Sgd::builder(&store).momentum(momentum).dampening(dampening).nesterov(nesterov))
        }
        OptimizerAlgorithm::RmsProp { alpha, eps, momentum, centered } => {
            built!(RMSprop::builder(&store).alpha(alpha).eps(eps).momentum(momentum).centered(centered))
        }
    })
}

/// Stands for the schedule of a DeepSpeed configuration (`DummyScheduler` of the reference): `prepare` makes that one, for
/// the optimizer that is made of the [`DummyOptim`]. Both go to the same call, in any order, or the optimizer to an earlier
/// one. It moves one step with each step of the optimizer. See there for an example.
#[derive(Debug)]
#[must_use = "it does nothing before `prepare`"]
pub struct DummyScheduler {
    pub(crate) total_num_steps: Option<usize>,
    pub(crate) warmup_num_steps: Option<usize>,
    made: Arc<OnceLock<OptimizerHandle>>,
}

impl DummyScheduler {
    /// For the optimizer that is made of this one.
    pub fn new(optimizer: &DummyOptim) -> Self {
        Self { total_num_steps: None, warmup_num_steps: None, made: Arc::clone(&optimizer.made) }
    }

    /// Steps until the end, as one process alone would count them, where the configuration says "auto".
    pub fn total_num_steps(self, total_num_steps: usize) -> Self {
        Self { total_num_steps: Some(total_num_steps), ..self }
    }

    /// Steps of the rise, where the configuration says "auto".
    pub fn warmup_num_steps(self, warmup_num_steps: usize) -> Self {
        Self { warmup_num_steps: Some(warmup_num_steps), ..self }
    }

    /// The optimizer it is for, once that is prepared.
    pub(crate) fn optimizer(&self) -> Option<&OptimizerHandle> {
        self.made.get()
    }
}

/// Whatever optimizer a configuration asks for.
impl Optimizer for Box<dyn Optimizer> {
    fn step(&mut self) -> Result<()> {
        (**self).step()
    }
    fn step_unless(&mut self, found_inf: &Tensor) -> Result<()> {
        (**self).step_unless(found_inf)
    }
    fn step_with_factor(&mut self, grad_factor: f64) -> Result<()> {
        (**self).step_with_factor(grad_factor)
    }
    fn zero_grad(&mut self) -> Result<()> {
        (**self).zero_grad()
    }
    fn handle(&self) -> &OptimizerHandle {
        (**self).handle()
    }
    fn state_dict(&self) -> Result<OptimizerState> {
        (**self).state_dict()
    }
    fn state_views(&self) -> Result<OptimizerState> {
        (**self).state_views()
    }
    fn state_outline(&self) -> Result<OptimizerState> {
        (**self).state_outline()
    }
    fn read_state(&self, wanted: &[(&str, &Tensor)]) -> Result<()> {
        (**self).read_state(wanted)
    }
    fn dequantized(&self, tensors: BTreeMap<String, Tensor>) -> Result<BTreeMap<String, Tensor>> {
        (**self).dequantized(tensors)
    }
    fn load_state_dict(&mut self, state: &OptimizerState) -> Result<()> {
        (**self).load_state_dict(state)
    }
    fn take_state_dict(&mut self, state: OptimizerState) -> Result<()> {
        (**self).take_state_dict(state)
    }
    fn offload_state(&mut self, target: &OffloadTarget) -> Result<()> {
        (**self).offload_state(target)
    }
    fn is_state_offloaded(&self) -> bool {
        (**self).is_state_offloaded()
    }
}
