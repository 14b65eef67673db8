//! What may stand where somebody says that a file is, and how names of files are shown.

use std::ffi::OsStr;
use std::fs::FileType;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

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

/// Names as messages show them: in one line, and without characters that a terminal would obey.
///
/// A name is whatever somebody has chosen, so that it could end a line and begin another one that looks like a message.
/// Every name of a file in a message is shown by this.
pub trait ShownPath {
    /// The whole name. Bytes that are no UTF-8 are shown as numbers.
    ///
    /// ```
    /// use accelerate_core::files::ShownPath;
    /// assert_eq!(std::path::Path::new("run 1/naïve.yaml").shown(), "run 1/naïve.yaml");
    /// assert_eq!(std::path::Path::new("a\u{1b}[2J\nb").shown(), "a\\u{1b}[2J\\nb");
    /// ```
    fn shown(&self) -> String;
}

impl ShownPath for Path {
    fn shown(&self) -> String {
        self.as_os_str().shown()
    }
}

impl ShownPath for OsStr {
    fn shown(&self) -> String {
        let mut text = String::new();
        for chunk in self.as_bytes().utf8_chunks() {
            text += &in_one_line(chunk.valid());
            chunk.invalid().iter().for_each(|byte| text += &format!("\\x{byte:02x}"));
        }
        text
    }
}

/// A text from elsewhere for a line of a message: without characters that a terminal would obey, or that end the line.
///
/// ```
/// use accelerate_core::files::in_one_line;
/// assert_eq!(in_one_line("\"é\" \\"), "\"é\" \\");
/// assert_eq!(in_one_line("a\r\nb\u{202e}\u{feff}"), "a\\r\\nb\\u{202e}\\u{feff}");
/// ```
pub fn in_one_line(text: &str) -> String {
    escaped(text, |_| false)
}

/// The same of a text of several lines: line feeds and tabs stay.
///
/// ```
/// use accelerate_core::files::printable;
/// assert_eq!(printable("a\nb\u{1b}[31m"), "a\nb\\u{1b}[31m");
/// ```
pub fn printable(text: &str) -> String {
    escaped(text, |letter| letter == '\n' || letter == '\t')
}

fn escaped(text: &str, stays: impl Fn(char) -> bool) -> String {
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        match is_obeyed(letter) && !stays(letter) {
            true => shown.extend(letter.escape_debug()),
            false => shown.push(letter),
        }
    }
    shown
}

/// Control characters, separators of lines, those that turn the direction of writing, and those that nobody sees.
fn is_obeyed(letter: char) -> bool {
    letter.is_control()
        || matches!(letter, '\u{61c}' | '\u{200b}' | '\u{2060}' | '\u{feff}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}
