//! Asking the kernel whether its out-of-memory killer has run, without the rights to read its log.

use crate::failure::MemoryPressure;

/// The machine-wide count of out-of-memory kills (those by a container's limit included) at some moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KillCounter(Option<u64>);

impl KillCounter {
    pub(crate) fn read() -> Self {
        Self(std::fs::read_to_string("/proc/vmstat").ok().and_then(|text| parse(&text)))
    }

    /// What has happened since `self` was read.
    pub(crate) fn since(self) -> MemoryPressure {
        match (self.0, Self::read().0) {
            (Some(before), Some(now)) if now > before => MemoryPressure::KillerRan,
            (Some(_), Some(_)) => MemoryPressure::KillerDidNotRun,
            _ => MemoryPressure::Unknown,
        }
    }
}

fn parse(vmstat: &str) -> Option<u64> {
    vmstat.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counter_is_found_in_the_table() {
        assert_eq!(parse("nr_free_pages 12\noom_kill 3\noom_kill_disable 9\n"), Some(3));
        assert_eq!(parse("nr_free_pages 12\n"), None);
        assert_eq!(KillCounter(None).since(), MemoryPressure::Unknown);
    }
}
