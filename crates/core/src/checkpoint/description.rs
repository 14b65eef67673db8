//! What a checkpoint says of itself.

use super::names::is_of_no_rank;
use crate::Error;
use crate::accumulation::WindowState;
use crate::error::weight_files::WeightFilesErrorKind as Kind;
use crate::layout::Layout;
use crate::weight_files::{Header, is_saved_file_name, newer_version, other_format, shortened_reason, shown};
use safetensors::Dtype;
use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt::{self, Display, Formatter};
use std::marker::PhantomData;

const FORMAT: &str = "accelerate-checkpoint";
const VERSION: u32 = 1;
/// More processes than any job has had.
const MOST_RANKS: usize = 1 << 20;
/// More steps, and checkpoints, than any run has.
pub const MOST_STEPS: usize = usize::MAX >> 8;
/// How many runs of elements the pieces of one tensor may have together, more than any sharding makes. Readers put them in order, and
/// each takes some bytes of memory for that.
pub const MOST_RUNS: usize = 1 << 23;

/// What the folder of a checkpoint holds: the objects of a run, where each of their tensors lies, and what they have besides
/// tensors. It is the file [`DESCRIPTION`](super::DESCRIPTION), which the manifest of the folder vouches for.
///
/// ```
/// use accelerate_core::checkpoint::Checkpoint;
/// let checkpoint = Checkpoint::new(2);
/// assert_eq!(Checkpoint::from_json(&checkpoint.to_json()?)?, checkpoint);
/// assert!(Checkpoint::from_json(r#"{"format": "other", "version": 1, "world_size": 1}"#).is_err());
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    format: String,
    version: u32,
    /// Differs from save to save, and is the same in all folders of one.
    #[serde(default)]
    pub id: String,
    /// Number of processes that the run had.
    pub world_size: usize,
    /// How many of them divided a model's parameters among themselves.
    #[serde(default = "one")]
    pub shard_size: usize,
    /// The number of this checkpoint, if it was named automatically.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iteration: Option<usize>,
    /// How good the run was, if the program has said so. Larger is better.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<f64>,
    /// Where the accumulation of gradients stood.
    #[serde(default)]
    pub accumulation: WindowState,
    /// The weight files, as [`SavedPiece::file`] counts them.
    #[serde(default)]
    pub files: Vec<String>,
    /// By name: `model`, `optimizer_1`, `custom_checkpoint_0`.
    #[serde(default, deserialize_with = "each_key_once")]
    pub objects: BTreeMap<String, SavedObject>,
}

fn one() -> usize {
    1
}

/// A map in which no key is there twice: of two entries, another reader could take the other one.
fn each_key_once<'de, D, K, V>(deserializer: D) -> Result<BTreeMap<K, V>, D::Error>
where
    D: Deserializer<'de>,
    K: Deserialize<'de> + Ord + Display,
    V: Deserialize<'de>,
{
    struct Entries<K, V>(PhantomData<(K, V)>);

    impl<'de, K: Deserialize<'de> + Ord + Display, V: Deserialize<'de>> Visitor<'de> for Entries<K, V> {
        type Value = BTreeMap<K, V>;

        fn expecting(&self, f: &mut Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut entries = BTreeMap::new();
            while let Some(key) = map.next_key::<K>()? {
                if entries.contains_key(&key) {
                    return Err(de::Error::custom(format_args!(
                        "the key `{}` is there twice",
                        shown(&key.to_string())
                    )));
                }
                entries.insert(key, map.next_value()?);
            }
            Ok(entries)
        }
    }

    deserializer.deserialize_map(Entries(PhantomData))
}

/// The state of one object of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedObject {
    /// What is not a tensor, on rank 0.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub values: Value,
    /// The same of those ranks that had other values than rank 0.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "each_key_once")]
    pub values_of_ranks: BTreeMap<usize, Value>,
    /// By name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "each_key_once")]
    pub tensors: BTreeMap<String, SavedTensor>,
}

/// Where a tensor lies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedTensor {
    /// Its element type.
    pub dtype: Dtype,
    /// Its sizes. Those of the full one where its pieces are parts.
    pub shape: Vec<usize>,
    /// Whether it has an element for each one of its layouts. State in blocks has not, and is of use for the same layouts only.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub is_elementwise: bool,
    /// Each number is in one of them. The same name stands for each of them in its file, so that no two are in one.
    pub pieces: Vec<SavedPiece>,
}

fn yes() -> bool {
    true
}

fn is_yes(value: &bool) -> bool {
    *value
}

/// A part of a tensor in a file, or all of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedPiece {
    /// Position in [`Checkpoint::files`].
    pub file: usize,
    /// Which elements. `None`: all of them, in the tensor's own shape.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<Layout>,
}

impl Checkpoint {
    /// Of a run of so many processes, with nothing in it.
    pub fn new(world_size: usize) -> Self {
        Self {
            format: FORMAT.to_owned(),
            version: VERSION,
            id: String::new(),
            world_size,
            shard_size: 1,
            iteration: None,
            metric: None,
            accumulation: WindowState::default(),
            files: Vec::new(),
            objects: BTreeMap::new(),
        }
    }

    /// Reads a description. Nothing in it is believed: what it names is in its folder, and what it counts is there.
    ///
    /// # Errors
    /// [`Error::is_weight_files`]: not such a description, one of a later version ([`Error::is_newer_version`]), or one that contradicts itself.
    pub fn from_json(json: &str) -> crate::Result<Self> {
        // Not the parser's error itself, which repeats what it has found, however long that is.
        let parsed = serde_json::from_str(json).map_err(|cause| shortened_reason(&cause.to_string()));
        let checked = parsed.and_then(|checkpoint: Self| checkpoint.check().map_or(Ok(checkpoint), Err));
        checked.map_err(|reason| newer_version(json, FORMAT, VERSION).unwrap_or(Kind::Checkpoint { reason }.into()))
    }

    /// Writes the description as JSON, with a newline at the end.
    ///
    /// # Errors
    /// [`Error::is_weight_files`]: never in practice.
    pub fn to_json(&self) -> crate::Result<String> {
        match serde_json::to_string(self) {
            Ok(json) => Ok(json + "\n"),
            Err(cause) => Err(Error::new(Kind::Checkpoint { reason: cause.to_string() }).caused_by(cause)),
        }
    }

    /// What is wrong with it, if anything.
    fn check(&self) -> Option<String> {
        if let Some(reason) = other_format((&self.format, self.version), (FORMAT, VERSION)) {
            return Some(reason);
        }
        if !(1..=MOST_RANKS).contains(&self.world_size) || !self.world_size.is_multiple_of(self.shard_size) {
            let Self { world_size, shard_size, .. } = self;
            return Some(format!("it is of {world_size} processes, of which {shard_size} share a model"));
        }
        let WindowState { step, seen, num_steps } = self.accumulation;
        if MOST_STEPS < step.max(seen).max(num_steps) || self.iteration.is_some_and(|number| MOST_STEPS < number) {
            return Some(format!("its counts are not those of a run: {step}, {seen}, {:?}", self.iteration));
        }
        if let Some(file) = self.files.iter().find(|file| !is_saved_file_name(file)) {
            return Some(format!("`{}` is not the name of a file in its folder", shown(file)));
        }
        let mut names = BTreeSet::new();
        if let Some(file) = self.files.iter().find(|file| !names.insert(file.as_str())) {
            return Some(format!("it lists the file `{}` twice", shown(file)));
        }
        let of_objects = self.objects.iter().find_map(|(name, object)| {
            let reason = self.check_object(object)?;
            Some(format!("of `{}`, {reason}", shown(name)))
        });
        let of_no_rank = self.objects.keys().find(|name| is_of_no_rank(name, self.world_size));
        if let Some(name) = of_no_rank {
            let (name, processes) = (shown(name), self.world_size);
            return Some(format!(
                "`{name}` is of none of the ranks that can have it: the run had {processes} processes"
            ));
        }
        of_objects.or_else(|| self.check_all_is_used())
    }

    /// What is saved and not named would be lost without a word.
    fn check_all_is_used(&self) -> Option<String> {
        let tensors = self.objects.values().flat_map(|object| object.tensors.values());
        let used: HashSet<usize> = tensors.flat_map(|tensor| &tensor.pieces).map(|piece| piece.file).collect();
        let (_, unused) = self.files.iter().enumerate().find(|(number, _)| !used.contains(number))?;
        Some(format!("it lists the file `{}`, and none of its tensors is in it", shown(unused)))
    }

    fn check_object(&self, object: &SavedObject) -> Option<String> {
        if let Some(rank) = object.values_of_ranks.keys().find(|&&rank| rank >= self.world_size) {
            return Some(format!("it has values of rank {rank}, and the run had {} processes", self.world_size));
        }
        object.tensors.iter().find_map(|(name, tensor)| {
            let reason = self.check_tensor(tensor)?;
            Some(format!("`{}` {reason}", shown(name)))
        })
    }

    fn check_tensor(&self, tensor: &SavedTensor) -> Option<String> {
        if tensor.pieces.is_empty() {
            return Some("is in no file".to_owned());
        }
        if let Some(piece) = tensor.pieces.iter().find(|piece| piece.file >= self.files.len()) {
            return Some(format!("is in file {}, and it lists {} files", piece.file, self.files.len()));
        }
        let shapes = tensor.pieces.iter().filter_map(|piece| Some(piece.layout.as_ref()?.shape()));
        let most_dims = shapes.map(<[usize]>::len).fold(tensor.shape.len(), usize::max);
        if most_dims > Header::MAX_DIMS {
            return Some(format!("has {most_dims} dims, and at most {} are known", Header::MAX_DIMS));
        }
        let other = |layout: &&Layout| tensor.is_elementwise && *layout.shape() != *tensor.shape;
        if let Some(layout) = tensor.pieces.iter().filter_map(|piece| piece.layout.as_ref()).find(other) {
            return Some(format!("has shape {:?}, and a piece is {layout}", tensor.shape));
        }
        // Each number is written once, so that reading takes no more time than the tensor has elements.
        let in_pieces = tensor.pieces.iter().filter_map(|piece| piece.layout.as_ref());
        let found = in_pieces.fold(0usize, |sum, layout| sum.saturating_add(layout.numel()));
        let wanted = tensor.shape.iter().fold(1usize, |numel, &size| numel.saturating_mul(size));
        if tensor.is_elementwise && found > wanted {
            return Some(format!("has {wanted} elements, and {found} in its pieces"));
        }
        // Under its name a file has one tensor. As several pieces, the same bytes would become a tensor of any size.
        let mut files = BTreeSet::new();
        if let Some(piece) = tensor.pieces.iter().find(|piece| !files.insert(piece.file)) {
            let file = self.files.get(piece.file).map(|file| shown(file)).unwrap_or_default();
            return Some(format!("has two pieces in the file `{file}`"));
        }
        let num_runs = tensor.num_runs();
        (num_runs > MOST_RUNS)
            .then(|| format!("is divided into {num_runs} runs of elements, and at most {MOST_RUNS} are read"))
    }
}

impl SavedObject {
    /// What is not a tensor, as this rank had it.
    pub fn values_of(&self, rank: usize) -> &Value {
        self.values_of_ranks.get(&rank).unwrap_or(&self.values)
    }
}

impl SavedTensor {
    /// How many runs of elements its pieces have together. Counted without going through them.
    pub fn num_runs(&self) -> usize {
        let layouts = self.pieces.iter().filter_map(|piece| piece.layout.as_ref());
        layouts.fold(0, |sum: usize, layout| sum.saturating_add(layout.runs().size_hint().0))
    }

    /// Number of bytes of the full tensor.
    pub fn num_bytes(&self) -> u64 {
        let bits = self.dtype.bitsize() as u64;
        self.shape.iter().fold(bits, |bits, &size| bits.saturating_mul(size as u64)) / 8
    }
}
