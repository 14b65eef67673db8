//! `accelerate merge-weights` on safetensors files that have notes about themselves.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use accelerate_core::checkpoint::STEM;
use accelerate_core::weight_files::{Index, shard_file_names};
use rstest::rstest;
use safetensors::Dtype;

use crate::checkpoint::folders::{Tensor, Values, notes_in, put_notes, weight_file, write_checkpoint, write_manifest};
use crate::support::{Finished, accelerate, finished};

type Notes<'a> = &'a [(&'a str, &'a str)];

fn merge(folder: &Path, words: &str) -> Finished {
    let mut command = accelerate();
    command.arg("merge-weights").args(words.split(' ')).current_dir(folder);
    finished(command)
}

/// A model in the folder `in`, in as many files as there are notes.
fn model(files: &[Notes<'_>]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    fs::create_dir(&input).unwrap();
    let mut index = Index::default();
    for (number, (name, notes)) in shard_file_names("model", files.len()).into_iter().zip(files).enumerate() {
        let tensor = format!("t{number}");
        fs::write(input.join(&name), weight_file(&[(tensor.as_str(), Dtype::U8, vec![1], vec![number as u8])]))
            .unwrap();
        put_notes(&input.join(&name), notes);
        index.weight_map.insert(tensor, name);
    }
    if files.len() > 1 {
        fs::write(input.join("model.safetensors.index.json"), index.to_json().unwrap()).unwrap();
    }
    folder
}

fn owned(notes: Notes<'_>) -> BTreeMap<String, String> {
    notes.iter().map(|(key, note)| ((*key).to_owned(), (*note).to_owned())).collect()
}

const ME: (&str, &str) = ("author", "me");
const PT: (&str, &str) = ("format", "pt");
const TF: (&str, &str) = ("format", "tf");

#[rstest]
#[case::none(&[&[][..]], &[PT], "")]
#[case::of_one_file(&[&[ME, ("licence", "é \"1\"")][..]], &[ME, PT, ("licence", "é \"1\"")], "")]
#[case::another_format(&[&[TF][..]], &[TF], "")]
#[case::alike(&[&[ME, PT][..], &[ME]], &[ME, PT], "")]
#[case::another_format_alike(&[&[TF][..], &[TF]], &[TF], "")]
#[case::different(&[&[ME, ("part", "1")][..], &[ME, ("part", "2"), ("last", "yes")]], &[ME, PT], "last, part")]
#[case::different_again(&[&[("part", "1")][..], &[("part", "2")], &[("part", "1")]], &[PT], "part")]
#[case::different_formats(&[&[TF][..], &[]], &[PT], "format")]
fn what_all_files_say_is_in_the_result(#[case] files: &[Notes<'_>], #[case] wanted: Notes<'_>, #[case] left: &str) {
    let folder = model(files);
    let ended = merge(folder.path(), "in out");
    ended.expect(0, &["in out/model.safetensors"]);
    assert_eq!(notes_in(&folder.path().join("out/model.safetensors")), owned(wanted));
    let told = format!("left out, because files differ in these notes about themselves: {left}\n");
    assert_eq!(ended.stderr.contains(&told), !left.is_empty(), "{}", ended.stderr);
    // In each file of several.
    merge(folder.path(), "in shards --max_shard_size 1B").expect(0, &[]);
    for name in shard_file_names("model", files.len()) {
        assert_eq!(notes_in(&folder.path().join("shards").join(name)), owned(wanted));
    }
}

#[test]
fn the_same_notes_are_the_same_bytes() {
    let keys = ["h", "g", "f", "e", "d", "c", "b", "a"];
    let folder = model(&[&keys.map(|key| (key, "note"))]);
    merge(folder.path(), "in out").expect(0, &[]);
    merge(folder.path(), "out again").expect(0, &[]);
    let [out, again] = ["out", "again"].map(|name| fs::read(folder.path().join(name).join("model.safetensors")));
    assert_eq!(out.unwrap(), again.unwrap());
}

/// The parts of ranks, and whole tensors in two files.
#[rstest]
#[case(Tensor::sharded, ["model.rank-00000-of-00002.safetensors", "model.rank-00001-of-00002.safetensors"])]
#[case(|tensor: Tensor| tensor, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])]
fn notes_of_a_checkpoint_are_kept(#[case] divide: fn(Tensor) -> Tensor, #[case] files: [&str; 2]) {
    let folder = tempfile::tempdir().unwrap();
    let own = folder.path().join("own");
    let tensors = ["a", "b"].map(|name| divide(Tensor::f32("model", name, &[1.0, 2.0])));
    write_checkpoint(&own, 2, &tensors, &Values::new());
    for (file, rank) in files.into_iter().zip(["0", "1"]) {
        put_notes(&own.join(file), &[ME, ("rank", rank)]);
    }
    write_manifest(&own, STEM);
    merge(folder.path(), "own out").expect(0, &["notes about themselves: rank\n"]);
    assert_eq!(notes_in(&folder.path().join("out/model.safetensors")), owned(&[ME, PT]));
}

/// What is in the result may be removed.
#[rstest]
#[case::of_one_file(&[&[ME, TF][..]], None)]
#[case::alike(&[&[ME][..], &[ME, PT]], None)]
#[case::different(&[&[ME][..], &[PT]], Some("not in the result: `author` in model-00001-of-00002.safetensors;"))]
#[case::different_formats(&[&[TF][..], &[PT]], Some("not in the result: `format` in model-00001-of-00002.safetensors;"))]
fn notes_that_would_be_lost_keep_the_folder(#[case] files: &[Notes<'_>], #[case] refused: Option<&str>) {
    let folder = model(files);
    let path = |name: &str| -> PathBuf { folder.path().join(name) };
    merge(folder.path(), "in out --remove_checkpoint_dir")
        .expect(if refused.is_some() { 1 } else { 0 }, &[refused.unwrap_or("in is removed")]);
    assert_eq!((path("in").exists(), path("out").exists()), (refused.is_some(), refused.is_none()));
}
