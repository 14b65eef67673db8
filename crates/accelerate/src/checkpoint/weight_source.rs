//! The tensors of a checkpoint, for whoever puts them into a model in a way of its own.

use super::load::{LoadOptions, mapped_names};
use super::source::Source;
use crate::error::Result;
use accelerate_core::layout::Layout;
use std::path::Path;
use tch::Tensor;

/// Weights in files of any format, of which nothing but headers has been read.
#[derive(Debug)]
pub(crate) struct WeightSource {
    source: Source,
    names: Vec<(String, Vec<i64>)>,
}

impl WeightSource {
    pub(crate) fn open(path: &Path, options: &LoadOptions) -> Result<Self> {
        let source = Source::open(path)?;
        let names = mapped_names(&source, options)?;
        Ok(Self { source, names })
    }

    /// The single file, the index, or the metadata of a folder.
    pub(crate) fn path(&self) -> &Path {
        &self.source.path
    }

    /// Names, as `key_map` has them, and shapes, file by file in the order of their data.
    pub(crate) fn tensors(&self) -> &[(String, Vec<i64>)] {
        &self.names
    }

    /// Reads one of them to the CPU.
    pub(crate) fn read(&mut self, position: usize) -> Result<Tensor> {
        let (name, shape, file) = &self.source.tensors[position];
        let full = Layout::full(shape.iter().map(|&size| size.max(0) as usize).collect::<Vec<_>>());
        Ok(self.source.files[*file].read_elements(name, &full)?.f_reshape(shape)?)
    }

    pub(crate) fn num_bytes_read(&self) -> u64 {
        self.source.num_bytes_read()
    }
}
