//! What this process holds that belongs to the processes it wants to start: accelerators and CUDA devices.
//!
//! The table of open files tells, because a process has one, while cells of a notebook each have a copy of this library with
//! variables of its own.

use crate::error::{LauncherError, Result};
use crate::state::PRESENCE;

/// Opened by the CUDA driver as soon as it is initialised, whichever library does it.
const CUDA: &str = "/dev/nvidia-uvm";

/// Refuses what the reference refuses.
pub(super) fn check() -> Result<()> {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten();
    let targets = entries.filter_map(|entry| entry.ok()?.path().read_link().ok()?.into_os_string().into_string().ok());
    check_targets(targets)
}

fn check_targets(targets: impl Iterator<Item = String>) -> Result<()> {
    let (mut num_accelerators, mut has_cuda) = (0, false);
    for target in targets {
        num_accelerators += usize::from(target.starts_with(&format!("/memfd:{PRESENCE} ")));
        has_cuda |= target == CUDA;
    }
    if num_accelerators > 0 {
        return Err(LauncherError::HasAccelerator { num_accelerators }.into());
    }
    if has_cuda {
        return Err(LauncherError::HasCuda.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accelerators_and_devices_are_seen_among_open_files() {
        let rows: [(&[&str], &str); 5] = [
            (&["/dev/null", "pipe:[12]", "/dev/nvidiactl", "/dev/nvidia-uvm-tools"], ""),
            (&["/memfd:accelerate-state (deleted)"], "1 accelerator"),
            (&["/memfd:accelerate-state (deleted)", "x", "/memfd:accelerate-state (deleted)"], "2 accelerators"),
            (&["/memfd:accelerate-statement (deleted)"], ""),
            (&["/dev/null", "/dev/nvidia-uvm"], "CUDA"),
        ];
        for (targets, expected) in rows {
            let text = check_targets(targets.iter().map(|target| (*target).to_owned())).err();
            let text = text.map(|error| error.to_string()).unwrap_or_default();
            assert!(text.contains(expected) && text.is_empty() == expected.is_empty(), "{targets:?}: {text}");
        }
    }
}
