//! What layers compute, as functions of their parameters: `torch.nn.functional` over [`Param`]s in place of tensors.
//!
//! A function asks a parameter for what it needs, so it may use how the parameter is stored: a weight of which ranks own
//! shards may take its gradient as a product, and a large tied table adds up its two gradients in place. A product in eight
//! bits or over slices of a weight is one more function of this kind.
//!
//! Each function fails where a parameter cannot be gathered, and where libtorch refuses the input: then the error names the
//! layer's parameter, and the input that was wanted and found.

use super::embedding::padding_row;
use super::layer::forward_error;
use super::tied_embedding::TiedEmbedding;
use super::{ConvConfig, ConvTransposeConfig, Padding, Param, deferred_weight_grad};
use crate::error::Result;
use std::ops::Range;
use tch::{Kind, TchError, Tensor};
use torch_ext::autograd::is_grad_enabled;
use torch_ext::{apply_function, few_rows, scalar};

/// `input [.., in_features]`, `weight [out_features, in_features]`, `bias [out_features]` to `[.., out_features]`. The inner
/// error is libtorch's, for the layer to explain.
pub(super) fn linear(input: &Tensor, weight: &Param, bias: Option<&Param>) -> Result<Result<Tensor, TchError>> {
    let bias = get(bias)?;
    if deferred_weight_grad::is_for_linear(weight, input)? {
        if let Some(defer) = deferred_weight_grad::deferral(weight, input)? {
            return deferred_weight_grad::linear(input, &weight.get()?, bias.as_ref(), Some(defer)).map(Ok);
        }
        if let Some(table) = TiedEmbedding::of(weight)? {
            return deferred_weight_grad::linear(input, &table.dense, bias.as_ref(), None).map(Ok);
        }
    }
    let weight = weight.get()?;
    if input.f_kind()? == Kind::BFloat16
        && !is_grad_enabled()
        && let Some(output) = few_rows::linear(input, &weight, bias.as_ref())?
    {
        return Ok(Ok(output));
    }
    Ok(input.f_linear(&weight, bias))
}

/// The same with some of the weight's rows, `[rows, in_features]`, and these elements of the bias.
pub(super) fn linear_rows(
    input: &Tensor,
    (weight, rows): (&Param, Range<i64>),
    bias: Option<(&Param, Range<i64>)>,
) -> Result<Result<Tensor, TchError>> {
    let narrow = |(param, rows): (&Param, Range<i64>)| -> Result<Tensor> {
        Ok(param.get()?.f_narrow(0, rows.start, rows.end - rows.start)?)
    };
    let bias = bias.map(narrow).transpose()?;
    Ok(input.f_linear(&narrow((weight, rows))?, bias))
}

/// `indices [..]` and `weight [num_embeddings, embedding_dim]` to `[.., embedding_dim]`. The row `padding_idx` gets no gradient.
pub(super) fn embedding(indices: &Tensor, weight: &Param, padding_idx: Option<i64>) -> Result<Tensor> {
    let shared = TiedEmbedding::of(weight)?;
    let makes_rows = shared.is_some() || weight.is_sharded();
    let table = shared.map_or_else(|| weight.get(), |table| Ok(table.rows))?;
    // libtorch takes -1 for none, where PyTorch counts from the last row.
    let num_embeddings = weight.shape().first().copied().unwrap_or_default();
    let padding_idx = padding_row(padding_idx, num_embeddings, weight.name())?.unwrap_or(-1);
    let rows = || {
        Tensor::f_embedding(&table, indices, padding_idx, false, false).map_err(|source| {
            let wanted = format!("int64 or int32 indices from 0 to {}", num_embeddings - 1);
            forward_error("Embedding", weight.name(), wanted, indices, source)
        })
    };
    if !makes_rows || !table.requires_grad() || !is_grad_enabled() {
        return rows();
    }
    with_sparse_gradient(&table, indices, padding_idx, tch::no_grad(rows)?)
}

/// Rows of a weight as an operation whose gradient has those rows only: a rank that keeps a shard of a table needs no more
/// of it than it sends, and the gradient of a table's other use has room for them. It has the values, to the bit, of the
/// gradient that libtorch makes.
fn with_sparse_gradient(weight: &Tensor, indices: &Tensor, padding_idx: i64, rows: Tensor) -> Result<Tensor> {
    let size = weight.size();
    let mut outputs = apply_function(
        "Embedding",
        &[weight],
        |context| {
            context.save_for_backward(&[indices]);
            Ok(vec![rows])
        },
        move |context, gradients| {
            let Some(Some(gradient)) = gradients.first() else { return Ok(vec![None]) };
            let indices = context.saved_tensors()?[0].f_reshape([-1])?.f_to_kind(Kind::Int64)?;
            let values = gradient.f_reshape([-1, size[1]])?;
            let counts = scalar::ne(&indices, padding_idx)?.f_nonzero()?.f_squeeze_dim(1)?;
            let (indices, values) = (indices.f_index_select(0, &counts)?, values.f_index_select(0, &counts)?);
            let (rows, place, _) = indices.f_internal_unique2(true, true, false)?;
            let options = (values.f_kind()?, values.device());
            let sums = Tensor::f_zeros([rows.size()[0], size[1]], options)?.f_index_add_(0, &place, &values)?;
            let rows = rows.f_unsqueeze(0)?;
            Ok(vec![Some(Tensor::f_sparse_coo_tensor_indices_size(&rows, &sums, &size[..], options, true)?)])
        },
    )?;
    Ok(outputs.swap_remove(0))
}

/// `input [batch, in_channels, length]`, `weight [out_channels, in_channels / groups, kernel_size]`.
pub(super) fn conv1d(input: &Tensor, weight: &Param, bias: Option<&Param>, config: ConvConfig<1>) -> Result<Tensor> {
    let (kernel, bias) = (weight.get()?, get(bias)?);
    let ConvConfig { stride, padding, dilation, groups, .. } = config;
    match padding {
        Padding::Explicit(zeros) => input.f_conv1d(&kernel, bias, stride, zeros, dilation, groups),
        Padding::Same => input.f_conv1d_padding(&kernel, bias, stride, "same", dilation, groups),
    }
    .map_err(|source| conv_error("Conv1d", weight, groups, input, source))
}

/// `input [batch, in_channels, height, width]`, `weight [out_channels, in_channels / groups, kernel_height, kernel_width]`.
pub(super) fn conv2d(input: &Tensor, weight: &Param, bias: Option<&Param>, config: ConvConfig<2>) -> Result<Tensor> {
    let (kernel, bias) = (weight.get()?, get(bias)?);
    let ConvConfig { stride, padding, dilation, groups, .. } = config;
    match padding {
        Padding::Explicit(zeros) => input.f_conv2d(&kernel, bias, stride, zeros, dilation, groups),
        Padding::Same => input.f_conv2d_padding(&kernel, bias, stride, "same", dilation, groups),
    }
    .map_err(|source| conv_error("Conv2d", weight, groups, input, source))
}

/// `input [batch, in_channels, length]`, `weight [in_channels, out_channels / groups, kernel_size]`.
pub(super) fn conv_transpose1d(
    input: &Tensor,
    weight: &Param,
    bias: Option<&Param>,
    config: ConvTransposeConfig<1>,
) -> Result<Tensor> {
    let ConvTransposeConfig { stride, padding, output_padding, dilation, groups, .. } = config;
    input
        .f_conv_transpose1d(&weight.get()?, get(bias)?, stride, padding, output_padding, groups, dilation)
        .map_err(|source| conv_transpose_error("ConvTranspose1d", weight, input, source))
}

/// `input [batch, in_channels, height, width]`, `weight [in_channels, out_channels / groups, kernel_height, kernel_width]`.
pub(super) fn conv_transpose2d(
    input: &Tensor,
    weight: &Param,
    bias: Option<&Param>,
    config: ConvTransposeConfig<2>,
) -> Result<Tensor> {
    let ConvTransposeConfig { stride, padding, output_padding, dilation, groups, .. } = config;
    input
        .f_conv_transpose2d(&weight.get()?, get(bias)?, stride, padding, output_padding, groups, dilation)
        .map_err(|source| conv_transpose_error("ConvTranspose2d", weight, input, source))
}

#[cold]
fn conv_transpose_error(layer: &'static str, weight: &Param, input: &Tensor, source: TchError) -> crate::Error {
    let shape = weight.shape();
    let in_channels = shape.first().copied().unwrap_or_default();
    let wanted = format!("[batch, {in_channels}{}]", ", size".repeat(shape.len().saturating_sub(2)));
    forward_error(layer, weight.name(), wanted, input, source)
}

#[cold]
fn conv_error(layer: &'static str, weight: &Param, groups: i64, input: &Tensor, source: TchError) -> crate::Error {
    let shape = weight.shape();
    let wanted = format!("[batch, {}{}]", shape[1] * groups, ", size".repeat(shape.len() - 2));
    forward_error(layer, weight.name(), wanted, input, source)
}

/// The learned scale and bias of a normalisation, where it has them.
pub(super) type Affine<'a> = (Option<&'a Param>, Option<&'a Param>);

/// `[.., normalized_shape]` to the same shape.
pub(super) fn layer_norm(input: &Tensor, normalized_shape: &[i64], affine: Affine<'_>, eps: f64) -> Result<Tensor> {
    let (weight, bias) = (get(affine.0)?, get(affine.1)?);
    input.f_layer_norm(normalized_shape, weight, bias, eps, true).map_err(|source| {
        forward_error("LayerNorm", name(affine.0), format!("last dims {normalized_shape:?}"), input, source)
    })
}

/// `[.., normalized_shape]` to the same shape.
pub(super) fn rms_norm(
    input: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Param>,
    eps: Option<f64>,
) -> Result<Tensor> {
    input.f_rms_norm(normalized_shape, get(weight)?, eps).map_err(|source| {
        forward_error("RMSNorm", name(weight), format!("last dims {normalized_shape:?}"), input, source)
    })
}

/// `[batch, num_channels, ..]` to the same shape.
pub(super) fn group_norm(
    input: &Tensor,
    (num_groups, num_channels): (i64, i64),
    affine: Affine<'_>,
    eps: f64,
) -> Result<Tensor> {
    let (weight, bias) = (get(affine.0)?, get(affine.1)?);
    input.f_group_norm(num_groups, weight, bias, eps, true).map_err(|source| {
        forward_error("GroupNorm", name(affine.0), format!("[batch, {num_channels}, ..]"), input, source)
    })
}

/// What a batch normalisation does with the statistics of this batch.
pub(super) struct BatchStatistics<'a> {
    /// Mean and variance of the batches before, which are updated where the batch's own are used.
    pub(super) running: (Option<&'a Param>, Option<&'a Param>),
    /// Normalise by the batch, in place of the running statistics?
    pub(super) use_batch: bool,
    /// Weight of the batch in the running statistics.
    pub(super) momentum: f64,
}

/// `[batch, num_features, ..]` to the same shape. The inner error is libtorch's, for the layer to explain.
pub(super) fn batch_norm(
    input: &Tensor,
    affine: Affine<'_>,
    statistics: &BatchStatistics<'_>,
    eps: f64,
) -> Result<Result<Tensor, TchError>> {
    let BatchStatistics { running, use_batch, momentum } = *statistics;
    let (weight, bias) = (get(affine.0)?, get(affine.1)?);
    let (mean, variance) = (get(running.0)?, get(running.1)?);
    Ok(input.f_batch_norm(weight, bias, mean, variance, use_batch, momentum, eps, true))
}

pub(super) fn get(param: Option<&Param>) -> Result<Option<Tensor>> {
    param.map(Param::get).transpose()
}

fn name(param: Option<&Param>) -> &str {
    param.map_or("without parameters", Param::name)
}
