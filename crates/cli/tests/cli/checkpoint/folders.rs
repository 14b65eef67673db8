//! Folders as `save_state` and `save_model` write them, made by hand: the types are those of the library, the bytes are not.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use accelerate_core::checkpoint::{Checkpoint, DESCRIPTION, HeldTensor, STEM, SavedObject, assign};
use accelerate_core::layout::Layout;
use accelerate_core::weight_files::{Checksum, Header, SaveManifest, SavedFile, sample_blocks};
use safetensors::Dtype;
use serde_json::Value;

/// What each rank has of a tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Division {
    Whole,
    /// Neighbouring elements, as FSDP divides parameters.
    Flat,
    /// Neighbouring columns, as tensor parallelism does.
    Columns,
}

/// A tensor, by the bytes of its elements.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) object: &'static str,
    pub(crate) name: &'static str,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
    pub(crate) division: Division,
}

impl Tensor {
    pub(crate) fn f32(object: &'static str, name: &'static str, numbers: &[f32]) -> Self {
        let bytes = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        Self { object, name, dtype: Dtype::F32, shape: vec![numbers.len()], bytes, division: Division::Whole }
    }

    pub(crate) fn of_shape(self, shape: &[usize]) -> Self {
        Self { shape: shape.to_vec(), ..self }
    }

    pub(crate) fn sharded(self) -> Self {
        Self { division: Division::Flat, ..self }
    }

    pub(crate) fn in_columns(self) -> Self {
        Self { division: Division::Columns, ..self }
    }

    fn layout(&self, rank: usize, world_size: usize) -> Option<Layout> {
        let own = |size: usize| size * rank / world_size..size * (rank + 1) / world_size;
        let full = Layout::full(self.shape.clone());
        match self.division {
            Division::Whole => None,
            Division::Flat => full.flat(own(self.shape.iter().product())).ok(),
            Division::Columns => full.slice(1, own(self.shape[1])).ok(),
        }
    }

    fn held(&self, rank: usize, world_size: usize) -> HeldTensor {
        let layout = self.layout(rank, world_size);
        let shape = layout.as_ref().map_or(self.shape.clone(), |layout| vec![layout.numel()]);
        let (object, name) = (self.object.to_owned(), self.name.to_owned());
        HeldTensor { object, name, dtype: self.dtype, shape, layout, may_differ: false }
    }

    fn bytes_of(&self, layout: Option<&Layout>) -> Vec<u8> {
        let size = self.dtype.bitsize() / 8;
        match layout {
            None => self.bytes.clone(),
            Some(layout) => {
                layout.runs().flat_map(|run| self.bytes[run.start * size..run.end * size].to_vec()).collect()
            }
        }
    }
}

/// What a run has besides tensors, by object.
pub(crate) type Values = BTreeMap<&'static str, Value>;

/// Writes a completed checkpoint.
pub(crate) fn write_checkpoint(folder: &Path, world_size: usize, tensors: &[Tensor], values: &Values) -> Checkpoint {
    fs::create_dir_all(folder).unwrap();
    let held: Vec<Vec<HeldTensor>> =
        (0..world_size).map(|rank| tensors.iter().map(|tensor| tensor.held(rank, world_size)).collect()).collect();
    let assignment = assign(&held).unwrap();
    let mut checkpoint = Checkpoint::new(world_size);
    checkpoint.files = assignment.files.iter().map(|file| file.name.clone()).collect();
    for (place, file) in assignment.files.iter().enumerate() {
        let own = file.tensors.iter().map(|name| {
            let tensor = tensors.iter().find(|it| it.object == file.object && it.name == name).unwrap();
            let saved = &assignment.tensors[&file.object][name];
            let piece = saved.pieces.iter().find(|piece| piece.file == place).unwrap();
            let layout = piece.layout.as_ref();
            let shape = layout.map_or(tensor.shape.clone(), |layout| vec![layout.numel()]);
            (tensor.name, tensor.dtype, shape, tensor.bytes_of(layout))
        });
        fs::write(folder.join(&file.name), weight_file(&own.collect::<Vec<_>>())).unwrap();
    }
    for (object, tensors) in assignment.tensors {
        checkpoint.objects.insert(object, SavedObject { tensors, ..Default::default() });
    }
    for (object, values) in values {
        checkpoint.objects.entry((*object).to_owned()).or_default().values = values.clone();
    }
    describe(folder, &checkpoint);
    checkpoint
}

/// Writes a description, and a manifest of all files in the folder.
pub(crate) fn describe(folder: &Path, checkpoint: &Checkpoint) {
    describe_as(folder, &checkpoint.to_json().unwrap());
}

pub(crate) fn describe_as(folder: &Path, json: &str) {
    fs::write(folder.join(DESCRIPTION), json).unwrap();
    write_manifest(folder, STEM);
}

/// Writes a manifest of all files in the folder.
pub(crate) fn write_manifest(folder: &Path, stem: &str) {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| SaveManifest::stem(name).is_none());
    names.sort();
    let files = names.iter().map(|name| saved_file(folder, name)).collect();
    put_manifest(folder, stem, &SaveManifest::new(files));
}

pub(crate) fn put_manifest(folder: &Path, stem: &str, manifest: &SaveManifest) {
    fs::write(folder.join(SaveManifest::file_name(stem)), manifest.to_json().unwrap()).unwrap();
}

pub(crate) fn manifest(folder: &Path, stem: &str) -> SaveManifest {
    SaveManifest::from_json(&fs::read_to_string(folder.join(SaveManifest::file_name(stem))).unwrap(), stem).unwrap()
}

fn saved_file(folder: &Path, name: &str) -> SavedFile {
    let content = fs::read(folder.join(name)).unwrap();
    let mut sample = Checksum::new();
    for block in sample_blocks(content.len() as u64) {
        sample.update(&content[block.start as usize..block.end as usize]);
    }
    SavedFile {
        name: name.to_owned(),
        temporary_name: None,
        bytes: content.len() as u64,
        xxh3_128: Checksum::of(&content).to_string(),
        sample: sample.to_string(),
    }
}

/// Gives files of a completed save the temporary names that they had before.
pub(crate) fn interrupt(folder: &Path, stem: &str, names: &[&str]) {
    let mut manifest = manifest(folder, stem);
    for (place, file) in manifest.files.iter_mut().enumerate() {
        let temporary = format!(".{stem}.x{place}.saving");
        if names.contains(&file.name.as_str()) {
            fs::rename(folder.join(&file.name), folder.join(&temporary)).unwrap();
        }
        file.temporary_name = Some(temporary);
    }
    put_manifest(folder, stem, &manifest);
}

/// A safetensors file with these tensors.
pub(crate) fn weight_file(tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)]) -> Vec<u8> {
    let (mut items, mut data) = (Vec::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let start = data.len();
        data.extend(bytes);
        let end = data.len();
        items.push(format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#));
    }
    let header = format!("{{{}}}", items.join(","));
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
}

/// Gives a safetensors file these notes about itself in place of those that it has.
pub(crate) fn put_notes(path: &Path, notes: &[(&str, &str)]) {
    let file = fs::read(path).unwrap();
    let header = Header::read(&mut file.as_slice(), file.len() as u64).unwrap();
    let tensors = header.entries().iter().map(|it| (it.name.as_str(), it.dtype, it.shape.clone()));
    let notes = notes.iter().map(|(key, note)| ((*key).to_owned(), (*note).to_owned())).collect();
    let beginning = Header::write(tensors, &notes).unwrap();
    fs::write(path, [&beginning, &file[header.data_at() as usize..]].concat()).unwrap();
}

/// The notes that a safetensors file has about itself.
pub(crate) fn notes_in(path: &Path) -> BTreeMap<String, String> {
    let file = fs::read(path).unwrap();
    Header::read_with_notes(&mut file.as_slice(), file.len() as u64).unwrap().1
}
