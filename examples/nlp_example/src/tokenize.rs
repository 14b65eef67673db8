//! WordPiece tokens: trained on the training split, or loaded from a folder in the layout of the Hub.

mod untrusted;

use accelerate_models::files::{self, FileError, shortened};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use tokenizers::models::wordpiece::{WordPiece, WordPieceTrainer};
use tokenizers::normalizers::bert::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::utils::parallelism::set_parallelism;
use tokenizers::{
    AddedToken, NormalizedString, Normalizer, OffsetReferential, OffsetType, PostProcessor, PreTokenizedString,
    PreTokenizer, Tokenizer, Trainer, TruncationParams, decoders,
};

/// Starts the threads in which texts are cut into tokens. Where the system gives the process none (`ulimit -v`, a limit of
/// threads), one thread does it. Call it once, before any text is cut.
pub fn start_threads() {
    // More threads than these only wait for one another, whatever RAYON_NUM_THREADS says.
    const MOST_THREADS: usize = 64;
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let wanted =
        std::env::var("RAYON_NUM_THREADS").ok().and_then(|text| text.parse().ok()).filter(|&number| number > 0);
    let threads = rayon::ThreadPoolBuilder::new().num_threads(wanted.unwrap_or(cores).min(MOST_THREADS));
    if threads.build_global().is_err() {
        set_parallelism(false);
    }
}

/// The file that holds a whole tokenizer.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// The file that holds one token per line, as BERT's first releases had it.
pub const VOCABULARY_FILE: &str = "vocab.txt";

/// In the order of their ids in a trained vocabulary.
const SPECIAL_TOKENS: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

/// Longest file that is read: some times as long as those of the largest vocabularies.
const MOST_BYTES: u64 = 100_000_000;

/// Most lines of a vocabulary.
const MOST_TOKENS: usize = 500_000;

/// The longest word that is cut into pieces, WordPiece's own limit. To learn from a word takes time that grows with the
/// square of its length.
const MAX_WORD_LETTERS: usize = 100;

/// A tokenizer that cannot be trained, loaded or used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizeError {
    /// The folder holds no tokenizer.
    #[error(
        "{folder} holds neither {TOKENIZER_FILE} nor {VOCABULARY_FILE}; wanted one of them beside the model's weights",
        folder = .folder.display()
    )]
    NoTokenizer {
        /// The folder.
        folder: PathBuf,
    },
    /// A file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A file does not hold a tokenizer.
    #[error("{path} does not hold a usable tokenizer: {message}", path = .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// The length leaves no room for text.
    #[error(
        "the maximum length is {found} tokens; wanted at least {wanted}, because the tokenizer adds {num_added} to each \
         text, as BERT's do with [CLS] and [SEP]", wanted = .num_added + 1
    )]
    TooShort {
        /// The length asked for.
        found: usize,
        /// How many tokens are added to each text.
        num_added: usize,
    },
    /// The tokenizers library gave up.
    #[error("the tokenizer failed: {0}")]
    Library(String),
}

/// One text as numbers; both vectors have the same length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// Ids of `[CLS]`, the word pieces, `[SEP]`.
    pub input_ids: Vec<i64>,
    /// All 0 for a single text; BERT wants to be told.
    pub token_type_ids: Vec<i64>,
}

/// Turns texts into ids of word pieces.
///
/// ```
/// use nlp_example::tokenize::TextTokenizer;
///
/// let texts = ["a good film", "a bad film", "good acting", "bad acting"];
/// let tokenizer = TextTokenizer::train(&texts, 100)?.with_max_length(16)?;
/// let encoded = tokenizer.encode(&["A GOOD film"])?;
/// assert_eq!(tokenizer.tokens(&encoded[0].input_ids), ["[CLS]", "a", "good", "film", "[SEP]"]);
/// # Ok::<(), nlp_example::tokenize::TokenizeError>(())
/// ```
#[derive(Clone, Debug)]
pub struct TextTokenizer {
    inner: Tokenizer,
}

impl TextTokenizer {
    /// Learns a vocabulary of at most `vocab_size` word pieces from `texts`. Lower case, accents removed,
    /// punctuation split off, as for `bert-base-uncased`.
    ///
    /// The result depends on nothing but the arguments, so every process may train its own. Words of more than 100 letters
    /// are left out: word pieces are not looked for in them, they are `[UNK]` whatever was learned.
    ///
    /// # Errors
    /// When the tokenizers library fails.
    pub fn train(texts: &[impl AsRef<str> + Sync], vocab_size: usize) -> Result<Self, TokenizeError> {
        let mut inner = bert_tokenizer(WordPiece::default(), true)?;
        let words = words_of(&inner, texts)?;
        let mut trainer = WordPieceTrainer::builder()
            .vocab_size(vocab_size)
            .min_frequency(2)
            .show_progress(false)
            .special_tokens(first_tokens(&words))
            .build();
        trainer.feed(words.iter(), |word| Ok(vec![word.to_owned()])).map_err(library)?;
        let mut model = WordPiece::default();
        trainer.train(&mut model).map_err(library)?;
        inner.with_model(model);
        with_special_tokens(&mut inner, Path::new(TOKENIZER_FILE))?;
        Ok(Self { inner })
    }

    /// Loads `tokenizer.json` or, without one, `vocab.txt` from a folder. With `vocab.txt` the key `do_lower_case` of
    /// `tokenizer_config.json` is honoured.
    ///
    /// # Errors
    /// When neither file is there, or the one that is cannot be used.
    pub fn from_folder(folder: &Path) -> Result<Self, TokenizeError> {
        let path = folder.join(TOKENIZER_FILE);
        if path.exists() {
            let json = files::read_text(&path, MOST_BYTES)?;
            return Self::from_json(&json).map_err(|error| malformed(&path, error));
        }
        let path = folder.join(VOCABULARY_FILE);
        if !path.exists() {
            return Err(TokenizeError::NoTokenizer { folder: folder.to_owned() });
        }
        let text = files::read_text(&path, MOST_BYTES)?;
        if text.lines().nth(MOST_TOKENS).is_some() {
            return Err(malformed(&path, format!("it has more than {MOST_TOKENS} lines, each of which is a token")));
        }
        let vocabulary = WordPiece::read_bytes(text.as_bytes())
            .and_then(|vocabulary| WordPiece::builder().vocab(vocabulary).build())
            .map_err(|error| malformed(&path, error))?;
        let mut inner = bert_tokenizer(vocabulary, lower_cases(folder)?)?;
        with_special_tokens(&mut inner, &path)?;
        Ok(Self { inner })
    }

    /// The tokenizer that [`to_json`](Self::to_json) wrote.
    ///
    /// # Errors
    /// When `json` is something else, or a tokenizer that cannot be used: its template names tokens that are not there,
    /// or it fails on a text.
    pub fn from_json(json: &str) -> Result<Self, TokenizeError> {
        files::check_json(json).map_err(TokenizeError::Library)?;
        let mut inner = Tokenizer::from_bytes(json).map_err(library)?;
        // Batches are padded to their own longest text, and the length limit is this program's choice.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(library)?;
        untrusted::check(&inner).map_err(TokenizeError::Library)?;
        Ok(Self { inner })
    }

    /// The whole tokenizer as the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// When the tokenizers library fails.
    pub fn to_json(&self) -> Result<String, TokenizeError> {
        self.inner.to_string(true).map_err(library)
    }

    /// Cuts texts to `max_length` tokens, `[CLS]` and `[SEP]` included.
    ///
    /// # Errors
    /// When `max_length` leaves no room for text: when it is below 3 for BERT's tokenizers.
    pub fn with_max_length(mut self, max_length: usize) -> Result<Self, TokenizeError> {
        let num_added = self.inner.get_post_processor().map_or(0, |processor| processor.added_tokens(false));
        if max_length <= num_added {
            return Err(TokenizeError::TooShort { found: max_length, num_added });
        }
        let truncation = TruncationParams { max_length, ..TruncationParams::default() };
        self.inner.with_truncation(Some(truncation)).map_err(library)?;
        Ok(self)
    }

    /// Numbers for each text, in the same order; computed on all cores.
    ///
    /// # Errors
    /// When the tokenizers library fails.
    pub fn encode(&self, texts: &[&str]) -> Result<Vec<Encoded>, TokenizeError> {
        let encodings = self.inner.encode_batch_fast(texts.to_vec(), true).map_err(library)?;
        let wide = |ids: &[u32]| ids.iter().map(|&id| i64::from(id)).collect();
        Ok(encodings
            .iter()
            .map(|encoding| Encoded {
                input_ids: wide(encoding.get_ids()),
                token_type_ids: wide(encoding.get_type_ids()),
            })
            .collect())
    }

    /// The word pieces behind ids; an id outside of the vocabulary becomes an empty string.
    pub fn tokens(&self, ids: &[i64]) -> Vec<String> {
        let token = |&id: &i64| self.inner.id_to_token(u32::try_from(id).ok()?);
        ids.iter().map(|id| token(id).unwrap_or_default()).collect()
    }

    /// One more than the largest id that a text can get.
    pub fn vocab_size(&self) -> usize {
        let vocabulary = self.inner.get_vocab(true);
        vocabulary.values().max().map_or(0, |&id| id as usize + 1)
    }

    /// The id that fills up short texts of a batch: that of `[PAD]`, or 0.
    pub fn pad_id(&self) -> i64 {
        self.inner.token_to_id("[PAD]").map_or(0, i64::from)
    }
}

fn bert_tokenizer(model: WordPiece, lower_case: bool) -> Result<Tokenizer, TokenizeError> {
    let mut tokenizer = Tokenizer::new(model);
    let mut normalizer = BertNormalizer::default();
    normalizer.lowercase = lower_case;
    tokenizer.with_normalizer(Some(normalizer)).map_err(library)?;
    tokenizer.with_pre_tokenizer(Some(BertPreTokenizer));
    tokenizer.with_decoder(Some(decoders::wordpiece::WordPiece::default()));
    Ok(tokenizer)
}

/// All words of the texts that pieces are looked for in, one after the other, as the vocabulary will see them.
fn words_of(tokenizer: &Tokenizer, texts: &[impl AsRef<str>]) -> Result<Vec<String>, TokenizeError> {
    let mut words = Vec::new();
    for text in texts {
        let mut text = NormalizedString::from(text.as_ref());
        if let Some(normalizer) = tokenizer.get_normalizer() {
            normalizer.normalize(&mut text).map_err(library)?;
        }
        let mut text = PreTokenizedString::from(text);
        if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut text).map_err(library)?;
        }
        let splits = text.get_splits(OffsetReferential::Original, OffsetType::None);
        let words_of_text = splits.into_iter().map(|(word, _, _)| word);
        words.extend(words_of_text.filter(|word| word.chars().count() <= MAX_WORD_LETTERS).map(str::to_owned));
    }
    Ok(words)
}

/// The tokens that get the first ids: the special ones, then every letter inside of a word, sorted.
///
/// Left to itself, the trainer numbers those letters in the order of a randomly seeded hash map, and numbers
/// break ties between pieces: two processes would learn two vocabularies from the same texts.
fn first_tokens(words: &[String]) -> Vec<AddedToken> {
    let letters: BTreeSet<char> = words.iter().flat_map(|word| word.chars().skip(1)).collect();
    let letters = letters.into_iter().map(|letter| AddedToken::from(format!("##{letter}"), false));
    SPECIAL_TOKENS.iter().map(|&token| AddedToken::from(token, true)).chain(letters).collect()
}

/// Makes the tokenizer put `[CLS]` before and `[SEP]` behind each text.
fn with_special_tokens(tokenizer: &mut Tokenizer, path: &Path) -> Result<(), TokenizeError> {
    let id = |token: &str| {
        tokenizer.token_to_id(token).ok_or_else(|| TokenizeError::Malformed {
            path: path.to_owned(),
            message: format!("the token {token} is missing; a vocabulary for BERT has it"),
        })
    };
    let special = ["[CLS]", "[SEP]"].map(|token| id(token).map(|id| (token, id)));
    let [start, end] = special;
    id("[UNK]")?;
    let template = TemplateProcessing::builder()
        .try_single("[CLS] $A [SEP]")
        .map_err(TokenizeError::Library)?
        .try_pair("[CLS] $A [SEP] $B:1 [SEP]:1")
        .map_err(TokenizeError::Library)?
        .special_tokens(vec![start?, end?])
        .build()
        .map_err(|error| TokenizeError::Library(error.to_string()))?;
    tokenizer.with_post_processor(Some(template));
    let present = SPECIAL_TOKENS.iter().filter(|token| tokenizer.token_to_id(token).is_some());
    let present: Vec<_> = present.map(|&token| AddedToken::from(token, true)).collect();
    tokenizer.add_special_tokens(present).map_err(library)?;
    Ok(())
}

fn lower_cases(folder: &Path) -> Result<bool, TokenizeError> {
    #[derive(Deserialize)]
    struct TokenizerConfig {
        #[serde(default = "yes")]
        do_lower_case: bool,
    }
    fn yes() -> bool {
        true
    }
    let path = folder.join("tokenizer_config.json");
    if !path.exists() {
        return Ok(true);
    }
    let text = files::read_text(&path, MOST_BYTES)?;
    let config: TokenizerConfig = files::from_json(&text).map_err(|error| malformed(&path, error))?;
    Ok(config.do_lower_case)
}

fn malformed(path: &Path, error: impl ToString) -> TokenizeError {
    TokenizeError::Malformed { path: path.to_owned(), message: shortened(&error.to_string()) }
}

fn library(error: Box<dyn std::error::Error + Send + Sync>) -> TokenizeError {
    TokenizeError::Library(shortened(&error.to_string()))
}
