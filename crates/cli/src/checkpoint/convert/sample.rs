//! Small checkpoints for tests of what happens while they are read.

use std::fs;
use std::path::Path;

use accelerate_core::checkpoint::Checkpoint;
use safetensors::Dtype;

use super::objects::{Object, write_checkpoint};
use super::staged::Staged;
use crate::progress::Progress;
use crate::weights::{Data, Tensor, Weights};

/// Writes a checkpoint with one model, all of whose elements are this number.
pub(crate) fn write_sample(folder: &Path, number: f32) {
    let data = Data::Bytes([number.to_le_bytes(); 4].concat());
    let tensors = vec![Tensor { name: "weight".to_owned(), dtype: Dtype::F32, shape: vec![4], data }];
    let weights = Weights { tensors, ..Weights::default() };
    let object = Object { name: "model".to_owned(), weights, ..Object::default() };
    let mut staged = Staged::create(Path::new("/nowhere"), folder).unwrap();
    write_checkpoint(Checkpoint::new(1), vec![object], &mut staged, &Progress::hidden()).unwrap();
    staged.commit().unwrap();
}

/// Gives the files of such a checkpoint the names of those that are there, as a save of a run does.
pub(crate) fn save_over(folder: &Path, number: f32) {
    let parent = tempfile::tempdir().unwrap();
    let new = parent.path().join("new");
    write_sample(&new, number);
    for name in ["model.safetensors", "checkpoint.json", "checkpoint.manifest.json"] {
        fs::copy(new.join(name), folder.join(".new")).unwrap();
        fs::rename(folder.join(".new"), folder.join(name)).unwrap();
    }
}
