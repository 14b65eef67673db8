//! Ranks that train by themselves and average their parameters now and then.

use accelerate::nn::Module;
use accelerate::optim::AdamW;
use accelerate::{LocalSGD, notebook_launcher};
use anyhow::{Result, ensure};

use super::ranks::{Place, processes};
use crate::check::{Context, Found};
use crate::models::{Classifier, ROWS, loss_of, on_cpu, tokens};

const NUM_STEPS: usize = 6;
/// Between two averages.
const LOCAL_STEPS: usize = 3;

/// The losses of a rank, and a sum over each parameter at the end.
pub(crate) fn local_rank(place: Place) -> Result<(Vec<f64>, Vec<f64>)> {
    let accelerator = place.builder(40).build()?;
    let model = Classifier::new(accelerator.device())?;
    let store = model.params().clone();
    let optimizer = AdamW::new(&store, 2e-3)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let mut local_sgd = LocalSGD::new(&accelerator, &model, LOCAL_STEPS)?;
    let mut losses = Vec::new();
    for step in 0..NUM_STEPS {
        // Each rank has rows of its own, so that ranks which were not averaged differ.
        let first_row = ROWS * accelerator.process_index() as i64;
        let (tokens, labels) = tokens(step, first_row, ROWS, accelerator.device())?;
        let loss = loss_of(&model.forward(&tokens)?, &labels)?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        local_sgd.step()?;
        losses.push(loss.f_double_value(&[])?);
    }
    local_sgd.finish()?;
    let sum = |tensor: &accelerate::tch::Tensor| tensor.f_sum(accelerate::tch::Kind::Double)?.f_double_value(&[]);
    let sums = on_cpu(&store)?.iter().map(|(_, tensor)| sum(tensor)).collect::<Result<_, _>>()?;
    Ok((losses, sums))
}

/// On a GPU beside the same on the CPU: other sums, as of `ranks::fsdp_two`.
pub(crate) fn beside_the_cpu(context: &Context<'_>) -> Result<Found> {
    let run = |place| notebook_launcher(context.workers, local_rank, place, &processes(2));
    let (found, wanted) = (run(Place::of(context))?, run(Place::CPU)?);
    let mut largest = 0f64;
    for (rank, ((losses, sums), (wanted_losses, wanted_sums))) in found.iter().zip(&wanted).enumerate() {
        ensure!(*sums == found[0].1, "the parameters of ranks 0 and {rank} differ");
        ensure!(losses.last() < losses.first(), "rank {rank}: the loss did not fall: {losses:?}");
        largest = largest.max(context.all_close(&format!("rank {rank}: loss"), losses, wanted_losses, 1e-4)?);
        // Sums of 4656 elements at most, each within 5e-4 and most of them far nearer.
        context.all_close(&format!("rank {rank}: sum of parameter"), sums, wanted_sums, 5e-2)?;
    }
    ensure!(found[0].0 != found[1].0, "both ranks had the same rows");
    Found::figure(format!("{NUM_STEPS} steps, averaged after {LOCAL_STEPS}, within {largest:.0e}"))
}
