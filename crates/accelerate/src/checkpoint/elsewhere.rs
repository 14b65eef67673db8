//! Tensors that are not in memory, on their way into a file: some at a time.

use super::memory::TensorMemory;
use crate::error::Result;
use crate::offload::is_outline;
use crate::session::StateReader;
use tch::Tensor;

/// How much of them is in memory at a time, unless one tensor alone is larger.
pub(super) const BATCH_BYTES: usize = 32 << 20;

/// Number of tensors at the beginning of a list that are read together: none, if the first is in memory.
pub(super) fn next_batch<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> usize {
    let outlines = tensors.take_while(|tensor| is_outline(tensor));
    fitting(outlines.map(|tensor| tensor.numel() * tensor.kind().elt_size_in_bytes()), BATCH_BYTES)
}

/// Number of the first of these sizes that make up at most so much, or one that alone is more.
pub(super) fn fitting(sizes: impl Iterator<Item = usize>, most_bytes: usize) -> usize {
    let mut total = 0;
    let fits = |(number, num_bytes): &(usize, usize)| -> bool {
        total += num_bytes;
        *number == 0 || total <= most_bytes
    };
    sizes.enumerate().take_while(fits).count()
}

/// Brings tensors into memory, under the names that they have with `reader`.
pub(super) fn read(reader: &dyn StateReader, tensors: &[(&str, &Tensor)]) -> Result<Vec<Tensor>> {
    let sizes = tensors.iter().map(|(_, tensor)| Ok((tensor.f_kind()?, tensor.numel()))).collect::<Result<Vec<_>>>()?;
    let mut memory = TensorMemory::new(TensorMemory::num_bytes(sizes.into_iter()))?;
    let places = tensors.iter().map(|(_, tensor)| memory.tensor_like(tensor)).collect::<Result<Vec<_>>>()?;
    let wanted: Vec<(&str, &Tensor)> = tensors.iter().zip(&places).map(|((name, _), place)| (*name, place)).collect();
    reader.read_state(&wanted)?;
    Ok(places)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const MIB: usize = 1 << 20;

    #[rstest]
    #[case::nothing(&[], 0)]
    #[case::all_have_room(&[1, 2, 3], 3)]
    #[case::to_the_brim(&[16, 16, 1], 2)]
    #[case::a_large_one_alone(&[100, 1], 1)]
    #[case::a_large_one_later(&[1, 100, 1], 1)]
    fn few_enough_are_read_together(#[case] mib: &[usize], #[case] wanted: usize) {
        assert_eq!(fitting(mib.iter().map(|mib| mib * MIB), BATCH_BYTES), wanted);
    }
}
