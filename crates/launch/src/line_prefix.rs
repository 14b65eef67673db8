//! What stands before each line of a rank: a template, as torchrun's `log_line_prefix_template`.

use crate::report::Source;

/// A prefix in which `${role_name}`, `${rank}` and `${local_rank}` stand for those of the process that has written the line. The
/// braces may be left out, and `$$` is a dollar sign; anything else stays as it is, as with Python's
/// `string.Template.safe_substitute`.
///
/// ```
/// use accelerate_launch::{LinePrefix, Source, Stream};
/// let prefix = LinePrefix { template: "[${role_name}${local_rank}]:".into(), role: "trainer".into() };
/// assert_eq!(prefix.of(Source { rank: 5, local_rank: 1, stream: Stream::Stdout }), "[trainer1]:");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinePrefix {
    /// The text with its names.
    pub template: String,
    /// What processes are called.
    pub role: String,
}

impl LinePrefix {
    /// What stands before a line of `source`.
    pub fn of(&self, source: Source) -> String {
        let mut prefix = String::with_capacity(self.template.len() + 16);
        let mut rest = self.template.as_str();
        while let Some((before, after)) = rest.split_once('$') {
            prefix.push_str(before);
            let (value, remainder) = self.value(source, after).unwrap_or(("$".to_owned(), after));
            prefix.push_str(&value);
            rest = remainder;
        }
        prefix + rest
    }

    /// What `after`, the text behind a dollar sign, begins with, and what is left of it.
    fn value<'a>(&self, source: Source, after: &'a str) -> Option<(String, &'a str)> {
        if let Some(rest) = after.strip_prefix('$') {
            return Some(("$".to_owned(), rest));
        }
        let (name, rest) = match after.strip_prefix('{') {
            Some(braced) => braced.split_once('}')?,
            None => {
                let is_of_name = |letter: char| letter == '_' || letter.is_ascii_alphanumeric();
                after.split_at(after.find(|letter| !is_of_name(letter)).unwrap_or(after.len()))
            }
        };
        let value = match name {
            "role_name" => self.role.clone(),
            "rank" => source.rank.to_string(),
            "local_rank" => source.local_rank.to_string(),
            _ => return None,
        };
        Some((value, rest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Stream;
    use rstest::rstest;

    #[rstest]
    #[case("[${role_name}${local_rank}]:", "[default1]:")]
    #[case("$rank/$local_rank ", "5/1 ")]
    #[case("$$rank $", "$rank $")]
    #[case("${rank", "${rank")]
    #[case("${host}$ranks $rank", "${host}$ranks 5")]
    #[case("", "")]
    fn names_of_the_template_are_replaced(#[case] template: &str, #[case] expected: &str) {
        let prefix = LinePrefix { template: template.to_owned(), role: "default".to_owned() };
        assert_eq!(prefix.of(Source { rank: 5, local_rank: 1, stream: Stream::Stderr }), expected);
    }
}
