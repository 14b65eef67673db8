//! Settings as variables: what a launcher says to the processes that it starts.

use super::{Origin, Record, Setting};
use crate::Result;
use crate::error::settings::SettingsErrorKind as Kind;

/// The variable in which `accelerate launch` says where the values of the other variables came from: an object in JSON,
/// from the name of a variable to its value and the text of its origin.
pub const ORIGINS_VARIABLE: &str = "ACCELERATE_CONFIG_ORIGINS";

/// The variable in which `accelerate launch` lists what it has set although nobody has said it, because programs in Python
/// expect it: an object in JSON, from the name of a variable to its value. While they have these values, such variables say
/// nothing to programs in Rust.
pub const DEFAULTS_VARIABLE: &str = "ACCELERATE_CONFIG_DEFAULTS";

/// What the variables say of the record, with their names. Variables that are set but empty say nothing, and neither does
/// Python's `None`.
pub(crate) fn read<R: Record>(lookup: &dyn Fn(&str) -> Option<String>) -> Result<(R, Vec<(&'static Setting, Origin)>)> {
    let mut record = R::default();
    let mut said = Vec::new();
    for setting in R::settings() {
        let Some(name) = setting.variable() else { continue };
        let Some(text) = lookup(&name).map(|text| text.trim().to_owned()).filter(|text| says_something(setting, text))
        else {
            continue;
        };
        if !record.say(setting, &text) || !setting.is_in_range(&text) {
            let wanted = setting.wanted_for(&text);
            return Err(Kind::Variable { name, found: super::document::shortened(&text), wanted }.into());
        }
        said.push((setting, Origin::Environment(name)));
    }
    Ok((record, said))
}

pub(crate) fn says_something(setting: &Setting, text: &str) -> bool {
    let is_none = || {
        let word = text.trim();
        word == "None"
            || (setting.kind.has_none() && (word.eq_ignore_ascii_case("none") || word.eq_ignore_ascii_case("null")))
    };
    let is_silent = || setting.declaration.silent.iter().any(|word| word.eq_ignore_ascii_case(text.trim()));
    !text.trim().is_empty() && !is_none() && !is_silent()
}
