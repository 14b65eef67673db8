//! Where the default configuration file is.

use super::Lookup;
use std::path::PathBuf;

/// The default configuration file: `accelerate/default_config.yaml` in `HF_HOME`, else in `huggingface` of `XDG_CACHE_HOME`,
/// else in `~/.cache/huggingface`. The first of these variables that is set decides. After it comes `default_config.json` in
/// the same folder, which is looked for where the first one does not exist. Nothing if even `HOME` is not set.
///
/// Python Accelerate has the same places, but not the file in JSON. A variable that is set to nothing counts as not set; Python
/// takes an empty `HF_HOME` for the working folder.
///
/// ```
/// use accelerate_core::config::default_config_files;
/// let lookup = |name: &str| (name == "HOME").then(|| "/users/ada".to_owned());
/// let [yaml, json] = default_config_files(&lookup).unwrap();
/// assert_eq!(yaml.to_str(), Some("/users/ada/.cache/huggingface/accelerate/default_config.yaml"));
/// assert_eq!(json.file_name(), Some("default_config.json".as_ref()));
/// ```
pub fn default_config_files(lookup: Lookup<'_>) -> Option<[PathBuf; 2]> {
    let folder = hugging_face_home(lookup)?.join("accelerate");
    Some(["default_config.yaml", "default_config.json"].map(|name| folder.join(name)))
}

/// The folder that all programs of Hugging Face share: `HF_HOME`, else `huggingface` in `XDG_CACHE_HOME`, else
/// `~/.cache/huggingface`. Nothing if even `HOME` is not set.
///
/// ```
/// use accelerate_core::config::hugging_face_home;
/// let lookup = |name: &str| (name == "HF_HOME").then(|| "/data/hf".to_owned());
/// assert_eq!(hugging_face_home(&lookup).unwrap().to_str(), Some("/data/hf"));
/// ```
pub fn hugging_face_home(lookup: Lookup<'_>) -> Option<PathBuf> {
    let set = |name: &str| lookup(name).filter(|value| !value.is_empty());
    let home = set("HOME").map(PathBuf::from);
    let expanded = |value: String| match (value.strip_prefix('~'), &home) {
        (Some(""), Some(home)) => home.clone(),
        (Some(rest), Some(home)) if rest.starts_with('/') => home.join(rest.trim_start_matches('/')),
        _ => PathBuf::from(value),
    };
    let in_cache = || {
        let cache = set("XDG_CACHE_HOME").map(expanded).or_else(|| Some(home.as_ref()?.join(".cache")))?;
        Some(cache.join("huggingface"))
    };
    set("HF_HOME").map(expanded).or_else(in_cache)
}
