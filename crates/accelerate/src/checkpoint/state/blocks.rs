//! State in blocks that was saved for other elements than this rank keeps: of blocks that are not cut it gets codes and scales as they
//! were saved, and of others the numbers that these stand for.

use super::super::reader::WeightReader;
use super::load::{CopiedFrom, OpenCheckpoint, Source, flat, signed};
use super::save::layout_of;
use crate::error::{CheckpointError, Result};
use accelerate_core::checkpoint::{
    BLOCK_ELEMENTS, FromBlocks, SavedTensor, blocks_of, from_blocks, num_blocks, scale_name,
};
use accelerate_core::layout::{Copied, Layout};
use accelerate_core::weight_files::shown;
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::ops::Range;
use tch::{Kind, Tensor};

/// Makes numbers of those tensors of an object's state that are codes in blocks.
pub(crate) type Dequantize<'a> = dyn Fn(BTreeMap<String, Tensor>) -> Result<BTreeMap<String, Tensor>> + 'a;

/// How a tensor of state in blocks comes to this rank, if not as any other tensor does.
pub(super) enum InBlocks {
    /// Block by block.
    Unchanged(Source),
    /// As numbers.
    Numbers(Tensor),
    /// Not at all: scales of what are numbers now.
    Left,
}

/// Elements that were saved together: their codes and their scales.
struct Piece {
    layout: Layout,
    codes_file: usize,
    scales_file: usize,
}

/// State in blocks by its names.
#[derive(Clone, Copy)]
struct Names<'a> {
    codes: &'a str,
    scales: &'a str,
}

impl OpenCheckpoint {
    /// Those tensors of an object that are in blocks of other elements than this rank keeps, by name.
    pub(super) fn in_blocks(
        &mut self,
        object: &str,
        saved: &BTreeMap<String, SavedTensor>,
        layouts: &BTreeMap<String, Layout>,
        dequantize: &Dequantize<'_>,
    ) -> Result<BTreeMap<String, InBlocks>> {
        let mut found = BTreeMap::new();
        // Of what has not an element for each one of its layouts, no header says how long the layouts may be.
        let are_codes = |tensor: &SavedTensor| tensor.dtype == Dtype::U8 && tensor.is_elementwise;
        for (name, codes) in saved.iter().filter(|(_, tensor)| are_codes(tensor)) {
            let scales = scale_name(name).and_then(|scales| saved.get_key_value(&scales));
            let Some((scales_name, scales)) = scales.filter(|(_, tensor)| tensor.dtype == Dtype::F32) else { continue };
            let own = layout_of(object, layouts, name);
            let has_own = |tensor: &SavedTensor| tensor.pieces.iter().any(|piece| piece.layout.as_ref() == own);
            let wanted = own.cloned().unwrap_or_else(|| Layout::full(codes.shape.clone()));
            // The same elements are taken as they are. Of another shape, the optimizer says so.
            if has_own(codes) && has_own(scales) || *wanted.shape() != *codes.shape {
                continue;
            }
            let names = Names { codes: name, scales: scales_name };
            let pieces = self.pieces(names, codes, scales)?;
            let shape = if own.is_some() { flat(&wanted) } else { signed(&codes.shape) };
            let how = from_blocks(&wanted, pieces.iter().map(|piece| &piece.layout));
            let (codes, scales) = match how.map_err(|missing| self.missing(name, &missing))? {
                FromBlocks::Unchanged { codes, scales } => {
                    let codes = copies(codes, |source| pieces[source].codes_file);
                    let scales = copies(scales, |source| pieces[source].scales_file);
                    let codes = Source { kind: Kind::Uint8, shape, copies: codes };
                    let scales =
                        Source { kind: Kind::Float, shape: vec![num_blocks(wanted.numel()) as i64], copies: scales };
                    (InBlocks::Unchanged(codes), InBlocks::Unchanged(scales))
                }
                FromBlocks::Anew(copies) => {
                    let numbers = self.numbers(names, &pieces, &copies, &wanted, dequantize)?;
                    (InBlocks::Numbers(numbers.f_view(&*shape)?), InBlocks::Left)
                }
            };
            found.insert(name.clone(), codes);
            found.insert(scales_name.clone(), scales);
        }
        Ok(found)
    }

    /// Codes and scales that go together, compared with the headers of their files.
    fn pieces(&mut self, names: Names<'_>, codes: &SavedTensor, scales: &SavedTensor) -> Result<Vec<Piece>> {
        let mut pieces = Vec::with_capacity(codes.pieces.len());
        for piece in &codes.pieces {
            self.check(names.codes, codes, piece)?;
            let layout = piece.layout.clone().unwrap_or_else(|| Layout::full(codes.shape.clone()));
            let Some(of_scales) = scales.pieces.iter().find(|scales| scales.layout == piece.layout) else {
                let reason = format!("scales of {layout} of `{}` are in no file", shown(names.codes));
                return Err(self.damaged(&self.description_path(), reason));
            };
            let (codes_file, scales_file) = (piece.file, of_scales.file);
            let wanted = [num_blocks(layout.numel())];
            let file = self.file(scales_file)?;
            if !file.get(names.scales).is_some_and(|found| found.dtype == Dtype::F32 && found.shape == wanted) {
                let (path, name) = (file.path().to_owned(), shown(names.scales));
                let reason = format!("`{name}` is not the scales of {layout}, {wanted:?} numbers of type F32");
                return Err(self.damaged(&path, reason));
            }
            pieces.push(Piece { layout, codes_file, scales_file });
        }
        Ok(pieces)
    }

    /// The `wanted` elements as numbers, flat.
    fn numbers(
        &mut self,
        names: Names<'_>,
        pieces: &[Piece],
        copies: &[Copied],
        wanted: &Layout,
        dequantize: &Dequantize<'_>,
    ) -> Result<Tensor> {
        let Some(first) = pieces.first() else { return Err(self.missing(names.codes, &(0..wanted.full_numel()))) };
        let numbers = self.file(first.codes_file)?.new_tensor(names.codes, wanted.numel(), Kind::Float)?;
        for Copied { source, from, to } in copies {
            let Piece { layout, codes_file, scales_file } = &pieces[*source];
            let blocks = blocks_of(from);
            let elements = blocks.start * BLOCK_ELEMENTS..(blocks.end * BLOCK_ELEMENTS).min(layout.numel());
            let codes = self.elements(*codes_file, names.codes, &elements, Kind::Uint8)?;
            let scales = self.elements(*scales_file, names.scales, &blocks, Kind::Float)?;
            let tensors = BTreeMap::from([(names.codes.to_owned(), codes), (names.scales.to_owned(), scales)]);
            let found = dequantize(tensors)?.remove(names.codes);
            let found =
                found.filter(|found| found.numel() == elements.len() && found.f_kind().ok() == Some(Kind::Float));
            let Some(found) = found else {
                let (path, name) = (self.description_path(), shown(names.codes));
                return Err(CheckpointError::InBlocks { path, name, wanted: wanted.to_string() }.into());
            };
            let first = (from.start - elements.start) as i64;
            let part = found.f_view([-1])?.f_narrow(0, first, from.len() as i64)?;
            numbers.f_narrow(0, *to as i64, from.len() as i64)?.f_copy_(&part)?;
        }
        Ok(numbers)
    }

    fn elements(&mut self, file: usize, name: &str, elements: &Range<usize>, kind: Kind) -> Result<Tensor> {
        let file = self.file(file)?;
        let tensor = file.new_tensor(name, elements.len(), kind)?;
        file.read_into(name, elements.start, &tensor)?;
        Ok(tensor)
    }
}

fn copies(copies: Vec<Copied>, file: impl Fn(usize) -> usize) -> Vec<CopiedFrom> {
    copies.into_iter().map(|Copied { source, from, to }| CopiedFrom { file: file(source), from, to }).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::{FolderWriters, PlannedSave, RunState};
    use super::*;
    use crate::checkpoint::IoMode;
    use crate::group::Group;
    use crate::session::ObjectState;
    use crate::{Accelerator, testing};
    use rstest::rstest;
    use tch::Device;

    const NUMEL: usize = 1000;
    /// Where the part of the second rank begins: in the middle of a block.
    const CUT: usize = 300;

    fn part(elements: Range<usize>) -> Layout {
        Layout::full([NUMEL]).flat(elements).unwrap()
    }

    fn codes(elements: Range<usize>) -> Tensor {
        Tensor::arange_start(elements.start as i64, elements.end as i64, (Kind::Int64, Device::Cpu))
            .remainder(250)
            .to_kind(Kind::Uint8)
    }

    /// Of the block `number` of a part that begins at `start`.
    fn scale(start: usize, number: usize) -> f64 {
        1.0 + start as f64 + 0.25 * number as f64
    }

    /// Two ranks save what `change` makes of their states of a parameter `w`.
    fn saved(change: impl Fn(usize, &mut ObjectState) + Sync) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        testing::ranks(2, Accelerator::builder().cpu(true), |accelerator| {
            let (rank, group) = (accelerator.process_index(), accelerator.group());
            let elements = [0..CUT, CUT..NUMEL][rank].clone();
            let scales: Vec<f32> =
                (0..num_blocks(elements.len())).map(|number| scale(elements.start, number) as f32).collect();
            let tensors = [("m.w", codes(elements.clone())), ("m_scale.w", Tensor::from_slice(&scales))];
            let mut state = ObjectState {
                tensors: tensors.map(|(name, tensor)| (name.to_owned(), tensor)).into(),
                layouts: BTreeMap::from([("w".to_owned(), part(elements))]),
                ..Default::default()
            };
            change(rank, &mut state);
            let objects = BTreeMap::from([("optimizer".to_owned(), state)]);
            let run = RunState { objects, shard_size: 2, ..Default::default() };
            PlannedSave::new(run, group, folder.path(), FolderWriters(0..2))?.write(group, IoMode::Buffered)
        })
        .unwrap();
        folder
    }

    /// A code is worth its number times its scale.
    fn dequantize(mut tensors: BTreeMap<String, Tensor>) -> Result<BTreeMap<String, Tensor>> {
        if let Some(scales) = tensors.remove("m_scale.w") {
            let codes = tensors["m.w"].to_kind(Kind::Float);
            let each = scales.repeat_interleave_self_int(BLOCK_ELEMENTS as i64, 0, None).narrow(0, 0, codes.size()[0]);
            tensors.insert("m.w".to_owned(), codes * each);
        }
        Ok(tensors)
    }

    fn load(folder: &tempfile::TempDir, own: Option<Layout>, dequantize: &Dequantize<'_>) -> Result<ObjectState> {
        let group = Group::single_process();
        let mut checkpoint = OpenCheckpoint::open(&group, folder.path(), &FolderWriters(0..1))?;
        let layouts = own.map(|own| ("w".to_owned(), own)).into_iter().collect();
        Ok(checkpoint.object("optimizer", &layouts, &BTreeMap::new(), (0, 1), dequantize)?.unwrap_or_default())
    }

    fn value(element: usize) -> f64 {
        let start = if element < CUT { 0 } else { CUT };
        (element % 250) as f64 * scale(start, (element - start) / BLOCK_ELEMENTS)
    }

    #[rstest]
    #[case::all(0..NUMEL, true)]
    #[case::over_the_cut(100..700, false)]
    #[case::within_one_part(310..900, false)]
    fn what_cuts_blocks_becomes_numbers(#[case] elements: Range<usize>, #[case] is_whole: bool) {
        let folder = saved(|_, _| {});
        let state = load(&folder, (!is_whole).then(|| part(elements.clone())), &dequantize).unwrap();
        assert_eq!(state.tensors.keys().collect::<Vec<_>>(), ["m.w"]);
        let found: Vec<f64> = Vec::try_from(state.tensors["m.w"].to_kind(Kind::Double)).unwrap();
        assert_eq!(found, elements.map(value).collect::<Vec<_>>());
    }

    #[rstest]
    #[case::the_same(CUT..NUMEL)]
    #[case::whole_blocks(CUT + 256..CUT + 512)]
    #[case::the_end(CUT + 256..NUMEL)]
    #[case::out_of_one_block(10..20)]
    #[case::nothing(5..5)]
    fn what_does_not_cut_blocks_stays_codes_and_scales(#[case] elements: Range<usize>) {
        let folder = saved(|_, _| {});
        let state = load(&folder, Some(part(elements.clone())), &dequantize).unwrap();
        assert_eq!(state.tensors["m.w"], codes(elements.clone()));
        let numbers = dequantize(state.tensors).unwrap();
        let found: Vec<f64> = Vec::try_from(numbers["m.w"].to_kind(Kind::Double)).unwrap();
        assert_eq!(found, elements.map(value).collect::<Vec<_>>());
    }

    #[rstest]
    #[case::too_few_scales("is not the scales of", &|_, state: &mut ObjectState| {
        state.tensors.insert("m_scale.w".to_owned(), Tensor::from_slice(&[1f32; 7]));
    })]
    #[case::scales_of_another_part("in no file", &|rank, state: &mut ObjectState| {
        if rank == 1 {
            state.tensors.remove("m_scale.w");
        }
    })]
    #[case::codes_without_scales("is state in blocks", &|_, state: &mut ObjectState| {
        state.tensors.insert("m_scale.w".to_owned(), Tensor::from_slice(&[1f64; 7]));
    })]
    fn what_does_not_go_together_is_told(
        #[case] wanted: &str,
        #[case] change: &(dyn Fn(usize, &mut ObjectState) + Sync),
    ) {
        let folder = saved(change);
        let error = load(&folder, Some(part(100..700)), &dequantize).unwrap_err().to_string();
        assert!(error.contains(wanted) && (error.contains("`m_scale.w`") || error.contains("`m.w`")), "{error}");
    }

    /// Their layouts are compared with no header, and may say any number of elements.
    #[test]
    fn codes_that_do_not_go_element_by_element_are_not_put_together() {
        let folder = saved(|_, _| {});
        let group = Group::single_process();
        let mut checkpoint = OpenCheckpoint::open(&group, folder.path(), &FolderWriters(0..1)).unwrap();
        let tensors = &mut checkpoint.description.objects.get_mut("optimizer").unwrap().tensors;
        tensors.get_mut("m.w").unwrap().is_elementwise = false;
        let layouts = BTreeMap::from([("w".to_owned(), part(100..700))]);
        let loaded = checkpoint.object("optimizer", &layouts, &BTreeMap::new(), (0, 1), &dequantize);
        let error = loaded.unwrap_err().to_string();
        assert!(error.contains("`m.w` is state in blocks"), "{error}");
    }

    /// Of an optimizer that does not know what its codes stand for.
    #[test]
    fn an_optimizer_that_has_no_numbers_for_its_codes_is_told() {
        let folder = saved(|_, _| {});
        let error = load(&folder, Some(part(100..700)), &Ok).unwrap_err().to_string();
        assert!(error.contains("`m.w` is state in blocks"), "{error}");
    }
}
