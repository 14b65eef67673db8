//! What a file of `torch.save` holds beside tensors by name: the states of optimizers, schedules, loss scales and random numbers.

use super::archive::Archive;
use super::contents::tensor;
use super::file::{Opened, length_of, most_repeated_bytes};
use super::pickle::{Data, Pickle, Value};
use super::strided::StoredTensor;
use crate::Result;
use crate::error::pytorch::{ContentsProblem as Problem, PytorchErrorKind as Kind, TensorProblem};
use crate::weight_files::shown;
use std::io::{Read, Seek};
use std::ops::Range;

/// How deep values may hold each other, which is more than any state does.
pub(super) const MOST_DEEP: usize = 32;
/// Values of one file, each counted as often as it is held, and some times those of models with a hundred thousand parameters.
const MOST_VALUES: usize = 1 << 21;
/// Python writes a value that is held again in two bytes, whatever is in it. So there may be so many values for each byte of a pickle, and
/// so many more.
const VALUES_PER_BYTE: usize = 16;
const FEW_VALUES: usize = 1 << 16;

/// How many bytes all texts of a file may have, each counted as often as it is held: so many times those of its pickle, in which names
/// of states are written once for all parameters, and so many more.
const MOST_TEXTS: usize = 16;
const FEW_TEXT_BYTES: usize = 1 << 20;

/// How many sizes and strides all tensors of a file may have, each counted as often as it is held, which takes as many numbers.
const MOST_SIZES: usize = 1 << 23;

/// A value as Python has it, made of plain data. `T` is what stands for a tensor: where it is in a file that was read, or
/// what is to be written.
///
/// ```
/// use accelerate_core::weight_files::Plain;
///
/// let value: Plain<()> = Plain::Dict(vec![(Plain::text("lr"), Plain::Float(0.1))]);
/// assert_eq!(value.get("lr"), Some(&Plain::Float(0.1)));
/// assert_eq!(value.get("momentum"), None);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Plain<T> {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A whole number that is too large for an `i64`, as seeds and hashes are.
    LargeInt(u64),
    /// A number, infinities and NaN included.
    Float(f64),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Plain<T>>),
    /// A tuple.
    Tuple(Vec<Plain<T>>),
    /// A dictionary, in the order in which its keys were set. A key may be there twice.
    Dict(Vec<(Plain<T>, Plain<T>)>),
    /// A tensor.
    Tensor(T),
    /// Something else, in words: an object, of which nothing was made.
    Other(String),
}

impl<T> Plain<T> {
    /// A text.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    /// A dictionary with these texts as keys.
    pub fn dict(entries: impl IntoIterator<Item = (impl Into<String>, Self)>) -> Self {
        Self::Dict(entries.into_iter().map(|(key, value)| (Self::text(key), value)).collect())
    }

    /// The value of this key, if this is a dictionary that has it. Of several, the last, which is the one that Python has.
    pub fn get(&self, wanted: &str) -> Option<&Self> {
        let Self::Dict(pairs) = self else { return None };
        pairs.iter().rev().find(|(key, _)| matches!(key, Self::Text(key) if key == wanted)).map(|(_, value)| value)
    }

    /// The same value with something else for its tensors.
    ///
    /// # Errors
    /// The first that `replace` gives.
    pub fn try_map<U, E>(self, replace: &mut impl FnMut(T) -> Result<Plain<U>, E>) -> Result<Plain<U>, E> {
        let mut all = |items: Vec<Self>| items.into_iter().map(|item| item.try_map(replace)).collect::<Result<_, E>>();
        Ok(match self {
            Self::None => Plain::None,
            Self::Bool(value) => Plain::Bool(value),
            Self::Int(value) => Plain::Int(value),
            Self::LargeInt(value) => Plain::LargeInt(value),
            Self::Float(value) => Plain::Float(value),
            Self::Text(text) => Plain::Text(text),
            Self::List(items) => Plain::List(all(items)?),
            Self::Tuple(items) => Plain::Tuple(all(items)?),
            Self::Dict(pairs) => {
                let pair = |(key, value): (Self, Self)| Ok((key.try_map(replace)?, value.try_map(replace)?));
                Plain::Dict(pairs.into_iter().map(pair).collect::<Result<_, E>>()?)
            }
            Self::Tensor(tensor) => replace(tensor)?,
            Self::Other(kind) => Plain::Other(kind),
        })
    }

    /// In words, for a message.
    pub fn kind(&self) -> String {
        match self {
            Self::None => "None".to_owned(),
            Self::Bool(_) => "a truth value".to_owned(),
            Self::Int(_) | Self::LargeInt(_) | Self::Float(_) => "a number".to_owned(),
            Self::Text(_) => "a text".to_owned(),
            Self::List(_) => "a list".to_owned(),
            Self::Tuple(_) => "a tuple".to_owned(),
            Self::Dict(_) => "a dictionary".to_owned(),
            Self::Tensor(_) => "a tensor".to_owned(),
            Self::Other(kind) => kind.clone(),
        }
    }
}

impl Plain<StoredTensor> {
    /// Reads all of a file of `torch.save` but the data of its tensors. Nothing in the file is executed. A tensor of a type or a form
    /// that safetensors does not have is [`Plain::Other`], which says why.
    ///
    /// # Errors
    /// [`is_weight_files`](crate::Error::is_weight_files): the file cannot be read, is damaged, or names functions or classes
    /// that no state needs.
    pub fn read(file: &mut (impl Read + Seek)) -> Result<Self> {
        let length = length_of(file)?;
        Self::read_range(file, 0..length)
    }

    /// The same of what `torch.save` has written alone into this range of a file.
    ///
    /// # Errors
    /// [`is_weight_files`](crate::Error::is_weight_files): as for [`Plain::read`].
    pub fn read_range(file: &mut (impl Read + Seek), range: Range<u64>) -> Result<Self> {
        let length = range.end.saturating_sub(range.start);
        let Opened { archive, root, pickle } = Opened::read(file, range)?;
        let pickle = Pickle::read(&pickle)?;
        let most_values =
            pickle.num_bytes().saturating_mul(VALUES_PER_BYTE).saturating_add(FEW_VALUES).min(MOST_VALUES);
        let most_text_bytes = pickle.num_bytes().saturating_mul(MOST_TEXTS).saturating_add(FEW_TEXT_BYTES);
        let (num_values, text_bytes, num_sizes, tensor_bytes) = (0, 0, 0, 0);
        let (archive, root) = (&archive, root.as_str());
        let mut reader =
            Reader { archive, root, num_values, most_values, text_bytes, most_text_bytes, num_sizes, tensor_bytes };
        let value = reader.value(pickle.root(), 0).map_err(Kind::from)?;
        let (bytes, most) = (reader.tensor_bytes.saturating_sub(length), most_repeated_bytes(length));
        if bytes > most {
            return Err(Kind::from(Problem::Repeated { bytes, most }).into());
        }
        Ok(value)
    }
}

struct Reader<'a> {
    archive: &'a Archive,
    root: &'a str,
    num_values: usize,
    most_values: usize,
    text_bytes: usize,
    most_text_bytes: usize,
    /// And strides.
    num_sizes: usize,
    /// Of all tensors, each counted as often as it is held.
    tensor_bytes: u64,
}

impl Reader<'_> {
    fn value(&mut self, value: Value<'_>, depth: usize) -> Result<Plain<StoredTensor>, Problem> {
        if depth > MOST_DEEP {
            return Err(Problem::Deep { most: MOST_DEEP });
        }
        self.num_values += 1;
        if self.num_values > self.most_values {
            return Err(Problem::ManyValues { most: self.most_values });
        }
        Ok(match value.data() {
            Data::None => Plain::None,
            Data::Bool(value) => Plain::Bool(value),
            Data::Int(value) => Plain::Int(value),
            Data::LargeInt(value) => Plain::LargeInt(value),
            Data::Float(value) => Plain::Float(value),
            Data::Text(text) => {
                self.text_bytes = self.text_bytes.saturating_add(text.len());
                if self.text_bytes > self.most_text_bytes {
                    return Err(Problem::LongTexts { most: self.most_text_bytes });
                }
                Plain::text(text)
            }
            Data::List(items) => {
                Plain::List(items.iter().map(|it| self.value(it, depth + 1)).collect::<Result<_, _>>()?)
            }
            Data::Tuple(items) => {
                Plain::Tuple(items.iter().map(|it| self.value(it, depth + 1)).collect::<Result<_, _>>()?)
            }
            Data::Dict(pairs) => {
                let pair = |(key, of_key)| Ok((self.value(key, depth + 1)?, self.value(of_key, depth + 1)?));
                Plain::Dict(pairs.iter().map(pair).collect::<Result<_, _>>()?)
            }
            Data::Call(..) => self.tensor(value)?,
            Data::Global(_) | Data::Object(..) | Data::Persistent(_) | Data::Other(_) => Plain::Other(value.kind()),
        })
    }

    fn tensor(&mut self, value: Value<'_>) -> Result<Plain<StoredTensor>, Problem> {
        let found = match tensor(value, self.archive, self.root) {
            // What is beside such a tensor is of use without it. Lists show the beginning of a text.
            Err(TensorProblem::ElementType { found }) => {
                return Ok(Plain::Other(format!("a tensor of {found}, which safetensors does not have")));
            }
            Err(TensorProblem::Form { found }) => {
                return Ok(Plain::Other(format!("a tensor that is stored in another form: {found}")));
            }
            found => found.map_err(Problem::OnlyTensor)?,
        };
        match found {
            Some(stored) => {
                self.num_sizes += stored.shape().len() + stored.stride().len();
                if self.num_sizes > MOST_SIZES {
                    return Err(Problem::ManySizes { most: MOST_SIZES });
                }
                self.tensor_bytes = self.tensor_bytes.saturating_add(stored.num_bytes());
                Ok(Plain::Tensor(stored))
            }
            None => Ok(Plain::Other(shown(&value.kind()))),
        }
    }
}
