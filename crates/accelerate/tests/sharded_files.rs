//! Weights of sharded models in files: written by all ranks together, whole for every reader, and safe from what fails on
//! one rank.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::checkpoint::{LoadOptions, load_checkpoint_in_model, load_file, save_model_weights};
use accelerate::nn::BufferOptions;
use accelerate::nn::*;
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, AutoWrapPolicy, FloatType, FullyShardedDataParallelPlugin, ProjectConfiguration,
    Result, SaveModelOptions, ShardingStrategy, testing,
};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const STRATEGIES: [ShardingStrategy; 4] = [
    ShardingStrategy::FullShard,
    ShardingStrategy::ShardGradOp,
    ShardingStrategy::OptimizerState,
    ShardingStrategy::OptimizerStateAndGradients,
];

/// Kind, shape and bytes of tensors by name.
type Contents = BTreeMap<String, (Kind, Vec<i64>, Vec<u8>)>;

fn sharded(strategy: ShardingStrategy) -> AcceleratorBuilder {
    Accelerator::builder().fsdp_plugin(FullyShardedDataParallelPlugin {
        sharding_strategy: Some(strategy),
        auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap),
        ..Default::default()
    })
}

/// Tied, frozen, scalar and empty parameters, odd sizes, two element types, and buffers of which one is not saved.
fn store() -> Result<ParamStore> {
    let store = ParamStore::new(Device::Cpu);
    let root = store.root();
    let embed = Embedding::new(&root / "embed", 11, 5, Default::default())?;
    for block in 0..3 {
        let path = &root / "blocks" / block;
        Linear::new(&path / "up", 5, 7, Default::default())?;
        let half = Tensor::zeros([7, 3], (Kind::BFloat16, Device::Cpu));
        (&path / "down").param("weight", half)?;
    }
    root.param("scale", ([0i64; 0], Init::Ones))?;
    root.param("empty", ([0, 3], Init::Ones))?;
    BatchNorm1d::new(&root / "norm", 5, Default::default())?;
    root.buffer("scratch", Tensor::zeros([2], (Kind::Float, Device::Cpu)), BufferOptions { persistent: false })?;
    (&root / "head").alias("weight", &embed.weight)?;
    store.get("blocks.2.up.weight").unwrap().set_requires_grad(false)?;
    Ok(store)
}

/// Other values for each seed, name and position.
fn fill(store: &ParamStore, seed: f64) -> Result<()> {
    for (index, param) in store.parameters().iter().chain(&store.buffers()).enumerate() {
        let values = Tensor::arange(param.numel() as i64, (Kind::Double, Device::Cpu)) * 0.7 + index as f64;
        param.copy_(&((values.sin() + seed) * 8.0).reshape(param.shape()))?;
    }
    Ok(())
}

fn prepared(accelerator: &Accelerator, seed: f64) -> Result<ParamStore> {
    let store = store()?;
    fill(&store, seed + 1000.0)?;
    accelerator.prepare(ModuleFn::new(&store, |input: &Tensor| Ok(input.shallow_clone())))?;
    fill(&store, seed)?;
    Ok(store)
}

fn contents<'a>(tensors: impl Iterator<Item = (&'a str, &'a Tensor)>) -> Contents {
    let describe = |tensor: &Tensor| {
        let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
        tensor.copy_data_u8(&mut bytes, tensor.numel());
        (tensor.kind(), tensor.size(), bytes)
    };
    tensors.map(|(name, tensor)| (name.to_owned(), describe(tensor))).collect()
}

/// What a model that was never sharded holds.
fn wanted(seed: f64) -> Contents {
    let store = store().unwrap();
    fill(&store, seed).unwrap();
    contents(store.state_dict().unwrap().iter())
}

fn listing(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn weight_files(folder: &Path) -> Vec<PathBuf> {
    listing(folder).into_iter().filter(|name| name.ends_with(".safetensors")).map(|name| folder.join(name)).collect()
}

/// What a folder holds for a reader that knows nothing of ranks.
fn read(folder: &Path) -> Contents {
    let mut all = Contents::new();
    for file in weight_files(folder) {
        all.extend(contents(load_file(file).unwrap().iter()));
    }
    let plain = store().unwrap();
    load_checkpoint_in_model(&plain, folder, &LoadOptions::default()).unwrap();
    assert_eq!(contents(plain.state_dict().unwrap().iter()), all);
    all
}

fn save(world_size: usize, strategy: ShardingStrategy, seed: f64, folder: &Path) {
    testing::ranks(world_size, sharded(strategy), |accelerator| {
        accelerator.save_model(&prepared(&accelerator, seed)?, folder, &Default::default())
    })
    .unwrap();
}

/// The error of each rank.
fn failed_save(world_size: usize, seed: f64, folder: &Path) -> Vec<String> {
    testing::ranks(world_size, sharded(ShardingStrategy::FullShard), |accelerator| {
        let error = accelerator.save_model(&prepared(&accelerator, seed)?, folder, &Default::default()).unwrap_err();
        assert!(error.is_weights(), "{error}");
        Ok(error.to_string())
    })
    .unwrap()
}

#[test]
fn weights_move_from_any_number_of_ranks_to_any_other() {
    for (number, strategy) in STRATEGIES.into_iter().enumerate() {
        for saving in 1..=4 {
            let (folder, seed) = (TempDir::new().unwrap(), (10 * number + saving) as f64);
            save(saving, strategy, seed, folder.path());
            assert_eq!(read(folder.path()), wanted(seed), "{saving} ranks, {strategy:?}");
            assert!(weight_files(folder.path()).len() >= saving, "{:?}", listing(folder.path()));
            for loading in 1..=4 {
                let other = STRATEGIES[(number + loading) % STRATEGIES.len()];
                testing::ranks(loading, sharded(other), |accelerator| {
                    let store = prepared(&accelerator, 500.0)?;
                    // Whole parameters that are here already have to be gathered anew.
                    store.state_dict()?;
                    accelerator.load_checkpoint_in_model(&store, folder.path())?;
                    let found = contents(store.state_dict()?.iter());
                    assert_eq!(found, wanted(seed), "from {saving} to {loading} ranks, {strategy:?} to {other:?}");
                    Ok(())
                })
                .unwrap();
            }
        }
    }
}

#[test]
fn files_are_balanced_and_no_larger_than_asked_for() {
    for (max_shard_size, num_ranks) in [("10GB", 3), ("100B", 3), ("1B", 2)] {
        let folder = TempDir::new().unwrap();
        testing::ranks(num_ranks, sharded(ShardingStrategy::FullShard), |accelerator| {
            let options = SaveModelOptions { max_shard_size: max_shard_size.to_owned(), ..Default::default() };
            accelerator.save_model(&prepared(&accelerator, 1.0)?, folder.path(), &options)
        })
        .unwrap();
        assert_eq!(read(folder.path()), wanted(1.0));
        let files = weight_files(folder.path());
        let sizes: Vec<Vec<usize>> = files
            .iter()
            .map(|file| contents(load_file(file).unwrap().iter()).values().map(|(_, _, bytes)| bytes.len()).collect())
            .collect();
        let bytes: Vec<usize> = sizes.iter().map(|sizes| sizes.iter().sum()).collect();
        let index: serde_json::Value =
            serde_json::from_slice(&fs::read(folder.path().join("model.safetensors.index.json")).unwrap()).unwrap();
        assert_eq!(index["metadata"]["total_size"], bytes.iter().sum::<usize>());
        match max_shard_size {
            "10GB" => {
                assert_eq!(files.len(), num_ranks);
                let largest = sizes.concat().into_iter().max().unwrap();
                assert!(bytes.iter().max().unwrap() - bytes.iter().min().unwrap() <= largest, "{bytes:?}");
            }
            "100B" => assert!(sizes.iter().all(|own| own.len() == 1 || own.iter().sum::<usize>() <= 100), "{sizes:?}"),
            // Empty tensors take no room.
            _ => assert!(sizes.iter().all(|own| own.iter().filter(|bytes| **bytes > 0).count() <= 1), "{sizes:?}"),
        }
    }
}

#[test]
fn one_rank_and_replicas_write_what_they_always_wrote() {
    let plain = TempDir::new().unwrap();
    let store = store().unwrap();
    fill(&store, 3.0).unwrap();
    save_model_weights(&store, plain.path(), &SaveModelOptions::default()).unwrap();
    let bytes = fs::read(plain.path().join("model.safetensors")).unwrap();
    for (world_size, builder) in [(1, sharded(ShardingStrategy::FullShard)), (2, Accelerator::builder())] {
        let folder = TempDir::new().unwrap();
        testing::ranks(world_size, builder, |accelerator| {
            accelerator.save_model(&prepared(&accelerator, 3.0)?, folder.path(), &Default::default())
        })
        .unwrap();
        assert_eq!(listing(folder.path()), ["model.manifest.json", "model.safetensors"]);
        assert_eq!(fs::read(folder.path().join("model.safetensors")).unwrap(), bytes, "{world_size} ranks");
    }
}

#[test]
fn every_save_replaces_the_one_before() {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("config.json"), "mine").unwrap();
    // What a process that was killed while it wrote has left.
    fs::write(folder.path().join(".model.4242.saving"), "half").unwrap();
    for (seed, world_size) in [1, 4, 2, 2, 3, 1].into_iter().enumerate() {
        save(world_size, ShardingStrategy::FullShard, seed as f64, folder.path());
        assert_eq!(read(folder.path()), wanted(seed as f64), "{world_size} ranks");
        let num_files = if world_size == 1 { 1 } else { world_size + 1 };
        assert_eq!(listing(folder.path()).len(), num_files + 2, "{:?}", listing(folder.path()));
    }
}

#[test]
fn what_is_in_the_way_of_a_rank_is_named_on_all_and_the_next_load_finishes_the_save() {
    let folder = TempDir::new().unwrap();
    save(3, ShardingStrategy::FullShard, 1.0, folder.path());
    let file = folder.path().join("model-00002-of-00003.safetensors");
    fs::remove_file(&file).unwrap();
    fs::create_dir_all(file.join("in the way")).unwrap();
    for text in failed_save(3, 2.0, folder.path()) {
        let parts = ["because rank 0 failed", "model-00002", "free what is in the way"];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
    assert!(!listing(folder.path()).contains(&"model.safetensors.index.json".to_owned()));
    fs::remove_dir_all(&file).unwrap();
    let store = store().unwrap();
    load_checkpoint_in_model(&store, folder.path(), &LoadOptions::default()).unwrap();
    assert_eq!(read(folder.path()), wanted(2.0));
    save(3, ShardingStrategy::FullShard, 3.0, folder.path());
    assert_eq!(read(folder.path()), wanted(3.0));
}

/// Each rank saves with what `of_rank` says; returns their errors.
fn disagreeing(of_rank: impl Fn(usize) -> (PathBuf, &'static str) + Sync) -> Vec<String> {
    disagreeing_in_type(of_rank, |_| None)
}

/// The same with a type to write in.
fn disagreeing_in_type(
    of_rank: impl Fn(usize) -> (PathBuf, &'static str) + Sync,
    dtype: impl Fn(usize) -> Option<FloatType> + Sync,
) -> Vec<String> {
    testing::ranks(3, sharded(ShardingStrategy::FullShard), |accelerator| {
        let (folder, size) = of_rank(accelerator.process_index());
        let dtype = dtype(accelerator.process_index());
        let options = SaveModelOptions { max_shard_size: size.to_owned(), dtype, ..Default::default() };
        let store = prepared(&accelerator, 2.0)?;
        let error = accelerator.save_model(&store, folder, &options).unwrap_err();
        // The ranks are in step: whatever follows works.
        assert_eq!(contents(store.state_dict()?.iter()), wanted(2.0));
        Ok(error.to_string())
    })
    .unwrap()
}

#[test]
fn ranks_that_do_not_ask_for_the_same_are_told() {
    let (folder, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    save(3, ShardingStrategy::FullShard, 1.0, folder.path());
    let before = listing(folder.path());
    let own = || folder.path().to_owned();
    let cases: Vec<(Vec<String>, &[&str])> = vec![
        (disagreeing(|rank| (own(), if rank == 2 { "1GBB" } else { "1GB" })), &["rank 2 failed", "1GBB"]),
        (
            disagreeing(|rank| (own(), if rank == 2 { "10B" } else { "1GB" })),
            &["3 files", "of at most 10 B", "max_shard"],
        ),
        (
            disagreeing_in_type(
                |_| (own(), "1GB"),
                |rank| Some(if rank == 2 { FloatType::Float16 } else { FloatType::BFloat16 }),
            ),
            &["save the same model with the same max_shard_size and dtype"],
        ),
        (
            disagreeing(|rank| (if rank == 1 { other.path().to_owned() } else { own() }, "1GB")),
            &["rank 1 failed", "another folder", "save_on_each_node"],
        ),
    ];
    for (texts, parts) in cases {
        for text in texts {
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        }
    }
    assert_eq!(listing(folder.path()), before);
    assert!(listing(other.path()).is_empty());
    assert_eq!(read(folder.path()), wanted(1.0));
}

#[test]
fn on_each_node_one_process_writes_everything() {
    let folder = TempDir::new().unwrap();
    let project = ProjectConfiguration { save_on_each_node: Some(true), ..Default::default() };
    let builder = sharded(ShardingStrategy::FullShard).project_config(project);
    let nowhere = folder.path().join("file").join("nowhere");
    fs::write(folder.path().join("file"), "").unwrap();
    testing::ranks(3, builder.clone(), |accelerator| {
        let store = prepared(&accelerator, 1.0)?;
        let own = if accelerator.is_local_main_process() { &folder.path().join("saved") } else { &nowhere };
        accelerator.save_model(&store, own, &Default::default())
    })
    .unwrap();
    assert_eq!(listing(&folder.path().join("saved")), ["model.manifest.json", "model.safetensors"]);
    assert_eq!(read(&folder.path().join("saved")), wanted(1.0));

    let texts = testing::ranks(3, builder, |accelerator| {
        let error = accelerator.save_model(&prepared(&accelerator, 1.0)?, &nowhere, &Default::default()).unwrap_err();
        Ok(error.to_string())
    })
    .unwrap();
    for text in texts {
        assert!(text.contains("rank 0 failed: cannot create") && text.contains("nowhere"), "{text}");
    }
}

#[test]
fn a_missing_parameter_is_missing_on_every_rank() {
    let folder = TempDir::new().unwrap();
    let mut state: StateDict = store().unwrap().state_dict().unwrap();
    state = state.into_iter().filter(|(name, _)| name != "scale" && name != "norm.bias").collect();
    accelerate::checkpoint::save_file(&state, folder.path().join("model.safetensors")).unwrap();
    // Of the scalar, three of four ranks have no element.
    testing::ranks(4, sharded(ShardingStrategy::FullShard), |accelerator| {
        let store = prepared(&accelerator, 1.0)?;
        let text = accelerator.load_checkpoint_in_model(&store, folder.path()).unwrap_err().to_string();
        assert!(text.contains("2 missing: scale, norm.bias"), "rank {}: {text}", accelerator.process_index());
        assert_eq!(contents(store.state_dict()?.iter()), wanted(1.0), "nothing was changed");
        Ok(())
    })
    .unwrap();
}
