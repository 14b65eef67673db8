//! Weights that PyTorch has saved, read into models: `pytorch_model.bin`, shards with an index, and folders of
//! `torch.distributed.checkpoint`. What is in them Python has written down (`parity/weights`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::checkpoint::{LoadOptions, checkpoint_shapes, load_checkpoint_in_model, load_file, save_file};
use accelerate::nn::{Module, ModuleFn, ParamStore, StateDict};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, AcceleratorBuilder, FullyShardedDataParallelPlugin, Result, SaveModelOptions, testing};
use rstest::rstest;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Deserialize)]
struct Described {
    dtype: String,
    shape: Vec<i64>,
    /// In hexadecimal.
    data: String,
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../parity/weights")
}

/// What Python says is in a file or folder, by name.
fn expected(name: &str) -> BTreeMap<String, Described> {
    let text = fs::read_to_string(fixtures().join("expected.json")).unwrap();
    serde_json::from_str::<BTreeMap<String, BTreeMap<String, Described>>>(&text).unwrap().remove(name).unwrap()
}

/// Those that libtorch can hold here.
fn kind(dtype: &str) -> Option<Kind> {
    Some(match dtype {
        "float32" => Kind::Float,
        "float64" => Kind::Double,
        "float16" => Kind::Half,
        "bfloat16" => Kind::BFloat16,
        "int64" => Kind::Int64,
        "int32" => Kind::Int,
        "int16" => Kind::Int16,
        "int8" => Kind::Int8,
        "uint8" => Kind::Uint8,
        "bool" => Kind::Bool,
        _ => return None,
    })
}

/// A model with these parameters, and with buffers of those that nobody shards.
fn store(device: Device, expected: &BTreeMap<String, Described>) -> Result<ParamStore> {
    let store = ParamStore::new(device);
    for (name, Described { dtype, shape, .. }) in expected {
        let Some(kind) = kind(dtype) else { continue };
        let zeros = Tensor::zeros(shape, (kind, device));
        let (path, name) = match name.rsplit_once('.') {
            Some((path, name)) => (path.split('.').fold(store.root(), |root, part| root / part), name),
            None => (store.root(), name.as_str()),
        };
        match kind == Kind::Float && zeros.numel() > 0 {
            true => drop(path.param(name, zeros)?),
            false => drop(path.buffer(name, zeros, Default::default())?),
        }
    }
    Ok(store)
}

fn hex(tensor: &Tensor) -> String {
    let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.contiguous().view([-1]).copy_data_u8(&mut bytes, tensor.numel());
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn builder(is_sharded: bool) -> AcceleratorBuilder {
    let builder = Accelerator::builder();
    if is_sharded { builder.fsdp_plugin(FullyShardedDataParallelPlugin::default()) } else { builder }
}

#[rstest]
#[case::one_file("model.bin")]
#[case::views_of_one_storage("views.bin")]
#[case::all_types("dtypes.bin")]
#[case::no_checksums("no_checksums.bin")]
#[case::an_index_and_its_shards("sharded_bin")]
#[case::of_one_rank("dcp_fsdp_1")]
#[case::of_two_ranks("dcp_fsdp_2")]
#[case::of_three_ranks("dcp_fsdp_3")]
#[case::in_columns("dcp_flat_3")]
#[case::types_of_a_folder("dcp_types_1")]
#[case::beside_what_is_no_tensor("dcp_nested_2")]
fn weights_of_pytorch_are_read_to_the_bit(
    #[case] name: &str,
    #[values((1, false), (1, true), (2, true), (3, true))] (world_size, is_sharded): (usize, bool),
) {
    // Gloo does not send all types to the other ranks.
    if world_size > 1 && name.contains("types") {
        return;
    }
    let expected = expected(name);
    testing::ranks(world_size, builder(is_sharded), |accelerator| {
        let store = store(accelerator.device(), &expected)?;
        let model = accelerator.prepare(ModuleFn::new(&store, |input: &Tensor| Ok(input.shallow_clone())))?;
        // Types that are none of libtorch's here are in the files, too.
        let options = LoadOptions { strict: false, ..Default::default() };
        let report = load_checkpoint_in_model(model.params(), fixtures().join(name), &options)?;
        assert_eq!(report.missing_keys, [""; 0]);
        let state = store.state_dict()?;
        assert!(!state.is_empty());
        for (name, tensor) in state.iter() {
            assert_eq!(
                (tensor.size(), hex(tensor)),
                (expected[name].shape.clone(), expected[name].data.clone()),
                "{name}"
            );
        }
        Ok(())
    })
    .unwrap();
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// The model of `model.bin`, and what comes of loading `path` into it.
fn load(path: &Path) -> Result<()> {
    let store = store(Device::Cpu, &expected("model.bin"))?;
    let options = LoadOptions { strict: false, ..Default::default() };
    load_checkpoint_in_model(&store, path, &options).map(drop)
}

#[test]
fn safetensors_go_before_pickles_in_a_folder_and_names_are_known() {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(fixtures().join("model.bin"), folder.path().join("pytorch_model.bin")).unwrap();
    fs::write(folder.path().join("training_args.bin"), "not weights").unwrap();
    load(folder.path()).unwrap();
    assert_eq!(checkpoint_shapes(folder.path()).unwrap().len(), expected("model.bin").len());
    fs::write(folder.path().join("model.safetensors"), "").unwrap();
    assert!(load(folder.path()).unwrap_err().to_string().contains("model.safetensors"));
}

/// Whatever is left of a file, or changed in it, is an error that names it, or weights; never a panic.
#[test]
fn damaged_files_are_errors_that_name_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pytorch_model.bin");
    let whole = fs::read(fixtures().join("model.bin")).unwrap();
    for length in (0..whole.len()).step_by(37) {
        fs::write(&path, &whole[..length]).unwrap();
        let error = load(&path).unwrap_err();
        assert!(error.is_weights() && error.to_string().contains("pytorch_model.bin"), "{length}: {error}");
    }
    for at in (0..whole.len()).step_by(11) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x41;
        fs::write(&path, &damaged).unwrap();
        if let Err(error) = load(&path) {
            assert!(error.is_weights() && error.to_string().contains("pytorch_model.bin"), "{at}: {error}");
        }
    }
}

#[rstest]
#[case::no_archive(b"\x80\x02cos\nsystem\n(S'true'\ntR.", "it is no archive of torch.save")]
#[case::nothing(b"", "it is no archive of torch.save")]
fn what_is_no_file_of_weights_is_never_run(#[case] content: &[u8], #[case] wanted: &str) {
    let folder = tempfile::tempdir().unwrap();
    for name in ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"] {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        let error = load(&path).unwrap_err().to_string();
        assert!(error.contains(wanted) && error.contains(name), "{error}");
    }
}

#[test]
fn a_folder_of_parts_that_is_not_whole_says_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    copy(&fixtures().join("dcp_fsdp_2"), folder.path());
    let part = folder.path().join("__1_0.distcp");
    let content = fs::read(&part).unwrap();
    let error = || load(folder.path()).unwrap_err().to_string();
    load(folder.path()).unwrap();
    fs::write(&part, &content[..content.len() / 2]).unwrap();
    assert!(error().contains("__1_0.distcp"), "{}", error());
    fs::remove_file(&part).unwrap();
    assert!(error().contains("__1_0.distcp"), "{}", error());
    fs::write(folder.path().join(".metadata"), b"\x80\x02cos\nsystem\n.").unwrap();
    assert!(error().contains(".metadata") && error().contains("os.system"), "{}", error());
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[rstest]
#[case::one_file(1, false, "10GB", &["pytorch_model.bin", "pytorch_model.manifest.json"])]
#[case::by_the_main_process(2, false, "10GB", &["pytorch_model.bin", "pytorch_model.manifest.json"])]
#[case::shards(1, false, "100B", &[
    "pytorch_model-00001-of-00004.bin", "pytorch_model-00002-of-00004.bin", "pytorch_model-00003-of-00004.bin",
    "pytorch_model-00004-of-00004.bin", "pytorch_model.bin.index.json", "pytorch_model.manifest.json",
])]
#[case::by_all_ranks(3, true, "10GB", &[
    "pytorch_model-00001-of-00003.bin", "pytorch_model-00002-of-00003.bin", "pytorch_model-00003-of-00003.bin",
    "pytorch_model.bin.index.json", "pytorch_model.manifest.json",
])]
fn a_model_is_written_as_torch_save_does(
    #[case] world_size: usize,
    #[case] is_sharded: bool,
    #[case] max_shard_size: &str,
    #[case] wanted: &[&str],
) {
    let folder = tempfile::tempdir().unwrap();
    let expected = expected("model.bin");
    let save = |safe_serialization: bool, max_shard_size: &str| {
        testing::ranks(world_size, builder(is_sharded), |accelerator| {
            let store = store(accelerator.device(), &expected)?;
            load_checkpoint_in_model(
                &store,
                fixtures().join("model.bin"),
                &LoadOptions { strict: false, ..Default::default() },
            )?;
            let model = accelerator.prepare(ModuleFn::new(&store, |input: &Tensor| Ok(input.shallow_clone())))?;
            let max_shard_size = max_shard_size.to_owned();
            let options = SaveModelOptions { safe_serialization, max_shard_size, ..Default::default() };
            accelerator.save_model(&model, folder.path(), &options)
        })
        .unwrap();
    };
    // Nothing of an earlier save is left.
    save(false, "50B");
    save(false, max_shard_size);
    assert_eq!(names(folder.path()), wanted);
    let store = store(Device::Cpu, &expected).unwrap();
    load_checkpoint_in_model(&store, folder.path(), &LoadOptions::default()).unwrap();
    for (name, tensor) in store.state_dict().unwrap().iter() {
        assert_eq!((tensor.size(), hex(tensor)), (expected[name].shape.clone(), expected[name].data.clone()), "{name}");
    }
    // Beside it, safetensors go first.
    save(true, "10GB");
    assert!(names(folder.path()).iter().any(|name| name.ends_with(".safetensors")));
    load_checkpoint_in_model(&store, folder.path(), &LoadOptions::default()).unwrap();
}

#[test]
fn a_stem_is_that_of_one_format() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::builder().cpu(true).build().unwrap();
    let store = store(Device::Cpu, &expected("model.bin")).unwrap();
    for (safe_serialization, stem) in [(true, "pytorch_model"), (false, "other")] {
        let options = SaveModelOptions { safe_serialization, stem: stem.to_owned(), ..Default::default() };
        let error = accelerator.save_model(&store, folder.path(), &options).unwrap_err().to_string();
        assert!(error.contains(stem) && error.contains("stem"), "{error}");
    }
    assert_eq!(names(folder.path()), [""; 0]);
}

/// Every type that both have, and shapes that are easily forgotten.
#[test]
fn a_state_is_written_as_torch_save_does_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let kinds = [
        Kind::Float,
        Kind::Double,
        Kind::Half,
        Kind::BFloat16,
        Kind::Int64,
        Kind::Int,
        Kind::Int16,
        Kind::Int8,
        Kind::Uint8,
        Kind::Bool,
    ];
    let numbers = || Tensor::arange(6, (Kind::Float, Device::Cpu)) - 2;
    let mut state: StateDict = kinds.iter().map(|kind| (format!("{kind:?}"), numbers().to_kind(*kind))).collect();
    state.insert("scalar", Tensor::from(2.5f32));
    state.insert("empty", Tensor::zeros([0, 4], (Kind::Float, Device::Cpu)));
    state.insert("transposed", numbers().view([2, 3]).tr());
    for name in ["state.bin", "state.pt", "state.safetensors"] {
        save_file(&state, folder.path().join(name)).unwrap();
        let loaded = load_file(folder.path().join(name)).unwrap();
        assert_eq!(loaded.len(), state.len(), "{name}");
        for (key, tensor) in state.iter() {
            let found = loaded.get(key).unwrap();
            assert_eq!(
                (found.kind(), found.size(), hex(found)),
                (tensor.kind(), tensor.size(), hex(tensor)),
                "{name}: {key}"
            );
        }
    }
    let heads = ["state.bin", "state.pt"].map(|name| fs::read(folder.path().join(name)).unwrap()[..4].to_vec());
    assert_eq!(heads, [b"PK\x03\x04"; 2]);
}
