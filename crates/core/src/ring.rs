//! How a ring divides a sum between ranks, and in which order it adds: that of Gloo's `allreduce`, so that whoever adds in
//! another way can come to the same bits.
//!
//! Method: Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of Parallel and
//! Distributed Computing 69, 2009. The sizes of the parts are those of `gloo/allreduce.cc`.

use std::ops::Range;

/// The most that Gloo sends at once, in bytes.
const MOST_SEGMENT_BYTES: usize = 1 << 20;

/// The elements of which each rank has the sum first, in the order of ranks. Parts of the last ranks may be shorter, or empty.
///
/// `element_bytes` is the size of an element.
///
/// ```
/// assert_eq!(accelerate_core::ring::parts(5, 4, 2), [0..4, 4..5]);
/// ```
pub fn parts(num_elements: usize, element_bytes: usize, world_size: usize) -> Vec<Range<usize>> {
    let (world_size, element_bytes) = (world_size.max(1), element_bytes.max(1));
    let num_bytes = num_elements * element_bytes;
    let most = element_bytes * (MOST_SEGMENT_BYTES / element_bytes).max(1);
    // Each rank has two segments at least: one travels while the other one is added.
    let segment = num_bytes.div_ceil(2 * world_size).min(most).next_multiple_of(element_bytes).max(element_bytes);
    let num_segments = num_bytes.div_ceil(segment).max(2 * world_size).next_multiple_of(world_size);
    let part = num_segments / world_size * (segment / element_bytes);
    (0..world_size).map(|rank| (rank * part).min(num_elements)..((rank + 1) * part).min(num_elements)).collect()
}

/// The ranks in the order in which their versions of rank `rank`'s part are added: around the ring, and its own last.
///
/// ```
/// assert_eq!(accelerate_core::ring::order(1, 4).collect::<Vec<_>>(), [0, 3, 2, 1]);
/// ```
pub fn order(rank: usize, world_size: usize) -> impl Iterator<Item = usize> {
    (1..=world_size).map(move |step| (rank + world_size - step) % world_size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_adjacent_and_cover_everything() {
        for world_size in 1..=5 {
            for num_elements in [0, 1, 2, 3, 7, 8, 9, 1000, 1 << 20, (3 << 20) + 5] {
                for element_bytes in [1, 2, 4, 8] {
                    let parts = parts(num_elements, element_bytes, world_size);
                    let mut end = 0;
                    for part in &parts {
                        assert_eq!(part.start, end, "{parts:?}");
                        end = part.end;
                    }
                    assert_eq!((parts.len(), end), (world_size, num_elements));
                }
            }
        }
    }

    #[test]
    fn every_rank_is_added_once_and_the_owner_last() {
        for world_size in 1..=5 {
            for rank in 0..world_size {
                let mut ranks: Vec<usize> = order(rank, world_size).collect();
                assert_eq!(ranks.last(), Some(&rank));
                ranks.sort_unstable();
                assert!(ranks.into_iter().eq(0..world_size));
            }
        }
    }

    #[test]
    fn parts_are_those_of_gloo() {
        // Segments of 1 MiB: 10 MiB are 12 segments on 4 ranks, of which each has 3.
        let million = 1 << 18;
        let wanted = [0..3 * million, 3 * million..6 * million, 6 * million..9 * million, 9 * million..10 * million];
        assert_eq!(parts(10 * million, 4, 4), wanted);
        for (num_elements, world_size, wanted) in [
            (0, 2, vec![0..0, 0..0]),
            (1, 3, vec![0..1, 1..1, 1..1]),
            (7, 3, vec![0..4, 4..7, 7..7]),
            (12, 3, vec![0..4, 4..8, 8..12]),
        ] {
            assert_eq!(parts(num_elements, 4, world_size), wanted, "{num_elements} of {world_size}");
        }
    }
}
