//! Normalisation over a batch, with running statistics for evaluation.

use super::functional::BatchStatistics;
use super::layer::{forward_error, impl_layer};
use super::sync_batch_norm::{SyncGroup, sync_batch_norm};
use super::{AnyLayer, Init, Param, Path, TrainingFlag, functional};
use crate::error::{NnError, Result};
use crate::group::Group;
use std::borrow::Borrow;
use tch::{Device, Kind, Tensor};
use torch_ext::scalar;

/// What a batch normalisation may be told besides its size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchNormConfig {
    /// Added to the variance. PyTorch's default: 1e-5.
    pub eps: f64,
    /// Weight of the newest batch in the running statistics; `None`: plain mean over all batches.
    /// PyTorch's default: 0.1.
    pub momentum: Option<f64>,
    /// Learn a scale and a bias per channel?
    pub affine: bool,
    /// Keep running statistics? Without them, evaluation normalises by the batch too.
    pub track_running_stats: bool,
}

impl Default for BatchNormConfig {
    fn default() -> Self {
        Self { eps: 1e-5, momentum: Some(0.1), affine: true, track_running_stats: true }
    }
}

/// Batch normalisation (<https://arxiv.org/abs/1502.03167>) over `N` dims of positions; see [`BatchNorm1d`] and [`BatchNorm2d`].
///
/// Parameters `weight` (ones) and `bias` (zeros), buffers `running_mean`, `running_var` `[num_features]` and
/// `num_batches_tracked` (int64, no dims).
#[derive(Clone, Debug)]
pub struct BatchNorm<const N: usize> {
    /// Scale `[num_features]`.
    pub weight: Option<Param>,
    /// Bias `[num_features]`.
    pub bias: Option<Param>,
    /// Mean of the batches seen, `[num_features]`.
    pub running_mean: Option<Param>,
    /// Unbiased variance of the batches seen, `[num_features]`.
    pub running_var: Option<Param>,
    /// Number of batches seen in training mode.
    pub num_batches_tracked: Option<Param>,
    /// Number of channels, the second dim of the input.
    pub num_features: i64,
    /// As given to [`new`](Self::new).
    pub config: BatchNormConfig,
    /// The store's mode.
    pub training: TrainingFlag,
    sync_group: SyncGroup,
}

/// `torch.nn.BatchNorm1d`: `[batch, num_features]` or `[batch, num_features, length]`.
///
/// ```
/// use accelerate::nn::{BatchNorm1d, ParamStore};
/// use accelerate::tch::{Device, Tensor};
///
/// let store = ParamStore::new(Device::Cpu);
/// let norm = BatchNorm1d::new(store.root(), 1, Default::default())?;
/// let output = norm.forward(&Tensor::from_slice(&[2.0f32, 4.0]).view([2, 1]))?;
/// assert!((output.double_value(&[0, 0]) + 1.0).abs() < 1e-4);
/// assert_eq!(norm.num_batches_tracked.unwrap().get()?.int64_value(&[]), 1);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub type BatchNorm1d = BatchNorm<1>;

/// `torch.nn.BatchNorm2d`: `[batch, num_features, height, width]`.
///
/// ```
/// use accelerate::nn::{BatchNorm2d, ParamStore};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let store = ParamStore::new(Device::Cpu);
/// let norm = BatchNorm2d::new(store.root() / "bn1", 3, Default::default())?;
/// let image = Tensor::ones([2, 3, 4, 4], (Kind::Float, Device::Cpu));
/// assert_eq!(norm.forward(&image)?.size(), [2, 3, 4, 4]);
/// assert!(store.get("bn1.running_var").is_some());
/// # Ok::<(), accelerate::Error>(())
/// ```
pub type BatchNorm2d = BatchNorm<2>;

impl<const N: usize> BatchNorm<N> {
    const NAME: &'static str = if N == 1 { "BatchNorm1d" } else { "BatchNorm2d" };

    /// Registers parameters and buffers under `path`.
    ///
    /// # Errors
    /// The names are taken.
    pub fn new(path: impl Borrow<Path>, num_features: i64, config: BatchNormConfig) -> Result<Self> {
        let path = path.borrow();
        let parameter = |name, init| path.param(name, ([num_features], init));
        let weight = config.affine.then(|| parameter("weight", Init::Ones)).transpose()?;
        let bias = config.affine.then(|| parameter("bias", Init::Zeros)).transpose()?;
        let buffer = |name, init| path.buffer(name, ([num_features], init), Default::default());
        let tracked = config.track_running_stats;
        let running_mean = tracked.then(|| buffer("running_mean", Init::Zeros)).transpose()?;
        let running_var = tracked.then(|| buffer("running_var", Init::Ones)).transpose()?;
        let num_batches_tracked = match tracked {
            true => {
                let zero = Tensor::f_zeros([0i64; 0], (Kind::Int64, Device::Cpu))?;
                Some(path.buffer("num_batches_tracked", zero, Default::default())?)
            }
            false => None,
        };
        let layer = Self {
            weight,
            bias,
            running_mean,
            running_var,
            num_batches_tracked,
            num_features,
            config,
            training: path.training_flag(),
            sync_group: SyncGroup::default(),
        };
        path.register_layer(AnyLayer::BatchNorm(layer.erased()));
        Ok(layer)
    }

    fn erased(&self) -> AnyBatchNorm {
        let Self { weight, bias, running_mean, running_var, num_batches_tracked, sync_group, .. } = self;
        let params = [weight, bias, running_mean, running_var, num_batches_tracked].into_iter().flatten();
        AnyBatchNorm { kind: Self::NAME, params: params.cloned().collect(), sync_group: sync_group.clone() }
    }

    /// The input's shape is kept. In training mode, normalises by the batch and updates the running
    /// statistics in place; in evaluation mode, normalises by the running statistics.
    ///
    /// Each process sees its own batch only, as PyTorch's `BatchNorm` under DDP, unless
    /// [`Accelerator::convert_sync_batchnorm`](crate::Accelerator::convert_sync_batchnorm) has been told otherwise.
    ///
    /// # Errors
    /// Another number of dims or channels; a single value per channel while training.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let num_dims = input.dim();
        let fits = if N == 1 { num_dims == 2 || num_dims == 3 } else { num_dims == N + 2 };
        if !fits {
            let source = tch::TchError::Shape(format!("the input has {num_dims} dims"));
            return Err(self.error(input, source));
        }
        let training = self.training.get();
        let use_batch = training || self.running_mean.is_none();
        let group = self.sync_group.get().filter(|group| training && group.world_size() > 1);
        if use_batch && group.is_none() && self.num_features > 0 && input.numel() as i64 == self.num_features {
            return Err(self.one_value(input));
        }
        if group.is_some() && input.size()[1] != self.num_features {
            let source = tch::TchError::Shape(format!("the input has {} channels", input.size()[1]));
            return Err(self.error(input, source));
        }
        let momentum = if training { self.count_batch()? } else { 0.0 };
        let running = (self.running_mean.as_ref(), self.running_var.as_ref());
        let statistics = BatchStatistics { running, use_batch, momentum };
        let affine = (self.weight.as_ref(), self.bias.as_ref());
        let output = match group {
            Some(group) => sync_batch_norm(&group, input, affine, &statistics, self.config.eps)?
                .ok_or_else(|| self.one_value(input))?,
            None => functional::batch_norm(input, affine, &statistics, self.config.eps)?,
        };
        output.map_err(|source| self.error(input, source))
    }

    /// Counts one batch; returns the weight it gets in the running statistics.
    fn count_batch(&self) -> Result<f64> {
        let Some(counter) = &self.num_batches_tracked else {
            return Ok(self.config.momentum.unwrap_or(0.0));
        };
        scalar::add_(&counter.local(), 1)?;
        match self.config.momentum {
            Some(momentum) => Ok(momentum),
            None => Ok(1.0 / counter.get()?.f_int64_value(&[])? as f64),
        }
    }

    fn name(&self) -> &str {
        let any = self.weight.as_ref().or(self.running_mean.as_ref());
        any.map_or("without parameters", Param::name)
    }

    #[cold]
    fn one_value(&self, input: &Tensor) -> crate::Error {
        let (layer, name) = (Self::NAME, self.name().to_owned());
        NnError::OneValuePerChannel { layer, name, found: input.size() }.into()
    }

    #[cold]
    fn error(&self, input: &Tensor, source: tch::TchError) -> crate::Error {
        let features = self.num_features;
        let wanted = match N {
            1 => format!("[batch, {features}] or [batch, {features}, length]"),
            _ => format!("[batch, {features}{}]", ", size".repeat(N)),
        };
        forward_error(Self::NAME, self.name(), wanted, input, source)
    }
}

/// A batch normalisation over any number of dims, as [`ParamStore::named_layers`](super::ParamStore::named_layers) finds it.
#[derive(Clone, Debug)]
pub struct AnyBatchNorm {
    kind: &'static str,
    params: Vec<Param>,
    sync_group: SyncGroup,
}

impl AnyBatchNorm {
    /// PyTorch's name of it: `SyncBatchNorm` once it normalises by the batches of several processes.
    pub fn kind(&self) -> &'static str {
        if self.sync_group.get().is_some() { "SyncBatchNorm" } else { self.kind }
    }

    /// Parameters and buffers.
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// From now on the layer normalises by the batches of all these processes together while it trains.
    pub(crate) fn synchronise(&self, group: &Group) {
        self.sync_group.set(group.clone());
    }
}

impl_layer!(BatchNorm1d, BatchNorm2d);
