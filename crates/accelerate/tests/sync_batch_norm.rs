//! Batch normalisation over the batches of several ranks, beside one rank with all of them.
#![allow(clippy::unwrap_used)]

use accelerate::nn::{BatchNorm2d, BatchNormConfig, ModuleFn, ParamStore};
use accelerate::optim::Sgd;
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, testing};

const CHANNELS: i64 = 3;

/// Rows far from zero, so that a variance from sums of squares would lose its digits.
fn rows(num_rows: i64) -> Tensor {
    let numbers = Tensor::arange(num_rows * CHANNELS * 4, (Kind::Float, Device::Cpu));
    (numbers * 12.9898).sin().view([num_rows, CHANNELS, 2, 2]) * 3.0 + 1000.0
}

/// What a loss would send back.
fn gradients(num_rows: i64) -> Tensor {
    (Tensor::arange(num_rows * CHANNELS * 4, (Kind::Float, Device::Cpu)) * 78.233)
        .cos()
        .view([num_rows, CHANNELS, 2, 2])
}

fn near(found: &Tensor, wanted: &Tensor, tolerance: f64, what: &str) {
    let difference = (found - wanted).abs().max().double_value(&[]);
    assert!(difference <= tolerance, "{what} is {difference} away: {found:?} {found} {wanted}");
}

struct Passed {
    output: Tensor,
    of_input: Tensor,
    of_weight: Tensor,
    of_bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    count: i64,
}

/// Two forward passes, and a backward pass through the second.
fn pass(store: &ParamStore, norm: &BatchNorm2d, input: &Tensor, gradient: &Tensor) -> accelerate::Result<Passed> {
    drop(norm.forward(&(input * 0.5))?);
    let input = input.detach().set_requires_grad(true);
    let output = norm.forward(&input)?;
    (&output * gradient).sum(None).backward();
    let grad = |name: &str| store.get(name).unwrap().grad().unwrap();
    Ok(Passed {
        output: output.detach(),
        of_input: input.grad(),
        of_weight: grad("weight"),
        of_bias: grad("bias"),
        mean: norm.running_mean.as_ref().unwrap().get()?.copy(),
        variance: norm.running_var.as_ref().unwrap().get()?.copy(),
        count: norm.num_batches_tracked.as_ref().unwrap().get()?.int64_value(&[]),
    })
}

fn layer(device: Device, config: BatchNormConfig) -> accelerate::Result<(ParamStore, BatchNorm2d)> {
    let store = ParamStore::new(device);
    let norm = BatchNorm2d::new(store.root(), CHANNELS, config)?;
    norm.weight.as_ref().unwrap().copy_(&Tensor::from_slice(&[0.5f32, 2.0, -1.5]))?;
    norm.bias.as_ref().unwrap().copy_(&Tensor::from_slice(&[0.1f32, -0.2, 0.3]))?;
    Ok((store, norm))
}

#[test]
fn ranks_normalise_as_one_with_all_their_rows() {
    // Also batches of other sizes, of one row, and of none.
    for sizes in [vec![4], vec![3, 5], vec![1, 1], vec![2, 0, 4], vec![1, 2, 3, 2]] {
        for momentum in [Some(0.1), None] {
            let config = BatchNormConfig { momentum, ..Default::default() };
            let total: i64 = sizes.iter().sum();
            let (store, norm) = layer(Device::Cpu, config).unwrap();
            let wanted = pass(&store, &norm, &rows(total), &gradients(total)).unwrap();
            let begins: Vec<i64> =
                sizes.iter().scan(0, |sum, size| Some(std::mem::replace(sum, *sum + size))).collect();
            let found = testing::ranks(sizes.len(), Accelerator::builder(), |accelerator| {
                let rank = accelerator.process_index();
                let own = |all: Tensor| all.narrow(0, begins[rank], sizes[rank]);
                let (store, norm) = layer(accelerator.device(), config)?;
                assert_eq!(accelerator.convert_sync_batchnorm(&store)?, 1);
                pass(&store, &norm, &own(rows(total)), &own(gradients(total)))
            })
            .unwrap();
            let sum = |part: fn(&Passed) -> &Tensor| {
                found
                    .iter()
                    .fold(Tensor::zeros([CHANNELS], (Kind::Float, Device::Cpu)), |sum, passed| sum + part(passed))
            };
            for (rank, passed) in found.iter().enumerate() {
                let own = |all: &Tensor| all.narrow(0, begins[rank], sizes[rank]);
                if sizes[rank] > 0 {
                    near(&passed.output, &own(&wanted.output), 2e-3, "the output");
                    near(&passed.of_input, &own(&wanted.of_input), 2e-4, "the gradient of the input");
                }
                near(&passed.mean, &wanted.mean, 1e-4, "the running mean");
                near(&passed.variance, &wanted.variance, 1e-4, "the running variance");
                assert_eq!(passed.count, 2);
            }
            near(&sum(|passed| &passed.of_weight), &wanted.of_weight, 1e-3, "the gradient of the weight");
            near(&sum(|passed| &passed.of_bias), &wanted.of_bias, 1e-4, "the gradient of the bias");
        }
    }
}

#[test]
fn training_on_two_ranks_is_training_with_both_batches() {
    let train = |accelerator: &Accelerator, own: Tensor| -> accelerate::Result<Vec<Tensor>> {
        let (store, norm) = layer(accelerator.device(), Default::default())?;
        accelerator.convert_sync_batchnorm(&store)?;
        let model = ModuleFn::new(&store, move |input: &Tensor| norm.forward(input));
        let optimizer = Sgd::new(&store, 0.1)?;
        let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
        for _ in 0..3 {
            let loss = model.forward(&own)?.square().mean(Kind::Float);
            accelerator.backward(&loss)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
        store.parameters().iter().map(|param| Ok(param.get()?.detach().copy())).collect()
    };
    let wanted = testing::ranks(1, Accelerator::builder(), |accelerator| train(&accelerator, rows(6))).unwrap();
    let found = testing::ranks(2, Accelerator::builder(), |accelerator| {
        train(&accelerator, rows(6).narrow(0, 3 * accelerator.process_index() as i64, 3))
    })
    .unwrap();
    for params in &found {
        params.iter().zip(&wanted[0]).for_each(|(found, wanted)| near(found, wanted, 1e-4, "a parameter"));
    }
}

#[test]
fn evaluation_and_half_precision_work_without_the_others() {
    let results = testing::ranks(2, Accelerator::builder(), |accelerator| {
        let (store, norm) = layer(accelerator.device(), Default::default())?;
        accelerator.convert_sync_batchnorm(&store)?;
        let halves = norm.forward(&(rows(4) - 1000.0).to_kind(Kind::BFloat16))?;
        assert_eq!(halves.kind(), Kind::BFloat16);
        store.eval();
        // Rank 1 does not come.
        if accelerator.process_index() == 0 {
            drop(norm.forward(&rows(1))?);
        }
        let kinds: Vec<_> = store.named_layers().iter().map(|(_, layer)| layer.kind()).collect();
        Ok(kinds)
    })
    .unwrap();
    assert_eq!(results, [["SyncBatchNorm"], ["SyncBatchNorm"]]);
}

#[test]
fn wrong_inputs_are_told_as_ever() {
    testing::ranks(2, Accelerator::builder(), |accelerator| {
        let (store, norm) = layer(accelerator.device(), Default::default())?;
        accelerator.convert_sync_batchnorm(&store)?;
        let error = norm.forward(&Tensor::zeros([2, 4, 2, 2], (Kind::Float, Device::Cpu))).unwrap_err().to_string();
        assert!(error.contains("BatchNorm2d at `weight`") && error.contains("[2, 4, 2, 2]"), "{error}");
        let error = norm.forward(&Tensor::zeros([0, 3, 2, 2], (Kind::Float, Device::Cpu))).unwrap_err().to_string();
        assert!(error.contains("one value per channel"), "{error}");
        Ok(())
    })
    .unwrap();
}
