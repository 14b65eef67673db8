//! A rank that is killed in its loop, and comes back: our half of the race `launch_restart`.

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use accelerate::tch::Tensor;
use accelerate::{Accelerator, ReduceOp, Result};
use rustix::process::{Signal, getpid, kill_process};

const NUM_STEPS: usize = 10;

fn main() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).build()?;
    let (rank, restart) = (accelerator.process_index(), accelerator.restart_count()?);
    let one = Tensor::f_from_slice(&[1.0_f32])?;
    let mut sum = 0.0;
    for step in 0..NUM_STEPS {
        sum += accelerator.reduce(&one, ReduceOp::Sum)?.f_double_value(&[0])?;
        if step == 0 {
            say(&format!("in_loop rank={rank} restart={restart} at={}", now()));
        }
    }
    if restart == 0 && rank == 1 {
        say(&format!("killed at={}", now()));
        // Nothing after this line runs.
        let _ = kill_process(getpid(), Signal::KILL);
    }
    if restart == 0 {
        // The other rank is not there any more, so this is an error.
        accelerator.reduce(&one, ReduceOp::Sum)?.f_double_value(&[0])?;
    }
    say(&format!("done rank={rank} sum={sum:?}"));
    Ok(())
}

/// Seconds, by the clock that all processes of a machine share.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn say(line: &str) {
    let mut output = std::io::stdout().lock();
    // Nobody reads it: the race is void, and says so.
    let _ = writeln!(output, "{line}").and_then(|()| output.flush());
}
