//! The section `optimizer`.

use super::Auto;
use super::reader::{FLAG, Kind, NOT_NEGATIVE, RATIO, Section};
use crate::names::spelled_enum;
use std::fmt;

spelled_enum! {
    /// Which optimizer a configuration asks for (`optimizer.type`). Others of DeepSpeed's and PyTorch's are refused.
    ///
    /// ```
    /// use accelerate_core::config::DeepSpeedOptimizerType;
    /// assert_eq!("adamw".parse::<DeepSpeedOptimizerType>()?, DeepSpeedOptimizerType::AdamW);
    /// assert!("OneBitAdam".parse::<DeepSpeedOptimizerType>().unwrap_err().to_string().contains("\"Lion\""));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    DeepSpeedOptimizerType, "DeepSpeed optimizer that is available" {
        /// Kingma and Ba, arXiv 1412.6980. DeepSpeed decouples the weight decay, as AdamW does, unless `adam_w_mode` is
        /// `false`.
        Adam = "Adam",
        /// Loshchilov and Hutter, arXiv 1711.05101.
        AdamW = "AdamW",
        /// Duchi et al., 2011.
        Adagrad = "Adagrad",
        /// Chen et al., arXiv 2302.06675.
        Lion = "Lion",
        /// PyTorch's, with momentum.
        Sgd = "SGD",
        /// PyTorch's.
        RmsProp = "RMSprop",
    }
}

impl DeepSpeedOptimizerType {
    /// The rate of a configuration that gives none: DeepSpeed's or PyTorch's own default.
    const fn default_lr(self) -> f64 {
        match self {
            Self::Adam | Self::AdamW | Self::Lion | Self::Sgd => 1e-3,
            Self::Adagrad | Self::RmsProp => 1e-2,
        }
    }
}

/// What an optimizer does with gradients, apart from the two numbers that all have. Where a configuration says nothing,
/// the defaults are those of DeepSpeed's optimizer of that name, else PyTorch's.
///
/// ```
/// use accelerate_core::config::{DeepSpeedConfig, OptimizerAlgorithm};
/// let config = DeepSpeedConfig::from_json(r#"{"optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.99]}}}"#)?;
/// let wanted = OptimizerAlgorithm::Adam { betas: [0.8, 0.99], eps: 1e-8, decoupled_weight_decay: true };
/// assert_eq!(config.optimizer.unwrap().algorithm, wanted);
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OptimizerAlgorithm {
    /// Adam, or AdamW where weight decay is decoupled.
    Adam {
        /// Shares of the old moments that stay: first and second. Default 0.9 and 0.999.
        betas: [f64; 2],
        /// Added to the root of the second moment. Default 1e-8.
        eps: f64,
        /// Shrink the parameters instead of adding to the gradients. Default true, also for the type "Adam".
        decoupled_weight_decay: bool,
    },
    /// Adagrad.
    Adagrad {
        /// Added to the root of the sum. Default 1e-10.
        eps: f64,
    },
    /// Lion.
    Lion {
        /// Shares of the old momentum: in the step and in what is kept. Default 0.9 and 0.99.
        betas: [f64; 2],
    },
    /// Stochastic gradient descent.
    Sgd {
        /// Share of the old momentum that stays. Default 0.
        momentum: f64,
        /// Share of the gradient that does not go into the momentum. Default 0.
        dampening: f64,
        /// Look ahead by one step of the momentum. Default false.
        nesterov: bool,
    },
    /// RMSprop.
    RmsProp {
        /// Share of the old second moment that stays. Default 0.99.
        alpha: f64,
        /// Added to the root of the second moment. Default 1e-8.
        eps: f64,
        /// Share of the old momentum that stays. Default 0.
        momentum: f64,
        /// Subtract the square of the mean from the second moment. Default false.
        centered: bool,
    },
}

/// `optimizer`: as written (`DeepSpeedOptimizer<Option<Auto<f64>>>`, `None` for an absent key), and as resolved
/// (`DeepSpeedOptimizer`).
///
/// ```
/// use accelerate_core::config::{Auto, DeepSpeedConfig, DeepSpeedOptimizerType};
/// let json = r#"{"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}}}"#;
/// let optimizer = DeepSpeedConfig::from_json(json)?.optimizer.unwrap();
/// assert_eq!(optimizer.optimizer_type, DeepSpeedOptimizerType::AdamW);
/// assert_eq!((optimizer.lr, optimizer.weight_decay), (Some(Auto::Auto), Some(Auto::Value(0.1))));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeepSpeedOptimizer<T = f64> {
    /// Its name.
    pub optimizer_type: DeepSpeedOptimizerType,
    /// Learning rate. Default 0.001; 0.01 for Adagrad and RMSprop.
    pub lr: T,
    /// Weight decay per step, as a share of the parameters (times the rate, where it is decoupled). Default 0.
    pub weight_decay: T,
    /// The rest.
    pub algorithm: OptimizerAlgorithm,
}

impl fmt::Display for DeepSpeedOptimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { optimizer_type, lr, weight_decay, .. } = self;
        write!(f, "{optimizer_type} with lr {lr} and weight_decay {weight_decay}")
    }
}

const BETAS: Kind<[f64; 2]> = Kind::new("two numbers from 0 to 1", |value| {
    let [first, second] = value.as_array()?.as_slice() else { return None };
    let both = [first.as_f64()?, second.as_f64()?];
    both.iter().all(|beta| (0.0..=1.0).contains(beta)).then_some(both)
});

impl DeepSpeedOptimizer<Option<Auto<f64>>> {
    pub(super) fn read(mut section: Section<'_>) -> Option<Self> {
        if !section.has("type") {
            section.missing("type", "name one, such as \"AdamW\"");
        }
        let optimizer_type = section.name::<DeepSpeedOptimizerType>("type");
        let optimizer = optimizer_type.map(|optimizer_type| match section.section("params") {
            Some(params) => Self::read_params(optimizer_type, params),
            None => Self::of_defaults(optimizer_type),
        });
        if optimizer.is_none() {
            // Without a type there is nothing to hold the parameters against.
            section.discard("params");
        }
        section.finish(None);
        optimizer
    }

    fn of_defaults(optimizer_type: DeepSpeedOptimizerType) -> Self {
        let mut findings = super::reader::Findings::default();
        Self::read_params(optimizer_type, Section::root(serde_json::Map::new(), &mut findings))
    }

    fn read_params(optimizer_type: DeepSpeedOptimizerType, mut params: Section<'_>) -> Self {
        use DeepSpeedOptimizerType as Type;
        let lr = params.auto("lr", &NOT_NEGATIVE);
        let weight_decay = params.auto("weight_decay", &NOT_NEGATIVE);
        let algorithm = match optimizer_type {
            Type::Adam | Type::AdamW => {
                let is_decoupled = params.plain("adam_w_mode", &FLAG).unwrap_or(true);
                OptimizerAlgorithm::Adam {
                    betas: params.plain("betas", &BETAS).unwrap_or([0.9, 0.999]),
                    eps: params.plain("eps", &NOT_NEGATIVE).unwrap_or(1e-8),
                    decoupled_weight_decay: is_decoupled || optimizer_type == Type::AdamW,
                }
            }
            Type::Adagrad => OptimizerAlgorithm::Adagrad { eps: params.plain("eps", &NOT_NEGATIVE).unwrap_or(1e-10) },
            Type::Lion => OptimizerAlgorithm::Lion { betas: params.plain("betas", &BETAS).unwrap_or([0.9, 0.99]) },
            Type::Sgd => OptimizerAlgorithm::Sgd {
                momentum: params.plain("momentum", &NOT_NEGATIVE).unwrap_or(0.0),
                dampening: params.plain("dampening", &RATIO).unwrap_or(0.0),
                nesterov: params.plain("nesterov", &FLAG).unwrap_or(false),
            },
            Type::RmsProp => OptimizerAlgorithm::RmsProp {
                alpha: params.plain("alpha", &RATIO).unwrap_or(0.99),
                eps: params.plain("eps", &NOT_NEGATIVE).unwrap_or(1e-8),
                momentum: params.plain("momentum", &NOT_NEGATIVE).unwrap_or(0.0),
                centered: params.plain("centered", &FLAG).unwrap_or(false),
            },
        };
        params.finish(Some(optimizer_type.as_str()));
        Self { optimizer_type, lr, weight_decay, algorithm }
    }

    /// With the numbers filled in; the defaults where there are none.
    pub(super) fn with_numbers(self, lr: Option<f64>, weight_decay: Option<f64>) -> DeepSpeedOptimizer {
        let Self { optimizer_type, algorithm, .. } = self;
        let lr = lr.unwrap_or(optimizer_type.default_lr());
        DeepSpeedOptimizer { optimizer_type, lr, weight_decay: weight_decay.unwrap_or(0.0), algorithm }
    }
}
