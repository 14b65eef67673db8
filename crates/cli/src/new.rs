//! `accelerate new`: a project that trains a small model, to begin with.

mod error;
pub(crate) mod library;
mod place;
mod template;

use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

use accelerate_setup::project_root;
use clap::{Args, ValueEnum};

use crate::{setup, shell_command};
use error::NewError;
use place::Place;
use template::Template;

use accelerate_core::files::ShownPath;

/// Make a project of your own that builds at once and trains a small model.
///
/// It has the training loop of the quick tour, a model, data that it generates, and a test that the loss falls. libtorch is
/// found or installed as by `accelerate setup`, so that `cargo test` works in it without any variable. The folder appears
/// when all is there: after an error there is none.
///
/// The project depends on the library by the path of the clone that this command was built from. The library is not on
/// crates.io yet, so where that clone is gone --accelerate has to name another one.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    accelerate new demo\n  \
    accelerate new demo --template lm --path projects/demo\n  \
    accelerate new demo --accelerate ~/accelerate")]
pub(crate) struct Arguments {
    /// The name of the package, and of its folder if --path names no other
    name: String,
    /// What the project trains
    #[arg(long, value_enum, default_value_t = Template::Nlp)]
    template: Template,
    /// The folder of the project, which must be new or empty
    #[arg(long, value_name = "DIR")]
    path: Option<PathBuf>,
    /// A clone of the library to depend on by its path
    #[arg(long, value_name = "PATH")]
    accelerate: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let Arguments { name, template, path, accelerate } = arguments;
    error::check_name(name)?;
    let shown = path.as_deref().unwrap_or(Path::new(name));
    let place = Place::find(shown)?;
    let source = library::find(accelerate.as_deref())?;
    // The last thing that can be wrong, before anything is written.
    let libtorch = accelerate_setup::ensure_installed()?;
    let parent = place.folder().parent();
    let files = template.files(name, &source, parent.is_some_and(|parent| project_root(parent).is_some()));
    place.fill(|folder| {
        for file in &files {
            write(&folder.join(file.path), &file.text)?;
        }
        accelerate_setup::link(folder, &libtorch)?;
        accelerate_setup::write_cargo_config(folder)?;
        Ok(())
    })?;
    let template = template.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
    let cd = shell_command([OsStr::new("cd"), &argument(shown)].into_iter());
    crate::print_result(&format!(
        "Made the project {name} (template {template}) in {}\n\
         It depends on accelerate {source}.\n\
         It is built with {}.\n\n\
         Next:\n  {cd}\n  cargo test\n  accelerate launch --num_processes 2 {name}\n",
        place.folder().shown(),
        setup::described(&libtorch)
    ))?;
    Ok(())
}

/// The folder as a program takes it for one: what begins with `-` would be taken for a flag.
fn argument(folder: &Path) -> OsString {
    let is_flag = folder.as_os_str().as_encoded_bytes().starts_with(b"-");
    if is_flag { Path::new(".").join(folder).into() } else { folder.into() }
}

fn write(path: &Path, text: &str) -> Result<(), NewError> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(|source| NewError::io("create", folder, source))?;
    }
    fs::write(path, text).map_err(|source| NewError::io("write", path, source))
}
