//! Names and reasons from files, as messages show them.

/// Longest name that a message shows, in bytes.
const NAME_BYTES: usize = 80;
/// What of a long reason is shown of its beginning and of its end, where parsers say the place.
const REASON_BYTES: [usize; 2] = [240, 120];

/// A name out of a file for a message: cut where it would hide the message, and without characters that a terminal
/// would obey.
///
/// ```
/// use accelerate_core::weight_files::shown;
/// assert_eq!(shown("layer.0.weight"), "layer.0.weight");
/// assert_eq!(shown("a\u{1b}[2J"), "a\\u{1b}[2J");
/// assert!(shown(&"a".repeat(1_000_000)).len() < 100);
/// ```
pub fn shown(name: &str) -> String {
    let mut text = String::new();
    for letter in name.chars() {
        if text.len() >= NAME_BYTES {
            text.push_str("...");
            break;
        }
        match letter {
            '"' | '\'' | '\\' => text.push(letter),
            _ => text.extend(letter.escape_debug()),
        }
    }
    text
}

/// Names for a message, separated by commas: as many as `most_bytes` have room for, and the number of the others.
///
/// ```
/// use accelerate_core::weight_files::listed;
/// let names = ["first", "second", "third"];
/// assert_eq!(listed(names, 100), "first, second, third");
/// assert_eq!(listed(names, 8), "first and 2 more");
/// ```
pub fn listed<T: AsRef<str>>(names: impl IntoIterator<Item = T>, most_bytes: usize) -> String {
    let mut text = String::new();
    let mut num_left_out = 0_usize;
    for (position, name) in names.into_iter().enumerate() {
        if num_left_out > 0 || (position > 0 && text.len() >= most_bytes) {
            num_left_out += 1;
            continue;
        }
        let name = shown(name.as_ref());
        if position > 0 && text.len() + name.len() > most_bytes {
            num_left_out += 1;
            continue;
        }
        let separator = if position == 0 { "" } else { ", " };
        text.extend([separator, &name]);
    }
    if num_left_out == 0 { text } else { format!("{text} and {num_left_out} more") }
}

/// What a parser says, without the middle if that is long: parsers repeat what they found.
pub(crate) fn shortened_reason(reason: &str) -> String {
    let [first, last] = REASON_BYTES;
    if reason.len() <= first + last {
        return reason.to_owned();
    }
    let (start, end) = (reason.floor_char_boundary(first), reason.ceil_char_boundary(reason.len() - last));
    format!("{} ... {}", &reason[..start], &reason[end..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_reasons_keep_their_beginning_and_their_place() {
        let reason = shortened_reason(&format!("unknown variant `{}` at line 1 column 9", "é".repeat(1000)));
        assert!(reason.starts_with("unknown variant `é") && reason.ends_with("at line 1 column 9"), "{reason}");
        assert!(reason.len() < 400, "{reason}");
        assert_eq!(shortened_reason("short"), "short");
    }

    #[test]
    fn lists_of_long_names_stay_short() {
        let text = listed(vec!["\u{1}".repeat(1000); 1000], 300);
        assert!(text.len() < 320 && text.ends_with(" more"), "{text}");
    }
}
