//! A gather that fails is the error of the `get()` that needed it.

use super::*;
use crate::nn::Init;
use std::sync::Barrier;
use torch_ext::Store;

/// What goes wrong on rank 1.
#[derive(Clone, Copy, Debug)]
enum Planted {
    /// It asks for the units in the other order, and so for a message of another size.
    OtherOrder,
    /// It cannot read its own shard of the second unit.
    OwnShardGone,
}

const DEADLINE: Duration = Duration::from_secs(3);

/// What one rank's `get()` said, and then its forward pass.
fn failures(store: &Store, rank: usize, planted: Planted, records: bool, end: &Barrier) -> [crate::Error; 2] {
    let group = testing::join_with_deadline(store, rank, 2, DEADLINE).unwrap();
    let accelerator = Accelerator::builder().build_in_group(group).unwrap();
    let store = ParamStore::new(accelerator.device());
    let param = |index: usize| {
        let path = store.root() / "layers" / index;
        path.param("weight", ([3 + 2 * index as i64], Init::Ones)).unwrap()
    };
    let params = [param(0), param(1)];
    let is_reversed = rank == 1 && matches!(planted, Planted::OtherOrder);
    let failure = Arc::new(Mutex::new(None));
    let seen = Arc::clone(&failure);
    let module = ModuleFn::new(&store, move |input: &Tensor| {
        let mut sum = input.shallow_clone();
        for index in if is_reversed { [1, 0] } else { [0, 1] } {
            let weight = params[index].get().map_err(|error| {
                let text = error.to_string();
                *seen.lock().unwrap() = Some(error);
                crate::Error::other(text)
            })?;
            assert_eq!(weight, weight.ones_like(), "nothing else stands for what could not be gathered");
            sum = sum.f_add(&weight.f_sum(None)?)?;
        }
        Ok(sum)
    });
    let plugin = FullyShardedDataParallelPlugin {
        auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap),
        direct_all_gather: Some(false),
        ..Default::default()
    };
    let engine = start(&accelerator, &store, &plugin).unwrap();
    if rank == 1 && matches!(planted, Planted::OwnShardGone) {
        engine.0.units.spoil_shard(1);
    }
    let model = with_engine(module, &engine, &accelerator);
    let input = Tensor::from_slice(&[0f32]);
    let forward = || model.forward(&input).unwrap_err();
    let error = if records { forward() } else { tch::no_grad(forward) };
    // Nobody's connections go before all have failed.
    end.wait();
    let failure = failure.lock().unwrap().take();
    [failure.unwrap_or_else(|| crate::Error::other("a gather failed, and `get` did not say so")), error]
}

#[test]
fn a_gather_that_fails_is_the_error_of_the_get_that_needed_it() {
    for (planted, records) in [(Planted::OtherOrder, true), (Planted::OtherOrder, false), (Planted::OwnShardGone, true)]
    {
        let (store, end) = (Store::hash().unwrap(), Barrier::new(2));
        let (store, end, started) = (&store, &end, Instant::now());
        let failures: Vec<_> = std::thread::scope(|scope| {
            let rank = |rank| scope.spawn(move || failures(store, rank, planted, records, end));
            [rank(0), rank(1)].into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        // The ranks also tell each other where they are.
        assert!(started.elapsed() < 4 * DEADLINE, "{planted:?}: {:?}", started.elapsed());
        for (rank, [of_get, of_forward]) in failures.iter().enumerate() {
            let text = of_get.to_string();
            assert_eq!(of_forward.to_string(), text, "{planted:?}, rank {rank}");
            match planted {
                // The one whose deadline ends later may find the other's connection closed.
                Planted::OtherOrder => {
                    let is_between_ranks = of_get.is_timeout() || of_get.is_peer_failure();
                    assert!(is_between_ranks && text.contains("layers."), "rank {rank}: {text}");
                }
                Planted::OwnShardGone if rank == 0 => {
                    assert!(of_get.is_timeout() && text.contains("rank 1 has left: "), "{text}");
                }
                Planted::OwnShardGone => assert!(!of_get.is_timeout(), "{text}"),
            }
        }
    }
}
