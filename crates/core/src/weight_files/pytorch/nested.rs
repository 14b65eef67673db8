//! The dictionaries and lists that everything in a checkpoint of `torch.distributed.checkpoint` was in.
//!
//! Keys of the checkpoint are what was on the way to a tensor or a value, with dots between: `optimizer.param_groups.0.lr`. The
//! metadata keep that way for each key, so that names with dots in them are told apart.

use super::distributed::{Described, DistributedCheckpoint};
use super::pickle::{Data, Items, Pairs, Pickle};
use super::plain::{MOST_DEEP, Plain};
use crate::Result;
use crate::error::pytorch::{ContentsProblem, DistributedProblem as Problem, PytorchErrorKind as Kind};
use crate::weight_files::shown;
use std::collections::HashMap;
use std::ops::Range;

/// What stands for a tensor or a value in the state of a [`DistributedCheckpoint`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DistributedItem {
    /// A tensor, by its place in [`DistributedCheckpoint::tensors`].
    Tensor(usize),
    /// Something else, which `torch.save` has written into a file, by its place in [`DistributedCheckpoint::files`].
    Value {
        /// What the checkpoint calls it.
        key: String,
        /// Its file.
        file: usize,
        /// Where in the file it is.
        range: Range<u64>,
    },
}

impl DistributedCheckpoint {
    /// Reads the metadata, and what was saved as it was: dictionaries and lists of tensors and values.
    ///
    /// # Errors
    /// [`is_weight_files`](crate::Error::is_weight_files): as for [`DistributedCheckpoint::read`], or the metadata do not say
    /// what each key was in, or not where each value is.
    pub fn read_nested(metadata: &[u8]) -> Result<(Self, Plain<DistributedItem>)> {
        let pickle = Pickle::read(metadata)?;
        let Described { mut checkpoint, mut places, paths } = Described::read(&pickle)?;
        let paths = Paths::read(paths)?;
        let mut entries = Vec::with_capacity(checkpoint.tensors.len() + checkpoint.others.len());
        for (number, tensor) in checkpoint.tensors.iter().enumerate() {
            entries.push((paths.find(&tensor.key)?, DistributedItem::Tensor(number)));
        }
        for key in &checkpoint.others {
            let (file, range) = places.find_value(paths.own(key)?)?;
            entries.push((paths.find(key)?, DistributedItem::Value { key: key.clone(), file, range }));
        }
        places.check_apart()?;
        checkpoint.files = places.files;
        let state = nest(entries, 0)?;
        Ok((checkpoint, state))
    }
}

/// The key in a dictionary, or the place in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Step<'a> {
    Key(&'a str),
    Place(i64),
}

/// What is on the way to each key.
struct Paths<'a>(HashMap<&'a str, Items<'a>>);

impl<'a> Paths<'a> {
    fn read(paths: Option<Pairs<'a>>) -> Result<Self> {
        let mut of = HashMap::new();
        for (key, path) in paths.into_iter().flat_map(Pairs::iter) {
            let (Data::Text(key), Data::Tuple(path) | Data::List(path)) = (key.data(), path.data()) else {
                return Err(wrong("a key has no way that led to it"));
            };
            of.insert(key, path);
        }
        Ok(Self(of))
    }

    /// The key, for as long as the metadata.
    fn own(&self, key: &str) -> Result<&'a str> {
        self.0.get_key_value(key).map(|(key, _)| *key).ok_or_else(|| unsaid(key))
    }

    fn find(&self, key: &str) -> Result<Vec<Step<'a>>> {
        let path = self.0.get(key).ok_or_else(|| unsaid(key))?;
        if path.len() > MOST_DEEP {
            return Err(Kind::from(ContentsProblem::Deep { most: MOST_DEEP }).into());
        }
        let mut steps = Vec::with_capacity(path.len());
        // A key is its way, so that all ways together are no longer than the keys are.
        let mut rest = Some(key);
        for step in path.iter() {
            let (step, text) = match step.data() {
                Data::Text(text) => (Step::Key(text), text.to_owned()),
                Data::Int(place) => (Step::Place(place), place.to_string()),
                _ => return Err(unsaid(key)),
            };
            let after = rest.and_then(|rest| rest.strip_prefix(text.as_str())).ok_or_else(|| unsaid(key))?;
            rest = after.strip_prefix('.');
            if rest.is_none() && !after.is_empty() {
                return Err(unsaid(key));
            }
            steps.push(step);
        }
        if rest.is_some() { Err(unsaid(key)) } else { Ok(steps) }
    }
}

fn wrong(reason: &'static str) -> crate::Error {
    Kind::from(Problem::Structure(reason)).into()
}

fn unsaid(key: &str) -> crate::Error {
    Kind::from(Problem::NoPath { key: shown(key) }).into()
}

/// Makes up what these were in, of which so many steps are done already.
fn nest(mut entries: Vec<(Vec<Step<'_>>, DistributedItem)>, depth: usize) -> Result<Plain<DistributedItem>> {
    if entries.iter().any(|(path, _)| path.len() == depth) {
        return match (entries.pop(), entries.pop()) {
            (Some((_, item)), None) => Ok(Plain::Tensor(item)),
            _ => Err(wrong("what is a tensor or a value has others in it")),
        };
    }
    let mut number_of = HashMap::new();
    let mut groups: Vec<(Step<'_>, Vec<_>)> = Vec::new();
    for (path, item) in entries {
        let step = path[depth];
        let number = *number_of.entry(step).or_insert(groups.len());
        if number == groups.len() {
            groups.push((step, Vec::new()));
        }
        groups[number].1.push((path, item));
    }
    if groups.iter().all(|(step, _)| matches!(step, Step::Key(_))) {
        let entry = |(step, group)| {
            let Step::Key(key) = step else { return Err(wrong("a dictionary is a list as well")) };
            Ok((Plain::text(key), nest(group, depth + 1)?))
        };
        return groups.into_iter().map(entry).collect::<Result<_>>().map(Plain::Dict);
    }
    groups.sort_by_key(|(step, _)| *step);
    let item = |(place, (step, group)): (usize, (Step<'_>, Vec<_>))| match step {
        Step::Place(found) if usize::try_from(found) == Ok(place) => nest(group, depth + 1),
        _ => Err(wrong("a list has gaps, or is a dictionary as well")),
    };
    groups.into_iter().enumerate().map(item).collect::<Result<_>>().map(Plain::List)
}
