//! Names, variables, places that answers lead to, and ranges.

use super::client::{content_range, resolve};
use super::{HubError, HubId, HubSettings};
use rstest::rstest;
use std::fs;

#[rstest]
#[case("bert-base-cased", true)]
#[case("org/some.model-7b_x", true)]
#[case("a/b/c", false)]
#[case("", false)]
#[case("/a", false)]
#[case("a/", false)]
#[case("./model", false)]
#[case("../model", false)]
#[case("a/..", false)]
#[case("a..b", false)]
#[case("a--b/c", false)]
#[case("a b", false)]
#[case("a?b=c", false)]
#[case("a%2f", false)]
#[case("é", false)]
#[case("model.safetensors", false)]
#[case("org/pytorch_model.bin", false)]
fn names_of_the_hub_are_told_from_paths(#[case] name: &str, #[case] wanted: bool) {
    assert_eq!(HubId::parse(name).is_some(), wanted);
    assert_eq!(HubId::parse(&name.repeat(1000)), None);
}

fn settings(variables: &[(&str, &str)]) -> Result<HubSettings, HubError> {
    HubSettings::new(&|wanted| variables.iter().find(|(name, _)| *name == wanted).map(|(_, value)| (*value).to_owned()))
}

#[test]
fn variables_of_the_hub_decide() {
    let default = settings(&[("HOME", "/users/ada")]).unwrap();
    assert_eq!(default.endpoint, "https://huggingface.co");
    assert_eq!(default.cache.unwrap().0.to_str(), Some("/users/ada/.cache/huggingface/hub"));
    assert!(!default.is_offline && default.token.is_none() && default.deadline.as_secs() == 30);
    let all = [
        ("HF_ENDPOINT", "http://mirror/hf/"),
        ("HF_HOME", "/h"),
        ("HF_HUB_CACHE", "/c"),
        ("HF_HUB_OFFLINE", "yes"),
        ("HF_TOKEN", " secret\n"),
        ("HF_HUB_DOWNLOAD_TIMEOUT", "7"),
    ];
    let said = settings(&all).unwrap();
    assert_eq!((said.endpoint.as_str(), said.deadline.as_secs(), said.is_offline), ("http://mirror/hf", 7, true));
    assert_eq!(said.cache.as_ref().unwrap().0.to_str(), Some("/c"));
    assert_eq!(said.token.as_ref().unwrap().0, "secret");
    assert!(!format!("{said:?}").contains("secret"), "{said:?}");
    let nobody = settings(&[("HF_TOKEN", "secret"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]).unwrap();
    assert!(nobody.token.is_none() && nobody.cache.is_none());
}

#[test]
fn a_token_is_read_from_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().to_str().unwrap();
    assert!(settings(&[("HF_HOME", home)]).unwrap().token.is_none());
    fs::write(folder.path().join("token"), "from-file\n").unwrap();
    assert_eq!(settings(&[("HF_HOME", home)]).unwrap().token.unwrap().0, "from-file");
    let path = folder.path().join("token");
    assert_eq!(settings(&[("HF_TOKEN_PATH", path.to_str().unwrap())]).unwrap().token.unwrap().0, "from-file");
    assert_eq!(settings(&[("HF_HOME", home), ("HF_TOKEN", "own")]).unwrap().token.unwrap().0, "own");
}

#[rstest]
#[case("HF_HUB_DOWNLOAD_TIMEOUT", "0", "HF_HUB_DOWNLOAD_TIMEOUT is \"0\"")]
#[case("HF_HUB_DOWNLOAD_TIMEOUT", "soon", "seconds")]
#[case("HF_TOKEN", "se cret", "cannot be sent")]
#[case("HF_TOKEN", "sécret", "cannot be sent")]
fn wrong_variables_are_named(#[case] name: &str, #[case] value: &str, #[case] words: &str) {
    let error = settings(&[(name, value)]).unwrap_err().to_string();
    assert!(error.contains(words) && !error.contains("cret"), "{error}");
}

#[rstest]
#[case("https://cdn.org/f?sig=1", Some("https://cdn.org/f?sig=1"))]
#[case("//cdn.org/f", Some("https://cdn.org/f"))]
#[case("/api/x?y=1#z", Some("https://hub.org:444/api/x?y=1"))]
#[case("x", Some("https://hub.org:444/a/b/x"))]
#[case("", None)]
#[case("ftp://hub.org/x", None)]
#[case("file:///etc/passwd", None)]
#[case("https://", None)]
#[case("http://a b/", None)]
fn answers_lead_on(#[case] location: &str, #[case] wanted: Option<&str>) {
    let from = "https://hub.org:444/a/b/c".parse().unwrap();
    assert_eq!(resolve(&from, location).map(|uri| uri.to_string()).as_deref(), wanted);
}

#[rstest]
#[case("bytes 0-7/100", Some(((0, 7), 100)))]
#[case("bytes 8-99/100", Some(((8, 99), 100)))]
#[case("bytes 8-100/100", None)]
#[case("bytes 7-0/100", None)]
#[case("bytes 0-7/*", None)]
#[case("bytes */100", None)]
#[case("0-7/100", None)]
#[case("bytes -1-7/100", None)]
#[case("bytes 0-7/99999999999999999999999", None)]
#[case("", None)]
fn ranges_are_read_strictly(#[case] text: &str, #[case] wanted: Option<((u64, u64), u64)>) {
    assert_eq!(content_range(text), wanted);
}
