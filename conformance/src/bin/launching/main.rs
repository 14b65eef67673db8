//! A program that launches its own functions, in every way that a program can get wrong. The word that it is given says which.

// What `workers!` expands to is none of the program's business.
#![forbid(unsafe_code)]

mod functions;

use accelerate::{Accelerator, NotebookLauncherOptions, PartialState, Workers, debug_launcher, notebook_launcher};
use anyhow::{Context, Result, bail};
use functions::*;

fn main() -> Result<()> {
    let case = std::env::args().nth(1).context("which case?")?;
    if case == "unreached" && std::env::var_os("ACCELERATE_WORKER_CALL").is_some() {
        return Ok(());
    }
    let workers = registered();
    // A worker process that came here would launch again.
    println!("main of process {}", std::process::id());
    run(&workers, &case)
}

fn on(num_processes: usize) -> NotebookLauncherOptions {
    NotebookLauncherOptions { num_processes: Some(num_processes), ..Default::default() }
}

fn run(workers: &Workers, case: &str) -> Result<()> {
    match case {
        "sums" => {
            for num_processes in 1..=3 {
                let sums = debug_launcher(workers, sums, vec![1.5, -2.5], num_processes)?;
                println!("sums: {sums:?}");
            }
        }
        "fails" => drop(debug_launcher(workers, fails, 1, 3)?),
        "panics" => drop(debug_launcher(workers, panics, (), 2)?),
        "unreached" => drop(debug_launcher(workers, basic, (), 2)?),
        "exits" => drop(debug_launcher(workers, exits, (), 2)?),
        "unregistered" => drop(debug_launcher(workers, functions::unregistered, (), 2)?),
        "twice" => drop(debug_launcher(workers, twice, (), 2)?),
        "unreadable" => drop(debug_launcher(workers, unreadable, Unreadable, 2)?),
        "nested" => println!("nested: {:?}", debug_launcher(workers, nested, (), 1)?),
        "starts_program" => println!("inner: {:?}", debug_launcher(workers, starts_program, (), 1)?),
        "sleeps" => drop(debug_launcher(workers, sleeps, (), 2)?),
        "no_processes" => drop(notebook_launcher(workers, basic, (), &on(0))?),
        "unsaid_processes" => drop(notebook_launcher(workers, basic, (), &Default::default())?),
        "accelerator" => {
            let accelerator = Accelerator::builder().cpu(true).build()?;
            // A single process takes nothing away.
            notebook_launcher(workers, basic, (), &on(1))?;
            let refused = notebook_launcher(workers, basic, (), &on(2)).err().context("an accelerator is there")?;
            debug_launcher(workers, basic, (), 2)?;
            drop(accelerator);
            let states = [PartialState::new(&Default::default())?, PartialState::new(&Default::default())?];
            let other = notebook_launcher(workers, basic, (), &on(2)).err().context("two states are there")?;
            drop(states);
            notebook_launcher(workers, basic, (), &on(2))?;
            bail!("{refused}\n{other}");
        }
        "precision" => {
            let options = NotebookLauncherOptions { mixed_precision: Some(accelerate::MixedPrecision::Bf16), ..on(2) };
            println!("precision: {:?}", notebook_launcher(workers, precision, (), &options)?);
            println!("precision: {:?}", debug_launcher(workers, precision, (), 2)?);
        }
        "prefixed" => {
            let template = Some("<${role_name} ${local_rank}> ".to_owned());
            let options = NotebookLauncherOptions { log_line_prefix_template: template, ..on(2) };
            notebook_launcher(workers, prefixed, (), &options)?;
        }
        "answers_once" => {
            let lock = tempfile::NamedTempFile::new()?;
            let options = NotebookLauncherOptions { max_restarts: 1, ..on(2) };
            drop(notebook_launcher(workers, answers_once, lock.path().to_owned(), &options)?);
        }
        "input" => println!("input: {:?}", debug_launcher(workers, input, (), 2)?),
        other => bail!("no case {other}"),
    }
    Ok(())
}
