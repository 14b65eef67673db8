//! Recurrent layers: LSTM (Hochreiter and Schmidhuber 1997) and GRU (<https://arxiv.org/abs/1406.1078>), computed by libtorch.

use super::layer::forward_error;
use super::{AnyLayer, Init, Param, Path, TrainingFlag};
use crate::error::{NnError, Result};
use std::borrow::Borrow;
use tch::{TchError, Tensor};

/// What a recurrent layer may be told besides its sizes; defaults are PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RNNConfig {
    /// Layers on top of each other. Default: 1.
    pub num_layers: i64,
    /// Add learned biases? Default: true.
    pub bias: bool,
    /// Is the batch the first dim (`true`) or the second? Default: false.
    pub batch_first: bool,
    /// Dropout on what a layer hands to the next, while training. Default: 0.
    pub dropout: f64,
    /// Read the sequence from its end as well? Default: false.
    pub bidirectional: bool,
}

impl Default for RNNConfig {
    fn default() -> Self {
        Self { num_layers: 1, bias: true, batch_first: false, dropout: 0.0, bidirectional: false }
    }
}

/// What both kinds have in common.
#[derive(Clone, Debug)]
struct Recurrent {
    /// In the order of PyTorch's `state_dict`: for each layer and direction `weight_ih`, `weight_hh`, `bias_ih`, `bias_hh`.
    params: Vec<Param>,
    input_size: i64,
    hidden_size: i64,
    config: RNNConfig,
    training: TrainingFlag,
}

impl Recurrent {
    fn new(
        path: &Path,
        (layer, num_gates): (&'static str, i64),
        input_size: i64,
        hidden_size: i64,
        config: RNNConfig,
    ) -> Result<Self> {
        if !(0.0..=1.0).contains(&config.dropout) {
            return Err(NnError::Probability { path: path.name().to_owned(), p: config.dropout }.into());
        }
        let bound = if hidden_size > 0 { 1.0 / (hidden_size as f64).sqrt() } else { 0.0 };
        let init = Init::Uniform { low: -bound, high: bound };
        let num_directions = if config.bidirectional { 2 } else { 1 };
        let mut params = Vec::new();
        for index in 0..config.num_layers {
            let width = if index == 0 { input_size } else { hidden_size * num_directions };
            for suffix in ["", "_reverse"].into_iter().take(num_directions as usize) {
                let mut param = |name: &str, shape: &[i64]| -> Result<()> {
                    params.push(path.param(&format!("{name}_l{index}{suffix}"), (shape, init))?);
                    Ok(())
                };
                let rows = num_gates * hidden_size;
                param("weight_ih", &[rows, width])?;
                param("weight_hh", &[rows, hidden_size])?;
                if config.bias {
                    param("bias_ih", &[rows])?;
                    param("bias_hh", &[rows])?;
                }
            }
        }
        path.register_layer(AnyLayer::Other { kind: layer, params: params.clone() });
        Ok(Self { params, input_size, hidden_size, config, training: path.training_flag() })
    }

    fn tensors(&self) -> Result<Vec<Tensor>> {
        self.params.iter().map(Param::get).collect()
    }

    /// Zeros `[num_layers * num_directions, batch, hidden_size]`.
    fn first_state(&self, input: &Tensor) -> Result<Tensor> {
        let batch_dim = if self.config.batch_first { 0 } else { 1 };
        let batch = input.size().get(batch_dim).copied().unwrap_or_default();
        let num_directions = if self.config.bidirectional { 2 } else { 1 };
        let shape = [self.config.num_layers * num_directions, batch, self.hidden_size];
        Ok(Tensor::f_zeros(shape, (input.f_kind()?, input.device()))?)
    }

    fn check(&self, layer: &'static str, input: &Tensor) -> Result<()> {
        match input.dim() {
            3 => Ok(()),
            num_dims => Err(self.error(layer, input, TchError::Shape(format!("the input has {num_dims} dims")))),
        }
    }

    #[cold]
    fn error(&self, layer: &'static str, input: &Tensor, source: TchError) -> crate::Error {
        let first = if self.config.batch_first { "batch, length" } else { "length, batch" };
        let name = self.params.first().map_or("without parameters", Param::name);
        forward_error(layer, name, format!("[{first}, {}]", self.input_size), input, source)
    }
}

/// `torch.nn.LSTM`, without projections: sequences to sequences, with a state that is handed on.
///
/// Parameters `weight_ih_l0 [4 * hidden_size, input_size]`, `weight_hh_l0 [4 * hidden_size, hidden_size]`, `bias_ih_l0` and
/// `bias_hh_l0 [4 * hidden_size]`, and the same for more layers and the other direction, drawn evenly within
/// `±1/sqrt(hidden_size)`.
///
/// ```
/// use accelerate::nn::{LSTM, ParamStore, RNNConfig};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let config = RNNConfig { batch_first: true, bidirectional: true, ..Default::default() };
/// let lstm = LSTM::new(ParamStore::new(Device::Cpu).root(), 3, 5, config)?;
/// let (output, (hidden, cell)) = lstm.forward(&Tensor::ones([2, 7, 3], (Kind::Float, Device::Cpu)), None)?;
/// assert_eq!((output.size(), hidden.size(), cell.size()), (vec![2, 7, 10], vec![2, 2, 5], vec![2, 2, 5]));
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct LSTM(Recurrent);

impl LSTM {
    /// Registers the parameters under `path`.
    ///
    /// # Errors
    /// The dropout is no probability; the names are taken.
    pub fn new(path: impl Borrow<Path>, input_size: i64, hidden_size: i64, config: RNNConfig) -> Result<Self> {
        Recurrent::new(path.borrow(), ("LSTM", 4), input_size, hidden_size, config).map(Self)
    }

    /// `[length, batch, input_size]` to `[length, batch, num_directions * hidden_size]`, and the state behind the last of each: hidden
    /// and cell, both `[num_layers * num_directions, batch, hidden_size]`, as `state` is; `None` begins with zeros. With
    /// `batch_first`, the first two dims of input and output are exchanged.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn forward(&self, input: &Tensor, state: Option<(&Tensor, &Tensor)>) -> Result<(Tensor, (Tensor, Tensor))> {
        let Recurrent { config, training, .. } = &self.0;
        self.0.check("LSTM", input)?;
        let (hidden, cell) = match state {
            Some((hidden, cell)) => (hidden.shallow_clone(), cell.shallow_clone()),
            None => (self.0.first_state(input)?, self.0.first_state(input)?),
        };
        let (output, hidden, cell) = input
            .f_lstm(
                &[hidden, cell],
                &self.0.tensors()?,
                config.bias,
                config.num_layers,
                config.dropout,
                training.get(),
                config.bidirectional,
                config.batch_first,
            )
            .map_err(|source| self.0.error("LSTM", input, source))?;
        Ok((output, (hidden, cell)))
    }
}

/// `torch.nn.GRU`: sequences to sequences, with a state that is handed on.
///
/// Parameters as those of an [`LSTM`], with three gates in place of four.
///
/// ```
/// use accelerate::nn::{GRU, ParamStore};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let gru = GRU::new(ParamStore::new(Device::Cpu).root(), 3, 5, Default::default())?;
/// let (output, hidden) = gru.forward(&Tensor::ones([7, 2, 3], (Kind::Float, Device::Cpu)), None)?;
/// assert_eq!((output.size(), hidden.size()), (vec![7, 2, 5], vec![1, 2, 5]));
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct GRU(Recurrent);

impl GRU {
    /// Registers the parameters under `path`.
    ///
    /// # Errors
    /// The dropout is no probability; the names are taken.
    pub fn new(path: impl Borrow<Path>, input_size: i64, hidden_size: i64, config: RNNConfig) -> Result<Self> {
        Recurrent::new(path.borrow(), ("GRU", 3), input_size, hidden_size, config).map(Self)
    }

    /// `[length, batch, input_size]` to `[length, batch, num_directions * hidden_size]`, and the state behind the last of each,
    /// `[num_layers * num_directions, batch, hidden_size]`, as `state` is; `None` begins with zeros. With `batch_first`, the first
    /// two dims of input and output are exchanged.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn forward(&self, input: &Tensor, state: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        let Recurrent { config, training, .. } = &self.0;
        self.0.check("GRU", input)?;
        let hidden = match state {
            Some(hidden) => hidden.shallow_clone(),
            None => self.0.first_state(input)?,
        };
        input
            .f_gru(
                &hidden,
                &self.0.tensors()?,
                config.bias,
                config.num_layers,
                config.dropout,
                training.get(),
                config.bidirectional,
                config.batch_first,
            )
            .map_err(|source| self.0.error("GRU", input, source))
    }
}
