//! Forward and backward passes as CUDA graphs.

use std::time::Instant;

use accelerate::nn::{Dropout, GraphedModule, Linear, Module, ModuleFn, ParamStore};
use accelerate::optim::AdamW;
use accelerate::tch::{Kind, Tensor};
use accelerate::{Accelerator, DynamoBackend, GradScalerKwargs, MixedPrecision, set_seed};
use anyhow::{Context as _, Result, ensure};
use torch_ext::stream::synchronize;

use crate::check::{Context, Found};
use crate::models::{Classifier, ROWS, loss_of, tokens};

const NUM_STEPS: usize = 12;
const NUM_TIMED: usize = 100;

/// The classifier with its loss, and with random numbers in it.
struct WithLoss {
    classifier: Classifier,
    dropout: Dropout,
}

impl WithLoss {
    fn new(accelerator: &Accelerator) -> Result<Self> {
        let classifier = Classifier::new(accelerator.device())?;
        let dropout = Dropout::new(classifier.params().root() / "dropout", 0.1)?;
        Ok(Self { classifier, dropout })
    }
}

impl Module for WithLoss {
    type Input = (Tensor, Tensor);
    type Output = (Tensor, Tensor);

    fn forward(&self, (tokens, labels): &(Tensor, Tensor)) -> accelerate::Result<(Tensor, Tensor)> {
        let logits = self.dropout.forward(&self.classifier.forward(tokens)?)?;
        Ok((loss_of(&logits, labels)?, logits))
    }

    fn params(&self) -> &ParamStore {
        self.classifier.params()
    }
}

/// The losses of a training, and the microseconds of a step of it.
fn trained<M>(accelerator: &Accelerator, model: M) -> Result<(Vec<f64>, f64, M)>
where
    M: Module<Input = (Tensor, Tensor), Output = (Tensor, Tensor)>,
{
    let optimizer = AdamW::new(model.params(), 2e-3)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    set_seed(21);
    let mut step = |number: usize| {
        let (loss, _) = model.forward(&tokens(number, 0, ROWS, accelerator.device())?)?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        Ok::<_, anyhow::Error>(loss)
    };
    let losses = (0..NUM_STEPS).map(|number| Ok(step(number)?.f_double_value(&[])?)).collect::<Result<Vec<f64>>>()?;
    synchronize(accelerator.device())?;
    let start = Instant::now();
    for number in 0..NUM_TIMED {
        drop(step(number)?);
    }
    synchronize(accelerator.device())?;
    let micros = 1e6 * start.elapsed().as_secs_f64() / NUM_TIMED as f64;
    Ok((losses, micros, model.into_inner()))
}

/// The same kernels on the same random numbers: sums of embeddings' gradients alone may come in another order.
pub(crate) fn replayed(context: &Context<'_>) -> Result<Found> {
    if !context.is_cuda() {
        return Found::not_here("it needs a GPU");
    }
    let mut figures = Vec::new();
    for (precision, tolerance) in
        [(MixedPrecision::No, 1e-4), (MixedPrecision::Bf16, 2e-2), (MixedPrecision::Fp16, 5e-3)]
    {
        let scaler = GradScalerKwargs { init_scale: Some(1024.0), ..Default::default() };
        let builder = context.builder().mixed_precision(precision);
        let builder = if precision == MixedPrecision::Fp16 { builder.kwargs_handler(scaler) } else { builder };
        let accelerator = builder.clone().build()?;
        let (wanted, eager_micros, _) = trained(&accelerator, WithLoss::new(&accelerator)?)?;
        let accelerator = builder.dynamo_backend(DynamoBackend::Cudagraphs).build()?;
        let graphed = GraphedModule::new(WithLoss::new(&accelerator)?)?;
        let (found, micros, graphed) = trained(&accelerator, graphed)?;
        let far = context.all_close(&format!("{precision}: loss of step"), &found, &wanted, tolerance)?;
        let num_replays = graphed.num_replays();
        ensure!(num_replays == NUM_STEPS + NUM_TIMED, "{num_replays} replays in {NUM_STEPS} + {NUM_TIMED} steps");
        figures.push(format!("{precision} within {far:.1e}, {micros:.0} us a step ({eager_micros:.0} without graphs)"));
        if precision == MixedPrecision::No {
            overwritten(&graphed, accelerator.device())?;
            let plain = accelerator.prepare(WithLoss::new(&accelerator)?).err();
            let text = plain.context("a model without graphs was prepared where graphs are asked for")?.to_string();
            ensure!(text.contains("GraphedModule"), "another error: {text}");
        }
    }
    fails_by_name(context)?;
    differs(context)?;
    Found::figure(figures.join("; "))
}

/// A forward pass that looks at a value cannot be recorded, and says so; the next one is the model's own.
fn fails_by_name(context: &Context<'_>) -> Result<()> {
    let store = ParamStore::new(context.device);
    let layer = Linear::new(store.root() / "layer", 4, 4, Default::default())?;
    let model = ModuleFn::new(&store, move |x: &Tensor| {
        let largest = x.f_max()?.f_double_value(&[])?;
        Ok(layer.forward(x)?.f_mul_scalar(largest)?)
    });
    let graphed = GraphedModule::new(model)?;
    let input = Tensor::f_ones([2, 4], (Kind::Float, context.device))?;
    let text = graphed.forward(&input).err().context("a pass that waits for the device was recorded")?.to_string();
    ensure!(text.contains("cannot be recorded"), "another error: {text}");
    let output = graphed.forward(&input)?;
    torch_ext::autograd::backward(&[&output.f_sum(Kind::Float)?], None, Default::default())?;
    ensure!(graphed.is_off() && graphed.num_replays() == 0, "graphs are not off");
    Ok(())
}

/// A pass that depends on something other than its inputs replays what it was when it was recorded. The comparison finds that, and graphs
/// are off from then on.
fn differs(context: &Context<'_>) -> Result<()> {
    let store = ParamStore::new(context.device);
    let layer = Linear::new(store.root() / "layer", 4, 4, Default::default())?;
    let num_passes = std::sync::atomic::AtomicI64::new(0);
    let model = ModuleFn::new(&store, move |x: &Tensor| {
        let number = num_passes.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok(layer.forward(x)?.f_add_scalar(number)?)
    });
    let graphed = GraphedModule::new(model)?;
    let input = Tensor::f_ones([2, 4], (Kind::Float, context.device))?;
    let mut said = String::new();
    for _ in 0..8 {
        match graphed.forward(&input) {
            Ok(output) => torch_ext::autograd::backward(&[&output.f_sum(Kind::Float)?], None, Default::default())?,
            Err(error) => said = error.to_string(),
        }
    }
    ensure!(graphed.is_off() && !said.is_empty(), "a pass that replays differently was taken for right: {said:?}");
    Ok(())
}

/// What would be computed from memory that is somebody else's is an error.
fn overwritten(graphed: &GraphedModule<WithLoss>, device: accelerate::tch::Device) -> Result<()> {
    let (first, _) = graphed.forward(&tokens(0, 0, ROWS, device)?)?;
    let _second = graphed.forward(&tokens(1, 0, ROWS, device)?)?;
    let error = torch_ext::autograd::backward(&[&first], None, Default::default()).err();
    let text = error.context("a backward pass through overwritten memory went through")?.to_string();
    ensure!(text.contains("overwritten"), "another error: {text}");
    Ok(())
}
