//! Tables of results, and the words in them.

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::time::Duration;

use anstyle::Style;
use rustix::termios::tcgetwinsize;

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

    /// The table, each line behind `indent`. Where standard output is a terminal that is narrower, it is another one that fits.
    pub(crate) fn text(&self, indent: &str) -> String {
        self.text_within(indent, terminal_columns())
    }

    /// The same for so many columns of letters. The last column goes on below where it has room for each of its words; otherwise each
    /// row becomes a line for each of its cells.
    fn text_within(&self, indent: &str, columns: Option<usize>) -> String {
        let widths: Vec<usize> = (0..self.columns.len()).map(|column| self.width(column)).collect();
        let Some((last, others)) = widths.split_last() else { return String::new() };
        let before = indent.len() + others.iter().map(|width| width + GAP.len()).sum::<usize>();
        let room = columns.map_or(*last, |columns| columns.saturating_sub(before));
        if room >= *last {
            return self.aligned(indent, &widths, before, *last);
        }
        let place = self.columns.len() - 1;
        let longest_word = |(_, cells): (Style, Vec<&str>)| cells.get(place)?.split(' ').map(num_letters).max();
        let longest = self.lines().filter_map(longest_word).max().unwrap_or(0);
        match room >= longest.max(NARROW) && self.columns[place].1 == Align::Left {
            true => self.aligned(indent, &widths, before, room),
            false => self.one_below_the_other(indent, columns.unwrap_or(usize::MAX)),
        }
    }

    /// Titles and rows.
    fn lines(&self) -> impl Iterator<Item = (Style, Vec<&str>)> {
        let titles = self.columns.iter().map(|(title, _)| *title).collect();
        let rows = self.rows.iter().map(|(style, cells)| (*style, cells.iter().map(String::as_str).collect()));
        std::iter::once((Style::new().bold(), titles)).chain(rows)
    }

    fn width(&self, column: usize) -> usize {
        let widths = self.lines().map(|(_, cells)| cells.get(column).map_or(0, |cell| num_letters(cell)));
        widths.max().unwrap_or(0)
    }

    /// In columns, of which the last is `room` wide and begins behind `before` letters.
    fn aligned(&self, indent: &str, widths: &[usize], before: usize, room: usize) -> String {
        let mut text = String::new();
        for (style, cells) in self.lines() {
            let (mut line, mut parts) = (String::new(), Vec::new());
            for (place, ((mut cell, &width), (_, align))) in
                cells.into_iter().zip(widths).zip(&self.columns).enumerate()
            {
                let gap = if place == 0 { "" } else { GAP };
                if place + 1 == widths.len() && width > room {
                    parts = wrapped(cell, room);
                    cell = parts.first().map_or("", String::as_str);
                }
                let _ = match align {
                    Align::Left => write!(line, "{gap}{cell:<width$}"),
                    Align::Right => write!(line, "{gap}{cell:>width$}"),
                };
            }
            let _ = writeln!(text, "{indent}{style}{}{style:#}", line.trim_end());
            for part in parts.iter().skip(1) {
                let _ = writeln!(text, "{:before$}{style}{part}{style:#}", "");
            }
        }
        text
    }

    /// Each row as its first cell, and the others below it behind their titles.
    fn one_below_the_other(&self, indent: &str, columns: usize) -> String {
        let mut text = String::new();
        for (style, cells) in &self.rows {
            for (place, (cell, (title, _))) in cells.iter().zip(&self.columns).enumerate() {
                if cell.is_empty() {
                    continue;
                }
                let lead = if place == 0 { "" } else { GAP };
                let title = if title.is_empty() { String::new() } else { format!("{title}: ") };
                // What goes on below is set in once more.
                let before = indent.len() + lead.len() + GAP.len();
                for (number, part) in wrapped(&(title + cell), columns.saturating_sub(before)).iter().enumerate() {
                    let gap = if number == 0 { "" } else { GAP };
                    let _ = writeln!(text, "{indent}{lead}{gap}{style}{part}{style:#}");
                }
            }
        }
        text
    }
}

/// Between columns.
const GAP: &str = "  ";
/// A column is not made narrower than this.
const NARROW: usize = 16;

fn num_letters(text: &str) -> usize {
    text.chars().count()
}

/// The words of a text in lines of so many letters at most. A word that is longer is a line.
fn wrapped(text: &str, room: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if num_letters(line) + 1 + num_letters(word) <= room => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// How wide the terminal is that results go to, if they go to one.
fn terminal_columns() -> Option<usize> {
    let stdout = std::io::stdout();
    let columns = stdout.is_terminal().then(|| tcgetwinsize(&stdout).ok()).flatten()?.ws_col;
    (columns > 0).then_some(columns.into())
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

    /// As a list of tensors has it.
    fn wide() -> Table {
        let mut table = Table::new(&[("tensor", Align::Left), ("size", Align::Right), ("note", Align::Left)]);
        table.push(
            Style::new(),
            ["weight", "1 KB", "left by a run that was ended and has a name"].map(str::to_owned).into(),
        );
        table.push(Style::new(), ["b", "", ""].map(str::to_owned).into());
        table
    }

    #[rstest]
    #[case::no_terminal(None, "tensor  size  note\nweight  1 KB  left by a run that was ended and has a name\nb\n")]
    #[case::wide(Some(57), "tensor  size  note\nweight  1 KB  left by a run that was ended and has a name\nb\n")]
    #[case::narrower(
        Some(56),
        "tensor  size  note\nweight  1 KB  left by a run that was ended and has a\n              name\nb\n"
    )]
    #[case::narrow(
        Some(30),
        "tensor  size  note\nweight  1 KB  left by a run\n              that was ended\n              and has a name\nb\n"
    )]
    #[case::very_narrow(
        Some(29),
        "tensor: weight\n  size: 1 KB\n  note: left by a run that\n    was ended and has a name\ntensor: b\n"
    )]
    fn a_table_fits_its_terminal(#[case] columns: Option<usize>, #[case] wanted: &str) {
        assert_eq!(anstream::adapter::strip_str(&wide().text_within("", columns)).to_string(), wanted);
    }

    #[test]
    fn words_that_do_not_fit_are_not_cut() {
        let mut table = Table::new(&[("a", Align::Left), ("b", Align::Left)]);
        table.push(Style::new(), vec!["x".to_owned(), "model.rank-00000-of-00002.safetensors".to_owned()]);
        let plain = anstream::adapter::strip_str(&table.text_within(" ", Some(30))).to_string();
        assert_eq!(plain, " a: x\n   b:\n     model.rank-00000-of-00002.safetensors\n");
    }
}
