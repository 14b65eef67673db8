//! `accelerate merge-weights` on tensors that no file may have, more than one file may have, and on folders of projects.

use std::fs;
use std::path::Path;

use accelerate_core::weight_files::{Header, Index, Pickled, Plain, TorchArchive};
use rstest::rstest;
use safetensors::Dtype;

use crate::checkpoint::folders::{Tensor, Values, weight_file, write_checkpoint};
use crate::support::{Finished, accelerate, finished};

fn merge(folder: &Path, words: &str) -> Finished {
    let mut command = accelerate();
    command.arg("merge-weights").args(words.split(' ')).current_dir(folder);
    finished(command)
}

/// Writes `pytorch_model.bin` with tensors of these names, of one element each.
fn write_bin(folder: &Path, names: &[&str]) {
    fs::create_dir_all(folder).unwrap();
    let value = Plain::dict(names.iter().map(|name| (*name, Plain::Tensor(()))));
    let Pickled { bytes, tensors } = Pickled::new(&value, |()| (Dtype::F32, vec![1])).unwrap();
    let mut archive = TorchArchive::new(Vec::new(), "archive");
    let mut entry = |name: &str, content: &[u8]| {
        archive.begin(name).unwrap();
        archive.append(content).unwrap();
    };
    entry("data.pkl", &bytes);
    (0..tensors.len()).for_each(|number| entry(&format!("data/{number}"), &[number as u8; 4]));
    fs::write(folder.join("pytorch_model.bin"), archive.finish().unwrap()).unwrap();
}

#[test]
fn a_tensor_with_the_name_of_notes_is_refused_and_nothing_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    write_bin(&folder.path().join("in"), &["weight", "__metadata__"]);
    let words =
        ["out/model.safetensors cannot be written", "a tensor that is called `__metadata__`", "rename the tensor"];
    merge(folder.path(), "in out --remove_checkpoint_dir").expect(1, &words);
    assert!(folder.path().join("in/pytorch_model.bin").exists() && !folder.path().join("out").exists());
    write_bin(&folder.path().join("in"), &["weight", "metadata"]);
    merge(folder.path(), "in out --remove_checkpoint_dir").expect(0, &["2 tensors", "in is removed"]);
}

#[test]
fn what_is_wrong_with_an_index_is_said_once() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("in")).unwrap();
    fs::write(folder.path().join("in/model.safetensors.index.json"), "{").unwrap();
    let ended = merge(folder.path(), "in out");
    ended.expect(1, &["in/model.safetensors.index.json cannot be understood", "this is not an index of weight files"]);
    assert_eq!(ended.stderr.matches("EOF while parsing").count(), 1, "{}", ended.stderr);
}

#[test]
fn of_a_result_that_is_not_written_nothing_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    write_bin(&folder.path().join("in"), &["weight"]);
    fs::copy(folder.path().join("in/pytorch_model.bin"), folder.path().join("in/pytorch_model_1.bin")).unwrap();
    fs::create_dir(folder.path().join("out")).unwrap();
    fs::write(folder.path().join("out/model.safetensors"), "").unwrap();
    let ended = merge(folder.path(), "in out");
    ended.expect(1, &["out/model.safetensors exists already"]);
    assert!(!ended.stderr.contains("left out"), "{}", ended.stderr);
    fs::remove_file(folder.path().join("out/model.safetensors")).unwrap();
    merge(folder.path(), "in out").expect(0, &["left out, because they are further models"]);
}

/// A model in two files, of so many tensors without elements in all.
fn write_shards(folder: &Path, num_tensors: usize) {
    fs::create_dir(folder).unwrap();
    let mut index = Index::default();
    for part in 0..2 {
        let file = format!("model-0000{}-of-00002.safetensors", part + 1);
        let names = (part..num_tensors).step_by(2).map(|number| format!("w{number}"));
        let items = names.map(|name| {
            index.weight_map.insert(name.clone(), file.clone());
            format!(r#""{name}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#)
        });
        let header = format!("{{{}}}", items.collect::<Vec<_>>().join(","));
        fs::write(folder.join(&file), [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    }
    fs::write(folder.join("model.safetensors.index.json"), index.to_json().unwrap()).unwrap();
}

#[test]
fn more_tensors_than_a_file_may_have_become_two_files() {
    let folder = tempfile::tempdir().unwrap();
    write_shards(&folder.path().join("in"), Header::MAX_TENSORS + 1);
    merge(folder.path(), "in out").expect(0, &["150001 tensors", "are in 2 files of out"]);
    for (number, wanted) in [(1, Header::MAX_TENSORS), (2, 1)] {
        let file = fs::read(folder.path().join(format!("out/model-0000{number}-of-00002.safetensors"))).unwrap();
        assert_eq!(Header::read(&mut file.as_slice(), file.len() as u64).unwrap().entries().len(), wanted);
    }
}

#[test]
fn a_tensor_of_parts_of_bytes_is_named_with_its_type() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    fs::create_dir(&input).unwrap();
    fs::write(input.join("model.safetensors"), weight_file(&[("packed", Dtype::F4, vec![4], vec![1, 2])])).unwrap();
    merge(folder.path(), "in out").expect(1, &["the elements of `packed` are F4, which take less than a byte each"]);
    let tensor = Tensor { dtype: Dtype::F4, shape: vec![4], ..Tensor::f32("model", "packed", &[0.0]) };
    let tensor = Tensor { bytes: vec![1, 2], ..tensor };
    write_checkpoint(&folder.path().join("own"), 1, &[tensor], &Values::new());
    merge(folder.path(), "own out").expect(1, &["the elements of `packed` are F4"]);
    let mut command = accelerate();
    command.args(["checkpoint", "convert", "own", "out"]).current_dir(folder.path());
    finished(command).expect(1, &["the elements of `packed` are F4, a type of less than a byte"]);
    assert!(!folder.path().join("out").exists());
}

#[rstest]
#[case("project", "there is one in project/checkpoints/checkpoint_10")]
#[case("project/checkpoints", "there is one in project/checkpoints/checkpoint_10")]
fn a_projects_newest_checkpoint_is_named(#[case] named: &str, #[case] words: &str) {
    let folder = tempfile::tempdir().unwrap();
    let tensors = [Tensor::f32("model", "weight", &[1.0])];
    for number in [2, 10] {
        let checkpoint = folder.path().join(format!("project/checkpoints/checkpoint_{number}"));
        write_checkpoint(&checkpoint, 1, &tensors, &Values::new());
    }
    fs::create_dir(folder.path().join("project/checkpoints/checkpoint_11")).unwrap();
    merge(folder.path(), &format!("{named} out")).expect(1, &["has no checkpoint", words]);
    merge(folder.path(), "project/checkpoints/checkpoint_10 out").expect(0, &["1 tensor"]);
}
