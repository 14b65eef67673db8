//! Checkpoints of whole runs: a run goes on as if nothing had been, on as many processes or on others, and whatever is not
//! a whole checkpoint is refused.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::data::Generator;
use accelerate::data::{DataLoader, DataLoaderShard, VecDataset};
use accelerate::nn::{BatchNorm1d, Linear, Module, ModuleFn, ParamStore};
use accelerate::optim::{AcceleratedOptimizer, AcceleratedScheduler, AdamW, LinearWithWarmup};
use accelerate::tch::{Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, GradScalerKwargs,
    MixedPrecision, PreparedModel, ProjectConfiguration, Result, ShardingStrategy, StateDictType, testing,
};
use rstest::rstest;
use std::collections::BTreeMap;
use std::path::Path;

/// How the processes of a run divide a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharding {
    Ddp,
    StaticGraph,
    Fsdp(ShardingStrategy),
}
use Sharding::{Ddp, Fsdp, StaticGraph};
use ShardingStrategy::{FullShard, HybridShard, OptimizerStateAndGradients as ShardGradOp};

fn builder(sharding: Sharding, world_size: usize) -> AcceleratorBuilder {
    let builder = Accelerator::builder().gradient_accumulation_steps(2);
    match sharding {
        Ddp => builder,
        StaticGraph => {
            builder.kwargs_handler(DistributedDataParallelKwargs { static_graph: Some(true), ..Default::default() })
        }
        Fsdp(strategy) => builder.fsdp_plugin(FullyShardedDataParallelPlugin {
            sharding_strategy: Some(strategy),
            dp_shard_size: (strategy == HybridShard).then_some((world_size / 2).max(1)),
            ..Default::default()
        }),
    }
}

struct Training<M> {
    accelerator: Accelerator,
    model: PreparedModel<M>,
    optimizer: AcceleratedOptimizer<AdamW>,
    loader: DataLoaderShard<Tensor>,
    scheduler: AcceleratedScheduler<LinearWithWarmup>,
}

/// 48 rows in an order that a seed decides.
fn training(accelerator: Accelerator) -> Result<Training<impl Module<Input = Tensor, Output = Tensor>>> {
    let store = ParamStore::new(accelerator.device());
    let hidden = Linear::new(store.root() / "hidden", 1, 5, Default::default())?;
    let head = Linear::new(store.root() / "head", 5, 1, Default::default())?;
    hidden.weight.copy_(&Tensor::from_slice(&[0.5f32, -1.0, 2.0, 0.25, -0.125]).f_view([5, 1])?)?;
    head.weight.copy_(&Tensor::from_slice(&[1f32, 0.5, -0.5, 0.25, 2.0]).f_view([1, 5])?)?;
    for bias in [&hidden.bias, &head.bias].into_iter().flatten() {
        bias.copy_(&Tensor::zeros(bias.shape(), (Kind::Float, accelerator.device())))?;
    }
    let optimizer = AdamW::new(&store, 0.05)?;
    let scheduler = LinearWithWarmup::new(&optimizer, 2, 40);
    let rows = VecDataset::new((0..48).map(|row| row as f32 / 16.0).collect());
    let generator = Generator::new_cpu()?;
    generator.manual_seed(7)?;
    let loader = DataLoader::builder(rows).batch_size(2).shuffle(true).generator(generator).build()?;
    let model =
        ModuleFn::new(&store, move |rows: &Tensor| head.forward(&hidden.forward(&rows.f_view([-1, 1])?)?.f_tanh()?));
    let (model, optimizer, loader, scheduler) = accelerator.prepare((model, optimizer, loader, scheduler))?;
    Ok(Training { accelerator, model, optimizer, loader, scheduler })
}

impl<M: Module<Input = Tensor, Output = Tensor>> Training<M> {
    /// Trains on the next batches of this epoch, and says what rows were seen and what came of it.
    fn train(&mut self, num_batches: usize) -> Result<(Vec<f64>, Vec<f64>)> {
        self.train_and_save(num_batches, None)
    }

    /// The same, saved after so many of the batches: what is returned is of those that follow.
    fn train_and_save(&mut self, num_batches: usize, save: Option<(usize, &Path)>) -> Result<(Vec<f64>, Vec<f64>)> {
        let (mut rows, mut results) = (Vec::new(), Vec::new());
        for (number, batch) in self.loader.iter()?.take(num_batches).enumerate() {
            let batch = batch?;
            rows.extend(numbers(&batch)?);
            self.accelerator.accumulate(&self.model, || {
                let loss = self.model.forward(&batch)?.square().mean(None);
                results.push(loss.double_value(&[]));
                self.accelerator.backward(&loss)?;
                self.optimizer.step()?;
                self.scheduler.step()?;
                self.optimizer.zero_grad()
            })?;
            results.extend(self.scheduler.get_last_lr());
            if let Some((_, path)) = save.filter(|(after, _)| *after == number + 1) {
                self.accelerator.save_state(path)?;
                rows.clear();
                results.clear();
            }
        }
        Ok((rows, results))
    }

    /// All parameters and the whole state of the optimizer, on every rank.
    fn full_state(&self) -> Result<BTreeMap<String, Vec<f64>>> {
        let model = self.model.params().state_dict()?;
        let optimizer = self.optimizer.full_state_dict()?;
        let model = model.iter().map(|(name, tensor)| (name.to_owned(), numbers(tensor)));
        let optimizer = optimizer.tensors.iter().map(|(name, tensor)| (name.clone(), numbers(tensor)));
        model.chain(optimizer).map(|(name, numbers)| Ok((name, numbers?))).collect()
    }
}

fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(Vec::<f64>::try_from(&tensor.detach().to_kind(Kind::Double).flatten(0, -1))?)
}

#[rstest]
fn a_run_goes_on_to_the_bit(
    #[values(1, 2, 3, 4)] world_size: usize,
    #[values(Ddp, StaticGraph, Fsdp(FullShard), Fsdp(ShardGradOp))] sharding: Sharding,
    // Of windows of two: after the first, between two others, and in the middle of one.
    #[values(2, 4, 3)] num_batches: usize,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let undisturbed = testing::ranks(world_size, builder(sharding, world_size), |accelerator| {
        let mut training = training(accelerator)?;
        // Nothing is loaded here: what a checkpoint lacks, both runs would lack.
        Ok((training.train_and_save(num_batches + 3, Some((num_batches, &path)))?, training.full_state()?))
    })
    .unwrap();
    let resumed = testing::ranks(world_size, builder(sharding, world_size), |accelerator| {
        let mut training = training(accelerator)?;
        // Gradients that the program has by then are not those of the checkpoint.
        training.train(1)?;
        training.accelerator.load_state(&path)?;
        // To load what was just saved changes nothing.
        let (before, again) = (training.full_state()?, folder.path().join("again"));
        training.accelerator.save_state(&again)?;
        training.accelerator.load_state(&again)?;
        assert_eq!(training.full_state()?, before);
        Ok((training.train(3)?, training.full_state()?))
    })
    .unwrap();
    assert_eq!(resumed, undisturbed);
}

#[rstest]
fn a_save_in_the_background_is_of_the_moment_of_its_call(
    #[values(1, 2, 3)] world_size: usize,
    #[values(Ddp, Fsdp(FullShard))] sharding: Sharding,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let at_the_call = testing::ranks(world_size, builder(sharding, world_size), |accelerator| {
        let mut training = training(accelerator)?;
        training.train(4)?;
        let at_the_call = training.full_state()?;
        training.accelerator.save_state_async(&path)?;
        training.train(4)?;
        assert_ne!(training.full_state()?, at_the_call);
        training.accelerator.wait_for_save()?;
        assert!(!training.accelerator.is_saving()?);
        Ok(at_the_call)
    })
    .unwrap();
    let loaded = testing::ranks(world_size, builder(sharding, world_size), |accelerator| {
        let training = training(accelerator)?;
        training.accelerator.load_state(&path)?;
        training.full_state()
    })
    .unwrap();
    assert_eq!(loaded, at_the_call);
}

/// Everything that waits for the save in the background.
#[rstest]
#[case::wait_for_save(|accelerator: &Accelerator, _: &Path| accelerator.wait_for_save())]
#[case::end_training(|accelerator: &Accelerator, _: &Path| accelerator.end_training())]
#[case::save_state(|accelerator: &Accelerator, path: &Path| accelerator.save_state(path).map(drop))]
#[case::save_state_async(|accelerator: &Accelerator, path: &Path| accelerator.save_state_async(path).map(drop))]
#[case::load_state(|accelerator: &Accelerator, path: &Path| accelerator.load_state(path).map(drop))]
fn what_goes_wrong_in_the_background_is_an_error_of_the_next_call_on_every_rank(
    #[case] next: fn(&Accelerator, &Path) -> Result<()>,
) {
    let folder = tempfile::tempdir().unwrap();
    let (file, good) = (folder.path().join("file"), folder.path().join("good"));
    std::fs::write(&file, "not a folder").unwrap();
    let errors = testing::ranks(2, builder(Ddp, 2), |accelerator| {
        let training = training(accelerator)?;
        training.accelerator.save_state(&good)?;
        training.accelerator.save_state_async(file.join("checkpoint"))?;
        let error = next(&training.accelerator, &good).map_err(|error| error.to_string());
        // It is told once, and the run can go on.
        next(&training.accelerator, &good)?;
        training.accelerator.end_training()?;
        Ok(error.unwrap_err())
    })
    .unwrap();
    for error in errors {
        assert!(error.contains("was not saved") && error.contains("checkpoint"), "{error}");
    }
}

#[test]
fn saves_in_the_background_follow_each_other_and_the_oldest_go() {
    let folder = tempfile::tempdir().unwrap();
    let builder = || builder(Ddp, 2).project_config(project(folder.path(), Some(1)));
    testing::ranks(2, builder(), |accelerator| {
        let mut training = training(accelerator)?;
        for number in 0..3 {
            training.train(2)?;
            let path = training.accelerator.save_state_async(None)?;
            assert!(path.ends_with(format!("checkpoint_{number}")));
        }
        // The last one is waited for when the accelerator goes.
        Ok(())
    })
    .unwrap();
    let names: Vec<_> =
        folder.path().join("checkpoints").read_dir().unwrap().map(|it| it.unwrap().file_name()).collect();
    assert_eq!(names, ["checkpoint_2"]);
    let loaded = testing::ranks(2, builder(), |accelerator| training(accelerator)?.accelerator.load_state(None));
    assert!(loaded.unwrap()[0].ends_with("checkpoint_2"));
}

/// What every rank has of a run that begins or goes on with `num_batches` batches.
type Seen = Vec<(Vec<f64>, BTreeMap<String, Vec<f64>>)>;

fn go_on(
    world_size: usize,
    sharding: Sharding,
    from: Option<&Path>,
    num_batches: usize,
    to: &Path,
) -> (BTreeMap<String, Vec<f64>>, Seen) {
    let seen = testing::ranks(world_size, builder(sharding, world_size), |accelerator| {
        let mut training = training(accelerator)?;
        if let Some(from) = from {
            training.accelerator.load_state(from)?;
        }
        let loaded = training.full_state()?;
        let (rows, _) = training.train(num_batches)?;
        training.accelerator.save_state(to)?;
        Ok((loaded, (rows, training.full_state()?)))
    })
    .unwrap();
    let (loaded, seen): (Vec<_>, Vec<_>) = seen.into_iter().unzip();
    assert!(loaded.windows(2).all(|pair| pair[0] == pair[1]), "ranks loaded different states");
    (loaded[0].clone(), seen)
}

#[test]
fn any_number_of_processes_goes_on_with_any_way_to_shard() {
    let folder = tempfile::tempdir().unwrap();
    let path = |number: usize| folder.path().join(number.to_string());
    // In rows of all ranks: 2 ranks x 2 batches x 2 rows, and so on. Every step takes two batches of each rank.
    let runs = [(2, Ddp), (1, Ddp), (4, Fsdp(ShardGradOp)), (3, Fsdp(FullShard)), (4, Fsdp(HybridShard)), (2, Ddp)];
    let mut rows: Vec<f64> = Vec::new();
    let mut before: Option<BTreeMap<String, Vec<f64>>> = None;
    for (number, (world_size, sharding)) in runs.into_iter().enumerate() {
        let from = number.checked_sub(1).map(path);
        let (loaded, seen) = go_on(world_size, sharding, from.as_deref(), 2, &path(number));
        if let Some(state) = &before {
            assert_eq!(&loaded, state, "run {number}: {world_size} ranks, {sharding:?}");
        }
        rows.extend(seen.iter().flat_map(|(rows, _)| rows));
        before = Some(seen[0].1.clone());
    }
    // 4 x (2 + 1 + 4 + 3 + 4 + 2) rows are more than an epoch of 48; the first five runs are 56, so compare what fits.
    rows.truncate(40);
    rows.sort_by(f64::total_cmp);
    rows.dedup();
    assert_eq!(rows.len(), 40, "no row of the epoch was seen twice");
}

#[test]
fn files_of_a_model_that_is_not_sharded_are_those_of_hugging_face() {
    let folder = tempfile::tempdir().unwrap();
    let expected = testing::ranks(2, builder(Ddp, 2), |accelerator| {
        let mut training = training(accelerator)?;
        training.train(2)?;
        training.accelerator.save_state(folder.path())?;
        training.full_state()
    })
    .unwrap();
    let mut names: Vec<String> =
        folder.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(
        names,
        [
            "checkpoint.json",
            "checkpoint.manifest.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "optimizer-00001-of-00002.safetensors",
            "optimizer-00002-of-00002.safetensors",
            "random_states-00001-of-00002.safetensors",
            "random_states-00002-of-00002.safetensors",
        ]
    );
    let alone = Accelerator::builder().cpu(true).build().unwrap();
    let training = training(alone).unwrap();
    training.accelerator.load_checkpoint_in_model(&training.model, folder.path()).unwrap();
    let loaded = training.full_state().unwrap();
    assert!(loaded.iter().all(|(name, numbers)| expected[0][name] == *numbers));
}

#[test]
fn the_loss_scale_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let builder = || {
        let scaler = GradScalerKwargs { init_scale: Some(4.0), growth_interval: Some(2), ..Default::default() };
        Accelerator::builder().cpu(true).mixed_precision(MixedPrecision::Fp16).kwargs_handler(scaler)
    };
    let scale = |accelerator: &Accelerator| accelerator.state_dict().unwrap()["scaler"].values["scale"].as_f64();
    let mut first = training(builder().build().unwrap()).unwrap();
    first.train(4).unwrap();
    assert_eq!(scale(&first.accelerator), Some(16.0));
    first.accelerator.save_state(folder.path()).unwrap();
    let second = training(builder().build().unwrap()).unwrap();
    second.accelerator.load_state(folder.path()).unwrap();
    assert_eq!(scale(&second.accelerator), Some(16.0));
}

fn project(folder: &Path, total_limit: Option<usize>) -> ProjectConfiguration {
    ProjectConfiguration {
        project_dir: Some(folder.to_owned()),
        automatic_checkpoint_naming: Some(true),
        total_limit,
        ..Default::default()
    }
}

#[test]
fn automatic_names_go_on_and_the_oldest_go() {
    let folder = tempfile::tempdir().unwrap();
    let start = || {
        let builder = Accelerator::builder().cpu(true).project_config(project(folder.path(), Some(2)));
        training(builder.build().unwrap()).unwrap()
    };
    let names = || {
        let mut names: Vec<String> = folder
            .path()
            .join("checkpoints")
            .read_dir()
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    let first = start();
    (0..3).for_each(|_| drop(first.accelerator.save_state(None).unwrap()));
    assert_eq!(names(), ["checkpoint_1", "checkpoint_2"]);
    let second = start();
    assert!(second.accelerator.load_state(None).unwrap().ends_with("checkpoint_2"));
    assert!(second.accelerator.save_state(None).unwrap().ends_with("checkpoint_3"));
    // A run that did not load numbers on, too, and replaces nothing.
    assert!(start().accelerator.save_state(None).unwrap().ends_with("checkpoint_4"));
    assert_eq!(names(), ["checkpoint_3", "checkpoint_4"]);
    // What was not completed is passed over, and what is not ours stays.
    std::fs::remove_file(folder.path().join("checkpoints/checkpoint_4/checkpoint.manifest.json")).unwrap();
    std::fs::create_dir(folder.path().join("checkpoints/checkpoint_0")).unwrap();
    std::fs::write(folder.path().join("checkpoints/checkpoint_0/model.safetensors"), "of Python's").unwrap();
    let third = start();
    assert!(third.accelerator.load_state(None).unwrap().ends_with("checkpoint_3"));
    assert!(third.accelerator.save_state(None).unwrap().ends_with("checkpoint_5"));
    assert_eq!(names(), ["checkpoint_0", "checkpoint_3", "checkpoint_4", "checkpoint_5"]);
}

#[test]
fn the_best_checkpoints_and_every_so_many_stay() {
    let folder = tempfile::tempdir().unwrap();
    let project = ProjectConfiguration { keep_every: Some(4), keep_best: Some(1), ..project(folder.path(), Some(1)) };
    let training = training(Accelerator::builder().cpu(true).project_config(project).build().unwrap()).unwrap();
    for accuracy in [f64::NAN, 0.5, f64::INFINITY, 0.25, 0.75, f64::NEG_INFINITY, 0.6] {
        training.accelerator.set_checkpoint_metric(accuracy);
        training.accelerator.save_state(None).unwrap();
    }
    let mut names: Vec<_> =
        folder.path().join("checkpoints").read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["checkpoint_0", "checkpoint_2", "checkpoint_4", "checkpoint_6"]);
}

#[test]
fn a_save_into_the_same_folder_leaves_nothing_of_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    go_on(3, Fsdp(FullShard), None, 2, folder.path());
    std::fs::write(folder.path().join("notes.txt"), "the user's own").unwrap();
    let (_, seen) = go_on(1, Ddp, Some(folder.path()), 2, folder.path());
    let names: Vec<_> = folder.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!names.iter().any(|name| name.to_string_lossy().contains("rank-")), "{names:?}");
    assert!(names.iter().any(|name| name == "notes.txt"));
    let (loaded, _) = go_on(2, Fsdp(FullShard), Some(folder.path()), 0, &folder.path().join("other"));
    assert_eq!(loaded, seen[0].1);
}

#[test]
fn a_flipped_bit_in_any_file_is_an_error_that_names_it_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    go_on(2, Fsdp(FullShard), None, 2, folder.path());
    for entry in folder.path().read_dir().unwrap() {
        let path = entry.unwrap().path();
        let content = std::fs::read(&path).unwrap();
        let mut damaged = content.clone();
        let at = damaged.len() * 3 / 4;
        damaged[at] ^= 4;
        std::fs::write(&path, &damaged).unwrap();
        let error = testing::ranks(2, builder(Fsdp(FullShard), 2), |accelerator| {
            let training = training(accelerator)?;
            let before = training.full_state()?;
            let loaded = training.accelerator.load_state(folder.path());
            assert!(loaded.is_err(), "{} was loaded", path.display());
            assert_eq!(training.full_state()?, before);
            loaded
        })
        .unwrap_err();
        let name = path.file_name().unwrap().to_str().unwrap();
        // The manifest says of another file what is not true of it.
        assert!(error.to_string().contains(name) || name == "checkpoint.manifest.json", "{error}");
        std::fs::write(&path, &content).unwrap();
    }
    go_on(2, Fsdp(FullShard), Some(folder.path()), 0, &folder.path().join("other"));
}

/// What a step would use is part of a checkpoint, and what it has used is not.
#[test]
fn gradients_between_a_backward_pass_and_its_step_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let run = |resumes: bool, steps_before: bool| {
        let Training { accelerator, model, mut optimizer, .. } =
            training(Accelerator::builder().cpu(true).build().unwrap()).unwrap();
        let path = folder.path().join(steps_before.to_string());
        if resumes {
            accelerator.load_state(&path).unwrap();
        } else {
            let loss = model.forward(&Tensor::from_slice(&[1f32, -2.0])).unwrap().square().mean(None);
            accelerator.backward(&loss).unwrap();
            if steps_before {
                optimizer.step().unwrap();
            }
            accelerator.save_state(&path).unwrap();
            let has_gradients = path.join("gradients_0.safetensors").exists();
            assert_eq!(has_gradients, !steps_before);
        }
        optimizer.step().unwrap();
        model.params().state_dict().unwrap().iter().map(|(_, it)| numbers(it).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(run(false, false), run(true, false));
    run(false, true);
}

#[test]
fn what_cannot_be_saved_or_loaded_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = || Accelerator::builder().cpu(true).gradient_accumulation_steps(2).build().unwrap();
    let new_training = training;
    let mut training = training(accelerator()).unwrap();
    let error = |result: Result<_>| -> String {
        let error = result.map(|_: std::path::PathBuf| ()).unwrap_err();
        assert!(error.is_checkpoint(), "{error}");
        error.to_string()
    };
    assert!(error(training.accelerator.save_state(None)).contains("automatic_checkpoint_naming"));
    assert!(error(training.accelerator.load_state(None)).contains("no checkpoint"));
    assert!(error(training.accelerator.load_state(folder.path())).contains("not a checkpoint"));
    training.train(1).unwrap();
    training.accelerator.save_state(folder.path().join("open")).unwrap();
    let others = testing::ranks(2, builder(Ddp, 2), |accelerator| {
        let training = new_training(accelerator)?;
        Ok(error(training.accelerator.load_state(folder.path().join("open"))))
    });
    others.unwrap().iter().for_each(|error| assert!(error.contains("gradients that wait for a step"), "{error}"));
    let named = Accelerator::builder().cpu(true).project_config(project(folder.path(), None)).build().unwrap();
    assert!(error(named.save_state(folder.path())).contains("names folders itself"));
    training.train(1).unwrap();
    training.accelerator.save_state(folder.path()).unwrap();
    let loaded = accelerator().load_state(folder.path()).unwrap_err().to_string();
    assert!(loaded.contains("model, optimizer, scheduler was neither prepared nor registered"), "{loaded}");
    // A value that JSON turns into null is told when it is saved, and not when it is missing.
    let other = accelerator();
    let best = other.register_for_checkpointing(f64::INFINITY);
    assert!(error(other.save_state(folder.path().join("other"))).contains("JSON has neither infinities"));
    *best.lock() = 1.0;
    other.save_state(folder.path().join("other")).unwrap();
    *best.lock() = f64::INFINITY;
    other.load_state(folder.path().join("other")).unwrap();
    assert_eq!(*best.lock(), 1.0);
}

/// Both have a model.safetensors, or parts of it that have the same names.
#[rstest]
fn a_checkpoint_and_a_model_that_was_saved_by_itself_do_not_destroy_each_other(
    #[values(1, 2)] world_size: usize,
    #[values(true, false)] saves_model_first: bool,
) {
    let folder = tempfile::tempdir().unwrap();
    let whole = FullyShardedDataParallelPlugin { state_dict_type: Some(StateDictType::Full), ..Default::default() };
    let builder = match world_size {
        1 => Accelerator::builder().cpu(true),
        _ => Accelerator::builder().fsdp_plugin(whole),
    };
    testing::ranks(world_size, builder, |accelerator| {
        let training = training(accelerator)?;
        let save_model = || training.accelerator.save_model(&training.model, folder.path(), &Default::default());
        let save_state = || training.accelerator.save_state(folder.path()).map(drop);
        let (first, second): (&dyn Fn() -> Result<()>, &dyn Fn() -> Result<()>) =
            if saves_model_first { (&save_model, &save_state) } else { (&save_state, &save_model) };
        first()?;
        let error = second().unwrap_err().to_string();
        assert!(error.contains(".safetensors belongs to the save of"), "{error}");
        first()?;
        match saves_model_first {
            true => training.accelerator.load_checkpoint_in_model(&training.model, folder.path()).map(drop),
            false => training.accelerator.load_state(folder.path()).map(drop),
        }
    })
    .unwrap();
}

/// Each rank has statistics of its own rows until the next forward pass takes over those of rank 0.
#[test]
fn buffers_are_those_of_rank_0() {
    let folder = tempfile::tempdir().unwrap();
    let run = |loads: bool| {
        testing::ranks(2, Accelerator::builder(), |accelerator| {
            let store = ParamStore::new(accelerator.device());
            let norm = BatchNorm1d::new(store.root(), 3, Default::default())?;
            let model = accelerator.prepare(ModuleFn::new(&store, move |rows: &Tensor| norm.forward(rows)))?;
            if loads {
                accelerator.load_state(folder.path())?;
            } else {
                let rank = accelerator.process_index() as f64;
                let rows = Tensor::arange(12, (Kind::Float, accelerator.device())).view([4, 3]) * (rank + 1.0);
                accelerator.backward(&model.forward(&rows)?.square().sum(None))?;
                accelerator.save_state(folder.path())?;
            }
            let state = model.params().state_dict()?;
            state.iter().map(|(_, tensor)| numbers(tensor)).collect::<Result<Vec<_>>>()
        })
        .unwrap()
    };
    let saved = run(false);
    assert_eq!(saved[0], saved[1], "all ranks go on with the buffers of rank 0");
    assert_eq!(run(true), saved);
}

#[test]
fn registered_values_go_on_and_those_of_a_rank_stay_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let run = |world_size: usize, saves: bool| {
        testing::ranks(world_size, builder(Ddp, world_size), |accelerator| {
            let best = accelerator.register_for_checkpointing(0.5f64);
            let rank = accelerator.register_for_checkpointing(String::new());
            if saves {
                (*best.lock(), *rank.lock()) = (0.25, format!("rank {}", accelerator.process_index()));
                accelerator.save_state(folder.path())?;
            } else {
                accelerator.load_state(folder.path())?;
            }
            let found = (*best.lock(), rank.lock().clone());
            Ok(found)
        })
        .unwrap()
    };
    let saved = run(2, true);
    assert_eq!(run(2, false), saved);
    assert_eq!(run(3, false), vec![saved[0].clone(); 3]);
}
