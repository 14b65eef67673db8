//! Backward passes and gradient hooks.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tch::{Device, Kind, Tensor};
use torch_ext::HookHandle;
use torch_ext::autograd::{self, BackwardOptions, GradOptions, gradient_of, set_gradient};
use torch_ext::hooks::{self, register_hook, register_post_accumulate_grad_hook};
use torch_ext::storage::storage_id;

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
    autograd::backward(&[&y, &z], Some(&[&ones, &weights]), Default::default()).unwrap();
    assert_eq!(gradient(&x).unwrap(), [22.0, 402.0]);
}

#[test]
fn backward_refuses_a_wrong_number_of_gradients() {
    let x = leaf(&[1.0]);
    let error = autograd::backward(&[&(&x * 2.0)], Some(&[]), Default::default()).unwrap_err();
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
    autograd::backward(&[&y], None, BackwardOptions { retain_graph: true, ..Default::default() }).unwrap();
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
    autograd::backward(&[&(&y * 5.0)], None, BackwardOptions { retain_graph: true, ..Default::default() }).unwrap();
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
    let hook = register_hook(&x, move |_| {
        autograd::backward(&[&inner], None, BackwardOptions { retain_graph: true, ..Default::default() })?;
        Ok(None)
    })
    .unwrap();
    let error = run_backward(&(&x * 3.0)).unwrap_err();
    assert!(error.message().contains("runs the same hook again"), "{error}");
    // The closure owns a graph that owns the closure.
    hook.remove();
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
                    autograd::backward(&[&(&x * 2.0)], None, Default::default()).unwrap();
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(runs.load(Ordering::SeqCst), 200);
    assert_eq!(gradient(&x).unwrap(), [400.0]);
}

#[test]
fn queued_callbacks_run_in_order_once_all_gradients_are_there() {
    let weight = Tensor::from(2f32).set_requires_grad(true);
    let log = Arc::new(Mutex::new(Vec::new()));
    let (seen, watched) = (Arc::clone(&log), weight.shallow_clone());
    hooks::register_hook(&weight, move |_| {
        for number in 0..2 {
            let (seen, weight) = (Arc::clone(&seen), watched.shallow_clone());
            hooks::queue_callback(move || {
                let gradient = autograd::gradient_of(&weight)?.ok_or("no gradient")?;
                seen.lock().unwrap().push((number, gradient.double_value(&[])));
                Ok(())
            })?;
        }
        Ok(None)
    })
    .unwrap();
    autograd::backward(&[&(&weight * 3.0)], None, Default::default()).unwrap();
    assert_eq!(*log.lock().unwrap(), [(0, 3.0), (1, 3.0)]);
}

#[test]
fn a_queued_callback_fails_the_pass_and_goes_with_a_pass_that_fails() {
    let kept = Arc::new(());
    for fails_in_callback in [true, false] {
        let weight = Tensor::from(2f32).set_requires_grad(true);
        let captured = Arc::clone(&kept);
        hooks::register_hook(&weight, move |_| {
            let captured = Arc::clone(&captured);
            hooks::queue_callback(move || {
                let _captured = captured;
                Err("the callback failed".into())
            })?;
            if fails_in_callback { Ok(None) } else { Err("the hook failed".into()) }
        })
        .unwrap();
        let error = autograd::backward(&[&(&weight * 3.0)], None, Default::default()).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(source, if fails_in_callback { "the callback failed" } else { "the hook failed" });
        drop(weight);
        assert_eq!(Arc::strong_count(&kept), 1, "what a callback captured is dropped");
    }
    assert!(hooks::queue_callback(|| Ok(())).is_err(), "no backward pass is running");
}
