//! What can be said on the command line.

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;

const AFTER_HELP: &str = "\
Examples:
  causal_lm
      Trains a small GPT-2 on the embedded corpus, in this one process; takes about two minutes.

  accelerate launch --num_processes 2 causal_lm --model llama --mixed_precision bf16
      A small Llama in two processes: each computes half of the gradients.

  causal_lm --model_name_or_path gpt2/ --train_file book.txt --block_size 256
      Fine-tunes a model that was downloaded from the Hub into a folder.

  accelerate launch --num_processes 2 causal_lm --model_name_or_path tinyllama/ --train_file book.txt \
      --load_in_4bit --lora_rank 16 --use_fsdp --gradient_checkpointing
      Trains small matrices beside the weights of a large Llama (QLoRA), of which each process keeps half, in 4 bits.

  causal_lm --model_name_or_path gpt2/ --train_file train.bin --validation_file validation.bin
      The same on files of tokens, two bytes each with the lowest first.

Options may be written with - in place of _ (--batch-size is --batch_size).";

/// Trains a model that continues texts, in as many processes as you start it with.
///
/// Without --train_file it makes its own small corpus; without --model_name_or_path it trains a small model from scratch, whose
/// tokens are bytes. After each epoch it prints the perplexity on the held-out part, and a text that the model continues.
#[derive(Clone, Debug, PartialEq, Parser)]
#[command(name = "causal_lm", version, rename_all = "snake_case", after_help = AFTER_HELP)]
pub struct Arguments {
    /// What to learn from: a text, or, if its name ends with .bin, tokens of two bytes each
    #[arg(long, value_name = "FILE", help_heading = "Data")]
    pub train_file: Option<PathBuf>,

    /// What to judge the model by, never learned from. Without it, the last tenth of the text is held out
    #[arg(long, value_name = "FILE", requires = "train_file", help_heading = "Data")]
    pub validation_file: Option<PathBuf>,

    /// Tokens in a row of a batch
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = at_least_two, help_heading = "Data")]
    pub block_size: usize,

    /// A trained model to go on from: a folder with config.json, model.safetensors and, unless its tokens are bytes, tokenizer.json, or
    /// a name on the Hugging Face Hub (what its cache lacks is downloaded with the cargo feature `hub`)
    #[arg(long, value_name = "FOLDER_OR_NAME", help_heading = "Model")]
    pub model_name_or_path: Option<PathBuf>,

    /// Which model to begin from scratch
    #[arg(long, value_enum, default_value_t = Model::Gpt2, conflicts_with = "model_name_or_path", help_heading = "Model")]
    pub model: Model,

    /// Keep the weights of linear layers as codes of 4 bits (nf4, with scales in 8 bits), which are not trained: needs --lora_rank
    #[arg(long = "load_in_4bit", help_heading = "Model")]
    pub load_in_4bit: bool,

    /// Train matrices of this rank beside all linear layers (LoRA) in place of the weights of --model_name_or_path
    #[arg(long, value_name = "RANK", value_parser = at_least_one, help_heading = "Model")]
    pub lora_rank: Option<usize>,

    /// What is added by them is multiplied by this number over the rank [default: twice the rank]
    #[arg(long, value_name = "NUMBER", value_parser = positive, help_heading = "Model")]
    pub lora_alpha: Option<f64>,

    /// Share of the inputs of these matrices that is set to zero at random in training
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share, help_heading = "Model")]
    pub lora_dropout: f64,

    /// Folder for the trained model, or for the matrices of --lora_rank alone; made if it is not there
    #[arg(long, value_name = "FOLDER", default_value = "causal_lm_output", help_heading = "Model")]
    pub output_dir: PathBuf,

    /// How often to go through the training texts
    #[arg(long, visible_alias = "epochs", value_name = "N", default_value_t = 3, value_parser = at_least_one, help_heading = "Training")]
    pub num_epochs: usize,

    /// Rows per step in each process
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one, help_heading = "Training")]
    pub batch_size: usize,

    /// Largest learning rate; it grows from 0 over the first tenth of the steps, then falls back to 0
    ///
    /// [default: 0.003 from scratch, 0.00005 with --model_name_or_path, 0.0002 with --lora_rank]
    #[arg(long, value_name = "RATE", value_parser = positive, help_heading = "Training")]
    pub learning_rate: Option<f64>,

    /// Number of batches whose gradients are averaged into one step; without it, what `accelerate launch` was told counts
    #[arg(long, value_name = "N", value_parser = at_least_one, help_heading = "Training")]
    pub gradient_accumulation_steps: Option<usize>,

    /// Compute activations once more in the backward pass in place of keeping them
    #[arg(long, help_heading = "Training")]
    pub gradient_checkpointing: bool,

    /// Start of all random numbers: initial weights, shuffling, dropout and the sample texts
    #[arg(long, value_name = "N", default_value_t = 42, help_heading = "Training")]
    pub seed: u64,

    /// What the sample texts begin with [default: the beginning of the held-out part]
    #[arg(long, value_name = "TEXT", help_heading = "Sample")]
    pub prompt: Option<String>,

    /// Tokens that are added to it; 0 for no sample
    #[arg(long, value_name = "TOKENS", default_value_t = 100, help_heading = "Sample")]
    pub sample_tokens: usize,

    /// How daring the samples are: scores are divided by it
    #[arg(long, value_name = "NUMBER", default_value_t = 0.7, value_parser = positive, help_heading = "Sample")]
    pub temperature: f64,

    /// Number format of the forward pass; without it, what `accelerate launch` was told counts
    #[arg(long, value_enum, value_name = "FORMAT", help_heading = "Processes and devices")]
    pub mixed_precision: Option<Precision>,

    /// Share the model between the processes (FSDP): each keeps a part of the weights, gradients and state
    #[arg(long, help_heading = "Processes and devices")]
    pub use_fsdp: bool,

    /// Use the processor even where there is a graphics card
    #[arg(long, help_heading = "Processes and devices")]
    pub cpu: bool,
}

/// Models that can be begun from scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Model {
    /// Learned positions, one head of keys for each of queries
    Gpt2,
    /// Rotary positions, two heads of queries for each of keys, gated feed-forward blocks
    Llama,
}

/// Number formats for the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Precision {
    /// 32-bit numbers everywhere
    No,
    /// 16-bit floating point with loss scaling
    Fp16,
    /// bfloat16, which needs no loss scaling
    Bf16,
}

impl Arguments {
    /// Reads a command line, the program's name first. Option names may be spelled with `-` or `_`.
    ///
    /// # Errors
    /// When the line makes no sense, or asks for help or the version; `clap::Error::exit` shows what to do.
    ///
    /// ```
    /// use causal_lm::arguments::Arguments;
    ///
    /// let arguments = Arguments::parse_line(["causal_lm", "--batch-size=8", "--epochs", "1"])?;
    /// assert_eq!((arguments.batch_size, arguments.num_epochs), (8, 1));
    /// # Ok::<(), clap::Error>(())
    /// ```
    pub fn parse_line(line: impl IntoIterator<Item = impl Into<OsString>>) -> Result<Self, clap::Error> {
        let arguments = Self::try_parse_from(line.into_iter().map(|argument| with_underscores(argument.into())))?;
        match arguments.contradiction() {
            Some(text) => Err(Self::command().error(ErrorKind::ArgumentConflict, text)),
            None => Ok(arguments),
        }
    }

    /// What the options mean together makes no sense: why, and what to do.
    fn contradiction(&self) -> Option<&'static str> {
        let is_from_scratch = self.model_name_or_path.is_none();
        let is_lora = self.lora_rank.is_some();
        match self {
            _ if self.load_in_4bit && !is_lora => Some(
                "weights of 4 bits are not trained, so with --load_in_4bit alone nothing would learn; add --lora_rank 16, which trains \
                 matrices beside them",
            ),
            _ if is_lora && is_from_scratch => Some(
                "--lora_rank leaves the weights of the model as they are, and those of a model from scratch know nothing; give a \
                 trained one by --model_name_or_path, or leave --lora_rank out",
            ),
            _ if !is_lora && (self.lora_alpha.is_some() || self.lora_dropout > 0.0) => Some(
                "--lora_alpha and --lora_dropout are for the matrices of --lora_rank, of which there are none; add --lora_rank 16, or \
                 leave them out",
            ),
            _ => None,
        }
    }

    /// Largest learning rate, given or by default.
    pub fn learning_rate(&self) -> f64 {
        self.learning_rate.unwrap_or(match (self.lora_rank, &self.model_name_or_path) {
            (Some(_), _) => 2e-4,
            (None, Some(_)) => 5e-5,
            (None, None) => 3e-3,
        })
    }
}

fn with_underscores(argument: OsString) -> OsString {
    let Some(option) = argument.to_str().and_then(|text| text.strip_prefix("--")) else { return argument };
    let (name, value) = match option.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (option, None),
    };
    let name = name.replace('-', "_");
    value.map_or_else(|| format!("--{name}"), |value| format!("--{name}={value}")).into()
}

fn at_least(text: &str, least: usize) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number >= least => Ok(number),
        _ => Err(format!("wanted a whole number from {least}")),
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    at_least(text, 1)
}

fn at_least_two(text: &str) -> Result<usize, String> {
    at_least(text, 2)
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if (0.0..1.0).contains(&number) => Ok(number),
        _ => Err("wanted a number from 0, below 1".to_owned()),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok(number),
        _ => Err("wanted a number above 0".to_owned()),
    }
}
