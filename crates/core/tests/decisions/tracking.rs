//! Trackers by name; event files and lines of JSON, byte for byte.

use accelerate_core::names::LoggerType;
use accelerate_core::tracking::*;
use rstest::rstest;
use serde::Deserialize;
use std::path::Path;

/// What `parity/tracking/generate.py` has had torch and TensorBoard write.
#[derive(Deserialize)]
struct Python {
    wall_time: f64,
    file_version: String,
    session_start: SessionStart,
    scalars: Vec<Scalar>,
    texts: Vec<Text>,
    hparams: Vec<Hparams>,
}

#[derive(Deserialize)]
struct SessionStart {
    step: i64,
    record: String,
}

#[derive(Deserialize)]
struct Scalar {
    tag: String,
    value: String,
    step: Option<i64>,
    new_style: bool,
    double_precision: bool,
    record: String,
}

#[derive(Deserialize)]
struct Text {
    tag: String,
    text: String,
    step: Option<i64>,
    record: String,
}

#[derive(Deserialize)]
struct Hparams {
    values: serde_json::Value,
    records: [String; 3],
}

fn python() -> Python {
    serde_json::from_str(include_str!("../../../../parity/tracking/events.json")).unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn entries(values: Value) -> Vec<(String, Value)> {
    match values {
        Value::Map(values) => values,
        other => panic!("{other:?}"),
    }
}

#[test]
fn files_begin_as_those_of_python() {
    let Python { wall_time, file_version, session_start, .. } = python();
    assert_eq!(hex(&Event::file_version(wall_time)), file_version);
    assert_eq!(hex(&Event::session_start(wall_time, session_start.step)), session_start.record);
}

#[test]
fn numbers_are_those_of_python() {
    let Python { wall_time, scalars, .. } = python();
    for Scalar { tag, value, step, new_style, double_precision, record } in scalars {
        let summary = scalar(&tag, value.parse().unwrap(), ScalarStyle { new_style, double_precision });
        assert_eq!(hex(&Event { wall_time, step, summary }.record()), record, "{tag} {value}");
    }
}

#[test]
fn texts_are_those_of_python() {
    let Python { wall_time, texts, .. } = python();
    for Text { tag, text, step, record } in texts {
        let summary = accelerate_core::tracking::text(&tag, &text);
        assert_eq!(hex(&Event { wall_time, step, summary }.record()), record, "{tag}");
    }
}

#[test]
fn hyperparameters_are_those_of_python() {
    let Python { wall_time, hparams: cases, .. } = python();
    for Hparams { values, records } in cases {
        let summaries = hparams(&entries(values.clone().into())).unwrap();
        let ours = summaries.map(|summary| hex(&Event { wall_time, step: None, summary }.record()));
        assert_eq!(ours, records, "{values}");
    }
}

#[test]
fn hyperparameters_with_parts_are_refused_by_name() {
    for (value, found) in [(Value::from([("a", 1)]), "a map"), (Value::List(vec![]), "a list")] {
        let error = hparams(&[("layers".to_owned(), value)]).unwrap_err();
        assert!(error.is_config() && error.to_string().contains(&format!("layers is {found}")), "{error}");
    }
}

#[rstest]
#[case::none(&[], "{}\n")]
#[case::sorted(&[("b", Value::from(12)), ("a", Value::from(0.01))], "a: 0.01\nb: 12\n")]
#[case::boolean(&[("x", Value::from(false))], "x: false\n")]
#[case::nothing(&[("x", Value::None)], "x: null\n")]
#[case::exponent(&[("x", Value::from(2e-9))], "x: 2.0e-9\n")]
#[case::word(&[("x", Value::from("some_value"))], "x: some_value\n")]
#[case::not_a_boolean(&[("x", Value::from("yes"))], "x: \"yes\"\n")]
#[case::lines(&[("x", Value::from("a\nb"))], "x: \"a\\u000ab\"\n")]
#[case::not_finite(&[("x", Value::from(f64::NAN))], "x: NaN\n")]
fn hyperparameters_in_yaml(#[case] values: &[(&str, Value)], #[case] wanted: &str) {
    let values: Vec<_> = values.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    assert_eq!(hparams_yaml(&values), wanted);
}

#[test]
fn every_service_is_refused_with_the_cure() {
    let services = LoggerType::ALL.iter().filter(|name| !BUILT_IN.contains(name) && **name != LoggerType::All);
    assert_eq!(services.clone().count(), 8);
    for name in services {
        let error = filter_trackers(&[*name], true).unwrap_err();
        let text = error.to_string();
        assert!(error.is_config() && text.contains(name.as_str()) && text.contains("GeneralTracker"), "{text}");
    }
    let error = "tensorbord".parse::<LoggerType>().unwrap_err().to_string();
    assert!(error.contains("is not a tracker; the choices are \"all\", \"tensorboard\", \"jsonl\""), "{error}");
}

#[rstest]
#[case(&[], &[])]
#[case(&[LoggerType::All, LoggerType::Jsonl], &BUILT_IN)]
#[case(&[LoggerType::Jsonl, LoggerType::All], &[LoggerType::Jsonl, LoggerType::TensorBoard])]
#[case(&[LoggerType::TensorBoard, LoggerType::TensorBoard], &[LoggerType::TensorBoard])]
fn trackers_are_made_once(#[case] log_with: &[LoggerType], #[case] wanted: &[LoggerType]) {
    assert_eq!(filter_trackers(log_with, true).unwrap(), wanted);
    assert_eq!(filter_trackers(log_with, false).is_ok(), wanted.is_empty(), "all of them write files");
}

#[test]
fn names_are_there_once() {
    assert!(check_names(["a", "b"]).is_ok());
    assert!(check_names(["a", "b", "a"]).unwrap_err().to_string().contains("two trackers are called \"a\""));
}

#[rstest]
#[case("bert", Some("logs/bert"))]
#[case("team/bert", Some("logs/team/bert"))]
#[case("", Some("logs"))]
#[case("./bert", Some("logs/bert"))]
#[case("..", None)]
#[case("a/../../b", None)]
#[case("/bert", None)]
#[case("a\0b", None)]
fn projects_stay_in_the_folder_of_logs(#[case] name: &str, #[case] wanted: Option<&str>) {
    let found = run_folder(Path::new("logs"), name);
    assert_eq!(found.as_deref().ok(), wanted.map(Path::new), "{found:?}");
}

#[rstest]
#[case("m/x", "p", Some("logs/m_x_p"))]
#[case("m/x", "q/r", Some("logs/m_x_q/r"))]
#[case("..", "x", Some("logs/.._x"))]
#[case("m", "/../../x", None)]
#[case("m", "x/../y", None)]
fn lines_of_a_chart_have_folders(#[case] main_tag: &str, #[case] tag: &str, #[case] wanted: Option<&str>) {
    let found = scalars_folder(Path::new("logs"), main_tag, tag);
    assert_eq!(found.as_deref().ok(), wanted.map(Path::new), "{found:?}");
}

#[test]
fn lines_of_json() {
    let loss = |loss: f64| vec![("loss".to_owned(), Value::from(loss))];
    assert_eq!(line(1.0, None, &loss(f64::NEG_INFINITY)).unwrap(), "{\"_timestamp\":1.0,\"loss\":\"-Infinity\"}\n");
    let twice: Vec<_> = [loss(1.0), loss(2.0)].concat();
    assert_eq!(line(1.0, Some(0), &twice).unwrap(), "{\"_timestamp\":1.0,\"_step\":0,\"loss\":2.0}\n");
    let text = vec![("a\"b".to_owned(), Value::from("x\ny")), ("m".to_owned(), Value::from([("p", 1)]))];
    assert_eq!(line(1.0, None, &text).unwrap(), "{\"_timestamp\":1.0,\"a\\\"b\":\"x\\ny\",\"m\":{\"p\":1}}\n");
    assert_eq!(config_line(1.0, &loss(0.5)), "{\"_timestamp\":1.0,\"_config\":{\"loss\":0.5}}\n");
    for reserved in RESERVED_KEYS {
        let error = line(1.0, None, &[(reserved.to_owned(), Value::None)]).unwrap_err();
        assert!(error.to_string().contains(reserved), "{error}");
    }
}

#[test]
fn options_are_known_and_have_their_kind() {
    const KNOWN: &[&str] = &["walltime", "new_style", "filename_suffix", "purge_step"];
    let given = |name: &str, value: Value| vec![(name.to_owned(), value)];
    let error = Options::new("tensorboard", KNOWN, &given("wall_time", 1.into())).unwrap_err().to_string();
    assert!(error.contains("has no option \"wall_time\"; it has walltime, new_style"), "{error}");
    let values = [
        ("walltime".to_owned(), 2.into()),
        ("new_style".to_owned(), true.into()),
        ("filename_suffix".to_owned(), ".a".into()),
        ("purge_step".to_owned(), Value::None),
    ];
    let options = Options::new("tensorboard", KNOWN, &values).unwrap();
    assert_eq!(options.number("walltime").unwrap(), Some(2.0));
    assert_eq!(options.boolean("new_style").unwrap(), Some(true));
    assert_eq!(options.part_of_file_name("filename_suffix").unwrap(), Some(".a"));
    assert_eq!(options.integer("purge_step").unwrap(), None);
    assert!(options.has("walltime") && !options.has("purge_step"));
    assert!(options.number("new_style").is_err() && options.boolean("walltime").is_err());
    for suffix in ["/a", "..\\a", "a\0"] {
        let values = given("filename_suffix", suffix.into());
        let options = Options::new("tensorboard", KNOWN, &values).unwrap();
        assert!(options.part_of_file_name("filename_suffix").is_err(), "{suffix:?}");
    }
}

#[test]
fn values_come_from_what_programs_have() {
    for (value, wanted) in [
        (Value::from(3_u64), Value::Int(3)),
        (Value::from(u64::MAX), Value::Float(u64::MAX as f64)),
        (Value::from(Some(0.5_f32)), Value::Float(0.5)),
        (Value::from(None::<f64>), Value::None),
        (
            serde_json::json!({"a": [1, 2.5, null, "x"]}).into(),
            Value::Map(vec![(
                "a".to_owned(),
                Value::List(vec![Value::Int(1), Value::Float(2.5), Value::None, "x".into()]),
            )]),
        ),
    ] {
        assert_eq!(value, wanted);
    }
    assert_eq!(numbers("m", &[("p".to_owned(), true.into())]).unwrap(), [("p".to_owned(), 1.0)]);
    let error = numbers("m", &[("p".to_owned(), "x".into())]).unwrap_err().to_string();
    assert!(error.contains("m.p is a text"), "{error}");
}
