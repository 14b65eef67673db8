//! Files that anybody may have put there.

use accelerate_core::weight_files::Checksum;
use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use super::error::Problem;

/// How much of a file is read at once.
pub(super) const BLOCK_BYTES: usize = 1 << 20;

/// Opens a regular file, or what a link leads to if it is one, and says how long it is. Nothing else is opened: a pipe would
/// keep its reader waiting, and a device has no end.
pub(super) fn open(path: &Path) -> Result<(File, u64), Problem> {
    refuse_others(fs::metadata(path).map_err(Problem::of)?.file_type())?;
    // Another process may have put a pipe there since.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(Problem::of)?;
    let metadata = file.metadata().map_err(Problem::of)?;
    refuse_others(metadata.file_type())?;
    Ok((file, metadata.len()))
}

fn refuse_others(found: FileType) -> Result<(), Problem> {
    let found = match found {
        found if found.is_file() => return Ok(()),
        found if found.is_dir() => "a folder",
        found if found.is_fifo() => "a pipe",
        found if found.is_socket() => "a socket",
        _ => "a device",
    };
    Err(Problem::NotAFile { found })
}

/// The content of a file of at most so many bytes.
pub(super) fn read_small(path: &Path, most_bytes: u64) -> Result<Vec<u8>, Problem> {
    let (file, found_bytes) = open(path)?;
    if found_bytes > most_bytes {
        return Err(Problem::Large { found_bytes, most_bytes });
    }
    let mut content = Vec::new();
    // The file may have grown since.
    file.take(found_bytes).read_to_end(&mut content).map_err(Problem::of)?;
    Ok(content)
}

/// The checksum of the first `num_bytes` of a file. `read_bytes` is told of each block that was read.
pub(super) fn content_checksum(file: &File, num_bytes: u64, read_bytes: impl Fn(u64)) -> io::Result<Checksum> {
    let mut checksum = Checksum::new();
    let mut block = vec![0; BLOCK_BYTES];
    let mut rest = file.take(num_bytes);
    loop {
        match rest.read(&mut block) {
            Ok(0) => return Ok(checksum),
            Ok(read) => {
                checksum.update(&block[..read]);
                read_bytes(read as u64);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// The names in a folder, in alphabetical order.
pub(super) fn names_in(folder: &Path) -> io::Result<Vec<String>> {
    let mut names: Vec<String> = fs::read_dir(folder)?
        .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
        .collect::<io::Result<_>>()?;
    names.sort_unstable();
    Ok(names)
}
