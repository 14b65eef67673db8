//! What the worker processes run.

use accelerate::{Accelerator, Error, PartialState, Result, Workers, debug_launcher, workers};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::process::Command;

/// Of this program. In a worker process it does not return.
pub(crate) fn registered() -> Workers {
    workers![
        basic,
        sums,
        fails,
        panics,
        exits,
        sleeps,
        nested,
        starts_program,
        unreadable,
        precision,
        prefixed,
        twice,
        twice,
        input,
        answers_once
    ]
}

pub(crate) fn basic(_: ()) -> Result<()> {
    PartialState::new(&Default::default())?.group().barrier()
}

/// Each rank adds its own number to what it was given, and all add up.
pub(crate) fn sums(numbers: Vec<f64>) -> Result<(usize, Vec<f64>)> {
    let accelerator = Accelerator::builder().build()?;
    let rank = accelerator.process_index();
    let ranks = accelerator.gather_object(&[rank])?;
    let all: usize = ranks.iter().sum();
    Ok((rank, numbers.iter().map(|number| number + all as f64).collect()))
}

pub(crate) fn fails(failing: usize) -> Result<()> {
    let accelerator = Accelerator::builder().build()?;
    accelerator.wait_for_everyone()?;
    if accelerator.process_index() == failing {
        return Err(Error::other("row 3 has no label"));
    }
    wait_for_ever()
}

/// What others do while one fails by itself. None of them may miss it, and fail as well.
fn wait_for_ever() -> ! {
    loop {
        std::thread::park();
    }
}

/// The panic is what it is for.
#[allow(clippy::panic)]
pub(crate) fn panics(_: ()) -> Result<()> {
    let accelerator = Accelerator::builder().build()?;
    accelerator.wait_for_everyone()?;
    if accelerator.process_index() == 0 {
        panic!("a panic of the function");
    }
    wait_for_ever()
}

pub(crate) fn exits(_: ()) -> Result<()> {
    std::process::exit(0)
}

pub(crate) fn unregistered(_: ()) -> Result<()> {
    Ok(())
}

pub(crate) fn twice(_: ()) -> Result<()> {
    Ok(())
}

/// Its bytes are no value of it.
#[derive(Serialize)]
pub(crate) struct Unreadable;

impl<'de> Deserialize<'de> for Unreadable {
    fn deserialize<D: Deserializer<'de>>(_: D) -> std::result::Result<Self, D::Error> {
        Err(D::Error::custom("a table is wanted"))
    }
}

pub(crate) fn unreadable(_: Unreadable) -> Result<()> {
    Ok(())
}

/// Says its process and a child's, and waits for what does not come.
pub(crate) fn sleeps(_: ()) -> Result<()> {
    let child = Command::new("sleep").arg("1000").spawn().map_err(Error::other)?;
    println!("started {} {}", std::process::id(), child.id());
    let accelerator = Accelerator::builder().build()?;
    if accelerator.is_main_process() {
        wait_for_ever();
    }
    accelerator.wait_for_everyone()
}

/// The error of a launch inside a worker process.
pub(crate) fn nested(_: ()) -> Result<String> {
    let workers = registered();
    let error = debug_launcher(&workers, basic, (), 2).err();
    Ok(error.map(|error| error.to_string()).unwrap_or_default())
}

/// A worker process may start other programs, which launch as programs do.
pub(crate) fn starts_program(_: ()) -> Result<String> {
    let program = std::env::current_exe().map_err(Error::other)?;
    let output = Command::new(program).arg("sums").output().map_err(Error::other)?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr))
}

pub(crate) fn precision(_: ()) -> Result<String> {
    let accelerator = Accelerator::builder().build()?;
    accelerator.wait_for_everyone()?;
    Ok(accelerator.mixed_precision().to_string())
}

pub(crate) fn prefixed(_: ()) -> Result<()> {
    println!("a line");
    Ok(())
}

pub(crate) fn input(_: ()) -> Result<usize> {
    std::io::stdin().read_to_end(&mut Vec::new()).map_err(Error::other)
}

/// In the first attempt rank 0 returns, and rank 1 fails after that. In the second one rank 0 ends without a result.
pub(crate) fn answers_once(lock: PathBuf) -> Result<usize> {
    let accelerator = Accelerator::builder().build()?;
    let is_first_attempt = accelerator.restart_count()? == 0;
    let file = File::open(lock).map_err(Error::other)?;
    if accelerator.is_main_process() {
        file.lock().map_err(Error::other)?;
        // Only its end opens it again.
        std::mem::forget(file);
        accelerator.wait_for_everyone()?;
        if !is_first_attempt {
            std::process::exit(0);
        }
        return Ok(0);
    }
    accelerator.wait_for_everyone()?;
    file.lock().map_err(Error::other)?;
    if is_first_attempt { Err(Error::other("the first attempt fails")) } else { Ok(1) }
}
