//! Files in the form ELF: for which kind of machine a program is, and, of 64 bits with the lowest byte first, as Linux has it on
//! x86-64 and AArch64, which libraries it asks the loader for and where the loader is to look.
//!
//! The file is anybody's, so nothing in it is believed: what lies outside of the file, or is longer than such things are, is an
//! error.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileExt;

/// Of the header, what says for which kind of machine the file is.
const TARGET_BYTES: usize = 20;
const HEADER_BYTES: usize = 64;
/// The form, its width, and its order of bytes.
const FORM: &[u8] = b"\x7fELF\x02\x01";
/// The kinds of files that are run: those at a fixed address, and those that may be anywhere.
const PROGRAMS: [u64; 2] = [2, 3];
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

/// The kind of machine that a program is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    is_64_bits: bool,
    has_lowest_byte_first: bool,
    number: u64,
}

/// The kinds that people have, with what they are called.
const TARGETS: [(u64, &str); 7] = [
    (3, "x86 with 32 bits"),
    (21, "PowerPC with 64 bits"),
    (22, "S/390"),
    (40, "ARM with 32 bits"),
    (62, "x86-64"),
    (183, "AArch64"),
    (243, "RISC-V"),
];

impl Target {
    /// What this file is for; `None` for a file of another form, such as a script. One that ends within the first bytes of the form
    /// is an error.
    pub(crate) fn of(file: &File) -> io::Result<Option<Self>> {
        let mut header = vec![0; TARGET_BYTES];
        let num_read = file.read_at(&mut header, 0)?;
        if !header[..num_read].starts_with(b"\x7fELF") {
            return Ok(None);
        }
        if num_read < TARGET_BYTES {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let has_lowest_byte_first = header[5] == 1;
        let number = match has_lowest_byte_first {
            true => number(&header, 18, 2),
            false => u64::from(header[18]) << 8 | u64::from(header[19]),
        };
        Ok(Some(Self { is_64_bits: header[4] == 2, has_lowest_byte_first, number }))
    }

    /// May a machine of this kind run programs of the other? Those with 64 bits may run those with 32 of the same family.
    pub(crate) fn may_run(self, other: Self) -> bool {
        self == other || matches!((self.number, other.number), (62, 3 | 62) | (183, 40))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match TARGETS.iter().find(|(number, _)| *number == self.number) {
            Some((_, name)) => f.write_str(name),
            None => write!(f, "another kind of machine (number {} in its header)", self.number),
        }
    }
}

/// Is there all of the file that the kernel would load? Of one with damaged parts it would say that it is no program, and a shell would
/// read it as a script. A file of another form, or of another width or order of bytes, is not looked at.
pub(crate) fn is_whole(file: &File) -> io::Result<bool> {
    let num_bytes = file.metadata()?.len();
    let header = bytes_at(file, 0, HEADER_BYTES).unwrap_or_default();
    if !header.starts_with(FORM) {
        return Ok(true);
    }
    let is_program = PROGRAMS.contains(&number(&header, 16, 2)) && number(&header, 54, 2) == SEGMENT_BYTES as u64;
    let Ok(segments) = segments(file, &header) else { return Ok(false) };
    let is_there =
        |segment: &Segment| segment.offset.checked_add(segment.num_bytes).is_some_and(|end| end <= num_bytes);
    let mut loaded = segments.iter().filter(|segment| segment.kind == LOAD).peekable();
    Ok(is_program && loaded.peek().is_some() && loaded.all(is_there))
}

/// What a program asks the loader for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Dynamic {
    /// Names of libraries.
    pub(crate) needed: Vec<OsString>,
    /// Folders to look in before those of `LD_LIBRARY_PATH`, with colons between them.
    pub(crate) rpath: Option<OsString>,
    /// Folders to look in after those. Where there are such, the others do not count.
    pub(crate) runpath: Option<OsString>,
}

/// What this file says; `None` for a file of another form, such as a script, and for a program that needs no loader.
pub(crate) fn dynamic(file: &File) -> io::Result<Option<Dynamic>> {
    let header = bytes_at(file, 0, HEADER_BYTES).unwrap_or_default();
    if !header.starts_with(FORM) || number(&header, 54, 2) != SEGMENT_BYTES as u64 {
        return Ok(None);
    }
    let segments = segments(file, &header)?;
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

fn segments(file: &File, header: &[u8]) -> io::Result<Vec<Segment>> {
    let num_segments = usize::try_from(number(header, 56, 2)).map_err(io::Error::other)?;
    let table = bytes_at(file, number(header, 32, 8), num_segments * SEGMENT_BYTES)?;
    Ok(table.chunks_exact(SEGMENT_BYTES).map(Segment::read).collect())
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
pub(crate) mod tests {
    use super::*;
    use std::io::Write;

    /// A file with nothing but a dynamic section: at 64 two segments, at 176 the entries, behind them the texts.
    pub(crate) fn program(texts: &[(u64, &str)]) -> Vec<u8> {
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
    fn a_program_that_is_cut_off_or_damaged_is_not_whole() {
        let mut own = std::fs::read("/proc/self/exe").unwrap();
        let is_whole = |bytes: &[u8]| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(bytes).unwrap();
            super::is_whole(&file).unwrap()
        };
        assert!(is_whole(&own) && is_whole(b"#!/bin/sh\n") && is_whole(b""));
        for num_bytes in [64, 100, 4096] {
            assert!(!is_whole(&own[..num_bytes]), "{num_bytes}");
        }
        // The kind of file, the size of an entry, and the number of them.
        for at in [16, 54, 56] {
            let byte = std::mem::replace(&mut own[at], 0);
            assert!(!is_whole(&own), "{at}");
            own[at] = byte;
        }
        // An address of the table where nothing is.
        own[39] = 0x7f;
        assert!(!is_whole(&own));
    }

    #[test]
    fn a_program_of_this_machine_is_read() {
        let own = dynamic(&File::open("/proc/self/exe").unwrap()).unwrap().unwrap();
        assert!(own.needed.iter().any(|name| name.to_string_lossy().starts_with("libc.so")), "{own:?}");
    }

    /// The beginning of a file of this kind.
    pub(crate) fn header(class: u8, order: u8, machine: [u8; 2]) -> Vec<u8> {
        [&b"\x7fELF"[..], &[class, order, 1], &[0; 9], &[2, 0], &machine].concat()
    }

    fn target(bytes: &[u8]) -> io::Result<Option<Target>> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        Target::of(&file)
    }

    #[test]
    fn the_kind_of_machine_is_read_in_either_order_of_bytes() {
        let named = |bytes: &[u8]| target(bytes).unwrap().unwrap().to_string();
        assert_eq!(named(&header(2, 1, [62, 0])), "x86-64");
        assert_eq!(named(&header(2, 1, [183, 0])), "AArch64");
        assert_eq!(named(&header(2, 2, [0, 22])), "S/390");
        assert_eq!(named(&header(2, 1, [1, 2])), "another kind of machine (number 513 in its header)");
        assert_eq!(target(b"#!/bin/sh\n").unwrap(), None);
        assert!(target(&header(2, 1, [62, 0])[..19]).is_err());
    }

    #[test]
    fn a_machine_runs_its_own_kind_and_the_narrower_one() {
        let kind = |class, order, machine| target(&header(class, order, machine)).unwrap().unwrap();
        let (x86_64, aarch64) = (kind(2, 1, [62, 0]), kind(2, 1, [183, 0]));
        assert!(x86_64.may_run(x86_64) && x86_64.may_run(kind(1, 1, [3, 0])) && x86_64.may_run(kind(1, 1, [62, 0])));
        assert!(!x86_64.may_run(aarch64) && !aarch64.may_run(x86_64) && aarch64.may_run(kind(1, 1, [40, 0])));
        assert!(!kind(1, 1, [243, 0]).may_run(kind(2, 1, [243, 0])));
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
