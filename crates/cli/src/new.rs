//! `accelerate new`: a project that trains a small model, to begin with.

mod error;
mod template;

use std::error::Error;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use crate::setup;
use error::NewError;
use template::{Source, Template};

/// Where this command was built, and with it the library beside it.
const BUILT_BESIDE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../accelerate");

/// Make a project of your own that builds at once and trains a small model.
///
/// It has the training loop of the quick tour, a model, data that it generates, and a test that the loss falls. libtorch is
/// found or installed as by `accelerate setup`, so that `cargo test` works in it without any variable.
///
/// The project depends on the library by the path of the clone that this command was built from, if that is still there,
/// and else by version; it says which. --accelerate names another clone.
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
    let folder = path.clone().unwrap_or_else(|| PathBuf::from(name));
    check_is_free(&folder)?;
    let source = source(accelerate.as_deref())?;
    let folder = std::path::absolute(&folder)?;
    let is_in_workspace = folder.parent().is_some_and(|parent| accelerate_setup::project_root(parent).is_some());
    for file in template.files(name, &source, is_in_workspace) {
        write(&folder.join(file.path), &file.text)?;
    }
    let template = template.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
    let mut out = io::stdout().lock();
    writeln!(out, "Made the project {name} (template {template}) in {}", folder.display())?;
    writeln!(out, "It depends on accelerate {source}.")?;
    out.flush()?;
    writeln!(out, "{}", setup::set_up(&folder)?)?;
    let shown = path.as_deref().unwrap_or(Path::new(name)).display();
    writeln!(out, "\nNext:\n  cd {shown}\n  cargo test\n  accelerate launch --num_processes 2 {name}")?;
    Ok(())
}

/// Nothing of the user's is ever written over.
fn check_is_free(folder: &Path) -> Result<(), NewError> {
    let in_the_way = |found| NewError::NotEmpty { folder: folder.to_path_buf(), found };
    let Ok(found) = fs::symlink_metadata(folder) else { return Ok(()) };
    if !folder.is_dir() {
        return Err(in_the_way(if found.is_symlink() { "a link to no folder" } else { "a file" }));
    }
    let mut entries = fs::read_dir(folder).map_err(|source| NewError::io("read", folder, source))?;
    if entries.next().is_some() { Err(in_the_way("a folder with files")) } else { Ok(()) }
}

/// The library to depend on: the clone that is named, the clone that this command was built from, or a version.
fn source(named: Option<&Path>) -> Result<Source, NewError> {
    let Some(named) = named else {
        let beside = Path::new(BUILT_BESIDE);
        return Ok(library_in(beside).map_or(Source::Version, |path| Source::BuiltFrom { path }));
    };
    let path = library_in(named).or_else(|| library_in(&named.join("crates/accelerate")));
    path.map(|path| Source::Named { path }).ok_or_else(|| NewError::NoLibrary { path: named.to_path_buf() })
}

/// The folder, if the package of the library is in it and its path can be written into a manifest.
fn library_in(folder: &Path) -> Option<String> {
    let manifest = fs::read_to_string(folder.join("Cargo.toml")).ok()?;
    let is_library = manifest.lines().any(|line| line.trim() == "name = \"accelerate-rs\"");
    let path = fs::canonicalize(folder).ok()?;
    if is_library { path.to_str().map(str::to_owned) } else { None }
}

fn write(path: &Path, text: &str) -> Result<(), NewError> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(|source| NewError::io("create", folder, source))?;
    }
    fs::write(path, text).map_err(|source| NewError::io("write", path, source))
}
