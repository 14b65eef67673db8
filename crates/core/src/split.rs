//! Which part of some inputs a rank works on, in `split_between_processes`.

use crate::Result;
use crate::error::data::DataErrorKind;
use std::ops::Range;

/// The part of one rank.
///
/// ```
/// use accelerate_core::split::split_between_processes;
/// let last = split_between_processes(5, 3, 2, true)?;
/// assert_eq!(last.indices().collect::<Vec<_>>(), [4, 4]); // one item, once more to match the others
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// Positions of the inputs that belong to this rank; empty when there are fewer inputs than ranks.
    pub range: Range<usize>,
    /// The position repeated to make all parts equally long, and how often. `None` when nothing is
    /// repeated: padding was not asked for, is not needed, or there is no input at all.
    pub padding: Option<Padding>,
}

/// A repetition at the end of a [`Split`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Padding {
    /// The position that is repeated: the last of all inputs.
    pub index: usize,
    /// How often, at least once.
    pub count: usize,
}

impl Split {
    /// The positions in order, repeated ones included.
    ///
    /// ```
    /// # use accelerate_core::split::split_between_processes;
    /// let split = split_between_processes(4, 2, 1, false)?;
    /// assert_eq!(split.indices().collect::<Vec<_>>(), [2, 3]);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn indices(&self) -> impl Iterator<Item = usize> + use<> {
        let (index, count) = self.padding.map_or((0, 0), |padding| (padding.index, padding.count));
        self.range.clone().chain(std::iter::repeat_n(index, count))
    }
}

/// The part of `rank` when `num_items` inputs are split over `num_processes` ranks
/// (`PartialState.split_between_processes` of the reference, `state.py`).
///
/// Every rank gets `num_items / num_processes` inputs in order, and each of the first
/// `num_items % num_processes` ranks one more. With `apply_padding` the shorter parts repeat the last
/// of all inputs, so that all parts are equally long and can be gathered.
///
/// # Errors
///
/// [`Error::is_data`](crate::Error::is_data): no processes, or a rank that does not exist.
///
/// ```
/// use accelerate_core::split::split_between_processes;
/// let ranges = (0..3).map(|rank| Ok(split_between_processes(17, 3, rank, false)?.range));
/// assert_eq!(ranges.collect::<accelerate_core::Result<Vec<_>>>()?, [0..6, 6..12, 12..17]);
/// # Ok::<(), accelerate_core::Error>(())
/// ```
pub fn split_between_processes(
    num_items: usize,
    num_processes: usize,
    rank: usize,
    apply_padding: bool,
) -> Result<Split> {
    if num_processes == 0 {
        return Err(DataErrorKind::ZeroProcesses.into());
    }
    if rank >= num_processes {
        return Err(DataErrorKind::NoSuchRank { rank, num_processes }.into());
    }
    let (each, extras) = (num_items / num_processes, num_items % num_processes);
    let start = rank * each + rank.min(extras);
    let length = each + usize::from(rank < extras);
    let longest = each + usize::from(extras > 0);
    let range = start..start + length;
    let padding =
        (apply_padding && length < longest).then(|| Padding { index: num_items - 1, count: longest - length });
    Ok(Split { range, padding })
}

/// The common length of named inputs that are to be split alike, as the values of a dictionary are.
/// `None` when there are none.
///
/// # Errors
///
/// [`Error::is_data`](crate::Error::is_data): two lengths differ; the message names both.
///
/// ```
/// use accelerate_core::split::common_length;
/// assert_eq!(common_length([("prompts", 4), ("seeds", 4)])?, Some(4));
/// let error = common_length([("prompts", 4), ("seeds", 3)]).unwrap_err();
/// assert!(error.to_string().contains("\"seeds\" has 3"));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
pub fn common_length<'a>(lengths: impl IntoIterator<Item = (&'a str, usize)>) -> Result<Option<usize>> {
    let mut lengths = lengths.into_iter();
    let Some((first, first_length)) = lengths.next() else {
        return Ok(None);
    };
    match lengths.find(|&(_, length)| length != first_length) {
        None => Ok(Some(first_length)),
        Some((second, second_length)) => Err(DataErrorKind::UnequalLengths {
            first: first.to_owned(),
            first_length,
            second: second.to_owned(),
            second_length,
        }
        .into()),
    }
}
