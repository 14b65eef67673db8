//! `accelerate checkpoint diff`: in what two checkpoints differ, whatever pieces they are saved in.

mod show;

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use accelerate_core::checkpoint::{SavedObject, SavedTensor};
use accelerate_core::files::ShownPath;
use clap::Args;
use serde::Serialize;
use serde_json::Value;

use super::error::{CheckpointError, Fault};
use super::files::BLOCK_BYTES;
use super::folder::OpenCheckpoint;
use super::numbers::Difference;
use super::tensors::{Bytes, Reader};
use super::unchanged::Seen;
use super::values::{ValueDifference, differences};
use super::verify::check_contents;
use crate::print_error;
use crate::progress::Progress;

/// The order in which gradients are put into buckets. A model on one process has none.
const GRADIENT_ORDER: &str = "gradient_order";

/// Show in what two checkpoints differ.
///
/// Objects and tensors that only one has, shapes and element types that differ, and of all other tensors how many numbers
/// differ and how much; values of schedulers, loaders and so on by their path. How tensors are divided among files makes no
/// difference, so that a run on two processes can be compared with one on four. Of a project, its newest completed checkpoint is
/// compared. First the content of all files is compared with their checksums, so that damage is no difference.
///
/// Numbers are equal if their bits are: NaN is equal to the same NaN, and -0 is not 0. The numbers and names of checkpoints,
/// and their numbers of processes, are shown and do not count; nor does the order in which gradients came, where the numbers of
/// processes differ.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    Whether a resumed run came to the same state as one that was never interrupted:\n    \
      accelerate checkpoint diff straight/checkpoint_9 resumed/checkpoint_9\n  \
    The same, where sums were made in another order:\n    \
      accelerate checkpoint diff one_process/checkpoint_9 four_processes/checkpoint_9 --tolerance 1e-5 \\\n        \
        --objects model optimizer\n\n\
    Exit code: 0 if they are equal, 1 if they differ, 2 if they cannot be compared.")]
pub(crate) struct Arguments {
    /// A checkpoint, or a project, whose newest one is meant.
    #[arg(value_name = "A")]
    a: PathBuf,

    /// The checkpoint to compare it with.
    #[arg(value_name = "B")]
    b: PathBuf,

    /// Compare these objects only, named as `ls` shows them: model, optimizer. Without it: all.
    ///
    /// Random numbers, for example, are those of ranks, and differ where the numbers of processes do.
    #[arg(long, value_name = "NAME", num_args = 1..)]
    objects: Vec<String>,

    /// Numbers whose absolute or relative difference is at most this are equal. Without it: those with the same bits.
    ///
    /// Complex numbers differ by the absolute value of their difference. Types of less than a byte are compared by their bits.
    #[arg(long, value_name = "NUMBER", value_parser = parse_tolerance)]
    tolerance: Option<f64>,

    /// Print JSON, with everything that differs.
    #[arg(long)]
    json: bool,
}

fn parse_tolerance(text: &str) -> Result<f64, CheckpointError> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| CheckpointError::Tolerance { found: text.to_owned() })
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Side {
    A,
    B,
}

/// Two checkpoints side by side.
#[derive(Debug, Serialize)]
struct Comparison {
    a: String,
    b: String,
    equal: bool,
    num_processes: [usize; 2],
    /// Where the accumulation of gradients stood.
    accumulation: Vec<ValueDifference>,
    objects: BTreeMap<String, ObjectComparison>,
}

#[derive(Debug, Default, Serialize)]
struct ObjectComparison {
    only_in: Option<Side>,
    /// Tensors of both together.
    num_tensors: u64,
    /// Those that differ, by name.
    tensors: BTreeMap<String, TensorDifference>,
    values: Vec<ValueDifference>,
}

impl ObjectComparison {
    fn is_equal(&self) -> bool {
        self.only_in.is_none() && self.tensors.is_empty() && self.values.is_empty()
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum TensorDifference {
    OnlyIn(Side),
    Dtypes([String; 2]),
    Shapes([Vec<usize>; 2]),
    Numbers(Difference),
    /// State in blocks says nothing without the elements that it is of.
    OtherPieces,
}

/// What went wrong with one of the two.
#[derive(Debug, thiserror::Error)]
#[error("the checkpoint {} cannot be read; `accelerate checkpoint verify` lists all that is wrong with it", folder.shown())]
struct ReadError {
    folder: PathBuf,
    source: Fault,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Box<dyn Error>> {
    match compare_and_show(arguments) {
        Err(error) => {
            print_error("accelerate checkpoint", error.as_ref(), &error.to_string());
            // As diff and cmp: 1 means that they differ.
            Ok(ExitCode::from(2))
        }
        outcome => outcome,
    }
}

fn compare_and_show(arguments: &Arguments) -> Result<ExitCode, Box<dyn Error>> {
    let opened = [open_checked(&arguments.a)?, open_checked(&arguments.b)?];
    let comparison = compare(&opened, arguments)?;
    let text = match arguments.json {
        true => serde_json::to_string_pretty(&comparison)? + "\n",
        false => show::comparison(&comparison),
    };
    crate::print_coloured(&text)?;
    Ok(if comparison.equal { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The checkpoint, or the newest of a project, whose files are those that were saved. A run that goes on may remove one that is being
/// read, and then has a newer one.
fn open_checked(folder: &Path) -> Result<Opened, CheckpointError> {
    const MOST_TRIES: usize = 10;
    let open = || {
        let checkpoint = OpenCheckpoint::open_newest(folder)?;
        Ok(Opened { seen: Seen::of(&checkpoint.save.folder), checkpoint })
    };
    for _ in 1..MOST_TRIES {
        let opened = open()?;
        let found = &opened.checkpoint.save.folder;
        match check_contents_of(&opened.checkpoint) {
            Ok(()) => return Ok(opened),
            Err(_) if found != folder && !found.exists() => {}
            Err(error) => return Err(error),
        }
    }
    let opened = open()?;
    check_contents_of(&opened.checkpoint)?;
    Ok(opened)
}

/// A checkpoint of which the content was verified.
struct Opened {
    /// What was in its folder before that.
    seen: Seen,
    checkpoint: OpenCheckpoint,
}

/// Makes sure that the files are those that were saved.
fn check_contents_of(checkpoint: &OpenCheckpoint) -> Result<(), CheckpointError> {
    let bar = Progress::new("verifying", checkpoint.save.num_bytes());
    let (faults, _) = check_contents(&checkpoint.save, &bar);
    bar.finish();
    let unusable = |source| CheckpointError::Unusable { folder: checkpoint.save.folder.clone(), source };
    faults.into_iter().next().map_or(Ok(()), |fault| Err(unusable(fault)))
}

fn compare(opened: &[Opened; 2], arguments: &Arguments) -> Result<Comparison, Box<dyn Error>> {
    let [a, b] = opened.each_ref().map(|opened| &opened.checkpoint);
    let objects = [&a.description.objects, &b.description.objects];
    let names = names_to_compare(objects, &arguments.objects)?;
    let tensors = names.iter().filter_map(|name| objects[0].get(*name)).flat_map(|object| object.tensors.values());
    let bar = Progress::new("comparing", tensors.map(SavedTensor::num_bytes).fold(0, u64::saturating_add));
    let same_processes = a.description.world_size == b.description.world_size;
    let readers = [Reader::new(a), Reader::new(b)];
    let mut comparer = Comparer { readers, tolerance: arguments.tolerance, same_processes, bar };
    let mut compared = BTreeMap::new();
    for name in names {
        let object = match (objects[0].get(name), objects[1].get(name)) {
            (Some(a), Some(b)) => comparer.objects(name, [a, b])?,
            (a, _) => ObjectComparison { only_in: Some(side_of(a.is_some())), ..Default::default() },
        };
        compared.insert(name.clone(), object);
    }
    comparer.bar.finish();
    // What was compared may have been of two saves.
    opened.iter().try_for_each(|opened| opened.seen.check())?;
    let window = |open: &OpenCheckpoint| serde_json::to_value(open.description.accumulation);
    let accumulation = match arguments.objects.is_empty() {
        true => differences("", &window(a)?, &window(b)?, None),
        false => Vec::new(),
    };
    Ok(Comparison {
        a: a.save.folder.display().to_string(),
        b: b.save.folder.display().to_string(),
        equal: accumulation.is_empty() && compared.values().all(ObjectComparison::is_equal),
        num_processes: [a.description.world_size, b.description.world_size],
        accumulation,
        objects: compared,
    })
}

/// The objects of both, or those of them that are `wanted`.
fn names_to_compare<'a>(
    [a, b]: [&'a BTreeMap<String, SavedObject>; 2],
    wanted: &[String],
) -> Result<BTreeSet<&'a String>, CheckpointError> {
    let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    if let Some(object) = wanted.iter().find(|object| !names.contains(object)) {
        let names = names.into_iter().cloned().collect();
        return Err(CheckpointError::NoSuchObject { object: object.clone(), names });
    }
    Ok(names.into_iter().filter(|name| wanted.is_empty() || wanted.contains(name)).collect())
}

fn side_of(is_in_a: bool) -> Side {
    if is_in_a { Side::A } else { Side::B }
}

struct Comparer<'a> {
    readers: [Reader<'a>; 2],
    tolerance: Option<f64>,
    /// Both runs had as many processes.
    same_processes: bool,
    bar: Progress,
}

impl Comparer<'_> {
    fn objects(&mut self, object: &str, both: [&SavedObject; 2]) -> Result<ObjectComparison, ReadError> {
        let mut compared = ObjectComparison { values: self.values(both), ..Default::default() };
        let names: BTreeSet<&String> = both[0].tensors.keys().chain(both[1].tensors.keys()).collect();
        compared.num_tensors = names.len() as u64;
        for name in names {
            let difference = match (both[0].tensors.get(name), both[1].tensors.get(name)) {
                (Some(a), Some(b)) => self.tensors(object, name, [a, b])?,
                (a, _) => Some(TensorDifference::OnlyIn(side_of(a.is_some()))),
            };
            if let Some(difference) = difference {
                compared.tensors.insert(name.clone(), difference);
            }
        }
        Ok(compared)
    }

    /// Those of rank 0, and of each rank that had other ones in either.
    fn values(&self, [a, b]: [&SavedObject; 2]) -> Vec<ValueDifference> {
        let mut found = differences("", &self.of_run(&a.values), &self.of_run(&b.values), self.tolerance);
        for &rank in a.values_of_ranks.keys().chain(b.values_of_ranks.keys()).collect::<BTreeSet<_>>() {
            let of_rank =
                |object: &SavedObject| object.values_of_ranks.get(&rank).map_or(Value::Null, |it| self.of_run(it));
            found.extend(differences(&format!("rank {rank}"), &of_rank(a), &of_rank(b), self.tolerance));
        }
        found
    }

    /// Values without those that belong to the number of processes, if that is another one on the other side.
    fn of_run(&self, values: &Value) -> Value {
        let mut values = values.clone();
        if let (false, Some(object)) = (self.same_processes, values.as_object_mut())
            && object.remove(GRADIENT_ORDER).is_some()
            && object.is_empty()
        {
            return Value::Null;
        }
        values
    }

    fn tensors(
        &mut self,
        object: &str,
        name: &str,
        both: [&SavedTensor; 2],
    ) -> Result<Option<TensorDifference>, ReadError> {
        let [a, b] = both;
        if a.dtype != b.dtype {
            return Ok(Some(TensorDifference::Dtypes(both.map(|tensor| tensor.dtype.to_string()))));
        }
        if a.shape != b.shape {
            return Ok(Some(TensorDifference::Shapes(both.map(|tensor| tensor.shape.clone()))));
        }
        // Elements of less than a byte have no place of their own.
        let goes_by_element = both.iter().all(|it| it.is_elementwise && it.dtype.bitsize().is_multiple_of(8));
        let layouts = |tensor: &SavedTensor| tensor.pieces.iter().map(|it| it.layout.clone()).collect::<Vec<_>>();
        if !goes_by_element && layouts(a) != layouts(b) {
            return Ok(Some(TensorDifference::OtherPieces));
        }
        let mut bytes = Vec::new();
        for (side, tensor) in both.into_iter().enumerate() {
            let reader = &mut self.readers[side];
            let found = match goes_by_element {
                true => reader.bytes_of(object, name, tensor),
                false => reader.bytes_of_pieces(name, tensor),
            };
            bytes.push(found.map_err(|source| self.read_error(side, source))?);
        }
        let difference = self.numbers(a, bytes)?;
        Ok((difference.num_different > 0).then_some(TensorDifference::Numbers(difference)))
    }

    /// Block by block, so that no tensor has to fit into memory.
    fn numbers(&mut self, tensor: &SavedTensor, mut bytes: Vec<Bytes>) -> Result<Difference, ReadError> {
        let mut difference = Difference::default();
        let mut buffers = [vec![0; BLOCK_BYTES], vec![0; BLOCK_BYTES]];
        let mut rest = bytes.iter().map(Bytes::len).min().unwrap_or(0);
        if bytes.iter().any(|bytes| bytes.len() != rest) {
            // State in blocks of other sizes.
            difference.num_different += 1;
        }
        while rest > 0 {
            let now = rest.min(BLOCK_BYTES as u64) as usize;
            for (side, bytes) in bytes.iter_mut().enumerate() {
                let read = self.readers[side].read(bytes, &mut buffers[side][..now]);
                read.map_err(|source| self.read_error(side, source))?;
            }
            difference.add(tensor.dtype, [&buffers[0][..now], &buffers[1][..now]], self.tolerance);
            self.bar.inc(now as u64);
            rest -= now as u64;
        }
        Ok(difference)
    }

    fn read_error(&self, side: usize, source: Fault) -> ReadError {
        ReadError { folder: self.readers[side].folder().to_owned(), source }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::Changed;
    use super::super::sample::{save_over, write_sample};
    use super::*;

    #[test]
    fn a_save_meanwhile_is_no_difference() {
        let folder = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| folder.path().join(name));
        [&a, &b].into_iter().for_each(|folder| write_sample(folder, 1.0));
        let arguments = Arguments { a, b, objects: Vec::new(), tolerance: None, json: false };
        let opened = [&arguments.a, &arguments.b].map(|folder| open_checked(folder).unwrap());
        assert!(compare(&opened, &arguments).unwrap().equal);
        save_over(&arguments.b, 2.0);
        let error = compare(&opened, &arguments).unwrap_err();
        assert!(error.is::<Changed>(), "{error}");
    }
}
