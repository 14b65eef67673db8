//! Checkpoints of runs that train adapters.

use super::model::{Model, case};
use super::ranks::{Kept, losses};
use accelerate::checkpoint::checkpoint_shapes;
use accelerate::lora::get_peft_model;
use accelerate::nn::Module;
use accelerate::optim::{AcceleratedOptimizer, AdamW};
use accelerate::tch;
use accelerate::{Accelerator, PreparedModel, ProjectConfiguration, Result, ShardingStrategy, testing};

struct Training {
    accelerator: Accelerator,
    model: PreparedModel<Model>,
    optimizer: AcceleratedOptimizer<AdamW>,
}

impl Training {
    fn new(accelerator: Accelerator, seed: i64) -> Result<Self> {
        let model = Model::new(accelerator.device())?;
        {
            let _generator = super::vectors::generator();
            tch::manual_seed(seed);
            get_peft_model(&model.store, case("list"))?;
        }
        let optimizer = AdamW::new(&model.store, 0.05)?;
        let (model, optimizer) = accelerator.prepare((model, optimizer))?;
        Ok(Self { accelerator, model, optimizer })
    }

    fn train(&mut self, steps: std::ops::Range<i64>) -> Result<Vec<f64>> {
        losses(&self.accelerator, &self.model, &mut self.optimizer, steps)
    }
}

#[test]
fn a_run_with_adapters_goes_on_to_the_bit() {
    for kept in [Kept::Replicated, Kept::Sharded(ShardingStrategy::FullShard)] {
        for world_size in 1..=3 {
            let folder = tempfile::tempdir().unwrap();
            let wanted = testing::ranks(world_size, kept.builder(), |accelerator| {
                let mut training = Training::new(accelerator, 1)?;
                training.train(0..3)?;
                training.accelerator.save_state(folder.path())?;
                training.train(3..6)
            });
            let found = testing::ranks(world_size, kept.builder(), |accelerator| {
                let mut training = Training::new(accelerator, 2)?;
                training.train(0..1)?;
                training.accelerator.load_state(folder.path())?;
                training.train(3..6)
            });
            assert_eq!(found.unwrap(), wanted.unwrap(), "{kept:?} on {world_size}");
        }
    }
}

/// The names of all tensors in a checkpoint.
fn saved_tensors(folder: &std::path::Path) -> Vec<String> {
    let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    let weights = files.filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    let names = weights.flat_map(|path| checkpoint_shapes(path).unwrap());
    names.map(|(name, _)| name).collect()
}

fn adapter_only() -> ProjectConfiguration {
    ProjectConfiguration { adapter_only: Some(true), ..Default::default() }
}

#[test]
fn a_checkpoint_without_the_base_goes_on_to_the_bit_on_any_number_of_ranks() {
    let sharded = Kept::Sharded(ShardingStrategy::FullShard);
    let whole = tempfile::tempdir().unwrap();
    for (saved, loaded) in [
        ((Kept::Replicated, 1), (Kept::Replicated, 1)),
        ((Kept::Replicated, 2), (sharded.clone(), 2)),
        ((sharded.clone(), 3), (sharded.clone(), 3)),
        ((sharded.clone(), 3), (sharded.clone(), 2)),
        ((sharded.clone(), 2), (Kept::Replicated, 1)),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let builder = |kept: &Kept| kept.builder().project_config(adapter_only());
        let wanted = testing::ranks(saved.1, builder(&saved.0), |accelerator| {
            let mut training = Training::new(accelerator, 1)?;
            training.train(0..3)?;
            training.accelerator.save_state(folder.path())?;
            training.train(3..6)
        });
        let names = saved_tensors(folder.path());
        assert!(names.iter().any(|name| name.contains("lora_A")), "{names:?}");
        let is_of_base =
            |name: &String| !name.contains("lora_") && (name.ends_with("weight") || name.ends_with("bias"));
        assert!(!names.iter().any(is_of_base), "{names:?}");
        let found = testing::ranks(loaded.1, loaded.0.builder(), |accelerator| {
            let mut training = Training::new(accelerator, 2)?;
            training.train(0..1)?;
            training.accelerator.load_state(folder.path())?;
            training.train(3..6)
        });
        let mean =
            |losses: &[Vec<f64>], step: usize| losses.iter().map(|own| own[step]).sum::<f64>() / losses.len() as f64;
        let (found, wanted) = (found.unwrap(), wanted.unwrap());
        for step in 0..3 {
            let apart = (mean(&found, step) - mean(&wanted, step)).abs();
            let bound =
                if saved.1 == loaded.1 && format!("{:?}", saved.0) == format!("{:?}", loaded.0) { 0.0 } else { 1e-5 };
            assert!(apart <= bound, "{saved:?} to {loaded:?}: {apart:e}");
        }
        if matches!(saved, (Kept::Replicated, 1)) {
            testing::ranks(1, saved.0.builder(), |accelerator| {
                let training = Training::new(accelerator, 1)?;
                training.accelerator.save_state(whole.path())
            })
            .unwrap();
            assert!(saved_tensors(whole.path()).iter().any(is_of_base));
        }
    }
}

#[test]
fn the_base_has_to_be_the_one_that_was_left_out() {
    let folder = tempfile::tempdir().unwrap();
    for kept in [Kept::Replicated, Kept::Sharded(ShardingStrategy::FullShard)] {
        let builder = || kept.builder().project_config(adapter_only());
        testing::ranks(2, builder(), |accelerator| {
            let training = Training::new(accelerator, 1)?;
            training.accelerator.save_state(folder.path()).map(drop)
        })
        .unwrap();
        // One number of one weight, in the shard of one rank.
        let found = testing::ranks(2, builder(), |accelerator| {
            let mut training = Training::new(accelerator, 1)?;
            let weight = training.model.params().get("layers.1.up_proj.weight").unwrap();
            let values = super::model::formula(&weight.shape(), 8.0) * 0.5;
            let before = training.train(0..1)?;
            weight.copy_(&(values + 1e-3))?;
            let error = training.accelerator.load_state(folder.path()).unwrap_err();
            Ok((before, error.is_checkpoint(), error.to_string()))
        });
        for (_, is_checkpoint, text) in found.unwrap() {
            assert!(is_checkpoint && text.contains("layers.1.up_proj.weight has other numbers"), "{text}");
            assert!(!text.contains("layers.0.up_proj.weight"), "{text}");
        }
    }
}
