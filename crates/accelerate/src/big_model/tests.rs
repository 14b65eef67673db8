//! Models that are kept elsewhere than where they are computed: equal to those in memory, and what is refused.
#![allow(clippy::unwrap_used, clippy::panic)]

use super::folder::{Found, OffloadFolder};
use super::*;
use crate::checkpoint::{
    LoadAndDispatchOptions, LoadOptions, SaveModelOptions, load_checkpoint_and_dispatch, load_checkpoint_in_model,
    save_model_weights,
};
use crate::error::Error;
use crate::nn::{BatchNorm1d, BufferOptions, Embedding, LayerNorm, Linear, ModuleFn, Param, ParamStore, StateDict};
use crate::{Accelerator, FullyShardedDataParallelPlugin};
use std::fs;
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// An embedding that the output layer is tied to, blocks, and buffers of both kinds.
struct Model {
    store: ParamStore,
    words: Embedding,
    blocks: Vec<(Linear, LayerNorm)>,
    norm: BatchNorm1d,
    scale: Param,
    decoder: Linear,
}

impl Model {
    fn new(store: ParamStore) -> Self {
        let root = store.root();
        let words = Embedding::new(&root / "words", 50, 16, Default::default()).unwrap();
        let block = |number: usize| {
            let path = &root / "blocks" / number;
            let linear = Linear::new(&path / "linear", 16, 16, Default::default()).unwrap();
            (linear, LayerNorm::new(&path / "norm", [16], Default::default()).unwrap())
        };
        let blocks = (0..4).map(block).collect();
        let norm = BatchNorm1d::new(&root / "norm", 16, Default::default()).unwrap();
        let options = BufferOptions { persistent: false };
        let scale = root.buffer("scale", Tensor::from_slice(&[0.5f32]), options).unwrap();
        let path = &root / "decoder";
        let decoder = Linear::from_params(&path, path.alias("weight", &words.weight).unwrap(), None);
        store.eval();
        Self { store, words, blocks, norm, scale, decoder }
    }

    fn in_memory() -> Self {
        tch::manual_seed(3);
        let model = Self::new(ParamStore::new(Device::Cpu));
        model.norm.running_mean.as_ref().unwrap().copy_(&Tensor::arange(16, FLOAT)).unwrap();
        model
    }

    fn empty() -> Self {
        Self::new(ParamStore::init_empty_weights(Device::Cpu))
    }

    fn forward(&self, ids: &Tensor) -> crate::Result<Tensor> {
        let mut hidden = self.words.forward(ids)?;
        for (linear, norm) in &self.blocks {
            hidden = &hidden + norm.forward(&linear.forward(&hidden)?.relu())?;
        }
        let hidden = self.norm.forward(&hidden)? * self.scale.get()?;
        self.decoder.forward(&hidden)
    }

    fn tensors(&self) -> Vec<(String, Tensor)> {
        let tensors = self.store.parameters_and_buffers();
        tensors.iter().map(|param| (param.name().to_owned(), param.full_tensor().unwrap().copy())).collect()
    }
}

fn ids() -> Tensor {
    Tensor::from_slice(&[3i64, 1, 4, 1, 5, 49, 0])
}

fn map(text: &str) -> DeviceMap {
    DeviceMap::from_json(text).unwrap()
}

fn in_folder(folder: &Path) -> DispatchOptions {
    DispatchOptions { offload_dir: Some(folder.to_owned()), ..Default::default() }
}

/// Does something to a folder or a file.
type Spoil<'a> = &'a dyn Fn(&Path);

const MAPS: [&str; 6] = [
    r#"{"": "cpu"}"#,
    r#"{"": "disk"}"#,
    r#"{"words": "cpu", "decoder": "cpu", "blocks": "disk", "norm": "disk", "scale": "cpu"}"#,
    r#"{"": "disk", "blocks.1": "cpu", "blocks.2.linear": "cpu"}"#,
    r#"{"": "cpu", "words": "disk", "decoder": "disk"}"#,
    r#"{"": "cpu", "blocks.3.linear.bias": "disk"}"#,
];

#[test]
fn every_map_gives_the_same_bits() {
    let model = Model::in_memory();
    let (wanted, tensors) = (model.forward(&ids()).unwrap(), model.tensors());
    for text in MAPS {
        for (resident_bytes, offload_buffers) in [(0, false), (2000, true), (1 << 20, true)] {
            let folder = tempfile::tempdir().unwrap();
            let model = Model::in_memory();
            let options = DispatchOptions { resident_bytes, offload_buffers, ..in_folder(folder.path()) };
            dispatch_model(&model.store, &map(text), &options).unwrap();
            for pass in 0..3 {
                assert_eq!(model.forward(&ids()).unwrap(), wanted, "{text}, {options:?}, pass {pass}");
            }
            assert_eq!(model.tensors(), tensors, "{text}");
            assert!(model.words.weight.is_same(&model.decoder.weight));
            // Once more, to somewhere else.
            dispatch_model(&model.store, &map(MAPS[3]), &in_folder(folder.path())).unwrap();
            assert_eq!(model.forward(&ids()).unwrap(), wanted, "{text}, dispatched again");
            dispatch_model(&model.store, &map(MAPS[0]), &Default::default()).unwrap();
            drop(folder);
            assert_eq!(model.forward(&ids()).unwrap(), wanted, "{text}, in memory again");
        }
    }
}

#[test]
fn whole_models_are_offloaded() {
    let model = Model::in_memory();
    let wanted = model.forward(&ids()).unwrap();
    cpu_offload(&model.store, &Default::default()).unwrap();
    assert_eq!(model.forward(&ids()).unwrap(), wanted);
    let folder = tempfile::tempdir().unwrap();
    disk_offload(&model.store, folder.path(), &Default::default()).unwrap();
    assert_eq!(model.forward(&ids()).unwrap(), wanted);
    // A tied weight is there once, and buffers are in memory.
    let mut names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names.len(), 1 + 1 + 4 * 4 + 2, "{names:?}");
    assert!(!names.iter().any(|name| name == "decoder.weight.dat" || name == "norm.running_mean.dat"));
    // Another model without memory takes them from there.
    let other = Model::empty();
    other.norm.running_mean.as_ref().unwrap().copy_(&Tensor::arange(16, FLOAT)).unwrap();
    dispatch_model(&other.store, &map(MAPS[1]), &in_folder(folder.path())).unwrap();
    assert_eq!(other.forward(&ids()).unwrap(), wanted);
    // Gradients of inputs go through weights on the disk, whose blocks have been let go by then.
    let input = Tensor::arange(16, FLOAT).set_requires_grad(true);
    let grad = |model: &Model| {
        let mut hidden = input.shallow_clone();
        for (linear, norm) in &model.blocks {
            hidden = norm.forward(&linear.forward(&hidden).unwrap().relu()).unwrap();
        }
        Tensor::run_backward(&[hidden.square().sum(None)], &[&input], false, false).swap_remove(0)
    };
    assert_eq!(grad(&other), grad(&Model::in_memory()));
}

fn saved(max_shard_size: &str) -> (tempfile::TempDir, Tensor, Vec<(String, Tensor)>) {
    let folder = tempfile::tempdir().unwrap();
    let model = Model::in_memory();
    let options = SaveModelOptions { max_shard_size: max_shard_size.to_owned(), ..Default::default() };
    save_model_weights(&model.store, folder.path(), &options).unwrap();
    (folder, model.forward(&ids()).unwrap(), model.tensors())
}

fn load(options: LoadOptions) -> LoadAndDispatchOptions {
    LoadAndDispatchOptions { load: options, ..Default::default() }
}

#[test]
fn checkpoints_go_straight_to_their_devices() {
    for max_shard_size in ["2KB", "10GB"] {
        let (folder, wanted, tensors) = saved(max_shard_size);
        for text in MAPS {
            for model in [Model::empty(), Model::new(ParamStore::new(Device::Cpu))] {
                let offload = tempfile::tempdir().unwrap();
                let options = LoadAndDispatchOptions {
                    device_map: map(text).into(),
                    ..load(LoadOptions { dispatch: in_folder(offload.path()), ..Default::default() })
                };
                let done = load_checkpoint_and_dispatch(&model.store, folder.path(), &options).unwrap();
                assert!(done.device_map == map(text) && done.report.missing_keys.is_empty());
                assert_eq!(model.forward(&ids()).unwrap(), wanted, "{text}");
                assert_eq!(model.tensors(), tensors, "{text}");
                // It can be saved from there.
                let copy = tempfile::tempdir().unwrap();
                save_model_weights(&model.store, copy.path(), &Default::default()).unwrap();
                let other = Model::new(ParamStore::new(Device::Cpu));
                load_checkpoint_in_model(&other.store, copy.path(), &Default::default()).unwrap();
                assert_eq!(other.tensors(), tensors, "{text}");
            }
        }
    }
}

#[test]
fn a_found_map_is_kept_to() {
    let (folder, wanted, _) = saved("10GB");
    for (budget, on_disk) in [("1MB", 0), ("7KB", 10), ("1KB", 18)] {
        let (model, offload) = (Model::empty(), tempfile::tempdir().unwrap());
        let options = LoadAndDispatchOptions {
            max_memory: Some(MaxMemory::from_texts([("cpu", budget)]).unwrap()),
            no_split_module_classes: vec!["blocks.*".to_owned()],
            ..load(LoadOptions { dispatch: in_folder(offload.path()), ..Default::default() })
        };
        let done = load_checkpoint_and_dispatch(&model.store, folder.path(), &options).unwrap();
        let offloaded = model.store.parameters().iter().filter(|param| param.is_offloaded()).count();
        assert!(offloaded >= on_disk && (on_disk > 0 || offloaded == 0), "{budget}: {}", done.table);
        let (used, budget) = done.table.devices[&MapDevice::Cpu];
        assert!(used <= budget.unwrap(), "{}", done.table);
        assert_eq!(model.forward(&ids()).unwrap(), wanted);
    }
}

#[test]
fn weights_are_cast_while_they_are_loaded() {
    let (folder, ..) = saved("10GB");
    let model = Model::empty();
    let offload = tempfile::tempdir().unwrap();
    let options = LoadOptions {
        device_map: Some(map(MAPS[3])),
        dtype: Some(Kind::BFloat16),
        dispatch: in_folder(offload.path()),
        ..Default::default()
    };
    load_checkpoint_in_model(&model.store, folder.path(), &options).unwrap();
    let cast = Model::in_memory();
    cast.store.to_kind(Kind::BFloat16).unwrap();
    assert_eq!(model.forward(&ids()).unwrap(), cast.forward(&ids()).unwrap());
    assert_eq!(model.norm.num_batches_tracked.as_ref().unwrap().kind(), Kind::Int64);
}

#[test]
fn what_a_checkpoint_lacks_is_initialised_or_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let model = Model::in_memory();
    let some = model.tensors().into_iter().filter(|(name, _)| name != "blocks.2.linear.weight" && name != "scale");
    crate::checkpoint::save_file(&some.collect::<StateDict>(), &path).unwrap();
    let options = |strict| LoadOptions {
        strict,
        device_map: Some(map(MAPS[1])),
        dispatch: in_folder(&folder.path().join("offload")),
        ..Default::default()
    };
    tch::manual_seed(3);
    let other = Model::empty();
    let error = load_checkpoint_in_model(&other.store, &path, &options(true)).unwrap_err();
    assert!(error.to_string().contains("blocks.2.linear.weight"), "{error}");
    assert!(other.store.parameters().iter().all(Param::is_deferred), "nothing was loaded");
    tch::manual_seed(3);
    let report = load_checkpoint_in_model(&other.store, &path, &options(false)).unwrap();
    assert_eq!(report.missing_keys, ["blocks.2.linear.weight"]);
    assert_eq!(other.forward(&ids()).unwrap(), model.forward(&ids()).unwrap(), "as its layer has it");
    // Nothing is initialised over what was loaded.
    other.store.materialize().unwrap();
    assert_eq!(other.forward(&ids()).unwrap(), model.forward(&ids()).unwrap());
}

/// What is refused before anything has changed.
#[test]
fn maps_that_cannot_be_carried_out_are_refused() {
    let (folder, ..) = saved("2KB");
    let offload = tempfile::tempdir().unwrap();
    let rows: [(&str, Option<&Path>, Option<MapDevice>, &str); 6] = [
        (r#"{"": 0}"#, None, None, "on the device 0, and this process has no accelerator"),
        (r#"{"": "cpu", "blocks.1": 7}"#, None, None, "on the device 7"),
        (r#"{"": "mps"}"#, None, None, "on the device mps"),
        (r#"{"blocks": "cpu"}"#, None, None, "does not give any device for"),
        (r#"{"": "disk"}"#, None, None, "DispatchOptions::offload_dir"),
        (r#"{"": "disk"}"#, Some(offload.path()), Some(MapDevice::Disk), "cannot be computed on a disk"),
    ];
    for (text, offload_dir, main_device, wanted) in rows {
        if tch::Cuda::device_count() > 0 && wanted.contains("on the device 0") {
            continue;
        }
        let dispatch =
            DispatchOptions { offload_dir: offload_dir.map(PathBuf::from), main_device, ..Default::default() };
        let (empty, full) = (Model::empty(), Model::in_memory());
        let options = LoadOptions { device_map: Some(map(text)), dispatch: dispatch.clone(), ..Default::default() };
        let loaded = load_checkpoint_in_model(&empty.store, folder.path(), &options).map(drop);
        let dispatched = dispatch_model(&full.store, &map(text), &dispatch);
        for error in [loaded.unwrap_err(), dispatched.unwrap_err()] {
            assert!(error.to_string().contains(wanted), "{error}");
        }
        assert!(empty.store.parameters().iter().all(Param::is_deferred), "nothing was loaded");
        assert_eq!(full.tensors(), Model::in_memory().tensors());
    }
    let error = dispatch_model(&Model::empty().store, &map(MAPS[0]), &Default::default()).unwrap_err();
    assert!(error.is_big_model() && error.to_string().contains("has no value yet"), "{error}");
}

#[test]
fn damaged_checkpoints_leave_the_model_as_it_was() {
    let damages: [(&str, Spoil<'_>); 3] = [
        ("model-00002-of", &|path| fs::remove_file(path).unwrap()),
        ("model-00003-of", &|path| fs::write(path, b"short").unwrap()),
        ("model.manifest", &|path| fs::write(path, b"{").unwrap()),
    ];
    for (beginning, damage) in damages {
        let (folder, ..) = saved("2KB");
        let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
        let is_it = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(beginning);
        damage(&names.into_iter().find(is_it).unwrap());
        let (model, offload) = (Model::empty(), tempfile::tempdir().unwrap());
        let options = load(LoadOptions { dispatch: in_folder(offload.path()), ..Default::default() });
        let options = LoadAndDispatchOptions { device_map: map(MAPS[3]).into(), ..options };
        let error = load_checkpoint_and_dispatch(&model.store, folder.path(), &options).unwrap_err();
        assert!(error.is_weights(), "{error}");
        assert!(model.store.parameters().iter().all(Param::is_deferred), "{beginning}: nothing was loaded");
    }
}

#[test]
fn what_is_kept_elsewhere_is_frozen() {
    let (model, folder) = (Model::in_memory(), tempfile::tempdir().unwrap());
    let options = DispatchOptions { offload_buffers: true, ..in_folder(folder.path()) };
    dispatch_model(&model.store, &map(MAPS[3]), &options).unwrap();
    let weight = &model.blocks[0].0.weight;
    let refused: [(Error, &str); 5] = [
        (weight.set_requires_grad(true).unwrap_err(), "trained"),
        (weight.copy_(&Tensor::zeros([16, 16], FLOAT)).unwrap_err(), "written to"),
        (model.store.to_device(Device::Cpu).unwrap_err(), "cannot be moved"),
        (model.store.to_kind(Kind::Half).unwrap_err(), "cannot be moved"),
        (
            model.store.load_state_dict(&model.store.state_dict().unwrap(), Default::default()).unwrap_err(),
            "written to",
        ),
    ];
    for (error, wanted) in refused {
        assert!(error.to_string().contains(wanted), "{error}");
    }
    weight.set_requires_grad(false).unwrap();
    let trainable: Vec<String> =
        model.store.trainable_parameters().iter().map(|param| param.name().to_owned()).collect();
    assert!(trainable.contains(&"blocks.1.linear.weight".to_owned()) && !trainable.contains(&weight.name().to_owned()));
    model.store.train();
    let error = model.forward(&ids()).unwrap_err();
    assert!(error.to_string().contains("is a buffer that is kept on disk") && error.is_big_model(), "{error}");
    // A model of one process may be prepared all the same; a sharded one may not.
    model.store.eval();
    let wanted = Model::in_memory().forward(&ids()).unwrap();
    let forward = ModuleFn::new(&model.store.clone(), move |ids: &Tensor| model.forward(ids));
    let plugin = FullyShardedDataParallelPlugin::default();
    let sharded = Accelerator::builder().cpu(true).fsdp_plugin(plugin).build().unwrap();
    let forward = match Accelerator::builder().cpu(true).build().unwrap().prepare(forward) {
        Ok(prepared) => {
            assert_eq!(tch::no_grad(|| prepared.forward(&ids())).unwrap(), wanted);
            prepared.into_inner()
        }
        Err(error) => panic!("{error}"),
    };
    let error = sharded.prepare(forward).unwrap_err();
    assert!(error.is_big_model() && error.to_string().contains("device map"), "{error}");
}

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../parity/device_map/offload")
}

/// The tensors of `parity/device_map/generate.py`.
fn offloaded() -> Vec<(String, Tensor)> {
    let numbers = Tensor::arange(12, FLOAT).view([3, 4]) / 8.0 - 0.5;
    let floats = [
        ("float16", Kind::Half),
        ("float32", Kind::Float),
        ("float64", Kind::Double),
        ("bfloat16", Kind::BFloat16),
        ("float8_e4m3fn", Kind::Float8e4m3fn),
        ("float8_e5m2", Kind::Float8e5m2),
        ("complex64", Kind::ComplexFloat),
    ];
    let integers = [
        ("bool", Kind::Bool),
        ("uint8", Kind::Uint8),
        ("int8", Kind::Int8),
        ("int16", Kind::Int16),
        ("int32", Kind::Int),
        ("int64", Kind::Int64),
    ];
    let counted = Tensor::arange(6, (Kind::Int64, Device::Cpu)).view([2, 1, 3]);
    let floats = floats.map(|(name, kind)| (format!("of.{name}"), numbers.to_kind(kind)));
    let integers = integers.map(|(name, kind)| (format!("of.{name}"), counted.to_kind(kind)));
    let scalars = [("scalar", Tensor::from(7i64)), ("half_scalar", Tensor::from(-0.75f32).to_kind(Kind::BFloat16))];
    floats.into_iter().chain(integers).chain(scalars.map(|(name, tensor)| (name.to_owned(), tensor))).collect()
}

fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    Vec::try_from(tensor.contiguous().view(-1).view_dtype(Kind::Uint8)).unwrap()
}

#[test]
fn folders_of_python_are_read_and_written_alike() {
    let theirs = OffloadFolder::open(&fixture()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut ours = OffloadFolder::create(folder.path()).unwrap();
    for (name, wanted) in offloaded() {
        let Found::Dat(file) = theirs.find(&name, &wanted.size()).unwrap() else { panic!("{name}") };
        let found = file.map().unwrap();
        assert_eq!((found.size(), found.kind()), (wanted.size(), wanted.kind()), "{name}");
        assert_eq!(bytes_of(&found), bytes_of(&wanted), "{name}");
        ours.write(&name, &wanted).unwrap();
        let [mine, other] = [folder.path(), &fixture()].map(|path| fs::read(path.join(format!("{name}.dat"))).unwrap());
        assert_eq!(mine, other, "{name}");
    }
    ours.finish().unwrap();
    let read = |path: &Path| -> serde_json::Value {
        serde_json::from_str(&fs::read_to_string(path.join("index.json")).unwrap()).unwrap()
    };
    assert_eq!(read(folder.path()), read(&fixture()));
}

#[test]
fn entries_may_name_a_safetensors_file() {
    let folder = tempfile::tempdir().unwrap();
    let weight = Tensor::arange(6, FLOAT).view([2, 3]);
    let state: StateDict = [("x.weight".to_owned(), weight.shallow_clone())].into_iter().collect();
    crate::checkpoint::save_file(&state, folder.path().join("model.safetensors")).unwrap();
    let index = r#"{"proj.weight": {"safetensors_file": "model.safetensors", "weight_name": "x.weight", "dtype": "bfloat16"},
        "x.weight": {"safetensors_file": "model.safetensors"}, "y": {"safetensors_file": "model.safetensors"},
        "z": {"safetensors_file": "absent.safetensors"}, "w": {"safetensors_file": "index.json"}}"#;
    fs::write(folder.path().join("index.json"), index).unwrap();
    let opened = OffloadFolder::open(folder.path()).unwrap();
    for (name, kind) in [("proj.weight", Kind::BFloat16), ("x.weight", Kind::Float)] {
        let Found::Read(found) = opened.find(name, &[2, 3]).unwrap() else { panic!("{name}") };
        assert_eq!(found, weight.to_kind(kind));
    }
    for (name, wanted) in [("y", "not in the file"), ("z", "cannot open"), ("w", "header")] {
        let error = opened.find(name, &[2, 3]).unwrap_err();
        assert!(error.is_big_model() && error.to_string().contains(wanted), "{error}");
    }
    let store = ParamStore::init_empty_weights(Device::Cpu);
    let proj = Linear::new(store.root() / "proj", 3, 2, crate::nn::LinearConfig { bias: false, ..Default::default() })
        .unwrap();
    disk_offload(&store, folder.path(), &Default::default()).unwrap();
    assert_eq!(proj.weight.get().unwrap(), weight.to_kind(Kind::BFloat16));
}

/// A folder with one parameter `proj.weight` of `[2, 3]`, spoilt, and what the error says.
#[test]
fn hostile_folders_are_refused() {
    let entry = |dtype: &str, shape: &str| format!(r#"{{"proj.weight": {{"dtype": "{dtype}", "shape": {shape}}}}}"#);
    let good = entry("float32", "[2, 3]");
    let dat =
        |num_bytes: usize| move |folder: &Path| fs::write(folder.join("proj.weight.dat"), vec![0; num_bytes]).unwrap();
    let rows: [(String, Spoil<'_>, &str); 13] = [
        (good.clone(), &dat(23), "has 23 bytes, where its index promises 24"),
        (good.clone(), &dat(25), "has 25 bytes"),
        (good.clone(), &|_| {}, "cannot open"),
        (good.clone(), &|folder| fs::create_dir(folder.join("proj.weight.dat")).unwrap(), "is a folder"),
        (entry("float16", "[2, 3]"), &dat(24), "promises 12"),
        (entry("float32", "[3, 2]"), &dat(24), "has the shape [3, 2]"),
        (entry("float32", "[6]"), &dat(24), "has the shape [6]"),
        (entry("float32", "[18446744073709551615, 3]"), &dat(24), "has the shape"),
        (entry("float31", "[2, 3]"), &dat(24), "type float31"),
        (entry("float32", "[2, -3]"), &dat(24), "cannot be used"),
        ("{}".to_owned(), &dat(24), "has no `proj.weight`"),
        ("[1".to_owned(), &dat(24), "cannot be used"),
        (r#"{"../proj.weight": {"dtype": "float32", "shape": [2, 3]}}"#.to_owned(), &dat(24), "cannot be used"),
    ];
    for (index, spoil, wanted) in rows {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("index.json"), &index).unwrap();
        spoil(folder.path());
        let store = ParamStore::init_empty_weights(Device::Cpu);
        let proj =
            Linear::new(store.root() / "proj", 3, 2, crate::nn::LinearConfig { bias: false, ..Default::default() })
                .unwrap();
        let error = disk_offload(&store, folder.path(), &Default::default()).unwrap_err();
        assert!(error.is_big_model() && error.to_string().contains(wanted), "{index}: {error}");
        assert!(proj.weight.is_deferred());
    }
}

#[test]
fn a_file_that_changes_under_the_only_layer_of_a_disk_is_noticed() {
    let changes: [Spoil<'_>; 2] =
        [&|path| fs::OpenOptions::new().write(true).open(path).unwrap().set_len(8).unwrap(), &|path| {
            fs::remove_file(path).unwrap()
        }];
    for change in changes {
        let (store, folder) = (ParamStore::new(Device::Cpu), tempfile::tempdir().unwrap());
        let layer = Linear::new(store.root() / "only", 16, 16, Default::default()).unwrap();
        disk_offload(&store, folder.path(), &Default::default()).unwrap();
        let input = Tensor::ones([1, 16], (Kind::Float, Device::Cpu));
        drop(layer.forward(&input).unwrap());
        change(&folder.path().join("only.weight.dat"));
        let error = layer.forward(&input).unwrap_err();
        assert!(error.to_string().contains("only.weight.dat"), "{error}");
    }
}

#[test]
fn a_folder_whose_name_is_no_text_keeps_weights() {
    use std::os::unix::ffi::OsStrExt;
    let (store, folder) = (ParamStore::new(Device::Cpu), tempfile::tempdir().unwrap());
    // Weights of several pages, of which whole ones are let go.
    let layers = [0, 1].map(|number| Linear::new(store.root() / number, 64, 64, Default::default()).unwrap());
    let forward = || layers.iter().fold(Tensor::ones([1, 64], FLOAT), |input, layer| layer.forward(&input).unwrap());
    let wanted = forward();
    let path = folder.path().join(std::ffi::OsStr::from_bytes(b"no\xfftext"));
    disk_offload(&store, &path, &Default::default()).unwrap();
    for _ in 0..3 {
        assert_eq!(forward(), wanted);
    }
}

#[test]
fn a_hook_gives_each_parameter_its_own_tensor_back() {
    let store = ParamStore::new(Device::Cpu);
    let params = [1.0, 2.0, 3.0].map(|value| {
        let values = Tensor::full([2], value, (Kind::Float, Device::Cpu));
        store.root().param(&format!("number_{value}"), values).unwrap()
    });
    let hook = cpu_offload_with_hook(&store, Some(MapDevice::Cpu), None).unwrap();
    store.remove(&params[..1]);
    hook.remove().unwrap();
    for (param, value) in params.iter().zip([1.0, 2.0, 3.0]) {
        assert_eq!(param.get().unwrap().double_value(&[0]), value);
    }
}

#[test]
fn files_that_change_under_a_model_are_noticed() {
    let changes: [Spoil<'_>; 3] = [
        &|path| fs::OpenOptions::new().write(true).open(path).unwrap().set_len(8).unwrap(),
        &|path| fs::remove_file(path).unwrap(),
        &|path| {
            let copy = path.with_extension("copy");
            fs::copy(path, &copy).unwrap();
            fs::rename(copy, path).unwrap();
        },
    ];
    for change in changes {
        let (model, folder) = (Model::in_memory(), tempfile::tempdir().unwrap());
        disk_offload(&model.store, folder.path(), &Default::default()).unwrap();
        drop(model.forward(&ids()).unwrap());
        change(&folder.path().join("blocks.2.linear.weight.dat"));
        let error = model.forward(&ids()).unwrap_err();
        assert!(error.is_big_model() && error.to_string().contains("blocks.2.linear.weight.dat"), "{error}");
    }
}

#[test]
fn the_tree_has_modules_in_their_order_and_tied_names() {
    let tree = module_tree(&Model::empty().store).unwrap();
    let names: Vec<&str> = tree.tensors().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names[0], "words.weight");
    assert_eq!(
        names[1..5],
        ["blocks.0.linear.weight", "blocks.0.linear.bias", "blocks.0.norm.weight", "blocks.0.norm.bias"]
    );
    assert_eq!(names[names.len() - 2..], ["decoder.weight", "scale"], "buffers of a module come last");
    let decoder = tree.tensors().find(|tensor| tensor.name == "decoder.weight").unwrap();
    assert_eq!(decoder.tied_to.as_deref(), Some("words.weight"));
    assert_eq!(tree.module_bytes("blocks.0", &Default::default()), Some(4 * (16 * 16 + 3 * 16)));
}

#[test]
fn models_take_turns_on_the_device() {
    let (first, second) = (Model::in_memory(), Model::in_memory());
    let wanted = first.forward(&ids()).unwrap();
    let first_hook = cpu_offload_with_hook(&first.store, None, None).unwrap();
    let second_hook = cpu_offload_with_hook(&second.store, Some(MapDevice::Cpu), Some(&first_hook)).unwrap();
    let are_there = || [first_hook.is_on_device(), second_hook.is_on_device()];
    assert_eq!(are_there(), [false, false]);
    assert_eq!(first.forward(&ids()).unwrap(), wanted);
    assert_eq!(are_there(), [true, false]);
    assert_eq!(second.forward(&ids()).unwrap(), wanted);
    assert_eq!(are_there(), [false, true]);
    second_hook.offload().unwrap();
    assert_eq!(are_there(), [false, false]);
    assert!(cpu_offload_with_hook(&first.store, None, None).unwrap_err().is_big_model(), "it has a hook");
    assert!(first.store.to_device(Device::Cpu).is_err());
    // Parameters stay those that are trained.
    first.forward(&ids()).unwrap().sum(None).backward();
    assert!(first.words.weight.grad().is_some());
    first_hook.remove().unwrap();
    assert!(first.words.weight.requires_grad() && !first.words.weight.is_dispatched());
    first.store.to_device(Device::Cpu).unwrap();
    let empty = Model::empty();
    assert!(cpu_offload_with_hook(&empty.store, None, None).unwrap_err().to_string().contains("no value yet"));
}
