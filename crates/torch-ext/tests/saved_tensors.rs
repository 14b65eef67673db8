//! Default saved-tensor hooks: what the graph keeps, and that nothing else changes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tch::{Kind, Tensor};
use torch_ext::autograd::{self, BackwardOptions, CallbackResult, gradient_of};
use torch_ext::saved_tensors::{
    Packed, SavedTensorHooks, SavedToken, push_saved_tensor_hooks, with_saved_tensor_hooks,
};
use torch_ext::storage::WeakStorage;

fn leaf(values: &[f32]) -> Tensor {
    Tensor::from_slice(values).set_requires_grad(true)
}

fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(&tensor.detach().contiguous().view([-1])).unwrap()
}

fn gradient(tensor: &Tensor) -> Vec<f32> {
    values(&gradient_of(tensor).unwrap().unwrap())
}

fn run_backward(output: &Tensor) -> torch_ext::Result<()> {
    autograd::backward(&[output], None, Default::default())
}

/// Keeps everything and counts.
#[derive(Default)]
struct Count(Cell<usize>);

impl SavedTensorHooks for Count {
    fn pack(&self, _: &Tensor) -> Packed {
        self.0.set(self.0.get() + 1);
        Packed::Keep
    }
}

/// Replaces everything by copies, and counts living tokens and unpackings.
#[derive(Default)]
struct Copies {
    tokens: Arc<AtomicUsize>,
    unpacked: Arc<AtomicUsize>,
}

struct CopyToken {
    copy: Tensor,
    tokens: Arc<AtomicUsize>,
    unpacked: Arc<AtomicUsize>,
}

impl SavedTensorHooks for Copies {
    fn pack(&self, tensor: &Tensor) -> Packed {
        self.tokens.fetch_add(1, Ordering::SeqCst);
        Packed::Token(Box::new(CopyToken {
            copy: tensor.copy(),
            tokens: Arc::clone(&self.tokens),
            unpacked: Arc::clone(&self.unpacked),
        }))
    }
}

impl SavedToken for CopyToken {
    fn unpack(&self) -> CallbackResult<Tensor> {
        self.unpacked.fetch_add(1, Ordering::SeqCst);
        Ok(self.copy.shallow_clone())
    }
}

impl Drop for CopyToken {
    fn drop(&mut self) {
        self.tokens.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A token made by a closure.
struct Made(Box<dyn Fn() -> CallbackResult<Tensor> + Send>);

impl SavedToken for Made {
    fn unpack(&self) -> CallbackResult<Tensor> {
        (self.0)()
    }
}

/// Packs every tensor with a function.
struct PackWith<F>(F);

impl<F: Fn(&Tensor) -> Packed> SavedTensorHooks for PackWith<F> {
    fn pack(&self, tensor: &Tensor) -> Packed {
        (self.0)(tensor)
    }
}

fn tokens_of(make: fn() -> CallbackResult<Tensor>) -> Rc<dyn SavedTensorHooks> {
    Rc::new(PackWith(move |_: &Tensor| Packed::Token(Box::new(Made(Box::new(make))))))
}

#[test]
fn tokens_stand_in_for_saved_tensors_and_are_dropped_after_use() {
    let (x, y) = (leaf(&[2.0, 3.0]), leaf(&[5.0, 7.0]));
    let copies = Rc::new(Copies::default());
    let product = with_saved_tensor_hooks(Rc::clone(&copies) as Rc<_>, || (&x * &y).sum(Kind::Float)).unwrap();
    assert_eq!(copies.tokens.load(Ordering::SeqCst), 2);
    assert_eq!(copies.unpacked.load(Ordering::SeqCst), 0);
    run_backward(&product).unwrap();
    assert_eq!((gradient(&x), gradient(&y)), (vec![5.0, 7.0], vec![2.0, 3.0]));
    assert_eq!(copies.unpacked.load(Ordering::SeqCst), 2);
    assert_eq!(copies.tokens.load(Ordering::SeqCst), 0, "tokens must go when their node has run");
}

#[test]
fn retained_graphs_unpack_again_and_dropped_graphs_drop_tokens() {
    let x = leaf(&[2.0]);
    let copies = Rc::new(Copies::default());
    let square = with_saved_tensor_hooks(Rc::clone(&copies) as Rc<_>, || &x * &x).unwrap();
    for pass in 1..=2 {
        autograd::backward(&[&square], None, BackwardOptions { retain_graph: true, ..Default::default() }).unwrap();
        assert_eq!(copies.unpacked.load(Ordering::SeqCst), 2 * pass);
    }
    assert_eq!(copies.tokens.load(Ordering::SeqCst), 2);
    drop(square);
    assert_eq!(copies.tokens.load(Ordering::SeqCst), 0);
    assert_eq!(gradient(&x), [8.0]);
}

#[test]
fn second_derivatives_go_through_tokens() {
    let x = leaf(&[2.0]);
    let copies: Rc<dyn SavedTensorHooks> = Rc::new(Copies::default());
    let second = with_saved_tensor_hooks(copies, || {
        let y = &x * &x * &x;
        let options = autograd::GradOptions { create_graph: true, ..Default::default() };
        let first = autograd::grad(&[&y], &[&x], None, options).unwrap().remove(0).unwrap();
        autograd::grad(&[&first], &[&x], None, Default::default()).unwrap().remove(0).unwrap()
    })
    .unwrap();
    assert_eq!(values(&second), [12.0]);
}

#[test]
fn hooks_end_with_their_scope() {
    let x = leaf(&[2.0]);
    let count = Rc::new(Count::default());
    let _inside = with_saved_tensor_hooks(Rc::clone(&count) as Rc<_>, || &x * &x).unwrap();
    let _outside = &x * &x;
    assert_eq!(count.0.get(), 2);
    assert_eq!(Rc::strong_count(&count), 1);
}

#[test]
fn inner_hooks_replace_outer_ones() {
    let x = leaf(&[2.0]);
    let (outer, inner) = (Rc::new(Count::default()), Rc::new(Count::default()));
    with_saved_tensor_hooks(Rc::clone(&outer) as Rc<_>, || {
        let _ = with_saved_tensor_hooks(Rc::clone(&inner) as Rc<_>, || &x * &x).unwrap();
        let _ = x.exp();
    })
    .unwrap();
    assert_eq!((outer.0.get(), inner.0.get()), (1, 2));
}

#[test]
fn guards_may_be_dropped_in_any_order() {
    let x = leaf(&[2.0]);
    let (first, second) = (Rc::new(Count::default()), Rc::new(Count::default()));
    let first_guard = push_saved_tensor_hooks(Rc::clone(&first) as Rc<_>).unwrap();
    let second_guard = push_saved_tensor_hooks(Rc::clone(&second) as Rc<_>).unwrap();
    drop(first_guard);
    let _ = x.exp();
    drop(second_guard);
    let _ = x.exp();
    assert_eq!((first.0.get(), second.0.get()), (0, 1));
    let again = push_saved_tensor_hooks(Rc::clone(&first) as Rc<_>).unwrap();
    let _ = x.exp();
    drop(again);
    assert_eq!(first.0.get(), 1);
}

#[test]
fn hooks_belong_to_their_thread() {
    let count = Rc::new(Count::default());
    with_saved_tensor_hooks(Rc::clone(&count) as Rc<_>, || {
        std::thread::spawn(|| {
            let x = leaf(&[2.0]);
            run_backward(&(&x * &x)).unwrap();
            assert_eq!(gradient(&x), [4.0]);
        })
        .join()
        .unwrap();
    })
    .unwrap();
    assert_eq!(count.0.get(), 0);
}

#[test]
fn what_a_hook_computes_does_not_come_back_to_it() {
    let x = leaf(&[2.0]);
    let calls = Rc::new(Cell::new(0));
    let seen = Rc::clone(&calls);
    let other = leaf(&[3.0]);
    let hooks = PackWith(move |tensor: &Tensor| {
        seen.set(seen.get() + 1);
        assert!(!(tensor * 1.0).requires_grad(), "packing must not record");
        tch::with_grad(|| {
            let _ = &other * &other;
        });
        Packed::Keep
    });
    let _ = with_saved_tensor_hooks(Rc::new(hooks), || x.exp()).unwrap();
    assert_eq!(calls.get(), 1);
}

#[test]
fn kept_outputs_do_not_keep_their_graph_alive() {
    let x = leaf(&[2.0]);
    let y = with_saved_tensor_hooks(Rc::new(Count::default()), || x.exp()).unwrap();
    let weak = WeakStorage::new(&y);
    run_backward(&(&y * 1.0)).unwrap();
    let y2 = with_saved_tensor_hooks(Rc::new(Count::default()), || x.exp()).unwrap();
    let weak2 = WeakStorage::new(&y2);
    drop((y, y2));
    assert!(!weak.is_alive() && !weak2.is_alive());
}

#[test]
fn a_kept_tensor_changed_in_place_is_found() {
    let x = leaf(&[2.0]);
    let mut factor = Tensor::from_slice(&[3f32]);
    let y = with_saved_tensor_hooks(Rc::new(Count::default()), || &x * &factor).unwrap();
    let _ = factor.fill_(4.0);
    let error = run_backward(&y).unwrap_err();
    assert!(error.message().contains("modified by an inplace operation"), "{error}");
}

#[test]
fn an_error_of_unpack_reaches_backward() {
    let x = leaf(&[2.0]);
    let y = with_saved_tensor_hooks(tokens_of(|| Err(std::fmt::Error.into())), || x.exp()).unwrap();
    let error = run_backward(&y).unwrap_err();
    assert!(error.is_callback());
    assert!(std::error::Error::source(&error).unwrap().is::<std::fmt::Error>());
}

#[test]
fn a_panic_of_unpack_is_raised_by_backward() {
    let x = leaf(&[2.0]);
    let y = with_saved_tensor_hooks(tokens_of(|| panic!("lost the shard")), || x.exp()).unwrap();
    let payload = catch_unwind(AssertUnwindSafe(|| run_backward(&y))).unwrap_err();
    assert_eq!(*payload.downcast::<&str>().unwrap(), "lost the shard");
}

#[test]
fn a_token_must_give_the_shape_and_kind_it_stands_for() {
    type Unpack = fn() -> CallbackResult<Tensor>;
    let wrong: [(Unpack, &str); 3] = [
        (|| Ok(Tensor::from_slice(&[1f32, 2.0])), "gave Float [2]"),
        (|| Ok(Tensor::from_slice(&[1f64])), "gave Double [1]"),
        (|| Ok(Tensor::new()), "gave nothing"),
    ];
    for (make, message) in wrong {
        let x = leaf(&[2.0]);
        let y = with_saved_tensor_hooks(tokens_of(make), || x.exp()).unwrap();
        let error = run_backward(&y).unwrap_err();
        assert!(error.is_invalid_argument(), "{error:?}");
        assert!(error.message().contains("stands for Float [1]"), "{error}");
        assert!(error.message().contains(message), "{error}");
    }
}

#[test]
fn a_panic_of_pack_is_raised_whatever_tch_makes_of_it() {
    let x = leaf(&[2.0]);
    let hooks = || Rc::new(PackWith(|_: &Tensor| -> Packed { panic!("cannot pack") }));
    let bodies: [&dyn Fn(); 2] = [&|| drop(x.f_exp()), &|| drop(x.exp())];
    for body in bodies {
        let payload = catch_unwind(AssertUnwindSafe(|| with_saved_tensor_hooks(hooks(), body))).unwrap_err();
        assert_eq!(*payload.downcast::<&str>().unwrap(), "cannot pack");
    }
    // The stack is clean afterwards.
    run_backward(&x.exp()).unwrap();
}

#[test]
fn a_panic_of_the_body_is_not_hidden() {
    let payload = catch_unwind(|| with_saved_tensor_hooks(Rc::new(Count::default()), || panic!("body"))).unwrap_err();
    assert_eq!(*payload.downcast::<&str>().unwrap(), "body");
}

#[test]
fn hooks_may_push_hooks_while_packing() {
    let x = leaf(&[2.0]);
    let inner = Rc::new(Count::default());
    let counted = Rc::clone(&inner);
    let calls = Rc::new(Cell::new(0));
    let seen = Rc::clone(&calls);
    let other = leaf(&[3.0]);
    let hooks = PackWith(move |_: &Tensor| {
        seen.set(seen.get() + 1);
        tch::with_grad(|| {
            with_saved_tensor_hooks(Rc::clone(&counted) as Rc<_>, || drop(other.exp())).unwrap();
            drop(other.exp());
        });
        Packed::Keep
    });
    with_saved_tensor_hooks(Rc::new(hooks), || drop(x.exp())).unwrap();
    assert_eq!((calls.get(), inner.0.get()), (1, 1));
}

#[test]
fn custom_functions_save_through_hooks() {
    let x = leaf(&[3.0]);
    let copies = Rc::new(Copies::default());
    let y = with_saved_tensor_hooks(Rc::clone(&copies) as Rc<_>, || {
        torch_ext::apply_function(
            "Square",
            &[&x],
            |context| {
                context.save_for_backward(&[&x]);
                Ok(vec![&x * &x])
            },
            |context, gradients| {
                let x = &context.saved_tensors()?[0];
                Ok(vec![gradients[0].as_ref().map(|gradient| gradient * x * 2.0)])
            },
        )
        .unwrap()
    })
    .unwrap();
    assert_eq!(copies.tokens.load(Ordering::SeqCst), 1);
    run_backward(&y[0]).unwrap();
    assert_eq!(gradient(&x), [6.0]);
    assert_eq!(copies.tokens.load(Ordering::SeqCst), 0);
}

#[test]
fn the_replaced_engine_runs_threads_and_nested_passes() {
    with_saved_tensor_hooks(Rc::new(Count::default()), || ()).unwrap();
    let threads: Vec<_> = (1..=4i32)
        .map(|factor| {
            std::thread::spawn(move || {
                // Deeper than the engine nests on one thread, so that it has to hand over to its pool.
                let gradient_at_depth = nested(f64::from(factor), 70);
                assert_eq!(gradient_at_depth, f64::from(factor));
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// A backward pass inside a backward pass, `depth` times.
fn nested(factor: f64, depth: usize) -> f64 {
    let x = leaf(&[1.0]);
    // Backward closures run without recording.
    let y = tch::with_grad(|| {
        torch_ext::apply_function(
            "Nested",
            &[&x],
            |_| Ok(vec![&x * factor]),
            move |_, gradients| {
                let inner = if depth == 0 { factor } else { nested(factor, depth - 1) };
                Ok(vec![gradients[0].as_ref().map(|gradient| gradient * inner)])
            },
        )
        .unwrap()
    });
    run_backward(&y[0]).unwrap();
    f64::from(gradient(&x)[0])
}

#[test]
fn bits_are_the_same_with_and_without_hooks() {
    tch::manual_seed(3);
    let x = Tensor::randn([8, 16], (Kind::Float, tch::Device::Cpu));
    let weights: Vec<Tensor> =
        (0..3).map(|_| Tensor::randn([16, 16], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true)).collect();
    let forward = || {
        weights
            .iter()
            .fold(x.shallow_clone(), |x, weight| {
                x.matmul(weight).gelu("none").layer_norm([16], None::<&Tensor>, None, 1e-5, false)
            })
            .square()
            .sum(Kind::Float)
    };
    let results = RefCell::new(Vec::new());
    let record = |loss: &Tensor| {
        run_backward(loss).unwrap();
        results.borrow_mut().push(weights.iter().map(gradient).collect::<Vec<_>>());
        weights.iter().for_each(|weight| autograd::set_gradient(weight, None).unwrap());
    };
    record(&forward());
    record(&with_saved_tensor_hooks(Rc::new(Count::default()), forward).unwrap());
    record(&with_saved_tensor_hooks(Rc::new(Copies::default()), forward).unwrap());
    let results = results.into_inner();
    assert_eq!(results[0], results[1]);
    assert_eq!(results[0], results[2]);
}
