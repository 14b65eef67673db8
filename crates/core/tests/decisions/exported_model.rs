//! What packages of `accelerate export-model` say of themselves.

use accelerate_core::exported_model::Signature;
use serde_json::{Value, json};

fn whole() -> Value {
    json!({
        "version": 1,
        "parameters": [
            {"name": "a.weight", "shape": [4, 3], "dtype": "float32", "requires_grad": true},
            {"name": "a.bias", "shape": [4], "dtype": "float32", "requires_grad": false},
        ],
        "buffers": [{"name": "mean", "shape": [], "dtype": "int64", "persistent": true}],
        "aliases": {"b.weight": "a.weight"},
        "inputs": [{"shape": [-1, 3], "dtype": "float32"}],
        "gradients": [0],
    })
}

#[test]
fn a_signature_says_what_the_programs_take() {
    let signature = Signature::parse(&whole().to_string()).unwrap();
    assert_eq!(signature.parameters[1].name, "a.bias");
    assert!(!signature.parameters[1].requires_grad);
    assert_eq!(signature.buffers[0].tensor.dtype, "int64");
    assert_eq!(signature.inputs[0].shape, [-1, 3]);
    assert_eq!(signature.gradients, [0]);
}

#[test]
fn what_contradicts_itself_is_refused() {
    let cases = [
        ("/version", json!(2), "version 2, version 1 is wanted"),
        ("/version", json!("one"), "cannot be understood"),
        ("/parameters/1/name", json!("a.weight"), "\"a.weight\" twice"),
        ("/buffers/0/name", json!("a.weight"), "\"a.weight\" twice"),
        ("/aliases", json!({"mean": "a.weight"}), "\"mean\" twice"),
        ("/aliases", json!({"b": "c"}), "\"c\", which is not there"),
        ("/parameters/0/shape", json!([-1, 3]), "leaves a size of \"a.weight\" open"),
        ("/gradients", json!([2]), "gradient of parameter 2"),
        ("/gradients", json!([0, 0]), "gradient of parameter 0, twice"),
        ("/gradients", json!([-1]), "cannot be understood"),
        ("/inputs/0/shape", json!("any"), "cannot be understood"),
    ];
    for (place, value, words) in cases {
        let mut signature = whole();
        *signature.pointer_mut(place).unwrap() = value;
        let error = Signature::parse(&signature.to_string()).unwrap_err();
        assert!(error.is_weight_files() && error.to_string().contains(words), "{place}: {error}");
    }
    for text in ["", "{}", "[]", "{\"version\": 1}", "\u{0}"] {
        assert!(Signature::parse(text).unwrap_err().to_string().contains("cannot be understood"), "{text}");
    }
}
