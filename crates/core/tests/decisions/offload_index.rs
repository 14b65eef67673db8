//! Indexes of offloaded weights, good and bad.
use accelerate_core::weight_files::{OffloadIndex, OffloadedWeight};

#[test]
fn indexes_of_the_reference_are_read_and_written() {
    let text = r#"{
  "a.weight": {
    "dtype": "float32",
    "shape": [
      2,
      3
    ]
  },
  "b": {
    "dtype": "int64",
    "shape": []
  }
}"#;
    let index = OffloadIndex::from_json(text).unwrap();
    assert_eq!(index.to_json().unwrap(), text);
    let text =
        r#"{"a": {"safetensors_file": "model.safetensors", "weight_name": "x.a", "dtype": "float16", "other": [1]}}"#;
    let [file, name, dtype] = ["model.safetensors", "x.a", "float16"].map(str::to_owned);
    let wanted = OffloadedWeight::Safetensors { safetensors_file: file, weight_name: Some(name), dtype: Some(dtype) };
    assert_eq!(OffloadIndex::from_json(text).unwrap().weights["a"], wanted);
    assert!(OffloadIndex::from_json("{}").unwrap().weights.is_empty());
}

#[test]
fn indexes_that_lead_elsewhere_or_say_too_little_are_refused() {
    let long = format!(r#"{{"{}": {{"dtype": "int8", "shape": []}}}}"#, "a".repeat(300));
    let dims = format!(r#"{{"a": {{"dtype": "int8", "shape": [{}1]}}}}"#, "1,".repeat(100));
    let rows = [
        ("", "EOF"),
        ("[]", "an object of tensors"),
        (r#"{"a": 1}"#, "what a tensor is"),
        (r#"{"a": {"dtype": "int8"}}"#, "neither dtype and shape"),
        (r#"{"a": {"shape": [1]}}"#, "neither dtype and shape"),
        (r#"{"a": {"dtype": "int8", "shape": [-1]}}"#, "invalid value"),
        (r#"{"a": {"dtype": "int8", "shape": [1.5]}}"#, "invalid type"),
        (r#"{"a": {"dtype": "int8", "shape": [99999999999999999999]}}"#, "invalid"),
        (r#"{"a": {"dtype": "int8", "dtype": "int8", "shape": []}}"#, "there twice"),
        (r#"{"a": {"dtype": "int8", "shape": []}, "a": {"dtype": "int8", "shape": []}}"#, "there twice"),
        (r#"{"../a": {"dtype": "int8", "shape": []}}"#, "folder of the index"),
        (r#"{"a/b": {"dtype": "int8", "shape": []}}"#, "folder of the index"),
        (r#"{"a": {"safetensors_file": "/etc/passwd"}}"#, "folder of the index"),
        (r#"{"a": {"safetensors_file": ".."}}"#, "folder of the index"),
        (long.as_str(), "folder of the index"),
        (dims.as_str(), "101 dims"),
    ];
    for (text, wanted) in rows {
        let error = OffloadIndex::from_json(text).unwrap_err();
        assert!(error.is_weight_files() && error.to_string().contains(wanted), "{text}: {error}");
    }
}
