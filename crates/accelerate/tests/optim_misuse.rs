//! What a training loop can get wrong around its step is an error with its cure, on the first step.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{Init, ModuleFn, Param, ParamStore};
use accelerate::optim::{Adafactor, AdamW, LinearWithWarmup, Lion, Optimizer, Sgd};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, Error, GradScalerKwargs, MixedPrecision, PrepareModelOptions};

fn weight(kind: Kind) -> (ParamStore, Param) {
    let store = ParamStore::new(Device::Cpu);
    let weight = store.root().param("weight", ([3], Init::Ones)).unwrap();
    if kind != Kind::Float {
        store.to_kind(kind).unwrap();
    }
    (store, weight)
}

fn accelerator(precision: MixedPrecision) -> Accelerator {
    Accelerator::builder().cpu(true).mixed_precision(precision).build().unwrap()
}

fn backward(accelerator: &Accelerator, weight: &Param) -> Result<(), Error> {
    accelerator.backward(&weight.get().unwrap().sum(Kind::Float))
}

#[test]
fn clipping_after_the_step_is_refused() {
    for precision in [MixedPrecision::No, MixedPrecision::Fp16] {
        let accelerator = accelerator(precision);
        let (store, weight) = weight(Kind::Float);
        let mut optimizer = accelerator.prepare(AdamW::new(&store, 0.1).unwrap()).unwrap();
        for drops in [false, true] {
            backward(&accelerator, &weight).unwrap();
            accelerator.clip_grad_norm_(&store, 1.0).unwrap();
            optimizer.step().unwrap();
            if drops {
                optimizer.zero_grad().unwrap();
            }
            for error in [
                accelerator.clip_grad_norm_(&store, 1.0).unwrap_err(),
                accelerator.clip_grad_value_(&store, 1.0).unwrap_err(),
            ] {
                let text = error.to_string();
                assert!(text.contains("after the step of AdamW") && text.contains("Clip between"), "{text}");
            }
        }
    }
}

#[test]
fn one_optimizer_that_has_not_stepped_is_reason_enough_to_clip() {
    let accelerator = accelerator(MixedPrecision::No);
    let ((first_store, first), (second_store, second)) = (weight(Kind::Float), weight(Kind::Float));
    let mut first_optimizer = accelerator.prepare(Sgd::new(&first_store, 0.1).unwrap()).unwrap();
    let _second_optimizer = accelerator.prepare(Sgd::new(&second_store, 0.1).unwrap()).unwrap();
    backward(&accelerator, &first).unwrap();
    backward(&accelerator, &second).unwrap();
    first_optimizer.step().unwrap();
    accelerator.clip_grad_norm_(&vec![first, second], 1.0).unwrap();
    assert!(accelerator.clip_grad_norm_(&first_store, 1.0).is_err());
}

#[test]
fn a_scheduler_whose_optimizer_was_not_prepared_is_refused() {
    let accelerator = accelerator(MixedPrecision::No);
    let (store, _) = weight(Kind::Float);
    let optimizer = Sgd::new(&store, 0.1).unwrap();
    let mut scheduler = accelerator.prepare(LinearWithWarmup::new(&optimizer, 1, 5)).unwrap();
    let text = scheduler.step().unwrap_err().to_string();
    assert!(text.contains("Sgd") && text.contains("Prepare both"), "{text}");
    // The order does not matter.
    let _optimizer = accelerator.prepare(optimizer).unwrap();
    scheduler.step().unwrap();
}

#[test]
fn stepping_an_optimizer_that_was_not_prepared_is_refused() {
    let accelerator = accelerator(MixedPrecision::No);
    let (store, _) = weight(Kind::Float);
    let module = |store: &ParamStore| {
        let weight = store.get("weight").unwrap();
        ModuleFn::new(store, move |input: &Tensor| Ok((weight.get()? * input).sum(Kind::Float)))
    };
    let mut plain: [Box<dyn Optimizer>; 3] = [
        Box::new(Sgd::new(&store, 0.1).unwrap()),
        Box::new(Lion::new(&store, 0.1).unwrap()),
        Box::new(Adafactor::new(&store, 0.1).unwrap()),
    ];
    // Nothing is prepared: a loop of one's own.
    plain.iter_mut().for_each(|optimizer| optimizer.step().unwrap());
    let model = accelerator.prepare(module(&store)).unwrap();
    for optimizer in &mut plain {
        let text = optimizer.step().unwrap_err().to_string();
        assert!(text.contains("\"weight\"") && text.contains("accelerator.prepare(optimizer)"), "{text}");
    }
    let mut optimizer = accelerator.prepare(Sgd::new(&store, 0.1).unwrap()).unwrap();
    optimizer.step().unwrap();
    let mut taken_back = optimizer.into_inner().unwrap();
    taken_back.step().unwrap_err();
    let _model = model.into_inner();
    taken_back.step().unwrap();
    // A model that is only evaluated is nobody's concern.
    let _evaluated = accelerator
        .prepare_model(module(&store), PrepareModelOptions { evaluation_mode: true, ..Default::default() })
        .unwrap();
    taken_back.step().unwrap();
    let _model = accelerator.prepare(module(&store)).unwrap();
    accelerator.free_memory();
    taken_back.step().unwrap();
}

#[test]
fn a_second_backward_pass_over_one_graph_is_refused() {
    let accelerator = accelerator(MixedPrecision::No);
    let (_store, weight) = weight(Kind::Float);
    let loss = weight.get().unwrap().square().sum(Kind::Float);
    accelerator.backward(&loss).unwrap();
    let text = accelerator.backward(&loss).unwrap_err().to_string();
    assert!(text.contains("second time"), "{text}");
}

#[test]
fn half_precision_parameters_under_the_scaler_are_refused_by_name() {
    let accelerator = accelerator(MixedPrecision::Fp16);
    let (store, weight) = weight(Kind::Half);
    let mut optimizer = accelerator.prepare(Sgd::new(&store, 0.1).unwrap()).unwrap();
    backward(&accelerator, &weight).unwrap();
    let text = optimizer.step().unwrap_err().to_string();
    assert!(text.contains("\"weight\" is float16") && text.contains("float32"), "{text}");
}

#[test]
fn two_handlers_of_one_kind_are_refused() {
    let builder = Accelerator::builder().cpu(true).kwargs_handler(GradScalerKwargs::default());
    let error = builder.kwargs_handler(GradScalerKwargs::default()).build().unwrap_err();
    assert!(error.to_string().contains("two handlers of kind GradScalerKwargs"), "{error}");
}
