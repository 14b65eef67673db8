//! Which output streams of which local ranks are written to files as well (`--tee` of torchrun).

use crate::settings::{SettingValue, ValueKind, text_of_setting};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Which streams of each local rank are copied to a file.
///
/// Written as torchrun writes it: 0 none, 1 standard output, 2 standard error, 3 both; or a list by local rank, whose other
/// ranks have none.
///
/// ```
/// use accelerate_core::config::{Streams, Tee};
/// use accelerate_core::settings::SettingValue;
/// let tee = Tee::read("0:1,2:3").unwrap();
/// assert_eq!(tee.of(0), Streams { stdout: true, stderr: false });
/// assert_eq!((tee.of(1), tee.of(2)), (Streams::default(), Streams { stdout: true, stderr: true }));
/// assert!(Tee::read("4").is_none());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Tee {
    /// The same of all ranks.
    All(Streams),
    /// By local rank.
    Each(BTreeMap<usize, Streams>),
}

/// Standard output, standard error, both or neither.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    /// Standard output.
    pub stdout: bool,
    /// Standard error.
    pub stderr: bool,
}

impl Streams {
    /// Is there one at all?
    pub fn any(self) -> bool {
        self.stdout || self.stderr
    }

    fn read(text: &str) -> Option<Self> {
        let number = match text.trim() {
            "0" => 0,
            "1" => 1,
            "2" => 2,
            "3" => 3,
            _ => return None,
        };
        Some(Self { stdout: number & 1 != 0, stderr: number & 2 != 0 })
    }
}

impl fmt::Display for Streams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", u8::from(self.stdout) + 2 * u8::from(self.stderr))
    }
}

impl Default for Tee {
    fn default() -> Self {
        Self::All(Streams::default())
    }
}

impl Tee {
    /// The streams of one local rank.
    pub fn of(&self, local_rank: usize) -> Streams {
        match self {
            Self::All(streams) => *streams,
            Self::Each(ranks) => ranks.get(&local_rank).copied().unwrap_or_default(),
        }
    }

    /// Is there one at all, of any rank?
    pub fn any(&self) -> bool {
        match self {
            Self::All(streams) => streams.any(),
            Self::Each(ranks) => ranks.values().any(|streams| streams.any()),
        }
    }

    /// The largest local rank that it names; `None` where it names none.
    pub fn last_named(&self) -> Option<usize> {
        match self {
            Self::All(_) => None,
            Self::Each(ranks) => ranks.keys().next_back().copied(),
        }
    }
}

impl SettingValue for Tee {
    const KIND: ValueKind = ValueKind::Streams;

    fn read(text: &str) -> Option<Self> {
        if let Some(streams) = Streams::read(text) {
            return Some(Self::All(streams));
        }
        let mut ranks = BTreeMap::new();
        for entry in text.split(',') {
            let (rank, streams) = entry.split_once(':')?;
            // A rank that is named twice is a slip.
            if ranks.insert(rank.trim().parse().ok()?, Streams::read(streams)?).is_some() {
                return None;
            }
        }
        Some(Self::Each(ranks))
    }

    fn write(&self) -> String {
        match self {
            Self::All(streams) => streams.to_string(),
            Self::Each(ranks) => {
                ranks.iter().map(|(rank, streams)| format!("{rank}:{streams}")).collect::<Vec<_>>().join(",")
            }
        }
    }
}

text_of_setting!(Tee);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("0", Some("0"), &[0, 0])]
    #[case(" 3 ", Some("3"), &[3, 3])]
    #[case("1:2", Some("1:2"), &[0, 2])]
    #[case("1:1,0:3", Some("0:3,1:1"), &[3, 1])]
    #[case("", None, &[])]
    #[case("4", None, &[])]
    #[case("-1", None, &[])]
    #[case("03", None, &[])]
    #[case("0:1,", None, &[])]
    #[case("0:1,0:2", None, &[])]
    #[case("0:4", None, &[])]
    #[case("99999999999999999999:1", None, &[])]
    #[case("both", None, &[])]
    fn what_is_copied(#[case] text: &str, #[case] written: Option<&str>, #[case] ranks: &[u8]) {
        let tee = Tee::read(text);
        assert_eq!(tee.as_ref().map(Tee::write).as_deref(), written);
        for (local_rank, number) in ranks.iter().enumerate() {
            assert_eq!(tee.as_ref().unwrap().of(local_rank).to_string(), number.to_string());
        }
    }
}
