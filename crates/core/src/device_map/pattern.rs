//! Paths of modules by pattern.

/// Does `path` fit `pattern`? `*` stands for any run of letters within one name of a path, `**` for any run at all.
pub(super) fn fits(pattern: &str, path: &str) -> bool {
    let (pattern, path) = (pattern.as_bytes(), path.as_bytes());
    // Where each star that may still grow began: in the pattern behind it, and in the path.
    let (mut at, mut place) = (0, 0);
    let mut single: Option<(usize, usize)> = None;
    let mut double: Option<(usize, usize)> = None;
    loop {
        if pattern[at..].starts_with(b"**") {
            at += 2;
            (single, double) = (None, Some((at, place)));
        } else if pattern.get(at) == Some(&b'*') {
            at += 1;
            single = Some((at, place));
        } else if place == path.len() && at == pattern.len() {
            return true;
        } else if place < path.len() && pattern.get(at) == Some(&path[place]) {
            (at, place) = (at + 1, place + 1);
        } else {
            // The innermost star that can take one letter more does so.
            let grown = single.filter(|&(_, end)| path.get(end).is_some_and(|letter| *letter != b'.'));
            if let Some((behind, end)) = grown {
                (at, place) = (behind, end + 1);
                single = Some((behind, end + 1));
            } else if let Some((behind, end)) = double.filter(|&(_, end)| end < path.len()) {
                (at, place) = (behind, end + 1);
                (single, double) = (None, Some((behind, end + 1)));
            } else {
                return false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::fits;

    #[test]
    fn stars_stand_for_runs_of_letters() {
        let rows = [
            ("encoder.layer.*", "encoder.layer.11", true),
            ("encoder.layer.*", "encoder.layer.11.attention", false),
            ("encoder.layer.*", "encoder.layer", false),
            ("h.*", "h.", true),
            ("**.block*", "a.b.block7", true),
            ("**block*", "block7", true),
            ("**block*", "a.block7.linear", false),
            ("**block**", "a.block7.linear", true),
            ("*.attention", "layer.attention", true),
            ("*.attention", "a.layer.attention", false),
            ("a*c*e", "abcde", true),
            ("a*c*e", "abcd", false),
            ("**.a.*.c", "x.a.b.a.b.c", true),
            ("", "", true),
            ("", "a", false),
            ("**", "", true),
            ("*", "a.b", false),
            ("exact.path", "exact.path", true),
            ("exact.path", "exact_path", false),
        ];
        for (pattern, path, wanted) in rows {
            assert_eq!(fits(pattern, path), wanted, "{pattern:?} and {path:?}");
        }
    }
}
