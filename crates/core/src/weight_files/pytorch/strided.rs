//! Tensors as PyTorch stores them: a view of a storage, which is a range of a file.

use super::archive::StoredBytes;
use crate::error::pytorch::TensorProblem as Problem;
use crate::weight_files::Header;
use safetensors::Dtype;
use std::hash::{Hash, Hasher};
use std::ops::Range;

/// A tensor whose elements lie in a range of a file, at distances of their own. Several may have one storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    dtype: Dtype,
    shape: Vec<u64>,
    /// In elements.
    stride: Vec<u64>,
    /// The place of the first element in the storage, in elements.
    first: u64,
    storage: StoredBytes,
}

/// Types have no hash. What is the same but for its type is there once for each type at most.
impl Hash for StoredTensor {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.shape, &self.stride, self.first, &self.storage).hash(state);
    }
}

/// A part of a tensor that is one piece in the file and in the tensor that is made of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where it begins in the file.
    pub from: u64,
    /// Where it begins in the new tensor, in bytes.
    pub to: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// Number of bytes of an element. Types of less than a byte are none of PyTorch's.
pub(super) fn element_bytes(dtype: Dtype) -> u64 {
    (dtype.bitsize() / 8) as u64
}

impl StoredTensor {
    /// A tensor whose elements lie one behind the other, and are all of the storage.
    pub fn contiguous(dtype: Dtype, shape: Vec<u64>, storage: StoredBytes) -> Self {
        Self { dtype, stride: contiguous_stride(&shape), shape, first: 0, storage }
    }

    pub(super) fn new(
        dtype: Dtype,
        shape: Vec<u64>,
        stride: Vec<u64>,
        first: u64,
        storage: StoredBytes,
    ) -> Result<Self, Problem> {
        if shape.len() != stride.len() {
            return Err(Problem::Description);
        }
        if shape_bytes(&shape, dtype).is_none() {
            return Err(Problem::Shape { shape });
        }
        if !shape.contains(&0) {
            let reached = shape.iter().zip(&stride).try_fold(first, |last, (&size, &stride)| {
                (size - 1).checked_mul(stride).and_then(|distance| last.checked_add(distance))
            });
            let wanted_bytes = reached.and_then(|last| last.checked_add(1)?.checked_mul(element_bytes(dtype)));
            let (wanted_bytes, found_bytes) = (wanted_bytes.unwrap_or(u64::MAX), storage.len());
            if wanted_bytes > found_bytes {
                return Err(Problem::BeyondStorage { wanted_bytes, found_bytes });
            }
        }
        Ok(Self { dtype, shape, stride, first, storage })
    }

    /// Its element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Its sizes, outermost dim first.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The distances between neighbours along each dim, in elements.
    pub fn stride(&self) -> &[u64] {
        &self.stride
    }

    /// The bytes that its elements are among.
    pub fn storage(&self) -> &StoredBytes {
        &self.storage
    }

    /// Number of bytes of its elements, each counted once for every place of the tensor that has it.
    pub fn num_bytes(&self) -> u64 {
        shape_bytes(&self.shape, self.dtype).unwrap_or(0)
    }

    /// The range of the file from its first element to its last.
    pub fn span(&self) -> Range<u64> {
        let start = self.storage.range.start + self.first * element_bytes(self.dtype);
        if self.shape.contains(&0) {
            return self.storage.range.start..self.storage.range.start;
        }
        let distance: u64 = self.shape.iter().zip(&self.stride).map(|(size, stride)| (size - 1) * stride).sum();
        start..start + (distance + 1) * element_bytes(self.dtype)
    }

    /// Which parts of the file make up the tensor, in the order of its elements, each element counted once for every place
    /// that has it. There are as few as possible.
    pub fn runs(&self) -> impl Iterator<Item = Run> + use<> {
        let zeros = vec![0; self.shape.len()];
        self.runs_within(&self.shape, &zeros)
    }

    /// The same where the tensor is the part of a larger one, of this shape, that begins at these offsets.
    pub fn runs_within(&self, shape: &[u64], offsets: &[u64]) -> impl Iterator<Item = Run> + use<> {
        let strides = contiguous_stride(shape);
        let to = offsets.iter().zip(&strides).map(|(offset, stride)| offset * stride).sum();
        let mut dims: Vec<Dim> = (self.shape.iter().zip(&self.stride).zip(&strides))
            .filter(|((size, _), _)| **size != 1)
            .map(|((&size, &from), &to)| Dim { size, from, to, at: 0 })
            .collect();
        let mut length = 1;
        while let Some(dim) = dims.pop_if(|dim| dim.from == length && dim.to == length) {
            length *= dim.size;
        }
        let is_done = self.shape.contains(&0);
        let (element, start) = (element_bytes(self.dtype), self.storage.range.start);
        Runs { dims, from: self.first, to, length, element, start, is_done }
    }
}

/// The distances between elements that lie one behind the other.
pub(super) fn contiguous_stride(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim].max(1);
    }
    strides
}

/// Nothing if they are more than any file has, or dims are more than are read.
pub(super) fn shape_bytes(shape: &[u64], dtype: Dtype) -> Option<u64> {
    // As if no dim were empty, so that no stride is too large.
    let most = shape.iter().try_fold(element_bytes(dtype), |bytes, &size| bytes.checked_mul(size.max(1)));
    let is_countable = most.is_some_and(|most| most <= i64::MAX as u64) && shape.len() <= Header::MAX_DIMS;
    is_countable.then_some(if shape.contains(&0) { 0 } else { most.unwrap_or(0) })
}

/// A dim, its strides on both sides, and the index that comes next.
#[derive(Clone, Copy, Debug)]
struct Dim {
    size: u64,
    from: u64,
    to: u64,
    at: u64,
}

/// Counts through the dims that are not part of a run.
#[derive(Debug)]
struct Runs {
    dims: Vec<Dim>,
    from: u64,
    to: u64,
    length: u64,
    element: u64,
    start: u64,
    is_done: bool,
}

impl Iterator for Runs {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        if self.is_done {
            return None;
        }
        let Self { from, to, length, element, start, .. } = *self;
        let run = Run { from: start + from * element, to: to * element, bytes: length * element };
        self.is_done = true;
        for dim in self.dims.iter_mut().rev() {
            if dim.at + 1 < dim.size {
                dim.at += 1;
                self.from += dim.from;
                self.to += dim.to;
                self.is_done = false;
                break;
            }
            self.from -= dim.at * dim.from;
            self.to -= dim.at * dim.to;
            dim.at = 0;
        }
        Some(run)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;

    const STORAGE: StoredBytes = StoredBytes { range: 100..200, crc32: None };

    fn elements(tensor: &StoredTensor) -> Vec<u64> {
        tensor.runs().flat_map(|run| run.from..run.from + run.bytes).map(|at| at - 100).collect()
    }

    #[rstest]
    #[case::scalar(&[], &[], 3, &[3], 1)]
    #[case::row(&[4], &[1], 2, &[2, 3, 4, 5], 1)]
    #[case::matrix(&[2, 3], &[3, 1], 0, &[0, 1, 2, 3, 4, 5], 1)]
    #[case::transposed(&[3, 2], &[1, 3], 0, &[0, 3, 1, 4, 2, 5], 6)]
    #[case::columns(&[2, 2], &[4, 1], 1, &[1, 2, 5, 6], 2)]
    #[case::expanded(&[2, 3], &[0, 1], 0, &[0, 1, 2, 0, 1, 2], 2)]
    #[case::a_dim_of_one(&[2, 1, 2], &[2, 77, 1], 0, &[0, 1, 2, 3], 1)]
    #[case::empty(&[2, 0], &[1, 1], 0, &[], 0)]
    fn elements_come_in_the_order_of_the_tensor(
        #[case] shape: &[u64],
        #[case] stride: &[u64],
        #[case] first: u64,
        #[case] wanted: &[u64],
        #[case] num_runs: usize,
    ) {
        let tensor = StoredTensor::new(Dtype::U8, shape.into(), stride.into(), first, STORAGE).unwrap();
        assert_eq!(elements(&tensor), wanted);
        assert_eq!(tensor.runs().count(), num_runs);
        assert_eq!(tensor.num_bytes(), wanted.len() as u64);
        let reach = wanted.iter().min().zip(wanted.iter().max()).map_or(100..100, |(min, max)| 100 + min..101 + max);
        assert_eq!(tensor.span(), reach);
    }

    #[test]
    fn a_block_goes_to_its_place_in_the_whole() {
        let block = StoredTensor::new(Dtype::F32, vec![2, 2], vec![2, 1], 0, STORAGE).unwrap();
        let runs: Vec<_> = block.runs_within(&[3, 4], &[1, 2]).collect();
        assert_eq!(runs, [Run { from: 100, to: 24, bytes: 8 }, Run { from: 108, to: 40, bytes: 8 }]);
    }

    #[rstest]
    #[case::reaches_too_far(&[101], &[1], 0)]
    #[case::begins_too_late(&[1], &[1], 100)]
    #[case::overflows(&[2, 2], &[u64::MAX, u64::MAX], 1)]
    #[case::cannot_be_counted(&[u64::MAX, 2], &[0, 0], 0)]
    #[case::has_no_stride(&[2, 2], &[1], 0)]
    #[case::has_too_many_dims(&[1; 65], &[0; 65], 0)]
    fn what_is_not_within_its_storage_is_refused(#[case] shape: &[u64], #[case] stride: &[u64], #[case] first: u64) {
        assert!(StoredTensor::new(Dtype::U8, shape.into(), stride.into(), first, STORAGE).is_err());
    }
}
