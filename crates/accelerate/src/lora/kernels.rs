//! What computes a layer that has adapters: the layer's kernel, and what the active adapters add to it.

use crate::error::Result;
use crate::nn::{
    AroundEmbedding, AroundLinear, DenseEmbeddingKernel, EmbeddingKernel, InnerPlace, Linear, LinearKernel, Param,
    TrainingFlag, forward_error, is_floating, padding_row,
};
use std::sync::{Arc, Mutex, PoisonError};
use tch::{Kind, Tensor};
use torch_ext::scalar;

/// The two layers of one adapter on one layer. Of an embedding they are tables: their weights are what they have in use.
#[derive(Debug)]
pub(super) struct LayerAdapter {
    /// Its weight is `[r, in_features]`; of an embedding `[r, num_embeddings]`.
    pub(super) a: Linear,
    /// Its weight is `[out_features, r]`; of an embedding `[embedding_dim, r]`.
    pub(super) b: Linear,
    pub(super) scaling: f64,
    pub(super) dropout: f64,
    pub(super) training: TrainingFlag,
}

/// Weight and bias of a layer into which adapters are merged.
#[derive(Debug)]
pub(super) struct Merged {
    /// As the layer stores its own.
    pub(super) weight: Tensor,
    pub(super) bias: Option<Tensor>,
    /// Is the weight `[in_features, out_features]`?
    pub(super) is_transposed: bool,
    /// Has the layer codes in place of numbers? Then it takes inputs of any floating type, and gives its output in that.
    pub(super) is_of_codes: bool,
}

impl Merged {
    pub(super) fn shallow_clone(&self) -> Self {
        let &Self { ref weight, ref bias, is_transposed, is_of_codes } = self;
        let bias = bias.as_ref().map(Tensor::shallow_clone);
        Self { weight: weight.shallow_clone(), bias, is_transposed, is_of_codes }
    }

    /// `input [.., in_features]` to `[.., out_features]`; `name` is that of the layer's own weight.
    fn linear(&self, input: &Tensor, name: &str) -> Result<Tensor> {
        let weight = if self.is_transposed { self.weight.f_transpose(0, 1)? } else { self.weight.shallow_clone() };
        let (kind, result) = (weight.f_kind()?, input.f_kind()?);
        let casts = self.is_of_codes && is_floating(result);
        let x = if casts { input.f_to_kind(kind)? } else { input.shallow_clone() };
        let output = x.f_linear(&weight, self.bias.as_ref()).map_err(|source| {
            let in_features = weight.size().get(1).copied().unwrap_or_default();
            forward_error("Linear", name, format!("[.., {in_features}] of {kind:?}"), input, source)
        })?;
        Ok(if casts { output.f_to_kind(result)? } else { output })
    }
}

/// What a layer computes.
#[derive(Debug, Default)]
pub(super) enum Mode {
    /// What it has computed before there were adapters.
    #[default]
    Base,
    /// That, and what these add to it, in this order.
    Adapters(Arc<[Arc<LayerAdapter>]>),
    /// An adapter's own copy in place of the layer (`modules_to_save`).
    Copy(Linear),
    /// A weight into which adapters are merged; the layer's own stays as it is.
    Merged(Merged),
    /// What it has computed before there were adapters, until it computes this again.
    Off(Box<Mode>),
}

impl Mode {
    fn shallow_clone(&self) -> Self {
        match self {
            Self::Base => Self::Base,
            Self::Adapters(adapters) => Self::Adapters(Arc::clone(adapters)),
            Self::Copy(copy) => Self::Copy(copy.clone()),
            Self::Merged(merged) => Self::Merged(merged.shallow_clone()),
            Self::Off(mode) => Self::Off(Box::new(mode.shallow_clone())),
        }
    }

    /// The layers that it consists of besides the one with adapters; `None` if it has nothing to do with how that is computed.
    fn inner_layers(&self) -> Option<Vec<(InnerPlace, Linear)>> {
        match self {
            Self::Base => Some(Vec::new()),
            Self::Adapters(adapters) => {
                let both =
                    |own: &Arc<LayerAdapter>| [(InnerPlace::First, own.a.clone()), (InnerPlace::Last, own.b.clone())];
                Some(adapters.iter().flat_map(both).collect())
            }
            Self::Copy(copy) => Some(vec![(InnerPlace::Instead, copy.clone())]),
            Self::Merged(_) => None,
            Self::Off(mode) => mode.inner_layers(),
        }
    }
}

/// The mode of a layer, which its kernel reads and the model sets.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedMode(Arc<Mutex<Mode>>);

impl SharedMode {
    // A single value: whole after every statement, also where another thread panicked.
    fn get(&self) -> Mode {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).shallow_clone()
    }

    pub(super) fn set(&self, mode: Mode) {
        let replaced = std::mem::replace(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), mode);
        drop(replaced);
    }
}

/// Goes around the kernel of a linear layer with adapters. It holds parameters, and not the store.
#[derive(Debug)]
pub(super) struct LoraLinear {
    pub(super) mode: SharedMode,
}

impl AroundLinear for LoraLinear {
    fn inner_layers(&self) -> Option<Vec<(InnerPlace, Linear)>> {
        self.mode.get().inner_layers()
    }

    fn linear(
        &self,
        kernel: &dyn LinearKernel,
        input: &Tensor,
        weight: &Param,
        bias: Option<&Param>,
    ) -> Result<Tensor> {
        match self.mode.get() {
            Mode::Base | Mode::Off(_) => kernel.linear(input, weight, bias),
            Mode::Copy(copy) => copy.forward(input),
            Mode::Merged(merged) => merged.linear(input, weight.name()),
            Mode::Adapters(adapters) => {
                let output = kernel.linear(input, weight, bias)?;
                add_each(output, &adapters, |adapter| adapter.linear(input))
            }
        }
    }
}

/// Goes around the kernel of an embedding with adapters.
#[derive(Debug)]
pub(super) struct LoraEmbedding {
    pub(super) mode: SharedMode,
}

impl AroundEmbedding for LoraEmbedding {
    fn embedding(
        &self,
        kernel: &dyn EmbeddingKernel,
        indices: &Tensor,
        weight: &Param,
        padding_idx: Option<i64>,
    ) -> Result<Tensor> {
        let num_embeddings = weight.shape().first().copied().unwrap_or_default();
        let padding_row = || padding_row(padding_idx, num_embeddings, weight.name());
        match self.mode.get() {
            Mode::Base | Mode::Off(_) => kernel.embedding(indices, weight, padding_idx),
            Mode::Copy(copy) => DenseEmbeddingKernel.embedding(indices, &copy.weight, padding_idx),
            Mode::Merged(Merged { weight, .. }) => {
                Ok(Tensor::f_embedding(&weight, indices, padding_row()?.unwrap_or(-1), false, false)?)
            }
            Mode::Adapters(adapters) => {
                let output = kernel.embedding(indices, weight, padding_idx)?;
                let padding_row = padding_row()?;
                add_each(output, &adapters, |adapter| adapter.embedding(indices, padding_row))
            }
        }
    }
}

/// Adds what each adapter gives to the output of the layer, whose element type stays.
fn add_each(
    output: Tensor,
    adapters: &[Arc<LayerAdapter>],
    product: impl Fn(&LayerAdapter) -> Result<Tensor>,
) -> Result<Tensor> {
    let kind = output.f_kind()?;
    let mut sum = output;
    for adapter in adapters {
        sum = sum.f_add(&scalar::mul(&product(adapter)?, adapter.scaling)?)?;
    }
    Ok(sum.f_to_kind(kind)?)
}

impl LayerAdapter {
    /// `B(A(dropout(x)))` of an input `[.., in_features]`, in the element type of the adapter.
    fn linear(&self, input: &Tensor) -> Result<Tensor> {
        let input = input.f_to_kind(self.a.weight.kind())?;
        // Without dropout no random number is drawn.
        let input = if self.dropout > 0.0 { input.f_dropout(self.dropout, self.training.get())? } else { input };
        self.b.forward(&self.a.forward(&input)?)
    }

    /// The rows of `(B A)^T` at `indices [..]`. The padding row of A gets no gradient.
    fn embedding(&self, indices: &Tensor, padding_row: Option<i64>) -> Result<Tensor> {
        let table = self.a.weight.get()?.f_transpose(0, 1)?;
        let rows = Tensor::f_embedding(&table, indices, padding_row.unwrap_or(-1), false, false)?;
        Ok(rows.f_matmul(&self.b.weight.get()?.f_transpose(0, 1)?)?)
    }

    /// What the adapter adds to the weight of its layer, `[out_features, in_features]`, or transposed, as an embedding's
    /// `[num_embeddings, embedding_dim]`, in
    /// the element type of the adapter. As PEFT does it: half precision is multiplied in float32 on the CPU.
    pub(super) fn delta(&self, is_transposed: bool) -> Result<Tensor> {
        let (a, b) = (self.a.weight.full_tensor()?, self.b.weight.full_tensor()?);
        let kind = b.f_kind()?;
        let is_half = matches!(kind, Kind::Half | Kind::BFloat16) && !b.device().is_cuda();
        let wide = |tensor: Tensor| if is_half { tensor.f_to_kind(Kind::Float) } else { Ok(tensor) };
        let product = wide(b)?.f_matmul(&wide(a)?)?;
        let product = if is_transposed { product.f_transpose(0, 1)? } else { product };
        Ok(scalar::mul(&product, self.scaling)?.f_to_kind(kind)?)
    }
}
