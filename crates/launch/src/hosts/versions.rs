//! Of which version program and libtorch are on a machine, found without running the one or loading the other, and on which
//! machines they differ from the others.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::hash::Hash;
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use accelerate_core::files::{ShownPath, in_one_line};
use accelerate_core::weight_files::Checksum;
use serde::{Deserialize, Serialize};

use super::message::Problem;
use crate::config::LaunchConfig;
use crate::elf::{self, Dynamic};

/// Folders of programs that come with the system, which differ between machines without harm.
const FOLDERS_OF_SYSTEM: [&str; 4] = ["/bin", "/sbin", "/usr/bin", "/usr/sbin"];
/// The file in a folder of libtorch that names the version, beside the folder `lib`.
const VERSION_FILE: &str = "build-version";
/// `2.11.0+cu130` has 12.
const MOST_VERSION_BYTES: usize = 64;

/// What is compared between machines. What is not known is not there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Versions {
    /// The checksum of the program's file, or of the Python script.
    pub(super) program: Option<String>,
    /// Of the libtorch that the program would load.
    pub(super) libtorch: Option<String>,
}

impl Versions {
    /// Is each of them what it is said to be?
    pub(super) fn are_plausible(&self) -> bool {
        self.program.as_deref().is_none_or(Checksum::is_written_as) && self.libtorch.as_deref().is_none_or(is_version)
    }
}

/// What there is on this machine for `command`, and what there is to say of what is not known.
pub(super) fn find(config: &LaunchConfig, command: &[OsString]) -> (Versions, Option<String>) {
    let Some(program) = command.first().map(Path::new) else { return Default::default() };
    let own = own_file(config, program).and_then(|path| checksum(&path).ok().flatten());
    let said = config.environment.iter().rev().find(|(name, _)| name == "LD_LIBRARY_PATH");
    let library_path = said.map(|(_, value)| value.clone()).or_else(|| std::env::var_os("LD_LIBRARY_PATH"));
    let (libtorch, unknown) = match libtorch(program, library_path.as_deref()) {
        Ok(libtorch) => (libtorch, None),
        Err(why) => {
            (None, Some(format!("of which version libtorch is there is not known, so it is not compared: {why}")))
        }
    };
    (Versions { program: own, libtorch }, unknown)
}

/// The file that somebody has brought to the machines: the program or the Python script, and nothing of the system's.
fn own_file(config: &LaunchConfig, program: &Path) -> Option<PathBuf> {
    if config.program.is_python() {
        // Options of the interpreter stand in the place of the script.
        return config.args.first().map(PathBuf::from);
    }
    let is_of_system =
        program.parent().is_some_and(|folder| FOLDERS_OF_SYSTEM.iter().any(|of| folder == Path::new(of)));
    (!is_of_system).then(|| program.to_owned())
}

/// `None` for what is no file, such as an option.
fn checksum(path: &Path) -> io::Result<Option<String>> {
    if !path.metadata()?.is_file() {
        return Ok(None);
    }
    let (mut file, mut checksum) = (File::open(path)?, Checksum::new());
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(Some(checksum.to_string())),
            num_read => checksum.update(&buffer[..num_read]),
        }
    }
}

/// The version of the libtorch that the loader would take for this program, `None` for a program that needs none by itself, or why
/// it cannot be told.
fn libtorch(program: &Path, library_path: Option<&OsStr>) -> Result<Option<String>, String> {
    let unread = |error: io::Error| format!("{} cannot be read ({error})", program.shown());
    let Some(dynamic) = File::open(program).and_then(|file| elf::dynamic(&file)).map_err(unread)? else {
        return Ok(None);
    };
    let is_of_libtorch =
        |name: &&OsString| [&b"libtorch"[..], b"libc10."].iter().any(|of| name.as_bytes().starts_with(of));
    let Some(name) = dynamic.needed.iter().find(is_of_libtorch) else { return Ok(None) };
    let origin = program.canonicalize().unwrap_or_else(|_| program.to_owned());
    let folders = folders(&dynamic, library_path, origin.parent().unwrap_or(Path::new("/")));
    let Some(folder) = folders.iter().find(|folder| folder.join(name).exists()) else {
        return Err(format!(
            "{} is in none of the folders that the program names or LD_LIBRARY_PATH has",
            in_one_line(&name.to_string_lossy())
        ));
    };
    let file = folder.parent().unwrap_or(folder).join(VERSION_FILE);
    let version = first_bytes(&file).ok().map(|text| text.trim().to_owned());
    version.filter(|version| is_version(version)).map(Some).ok_or_else(|| format!("{} does not say it", file.shown()))
}

/// Where the loader looks, in its order; its cache and the folders of the system come after these.
fn folders(dynamic: &Dynamic, library_path: Option<&OsStr>, origin: &Path) -> Vec<PathBuf> {
    let before = dynamic.rpath.as_deref().filter(|_| dynamic.runpath.is_none());
    let lists = [before, library_path, dynamic.runpath.as_deref()];
    let folders =
        lists.into_iter().flatten().flat_map(|list| list.as_bytes().split(|byte| matches!(byte, b':' | b';')));
    folders.map(|folder| with_origin(folder, origin)).collect()
}

/// The folder of the program is called `$ORIGIN`, and an empty word is the working folder.
fn with_origin(folder: &[u8], origin: &Path) -> PathBuf {
    let rest = [&b"$ORIGIN"[..], b"${ORIGIN}"].iter().find_map(|name| folder.strip_prefix(*name));
    match rest {
        Some(rest) => OsString::from_vec([origin.as_os_str().as_bytes(), rest].concat()).into(),
        None if folder.is_empty() => ".".into(),
        None => OsStr::from_bytes(folder).into(),
    }
}

fn first_bytes(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(2 * MOST_VERSION_BYTES as u64).read_to_string(&mut text)?;
    Ok(text)
}

fn is_version(text: &str) -> bool {
    (1..=MOST_VERSION_BYTES).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// A machine of the run with what is there; `None` for one that has not said it.
pub(super) struct Found<'a> {
    pub(super) machine: &'a str,
    pub(super) config: &'a LaunchConfig,
    pub(super) versions: Option<&'a Versions>,
}

/// What differs from what most machines have, of equally many from what the first of them has, with the numbers of the machines.
pub(super) fn differences(found: &[Found<'_>]) -> Vec<(usize, Problem)> {
    let programs: Vec<_> = found.iter().map(|one| one.versions?.program.as_deref()).collect();
    let of_programs = odd_ones(&programs).into_iter().map(|(index, usual)| {
        let name = own_file(found[index].config, Path::new(found[index].config.program.name())).unwrap_or_default();
        let text = format!(
            "{} has another content there than on {}; bring the same file to all machines, or start with --no_preflight where it may \
             differ",
            name.shown(),
            found[usual].machine
        );
        (index, Problem { text, exit_code: 1 })
    });
    // Builds for the CPU and for GPUs, which are named behind the number, understand each other.
    let number = |version: &str| version.split('+').next().unwrap_or_default().to_owned();
    let libtorch = |one: &Found<'_>| one.versions?.libtorch.as_deref().map(number);
    let versions: Vec<_> = found.iter().map(libtorch).collect();
    let of_libtorch = odd_ones(&versions).into_iter().map(|(index, usual)| {
        let text = |index: usize| versions[index].as_deref().unwrap_or_default();
        let text = format!(
            "the program would load libtorch {} there and {} on {}; install the same one on all machines, and look at LD_LIBRARY_PATH \
             there",
            text(index),
            text(usual),
            found[usual].machine
        );
        (index, Problem { text, exit_code: 1 })
    });
    of_programs.chain(of_libtorch).collect()
}

/// Each that is not the usual one, with a place where the usual one is. Nothing is said of what is not known.
fn odd_ones<T: Hash + Eq>(found: &[Option<T>]) -> Vec<(usize, usize)> {
    let known = || found.iter().enumerate().filter_map(|(index, one)| Some((index, one.as_ref()?)));
    let mut counts: HashMap<&T, usize> = HashMap::new();
    known().for_each(|(_, one)| *counts.entry(one).or_default() += 1);
    // Of several maxima this finds the last, and so the first of the reverse.
    let usual = known().rev().max_by_key(|(_, one)| counts[one]);
    let Some((usual, value)) = usual else { return Vec::new() };
    known().filter(|(_, one)| *one != value).map(|(index, _)| (index, usual)).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::Program;
    use crate::elf::tests::program;
    use rstest::rstest;
    use std::fs;

    const NEEDED: u64 = 1;
    const RPATH: u64 = 15;
    const RUNPATH: u64 = 29;

    /// `bin/train` with these entries, and in the folders `a` and `b` libraries of the versions 1.0 and 2.0.
    fn machine(entries: &[(u64, &str)]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        for (name, version) in [("a", "1.0\n"), ("b", "2.0+cpu")] {
            fs::create_dir_all(folder.path().join(name).join("lib")).unwrap();
            fs::write(folder.path().join(name).join("lib/libtorch_cpu.so"), "").unwrap();
            fs::write(folder.path().join(name).join(VERSION_FILE), version).unwrap();
        }
        let train = folder.path().join("bin/train");
        fs::create_dir(folder.path().join("bin")).unwrap();
        fs::write(&train, program(entries)).unwrap();
        (folder, train)
    }

    #[rstest]
    #[case::runpath(&[(RUNPATH, "$ORIGIN/../a/lib")], None, "1.0")]
    #[case::runpath_with_braces(&[(RUNPATH, "/no/such/folder:${ORIGIN}/../b/lib")], None, "2.0+cpu")]
    #[case::the_variable_comes_first(&[(RUNPATH, "$ORIGIN/../a/lib")], Some("b/lib"), "2.0+cpu")]
    #[case::but_not_before_rpath(&[(RPATH, "$ORIGIN/../a/lib")], Some("b/lib"), "1.0")]
    #[case::which_runpath_switches_off(&[(RPATH, "$ORIGIN/../a/lib"), (RUNPATH, "/x")], Some("b/lib"), "2.0+cpu")]
    #[case::only_the_variable(&[], Some("b/lib"), "2.0+cpu")]
    fn the_libtorch_is_that_of_the_loader(
        #[case] entries: &[(u64, &str)],
        #[case] variable: Option<&str>,
        #[case] wanted: &str,
    ) {
        let entries = [&[(NEEDED, "libm.so.6"), (NEEDED, "libtorch_cpu.so")], entries].concat();
        let (folder, train) = machine(&entries);
        let variable = variable.map(|name| folder.path().join(name).into_os_string());
        assert_eq!(libtorch(&train, variable.as_deref()), Ok(Some(wanted.to_owned())));
    }

    #[test]
    fn what_is_not_known_is_said_and_not_invented() {
        let (folder, train) = machine(&[(NEEDED, "libtorch_cpu.so"), (RUNPATH, "$ORIGIN/../a/lib")]);
        let version_file = folder.path().join("a").join(VERSION_FILE);
        for text in ["", "\n", "two words", &"9".repeat(65)] {
            fs::write(&version_file, text).unwrap();
            let why = libtorch(&train, None).unwrap_err();
            assert!(why.ends_with("a/build-version does not say it"), "{why}");
        }
        fs::remove_file(version_file).unwrap();
        assert!(libtorch(&train, None).unwrap_err().ends_with("a/build-version does not say it"));
        fs::remove_dir_all(folder.path().join("a")).unwrap();
        assert!(libtorch(&train, None).unwrap_err().starts_with("libtorch_cpu.so is in none of the folders"));
        let (versions, told) = find(&LaunchConfig::new(Program::Executable(train.clone().into()), 1), &[train.into()]);
        assert!(versions.program.is_some() && versions.libtorch.is_none());
        assert!(told.unwrap().starts_with("of which version libtorch is there is not known"));
    }

    #[test]
    fn a_program_without_libtorch_has_no_version_of_it() {
        let (folder, train) = machine(&[(NEEDED, "libc.so.6"), (RUNPATH, "$ORIGIN/../a/lib")]);
        assert_eq!(libtorch(&train, None), Ok(None));
        let script = folder.path().join("run.sh");
        fs::write(&script, "#!/bin/sh\n").unwrap();
        assert_eq!(libtorch(&script, None), Ok(None));
    }

    #[rstest]
    #[case::own_program("/apps/train", &[], Some("/apps/train"))]
    #[case::of_the_system("/usr/bin/env", &["train"], None)]
    #[case::beside_the_system("/usr/local/bin/train", &[], Some("/usr/local/bin/train"))]
    #[case::python("/usr/bin/python3.11", &["train.py", "-v"], Some("train.py"))]
    #[case::python_module("/usr/bin/python3.11", &["-m", "train"], Some("-m"))]
    fn files_that_somebody_has_brought_are_compared(
        #[case] program: &str,
        #[case] args: &[&str],
        #[case] wanted: Option<&str>,
    ) {
        let args = args.iter().map(OsString::from).collect();
        let config = LaunchConfig { args, ..LaunchConfig::new(Program::Executable(program.into()), 1) };
        assert_eq!(own_file(&config, Path::new(program)), wanted.map(PathBuf::from));
    }

    #[test]
    fn a_checksum_is_that_of_the_content() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train");
        fs::write(&path, [7; 100_000]).unwrap();
        assert_eq!(checksum(&path).unwrap(), Some(Checksum::of(&[7; 100_000]).to_string()));
        assert_eq!(checksum(folder.path()).unwrap(), None);
        assert!(checksum(Path::new("-m")).is_err());
    }

    #[rstest]
    #[case::same(&[Some(1), Some(1)], &[])]
    #[case::two(&[Some(1), Some(2)], &[(1, 0)])]
    #[case::the_first_is_odd(&[Some(1), Some(2), Some(2)], &[(0, 1)])]
    #[case::several_are(&[Some(3), Some(1), Some(1), Some(2)], &[(0, 1), (3, 1)])]
    #[case::unknown(&[None, Some(1), None], &[])]
    #[case::none(&[], &[])]
    fn the_machines_that_differ_are_found(#[case] found: &[Option<u8>], #[case] wanted: &[(usize, usize)]) {
        assert_eq!(odd_ones(found), wanted);
    }

    #[test]
    fn differences_name_the_machine_with_which_they_differ() {
        let config = LaunchConfig::new(Program::Executable("/apps/train".into()), 1);
        let versions =
            |program: &str, libtorch: &str| Versions { program: Some(program.into()), libtorch: Some(libtorch.into()) };
        let all = [versions("x", "2.11.0"), versions("x", "2.11.0+cu130"), versions("y", "2.10.0+cpu")];
        let found: Vec<_> = ["a", "b", "c"]
            .iter()
            .zip(&all)
            .map(|(machine, versions)| Found { machine, config: &config, versions: Some(versions) })
            .collect();
        let found = differences(&found);
        let texts: Vec<_> = found.iter().map(|(index, problem)| (*index, problem.text.as_str())).collect();
        assert!(matches!(texts[..], [(2, _), (2, _)]), "{texts:?}");
        assert!(texts[0].1.starts_with("/apps/train has another content there than on a; "), "{texts:?}");
        assert!(texts[1].1.starts_with("the program would load libtorch 2.10.0 there and 2.11.0 on a; "), "{texts:?}");
    }

    #[test]
    fn what_no_agent_finds_is_not_plausible() {
        let versions = |program: Option<&str>, libtorch: Option<&str>| Versions {
            program: program.map(str::to_owned),
            libtorch: libtorch.map(str::to_owned),
        };
        assert!(
            versions(None, None).are_plausible()
                && versions(Some(&"0a".repeat(16)), Some("2.11.0+cpu")).are_plausible()
        );
        for (program, libtorch) in
            [(Some("x"), None), (None, Some("")), (None, Some("2.11\u{1b}[2J")), (None, Some("a b"))]
        {
            assert!(!versions(program, libtorch).are_plausible(), "{program:?} {libtorch:?}");
        }
    }
}
