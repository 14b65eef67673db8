//! Values that can be split between processes.

use crate::error::Result;
use accelerate_core::split::{common_length, split_between_processes};
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hash};
use tch::Tensor;

/// How [`PartialState::split_between_processes`](crate::PartialState::split_between_processes) shares.
///
/// ```
/// assert!(!accelerate::SplitOptions::default().apply_padding);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SplitOptions {
    /// Repeat the last item so that all shares have one length? Default false.
    pub apply_padding: bool,
}

/// What [`PartialState::split_between_processes`](crate::PartialState::split_between_processes) takes.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be split between processes",
    label = "has no `SplitBetweenProcesses`",
    note = "a `Vec`, a tensor (by its rows) and maps of these can"
)]
pub trait SplitBetweenProcesses: Sized {
    /// Number of items, or `None` for an empty map.
    fn num_items(&self) -> Result<Option<usize>>;

    /// The share of rank `rank` of `num_processes`.
    fn split_for(&self, rank: usize, num_processes: usize, options: SplitOptions) -> Result<Self>;
}

impl<T: Clone> SplitBetweenProcesses for Vec<T> {
    fn num_items(&self) -> Result<Option<usize>> {
        Ok(Some(self.len()))
    }

    fn split_for(&self, rank: usize, num_processes: usize, options: SplitOptions) -> Result<Self> {
        let split = split_between_processes(self.len(), num_processes, rank, options.apply_padding)?;
        Ok(split.indices().map(|index| self[index].clone()).collect())
    }
}

impl SplitBetweenProcesses for Tensor {
    fn num_items(&self) -> Result<Option<usize>> {
        Ok(Some(self.size().first().map_or(0, |rows| *rows as usize)))
    }

    fn split_for(&self, rank: usize, num_processes: usize, options: SplitOptions) -> Result<Self> {
        let rows = self.num_items()?.unwrap_or(0);
        let split = split_between_processes(rows, num_processes, rank, options.apply_padding)?;
        let indices: Vec<i64> = split.indices().map(|index| index as i64).collect();
        Ok(self.f_index_select(0, &Tensor::f_from_slice(&indices)?.f_to_device(self.device())?)?)
    }
}

macro_rules! map {
    ($($map:ident<$key:ident, V $(, $state:ident)?>;)*) => {$(
        impl<$key: Clone + ToString + Ord + Hash, V: SplitBetweenProcesses $(, $state: BuildHasher + Default)?>
            SplitBetweenProcesses for $map<$key, V $(, $state)?>
        {
            fn num_items(&self) -> Result<Option<usize>> {
                let mut lengths = Vec::with_capacity(self.len());
                for (key, value) in self {
                    if let Some(length) = value.num_items()? {
                        lengths.push((key.to_string(), length));
                    }
                }
                lengths.sort();
                Ok(common_length(lengths.iter().map(|(key, length)| (key.as_str(), *length)))?)
            }

            fn split_for(&self, rank: usize, num_processes: usize, options: SplitOptions) -> Result<Self> {
                self.num_items()?;
                self.iter()
                    .map(|(key, value)| Ok((key.clone(), value.split_for(rank, num_processes, options)?)))
                    .collect()
            }
        }
    )*};
}

map! {
    BTreeMap<K, V>;
    HashMap<K, V, S>;
}
