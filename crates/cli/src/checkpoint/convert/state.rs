//! What PyTorch has saved of an object, in one file or in parts.

use std::convert::Infallible;
use std::error::Error;
use std::path::Path;

use accelerate_core::weight_files::Plain;

use super::super::numbers::number;
use super::error::ConvertError;
use crate::progress::Progress;
use crate::weights::{Copier, Files, Sink, Tensor, Weights, WeightsError, open_nested};

/// What an optimizer of a run with FSDP is in, within its folder.
const OPTIMIZER: &str = "optimizer";
/// What the states of its parameters are in.
const STATE: &str = "state";

/// A value with tensors in it.
pub(super) struct State {
    pub(super) files: Files,
    pub(super) tensors: Vec<Tensor>,
    /// Its tensors are numbers of `tensors`.
    pub(super) value: Plain<usize>,
    /// What is saved beside it, by name.
    pub(super) beside: Vec<String>,
}

impl State {
    /// What is in a file of `torch.save`.
    pub(super) fn read(path: &Path) -> Result<Self, Box<dyn Error>> {
        let mut files = Files::default();
        let number = files.add(path.to_owned());
        let (file, _) = files.get(number)?;
        let value = Plain::read(file).map_err(|source| ConvertError::State { path: path.to_owned(), source })?;
        let mut tensors = Vec::new();
        let Ok(value) = value.try_map(&mut |stored| {
            tensors.push(Tensor::stored(String::new(), number, stored));
            Ok::<_, Infallible>(Plain::Tensor(tensors.len() - 1))
        });
        Ok(Self { files, tensors, value, beside: Vec::new() })
    }

    /// The same of an optimizer, which is a folder where FSDP has saved it in parts.
    pub(super) fn of_optimizer(path: &Path) -> Result<Self, Box<dyn Error>> {
        if !path.is_dir() {
            return Self::read(path);
        }
        let (Weights { files, tensors, .. }, saved) = open_nested(path)?;
        let absent = || {
            let reason =
                format!("it has no `{OPTIMIZER}`, in which save_state of Python Accelerate writes an optimizer");
            ConvertError::Values { path: path.to_owned(), reason }
        };
        let value = saved.get(OPTIMIZER).cloned().ok_or_else(absent)?;
        Ok(Self { files, tensors, value: with_state(value), beside: beside_optimizer(&saved) })
    }

    /// A part of the value with numbers for the tensors that have one element: PyTorch takes settings as either.
    pub(super) fn with_numbers(&mut self, value: Plain<usize>) -> Result<Plain<usize>, WeightsError> {
        value.try_map(&mut |place| match self.tensors.get(place) {
            Some(tensor) if tensor.shape.iter().all(|&size| size == 1) => {
                let mut bytes = Vec::new();
                let mut sink = Sink { output: &mut bytes, path: Path::new("") };
                Copier::new(&mut self.files, Progress::hidden()).copy(tensor, &mut sink)?;
                Ok(number(tensor.dtype, &bytes).unwrap_or(Plain::Tensor(place)))
            }
            _ => Ok(Plain::Tensor(place)),
        })
    }
}

/// The keys of what else is in the folder of an optimizer.
fn beside_optimizer(saved: &Plain<usize>) -> Vec<String> {
    let Plain::Dict(entries) = saved else { return Vec::new() };
    let key = |key: &Plain<usize>| if let Plain::Text(key) = key { key.clone() } else { key.kind() };
    entries.iter().map(|(found, _)| key(found)).filter(|key| key != OPTIMIZER).collect()
}

/// torch.distributed.checkpoint writes no dictionary that is empty, as the state of SGD without momentum is.
fn with_state(mut optimizer: Plain<usize>) -> Plain<usize> {
    let has_state = optimizer.get(STATE).is_some();
    if let (Plain::Dict(entries), false) = (&mut optimizer, has_state) {
        entries.push((Plain::text(STATE), Plain::Dict(Vec::new())));
    }
    optimizer
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[test]
    fn what_is_beside_an_optimizer_is_named() {
        let saved = |keys: &[&str]| Plain::dict(keys.iter().map(|key| (*key, Plain::None)));
        assert_eq!(beside_optimizer(&saved(&["optimizer"])), Vec::<String>::new());
        assert_eq!(beside_optimizer(&saved(&["model", "optimizer", "step"])), ["model", "step"]);
    }

    #[rstest]
    #[case::none(None, Plain::Dict(Vec::new()))]
    #[case::some(Some(Plain::Int(1)), Plain::Int(1))]
    fn an_optimizer_in_parts_has_a_state(#[case] found: Option<Plain<usize>>, #[case] wanted: Plain<usize>) {
        let groups = ("param_groups", Plain::List(Vec::new()));
        let optimizer = Plain::dict([groups].into_iter().chain(found.map(|state| (STATE, state))));
        assert_eq!(with_state(optimizer).get(STATE), Some(&wanted));
    }
}
