//! Who makes the optimizer and the schedule: the configuration or the program.

use super::DeepSpeedConfig;
use crate::Result;
use crate::error::deep_speed::DeepSpeedErrorKind as Kind;

/// The optimizer that a program passes to `prepare`.
///
/// ```
/// use accelerate_core::config::OptimizerInCode;
/// let dummy = OptimizerInCode::Dummy { lr: Some(5e-5), weight_decay: None };
/// assert_eq!(dummy.lr(), Some(5e-5));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OptimizerInCode {
    /// One of its own.
    Own {
        /// Its learning rate.
        lr: Option<f64>,
    },
    /// `DummyOptim` of the reference (`utils/deepspeed.py`): it stands for the one that the configuration describes.
    Dummy {
        /// Its learning rate, for "auto". Default: that of the optimizer's type; Python Accelerate's is 0.001.
        lr: Option<f64>,
        /// Its weight decay, for "auto". Default 0.
        weight_decay: Option<f64>,
    },
}

impl OptimizerInCode {
    /// The rate that it was given.
    pub const fn lr(&self) -> Option<f64> {
        match *self {
            Self::Own { lr } | Self::Dummy { lr, .. } => lr,
        }
    }
}

/// The learning-rate scheduler that a program passes to `prepare`.
///
/// ```
/// use accelerate_core::config::SchedulerInCode;
/// let dummy = SchedulerInCode::Dummy { total_num_steps: Some(100), warmup_num_steps: Some(10), has_callable: false };
/// assert_ne!(dummy, SchedulerInCode::Own);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchedulerInCode {
    /// One of its own.
    Own,
    /// `DummyScheduler` of the reference (`utils/deepspeed.py`): it stands for the one that the configuration describes,
    /// or that its callable makes.
    Dummy {
        /// Steps until the end, as one process alone would count them, for "auto".
        total_num_steps: Option<u64>,
        /// Steps of the rise, for "auto". Default 1; Python Accelerate's 0 counts as 1 there too.
        warmup_num_steps: Option<usize>,
        /// Does it come with `lr_scheduler_callable`, which makes the scheduler?
        has_callable: bool,
    },
}

/// Checks that optimizer and scheduler are each made by one side only (`Accelerator._prepare_deepspeed` of the
/// reference). `None` is an object that was not passed.
///
/// # Errors
///
/// [`Error::is_config`](crate::Error::is_config): an optimizer in the configuration without a `DummyOptim`, or the other
/// way round; a scheduler in the configuration although the program makes one, itself or by the callable of a
/// `DummyScheduler`; a `DummyScheduler` for which there is neither; a scheduler of the program's own for a `DummyOptim`.
///
/// ```
/// use accelerate_core::config::{DeepSpeedConfig, OptimizerInCode, check_deep_speed_prepared};
/// let config = DeepSpeedConfig::from_json(r#"{"optimizer": {"type": "AdamW"}}"#)?;
/// let own = OptimizerInCode::Own { lr: Some(0.1) };
/// let error = check_deep_speed_prepared(&config, Some(&own), None).unwrap_err();
/// assert!(error.to_string().contains("pass a DummyOptim in its place"));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
pub fn check_deep_speed_prepared(
    config: &DeepSpeedConfig,
    optimizer: Option<&OptimizerInCode>,
    scheduler: Option<&SchedulerInCode>,
) -> Result<()> {
    let is_dummy_optimizer = matches!(optimizer, Some(OptimizerInCode::Dummy { .. }));
    match optimizer {
        Some(OptimizerInCode::Own { .. }) if config.optimizer.is_some() => return Err(Kind::OptimizerTwice.into()),
        Some(OptimizerInCode::Dummy { .. }) if config.optimizer.is_none() => return Err(Kind::NoOptimizer.into()),
        _ => {}
    }
    match (scheduler, &config.scheduler) {
        (Some(SchedulerInCode::Own | SchedulerInCode::Dummy { has_callable: true, .. }), Some(_)) => {
            Err(Kind::SchedulerTwice.into())
        }
        (Some(SchedulerInCode::Dummy { has_callable: false, .. }), None) => Err(Kind::NoScheduler.into()),
        (Some(SchedulerInCode::Own), None) if is_dummy_optimizer => Err(Kind::SchedulerOfDummy.into()),
        _ => Ok(()),
    }
}
