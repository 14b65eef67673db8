//! Every collective on 1 to 4 ranks. Ranks are threads here: each has its own group over one shared store.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::time::Duration;
use tch::{Device, Kind, Tensor};
use torch_ext::{GlooInterface, GlooOptions, MonitoredBarrierOptions, ProcessGroup, ReduceOp, Store};

fn options(timeout: Duration) -> GlooOptions {
    GlooOptions { timeout, interface: GlooInterface::Address("127.0.0.1".into()), ..GlooOptions::default() }
}

/// Runs `body` on every rank of a world and returns the results in rank order.
fn ranks<T: Send>(world_size: usize, body: impl Fn(Arc<ProcessGroup>) -> T + Sync) -> Vec<T> {
    let store = Store::hash().unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world_size)
            .map(|rank| {
                let (store, body) = (store.clone(), &body);
                scope.spawn(move || {
                    let group =
                        ProcessGroup::gloo(&store, rank, world_size, &options(Duration::from_secs(30))).unwrap();
                    body(Arc::new(group))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn floats(values: &[f32]) -> Tensor {
    Tensor::from_slice(values)
}

fn to_vec(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.to_kind(Kind::Float).reshape([-1])).unwrap()
}

fn zeros(count: i64) -> Tensor {
    Tensor::zeros([count], (Kind::Float, Device::Cpu))
}

/// c10d's flight recorder, on unless `TORCH_FR_BUFFER_SIZE=0`, keeps one map for all groups of a process.
#[test]
fn new_groups_do_not_disturb_those_at_work_on_other_threads() {
    let tensors = ranks(8, |busy| {
        for _ in 0..20 {
            let alone = ProcessGroup::gloo(&Store::hash().unwrap(), 0, 1, &options(Duration::from_secs(30))).unwrap();
            alone.all_reduce(&zeros(1), ReduceOp::Sum, None).unwrap().wait(None).unwrap();
            busy.all_reduce(&zeros(1), ReduceOp::Sum, None).unwrap().wait(None).unwrap();
        }
        busy.rank()
    });
    assert_eq!(tensors, (0..8).collect::<Vec<_>>());
}

/// c10d's own `ProcessGroup::barrier` has one tensor for all threads of a process, and two of them could free it at once.
#[test]
fn barriers_of_ranks_that_are_threads_do_not_disturb_each_other() {
    let reached = ranks(4, |group| {
        for _ in 0..500 {
            group.barrier(None).unwrap().wait(None).unwrap();
        }
        group.rank()
    });
    assert_eq!(reached, [0, 1, 2, 3]);
}

#[test]
fn all_reduce_combines_by_every_op() {
    for world_size in 1..=4 {
        for (op, fold) in [
            (ReduceOp::Sum, (|a, b| a + b) as fn(f32, f32) -> f32),
            (ReduceOp::Product, |a, b| a * b),
            (ReduceOp::Min, f32::min),
            (ReduceOp::Max, f32::max),
        ] {
            let expected = (1..=world_size).map(|r| r as f32).reduce(fold).unwrap();
            let got = ranks(world_size, |group| {
                let tensor = floats(&[group.rank() as f32 + 1.0, group.rank() as f32 + 1.0]);
                group.all_reduce(&tensor, op, None).unwrap().wait(None).unwrap();
                to_vec(&tensor)
            });
            assert_eq!(got, vec![vec![expected; 2]; world_size], "{op:?} on {world_size}");
        }
    }
}

#[test]
fn all_reduce_takes_every_dtype_of_gloo() {
    for kind in [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16, Kind::Int8, Kind::Uint8, Kind::Int, Kind::Int64]
    {
        let got = ranks(2, |group| {
            let tensor = floats(&[group.rank() as f32 + 1.0]).to_kind(kind);
            group.all_reduce(&tensor, ReduceOp::Sum, None).unwrap().wait(None).unwrap();
            to_vec(&tensor)
        });
        assert_eq!(got, vec![vec![3.0]; 2], "{kind:?}");
    }
}

#[test]
fn all_reduce_coalesced_reduces_each_tensor() {
    let got = ranks(3, |group| {
        let tensors = [floats(&[1.0]), floats(&[group.rank() as f32, 2.0])];
        group.all_reduce_coalesced(&tensors, ReduceOp::Sum, None).unwrap().wait(None).unwrap();
        [to_vec(&tensors[0]), to_vec(&tensors[1])]
    });
    assert_eq!(got, vec![[vec![3.0], vec![3.0, 6.0]]; 3]);
}

#[test]
fn broadcast_and_reduce_know_their_root() {
    for world_size in 1..=4 {
        for root in 0..world_size {
            let got = ranks(world_size, |group| {
                let sent = floats(&[group.rank() as f32]);
                group.broadcast(&sent, root, None).unwrap().wait(None).unwrap();
                let summed = floats(&[1.0]);
                group.reduce(&summed, root, ReduceOp::Sum, None).unwrap().wait(None).unwrap();
                (to_vec(&sent)[0], to_vec(&summed)[0])
            });
            assert!(got.iter().all(|(sent, _)| *sent == root as f32));
            assert_eq!(got[root].1, world_size as f32);
        }
    }
}

#[test]
fn gathering_keeps_rank_order() {
    for world_size in 1..=4 {
        let expected: Vec<f32> = (0..world_size).flat_map(|r| [r as f32, 10.0 * r as f32]).collect();
        let got = ranks(world_size, |group| {
            let input = floats(&[group.rank() as f32, 10.0 * group.rank() as f32]);
            let outputs: Vec<_> = (0..world_size).map(|_| zeros(2)).collect();
            group.all_gather(&outputs, &input, None).unwrap().wait(None).unwrap();
            let flat = zeros(2 * world_size as i64);
            group.all_gather_into_tensor(&flat, &input, None).unwrap().wait(None).unwrap();
            let at_root: Vec<_> = if group.rank() == 0 { (0..world_size).map(|_| zeros(2)).collect() } else { vec![] };
            group.gather(&at_root, &input, 0, None).unwrap().wait(None).unwrap();
            (to_vec(&Tensor::cat(&outputs, 0)), to_vec(&flat), at_root.iter().flat_map(to_vec).collect::<Vec<_>>())
        });
        for (rank, (list, flat, at_root)) in got.into_iter().enumerate() {
            assert_eq!(list, expected);
            assert_eq!(flat, expected);
            assert_eq!(at_root, if rank == 0 { expected.clone() } else { vec![] });
        }
    }
}

#[test]
fn scattering_gives_each_rank_its_part() {
    for world_size in 1..=4_usize {
        let got = ranks(world_size, |group| {
            let rank = group.rank();
            let parts: Vec<_> = (0..world_size).map(|r| floats(&[r as f32])).collect();
            let scattered = zeros(1);
            group.scatter(&scattered, if rank == 0 { &parts } else { &[] }, 0, None).unwrap().wait(None).unwrap();
            let (reduced, flat) = (zeros(1), zeros(1));
            group.reduce_scatter(&reduced, &parts, ReduceOp::Sum, None).unwrap().wait(None).unwrap();
            group
                .reduce_scatter_tensor(&flat, &Tensor::cat(&parts, 0), ReduceOp::Sum, None)
                .unwrap()
                .wait(None)
                .unwrap();
            [to_vec(&scattered)[0], to_vec(&reduced)[0], to_vec(&flat)[0]]
        });
        for (rank, values) in got.into_iter().enumerate() {
            let sum = (rank * world_size) as f32;
            assert_eq!(values, [rank as f32, sum, sum]);
        }
    }
}

#[test]
fn all_to_all_swaps_rows_and_columns() {
    for world_size in 1..=4_usize {
        let got = ranks(world_size, |group| {
            let inputs: Vec<_> =
                (0..world_size).map(|to| floats(&vec![(10 * group.rank() + to) as f32; to + 1])).collect();
            let mut outputs: Vec<_> = (0..world_size).map(|_| zeros(group.rank() as i64 + 1)).collect();
            group.all_to_all(&mut outputs, &inputs, None).unwrap();
            outputs.iter().map(to_vec).collect::<Vec<_>>()
        });
        for (rank, received) in got.into_iter().enumerate() {
            let expected: Vec<_> = (0..world_size).map(|from| vec![(10 * from + rank) as f32; rank + 1]).collect();
            assert_eq!(received, expected);
        }
    }
}

#[test]
fn messages_travel_between_two_ranks() {
    let got = ranks(2, |group| {
        let tensor = floats(&[group.rank() as f32 + 5.0]);
        if group.rank() == 0 {
            group.send(&tensor, 1, 7).unwrap().wait(None).unwrap();
        } else {
            group.recv(&tensor, Some(0), 7).unwrap().wait(None).unwrap();
        }
        to_vec(&tensor)[0]
    });
    assert_eq!(got, vec![5.0, 5.0]);
}

#[test]
fn coalesced_broadcast_and_barrier_end() {
    let got = ranks(3, |group| {
        let tensors = [floats(&[group.rank() as f32]), floats(&[2.0 * group.rank() as f32])];
        group.broadcast_coalesced(&tensors, 1 << 20, 2).unwrap();
        group.barrier(None).unwrap().wait(None).unwrap();
        group.monitored_barrier(MonitoredBarrierOptions { wait_all_ranks: true, ..Default::default() }).unwrap();
        [to_vec(&tensors[0])[0], to_vec(&tensors[1])[0]]
    });
    assert_eq!(got, vec![[2.0, 4.0]; 3]);
}

#[test]
fn different_models_are_refused() {
    let got = ranks(2, |group| {
        let params = [zeros(if group.rank() == 0 { 2 } else { 3 })];
        group.verify_params_across_processes(&params).map_err(|error| error.to_string())
    });
    assert!(got.iter().any(Result::is_err), "{got:?}");
}

#[test]
fn a_missing_peer_is_a_timeout() {
    let got = ranks(2, |group| {
        let tensor = floats(&[1.0]);
        // Both are connected then.
        group.all_reduce(&tensor, ReduceOp::Sum, None).and_then(|work| work.wait(None)).unwrap();
        if group.rank() == 1 {
            return None;
        }
        let work = group.all_reduce(&tensor, ReduceOp::Sum, Some(Duration::from_millis(300)));
        Some(work.and_then(|work| work.wait(None)).unwrap_err())
    });
    let error = got.into_iter().next().flatten().unwrap();
    // The other rank has left: either its connection closes first or the deadline passes first.
    assert!(error.is_timeout() || error.is_connection(), "{error:?}");
    assert_eq!(error.operation(), "all_reduce");
}

#[test]
fn wrong_arguments_are_named() {
    ranks(1, |group| {
        let tensor = zeros(2);
        for (error, word) in [
            (group.broadcast(&tensor, 3, None).unwrap_err(), "rank 3"),
            (group.all_gather(&[], &tensor, None).unwrap_err(), "found 0 tensors"),
            (group.all_gather_into_tensor(&zeros(3), &tensor, None).unwrap_err(), "3 elements"),
        ] {
            assert!(error.is_invalid_argument() && error.to_string().contains(word), "{error}");
        }
    });
    let store = Store::hash().unwrap();
    let error = ProcessGroup::gloo(&store, 2, 2, &GlooOptions::default()).unwrap_err();
    assert!(error.to_string().contains("rank 2 does not fit a world of 2"));
}
