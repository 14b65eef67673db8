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

/// What the objects tell that a program passes to `prepare`, in one call or in several. The order does not matter.
///
/// ```
/// use accelerate_core::config::{OptimizerInCode, PreparedFacts};
/// let mut facts = PreparedFacts { batch_sizes: vec![Some(8)], ..Default::default() };
/// let optimizers = vec![OptimizerInCode::Own { lr: Some(0.1) }];
/// facts.extend(&PreparedFacts { optimizers, batch_sizes: vec![Some(8), Some(16)], ..Default::default() });
/// assert_eq!((facts.batch_sizes, facts.optimizers.len()), (vec![Some(8), Some(16)], 1));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PreparedFacts {
    /// Batch sizes of the loaders as the program made them; `None` for one that is not cut into batches of one size.
    pub batch_sizes: Vec<Option<usize>>,
    /// The optimizers.
    pub optimizers: Vec<OptimizerInCode>,
    /// The schedulers.
    pub schedulers: Vec<SchedulerInCode>,
}

impl PreparedFacts {
    /// Takes over what more objects tell. What is known already is not kept twice.
    pub fn extend(&mut self, more: &Self) {
        fn add<T: Clone + PartialEq>(known: &mut Vec<T>, more: &[T]) {
            for fact in more {
                if !known.contains(fact) {
                    known.push(fact.clone());
                }
            }
        }
        add(&mut self.batch_sizes, &more.batch_sizes);
        add(&mut self.optimizers, &more.optimizers);
        add(&mut self.schedulers, &more.schedulers);
    }

    /// Checks that optimizer and scheduler are each made by one side only (`Accelerator._prepare_deepspeed` of the
    /// reference).
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): an optimizer in the configuration without a `DummyOptim`, or the other
    /// way round; a scheduler in the configuration although the program makes one, itself or by the callable of a
    /// `DummyScheduler`; a `DummyScheduler` for which there is neither; a scheduler of the program's own for a `DummyOptim`.
    ///
    /// ```
    /// use accelerate_core::config::{DeepSpeedConfig, OptimizerInCode, PreparedFacts};
    /// let config = DeepSpeedConfig::from_json(r#"{"optimizer": {"type": "AdamW"}}"#)?;
    /// let optimizers = vec![OptimizerInCode::Own { lr: Some(0.1) }];
    /// let error = PreparedFacts { optimizers, ..Default::default() }.check(&config).unwrap_err();
    /// assert!(error.to_string().contains("pass a DummyOptim in its place"));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn check(&self, config: &DeepSpeedConfig) -> Result<()> {
        let mut has_dummy = false;
        for optimizer in &self.optimizers {
            match optimizer {
                OptimizerInCode::Own { .. } if config.optimizer.is_some() => return Err(Kind::OptimizerTwice.into()),
                OptimizerInCode::Own { .. } => {}
                OptimizerInCode::Dummy { .. } if config.optimizer.is_none() => return Err(Kind::NoOptimizer.into()),
                OptimizerInCode::Dummy { .. } => has_dummy = true,
            }
        }
        self.schedulers.iter().try_for_each(|scheduler| match (scheduler, &config.scheduler) {
            (SchedulerInCode::Own | SchedulerInCode::Dummy { has_callable: true, .. }, Some(_)) => {
                Err(Kind::SchedulerTwice.into())
            }
            (SchedulerInCode::Dummy { has_callable: false, .. }, None) => Err(Kind::NoScheduler.into()),
            (SchedulerInCode::Own, None) if has_dummy => Err(Kind::SchedulerOfDummy.into()),
            _ => Ok(()),
        })
    }
}
