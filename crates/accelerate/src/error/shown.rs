//! What was found, made short enough for a message: files may hold names and values of many megabytes.

use std::fmt;

/// Longest part of a value that is shown, in characters.
const MAX_VALUE_CHARS: usize = 160;
/// Longest part of a name that is shown, in characters.
const MAX_NAME_CHARS: usize = 40;
/// Longest part of a library's message that is shown, in characters: some print a whole field.
const MAX_REASON_CHARS: usize = 300;
/// The most names of a list that are shown.
const MAX_NAMES: usize = 12;

/// A value in quotation marks.
pub(crate) struct Value<'a>(pub(crate) &'a str);

/// A name in quotation marks.
pub(crate) struct Name<'a>(pub(crate) &'a str);

/// Names in quotation marks.
pub(crate) struct Names<'a>(pub(crate) &'a [String]);

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        quoted(f, self.0, MAX_VALUE_CHARS)
    }
}

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        quoted(f, self.0, MAX_NAME_CHARS)
    }
}

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (position, name) in self.0.iter().take(MAX_NAMES).enumerate() {
            if 0 < position {
                f.write_str(", ")?;
            }
            Name(name).fmt(f)?;
        }
        match self.0.len().checked_sub(MAX_NAMES) {
            None | Some(0) => f.write_str("]"),
            Some(more) => write!(f, " and {more} more]"),
        }
    }
}

/// As `{:?}` shows it, up to so many characters of that.
fn quoted(f: &mut fmt::Formatter<'_>, text: &str, max_chars: usize) -> fmt::Result {
    let mut num_chars = 0;
    f.write_str("\"")?;
    for char in text.chars() {
        // Of the marks only these end a text, and `{:?}` leaves the others as they are.
        let escaped = char.escape_debug();
        let length = if char == '\'' { 1 } else { escaped.len() };
        num_chars += length;
        if max_chars < num_chars {
            return write!(f, " ...\" ({} bytes)", text.len());
        }
        match char {
            '\'' => f.write_str("'")?,
            _ => write!(f, "{escaped}")?,
        }
    }
    f.write_str("\"")
}

/// The beginning of a message.
pub(crate) fn shortened(text: &str) -> String {
    shortened_to(text, MAX_REASON_CHARS)
}

/// The beginning of a message, of at most so many characters.
pub(crate) fn shortened_to(text: &str, max_chars: usize) -> String {
    match text.char_indices().nth(max_chars) {
        Some((end, _)) => format!("{} ...", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

/// How long a list of problems may be in a message.
const MOST_PROBLEM_BYTES: usize = 1000;

/// Problems, one per line: as many as a message has room for, and the number of the others.
pub(crate) fn problem_lines(problems: &[String]) -> String {
    let mut text = String::new();
    for (position, problem) in problems.iter().enumerate() {
        if text.len() > MOST_PROBLEM_BYTES {
            return format!("{text}\n  and {} more", problems.len() - position);
        }
        let separator = if position == 0 { "" } else { "\n  " };
        text.extend([separator, &shortened(problem)]);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_problems_stays_short() {
        assert_eq!(problem_lines(&["one".to_owned(), "two".to_owned()]), "one\n  two");
        let text = problem_lines(&vec!["p".repeat(10_000); 10_000]);
        assert!(text.len() < 2000 && text.ends_with(" more"), "{text}");
    }

    #[test]
    fn short_values_are_shown_as_they_are() {
        for text in ["", "a", "it's \"b\"\n", "傑作 👍", "\u{feff}\0"] {
            assert_eq!(Value(text).to_string(), format!("{text:?}"));
        }
        let names = ["a".to_owned(), "b c".to_owned()];
        assert_eq!(Names(&names).to_string(), format!("{names:?}"));
        assert_eq!(shortened("torn"), "torn");
    }

    #[test]
    fn long_values_are_cut_and_counted() {
        assert_eq!(Name(&"é".repeat(1000)).to_string(), format!("\"{} ...\" (2000 bytes)", "é".repeat(40)));
        assert_eq!(Value(&"\0".repeat(1000)).to_string(), format!("\"{} ...\" (1000 bytes)", "\\0".repeat(80)));
        let names: Vec<String> = (0..100_000).map(|column| column.to_string()).collect();
        assert!(Names(&names).to_string().ends_with("\"10\", \"11\" and 99988 more]"), "{}", Names(&names));
        assert_eq!(shortened(&"é".repeat(1000)), format!("{} ...", "é".repeat(300)));
    }
}
