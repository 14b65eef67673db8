//! How JSON values differ, by path.

use accelerate_core::weight_files::shown;
use serde::Serialize;
use serde_json::Value;

use super::numbers::Distance;

/// A place at which two values differ. Where one has nothing, it is `None`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct ValueDifference {
    /// `base_lrs[0]`, or nothing if all of it differs.
    pub(super) path: String,
    pub(super) a: Option<Value>,
    pub(super) b: Option<Value>,
}

/// All places at which two values differ. Numbers may be so far apart as `tolerance` says.
pub(super) fn differences(path: &str, a: &Value, b: &Value, tolerance: Option<f64>) -> Vec<ValueDifference> {
    let mut found = Vec::new();
    // Values come from JSON texts, which are nested at most 128 deep.
    compare(path.to_owned(), Some(a), Some(b), tolerance, &mut found);
    found
}

fn compare(
    path: String,
    a: Option<&Value>,
    b: Option<&Value>,
    tolerance: Option<f64>,
    found: &mut Vec<ValueDifference>,
) {
    match (a, b) {
        (Some(Value::Object(a)), Some(Value::Object(b))) => {
            let only_b = b.keys().filter(|key| !a.contains_key(*key));
            for key in a.keys().chain(only_b) {
                let path = if path.is_empty() { shown(key) } else { format!("{path}.{}", shown(key)) };
                compare(path, a.get(key), b.get(key), tolerance, found);
            }
        }
        (Some(Value::Array(a)), Some(Value::Array(b))) => {
            for place in 0..a.len().max(b.len()) {
                compare(format!("{path}[{place}]"), a.get(place), b.get(place), tolerance, found);
            }
        }
        (a, b) if a == b || are_close(a, b, tolerance) => {}
        (a, b) => found.push(ValueDifference { path, a: a.cloned(), b: b.cloned() }),
    }
}

fn are_close(a: Option<&Value>, b: Option<&Value>, tolerance: Option<f64>) -> bool {
    let (Some(a), Some(b), Some(tolerance)) = (a.and_then(Value::as_f64), b.and_then(Value::as_f64), tolerance) else {
        return false;
    };
    Distance::of(a, b).is_within(tolerance)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    #[rstest]
    #[case(json!({"a": [1, {"b": 2}]}), json!({"a": [1, {"b": 2}]}), None, &[])]
    #[case(json!({"a": [1, {"b": 2}]}), json!({"a": [1, {"b": 3}]}), None, &["a[1].b"])]
    #[case(json!({"a": 1, "b": 1}), json!({"b": 2, "c": 3}), None, &["a", "b", "c"])]
    #[case(json!([1, 2]), json!([1]), None, &["[1]"])]
    #[case(json!(1), json!({"a": 1}), None, &[""])]
    #[case(json!(null), json!({"a": 1}), None, &[""])]
    #[case(json!(0.1), json!(0.1000001), None, &[""])]
    #[case(json!(0.1), json!(0.1000001), Some(1e-3), &[])]
    #[case(json!("0.1"), json!("0.2"), Some(1e3), &[""])]
    fn paths_say_where(#[case] a: Value, #[case] b: Value, #[case] tolerance: Option<f64>, #[case] wanted: &[&str]) {
        let found = differences("", &a, &b, tolerance);
        assert_eq!(found.iter().map(|it| it.path.as_str()).collect::<Vec<_>>(), wanted);
    }
}
