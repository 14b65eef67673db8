//! Methods of tch that take a number and panic where they fail: its `Scalar` is dropped before the error is read, and the drop
//! unwraps that error. Library code calls `torch_ext::scalar` in their place.

use anyhow::Result;

use super::{TextFile, Tree};

/// The names without `f_` and without those that end in `_out`, which nobody calls: every function of
/// `src/wrappers/tensor_fallible_generated.rs` of tch 0.24.0 with a parameter that is `Into<Scalar>`.
const NAMES: &str = include_str!("number_calls.txt");

/// What file names of tests end in, or are.
const TESTS: [&str; 2] = ["tests.rs", "/tests"];

pub(super) fn panicking_calls(tree: &Tree) -> Result<Vec<String>> {
    let is_library = |file: &&TextFile| {
        let folder = file.path.rsplit_once('/').map_or("", |(folder, _)| folder);
        let is_test = TESTS.iter().any(|end| file.path.ends_with(end) || folder.ends_with(end));
        file.extension() == "rs" && file.is_under("crates") && file.path.contains("/src/") && !is_test
    };
    Ok(tree.files.iter().filter(is_library).flat_map(complaints).collect())
}

fn complaints(file: &TextFile) -> Vec<String> {
    // Tests stand at the end of a file.
    let code = file.text.lines().enumerate().take_while(|(_, line)| !line.starts_with("#[cfg(test)]"));
    let calls = code.filter_map(|(number, line)| Some((number + 1, called(line.split("//").next()?)?)));
    calls
        .map(|(line, name)| {
            format!("{}:{line}: `f_{name}` of tch panics where it fails; use torch_ext::scalar in its place", file.path)
        })
        .collect()
}

/// The first method that is called here and is one of [`NAMES`].
fn called(code: &str) -> Option<&str> {
    code.split("f_").skip(1).find_map(|rest| {
        let name = rest.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next()?;
        let is_call = rest[name.len()..].starts_with(['(', ':']);
        (is_call && NAMES.split_whitespace().any(|other| other == name)).then_some(name)
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_found_in_library_code_only() {
        let call = "let x = Tensor::f_full([2], 1.0, options)?;\n";
        for (path, text, found) in [
            ("crates/a/src/b.rs", call.to_owned(), 1),
            ("crates/a/src/b.rs", "x.f_neg()?.f_mul_scalar_(2.0)?;".to_owned(), 1),
            ("crates/a/src/b.rs", "x.f_mul(&y)?; scalar::mul_(&x, 2.0)?;".to_owned(), 0),
            ("crates/a/src/b.rs", format!("/// {call}"), 0),
            ("crates/a/src/b.rs", format!("#[cfg(test)]\nmod tests {{\n{call}}}"), 0),
            ("crates/a/src/b/tests.rs", call.to_owned(), 0),
            ("crates/a/src/b/tests/c.rs", call.to_owned(), 0),
            ("crates/a/tests/b.rs", call.to_owned(), 0),
        ] {
            assert_eq!(panicking_calls(&Tree::of(&[(path, &text)])).unwrap().len(), found, "{path}: {text}");
        }
    }
}
