//! Texts as tokens and back: bytes, or what the tokenizer of a trained model makes of them.

use anyhow::{Context, Result, anyhow, ensure};
use std::path::Path;

/// The file that holds a tokenizer, beside the weights.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

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
            let tokenizer = tokenizers::Tokenizer::from_file(&file)
                .map_err(|error| anyhow!(error))
                .with_context(|| format!("{} is not a tokenizer", file.display()))?;
            let num_tokens = tokenizer.get_vocab_size(true) as i64;
            ensure!(
                num_tokens <= vocab_size,
                "{} knows {num_tokens} tokens, but the model has {vocab_size}; the two belong to different models",
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
