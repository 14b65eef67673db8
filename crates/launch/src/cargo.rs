//! Programs of the Cargo project around the working folder, found by name among what has been built.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use accelerate_core::settings::read_file;
use serde_json::Value;

use crate::error::Result;
use crate::program::{ProgramSearch, is_executable_file};
use crate::question::{Limits, ask};

/// The folders of builds in a target folder.
const PROFILES: [&str; 2] = ["release", "debug"];

/// A Cargo project: the working folder, or one around it, has a `Cargo.toml`.
#[derive(Debug)]
pub(crate) struct Project {
    /// Folders with a `Cargo.toml`, from the working folder upwards.
    folders: Vec<PathBuf>,
}

/// What Cargo says of a project.
#[derive(Debug)]
pub(crate) struct Metadata(Value);

/// A program that has been built.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Built {
    pub(crate) newest: PathBuf,
    /// The build of the other profile.
    pub(crate) older: Option<PathBuf>,
}

impl Project {
    pub(crate) fn around(search: &ProgramSearch) -> Option<Self> {
        let folders = search.working_folder.as_deref()?.ancestors();
        let folders: Vec<_> =
            folders.filter(|folder| folder.join("Cargo.toml").is_file()).map(Path::to_owned).collect();
        (!folders.is_empty()).then_some(Self { folders })
    }

    /// The newest build of `name`, as far as files alone tell: where a configuration of Cargo's says "target-dir", only Cargo
    /// knows what it means.
    pub(crate) fn built(&self, name: &OsStr, search: &ProgramSearch) -> Option<Built> {
        match &search.cargo_target_dir {
            Some(folder) => newest(&search.working_folder.as_deref()?.join(folder), name),
            None if self.is_configured(search) => None,
            // A member of a workspace is built into the folder of the workspace.
            None => self.folders.iter().find_map(|folder| newest(&folder.join("target"), name)),
        }
    }

    /// What Cargo says of the project; nothing is built or fetched for it. `None` where Cargo has nothing to say.
    ///
    /// # Errors
    ///
    /// Cargo does not answer.
    pub(crate) fn asked(&self, search: &ProgramSearch) -> Result<Option<Metadata>> {
        let (Some(cargo), Some(folder)) = (search.find("cargo".as_ref()), &search.working_folder) else {
            return Ok(None);
        };
        let mut command = Command::new(cargo);
        match &search.cargo_target_dir {
            Some(folder) => command.env("CARGO_TARGET_DIR", folder),
            None => command.env_remove("CARGO_TARGET_DIR"),
        };
        command.args(["metadata", "--no-deps", "--offline", "--format-version", "1"]).current_dir(folder);
        match ask(&mut command, Limits::default()) {
            Ok(answer) => Ok(serde_json::from_slice(&answer.stdout).ok().map(Metadata)),
            Err(error) if error.is_limit_passed() || error.is_interrupted() => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Does a configuration file of Cargo's, here or above, speak of a target folder?
    fn is_configured(&self, search: &ProgramSearch) -> bool {
        let folders = search.working_folder.iter().flat_map(|folder| folder.ancestors());
        let mut files =
            folders.flat_map(|folder| ["config.toml", "config"].map(|name| folder.join(".cargo").join(name)));
        // A pipe in its place would never end.
        files.any(|file| read_file(&file).is_ok_and(|text| text.contains("target-dir")))
    }
}

fn newest(target: &Path, name: &OsStr) -> Option<Built> {
    let candidates = PROFILES.iter().map(|profile| target.join(profile).join(name));
    let mut files: Vec<(SystemTime, PathBuf)> = candidates
        .filter(|file| is_executable_file(file))
        .filter_map(|file| Some((file.metadata().ok()?.modified().ok()?, file)))
        .collect();
    // Of the same age, the first: sorting keeps their order.
    files.sort_by_key(|(modified, _)| std::cmp::Reverse(*modified));
    let mut files = files.into_iter().map(|(_, file)| file);
    Some(Built { newest: files.next()?, older: files.next() })
}

impl Metadata {
    /// The newest build of `name`.
    pub(crate) fn built(&self, name: &OsStr) -> Option<Built> {
        newest(Path::new(self.0.get("target_directory")?.as_str()?), name)
    }

    /// The package that has a program of this name, built or not.
    pub(crate) fn package_with(&self, name: &OsStr) -> Option<&str> {
        let is_program = |target: &Value| {
            let kinds = target.get("kind").and_then(Value::as_array);
            let is_bin = kinds.is_some_and(|kinds| kinds.iter().any(|kind| kind == "bin"));
            is_bin && target.get("name").and_then(Value::as_str).is_some_and(|known| name == known)
        };
        let has_program = |package: &&Value| {
            package.get("targets").and_then(Value::as_array).is_some_and(|targets| targets.iter().any(is_program))
        };
        self.0.get("packages")?.as_array()?.iter().find(has_program)?.get("name")?.as_str()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    /// An executable file, `age` seconds old.
    fn program(path: &Path, age: u64) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "#!/bin/sh\n").unwrap();
        fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
        let file = fs::File::options().write(true).open(path).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 - age)).unwrap();
    }

    fn package(folder: &Path) -> ProgramSearch {
        fs::create_dir_all(folder.join("src")).unwrap();
        fs::write(folder.join("Cargo.toml"), "[package]\nname = \"demo\"\nversion = \"0.1.0\"\n[workspace]\n").unwrap();
        fs::write(folder.join("src/main.rs"), "fn main() {}\n").unwrap();
        ProgramSearch { path: std::env::var_os("PATH"), working_folder: Some(folder.to_owned()), ..Default::default() }
    }

    #[test]
    fn the_newest_build_is_taken() {
        let root = tempfile::tempdir().unwrap();
        let search = package(root.path());
        let project = Project::around(&search).unwrap();
        let [release, debug] = PROFILES.map(|profile| root.path().join("target").join(profile).join("demo"));
        let asked = project.asked(&search).unwrap().unwrap();
        assert_eq!(project.built("demo".as_ref(), &search), None);
        assert_eq!(asked.built("demo".as_ref()), None);
        assert_eq!(asked.package_with("demo".as_ref()), Some("demo"));
        assert_eq!(asked.package_with("demos".as_ref()), None);
        program(&debug, 5);
        assert_eq!(project.built("demo".as_ref(), &search), Some(Built { newest: debug.clone(), older: None }));
        for (age, newest, older) in [(9, &debug, &release), (2, &release, &debug), (5, &release, &debug)] {
            program(&release, age);
            let wanted = Built { newest: newest.clone(), older: Some(older.clone()) };
            assert_eq!(project.built("demo".as_ref(), &search), Some(wanted), "{age}");
        }
    }

    /// From a folder within the project, and where builds go elsewhere.
    #[test]
    fn the_target_folder_is_cargos() {
        let root = tempfile::tempdir().unwrap();
        let mut search = package(root.path());
        search.working_folder = Some(root.path().join("src"));
        program(&root.path().join("target/debug/demo"), 1);
        let found = |search: &ProgramSearch| {
            let project = Project::around(search).unwrap();
            let asked = || project.asked(search).unwrap().unwrap().built("demo".as_ref());
            project.built("demo".as_ref(), search).or_else(asked).map(|built| built.newest)
        };
        assert_eq!(found(&search), Some(root.path().join("target/debug/demo")));

        let elsewhere = root.path().join("elsewhere/release/demo");
        program(&elsewhere, 1);
        fs::create_dir(root.path().join(".cargo")).unwrap();
        fs::write(root.path().join(".cargo/config.toml"), "[build]\ntarget-dir = \"elsewhere\"\n").unwrap();
        assert_eq!(found(&search), Some(elsewhere));

        search.cargo_target_dir = Some(root.path().join("third"));
        program(&root.path().join("third/release/demo"), 1);
        assert_eq!(found(&search), Some(root.path().join("third/release/demo")));
    }

    #[test]
    fn a_folder_outside_of_projects_has_none() {
        let root = tempfile::tempdir().unwrap();
        let search = ProgramSearch { working_folder: Some(root.path().to_owned()), ..Default::default() };
        assert!(Project::around(&search).is_none());
        fs::write(root.path().join("Cargo.toml"), "nonsense = [").unwrap();
        let search = ProgramSearch { path: std::env::var_os("PATH"), ..search };
        let project = Project::around(&search).unwrap();
        assert!(project.asked(&search).unwrap().is_none());
    }
}
