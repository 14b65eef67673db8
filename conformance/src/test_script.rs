//! `test_script.py`: process control, loader preparation, training against a single process, splitting.

use crate::loader_checks::{loader_checks, numbers};
use crate::training_check::training_check;
use accelerate::tch::{self, Kind, Tensor};
use accelerate::{Accelerator, RngType, SplitOptions, main_println};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

pub(crate) fn run(folder: Option<&Path>) -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).build()?;
    init_state_check(&accelerator)?;
    process_execution_check(&accelerator, folder)?;
    rng_sync_check(&accelerator)?;
    loader_checks(&accelerator)?;
    split_between_processes_checks(&accelerator)?;
    trigger_check(&accelerator)?;
    for use_seedable_sampler in [false, true] {
        training_check(&accelerator, use_seedable_sampler)?;
    }
    main_println!(accelerator, "test_script: all checks passed");
    Ok(())
}

/// A second accelerator takes part in the same run. The reference shares one global state instead, which can be reset under an
/// accelerator that still uses it (`test_reinstantiated_state`); there is no such state here.
fn init_state_check(accelerator: &Accelerator) -> Result<()> {
    let (first, second) = (accelerator.state(), Accelerator::builder().build_from(accelerator)?);
    let second = second.state();
    ensure!(first.process_index() == second.process_index() && first.num_processes() == second.num_processes());
    ensure!(first.to_string() == second.to_string(), "{first}\n{second}");
    let wanted =
        [format!("Num processes: {}", first.num_processes()), format!("Process index: {}", first.process_index())];
    ensure!(wanted.iter().all(|line| first.to_string().contains(line)), "{first}");
    Ok(())
}

fn process_execution_check(accelerator: &Accelerator, folder: Option<&Path>) -> Result<()> {
    let (rank, last) = (accelerator.process_index(), accelerator.num_processes() - 1);
    ensure!(accelerator.on_main_process(|| ()).is_some() == (rank == 0));
    ensure!(accelerator.on_last_process(|| ()).is_some() == (rank == last));
    ensure!(accelerator.on_process(last, || ()).is_some() == (rank == last));
    ensure!(accelerator.on_local_main_process(|| ()).is_some() == (accelerator.local_process_index() == 0));
    let Some(folder) = folder else { return Ok(()) };
    let path = folder.join("order");
    let write = |text: &str| -> accelerate::Result<()> {
        let mut file =
            std::fs::OpenOptions::new().create(true).append(true).open(&path).map_err(accelerate::Error::other)?;
        file.write_all(text.as_bytes()).map_err(accelerate::Error::other)
    };
    accelerator.main_process_first(|| write(if accelerator.is_main_process() { "main " } else { "other " }))?;
    accelerator.wait_for_everyone()?;
    let text = std::fs::read_to_string(&path).context("the file that every rank wrote to")?;
    ensure!(text.starts_with("main ") && text.matches("other ").count() == last, "found {text:?}");
    Ok(())
}

/// Ranks that are seeded differently draw the same once they have taken over rank 0's state, asked for or by a loader.
fn rng_sync_check(accelerator: &Accelerator) -> Result<()> {
    let rank = accelerator.process_index() as i64;
    let same_everywhere = || -> Result<bool> {
        let drawn = accelerator.gather(&tch::Tensor::randn([1], tch::kind::FLOAT_CPU))?;
        Ok(Vec::<f32>::try_from(&drawn)?.windows(2).all(|pair| pair[0] == pair[1]))
    };
    tch::manual_seed(rank);
    ensure!(accelerator.num_processes() == 1 || !same_everywhere()?, "seeds make no difference");
    tch::manual_seed(rank);
    accelerator.synchronize_rng_states(&[RngType::Torch])?;
    ensure!(same_everywhere()?, "the states differ after synchronisation");
    let configured = Accelerator::builder().rng_types([RngType::Torch]).build_from(accelerator)?;
    let loader = configured.prepare(numbers(8, 2, false)?)?;
    tch::manual_seed(rank);
    let _batches = loader.iter()?;
    ensure!(same_everywhere()?, "the states differ after a pass has begun");
    Ok(())
}

fn split_between_processes_checks(accelerator: &Accelerator) -> Result<()> {
    let (rank, world_size) = (accelerator.process_index(), accelerator.num_processes());
    for (items, padding) in [(17, false), (17, true), (world_size, false), (2 * world_size, true)] {
        let list: Vec<usize> = (0..items).collect();
        let nested = BTreeMap::from([("a", list.clone()), ("b", list.iter().map(|item| 2 * item).collect())]);
        let mine = accelerator.split_between_processes(&list, SplitOptions { apply_padding: padding })?;
        let share = accelerator.split_between_processes(&nested, SplitOptions { apply_padding: padding })?;
        ensure!(share["a"] == mine && share["b"] == mine.iter().map(|item| 2 * item).collect::<Vec<_>>());
        let tensor = accelerator.split_between_processes(
            &Tensor::f_arange(items as i64, (Kind::Int64, accelerator.device()))?,
            SplitOptions { apply_padding: padding },
        )?;
        ensure!(Vec::<i64>::try_from(&tensor)?.iter().map(|item| *item as usize).eq(mine.iter().copied()));
        let all = accelerator.gather_object(&mine)?;
        let longest = items.div_ceil(world_size);
        if padding {
            ensure!(mine.len() == longest && all.len() == longest * world_size);
        } else {
            ensure!(all == list, "the shares of all ranks, in rank order, are the whole");
            ensure!(mine.len() == items / world_size + usize::from(rank < items % world_size));
        }
    }
    Ok(())
}

fn trigger_check(accelerator: &Accelerator) -> Result<()> {
    ensure!(!accelerator.check_trigger()?, "nobody raised the flag");
    if accelerator.is_last_process() {
        accelerator.set_trigger();
    }
    ensure!(accelerator.check_trigger()?, "the last rank raised the flag");
    ensure!(!accelerator.check_trigger()?, "the flag stays up");
    Ok(())
}
