//! Operations on the tensors of a batch that need no other process.

use super::collate::merge_trees;
use crate::TensorTree;
use crate::error::{DataError, Result};
use std::ops::Range;
use tch::{Device, Tensor};

/// How [`send_to_device`] copies.
///
/// ```
/// assert!(!accelerate::data::SendToDeviceOptions::default().non_blocking);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendToDeviceOptions {
    /// May a copy from pinned host memory to a GPU still be under way when the call returns? Work queued on that GPU waits for
    /// it. Default false.
    pub non_blocking: bool,
}

/// Moves every tensor to the device (`send_to_device` of the reference, `utils/operations.py`).
///
/// Shapes and dtypes stay. Tensors that are there already are not copied.
/// Differentiable.
///
/// ```
/// use accelerate::data::send_to_device;
/// use accelerate::tch::{Device, Tensor};
///
/// let (ids, name) = send_to_device((Tensor::from_slice(&[1i64, 2]), "row".to_owned()), Device::Cpu, Default::default())?;
/// assert_eq!((ids.size(), name.as_str()), (vec![2], "row"));
/// # Ok::<(), accelerate::Error>(())
/// ```
///
/// # Errors
///
/// When the device does not exist or has no room.
pub fn send_to_device<T: TensorTree>(tree: T, device: Device, options: SendToDeviceOptions) -> Result<T> {
    let SendToDeviceOptions { non_blocking } = options;
    let mut is_there = true;
    tree.for_each_tensor(&mut |tensor| is_there &= tensor.device() == device);
    if is_there {
        return Ok(tree);
    }
    tree.try_map_tensors(&mut |tensor| {
        if tensor.device() == device {
            return Ok(tensor.shallow_clone());
        }
        let copy = false;
        Ok(tensor.f_to_device_(device, tensor.f_kind()?, non_blocking, copy)?)
    })
}

/// The size of the first dimension of the first tensor that has one (`find_batch_size` of the reference,
/// `utils/operations.py`).
///
/// ```
/// use accelerate::data::find_batch_size;
/// use accelerate::tch::Tensor;
///
/// assert_eq!(find_batch_size(&("text".to_owned(), Tensor::from_slice(&[1i64, 2, 3])))?, 3);
/// # Ok::<(), accelerate::Error>(())
/// ```
///
/// # Errors
///
/// When there is no such tensor.
pub fn find_batch_size<T: TensorTree>(tree: &T) -> Result<usize> {
    let mut batch_size = None;
    tree.for_each_tensor(&mut |tensor| {
        batch_size = batch_size.or_else(|| tensor.size().first().copied());
    });
    Ok(batch_size.ok_or(DataError::NoBatchSize)? as usize)
}

/// Rows `rows` of every tensor's first dimension, as views (`slice_tensors` of the reference,
/// `utils/operations.py`).
///
/// Like slices in Python, a range that reaches beyond the last row is cut off there. Differentiable.
///
/// ```
/// use accelerate::data::slice_tensors;
/// use accelerate::tch::Tensor;
///
/// let batch = vec![Tensor::from_slice(&[1i64, 2, 3])];
/// assert_eq!(slice_tensors(&batch, 1..9)?, [Tensor::from_slice(&[2i64, 3])]);
/// # Ok::<(), accelerate::Error>(())
/// ```
///
/// # Errors
///
/// When a tensor has no dimensions.
pub fn slice_tensors<T: TensorTree>(tree: &T, rows: Range<usize>) -> Result<T> {
    let (start, end) = (rows.start as i64, rows.end as i64);
    tree.try_map_tensors(&mut |tensor| Ok(tensor.f_slice(0, start, end, 1)?))
}

/// One tree of many of the same form, their tensors concatenated along `dim` (`concatenate` of the reference,
/// `utils/operations.py`); what is not a tensor comes from the first tree. Differentiable.
///
/// ```
/// use accelerate::data::concatenate;
/// use accelerate::tch::Tensor;
///
/// let batch = |values: &[f32]| (Tensor::from_slice(values),);
/// let (whole,) = concatenate(&[batch(&[1.0]), batch(&[2.0, 3.0])], 0)?;
/// assert_eq!(whole, Tensor::from_slice(&[1f32, 2.0, 3.0]));
/// # Ok::<(), accelerate::Error>(())
/// ```
///
/// # Errors
///
/// When there are no trees, or their tensors differ in number or in a size other than that of `dim`.
pub fn concatenate<T: TensorTree>(trees: &[T], dim: i64) -> Result<T> {
    merge_trees(trees, &mut |tensors: &[Tensor]| Ok(Tensor::f_cat(tensors, dim)?))
}

/// Pads every tensor's dimension `dim` with zeros at its end to the next multiple of `num_processes`, so that
/// it can be cut into equal parts (`pad_input_tensors` of the reference, `utils/operations.py`).
///
/// The reference adds more zeros than needed in some cases, even to a size that is a multiple already.
/// Differentiable.
///
/// ```
/// use accelerate::data::pad_input_tensors;
/// use accelerate::tch::Tensor;
///
/// let padded = pad_input_tensors(&Tensor::from_slice(&[1i64, 2, 3]), 2, 0)?;
/// assert_eq!(padded, Tensor::from_slice(&[1i64, 2, 3, 0]));
/// # Ok::<(), accelerate::Error>(())
/// ```
///
/// # Errors
///
/// When `num_processes` is 0, or a tensor has no dimension `dim`.
pub fn pad_input_tensors<T: TensorTree>(tree: &T, num_processes: usize, dim: i64) -> Result<T> {
    if num_processes == 0 {
        return Err(DataError::MustBePositive { setting: "num_processes", found: 0 }.into());
    }
    tree.try_map_tensors(&mut |tensor| {
        let mut shape = tensor.size();
        let axis = if dim < 0 { dim + shape.len() as i64 } else { dim };
        let Some(size) = usize::try_from(axis).ok().and_then(|axis| shape.get_mut(axis)) else {
            return Err(DataError::NoSuchDimension { dim, shape }.into());
        };
        let missing = size.rem_euclid(num_processes as i64);
        if missing == 0 {
            return Ok(tensor.shallow_clone());
        }
        *size = num_processes as i64 - missing;
        let zeros = tensor.f_new_zeros(&shape, (tensor.f_kind()?, tensor.device()))?;
        Ok(Tensor::f_cat(&[tensor.shallow_clone(), zeros], dim)?)
    })
}
