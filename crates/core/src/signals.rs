//! What a process does with signals, as the kernel writes it down.

/// Which signals a process ignores and catches, as bit masks of the kernel.
///
/// ```
/// use accelerate_core::signals::Dispositions;
/// let status = "Name:\ttrain\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000004000\n";
/// let dispositions = Dispositions::parse(status);
/// assert!(dispositions.is_ignored(1) && dispositions.is_caught(15) && !dispositions.is_caught(1));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dispositions {
    ignored: u64,
    caught: u64,
}

impl Dispositions {
    /// Reads the text of `/proc/self/status`. Lines that are not there say that nothing is ignored or caught.
    pub fn parse(status: &str) -> Self {
        let mask = |name: &str| {
            let value = status.lines().find_map(|line| line.strip_prefix(name))?;
            u64::from_str_radix(value.trim(), 16).ok()
        };
        Self { ignored: mask("SigIgn:").unwrap_or(0), caught: mask("SigCgt:").unwrap_or(0) }
    }

    /// Does nothing happen when the signal with this number comes?
    pub fn is_ignored(self, signal: i32) -> bool {
        is_in(self.ignored, signal)
    }

    /// Does the process have a handler for it?
    pub fn is_caught(self, signal: i32) -> bool {
        is_in(self.caught, signal)
    }
}

/// The masks count from signal 1.
fn is_in(mask: u64, signal: i32) -> bool {
    u32::try_from(signal - 1).ok().and_then(|shift| mask.checked_shr(shift)).is_some_and(|mask| mask & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_masks_of_the_kernel_count_from_signal_one() {
        let status = "Name:\tx\nSigBlk:\t0\nSigIgn:\t0000000000001001\nSigCgt:\t0000000180004002\n";
        let dispositions = Dispositions::parse(status);
        assert!(dispositions.is_ignored(1) && dispositions.is_ignored(13) && !dispositions.is_ignored(2));
        assert!(dispositions.is_caught(2) && dispositions.is_caught(15) && !dispositions.is_caught(1));
        assert!(!dispositions.is_ignored(0) && !dispositions.is_ignored(65));
        assert_eq!(Dispositions::parse("SigIgn: all"), Dispositions::default());
    }
}
