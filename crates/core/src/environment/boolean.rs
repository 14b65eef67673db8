//! Reading of yes and no from text.

use crate::Result;
use crate::error::environment::EnvironmentErrorKind as Kind;
use crate::settings::shortened;

/// Reads `y`, `yes`, `t`, `true`, `on`, `1` as true and `n`, `no`, `f`, `false`, `off`, `0` as false, in
/// upper or lower case (`str_to_bool` of the reference, `utils/environment.py`). `None`: neither.
///
/// ```
/// use accelerate_core::environment::str_to_bool;
/// assert_eq!(str_to_bool("Yes"), Some(true));
/// assert_eq!(str_to_bool("off"), Some(false));
/// assert_eq!(str_to_bool("maybe"), None);
/// ```
pub fn str_to_bool(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" | "t" | "true" | "on" | "1" => Some(true),
        "n" | "no" | "f" | "false" | "off" | "0" => Some(false),
        _ => None,
    }
}

/// Reads the variable `name` as yes or no; `default` when it is not set or empty
/// (`parse_flag_from_env` of the reference).
///
/// # Errors
///
/// [`Error::is_environment`](crate::Error::is_environment) when the value is neither.
///
/// ```
/// use accelerate_core::environment::parse_flag;
/// assert!(parse_flag(&|_| Some("on".to_owned()), "ACCELERATE_USE_CPU", false)?);
/// assert!(parse_flag(&|_| None, "ACCELERATE_USE_CPU", true)?);
/// # Ok::<(), accelerate_core::Error>(())
/// ```
pub fn parse_flag(lookup: &dyn Fn(&str) -> Option<String>, name: &str, default: bool) -> Result<bool> {
    let Some(value) = lookup(name).filter(|value| !value.trim().is_empty()) else {
        return Ok(default);
    };
    str_to_bool(&value).ok_or_else(|| {
        let wanted = "one of y, yes, t, true, on, 1 or n, no, f, false, off, 0";
        Kind::Value { name: name.to_owned(), value: shortened(&value), wanted }.into()
    })
}
