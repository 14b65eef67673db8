//! `accelerate man`: the manual pages, from the same definition as flags and help.

use std::error::Error;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::builder::Resettable;
use clap::{Args, Command, CommandFactory};
use clap_mangen::Man;

use crate::{examples, launch};

use accelerate_core::files::ShownPath;

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
            folder.shown()
        )
    };
    fs::create_dir_all(folder).map_err(explain)?;
    write(folder).map_err(explain)?;
    crate::print_message(&format!("accelerate man: wrote the manual pages into {}", folder.shown()));
    Ok(())
}

/// Each page appears whole or not at all, and takes the place of a link in place of following it.
fn write(folder: &Path) -> io::Result<()> {
    let beside = tempfile::tempdir_in(folder)?;
    let mut command = launch::help::with_all(crate::Cli::command()).disable_help_subcommand(true);
    command.build();
    write_pages(&command, beside.path())?;
    for page in fs::read_dir(beside.path())? {
        let page = page?;
        fs::rename(page.path(), folder.join(page.file_name()))?;
    }
    Ok(())
}

/// A page for the command, and one for each below it. What follows help is set here, line by line.
fn write_pages(command: &Command, folder: &Path) -> io::Result<()> {
    let after = command.get_after_long_help().or_else(|| command.get_after_help());
    let after = after.map(|text| examples::as_roff(&text.to_string()));
    let page = Man::new(command.clone().after_help(Resettable::Reset).after_long_help(Resettable::Reset));
    let mut text = Vec::new();
    page.render(&mut text)?;
    text.extend(after.unwrap_or_default().into_bytes());
    fs::write(folder.join(page.get_filename()), text)?;
    command.get_subcommands().filter(|below| !below.is_hide_set()).try_for_each(|below| write_pages(below, folder))
}
