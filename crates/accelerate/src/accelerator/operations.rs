//! Collectives over trees of tensors and over objects (`utils/operations.py` of the reference).

use crate::error::{CollectiveError, Error, Result};
use crate::group::{Group, ReduceOp, shape_text};
use crate::session::{Call, Join, LoaderPosition};
use crate::tensor_tree::TensorTree;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::{Device, Kind, Tensor};
use torch_ext::scalar::{self, Number};

/// Shapes and dtypes of all tensors of a tree, in running text.
fn describe(tree: &impl TensorTree) -> String {
    let mut shapes = Vec::new();
    tree.for_each_tensor(&mut |tensor| shapes.push(shape_text(tensor)));
    shapes.join(", ")
}

/// Every tensor joined over ranks along dim 0, in rank order. Collective.
pub(crate) fn gather<T: TensorTree>(group: &Group, tree: &T) -> Result<T> {
    const CURE: &str = "For tensors of unequal length, call accelerator.pad_across_processes(&tensor, \
                        PadOptions { dim, .. }) first; for values that are not tensors, gather_object";
    group.agree("gather", &describe(tree), CURE)?;
    tree.try_map_tensors(&mut |tensor| group.all_gather_into_tensor(tensor))
}

/// How [`Accelerator::reduce`](crate::Accelerator::reduce) combines tensors. A [`ReduceOp`] becomes one by `into`.
///
/// ```
/// use accelerate::{ReduceOp, ReduceOptions};
/// assert_eq!(ReduceOptions::default(), ReduceOp::Sum.into());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReduceOptions {
    /// Default: the sum.
    pub reduction: ReduceOp,
    /// What the result is multiplied by, in its own dtype; 1 leaves it as it is. Integers take whole numbers in their range,
    /// and wrap around as PyTorch's do; `Bool` takes 0 and 1. Default 1.
    ///
    /// On CPUs and GPUs the reference accepts a scale and leaves it out. Here it has its effect on every device.
    pub scale: f64,
}

impl Default for ReduceOptions {
    fn default() -> Self {
        ReduceOp::Sum.into()
    }
}

impl From<ReduceOp> for ReduceOptions {
    fn from(reduction: ReduceOp) -> Self {
        Self { reduction, scale: 1.0 }
    }
}

/// Every tensor combined over ranks. Collective.
pub(crate) fn reduce<T: TensorTree>(group: &Group, tree: &T, options: ReduceOptions) -> Result<T> {
    let ReduceOptions { reduction, scale } = options;
    const OP: &str = "reduce";
    const CURE: &str = "Give tensors of the same shape on every rank, and combine them in the same way";
    group.agree(OP, &format!("{} ({reduction:?}, scale {scale})", describe(tree)), CURE)?;
    let mut held = Ok(());
    tree.for_each_tensor(&mut |tensor| {
        if held.is_ok() {
            held = number_in(OP, "scale", scale, tensor).map(drop);
        }
    });
    held?;
    tree.try_map_tensors(&mut |tensor| {
        let mut copy = own_copy(tensor)?;
        group.all_reduce(&copy, reduction)?;
        match number_in(OP, "scale", scale, tensor)? {
            _ if scale == 1.0 => {}
            // A product with a number is an integer; of the two numbers that a bool takes, this is the other one.
            _ if copy.f_kind()? == Kind::Bool => drop(copy.f_zero_()?),
            number => scalar::mul_(&copy, number)?,
        }
        Ok(copy)
    })
}

/// A contiguous copy without history. What is only marked as negated or conjugated is so in memory, too.
fn own_copy(tensor: &Tensor) -> Result<Tensor> {
    let plain = tensor.f_detach()?.f_resolve_conj()?.f_resolve_neg()?;
    Ok(plain.f_contiguous()?.f_detach_copy()?)
}

/// The number as the tensor's dtype holds it.
fn number_in(op: &'static str, what: &'static str, value: f64, tensor: &Tensor) -> Result<Number> {
    let error = || CollectiveError::NotHeld { op, what, value, found: shape_text(tensor) }.into();
    Number::held_by(tensor.f_kind()?, value).ok_or_else(error)
}

/// Every tensor as it is on rank `from_process`; other ranks give tensors of the same shapes. Collective.
pub(crate) fn broadcast<T: TensorTree>(group: &Group, tree: &T, from_process: usize) -> Result<T> {
    const CURE: &str = "Give tensors of the same shape on every rank; broadcast_object_list sends anything else";
    group.agree("broadcast", &describe(tree), CURE)?;
    tree.try_map_tensors(&mut |tensor| {
        let copy = own_copy(tensor)?;
        group.broadcast(&copy, from_process)?;
        Ok(copy)
    })
}

/// How [`Accelerator::pad_across_processes`](crate::Accelerator::pad_across_processes) pads.
///
/// ```
/// let options = accelerate::PadOptions::default();
/// assert_eq!((options.dim, options.pad_index, options.pad_first), (0, 0.0, false));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PadOptions {
    /// Along which dim; a negative number counts from the last one. Default 0.
    pub dim: i64,
    /// With what: a number that the dtype of every padded tensor can hold, so a whole one for integers, and 0 or 1 for
    /// `Bool`. Default 0.
    ///
    /// The reference gives tensors of integers that it pads with a fraction, and bools, another dtype on the ranks where they
    /// are padded, and wraps numbers out of range around. Here dtypes stay, and what they cannot hold is an error.
    pub pad_index: f64,
    /// At the front instead of the end? Default false.
    pub pad_first: bool,
}

/// Every tensor with `dim` as long as on the rank where it is longest. Collective.
pub(crate) fn pad_across_processes<T: TensorTree>(group: &Group, tree: &T, padding: PadOptions) -> Result<T> {
    const OP: &str = "pad_across_processes";
    const CURE: &str = "Only the padded dim may differ between ranks";
    let mut others = Vec::new();
    let mut held = Ok(());
    tree.for_each_tensor(&mut |tensor| {
        let mut shape = tensor.size();
        others.push(match dim_of(tensor, padding.dim) {
            Some(index) => {
                if held.is_ok() {
                    held = number_in(OP, "pad_index", padding.pad_index, tensor).map(drop);
                }
                shape[index] = -1;
                format!("{shape:?} {:?}", tensor.kind())
            }
            // It stays as it is, so its shape does not matter.
            None => format!("a tensor without dim {}", padding.dim),
        });
    });
    group.agree(OP, &format!("{} (pad_index {})", others.join(", "), padding.pad_index), CURE)?;
    held?;
    tree.try_map_tensors(&mut |tensor| pad_one(group, tensor, padding))
}

/// The dim counted from the front; `None` where the tensor has no such dim.
fn dim_of(tensor: &Tensor, dim: i64) -> Option<usize> {
    let num_dims = tensor.dim() as i64;
    let dim = if dim < 0 { dim + num_dims } else { dim };
    (0..num_dims).contains(&dim).then_some(dim as usize)
}

fn pad_one(group: &Group, tensor: &Tensor, padding: PadOptions) -> Result<Tensor> {
    const OP: &str = "pad_across_processes";
    let Some(dim) = dim_of(tensor, padding.dim) else { return Ok(tensor.shallow_clone()) };
    let mut shape = tensor.size();
    let length = shape[dim];
    let longest = Tensor::f_from_slice(&[length])?;
    group.all_reduce(&longest, ReduceOp::Max)?;
    let longest = i64::try_from(&longest)?;
    if longest == length {
        return Ok(tensor.shallow_clone());
    }
    shape[dim] = longest - length;
    let number = number_in(OP, "pad_index", padding.pad_index, tensor)?;
    let filler = scalar::full(&shape, number, (tensor.f_kind()?, tensor.device()))?;
    let parts = if padding.pad_first { [&filler, tensor] } else { [tensor, &filler] };
    Ok(Tensor::f_cat(&parts, dim as i64)?)
}

/// All ranks' objects in rank order. Collective.
pub(crate) fn gather_object<T: Serialize + DeserializeOwned>(group: &Group, objects: &[T]) -> Result<Vec<T>> {
    const OP: &str = "gather_object";
    let parts = group.all_gather_bytes(&encode(OP, objects)?)?;
    let lists: Vec<Vec<T>> = parts.iter().map(|part| decode(OP, part)).collect::<Result<_>>()?;
    Ok(lists.into_iter().flatten().collect())
}

/// Replaces the objects by those of rank `from_process`. Collective.
pub(crate) fn broadcast_object_list<T: Serialize + DeserializeOwned>(
    group: &Group,
    objects: &mut Vec<T>,
    from_process: usize,
) -> Result<()> {
    const OP: &str = "broadcast_object_list";
    // Only the sender's objects travel, so only they have to be encoded.
    let mine = if group.rank() == from_process { encode(OP, objects)? } else { Vec::new() };
    let received = group.broadcast_bytes(&mine, from_process)?;
    if group.rank() != from_process {
        *objects = decode(OP, &received)?;
    }
    Ok(())
}

fn encode<T: Serialize + ?Sized>(op: &'static str, value: &T) -> Result<Vec<u8>> {
    rmp_serde::to_vec_named(value)
        .map_err(|error| CollectiveError::Object { op, verb: "write", source: error.into() }.into())
}

fn decode<T: DeserializeOwned>(op: &'static str, bytes: &[u8]) -> Result<T> {
    rmp_serde::from_slice(bytes)
        .map_err(|error| CollectiveError::Object { op, verb: "read", source: error.into() }.into())
}

/// Which rows of which rank count in the round at hand.
struct Counted<'a> {
    rows: &'a [Vec<bool>],
    /// Some rank has no batch in this round, and follows those that have.
    absent: Option<&'a Join>,
}

/// The rows of all ranks that count, each row of the data set once. Collective.
///
/// `position` is what the active loader published for this round; without one, or when the loader cannot
/// know its rows, everything counts. `join` is what ranks without batches are in.
pub(crate) fn gather_for_metrics<T: TensorTree>(
    group: &Group,
    tree: &T,
    position: Option<&LoaderPosition>,
    join: Option<&Join>,
) -> Result<T> {
    let Some(counted) = counted_rows(group, position, join)? else { return gather(group, tree) };
    let rank = group.rank();
    let wanted = counted.rows[rank].len();
    let mut wrong = None;
    tree.for_each_tensor(&mut |tensor| {
        if tensor.size().first().is_some_and(|rows| *rows != wanted as i64) {
            wrong.get_or_insert(shape_text(tensor));
        }
    });
    if let Some(found) = wrong {
        return Err(CollectiveError::NotRows { found, rank, wanted }.into());
    }
    if let Some(join) = counted.absent {
        return gather_rows_present(group, tree, counted.rows, join);
    }
    let longest = counted.rows.iter().map(Vec::len).max().unwrap_or(0);
    let padded = tree.try_map_tensors(&mut |tensor| pad_rows(tensor, longest))?;
    let keep = kept_rows(counted.rows, longest);
    let all = keep.len() == longest * counted.rows.len();
    const CURE: &str = "Only the number of rows may differ between ranks: pad other dims with \
                        accelerator.pad_across_processes(&tensor, PadOptions { dim, .. }) first, or gather one object \
                        per row with gather_object_for_metrics";
    group.agree("gather_for_metrics", &describe(&padded), CURE)?;
    padded.try_map_tensors(&mut |tensor| {
        let gathered = group.all_gather_into_tensor(tensor)?;
        // One value per rank, such as a mean loss, has no rows to leave out.
        if all || tensor.dim() == 0 {
            return Ok(gathered);
        }
        Ok(gathered.f_index_select(0, &indices(&keep, tensor)?)?)
    })
}

/// As [`gather_for_metrics`] where ranks without a batch do not know what is gathered: rows travel as bytes.
fn gather_rows_present<T: TensorTree>(group: &Group, tree: &T, counted: &[Vec<bool>], join: &Join) -> Result<T> {
    let keep = kept_rows(&counted[group.rank()..=group.rank()], 0);
    let mut shapes = Vec::new();
    let mut bytes = Vec::new();
    let mut outcome = Ok(());
    tree.for_each_tensor(&mut |tensor| {
        shapes.push(row_text(tensor));
        if outcome.is_ok() {
            outcome = append_rows(&mut bytes, tensor, &keep);
        }
    });
    outcome?;
    join.announce(Call::Metrics { shapes: shapes.join(", ") })?;
    let parts = group.all_gather_bytes(&bytes)?;
    // Where the next tensor's rows of each rank begin.
    let mut starts = vec![0; parts.len()];
    tree.try_map_tensors(&mut |tensor| {
        let row_elements: i64 = tensor.size().iter().skip(1).product();
        let mut shape = if tensor.dim() == 0 { vec![1] } else { tensor.size() };
        let mut rows = Vec::new();
        for ((part, counted), start) in
            parts.iter().zip(counted).zip(&mut starts).filter(|((_, rows), _)| !rows.is_empty())
        {
            shape[0] = if tensor.dim() == 0 { 1 } else { counted.iter().filter(|keep| **keep).count() as i64 };
            let end = *start + (shape[0] * row_elements) as usize * tensor.kind().elt_size_in_bytes();
            let own = part.get(*start..end).ok_or_else(|| Error::other("a rank sent fewer rows than it has"))?;
            rows.push(Tensor::f_from_data_size(own, &shape, tensor.kind())?);
            *start = end;
        }
        Ok(Tensor::f_cat(&rows, 0)?.f_to_device(tensor.device())?)
    })
}

/// What has to be equal on all ranks: everything but the number of rows.
fn row_text(tensor: &Tensor) -> String {
    match tensor.size().as_slice() {
        [] => format!("[] {:?}", tensor.kind()),
        [_, rest @ ..] => format!("rows of {rest:?} {:?}", tensor.kind()),
    }
}

/// Appends the memory of the rows to keep; of a 0-d tensor its one value.
fn append_rows(bytes: &mut Vec<u8>, tensor: &Tensor, keep: &[i64]) -> Result<()> {
    let tensor = tensor.f_detach()?;
    let rows = if tensor.dim() == 0 { tensor } else { tensor.f_index_select(0, &indices(keep, &tensor)?)? };
    if rows.numel() > 0 {
        let plain = rows.f_resolve_conj()?.f_resolve_neg()?;
        let flat = plain.f_to_device(Device::Cpu)?.f_contiguous()?.f_view([-1])?.f_view_dtype(Kind::Uint8)?;
        bytes.extend(Vec::<u8>::try_from(&flat)?);
    }
    Ok(())
}

fn indices(rows: &[i64], like: &Tensor) -> Result<Tensor> {
    Ok(Tensor::f_from_slice(rows)?.f_to_device(like.device())?)
}

/// As [`gather_for_metrics`], for one object per row.
pub(crate) fn gather_object_for_metrics<T: Serialize + DeserializeOwned>(
    group: &Group,
    objects: &[T],
    position: Option<&LoaderPosition>,
    join: Option<&Join>,
) -> Result<Vec<T>> {
    const OP: &str = "gather_object_for_metrics";
    let Some(counted) = counted_rows(group, position, join)? else { return gather_object(group, objects) };
    let mine = &counted.rows[group.rank()];
    if mine.len() != objects.len() {
        let found = format!("{} objects", objects.len());
        return Err(CollectiveError::NotRows { found, rank: group.rank(), wanted: mine.len() }.into());
    }
    if let Some(join) = counted.absent {
        join.announce(Call::Metrics { shapes: "objects".to_owned() })?;
    }
    let kept: Vec<&T> = objects.iter().zip(mine).filter(|(_, keep)| **keep).map(|(object, _)| object).collect();
    let parts = group.all_gather_bytes(&encode(OP, &kept)?)?;
    // Ranks without a batch send nothing, not even an empty list.
    let parts = parts.iter().filter(|part| !part.is_empty());
    let lists: Vec<Vec<T>> = parts.map(|part| decode(OP, part)).collect::<Result<_>>()?;
    Ok(lists.into_iter().flatten().collect())
}

fn counted_rows<'a>(
    group: &Group,
    position: Option<&'a LoaderPosition>,
    join: Option<&'a Join>,
) -> Result<Option<Counted<'a>>> {
    let Some(position) = position.filter(|position| position.counted_rows.len() == group.world_size()) else {
        return Ok(None);
    };
    let rows = &position.counted_rows;
    let absent: Vec<String> =
        (0..rows.len()).filter(|rank| rows[*rank].is_empty()).map(|rank| rank.to_string()).collect();
    match (absent.is_empty(), join) {
        (true, _) => Ok(Some(Counted { rows, absent: None })),
        (false, Some(join)) => Ok(Some(Counted { rows, absent: Some(join) })),
        (false, None) => Err(CollectiveError::RanksWithoutBatch { ranks: absent.join(", ") }.into()),
    }
}

fn pad_rows(tensor: &Tensor, rows: usize) -> Result<Tensor> {
    let mut shape = tensor.size();
    let missing = match shape.first() {
        Some(length) => rows as i64 - length,
        None => 0,
    };
    if missing == 0 {
        return Ok(tensor.shallow_clone());
    }
    shape[0] = missing;
    let filler = Tensor::f_zeros(shape.as_slice(), (tensor.kind(), tensor.device()))?;
    Ok(Tensor::f_cat(&[tensor, &filler], 0)?)
}

/// Indices of the rows that count in the concatenation of all ranks' rows, each padded to `longest`.
fn kept_rows(counted: &[Vec<bool>], longest: usize) -> Vec<i64> {
    counted
        .iter()
        .enumerate()
        .flat_map(|(rank, rows)| {
            rows.iter().enumerate().filter(|(_, keep)| **keep).map(move |(row, _)| (rank * longest + row) as i64)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_rows_skip_fillers_and_padding() {
        for (counted, longest, expected) in [
            (vec![vec![true, true], vec![true, false]], 2, vec![0, 1, 2]),
            (vec![vec![true, true, true], vec![true]], 3, vec![0, 1, 2, 3]),
            (vec![vec![false], vec![false]], 1, vec![]),
        ] {
            assert_eq!(kept_rows(&counted, longest), expected);
        }
    }
}
