//! Options of the meeting of all processes (`--rdzv_conf` of torchrun).

use crate::settings::{SettingValue, ValueKind, text_of_setting};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How long the processes of a run may take to meet.
///
/// Written as torchrun writes it, `KEY=VALUE` separated by commas, with the two keys by which its backends name that time:
/// `timeout` of the backend `static` and `join_timeout` of `c10d`. Where both are given, the longer one counts.
///
/// ```
/// use accelerate_core::config::RendezvousOptions;
/// use accelerate_core::settings::SettingValue;
/// use std::time::Duration;
/// let options = RendezvousOptions::read("join_timeout=900").unwrap();
/// assert_eq!(options.join_timeout, Some(Duration::from_secs(900)));
/// assert!(RendezvousOptions::read("last_call_timeout=30").is_none());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct RendezvousOptions {
    /// Time until all processes have to be there, from the start of the one that waits. `None`: as long as any collective may
    /// take.
    pub join_timeout: Option<Duration>,
}

impl SettingValue for RendezvousOptions {
    const KIND: ValueKind = ValueKind::RendezvousOptions;

    fn read(text: &str) -> Option<Self> {
        let mut options = Self::default();
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let (key, value) = entry.split_once('=')?;
            if !["timeout", "join_timeout"].contains(&key.trim()) {
                return None;
            }
            let seconds = Duration::read(value.trim()).filter(|time| !time.is_zero())?;
            options.join_timeout = options.join_timeout.max(Some(seconds));
        }
        Some(options)
    }

    fn write(&self) -> String {
        self.join_timeout.map(|time| format!("join_timeout={}", time.write())).unwrap_or_default()
    }
}

text_of_setting!(RendezvousOptions);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("", Some(""))]
    #[case("timeout=900", Some("join_timeout=900"))]
    #[case(" join_timeout = 0.5 ,", Some("join_timeout=0.5"))]
    #[case("join_timeout=30,timeout=900", Some("join_timeout=900"))]
    #[case("timeout=900,join_timeout=30", Some("join_timeout=900"))]
    #[case("timeout", None)]
    #[case("timeout=", None)]
    #[case("timeout=0", None)]
    #[case("timeout=-1", None)]
    #[case("timeout=nan", None)]
    #[case("timeout=1e300", None)]
    #[case("is_host=1", None)]
    #[case("timeout=900,read_timeout=60", None)]
    #[case("Timeout=900", None)]
    fn what_is_read(#[case] text: &str, #[case] written: Option<&str>) {
        assert_eq!(RendezvousOptions::read(text).map(|options| options.write()).as_deref(), written);
    }
}
