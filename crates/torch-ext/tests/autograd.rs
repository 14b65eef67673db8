//! Backward passes, gradient hooks and custom functions.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tch::{Device, Kind, Tensor};
use torch_ext::autograd::{self, GradOptions, gradient_of, set_gradient};
use torch_ext::hooks::{register_hook, register_post_accumulate_grad_hook};
use torch_ext::storage::{WeakStorage, storage_id};
use torch_ext::{HookHandle, apply_function};

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
    autograd::backward(&[output], None, false, false)
}

/// What a closure's panic says.
fn panic_text(body: impl FnOnce()) -> String {
    let payload = catch_unwind(AssertUnwindSafe(body)).expect_err("no panic arrived");
    match payload.downcast::<&'static str>() {
        Ok(text) => (*text).to_owned(),
        Err(payload) => *payload.downcast::<String>().expect("a panic without text"),
    }
}

// ---- backward and grad ----

#[test]
fn backward_adds_to_gradients() {
    let x = leaf(&[1.0, 2.0]);
    for expected in [[3.0, 3.0], [6.0, 6.0]] {
        run_backward(&(&x * 3.0).sum(Kind::Float)).unwrap();
        assert_eq!(gradient(&x).unwrap(), expected);
    }
}

#[test]
fn backward_takes_a_gradient_per_output() {
    let x = leaf(&[1.0, 2.0]);
    let (y, z) = (&x * 2.0, &x * &x);
    let ones = Tensor::from_slice(&[1f32, 1.0]);
    let weights = Tensor::from_slice(&[10f32, 100.0]);
    autograd::backward(&[&y, &z], Some(&[&ones, &weights]), false, false).unwrap();
    assert_eq!(gradient(&x).unwrap(), [22.0, 402.0]);
}

#[test]
fn backward_refuses_a_wrong_number_of_gradients() {
    let x = leaf(&[1.0]);
    let error = autograd::backward(&[&(&x * 2.0)], Some(&[]), false, false).unwrap_err();
    assert!(error.is_invalid_argument());
    assert_eq!(error.message(), "0 gradients were given for 1 outputs");
}

#[test]
fn backward_without_gradient_wants_a_scalar() {
    let x = leaf(&[1.0, 2.0]);
    let error = run_backward(&(&x * 2.0)).unwrap_err();
    assert_eq!(error.operation(), "backward");
    assert!(error.message().contains("scalar outputs"), "{error}");
}

#[test]
fn a_second_pass_needs_retain_graph() {
    let x = leaf(&[3.0]);
    let y = (&x * &x).sum(Kind::Float);
    autograd::backward(&[&y], None, true, false).unwrap();
    run_backward(&y).unwrap();
    assert_eq!(gradient(&x).unwrap(), [12.0]);
    assert!(run_backward(&y).unwrap_err().message().contains("second time"));
}

#[test]
fn create_graph_gives_second_derivatives() {
    let x = leaf(&[2.0]);
    let y = (&x * &x * &x).sum(Kind::Float);
    let options = GradOptions { create_graph: true, retain_graph: true, ..GradOptions::default() };
    let first = autograd::grad(&[&y], &[&x], None, options).unwrap().remove(0).unwrap();
    assert_eq!(values(&first), [12.0]);
    let second = autograd::grad(&[&first], &[&x], None, GradOptions::default()).unwrap();
    assert_eq!(values(second[0].as_ref().unwrap()), [12.0]);
    assert_eq!(gradient(&x), None, "grad must not accumulate");
}

#[test]
fn unused_inputs_are_errors_unless_allowed() {
    let (x, unused) = (leaf(&[2.0]), leaf(&[1.0]));
    let error = autograd::grad(&[&(&x * 2.0)], &[&x, &unused], None, GradOptions::default()).unwrap_err();
    assert!(error.message().contains("not have been used"), "{error}");
    let options = GradOptions { allow_unused: true, ..GradOptions::default() };
    let gradients = autograd::grad(&[&(&x * 2.0)], &[&x, &unused], None, options).unwrap();
    assert!(gradients[0].is_some() && gradients[1].is_none());
}

// ---- gradients in place ----

#[test]
fn set_gradient_shares_memory_and_clears() {
    let x = leaf(&[1.0, 2.0]);
    let buffer = Tensor::zeros([2], (Kind::Float, Device::Cpu));
    set_gradient(&x, Some(&buffer)).unwrap();
    run_backward(&(&x * 3.0).sum(Kind::Float)).unwrap();
    assert_eq!(values(&buffer), [3.0, 3.0], "the backward pass must add into the given buffer");
    assert_eq!(storage_id(&gradient_of(&x).unwrap().unwrap()), storage_id(&buffer));
    set_gradient(&x, None).unwrap();
    assert_eq!(gradient(&x), None);
}

#[test]
fn set_gradient_refuses_what_does_not_fit() {
    let x = leaf(&[1.0, 2.0]);
    let cases = [
        (Tensor::zeros([3], (Kind::Float, Device::Cpu)), "shape"),
        (Tensor::zeros([2], (Kind::Double, Device::Cpu)), "Double"),
        (x.shallow_clone(), "own gradient"),
    ];
    for (gradient, word) in cases {
        let error = set_gradient(&x, Some(&gradient)).unwrap_err();
        assert!(error.is_invalid_argument() && error.message().contains(word), "{error}");
    }
}

#[test]
fn gradient_of_a_plain_tensor_is_none() {
    assert!(gradient_of(&Tensor::from(1f32)).unwrap().is_none());
    assert!(gradient_of(&Tensor::new()).unwrap().is_none());
    set_gradient(&Tensor::from(1f32), None).unwrap();
}

#[test]
fn requires_grad_is_set_in_place_on_floats_only() {
    let x = Tensor::from_slice(&[1f32]);
    autograd::set_requires_grad_(&x, true).unwrap();
    assert!(x.requires_grad() && autograd::is_leaf(&x));
    assert!(autograd::set_requires_grad_(&Tensor::from_slice(&[1i64]), true).is_err());
    assert!(!autograd::is_leaf(&Tensor::new()));
}

// ---- hooks ----

#[test]
fn post_accumulate_hooks_see_the_complete_gradient_once() {
    let x = leaf(&[1.0, 2.0]);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    register_post_accumulate_grad_hook(&x, move |x| {
        log.lock().unwrap().push(values(&gradient_of(x)?.ok_or("no gradient")?));
        Ok(())
    })
    .unwrap();
    // Two uses of x: one accumulation of their sum.
    run_backward(&(&x * 3.0 + &x * 2.0).sum(Kind::Float)).unwrap();
    run_backward(&(&x * 1.0).sum(Kind::Float)).unwrap();
    assert_eq!(*seen.lock().unwrap(), [[5.0, 5.0], [6.0, 6.0]]);
}

#[test]
fn a_post_accumulate_hook_may_clear_the_gradient() {
    let x = leaf(&[1.0]);
    register_post_accumulate_grad_hook(&x, |x| Ok(set_gradient(x, None)?)).unwrap();
    run_backward(&(&x * 3.0)).unwrap();
    assert_eq!(gradient(&x), None);
}

#[test]
fn several_hooks_run_in_order_and_are_removed_one_by_one() {
    let x = leaf(&[1.0]);
    let order = Arc::new(Mutex::new(String::new()));
    let handles: Vec<HookHandle> = "abc"
        .chars()
        .map(|name| {
            let order = Arc::clone(&order);
            register_post_accumulate_grad_hook(&x, move |_| {
                order.lock().unwrap().push(name);
                Ok(())
            })
            .unwrap()
        })
        .collect();
    run_backward(&(&x * 1.0)).unwrap();
    handles[1].remove();
    handles[1].remove();
    run_backward(&(&x * 1.0)).unwrap();
    drop(handles);
    run_backward(&(&x * 1.0)).unwrap();
    assert_eq!(*order.lock().unwrap(), "abcacac", "dropping a handle must not remove the hook");
}

#[test]
fn a_removed_hook_drops_its_closure_at_once() {
    let x = leaf(&[1.0]);
    let token = Arc::new(());
    for register in [0, 1] {
        let captured = Arc::clone(&token);
        let handle = if register == 0 {
            register_post_accumulate_grad_hook(&x, move |_| {
                let _ = &captured;
                Ok(())
            })
        } else {
            register_hook(&x, move |_| {
                let _ = &captured;
                Ok(None)
            })
        }
        .unwrap();
        assert_eq!(Arc::strong_count(&token), 2);
        handle.remove();
        assert_eq!(Arc::strong_count(&token), 1);
    }
}

#[test]
fn a_hook_may_remove_itself() {
    let x = leaf(&[1.0]);
    let runs = Arc::new(AtomicUsize::new(0));
    let own: Arc<Mutex<Option<HookHandle>>> = Arc::default();
    let token = Arc::new(());
    let (count, slot, captured) = (Arc::clone(&runs), Arc::clone(&own), Arc::clone(&token));
    let handle = register_post_accumulate_grad_hook(&x, move |_| {
        let _ = &captured;
        count.fetch_add(1, Ordering::SeqCst);
        slot.lock().unwrap().as_ref().unwrap().remove();
        Ok(())
    })
    .unwrap();
    *own.lock().unwrap() = Some(handle);
    run_backward(&(&x * 1.0)).unwrap();
    run_backward(&(&x * 1.0)).unwrap();
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    assert_eq!(Arc::strong_count(&token), 1, "the closure must be dropped after its own run");
}

#[test]
fn the_tensor_owns_the_hook() {
    let token = Arc::new(());
    let x = leaf(&[1.0]);
    let captured = Arc::clone(&token);
    let handle = register_post_accumulate_grad_hook(&x, move |_| {
        let _ = &captured;
        Ok(())
    })
    .unwrap();
    drop(x);
    assert_eq!(Arc::strong_count(&token), 1);
    handle.remove();
    assert_eq!(format!("{handle:?}"), "HookHandle { tensor_alive: false }");
}

#[test]
fn tensor_hooks_replace_gradients_of_leaves_and_inner_tensors() {
    let x = leaf(&[1.0]);
    let y = &x * 2.0;
    register_hook(&y, |gradient| Ok(Some(gradient + 1.0))).unwrap();
    register_hook(&x, |_| Ok(None)).unwrap();
    let doubled = register_hook(&x, |gradient| Ok(Some(gradient * 10.0))).unwrap();
    autograd::backward(&[&(&y * 5.0)], None, true, false).unwrap();
    assert_eq!(gradient(&x).unwrap(), [120.0]); // ((5 + 1) * 2) * 10
    doubled.remove();
    set_gradient(&x, None).unwrap();
    run_backward(&(&x * 1.0)).unwrap();
    assert_eq!(gradient(&x).unwrap(), [1.0]);
}

#[test]
fn a_tensor_hook_cannot_change_the_shape() {
    let x = leaf(&[1.0, 2.0]);
    register_hook(&x, |_| Ok(Some(Tensor::from_slice(&[1f32])))).unwrap();
    let error = run_backward(&(&x * 2.0).sum(Kind::Float)).unwrap_err();
    assert!(error.message().contains("has changed the size of value"), "{error}");
}

#[test]
fn hooks_are_refused_where_no_gradient_arrives() {
    let plain = Tensor::from(1f32);
    let inner = leaf(&[1.0]) * 2.0;
    for (result, word) in [
        (register_post_accumulate_grad_hook(&plain, |_| Ok(())), "does not require"),
        (register_post_accumulate_grad_hook(&inner, |_| Ok(())), "not a leaf"),
        (register_hook(&plain, |_| Ok(None)), "does not require"),
    ] {
        let error = result.unwrap_err();
        assert!(error.is_invalid_argument() && error.message().contains(word), "{error}");
    }
}

#[test]
fn an_error_in_a_hook_comes_back_as_itself() {
    let x = leaf(&[1.0]);
    let hook = register_post_accumulate_grad_hook(&x, |_| Err(std::fmt::Error.into())).unwrap();
    let error = run_backward(&(&x * 2.0)).unwrap_err();
    assert!(error.is_callback());
    assert_eq!(error.operation(), "backward");
    let source = std::error::Error::source(&error).unwrap();
    assert!(source.is::<std::fmt::Error>());
    hook.remove();
    run_backward(&(&x * 2.0)).unwrap();
}

#[test]
fn a_panic_in_a_hook_is_raised_again_and_nothing_is_poisoned() {
    let x = leaf(&[1.0]);
    let mut calls = 0;
    register_hook(&x, move |_| {
        calls += 1;
        assert!(calls > 1, "first call fails");
        Ok(None)
    })
    .unwrap();
    let y = &x * 2.0;
    assert_eq!(panic_text(|| run_backward(&y).unwrap()), "first call fails");
    run_backward(&(&x * 2.0)).unwrap();
    assert_eq!(gradient(&x).unwrap(), [2.0]);
}

#[test]
fn a_failure_swallowed_by_tch_is_not_blamed_on_the_next_call() {
    let x = leaf(&[1.0]);
    let hook = register_hook(&x, |_| Err("the old failure".into())).unwrap();
    assert!((&x * 2.0).f_backward().is_err());
    hook.remove();
    let error = run_backward(&Tensor::from(1f32)).unwrap_err();
    assert!(!error.is_callback() && !error.message().contains("the old failure"), "{error}");
}

#[test]
fn a_hook_that_runs_into_itself_is_an_error() {
    let x = leaf(&[1.0]);
    let inner = (&x * 2.0).shallow_clone();
    register_hook(&x, move |_| {
        autograd::backward(&[&inner], None, true, false)?;
        Ok(None)
    })
    .unwrap();
    let error = run_backward(&(&x * 3.0)).unwrap_err();
    assert!(error.message().contains("runs the same hook again"), "{error}");
}

#[test]
fn hooks_work_on_any_thread() {
    let x = leaf(&[1.0]);
    let runs = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&runs);
    register_post_accumulate_grad_hook(&x, move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        Ok(())
    })
    .unwrap();
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let x = x.shallow_clone();
            std::thread::spawn(move || {
                for _ in 0..50 {
                    autograd::backward(&[&(&x * 2.0)], None, false, false).unwrap();
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(runs.load(Ordering::SeqCst), 200);
    assert_eq!(gradient(&x).unwrap(), [400.0]);
}

// ---- custom functions ----

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
            let [sum, product] = &gradients[..] else { return Err("two outputs".into()) };
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
    let wrong: [(fn() -> Vec<Option<Tensor>>, &str); 2] = [
        (|| vec![], "`Gather` returned 0 gradients for 1 inputs"),
        (|| vec![Some(Tensor::zeros([3], (Kind::Float, Device::Cpu)))], "Gather returned an invalid gradient at index 0"),
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
    let error = apply_function("Broken", &[&x], |_| Err("no memory".into()), |_, gradients| Ok(gradients))
        .unwrap_err();
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
        autograd::backward(&[&y[0]], None, retain_graph, false).unwrap();
        assert_eq!(Arc::strong_count(&token), if retain_graph { 2 } else { 1 });
        match autograd::backward(&[&y[0]], None, false, false) {
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
    autograd::backward(&[&y[0]], None, true, false).unwrap();
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
            autograd::backward(&[&y], Some(&[&gradient]), false, false)?;
            Ok(vec![gradient_of(&x)?])
        },
    )
    .unwrap();
    run_backward(&(&y[0] * 5.0)).unwrap();
    assert_eq!(gradient(&x).unwrap(), [30.0]);
}
