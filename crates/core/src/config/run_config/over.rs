//! A run that would have to be over before it starts.

use super::{RunConfig, name_for};
use crate::settings::{Origin, SettingValue};
use std::fmt;
use std::time::{Duration, SystemTime};

const PATH: &str = "stop_at";

/// A `stop_at` that has passed. Its `Display` says which, and when it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassedEnd {
    stop_at: SystemTime,
    origin: Origin,
    now: SystemTime,
}

impl fmt::Display for PassedEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stop_at, origin, now } = self;
        let name = name_for(PATH, origin);
        write!(f, "{name} is {} ({origin}), which has passed: it is {} now", in_seconds(*stop_at), in_seconds(*now))
    }
}

/// The moment without fractions of its second.
fn in_seconds(time: SystemTime) -> String {
    let seconds = time.duration_since(SystemTime::UNIX_EPOCH).map(|since| Duration::from_secs(since.as_secs()));
    seconds.map_or(time, |since| SystemTime::UNIX_EPOCH + since).write()
}

impl RunConfig {
    /// Says that `stop_at` has passed at the moment `now`; `None` if it has not, or is not set. A program that asks `should_stop` would
    /// end after its first step. The end of an allocation, which Slurm tells, is not looked at.
    ///
    /// ```
    /// use accelerate_core::config::{RunConfig, Sources};
    /// use std::time::{Duration, SystemTime};
    /// let lookup = |name: &str| (name == "ACCELERATE_STOP_AT").then(|| "2020-01-31T18:00:00+01:00".to_owned());
    /// let run = RunConfig::resolve(Sources { environment: Some(&lookup), ..Default::default() })?;
    /// let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_600_000_000);
    /// assert_eq!(
    ///     run.passed_end(now).unwrap().to_string(),
    ///     "stop_at is 2020-01-31T17:00:00Z (environment variable ACCELERATE_STOP_AT), which has passed: it is \
    ///      2020-09-13T12:26:40Z now"
    /// );
    /// assert!(run.passed_end(SystemTime::UNIX_EPOCH).is_none());
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn passed_end(&self, now: SystemTime) -> Option<PassedEnd> {
        let stop_at = self.cluster.stop_at.filter(|stop_at| *stop_at <= now)?;
        Some(PassedEnd { stop_at, origin: self.origin(PATH).clone(), now })
    }
}
