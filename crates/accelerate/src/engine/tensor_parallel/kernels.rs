//! Products and lookups of which each rank makes a part.

use super::cross_entropy::cross_entropy;
use super::region::Region;
use crate::error::{NnError, Result, StateError};
use crate::nn::{EmbeddingKernel, LinearKernel, Param, ShardedOutput, padding_row};
use std::ops::Range;
use std::sync::Arc;
use tch::{Kind, Reduction, Tensor};
use torch_ext::scalar;

/// What the kernels of a divided layer know of it.
#[derive(Clone, Debug)]
pub(super) struct Divided {
    pub(super) region: Region,
    /// Features by rank: of the output of a colwise layer, of the input of a rowwise one, rows or columns of an embedding.
    pub(super) slices: Arc<[Range<usize>]>,
    /// Is the weight `[in_features, out_features]`?
    pub(super) is_transposed: bool,
}

impl Divided {
    fn own(&self) -> Range<i64> {
        let own = self.slices.get(self.region.rank()).cloned().unwrap_or(0..0);
        own.start as i64..own.end as i64
    }

    /// Before rows are looked up: the same indices on all ranks, which exist. The padding row, counted from the first one.
    fn begin_lookup(&self, indices: &Tensor, weight: &Param, padding_idx: Option<i64>) -> Result<Option<i64>> {
        if self.region.divides_tokens() && indices.dim() < 2 {
            return Err(StateError::NoTokens { found: indices.size() }.into());
        }
        self.region.compare_input(indices)?;
        let num_embeddings = weight.shape().first().copied().unwrap_or_default();
        check_indices(indices, weight, num_embeddings)?;
        padding_row(padding_idx, num_embeddings, weight.name())
    }

    /// This rank's slice of a weight, `[out_features, in_features]`.
    fn matrix(&self, weight: &Param) -> Result<Tensor> {
        let slice = weight.slice()?;
        Ok(if self.is_transposed { slice.f_transpose(0, 1)? } else { slice })
    }

    fn product(&self, input: &Tensor, (weight, matrix): (&Param, &Tensor), bias: Option<&Tensor>) -> Result<Tensor> {
        input.f_linear(matrix, bias).map_err(|source| {
            let in_features = matrix.size().last().copied().unwrap_or_default();
            let (name, kind) = (weight.name().to_owned(), input.f_kind().ok());
            let wanted = format!("[.., {in_features}] of {:?} (this rank's slice)", weight.kind());
            NnError::Forward { layer: "tensor-parallel Linear", name, wanted, found: input.size(), kind, source }.into()
        })
    }
}

/// Some of the output features of a linear layer.
#[derive(Debug)]
pub(super) struct Colwise {
    pub(super) divided: Divided,
    pub(super) gathers_output: bool,
    pub(super) parts: usize,
}

impl LinearKernel for Colwise {
    fn linear(&self, input: &Tensor, weight: &Param, bias: Option<&Param>) -> Result<Tensor> {
        let (matrix, bias) = (self.divided.matrix(weight)?, bias.map(Param::slice).transpose()?);
        let own = match self.divided.region.enter_with_product(input, (&matrix, bias.as_ref()))? {
            Some(own) => own,
            None => {
                let input = self.divided.region.enter(input)?;
                self.divided.product(&input, (weight, &matrix), bias.as_ref())?
            }
        };
        if self.gathers_output { self.divided.region.gather(&own, -1, &self.divided.slices) } else { Ok(own) }
    }

    fn sharded_output(&self) -> Option<Arc<dyn ShardedOutput>> {
        let is_divided = !self.gathers_output && self.parts == 1;
        is_divided.then(|| Arc::new(self.divided.clone()) as Arc<dyn ShardedOutput>)
    }
}

impl ShardedOutput for Divided {
    fn range(&self) -> Range<i64> {
        self.own()
    }

    fn gather(&self, output: &Tensor) -> Result<Tensor> {
        self.region.gather(output, -1, &self.slices)
    }

    fn cross_entropy(
        &self,
        logits: &Tensor,
        classes: &Tensor,
        reduction: Reduction,
        ignore_index: i64,
    ) -> Result<Tensor> {
        self.region.forget_input();
        let num_classes = self.slices.last().map_or(0, |last| last.end as i64);
        cross_entropy(self.region.group(), logits, classes, (self.own(), num_classes), (reduction, ignore_index))
    }
}

/// Some of the input features of a linear layer.
#[derive(Debug)]
pub(super) struct Rowwise {
    pub(super) divided: Divided,
    pub(super) splits_input: bool,
}

impl LinearKernel for Rowwise {
    fn linear(&self, input: &Tensor, weight: &Param, bias: Option<&Param>) -> Result<Tensor> {
        let split = match self.splits_input {
            true => Some(self.divided.region.split(input, &self.divided.slices)?),
            false => None,
        };
        let (input, matrix) = (split.as_ref().unwrap_or(input), self.divided.matrix(weight)?);
        let sum = match self.divided.region.sum_product(input, &matrix)? {
            Some(sum) => sum,
            None => self.divided.region.sum(&self.divided.product(input, (weight, &matrix), None)?)?,
        };
        // Every rank has the bias, which is added once.
        match bias {
            Some(bias) => Ok(sum.f_add(&bias.get()?.f_to_kind(sum.f_kind()?)?)?),
            None => Ok(sum),
        }
    }
}

/// Some rows of an embedding.
#[derive(Debug)]
pub(super) struct EmbeddingRowwise(pub(super) Divided);

impl EmbeddingKernel for EmbeddingRowwise {
    fn embedding(&self, indices: &Tensor, weight: &Param, padding_idx: Option<i64>) -> Result<Tensor> {
        let (own, padding) = (self.0.own(), self.0.begin_lookup(indices, weight, padding_idx)?);
        let padding = padding.filter(|row| own.contains(row));
        let is_own = scalar::ge(indices, own.start)?.f_logical_and(&scalar::lt(indices, own.end)?)?;
        // Rows of other ranks are looked up in the first one, and are zero here.
        let local = scalar::add(indices, -own.start)?.f_mul(&is_own.f_to_kind(indices.f_kind()?)?)?;
        let padding = padding.map_or(-1, |row| row - own.start);
        let rows = Tensor::f_embedding(&weight.slice()?, &local, padding, false, false)?;
        let part = scalar::masked_fill(&rows, &is_own.f_logical_not()?.f_unsqueeze(-1)?, 0.0)?;
        self.0.region.sum(&part)
    }
}

/// Some columns of an embedding.
#[derive(Debug)]
pub(super) struct EmbeddingColwise(pub(super) Divided);

impl EmbeddingKernel for EmbeddingColwise {
    fn embedding(&self, indices: &Tensor, weight: &Param, padding_idx: Option<i64>) -> Result<Tensor> {
        let padding = self.0.begin_lookup(indices, weight, padding_idx)?.unwrap_or(-1);
        let own = Tensor::f_embedding(&weight.slice()?, indices, padding, false, false)?;
        let rows = self.0.region.gather(&own, -1, &self.0.slices)?;
        if self.0.region.divides_tokens() { self.0.region.own_tokens(&rows) } else { Ok(rows) }
    }
}

/// libtorch's lookup sees this rank's rows alone, and so cannot say what does not exist.
fn check_indices(indices: &Tensor, weight: &Param, num_embeddings: i64) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let kind = indices.f_kind()?;
    let (least, most) = match indices.numel() {
        0 => return Ok(()),
        _ if !matches!(kind, Kind::Int64 | Kind::Int) => (-1, -1),
        _ => (indices.f_min()?.f_int64_value(&[])?, indices.f_max()?.f_int64_value(&[])?),
    };
    if 0 <= least && most < num_embeddings {
        return Ok(());
    }
    let source = tch::TchError::Shape(format!("an index is {}", if least < 0 { least } else { most }));
    let (name, wanted) = (weight.name().to_owned(), format!("int64 or int32 indices from 0 to {}", num_embeddings - 1));
    Err(NnError::Forward { layer: "Embedding", name, wanted, found: indices.size(), kind: Some(kind), source }.into())
}
