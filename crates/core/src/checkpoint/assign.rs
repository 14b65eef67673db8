//! Which rank writes which tensor of a checkpoint.

use super::description::{SavedPiece, SavedTensor};
use crate::Result;
use crate::error::weight_files::WeightFilesErrorKind as Kind;
use crate::layout::Layout;
use crate::weight_files::{EXTENSION, check_saved_name, shard_file_names, shown};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A tensor as one rank holds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldTensor {
    /// The object whose state it is: `model`, `optimizer_1`.
    pub object: String,
    /// Its name in that state.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its sizes: `[elements]` where it is a part of one that is sharded.
    pub shape: Vec<usize>,
    /// Which elements of a sharded parameter it is, or is state of. `None` if it is whole.
    pub layout: Option<Layout>,
    /// Ranks that hold it may hold other numbers, as of buffers: those of the first of them count.
    #[serde(default)]
    pub may_differ: bool,
}

impl HeldTensor {
    /// Number of bytes of its elements.
    pub(super) fn num_bytes(&self) -> u64 {
        let bits = self.dtype.bitsize() as u64;
        self.shape.iter().fold(bits, |bits, &size| bits.saturating_mul(size as u64)) / 8
    }

    /// Has it an element for each element of its layout?
    pub(super) fn is_elementwise(&self) -> bool {
        self.layout.as_ref().is_none_or(|layout| layout.numel() == self.shape.iter().product::<usize>())
    }

    /// Would it have as many elements in blocks, too? One element takes one scale.
    fn is_either(&self) -> bool {
        self.layout.as_ref().is_some_and(|layout| layout.numel() <= 1) && self.is_elementwise()
    }

    pub(super) fn full_shape(&self) -> &[usize] {
        match &self.layout {
            Some(layout) if self.is_elementwise() => layout.shape(),
            _ => &self.shape,
        }
    }
}

/// A file of a checkpoint and who writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedFile {
    /// Its name in the folder.
    pub name: String,
    /// The rank that writes it.
    pub writer: usize,
    /// The object whose state it holds.
    pub object: String,
    /// Names of the tensors in it, in alphabetical order.
    pub tensors: Vec<String>,
}

/// The tensors of all ranks in files.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Assignment {
    /// In the order in which [`SavedPiece::file`] counts them.
    pub files: Vec<PlannedFile>,
    /// By object and name.
    pub tensors: BTreeMap<String, BTreeMap<String, SavedTensor>>,
}

impl Assignment {
    /// The files that a rank writes.
    pub fn of_writer(&self, rank: usize) -> impl Iterator<Item = &PlannedFile> {
        self.files.iter().filter(move |file| file.writer == rank)
    }
}

/// One part of a tensor: whoever holds the same elements holds the same numbers, and any of them may write them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece<'a> {
    held: &'a HeldTensor,
    writer: usize,
}

/// Elements of a piece, and its place among all pieces.
type PlacedRange = (Range<usize>, usize);

/// A tensor and the ranks that hold the same elements of it.
pub(super) type WithHolders<'a> = (&'a HeldTensor, Vec<usize>);

/// Divides what ranks hold into files, one for each rank and object, so that each number is written once, and every rank
/// writes about as many bytes as the others. `held` is what each rank holds, by rank; all ranks that are given the same come
/// to the same answer.
///
/// The state of an object that no rank has a part of is in files with the names of Hugging Face's shards, which one rank
/// may write whole: `model.safetensors`, or `model-00001-of-00002.safetensors`. Parts are in files with a rank in their name:
/// `model.rank-00000-of-00002.safetensors`.
///
/// # Errors
/// [`is_weight_files`](crate::Error::is_weight_files): ranks that hold tensors of other shapes or types under one name, and a name that
/// no tensor of a safetensors file can have.
///
/// ```
/// use accelerate_core::checkpoint::{HeldTensor, assign};
/// use safetensors::Dtype;
///
/// let tensor = |name: &str, size| HeldTensor {
///     object: "model".into(), name: name.into(), dtype: Dtype::F32, shape: vec![size], layout: None,
///     may_differ: false,
/// };
/// let own = vec![tensor("bias", 2), tensor("weight", 4)];
/// let assignment = assign(&[own.clone(), own])?;
/// let files: Vec<_> = assignment.files.iter().map(|file| (file.name.as_str(), file.writer, &file.tensors[..])).collect();
/// assert_eq!(files, [
///     ("model-00001-of-00002.safetensors", 0, &["weight".to_owned()][..]),
///     ("model-00002-of-00002.safetensors", 1, &["bias".to_owned()][..]),
/// ]);
/// # Ok::<(), accelerate_core::Error>(())
/// ```
pub fn assign(held: &[Vec<HeldTensor>]) -> Result<Assignment> {
    let pieces = choose_writers(held)?;
    let mut assignment = Assignment::default();
    for (object, pieces) in pieces {
        if let Some(error) = pieces.iter().find_map(|piece| check_saved_name(&piece.held.name).err()) {
            return Err(Kind::NotSaved { object: shown(object), reason: error.to_string() }.into());
        }
        let first_file = assignment.files.len();
        assignment.files.extend(files_of(object, &pieces, held.len()));
        let files: BTreeMap<usize, usize> =
            (first_file..).zip(&assignment.files[first_file..]).map(|(number, file)| (file.writer, number)).collect();
        let tensors = assignment.tensors.entry(object.to_owned()).or_default();
        for Piece { held, writer } in pieces {
            let tensor = tensors.entry(held.name.clone()).or_insert_with(|| SavedTensor {
                dtype: held.dtype,
                shape: held.full_shape().to_vec(),
                is_elementwise: held.is_elementwise(),
                pieces: Vec::new(),
            });
            // One piece in blocks tells of those that could be either.
            if tensor.is_elementwise && !held.is_elementwise() {
                (tensor.is_elementwise, tensor.shape) = (false, held.full_shape().to_vec());
            }
            tensor.pieces.push(SavedPiece { file: files[&writer], layout: held.layout.clone() });
        }
    }
    Ok(assignment)
}

/// What ranks hold by object and name: each different part with the ranks that hold it.
///
/// # Errors
/// Ranks that hold what cannot be one tensor.
pub(super) fn by_name(held: &[Vec<HeldTensor>]) -> Result<BTreeMap<(&str, &str), Vec<WithHolders<'_>>>> {
    let mut by_name: BTreeMap<(&str, &str), Vec<WithHolders<'_>>> = BTreeMap::new();
    for (rank, tensors) in held.iter().enumerate() {
        for tensor in tensors {
            let pieces = by_name.entry((&tensor.object, &tensor.name)).or_default();
            if let Some((first, holders)) = pieces.first()
                && !go_together(first, tensor)
            {
                let (object, name) = (shown(&tensor.object), shown(&tensor.name));
                let found = [(holders[0], describe(first)), (rank, describe(tensor))];
                return Err(Kind::RanksDiffer { object, name, found }.into());
            }
            match pieces.iter_mut().find(|(piece, _)| piece.layout == tensor.layout) {
                Some((_, holders)) => holders.push(rank),
                None => pieces.push((tensor, vec![rank])),
            }
        }
    }
    by_name.values_mut().for_each(|pieces| leave_out_overlaps(pieces));
    Ok(by_name)
}

/// Ranks that compute layers together hold other parameters whole, each divided among those that share its place. Where their slices
/// are of different sizes, these are cut at other elements, and each element would be written several times: of pieces that overlap,
/// those stay that follow each other from the first element to the last.
fn leave_out_overlaps(pieces: &mut Vec<WithHolders<'_>>) {
    // Pieces of the same thing, by their place among all pieces.
    let mut families: Vec<(Layout, Vec<PlacedRange>)> = Vec::new();
    for (place, (piece, _)) in pieces.iter().enumerate().filter(|(_, (piece, _))| piece.is_elementwise()) {
        let Some((whole, range)) = piece.layout.as_ref().map(Layout::ranged) else { continue };
        match families.iter_mut().find(|(known, _)| *known == whole) {
            Some((_, members)) => members.push((range, place)),
            None => families.push((whole, vec![(range, place)])),
        }
    }
    let mut left_out = BTreeSet::new();
    for (whole, members) in families {
        let held = members.iter().fold(0usize, |sum, (range, _)| sum.saturating_add(range.len()));
        if let Some(chain) = (held > whole.numel()).then(|| chain_of(&members, whole.numel())).flatten() {
            left_out.extend(members.iter().map(|(_, place)| *place).filter(|place| !chain.contains(place)));
        }
    }
    let mut place = 0;
    pieces.retain(|_| {
        place += 1;
        !left_out.contains(&(place - 1))
    });
}

/// The places of ranges that follow each other from 0 to `end`, if there are such. The first rank's go before others.
fn chain_of(ranges: &[PlacedRange], end: usize) -> Option<BTreeSet<usize>> {
    // By where they begin. Those without elements lead nowhere.
    let mut by_start: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
    for (range, place) in ranges.iter().filter(|(range, _)| !range.is_empty()) {
        by_start.entry(range.start).or_default().push((range.end, *place));
    }
    // From the last to the first: which range to take where one begins.
    let mut next: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
    for (start, own) in by_start.into_iter().rev() {
        let leads_to_end = |(to, _): &&(usize, usize)| *to == end || next.contains_key(to);
        if let Some(&(to, place)) = own.iter().find(leads_to_end) {
            next.insert(start, (to, place));
        }
    }
    let (mut at, mut chain) = (0, BTreeSet::new());
    while at < end {
        let &(to, place) = next.get(&at)?;
        chain.insert(place);
        at = to;
    }
    Some(chain)
}

/// All pieces by object, and within one by name. The largest are given away first, each to the holder that has the
/// least to write so far.
fn choose_writers(held: &[Vec<HeldTensor>]) -> Result<BTreeMap<&str, Vec<Piece<'_>>>> {
    let mut pieces: Vec<WithHolders<'_>> = by_name(held)?.into_values().flatten().collect();
    // Pieces of one holder first: that they are written there is settled.
    pieces.sort_by_key(|(piece, holders)| (holders.len() > 1, std::cmp::Reverse(piece.num_bytes())));
    let mut loads = vec![0u64; held.len()];
    let mut by_object: BTreeMap<&str, Vec<Piece<'_>>> = BTreeMap::new();
    for (held, holders) in pieces {
        let least_loaded = || holders.iter().min_by_key(|&&rank| loads[rank]);
        let Some(&writer) = (if held.may_differ { holders.first() } else { least_loaded() }) else { continue };
        loads[writer] = loads[writer].saturating_add(held.num_bytes());
        by_object.entry(&held.object).or_default().push(Piece { held, writer });
    }
    for pieces in by_object.values_mut() {
        pieces.sort_by_key(|piece| (&piece.held.name, piece.writer));
    }
    Ok(by_object)
}

/// May both be parts of one tensor, or be the same one?
fn go_together(first: &HeldTensor, other: &HeldTensor) -> bool {
    let is_either = first.is_either() || other.is_either();
    let is_same_tensor = first.dtype == other.dtype && (is_either || first.is_elementwise() == other.is_elementwise());
    // The shape of what does not go element by element may differ with the elements.
    let is_elementwise = first.is_elementwise() && other.is_elementwise();
    let is_free = !is_elementwise && first.layout != other.layout;
    // Both in parts, or both whole: otherwise nobody knows which of them counts.
    first.layout.is_some() == other.layout.is_some()
        && is_same_tensor
        && (is_free || first.full_shape() == other.full_shape())
}

fn describe(tensor: &HeldTensor) -> String {
    match &tensor.layout {
        Some(layout) => format!("{} of {layout}", tensor.dtype),
        None => format!("{} of shape {:?}", tensor.dtype, tensor.shape),
    }
}

fn files_of(object: &str, pieces: &[Piece<'_>], world_size: usize) -> Vec<PlannedFile> {
    let writers: BTreeSet<usize> = pieces.iter().map(|piece| piece.writer).collect();
    let is_whole = pieces.iter().all(|piece| piece.held.layout.is_none());
    let names = match is_whole {
        true => shard_file_names(object, writers.len()),
        false => writers.iter().map(|rank| format!("{object}.rank-{rank:05}-of-{world_size:05}.{EXTENSION}")).collect(),
    };
    let file = |(writer, name): (usize, String)| {
        let own = pieces.iter().filter(|piece| piece.writer == writer);
        let tensors = own.map(|piece| piece.held.name.clone()).collect();
        PlannedFile { name, writer, object: object.to_owned(), tensors }
    };
    writers.into_iter().zip(names).map(file).collect()
}
