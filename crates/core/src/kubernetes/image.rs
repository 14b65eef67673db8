//! Whether a text can be the name of an image, by the grammar of `reference.go` of the project distribution, which Docker and
//! containerd read names with. A cluster takes other texts, and its pods wait for ever in `InvalidImageName`.

const LONGEST_TAG: usize = 128;
const SHORTEST_DIGEST: usize = 32;

/// `registry.example:5000/team/train:1`, `train@sha256:...`: a registry, a path, a tag and a digest, of which the path has to be there.
pub(super) fn is_image(text: &str) -> bool {
    let (rest, digest) = text.split_once('@').map_or((text, None), |(rest, digest)| (rest, Some(digest)));
    // The port of a registry is before a slash, and a tag is not.
    let (name, tag) = match rest.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
        _ => (rest, None),
    };
    is_name(name) && tag.is_none_or(is_tag) && digest.is_none_or(is_digest)
}

fn is_name(text: &str) -> bool {
    let is_path = |path: &str| path.split('/').all(is_component);
    is_path(text) || text.split_once('/').is_some_and(|(registry, path)| is_registry(registry) && is_path(path))
}

/// Words in lower case with one of `.`, `_`, `__` or some `-` between them.
fn is_component(text: &str) -> bool {
    let is_word_byte = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let has_ends = text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text.ends_with(|last: char| last.is_ascii_alphanumeric());
    let mut separators = text.split(|letter: char| letter.is_ascii_alphanumeric());
    let is_separator = |text: &str| matches!(text, "" | "." | "_" | "__") || text.bytes().all(|byte| byte == b'-');
    has_ends && text.bytes().all(|byte| is_word_byte(byte) || b"._-".contains(&byte)) && separators.all(is_separator)
}

/// A name or an address, with or without a port.
fn is_registry(text: &str) -> bool {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (text, None),
    };
    let address = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let is_part = |part: &str| {
        let is_plain = part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        !part.is_empty() && is_plain && !part.starts_with('-') && !part.ends_with('-')
    };
    let is_host = match address {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => host.split('.').all(is_part),
    };
    is_host && port.is_none_or(|port| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()))
}

fn is_tag(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let is_rest = |byte: u8| is_plain(byte) || b".-".contains(&byte);
    text.len() <= LONGEST_TAG && text.bytes().next().is_some_and(is_plain) && text.bytes().all(is_rest)
}

/// `sha256:` and its digits.
fn is_digest(text: &str) -> bool {
    let is_algorithm = |text: &str| {
        let words = text.split(|letter| "+._-".contains(letter));
        words.into_iter().all(|word| {
            word.starts_with(|first: char| first.is_ascii_alphabetic())
                && word.bytes().all(|byte| byte.is_ascii_alphanumeric())
        })
    };
    text.split_once(':').is_some_and(|(algorithm, digits)| {
        let are_digits = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_algorithm(algorithm) && digits.len() >= SHORTEST_DIGEST && are_digits
    })
}

#[cfg(test)]
mod tests {
    use super::is_image;
    use rstest::rstest;

    #[rstest]
    #[case("i")]
    #[case("registry.example/train:1")]
    #[case("localhost:5000/team/train_a/b--c.d__e:V1.0-rc_2")]
    #[case("[fd78::1]:5000/train")]
    #[case("Registry/train")]
    #[case("train@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef")]
    #[case("train:1@sha256:0123456789abcdef0123456789abcdef")]
    fn names_of_images(#[case] text: &str) {
        assert!(is_image(text), "{text}");
    }

    #[rstest]
    #[case::nothing("")]
    #[case::two_words("x y")]
    #[case::a_space_at_the_end("x ")]
    #[case::upper_case("Train:1")]
    #[case::an_address("https://registry.example/train:1")]
    #[case::a_flag("--nodes")]
    #[case::no_tag("train:")]
    #[case::a_tag_that_is_none("train:-1")]
    #[case::no_path("registry.example/")]
    #[case::two_slashes("registry.example//train")]
    #[case::three_underscores("a___b")]
    #[case::two_dots("a..b")]
    #[case::no_port("registry:/train")]
    #[case::a_short_digest("train@sha256:0123")]
    #[case::no_algorithm("train@0123456789abcdef0123456789abcdef")]
    #[case::a_variable("$IMAGE")]
    #[case::line("a\nb")]
    #[case::other_letters("träin")]
    fn what_no_image_is_called(#[case] text: &str) {
        assert!(!is_image(text), "{text}");
    }

    #[test]
    fn a_tag_has_at_most_128_letters() {
        assert!(is_image(&format!("train:{}", "a".repeat(128))));
        assert!(!is_image(&format!("train:{}", "a".repeat(129))));
    }
}
