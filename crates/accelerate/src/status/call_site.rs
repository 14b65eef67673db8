//! The line of the program that has called, while the library works for it.

use std::cell::Cell;
use std::panic::Location;

/// A line of the program.
pub(super) type CallSite = &'static Location<'static>;

thread_local! {
    /// The innermost call of the program on this thread.
    static CALL_SITE: Cell<Option<CallSite>> = const { Cell::new(None) };
}

/// The call of the program that this thread is in, if it is one that says so.
pub(super) fn call_site() -> Option<CallSite> {
    CALL_SITE.get()
}

/// Says who has called, until this is dropped.
#[must_use = "the call lasts as long as this lives"]
pub(crate) struct Called {
    before: Option<CallSite>,
}

impl Drop for Called {
    fn drop(&mut self) {
        CALL_SITE.set(self.before);
    }
}

/// At the beginning of a function that is `#[track_caller]`: its caller has called. A call of the library's own is part of the
/// program's call around it.
#[track_caller]
pub(crate) fn here() -> Called {
    let before = CALL_SITE.get();
    let caller = Location::caller();
    if !is_own(caller.file()) {
        CALL_SITE.set(Some(caller));
    }
    Called { before }
}

/// Is it a source of this crate? Paths are as the compiler was given them, for all files of a crate from the same folder.
fn is_own(file: &str) -> bool {
    let own = file!();
    // Without the path of this file in the folder of sources.
    own.strip_suffix("status/call_site.rs").is_some_and(|sources| file.starts_with(sources))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_the_library_are_part_of_the_programs() {
        assert!(call_site().is_none());
        {
            let _called = here();
            assert!(call_site().is_none(), "this file is the library's");
        }
        assert!(is_own(file!()) && !is_own("src/main.rs") && !is_own("crates/accelerate/tests/session.rs"));
    }

    #[test]
    fn the_call_around_comes_back() {
        let outer: CallSite = Location::caller();
        CALL_SITE.set(Some(outer));
        drop(here());
        assert_eq!(call_site(), Some(outer));
    }
}
