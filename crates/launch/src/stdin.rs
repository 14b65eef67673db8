//! What a rank reads from.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::process::Stdio;

use rustix::fs::{MemfdFlags, memfd_create};

use crate::config::LaunchConfig;
use crate::machine::Machine;

/// What a rank reads from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stdin {
    /// The launcher's own standard input.
    Inherited,
    /// Nothing: end of file at once.
    Nothing,
    /// These bytes, and then nothing.
    Given(Vec<u8>),
}

impl Stdin {
    /// Of several ranks only the first can read, and not from a terminal: the kernel would stop it there,
    /// because its process group is not the one in the foreground.
    pub(crate) fn of_rank(config: &LaunchConfig, local_rank: usize, machine: &Machine) -> Self {
        let is_first = config.num_local_processes() == 1 || (local_rank == 0 && !machine.stdin_is_terminal);
        match &config.input {
            Some(bytes) => Self::Given(bytes.clone()),
            None if config.hands_on_input && is_first => Self::Inherited,
            None => Self::Nothing,
        }
    }

    pub(crate) fn open(&self) -> io::Result<Stdio> {
        Ok(match self {
            Self::Inherited => Stdio::inherit(),
            Self::Nothing => Stdio::null(),
            Self::Given(bytes) => {
                // A file in memory and not a pipe, which somebody would have to fill while the rank reads it.
                let mut file = File::from(memfd_create("accelerate-input", MemfdFlags::CLOEXEC)?);
                file.write_all(bytes)?;
                file.rewind()?;
                file.into()
            }
        })
    }
}
