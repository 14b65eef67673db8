//! State of which blocks of elements share a scale, such as that of 8-bit optimizers, for ranks that keep other elements than
//! those which saved it.

use crate::layout::{Copied, Layout};
use std::ops::Range;

/// How many elements share a scale. The blocks of a part begin with its first element, and the last one may have fewer.
pub const BLOCK_ELEMENTS: usize = 256;

/// What the name of the scales has behind that of the state.
const SCALE: &str = "_scale";

/// What the scales of state in blocks are called: `exp_avg_scale.weight` goes with the codes `exp_avg.weight`. `None` for what
/// is not the name of an optimizer's state.
///
/// ```
/// use accelerate_core::checkpoint::scale_name;
/// assert_eq!(scale_name("exp_avg.layers.0.weight").as_deref(), Some("exp_avg_scale.layers.0.weight"));
/// assert_eq!(scale_name("step"), None);
/// ```
pub fn scale_name(codes: &str) -> Option<String> {
    let (state, parameter) = codes.split_once('.')?;
    Some(format!("{state}{SCALE}.{parameter}"))
}

/// Number of blocks of so many elements.
///
/// ```
/// use accelerate_core::checkpoint::num_blocks;
/// assert_eq!([0, 1, 256, 257].map(num_blocks), [0, 1, 1, 2]);
/// ```
pub fn num_blocks(numel: usize) -> usize {
    numel.div_ceil(BLOCK_ELEMENTS)
}

/// How elements that were saved in blocks come to a rank. Pieces are counted as they were given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromBlocks {
    /// All elements of each block come out of one that was saved: codes and scales stay what they are.
    Unchanged {
        /// Codes, an element each.
        codes: Vec<Copied>,
        /// Scales, one for each block.
        scales: Vec<Copied>,
    },
    /// Blocks are cut otherwise, so that their elements have to become numbers, and then blocks anew.
    Anew(Vec<Copied>),
}

/// How to put the `wanted` elements together from `pieces` in blocks.
///
/// # Errors
/// The first elements of the full tensor that no piece has.
///
/// ```
/// use accelerate_core::checkpoint::{FromBlocks, from_blocks};
/// use accelerate_core::layout::Layout;
///
/// let part = |elements| Layout::full([1024]).flat(elements).unwrap();
/// let halves = [part(0..512), part(512..1024)];
/// let Ok(FromBlocks::Unchanged { scales, .. }) = from_blocks(&part(256..768), &halves) else { panic!("no block is cut") };
/// assert_eq!((scales[0].source, scales[0].from.clone(), scales[1].source), (0, 1..2, 1));
/// assert!(matches!(from_blocks(&part(100..200), &halves), Ok(FromBlocks::Unchanged { .. })), "out of one block");
/// assert!(matches!(from_blocks(&part(100..400), &halves), Ok(FromBlocks::Anew(_))));
/// ```
pub fn from_blocks<'a>(
    wanted: &Layout,
    pieces: impl IntoIterator<Item = &'a Layout>,
) -> Result<FromBlocks, Range<usize>> {
    let copies = wanted.copies_from(pieces)?;
    let numel = wanted.numel();
    if !copies.iter().all(|copied| keeps_blocks(copied, numel)) {
        return Ok(FromBlocks::Anew(copies));
    }
    let scales = copies.iter().map(|copied| Copied {
        source: copied.source,
        from: blocks_of(&copied.from),
        to: copied.to / BLOCK_ELEMENTS,
    });
    Ok(FromBlocks::Unchanged { scales: scales.collect(), codes: copies })
}

/// The blocks that some elements of a piece are in.
pub fn blocks_of(elements: &Range<usize>) -> Range<usize> {
    elements.start / BLOCK_ELEMENTS..num_blocks(elements.end)
}

/// Does each block that these elements fill, of so many in all, have elements of one saved block only?
fn keeps_blocks(Copied { from, to, .. }: &Copied, numel: usize) -> bool {
    let end = to + from.len();
    let begins = to.is_multiple_of(BLOCK_ELEMENTS);
    let ends = end.is_multiple_of(BLOCK_ELEMENTS) || end == numel;
    let is_in_step = from.start.is_multiple_of(BLOCK_ELEMENTS) || blocks_of(from).len() == 1;
    begins && ends && is_in_step
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;

    const FULL: usize = 1000;

    fn part(elements: Range<usize>) -> Layout {
        Layout::full([FULL]).flat(elements).unwrap()
    }

    /// Pieces end where these numbers say.
    fn pieces(ends: &[usize]) -> Vec<Layout> {
        let starts = [0].into_iter().chain(ends.iter().copied());
        starts.zip(ends).map(|(start, &end)| part(start..end)).collect()
    }

    #[rstest]
    #[case::the_same(&[512, FULL], 0..512, true)]
    #[case::all_of_even_pieces(&[512, FULL], 0..FULL, true)]
    #[case::a_piece_ends_in_a_block(&[500, FULL], 0..FULL, false)]
    #[case::the_last_piece_may(&[500, FULL], 500..FULL, true)]
    #[case::from_block_to_block(&[FULL], 256..768, true)]
    #[case::less_than_a_block(&[FULL], 256..300, true)]
    #[case::out_of_the_middle_of_one(&[FULL], 260..300, true)]
    #[case::over_a_border(&[FULL], 250..300, false)]
    #[case::a_block_too_late(&[FULL], 10..266, false)]
    #[case::two_pieces_of_one_block(&[100, FULL], 50..150, false)]
    #[case::nothing(&[FULL], 3..3, true)]
    fn blocks_stay_what_they_are_where_none_is_cut(
        #[case] ends: &[usize],
        #[case] wanted: Range<usize>,
        #[case] stays: bool,
    ) {
        let found = from_blocks(&part(wanted), &pieces(ends)).unwrap();
        assert_eq!(matches!(found, FromBlocks::Unchanged { .. }), stays, "{found:?}");
    }

    /// Each element keeps the scale that it was saved with.
    #[test]
    fn scales_go_with_their_elements() {
        for ends in [vec![FULL], vec![512, FULL], vec![256, 300, 812, FULL], vec![1, 2, FULL]] {
            let pieces = pieces(&ends);
            for start in [0, 1, 2, 256, 300, 512, 556] {
                for end in [start, start + 1, start + 200, start + 256, 812, FULL] {
                    if !(start..=FULL).contains(&end) {
                        continue;
                    }
                    let Ok(FromBlocks::Unchanged { codes, scales }) = from_blocks(&part(start..end), &pieces) else {
                        continue;
                    };
                    for copied in codes {
                        for offset in 0..copied.from.len() {
                            let block = (copied.to + offset) / BLOCK_ELEMENTS;
                            let holds = |scale: &&Copied| (scale.to..scale.to + scale.from.len()).contains(&block);
                            let scale = scales.iter().find(holds).unwrap();
                            let saved = (copied.from.start + offset) / BLOCK_ELEMENTS;
                            assert_eq!((scale.source, scale.from.start + block - scale.to), (copied.source, saved));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_in_no_piece_is_said() {
        assert_eq!(from_blocks(&part(0..FULL), &pieces(&[700])), Err(700..FULL));
    }
}
