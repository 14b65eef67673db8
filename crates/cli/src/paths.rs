//! Where paths lead, also before all that is on them exists.

use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// So many links a path may lead through, as on Linux.
const MOST_LINKS: usize = 40;

/// The place that a path leads to once the folders on it are made: absolute, and without links, `.` and `..`.
///
/// `new/../old` is `old` also while there is no `new`, since whoever makes the folders of a path makes `new` first.
pub(crate) fn resolved(path: &Path) -> io::Result<PathBuf> {
    // The current folder may have been removed, which is nothing to an absolute path.
    let mut place = if path.is_absolute() { PathBuf::new() } else { std::env::current_dir()? };
    let mut rest = Vec::new();
    push_parts(&mut rest, path);
    let mut num_links = 0;
    while let Some(part) = rest.pop() {
        if part == "." {
            continue;
        }
        if part == ".." {
            place.pop();
            continue;
        }
        let next = place.join(&part);
        match fs::symlink_metadata(&next) {
            Ok(found) if found.is_symlink() => {
                num_links += 1;
                if num_links > MOST_LINKS {
                    return Err(Errno::LOOP.into());
                }
                push_parts(&mut rest, &fs::read_link(&next)?);
            }
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            Ok(_) | Err(_) => place = next,
        }
    }
    Ok(place)
}

/// Pushes the parts of a path, the first of them last. That of an absolute path is the root, and joined to any path it is the root again.
fn push_parts(rest: &mut Vec<OsString>, path: &Path) {
    rest.extend(path.components().rev().map(|part| part.as_os_str().to_owned()));
}

/// Does a path lead into a folder, or to the folder itself? Folders are compared by what they are, so that one that is mounted in a second
/// place is known there, too. In a folder that does not exist is nothing.
pub(crate) fn is_within(path: &Path, folder: &Path) -> io::Result<bool> {
    let place = resolved(path)?;
    let Ok(folder) = fs::metadata(folder) else { return Ok(false) };
    let is_it = |found: Metadata| (found.dev(), found.ino()) == (folder.dev(), folder.ino());
    Ok(place.ancestors().any(|above| fs::metadata(above).is_ok_and(is_it)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;
    use std::os::unix::fs::symlink;

    /// A folder with `src/below`, a file, and links to folders, to nothing, and to each other.
    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("src/below")).unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        let links = [
            ("link", "src"),
            ("deep", "link/below"),
            ("nowhere", "absent/src"),
            ("one", "other"),
            ("other", "one"),
            ("src/up", ".."),
        ];
        links.iter().for_each(|(name, to)| symlink(to, folder.path().join(name)).unwrap());
        symlink(folder.path().join("src"), folder.path().join("absolute")).unwrap();
        folder
    }

    #[rstest]
    #[case("", "", false)]
    #[case(".", "", false)]
    #[case("src", "src", true)]
    #[case("src/", "src", true)]
    #[case("src/below/new", "src/below/new", true)]
    #[case("src2", "src2", false)]
    #[case("new/src", "new/src", false)]
    #[case("new/../src", "src", true)]
    #[case("new/more/../../src/new", "src/new", true)]
    #[case("src/../new", "new", false)]
    #[case("src/new/../../new2/..", "", false)]
    #[case("link/new", "src/new", true)]
    #[case("new/../link", "src", true)]
    #[case("deep/../new", "src/new", true)]
    #[case("link/../src2", "src2", false)]
    #[case("absolute/below", "src/below", true)]
    #[case("src/up/new", "new", false)]
    #[case("src/up/src/x", "src/x", true)]
    #[case("nowhere/x", "absent/src/x", false)]
    #[case("nowhere/../../src", "src", true)]
    fn a_path_leads_where_its_folders_will_be(#[case] path: &str, #[case] wanted: &str, #[case] within: bool) {
        let folder = folder();
        let root = fs::canonicalize(folder.path()).unwrap();
        let path = folder.path().join(path);
        assert_eq!(resolved(&path).unwrap(), root.join(wanted).components().collect::<PathBuf>());
        assert_eq!(is_within(&path, &folder.path().join("src")).unwrap(), within);
        assert_eq!(is_within(&path, &folder.path().join("link")).unwrap(), within, "a link to it is it");
        assert!(!is_within(&path, &folder.path().join("absent")).unwrap());
    }

    #[rstest]
    #[case::links_to_each_other("one/x")]
    #[case::a_file_as_folder("file/x")]
    fn what_leads_nowhere_is_an_error(#[case] path: &str) {
        let folder = folder();
        assert!(resolved(&folder.path().join(path)).is_err());
    }
}
