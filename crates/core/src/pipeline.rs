//! Pipelined inference: which process computes which blocks of a model.

use crate::Result;
use crate::error::config::ConfigErrorKind as Kind;
use std::ops::Range;

/// Consecutive blocks for each of `num_stages` processes, so that the largest stage is as small as can be. `sizes` are the bytes of the
/// blocks. Of several such ways it is the one whose first stages have the most blocks.
///
/// ```
/// use accelerate_core::pipeline::balanced_stages;
/// assert_eq!(balanced_stages(&[5, 1, 1, 1, 4], 2)?, [0..2, 2..5]);
/// assert_eq!(balanced_stages(&[1, 1, 1, 1], 2)?, [0..2, 2..4]);
/// assert!(balanced_stages(&[1, 1], 3).is_err());
/// # Ok::<(), accelerate_core::Error>(())
/// ```
///
/// # Errors
/// [`Error::is_config`](crate::Error::is_config): fewer blocks than stages.
pub fn balanced_stages(sizes: &[u64], num_stages: usize) -> Result<Vec<Range<usize>>> {
    if sizes.len() < num_stages || num_stages == 0 {
        return Err(Kind::FewBlocks { num_blocks: sizes.len(), num_stages }.into());
    }
    // The limit lies between the largest block and all blocks.
    let (mut low, mut high) = (sizes.iter().copied().max().unwrap_or(0), sum(sizes));
    while low < high {
        let middle = low + (high - low) / 2;
        match fill(sizes, num_stages, middle) {
            Some(_) => high = middle,
            None => low = middle + 1,
        }
    }
    fill(sizes, num_stages, low).ok_or_else(|| Kind::FewBlocks { num_blocks: sizes.len(), num_stages }.into())
}

fn sum(sizes: &[u64]) -> u64 {
    sizes.iter().fold(0, |sum, &size| sum.saturating_add(size))
}

/// Stages of at most `limit` bytes, each with at least one block.
fn fill(sizes: &[u64], num_stages: usize, limit: u64) -> Option<Vec<Range<usize>>> {
    let mut stages = Vec::with_capacity(num_stages);
    let mut begin = 0;
    for stage in 0..num_stages {
        let last = sizes.len() - (num_stages - stage - 1);
        let mut end = begin;
        let mut filled = 0u64;
        while end < last && filled.saturating_add(sizes[end]) <= limit {
            filled = filled.saturating_add(sizes[end]);
            end += 1;
        }
        if end == begin {
            return None;
        }
        stages.push(begin..end);
        begin = end;
    }
    (begin == sizes.len()).then_some(stages)
}

/// Consecutive blocks, of which a new stage begins at each of `points`: a path of `blocks`, as in the reference's `split_points`.
///
/// ```
/// use accelerate_core::pipeline::stages_from_points;
/// let blocks = ["h.0", "h.1", "h.2"].map(str::to_owned);
/// assert_eq!(stages_from_points(&blocks, &["h.1".to_owned()], 2)?, [0..1, 1..3]);
/// assert!(stages_from_points(&blocks, &["h.7".to_owned()], 2).is_err());
/// # Ok::<(), accelerate_core::Error>(())
/// ```
///
/// # Errors
/// [`Error::is_config`](crate::Error::is_config): a point that is no block, is the first one, comes twice or before the one in front of
/// it; other than one point fewer than stages.
pub fn stages_from_points(blocks: &[String], points: &[String], num_stages: usize) -> Result<Vec<Range<usize>>> {
    if points.len() + 1 != num_stages {
        return Err(Kind::SplitPoints { num_points: points.len(), num_stages }.into());
    }
    let mut begins = vec![0];
    for point in points {
        let found = blocks.iter().position(|block| block == point);
        let last = begins.last().copied().unwrap_or(0);
        let Some(begin) = found.filter(|&begin| last < begin) else {
            return Err(Kind::SplitPoint { point: point.clone(), is_block: found.is_some() }.into());
        };
        begins.push(begin);
    }
    let ends = begins.iter().skip(1).copied().chain([blocks.len()]);
    Ok(begins.iter().copied().zip(ends).map(|(begin, end)| begin..end).collect())
}

/// How many rows each of `num_chunks` chunks of a batch has, the last ones after rows have been repeated. 1 for a batch of fewer rows
/// than chunks.
///
/// ```
/// assert_eq!(accelerate_core::pipeline::rows_of_chunk(7, 2), 4);
/// assert_eq!(accelerate_core::pipeline::rows_of_chunk(1, 3), 1);
/// ```
pub fn rows_of_chunk(num_rows: usize, num_chunks: usize) -> usize {
    num_rows.div_ceil(num_chunks.max(1)).max(1)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    fn largest(sizes: &[u64], stages: &[Range<usize>]) -> u64 {
        stages.iter().map(|stage| sum(&sizes[stage.clone()])).max().unwrap_or(0)
    }

    /// By trying all ways.
    fn least(sizes: &[u64], num_stages: usize) -> u64 {
        if num_stages == 1 {
            return sum(sizes);
        }
        let cuts = 1..=sizes.len() - (num_stages - 1);
        cuts.map(|cut| sum(&sizes[..cut]).max(least(&sizes[cut..], num_stages - 1))).min().unwrap()
    }

    proptest! {
        #[test]
        fn no_other_way_has_a_smaller_largest_stage(
            sizes in prop::collection::vec(0u64..20, 1..9), num_stages in 1usize..6,
        ) {
            let stages = balanced_stages(&sizes, num_stages);
            if sizes.len() < num_stages {
                prop_assert!(stages.unwrap_err().is_config());
            } else {
                let stages = stages.unwrap();
                prop_assert_eq!(stages.len(), num_stages);
                prop_assert!(stages.iter().all(|stage| !stage.is_empty()));
                let joined: Vec<usize> = stages.iter().cloned().flatten().collect();
                prop_assert_eq!(joined, (0..sizes.len()).collect::<Vec<_>>());
                prop_assert_eq!(largest(&sizes, &stages), least(&sizes, num_stages));
            }
        }
    }

    #[test]
    fn sizes_beyond_all_bounds_are_no_overflow() {
        assert_eq!(balanced_stages(&[u64::MAX, u64::MAX, 1], 2).unwrap().len(), 2);
    }

    #[rstest]
    #[case::none(&[], 2, "0 points")]
    #[case::too_many(&["b", "c"], 2, "2 points")]
    #[case::absent(&["x"], 2, "no block")]
    #[case::first(&["a"], 2, "comes before")]
    #[case::twice(&["b", "b"], 3, "comes before")]
    #[case::backward(&["c", "b"], 3, "comes before")]
    fn points_that_make_no_stages_are_errors(#[case] points: &[&str], #[case] num_stages: usize, #[case] wanted: &str) {
        let strings = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        let error = stages_from_points(&strings(&["a", "b", "c"]), &strings(points), num_stages).unwrap_err();
        assert!(error.is_config() && error.to_string().contains(wanted), "{error}");
    }
}
