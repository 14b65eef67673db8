//! `test_utils/scripts/test_notebook.py`: launching functions from a program, in as many processes as
//! `ACCELERATE_NUM_PROCESSES` says.

use accelerate::{NotebookLauncherOptions, PartialState, Workers, notebook_launcher, workers};
use anyhow::{Context, Result, bail, ensure};

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
    loop {
        std::thread::park();
    }
}

/// Fails until it has been started often enough.
fn tough_nut_function(trials: usize) -> accelerate::Result<usize> {
    let state = PartialState::new(&Default::default())?;
    let attempt: usize =
        std::env::var("TORCHELASTIC_RESTART_COUNT").ok().and_then(|count| count.parse().ok()).unwrap_or(0);
    if attempt < trials {
        return Err(accelerate::Error::other("The nut hasn't cracked yet! Try again."));
    }
    state.group().barrier()?;
    Ok(attempt)
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

fn test_fault_tolerant(workers: &Workers, options: &NotebookLauncherOptions) -> Result<()> {
    let options = NotebookLauncherOptions { max_restarts: 3, ..options.clone() };
    let Err(error) = notebook_launcher(workers, tough_nut_function, 3, &options) else { bail!("restarted") };
    ensure!(error.to_string().contains("max_restarts"), "{error}");
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
