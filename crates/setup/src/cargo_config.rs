//! The `.cargo/config.toml` of a project, which tells cargo where libtorch is.
//!
//! One line is ours, `env.LIBTORCH`. Whatever else stands in the file stays as it is, comments included.

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use accelerate_core::files::ShownPath;
use accelerate_core::settings::{read_file, shortened};
use toml_edit::{DocumentMut, InlineTable, Item, Table, TableLike, Value};

use super::LINKS;
use super::error::{Result, SetupError};

/// What an error says of a folder that the file names.
pub(crate) const WHO: &str = "the project's cargo configuration (env.LIBTORCH) points at";

/// The kernel takes no longer path, and an error does not show one.
const MOST_PATH_BYTES: usize = 4096;

/// What [`write_cargo_config`](super::write_cargo_config) did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CargoConfig {
    /// There was no file.
    Created,
    /// A line was added to the file that was there.
    Extended,
    /// The line was there.
    Unchanged,
    /// The file names another folder, which its author chose. It was left alone.
    NamesAnother,
}

/// Lets cargo find `.libtorch` in every build of the project at `root`.
///
/// A folder that the file names already is left in force. The line is relative, so the file can be given to others.
pub(crate) fn write(root: &Path) -> Result<(PathBuf, CargoConfig)> {
    let path = path(root);
    let text = read(&path)?;
    let mut document = parse(&path, text.as_deref().unwrap_or_default())?;
    let env = document.entry("env").or_insert(Item::Table(Table::new()));
    let env = env.as_table_like_mut().ok_or_else(|| wrong(&path, "`env` is no table"))?;
    match folder_in(env, root) {
        Some(folder) if folder == root.join(LINKS) => return Ok((path, CargoConfig::Unchanged)),
        Some(_) => return Ok((path, CargoConfig::NamesAnother)),
        None => {}
    }
    let mut line = InlineTable::new();
    line.insert("value", Value::from(LINKS));
    line.insert("relative", Value::from(true));
    // A variable that somebody's shell sets is looked at here, once. In each build it could lead nowhere, or to another
    // version, and libtorch's bindings would be compiled again, which takes minutes.
    line.insert("force", Value::from(true));
    env.insert("LIBTORCH", Item::Value(Value::InlineTable(line)));
    if text.is_none() {
        let comment =
            "# `accelerate setup` fills this folder with links to libtorch: to that of LIBTORCH, if it is set then.\n";
        document.decor_mut().set_prefix(comment);
    }
    replace(&path, &document.to_string())?;
    Ok((path, if text.is_none() { CargoConfig::Created } else { CargoConfig::Extended }))
}

/// The folder that a configuration names for builds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) folder: PathBuf,
    /// Whatever the variable says.
    pub(crate) is_forced: bool,
}

/// What the configuration names.
pub(crate) fn named(root: &Path) -> Result<Option<Named>> {
    let path = path(root);
    let document = parse(&path, &read(&path)?.unwrap_or_default())?;
    let Some(env) = document.get("env").and_then(Item::as_table_like) else { return Ok(None) };
    let force = env.get("LIBTORCH").and_then(|item| item.as_table_like()?.get("force")?.as_bool());
    let folder = folder_in(env, root);
    if folder.as_ref().is_some_and(|folder| folder.as_os_str().len() > MOST_PATH_BYTES) {
        return Err(wrong(&path, "the folder in env.LIBTORCH is longer than any path"));
    }
    Ok(folder.map(|folder| Named { folder, is_forced: force.unwrap_or_default() }))
}

/// Cargo prefers the old name without an ending where both are there.
fn path(root: &Path) -> PathBuf {
    let old = root.join(".cargo/config");
    if old.exists() { old } else { root.join(".cargo/config.toml") }
}

/// `LIBTORCH = "folder"`, or a table with `value` and `relative`.
fn folder_in(env: &dyn TableLike, root: &Path) -> Option<PathBuf> {
    let item = env.get("LIBTORCH")?;
    if let Some(folder) = item.as_str() {
        return Some(PathBuf::from(folder));
    }
    let table = item.as_table_like()?;
    let folder = table.get("value")?.as_str()?;
    let is_relative = table.get("relative").and_then(Item::as_bool).unwrap_or_default();
    Some(if is_relative { root.join(folder) } else { PathBuf::from(folder) })
}

/// The text, or `None` where there is no file.
fn read(path: &Path) -> Result<Option<String>> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(SetupError::io("read", path, source)),
    };
    match read_file(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if found.is_symlink() && error.kind() == ErrorKind::NotFound => {
            let target = fs::read_link(path).map(|target| target.shown()).unwrap_or_default();
            Err(wrong(path, &format!("it is a link to `{}`, which is not there", shortened(&target))))
        }
        Err(error) => Err(wrong(path, &error.to_string())),
    }
}

/// Without the line of the file, which may be long and hold a token.
fn parse(path: &Path, text: &str) -> Result<DocumentMut> {
    text.parse::<DocumentMut>().map_err(|error| wrong(path, error.message()))
}

fn wrong(path: &Path, problem: &str) -> SetupError {
    SetupError::CargoConfig { path: path.to_path_buf(), problem: problem.to_owned() }
}

/// The new text takes the place of the old one in one step: a full disk leaves the old one.
fn replace(path: &Path, text: &str) -> Result<()> {
    // Where the file is a link, what it leads to is replaced.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(|source| SetupError::io("create", folder, source))?;
    }
    let fresh = path.with_added_extension(format!("new-{}", std::process::id()));
    let permissions = fs::metadata(&path).ok().map(|found| found.permissions());
    // Made anew: nobody can put a link there beforehand.
    let written = fs::File::create_new(&fresh).and_then(|mut file| {
        permissions.map_or(Ok(()), |permissions| file.set_permissions(permissions))?;
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    let outcome = written.and_then(|()| fs::rename(&fresh, &path));
    outcome.map_err(|source| {
        let _ = fs::remove_file(&fresh);
        SetupError::io("write", &path, source)
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rstest::rstest;

    use super::*;

    const LINE: &str = "LIBTORCH = { value = \".libtorch\", relative = true, force = true }\n";

    fn project(text: Option<&str>) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join(".cargo")).unwrap();
        if let Some(text) = text {
            fs::write(root.path().join(".cargo/config.toml"), text).unwrap();
        }
        root
    }

    fn text(root: &tempfile::TempDir) -> String {
        fs::read_to_string(root.path().join(".cargo/config.toml")).unwrap()
    }

    #[rstest]
    #[case::empty("", "[env]\n", "")]
    #[case::another_table("# mine\n[build]\njobs = 1 # few\n", "# mine\n[build]\njobs = 1 # few\n\n[env]\n", "")]
    #[case::env_is_there("[env]\n# why\nA = \"1\"\n\n[build]\n", "[env]\n# why\nA = \"1\"\n", "\n[build]\n")]
    fn what_is_there_stays(#[case] before: &str, #[case] start: &str, #[case] end: &str) {
        let root = project(Some(before));
        assert_eq!(write(root.path()).unwrap().1, CargoConfig::Extended);
        assert_eq!(text(&root), format!("{start}{LINE}{end}"));
        assert_eq!(write(root.path()).unwrap().1, CargoConfig::Unchanged);
        assert_eq!(text(&root), format!("{start}{LINE}{end}"));
    }

    #[test]
    fn a_new_file_says_what_the_folder_is() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(write(root.path()).unwrap().1, CargoConfig::Created);
        assert!(text(&root).starts_with("# `accelerate setup`") && text(&root).ends_with(&format!("[env]\n{LINE}")));
        assert_eq!(write(root.path()).unwrap().1, CargoConfig::Unchanged);
        let named = named(root.path()).unwrap().unwrap();
        assert_eq!(named, Named { folder: root.path().join(".libtorch"), is_forced: true });
    }

    #[rstest]
    #[case("[env]\nLIBTORCH = \"/opt/libtorch\"\n", "/opt/libtorch")]
    #[case("env.LIBTORCH.value = \"/opt/libtorch\"\n", "/opt/libtorch")]
    fn a_folder_of_the_users_own_stays_in_force(#[case] before: &str, #[case] folder: &str) {
        let root = project(Some(before));
        assert_eq!(write(root.path()).unwrap().1, CargoConfig::NamesAnother);
        assert_eq!(text(&root), before);
        assert_eq!(named(root.path()).unwrap(), Some(Named { folder: PathBuf::from(folder), is_forced: false }));
    }

    #[rstest]
    #[case::broken("[env\n")]
    #[case::no_table("env = 3\n")]
    fn a_file_that_is_no_configuration_is_refused_and_kept(#[case] before: &str) {
        let root = project(Some(before));
        let message = write(root.path()).unwrap_err().to_string();
        assert!(message.contains("config.toml") && message.contains("accelerate setup"), "{message}");
        assert_eq!(text(&root), before);
    }

    /// As an earlier `accelerate setup` wrote it, and as somebody may want it: the variable wins in builds.
    #[test]
    fn a_line_that_leaves_builds_to_the_variable_stays() {
        let root = project(Some("[env]\nLIBTORCH = { value = \".libtorch\", relative = true }\n"));
        assert_eq!(write(root.path()).unwrap().1, CargoConfig::Unchanged);
        assert!(!text(&root).contains("force") && !named(root.path()).unwrap().unwrap().is_forced);
    }

    #[test]
    fn a_token_is_neither_shown_nor_made_readable() {
        use std::os::unix::fs::PermissionsExt;
        let root = project(Some("[registries.x]\ntoken=\"s3cret\" x\n"));
        assert!(!write(root.path()).unwrap_err().to_string().contains("s3cret"));
        let root = project(Some("[registries.x]\ntoken=\"s3cret\"\n"));
        let path = root.path().join(".cargo/config.toml");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        write(root.path()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    /// Only where there is nothing may a file be made.
    #[rstest]
    #[case::folder(|path: &Path| fs::create_dir(path).unwrap(), "it is a folder")]
    #[case::pipe(pipe, "it is a pipe")]
    #[case::huge(|path: &Path| fs::write(path, "#".repeat(2 << 20)).unwrap(), "1048576 bytes")]
    #[case::no_text(|path: &Path| fs::write(path, b"\xff").unwrap(), "UTF-8")]
    #[case::dangling(|path: &Path| std::os::unix::fs::symlink("gone.toml", path).unwrap(), "a link to `gone.toml`, which is not")]
    #[case::cycle(|path: &Path| std::os::unix::fs::symlink("config.toml", path).unwrap(), "symbolic links")]
    fn what_is_no_readable_file_is_refused_and_stays(#[case] make: fn(&Path), #[case] found: &str) {
        let root = project(None);
        let path = root.path().join(".cargo/config.toml");
        make(&path);
        for message in [write(root.path()).unwrap_err().to_string(), named(root.path()).unwrap_err().to_string()] {
            assert!(message.contains(found) && message.contains("move it away"), "{message}");
        }
        assert!(fs::symlink_metadata(&path).is_ok());
        assert_eq!(fs::read_dir(root.path().join(".cargo")).unwrap().count(), 1);
    }

    fn pipe(path: &Path) {
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    }

    #[test]
    fn a_file_where_the_folder_would_be_is_an_error_and_not_no_configuration() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join(".cargo"), "mine").unwrap();
        let error = write(root.path()).unwrap_err();
        assert!(error.to_string().contains("could not read") && error.to_string().contains(".cargo"), "{error}");
        assert_eq!(fs::read_to_string(root.path().join(".cargo")).unwrap(), "mine");
    }

    #[rstest]
    #[case::broken("KEY = 1\nKEY = 2\n")]
    #[case::path("[env]\nLIBTORCH = \"KEY\"\n")]
    fn a_mistake_in_a_huge_line_is_told_in_a_short_message(#[case] text: &str) {
        let root = project(Some(&text.replace("KEY", &"k".repeat(100_000))));
        let message = named(root.path()).map_or_else(|error| error.to_string(), |named| format!("{named:?}"));
        assert!(message.len() < 500 && message.contains("config.toml"), "{} bytes: {message:.300}", message.len());
    }

    #[test]
    fn the_old_name_of_the_file_is_kept() {
        let root = project(None);
        fs::write(root.path().join(".cargo/config"), "").unwrap();
        assert_eq!(write(root.path()).unwrap().0, root.path().join(".cargo/config"));
        assert!(!root.path().join(".cargo/config.toml").exists());
    }
}
