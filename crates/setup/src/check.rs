//! Whether a folder is the libtorch that is wanted.

use std::path::Path;

use accelerate_core::settings::read_file;

use super::error::{Result, SetupError};
use super::{VERSION, links};

/// Fails unless `folder` is a libtorch of the right version with headers and libraries.
pub(crate) fn check(folder: &Path, who: &'static str) -> Result<()> {
    if !folder.is_dir() {
        let found = if folder.exists() { "a file" } else { "nothing" };
        return Err(SetupError::NoFolder { who, folder: folder.to_path_buf(), found });
    }
    let missing = ["include/torch/csrc/api/include/torch/torch.h", "lib"]
        .into_iter()
        .chain(links::REQUIRED_LIBRARIES.iter().copied())
        .find(|part| !folder.join(part).exists());
    if let Some(part) = missing {
        return Err(SetupError::NotLibtorch { who, folder: folder.to_path_buf(), missing: part.to_owned() });
    }
    match version_of(folder) {
        Some(found) if base_version(&found) == VERSION => Ok(()),
        found => Err(SetupError::WrongVersion {
            who,
            folder: folder.to_path_buf(),
            found: found.unwrap_or_else(|| "of unknown version".to_owned()),
        }),
    }
}

/// The version a libtorch folder says it has: by its headers, or by the file `build-version`.
fn version_of(folder: &Path) -> Option<String> {
    let places = ["include/torch/headeronly/version.h", "include/torch/csrc/api/include/torch/version.h"];
    let header = places.iter().filter_map(|place| read_file(&folder.join(place)).ok());
    header
        .filter_map(|text| version_in_header(&text))
        .next()
        .or_else(|| read_file(&folder.join("build-version")).ok().map(|text| text.trim().to_owned()))
}

fn version_in_header(text: &str) -> Option<String> {
    let number = |name: &str| {
        text.lines().find_map(|line| {
            let value = line.strip_prefix("#define TORCH_VERSION_")?.strip_prefix(name)?;
            value.trim().parse::<u32>().ok()
        })
    };
    Some(format!("{}.{}.{}", number("MAJOR")?, number("MINOR")?, number("PATCH")?))
}

/// `2.11.0+cu130` is version `2.11.0`.
pub(crate) fn base_version(version: &str) -> &str {
    version.trim().split('+').next().unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs;

    fn folder_with(version: Option<&str>, libraries: bool) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("include/torch/csrc/api/include/torch")).unwrap();
        fs::write(folder.path().join("include/torch/csrc/api/include/torch/torch.h"), "").unwrap();
        fs::create_dir(folder.path().join("lib")).unwrap();
        if let Some(version) = version {
            fs::write(folder.path().join("build-version"), version).unwrap();
        }
        if libraries {
            for library in links::REQUIRED_LIBRARIES {
                fs::write(folder.path().join(library), "").unwrap();
            }
        }
        folder
    }

    #[test]
    fn a_libtorch_of_the_right_version_is_taken() {
        for version in ["2.11.0", "2.11.0+cpu", "2.11.0+cu130\n"] {
            check(folder_with(Some(version), true).path(), "LIBTORCH points at").unwrap();
        }
    }

    #[test]
    fn another_version_is_refused_by_found_and_wanted_version() {
        for version in ["2.10.1", "2.11.1+cpu", "12.11.0"] {
            let folder = folder_with(Some(version), true);
            let message = check(folder.path(), "LIBTORCH points at").unwrap_err().to_string();
            assert!(message.contains(version) && message.contains(VERSION), "{message}");
            assert!(message.contains("unset LIBTORCH"), "{message}");
        }
    }

    #[test]
    fn a_folder_without_headers_or_libraries_is_refused_by_what_is_missing() {
        let empty = tempfile::tempdir().unwrap();
        let message = check(empty.path(), "LIBTORCH points at").unwrap_err().to_string();
        assert!(message.contains("torch.h"), "{message}");
        let message = check(folder_with(Some(VERSION), false).path(), "x").unwrap_err().to_string();
        assert!(message.contains(links::REQUIRED_LIBRARIES[0]), "{message}");
    }

    #[test]
    fn what_is_no_folder_is_refused_by_what_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        for (path, want) in [(folder.path().join("absent"), "where there is nothing"), (file, "where there is a file")]
        {
            let message = check(&path, "LIBTORCH points at").unwrap_err().to_string();
            assert!(message.contains(want) && message.contains("unset LIBTORCH"), "{message}");
        }
    }

    #[test]
    fn the_header_decides_the_version() {
        let header = "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 9\n#define TORCH_VERSION_PATCH 1\n";
        assert_eq!(version_in_header(header).as_deref(), Some("2.9.1"));
        assert_eq!(version_in_header("#define TORCH_VERSION_MAJOR 2\n"), None);
        let folder = folder_with(Some(VERSION), true);
        fs::create_dir_all(folder.path().join("include/torch/headeronly")).unwrap();
        fs::write(folder.path().join("include/torch/headeronly/version.h"), header).unwrap();
        assert!(check(folder.path(), "x").unwrap_err().to_string().contains("2.9.1"));
    }
}
