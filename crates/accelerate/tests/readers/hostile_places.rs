//! Paths that lead to no readable file, for every reader.

use super::hostile::check_refused;
use accelerate::data::Dataset;
use accelerate::data::readers::{JsonLinesDataset, TokenFileDataset, TokenFileOptions};
use rustix::fs::{FileType, Mode};
use std::fs::File;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

type Reader = fn(&Path) -> accelerate::Result<usize>;

/// Number of rows, after the first of them has been read.
fn read<D: Dataset>(dataset: accelerate::Result<D>) -> accelerate::Result<usize> {
    let dataset = dataset?;
    dataset.get(0)?;
    Ok(dataset.len())
}

const READERS: &[(&str, Reader)] = &[
    ("JSON lines", |path| read(JsonLinesDataset::<i64>::from_files([path]))),
    ("tokens", |path| read(TokenFileDataset::from_files([path], &TokenFileOptions::default()))),
    #[cfg(feature = "csv")]
    ("CSV", |path| read(accelerate::data::readers::CsvDataset::<(String,)>::from_files([path]))),
    #[cfg(feature = "parquet")]
    ("Parquet", |path| read(accelerate::data::readers::ParquetDataset::<(i64,)>::from_files([path]))),
    #[cfg(feature = "arrow")]
    ("Arrow", |path| read(accelerate::data::readers::ArrowDataset::<(i64,)>::from_files([path]))),
];

/// Every reader refuses what `make` puts into an empty folder.
fn check(case: &str, parts: &[&str], make: impl FnOnce(&Path) -> PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = make(folder.path());
    for (reader, read) in READERS {
        check_refused(&format!("{reader}: {case}"), &path, parts, || read(&path));
    }
}

#[test]
fn devices_pipes_and_folders_are_not_read() {
    check("a folder", &["is a folder", "name its files one by one"], Path::to_owned);
    check("an endless device", &["is a device"], |_| PathBuf::from("/dev/zero"));
    check("an empty device", &["is a device"], |_| PathBuf::from("/dev/null"));
    check("a link to a device", &["is a device"], |folder| {
        symlink("/dev/urandom", folder.join("data")).unwrap();
        folder.join("data")
    });
    check("a pipe without a writer", &["is a pipe"], |folder| {
        let path = folder.join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap();
        path
    });
    check("a socket", &["is a socket"], |folder| {
        let path = folder.join("socket");
        UnixListener::bind(&path).unwrap();
        path
    });
}

#[test]
fn paths_that_lead_nowhere_are_named() {
    check("no file", &["cannot open", "No such file"], |folder| folder.join("absent"));
    check("a link to nothing", &["cannot open", "No such file"], |folder| {
        symlink("absent", folder.join("link")).unwrap();
        folder.join("link")
    });
    check("a link to itself", &["cannot open", "symbolic links"], |folder| {
        symlink("link", folder.join("link")).unwrap();
        folder.join("link")
    });
    check("a file as a folder", &["cannot open", "Not a directory"], |folder| {
        File::create(folder.join("file")).unwrap();
        folder.join("file/data")
    });
    check("a name that is too long", &["cannot open", "name too long"], |folder| folder.join("x".repeat(300)));
    check("a name with a zero byte", &["cannot open"], |folder| folder.join("a\0b"));
}
