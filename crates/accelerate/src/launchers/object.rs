//! The file that a piece of code was loaded from: the program, or the library of a notebook's cell.

use std::io;

/// Where workers find the function that they begin with.
#[derive(Debug, PartialEq)]
pub(super) enum Object {
    /// The program itself, which reaches the function by its own `main`.
    Program,
    /// A library, by its path.
    Library(String),
}

impl Object {
    /// The object that `address` belongs to.
    pub(super) fn of(address: usize) -> io::Result<Self> {
        let program = std::fs::read_link("/proc/self/exe")?;
        let mappings = std::fs::read_to_string("/proc/self/maps")?;
        let path = file_at(&mappings, address).ok_or(io::ErrorKind::NotFound)?;
        Ok(if program.to_str() == Some(path) { Self::Program } else { Self::Library(path.to_owned()) })
    }
}

/// The file whose mapping holds `address`; lines are `start-end access offset device inode path`.
fn file_at(mappings: &str, address: usize) -> Option<&str> {
    mappings.lines().find_map(|line| {
        let (start, rest) = line.split_once('-')?;
        let (end, rest) = rest.split_once(' ')?;
        let bounds = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
        let path = rest.splitn(5, ' ').last()?.trim_start();
        (bounds.contains(&address) && path.starts_with('/')).then_some(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_an_address_is_found() {
        let mappings = "\
1000-2000 r--p 00000000 08:01 42                         /bin/train
2000-3000 r-xp 00001000 08:01 42                         /bin/train
3000-4000 rw-p 00000000 00:00 0
5000-6000 r-xp 00000000 08:01 43                         /a folder/libcode_7.so
6000-7000 rw-p 00000000 00:00 0                          [heap]";
        let rows = [
            (0x1000, Some("/bin/train")),
            (0x2fff, Some("/bin/train")),
            (0x3000, None),
            (0x4000, None),
            (0x5a00, Some("/a folder/libcode_7.so")),
            (0x6000, None),
        ];
        for (address, expected) in rows {
            assert_eq!(file_at(mappings, address), expected, "{address:x}");
        }
    }

    #[test]
    fn a_function_of_a_program_is_the_programs() -> io::Result<()> {
        assert_eq!(Object::of(file_at as fn(&str, usize) -> Option<&str> as usize)?, Object::Program);
        Ok(())
    }
}
