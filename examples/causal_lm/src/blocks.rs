//! Tokens in rows of equal length, to learn from and to judge by.

use crate::arguments::Arguments;
use crate::corpus;
use crate::tokens::Tokens;
use accelerate::data::readers::{TokenFileDataset, TokenFileOptions};
use accelerate::data::{DataLoader, Dataset, TensorDataset, stack_tensors};
use accelerate::tch::Tensor;
use accelerate_models::files::read_text;
use anyhow::{Context, Result, ensure};
use std::path::Path;

/// A text is kept in memory, and so are its tokens, which take eight times as much.
const MOST_TEXT_BYTES: u64 = 1 << 33;

/// Rows of tokens `[block_size]`, int64.
#[derive(Debug)]
pub enum Blocks {
    /// Of a text, all in memory `[num_blocks, block_size]`.
    Text(Tensor),
    /// Of a file of tokens, read row by row.
    File(TokenFileDataset),
}

impl Blocks {
    /// What to learn from, and what to judge by.
    ///
    /// # Errors
    /// Files that cannot be read, or are too short for a block.
    pub fn load(arguments: &Arguments, tokens: &Tokens) -> Result<(Self, Self)> {
        let read = |path: &Path| read_text(path, MOST_TEXT_BYTES);
        let of_text = |text: &str| Self::of_tokens(&tokens.encode(text)?, arguments.block_size);
        let is_tokens = |path: &Path| path.extension().is_some_and(|extension| extension == "bin");
        let of_file = |path: &Path| match is_tokens(path) {
            true => {
                let options = TokenFileOptions { block_size: arguments.block_size, ..Default::default() };
                Ok(Self::File(TokenFileDataset::from_files([path], &options)?))
            }
            false => of_text(&read(path)?).with_context(|| format!("{} is too short", path.display())),
        };
        match (&arguments.train_file, &arguments.validation_file) {
            (Some(train), Some(validation)) => Ok((of_file(train)?, of_file(validation)?)),
            (Some(train), None) => {
                ensure!(!is_tokens(train), "a file of tokens is not divided: give a --validation_file as well");
                let (train, validation) = held_out(&read(train)?);
                Ok((of_text(&train)?, of_text(&validation)?))
            }
            (None, _) => {
                let (train, validation) = held_out(&corpus::text());
                Ok((of_text(&train)?, of_text(&validation)?))
            }
        }
    }

    /// What is left behind the last whole block is left out.
    fn of_tokens(tokens: &[i64], block_size: usize) -> Result<Self> {
        let num_blocks = tokens.len() / block_size;
        ensure!(num_blocks > 0, "there are {} tokens, fewer than --block_size {block_size}", tokens.len());
        let whole = Tensor::f_from_slice(&tokens[..num_blocks * block_size])?;
        Ok(Self::Text(whole.f_view([num_blocks as i64, block_size as i64])?))
    }

    /// A loader of batches `[batch, block_size]`.
    ///
    /// # Errors
    /// Those of the loader.
    pub fn loader(self, batch_size: usize, shuffle: bool) -> Result<DataLoader<Tensor>> {
        Ok(match self {
            Self::Text(blocks) => {
                DataLoader::builder(TensorDataset::new(blocks)?).batch_size(batch_size).shuffle(shuffle).build()?
            }
            Self::File(blocks) => {
                DataLoader::builder(blocks).batch_size(batch_size).shuffle(shuffle).collate_fn(stack_tensors).build()?
            }
        })
    }

    /// The first `num_tokens` tokens.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn beginning(&self, num_tokens: usize) -> Result<Vec<i64>> {
        let first = match self {
            Self::Text(blocks) => blocks.f_select(0, 0)?,
            Self::File(blocks) => blocks.get(0)?,
        };
        Ok(Vec::<i64>::try_from(&first)?.into_iter().take(num_tokens).collect())
    }
}

/// All but the last tenth, and that, divided at the end of a line where there is one.
fn held_out(text: &str) -> (String, String) {
    let at = text.floor_char_boundary(text.len() / 10 * 9);
    let at = text[..at].rfind('\n').map_or(at, |end| end + 1);
    (text[..at].to_owned(), text[at..].to_owned())
}
