//! Reading a settings file from disk, whatever stands there.

use super::document::MAX_BYTES;
use crate::files::other_than_file;
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

/// The text of the settings file at `path`: YAML or JSON of Accelerate, or JSON of DeepSpeed.
///
/// Devices and pipes have no end or do not begin, so only a regular file is opened, and no more than 1 MiB of it is read.
///
/// # Errors
///
/// What opening and reading fail with; a path that is no regular file, saying what it is; more than 1 MiB; bytes that are
/// no UTF-8. The texts leave out the path, which the caller knows.
///
/// ```
/// use accelerate_core::settings::read_file;
/// let error = read_file("/dev/zero".as_ref()).unwrap_err();
/// assert_eq!(error.to_string(), "it is a device; settings are read from a regular file");
/// ```
pub fn read_file(path: &Path) -> Result<String> {
    let metadata = path.metadata()?;
    if let Some(found) = other_than_file(metadata.file_type()) {
        let text = format!("it is {found}; settings are read from a regular file");
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    let most = MAX_BYTES as u64;
    if metadata.len() > most {
        return Err(too_large(&format!("{} bytes", metadata.len())));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    // Files of the kernel and files that grow have more than their metadata say.
    if bytes.len() > MAX_BYTES {
        return Err(too_large("more"));
    }
    String::from_utf8(bytes).map_err(|error| {
        let position = error.utf8_error().valid_up_to();
        let line = 1 + error.as_bytes()[..position].iter().filter(|&&byte| byte == b'\n').count();
        let text = format!("line {line} has bytes that are no text in UTF-8; write the file in the encoding UTF-8");
        Error::new(ErrorKind::InvalidData, text)
    })
}

fn too_large(found: &str) -> Error {
    let text = format!("it has {found}, but a settings file may have at most {MAX_BYTES} bytes");
    Error::new(ErrorKind::FileTooLarge, text)
}
