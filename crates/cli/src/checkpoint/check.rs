//! Whether what files hold is what the description of a checkpoint, or the index of a model, says of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use accelerate_core::checkpoint::{Checkpoint, DESCRIPTION, SavedPiece, SavedTensor};
use accelerate_core::layout::Layout;
use accelerate_core::weight_files::{EXTENSION, Header, HeaderEntry, Index, SaveManifest};

use super::error::{Fault, Problem};

/// Everything that contradicts the description. `headers` are those of the weight files that could be read.
pub(super) fn check_description(
    description: &Checkpoint,
    manifest: &SaveManifest,
    headers: &BTreeMap<String, Header>,
) -> Vec<Fault> {
    let mut faults = check_files(description, manifest);
    let mut described: HashMap<&str, BTreeSet<&str>> = HashMap::new();
    for (object_name, object) in &description.objects {
        for (name, tensor) in &object.tensors {
            let mut is_sound = true;
            for piece in &tensor.pieces {
                let file = description.files.get(piece.file).map_or(DESCRIPTION, String::as_str);
                described.entry(file).or_default().insert(name);
                match headers.get(file).map(|header| check_piece(header.get(name), name, tensor, piece)) {
                    Some(Ok(())) => continue,
                    Some(Err(problem)) => faults.push(problem.at(file)),
                    // What is wrong with the file has been said.
                    None => {}
                }
                is_sound = false;
            }
            if let (true, Err(problem)) = (is_sound, check_coverage(object_name, name, tensor)) {
                faults.push(problem.at(DESCRIPTION));
            }
        }
    }
    for (file, header) in headers.iter().filter(|(file, _)| description.files.contains(file)) {
        let known = described.get(file.as_str());
        let unknown = |entry: &&HeaderEntry| known.is_none_or(|known| !known.contains(entry.name.as_str()));
        let names: Vec<String> = header.entries().iter().filter(unknown).map(|entry| entry.name.clone()).collect();
        if !names.is_empty() {
            faults.push(Problem::OtherTensors { names }.at(file));
        }
    }
    faults
}

/// The files that the description and the manifest list.
fn check_files(description: &Checkpoint, manifest: &SaveManifest) -> Vec<Fault> {
    let mut faults = Vec::new();
    let listed: BTreeSet<&str> = manifest.files.iter().map(|file| file.name.as_str()).collect();
    for file in &description.files {
        if !listed.contains(file.as_str()) {
            faults.push(Problem::NotListed { by: "the description" }.at(file));
        }
        let world_size = description.world_size;
        if let Some((rank, of)) = rank_in(file).filter(|&(rank, of)| of != world_size || rank >= of) {
            faults.push(Problem::OtherWorld { rank, of, world_size }.at(file));
        }
    }
    let described: BTreeSet<&str> = description.files.iter().map(String::as_str).collect();
    let suffix = format!(".{EXTENSION}");
    let unknown = listed.iter().filter(|name| name.ends_with(&suffix) && !described.contains(*name));
    faults.extend(unknown.map(|name| Problem::NotDescribed.at(*name)));
    faults
}

/// Which rank of how many wrote a file of this name: `model.rank-00000-of-00002.safetensors`.
pub(super) fn rank_in(file: &str) -> Option<(usize, usize)> {
    let (_, ranks) = file.strip_suffix(EXTENSION)?.strip_suffix('.')?.rsplit_once(".rank-")?;
    let (rank, of) = ranks.split_once("-of-")?;
    Some((rank.parse().ok()?, of.parse().ok()?))
}

/// Whether a piece in its file is what the description says of it.
pub(super) fn check_piece(
    found: Option<&HeaderEntry>,
    name: &str,
    saved: &SavedTensor,
    piece: &SavedPiece,
) -> Result<(), Problem> {
    let name = name.to_owned();
    let Some(found) = found else { return Err(Problem::NoSuchTensor { name, by: "the description" }) };
    if found.dtype != saved.dtype {
        return Err(Problem::OtherDtype { name, found: found.dtype, wanted: saved.dtype });
    }
    let wanted = match &piece.layout {
        None if found.shape != saved.shape => format!("{:?}", saved.shape),
        Some(layout) if saved.is_elementwise && found.shape != [layout.numel()] => layout.to_string(),
        _ => return Ok(()),
    };
    Err(Problem::OtherShape { name, found: found.shape.clone(), wanted })
}

/// Whether each element is in exactly one piece. The pieces are in their files, so that their sizes are true.
pub(super) fn check_coverage(object: &str, name: &str, saved: &SavedTensor) -> Result<(), Problem> {
    let names = || (object.to_owned(), name.to_owned());
    let twice = || {
        let (object, name) = names();
        Problem::Twice { object, name }
    };
    let layouts: Vec<&Layout> = saved.pieces.iter().filter_map(|piece| piece.layout.as_ref()).collect();
    if layouts.len() < saved.pieces.len() {
        return if saved.pieces.len() == 1 { Ok(()) } else { Err(twice()) };
    }
    if !saved.is_elementwise {
        let different: BTreeSet<String> = layouts.iter().map(|layout| layout.to_string()).collect();
        return if different.len() < layouts.len() { Err(twice()) } else { Ok(()) };
    }
    let full = Layout::full(saved.shape.clone());
    if let Err(missing) = full.copies_from(layouts.iter().copied()) {
        let (object, name) = names();
        return Err(Problem::NotCovered { object, name, missing });
    }
    let num_saved = layouts.iter().fold(0, |sum: usize, layout| sum.saturating_add(layout.numel()));
    if num_saved == full.numel() { Ok(()) } else { Err(twice()) }
}

/// Whether each tensor of an index is in the file that it names.
pub(super) fn check_index(index: &Index, headers: &BTreeMap<String, Header>, manifest: &SaveManifest) -> Vec<Fault> {
    let mut faults = Vec::new();
    let listed: BTreeSet<&str> = manifest.files.iter().map(|file| file.name.as_str()).collect();
    for file in index.files().into_iter().filter(|file| !listed.contains(file)) {
        faults.push(Problem::NotListed { by: "the index" }.at(file));
    }
    for (name, file) in &index.weight_map {
        if headers.get(file).is_some_and(|header| header.get(name).is_none()) {
            faults.push(Problem::NoSuchTensor { name: name.clone(), by: "the index" }.at(file));
        }
    }
    faults
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;
    use safetensors::Dtype;

    #[rstest]
    #[case("model.rank-00001-of-00002.safetensors", Some((1, 2)))]
    #[case("a.rank-0-of-1.b.rank-00003-of-00004.safetensors", Some((3, 4)))]
    #[case("model-00001-of-00002.safetensors", None)]
    #[case("model.rank-x-of-00002.safetensors", None)]
    #[case("model.rank-00001-of-00002.json", None)]
    fn ranks_are_read_from_names(#[case] file: &str, #[case] wanted: Option<(usize, usize)>) {
        assert_eq!(rank_in(file), wanted);
    }

    fn tensor(shape: &[usize], layouts: Vec<Option<Layout>>) -> SavedTensor {
        let pieces = layouts.into_iter().map(|layout| SavedPiece { file: 0, layout }).collect();
        SavedTensor { dtype: Dtype::F32, shape: shape.to_vec(), is_elementwise: true, pieces }
    }

    #[rstest]
    #[case(&[None], "")]
    #[case(&[None, None], "more than one file")]
    #[case(&[Some(0..6)], "")]
    #[case(&[Some(0..4), Some(4..6)], "")]
    #[case(&[Some(4..6), Some(0..4)], "")]
    #[case(&[Some(0..4), Some(3..6)], "more than one file")]
    #[case(&[Some(0..4), Some(5..6)], "4..5")]
    #[case(&[Some(1..6)], "0..1")]
    #[case(&[Some(0..6), None], "more than one file")]
    fn each_element_is_in_one_piece(#[case] ranges: &[Option<std::ops::Range<usize>>], #[case] words: &str) {
        let layout = |range: &std::ops::Range<usize>| Layout::full([2, 3]).flat(range.clone()).unwrap();
        let layouts = ranges.iter().map(|range| range.as_ref().map(layout)).collect();
        match check_coverage("model", "weight", &tensor(&[2, 3], layouts)) {
            Ok(()) => assert!(words.is_empty(), "{ranges:?}"),
            Err(problem) => assert!(!words.is_empty() && problem.to_string().contains(words), "{problem}"),
        }
    }
}
