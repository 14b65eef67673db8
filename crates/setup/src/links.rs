//! The folder `.libtorch` at the root of the repository: a real folder with links into a libtorch.
//!
//! `libtorch.so` is linked to `libtorch_cpu.so`: the wheel's own `libtorch.so` would pull
//! `libtorch_cuda.so` into every program, and with it CUDA libraries that a CPU machine lacks.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use accelerate_core::settings::read_file;

use super::VERSION;
use super::error::{Result, SetupError};

/// What must be in a libtorch folder.
#[cfg(not(target_os = "macos"))]
pub(crate) const REQUIRED_LIBRARIES: [&str; 2] = ["lib/libtorch_cpu.so", "lib/libc10.so"];
/// What must be in a libtorch folder.
#[cfg(target_os = "macos")]
pub(crate) const REQUIRED_LIBRARIES: [&str; 2] = ["lib/libtorch_cpu.dylib", "lib/libc10.dylib"];

/// What `libtorch_cpu.so` of a CUDA build needs beside itself; wheels keep it in another folder.
const CUDA_LIBRARIES: [&str; 2] = ["libcudart.so.13", "libcupti.so.13"];

/// The libtorch that `.libtorch` links to, if every link is there and leads somewhere.
pub(crate) fn current_target(root: &Path) -> Option<PathBuf> {
    let folder = root.join(".libtorch");
    let version = read_file(&folder.join("build-version")).ok()?;
    let libtorch = fs::read_link(folder.join("include")).ok()?.parent()?.to_path_buf();
    let complete = version.trim() == VERSION
        && expected(&libtorch).iter().all(|(name, target)| {
            let link = folder.join(name);
            fs::read_link(&link).is_ok_and(|found| found == *target) && link.exists()
        });
    complete.then_some(libtorch)
}

/// Makes `.libtorch` under `root` lead to the libtorch in `libtorch`. Right links are left alone:
/// touching them would make cargo build tch again.
pub(crate) fn write(root: &Path, libtorch: &Path) -> Result<()> {
    let folder = root.join(".libtorch");
    let lib = folder.join("lib");
    for own in [&folder, &lib] {
        make_own(own)?;
    }
    let expected = expected(libtorch);
    for (name, target) in &expected {
        let link = folder.join(name);
        if fs::read_link(&link).is_ok_and(|found| found == *target) {
            continue;
        }
        replace_link(&link, target)?;
    }
    remove_others(&lib, &expected)?;
    // git leaves out a folder that says so itself: the links are this machine's.
    let ignore = folder.join(".gitignore");
    if fs::symlink_metadata(&ignore).is_err() {
        write_anew(&ignore, "*\n")?;
    }
    let version = folder.join("build-version");
    let is_file = fs::symlink_metadata(&version).is_ok_and(|found| found.is_file());
    if is_file && read_file(&version).is_ok_and(|text| text.trim() == VERSION) {
        return Ok(());
    }
    let _ = fs::remove_file(&version);
    write_anew(&version, &format!("{VERSION}\n"))
}

/// A folder that is one, and no link to somebody else's.
fn make_own(folder: &Path) -> Result<()> {
    match fs::symlink_metadata(folder) {
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) => Err(SetupError::NotOurs { path: folder.to_path_buf() }),
        Err(_) => fs::create_dir_all(folder).map_err(|source| SetupError::io("create", folder, source)),
    }
}

/// Nothing is there: a link is not followed.
fn write_anew(path: &Path, text: &str) -> Result<()> {
    let written = fs::File::create_new(path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|source| SetupError::io("write", path, source))
}

/// Links of a libtorch that is no longer used would be found by the linker.
fn remove_others(lib: &Path, expected: &[(PathBuf, PathBuf)]) -> Result<()> {
    let entries = fs::read_dir(lib).map_err(|source| SetupError::io("read", lib, source))?;
    for entry in entries.flatten() {
        // What is no link is not ours.
        let is_link = entry.file_type().is_ok_and(|kind| kind.is_symlink());
        let wanted = !is_link || expected.iter().any(|(name, _)| name.file_name() == Some(&entry.file_name()));
        if !wanted {
            fs::remove_file(entry.path()).map_err(|source| SetupError::io("remove", &entry.path(), source))?;
        }
    }
    Ok(())
}

/// The new link replaces the old one in one step, so that a build running now never finds none.
fn replace_link(link: &Path, target: &Path) -> Result<()> {
    let fresh = link.with_added_extension(format!("new-{}", std::process::id()));
    let _ = fs::remove_file(&fresh);
    symlink(target, &fresh).map_err(|source| SetupError::io("create", &fresh, source))?;
    fs::rename(&fresh, link).map_err(|source| SetupError::io("replace", link, source))
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(not(unix))]
fn symlink(target: &Path, link: &Path) -> std::io::Result<()> {
    if target.is_dir() {
        std::os::windows::fs::symlink_dir(target, link)
    } else {
        std::os::windows::fs::symlink_file(target, link)
    }
}

/// Link name, relative to `.libtorch`, and where it leads.
fn expected(libtorch: &Path) -> Vec<(PathBuf, PathBuf)> {
    let lib = libtorch.join("lib");
    let mut links = vec![(PathBuf::from("include"), libtorch.join("include"))];
    for library in REQUIRED_LIBRARIES {
        links.push((PathBuf::from(library), libtorch.join(library)));
    }
    let whole = REQUIRED_LIBRARIES[0].replace("torch_cpu", "torch");
    links.push((PathBuf::from(whole), libtorch.join(REQUIRED_LIBRARIES[0])));
    for name in openmp_libraries(&lib) {
        links.push((Path::new("lib").join(&name), lib.join(&name)));
    }
    // A libtorch archive has them in `lib`; a wheel has them in the package `nvidia` beside it.
    let places = [Some(lib.clone()), libtorch.parent().map(|home| home.join("nvidia/cu13/lib"))];
    for name in CUDA_LIBRARIES {
        let found = places.iter().flatten().map(|place| place.join(name)).find(|path| path.exists());
        links.extend(found.map(|path| (Path::new("lib").join(name), path)));
    }
    links
}

/// libtorch is linked against the OpenMP runtime it ships, whose name differs between builds.
fn openmp_libraries(lib: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(lib) else {
        return Vec::new();
    };
    let is_openmp = |name: &str| ["libgomp", "libomp", "libiomp5"].iter().any(|stem| name.starts_with(stem));
    let mut names: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| PathBuf::from(entry.file_name()))
        .filter(|name| is_openmp(&name.to_string_lossy()))
        .collect();
    names.sort();
    names
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn wheel(home: &Path) -> PathBuf {
        let torch = home.join("torch");
        fs::create_dir_all(torch.join("include")).unwrap();
        fs::create_dir_all(torch.join("lib")).unwrap();
        fs::create_dir_all(home.join("nvidia/cu13/lib")).unwrap();
        for name in ["libtorch_cpu.so", "libc10.so", "libtorch.so", "libgomp.so.1", "libtorch_cuda.so"] {
            fs::write(torch.join("lib").join(name), name).unwrap();
        }
        for name in CUDA_LIBRARIES {
            fs::write(home.join("nvidia/cu13/lib").join(name), name).unwrap();
        }
        torch
    }

    #[test]
    fn the_folder_holds_the_cpu_libraries_and_nothing_else() {
        let (root, home) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let torch = wheel(home.path());
        write(root.path(), &torch).unwrap();
        let mut names: Vec<String> = fs::read_dir(root.path().join(".libtorch/lib"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        let want = ["libc10.so", "libcudart.so.13", "libcupti.so.13", "libgomp.so.1", "libtorch.so", "libtorch_cpu.so"];
        assert_eq!(names, want);
        // The linker must not be led to libtorch_cuda.
        let whole = fs::read_to_string(root.path().join(".libtorch/lib/libtorch.so")).unwrap();
        assert_eq!(whole, "libtorch_cpu.so");
        assert_eq!(current_target(root.path()), Some(torch));
    }

    #[test]
    fn a_broken_link_a_missing_link_or_another_version_is_not_current() {
        let (root, home) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let torch = wheel(home.path());
        let breakages: [fn(&Path, &Path); 4] = [
            |root, _| fs::remove_file(root.join(".libtorch/lib/libc10.so")).unwrap(),
            |root, _| fs::write(root.join(".libtorch/build-version"), "2.10.0").unwrap(),
            |root, _| fs::remove_file(root.join(".libtorch/lib/libcudart.so.13")).unwrap(),
            |_, torch| fs::remove_file(torch.join("lib/libtorch_cpu.so")).unwrap(),
        ];
        for (number, breakage) in breakages.iter().enumerate() {
            write(root.path(), &torch).unwrap();
            assert_eq!(current_target(root.path()), Some(torch.clone()), "before breakage {number}");
            breakage(root.path(), &torch);
            assert_eq!(current_target(root.path()), None, "after breakage {number}");
        }
    }

    #[test]
    fn another_libtorch_replaces_every_link() {
        let (root, first, second) =
            (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write(root.path(), &wheel(first.path())).unwrap();
        let other = wheel(second.path());
        fs::rename(other.join("lib/libgomp.so.1"), other.join("lib/libgomp-98b21ff3.so.1")).unwrap();
        write(root.path(), &other).unwrap();
        assert_eq!(current_target(root.path()), Some(other));
        assert!(!root.path().join(".libtorch/lib/libgomp.so.1").is_symlink());
    }

    #[test]
    fn what_links_lead_to_and_files_of_others_stay() {
        let (root, home, precious) =
            (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let torch = wheel(home.path());
        let thesis = precious.path().join("thesis.txt");
        fs::write(&thesis, "important").unwrap();
        let folder = root.path().join(".libtorch");
        fs::create_dir(&folder).unwrap();
        symlink(precious.path(), &folder.join("lib")).unwrap();
        assert!(write(root.path(), &torch).unwrap_err().to_string().contains("lib` is a link"));
        fs::remove_file(folder.join("lib")).unwrap();
        for name in ["build-version", ".gitignore"] {
            symlink(&thesis, &folder.join(name)).unwrap();
        }
        fs::create_dir(folder.join("lib")).unwrap();
        fs::write(folder.join("lib/notes.txt"), "mine").unwrap();
        write(root.path(), &torch).unwrap();
        assert_eq!(fs::read_to_string(&thesis).unwrap(), "important");
        assert_eq!(fs::read_dir(precious.path()).unwrap().count(), 1);
        assert_eq!(fs::read_to_string(folder.join("lib/notes.txt")).unwrap(), "mine");
        assert_eq!(current_target(root.path()), Some(torch));
    }

    #[test]
    fn a_second_run_touches_nothing() {
        let (root, home) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let torch = wheel(home.path());
        write(root.path(), &torch).unwrap();
        let written_at = || {
            let version = fs::metadata(root.path().join(".libtorch/build-version")).unwrap();
            let link = fs::symlink_metadata(root.path().join(".libtorch/lib/libc10.so")).unwrap();
            (version.modified().unwrap(), link.modified().unwrap())
        };
        let before = written_at();
        write(root.path(), &torch).unwrap();
        assert_eq!(written_at(), before);
    }
}
