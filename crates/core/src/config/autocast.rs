//! How autocast is entered.

use serde::{Deserialize, Serialize};

/// How the forward pass enters autocast (`AutocastKwargs` of the reference, `utils/dataclasses.py`).
///
/// ```
/// use accelerate_core::config::AutocastKwargs;
/// let kwargs: AutocastKwargs = serde_json::from_str(r#"{"cache_enabled": false}"#).unwrap();
/// assert_eq!(kwargs, AutocastKwargs { enabled: true, cache_enabled: Some(false) });
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AutocastKwargs {
    /// Whether autocast is on. Default true.
    pub enabled: bool,
    /// Whether a weight is cast once per step rather than at each use. Default `None`: libtorch's own
    /// choice, which is yes.
    pub cache_enabled: Option<bool>,
}

impl Default for AutocastKwargs {
    fn default() -> Self {
        Self { enabled: true, cache_enabled: None }
    }
}
