//! What a race measured, and the one line it prints.

use std::fmt;

/// A race: what both sides measured, pair by pair, in the order in which they ran.
#[derive(Debug, Clone)]
pub(crate) struct Race {
    pub(crate) name: &'static str,
    /// Of both values, for the record; the line gives bare numbers.
    pub(crate) unit: &'static str,
    /// The largest median ratio that counts as won.
    pub(crate) goal: f64,
    pub(crate) pairs: Vec<Pair>,
}

/// The races of a run, in the order in which they end. Each prints its line as it ends, for a run takes long and may be ended before
/// its last race.
#[derive(Debug, Default)]
pub(crate) struct Races(Vec<Race>);

impl Races {
    pub(crate) fn add(&mut self, race: Race) {
        println!("{race}");
        self.0.push(race);
    }

    pub(crate) fn all(&self) -> &[Race] {
        &self.0
    }
}

impl Extend<Race> for Races {
    fn extend<I: IntoIterator<Item = Race>>(&mut self, races: I) {
        races.into_iter().for_each(|race| self.add(race));
    }
}

/// One round: ours and theirs, run one right after the other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pair {
    pub(crate) ours: f64,
    pub(crate) rival: f64,
}

impl Pair {
    fn ratio(self) -> f64 {
        self.ours / self.rival
    }
}

impl Race {
    /// The ratios of all rounds, smallest first.
    fn ratios(&self) -> Vec<f64> {
        let mut ratios: Vec<f64> = self.pairs.iter().map(|pair| pair.ratio()).collect();
        ratios.sort_by(f64::total_cmp);
        ratios
    }

    /// The median ratio, ours divided by theirs; smaller is better.
    pub(crate) fn ratio(&self) -> f64 {
        median(self.ratios())
    }

    /// Whether the median ratio is at most `factor` times the goal. A ratio that is not a number never is.
    pub(crate) fn is_within(&self, factor: f64) -> bool {
        self.ratio() <= self.goal * factor
    }
}

impl fmt::Display for Race {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ratios = self.ratios();
        let (min, max) = (ratios.first().copied().unwrap_or(f64::NAN), ratios.last().copied().unwrap_or(f64::NAN));
        let ours = median(self.pairs.iter().map(|pair| pair.ours).collect());
        let rival = median(self.pairs.iter().map(|pair| pair.rival).collect());
        write!(
            formatter,
            "race={} ours={ours:.4} rival={rival:.4} ratio={:.4} min={min:.4} max={max:.4} goal={}",
            self.name,
            self.ratio(),
            self.goal,
        )
    }
}

/// The middle value, or the mean of the two middle ones; not a number for no values.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn race(pairs: &[(f64, f64)]) -> Race {
        let pairs = pairs.iter().map(|&(ours, rival)| Pair { ours, rival }).collect();
        Race { name: "launch_noop", unit: "s", goal: 0.5, pairs }
    }

    #[test]
    fn the_median_is_the_middle() {
        for (values, want) in [(vec![3.0, 1.0, 2.0], 2.0), (vec![4.0, 1.0, 2.0, 3.0], 2.5), (vec![7.0], 7.0)] {
            assert_eq!(median(values), want);
        }
        assert!(median(Vec::new()).is_nan());
    }

    #[test]
    fn the_line_has_the_median_of_ratios_not_the_ratio_of_medians() {
        let line = race(&[(1.0, 10.0), (2.0, 4.0), (9.0, 10.0)]).to_string();
        assert_eq!(line, "race=launch_noop ours=2.0000 rival=10.0000 ratio=0.5000 min=0.1000 max=0.9000 goal=0.5");
    }

    #[test]
    fn a_race_is_won_at_its_goal_and_lost_above_it() {
        assert!(race(&[(1.0, 2.0)]).is_within(1.0));
        assert!(!race(&[(1.001, 2.0)]).is_within(1.0));
        assert!(race(&[(1.001, 2.0)]).is_within(2.0));
        assert!(!race(&[]).is_within(2.0));
    }
}
