//! Asking the kernel whether its out-of-memory killer has run, without the rights to read its log.

use std::path::{Path, PathBuf};

use crate::failure::MemoryPressure;

/// Counts of out-of-memory kills at some moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct KillCounter {
    /// Of processes of this cgroup, in which ranks are as well; the file and the number.
    own: Option<(PathBuf, u64)>,
    /// Of the whole machine, where other users' processes count as well.
    machine: Option<u64>,
}

impl KillCounter {
    pub(crate) fn read() -> Self {
        let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let file = file_of(&groups, Path::new("/sys/fs/cgroup"));
        Self { own: file.and_then(|file| Some((file.clone(), count_in(&file)?))), machine: of_machine() }
    }

    /// What has happened since `self` was read.
    pub(crate) fn since(&self) -> MemoryPressure {
        let own = self.own.as_ref().and_then(|(file, before)| Some(count_in(file)? > *before));
        let machine = self.machine.zip(of_machine()).map(|(before, now)| now > before);
        pressure(own, machine)
    }
}

/// From whether counters have risen.
fn pressure(own: Option<bool>, machine: Option<bool>) -> MemoryPressure {
    match (own, machine) {
        (Some(true), _) => MemoryPressure::KillerRan,
        (Some(false), _) | (None, Some(false)) => MemoryPressure::KillerDidNotRun,
        (None, Some(true)) => MemoryPressure::KillerRanOnMachine,
        (None, None) => MemoryPressure::Unknown,
    }
}

/// The file with the counter of this process's cgroup, by what `/proc/self/cgroup` says: a line is `number:controllers:path`, and
/// version 2 has no controllers. A path of another namespace is not there.
fn file_of(groups: &str, root: &Path) -> Option<PathBuf> {
    let files = groups.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?.trim_start_matches('/'));
        match controllers {
            "" => Some(root.join(path).join("memory.events")),
            _ if controllers.split(',').any(|name| name == "memory") => {
                Some(root.join("memory").join(path).join("memory.oom_control"))
            }
            _ => None,
        }
    });
    files.into_iter().find(|file| count_in(file).is_some())
}

fn of_machine() -> Option<u64> {
    count_in(Path::new("/proc/vmstat"))
}

fn count_in(file: &Path) -> Option<u64> {
    parse(&std::fs::read_to_string(file).ok()?)
}

/// The line `oom_kill NUMBER`, which all of these files have.
fn parse(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_counter_is_found_in_the_table() {
        assert_eq!(parse("nr_free_pages 12\noom_kill 3\noom_kill_disable 9\n"), Some(3));
        assert_eq!(parse("low 0\nhigh 0\nmax 0\noom 2\noom_kill 1\noom_group_kill 0\n"), Some(1));
        assert_eq!(parse("nr_free_pages 12\n"), None);
        assert_eq!(KillCounter::default().since(), MemoryPressure::Unknown);
    }

    #[test]
    fn kills_of_others_are_not_those_of_ranks() {
        use MemoryPressure::{KillerDidNotRun, KillerRan, KillerRanOnMachine, Unknown};
        for (own, machine, wanted) in [
            (Some(true), Some(true), KillerRan),
            (Some(false), Some(true), KillerDidNotRun),
            (Some(true), None, KillerRan),
            (None, Some(true), KillerRanOnMachine),
            (None, Some(false), KillerDidNotRun),
            (None, None, Unknown),
        ] {
            assert_eq!(pressure(own, machine), wanted, "{own:?} {machine:?}");
        }
    }

    #[test]
    fn the_file_of_a_group_is_found_in_both_versions() {
        let root = tempfile::tempdir().unwrap();
        let write = |name: &str| {
            let file = root.path().join(name);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(&file, "oom_kill 4\n").unwrap();
            file
        };
        let second = write("job/step/memory.events");
        let first = write("memory/job/memory.oom_control");
        for (groups, wanted) in [
            ("0::/job/step\n", Some(&second)),
            ("9:cpu,memory:/job\n1:cpu:/\n0::/\n", Some(&first)),
            ("0::/of/another/namespace\n", None),
            ("", None),
            ("nonsense", None),
        ] {
            assert_eq!(file_of(groups, root.path()).as_ref(), wanted, "{groups}");
        }
    }
}
