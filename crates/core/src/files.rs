//! What may stand where somebody says that a file is.

use std::fs::FileType;
use std::os::unix::fs::FileTypeExt;

/// In words, what this is if it is not a regular file. Nothing else is opened where a user names a file to read: to open a
/// pipe is to wait for its writer, a device never ends, and some devices act on being opened.
///
/// ```
/// use accelerate_core::files::other_than_file;
/// assert_eq!(other_than_file(std::fs::metadata("/dev/zero")?.file_type()), Some("a device"));
/// assert_eq!(other_than_file(std::fs::metadata("/")?.file_type()), Some("a folder"));
/// assert_eq!(other_than_file(std::fs::metadata(std::env::current_exe()?)?.file_type()), None);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn other_than_file(kind: FileType) -> Option<&'static str> {
    match () {
        () if kind.is_file() => None,
        () if kind.is_dir() => Some("a folder"),
        () if kind.is_fifo() => Some("a pipe"),
        () if kind.is_socket() => Some("a socket"),
        () => Some("a device"),
    }
}
