//! How long functions are. Formatted code is assumed: a function ends at the first closing brace
//! that is indented as its first line is, so no parser is needed.

use anyhow::Result;

use super::Tree;
use super::files::REASON;

/// A function longer than this needs a reason.
const MOST_LINES: usize = 60;

pub(super) fn lengths(tree: &Tree) -> Result<Vec<String>> {
    let rust = tree.files.iter().filter(|file| file.extension() == "rs");
    let mut complaints = Vec::new();
    for file in rust {
        for (line, name, length) in long_functions(&file.text) {
            let path = &file.path;
            complaints.push(format!(
                "{path}:{line}: `{name}` has {length} lines; split it, or say `{REASON} …` in its documentation"
            ));
        }
    }
    Ok(complaints)
}

/// Line number, name and length of each long function without a reason.
fn long_functions(text: &str) -> Vec<(usize, &str, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let Some(name) = function_name(line) else {
            continue;
        };
        if is_declaration(&lines[start..]) {
            continue;
        }
        let end = format!("{}}}", &line[..line.len() - line.trim_start().len()]);
        let Some(length) = lines[start..].iter().position(|other| *other == end) else {
            continue;
        };
        if length + 1 > MOST_LINES && !gives_reason(&lines[..start]) {
            found.push((start + 1, name, length + 1));
        }
    }
    found
}

/// The name of the function whose definition begins on this line and goes on below it.
fn function_name(line: &str) -> Option<&str> {
    let code = line.trim_start();
    if code.ends_with(';') || code.ends_with('}') {
        return None;
    }
    let (before, after) = code.split_once("fn ")?;
    let is_modifier = |word: &str| {
        ["const", "async", "extern", "default"].contains(&word)
            || ["pub", "uns", "\""].iter().any(|start| word.starts_with(start))
            // The second half of `pub(in crate::x)`.
            || word.ends_with(')')
    };
    if !before.split_whitespace().all(is_modifier) {
        return None;
    }
    let end = after.find(|letter: char| !letter.is_alphanumeric() && letter != '_')?;
    (end > 0).then_some(&after[..end])
}

/// Whether the signature that begins here ends without a body, as in a trait or a foreign block.
fn is_declaration(lines: &[&str]) -> bool {
    let end = lines.iter().find(|line| line.ends_with('{') || line.ends_with(';'));
    end.is_some_and(|line| line.ends_with(';'))
}

/// Whether the comment lines directly above give a reason.
fn gives_reason(above: &[&str]) -> bool {
    let is_header = |line: &&&str| line.trim_start().starts_with("//") || line.trim_start().starts_with("#[");
    above.iter().rev().take_while(is_header).any(|line| line.contains(REASON))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(header: &str, body_lines: usize) -> String {
        format!("impl X {{\n    {header} {{\n{}    }}\n}}\n", "        step();\n".repeat(body_lines))
    }

    #[test]
    fn a_long_function_is_found_by_name_and_line() {
        assert_eq!(long_functions(&function("pub(crate) const fn walk(x: u8)", 59)), [(2, "walk", 61)]);
        assert_eq!(long_functions(&function("fn walk()", 58)), []);
    }

    #[test]
    fn a_declaration_has_no_length() {
        let text = format!("{{\n    fn walk(\n        x: u8,\n    ) -> i32;\n{}    }}\n", "    step();\n".repeat(80));
        assert_eq!(long_functions(&text), []);
    }

    #[test]
    fn a_reason_above_the_function_is_enough() {
        let text = function("fn walk()", 80);
        let reason = format!("    /// {REASON} it is one table.\n    #[inline]\n    fn walk");
        assert_eq!(long_functions(&text.replace("    fn walk", &reason)), []);
    }

    #[test]
    fn only_definitions_count() {
        for line in ["fn f();", "let fn_name = 1", "    // a fn that", "fn f() {}", "fn(u8) -> u8 {"] {
            assert_eq!(function_name(line), None, "{line}");
        }
        for line in ["fn f() {", "    pub async fn f(", "pub(in crate::x) fn f<T>(", "extern \"C\" fn f("] {
            assert_eq!(function_name(line), Some("f"), "{line}");
        }
    }
}
