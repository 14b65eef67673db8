//! `accelerate man`: the manual pages, from the same definition as flags and help.

use std::error::Error;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory};

/// Write the manual pages: one for the command, and one for each of its subcommands.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    accelerate man --out ~/.local/share/man/man1 && man accelerate-launch")]
pub(crate) struct Arguments {
    /// The folder to write into. It is made if it does not exist.
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let folder = &arguments.out;
    let explain = |error| {
        format!(
            "the manual pages cannot be written into {}: {error}; name a folder that you can write to",
            folder.display()
        )
    };
    fs::create_dir_all(folder).map_err(explain)?;
    write(folder).map_err(explain)?;
    crate::print_message(&format!("wrote the manual pages into {}", folder.display()));
    Ok(())
}

/// Each page appears whole or not at all, and takes the place of a link in place of following it.
fn write(folder: &Path) -> io::Result<()> {
    let beside = tempfile::tempdir_in(folder)?;
    clap_mangen::generate_to(crate::Cli::command(), beside.path())?;
    for page in fs::read_dir(beside.path())? {
        let page = page?;
        fs::rename(page.path(), folder.join(page.file_name()))?;
    }
    Ok(())
}
