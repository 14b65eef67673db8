//! Configuration files: YAML or JSON, read with positions, and written.
//!
//! A scalar stays the text that is written, because only its setting knows whether `no` is a word or an answer.
//! Aliases of YAML are refused: a configuration has no use for them, and a few lines of them can stand for gigabytes.

use super::Position;
use crate::Result;
use crate::error::settings::SettingsErrorKind as Kind;
use crate::files::in_one_line;
use saphyr_parser::{Event, Marker, Parser, ScalarStyle};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// The most bytes that a configuration file may have: 1 MiB.
pub(crate) const MAX_BYTES: usize = 1 << 20;

/// The deepest nesting of lists and mappings.
const MAX_DEPTH: usize = 32;

/// A configuration file as it is written.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// The file, for messages.
    pub path: PathBuf,
    /// What is in it. An empty file is a mapping without keys.
    pub root: Node,
}

/// A value in a file, and where it begins.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Where it begins.
    pub position: Position,
    /// What it is.
    pub value: NodeValue,
}

/// What stands in a place of a file.
#[derive(Clone, Debug, PartialEq)]
pub enum NodeValue {
    /// Text, a number, a yes or a no.
    Scalar {
        /// As it is written, without quotes.
        text: String,
        /// It has quotes, so it is text for certain.
        is_quoted: bool,
    },
    /// A list.
    List(Vec<Node>),
    /// Keys with their positions, and values, in the order of the file.
    Mapping(Vec<(String, Position, Node)>),
}

impl Document {
    /// Reads `text`, the content of the file at `path`.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config), naming file, line and column: text that is neither YAML nor JSON, a key
    /// twice in one mapping, an alias, more than one document, more than 1 MiB, or something else than a mapping.
    ///
    /// ```
    /// use accelerate_core::settings::Document;
    /// let document = Document::parse("num_processes: 2\nfsdp_config: {fsdp_version: 2}\n", "config.yaml".as_ref())?;
    /// assert_eq!(document.root.position.to_string(), "1:1");
    /// let error = Document::parse("a: 1\na: 2\n", "config.yaml".as_ref()).unwrap_err();
    /// assert!(error.to_string().starts_with("config.yaml:2:1:"), "{error}");
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        let path = path.to_owned();
        if text.len() > MAX_BYTES {
            return Err(Kind::TooLarge { path, bytes: text.len(), most: MAX_BYTES }.into());
        }
        let root = Reader { events: Parser::new_from_str(text), path: path.clone() }.document()?;
        let Node { value: NodeValue::Mapping(_), .. } = root else {
            return Err(
                Kind::NotAMapping { path, position: root.position, what: "a configuration file".to_owned() }.into()
            );
        };
        Ok(Self { path, root })
    }
}

struct Reader<'a> {
    events: Parser<'a, saphyr_parser::StrInput<'a>>,
    path: PathBuf,
}

impl<'a> Reader<'a> {
    fn next(&mut self) -> Result<(Event<'a>, Position)> {
        match self.events.next() {
            Some(Ok((event, span))) => Ok((event, position(&span.start))),
            Some(Err(error)) => Err(self.syntax(position(error.marker()), error.info().to_owned())),
            None => Err(self.syntax(Position { line: 1, column: 1 }, "the text ends too early".to_owned())),
        }
    }

    fn syntax(&self, position: Position, problem: String) -> crate::Error {
        Kind::Syntax { path: self.path.clone(), position, problem }.into()
    }

    fn document(mut self) -> Result<Node> {
        let mut root = None;
        loop {
            match self.next()? {
                (Event::StreamEnd, position) => {
                    return Ok(root.unwrap_or(Node { position, value: NodeValue::Mapping(Vec::new()) }));
                }
                (Event::DocumentStart(_), position) if root.is_some() => {
                    return Err(
                        self.syntax(position, "a second document begins here; a configuration is one".to_owned())
                    );
                }
                (Event::Nothing | Event::StreamStart | Event::DocumentStart(_) | Event::DocumentEnd, _) => {}
                (event, position) => {
                    let node = self.node(event, position, 0)?;
                    let says_nothing = node.is_null() && !matches!(node.value, NodeValue::List(_));
                    root = Some(node).filter(|_| !says_nothing).or(root);
                }
            }
        }
    }

    fn node(&mut self, event: Event<'a>, position: Position, depth: usize) -> Result<Node> {
        if depth > MAX_DEPTH {
            return Err(self.syntax(position, format!("values are nested more than {MAX_DEPTH} deep")));
        }
        let value = match event {
            Event::Scalar(text, style, ..) => {
                NodeValue::Scalar { text: text.into_owned(), is_quoted: style != ScalarStyle::Plain }
            }
            Event::SequenceStart(..) => {
                let mut items = Vec::new();
                loop {
                    match self.next()? {
                        (Event::SequenceEnd, _) => break NodeValue::List(items),
                        (event, position) => items.push(self.node(event, position, depth + 1)?),
                    }
                }
            }
            Event::MappingStart(..) => self.mapping(depth)?,
            Event::Alias(_) => {
                return Err(self.syntax(position, "aliases (*name) are not read; write the value".to_owned()));
            }
            _ => return Err(self.syntax(position, "a value was expected here".to_owned())),
        };
        Ok(Node { position, value })
    }

    fn mapping(&mut self, depth: usize) -> Result<NodeValue> {
        let mut entries: Vec<(String, Position, Node)> = Vec::new();
        let mut known = std::collections::HashSet::new();
        loop {
            let (key, of_key) = match self.next()? {
                (Event::MappingEnd, _) => return Ok(NodeValue::Mapping(entries)),
                (Event::Scalar(key, ..), position) => (key.into_owned(), position),
                (_, position) => return Err(self.syntax(position, "a key must be plain text".to_owned())),
            };
            if !known.insert(key.clone()) {
                let (path, key) = (self.path.clone(), shortened(&key));
                return Err(Kind::DuplicateKey { path, position: of_key, key }.into());
            }
            let (event, position) = self.next()?;
            let value = self.node(event, position, depth + 1)?;
            entries.push((key, of_key, value));
        }
    }
}

/// The reader counts columns from 0.
fn position(marker: &Marker) -> Position {
    Position { line: marker.line(), column: marker.col() + 1 }
}

/// The text as messages show it: keys and values are cut where they would hide the message.
///
/// ```
/// use accelerate_core::settings::shortened;
/// assert_eq!(shortened("bf16"), "bf16");
/// assert_eq!(shortened(&"x".repeat(1000)).len(), 83);
/// ```
pub fn shortened(text: &str) -> String {
    const MOST: usize = 80;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// The same for a place without quotation marks: in one line, and without characters that a terminal would obey.
///
/// ```
/// use accelerate_core::settings::shortened_line;
/// assert_eq!(shortened_line("a\nb\u{1b}[2J"), "a\\nb\\u{1b}[2J");
/// ```
pub fn shortened_line(text: &str) -> String {
    in_one_line(&shortened(text))
}

impl Node {
    /// Where a mistake in the value is shown: at the value, or where that begins on another line, at its key.
    pub(crate) fn position_beside(&self, key: Position) -> Position {
        if self.position.line == key.line { self.position } else { key }
    }

    /// Does it say nothing: `null`, `~`, nothing at all, or a list or mapping without entries?
    pub fn is_null(&self) -> bool {
        match &self.value {
            NodeValue::Scalar { text, is_quoted } => {
                !is_quoted && matches!(text.as_str(), "" | "~" | "null" | "Null" | "NULL")
            }
            NodeValue::List(items) => items.is_empty(),
            NodeValue::Mapping(entries) => entries.is_empty(),
        }
    }

    /// The text of the value as a variable would hold it: a list of plain words is separated by commas, a mapping is JSON.
    pub(crate) fn text(&self) -> String {
        match &self.value {
            NodeValue::Scalar { text, .. } => text.clone(),
            NodeValue::List(items) => items.iter().map(Self::text).collect::<Vec<_>>().join(","),
            NodeValue::Mapping(_) => self.json().to_string(),
        }
    }

    fn json(&self) -> Value {
        match &self.value {
            NodeValue::Scalar { text, is_quoted: true } => Value::String(text.clone()),
            NodeValue::Scalar { text, .. } => match text.as_str() {
                _ if self.is_null() => Value::Null,
                "true" | "True" => Value::Bool(true),
                "false" | "False" => Value::Bool(false),
                text => {
                    text.parse::<serde_json::Number>().map_or_else(|_| Value::String(text.to_owned()), Value::Number)
                }
            },
            NodeValue::List(items) => Value::Array(items.iter().map(Self::json).collect()),
            NodeValue::Mapping(entries) => {
                Value::Object(entries.iter().map(|(key, _, node)| (key.clone(), node.json())).collect::<Map<_, _>>())
            }
        }
    }
}
