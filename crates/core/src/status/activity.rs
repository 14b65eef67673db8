//! What ranks are doing, in words, and who of them is waited for.

use super::page::{CallRecord, RankStatus};
use crate::files::in_one_line;
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

/// The operation of a backward pass. Its collectives are the reducer's, which nobody numbers, so it has the number of the last one
/// before it.
pub const BACKWARD: &str = "backward";

/// The operation in which the ranks of a run find each other, as PyTorch's users know it. It comes before all collectives.
pub const RENDEZVOUS: &str = "init_process_group";

/// An operation as people are told of it. All collectives of a group are counted together, whatever they do, as PyTorch counts them
/// in its messages: so the number stands by the word that says so.
///
/// ```
/// use accelerate_core::status::{BACKWARD, RENDEZVOUS, operation};
/// assert_eq!(operation("all_reduce", 17), "all_reduce (collective 17)");
/// assert_eq!(operation(BACKWARD, 17), "backward (after collective 17)");
/// assert_eq!(operation(RENDEZVOUS, 1), "init_process_group");
/// ```
pub fn operation(op: &str, sequence: u64) -> String {
    match op {
        BACKWARD => format!("{op} (after collective {sequence})"),
        RENDEZVOUS => op.to_owned(),
        _ => format!("{op} (collective {sequence})"),
    }
}

/// A collective call as people are told of it: in one line that cannot steer a terminal, whoever has written the texts.
///
/// ```
/// use accelerate_core::status::CallName;
/// let call = CallName { op: "all_reduce".to_owned(), sequence: 17, site: Some("src/main.rs:40".to_owned()) };
/// assert_eq!(call.to_string(), "all_reduce (collective 17) at src/main.rs:40");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallName {
    /// The operation.
    pub op: String,
    /// Which collective of its group it is.
    pub sequence: u64,
    /// The file and the line of the program that has called, where they are known.
    pub site: Option<String>,
}

impl CallName {
    fn of(call: &CallRecord) -> Self {
        let site = call.site.as_ref().map(|(file, line)| format!("{file}:{line}"));
        Self { op: call.op.clone(), sequence: call.sequence, site }
    }
}

impl fmt::Display for CallName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // It may come from another machine.
        f.write_str(&operation(&in_one_line(&self.op), self.sequence))?;
        self.site.as_ref().map_or(Ok(()), |site| write!(f, " at {}", in_one_line(site)))
    }
}

/// What a rank is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RankActivity {
    /// Nobody knows: the program does not use the library, or not yet.
    Unknown,
    /// Something of its own.
    Computing {
        /// The call before, and how long ago it ended.
        after: Option<(CallName, Duration)>,
    },
    /// It is in a call.
    InCall {
        /// Which one.
        call: CallName,
        /// Since when.
        elapsed: Duration,
    },
}

/// A rank and what it is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankSummary {
    /// Rank among all ranks.
    pub rank: usize,
    /// What it does.
    pub activity: RankActivity,
    /// Its process is stopped, by `SIGSTOP` for example, and does nothing until somebody lets it go on.
    #[serde(default)]
    pub is_stopped: bool,
}

impl RankStatus {
    /// What the rank is doing at `now`, in nanoseconds of the machine's clock. What it does in the background counts only where
    /// nothing else is known.
    pub fn activity(&self, now: u64) -> RankActivity {
        if self.owner.is_none() {
            return RankActivity::Unknown;
        }
        let since = |time: u64| Duration::from_nanos(now.saturating_sub(time));
        let made = || self.calls.iter().filter(|call| call.sequence > 0);
        let running = made().filter(|call| call.is_running());
        if let Some(call) = running.max_by_key(|call| (!call.is_in_background, call.began))
            && (!call.is_in_background || made().all(|call| call.is_in_background))
        {
            return RankActivity::InCall { call: CallName::of(call), elapsed: since(call.began) };
        }
        let last = made().filter(|call| !call.is_in_background).max_by_key(|call| call.ended);
        RankActivity::Computing { after: last.map(|call| (CallName::of(call), since(call.ended.unwrap_or(now)))) }
    }
}

/// For each of these ranks, whether others wait for it: they have been for at least `long` in a call of a group that it belongs
/// to, and it has not come to that call. Of a backward pass only those can tell that are not in it. A rank that has made no call at
/// all belongs to the groups of all `num_processes` ranks of the run.
pub fn awaited_ranks(ranks: &[RankStatus], num_processes: usize, now: u64, long: Duration) -> Vec<bool> {
    // Of each group, the last call that somebody waits in, with the names by which it is called: calls inside of a backward pass
    // have no number of their own.
    let mut waited_in: BTreeMap<&str, (u64, BTreeSet<&str>)> = BTreeMap::new();
    let mut all_are_waited_for = false;
    let running = ranks.iter().flat_map(|rank| &rank.calls).filter(|call| call.is_running() && !call.is_in_background);
    for call in running.filter(|call| long.as_nanos() <= u128::from(now.saturating_sub(call.began))) {
        all_are_waited_for |= call.num_members == num_processes;
        let (sequence, ops) = waited_in.entry(&call.group).or_default();
        if *sequence < call.sequence {
            (*sequence, *ops) = (call.sequence, BTreeSet::new());
        }
        if *sequence == call.sequence {
            ops.insert(&call.op);
        }
    }
    let is_behind = |own: &CallRecord| match waited_in.get(own.group.as_str()) {
        Some((sequence, ops)) => match own.sequence.cmp(sequence) {
            Ordering::Less => true,
            Ordering::Equal => !own.is_running() && ops.iter().any(|op| *op != own.op),
            Ordering::Greater => false,
        },
        None => false,
    };
    let is_awaited = |rank: &RankStatus| match rank.calls.is_empty() {
        true => all_are_waited_for,
        false => rank.calls.iter().any(is_behind),
    };
    ranks.iter().map(is_awaited).collect()
}

/// What ranks were doing, a sentence for all that were doing the same. Of ranks that tell nothing there is a sentence only if
/// others do. Ranks whose processes are stopped have a sentence of their own besides.
///
/// ```
/// use accelerate_core::status::{CallName, RankActivity, RankSummary, sentences};
/// use std::time::Duration;
/// let call = CallName { op: "all_reduce".to_owned(), sequence: 17, site: None };
/// let waiting = RankActivity::InCall { call, elapsed: Duration::from_millis(2100) };
/// let mut ranks: Vec<_> = (0..4).map(|rank| RankSummary { rank, activity: waiting.clone(), is_stopped: false }).collect();
/// ranks[2].activity = RankActivity::Computing { after: None };
/// let wanted = [
///     "ranks 0-1, 3 were in all_reduce (collective 17) for 2.1 s",
///     "rank 2 was computing and had made no call to other ranks",
/// ];
/// assert_eq!(sentences(&ranks), wanted);
/// ```
pub fn sentences(ranks: &[RankSummary]) -> Vec<String> {
    let stopped: Vec<usize> = ranks.iter().filter(|rank| rank.is_stopped).map(|rank| rank.rank).collect();
    let was = if stopped.len() == 1 { "was" } else { "were" };
    let stopped = (!stopped.is_empty())
        .then(|| format!("{} {was} stopped by a signal such as SIGSTOP, and did nothing", named_ranks(&stopped)));
    if ranks.iter().all(|rank| rank.activity == RankActivity::Unknown) {
        return stopped.into_iter().collect();
    }
    let mut groups: Vec<(&RankActivity, Vec<usize>, Duration)> = Vec::new();
    for RankSummary { rank, activity, .. } in ranks {
        let lasted = lasted(activity);
        match groups.iter_mut().find(|(other, ..)| is_same(other, activity)) {
            Some((_, numbers, longest)) => {
                numbers.push(*rank);
                *longest = lasted.max(*longest);
            }
            None => groups.push((activity, vec![*rank], lasted)),
        }
    }
    let sentence = |(activity, numbers, longest): (&RankActivity, Vec<usize>, Duration)| {
        let who = named_ranks(&numbers);
        let was = if numbers.len() == 1 { "was" } else { "were" };
        let seconds = longest.as_secs_f64();
        match activity {
            RankActivity::Unknown => format!("{who} {was} silent about calls to other ranks"),
            RankActivity::Computing { after: None } => {
                format!("{who} {was} computing and had made no call to other ranks")
            }
            RankActivity::Computing { after: Some((call, _)) } => {
                format!("{who} {was} computing, {seconds:.1} s after {call}")
            }
            RankActivity::InCall { call, .. } => format!("{who} {was} in {call} for {seconds:.1} s"),
        }
    };
    groups.into_iter().map(sentence).chain(stopped).collect()
}

fn lasted(activity: &RankActivity) -> Duration {
    match activity {
        RankActivity::InCall { elapsed, .. } | RankActivity::Computing { after: Some((_, elapsed)) } => *elapsed,
        RankActivity::Unknown | RankActivity::Computing { after: None } => Duration::ZERO,
    }
}

/// Apart from how long.
fn is_same(one: &RankActivity, other: &RankActivity) -> bool {
    match (one, other) {
        (RankActivity::InCall { call: one, .. }, RankActivity::InCall { call: other, .. }) => one == other,
        (RankActivity::Computing { after: one }, RankActivity::Computing { after: other }) => {
            one.as_ref().map(|after| &after.0) == other.as_ref().map(|after| &after.0)
        }
        (RankActivity::Unknown, RankActivity::Unknown) => true,
        _ => false,
    }
}

/// `rank 3`, or `ranks 0-2, 4`.
///
/// ```
/// use accelerate_core::status::named_ranks;
/// assert_eq!((named_ranks(&[3]), named_ranks(&[0, 1, 2, 4])), ("rank 3".to_owned(), "ranks 0-2, 4".to_owned()));
/// ```
pub fn named_ranks(sorted: &[usize]) -> String {
    format!("rank{} {}", if sorted.len() == 1 { "" } else { "s" }, number_ranges(sorted))
}

/// `0-2, 4` for 0, 1, 2, 4.
///
/// ```
/// assert_eq!(accelerate_core::status::number_ranges(&[0, 1, 2, 4]), "0-2, 4");
/// ```
pub fn number_ranges(sorted: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for &number in sorted {
        match parts.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => parts.push((number, number)),
        }
    }
    let texts =
        parts.iter().map(|(first, last)| if first == last { format!("{first}") } else { format!("{first}-{last}") });
    texts.collect::<Vec<_>>().join(", ")
}
