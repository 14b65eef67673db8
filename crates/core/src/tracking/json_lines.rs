//! Values of a run as lines of JSON, one object each.

use super::Value;
use crate::error::tracking::TrackingErrorKind;
use crate::{Error, Result};

/// The file in the folder of the project.
pub const JSON_LINES_FILE: &str = "log.jsonl";
/// The step of the training, where it was said.
pub const STEP_KEY: &str = "_step";
/// When the line was written, in seconds since 1970.
pub const TIME_KEY: &str = "_timestamp";
/// Of the line with the configuration of the run.
pub const CONFIG_KEY: &str = "_config";
/// What a value cannot be called.
pub const RESERVED_KEYS: [&str; 3] = [STEP_KEY, TIME_KEY, CONFIG_KEY];

/// The line of one call, with its end: time and step first, then the values by their names.
///
/// ```
/// use accelerate_core::tracking::{Value, line};
/// let values = [("loss".to_owned(), Value::Float(0.5)), ("lr".to_owned(), Value::Float(f64::NAN))];
/// let line = line(1.5, Some(3), &values)?;
/// assert_eq!(line, "{\"_timestamp\":1.5,\"_step\":3,\"loss\":0.5,\"lr\":\"NaN\"}\n");
/// # Ok::<(), accelerate_core::Error>(())
/// ```
///
/// # Errors
/// A value that is called as what the line has anyway.
pub fn line(wall_time: f64, step: Option<i64>, values: &[(String, Value)]) -> Result<String> {
    if let Some((name, _)) = values.iter().find(|(name, _)| RESERVED_KEYS.contains(&name.as_str())) {
        return Err(Error::new(TrackingErrorKind::ReservedName { name: name.clone() }));
    }
    let step = step.map(|step| (STEP_KEY.to_owned(), Value::Int(step)));
    let first = [(TIME_KEY.to_owned(), Value::Float(wall_time))];
    Ok(object(first.into_iter().chain(step).chain(values.iter().cloned())))
}

/// The line with the configuration of a run, of which there is one for each time that it was started.
pub fn config_line(wall_time: f64, values: &[(String, Value)]) -> String {
    let time = (TIME_KEY.to_owned(), Value::Float(wall_time));
    object([time, (CONFIG_KEY.to_owned(), Value::Map(values.to_vec()))])
}

fn object(entries: impl IntoIterator<Item = (String, Value)>) -> String {
    // A later value replaces an earlier one of the same name, as in a dictionary.
    let mut unique: Vec<(String, Value)> = Vec::new();
    for (name, value) in entries {
        match unique.iter_mut().find(|(known, _)| *known == name) {
            Some(entry) => entry.1 = value,
            None => unique.push((name, value)),
        }
    }
    // Names are texts and numbers are finite where they are numbers, so that nothing is left which JSON could not say.
    let mut line = serde_json::to_string(&Value::Map(unique)).unwrap_or_default();
    line.push('\n');
    line
}
