//! The DDP reducer on real Gloo groups; ranks are threads.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::time::Duration;
use tch::{Device, Kind, Tensor};
use torch_ext::{GlooInterface, GlooOptions, ProcessGroup, ReduceOp, Reducer, ReducerOptions, Store};

fn ranks<T: Send>(world_size: usize, body: impl Fn(Arc<ProcessGroup>) -> T + Sync) -> Vec<T> {
    let store = Store::hash().unwrap();
    let options = GlooOptions {
        timeout: Duration::from_secs(30),
        interface: GlooInterface::Address("127.0.0.1".into()),
        ..GlooOptions::default()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world_size)
            .map(|rank| {
                let (store, body, options) = (store.clone(), &body, &options);
                scope.spawn(move || body(Arc::new(ProcessGroup::gloo(&store, rank, world_size, options).unwrap())))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn parameter(value: f32, size: i64) -> Tensor {
    Tensor::full([size], f64::from(value), (Kind::Float, Device::Cpu)).set_requires_grad(true)
}

fn gradient(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.grad()).unwrap()
}

/// loss = sum(a * scale) + sum(b * scale): the gradient of every element is `scale`.
fn backward(params: &[Tensor], scale: f64) {
    let terms: Vec<_> = params.iter().map(|param| (param * scale).sum(Kind::Float)).collect();
    Tensor::stack(&terms, 0).sum(Kind::Float).backward();
}

#[test]
fn gradients_are_means_over_ranks_for_every_option() {
    for world_size in 1..=4 {
        for (bucket_bytes, view, static_graph, unused) in [
            (25 << 20, false, false, false),
            (16, true, false, false),
            (16, false, true, false),
            (16, false, false, true),
        ] {
            let options = ReducerOptions {
                first_bucket_bytes: 16,
                bucket_bytes,
                find_unused_parameters: unused,
                gradient_as_bucket_view: view,
                static_graph,
                ..Default::default()
            };
            let got = ranks(world_size, |group| {
                let params: Vec<_> = (0..3).map(|_| parameter(1.0, 4)).collect();
                let rank = group.rank();
                let reducer = Reducer::new(&params, &["a", "b", "c"], group, &options).unwrap();
                for iteration in 0..3 {
                    for param in params.iter().filter(|param| param.grad().defined()) {
                        let _ = param.grad().zero_();
                    }
                    reducer.prepare_for_forward().unwrap();
                    reducer.rebuild_buckets().unwrap();
                    let terms: Vec<_> =
                        params.iter().map(|param| (param * (rank as f64 + 1.0)).sum(Kind::Float)).collect();
                    let loss = Tensor::stack(&terms, 0).sum(Kind::Float);
                    reducer.prepare_for_backward(std::slice::from_ref(&loss)).unwrap();
                    loss.backward();
                    if static_graph && iteration == 0 {
                        assert!(reducer.delay_all_reduce(&[0, 0, 1]).is_err());
                        reducer.delay_all_reduce(&[2, 0, 1]).unwrap();
                    }
                    if static_graph && iteration == 1 {
                        assert_eq!(reducer.order().unwrap(), [2, 0, 1], "what the first pass was told");
                    }
                    reducer.check_finalized().unwrap();
                }
                params.iter().map(gradient).collect::<Vec<_>>()
            });
            let mean = (world_size as f32 + 1.0) / 2.0;
            assert_eq!(got, vec![vec![vec![mean; 4]; 3]; world_size], "{options:?}");
        }
    }
}

#[test]
fn an_unarmed_backward_accumulates_locally() {
    let got = ranks(2, |group| {
        let params = vec![parameter(1.0, 2)];
        let rank = group.rank();
        let reducer = Reducer::new(&params, &["a"], group, &ReducerOptions::default()).unwrap();
        backward(&params, rank as f64 + 1.0);
        let local = gradient(&params[0]);
        reducer.prepare_for_forward().unwrap();
        reducer.prepare_for_backward(&[]).unwrap();
        backward(&params, rank as f64 + 1.0);
        (local, gradient(&params[0]))
    });
    assert_eq!(got[0], (vec![1.0; 2], vec![3.0; 2]));
    assert_eq!(got[1], (vec![2.0; 2], vec![3.0; 2]));
}

#[test]
fn a_parameter_without_gradient_is_an_error_in_the_next_iteration() {
    let got = ranks(2, |group| {
        let params = vec![parameter(1.0, 2), parameter(1.0, 2)];
        let options = ReducerOptions::default();
        let reducer = Reducer::new(&params, &["used", "unused"], group, &options).unwrap();
        reducer.prepare_for_forward().unwrap();
        reducer.prepare_for_backward(&[]).unwrap();
        backward(&params[..1], 1.0);
        let finalized = reducer.check_finalized().unwrap_err().to_string();
        // A second reducer may not exist while this one still waits; dropping must not hang.
        drop(reducer);
        finalized
    });
    for text in got {
        assert!(text.contains("index") || text.contains("indices"), "{text}");
    }
}

#[test]
fn hooks_decide_what_travels() {
    let got = ranks(2, |group| {
        let params = vec![parameter(1.0, 2)];
        let rank = group.rank();
        let reducer = Reducer::new(&params, &["a"], group.clone(), &ReducerOptions::default()).unwrap();
        let world = group.clone();
        reducer
            .register_comm_hook(None, move |bucket| {
                let mut sum = bucket.buffer.copy();
                world.all_reduce(&sum, ReduceOp::Sum, None)?.wait(None)?;
                let _ = sum.g_div_scalar_(2.0);
                // Ten times the mean, so that the test sees that this hook and no other ran.
                Ok(Some(sum * 10.0))
            })
            .unwrap();
        reducer.prepare_for_forward().unwrap();
        reducer.prepare_for_backward(&[]).unwrap();
        backward(&params, rank as f64 + 1.0);
        gradient(&params[0])
    });
    assert_eq!(got, vec![vec![15.0; 2]; 2]);
}

#[test]
fn hooks_see_each_gradient_in_its_shape_and_may_leave_the_mean_to_the_reducer() {
    let got = ranks(2, |group| {
        let params = vec![parameter(1.0, 2), Tensor::ones([3, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true)];
        let rank = group.rank();
        let reducer = Reducer::new(&params, &["a", "b"], group, &ReducerOptions::default()).unwrap();
        let (sender, seen) = std::sync::mpsc::channel();
        reducer
            .register_comm_hook(Some(Kind::BFloat16), move |bucket| {
                let shapes: Vec<Vec<i64>> = bucket.gradients.iter().map(Tensor::size).collect();
                // Writing to a gradient writes to the buffer.
                let _ = bucket.gradients[0].shallow_clone().f_fill_(8.0)?;
                sender.send((shapes, bucket.buffer.kind(), bucket.buffer.numel()))?;
                Ok(None)
            })
            .unwrap();
        reducer.prepare_for_forward().unwrap();
        reducer.prepare_for_backward(&[]).unwrap();
        backward(&params, rank as f64 + 1.0);
        let gradients: Vec<Vec<f32>> = params.iter().map(|p| Vec::try_from(p.grad().view(-1)).unwrap()).collect();
        (seen.try_iter().collect::<Vec<_>>(), gradients, params[1].grad().kind())
    });
    for (seen, gradients, kind) in &got {
        let [(shapes, wire, numel)] = &seen[..] else { panic!("one bucket, found {seen:?}") };
        assert_eq!((*wire, *numel, *kind), (Kind::BFloat16, 8, Kind::Float));
        // Buckets hold parameters in the order in which gradients come, last parameter first.
        let filled = shapes.iter().position(|shape| shape.len() == 1).unwrap();
        let mut expected = [vec![1.5; 2], vec![1.5; 6]];
        expected[filled].fill(8.0);
        assert_eq!(gradients[..], expected, "{shapes:?}");
    }
}

#[test]
fn compressed_gradients_are_close_and_equal_on_all_ranks() {
    for wire in [Kind::Half, Kind::BFloat16] {
        let got = ranks(2, |group| {
            let params = vec![parameter(1.0, 3)];
            let rank = group.rank();
            let reducer = Reducer::new(&params, &["a"], group, &ReducerOptions::default()).unwrap();
            reducer.compress(wire).unwrap();
            reducer.prepare_for_forward().unwrap();
            reducer.prepare_for_backward(&[]).unwrap();
            backward(&params, 1.0 / (rank as f64 + 3.0));
            gradient(&params[0])
        });
        assert_eq!(got[0], got[1]);
        let exact = (1.0 / 3.0 + 0.25) / 2.0;
        assert!(got[0].iter().all(|value| (value - exact).abs() < 2e-3 && *value != exact), "{got:?}");
    }
}

#[test]
fn nothing_to_train_is_an_error() {
    ranks(1, |group| {
        let error = Reducer::new(&[], &[], group, &ReducerOptions::default()).unwrap_err();
        assert!(error.to_string().contains("no parameter that requires a gradient"));
    });
}

#[test]
fn a_reducer_that_is_given_the_order_of_another_one_has_it_from_the_beginning() {
    let orders = ranks(2, |group| {
        let params: Vec<_> = (0..3).map(|_| parameter(1.0, 4)).collect();
        let names = ["a", "b", "c"];
        let learning = Reducer::new(&params, &names, group.clone(), &ReducerOptions::default()).unwrap();
        assert_eq!(learning.order().unwrap(), [0, 1, 2]);
        for _ in 0..2 {
            learning.prepare_for_forward().unwrap();
            learning.rebuild_buckets().unwrap();
            // The second parameter's gradient comes first, because it is the last that is used.
            let loss = ((&params[2] * &params[0]) * &params[1]).sum(Kind::Float);
            learning.prepare_for_backward(&[]).unwrap();
            loss.backward();
        }
        let learned = learning.order().unwrap();
        drop(learning);
        let options = ReducerOptions { order: learned.clone(), ..Default::default() };
        let told = Reducer::new(&params, &names, group.clone(), &options).unwrap();
        assert_eq!(told.order().unwrap(), learned);
        let wrong = ReducerOptions { order: vec![0, 0, 1], ..Default::default() };
        assert!(Reducer::new(&params, &names, group, &wrong).is_err());
        learned
    });
    assert_ne!(orders[0], [0, 1, 2]);
    assert_eq!(orders[0], orders[1]);
}
