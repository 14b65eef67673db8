//! Collectives in memory beside the backend's: the same bits, and the same blame.

use super::{Group, ReduceOp};
use crate::error::{Error, Result};
use crate::testing;
use std::sync::Barrier;
use std::time::Duration;
use tch::{Device, Kind, Tensor};
use torch_ext::Store;

/// Numbers of which sums round, other ones on each rank.
fn numbers(rank: usize, numel: i64, kind: Kind) -> Tensor {
    let at = Tensor::arange(numel, (Kind::Double, Device::Cpu)) * 0.7 + rank as f64 * 1.3;
    let waves = at.sin() * 1e3 / (at.cos() + 1.5);
    match kind {
        Kind::Bool => waves.gt(300.0),
        Kind::ComplexFloat | Kind::ComplexDouble => Tensor::complex(&waves, &(&waves * 0.3)).to_kind(kind),
        // Nothing that another type would not hold.
        Kind::Uint8 => waves.abs().remainder(60.0).to_kind(kind),
        Kind::Int8 => waves.remainder(30.0).to_kind(kind),
        _ => waves.to_kind(kind),
    }
}

/// The bytes, for numbers that are equal to the bit.
fn bits(tensor: &Tensor) -> Vec<u8> {
    let flat = tensor.contiguous().view([-1]);
    let flat =
        if matches!(tensor.kind(), Kind::ComplexFloat | Kind::ComplexDouble) { flat.view_as_real() } else { flat };
    Vec::try_from(&flat.contiguous().view([-1]).view_dtype(Kind::Uint8)).unwrap()
}

fn all_equal(group: &Group, tensor: &Tensor) -> bool {
    let all = group.all_gather_bytes(&bits(tensor)).unwrap();
    all.iter().all(|other| *other == all[0])
}

/// Sizes of small tensors, of some whose parts are empty, and of some that are read in several blocks.
const SIZES: [i64; 8] = [0, 1, 2, 3, 7, 1000, 20_011, 300_007];

#[test]
fn reductions_have_the_bits_of_the_backend_on_every_rank() {
    const KINDS: [Kind; 8] =
        [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16, Kind::Int8, Kind::Uint8, Kind::Int, Kind::Int64];
    for world_size in 1..=4 {
        testing::ranks(world_size, Default::default(), |accelerator| {
            let group = accelerator.group();
            for kind in KINDS {
                for numel in SIZES {
                    for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
                        let (ours, theirs) = (numbers(group.rank(), numel, kind), numbers(group.rank(), numel, kind));
                        group.all_reduce(&ours, op)?;
                        if let Some(backend) = group.process_group().filter(|_| numel > 0) {
                            backend.all_reduce(&theirs, op.of_backend(), None)?.wait(None)?;
                        }
                        assert_eq!(bits(&ours), bits(&theirs), "{world_size} ranks, {numel} {kind:?}, {op:?}");
                        assert!(all_equal(group, &ours));
                    }
                }
            }
            assert_eq!(group.reads_peers(), world_size > 1);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn bools_shorts_and_complex_numbers_are_added_too() {
    for world_size in 1..=4i64 {
        testing::ranks(world_size as usize, Default::default(), |accelerator| {
            let group = accelerator.group();
            let all = |numel, kind| (0..world_size as usize).map(move |rank| numbers(rank, numel, kind));
            for numel in SIZES {
                for kind in [Kind::Bool, Kind::Int16, Kind::ComplexFloat, Kind::ComplexDouble] {
                    let own = numbers(group.rank(), numel, kind);
                    group.all_reduce(&own, ReduceOp::Sum)?;
                    let wanted = all(numel, kind)
                        .reduce(|sum, next| if kind == Kind::Bool { sum.logical_or(&next) } else { sum + next });
                    // The order of the sum is another one, so the last digits may differ.
                    let near = |most: f64| {
                        own.view_as_real().allclose(&wanted.as_ref().unwrap().view_as_real(), 0.0, most, false)
                    };
                    let is_near = match kind {
                        Kind::ComplexFloat => near(1e-2),
                        Kind::ComplexDouble => near(1e-9),
                        _ => own == *wanted.as_ref().unwrap(),
                    };
                    assert!(is_near && all_equal(group, &own), "{world_size} ranks, {numel} {kind:?}");
                }
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn tensors_of_every_dtype_come_from_the_ranks_they_should() {
    const KINDS: [Kind; 8] = [
        Kind::Float,
        Kind::Half,
        Kind::BFloat16,
        Kind::Bool,
        Kind::Int16,
        Kind::Int64,
        Kind::Uint8,
        Kind::ComplexDouble,
    ];
    for world_size in 1..=4 {
        testing::ranks(world_size, Default::default(), |accelerator| {
            let group = accelerator.group();
            for kind in KINDS {
                for numel in SIZES {
                    let own = numbers(group.rank(), numel, kind);
                    let wanted: Vec<Tensor> = (0..world_size).map(|rank| numbers(rank, numel, kind)).collect();
                    assert_eq!(group.all_gather(&own)?, wanted);
                    assert_eq!(group.all_gather_into_tensor(&own)?, Tensor::cat(&wanted, 0));
                    for (source, wanted) in wanted.iter().enumerate() {
                        let copy = own.copy();
                        group.broadcast(&copy, source)?;
                        assert_eq!(copy, *wanted, "{world_size} ranks, {numel} {kind:?} of rank {source}");
                    }
                    group.barrier()?;
                }
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn parts_go_to_the_ranks_that_they_are_for() {
    for world_size in 1..=4 {
        testing::ranks(world_size, Default::default(), |accelerator| {
            let group = accelerator.group();
            for kind in [Kind::Float, Kind::BFloat16, Kind::Bool, Kind::Int64] {
                for rows in [0, 1, 3, 50_021] {
                    let all: Vec<Tensor> =
                        (0..world_size).map(|rank| numbers(rank, rows * world_size as i64, kind)).collect();
                    let own = &all[group.rank()];
                    let to_this = |sent: &Tensor| sent.narrow(0, rows * group.rank() as i64, rows);
                    let wanted = Tensor::cat(&all.iter().map(to_this).collect::<Vec<_>>(), 0);
                    let received = group.all_to_all_single(own)?;
                    assert_eq!(received, wanted, "{world_size} ranks, {rows} rows of {kind:?}");
                    assert_eq!(group.all_to_all_single(&received)?, *own);
                    let before = (group.rank() + world_size - 1) % world_size;
                    assert_eq!(group.rotate(&own.view([-1, 1]))?, all[before].view([-1, 1]));
                }
            }
            let indivisible = group.all_to_all_single(&numbers(0, 5 * world_size as i64 + 1, Kind::Float));
            assert_eq!(indivisible.is_err(), world_size > 1);
            Ok(())
        })
        .unwrap();
    }
}

/// Sums of numbers that do not round, so that all orders of adding have one result.
#[test]
fn calls_of_every_kind_follow_each_other_while_ranks_are_late_by_turns() {
    const SIZES: [i64; 4] = [1000, 40_000, 150_001, 700_000];
    for world_size in 2..=4i64 {
        testing::ranks(world_size as usize, Default::default(), |accelerator| {
            let (group, rank) = (accelerator.group(), accelerator.process_index() as i64);
            let of = |rank: i64, numel| Tensor::arange(numel, (Kind::Int, Device::Cpu)) * 7 + 1_000_003 * rank;
            for call in 0..60i64 {
                let numel = SIZES[(call * call / 3 % 4) as usize] * world_size;
                (0..(call * 7 + rank * 5) % 11 * 20).for_each(|_| std::thread::yield_now());
                let own = of(rank, numel);
                let all: Vec<Tensor> = (0..world_size).map(|rank| of(rank, numel)).collect();
                let sum = all.iter().map(Tensor::copy).reduce(|sum, next| sum + next).unwrap();
                let part = |tensor: &Tensor| tensor.narrow(0, rank * numel / world_size, numel / world_size);
                let (received, wanted) = match call % 6 {
                    0 => (group.all_to_all_single(&own)?, Tensor::cat(&all.iter().map(part).collect::<Vec<_>>(), 0)),
                    1 => (group.rotate(&own)?, all[((rank + world_size - 1) % world_size) as usize].copy()),
                    2 => (group.all_gather_into_tensor(&own)?, Tensor::cat(&all, 0)),
                    3 => (group.reduce_scatter_tensor(&own, ReduceOp::Sum)?, part(&sum)),
                    4 => {
                        group.all_reduce(&own, ReduceOp::Sum)?;
                        (own, sum)
                    }
                    _ => {
                        group.broadcast(&own, (call % world_size) as usize)?;
                        (own, all[(call % world_size) as usize].copy())
                    }
                };
                assert_eq!(received, wanted, "call {call} of {numel} numbers on {world_size} ranks");
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn shards_of_a_sum_are_added_in_the_order_of_ranks() {
    for world_size in 1..=4 {
        testing::ranks(world_size, Default::default(), |accelerator| {
            let group = accelerator.group();
            for kind in [Kind::Float, Kind::BFloat16, Kind::Int64] {
                for rows in [0, 1, 3, 50_021] {
                    let numel = rows * world_size as i64;
                    let shard = group.reduce_scatter_tensor(&numbers(group.rank(), numel, kind), ReduceOp::Sum)?;
                    let sum = (0..world_size).map(|rank| numbers(rank, numel, kind)).reduce(|sum, next| sum + next);
                    let wanted = sum.unwrap().narrow(0, rows * group.rank() as i64, rows);
                    assert_eq!(bits(&shard), bits(&wanted), "{world_size} ranks, {rows} rows of {kind:?}");
                }
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn tensors_that_are_not_contiguous_are_written_through() {
    testing::ranks(3, Default::default(), |accelerator| {
        let group = accelerator.group();
        let rank = group.rank() as i64;
        let whole = Tensor::arange(12, (Kind::Float, Device::Cpu)).view([3, 4]) * (rank + 1);
        let original = whole.copy();
        let column = whole.select(1, 1);
        group.all_reduce(&column, ReduceOp::Mean)?;
        assert_eq!(column, Tensor::from_slice(&[2f32, 10.0, 18.0]));
        assert_eq!(whole.select(1, 2), original.select(1, 2));
        group.broadcast(&whole.transpose(0, 1), 2)?;
        let wanted = Tensor::arange(12, (Kind::Float, Device::Cpu)).view([3, 4]) * 3;
        wanted.select(1, 1).copy_(&Tensor::from_slice(&[2f32, 10.0, 18.0]));
        assert_eq!(whole, wanted);
        assert_eq!(group.all_gather(&whole.transpose(0, 1))?[1], wanted.transpose(0, 1));
        Ok(())
    })
    .unwrap();
}

#[test]
fn gradients_are_divided_before_they_are_added() {
    for world_size in 2..=4 {
        testing::ranks(world_size, Default::default(), |accelerator| {
            let group = accelerator.group();
            group.all_gather_bytes(&[])?;
            for numel in SIZES {
                let ours = numbers(group.rank(), numel, Kind::Float);
                let theirs = &ours * (1.0 / world_size as f64);
                group.mean_of_gradients(&ours)?;
                group.all_reduce(&theirs, ReduceOp::Sum)?;
                assert_eq!(bits(&ours), bits(&theirs), "{world_size} ranks, {numel}");
            }
            Ok(())
        })
        .unwrap();
    }
}

/// No rank waits for the others at the end of an all-reduce, and the next one fills slots that it has used.
#[test]
fn one_all_reduce_after_the_other_leaves_its_results_alone() {
    const SUMS: [(i64, Kind); 4] =
        [(300_007, Kind::Float), (70_001, Kind::BFloat16), (5, Kind::Float), (300_007, Kind::Double)];
    for world_size in 2..=4 {
        testing::ranks(world_size, Default::default(), |accelerator| {
            let group = accelerator.group();
            for turn in 0..12 {
                for (numel, kind) in SUMS {
                    let of = |rank: usize| numbers(rank + 10 * turn, numel, kind);
                    let ours = of(group.rank());
                    group.all_reduce(&ours, ReduceOp::Max)?;
                    // Work in between that is another one on each rank.
                    let wanted = (0..world_size).map(of).reduce(|most, next| most.maximum(&next));
                    (0..group.rank() * turn % 5).for_each(|_| drop(ours.sin()));
                    assert_eq!(
                        bits(&ours),
                        bits(&wanted.unwrap()),
                        "{world_size} ranks, turn {turn}, {numel} {kind:?}"
                    );
                }
            }
            Ok(())
        })
        .unwrap();
    }
}

/// What becomes of each rank; all stay until all are done, so that nobody's memory goes before.
fn each<T: Send>(world_size: usize, deadline: Duration, body: impl Fn(usize, &Group) -> T + Sync) -> Vec<T> {
    let (store, end) = (Store::hash().unwrap(), Barrier::new(world_size));
    let rank = |rank: usize| {
        let group = testing::join_with_deadline(&store, rank, world_size, deadline).unwrap();
        let outcome = body(rank, &group);
        end.wait();
        outcome
    };
    let rank = &rank;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world_size).map(|number| scope.spawn(move || rank(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn different_calls_are_named_on_every_rank_at_once_and_the_group_goes_on() {
    type Call = fn(&Group, &Tensor) -> Result<()>;
    let sum: Call = |group, tensor| group.all_reduce(tensor, ReduceOp::Sum);
    let rows: [(&str, &str, Call, Call); 6] = [
        ("all_reduce of [3] Float (Sum)", "all_reduce of [3] Float (Max)", sum, |group, tensor| {
            group.all_reduce(tensor, ReduceOp::Max)
        }),
        // Both are a sum to the backend.
        ("all_reduce of [3] Float (Sum)", "all_reduce of [3] Float (Mean)", sum, |group, tensor| {
            group.all_reduce(tensor, ReduceOp::Mean)
        }),
        ("all_reduce of [3] Float (Sum)", "all_reduce of [2] Float (Sum)", sum, |group, tensor| {
            group.all_reduce(&tensor.narrow(0, 0, 2), ReduceOp::Sum)
        }),
        ("all_reduce of [3] Float (Sum)", "all_reduce of [3] Double (Sum)", sum, |group, tensor| {
            group.all_reduce(&tensor.to_kind(Kind::Double), ReduceOp::Sum)
        }),
        ("all_reduce of [3] Float (Sum)", "rank 2: barrier", sum, |group, _| group.barrier()),
        (
            "[3] Float from rank 1",
            "[3] Float from rank 0",
            |group, tensor| group.broadcast(tensor, 1),
            |group, tensor| group.broadcast(tensor, 0),
        ),
    ];
    for (one, other, most, last) in rows {
        let outcomes = each(3, Duration::from_secs(60), |rank, group| {
            let own = Tensor::from_slice(&[1f32, 2.0, 3.0]);
            group.all_reduce(&own.copy(), ReduceOp::Sum).unwrap();
            let error = if rank == 2 { last(group, &own) } else { most(group, &own) }.unwrap_err();
            assert_eq!(own, Tensor::from_slice(&[1f32, 2.0, 3.0]), "nothing has been read");
            group.all_reduce(&own, ReduceOp::Sum).unwrap();
            (error.to_string(), own)
        });
        for (text, sum) in outcomes {
            assert!(
                text.contains("ranks make different calls") && text.contains(one) && text.contains(other),
                "{text}"
            );
            assert_eq!(sum, Tensor::from_slice(&[3f32, 6.0, 9.0]));
        }
    }
}

#[test]
fn a_rank_that_is_late_is_named_at_the_deadline_and_finds_the_others_gone() {
    for numel in [3, 100_000] {
        let missed = Barrier::new(3);
        let errors: Vec<Error> = each(3, Duration::from_secs(3), |rank, group| {
            let own = numbers(rank, numel, Kind::Float);
            group.all_reduce(&own, ReduceOp::Sum).unwrap();
            if rank == 1 {
                missed.wait();
            }
            let error = group.all_reduce(&own, ReduceOp::Sum).unwrap_err();
            if rank != 1 {
                missed.wait();
            }
            assert!(group.all_reduce(&own, ReduceOp::Sum).is_err(), "a group that has failed makes no call any more");
            error
        });
        let texts: Vec<String> = errors.iter().map(Error::to_string).collect();
        let late = |at: usize| texts[at].contains("rank 1 has not made this call");
        assert!(errors.iter().any(Error::is_timeout) && late(0) && late(2), "{texts:?}");
        assert!(errors[1].is_peer_failure(), "{texts:?}");
    }
}

#[test]
fn a_rank_that_has_left_is_missed_at_once() {
    let store = Store::hash().unwrap();
    let store = &store;
    let rank = |rank: usize| {
        let group = testing::join_with_deadline(store, rank, 2, Duration::from_secs(600)).unwrap();
        let own = numbers(rank, 5, Kind::Float);
        group.all_reduce(&own, ReduceOp::Sum).unwrap();
        (rank == 0).then(|| group.all_reduce(&own, ReduceOp::Sum).unwrap_err())
    };
    let error = std::thread::scope(|scope| {
        let threads = [0, 1].map(|number| scope.spawn(move || rank(number)));
        threads.into_iter().filter_map(|thread| thread.join().unwrap()).next().unwrap()
    });
    assert!(error.is_peer_failure() && error.to_string().contains("rank 1"), "{error}");
}
