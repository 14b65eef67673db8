//! What can be said on the command line.

use clap::{Parser, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;

const AFTER_HELP: &str = "\
Examples:
  nlp_example
      Trains a small BERT on the embedded corpus, in this one process.

  accelerate launch --num_processes 2 nlp_example --output_dir out
      The same in two processes: each computes half of the gradients.

  nlp_example --train_file train.tsv --validation_file dev.tsv --num_epochs 5
      Trains from scratch on your own text.

  nlp_example --model_name_or_path bert-base-uncased/ --train_file train.csv --validation_file dev.csv
      Fine-tunes a model that was downloaded from the Hub into a folder.

Options may be written with - in place of _ (--batch-size is --batch_size).";

/// Trains BERT to classify texts, in as many processes as you start it with.
///
/// Without --train_file and --dataset_name it makes its own small corpus of film reviews; without
/// --model_name_or_path it trains a small BERT from scratch on a vocabulary learned from the training split.
#[derive(Clone, Debug, PartialEq, Parser)]
#[command(name = "nlp_example", version, rename_all = "snake_case", after_help = AFTER_HELP)]
pub struct Arguments {
    /// Texts to learn from: .tsv, .csv, .jsonl or .parquet with the columns `sentence` (or `text`) and `label`
    ///
    /// Labels are whole numbers counted from 0. TSV and CSV files may do without a line of column names if
    /// they hold just the text and the label, in this order.
    #[arg(long, value_name = "FILE", requires = "validation_file", help_heading = "Data")]
    pub train_file: Option<PathBuf>,

    /// Texts to judge the model by, never learned from; same formats as --train_file
    #[arg(long, value_name = "FILE", requires = "train_file", help_heading = "Data")]
    pub validation_file: Option<PathBuf>,

    /// Data set on the Hugging Face Hub, for example stanfordnlp/sst2 (needs the cargo feature `hub`)
    #[arg(long, value_name = "NAME", conflicts_with = "train_file", help_heading = "Data")]
    pub dataset_name: Option<String>,

    /// Which configuration of --dataset_name to use, for data sets that have several
    #[arg(long, value_name = "NAME", requires = "dataset_name", help_heading = "Data")]
    pub dataset_config_name: Option<String>,

    /// Longest text in tokens; what is longer is cut off
    #[arg(long, value_name = "TOKENS", default_value_t = 128, help_heading = "Data")]
    pub max_length: usize,

    /// A trained model to continue from: a folder with config.json, model.safetensors and tokenizer.json (or
    /// vocab.txt), or a name on the Hub (needs the cargo feature `hub`)
    #[arg(long, value_name = "FOLDER|NAME", help_heading = "Model")]
    pub model_name_or_path: Option<String>,

    /// Folder for the trained model, its tokenizer and the loss curve; made if it is not there
    #[arg(long, value_name = "FOLDER", default_value = "nlp_example_output", help_heading = "Model")]
    pub output_dir: PathBuf,

    /// How often to go through the training texts [default: 5, with the embedded corpus 6]
    #[arg(long, visible_alias = "epochs", value_name = "N", value_parser = at_least_one, help_heading = "Training")]
    pub num_epochs: Option<usize>,

    /// Texts per step in each process (with --split_batches: in all processes together)
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one, help_heading = "Training")]
    pub batch_size: usize,

    /// Largest learning rate; it grows from 0 over the first tenth of the steps, then falls back to 0
    ///
    /// [default: 0.001 from scratch, 0.00002 with --model_name_or_path]
    #[arg(long, value_name = "RATE", value_parser = positive, help_heading = "Training")]
    pub learning_rate: Option<f64>,

    /// Number of batches whose gradients are averaged into one step: large batches in little memory; without it, what
    /// `accelerate launch` was told counts
    #[arg(long, value_name = "N", value_parser = at_least_one, help_heading = "Training")]
    pub gradient_accumulation_steps: Option<usize>,

    /// Save a checkpoint of the whole run every N steps, in `checkpoints` of --output_dir; the two newest are kept
    #[arg(long, value_name = "N", value_parser = at_least_one, help_heading = "Training")]
    pub save_every: Option<usize>,

    /// Go on from the newest checkpoint in --output_dir, with the same options, on any number of processes; where there is
    /// none, begin
    #[arg(long, help_heading = "Training")]
    pub resume: bool,

    /// Write losses and scores of each epoch for TensorBoard, and as lines of JSON
    #[arg(long, help_heading = "Training")]
    pub with_tracking: bool,

    /// Folder for --with_tracking; a relative one is inside --output_dir
    #[arg(long, value_name = "FOLDER", default_value = "logs", help_heading = "Training")]
    pub logging_dir: PathBuf,

    /// Start of all random numbers: initial weights, shuffling and dropout
    #[arg(long, value_name = "N", default_value_t = 42, help_heading = "Training")]
    pub seed: u64,

    /// Number format of the forward pass; without it, what `accelerate launch` was told counts
    #[arg(long, value_enum, value_name = "FORMAT", help_heading = "Processes and devices")]
    pub mixed_precision: Option<Precision>,

    /// Cut each batch of --batch_size texts into one part for each process, so that the steps are the same
    /// however many processes there are
    #[arg(long, help_heading = "Processes and devices")]
    pub split_batches: bool,

    /// Use the processor even where there is a graphics card
    #[arg(long, help_heading = "Processes and devices")]
    pub cpu: bool,
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
    /// 8-bit floating point in matrix products
    Fp8,
}

impl Arguments {
    /// Reads a command line, the program's name first. Option names may be spelled with `-` or `_`.
    ///
    /// # Errors
    /// When the line makes no sense, or asks for help or the version; `clap::Error::exit` shows what to do.
    ///
    /// ```
    /// use nlp_example::arguments::Arguments;
    ///
    /// let arguments = Arguments::parse_line(["nlp_example", "--batch-size=16", "--epochs", "3"])?;
    /// assert_eq!((arguments.batch_size, arguments.num_epochs()), (16, 3));
    /// # Ok::<(), clap::Error>(())
    /// ```
    pub fn parse_line(line: impl IntoIterator<Item = impl Into<OsString>>) -> Result<Self, clap::Error> {
        Self::try_parse_from(line.into_iter().map(|argument| with_underscores(argument.into())))
    }

    /// How often to go through the training texts, given or by default.
    pub fn num_epochs(&self) -> usize {
        let uses_own_corpus = self.train_file.is_none() && self.dataset_name.is_none();
        self.num_epochs.unwrap_or(if uses_own_corpus { 6 } else { 5 })
    }

    /// The peak learning rate, given or by default.
    pub fn learning_rate(&self) -> f64 {
        const FROM_SCRATCH: f64 = 1e-3;
        const FINE_TUNING: f64 = 2e-5;
        let default = if self.model_name_or_path.is_some() { FINE_TUNING } else { FROM_SCRATCH };
        self.learning_rate.unwrap_or(default)
    }
}

fn with_underscores(argument: OsString) -> OsString {
    let Some(option) = argument.to_str().and_then(|text| text.strip_prefix("--")) else {
        return argument;
    };
    let (name, value) = match option.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (option, None),
    };
    let name = name.replace('-', "_");
    match value {
        Some(value) => format!("--{name}={value}").into(),
        None => format!("--{name}").into(),
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("wanted a whole number of at least 1".to_owned()),
        Ok(number) => Ok(number),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("wanted a number above 0, such as 0.0005 or 5e-4".to_owned()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use clap::error::ErrorKind;
    use rstest::rstest;

    fn parse(line: &str) -> Result<Arguments, clap::Error> {
        Arguments::parse_line(std::iter::once("nlp_example").chain(line.split_whitespace()))
    }

    #[test]
    fn the_definition_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn both_spellings_mean_the_same() {
        let underscores = "--train_file a_b.tsv --validation_file=c_d.tsv --batch_size 8 --split_batches";
        let hyphens = "--train-file a_b.tsv --validation-file=c_d.tsv --batch-size 8 --split-batches";
        let parsed = parse(underscores).unwrap();
        assert_eq!(parsed, parse(hyphens).unwrap());
        assert_eq!(parsed.validation_file, Some("c_d.tsv".into()), "values keep their spelling");
    }

    #[rstest]
    #[case::from_scratch("", 1e-3)]
    #[case::fine_tuning("--model_name_or_path bert", 2e-5)]
    #[case::given("--learning_rate 3e-4", 3e-4)]
    fn learning_rate_depends_on_the_model(#[case] line: &str, #[case] wanted: f64) {
        assert_eq!(parse(line).unwrap().learning_rate(), wanted);
    }

    #[rstest]
    #[case("--train_file a.tsv", ErrorKind::MissingRequiredArgument)]
    #[case("--validation_file a.tsv", ErrorKind::MissingRequiredArgument)]
    #[case("--dataset_config_name a", ErrorKind::MissingRequiredArgument)]
    #[case("--train_file a.tsv --validation_file b.tsv --dataset_name c", ErrorKind::ArgumentConflict)]
    #[case("--batch_size 0", ErrorKind::ValueValidation)]
    #[case("--num_epochs 0", ErrorKind::ValueValidation)]
    #[case("--gradient_accumulation_steps -1", ErrorKind::UnknownArgument)]
    #[case("--learning_rate nan", ErrorKind::ValueValidation)]
    #[case("--learning_rate 0", ErrorKind::ValueValidation)]
    #[case("--mixed_precision fp12", ErrorKind::InvalidValue)]
    #[case("--typo", ErrorKind::UnknownArgument)]
    fn senseless_lines_are_refused(#[case] line: &str, #[case] kind: ErrorKind) {
        assert_eq!(parse(line).unwrap_err().kind(), kind);
    }
}
