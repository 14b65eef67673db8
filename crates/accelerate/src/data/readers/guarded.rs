//! Calls into libraries that decode what may be malformed.

use crate::error::shortened;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The call's value, or what went wrong in few words.
///
/// The libraries panic on some malformed files, which must end a training program as little as any other.
pub(super) fn guarded<T, E: Display>(call: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(called) => called.map_err(|error| shortened(&error.to_string())),
        Err(panic) => {
            let message = panic.downcast_ref::<String>().map(String::as_str);
            let message = message.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
            Err(shortened(message))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn errors_and_panics_become_short_reasons() {
        assert_eq!(guarded(|| Ok::<_, String>(3)).unwrap(), 3);
        assert_eq!(guarded(|| Err::<(), _>("torn")).unwrap_err(), "torn");
        let divided = guarded(|| -> Result<(), String> { panic!("row {}", 7) });
        assert_eq!(divided.unwrap_err(), "row 7");
        let long = guarded(|| Err::<(), _>("é".repeat(1000))).unwrap_err();
        assert_eq!(long, format!("{} ...", "é".repeat(300)));
    }
}
