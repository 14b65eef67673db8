//! What a notebook's kernel makes of a cell: a library with a function that it calls. `tests/launching.rs` loads it.

use accelerate::prelude::*;
use accelerate::{NotebookLauncherOptions, debug_launcher, notebook_launcher, workers};

fn train(steps: usize) -> accelerate::Result<Vec<usize>> {
    let accelerator = Accelerator::builder().build()?;
    accelerator.gather_object(&[steps + accelerator.process_index()])
}

fn fails(_: ()) -> accelerate::Result<()> {
    let accelerator = Accelerator::builder().build()?;
    accelerator.wait_for_everyone()?;
    if accelerator.process_index() == 1 {
        return Err(Error::other("row 3 has no label"));
    }
    loop {
        std::thread::park();
    }
}

fn cell() {
    let workers = workers![train, fails];
    println!("trained: {:?}", debug_launcher(&workers, train, 5, 2));
    println!("failed: {:?}", debug_launcher(&workers, fails, (), 2));
    let accelerator = Accelerator::builder().cpu(true).build();
    let options = NotebookLauncherOptions { num_processes: Some(2), ..Default::default() };
    println!("refused: {:?}", notebook_launcher(&workers, train, 5, &options));
    drop(accelerator);
}

/// The address of the function that a kernel finds as `run_cell`.
pub fn address() -> usize {
    accelerate::launchers::exported_function!(run_cell, cell)
}
