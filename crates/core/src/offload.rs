//! How state that is kept off the device is cut into blocks, which are read, changed and written one after the other.
//!
//! Method: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", SC 2021,
//! where a step of the optimizer streams its state through a few buffers.

/// What files are read and written in multiples of, so that the kernel need not keep a copy of them: the size of a page.
pub const ALIGNMENT: usize = 4096;

/// The most that one block holds. Large enough that a disk's price is its bytes, and small enough that many requests are on
/// their way at once in little memory.
pub const MAX_BLOCK_BYTES: usize = 512 << 10;

/// Where a member may be cut. Kernels over lists work in pieces of this size from the beginning of a tensor, so that
/// what is cut here has the same values to the bit as what is not.
pub const GRAIN_ELEMENTS: usize = 1 << 14;

/// A tensor whose state is kept in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Number of elements.
    pub num_elements: usize,
    /// Bytes of one element of its state.
    pub element_bytes: usize,
    /// What is used together: a block has members of one unit only.
    pub unit: usize,
}

/// Elements of one member in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Position of the member in the list that was divided.
    pub member: usize,
    /// Its first element in the block, counted from the member's beginning.
    pub start: usize,
    /// Number of elements, at least one.
    pub len: usize,
    /// Where the first of them is in each plane of the block, in elements.
    pub at: usize,
}

/// What is in memory at once: for every state tensor of an optimizer a plane of elements, one behind the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Unit of all members.
    pub unit: usize,
    /// The elements, in the order of the members.
    pub segments: Vec<Segment>,
    /// Elements of one plane.
    pub num_elements: usize,
    /// Bytes of one element.
    pub element_bytes: usize,
    /// Where the block begins in the file, a multiple of [`ALIGNMENT`].
    pub file_offset: u64,
    /// Its size there, a multiple of [`ALIGNMENT`].
    pub num_bytes: usize,
}

/// The blocks of some members.
///
/// ```
/// use accelerate_core::offload::{BlockLayout, Member};
/// let member = |num_elements, unit| Member { num_elements, element_bytes: 4, unit };
/// // Two moments in float32 for each parameter.
/// let layout = BlockLayout::new(&[member(80_000, 0), member(10, 0), member(7, 1)], 2);
/// assert_eq!(layout.blocks.len(), 3);
/// assert_eq!(layout.blocks[1].segments[1].member, 1);
/// assert_eq!(layout.num_bytes, layout.blocks.iter().map(|block| block.num_bytes as u64).sum::<u64>());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockLayout {
    /// In the order of the members.
    pub blocks: Vec<Block>,
    /// Number of planes in each.
    pub num_planes: usize,
    /// Bytes of all blocks.
    pub num_bytes: u64,
}

impl BlockLayout {
    /// Divides the state of `members`, `num_planes` tensors for each, into blocks of at most [`MAX_BLOCK_BYTES`].
    pub fn new(members: &[Member], num_planes: usize) -> Self {
        let mut layout = Self { blocks: Vec::new(), num_planes, num_bytes: 0 };
        for (position, member) in members.iter().enumerate() {
            let most = most_elements(num_planes, member.element_bytes);
            let mut start = 0;
            while start < member.num_elements {
                let left = member.num_elements - start;
                let room = layout.room(member, most);
                let len = if left <= room { left } else { room / GRAIN_ELEMENTS * GRAIN_ELEMENTS };
                if len == 0 {
                    layout.open(member);
                    continue;
                }
                layout.put(Segment { member: position, start, len, at: 0 });
                start += len;
            }
        }
        layout.place();
        layout
    }

    /// How many elements of the member still go into the last block.
    fn room(&self, member: &Member, most: usize) -> usize {
        let last = self.blocks.last();
        last.filter(|block| (block.unit, block.element_bytes) == (member.unit, member.element_bytes))
            .map_or(0, |block| most.saturating_sub(block.num_elements))
    }

    fn open(&mut self, member: &Member) {
        self.blocks.push(Block {
            unit: member.unit,
            segments: Vec::new(),
            num_elements: 0,
            element_bytes: member.element_bytes,
            file_offset: 0,
            num_bytes: 0,
        });
    }

    fn put(&mut self, segment: Segment) {
        if let Some(block) = self.blocks.last_mut() {
            block.segments.push(Segment { at: block.num_elements, ..segment });
            block.num_elements += segment.len;
        }
    }

    fn place(&mut self) {
        for block in &mut self.blocks {
            block.file_offset = self.num_bytes;
            let num_bytes = self.num_planes * block.num_elements * block.element_bytes;
            block.num_bytes = num_bytes.next_multiple_of(ALIGNMENT);
            self.num_bytes += block.num_bytes as u64;
        }
    }
}

fn most_elements(num_planes: usize, element_bytes: usize) -> usize {
    let most = MAX_BLOCK_BYTES / (num_planes * element_bytes).max(1);
    (most / GRAIN_ELEMENTS * GRAIN_ELEMENTS).max(GRAIN_ELEMENTS)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    fn members(sizes: &[(usize, usize)]) -> Vec<Member> {
        sizes.iter().map(|&(num_elements, unit)| Member { num_elements, element_bytes: 4, unit }).collect()
    }

    /// `(unit, [(member, start, len, at)])` of each block.
    type Blocks = Vec<(usize, Vec<(usize, usize, usize, usize)>)>;

    const MOST: usize = MAX_BLOCK_BYTES / 8;

    #[rstest]
    #[case::nothing(&[], vec![])]
    #[case::no_elements(&[(0, 0), (3, 0), (0, 1)], vec![(0, vec![(1, 0, 3, 0)])])]
    #[case::small_ones_share(&[(5, 0), (6, 0)], vec![(0, vec![(0, 0, 5, 0), (1, 0, 6, 5)])])]
    #[case::units_are_apart(&[(5, 0), (6, 1)], vec![(0, vec![(0, 0, 5, 0)]), (1, vec![(1, 0, 6, 0)])])]
    #[case::cut(&[(MOST + 1, 0)], vec![(0, vec![(0, 0, MOST, 0)]), (0, vec![(0, MOST, 1, 0)])])]
    #[case::cut_at_a_grain(&[(1, 0), (MOST, 0)], vec![
        (0, vec![(0, 0, 1, 0), (1, 0, MOST - GRAIN_ELEMENTS, 1)]),
        (0, vec![(1, MOST - GRAIN_ELEMENTS, GRAIN_ELEMENTS, 0)]),
    ])]
    #[case::no_room_for_a_grain(&[(MOST - 9, 0), (10, 0)], vec![(0, vec![(0, 0, MOST - 9, 0)]), (0, vec![(1, 0, 10, 0)])])]
    #[case::room_for_all(&[(MOST - 9, 0), (9, 0)], vec![(0, vec![(0, 0, MOST - 9, 0), (1, 0, 9, MOST - 9)])])]
    fn blocks_of_two_planes(#[case] sizes: &[(usize, usize)], #[case] wanted: Blocks) {
        let layout = BlockLayout::new(&members(sizes), 2);
        let found: Vec<_> = layout
            .blocks
            .iter()
            .map(|block| {
                let segments = block.segments.iter();
                (block.unit, segments.map(|own| (own.member, own.start, own.len, own.at)).collect::<Vec<_>>())
            })
            .collect();
        assert_eq!(found, wanted);
    }

    #[test]
    fn types_are_apart() {
        let mut members = members(&[(5, 0), (5, 0)]);
        members[1].element_bytes = 2;
        let layout = BlockLayout::new(&members, 1);
        assert_eq!(layout.blocks.iter().map(|block| block.element_bytes).collect::<Vec<_>>(), [4, 2]);
    }

    proptest! {
        #[test]
        fn every_element_has_one_place(
            sizes in prop::collection::vec((0usize..3_000_000, 0usize..3), 0..8),
            num_planes in 1usize..4,
            element_bytes in prop::sample::select(vec![2usize, 4, 8]),
        ) {
            let mut members = members(&sizes);
            members.iter_mut().for_each(|member| member.element_bytes = element_bytes);
            let layout = BlockLayout::new(&members, num_planes);
            let mut next = vec![0; members.len()];
            let mut end = 0;
            for block in &layout.blocks {
                prop_assert_eq!((block.file_offset, block.num_bytes % ALIGNMENT), (end, 0));
                prop_assert!(block.num_bytes <= MAX_BLOCK_BYTES);
                prop_assert!(num_planes * block.num_elements * element_bytes <= block.num_bytes);
                end += block.num_bytes as u64;
                let mut at = 0;
                for own in &block.segments {
                    prop_assert_eq!((own.start, own.at), (next[own.member], at));
                    prop_assert_eq!((own.start % GRAIN_ELEMENTS, members[own.member].unit), (0, block.unit));
                    prop_assert!(own.len > 0);
                    at += own.len;
                    next[own.member] += own.len;
                }
                prop_assert_eq!(at, block.num_elements);
            }
            prop_assert_eq!(end, layout.num_bytes);
            prop_assert_eq!(next, sizes.iter().map(|(size, _)| *size).collect::<Vec<_>>());
        }
    }
}
