//! Models of the Hugging Face Hub: in its cache on this machine, or their headers over the network.

mod cache;
mod client;
mod error;
mod repository;

use std::fmt;
use std::time::Duration;

use accelerate_core::config::hugging_face_home;

pub(super) use cache::Cache;
pub(super) use error::HubError;
pub(super) use repository::Repository;

/// Where models are when `HF_ENDPOINT` does not say.
const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
/// How long one request may take when `HF_HUB_DOWNLOAD_TIMEOUT` does not say.
const DEFAULT_DEADLINE: Duration = Duration::from_secs(30);
/// Longest name that the Hub allows.
const MAX_ID_BYTES: usize = 200;
/// Longer than any token.
const MAX_TOKEN_BYTES: u64 = 10_000;

/// The name of a model: `owner/name`, or `name` for the oldest ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HubId(String);

impl HubId {
    /// Nothing for what can only be a path: with another number of parts, signs that names do not have, or the ending of a
    /// file of weights.
    pub(super) fn parse(name: &str) -> Option<Self> {
        let is_part = |part: &str| {
            part.starts_with(|c: char| c.is_ascii_alphanumeric())
                && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
                && !part.contains("..")
                && !part.contains("--")
        };
        let is_file =
            [".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt"].iter().any(|ending| name.ends_with(ending));
        let is_id = name.len() <= MAX_ID_BYTES && name.split('/').count() <= 2 && name.split('/').all(is_part);
        (is_id && !is_file).then(|| Self(name.to_owned()))
    }
}

impl fmt::Display for HubId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What says who is asking. It is never shown.
#[derive(Clone)]
pub(super) struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// What the variables of huggingface_hub say.
#[derive(Clone, Debug)]
pub(super) struct HubSettings {
    endpoint: String,
    pub(super) cache: Option<Cache>,
    pub(super) is_offline: bool,
    token: Option<Token>,
    deadline: Duration,
}

impl HubSettings {
    /// Reads `HF_ENDPOINT`, `HF_HUB_CACHE`, `HF_HOME`, `HF_HUB_OFFLINE`, `HF_TOKEN`, `HF_TOKEN_PATH`,
    /// `HF_HUB_DISABLE_IMPLICIT_TOKEN` and `HF_HUB_DOWNLOAD_TIMEOUT`.
    ///
    /// # Errors
    /// The time is no number of seconds, or the token cannot be sent.
    pub(super) fn new(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Self, HubError> {
        let set = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let is_true = |name: &str| {
            set(name).is_some_and(|value| ["1", "ON", "YES", "TRUE"].contains(&value.to_ascii_uppercase().as_str()))
        };
        let home = hugging_face_home(lookup);
        let cache = set("HF_HUB_CACHE").map(Into::into).or_else(|| Some(home.as_ref()?.join("hub")));
        let in_file = || {
            let path = set("HF_TOKEN_PATH").map(Into::into).or_else(|| Some(home.as_ref()?.join("token")))?;
            cache::read_small(&path, MAX_TOKEN_BYTES)
        };
        let token = match set("HF_TOKEN") {
            _ if is_true("HF_HUB_DISABLE_IMPLICIT_TOKEN") => None,
            Some(token) => Some(token),
            None => in_file(),
        };
        let token = token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        if token.as_ref().is_some_and(|token| !token.bytes().all(|byte| byte.is_ascii_graphic())) {
            return Err(HubError::Token);
        }
        let deadline = match set("HF_HUB_DOWNLOAD_TIMEOUT") {
            None => DEFAULT_DEADLINE,
            Some(text) => match text.trim().parse::<u32>() {
                Ok(seconds) if seconds > 0 => Duration::from_secs(seconds.into()),
                _ => return Err(HubError::DeadlineVariable { found: text }),
            },
        };
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
        Ok(Self {
            endpoint: endpoint.trim().trim_end_matches('/').to_owned(),
            cache: cache.map(Cache),
            is_offline: is_true("HF_HUB_OFFLINE"),
            token: token.map(Token),
            deadline,
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
