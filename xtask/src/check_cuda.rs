//! Placeholder.
use anyhow::Result;
use clap::Args;
#[derive(Debug, Args)]
pub(crate) struct Arguments {}
pub(crate) fn run(_: &Arguments) -> Result<()> {
    Ok(())
}
