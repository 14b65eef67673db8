//! Checkpoints of runs whose gradients PowerSGD compresses: what the hook keeps from step to step goes on with them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{Linear, Module, ModuleFn, ParamStore};
use accelerate::optim::{AcceleratedOptimizer, Sgd};
use accelerate::tch::{Kind, Tensor};
use accelerate::{Accelerator, AcceleratorBuilder, DistributedDataParallelKwargs, PreparedModel, Result, testing};
use rstest::rstest;
use serde_json::{Value, json};
use std::path::Path;

/// Two layers of more than a MiB each, so that there are several buckets.
const WIDTH: i64 = 520;

fn builder(hook: &Value) -> AcceleratorBuilder {
    let kwargs: DistributedDataParallelKwargs = serde_json::from_value(hook.clone()).unwrap();
    Accelerator::builder().cpu(true).kwargs_handler(kwargs)
}

fn hook(name: &str, options: Value) -> Value {
    let mut options = options;
    options["start_powerSGD_iter"] = json!(2);
    json!({"comm_hook": name, "comm_state_option": options})
}

fn fractions(shape: &[i64], salt: i64) -> Tensor {
    let values: Vec<f32> =
        (0..shape.iter().product()).map(|i| ((i * 37 + salt * 11) % 101) as f32 / 101.0 - 0.5).collect();
    Tensor::from_slice(&values).view(shape)
}

struct Training<M> {
    accelerator: Accelerator,
    model: PreparedModel<M>,
    optimizer: AcceleratedOptimizer<Sgd>,
    num_steps: i64,
}

fn training(accelerator: Accelerator) -> Result<Training<impl Module<Input = Tensor, Output = Tensor>>> {
    let store = ParamStore::new(accelerator.device());
    let layer = |name| Linear::new(store.root() / name, WIDTH, WIDTH, Default::default());
    let layers = [layer("first")?, layer("second")?];
    for (salt, param) in store.parameters().iter().enumerate() {
        param.copy_(&(fractions(&param.shape(), salt as i64) * 0.1))?;
    }
    let optimizer = Sgd::new(&store, 0.01)?;
    let forward = move |x: &Tensor| layers[1].forward(&layers[0].forward(x)?.f_tanh()?);
    let (model, optimizer) = accelerator.prepare((ModuleFn::new(&store, forward), optimizer))?;
    Ok(Training { accelerator, model, optimizer, num_steps: 0 })
}

impl<M: Module<Input = Tensor, Output = Tensor>> Training<M> {
    /// Each rank with rows of its own, which the number of the step decides.
    fn train(&mut self, num_steps: i64) -> Result<()> {
        for _ in 0..num_steps {
            let salt = 100 + 10 * self.num_steps + self.accelerator.process_index() as i64;
            let loss = self.model.forward(&fractions(&[2, WIDTH], salt))?.square().sum(Kind::Float);
            self.accelerator.backward(&loss)?;
            self.optimizer.step()?;
            self.optimizer.zero_grad()?;
            self.num_steps += 1;
        }
        Ok(())
    }

    fn parameters(&self) -> Result<Vec<Vec<f32>>> {
        let state = self.model.params().state_dict()?;
        Ok(state.iter().map(|(_, tensor)| Vec::try_from(tensor.detach().reshape(-1)).unwrap()).collect())
    }
}

fn saved_of_rank(path: &Path, rank: usize) -> Value {
    let text = std::fs::read_to_string(path.join("checkpoint.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["objects"][format!("comm_hook_{rank}")].take()
}

#[rstest]
#[case::by_layer(hook("power_sgd", json!({})))]
#[case::as_one_square(hook("batched_power_sgd", json!({"matrix_approximation_rank": 2})))]
#[case::without_errors(hook("power_sgd", json!({"use_error_feedback": false, "batch_tensors_with_same_shape": true})))]
#[case::with_new_factors_in_each_step(hook("power_sgd", json!({"warm_start": false})))]
#[case::without_memory(hook("power_sgd", json!({"warm_start": false, "use_error_feedback": false})))]
fn a_compressed_run_goes_on_to_the_bit(
    #[values(1, 2, 3)] world_size: usize,
    // Before compression has begun, and after it.
    #[values(1, 4)] num_steps: i64,
    #[case] hook: Value,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let undisturbed = testing::ranks(world_size, builder(&hook), |accelerator| {
        let mut training = training(accelerator)?;
        training.train(num_steps)?;
        // Nothing is loaded here: what a checkpoint lacks, both runs would lack.
        training.accelerator.save_state(&path)?;
        training.train(4)?;
        training.parameters()
    })
    .unwrap();
    let resumed = testing::ranks(world_size, builder(&hook), |accelerator| {
        let mut training = training(accelerator)?;
        // What the hook keeps by then is not that of the checkpoint.
        training.train(3)?;
        training.accelerator.load_state(&path)?;
        training.num_steps = num_steps;
        training.train(4)?;
        training.parameters()
    })
    .unwrap();
    assert!(resumed == undisturbed, "the parameters differ");
}

/// Errors are those of a rank's own gradients, and factors those of the buckets: with other ones, both begin anew.
#[rstest]
#[case::other_processes(3, hook("power_sgd", json!({})))]
#[case::one_process(1, hook("power_sgd", json!({})))]
#[case::other_factors(2, hook("power_sgd", json!({"matrix_approximation_rank": 2})))]
fn a_run_that_divides_gradients_otherwise_goes_on_without_errors_and_factors(
    #[case] world_size: usize,
    #[case] other: Value,
) {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    testing::ranks(2, builder(&hook("power_sgd", json!({}))), |accelerator| {
        let mut training = training(accelerator)?;
        training.train(4)?;
        training.accelerator.save_state(&first).map(drop)
    })
    .unwrap();
    let kept = saved_of_rank(&first, 1);
    assert_eq!(kept["values"]["model"]["iteration"], 4);
    assert!(kept["tensors"]["model.bucket_1.error"].is_object() && kept["tensors"]["model.bucket_1.q"].is_object());

    let parameters = testing::ranks(world_size, builder(&other), |accelerator| {
        let mut training = training(accelerator)?;
        training.accelerator.load_state(&first)?;
        training.accelerator.save_state(&second)?;
        training.train(3)?;
        training.parameters()
    })
    .unwrap();
    assert!(parameters.iter().all(|of_rank| *of_rank == parameters[0]), "ranks differ");
    let kept = saved_of_rank(&second, 0);
    if world_size > 1 {
        assert_eq!(
            (&kept["values"]["model"]["iteration"], &kept["values"]["model"]["num_buckets"]),
            (&json!(4), &json!(0))
        );
        assert!(kept["tensors"].is_null());
    } else {
        // There is nothing to send, and no hook.
        assert!(kept.is_null());
    }
}

#[test]
fn a_run_that_begins_to_compress_loads_a_checkpoint_without_a_hook_and_the_other_way_round() {
    let folder = tempfile::tempdir().unwrap();
    let compressed = hook("power_sgd", json!({}));
    let mut from = None;
    for (number, hook) in [json!({}), compressed, json!({})].iter().enumerate() {
        let path = folder.path().join(number.to_string());
        testing::ranks(2, builder(hook), |accelerator| {
            let mut training = training(accelerator)?;
            if let Some(from) = &from {
                training.accelerator.load_state(from)?;
            }
            training.train(4)?;
            training.accelerator.save_state(&path).map(drop)
        })
        .unwrap();
        assert_eq!(saved_of_rank(&path, 0).is_null(), number != 1);
        from = Some(path);
    }
}
