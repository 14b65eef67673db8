//! Custom functions: nodes of the graph made of Rust closures.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use tch::{Device, Kind, Tensor};
use torch_ext::apply_function;
use torch_ext::autograd::{self, BackwardOptions, CallbackResult, GradOptions, gradient_of};
use torch_ext::function::{BackwardContext, two_uses};
use torch_ext::hooks::register_hook;
use torch_ext::storage::WeakStorage;

fn leaf(values: &[f32]) -> Tensor {
    Tensor::from_slice(values).set_requires_grad(true)
}

fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(&tensor.detach().contiguous().view([-1])).unwrap()
}

fn gradient(tensor: &Tensor) -> Option<Vec<f32>> {
    gradient_of(tensor).unwrap().map(|gradient| values(&gradient))
}

fn run_backward(output: &Tensor) -> torch_ext::Result<()> {
    autograd::backward(&[output], None, Default::default())
}

/// What a closure's panic says.
fn panic_text(body: impl FnOnce()) -> String {
    let payload = catch_unwind(AssertUnwindSafe(body)).expect_err("no panic arrived");
    match payload.downcast::<&'static str>() {
        Ok(text) => (*text).to_owned(),
        Err(payload) => *payload.downcast::<String>().expect("a panic without text"),
    }
}

/// `inputs -> (sum, product)` of two tensors, as one node with two outputs.
fn sum_and_product(x: &Tensor, y: &Tensor) -> Vec<Tensor> {
    apply_function(
        "SumAndProduct",
        &[x, y],
        |context| {
            context.save_for_backward(&[x, y]);
            Ok(vec![x + y, x * y])
        },
        |context, gradients| {
            let saved = context.saved_tensors()?;
            let [sum, product] = &gradients[..] else {
                return Err("two outputs".into());
            };
            let part = |other: &Tensor| match (sum, product) {
                (Some(sum), Some(product)) => Some(sum + product * other),
                (Some(sum), None) => Some(sum.shallow_clone()),
                (None, Some(product)) => Some(product * other),
                (None, None) => None,
            };
            Ok(vec![part(&saved[1]), part(&saved[0])])
        },
    )
    .unwrap()
}

#[test]
fn a_function_with_two_outputs_differentiates() {
    let (x, y) = (leaf(&[2.0, 3.0]), leaf(&[5.0, 7.0]));
    let outputs = sum_and_product(&x, &y);
    assert_eq!((values(&outputs[0]), values(&outputs[1])), (vec![7.0, 10.0], vec![10.0, 21.0]));
    assert!(outputs.iter().all(|output| output.requires_grad() && !autograd::is_leaf(output)));
    run_backward(&(&outputs[0] * 10.0 + &outputs[1]).sum(Kind::Float)).unwrap();
    assert_eq!(gradient(&x).unwrap(), [15.0, 17.0]);
    assert_eq!(gradient(&y).unwrap(), [12.0, 13.0]);
}

#[test]
fn unused_outputs_give_none() {
    for (used, expected) in [(0, [1.0]), (1, [5.0])] {
        let (x, y) = (leaf(&[2.0]), leaf(&[5.0]));
        run_backward(&sum_and_product(&x, &y)[used]).unwrap();
        assert_eq!(gradient(&x).unwrap(), expected);
    }
}

#[test]
fn the_forward_closure_is_outside_the_graph() {
    let x = leaf(&[1.0]);
    apply_function(
        "Inspect",
        &[&x],
        |_| {
            let y = &x * 2.0;
            assert!(!y.requires_grad());
            Ok(vec![y])
        },
        |_, gradients| Ok(gradients),
    )
    .unwrap();
    assert!((&x * 2.0).requires_grad(), "recording must be on again afterwards");
}

#[test]
fn nothing_is_recorded_when_nothing_requires_gradients() {
    let token = Arc::new(());
    let captured = Arc::clone(&token);
    let x = Tensor::from(1f32);
    let y = apply_function(
        "Plain",
        &[&x],
        |context| {
            assert!(!context.is_differentiated());
            Ok(vec![&x * 2.0])
        },
        move |_, gradients| {
            let _ = &captured;
            Ok(gradients)
        },
    )
    .unwrap();
    assert!(!y[0].requires_grad());
    assert_eq!(Arc::strong_count(&token), 1, "an unused backward closure must be dropped");
}

#[test]
fn inputs_without_gradient_are_not_needed() {
    let (x, constant) = (leaf(&[2.0]), Tensor::from_slice(&[3f32]));
    let y = apply_function(
        "Scale",
        &[&constant, &x],
        |_| Ok(vec![&x * &constant]),
        |context, gradients| {
            assert!(!context.needs_input_grad(0) && context.needs_input_grad(1));
            assert!(!context.needs_input_grad(2));
            Ok(vec![None, gradients[0].as_ref().map(|gradient| gradient * 3.0)])
        },
    )
    .unwrap();
    run_backward(&y[0]).unwrap();
    assert_eq!(gradient(&x).unwrap(), [3.0]);
    assert_eq!(gradient(&constant), None);
}

#[test]
fn marked_and_integer_outputs_are_not_differentiable() {
    let x = leaf(&[2.0, 1.0]);
    let outputs = apply_function(
        "Sort",
        &[&x],
        |context| {
            let (sorted, index) = x.sort(0, false);
            let mask = x.gt(1.5).to_kind(Kind::Float);
            context.mark_non_differentiable(&mask);
            Ok(vec![sorted, index, mask])
        },
        |_, gradients| Ok(vec![gradients.into_iter().next().flatten()]),
    )
    .unwrap();
    let recorded: Vec<bool> = outputs.iter().map(Tensor::requires_grad).collect();
    assert_eq!(recorded, [true, false, false]);
}

#[test]
fn an_input_returned_as_output_is_a_new_tensor_of_the_graph() {
    let x = leaf(&[2.0]);
    let y = apply_function(
        "Identity",
        &[&x],
        |_| Ok(vec![x.shallow_clone()]),
        |_, gradients| Ok(vec![gradients[0].as_ref().map(|gradient| gradient * 7.0)]),
    )
    .unwrap();
    assert!(autograd::is_leaf(&x) && !autograd::is_leaf(&y[0]));
    run_backward(&y[0]).unwrap();
    assert_eq!(gradient(&x).unwrap(), [7.0]);
}

#[test]
fn wrong_gradients_name_the_function() {
    type Gradients = fn() -> Vec<Option<Tensor>>;
    let wrong: [(Gradients, &str); 2] = [
        (|| vec![], "`Gather` returned 0 gradients for 1 inputs"),
        (
            || vec![Some(Tensor::zeros([3], (Kind::Float, Device::Cpu)))],
            "Gather returned an invalid gradient at index 0",
        ),
    ];
    for (gradients, message) in wrong {
        let x = leaf(&[1.0, 2.0]);
        let y = apply_function("Gather", &[&x], |_| Ok(vec![&x * 1.0]), move |_, _| Ok(gradients())).unwrap();
        let error = run_backward(&y[0].sum(Kind::Float)).unwrap_err();
        assert!(error.message().contains(message), "{error}");
    }
}

#[test]
fn errors_and_panics_of_both_closures_arrive() {
    let x = leaf(&[1.0]);
    let error = apply_function("Broken", &[&x], |_| Err("no memory".into()), |_, gradients| Ok(gradients)).unwrap_err();
    assert_eq!(error.message(), "the forward of the custom function `Broken` failed: no memory");
    assert!(error.is_callback());
    assert!((&x * 2.0).requires_grad(), "recording must be on again after the error");

    let y = apply_function("Broken", &[&x], |_| Ok(vec![&x * 1.0]), |_, _| Err(std::fmt::Error.into())).unwrap();
    let error = run_backward(&y[0]).unwrap_err();
    assert!(error.message().starts_with("the backward of the custom function `Broken` failed"), "{error}");
    let wrapped = std::error::Error::source(&error).unwrap();
    assert!(wrapped.source().unwrap().is::<std::fmt::Error>());

    let y = apply_function("Broken", &[&x], |_| Ok(vec![&x * 1.0]), |_, _| panic!("out of tokens")).unwrap();
    assert_eq!(panic_text(|| run_backward(&y[0]).unwrap()), "out of tokens");

    let text = panic_text(|| {
        let _ = apply_function("Broken", &[&x], |_| panic!("early"), |_, gradients| Ok(gradients));
    });
    assert_eq!(text, "early");
    assert!((&x * 2.0).requires_grad(), "recording must be on again after the panic");
}

/// A function whose backward pass runs that of another one like it, so many times; `end` is what the innermost does.
fn nested(depth: usize, end: fn() -> CallbackResult<()>) -> Tensor {
    let x = leaf(&[1.0]);
    let backward = move |_: &BackwardContext<'_>, gradients| {
        match depth {
            0 => end()?,
            _ => tch::with_grad(|| run_backward(&nested(depth - 1, end)))?,
        }
        Ok(gradients)
    };
    apply_function("Nested", &[&x], |_| Ok(vec![&x * 1.0]), backward).unwrap().remove(0)
}

/// libtorch goes on with another thread beyond 60 passes within each other, as it does for every pass of a GPU.
#[test]
fn errors_and_panics_arrive_from_other_threads() {
    fn sources(error: &dyn std::error::Error) -> Vec<String> {
        std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string).collect()
    }
    thread_local!(static IS_CALLER: std::cell::Cell<bool> = const { std::cell::Cell::new(false) });
    IS_CALLER.set(true);
    let fails = || Err(format!("far away: {}", IS_CALLER.get()).into());
    for (depth, is_caller) in [(3, true), (100, false)] {
        let error = run_backward(&nested(depth, fails)).unwrap_err();
        assert_eq!(sources(&error).last().unwrap(), &format!("far away: {is_caller}"));
        assert!(error.is_callback());
    }
    assert_eq!(panic_text(|| run_backward(&nested(100, || panic!("far away"))).unwrap()), "far away");
    // Nothing of it is left for the next one.
    let error = run_backward(&nested(0, || Err("here".into()))).unwrap_err();
    assert!(error.message().contains("here"), "{error}");
}

#[test]
fn an_undefined_output_is_refused() {
    let x = leaf(&[1.0]);
    let error = apply_function("Hole", &[&x], |_| Ok(vec![Tensor::new()]), |_, gradients| Ok(gradients)).unwrap_err();
    assert_eq!(error.message(), "output 0 of `Hole` is undefined");
}

#[test]
fn the_backward_closure_is_dropped_when_its_node_has_run() {
    for retain_graph in [false, true] {
        let token = Arc::new(());
        let captured = Arc::clone(&token);
        let x = leaf(&[1.0]);
        let y = apply_function(
            "Holder",
            &[&x],
            |_| Ok(vec![&x * 1.0]),
            move |_, gradients| {
                let _ = &captured;
                Ok(gradients)
            },
        )
        .unwrap();
        autograd::backward(&[&y[0]], None, BackwardOptions { retain_graph, ..Default::default() }).unwrap();
        assert_eq!(Arc::strong_count(&token), if retain_graph { 2 } else { 1 });
        match autograd::backward(&[&y[0]], None, Default::default()) {
            Ok(()) => assert!(retain_graph),
            Err(error) => assert!(!retain_graph && error.message().contains("`Holder` a second time"), "{error}"),
        }
        drop(y);
        assert_eq!(Arc::strong_count(&token), 1);
    }
}

#[test]
fn gradients_can_be_freed_inside_the_backward_closure() {
    let x = leaf(&[1.0, 2.0]);
    let freed = Arc::new(Mutex::new(None));
    let result = Arc::clone(&freed);
    let y = apply_function(
        "Reduce",
        &[&x],
        |_| Ok(vec![&x * 1.0]),
        move |_, mut gradients| {
            let gradient = gradients.remove(0).ok_or("no gradient")?;
            let weak = WeakStorage::new(&gradient);
            let reduced = &gradient * 2.0;
            drop(gradient);
            *result.lock().unwrap() = Some(!weak.is_alive());
            Ok(vec![Some(reduced)])
        },
    )
    .unwrap();
    run_backward(&(&y[0] * 3.0).sum(Kind::Float)).unwrap();
    assert_eq!(*freed.lock().unwrap(), Some(true));
    assert_eq!(gradient(&x).unwrap(), [6.0, 6.0]);
}

#[test]
fn a_saved_output_does_not_keep_its_graph_alive() {
    let x = leaf(&[1.0]);
    let y = apply_function(
        "Exp",
        &[&x],
        |context| {
            let y = x.exp();
            context.save_for_backward(&[&y]);
            Ok(vec![y])
        },
        |context, gradients| {
            let y = &context.saved_tensors()?[0];
            Ok(vec![gradients[0].as_ref().map(|gradient| gradient * y)])
        },
    )
    .unwrap();
    let weak = WeakStorage::new(&y[0]);
    autograd::backward(&[&y[0]], None, BackwardOptions { retain_graph: true, ..Default::default() }).unwrap();
    assert!((gradient(&x).unwrap()[0] - 1f32.exp()).abs() < 1e-6);
    drop(y);
    assert!(!weak.is_alive());
}

#[test]
fn a_saved_tensor_changed_in_place_is_found() {
    let x = leaf(&[1.0]);
    let mut scratch = Tensor::from_slice(&[2f32]);
    let y = apply_function(
        "Scale",
        &[&x],
        |context| {
            context.save_for_backward(&[&scratch]);
            Ok(vec![&x * &scratch])
        },
        |context, _| Ok(vec![Some(context.saved_tensors()?.remove(0))]),
    )
    .unwrap();
    let _ = scratch.fill_(9.0);
    let error = run_backward(&y[0]).unwrap_err();
    assert!(error.message().contains("modified by an inplace operation"), "{error}");
}

#[test]
fn a_backward_closure_may_run_a_backward_pass_of_its_own() {
    let x = leaf(&[3.0]);
    let y = apply_function(
        "Recompute",
        &[&x],
        |context| {
            context.save_for_backward(&[&x]);
            Ok(vec![&x * &x])
        },
        |context, mut gradients| {
            let x = context.saved_tensors()?.remove(0).detach().set_requires_grad(true);
            let y = tch::with_grad(|| &x * &x);
            let gradient = gradients.remove(0).ok_or("no gradient")?;
            autograd::backward(&[&y], Some(&[&gradient]), Default::default())?;
            Ok(vec![gradient_of(&x)?])
        },
    )
    .unwrap();
    run_backward(&(&y[0] * 5.0)).unwrap();
    assert_eq!(gradient(&x).unwrap(), [30.0]);
}

/// Gradient of a table `[3, 2]`, whole and with rows 0 and 2 only, of which the first backward pass may use either.
fn whole_and_rows(whole: &Tensor, rows: &Tensor, uses: (bool, bool), is_sparse: bool) -> Tensor {
    let of_whole = (whole * Tensor::arange(6, (Kind::Float, Device::Cpu)).view([3, 2])).sum(Kind::Float);
    let picked = Tensor::embedding(rows, &Tensor::from_slice(&[2i64, 0, 2]), -1, false, is_sparse);
    let of_rows = picked.sum(Kind::Float) * 0.5;
    let used = |loss: Tensor, is_used: bool| if is_used { loss } else { loss.detach() };
    used(of_whole, uses.0) + used(of_rows, uses.1)
}

#[test]
fn two_uses_of_a_table_have_the_gradient_of_one() {
    for (uses, is_sparse) in [(true, true), (true, false), (false, true)]
        .into_iter()
        .flat_map(|uses| [true, false].map(|is_sparse| (uses, is_sparse)))
    {
        let table = || Tensor::zeros([3, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let (wanted, found) = (table(), table());
        let [whole, rows] = two_uses(&found).unwrap();
        // The same two serve pass after pass.
        for passes in 1..=3 {
            run_backward(&whole_and_rows(&wanted, &wanted, uses, false)).unwrap();
            run_backward(&whole_and_rows(&whole, &rows, uses, is_sparse)).unwrap();
            assert!(!gradient_of(&found).unwrap().unwrap().is_sparse());
            assert_eq!(gradient(&found), gradient(&wanted), "{uses:?}, sparse: {is_sparse}, {passes} passes");
        }
        let gradient_in_pass = |loss: &Tensor, table: &Tensor, create_graph: bool| {
            let options = GradOptions { create_graph, ..Default::default() };
            autograd::grad(&[loss], &[table], None, options).unwrap()[0].as_ref().map(values)
        };
        let recorded = gradient_in_pass(&whole_and_rows(&whole, &rows, uses, is_sparse), &found, true);
        let plain = gradient_in_pass(&whole_and_rows(&wanted, &wanted, uses, false), &wanted, false);
        assert_eq!(recorded, plain, "recorded");
    }
}

#[test]
fn a_gradient_of_rows_is_added_in_place_unless_somebody_else_has_the_other() {
    for is_kept in [false, true] {
        let table = Tensor::zeros([3, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let [whole, rows] = two_uses(&table).unwrap();
        let seen = Arc::new(Mutex::new((0, None)));
        let log = Arc::clone(&seen);
        register_hook(&whole, move |gradient| {
            *log.lock().unwrap() = (gradient.data_ptr() as usize, is_kept.then(|| gradient.shallow_clone()));
            Ok(None)
        })
        .unwrap();
        run_backward(&whole_and_rows(&whole, &rows, (true, true), true)).unwrap();
        let (place, kept) = &*seen.lock().unwrap();
        assert_eq!(gradient_of(&table).unwrap().unwrap().data_ptr() as usize == *place, !is_kept);
        assert_eq!(gradient(&table), Some(vec![0.5, 1.5, 2.0, 3.0, 5.0, 6.0]));
        assert_eq!(kept.as_ref().map(values), is_kept.then(|| vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0]));
    }
}

#[test]
fn two_uses_of_a_constant_are_refused() {
    let text = two_uses(&Tensor::from(1f32)).unwrap_err().to_string();
    assert!(text.contains("does not require a gradient"), "{text}");
}
