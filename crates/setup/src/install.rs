//! Installs libtorch into the user's cache folder, with pip, once.
//!
//! Wheels are downloaded one by one into a folder of their own and kept until all is done, so an
//! interrupted run continues where it stopped; pip checks each against the registry's checksum.
//! They are unpacked beside the final place, compared file by file with their own records, and
//! moved there in one step: whoever finds the folder finds it whole.

use std::env;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use accelerate_core::files::{ShownPath, other_than_file};
use accelerate_launch::{Limits, ask, ask_and_watch};

use super::VERSION;
use super::error::{Result, SetupError};
use super::links::REQUIRED_LIBRARIES;
use super::progress::{Watch, say};

/// What is downloaded. The two CUDA packages are small, and `libtorch_cpu.so` of the registry's
/// wheel is linked against them.
const PACKAGES: [&str; 3] = ["nvidia-cuda-runtime==13.0.*", "nvidia-cuda-cupti==13.0.*", "torch==2.11.0"];

/// The libtorch folder in `home`, installed if it is not there.
pub(crate) fn ensure(home: &Path) -> Result<PathBuf> {
    if home.exists() {
        return whole(home);
    }
    let system = format!("{} {}", env::consts::OS, env::consts::ARCH);
    if system != "linux x86_64" {
        return Err(SetupError::UnsupportedSystem { system });
    }
    let python = find_python()?.ok_or(SetupError::NoPython)?;
    require_pip(&python)?;
    if let Some(parent) = home.parent() {
        fs::create_dir_all(parent).map_err(|source| SetupError::io("create", parent, source))?;
    }
    let _lock = lock(&beside(home, "lock"))?;
    // Another run may have installed it while this one waited.
    if home.exists() {
        return whole(home);
    }
    say(&format!("Installing libtorch {VERSION} into {} (about 0.5 GB to download, 1.2 GB on disk)", home.shown()));
    let (wheels, unpacked) = (beside(home, "wheels"), beside(home, "unpacked"));
    download(&python, &wheels)?;
    unpack(&python, &wheels, &unpacked)?;
    verify_records(&unpacked)?;
    fs::rename(&unpacked, home).map_err(|source| SetupError::io("move into place", &unpacked, source))?;
    fs::remove_dir_all(&wheels).map_err(|source| SetupError::io("remove", &wheels, source))?;
    whole(home)
}

/// The first of `python3` and `python` that runs and is Python 3.
pub(crate) fn find_python() -> Result<Option<PathBuf>> {
    for name in ["python3", "python"] {
        let answer = answer_of(Command::new(name).args(["-c", "import sys; print(sys.version_info[0])"]))?;
        if answer.is_some_and(|printed| printed.starts_with('3')) {
            return Ok(Some(PathBuf::from(name)));
        }
    }
    Ok(None)
}

/// Fails where `python -m pip` does not work.
pub(crate) fn require_pip(python: &Path) -> Result<()> {
    match answer_of(Command::new(python).args(["-m", "pip", "--version"]))? {
        Some(_) => Ok(()),
        None => Err(SetupError::NoPip { python: python.to_path_buf() }),
    }
}

/// What the program prints, if it runs and ends well. One that never ends is nobody's answer, and an error.
pub(crate) fn answer_of(command: &mut Command) -> Result<Option<String>> {
    match ask(command, Limits::default()) {
        Ok(answer) if answer.status.success() => Ok(Some(String::from_utf8_lossy(&answer.stdout).into_owned())),
        Err(error) if error.is_limit_passed() || error.is_interrupted() => Err(error.into()),
        Ok(_) | Err(_) => Ok(None),
    }
}

/// `libtorch-2.11.0` in the cache folder has `libtorch-2.11.0.lock` and others beside it.
fn beside(home: &Path, what: &str) -> PathBuf {
    home.with_added_extension(what)
}

/// Waits until no other run installs. The lock ends with the process, however it ends.
pub(crate) fn lock(path: &Path) -> Result<File> {
    // To open a pipe in its place would be to wait for ever.
    if let Some(found) = fs::metadata(path).ok().and_then(|found| other_than_file(found.file_type())) {
        let source = io::Error::other(format!("it is {found}; remove it"));
        return Err(SetupError::io("lock", path, source));
    }
    let file = File::create(path).map_err(|source| SetupError::io("create", path, source))?;
    if file.try_lock().is_err() {
        say(&format!("Waiting for another installation to finish ({})", path.shown()));
        file.lock().map_err(|source| SetupError::io("lock", path, source))?;
    }
    Ok(file)
}

fn whole(home: &Path) -> Result<PathBuf> {
    let torch = home.join("torch");
    let metadata = home.join(format!("torch-{VERSION}.dist-info/METADATA"));
    let libraries = REQUIRED_LIBRARIES.iter().map(|library| torch.join(library));
    for file in libraries.chain([torch.join("include"), metadata]) {
        if !file.exists() {
            return Err(SetupError::Damaged { home: home.to_path_buf(), file, problem: "is missing".to_owned() });
        }
    }
    Ok(torch)
}

fn download(python: &Path, wheels: &Path) -> Result<()> {
    let partial = wheels.join("partial");
    fs::create_dir_all(&partial).map_err(|source| SetupError::io("create", &partial, source))?;
    // pip 25.1 and later continue a broken download within one file.
    let help = answer_of(Command::new(python).args(["-m", "pip", "download", "--help"]))?;
    let can_resume = help.is_some_and(|help| help.contains("--resume-retries"));
    for package in PACKAGES {
        let mut command = pip(python, &partial);
        command.args(["download", "--no-deps", "--progress-bar", "off", "--dest"]).arg(wheels).arg(package);
        if can_resume {
            command.args(["--resume-retries", "10"]);
        }
        let watch = Watch::bytes_in(&format!("download {package}"), &partial);
        supervise(command, &format!("download {package}"), &watch)?;
        watch.finish();
    }
    fs::remove_dir_all(&partial).map_err(|source| SetupError::io("remove", &partial, source))
}

fn unpack(python: &Path, wheels: &Path, unpacked: &Path) -> Result<()> {
    if unpacked.exists() {
        fs::remove_dir_all(unpacked).map_err(|source| SetupError::io("remove", unpacked, source))?;
    }
    // pip unpacks into its temporary folder first: on the same disk, moving from there is a rename.
    let temporary = beside(unpacked, "temporary");
    let _ = fs::remove_dir_all(&temporary);
    fs::create_dir_all(&temporary).map_err(|source| SetupError::io("create", &temporary, source))?;
    let mut command = pip(python, &temporary);
    command.args(["install", "--no-deps", "--no-index", "--no-compile", "--upgrade", "--target"]).arg(unpacked);
    command.args(wheel_files(wheels)?);
    let watch = Watch::bytes_in("unpack", &temporary);
    watch.set_total(unpacked_bytes(python, wheels));
    supervise(command, "unpack libtorch", &watch)?;
    watch.finish();
    fs::remove_dir_all(&temporary).map_err(|source| SetupError::io("remove", &temporary, source))
}

fn wheel_files(wheels: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(wheels).map_err(|source| SetupError::io("read", wheels, source))?;
    let is_wheel = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "whl");
    Ok(entries.flatten().map(|entry| entry.path()).filter(is_wheel).collect())
}

/// For the progress bar only; a wheel is a zip archive, which Python reads without further packages.
fn unpacked_bytes(python: &Path, wheels: &Path) -> Option<u64> {
    const SUM: &str = "import sys, zipfile\n\
         print(sum(i.file_size for name in sys.argv[1:] for i in zipfile.ZipFile(name).infolist()))";
    let files = wheel_files(wheels).ok()?;
    answer_of(Command::new(python).args(["-c", SUM]).args(files)).ok()??.trim().parse().ok()
}

fn pip(python: &Path, temporary: &Path) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", "pip"]).env("TMPDIR", temporary).env("PIP_DISABLE_PIP_VERSION_CHECK", "1");
    command
}

/// Runs pip and tells the progress bar the size that pip announces.
///
/// There is no limit of time: the bar shows how far it is, pip itself gives up where the network is silent, and Ctrl-C ends
/// both.
fn supervise(mut command: Command, action: &str, watch: &Watch) -> Result<()> {
    let limits = Limits { time: None, ..Limits::default() };
    let mut line = Vec::new();
    let mut look_for_size = |bytes: &[u8]| {
        for byte in bytes {
            match byte {
                b'\n' => {
                    watch.set_total(announced_bytes(&String::from_utf8_lossy(&line)));
                    line.clear();
                }
                byte => line.push(*byte),
            }
        }
    };
    let answer = ask_and_watch(&mut command, limits, &mut look_for_size)?;
    if answer.status.success() {
        return Ok(());
    }
    let printed = String::from_utf8_lossy(&answer.stdout) + String::from_utf8_lossy(&answer.stderr);
    let last_lines = last_lines(&printed, 12);
    Err(SetupError::Pip { action: action.to_owned(), status: answer.status.to_string(), last_lines })
}

/// The last `count` lines of a text, each cut where it would hide the others.
fn last_lines(text: &str, count: usize) -> String {
    const MOST_LETTERS: usize = 300;
    let mut lines: Vec<String> =
        text.trim_end().lines().rev().take(count).map(|line| line.chars().take(MOST_LETTERS).collect()).collect();
    lines.reverse();
    lines.join("\n")
}

/// The size in a line like `  Downloading torch-2.11.0-….whl (530.6 MB)`.
fn announced_bytes(line: &str) -> Option<u64> {
    let line = line.trim();
    if !line.starts_with("Downloading") {
        return None;
    }
    let (_, size) = line.strip_suffix(')')?.rsplit_once('(')?;
    let (number, unit) = size.split_once(' ')?;
    let factor = match unit {
        "bytes" => 1.0,
        "kB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        _ => return None,
    };
    Some((number.parse::<f64>().ok()? * factor) as u64)
}

/// Every file of every package is there with the size its record says.
fn verify_records(home: &Path) -> Result<()> {
    let damaged = |file: PathBuf, problem: String| SetupError::Damaged { home: home.to_path_buf(), file, problem };
    let entries = fs::read_dir(home).map_err(|source| SetupError::io("read", home, source))?;
    let mut packages = 0;
    for entry in entries.flatten() {
        let record = entry.path().join("RECORD");
        if entry.path().extension().is_none_or(|extension| extension != "dist-info") {
            continue;
        }
        packages += 1;
        let text = fs::read_to_string(&record).map_err(|source| SetupError::io("read", &record, source))?;
        for (name, bytes) in text.lines().filter_map(record_line) {
            let file = home.join(name);
            match fs::metadata(&file) {
                Ok(found) if found.len() == bytes => {}
                Ok(found) => {
                    return Err(damaged(file, format!("has {} bytes and should have {bytes}", found.len())));
                }
                Err(_) => return Err(damaged(file, "is missing".to_owned())),
            }
        }
    }
    if packages < PACKAGES.len() {
        return Err(damaged(home.to_path_buf(), format!("holds {packages} packages of {}", PACKAGES.len())));
    }
    Ok(())
}

/// A record line is `name,checksum,bytes`. Names that leave the folder are programs, which
/// `pip install --target` puts elsewhere; lines without a size are what pip adds itself.
fn record_line(line: &str) -> Option<(&str, u64)> {
    let mut parts = line.rsplitn(3, ',');
    let bytes = parts.next()?.parse().ok()?;
    let _checksum = parts.next()?;
    let name = parts.next()?.trim_matches('"');
    (!name.starts_with("..")).then_some((name, bytes))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_announced_size_of_a_download_is_read() {
        let rows = [
            ("  Downloading torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl (530.6 MB)", Some(530_600_000)),
            ("Downloading x.whl (12 kB)", Some(12_000)),
            ("Downloading x.whl (7 bytes)", Some(7)),
            ("Saved ./torch-2.11.0.whl (5 MB)", None),
            ("  Downloading x.whl.metadata", None),
            ("Downloading x.whl (many MB)", None),
        ];
        for (line, want) in rows {
            assert_eq!(announced_bytes(line), want, "{line}");
        }
    }

    #[test]
    fn what_a_program_said_last_is_short() {
        let text = format!("first\n{}\nlast\n", "x".repeat(10_000));
        assert_eq!(last_lines(&text, 2), format!("{}\nlast", "x".repeat(300)));
        assert_eq!(last_lines("", 3), "");
    }

    /// Stands for a Python that hangs or floods: what it is asked is no reason to wait for ever.
    #[test]
    fn a_program_that_does_not_answer_is_an_error_and_one_that_is_not_there_is_none() {
        let message = answer_of(&mut Command::new("yes")).unwrap_err().to_string();
        assert!(message.contains("`yes` printed more than") && message.contains("shell"), "{message}");
        assert_eq!(answer_of(&mut Command::new("no-such-program-anywhere")).unwrap(), None);
        assert_eq!(answer_of(&mut Command::new("false")).unwrap(), None);
        assert_eq!(answer_of(Command::new("echo").arg("3")).unwrap().as_deref(), Some("3\n"));
    }

    #[test]
    fn a_pipe_in_place_of_the_lock_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let error = lock(&path).unwrap_err();
        assert!(error.to_string().contains("could not lock"), "{error}");
    }

    #[test]
    fn record_lines_give_name_and_size() {
        let rows = [
            ("torch/lib/libc10.so,sha256=abc,123", Some(("torch/lib/libc10.so", 123))),
            ("\"odd,name.py\",sha256=abc,5", Some(("odd,name.py", 5))),
            ("../../bin/torchrun,sha256=abc,200", None),
            ("torch-2.11.0.dist-info/RECORD,,", None),
        ];
        for (line, want) in rows {
            assert_eq!(record_line(line), want, "{line}");
        }
    }

    /// A folder as pip leaves it: three packages, each with a record and one file.
    fn unpacked() -> tempfile::TempDir {
        let home = tempfile::tempdir().unwrap();
        for name in ["torch", "nvidia_cuda_runtime", "nvidia_cuda_cupti"] {
            let package = home.path().join(name);
            let record = home.path().join(format!("{name}-1.dist-info"));
            fs::create_dir_all(&package).unwrap();
            fs::create_dir_all(&record).unwrap();
            fs::write(package.join("library.so"), "12345").unwrap();
            let text = format!("{name}/library.so,sha256=abc,5\n{name}-1.dist-info/RECORD,,\n");
            fs::write(record.join("RECORD"), text).unwrap();
        }
        home
    }

    #[test]
    fn a_whole_installation_passes_and_a_damaged_one_names_the_file() {
        verify_records(unpacked().path()).unwrap();
        type Damage = fn(&Path);
        let damages: [(Damage, &str); 3] = [
            (|home| fs::write(home.join("torch/library.so"), "1234").unwrap(), "has 4 bytes and should have 5"),
            (|home| fs::remove_file(home.join("torch/library.so")).unwrap(), "is missing"),
            (|home| fs::remove_dir_all(home.join("torch-1.dist-info")).unwrap(), "2 packages of 3"),
        ];
        for (damage, want) in damages {
            let home = unpacked();
            damage(home.path());
            let message = verify_records(home.path()).unwrap_err().to_string();
            assert!(message.contains(want) && message.contains("Delete the folder"), "{message}");
        }
    }

    #[test]
    fn an_existing_folder_without_the_libraries_is_reported_not_overwritten() {
        let home = tempfile::tempdir().unwrap();
        let message = ensure(home.path()).unwrap_err().to_string();
        assert!(message.contains(REQUIRED_LIBRARIES[0]) && message.contains("Delete the folder"), "{message}");
    }

    #[test]
    fn the_pinned_package_is_the_pinned_version() {
        assert!(PACKAGES.contains(&format!("torch=={VERSION}").as_str()));
    }
}
