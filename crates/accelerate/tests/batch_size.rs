//! Ranks that run out of memory, alone or together, find one batch size.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{Linear, ModuleFn, ParamStore};
use accelerate::optim::Sgd;
use accelerate::testing::ranks;
use accelerate::{
    Accelerator, AutoWrapPolicy, DistributedDataParallelKwargs, Error, FullyShardedDataParallelPlugin, ReduceOp,
    Result, find_executable_batch_size,
};
use std::sync::atomic::{AtomicUsize, Ordering};
use tch::{Device, Kind, Tensor};

fn oom() -> Error {
    Error::other("CUDA out of memory. Tried to allocate 20.00 MiB")
}

/// Where in the second step memory runs out.
#[derive(Clone, Copy, Debug)]
enum Place {
    BeforeTheFirstStep,
    BetweenForwardAndBackward,
    WithinBackward,
}

/// Two steps of a model with two buckets; gives the sum of its weights.
fn train(accelerator: &Accelerator, place: Option<Place>) -> Result<f64> {
    const WIDTH: i64 = 520; // a layer fills a bucket
    let store = ParamStore::new(accelerator.device());
    let first = Linear::new(store.root() / "first", 1, WIDTH, Default::default())?;
    let second = Linear::new(store.root() / "second", WIDTH, WIDTH, Default::default())?;
    let third = Linear::new(store.root() / "third", WIDTH, WIDTH, Default::default())?;
    let optimizer = Sgd::new(&store, 1e-3)?;
    let model = ModuleFn::new(&store, move |x: &Tensor| {
        let middle = second.forward(&first.forward(x)?)?;
        Ok((third.forward(&middle)?, middle))
    });
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    if let Some(Place::BeforeTheFirstStep) = place {
        return Err(oom());
    }
    for step in 0..3 {
        let x = Tensor::ones([1, 1], (Kind::Float, Device::Cpu));
        let (output, middle) = model.forward(&x)?;
        let now = place.filter(|_| step == 2);
        match now {
            Some(Place::BetweenForwardAndBackward) => return Err(oom()),
            Some(Place::WithinBackward) => {
                torch_ext::hooks::register_hook(&middle, |_| Err("CUDA out of memory.".into())).unwrap();
            }
            _ => {}
        }
        accelerator.backward(&output.f_mean(Kind::Float)?)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    let total = store.parameters().iter().map(|param| param.get().unwrap().sum(Kind::Double).double_value(&[])).sum();
    Ok(total)
}

#[test]
fn all_ranks_try_again_wherever_one_ran_out_of_memory() {
    let kwargs = DistributedDataParallelKwargs { bucket_cap_mb: Some(0.001), ..Default::default() };
    let replicated = Accelerator::builder().kwargs_handler(kwargs);
    let sharded = Accelerator::builder().fsdp_plugin(FullyShardedDataParallelPlugin {
        auto_wrap_policy: Some(AutoWrapPolicy::SizeBasedWrap),
        min_num_params: Some(1),
        ..Default::default()
    });
    let places = [Place::BeforeTheFirstStep, Place::BetweenForwardAndBackward, Place::WithinBackward];
    for (builder, place) in [replicated, sharded].iter().flat_map(|builder| places.map(|place| (builder, place))) {
        for world_size in 1..=3 {
            let tries = AtomicUsize::new(0);
            let builder = builder.clone();
            let got = ranks(world_size, builder, |accelerator| {
                let mut executable = find_executable_batch_size().starting_batch_size(10);
                let total = executable.run_on(&accelerator, |accelerator, batch_size| {
                    tries.fetch_add(1, Ordering::Relaxed);
                    let short = accelerator.is_last_process() && batch_size > 8;
                    train(accelerator, short.then_some(place))
                })?;
                assert_eq!(executable.batch_size(), 8, "10 and 9 did not fit");
                // The connections of the tries that failed were their own.
                let together = accelerator.reduce(&Tensor::from(total), ReduceOp::Sum)?.double_value(&[]);
                assert!((together - total * world_size as f64).abs() < 1e-6 * together.abs(), "{place:?}");
                Ok(total)
            })
            .unwrap();
            assert!(got.iter().all(|total| *total == got[0]), "{place:?}: {got:?}");
            assert_eq!(tries.load(Ordering::Relaxed), 3 * world_size, "{place:?}");
        }
    }
}

#[test]
fn ranks_that_all_run_out_of_memory_stop_together() {
    let errors = ranks(3, Default::default(), |accelerator| {
        let mut executable = find_executable_batch_size().starting_batch_size(2);
        Ok(executable.run_on(&accelerator, |_, _| -> Result<()> { Err(oom()) }).unwrap_err())
    })
    .unwrap();
    assert!(errors.iter().all(|error| error.is_out_of_memory() && error.to_string().contains("no batch size")));
}

#[test]
fn another_failure_is_raised_on_all_ranks_with_the_rank_that_failed() {
    for panics in [false, true] {
        let errors = ranks(3, Default::default(), |accelerator| {
            let mut executable = find_executable_batch_size();
            let mut run = || {
                executable.run_on(&accelerator, |accelerator, _| {
                    match accelerator.process_index() {
                        1 if panics => panic!("row 7 is broken"),
                        1 => return Err(Error::other("row 7 is broken")),
                        // Without memory, while another rank fails: the failure counts.
                        2 => return Err(oom()),
                        _ => {}
                    }
                    accelerator.wait_for_everyone()
                })
            };
            if accelerator.process_index() == 1 && panics {
                let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
                assert!(caught.is_err(), "the rank's own panic goes on");
                return Ok("row 7 is broken".to_owned());
            }
            Ok(run().unwrap_err().to_string())
        })
        .unwrap();
        assert_eq!(errors[1], "row 7 is broken");
        for error in [&errors[0], &errors[2]] {
            assert!(
                error.contains("rank 1 failed with batch size 128") && error.contains("row 7 is broken"),
                "{error}"
            );
        }
    }
}

#[test]
fn a_rank_that_leaves_a_collective_without_reason_is_no_lack_of_memory() {
    let errors = ranks(2, Default::default(), |accelerator| {
        let outcome = find_executable_batch_size().run_on(&accelerator, |accelerator, _| {
            if accelerator.is_main_process() { accelerator.wait_for_everyone() } else { Err(Error::other("enough")) }
        });
        Ok(outcome.unwrap_err().to_string())
    })
    .unwrap();
    assert!(errors[0].contains("rank 1 failed") && errors[1] == "enough", "{errors:?}");
}

#[test]
fn the_size_found_serves_the_next_run() {
    ranks(2, Default::default(), |accelerator| {
        let mut executable = find_executable_batch_size();
        for (run, tries) in [(0, 4), (1, 1)] {
            let mut tried = 0;
            let found = executable.run_on(&accelerator, |accelerator, batch_size| {
                tried += 1;
                if accelerator.is_main_process() && batch_size > 100 { Err(oom()) } else { Ok(batch_size) }
            })?;
            // A rank that is still connecting when the other one leaves skips the body of that try.
            let at_least = if accelerator.is_main_process() { tries } else { 1 };
            assert_eq!(found, 92, "run {run}");
            assert!((at_least..=tries).contains(&tried), "run {run}: {tried} of {tries}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn different_sizes_are_shown() {
    let errors = ranks(2, Default::default(), |accelerator| {
        let mut executable = find_executable_batch_size().starting_batch_size(8 + accelerator.process_index());
        Ok(executable.run_on(&accelerator, |_, _| Ok(())).unwrap_err().to_string())
    })
    .unwrap();
    assert!(errors.iter().all(|error| error.contains("different batch sizes (8, 9")), "{errors:?}");
}

#[test]
fn a_try_has_the_settings_of_the_run() {
    let builder =
        Accelerator::builder().gradient_accumulation_steps(3).mixed_precision(accelerate::MixedPrecision::Bf16);
    ranks(2, builder, |accelerator| {
        accelerator.set_gradient_accumulation_steps(5)?;
        find_executable_batch_size().run_on(&accelerator, |own, _| {
            assert_eq!(
                (own.gradient_accumulation_steps(), own.mixed_precision()),
                (5, accelerate::MixedPrecision::Bf16)
            );
            assert_eq!((own.process_index(), own.num_processes()), (accelerator.process_index(), 2));
            Ok(())
        })
    })
    .unwrap();
}
