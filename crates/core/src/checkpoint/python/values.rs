//! Plain data of Python's as JSON, and back.

use crate::weight_files::{Plain, shown};
use serde_json::{Map, Number, Value};

/// What of a state JSON cannot say, by its path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Left(pub Vec<String>);

impl Left {
    pub(super) fn add(&mut self, path: &str, what: &str) {
        self.0.push(if path.is_empty() { what.to_owned() } else { format!("{path} ({what})") });
    }
}

/// A value as JSON. What JSON cannot say is left out of the dictionary that it is in, and noted; a list that has it is left out as
/// a whole.
///
/// ```
/// use accelerate_core::checkpoint::python::{Left, to_json};
/// use accelerate_core::weight_files::Plain;
///
/// let mut left = Left::default();
/// let state: Plain<()> = Plain::dict([("lr", Plain::Float(0.1)), ("best", Plain::Float(f64::INFINITY))]);
/// assert_eq!(to_json(&state, "", &mut left), Some(serde_json::json!({ "lr": 0.1 })));
/// assert_eq!(left.0, ["best (inf)"]);
/// ```
pub fn to_json<T>(value: &Plain<T>, path: &str, left: &mut Left) -> Option<Value> {
    let json = match value {
        Plain::None => Value::Null,
        Plain::Bool(value) => (*value).into(),
        Plain::Int(value) => (*value).into(),
        Plain::LargeInt(value) => (*value).into(),
        Plain::Float(value) => match Number::from_f64(*value) {
            Some(number) => number.into(),
            None => {
                left.add(path, &value.to_string());
                return None;
            }
        },
        Plain::Text(text) => text.as_str().into(),
        Plain::List(items) | Plain::Tuple(items) => {
            let mut within = Left::default();
            let of_item = |(place, item)| to_json(item, &format!("{path}[{place}]"), &mut within);
            // A list without one of its items would be another one.
            let items = items.iter().enumerate().map(of_item).collect::<Option<Vec<_>>>();
            match (items.is_some(), within.0.last()) {
                // What comes first is enough to look for.
                (false, Some(reason)) => left.add(path, &format!("the whole list, because of {reason}")),
                _ => left.0.append(&mut within.0),
            }
            return items.map(Value::Array);
        }
        Plain::Dict(pairs) => {
            let mut object = Map::new();
            for (key, value) in pairs {
                let Plain::Text(key) = key else {
                    left.add(path, "the whole dictionary, because it has keys that are no texts");
                    return None;
                };
                let within = if path.is_empty() { shown(key) } else { format!("{path}.{}", shown(key)) };
                if let Some(value) = to_json(value, &within, left) {
                    object.insert(key.clone(), value);
                }
            }
            object.into()
        }
        Plain::Tensor(_) | Plain::Other(_) => {
            left.add(path, &value.kind());
            return None;
        }
    };
    Some(json)
}

/// JSON as Python has it: arrays as lists.
pub fn from_json<T>(value: &Value) -> Plain<T> {
    match value {
        Value::Null => Plain::None,
        Value::Bool(value) => Plain::Bool(*value),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => Plain::Int(number),
            (None, Some(number)) => Plain::LargeInt(number),
            (None, None) => Plain::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(text) => Plain::text(text),
        Value::Array(items) => Plain::List(items.iter().map(from_json).collect()),
        Value::Object(object) => Plain::dict(object.iter().map(|(key, value)| (key, from_json(value)))),
    }
}

/// Which type of schedule has saved a state, in JSON alone.
const SCHEDULER_TYPE: &str = "_scheduler_type";

/// The state of a schedule as Python's `load_state_dict` takes it, whatever schedule it is of: without the name of the type that
/// saved it here, which PyTorch would make an attribute of its schedule.
///
/// ```
/// use accelerate_core::checkpoint::python::schedule_from_json;
/// use accelerate_core::weight_files::Plain;
///
/// let state: Plain<()> = schedule_from_json(&serde_json::json!({
///     "_scheduler_type": "StepLr", "last_epoch": 3, "base_lrs": [0.1, 0.2]
/// }));
/// assert_eq!(state.get("last_epoch"), Some(&Plain::Int(3)));
/// assert_eq!(state.get("lr_lambdas"), Some(&Plain::List(vec![Plain::None, Plain::None])));
/// assert_eq!(state.get("_scheduler_type"), None);
/// ```
pub fn schedule_from_json<T>(state: &Value) -> Plain<T> {
    let mut state = state.clone();
    make_pythons(&mut state);
    from_json(&state)
}

/// The state of a schedule without what [`schedule_from_json`] adds, so that nothing is new after both ways: functions of which
/// nothing is saved.
///
/// ```
/// use accelerate_core::checkpoint::python::without_lambdas;
///
/// let state = serde_json::json!({ "last_epoch": 3, "base_lrs": [0.1, 0.2], "lr_lambdas": [null, null] });
/// assert_eq!(without_lambdas(state), serde_json::json!({ "last_epoch": 3, "base_lrs": [0.1, 0.2] }));
/// ```
pub fn without_lambdas(mut state: Value) -> Value {
    remove_lambdas(&mut state);
    state
}

fn remove_lambdas(state: &mut Value) {
    let Some(object) = state.as_object_mut() else { return };
    if let Some(Value::Array(within)) = object.get_mut("_schedulers") {
        within.iter_mut().for_each(remove_lambdas);
    }
    let saves_none = |lambdas: &Value| lambdas.as_array().is_some_and(|lambdas| lambdas.iter().all(Value::is_null));
    if object.get("lr_lambdas").is_some_and(saves_none) {
        object.remove("lr_lambdas");
    }
}

/// `LambdaLR` takes no state without its functions, of which it saves none either. Other schedules do not look at them.
/// What is not PyTorch's goes.
fn make_pythons(state: &mut Value) {
    let Some(object) = state.as_object_mut() else { return };
    if let Some(Value::Array(within)) = object.get_mut("_schedulers") {
        within.iter_mut().for_each(make_pythons);
    }
    object.remove(SCHEDULER_TYPE);
    if let Some(groups) = object.get("base_lrs").and_then(Value::as_array).map(Vec::len) {
        object.entry("lr_lambdas").or_insert_with(|| vec![Value::Null; groups].into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn no_schedule_within_another_one_brings_its_type_to_python() {
        let inner = json!({ "_scheduler_type": "StepLr", "last_epoch": 1 });
        let state = json!({ "_scheduler_type": "Warmup", "last_epoch": 3, "_schedulers": [inner] });
        let wanted = json!({ "last_epoch": 3, "_schedulers": [{ "last_epoch": 1 }] });
        assert_eq!(schedule_from_json::<()>(&state), from_json(&wanted));
    }
}
