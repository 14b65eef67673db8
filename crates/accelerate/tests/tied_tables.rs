//! Large tables with two uses: an embedding and a linear layer make one gradient, the one that libtorch makes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod processor;

use accelerate::nn::{Embedding, EmbeddingConfig, Linear, Module, ModuleFn, ParamStore, checkpoint};
use accelerate::optim::Sgd;
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, AcceleratorBuilder, DistributedDataParallelKwargs, MixedPrecision, Result, testing};
use torch_ext::autograd::{BackwardOptions, backward};

/// Above 4 MiB: smaller ones are left to libtorch.
const ROWS: i64 = 1101;
const WIDTH: i64 = 1024;
const PADDING: i64 = 3;

/// What computes with the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Uses {
    Both,
    /// The embedding twice, the head twice.
    Twice,
    /// The head inside of a segment that is computed again.
    Checkpointed,
    EmbeddingOnly,
    HeadOnly,
}

const ALL: [Uses; 5] = [Uses::Both, Uses::Twice, Uses::Checkpointed, Uses::EmbeddingOnly, Uses::HeadOnly];

/// An embedding and a head over one table, with our layers or as libtorch's operations over the parameter itself.
fn tied(
    store: &ParamStore,
    uses: Uses,
    has_layers: bool,
) -> Result<impl Module<Input = Tensor, Output = Tensor> + use<>> {
    let config = EmbeddingConfig { padding_idx: Some(PADDING), ..Default::default() };
    let embedding = Embedding::new(store.root() / "embedding", ROWS, WIDTH, config)?;
    let bias = (store.root() / "head").param("bias", ([ROWS], accelerate::nn::Init::Zeros))?;
    let head = Linear::from_params(
        store.root() / "head",
        (store.root() / "head").alias("weight", &embedding.weight)?,
        Some(bias),
    );
    let weight = embedding.weight.clone();
    let values = Tensor::arange(ROWS * WIDTH, (Kind::Double, Device::Cpu)) * 0.7;
    weight.copy_(&(values.sin() * 0.05).reshape([ROWS, WIDTH]))?;
    Ok(ModuleFn::new(store, move |tokens: &Tensor| {
        let embed = |tokens: &Tensor| match has_layers {
            true => embedding.forward(tokens),
            false => Ok(Tensor::f_embedding(&weight.get()?, tokens, PADDING, false, false)?),
        };
        let layer = head.clone();
        let score = move |x: &Tensor| match has_layers {
            true => layer.forward(x),
            false => Ok(x.f_linear(&layer.weight.get()?, layer.bias.as_ref().map(|bias| bias.get().unwrap()))?),
        };
        match uses {
            Uses::Both => score(&embed(tokens)?),
            Uses::Twice => Ok(score(&embed(tokens)?)? + score(&embed(&tokens.f_flip([0])?)?)?.f_tanh()?),
            Uses::Checkpointed => checkpoint(&[&embed(tokens)?], Default::default(), move |inputs| score(&inputs[0])),
            Uses::EmbeddingOnly => embed(tokens),
            Uses::HeadOnly => score(&Tensor::f_ones([2, WIDTH], (Kind::Float, Device::Cpu))?),
        }
    }))
}

fn tokens(step: i64) -> Tensor {
    (Tensor::from_slice(&[1i64, 7, PADDING, 1100, 7, 7]).view([2, 3]) - (step % 2)).abs()
}

/// Equal to the bit, but where more than two gradients are added up in another order.
fn assert_same(found: &[Vec<f32>], wanted: &[Vec<f32>], uses: Uses, what: &str) {
    let tolerance = if uses == Uses::Twice { 1e-6 } else { 0.0 };
    // The terms of a sum are about 0.01, so that is what its last bits are bits of.
    let least = if processor::is_intel() { 1e-3 } else { 1e-2 };
    assert_eq!(found.len(), wanted.len());
    for (found, wanted) in found.iter().flatten().zip(wanted.iter().flatten()) {
        assert!((found - wanted).abs() <= tolerance * wanted.abs().max(least), "{what}, {uses:?}: {found} {wanted}");
    }
}

/// Gradients of table and bias after two backward passes over one graph, and over another.
fn gradients(uses: Uses, has_layers: bool, is_frozen: bool) -> Vec<Vec<f32>> {
    let store = ParamStore::new(Device::Cpu);
    let model = tied(&store, uses, has_layers).unwrap();
    let parameters = store.parameters();
    parameters[0].set_requires_grad(!is_frozen).unwrap();
    for step in 0..2 {
        let _ = evaluate(&model, step);
        let loss = model.forward(&tokens(step)).unwrap().square().mean(None);
        if loss.requires_grad() {
            backward(&[&loss], None, BackwardOptions { retain_graph: true, ..Default::default() }).unwrap();
            backward(&[&loss], None, Default::default()).unwrap();
        }
    }
    let values = |grad: Tensor| Vec::try_from(grad.reshape([-1])).unwrap();
    parameters.iter().map(|param| param.grad().map(values).unwrap_or_default()).collect()
}

/// Without gradients: leaves no trace.
fn evaluate(model: &impl Module<Input = Tensor, Output = Tensor>, step: i64) -> Tensor {
    accelerate::tch::no_grad(|| model.forward(&tokens(step)).unwrap())
}

#[test]
fn gradients_are_those_of_libtorch() {
    for uses in ALL {
        for is_frozen in [false, true] {
            let (found, wanted) = (gradients(uses, true, is_frozen), gradients(uses, false, is_frozen));
            assert_same(&found, &wanted, uses, if is_frozen { "frozen" } else { "learns" });
            assert_eq!(found[0].is_empty(), is_frozen, "{uses:?}");
        }
    }
}

/// Table and bias after some steps.
fn train(world_size: usize, builder: AcceleratorBuilder, uses: Uses, has_layers: bool) -> Vec<Vec<f32>> {
    testing::ranks(world_size, builder, |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let model = tied(&store, uses, has_layers)?;
        let (model, mut optimizer) = accelerator.prepare((model, Sgd::new(&store, 0.5)?))?;
        for step in 0..4 {
            accelerator.accumulate(&model, || {
                let output = model.forward(&tokens(step + accelerator.process_index() as i64))?;
                accelerator.backward(&output.f_square()?.f_mean(None)?)?;
                optimizer.step()?;
                optimizer.zero_grad()
            })?;
        }
        Ok(store.parameters().iter().map(|param| Vec::try_from(param.get().unwrap().reshape([-1])).unwrap()).collect())
    })
    .unwrap()
    .swap_remove(0)
}

#[test]
fn training_is_the_same_alone_and_together() {
    let kwargs = DistributedDataParallelKwargs {
        find_unused_parameters: Some(true),
        gradient_as_bucket_view: Some(true),
        ..Default::default()
    };
    for (world_size, uses) in [(1, Uses::Both), (2, Uses::Both), (2, Uses::Twice), (2, Uses::EmbeddingOnly)] {
        let builder = || Accelerator::builder().gradient_accumulation_steps(2).kwargs_handler(kwargs.clone());
        let wanted = train(world_size, builder(), uses, false);
        assert!(wanted.iter().flatten().all(|value| value.is_finite()));
        assert_same(&train(world_size, builder(), uses, true), &wanted, uses, &format!("{world_size} ranks"));
    }
}

#[test]
fn autocast_is_left_to_libtorch() {
    let builder = || Accelerator::builder().mixed_precision(MixedPrecision::Bf16);
    assert!(train(1, builder(), Uses::Both, true) == train(1, builder(), Uses::Both, false));
}

/// The two names of a table follow it to other data.
#[test]
fn a_table_that_has_moved_is_used_where_it_is() {
    let run = |has_layers: bool| {
        let store = ParamStore::new(Device::Cpu);
        let model = tied(&store, Uses::Both, has_layers).unwrap();
        let mut found = Vec::new();
        for step in 0..2 {
            let output = model.forward(&tokens(step)).unwrap();
            backward(&[&output.square().mean(None)], None, Default::default()).unwrap();
            store.to_kind(Kind::Double).unwrap();
            store.to_kind(Kind::Float).unwrap();
            store.parameters()[0].copy_(&(store.parameters()[0].get().unwrap() * 2.0)).unwrap();
            found.push(Vec::<f32>::try_from(output.reshape([-1])).unwrap());
            found.push(Vec::try_from(store.parameters()[0].grad().unwrap().reshape([-1])).unwrap());
        }
        found
    };
    assert_same(&run(true), &run(false), Uses::Both, "moved");
}
