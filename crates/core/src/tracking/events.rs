//! Event files of TensorBoard: records with checksums around protocol buffers, byte for byte as `torch.utils.tensorboard` writes them.

use super::Value;
use super::proto::Message;
use crate::error::tracking::TrackingErrorKind;
use crate::yaml::yaml;
use crate::{Error, Result};

/// The file beside the hyperparameters of a run in which they can be read without TensorBoard.
pub const HPARAMS_FILE: &str = "hparams.yml";

const FILE_VERSION: &[u8] = b"brain.Event:2";
/// Which program wrote it. TensorBoard keeps statistics by it, so it is the name that Python's writer has.
const WRITER: &[u8] = b"tensorboard.summary.writer.event_file_writer";

/// What happened, and when.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Seconds since 1970.
    pub wall_time: f64,
    /// The step of the training. None is written as 0 is.
    pub step: Option<i64>,
    /// What [`scalar`], [`text`] or [`hparams`] made.
    pub summary: Vec<u8>,
}

impl Event {
    /// The record that is appended to a file.
    pub fn record(&self) -> Vec<u8> {
        framed(&event(self.wall_time, self.step).bytes(5, &self.summary).into_bytes())
    }

    /// The record that every file begins with.
    pub fn file_version(wall_time: f64) -> Vec<u8> {
        let writer = Message::default().bytes(1, WRITER);
        framed(&event(wall_time, None).bytes(3, FILE_VERSION).message(10, writer).into_bytes())
    }

    /// The records that say that the run goes on at `step`: TensorBoard forgets what earlier files of the folder have from there on
    /// (`purge_step`).
    pub fn session_start(wall_time: f64, step: i64) -> Vec<u8> {
        const START: i64 = 1;
        let version = event(wall_time, Some(step)).bytes(3, FILE_VERSION);
        let session = event(wall_time, Some(step)).message(7, Message::default().int(1, START));
        [framed(&version.into_bytes()), framed(&session.into_bytes())].concat()
    }
}

fn event(wall_time: f64, step: Option<i64>) -> Message {
    let event = Message::default().double(1, wall_time);
    // Numbers that are 0 are left out.
    match step.filter(|step| *step != 0) {
        Some(step) => event.int(2, step),
        None => event,
    }
}

/// A record: length, its checksum, the payload, its checksum.
fn framed(payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(payload.len() + 16);
    for part in [&length, payload] {
        record.extend(part);
        record.extend(masked_checksum(part).to_le_bytes());
    }
    record
}

/// CRC-32C, turned and shifted: a checksum over data that contain checksums would be weak otherwise.
fn masked_checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// How a number is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScalarStyle {
    /// As a tensor, which TensorBoard loads faster (`new_style` of PyTorch).
    pub new_style: bool,
    /// That tensor in double precision. Without `new_style` it has no effect, as in PyTorch.
    pub double_precision: bool,
}

/// A number called `tag`. It is rounded to float32 unless the style says otherwise.
pub fn scalar(tag: &str, value: f64, style: ScalarStyle) -> Vec<u8> {
    const FLOAT: i64 = 1;
    const DOUBLE: i64 = 2;
    let summary = Message::default().bytes(1, tag.as_bytes());
    if !style.new_style {
        return of_value(summary.float(2, value as f32));
    }
    let tensor = match style.double_precision {
        true => Message::default().int(1, DOUBLE).bytes(6, &value.to_le_bytes()),
        false => Message::default().int(1, FLOAT).bytes(5, &(value as f32).to_le_bytes()),
    };
    of_value(summary.message(8, tensor).message(9, of_plugin("scalars", &[])))
}

/// A text called `tag`.
pub fn text(tag: &str, text: &str) -> Vec<u8> {
    const STRING: i64 = 7;
    let shape = Message::default().message(2, Message::default().int(1, 1));
    let tensor = Message::default().int(1, STRING).message(2, shape).bytes(8, text.as_bytes());
    let tag = format!("{tag}/text_summary");
    of_value(Message::default().bytes(1, tag.as_bytes()).message(8, tensor).message(9, of_plugin("text", &[])))
}

fn of_value(value: Message) -> Vec<u8> {
    Message::default().message(1, value).into_bytes()
}

/// By which part of TensorBoard it is shown.
fn of_plugin(name: &str, content: &[u8]) -> Message {
    let plugin = Message::default().bytes(1, name.as_bytes());
    Message::default().message(1, if content.is_empty() { plugin } else { plugin.bytes(2, content) })
}

/// Hyperparameters, as three summaries: the experiment, the start and the end of its session (`add_hparams` of PyTorch). Booleans
/// are numbers, as they are there, so that runs of both stand in one column.
///
/// # Errors
/// Maps and lists, which TensorBoard does not know.
pub fn hparams(values: &[(String, Value)]) -> Result<[Vec<u8>; 3]> {
    const TEXT: i64 = 1;
    const FLOAT64: i64 = 3;
    const SUCCESS: i64 = 1;
    let (mut experiment, mut start) = (Message::default(), Message::default());
    for (name, value) in values {
        let (kind, written) = match value {
            Value::None => continue,
            Value::Text(text) => (TEXT, Message::default().bytes(3, text.as_bytes())),
            Value::Map(_) | Value::List(_) => {
                let (name, found) = (name.clone(), value.kind());
                return Err(Error::new(TrackingErrorKind::Hyperparameter { name, found }));
            }
            Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
                (FLOAT64, Message::default().double(2, value.number().unwrap_or(f64::NAN)))
            }
        };
        experiment = experiment.message(4, Message::default().bytes(1, name.as_bytes()).int(4, kind));
        start = start.message(1, Message::default().bytes(1, name.as_bytes()).message(2, written));
    }
    let parts = [
        ("_hparams_/experiment", Message::default().message(2, experiment)),
        ("_hparams_/session_start_info", Message::default().message(3, start)),
        ("_hparams_/session_end_info", Message::default().message(4, Message::default().int(1, SUCCESS))),
    ];
    Ok(parts.map(|(tag, content)| {
        let metadata = of_plugin("hparams", &content.into_bytes());
        of_value(Message::default().bytes(1, tag.as_bytes()).message(9, metadata))
    }))
}

/// The same as YAML, sorted by name, as PyYAML does it.
pub fn hparams_yaml(values: &[(String, Value)]) -> String {
    if values.is_empty() {
        return "{}\n".to_owned();
    }
    let sorted: std::collections::BTreeMap<_, _> =
        values.iter().map(|(name, value)| (name.clone(), json(value))).collect();
    yaml(&sorted.into_iter().collect())
}

fn json(value: &Value) -> serde_json::Value {
    match value {
        Value::None => serde_json::Value::Null,
        Value::Bool(value) => (*value).into(),
        Value::Int(value) => (*value).into(),
        // As a text where it is not finite: YAML has words for that, and JSON has none.
        Value::Float(value) => {
            serde_json::Number::from_f64(*value).map_or_else(|| value.to_string().into(), Into::into)
        }
        Value::Text(value) => value.as_str().into(),
        Value::Map(values) => values.iter().map(|(name, value)| (name.clone(), json(value))).collect(),
        Value::List(values) => values.iter().map(json).collect(),
    }
}

/// What Python's `str(time.time())` gives, which names the folders of hyperparameters.
///
/// ```
/// assert_eq!(accelerate_core::tracking::timestamp(1700000000.25), "1700000000.25");
/// assert_eq!(accelerate_core::tracking::timestamp(1700000000.0), "1700000000.0");
/// ```
pub fn timestamp(wall_time: f64) -> String {
    format!("{wall_time:?}")
}

/// The name of an event file: TensorBoard takes every file with `tfevents` in its name, and reads those of a folder in the order of
/// their names. `number` tells files apart that one process makes in one second.
///
/// ```
/// let name = accelerate_core::tracking::event_file_name(1700000000.25, "node0", 42, 1, ".train");
/// assert_eq!(name, "events.out.tfevents.1700000000.node0.42.1.train");
/// ```
pub fn event_file_name(wall_time: f64, host: &str, process: u32, number: u64, suffix: &str) -> String {
    format!("events.out.tfevents.{:010}.{host}.{process}.{number}{suffix}", wall_time.max(0.0) as u64)
}
