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
    let folder = set("HF_HOME").map(expanded).or_else(in_cache)?.join("accelerate");
    Some(["default_config.yaml", "default_config.json"].map(|name| folder.join(name)))
}
