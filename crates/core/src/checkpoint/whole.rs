//! Which rank makes whole tensors of the parts that ranks hold, and of whose parts.

use super::HeldTensor;
use super::assign::{WithHolders, by_name};
use crate::Result;
use crate::error::weight_files::WeightFilesErrorKind as Kind;
use crate::layout::Layout;
use crate::weight_files::shown;
use safetensors::Dtype;
use std::cmp::Reverse;
use std::ops::Range;

/// Who writes whole tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WrittenBy {
    /// The first of the ranks that write into a folder.
    FirstRank,
    /// All of them, each about as many bytes.
    AllRanks,
}

/// A tensor that a rank makes of what ranks hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WholeTensor {
    /// The object whose state it is.
    pub object: String,
    /// Its name in that state.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its sizes.
    pub shape: Vec<usize>,
    /// The rank that makes it.
    pub writer: usize,
    /// Whose elements it takes, and which these are; each rank is there once. Together they are all elements.
    pub parts: Vec<(usize, Layout)>,
}

/// Plans how the tensors of objects that are to be whole come to those who write them: `held` is what each rank holds, by rank,
/// `folders` says which neighbouring ranks write into one folder, all into `0..world_size` if all see it, and `form`
/// who writes the tensors of an object, or `None` where they are left in parts. All ranks that are given the same come to
/// the same plan, in the order of which tensors travel, one after the other.
///
/// What is whole already is in the plan only if nobody has it who may write it.
///
/// # Errors
/// [`is_weight_files`](crate::Error::is_weight_files): ranks that hold tensors of other shapes or types under one name, elements
/// that nobody holds, and state in blocks, of which no whole can be made.
///
/// ```
/// use accelerate_core::checkpoint::{HeldTensor, WrittenBy, plan_whole_tensors};
/// use accelerate_core::layout::Layout;
/// use safetensors::Dtype;
///
/// let part = |elements: std::ops::Range<usize>| vec![HeldTensor {
///     object: "model".into(), name: "weight".into(), dtype: Dtype::F32, shape: vec![elements.len()],
///     layout: Layout::full([2, 3]).flat(elements).ok(), may_differ: false,
/// }];
/// let plan = plan_whole_tensors(&[part(0..3), part(3..6)], &[0..2], &|_| Some(WrittenBy::FirstRank))?;
/// assert_eq!((plan[0].writer, &plan[0].shape[..]), (0, &[2, 3][..]));
/// assert_eq!(plan[0].parts.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [0, 1]);
/// # Ok::<(), accelerate_core::Error>(())
/// ```
pub fn plan_whole_tensors(
    held: &[Vec<HeldTensor>],
    folders: &[Range<usize>],
    form: &dyn Fn(&str) -> Option<WrittenBy>,
) -> Result<Vec<WholeTensor>> {
    let mut tensors = Vec::new();
    for ((object, _), pieces) in by_name(held)? {
        let (Some(written_by), Some((first, _))) = (form(object), pieces.first()) else { continue };
        if !first.is_elementwise() {
            let reason = "it is state in blocks, which belong to the part that a rank has".to_owned();
            return Err(not_whole(first, reason));
        }
        tensors.push((*first, pieces, written_by));
    }
    tensors.sort_by_key(|(first, ..)| Reverse(whole_bytes(first)));
    let mut loads = vec![0u64; held.len()];
    let mut plan = Vec::new();
    for (first, pieces, written_by) in tensors {
        for folder in folders {
            let holds = |rank: &usize| pieces.iter().any(|(_, holders)| holders.contains(rank));
            let writer = match written_by {
                WrittenBy::AllRanks if first.layout.is_none() => folder.clone().find(holds).unwrap_or(folder.start),
                WrittenBy::AllRanks => folder.clone().min_by_key(|&rank| loads.get(rank)).unwrap_or(folder.start),
                WrittenBy::FirstRank => folder.start,
            };
            // It stays where it is.
            if first.layout.is_none() && holds(&writer) {
                continue;
            }
            if let Some(load) = loads.get_mut(writer) {
                *load = load.saturating_add(whole_bytes(first));
            }
            let (object, name) = (first.object.clone(), first.name.clone());
            let (dtype, shape, parts) =
                (first.dtype, first.full_shape().to_vec(), parts(first, &pieces, writer, folder)?);
            plan.push(WholeTensor { object, name, dtype, shape, writer, parts });
        }
    }
    plan.sort_by(|a, b| (&a.object, &a.name, a.writer).cmp(&(&b.object, &b.name, b.writer)));
    Ok(plan)
}

/// Whose elements a writer takes: its own before those of a rank beside it, and those before any other's.
fn parts(
    first: &HeldTensor,
    pieces: &[WithHolders<'_>],
    writer: usize,
    folder: &Range<usize>,
) -> Result<Vec<(usize, Layout)>> {
    let whole = Layout::full(first.full_shape().to_vec());
    let nearest =
        |holders: &[usize]| holders.iter().copied().min_by_key(|rank| (*rank != writer, !folder.contains(rank)));
    let mut parts: Vec<(usize, &Layout)> = pieces
        .iter()
        .filter_map(|(piece, holders)| Some((nearest(holders)?, piece.layout.as_ref().unwrap_or(&whole))))
        .collect();
    // Of parts that hold the same elements, the first counts.
    parts.sort_by_key(|(rank, _)| (*rank != writer, !folder.contains(rank)));
    let copies = whole
        .copies_from(parts.iter().map(|(_, layout)| *layout))
        .map_err(|missing| not_whole(first, format!("no rank has its elements {}..{}", missing.start, missing.end)))?;
    let is_used = |place: usize| copies.iter().any(|copied| copied.source == place);
    let used = parts.iter().enumerate().filter(|(place, _)| is_used(*place));
    Ok(used.map(|(_, (rank, layout))| (*rank, (*layout).clone())).collect())
}

fn whole_bytes(tensor: &HeldTensor) -> u64 {
    let bits = tensor.dtype.bitsize() as u64;
    tensor.full_shape().iter().fold(bits, |bits, &size| bits.saturating_mul(size as u64)) / 8
}

fn not_whole(tensor: &HeldTensor, reason: String) -> crate::Error {
    Kind::NotWhole { object: shown(&tensor.object), name: shown(&tensor.name), reason }.into()
}

#[cfg(test)]
// Folders are ranges of ranks, of which there may be one.
#[allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn held(object: &str, name: &str, shape: &[usize], layout: Option<Layout>) -> HeldTensor {
        let (object, name, shape) = (object.to_owned(), name.to_owned(), shape.to_vec());
        HeldTensor { object, name, dtype: Dtype::F32, shape, layout, may_differ: false }
    }

    fn part(name: &str, numel: usize, elements: Range<usize>) -> HeldTensor {
        held("model", name, &[elements.len()], Layout::full([numel]).flat(elements).ok())
    }

    fn ranks(whole: &WholeTensor) -> Vec<usize> {
        whole.parts.iter().map(|(rank, _)| *rank).collect()
    }

    #[rstest]
    #[case::by_all(WrittenBy::AllRanks, &[("a", 0, &[0, 1][..]), ("b", 1, &[1, 0])])]
    #[case::by_one(WrittenBy::FirstRank, &[("a", 0, &[0, 1][..]), ("b", 0, &[0, 1])])]
    fn each_tensor_comes_to_one_writer(#[case] written_by: WrittenBy, #[case] wanted: &[(&str, usize, &[usize])]) {
        let rank = |start: usize| {
            vec![
                part("a", 8, start * 4..start * 4 + 4),
                part("b", 6, start * 3..start * 3 + 3),
                held("model", "c", &[2], None),
            ]
        };
        let plan = plan_whole_tensors(&[rank(0), rank(1)], &[0..2], &|_| Some(written_by)).unwrap();
        let found: Vec<_> = plan.iter().map(|whole| (whole.name.as_str(), whole.writer, ranks(whole))).collect();
        let wanted: Vec<_> = wanted.iter().map(|(name, writer, ranks)| (*name, *writer, ranks.to_vec())).collect();
        assert_eq!(found, wanted);
    }

    /// Two replicas of two ranks each, and a folder for each machine of two ranks.
    #[rstest]
    #[case::a_replica_in_each_folder([0, 1, 0, 1], [[0, 1], [2, 3]])]
    #[case::replicas_across_folders([0, 0, 1, 1], [[0, 2], [2, 0]])]
    fn each_folder_gets_everything_from_the_nearest(#[case] halves: [usize; 4], #[case] wanted: [[usize; 2]; 2]) {
        let all: Vec<_> = halves.iter().map(|half| vec![part("a", 8, half * 4..half * 4 + 4)]).collect();
        let plan = plan_whole_tensors(&all, &[0..2, 2..4], &|_| Some(WrittenBy::FirstRank)).unwrap();
        assert_eq!(plan.iter().map(ranks).collect::<Vec<_>>(), wanted);
        assert_eq!(plan.iter().map(|whole| whole.writer).collect::<Vec<_>>(), [0, 2]);
    }

    #[test]
    fn what_is_whole_travels_only_to_whom_it_is_missing() {
        let scalar = |ranks: &[usize]| -> Vec<Vec<HeldTensor>> {
            let own = |rank| ranks.contains(&rank).then(|| held("optimizer", "step.a", &[], None));
            (0..4).map(|rank| own(rank).into_iter().collect()).collect()
        };
        let plan = |ranks: &[usize], written_by| {
            let plan = plan_whole_tensors(&scalar(ranks), &[0..2, 2..4], &|_| Some(written_by)).unwrap();
            plan.iter().map(|whole| (self::ranks(whole)[0], whole.writer)).collect::<Vec<_>>()
        };
        assert_eq!(plan(&[0, 1, 2, 3], WrittenBy::FirstRank), []);
        assert_eq!(plan(&[1, 3], WrittenBy::AllRanks), []);
        assert_eq!(plan(&[1, 3], WrittenBy::FirstRank), [(1, 0), (3, 2)]);
        assert_eq!(plan(&[1], WrittenBy::AllRanks), [(1, 2)]);
    }

    #[rstest]
    #[case::elements_that_nobody_has(part("a", 8, 4..7), "no rank has its elements 7..8")]
    #[case::another_shape(part("a", 9, 4..8), "rank 1")]
    fn what_cannot_be_whole_says_why(#[case] second: HeldTensor, #[case] wanted: &str) {
        let all = [vec![part("a", 8, 0..4)], vec![second]];
        let error = plan_whole_tensors(&all, &[0..2], &|_| Some(WrittenBy::AllRanks)).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
        assert!(
            plan_whole_tensors(&all[..1], &[0..1], &|_| None).unwrap().is_empty(),
            "what is left in parts is no concern"
        );
    }

    #[test]
    fn state_in_blocks_stays_in_parts() {
        let blocks = held("optimizer", "exp_avg.a", &[3], Layout::full([8]).flat(0..4).ok());
        let error =
            plan_whole_tensors(&[vec![blocks]], &[0..1], &|_| Some(WrittenBy::AllRanks)).unwrap_err().to_string();
        assert!(error.contains("state in blocks") && error.contains("SHARDED_STATE_DICT"), "{error}");
    }

    #[test]
    fn ranks_get_about_as_many_bytes_each() {
        let names: Vec<String> = (0..20).map(|number| format!("w{number:02}")).collect();
        let rank = |rank: usize| -> Vec<HeldTensor> {
            names
                .iter()
                .enumerate()
                .map(|(n, name)| part(name, 3 * (n + 1), rank * (n + 1)..(rank + 1) * (n + 1)))
                .collect()
        };
        let plan = plan_whole_tensors(&[rank(0), rank(1), rank(2)], &[0..3], &|_| Some(WrittenBy::AllRanks)).unwrap();
        let mut loads = [0; 3];
        plan.iter().for_each(|whole| loads[whole.writer] += whole.shape[0]);
        assert_eq!(loads.iter().sum::<usize>(), 630);
        assert!(loads.iter().all(|load| (200..=220).contains(load)), "{loads:?}");
    }
}
