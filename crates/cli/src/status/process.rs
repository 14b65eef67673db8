//! Processes that are told from later ones of the same number.

use std::fs;

/// A process that was there.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Process {
    id: u32,
    /// When it was started, in ticks since the machine was.
    started: u64,
}

impl Process {
    /// `None`: there is none of this number, or it has ended and nobody has taken notice.
    pub(super) fn of(id: u32) -> Option<Self> {
        read(&fs::read_to_string(format!("/proc/{id}/stat")).ok()?).map(|started| Self { id, started })
    }

    pub(super) fn id(&self) -> u32 {
        self.id
    }

    pub(super) fn is_alive(&self) -> bool {
        Self::of(self.id).as_ref() == Some(self)
    }
}

/// When a process that lives was started. Its name, in parentheses, may have anything in it.
fn read(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    match fields.next()? {
        "Z" | "X" => None,
        _ => fields.nth(18)?.parse().ok(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::a_process("S", Some(77))]
    #[case::one_that_has_ended("Z", None)]
    fn the_start_is_the_22nd_field(#[case] state: &str, #[case] started: Option<u64>) {
        let zeros = "0 ".repeat(18);
        assert_eq!(read(&format!("12 (a) b (c)) {state} {zeros}77 5 6")), started);
        assert_eq!(read("12 (a) S 1"), None);
    }

    #[test]
    fn this_process_is_alive_and_another_of_its_number_is_not_it() {
        let own = Process::of(std::process::id()).unwrap();
        assert!(own.is_alive());
        assert!(!Process { started: own.started + 1, ..own }.is_alive());
    }
}
