//! Turning what the user typed into the command that every rank runs, or into an error that says what is
//! wrong with it before anything has started.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{File, FileType};
use std::io::{self, Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use accelerate_core::files::{ShownPath, other_than_file};
use rustix::fs::{Access, access};

use crate::cargo::Project;
use crate::config::Program;
use crate::elf::{self, Target};
use crate::error::{Error, Result};

/// Where programs and interpreters are looked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProgramSearch {
    /// Value of `PATH`.
    pub path: Option<OsString>,
    /// Value of `VIRTUAL_ENV`, the folder of an active Python environment.
    pub virtual_env: Option<PathBuf>,
    /// Value of `CONDA_PREFIX`, the folder of an active conda environment.
    pub conda_prefix: Option<PathBuf>,
    /// The working folder, whose Cargo project is looked into.
    pub working_folder: Option<PathBuf>,
    /// Value of `CARGO_TARGET_DIR`, where all projects are built.
    pub cargo_target_dir: Option<PathBuf>,
}

impl ProgramSearch {
    /// As this process would search.
    pub fn of_this_process() -> Self {
        let folder = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        Self {
            path: std::env::var_os("PATH"),
            virtual_env: folder("VIRTUAL_ENV"),
            conda_prefix: folder("CONDA_PREFIX"),
            working_folder: std::env::current_dir().ok(),
            cargo_target_dir: folder("CARGO_TARGET_DIR"),
        }
    }

    /// As a shell does, which looks for a path where that leads.
    pub(crate) fn look_for(&self, name: &OsStr) -> Result<PathBuf, io::ErrorKind> {
        let path = match name.as_bytes().contains(&b'/') {
            true => PathBuf::from(name),
            false => return self.find(name).ok_or(io::ErrorKind::NotFound),
        };
        match path.metadata() {
            Ok(_) if is_executable_file(&path) => Ok(path),
            Ok(_) => Err(io::ErrorKind::PermissionDenied),
            Err(error) => Err(error.kind()),
        }
    }

    pub(crate) fn find(&self, name: &OsStr) -> Option<PathBuf> {
        std::env::split_paths(self.path.as_deref()?)
            // An empty entry means the current folder, which nobody means any more.
            .filter(|folder| !folder.as_os_str().is_empty())
            .map(|folder| folder.join(name))
            .find(|candidate| is_executable_file(candidate))
    }
}

/// The command line that starts `program`: the executable, for Python preceded by the interpreter. The
/// program's own arguments come after it.
///
/// A name without `/` is looked up in `PATH`, and then among what Cargo has built for the project around the working folder.
/// The interpreter is that of `VIRTUAL_ENV`, else of `CONDA_PREFIX`, else `python3`, else `python` in `PATH`.
///
/// # Errors
///
/// [`Error::is_program_not_found`] and [`Error::is_program_not_executable`], naming the path and the cure;
/// [`Error::is_limit_passed`]: Cargo, which was asked where it builds, does not answer.
///
/// ```
/// use accelerate_launch::{Program, ProgramSearch, resolve_program};
/// let search = ProgramSearch::of_this_process();
/// assert!(resolve_program(&Program::Executable("sh".into()), &search)?[0].as_encoded_bytes().ends_with(b"/sh"));
/// assert!(resolve_program(&Program::guess("no/such.py".as_ref()), &search).unwrap_err().is_program_not_found());
/// # Ok::<(), accelerate_launch::Error>(())
/// ```
pub fn resolve_program(program: &Program, search: &ProgramSearch) -> Result<Vec<OsString>> {
    if program.name().is_empty() {
        return Err(Error::invalid_configuration(
            "the program is an empty word, perhaps of a variable that is not set; a path, a name, a .py file or a module is \
             wanted"
                .into(),
        ));
    }
    match program {
        Program::Executable(name) => {
            let path = resolve_executable(name, search)?;
            check_form(&path)?;
            Ok(vec![path.into()])
        }
        Program::PythonScript(path) => {
            match path.metadata() {
                Err(_) => {
                    return Err(Error::program_not_found(path, "; is the path relative to another folder?"));
                }
                Ok(metadata) => {
                    if let Some(found) = other_than_file(metadata.file_type()) {
                        return Err(Error::program_not_executable(path, format!("it is {found}, not a Python file")));
                    }
                }
            }
            Ok(vec![find_python(search)?.into(), path.into()])
        }
        Program::PythonModule(name) => Ok(vec![find_python(search)?.into(), "-m".into(), name.clone()]),
    }
}

/// A file that the kernel does not take for a program is run by a shell, as a script. An empty one would do nothing and succeed, and
/// one of another kind of machine would be a syntax error.
fn check_form(path: &Path) -> Result<()> {
    let refused = |reason: String| Err(Error::program_not_executable(path, reason));
    let is_empty = path.metadata().is_ok_and(|metadata| metadata.len() == 0);
    if is_empty {
        return refused("it is empty, perhaps because writing it has failed; build or copy it again".to_owned());
    }
    // One that may be run and not read is taken as it is.
    let Ok(mut file) = File::open(path) else { return Ok(()) };
    if let Some(interpreter) = interpreter(&mut file).filter(|interpreter| !interpreter.exists()) {
        let cure = match interpreter.as_os_str().as_bytes().ends_with(b"\r") {
            true => {
                "whose line ends with the carriage return of Windows; write the script with the line ends of Unix (dos2unix)"
            }
            false => "which does not exist; install it, or name another one there",
        };
        return refused(format!("its first line names the interpreter {}, {cure}", interpreter.shown()));
    }
    let Ok(found) = Target::of(&file) else {
        return refused("it is cut off within its first bytes; build or copy it again".to_owned());
    };
    let own = File::open("/proc/self/exe").ok().and_then(|own| Target::of(&own).ok().flatten());
    match (found, own) {
        (Some(found), Some(own)) if !own.may_run(found) && !is_emulating(Path::new(EMULATORS)) => refused(format!(
            "it is a program for {found}, and this machine is {own}; build it for this one, or name one that is"
        )),
        (Some(found), Some(own)) if own == found && elf::is_whole(&file).is_ok_and(|is_whole| !is_whole) => {
            refused("it is damaged, perhaps because it is cut off; build or copy it again".to_owned())
        }
        _ => Ok(()),
    }
}

/// What the first line of a script names, by as much of it as the kernel reads.
fn interpreter(file: &mut File) -> Option<PathBuf> {
    let mut first = Vec::new();
    file.by_ref().take(255).read_to_end(&mut first).ok()?;
    file.rewind().ok()?;
    let line = first.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let is_blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    let word = line.split(is_blank).find(|word| !word.is_empty())?;
    Some(PathBuf::from(OsStr::from_bytes(word)))
}

/// Where the kernel says what it runs by other programs, such as those of other machines by QEMU.
const EMULATORS: &str = "/proc/sys/fs/binfmt_misc";

fn is_emulating(folder: &Path) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.file_name()));
    entries.into_iter().any(|name| name != "register" && name != "status")
}

fn find_python(search: &ProgramSearch) -> Result<PathBuf> {
    let environments = [&search.virtual_env, &search.conda_prefix];
    environments
        .into_iter()
        .flatten()
        .map(|folder| folder.join("bin/python"))
        .find(|candidate| is_executable_file(candidate))
        .or_else(|| search.find("python3".as_ref()))
        .or_else(|| search.find("python".as_ref()))
        .ok_or_else(|| {
            Error::program_not_found(
                "python3",
                ": neither in VIRTUAL_ENV nor in CONDA_PREFIX nor in PATH; activate a Python environment, or give \
                 --no_python if the program is not a Python file",
            )
        })
}

/// What may stand in the place of the program.
const PROGRAMS: &str = "name a binary by its path (target/release/train), a Python file (train.py), or a Python module \
                        (-m package.train)";

fn resolve_executable(name: &OsStr, search: &ProgramSearch) -> Result<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return match path.metadata() {
            Err(_) => Err(Error::program_not_found(path, "; is it built, and is the path relative to this folder?")),
            Ok(_) if is_executable_file(&path) => Ok(path),
            Ok(metadata) => Err(not_executable(&path, metadata.file_type())),
        };
    }
    if let Some(path) = search.find(name) {
        return Ok(path);
    }
    let project = Project::around(search);
    if let Some(built) = project.as_ref().and_then(|project| project.built(name, search)) {
        return Ok(built.newest);
    }
    // Files have not told.
    let asked = project.as_ref().map_or(Ok(None), |project| project.asked(search))?;
    if let Some(built) = asked.as_ref().and_then(|asked| asked.built(name)) {
        return Ok(built.newest);
    }
    let package = asked.as_ref().and_then(|asked| asked.package_with(name));
    // What is meant is here, and adding ./ would not help.
    let here = Path::new(name);
    if let (None, Ok(metadata)) = (&package, here.metadata())
        && !is_executable_file(here)
    {
        return Err(not_executable(here, metadata.file_type()));
    }
    let hint = match (package, &project) {
        (Some(package), _) => {
            format!(
                " because it is not built: build this program of the package {package} with `cargo build --release`"
            )
        }
        _ if here.is_file() => {
            format!(" in PATH; a file of this name is in the current folder: write ./{} for it", here.shown())
        }
        (None, Some(_)) => format!(" in PATH, and no program of this Cargo project has that name; {PROGRAMS}"),
        (None, None) => format!(" in PATH; {PROGRAMS}"),
    };
    Err(Error::program_not_found(name, hint))
}

/// Which file a name alone stands for, where there is more than one place for it. Its `Display` is a sentence for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProgramChoice {
    /// The one that Cargo has built for the project around the working folder, because `PATH` has none.
    Built {
        /// Its file.
        path: PathBuf,
        /// The other build, if there is one, which is older.
        older: Option<PathBuf>,
    },
    /// The one in `PATH`, although the project has one as well.
    InPath {
        /// Its file.
        path: PathBuf,
        /// That of the project.
        built: PathBuf,
    },
}

impl ProgramChoice {
    /// What there was to choose for `command`, which [`resolve_program`] gave for `program`.
    pub fn between(program: &Program, command: &[OsString], search: &ProgramSearch) -> Option<Self> {
        let Program::Executable(name) = program else { return None };
        if name.as_bytes().contains(&b'/') {
            return None;
        }
        let path = PathBuf::from(command.first()?);
        let built = Project::around(search)?.built(name, search);
        match (search.find(name), built) {
            (Some(_), Some(built)) if built.newest != path => Some(Self::InPath { path, built: built.newest }),
            (Some(_), _) => None,
            (None, built) => Some(Self::Built { path, older: built.and_then(|built| built.older) }),
        }
    }
}

impl fmt::Display for ProgramChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Built { path, older: None } => write!(f, "running {}", path.shown()),
            Self::Built { path, older: Some(older) } => {
                write!(f, "running {}, which is newer than {}", path.shown(), older.shown())
            }
            Self::InPath { path, built } => {
                write!(f, "running {} of PATH; write {} for the one of this project", path.shown(), built.shown())
            }
        }
    }
}

/// What stands there instead of a program, and what to do about it.
#[cold]
fn not_executable(path: &Path, kind: FileType) -> Error {
    let name = path.shown();
    let reason = match (other_than_file(kind), path.extension().and_then(OsStr::to_str)) {
        (Some("a folder"), _) if path.join("Cargo.toml").is_file() => format!(
            "it is the folder of a Cargo project, and a program is a file; run `cargo build --release` in it, and name the \
             program in {name}/target/release"
        ),
        (Some("a folder"), _) => {
            "it is a folder, and a program is a file; name the binary or the .py file in it, or with -m a module"
                .to_owned()
        }
        (Some(found), _) => format!("it is {found}, and a program is a file; name that"),
        (None, Some("yaml" | "yml" | "json")) => format!(
            "it is not marked as executable, and looks like a configuration file; write --config_file {name}, and then the \
             program"
        ),
        (None, Some("rs")) => {
            "it is source code; build it with `cargo build --release`, and name the program that this writes".to_owned()
        }
        (None, _) => format!("it is not marked as executable; run: chmod +x {name}"),
    };
    Error::program_not_executable(path, reason)
}

pub(crate) fn is_executable_file(path: &Path) -> bool {
    path.is_file() && access(path, Access::EXEC_OK).is_ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn file(path: &Path, mode: u32) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "#!/bin/sh\n").unwrap();
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    fn resolved(program: &Program, search: &ProgramSearch) -> Vec<PathBuf> {
        resolve_program(program, search).unwrap().into_iter().map(PathBuf::from).collect()
    }

    #[test]
    fn the_interpreter_is_that_of_the_active_environment() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        file(&root.join("venv/bin/python"), 0o755);
        file(&root.join("conda/bin/python"), 0o755);
        file(&root.join("bin/python3"), 0o755);
        file(&root.join("old/python"), 0o755);
        let script = root.join("train.py");
        file(&script, 0o644);
        let program = Program::guess(&script);

        let mut search = ProgramSearch {
            path: Some(std::env::join_paths([root.join("old"), root.join("bin")]).unwrap()),
            virtual_env: Some(root.join("venv")),
            conda_prefix: Some(root.join("conda")),
            ..Default::default()
        };
        assert_eq!(resolved(&program, &search), [root.join("venv/bin/python"), script.clone()]);
        search.virtual_env = Some(root.join("removed"));
        assert_eq!(resolved(&program, &search), [root.join("conda/bin/python"), script.clone()]);
        search.conda_prefix = None;
        assert_eq!(resolved(&program, &search), [root.join("bin/python3"), script.clone()]);
        search.path = Some(root.join("old").into());
        assert_eq!(
            resolved(&Program::PythonModule("package.train".into()), &search),
            [root.join("old/python"), "-m".into(), "package.train".into()]
        );
        search.path = None;
        let error = resolve_program(&program, &search).unwrap_err();
        assert!(error.is_program_not_found() && error.to_string().contains("python3"), "{error}");
    }

    /// A shell would run them as scripts.
    #[test]
    fn files_that_no_kernel_runs_are_refused() {
        use crate::elf::tests::header;
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("train");
        let check = |content: &[u8]| {
            file(&path, 0o755);
            std::fs::write(&path, content).unwrap();
            check_form(&path).map_err(|error| error.to_string())
        };
        let other = if cfg!(target_arch = "x86_64") { [183, 0] } else { [62, 0] };
        assert!(check(b"").unwrap_err().ends_with("build or copy it again"));
        assert!(check(&header(2, 1, other)[..10]).unwrap_err().contains("it is cut off"));
        assert!(check(b"echo a script without a first line\n").is_ok());
        let whole = std::fs::read("/bin/sh").unwrap();
        assert!(check(&whole).is_ok());
        assert!(check(&whole[..whole.len() / 2]).unwrap_err().contains("it is damaged, perhaps because it is cut off"));
        let of_another = check(&header(2, 1, other));
        match is_emulating(Path::new(EMULATORS)) {
            true => assert_eq!(of_another, Ok(())),
            false => assert!(of_another.unwrap_err().contains("build it for this one")),
        }
    }

    #[test]
    fn an_emulator_is_one_that_is_registered() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!is_emulating(&folder.path().join("missing")));
        file(&folder.path().join("register"), 0o644);
        file(&folder.path().join("status"), 0o644);
        assert!(!is_emulating(folder.path()));
        file(&folder.path().join("qemu-aarch64"), 0o644);
        assert!(is_emulating(folder.path()));
    }

    #[test]
    fn each_way_a_program_can_be_wrong_has_its_own_message() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        file(&root.join("plain"), 0o644);
        file(&root.join("bin/tool"), 0o755);
        file(&root.join("bin/data"), 0o644);
        let search = ProgramSearch { path: Some(root.join("bin").into()), ..Default::default() };

        assert_eq!(resolved(&Program::Executable("tool".into()), &search), [root.join("bin/tool")]);
        for (name, not_found, words) in [
            (root.join("missing").into_os_string(), true, "was not found"),
            (root.join("plain").into_os_string(), false, "chmod +x"),
            (root.as_os_str().to_os_string(), false, "it is a folder"),
            ("data".into(), true, "in PATH"),
        ] {
            let error = resolve_program(&Program::Executable(name.clone()), &search).unwrap_err();
            assert_eq!(error.is_program_not_found(), not_found, "{error}");
            assert_eq!(error.is_program_not_executable(), !not_found, "{error}");
            assert_eq!(error.exit_code(), if not_found { 127 } else { 126 });
            let text = error.to_string();
            assert!(text.contains(words) && text.contains(&*name.to_string_lossy()), "{text}");
        }
    }
}
