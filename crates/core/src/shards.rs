//! Elements in shards: which of the pieces that are there make up a shard that is wanted.

use std::ops::Range;

/// Elements to copy from one of several pieces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copied {
    /// Which piece.
    pub source: usize,
    /// Its elements, counted from its first.
    pub from: Range<usize>,
    /// Where the first of them goes, counted from the first that is wanted.
    pub to: usize,
}

/// How to put the elements `wanted` together from `pieces`, which may overlap (replicas hold the same) and come in any order;
/// positions are counted over all elements.
///
/// # Errors
/// The first elements that no piece has.
///
/// ```
/// use accelerate_core::shards::{Copied, cover};
/// let copies = cover(2..7, &[4..9, 0..4])?;
/// assert_eq!(copies, [
///     Copied { source: 1, from: 2..4, to: 0 },
///     Copied { source: 0, from: 0..3, to: 2 },
/// ]);
/// assert_eq!(cover(0..5, &[0..2, 3..5]), Err(2..3));
/// # Ok::<(), std::ops::Range<usize>>(())
/// ```
pub fn cover(wanted: Range<usize>, pieces: &[Range<usize>]) -> Result<Vec<Copied>, Range<usize>> {
    let mut copies = Vec::new();
    let mut next = wanted.start;
    while next < wanted.end {
        let reaching = pieces.iter().enumerate().filter(|(_, piece)| piece.contains(&next));
        let Some((source, piece)) = reaching.max_by_key(|(_, piece)| piece.end) else {
            let later = pieces.iter().filter(|piece| !piece.is_empty() && piece.start > next).map(|piece| piece.start);
            return Err(next..later.min().unwrap_or(wanted.end).min(wanted.end));
        };
        let end = piece.end.min(wanted.end);
        copies.push(Copied { source, from: next - piece.start..end - piece.start, to: next - wanted.start });
        next = end;
    }
    Ok(copies)
}
