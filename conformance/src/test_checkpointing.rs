//! `test_checkpointing.py`: a run that goes on from the checkpoint of any epoch has the accuracy and the learning rates that the
//! run before had there. Unlike the reference, which stops at this, it also trains on and has to come to the same end.
//!
//! The reference fine-tunes BERT on sentences from the network. Here a small network with dropout tells on which side of a
//! curve points lie.

use accelerate::data::{DataLoader, DataLoaderShard, TensorDataset};
use accelerate::nn::{Dropout, Linear, Module, ModuleFn, ParamStore};
use accelerate::optim::{AcceleratedOptimizer, AcceleratedScheduler, AdamW, LinearWithWarmup};
use accelerate::tch::{Kind, Reduction, Tensor, no_grad};
use accelerate::{Accelerator, PreparedModel, SeedOptions, main_println};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

const NUM_EPOCHS: usize = 3;
/// Neither a multiple of the batch nor of the processes.
const ROWS: i64 = 99;

pub(crate) fn run(folder: Option<&Path>) -> Result<()> {
    let folder = folder.context("this script needs --folder")?;
    let accelerator = Accelerator::builder().cpu(true).build()?;
    let epoch_folder = |epoch: usize| folder.join(format!("epoch_{epoch}"));
    let state_file = |epoch: usize| folder.join(format!("state_{epoch}.json"));
    let mut undisturbed = start(&accelerator)?;
    let mut states = Vec::new();
    for epoch in 0..NUM_EPOCHS {
        undisturbed.train()?;
        undisturbed.accelerator.save_state(epoch_folder(epoch))?;
        let state = undisturbed.state(epoch)?;
        if accelerator.is_main_process() {
            fs::write(state_file(epoch), serde_json::to_string(&state)?)?;
        }
        states.push(state);
    }
    ensure!(states.windows(2).all(|pair| pair[0].lr != pair[1].lr), "the learning rate does not move: {states:?}");
    ensure!(states[0].loss > states[NUM_EPOCHS - 1].loss, "nothing is learnt: {states:?}");
    accelerator.wait_for_everyone()?;
    for from in 0..NUM_EPOCHS {
        let saved: State = serde_json::from_str(&fs::read_to_string(state_file(from))?)?;
        let mut resumed = start(&accelerator)?;
        resumed.accelerator.load_state(epoch_folder(from))?;
        let found = resumed.state(from)?;
        ensure!(found == saved, "resumed at {found:?}, saved was {saved:?}");
        for (epoch, wanted) in states.iter().enumerate().skip(from + 1) {
            resumed.train()?;
            let found = resumed.state(epoch)?;
            ensure!(found == *wanted, "resumed from epoch {from}: {found:?}, without interruption {wanted:?}");
        }
    }
    main_println!(accelerator, "test_checkpointing: all checks passed");
    Ok(())
}

/// Where a run is behind an epoch.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
struct State {
    epoch: usize,
    accuracy: f64,
    /// Of all rows, to the bit; an accuracy alone would hide small differences.
    loss: u64,
    lr: u64,
    optimizer_lr: u64,
}

fn cross_entropy(outputs: &Tensor, labels: &Tensor) -> Result<Tensor> {
    Ok(outputs.f_cross_entropy_loss::<Tensor>(labels, None, Reduction::Mean, -100, 0.0)?)
}

/// The points and their labels.
type Rows = DataLoaderShard<(Tensor, Tensor)>;

struct Training<M> {
    accelerator: Accelerator,
    model: PreparedModel<M>,
    optimizer: AcceleratedOptimizer<AdamW>,
    train_loader: Rows,
    eval_loader: Rows,
    scheduler: AcceleratedScheduler<LinearWithWarmup>,
}

fn new_model(store: &ParamStore) -> accelerate::Result<impl Module<Input = Tensor, Output = Tensor> + use<>> {
    let hidden = Linear::new(store.root() / "hidden", 2, 16, Default::default())?;
    let head = Linear::new(store.root() / "head", 16, 2, Default::default())?;
    let dropout = Dropout::new(store.root() / "dropout", 0.1)?;
    Ok(ModuleFn::new(store, move |x: &Tensor| head.forward(&dropout.forward(&hidden.forward(x)?.f_tanh()?)?)))
}

fn start(processes: &Accelerator) -> Result<Training<impl Module<Input = Tensor, Output = Tensor>>> {
    let accelerator = Accelerator::builder().build_from(processes)?;
    // Processes drop other numbers.
    accelerator.set_seed(42, SeedOptions { device_specific: true, ..Default::default() })?;
    let store = ParamStore::new(accelerator.device());
    let model = new_model(&store)?;
    let points =
        Tensor::f_arange(2 * ROWS, (Kind::Float, accelerator.device()))?.f_view([ROWS, 2])?.f_mul_scalar(0.7)?;
    let points = points.f_sin()?;
    let labels = points.f_select(1, 0)?.f_square()?.f_lt_tensor(&points.f_select(1, 1)?)?.f_to_kind(Kind::Int64)?;
    let rows = || TensorDataset::new((points.shallow_clone(), labels.shallow_clone()));
    let train_loader = DataLoader::builder(rows()?).batch_size(4).shuffle(true).build()?;
    let eval_loader = DataLoader::builder(rows()?).batch_size(8).build()?;
    let optimizer = AdamW::new(&store, 1e-2)?;
    let num_steps = accelerator.num_training_steps(&train_loader, NUM_EPOCHS);
    let scheduler = LinearWithWarmup::new(&optimizer, 0, num_steps);
    let (model, optimizer, train_loader, eval_loader, scheduler) =
        accelerator.prepare((model, optimizer, train_loader, eval_loader, scheduler))?;
    Ok(Training { accelerator, model, optimizer, train_loader, eval_loader, scheduler })
}

impl<M: Module<Input = Tensor, Output = Tensor>> Training<M> {
    fn train(&mut self) -> Result<()> {
        self.model.params().train();
        for batch in self.train_loader.iter()? {
            let (points, labels) = batch?;
            let loss = cross_entropy(&self.model.forward(&points)?, &labels)?;
            self.accelerator.backward(&loss)?;
            self.optimizer.step()?;
            self.scheduler.step()?;
            self.optimizer.zero_grad()?;
        }
        Ok(())
    }

    /// Accuracy and loss of all rows, and the rates.
    fn state(&self, epoch: usize) -> Result<State> {
        self.model.params().eval();
        let (mut right, mut count, mut loss) = (0, 0, 0.0);
        for batch in self.eval_loader.iter()? {
            let (points, labels) = batch?;
            let outputs = no_grad(|| self.model.forward(&points))?;
            let (outputs, labels) = self.accelerator.gather_for_metrics(&(outputs, labels))?;
            let is_right = outputs.f_argmax(-1, false)?.f_eq_tensor(&labels)?;
            right += is_right.f_sum(Kind::Int64)?.f_int64_value(&[])?;
            count += labels.size()[0];
            loss += cross_entropy(&outputs, &labels)?.f_double_value(&[])?;
        }
        ensure!(count == ROWS, "{count} rows, wanted {ROWS}");
        let optimizer_lr = self.optimizer.handle().get_lr(0)?;
        Ok(State {
            epoch,
            accuracy: right as f64 / count as f64,
            loss: f64::to_bits(loss),
            lr: self.scheduler.get_last_lr()[0].to_bits(),
            optimizer_lr: optimizer_lr.to_bits(),
        })
    }
}
