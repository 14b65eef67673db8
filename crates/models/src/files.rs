//! Files that somebody names or downloads: regular ones of a sensible length, and JSON that says each thing once.

use serde::de::{self, DeserializeOwned, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Most values of one JSON text: a tokenizer of half a million tokens has fewer.
const MOST_VALUES: usize = 4_000_000;
/// Most keys of one JSON object.
const MOST_KEYS: usize = 500_000;
/// What of a long reason is shown of its beginning and of its end, where parsers say the place.
const REASON_BYTES: [usize; 2] = [240, 120];

/// A file that cannot be read, or had better not be.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The operating system refused.
    #[error("cannot read {path}: {source}", path = .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// A folder, a device or a pipe.
    #[error("{path} is {found}; wanted a file", path = .path.display())]
    NotAFile {
        /// What was to be read.
        path: PathBuf,
        /// What it is.
        found: &'static str,
    },
    /// It is too long to be what it should be.
    #[error("{path} has {found_bytes} bytes; wanted at most {most_bytes}", path = .path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Its length.
        found_bytes: u64,
        /// The length up to which it is read.
        most_bytes: u64,
    },
}

/// The text of a file that has at most `most_bytes`.
///
/// # Errors
/// When it is no regular file, is longer, cannot be read or is not UTF-8.
pub fn read_text(path: &Path, most_bytes: u64) -> Result<String, FileError> {
    let unreadable = |source| FileError::Unreadable { path: path.to_owned(), source };
    // Asked before opening: to open a pipe is to wait for its writer, and a device never ends.
    let metadata = fs::metadata(path).map_err(unreadable)?;
    if !metadata.is_file() {
        let found = if metadata.is_dir() { "a folder" } else { "a device or a pipe" };
        return Err(FileError::NotAFile { path: path.to_owned(), found });
    }
    let found_bytes = metadata.len();
    if found_bytes > most_bytes {
        return Err(FileError::TooLong { path: path.to_owned(), found_bytes, most_bytes });
    }
    let mut text = String::new();
    // The file may have grown since.
    File::open(path).and_then(|file| file.take(most_bytes).read_to_string(&mut text)).map_err(unreadable)?;
    Ok(text)
}

/// Reads a JSON object. A key that is there twice, at any depth, is an error, and so is a list where the object should be.
///
/// # Errors
/// What is wrong, and at which line and column.
pub fn from_json<T: DeserializeOwned>(json: &str) -> Result<T, String> {
    check_json(json)?;
    serde_json::from_str(json).map_err(|error| shortened(&error.to_string()))
}

/// Is this an object in which no key is there twice?
///
/// # Errors
/// What is wrong, and at which line and column.
pub fn check_json(json: &str) -> Result<(), String> {
    let mut left = MOST_VALUES;
    let mut reader = serde_json::Deserializer::from_str(json);
    let checked = reader.deserialize_map(Distinct(&mut left)).and_then(|()| reader.end());
    checked.map_err(|error| shortened(&error.to_string()))
}

/// A reason without its middle if it is long: parsers repeat what they found.
pub fn shortened(reason: &str) -> String {
    let [first, last] = REASON_BYTES;
    let shown: String = reason.chars().map(|letter| if letter.is_control() { '\u{fffd}' } else { letter }).collect();
    if shown.len() <= first + last {
        return shown;
    }
    let (start, end) = (shown.floor_char_boundary(first), shown.ceil_char_boundary(shown.len() - last));
    format!("{} ... {}", &shown[..start], &shown[end..])
}

/// Looks at a value and keeps nothing. Counts down the values that may still come.
struct Distinct<'a>(&'a mut usize);

impl<'de> DeserializeSeed<'de> for Distinct<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        let left = self.0.checked_sub(1);
        *self.0 = left.ok_or_else(|| de::Error::custom(format_args!("there are more than {MOST_VALUES} values")))?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Distinct<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while list.next_element_seed(Distinct(self.0))?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut known = HashSet::new();
        while let Some(Key(key)) = map.next_key()? {
            if known.len() == MOST_KEYS {
                return Err(de::Error::custom(format_args!("an object has more than {MOST_KEYS} keys")));
            }
            if known.contains(&key) {
                return Err(de::Error::custom(format_args!("the key {key:?} is there twice")));
            }
            known.insert(key);
            map.next_value_seed(Distinct(self.0))?;
        }
        Ok(())
    }
}

/// Not copied out of the text where that can be avoided.
#[derive(serde::Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);
