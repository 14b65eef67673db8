//! How models are passed to calls: one by one or as tuples, prepared or not, as each call needs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{Init, Linear, Module, ModuleFn, ParamStore};
use accelerate::optim::Sgd;
use accelerate::tch::{Kind, Tensor};
use accelerate::{Accelerator, Error, HasParameters, JoinOptions, MixedPrecision, SaveModelOptions};
use rstest::rstest;

fn accelerator() -> Accelerator {
    Accelerator::builder().cpu(true).gradient_accumulation_steps(2).build().unwrap()
}

/// A model of one weight of 1 x `width` ones, and its store.
fn model(accelerator: &Accelerator, width: i64) -> (ParamStore, impl Module<Input = Tensor, Output = Tensor>) {
    let store = ParamStore::new(accelerator.device());
    let linear =
        Linear::new(store.root(), width, 1, accelerate::nn::LinearConfig { bias: false, ..Default::default() });
    let linear = linear.unwrap();
    linear.weight.copy_(&Tensor::from(1f32)).unwrap();
    let module = ModuleFn::new(&store, move |input: &Tensor| linear.forward(input));
    (store, module)
}

#[test]
fn only_prepared_models_can_keep_their_gradients_local() {
    let accelerator = accelerator();
    let (store, module) = model(&accelerator, 1);
    let params = store.trainable_parameters();
    let calls: [(&str, Result<(), Error>); 6] = [
        ("accumulate", accelerator.accumulate(&store, || Ok(()))),
        ("accumulate", accelerator.accumulate(&params, || Ok(()))),
        ("accumulate", accelerator.accumulate(&(&module, &store), || Ok(()))),
        ("no_sync", accelerator.no_sync(&module, || Ok(()))),
        ("trigger_sync_in_backward", accelerator.trigger_sync_in_backward(&store)),
        ("join_uneven_inputs", accelerator.join_uneven_inputs(&store, JoinOptions::default(), || Ok(()))),
    ];
    for (call, result) in calls {
        let error = result.unwrap_err();
        let words = format!("{call} was given a model that `prepare` has not returned");
        assert!(error.is_config() && error.to_string().contains(&words), "{error}");
    }
    // A refused call counts no micro-batch.
    let model = accelerator.prepare(module).unwrap();
    accelerator.accumulate(&model, || Ok(())).unwrap();
    assert!(!accelerator.sync_gradients());
    accelerator.accumulate(&(&model,), || Ok(())).unwrap();
    assert!(accelerator.sync_gradients());
}

#[test]
fn several_models_are_clipped_together() {
    let accelerator = accelerator();
    let ((first_store, first), (second_store, second)) = (model(&accelerator, 4), model(&accelerator, 5));
    let (first, second) = accelerator.prepare((first, second)).unwrap();
    let both: [(&dyn Forward, i64); 2] = [(&first, 4), (&second, 5)];
    for (forward, width) in both {
        accelerator
            .backward(&(forward.run(&Tensor::ones([width], (Kind::Float, accelerator.device()))) * 2.0))
            .unwrap();
    }
    // Nine gradients of 1: the loss is halved by accumulation.
    let norm = accelerator.clip_grad_norm_(&(&first, &second_store), 1.5).unwrap().double_value(&[]);
    assert!((norm - 3.0).abs() < 1e-6, "{norm}");
    let after = accelerator.clip_grad_norm_(&(&first_store, &second), 100.0).unwrap().double_value(&[]);
    assert!((after - 1.5).abs() < 1e-5, "{after}");
    assert_eq!((&first, &second).trainable_parameters().len(), 2);
}

#[rstest]
#[case::plain(MixedPrecision::No)]
#[case::scaled(MixedPrecision::Fp16)]
fn every_element_of_a_true_gradient_is_clipped(#[case] mixed_precision: MixedPrecision) {
    let accelerator = Accelerator::builder().cpu(true).mixed_precision(mixed_precision).build().unwrap();
    let store = ParamStore::new(accelerator.device());
    let weight = store.root().param("weight", ([4], Init::Ones)).unwrap();
    let _optimizer = accelerator.prepare(Sgd::new(&store, 0.1).unwrap()).unwrap();
    let gradient = Tensor::from_slice(&[3f32, -3.0, 0.25, -0.25]);
    accelerator.backward(&(weight.get().unwrap() * &gradient).sum(None)).unwrap();
    accelerator.clip_grad_value_(&store, 1.0).unwrap();
    assert_eq!(weight.grad().unwrap(), gradient.clamp(-1.0, 1.0));
}

/// The forward pass of a prepared model whose type has no name.
trait Forward {
    fn run(&self, input: &Tensor) -> Tensor;
}

impl<M: Module<Input = Tensor, Output = Tensor>> Forward for accelerate::PreparedModel<M> {
    fn run(&self, input: &Tensor) -> Tensor {
        self.forward(input).unwrap().sum(None)
    }
}

#[test]
fn files_are_of_one_model() {
    let accelerator = accelerator();
    let folder = tempfile::tempdir().unwrap();
    let ((first, module), (second, _)) = (model(&accelerator, 1), model(&accelerator, 1));
    let options = SaveModelOptions::default();
    for (found, result) in [
        (2, accelerator.save_model(&(&first, &second), folder.path(), &options)),
        (0, accelerator.save_model(&first.trainable_parameters(), folder.path(), &options)),
        (2, accelerator.load_checkpoint_in_model(&(&first, &second), folder.path()).map(drop)),
    ] {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(&format!("takes one model, but was given {found}")), "{error}");
    }
    accelerator.save_model(&accelerator.prepare(module).unwrap(), folder.path(), &options).unwrap();
    second.get("weight").unwrap().copy_(&Tensor::from(5f32)).unwrap();
    accelerator.load_checkpoint_in_model(&second, folder.path()).unwrap();
    assert_eq!(second.get("weight").unwrap().local().double_value(&[0, 0]), 1.0);
}
