//! What came of all trials.

use std::fmt;
use std::time::Duration;

use super::plan::Kind;

/// Trials by kind, each with the time from the event to the next step if there was such a step; `None` for a fault.
#[derive(Debug, Default)]
pub(super) struct Table(Vec<(Kind, Option<Option<Duration>>)>);

impl Table {
    pub(super) fn add(&mut self, kind: Kind, result: Option<Option<Duration>>) {
        self.0.push((kind, result));
    }

    pub(super) fn faults(&self) -> u64 {
        self.0.iter().filter(|(_, result)| result.is_none()).count() as u64
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<30} {:>6} {:>6} {:>22}", "", "", "", "s to the next step")?;
        write!(f, "{:<30} {:>6} {:>6} {:>11} {:>10}", "event", "trials", "faults", "median", "largest")?;
        let mut row = |name: &str, counts: &dyn Fn(Kind) -> bool| {
            let found: Vec<_> = self.0.iter().filter(|(kind, _)| counts(*kind)).map(|(_, result)| *result).collect();
            if found.is_empty() {
                return Ok(());
            }
            let faults = found.iter().filter(|result| result.is_none()).count();
            let mut times: Vec<_> = found.iter().copied().flatten().flatten().collect();
            times.sort_unstable();
            let shown = |time: Option<&Duration>| time.map_or("-".to_owned(), |it| format!("{:.2}", it.as_secs_f64()));
            let (median, largest) = (shown(times.get(times.len() / 2)), shown(times.last()));
            write!(f, "\n{name:<30} {:>6} {faults:>6} {median:>11} {largest:>10}", found.len())
        };
        Kind::ALL.into_iter().try_for_each(|kind| row(kind.shown(), &|other| other == kind))?;
        row("all", &|_| true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_counts_each_kind_and_all() {
        let mut table = Table::default();
        let seconds = |number| Some(Duration::from_secs(number));
        for result in [Some(seconds(1)), Some(seconds(3)), Some(seconds(2)), None, Some(None)] {
            table.add(Kind::KillRank, result);
        }
        table.add(Kind::CutLink, Some(seconds(9)));
        let text = table.to_string();
        let rows: Vec<Vec<&str>> =
            text.lines().skip(2).map(|line| line.split_whitespace().rev().take(4).collect()).collect();
        let wanted = [["3.00", "2.00", "1", "5"], ["9.00", "9.00", "0", "1"], ["9.00", "3.00", "1", "6"]];
        assert_eq!((rows, table.faults()), (wanted.map(Vec::from).to_vec(), 1), "{text}");
    }
}
