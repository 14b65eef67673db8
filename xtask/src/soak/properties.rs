//! `cargo xtask soak properties`: the tests of properties with other inputs than those of the suite.

use anyhow::{Result, bail};
use clap::Args;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::process;

/// Where tests of properties are that need no libtorch.
const PACKAGES: [&str; 2] = ["accelerate-core", "accelerate-rendezvous"];

/// What the tests read their seed from. In `.cargo/config.toml` stands the one of the suite.
const SEED: &str = "PROPTEST_RNG_SEED";

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// How often to run all of them
    #[arg(long, default_value_t = 20)]
    rounds: u64,
    /// The seed of the first round; those after it count on. By default one of the time of day
    #[arg(long)]
    seed: Option<u64>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let first = arguments.seed.unwrap_or_else(now);
    for round in 0..arguments.rounds {
        let seed = first.wrapping_add(round);
        let mut tests = process::cargo(&["test", "--quiet", "--no-fail-fast", "--tests"]);
        tests.args(PACKAGES.iter().flat_map(|name| ["--package", name])).env(SEED, seed.to_string());
        if let Err(error) = process::run(&mut tests) {
            bail!("{error}. Once more: cargo xtask soak properties --rounds 1 --seed {seed}");
        }
    }
    println!("{} rounds from seed {first}: no property was broken", arguments.rounds);
    Ok(())
}
