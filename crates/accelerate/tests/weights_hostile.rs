//! Damaged, foreign and missing files: an error that names the file, and a model left as it was.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::SaveModelOptions;
use accelerate::checkpoint::{LoadOptions, load_checkpoint_in_model, load_file, save_file, save_model_weights};
use accelerate::nn::*;
use accelerate::tch::{Device, Kind, Tensor};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

fn model() -> ParamStore {
    let store = ParamStore::new(Device::Cpu);
    for name in ["first", "second", "third"] {
        store.root().param(name, ([4], Init::Zeros)).unwrap();
    }
    store
}

/// Three shards with ones, and their index, without a manifest, as files from elsewhere are.
fn saved() -> (TempDir, Vec<PathBuf>) {
    let folder = TempDir::new().unwrap();
    let store = model();
    for param in store.parameters() {
        param.copy_(&Tensor::ones([4], CPU)).unwrap();
    }
    let options = SaveModelOptions { max_shard_size: "16B".into(), ..Default::default() };
    let files = save_model_weights(&store, folder.path(), &options).unwrap();
    assert_eq!(files.len(), 4);
    fs::remove_file(folder.path().join("model.manifest.json")).unwrap();
    (folder, files)
}

/// Loading fails with a message that has all the parts, and changes nothing.
#[track_caller]
fn check_refused(path: &Path, parts: &[&str]) {
    check_refused_with(path, &LoadOptions::default(), parts);
}

#[track_caller]
fn check_refused_with(path: &Path, options: &LoadOptions, parts: &[&str]) {
    let store = model();
    let error = load_checkpoint_in_model(&store, path, options).unwrap_err();
    assert!(error.is_weights(), "{error}");
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{text:?} lacks {part:?}");
    }
    for param in store.parameters() {
        assert_eq!(param.get().unwrap().sum(Kind::Float).double_value(&[]), 0.0, "{} was changed", param.name());
    }
}

fn header_of(json: &str) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes()[..], json.as_bytes()].concat()
}

#[test]
fn a_file_cut_off_anywhere_is_refused() {
    let (_folder, files) = saved();
    let whole = fs::read(&files[1]).unwrap();
    for length in 0..whole.len() {
        fs::write(&files[1], &whole[..length]).unwrap();
        check_refused(&files[3], &["model-00002-of-00003.safetensors"]);
    }
}

#[test]
fn a_file_with_something_appended_is_refused() {
    let (_folder, files) = saved();
    let mut bytes = fs::read(&files[0]).unwrap();
    bytes.push(0);
    fs::write(&files[0], bytes).unwrap();
    check_refused(&files[0], &["model-00001-of-00003.safetensors", "lengthened"]);
}

#[test]
fn no_flipped_bit_in_a_header_goes_unnoticed_or_panics() {
    let (_folder, files) = saved();
    let whole = fs::read(&files[0]).unwrap();
    let header_end = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for position in 0..header_end {
        for bit in 0..8 {
            let mut bytes = whole.clone();
            bytes[position] ^= 1 << bit;
            fs::write(&files[0], &bytes).unwrap();
            let store = model();
            // A flip inside the value of `format`, or one that turns a blank into another, does no harm.
            if let Ok(report) = load_checkpoint_in_model(&store, &files[3], &LoadOptions::default()) {
                assert!(report.missing_keys.is_empty());
                for param in store.parameters() {
                    assert_eq!(
                        param.get().unwrap(),
                        Tensor::ones([4], CPU).set_requires_grad(true),
                        "bit {bit} of {position}"
                    );
                }
            }
        }
    }
}

#[test]
fn headers_that_lie_are_refused_before_memory_is_taken() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    let huge = u64::MAX.to_le_bytes().to_vec();
    let long = [&(100_000_001u64).to_le_bytes()[..], b"{}"].concat();
    let beyond = [&(1000u64).to_le_bytes()[..], b"{}"].concat();
    let overflow = r#"{"first":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,16]}}"#;
    let hole = r#"{"first":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}"#;
    let backwards = r#"{"first":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#;
    let mismatch = r#"{"first":{"dtype":"F32","shape":[4],"data_offsets":[0,4]}}"#;
    let overlap = r#"{"first":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"second":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#;
    let twice = r#"{"first":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"first":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}"#;
    let unknown = r#"{"first":{"dtype":"F7","shape":[1],"data_offsets":[0,4]}}"#;
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty", vec![], "only 0 bytes"),
        ("short", vec![1, 2, 3], "only 3 bytes"),
        ("huge", huge, "more than the 100000000 allowed"),
        ("long", long, "more than the 100000000 allowed"),
        ("beyond", beyond, "claims 1000 bytes, but the file has only 10"),
        ("text", b"this is a text and no weights at all".to_vec(), "its header claims"),
        ("no json", header_of("{]"), "damaged"),
        ("not utf-8", [&2u64.to_le_bytes()[..], &[0xff, 0xfe]].concat(), "damaged"),
        ("a list", header_of("[]"), "damaged"),
        ("overflow", header_of(overflow), "no countable number"),
        ("hole", header_of(hole), "the tensor `first` has the data_offsets [8, 12]"),
        ("backwards", header_of(backwards), "damaged"),
        ("mismatch", header_of(mismatch), "takes 16 bytes as F32"),
        ("overlap", header_of(overlap), "the tensor `second` has the data_offsets [1, 3]"),
        ("twice", header_of(twice), "`first` is there twice"),
        ("unknown type", header_of(unknown), "F7"),
        ("without data", header_of(r#"{"first":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#), "cut off"),
    ];
    for (name, bytes, part) in cases {
        fs::write(&path, bytes).unwrap();
        let error = load_file(&path).unwrap_err();
        let text = error.to_string();
        assert!(error.is_weights() && text.contains("model.safetensors") && text.contains(part), "{name}: {text}");
    }
}

#[test]
fn element_types_that_libtorch_lacks_are_refused_by_name() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    let json = r#"{"first":{"dtype":"U64","shape":[1],"data_offsets":[0,8]}}"#;
    fs::write(&path, [header_of(json), vec![0; 8]].concat()).unwrap();
    let text = load_file(&path).unwrap_err().to_string();
    assert!(text.contains("`first`") && text.contains("U64"), "{text}");
}

#[test]
fn all_that_does_not_fit_the_model_is_listed_with_the_file() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    let tensor = |size: i64| Tensor::ones([size], CPU);
    let state: StateDict = [("first", 4), ("second", 5), ("fourth", 4)]
        .map(|(name, size)| (name.to_string(), tensor(size)))
        .into_iter()
        .collect();
    save_file(&state, &path).unwrap();
    let parts =
        ["model.safetensors", "1 missing: third", "1 unexpected: fourth", "second is [5] but the model has [4]"];
    check_refused(folder.path(), &parts);
    let tolerant = LoadOptions { strict: false, ..Default::default() };
    check_refused_with(folder.path(), &tolerant, &parts);
}

#[test]
fn an_absent_shard_is_named_with_the_number_of_its_tensors() {
    let (folder, files) = saved();
    fs::remove_file(&files[2]).unwrap();
    check_refused(folder.path(), &["model.safetensors.index.json", "model-00003-of-00003.safetensors for 1 tensors"]);
}

#[test]
fn swapped_shards_are_noticed() {
    let (folder, files) = saved();
    fs::rename(&files[0], folder.path().join("other")).unwrap();
    fs::rename(&files[1], &files[0]).unwrap();
    fs::rename(folder.path().join("other"), &files[1]).unwrap();
    check_refused(
        folder.path(),
        &["2 tensors are not where it says", "first (not in model-00001-of-00003.safetensors)"],
    );
}

#[test]
fn an_index_that_cannot_be_used_is_refused() {
    let cases = [
        ("", "cannot be used"),
        ("{]", "cannot be used"),
        ("{}", "weight_map"),
        (r#"{"weight_map": {"first": 3}}"#, "cannot be used"),
        (r#"{"weight_map": {"first": "../../secret.safetensors"}}"#, "secret"),
        (r#"{"weight_map": {"first": "/etc/passwd"}}"#, "passwd"),
        (r#"{"weight_map": {"first": "absent.safetensors"}}"#, "absent.safetensors"),
        (r#"{"weight_map": {"fourth": "model-00001-of-00003.safetensors"}}"#, "fourth (not in model-00001"),
        (r#"{"weight_map": {}}"#, "3 missing: first, second, third"),
    ];
    let (_folder, files) = saved();
    for (text, part) in cases {
        fs::write(&files[3], text).unwrap();
        check_refused(&files[3], &["model.safetensors.index.json", part]);
    }
}

#[test]
fn where_two_shards_hold_a_tensor_the_index_decides() {
    let (folder, files) = saved();
    let ones = || Tensor::ones([4], CPU);
    let both: StateDict = [("second".to_string(), ones() * 7), ("first".to_string(), ones())].into_iter().collect();
    save_file(&both, &files[0]).unwrap();
    let store = model();
    load_checkpoint_in_model(&store, folder.path(), &LoadOptions::default()).unwrap();
    assert_eq!(store.get("second").unwrap().get().unwrap().double_value(&[0]), 1.0);

    for file in &files[..2] {
        let mut state = load_file(file).unwrap();
        state.insert("stranger", ones());
        save_file(&state, file).unwrap();
    }
    check_refused(folder.path(), &["`stranger` is both in", "model-00001", "model-00002"]);
}

#[test]
fn folders_without_weights_say_what_they_hold() {
    let folder = TempDir::new().unwrap();
    check_refused(folder.path(), &["it holds nothing"]);
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    check_refused(folder.path(), &["it holds config.json"]);
    fs::write(folder.path().join("pytorch_model.bin"), "").unwrap();
    check_refused(folder.path(), &["pytorch_model.bin", "no archive of torch.save", "safetensors.torch.save_file"]);
    fs::remove_file(folder.path().join("pytorch_model.bin")).unwrap();
    for name in ["a.safetensors", "b.safetensors"] {
        fs::write(folder.path().join(name), "").unwrap();
    }
    check_refused(folder.path(), &["can be told apart", "a.safetensors, b.safetensors"]);
    check_refused(&folder.path().join("nowhere"), &["cannot open", "nowhere"]);
}

#[test]
fn a_folder_with_one_file_of_another_name_is_understood() {
    let folder = TempDir::new().unwrap();
    save_model_weights(&model(), folder.path(), &SaveModelOptions { stem: "adapter".into(), ..Default::default() })
        .unwrap();
    load_checkpoint_in_model(&model(), folder.path(), &LoadOptions::default()).unwrap();
}

#[test]
fn a_key_map_that_merges_names_is_refused() {
    let (folder, _) = saved();
    let options = LoadOptions::default().key_map(|_| "first".to_owned());
    check_refused_with(folder.path(), &options, &["both `first` and `second`", "into `first`"]);
}

#[test]
fn a_failed_save_leaves_the_earlier_one_and_no_litter() {
    let (folder, files) = saved();
    let before: Vec<_> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    let store = model();
    // The last tensor cannot be written: the format has no such type.
    let complex = Tensor::zeros([16], (Kind::ComplexDouble, Device::Cpu));
    store.root().buffer("wave", complex, Default::default()).unwrap();
    let options = SaveModelOptions { max_shard_size: "16B".into(), ..Default::default() };
    let error = save_model_weights(&store, folder.path(), &options).unwrap_err();
    let text = error.to_string();
    assert!(error.is_weights() && text.contains("`wave`") && text.contains("ComplexDouble"), "{text}");
    let after: Vec<_> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    assert_eq!(before, after);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4);
}

#[test]
fn shards_of_two_saves_never_load_as_one() {
    let (folder, files) = saved();
    // A folder in the place of the last shard stops the renames after the first two.
    let old_shard = fs::read(&files[2]).unwrap();
    fs::remove_file(&files[2]).unwrap();
    fs::create_dir_all(files[2].join("in the way")).unwrap();
    let options = SaveModelOptions { max_shard_size: "16B".into(), ..Default::default() };
    let error = save_model_weights(&model(), folder.path(), &options).unwrap_err();
    assert!(error.to_string().contains("free what is in the way"), "{error}");
    // Somebody copies the old shard there afterwards.
    fs::remove_dir_all(&files[2]).unwrap();
    fs::write(&files[2], old_shard).unwrap();
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(1);
    fs::File::options().write(true).open(&files[2]).unwrap().set_modified(later).unwrap();
    check_refused(folder.path(), &["has been written since", "model-00003-of-00003.safetensors"]);
    // Without what the save had written, no index is there that holds the two together.
    fs::remove_file(folder.path().join("model.manifest.json")).unwrap();
    check_refused(folder.path(), &["can be told apart", "model-00003-of-00003.safetensors"]);
}

#[test]
fn a_folder_that_cannot_be_made_is_named() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = save_model_weights(&model(), file.join("out"), &SaveModelOptions::default()).unwrap_err();
    assert!(error.is_weights() && error.to_string().contains("cannot create"), "{error}");
}

/// Readers take it for notes about the file, and would find no tensor.
#[test]
fn a_tensor_that_no_safetensors_file_can_have_is_refused_before_anything_is_written() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut state = accelerate::nn::StateDict::default();
    state.insert("__metadata__".to_owned(), Tensor::ones([4], CPU));
    let error = save_file(&state, &path).unwrap_err();
    assert!(error.is_weights() && error.to_string().contains("__metadata__"), "{error}");
    assert!(fs::read_dir(folder.path()).unwrap().next().is_none());
    save_file(&state, folder.path().join("model.bin")).unwrap();
}
