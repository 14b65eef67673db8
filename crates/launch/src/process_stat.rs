//! What the kernel says of a process in `/proc/PID/stat`.

/// Of `PF_KTHREAD` in the kernel.
const IS_KERNEL_THREAD: u32 = 0x0020_0000;

/// The fields that are asked for here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProcessStat {
    /// Has it ended, whether or not anybody has collected it?
    pub(crate) has_ended: bool,
    pub(crate) parent: i32,
    pub(crate) group: i32,
    pub(crate) is_kernel_thread: bool,
    /// In ticks of the kernel's clock since the start of the machine.
    pub(crate) started_at: u64,
    /// Where its environment ends in memory; 0 for one that is becoming another program, and for those that this process may not
    /// look at.
    pub(crate) environment_end: u64,
}

impl ProcessStat {
    /// Of a process that there is.
    pub(crate) fn read(process: &str) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?)
    }

    /// The second field is a name in parentheses that may itself contain spaces and parentheses. Fields are numbered from 1, as in the
    /// manual.
    pub(crate) fn parse(stat: &str) -> Option<Self> {
        let (_, after_name) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = after_name.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3).copied();
        let flags: u32 = field(9)?.parse().ok()?;
        Some(Self {
            has_ended: matches!(field(3)?, "Z" | "X"),
            parent: field(4)?.parse().ok()?,
            group: field(5)?.parse().ok()?,
            is_kernel_thread: flags & IS_KERNEL_THREAD != 0,
            started_at: field(22)?.parse().ok()?,
            environment_end: field(51).and_then(|text| text.parse().ok()).unwrap_or_default(),
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;

    /// A line as the kernel writes it.
    pub(crate) fn stat(name: &str, state: &str, flags: u32, started_at: u64, environment_end: u64) -> String {
        let zeros = |num: usize| vec!["0"; num].join(" ");
        let (to_start, to_end) = (zeros(12), zeros(28));
        format!("12 ({name}) {state} 7 12 12 0 -1 {flags} {to_start} {started_at} {to_end} {environment_end} 0")
    }

    #[test]
    fn fields_are_found_behind_any_name() {
        for name in ["sh", "a) S 9 (b c", ""] {
            let found = ProcessStat::parse(&stat(name, "S", 4_194_304, 88, 99)).unwrap();
            let wanted = ProcessStat {
                has_ended: false,
                parent: 7,
                group: 12,
                is_kernel_thread: false,
                started_at: 88,
                environment_end: 99,
            };
            assert_eq!(found, wanted, "{name}");
        }
        let is = |state: &str, flags: u32| ProcessStat::parse(&stat("x", state, flags, 1, 0)).unwrap();
        assert!(is("Z", 0).has_ended && is("X", 0).has_ended && is("I", 0x0021_0000).is_kernel_thread);
        assert_eq!(ProcessStat::parse("12"), None);
        assert_eq!(ProcessStat::parse("12 (sh) S 7"), None);
    }

    #[test]
    fn this_process_is_found() {
        let own = ProcessStat::read("self").unwrap();
        assert!(!own.has_ended && !own.is_kernel_thread && own.environment_end > 0 && own.started_at > 0);
        assert_eq!(ProcessStat::read("no process"), None);
    }
}
