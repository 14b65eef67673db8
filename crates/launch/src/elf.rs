//! Which libraries a program asks the loader for, and where the loader is to look: the dynamic section of a file in the form ELF,
//! of 64 bits with the lowest byte first, as Linux has it on x86-64 and AArch64.
//!
//! The file is anybody's, so nothing in it is believed: what lies outside of the file, or is longer than such things are, is an
//! error.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileExt;

const HEADER_BYTES: usize = 64;
const SEGMENT_BYTES: usize = 56;
/// The kind of a segment that is loaded.
const LOAD: u64 = 1;
/// That of the one with the dynamic section.
const DYNAMIC: u64 = 2;
/// Programs have tens of entries.
const MOST_DYNAMIC_BYTES: usize = 1 << 16;
/// Of a name or a list of folders.
const MOST_TEXT_BYTES: usize = 1 << 14;
/// Entries of the dynamic section: a library, the texts, and the two lists of folders.
const NEEDED: u64 = 1;
const TEXTS: u64 = 5;
const RPATH: u64 = 15;
const RUNPATH: u64 = 29;

/// What a program asks the loader for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Dynamic {
    /// Names of libraries.
    pub(super) needed: Vec<OsString>,
    /// Folders to look in before those of `LD_LIBRARY_PATH`, with colons between them.
    pub(super) rpath: Option<OsString>,
    /// Folders to look in after those. Where there are such, the others do not count.
    pub(super) runpath: Option<OsString>,
}

/// What this file says; `None` for a file of another form, such as a script, and for a program that needs no loader.
pub(super) fn dynamic(file: &File) -> io::Result<Option<Dynamic>> {
    let header = bytes_at(file, 0, HEADER_BYTES).unwrap_or_default();
    // The form, its width, and its order of bytes.
    if !header.starts_with(b"\x7fELF\x02\x01") || number(&header, 54, 2) != SEGMENT_BYTES as u64 {
        return Ok(None);
    }
    let num_segments = usize::try_from(number(&header, 56, 2)).map_err(io::Error::other)?;
    let table = bytes_at(file, number(&header, 32, 8), num_segments * SEGMENT_BYTES)?;
    let segments: Vec<Segment> = table.chunks_exact(SEGMENT_BYTES).map(Segment::read).collect();
    let Some(found) = segments.iter().find(|segment| segment.kind == DYNAMIC) else { return Ok(None) };
    let num_bytes = usize::try_from(found.num_bytes).ok().filter(|number| *number <= MOST_DYNAMIC_BYTES);
    let section = bytes_at(file, found.offset, num_bytes.ok_or_else(nonsense)?)?;
    let entries: Vec<(u64, u64)> =
        section.chunks_exact(16).map(|entry| (number(entry, 0, 8), number(entry, 8, 8))).collect();
    let values = |tag: u64| entries.iter().filter(move |entry| entry.0 == tag).map(|entry| entry.1);
    let texts = values(TEXTS).next().and_then(|address| offset_of(&segments, address));
    let text = |at: u64| text_at(file, texts.and_then(|texts| texts.checked_add(at)).ok_or_else(nonsense)?);
    Ok(Some(Dynamic {
        needed: values(NEEDED).map(text).collect::<io::Result<_>>()?,
        rpath: values(RPATH).next().map(text).transpose()?,
        runpath: values(RUNPATH).next().map(text).transpose()?,
    }))
}

/// A part of the file, and where it is in memory once it is loaded.
struct Segment {
    kind: u64,
    offset: u64,
    address: u64,
    num_bytes: u64,
}

impl Segment {
    fn read(bytes: &[u8]) -> Self {
        Self {
            kind: number(bytes, 0, 4),
            offset: number(bytes, 8, 8),
            address: number(bytes, 16, 8),
            num_bytes: number(bytes, 32, 8),
        }
    }
}

fn offset_of(segments: &[Segment], address: u64) -> Option<u64> {
    let within = |segment: &Segment| {
        let distance = address.checked_sub(segment.address)?;
        (segment.kind == LOAD && distance < segment.num_bytes).then_some(distance)?.checked_add(segment.offset)
    };
    segments.iter().find_map(within)
}

fn bytes_at(file: &File, offset: u64, num_bytes: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; num_bytes];
    file.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}

/// Up to the byte 0 that ends it.
fn text_at(file: &File, offset: u64) -> io::Result<OsString> {
    let mut bytes = vec![0; MOST_TEXT_BYTES];
    let num_read = file.read_at(&mut bytes, offset)?;
    let end = bytes[..num_read].iter().position(|byte| *byte == 0).ok_or_else(nonsense)?;
    bytes.truncate(end);
    Ok(OsString::from_vec(bytes))
}

/// 0 for what is not there.
fn number(bytes: &[u8], at: usize, num_bytes: usize) -> u64 {
    let bytes = bytes.get(at..at + num_bytes).unwrap_or_default();
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn nonsense() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "its dynamic section makes no sense")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use super::*;
    use std::io::Write;

    /// A file with nothing but a dynamic section: at 64 two segments, at 176 the entries, behind them the texts.
    pub(in crate::hosts) fn program(texts: &[(u64, &str)]) -> Vec<u8> {
        let texts_at = 176 + 16 * (texts.len() as u64 + 2);
        let mut table = vec![0];
        let mut entries = vec![(TEXTS, ADDRESS + texts_at)];
        for (tag, text) in texts {
            entries.push((*tag, table.len() as u64));
            table.extend_from_slice(text.as_bytes());
            table.push(0);
        }
        entries.push((0, 0));
        let num_bytes = texts_at + table.len() as u64;
        let mut file = b"\x7fELF\x02\x01\x01".to_vec();
        file.resize(32, 0);
        file.extend(64_u64.to_le_bytes());
        file.resize(54, 0);
        file.extend([56, 0, 2, 0]);
        file.resize(64, 0);
        for (kind, offset, num_bytes) in [(LOAD, 0, num_bytes), (DYNAMIC, 176, 16 * entries.len() as u64)] {
            for word in [kind, offset, ADDRESS + offset, ADDRESS + offset, num_bytes, num_bytes, 8] {
                file.extend(word.to_le_bytes());
            }
        }
        for (tag, value) in entries {
            file.extend([tag.to_le_bytes(), value.to_le_bytes()].concat());
        }
        file.extend(table);
        file
    }

    const ADDRESS: u64 = 0x40_0000;

    fn read(bytes: &[u8]) -> io::Result<Option<Dynamic>> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        dynamic(&file)
    }

    #[test]
    fn libraries_and_folders_are_read() {
        let file = program(&[(NEEDED, "libtorch_cpu.so"), (RUNPATH, "/a:/b"), (NEEDED, "libc.so.6"), (RPATH, "/c")]);
        let needed = ["libtorch_cpu.so", "libc.so.6"].map(OsString::from).to_vec();
        let wanted = Dynamic { needed, rpath: Some("/c".into()), runpath: Some("/a:/b".into()) };
        assert_eq!(read(&file).unwrap(), Some(wanted));
    }

    #[test]
    fn a_program_of_this_machine_is_read() {
        let own = dynamic(&File::open("/proc/self/exe").unwrap()).unwrap().unwrap();
        assert!(own.needed.iter().any(|name| name.to_string_lossy().starts_with("libc.so")), "{own:?}");
    }

    #[test]
    fn another_form_says_nothing() {
        let mut of_32_bits = program(&[]);
        of_32_bits[4] = 1;
        for bytes in [&b""[..], b"\x7fELF", b"#!/bin/sh\nexec train\n", &of_32_bits] {
            assert_eq!(read(bytes).unwrap(), None);
        }
    }

    /// However a file is cut or changed, it is read or refused.
    #[test]
    fn a_broken_file_is_no_harm() {
        let whole = program(&[(NEEDED, "libtorch.so"), (RUNPATH, "/a")]);
        for length in 64..whole.len() {
            let _ = read(&whole[..length]);
        }
        for place in 0..whole.len() {
            for byte in [0, 0x7f, 0xff] {
                let mut file = whole.clone();
                file[place] = byte;
                let _ = read(&file);
            }
        }
        // The number of the text's first byte, which lies behind the end of the file.
        let mut far = whole;
        far[176 + 16 + 8 + 7] = 0x7f;
        assert!(read(&far).is_err());
    }
}
