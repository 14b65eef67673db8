//! `tests/test_state_checkpointing.py`: a run that loads what an earlier one saved goes on to the bit, and folders get their
//! names and go by the rules.
//!
//! Two of its cases have no meaning here. `test_map_location` chooses where optimizers' states go: here they are always where
//! the parameters are. The half of every case that writes `pytorch_model.bin` is left out, because no checkpoint has pickles.

use crate::regression::mse;
use accelerate::data::{DataLoader, DataLoaderShard, TensorDataset};
use accelerate::nn::{Module, Param, ParamStore};
use accelerate::optim::{AcceleratedOptimizer, AcceleratedScheduler, AdamW, StepLr};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, PreparedModel, ProjectConfiguration, main_println, set_seed};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

pub(crate) fn run(folder: Option<&Path>) -> Result<()> {
    let folder = folder.context("this script needs --folder")?;
    let accelerator = Accelerator::builder().cpu(true).build()?;
    let case = |name: &str| Case { accelerator: &accelerator, folder: folder.join(name) };
    test_with_save_limit(&case("save_limit"))?;
    test_can_resume_training_with_folder(&case("with_folder"))?;
    test_can_resume_training(&case("resume"), true)?;
    let relative = Case { accelerator: &accelerator, folder: relative(&folder.join("relative"))? };
    // `test_can_resume_training_checkpoints_relative_path`: a path that is not absolute, and the newest of its checkpoints.
    test_can_resume_training(&relative, false)?;
    test_invalid_registration(&case("registration"))?;
    test_with_scheduler(&case("scheduler"))?;
    test_automatic_loading(&case("automatic"))?;
    test_checkpoint_deletion(&case("deletion"))?;
    main_println!(accelerator, "test_state_checkpointing: all checks passed");
    Ok(())
}

/// The processes, and a folder that they share and nobody else has.
struct Case<'a> {
    accelerator: &'a Accelerator,
    folder: PathBuf,
}

impl Case<'_> {
    /// Named automatically, as the reference's runs are.
    fn project(&self) -> ProjectConfiguration {
        ProjectConfiguration {
            project_dir: Some(self.folder.clone()),
            automatic_checkpoint_naming: Some(true),
            ..Default::default()
        }
    }

    fn start(&self, project: ProjectConfiguration) -> Result<Run> {
        Run::start(self.accelerator, project)
    }

    fn checkpoint(&self, number: usize) -> PathBuf {
        self.folder.join(format!("checkpoints/checkpoint_{number}"))
    }

    /// What is in the folder of the checkpoints, once no process changes it any more.
    fn checkpoints(&self) -> Result<Vec<String>> {
        self.accelerator.wait_for_everyone()?;
        let entries = fs::read_dir(self.folder.join("checkpoints"))?;
        let mut names =
            entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect::<Result<Vec<_>>>()?;
        names.sort();
        Ok(names)
    }
}

/// y = a x + b, begun at random.
struct DummyModel {
    store: ParamStore,
    a: Param,
    b: Param,
}

impl DummyModel {
    fn new(device: Device) -> Result<Self> {
        let store = ParamStore::new(device);
        let random = || Tensor::f_randn([1], (Kind::Float, device));
        let (a, b) = (store.root().param("a", random()?)?, store.root().param("b", random()?)?);
        Ok(Self { store, a, b })
    }
}

impl Module for DummyModel {
    type Input = Tensor;
    type Output = Tensor;

    fn forward(&self, x: &Tensor) -> accelerate::Result<Tensor> {
        Ok(x.f_mul(&self.a.get()?)?.f_add(&self.b.get()?)?)
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }
}

/// Everything that a process prepares.
struct Run {
    accelerator: Accelerator,
    model: PreparedModel<DummyModel>,
    optimizer: AcceleratedOptimizer<AdamW>,
    loader: DataLoaderShard<(Tensor, Tensor)>,
    scheduler: AcceleratedScheduler<StepLr>,
}

/// Name and value of every number that a run has, as text: equal texts are equal numbers.
type State = BTreeMap<String, String>;

impl Run {
    /// Ten batches of 16 points for one process, in an order that the seed decides.
    fn start(processes: &Accelerator, project: ProjectConfiguration) -> Result<Self> {
        set_seed(42);
        let accelerator = Accelerator::builder().project_config(project).build_from(processes)?;
        let model = DummyModel::new(accelerator.device())?;
        let optimizer = AdamW::new(model.params(), 1e-3)?;
        let scheduler = StepLr::new(&optimizer, 1, 0.99)?;
        let x = Tensor::f_randn([160, 1], (Kind::Float, accelerator.device()))?;
        let noise = x.f_randn_like()?.f_mul_scalar(0.1)?;
        let y = x.f_mul_scalar(2.0)?.f_add_scalar(3.0)?.f_add(&noise)?;
        let loader = DataLoader::builder(TensorDataset::new((x, y))?).batch_size(16).shuffle(true).build()?;
        let (model, optimizer, loader, scheduler) = accelerator.prepare((model, optimizer, loader, scheduler))?;
        Ok(Self { accelerator, model, optimizer, loader, scheduler })
    }

    /// Trains, and returns a random number that was drawn behind each epoch.
    fn train(&mut self, num_epochs: usize) -> Result<Vec<f64>> {
        let mut random = Vec::new();
        for _ in 0..num_epochs {
            for batch in self.loader.iter()? {
                let (x, y) = batch?;
                self.accelerator.backward(&mse(&self.model.forward(&x)?, &y)?)?;
                self.optimizer.step()?;
                self.optimizer.zero_grad()?;
            }
            random.push(Tensor::f_rand([1], (Kind::Double, Device::Cpu))?.f_double_value(&[0])?);
            self.scheduler.step()?;
        }
        Ok(random)
    }

    /// Of the objects whose names begin so.
    fn state(&self, kinds: &[&str]) -> Result<State> {
        let mut state = State::new();
        for (name, object) in self.accelerator.state_dict()? {
            if !kinds.iter().any(|kind| name.starts_with(kind)) {
                continue;
            }
            state.insert(name.clone(), object.values.to_string());
            for (tensor_name, tensor) in &object.tensors {
                let numbers = Vec::<f64>::try_from(&tensor.f_to_kind(Kind::Double)?.f_flatten(0, -1)?)?;
                let bits: Vec<u64> = numbers.into_iter().map(f64::to_bits).collect();
                state.insert(format!("{name}.{tensor_name}"), format!("{bits:x?}"));
            }
        }
        Ok(state)
    }

    /// Parameters and what the optimizer knows of them.
    fn learnt(&self) -> Result<State> {
        self.state(&["model", "optimizer"])
    }
}

/// The same path, by way of the working folder.
fn relative(path: &Path) -> Result<PathBuf> {
    let working = std::env::current_dir()?;
    let up = working.components().filter(|part| matches!(part, Component::Normal(_))).map(|_| Component::ParentDir);
    let down = std::path::absolute(path)?;
    Ok(up.chain(down.components().filter(|part| matches!(part, Component::Normal(_)))).collect())
}

fn test_with_save_limit(case: &Case<'_>) -> Result<()> {
    let run = case.start(ProjectConfiguration { total_limit: Some(1), ..case.project() })?;
    run.accelerator.save_state(None)?;
    run.accelerator.save_state(None)?;
    let found = case.checkpoints()?;
    ensure!(found == ["checkpoint_1"], "with a limit of one there are {found:?}");
    Ok(())
}

/// What a run that nobody disturbed becomes in three epochs.
struct Undisturbed {
    at_first: State,
    at_last: State,
    random: Vec<f64>,
}

impl Undisturbed {
    fn of(mut run: Run) -> Result<Self> {
        let at_first = run.learnt()?;
        let random = run.train(3)?;
        let at_last = run.learnt()?;
        ensure!(at_first != at_last, "training changed nothing");
        Ok(Self { at_first, at_last, random })
    }

    /// Two epochs, a checkpoint, and one epoch more come to the same.
    fn check(&self, mut run: Run, save_and_load: impl Fn(&Accelerator) -> Result<()>) -> Result<()> {
        ensure!(run.learnt()? == self.at_first, "what was loaded is not what was saved");
        let mut random = run.train(2)?;
        save_and_load(&run.accelerator)?;
        random.extend(run.train(1)?);
        let found = run.learnt()?;
        ensure!(found == self.at_last, "resumed to {found:?}, without interruption {:?}", self.at_last);
        ensure!(random == self.random, "random numbers {random:?}, without interruption {:?}", self.random);
        Ok(())
    }
}

fn test_can_resume_training_with_folder(case: &Case<'_>) -> Result<()> {
    let (initial, checkpoint) = (case.folder.join("initial"), case.folder.join("checkpoint"));
    let run = case.start(Default::default())?;
    run.accelerator.save_state(&initial)?;
    let undisturbed = Undisturbed::of(run)?;
    let mut run = case.start(Default::default())?;
    // Other numbers than those that are loaded, which the reference has only by luck of the seed.
    run.train(1)?;
    run.accelerator.load_state(&initial)?;
    undisturbed.check(run, |accelerator| {
        accelerator.save_state(&checkpoint)?;
        accelerator.load_state(&checkpoint)?;
        Ok(())
    })
}

/// The first checkpoint is named, or found by itself.
fn test_can_resume_training(case: &Case<'_>, names_the_first: bool) -> Result<()> {
    let run = case.start(case.project())?;
    run.accelerator.save_state(None)?;
    let undisturbed = Undisturbed::of(run)?;
    let mut run = case.start(ProjectConfiguration { iteration: Some(1), ..case.project() })?;
    run.train(1)?;
    let loaded = match names_the_first {
        true => run.accelerator.load_state(case.checkpoint(0))?,
        false => run.accelerator.load_state(None)?,
    };
    ensure!(loaded == case.checkpoint(0), "loaded {}", loaded.display());
    undisturbed.check(run, |accelerator| {
        accelerator.save_state(None)?;
        accelerator.load_state(case.checkpoint(1))?;
        Ok(())
    })
}

/// What has no state does not compile here. What JSON cannot hold is refused when it is saved, on all processes, and nothing is
/// written.
fn test_invalid_registration(case: &Case<'_>) -> Result<()> {
    let run = case.start(Default::default())?;
    let value = run.accelerator.register_for_checkpointing(0.5f64);
    if run.accelerator.is_last_process() {
        *value.lock() = f64::NAN;
    }
    let Err(error) = run.accelerator.save_state(&case.folder) else {
        anyhow::bail!("a value that no file can hold was saved");
    };
    ensure!(error.to_string().contains("custom_checkpoint_0"), "the error does not name the value: {error}");
    run.accelerator.wait_for_everyone()?;
    ensure!(!case.folder.exists(), "a folder was made for nothing");
    Ok(())
}

fn test_with_scheduler(case: &Case<'_>) -> Result<()> {
    let mut run = case.start(case.project())?;
    run.accelerator.save_state(None)?;
    let before = run.state(&["scheduler"])?;
    run.train(3)?;
    ensure!(run.state(&["scheduler"])? != before, "the schedule did not move");
    run.accelerator.load_state(case.checkpoint(0))?;
    let found = run.state(&["scheduler"])?;
    ensure!(found == before && !before.is_empty(), "the schedule is at {found:?}, and was at {before:?}");
    Ok(())
}

fn test_automatic_loading(case: &Case<'_>) -> Result<()> {
    let mut run = case.start(case.project())?;
    run.accelerator.save_state(None)?;
    run.train(2)?;
    let second = run.learnt()?;
    run.accelerator.save_state(None)?;
    run.train(1)?;
    ensure!(run.learnt()? != second, "the third epoch changed nothing");
    run.accelerator.load_state(None)?;
    ensure!(run.learnt()? == second, "the newest checkpoint is not the second");
    Ok(())
}

fn test_checkpoint_deletion(case: &Case<'_>) -> Result<()> {
    let run = case.start(ProjectConfiguration { total_limit: Some(2), ..case.project() })?;
    for _ in 0..11 {
        run.accelerator.save_state(None)?;
    }
    // By number, not by name: 10 is newer than 9.
    let found = case.checkpoints()?;
    ensure!(found == ["checkpoint_10", "checkpoint_9"], "of eleven checkpoints {found:?} are left");
    Ok(())
}
