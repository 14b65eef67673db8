//! What `attack` attacks: training that saves all the time, and a check that what was saved is whole.

use accelerate::checkpoint::{LoadOptions, load_checkpoint_in_model, read_saved_file, verify_saved_files};
use accelerate::nn::{Linear, ModuleFn, ParamStore};
use accelerate::optim::AdamW;
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, FullyShardedDataParallelPlugin, SaveModelOptions, main_println};
use anyhow::{Context, bail, ensure};
use std::path::Path;

/// Which rank fails by itself, and at which step: `1:7`.
const FAILS: &str = "ATTACK_FAILS";
/// The model is sharded.
const SHARDED: &str = "ATTACK_SHARDED";
/// How many steps there are.
const STEPS: &str = "ATTACK_STEPS";
const LAYERS: usize = 3;
const WIDTH: i64 = 48;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn layers(store: &ParamStore) -> accelerate::Result<Vec<Linear>> {
    (0..LAYERS).map(|layer| Linear::new(store.root() / "layers" / layer, WIDTH, WIDTH, Default::default())).collect()
}

/// Trains, and saves every other step a model whose weights are all the number of the step, with a file that has it too.
pub(crate) fn train(folder: Option<&Path>) -> anyhow::Result<()> {
    let folder = folder.context("the folder to save to has to be given")?;
    let builder = Accelerator::builder().cpu(true);
    let accelerator = match number(SHARDED) {
        Some(1) => builder.fsdp_plugin(FullyShardedDataParallelPlugin::default()).build()?,
        _ => builder.build()?,
    };
    let (rank, process) = (accelerator.process_index(), std::process::id());
    let fails = std::env::var(FAILS).ok();
    let store = ParamStore::new(accelerator.device());
    let layers = layers(&store)?;
    let model = accelerator.prepare(ModuleFn::new(&store, move |input: &Tensor| {
        layers.iter().try_fold(input.shallow_clone(), |x, layer| layer.forward(&x))
    }))?;
    let mut optimizer = accelerator.prepare(AdamW::new(&store, 1e-3)?)?;
    main_println!(accelerator, "port {}", std::env::var("MASTER_PORT").unwrap_or_default());
    for step in 0..number(STEPS).unwrap_or(40) {
        println!("step {step} of process {process} on rank {rank}");
        if fails.as_deref() == Some(&format!("{rank}:{step}")) {
            bail!("rank {rank} fails by itself at step {step}");
        }
        let loss =
            model.forward(&Tensor::ones([8, WIDTH], (Kind::Float, accelerator.device())))?.f_mean(Kind::Float)?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        if step % 2 == 0 {
            for param in store.parameters() {
                let _ = param.local().f_detach()?.f_fill_(step as f64)?;
            }
            let files = [("step.txt".to_owned(), step.to_string().into_bytes())].into();
            accelerator.save_model(&model, folder, &SaveModelOptions { files, ..Default::default() })?;
        }
    }
    accelerator.wait_for_everyone()?;
    main_println!(accelerator, "trained to the end");
    Ok(())
}

/// Is the folder without a save, or with a whole one: file and weights of the same step?
pub(crate) fn check_saved(folder: Option<&Path>) -> anyhow::Result<()> {
    let folder = folder.context("the folder has to be given")?;
    let store = ParamStore::new(Device::Cpu);
    layers(&store)?;
    let Ok(step) = read_saved_file(folder, "step.txt") else {
        let mut names = std::fs::read_dir(folder)?.flatten().map(|entry| entry.file_name());
        let saved = names.find(|name| !name.to_string_lossy().starts_with('.'));
        ensure!(saved.is_none(), "there is no step.txt, and there is {saved:?}");
        return Ok(());
    };
    let step: f64 = String::from_utf8(step)?.parse()?;
    load_checkpoint_in_model(&store, folder, &LoadOptions::default())?;
    for param in store.parameters() {
        let found = param.get()?;
        ensure!(
            found.f_eq(step)?.f_all()?.f_int64_value(&[])? == 1,
            "{} is {found:?} beside a file of step {step}",
            param.name()
        );
    }
    verify_saved_files(folder)?;
    Ok(())
}
