//! Host files: `host slots=4` as Open MPI and DeepSpeed write them, `host:4` as MPICH does, or a name alone.

use std::path::Path;

use super::{Hosts, count, host_and_number};
use crate::Result;
use crate::error::hosts::HostsErrorKind as Kind;
use crate::files::ShownPath;
use crate::settings::shortened_line;

impl Hosts {
    /// Reads the text of a host file, one machine on each line. What follows a `#` is a comment, and a mark of the order of bytes
    /// before the text, as some editors write, means nothing.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config), with the line.
    ///
    /// ```
    /// use accelerate_core::hosts::Hosts;
    /// let hosts = Hosts::parse_file("# two machines\nnode1 slots=4 max_slots=8\nnode2:2\n", "hosts".as_ref())?;
    /// assert_eq!(hosts.num_processes(None, 1)?, [4, 2]);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn parse_file(text: &str, path: &Path) -> Result<Self> {
        let mut list = Vec::new();
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        for (index, line) in text.lines().enumerate() {
            let line = joined(line.split('#').next().unwrap_or_default());
            let place = format!("{}:{}", path.shown(), index + 1);
            let mut words = line.split_whitespace();
            let Some(first) = words.next() else { continue };
            let mut host = host_and_number(first, &place)?;
            for word in words {
                match word.split_once('=') {
                    Some(("slots", number)) if host.num_processes.is_none() => {
                        host.num_processes = Some(count(number, word, &place)?);
                    }
                    // How many a machine could have at most decides nothing where the number is said.
                    Some(("max_slots" | "max-slots", _)) => {}
                    _ => {
                        return Err(Kind::Word { word: shortened_line(word), place }.into());
                    }
                }
            }
            list.push(host);
        }
        Self::new(list, &path.shown().to_string())
    }
}

/// The line with `slots = 4` as one word, as Open MPI reads it.
fn joined(line: &str) -> String {
    line.split('=').map(str::trim).collect::<Vec<_>>().join("=")
}
