//! Folders of models of the Hugging Face Hub: out of its cache on this machine, which is shared with Python's `huggingface_hub`, and,
//! with the cargo feature `hub`, downloaded into it.

#[cfg(not(feature = "hub"))]
mod disabled;
#[cfg(feature = "hub")]
mod enabled;

#[cfg(not(feature = "hub"))]
use disabled::download;
#[cfg(feature = "hub")]
use enabled::download;

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// The branch that is meant without a revision.
const DEFAULT_REVISION: &str = "main";
/// A commit's hash is a little shorter than this, and so is a sensible name of a branch.
const MOST_REVISION_BYTES: u64 = 256;

/// A model that the Hub's cache does not hold, or that cannot be fetched.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// Neither a folder nor what the Hub's models are called.
    #[error(
        "{found:?} is no folder on this machine, and no name of a model on the Hugging Face Hub either; wanted a folder with \
         config.json, or a name such as openai-community/gpt2"
    )]
    NoSuchFolder {
        /// What was asked for.
        found: String,
    },
    /// The library was compiled without the feature.
    #[error(
        "{wanted:?} is no folder on this machine, the Hugging Face cache {cache} does not hold it{at}, and downloads need the cargo \
         feature `hub` of accelerate-models; switch it on, or name a folder",
        cache = .cache.display(),
        at = .revision.as_ref().map(|revision| format!(" at revision {revision:?}")).unwrap_or_default()
    )]
    FeatureDisabled {
        /// Name of the model.
        wanted: String,
        /// The revision that was asked for.
        revision: Option<String>,
        /// Where it was looked for.
        cache: PathBuf,
    },
    /// The network is not to be used.
    #[error(
        "{wanted:?} is no folder on this machine, and the Hugging Face cache {cache} does not hold it; HF_HUB_OFFLINE is set, which \
         forbids to download it",
        cache = .cache.display()
    )]
    Offline {
        /// Name of the model.
        wanted: String,
        /// Where it was looked for.
        cache: PathBuf,
    },
    /// The download failed.
    #[error("cannot fetch {wanted:?} from the Hugging Face Hub: {message}")]
    Fetch {
        /// Name of the model.
        wanted: String,
        /// What the client said.
        message: String,
    },
    /// The repository has no file that is needed.
    #[error("the model {wanted:?} on the Hugging Face Hub has no {missing}; it has {found:?}")]
    MissingFile {
        /// Name of the model.
        wanted: String,
        /// What is missing.
        missing: &'static str,
        /// Files that are there.
        found: Vec<String>,
    },
}

/// The folder that `model` means: itself if there is such a folder, else one of the Hub's cache that holds sizes, weights and tokenizer
/// of the model of this name. `revision` is a branch, a tag or a commit, by default `main`.
///
/// With the cargo feature `hub`, what the cache lacks is downloaded, unless the variable `HF_HUB_OFFLINE` is `1`; a branch is looked
/// up anew each time, and where the Hub cannot be reached, what the cache holds is taken. The variables `HF_ENDPOINT`, `HF_HOME` and `HF_HUB_CACHE` mean what they mean to Python, and the crate `hf-hub`
/// takes `HF_TOKEN`.
///
/// Not collective: on several processes of one machine, let one fetch first (`accelerator.local_main_process_first`).
///
/// ```
/// use accelerate_models::hub::{HubError, model_folder};
///
/// let here = std::env::temp_dir();
/// assert_eq!(model_folder(&here, None)?, here);
/// assert!(matches!(model_folder("no/such/folder", None), Err(HubError::NoSuchFolder { .. })));
/// # Ok::<(), HubError>(())
/// ```
///
/// # Errors
/// There is no such folder, and the Hub cannot help.
pub fn model_folder(model: impl AsRef<Path>, revision: Option<&str>) -> Result<PathBuf, HubError> {
    let model = model.as_ref();
    if model.is_dir() {
        return Ok(model.to_owned());
    }
    let name = model.to_str().filter(|name| is_model_name(name));
    let name = name.ok_or_else(|| HubError::NoSuchFolder { found: model.to_string_lossy().into_owned() })?;
    let cache = cache_folder(|variable| env::var_os(variable));
    let is_offline = env::var("HF_HUB_OFFLINE").is_ok_and(|value| is_true(&value));
    if is_offline || cfg!(not(feature = "hub")) {
        if let Some(folder) = cached(&cache, name, revision) {
            return Ok(folder);
        }
        if is_offline {
            return Err(HubError::Offline { wanted: name.to_owned(), cache });
        }
    }
    download(name, revision, &cache).or_else(|error| match error {
        // Where there is no network, Python takes what it has as well.
        HubError::Fetch { .. } => cached(&cache, name, revision).ok_or(error),
        other => Err(other),
    })
}

/// `name` or `owner/name`, of the characters that the Hub allows.
fn is_model_name(text: &str) -> bool {
    let is_part = |part: &str| {
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        !part.is_empty()
            && part.len() <= 96
            && part.chars().all(is_allowed)
            && !part.starts_with(['-', '.'])
            && !part.ends_with(['-', '.'])
            && !part.contains("..")
            && !part.contains("--")
    };
    let parts: Vec<&str> = text.split('/').collect();
    parts.len() <= 2 && parts.into_iter().all(is_part)
}

fn is_true(value: &str) -> bool {
    ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str())
}

/// Where `huggingface_hub` keeps files.
fn cache_folder(variable: impl Fn(&str) -> Option<OsString>) -> PathBuf {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || {
        set("HF_HOME").unwrap_or_else(|| {
            let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
            cache.unwrap_or_default().join("huggingface")
        })
    };
    set("HF_HUB_CACHE").unwrap_or_else(|| home().join("hub"))
}

/// The snapshot of a model that the cache holds.
fn cached(cache: &Path, name: &str, revision: Option<&str>) -> Option<PathBuf> {
    let repository = cache.join(format!("models--{}", name.replace('/', "--")));
    let revision = revision.unwrap_or(DEFAULT_REVISION);
    let is_inside =
        |part: &str| !part.is_empty() && !part.starts_with('/') && !part.split('/').any(|part| part == "..");
    if !is_inside(revision) {
        return None;
    }
    let reference = repository.join("refs").join(revision);
    let is_short = fs::metadata(&reference).is_ok_and(|data| data.is_file() && data.len() <= MOST_REVISION_BYTES);
    let commit = match is_short {
        true => fs::read_to_string(reference).ok()?.trim().to_owned(),
        false => revision.to_owned(),
    };
    let folder = is_inside(&commit).then(|| repository.join("snapshots").join(commit))?;
    folder.join(crate::config::CONFIG_FILE).is_file().then_some(folder)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("gpt2", true)]
    #[case("openai-community/gpt2", true)]
    #[case("meta-llama/Llama-3.2-1B", true)]
    #[case("a/b/c", false)]
    #[case("", false)]
    #[case("/gpt2", false)]
    #[case("./gpt2", false)]
    #[case("../gpt2", false)]
    #[case("a/..", false)]
    #[case("owner/", false)]
    #[case("owner/a--b", false)]
    #[case("owner/a b", false)]
    #[case("owner/\u{e9}", false)]
    fn names_of_the_hub(#[case] name: &str, #[case] is_name: bool) {
        assert_eq!(is_model_name(name), is_name);
    }

    #[rstest]
    #[case(&[("HOME", "/u")], "/u/.cache/huggingface/hub")]
    #[case(&[("HOME", "/u"), ("XDG_CACHE_HOME", "/c")], "/c/huggingface/hub")]
    #[case(&[("HOME", "/u"), ("XDG_CACHE_HOME", "/c"), ("HF_HOME", "/hf")], "/hf/hub")]
    #[case(&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/h")], "/h")]
    #[case(&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "")], "/hf/hub")]
    fn places_of_the_cache(#[case] variables: &[(&str, &str)], #[case] wanted: &str) {
        let variable = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
        assert_eq!(cache_folder(variable), Path::new(wanted));
    }

    #[test]
    fn what_the_cache_holds_is_found_by_branch_and_by_commit() {
        let cache = tempfile::tempdir().unwrap();
        let repository = cache.path().join("models--owner--tiny");
        let (snapshot, empty) = (repository.join("snapshots/0a1b"), repository.join("snapshots/ffff"));
        for folder in [&snapshot, &empty, &repository.join("refs/pr")] {
            fs::create_dir_all(folder).unwrap();
        }
        fs::write(snapshot.join("config.json"), "{}").unwrap();
        let refs =
            [("main", "0a1b"), ("pr/1", "0a1b\n"), ("empty", "ffff"), ("out", "../../.."), ("long", &"a".repeat(300))];
        refs.iter().for_each(|(name, commit)| fs::write(repository.join("refs").join(name), commit).unwrap());
        let find = |name: &str, revision| cached(cache.path(), name, revision);
        for revision in [None, Some("main"), Some("pr/1"), Some("0a1b")] {
            assert_eq!(find("owner/tiny", revision).unwrap(), snapshot);
        }
        // Not all of it is there, nothing is, or the reference leads out of the cache.
        for revision in ["empty", "ffff", "v2", "out", "long", "../refs/main", "/", ""] {
            assert!(find("owner/tiny", Some(revision)).is_none(), "{revision}");
        }
        assert!(find("tiny", None).is_none());
    }
}
