//! Checkpoints of machines that share no file system: `save_on_each_node`.

use super::{free_port, launched_on};
use crate::data::{DataLoader, DataLoaderShard, Generator, VecDataset};
use crate::error::Result;
use crate::nn::{BatchNorm1d, Linear, Module, ModuleFn, ParamStore};
use crate::optim::{AcceleratedOptimizer, AdamW};
use crate::{Accelerator, AcceleratorBuilder, FullyShardedDataParallelPlugin, PreparedModel, StateDictType};
use accelerate_core::config::{DistributedDataParallelKwargs, ProjectConfiguration};
use rstest::rstest;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use tch::{Kind, Tensor};
use tempfile::TempDir;

const PER_MACHINE: usize = 2;

/// What the machine of a rank calls its disk.
fn disk(folders: &TempDir, rank: usize) -> PathBuf {
    folders.path().join(format!("machine_{}", rank / PER_MACHINE))
}

/// Checkpoints are on the disks of the machines, automatically named.
fn builder(folders: &TempDir, rank: usize) -> AcceleratorBuilder {
    let project = ProjectConfiguration {
        save_on_each_node: Some(true),
        project_dir: Some(disk(folders, rank)),
        automatic_checkpoint_naming: Some(true),
        ..Default::default()
    };
    Accelerator::builder().gradient_accumulation_steps(2).project_config(project)
}

fn on_machines<T: Send>(
    (num_machines, per_machine): (usize, usize),
    builder: impl Fn(usize) -> AcceleratorBuilder + Sync,
    body: impl Fn(Accelerator) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let place = format!("tcp://127.0.0.1:{}", free_port());
    launched_on((num_machines * per_machine, per_machine), &builder, &place, body)
}

struct Training<M> {
    accelerator: Accelerator,
    model: PreparedModel<M>,
    optimizer: AcceleratedOptimizer<AdamW>,
    loader: DataLoaderShard<Tensor>,
}

/// With buffers, and 96 rows in an order that a seed decides.
fn training(accelerator: Accelerator) -> Result<Training<impl Module<Input = Tensor, Output = Tensor>>> {
    let store = ParamStore::new(accelerator.device());
    let hidden = Linear::new(store.root() / "hidden", 1, 8, Default::default())?;
    let norm = BatchNorm1d::new(store.root() / "norm", 8, Default::default())?;
    let head = Linear::new(store.root() / "head", 8, 1, Default::default())?;
    for (salt, param) in store.parameters().iter().enumerate() {
        let numbers: Vec<f32> = (0..param.local().numel()).map(|at| ((at * 7 + salt * 3) % 11) as f32 / 11.0).collect();
        param.copy_(&Tensor::from_slice(&numbers).view(&param.shape()[..]))?;
    }
    let optimizer = AdamW::new(&store, 0.05)?;
    let generator = Generator::new_cpu()?;
    generator.manual_seed(7)?;
    let rows = VecDataset::new((0..96).map(|row| row as f32 / 16.0).collect());
    let loader = DataLoader::builder(rows).batch_size(2).shuffle(true).generator(generator).build()?;
    let forward = move |rows: &Tensor| {
        let hidden = norm.forward(&hidden.forward(&rows.f_view([-1, 1])?)?)?;
        head.forward(&hidden.f_tanh()?)
    };
    let (model, optimizer, loader) = accelerator.prepare((ModuleFn::new(&store, forward), optimizer, loader))?;
    Ok(Training { accelerator, model, optimizer, loader })
}

impl<M: Module<Input = Tensor, Output = Tensor>> Training<M> {
    /// Trains on the next batches of this epoch, and saves after so many of them: the losses are those that follow.
    fn train(&mut self, num_batches: usize, save_after: Option<usize>) -> Result<Vec<f64>> {
        let mut losses = Vec::new();
        for (number, batch) in self.loader.iter()?.take(num_batches).enumerate() {
            let batch = batch?;
            self.accelerator.accumulate(&self.model, || {
                let loss = self.model.forward(&batch)?.square().mean(None);
                losses.push(loss.double_value(&[]));
                self.accelerator.backward(&loss)?;
                self.optimizer.step()?;
                self.optimizer.zero_grad()
            })?;
            if save_after == Some(number + 1) {
                self.accelerator.save_state(None)?;
                losses.clear();
            }
        }
        Ok(losses)
    }

    /// Of the model, without what is `ignored`, and of the optimizer.
    fn numbers(&self, ignored: Option<&str>) -> Result<Vec<Vec<f64>>> {
        let (model, optimizer) = (self.model.params().state_dict()?, self.optimizer.full_state_dict()?);
        let is_compared = |name: &str| ignored.is_none_or(|ignored| !name.starts_with(ignored));
        let model = model.iter().filter(|(name, _)| is_compared(name)).map(|(_, tensor)| tensor);
        let tensors = model.chain(optimizer.tensors.values());
        tensors.map(|tensor| Ok(Vec::try_from(&tensor.detach().to_kind(Kind::Double).flatten(0, -1))?)).collect()
    }
}

fn compressed() -> DistributedDataParallelKwargs {
    let options = json!({"start_powerSGD_iter": 2, "min_compression_rate": 0.1});
    serde_json::from_value(json!({"comm_hook": "power_sgd", "comm_state_option": options})).unwrap()
}

fn whole() -> FullyShardedDataParallelPlugin {
    FullyShardedDataParallelPlugin { state_dict_type: Some(StateDictType::Full), ..Default::default() }
}

/// Each machine has all that its processes need, gradients in the middle of a window and what hooks keep included.
#[rstest]
#[case::replicated(|builder: AcceleratorBuilder| builder, 5, None)]
#[case::compressed(|builder: AcceleratorBuilder| builder.kwargs_handler(compressed()), 7, None)]
// Ranks of a sharded model have buffers of their own, and go on with those of rank 0.
#[case::sharded_and_saved_whole(|builder: AcceleratorBuilder| builder.fsdp_plugin(whole()), 5, Some("norm.running_"))]
fn machines_without_a_shared_disk_go_on_to_the_bit(
    #[case] strategy: fn(AcceleratorBuilder) -> AcceleratorBuilder,
    #[case] num_batches: usize,
    #[case] ignored: Option<&str>,
) {
    let folders = TempDir::new().unwrap();
    let builder = |rank| strategy(builder(&folders, rank));
    let undisturbed = on_machines((2, PER_MACHINE), builder, |accelerator| {
        let mut training = training(accelerator)?;
        let losses = training.train(num_batches + 3, Some(num_batches))?;
        let own = disk(&folders, training.accelerator.process_index());
        assert!(own.join("checkpoints/checkpoint_0/checkpoint.manifest.json").exists());
        Ok((losses, training.numbers(ignored)?))
    })
    .unwrap();
    let resumed = on_machines((2, PER_MACHINE), builder, |accelerator| {
        let mut training = training(accelerator)?;
        training.train(1, None)?;
        training.accelerator.load_state(None)?;
        Ok((training.train(3, None)?, training.numbers(ignored)?))
    })
    .unwrap();
    let losses = |ranks: &[(Vec<f64>, _)]| ranks.iter().map(|(losses, _)| losses.clone()).collect::<Vec<_>>();
    assert_eq!(losses(&resumed), losses(&undisturbed));
    assert!(resumed == undisturbed, "parameters or states differ");
}

fn save_twice(folders: &TempDir) -> Vec<Vec<Vec<f64>>> {
    on_machines(
        (2, PER_MACHINE),
        |rank| builder(folders, rank),
        |accelerator| {
            let mut training = training(accelerator)?;
            training.train(2, Some(2))?;
            let first = training.numbers(None)?;
            training.train(2, Some(2))?;
            Ok(first)
        },
    )
    .unwrap()
}

#[test]
fn all_machines_go_on_from_the_newest_checkpoint_that_each_of_them_has_completed() {
    let folders = TempDir::new().unwrap();
    let first = save_twice(&folders);
    fs::remove_file(disk(&folders, 2).join("checkpoints/checkpoint_1/checkpoint.manifest.json")).unwrap();
    let loaded = on_machines(
        (2, PER_MACHINE),
        |rank| builder(&folders, rank),
        |accelerator| {
            let training = training(accelerator)?;
            assert!(training.accelerator.load_state(None)?.ends_with("checkpoint_0"));
            training.numbers(None)
        },
    )
    .unwrap();
    assert_eq!(loaded, first);
}

/// What every rank says of a run that loads from these folders of the machines.
fn refusals(folders: &TempDir, num_machines: usize, from: impl Fn(&Path, usize) -> PathBuf + Sync) -> Vec<String> {
    let num_ranks = 2 * PER_MACHINE;
    let builder = |rank| {
        let project = ProjectConfiguration { save_on_each_node: Some(true), ..Default::default() };
        builder(folders, rank).project_config(project)
    };
    on_machines((num_machines, num_ranks / num_machines), builder, |accelerator| {
        let training = training(accelerator)?;
        let rank = training.accelerator.process_index();
        Ok(training.accelerator.load_state(from(folders.path(), rank)).unwrap_err().to_string())
    })
    .unwrap()
}

#[test]
fn machines_that_name_checkpoints_of_different_saves_are_told_so() {
    let folders = TempDir::new().unwrap();
    save_twice(&folders);
    let of_its_own =
        |path: &Path, rank| path.join(format!("machine_{0}/checkpoints/checkpoint_{0}", rank / PER_MACHINE));
    for error in refusals(&folders, 2, of_its_own) {
        assert!(error.contains("name a checkpoint that all machines have completed"), "{error}");
    }
}

#[test]
fn gradients_that_are_in_the_folder_of_another_machine_are_not_taken_for_none() {
    let folders = TempDir::new().unwrap();
    on_machines(
        (2, PER_MACHINE),
        |rank| builder(&folders, rank),
        |accelerator| {
            let mut training = training(accelerator)?;
            training.train(3, Some(3)).map(drop)
        },
    )
    .unwrap();
    // As many processes, on one machine with the disk of the first.
    for error in refusals(&folders, 1, |path, _| path.join("machine_0/checkpoints/checkpoint_0")) {
        assert!(error.contains("gradients_") && error.contains("save_on_each_node"), "{error}");
    }
}

#[test]
fn parts_that_no_process_of_a_machine_has_are_named_and_nothing_is_saved() {
    let folders = TempDir::new().unwrap();
    let sharded =
        FullyShardedDataParallelPlugin { state_dict_type: Some(StateDictType::Sharded), ..Default::default() };
    let errors = on_machines(
        (2, PER_MACHINE),
        |rank| builder(&folders, rank).fsdp_plugin(sharded.clone()),
        |accelerator| Ok(training(accelerator)?.accelerator.save_state(None).unwrap_err().to_string()),
    )
    .unwrap();
    for error in errors {
        assert!(error.contains("of model are on none") && error.contains("without save_on_each_node"), "{error}");
    }
    assert!(!disk(&folders, 0).join("checkpoints/checkpoint_0/checkpoint.manifest.json").exists());
}

/// How good a run is, the main process says: each machine keeps the same checkpoints.
#[test]
fn the_best_checkpoint_is_the_same_on_all_machines() {
    let folders = TempDir::new().unwrap();
    let builder = |rank| {
        let project = ProjectConfiguration {
            save_on_each_node: Some(true),
            project_dir: Some(disk(&folders, rank)),
            automatic_checkpoint_naming: Some(true),
            total_limit: Some(1),
            keep_best: Some(1),
            ..Default::default()
        };
        Accelerator::builder().project_config(project)
    };
    on_machines((2, PER_MACHINE), builder, |accelerator| {
        for metric in [0.25, 0.75, 0.5, 0.125] {
            // Other processes say nothing, or something else.
            match accelerator.process_index() {
                0 => accelerator.set_checkpoint_metric(metric),
                3 => accelerator.set_checkpoint_metric(-metric),
                _ => {}
            }
            accelerator.save_state(None)?;
        }
        accelerator.wait_for_everyone()
    })
    .unwrap();
    for machine in 0..2 {
        let checkpoints = disk(&folders, machine * PER_MACHINE).join("checkpoints");
        let mut names: Vec<_> = fs::read_dir(checkpoints).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["checkpoint_1", "checkpoint_3"], "machine {machine}");
    }
}
