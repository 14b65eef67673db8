//! A sign in the process's table of open files that it has an accelerator.
//!
//! Launchers look for it. A static would not do: the cells of a notebook each have their own copy of this library.

use rustix::fs::{MemfdFlags, memfd_create};
use std::os::fd::OwnedFd;

/// The name of the sign.
pub(crate) const PRESENCE: &str = "accelerate-state";

/// Shows for as long as it lives. A system that allows no such file goes without the sign.
#[derive(Debug)]
pub(super) struct Presence {
    _sign: Option<OwnedFd>,
}

impl Presence {
    pub(super) fn show() -> Self {
        Self { _sign: memfd_create(PRESENCE, MemfdFlags::CLOEXEC).ok() }
    }
}
