//! What was found, made short enough for a message: files may hold names and values of megabytes.

/// The most names of a list that are shown.
const MAX_NAMES: usize = 12;
/// The longest part of a name or value that is shown, in characters.
const MAX_CHARS: usize = 40;

/// A name or a value in quotation marks.
pub(super) fn quoted(text: &str) -> String {
    match text.char_indices().nth(MAX_CHARS) {
        None => format!("{text:?}"),
        Some((end, _)) => format!("{:?} ... ({} bytes)", text.get(..end).unwrap_or_default(), text.len()),
    }
}

/// Names in quotation marks.
pub(super) fn list(names: &[String]) -> String {
    let shown: Vec<String> = names.iter().take(MAX_NAMES).map(|name| quoted(name)).collect();
    match names.len().saturating_sub(MAX_NAMES) {
        0 => format!("[{}]", shown.join(", ")),
        more => format!("[{} and {more} more]", shown.join(", ")),
    }
}
