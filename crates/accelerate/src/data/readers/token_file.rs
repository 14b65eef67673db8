//! Flat files of token ids, cut into blocks.

use super::file::{Joined, PositionedFile, open_all};
use crate::data::Dataset;
use crate::error::{Place, Position, ReaderError, Result};
use std::path::Path;
use tch::Tensor;

/// How a token is written; always with its lowest byte first, as NumPy's `tofile` does on the usual machines.
///
/// ```
/// use accelerate::data::readers::TokenDtype;
///
/// assert_eq!(TokenDtype::U16.num_bytes(), 2);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenDtype {
    /// Two bytes, 0 to 65535: enough for vocabularies such as GPT-2's.
    #[default]
    U16,
    /// Four bytes, not negative.
    U32,
    /// Four bytes.
    I32,
    /// Eight bytes.
    I64,
}

impl TokenDtype {
    /// Bytes of one token.
    ///
    /// ```
    /// assert_eq!(accelerate::data::readers::TokenDtype::I64.num_bytes(), 8);
    /// ```
    pub fn num_bytes(self) -> u64 {
        match self {
            Self::U16 => 2,
            Self::U32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::U16 => "u16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::I64 => "i64",
        }
    }

    fn decode(self, bytes: &[u8]) -> Vec<i64> {
        match self {
            Self::U16 => numbers(bytes, |bytes| i64::from(u16::from_le_bytes(bytes))),
            Self::U32 => numbers(bytes, |bytes| i64::from(u32::from_le_bytes(bytes))),
            Self::I32 => numbers(bytes, |bytes| i64::from(i32::from_le_bytes(bytes))),
            Self::I64 => numbers(bytes, i64::from_le_bytes),
        }
    }
}

fn numbers<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> i64) -> Vec<i64> {
    bytes.as_chunks().0.iter().copied().map(number).collect()
}

/// How token files are read.
///
/// ```
/// use accelerate::data::readers::TokenFileOptions;
///
/// let options = TokenFileOptions { block_size: 256, ..TokenFileOptions::default() };
/// assert_eq!(options.header_bytes, 0);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenFileOptions {
    /// How a token is written; default: `U16`.
    pub dtype: TokenDtype,
    /// Number of tokens in each row; default: 1024.
    pub block_size: usize,
    /// Bytes before the first token of each file, which are skipped; default: 0.
    pub header_bytes: u64,
}

impl Default for TokenFileOptions {
    fn default() -> Self {
        Self { dtype: TokenDtype::U16, block_size: 1024, header_bytes: 0 }
    }
}

/// Blocks of tokens from flat files of token ids, the form in which texts for pre-training are kept: each row an
/// `Int64` tensor `[block_size]` on the CPU.
///
/// Blocks do not overlap and do not reach from one file into the next; the tokens behind the last whole block of a file
/// are left out. Ids are handed on as they are: whether they fit a vocabulary is for the model to say.
/// [`with_labels`](Self::with_labels) gives each block together with the tokens that follow.
///
/// Opening a file reads nothing of it, and memory does not grow with it: a row is read by its position from what the
/// operating system caches, and nothing is mapped. So 100 GiB of tokens need as little memory of this process as 100
/// KiB, and a file that is cut off while it is read is an error rather than a signal.
///
/// ```
/// use accelerate::data::{Dataset, readers::{TokenFileDataset, TokenFileOptions}};
/// use accelerate::tch::Tensor;
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("train.bin");
/// let tokens: Vec<u8> = (0u16..8).flat_map(u16::to_le_bytes).collect();
/// std::fs::write(&path, tokens).unwrap();
/// let options = TokenFileOptions { block_size: 3, ..TokenFileOptions::default() };
/// let blocks = TokenFileDataset::from_files([&path], &options)?;
/// assert_eq!((blocks.len(), blocks.get(1)?), (2, Tensor::from_slice(&[3i64, 4, 5])));
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct TokenFileDataset {
    files: Vec<PositionedFile>,
    joined: Joined,
    options: TokenFileOptions,
    /// Tokens behind a block that are read with it: 1 for labels.
    num_following: usize,
}

impl TokenFileDataset {
    /// The blocks of all files, in the order in which the files are given.
    ///
    /// # Errors
    ///
    /// [`is_data`](crate::Error::is_data): no file is given, one cannot be opened or is a folder, its size is not a
    /// whole number of tokens, or it has fewer tokens than one block; or `block_size` is 0.
    ///
    /// ```
    /// use accelerate::data::readers::{TokenFileDataset, TokenFileOptions};
    ///
    /// let error = TokenFileDataset::from_files(["absent.bin"], &TokenFileOptions::default()).unwrap_err();
    /// assert!(error.is_data() && error.to_string().contains("absent.bin"));
    /// ```
    pub fn from_files(paths: impl IntoIterator<Item: AsRef<Path>>, options: &TokenFileOptions) -> Result<Self> {
        if options.block_size == 0 {
            let (setting, found) = ("TokenFileOptions.block_size", "0".to_owned());
            return Err(ReaderError::Setting { setting, found, wanted: "must be at least 1" }.into());
        }
        let files = open_all(paths, |file| {
            num_tokens(&file, options)?;
            Ok(file)
        })?;
        Self { files, joined: Joined::new([]), options: options.clone(), num_following: 0 }.counted()
    }

    /// Rows become pairs of `Int64` tensors `[block_size]`: a block, and the same block one token further on, so that
    /// label `i` is the token that follows input `i`.
    ///
    /// # Errors
    ///
    /// When a file has no token behind its first block.
    ///
    /// ```
    /// use accelerate::data::{Dataset, readers::{TokenDtype, TokenFileDataset, TokenFileOptions}};
    /// use accelerate::tch::Tensor;
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("train.bin");
    /// std::fs::write(&path, (0..5i32).flat_map(i32::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    /// let options = TokenFileOptions { dtype: TokenDtype::I32, block_size: 2, ..TokenFileOptions::default() };
    /// let (inputs, labels) = TokenFileDataset::from_files([&path], &options)?.with_labels()?.get(1)?;
    /// assert_eq!(inputs, Tensor::from_slice(&[2i64, 3]));
    /// assert_eq!(labels, Tensor::from_slice(&[3i64, 4]));
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn with_labels(self) -> Result<LabelledTokenFileDataset> {
        Ok(LabelledTokenFileDataset(Self { num_following: 1, ..self }.counted()?))
    }

    /// The file of row `index`, and the number of its first token in there.
    ///
    /// # Errors
    ///
    /// When there is no such row.
    ///
    /// ```
    /// use accelerate::data::readers::{Position, TokenFileDataset, TokenFileOptions};
    ///
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("train.bin");
    /// std::fs::write(&path, [0; 64]).unwrap();
    /// let options = TokenFileOptions { block_size: 4, ..TokenFileOptions::default() };
    /// let place = TokenFileDataset::from_files([&path], &options)?.place(2)?;
    /// assert_eq!(place.position, Position::Token(8));
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn place(&self, index: usize) -> Result<Place> {
        let (file, token) = self.locate(index)?;
        Ok(Place { path: file.path().to_owned(), position: Position::Token(token) })
    }

    /// With the number of blocks of each file.
    fn counted(mut self) -> Result<Self> {
        let following = self.num_following as u64;
        let wanted = (self.options.block_size as u64).saturating_add(following);
        let num_blocks = self.files.iter().map(|file| {
            let found = num_tokens(file, &self.options)?;
            if found < wanted {
                return Err(ReaderError::NoBlock { path: file.path().to_owned(), found, wanted });
            }
            Ok(((found - following) / self.options.block_size as u64) as usize)
        });
        self.joined = Joined::new(num_blocks.collect::<Result<Vec<_>, _>>()?);
        Ok(self)
    }

    fn locate(&self, index: usize) -> Result<(&PositionedFile, u64)> {
        let (position, block) = self.joined.locate(index)?;
        Ok((&self.files[position], block as u64 * self.options.block_size as u64))
    }

    fn tokens(&self, index: usize) -> Result<Vec<i64>> {
        let (file, first) = self.locate(index)?;
        let num_tokens = (self.options.block_size + self.num_following) as u64;
        let at = |token: u64| self.options.header_bytes + token * self.options.dtype.num_bytes();
        Ok(self.options.dtype.decode(&file.read(at(first), at(first + num_tokens))?))
    }
}

impl Dataset for TokenFileDataset {
    type Item = Tensor;
    fn len(&self) -> usize {
        self.joined.len()
    }
    fn get(&self, index: usize) -> Result<Tensor> {
        Ok(Tensor::f_from_slice(&self.tokens(index)?)?)
    }
}

/// Blocks of tokens and the tokens that follow them: what [`TokenFileDataset::with_labels`] makes.
///
/// Each row is a pair of `Int64` tensors `[block_size]` on the CPU.
///
/// ```
/// use accelerate::data::{DataLoader, readers::{TokenFileDataset, TokenFileOptions}};
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("train.bin");
/// std::fs::write(&path, [0; 66]).unwrap();
/// let options = TokenFileOptions { block_size: 8, ..TokenFileOptions::default() };
/// let dataset = TokenFileDataset::from_files([&path], &options)?.with_labels()?;
/// let loader = DataLoader::builder(dataset).batch_size(4).build()?;
/// let (inputs, labels) = loader.iter()?.next().unwrap()?;
/// assert_eq!((inputs.size(), labels.size()), (vec![4, 8], vec![4, 8]));
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct LabelledTokenFileDataset(TokenFileDataset);

impl LabelledTokenFileDataset {
    /// As [`TokenFileDataset::place`].
    ///
    /// # Errors
    ///
    /// When there is no such row.
    ///
    /// ```
    /// # use accelerate::data::readers::{Position, TokenFileDataset, TokenFileOptions};
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("train.bin");
    /// std::fs::write(&path, [0; 64]).unwrap();
    /// let options = TokenFileOptions { block_size: 4, ..TokenFileOptions::default() };
    /// let pairs = TokenFileDataset::from_files([&path], &options)?.with_labels()?;
    /// assert_eq!(pairs.place(1)?.position, Position::Token(4));
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn place(&self, index: usize) -> Result<Place> {
        self.0.place(index)
    }
}

impl Dataset for LabelledTokenFileDataset {
    type Item = (Tensor, Tensor);
    fn len(&self) -> usize {
        self.0.len()
    }
    fn get(&self, index: usize) -> Result<(Tensor, Tensor)> {
        let tokens = self.0.tokens(index)?;
        let inputs = tokens.split_last().map_or(&[][..], |(_, inputs)| inputs);
        let labels = tokens.split_first().map_or(&[][..], |(_, labels)| labels);
        Ok((Tensor::f_from_slice(inputs)?, Tensor::f_from_slice(labels)?))
    }
}

fn num_tokens(file: &PositionedFile, options: &TokenFileOptions) -> Result<u64, ReaderError> {
    let (path, wanted_bytes) = (file.path().to_owned(), options.header_bytes);
    let Some(found_bytes) = file.num_bytes().checked_sub(wanted_bytes) else {
        return Err(ReaderError::TornHeader { path, found_bytes: file.num_bytes(), wanted_bytes });
    };
    let (token_bytes, dtype) = (options.dtype.num_bytes(), options.dtype.name());
    if !found_bytes.is_multiple_of(token_bytes) {
        return Err(ReaderError::TornToken { path, found_bytes, token_bytes, dtype });
    }
    Ok(found_bytes / token_bytes)
}
