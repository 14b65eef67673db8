//! A run and a checkpoint of it, and how somebody who knows the format changes one.

use accelerate::checkpoint::{load_file, save_file};
use accelerate::data::{DataLoader, DataLoaderShard, Generator, TensorDataset};
use accelerate::nn::{Linear, Module, ModuleFn, ParamStore, StateDict};
use accelerate::optim::{AcceleratedOptimizer, AcceleratedScheduler, AdamW, StepLr};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, PreparedModel,
    Registered, Result, testing,
};
use accelerate_core::weight_files::{Checksum, sample_blocks};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

use super::{DESCRIPTION, MANIFEST};

/// Everything that can be prepared, prepared.
pub struct Run<M> {
    pub accelerator: Accelerator,
    model: PreparedModel<M>,
    optimizer: AcceleratedOptimizer<AdamW>,
    loader: DataLoaderShard<Tensor>,
    scheduler: AcceleratedScheduler<StepLr>,
    registered: Registered<f64>,
}

/// A run of one process.
pub fn start() -> Run<impl Module<Input = Tensor, Output = Tensor>> {
    prepare(Accelerator::builder().cpu(true).build().unwrap()).unwrap()
}

pub fn prepare(accelerator: Accelerator) -> Result<Run<impl Module<Input = Tensor, Output = Tensor>>> {
    let store = ParamStore::new(accelerator.device());
    let hidden = Linear::new(store.root() / "hidden", 3, 5, Default::default())?;
    let head = Linear::new(store.root() / "head", 5, 1, Default::default())?;
    let model = ModuleFn::new(&store, move |rows: &Tensor| head.forward(&hidden.forward(rows)?.f_tanh()?));
    let optimizer = AdamW::new(&store, 0.05)?;
    let scheduler = StepLr::new(&optimizer, 1, 0.5)?;
    let rows = TensorDataset::new(Tensor::f_arange(72, (Kind::Float, accelerator.device()))?.f_view([24, 3])?)?;
    let loader = DataLoader::builder(rows).batch_size(2).shuffle(true).generator(Generator::new_cpu()?).build()?;
    let (model, optimizer, loader, scheduler) = accelerator.prepare((model, optimizer, loader, scheduler))?;
    let registered = accelerator.register_for_checkpointing(0.5);
    Ok(Run { accelerator, model, optimizer, loader, scheduler, registered })
}

impl<M: Module<Input = Tensor, Output = Tensor>> Run<M> {
    /// Changes everything that has a state.
    pub fn train(&mut self) -> Result<()> {
        for rows in self.loader.iter()?.take(2) {
            let loss = self.model.forward(&rows?)?.f_square()?.f_mean(Kind::Float)?;
            self.accelerator.backward(&loss)?;
            self.optimizer.step()?;
            self.scheduler.step()?;
            self.optimizer.zero_grad()?;
        }
        *self.registered.lock() += 0.25;
        Ok(())
    }

    /// Every number that a checkpoint has, by name.
    pub fn state(&self) -> BTreeMap<String, String> {
        let mut state = BTreeMap::new();
        for (name, object) in self.accelerator.state_dict().unwrap() {
            state.insert(name.clone(), object.values.to_string());
            for (tensor_name, tensor) in object.tensors {
                let numbers = Vec::<f64>::try_from(&tensor.to_kind(Kind::Double).flatten(0, -1)).unwrap();
                state.insert(format!("{name}.{tensor_name}"), format!("{numbers:?}"));
            }
        }
        let random = torch_ext::Generator::default_cpu().unwrap().state().unwrap();
        state.insert("random".to_owned(), format!("{:?}", Vec::<u8>::try_from(&random).unwrap()));
        state
    }
}

/// A run whose hook keeps errors and factors from the first step on.
pub fn compressed() -> AcceleratorBuilder {
    let kwargs = json!({"comm_hook": "batched_power_sgd", "comm_state_option": {"start_powerSGD_iter": 2}});
    let kwargs: DistributedDataParallelKwargs = serde_json::from_value(kwargs).unwrap();
    Accelerator::builder().cpu(true).kwargs_handler(kwargs)
}

/// A checkpoint in a folder of its own.
pub struct Saved(TempDir);

impl Saved {
    /// Of one process.
    pub fn whole() -> Self {
        Self::by(1, Accelerator::builder())
    }

    /// Of two that share everything.
    pub fn sharded() -> Self {
        Self::by(2, Accelerator::builder().fsdp_plugin(FullyShardedDataParallelPlugin::default()))
    }

    /// Of two whose gradients are compressed.
    pub fn compressed() -> Self {
        Self::by(2, compressed())
    }

    fn by(world_size: usize, builder: AcceleratorBuilder) -> Self {
        let folder = tempfile::tempdir().unwrap();
        testing::ranks(world_size, builder, |accelerator| {
            let mut run = prepare(accelerator)?;
            run.train()?;
            run.accelerator.save_state(folder.path())
        })
        .unwrap();
        Self(folder)
    }

    pub fn copy(&self) -> Self {
        let copy = Self(tempfile::tempdir().unwrap());
        for name in self.names() {
            fs::copy(self.path(&name), copy.path(&name)).unwrap();
        }
        copy
    }

    pub fn folder(&self) -> &Path {
        self.0.path()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn names(&self) -> Vec<String> {
        let names = fs::read_dir(self.0.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    /// A weight file, by how its name begins.
    pub fn weights(&self, begin: &str) -> String {
        let is_it = |name: &String| name.starts_with(begin) && name.ends_with(".safetensors");
        self.names().into_iter().find(is_it).unwrap()
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&fs::read(self.path(name)).unwrap()).unwrap()
    }

    /// Changes the manifest, which nothing vouches for.
    pub fn list(&self, change: impl FnOnce(&mut Value)) {
        let mut manifest = self.json(MANIFEST);
        change(&mut manifest);
        fs::write(self.path(MANIFEST), manifest.to_string()).unwrap();
    }

    /// Changes the description, and makes the manifest vouch for it.
    pub fn describe(&self, change: impl FnOnce(&mut Value)) {
        let mut description = self.json(DESCRIPTION);
        change(&mut description);
        self.put(DESCRIPTION, description.to_string());
    }

    /// Gives a file this content, and makes the manifest vouch for it.
    pub fn put(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).unwrap();
        self.seal(name);
    }

    /// Changes the tensors of a weight file, and makes the manifest vouch for it.
    pub fn weigh(&self, name: &str, change: impl FnOnce(&mut BTreeMap<String, Tensor>)) {
        let loaded = load_file(self.path(name)).unwrap();
        let mut tensors = loaded.iter().map(|(name, tensor)| (name.to_owned(), tensor.shallow_clone())).collect();
        change(&mut tensors);
        save_file(&tensors.into_iter().collect::<StateDict>(), self.path(name)).unwrap();
        self.seal(name);
    }

    /// Makes the manifest vouch for what is in a file, if both are there.
    pub fn seal(&self, name: &str) {
        let Ok(content) = fs::read(self.path(name)) else { return };
        let mut sample = Checksum::new();
        for block in sample_blocks(content.len() as u64) {
            sample.update(&content[block.start as usize..block.end as usize]);
        }
        self.list(|manifest| {
            let files = manifest["files"].as_array_mut().unwrap();
            let file = files.iter_mut().find(|file| file["name"] == name).unwrap();
            file["bytes"] = json!(content.len());
            file["xxh3_128"] = json!(Checksum::of(&content).to_string());
            file["sample"] = json!(sample.to_string());
        });
    }
}

/// A tensor of as many zeros.
pub fn zeros(shape: &[i64], kind: Kind) -> Tensor {
    Tensor::zeros(shape, (kind, Device::Cpu))
}
