//! A rank that does nothing but say that it ran: our half of the race `launch_noop`.
//!
//! It does not link libtorch, as the rival's half does not import torch: the launchers race.

use anyhow::{Context, Result};

fn main() -> Result<()> {
    let variable =
        |name: &str| std::env::var(name).with_context(|| format!("{name} is not set; start this by a launcher"));
    println!("rank={} world_size={}", variable("RANK")?, variable("WORLD_SIZE")?);
    Ok(())
}
