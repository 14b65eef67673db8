//! Which rank writes which tensors, when several write one model at once.

use super::{WeightFiles, plan_shards};
use std::collections::BTreeMap;

/// A tensor that is to be saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// Its key in a state dict.
    pub name: String,
    /// Bytes of the whole tensor.
    pub bytes: u64,
    /// Bytes of one element.
    pub element_bytes: u64,
    /// What it is gathered with; `None` for a tensor that every rank has whole.
    pub unit: Option<usize>,
}

/// The files that hold a model's weights, and the rank that writes each.
///
/// Units arrive one after the other on all ranks, and each rank writes its tensors as they come. So the tensors of *each*
/// unit are dealt to all writers: every rank has something to write while a unit is there.
///
/// ```
/// use accelerate_core::weight_files::{ParallelFiles, TensorEntry};
/// let entry = |name: &str, bytes, unit| TensorEntry { name: name.to_owned(), bytes, element_bytes: 4, unit };
/// let tensors = [entry("up", 40, Some(0)), entry("down", 40, Some(0)), entry("mean", 8, None)];
/// let plan = ParallelFiles::plan(&tensors, 2, 1000, "model");
/// assert_eq!(plan.groups, [vec![0, 1], vec![2]]);
/// assert_eq!(plan.files.files[0], ("model-00001-of-00002.safetensors".into(), vec!["up".into(), "mean".into()]));
/// assert_eq!(plan.writers, [0, 1]);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ParallelFiles {
    /// Positions of the tensors that arrive together, in the order of arrival: those of one unit, or those without one
    /// and of one element size. The widest elements come first, so that no tensor of a file needs a hole before it; of
    /// these the largest unit, so that what comes last is small and evens out what ranks have.
    pub groups: Vec<Vec<usize>>,
    /// The files, each with its tensors in the order of arrival.
    pub files: WeightFiles,
    /// Who writes each of `files.files`, counted from 0.
    pub writers: Vec<usize>,
}

impl ParallelFiles {
    /// Deals tensors to `num_writers` ranks, and each rank's tensors to files of at most `max_shard_bytes` by the rules of
    /// [`plan_shards`](super::plan_shards).
    ///
    /// Each tensor goes to the rank that has the fewest bytes until then, the largest of a unit first (list scheduling;
    /// Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 1969). No two ranks differ by more than
    /// the bytes of the largest tensor, and no rank is without a file while another has two tensors. A model without
    /// tensors gets one empty file, from rank 0.
    pub fn plan(tensors: &[TensorEntry], num_writers: usize, max_shard_bytes: u64, stem: &str) -> Self {
        let groups = groups_in_order(tensors);
        let mut dealt = vec![Vec::new(); num_writers.max(1)];
        let mut load = vec![(0_u64, 0_usize); num_writers.max(1)];
        for group in &groups {
            let mut largest_first = group.clone();
            largest_first.sort_by_key(|&position| std::cmp::Reverse(tensors[position].bytes));
            let mut writer_of = BTreeMap::new();
            for position in largest_first {
                let (writer, (bytes, count)) = least(&mut load);
                *bytes = bytes.saturating_add(tensors[position].bytes);
                *count += 1;
                writer_of.insert(position, writer);
            }
            for &position in group {
                let TensorEntry { name, bytes, .. } = &tensors[position];
                dealt[writer_of[&position]].push((name.clone(), *bytes));
            }
        }
        let (mut shards, mut writers) = (Vec::new(), Vec::new());
        for (writer, own) in dealt.iter().enumerate() {
            let own = plan_shards(own, max_shard_bytes);
            writers.resize(writers.len() + own.len(), writer);
            shards.extend(own);
        }
        writers.resize(writers.len().max(1), 0);
        let total_size = tensors.iter().fold(0, |sum: u64, tensor| sum.saturating_add(tensor.bytes));
        Self { groups, files: WeightFiles::of_shards(shards, total_size, stem), writers }
    }
}

/// The place of the smallest, and the smallest itself.
fn least<T: Ord>(loads: &mut [T]) -> (usize, &mut T) {
    let smallest = (0..loads.len()).min_by_key(|&place| &loads[place]).unwrap_or(0);
    (smallest, &mut loads[smallest])
}

fn groups_in_order(tensors: &[TensorEntry]) -> Vec<Vec<usize>> {
    /// Units apart from each other, and from what has no unit: that is told apart by its element size.
    type Key = (Option<usize>, u64);
    let mut groups: BTreeMap<Key, Vec<usize>> = BTreeMap::new();
    for (position, tensor) in tensors.iter().enumerate() {
        let key = (tensor.unit, if tensor.unit.is_some() { 0 } else { tensor.element_bytes });
        groups.entry(key).or_default().push(position);
    }
    let mut groups: Vec<Vec<usize>> = groups.into_values().collect();
    groups.sort_by_key(|group| {
        let bytes = group.iter().fold(0, |sum: u64, &position| sum.saturating_add(tensors[position].bytes));
        let first = &tensors[group[0]];
        // What is there anyway waits until units that have to be gathered have come.
        (std::cmp::Reverse(first.element_bytes), first.unit.is_none(), std::cmp::Reverse(bytes), group[0])
    });
    groups
}
