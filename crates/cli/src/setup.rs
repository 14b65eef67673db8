//! `accelerate setup`: libtorch, found or installed, and made known to a project.

use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use accelerate_setup::{CargoConfig, Libtorch, Needs, Origin, VERSION};
use clap::Args;

use crate::new::library;

use accelerate_core::files::ShownPath;

/// Find or install libtorch, and let cargo find it in a project.
///
/// Looks at the variable LIBTORCH, then at the torch of the active Python, then at your cache folder, which pip fills
/// once: it downloads 0.5 GB, and goes on where it stopped when it is run again. The version is checked; it is the one
/// that this project is built for.
///
/// What was found is linked as .libtorch at the root of the project, and one line in its .cargo/config.toml tells cargo
/// so. The rest of that file stays as it is. A second run changes nothing. Outside of a project, libtorch is installed
/// and nothing is written. What else the package needs to be built on the library, and does not have, is said at the end.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    accelerate setup                       # the project of the current folder\n  \
    accelerate setup --folder my_project\n  \
    LIBTORCH=/opt/libtorch accelerate setup")]
pub(crate) struct Arguments {
    /// The project, or a folder in it, in place of the current folder
    #[arg(long, value_name = "PROJECT")]
    folder: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
#[error(
    "{} is in no project: neither it nor a folder above has a Cargo.toml; name the folder of a project, or make one by \
     `accelerate new`", folder.shown()
)]
struct NoProject {
    folder: PathBuf,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let here = std::env::current_dir()?;
    let folder = arguments.folder.as_deref().unwrap_or(&here);
    let text = match (accelerate_setup::project_root(folder), &arguments.folder) {
        (Some(root), _) => set_up(&root)? + &accelerate_setup::needs(folder).map_or_else(String::new, still_to_do),
        (None, Some(folder)) => return Err(NoProject { folder: folder.clone() }.into()),
        (None, None) => {
            let found = described(&accelerate_setup::ensure_installed()?);
            format!(
                "{found}\nThere is no project here to tell of it: run this in one, or make one by `accelerate new`.\n"
            )
        }
    };
    Ok(crate::print_result(&text)?)
}

/// Links libtorch in the project and tells cargo; says what was found and what was written.
fn set_up(root: &Path) -> Result<String, accelerate_setup::Error> {
    // A folder that the author of the project chose is checked, and left in force.
    let found = match accelerate_setup::find(root)? {
        Some(found) if found.origin == Origin::CargoConfig => found,
        _ => accelerate_setup::ensure(root)?,
    };
    let (path, done) = accelerate_setup::write_cargo_config(root)?;
    let path = path.shown();
    let written = match done {
        CargoConfig::Created => format!("Wrote {path}: cargo finds it in this project."),
        CargoConfig::Extended => format!("Added LIBTORCH to {path}: cargo finds it in this project."),
        CargoConfig::Unchanged => format!("{path} names it already."),
        CargoConfig::NamesAnother => format!("{path} names a folder of your own, which stays in force."),
    };
    Ok(format!("{}\n{written}\n", described(&found)))
}

/// What the package does not have yet, as it is to be written.
fn still_to_do(needs: Needs) -> String {
    let mut text = String::new();
    let package = needs.package.shown();
    // Writing to a string cannot fail.
    if needs.dependency {
        let library = library::beside_this_command().unwrap_or_else(|| "PATH/crates/accelerate".to_owned());
        let path = serde_json::json!(library);
        let _ = writeln!(
            text,
            "\n{package}/Cargo.toml does not name the library yet. Add to [dependencies]:\n\n    \
             accelerate = {{ package = \"accelerate-rs\", path = {path} }}"
        );
    }
    if needs.build_script {
        let _ =
            writeln!(text, "\n{package} has no build.rs that lets programs find libtorch when they run. Make it:\n");
        for line in library::BUILD_SCRIPT.lines() {
            let _ = writeln!(text, "    {line}");
        }
    }
    text
}

pub(crate) fn described(found: &Libtorch) -> String {
    format!("libtorch {VERSION} in {} ({})", found.folder.shown(), found.origin)
}
