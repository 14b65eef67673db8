//! Whether blocks make up a tensor, each element once.

/// A block of a tensor: where it begins, and its sizes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block<'a> {
    pub(super) offsets: &'a [u64],
    pub(super) sizes: &'a [u64],
}

/// The place at which the blocks overlap or leave a gap, if they do. They lie within the shape, in any order.
///
/// Blocks are told to divide a tensor as shards do: into slabs along the first dim, and each slab so along the others. That takes
/// no longer than sorting, however many there are.
pub(super) fn first_fault(shape: &[u64], blocks: &[Block<'_>]) -> Option<Vec<u64>> {
    if shape.contains(&0) {
        return None;
    }
    let mut blocks: Vec<_> = blocks.iter().copied().filter(|block| !block.sizes.contains(&0)).collect();
    blocks.sort_unstable_by_key(|block| block.offsets);
    let Some(first) = blocks.first() else { return Some(vec![0; shape.len()]) };
    let mut at = first.offsets.to_vec();
    fault_along(0, shape, &blocks, &mut at).then_some(at)
}

/// Whether there is a fault among blocks that are alike in all dims before this one. `at` is then its place.
fn fault_along(dim: usize, shape: &[u64], blocks: &[Block<'_>], at: &mut Vec<u64>) -> bool {
    let Some(&size) = shape.get(dim) else { return blocks.len() != 1 };
    let mut next = 0;
    for slab in blocks.chunk_by(|one, other| one.offsets[dim] == other.offsets[dim]) {
        let (start, length) = (slab[0].offsets[dim], slab[0].sizes[dim]);
        at[dim] = next.min(start);
        if start != next || slab.iter().any(|block| block.sizes[dim] != length) {
            at[dim + 1..].fill(0);
            return true;
        }
        if fault_along(dim + 1, shape, slab, at) {
            return true;
        }
        next += length;
    }
    at[dim] = next;
    at[dim + 1..].fill(0);
    next != size
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    type Rows<'a> = &'a [([u64; 2], [u64; 2])];

    #[rstest]
    #[case::whole(&[([0, 0], [4, 6])], None)]
    #[case::rows(&[([2, 0], [2, 6]), ([0, 0], [2, 6])], None)]
    #[case::uneven_rows(&[([3, 0], [1, 6]), ([0, 0], [3, 6])], None)]
    #[case::columns(&[([0, 0], [4, 1]), ([0, 1], [4, 5])], None)]
    #[case::grid(&[([0, 0], [2, 3]), ([0, 3], [2, 3]), ([2, 0], [2, 3]), ([2, 3], [2, 3])], None)]
    #[case::with_an_empty_one(&[([0, 0], [4, 6]), ([4, 0], [0, 6])], None)]
    #[case::nothing(&[], Some(vec![0, 0]))]
    #[case::gap_at_the_end(&[([0, 0], [3, 6])], Some(vec![3, 0]))]
    #[case::gap_within(&[([0, 0], [1, 6]), ([2, 0], [2, 6])], Some(vec![1, 0]))]
    #[case::gap_in_a_slab(&[([0, 0], [2, 6]), ([2, 0], [2, 5])], Some(vec![2, 5]))]
    #[case::overlap(&[([0, 0], [3, 6]), ([2, 0], [2, 6])], Some(vec![2, 0]))]
    #[case::twice(&[([0, 0], [4, 6]), ([0, 0], [4, 6])], Some(vec![0, 0]))]
    #[case::the_right_number_in_wrong_places(&[([0, 0], [2, 6]), ([1, 0], [2, 6])], Some(vec![1, 0]))]
    #[case::no_grid(&[([0, 0], [2, 6]), ([0, 0], [1, 6])], Some(vec![0, 0]))]
    fn blocks_make_up_a_tensor_or_the_place_is_named(#[case] rows: Rows<'_>, #[case] wanted: Option<Vec<u64>>) {
        let blocks: Vec<_> = rows.iter().map(|(offsets, sizes)| Block { offsets, sizes }).collect();
        assert_eq!(first_fault(&[4, 6], &blocks), wanted);
    }

    #[test]
    fn a_scalar_is_one_block() {
        let scalar = Block { offsets: &[], sizes: &[] };
        assert_eq!(first_fault(&[], &[scalar]), None);
        assert_eq!(first_fault(&[], &[scalar, scalar]), Some(vec![]));
        assert_eq!(first_fault(&[0, 3], &[]), None);
    }
}
