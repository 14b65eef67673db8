//! Tables of results, and the words in them.

use std::fmt::Write as _;
use std::time::Duration;

use anstyle::Style;

/// Where the letters of a column stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// Rows of cells, each as wide as the widest of its column.
#[derive(Debug)]
pub(crate) struct Table {
    columns: Vec<(&'static str, Align)>,
    rows: Vec<(Style, Vec<String>)>,
}

impl Table {
    pub(crate) fn new(columns: &[(&'static str, Align)]) -> Self {
        Self { columns: columns.to_vec(), rows: Vec::new() }
    }

    pub(crate) fn push(&mut self, style: Style, cells: Vec<String>) {
        self.rows.push((style, cells));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The table, each line behind `indent`.
    pub(crate) fn text(&self, indent: &str) -> String {
        let titles: Vec<String> = self.columns.iter().map(|(title, _)| (*title).to_owned()).collect();
        let lines = || std::iter::once((Style::new().bold(), &titles)).chain(self.rows.iter().map(|(s, c)| (*s, c)));
        let width = |column: usize| {
            let widths = lines().map(|(_, cells)| cells.get(column).map_or(0, |cell| cell.chars().count()));
            widths.max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let mut text = String::new();
        for (style, cells) in lines() {
            let mut line = String::new();
            for (place, ((cell, &width), (_, align))) in cells.iter().zip(&widths).zip(&self.columns).enumerate() {
                let gap = if place == 0 { "" } else { "  " };
                let _ = match align {
                    Align::Left => write!(line, "{gap}{cell:<width$}"),
                    Align::Right => write!(line, "{gap}{cell:>width$}"),
                };
            }
            let _ = writeln!(text, "{indent}{style}{}{style:#}", line.trim_end());
        }
        text
    }
}

/// How long ago something was, in one unit.
pub(crate) fn age(age: Duration) -> String {
    let seconds = age.as_secs();
    let units = [(86_400, "d"), (3600, "h"), (60, "min"), (1, "s")];
    let unit = units.iter().find(|(length, _)| seconds >= *length);
    unit.map_or_else(|| "0 s".to_owned(), |(length, unit)| format!("{} {unit}", seconds / length))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(0, "0 s")]
    #[case(59, "59 s")]
    #[case(60, "1 min")]
    #[case(7199, "1 h")]
    #[case(86_400 * 400, "400 d")]
    fn ages_have_one_unit(#[case] seconds: u64, #[case] wanted: &str) {
        assert_eq!(age(Duration::from_secs(seconds)), wanted);
    }

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(&[("name", Align::Left), ("bytes", Align::Right)]);
        table.push(Style::new(), vec!["a longer one".to_owned(), "1 B".to_owned()]);
        table.push(Style::new(), vec!["é".to_owned(), "1000 B".to_owned()]);
        let plain = anstream::adapter::strip_str(&table.text("  ")).to_string();
        assert_eq!(plain, "  name           bytes\n  a longer one     1 B\n  é             1000 B\n");
    }
}
