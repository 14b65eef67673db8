//! Lower rates when a metric stops improving.

use crate::error::{OptimError, Result};
use crate::optim::{Optimizer, OptimizerHandle};
use accelerate_core::schedule::{Plateau, PlateauState};

/// The rates are multiplied by a factor when a metric has stopped improving. PyTorch's `ReduceLROnPlateau`.
///
/// It follows a metric and not the optimizer's steps, so it is no [`LrScheduler`](super::LrScheduler) and is not given
/// to `prepare`: call [`step`](Self::step) once after each evaluation, with a metric that is the same on all
/// processes (gathered or reduced), so that all lower their rates together. It works on prepared
/// optimizers, and beside other schedules that multiply the present rate.
///
/// ```
/// use accelerate::nn::{Init, ParamStore};
/// use accelerate::optim::{Optimizer, Plateau, ReduceLrOnPlateau, Sgd};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([2], Init::Zeros))?;
/// let optimizer = Sgd::new(&store, 1.0)?;
/// let settings = Plateau { patience: 1, factor: 0.5, ..Plateau::default() };
/// let mut scheduler = ReduceLrOnPlateau::with_settings(&optimizer, settings)?;
/// let lowered = [3.0, 2.0, 2.0, 2.0].map(|loss| scheduler.step(loss));
/// assert_eq!(lowered, [false, false, false, true]);
/// assert_eq!(optimizer.handle().get_lr(0)?, 0.5);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct ReduceLrOnPlateau {
    handle: OptimizerHandle,
    settings: Plateau,
    min_lrs: Vec<f64>,
    state: PlateauState,
}

impl ReduceLrOnPlateau {
    /// Waits for ten metrics in a row that are no lower, with PyTorch's other defaults.
    ///
    /// # Errors
    /// None with these settings.
    pub fn new(optimizer: &impl Optimizer) -> Result<Self> {
        Self::with_settings(optimizer, Plateau::default())
    }

    /// Chooses every setting.
    ///
    /// # Errors
    /// `factor` or `threshold` is out of range, or the number of minimal rates is neither 1 nor that of
    /// the parameter groups.
    pub fn with_settings(optimizer: &impl Optimizer, settings: Plateau) -> Result<Self> {
        settings.check()?;
        let handle = optimizer.handle().clone();
        let wanted = handle.num_groups();
        let min_lrs = match &settings.min_lr[..] {
            [all] => vec![*all; wanted],
            each if each.len() == wanted => each.to_vec(),
            each => {
                let (scheduler, what, found) = ("ReduceLrOnPlateau", "minimal rates", each.len());
                return Err(OptimError::GroupCount { scheduler, what, found, wanted }.into());
            }
        };
        Ok(Self { handle, settings, min_lrs, state: PlateauState::default() })
    }

    /// Takes in a metric; lowers the rates for the optimizer's next step if it is time, and says so.
    /// A metric that is not a number counts as no improvement.
    pub fn step(&mut self, metric: f64) -> bool {
        let lower = self.settings.observe(&mut self.state, metric);
        if lower {
            let Self { handle, settings, min_lrs, .. } = self;
            handle.map_lrs(|group, lr| settings.lowered(lr, min_lrs.get(group).copied().unwrap_or(0.0)));
        }
        lower
    }

    /// The present learning rates, one for each parameter group.
    pub fn get_last_lr(&self) -> Vec<f64> {
        self.handle.learning_rates()
    }

    /// The optimizer whose learning rates it changes.
    pub fn handle(&self) -> &OptimizerHandle {
        &self.handle
    }

    /// Everything needed to go on later. The learning rates themselves are part of the optimizer's state.
    pub fn state_dict(&self) -> PlateauState {
        self.state
    }

    /// Takes over what [`state_dict`](Self::state_dict) returned.
    pub fn load_state_dict(&mut self, state: &PlateauState) {
        self.state = *state;
    }
}
