//! Texts as tokens and back: bytes, or what the tokenizer of a trained model makes of them.

use accelerate_models::files::read_text;
use anyhow::{Context, Result, anyhow, ensure};
use std::path::Path;

/// The file that holds a tokenizer, beside the weights.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// A tokenizer of half a million tokens has a tenth of it.
const MOST_BYTES: u64 = 1 << 28;

/// Tokens of a model whose tokens are bytes.
pub const NUM_BYTES: i64 = 256;

/// How texts become tokens.
///
/// ```
/// use causal_lm::tokens::Tokens;
///
/// let tokens = Tokens::Bytes;
/// assert_eq!(tokens.encode("hi")?, [104, 105]);
/// assert_eq!(tokens.decode(&[104, 105])?, "hi");
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug)]
pub enum Tokens {
    /// Each byte is one.
    Bytes,
    /// As `tokenizer.json` says.
    Tokenizer(Box<tokenizers::Tokenizer>),
}

impl Tokens {
    /// Those of the model in `folder`, which has `vocab_size` of them.
    ///
    /// # Errors
    /// A file that is not a tokenizer, or none, and too few tokens for bytes.
    pub fn from_folder(folder: &Path, vocab_size: i64) -> Result<Self> {
        let file = folder.join(TOKENIZER_FILE);
        if file.exists() {
            let text = read_text(&file, MOST_BYTES)?;
            let tokenizer = tokenizers::Tokenizer::from_bytes(text)
                .map_err(|error| anyhow!(error))
                .with_context(|| format!("{} is not a tokenizer", file.display()))?;
            // Ids may have gaps.
            let largest = tokenizer.get_vocab(true).into_values().max();
            let num_tokens = largest.map_or(0, |largest| i64::from(largest) + 1);
            ensure!(
                num_tokens <= vocab_size,
                "{} numbers its tokens up to {num_tokens}, but the model has {vocab_size}; the two belong to different models",
                file.display()
            );
            return Ok(Self::Tokenizer(Box::new(tokenizer)));
        }
        ensure!(
            vocab_size == NUM_BYTES,
            "{} is not there, and the model has {vocab_size} tokens, so they are not bytes",
            file.display()
        );
        Ok(Self::Bytes)
    }

    /// A text as tokens.
    ///
    /// # Errors
    /// Those of the tokenizers library.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>> {
        match self {
            Self::Bytes => Ok(text.bytes().map(i64::from).collect()),
            Self::Tokenizer(tokenizer) => {
                let encoding = tokenizer.encode(text, false).map_err(|error| anyhow!(error))?;
                Ok(encoding.get_ids().iter().copied().map(i64::from).collect())
            }
        }
    }

    /// Tokens as a text; what is no text is shown as `\u{fffd}`.
    ///
    /// # Errors
    /// Those of the tokenizers library.
    pub fn decode(&self, tokens: &[i64]) -> Result<String> {
        match self {
            Self::Bytes => {
                let bytes: Vec<u8> = tokens.iter().map(|token| u8::try_from(*token).unwrap_or(b'?')).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Self::Tokenizer(tokenizer) => {
                let ids: Vec<u32> = tokens.iter().filter_map(|token| u32::try_from(*token).ok()).collect();
                tokenizer.decode(&ids, true).map_err(|error| anyhow!(error))
            }
        }
    }
}
