//! How autocast is entered.

use crate::settings::record::record;

record! {
    /// How the forward pass enters autocast (`AutocastKwargs` of the reference, `utils/dataclasses.py`).
    ///
    /// ```
    /// use accelerate_core::config::{AutocastKwargs, AutocastSettings};
    /// let kwargs: AutocastKwargs = serde_json::from_str(r#"{"cache_enabled": false}"#).unwrap();
    /// assert_eq!(AutocastSettings::from(kwargs), AutocastSettings { enabled: true, cache_enabled: Some(false) });
    /// ```
    AutocastKwargs => AutocastSettings, section "autocast_config", keys "", variables "ACCELERATE_AUTOCAST_" {
        /// Whether autocast is on. Default true.
        enabled: bool = true => setting();
        /// Whether a weight is cast once per step rather than at each use. Default `None`: libtorch's own
        /// choice, which is yes.
        cache_enabled: bool => setting();
    }
}
