//! `test_utils/scripts/test_notebook.py`: launching functions from a program, in as many processes as
//! `ACCELERATE_NUM_PROCESSES` says.

use accelerate::{Accelerator, NotebookLauncherOptions, PartialState, Workers, notebook_launcher, workers};
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;

/// What worker processes of this program can run.
pub(crate) fn workers() -> Workers {
    workers![basic_function, clean_process_function, bipolar_sleep_function, tough_nut_function]
}

/// Rank and number of processes.
fn basic_function(_: ()) -> accelerate::Result<(usize, usize)> {
    let state = PartialState::new(&Default::default())?;
    println!("PartialState: {state:?}");
    // Who ends while others still connect is missed by them.
    state.group().barrier()?;
    Ok((state.process_index(), state.num_processes()))
}

/// What the process that launches has opened is not here.
fn clean_process_function(_: ()) -> accelerate::Result<Vec<String>> {
    let entries = std::fs::read_dir("/proc/self/fd").map_err(accelerate::Error::other)?;
    let targets = entries.filter_map(|entry| entry.ok()?.path().read_link().ok());
    Ok(targets.map(|target| target.display().to_string()).collect())
}

fn bipolar_sleep_function(_: ()) -> accelerate::Result<()> {
    let state = PartialState::new(&Default::default())?;
    state.group().barrier()?;
    if state.process_index().is_multiple_of(2) {
        return Err(accelerate::Error::other("I'm an even process. I don't like to sleep."));
    }
    sleep_for_ever()
}

/// Fails as often as the file says, which stands for the queue that processes of the reference share. Returns how often it had been
/// started before.
fn tough_nut_function(queue: PathBuf) -> accelerate::Result<usize> {
    let accelerator = Accelerator::builder().build()?;
    let text = std::fs::read_to_string(&queue).map_err(accelerate::Error::other)?;
    let trials: usize = text.parse().map_err(accelerate::Error::other)?;
    accelerator.wait_for_everyone()?;
    if trials == 0 {
        return accelerator.restart_count();
    }
    if !accelerator.is_main_process() {
        // Nobody else is to fail, because rank 0 was missed.
        sleep_for_ever();
    }
    std::fs::write(&queue, (trials - 1).to_string()).map_err(accelerate::Error::other)?;
    Err(accelerate::Error::other("The nut hasn't cracked yet! Try again."))
}

fn sleep_for_ever() -> ! {
    loop {
        std::thread::park();
    }
}

pub(crate) fn run(workers: &Workers) -> Result<()> {
    let num_processes: usize =
        std::env::var("ACCELERATE_NUM_PROCESSES").context("in how many processes?")?.parse().context("a number")?;
    let options = NotebookLauncherOptions { num_processes: Some(num_processes), ..Default::default() };
    let with_backend = |name: &str| NotebookLauncherOptions { rdzv_backend: Some(name.to_owned()), ..options.clone() };
    let everywhere: Vec<_> = (0..num_processes).map(|rank| (rank, num_processes)).collect();

    // test_can_initialize, with the number of the environment, test_static_rdzv_backend, test_c10d_rdzv_backend
    for options in [Default::default(), options.clone(), with_backend("static"), with_backend("c10d")] {
        let ranks = notebook_launcher(workers, basic_function, (), &options)?;
        ensure!(ranks == everywhere, "{options:?}: {ranks:?}");
    }
    test_clean_process(workers, &options)?;
    test_fault_tolerant(workers, &options)?;
    test_monitoring(workers, &options)?;
    test_problematic_imports(workers, &options)?;
    println!("test_notebook: all checks passed");
    Ok(())
}

/// `test_clean_cuda_fork`, for anything that is open.
fn test_clean_process(workers: &Workers, options: &NotebookLauncherOptions) -> Result<()> {
    let own = std::fs::File::open("/dev/zero")?;
    let open = notebook_launcher(workers, clean_process_function, (), options)?;
    drop(own);
    let unclean =
        open.iter().flatten().find(|target| target.starts_with("/dev/zero") || target.starts_with("/dev/nvidia"));
    ensure!(unclean.is_none(), "{unclean:?}");
    Ok(())
}

/// With as many restarts as the nut needs, and with fewer.
fn test_fault_tolerant(workers: &Workers, options: &NotebookLauncherOptions) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let queue = folder.path().join("queue");
    let crack = |max_restarts: usize| {
        std::fs::write(&queue, "3")?;
        let options = NotebookLauncherOptions { max_restarts, ..options.clone() };
        Ok::<_, anyhow::Error>(notebook_launcher(workers, tough_nut_function, queue.clone(), &options))
    };
    let num_restarts = crack(3)??;
    ensure!(num_restarts == vec![3; options.num_processes.unwrap_or(0)], "{num_restarts:?}");
    let error = crack(1)?.err().context("a nut that is not cracked")?;
    let text = error.to_string();
    let told =
        ["failed: after 1 restart: rank 0 (", "The nut hasn't cracked yet!", "every attempt failed in the same way"];
    ensure!(told.iter().all(|words| text.contains(words)) && error.failed_rank() == Some(0), "{text}");
    Ok(())
}

/// Nobody waits for a process that sleeps for ever.
fn test_monitoring(workers: &Workers, options: &NotebookLauncherOptions) -> Result<()> {
    let options = NotebookLauncherOptions { monitor_interval: Some(0.01), ..options.clone() };
    let error = notebook_launcher(workers, bipolar_sleep_function, (), &options).err().context("rank 0 fails")?;
    let rank = error.failed_rank().context("a rank failed")?;
    let text = error.to_string();
    ensure!(rank.is_multiple_of(2) && text.contains("I'm an even process. I don't like to sleep."), "{text}");
    Ok(())
}

/// Whatever was initialised before. Without a GPU only an accelerator can have been.
fn test_problematic_imports(workers: &Workers, options: &NotebookLauncherOptions) -> Result<()> {
    let state = PartialState::new(&Default::default())?;
    let launched = notebook_launcher(workers, basic_function, (), options);
    match launched {
        // A single process takes nothing away from this one.
        Ok(_) => ensure!(options.num_processes == Some(1), "launched beside an accelerator"),
        Err(error) => ensure!(error.is_launcher() && error.to_string().contains("inside of the function"), "{error}"),
    }
    drop(state);
    notebook_launcher(workers, basic_function, (), options)?;
    Ok(())
}
