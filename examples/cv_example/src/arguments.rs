//! What can be said on the command line.

use clap::{Parser, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;

const AFTER_HELP: &str = "\
Examples:
  cv_example
      Trains a small ResNet on images that it draws, in this one process; takes about a minute.

  accelerate launch --num_processes 2 cv_example --mixed_precision bf16
      The same in two processes: each computes half of the gradients.

Options may be written with - in place of _ (--batch-size is --batch_size).";

/// Trains a ResNet to tell shapes apart, in as many processes as you start it with.
#[derive(Clone, Debug, PartialEq, Parser)]
#[command(name = "cv_example", version, rename_all = "snake_case", after_help = AFTER_HELP)]
pub struct Arguments {
    /// Images to draw and learn from
    #[arg(long, value_name = "N", default_value_t = 3000, value_parser = at_least_one, help_heading = "Data")]
    pub num_train: usize,

    /// Images to draw and judge by
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = at_least_one, help_heading = "Data")]
    pub num_validation: usize,

    /// A folder that this program has written, to go on from, or the name of such a model on the Hugging Face Hub (what its cache lacks
    /// is downloaded with the cargo feature `hub`)
    #[arg(long, value_name = "FOLDER_OR_NAME", help_heading = "Model")]
    pub model_name_or_path: Option<PathBuf>,

    /// Folder for the trained model; made if it is not there
    #[arg(long, value_name = "FOLDER", default_value = "cv_example_output", help_heading = "Model")]
    pub output_dir: PathBuf,

    /// How often to go through the images
    #[arg(long, visible_alias = "epochs", value_name = "N", default_value_t = 3, value_parser = at_least_one, help_heading = "Training")]
    pub num_epochs: usize,

    /// Images per step in each process
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_two, help_heading = "Training")]
    pub batch_size: usize,

    /// Largest learning rate; it grows from 0 over the first tenth of the steps, then falls back to 0
    #[arg(long, value_name = "RATE", default_value_t = 0.003, value_parser = positive, help_heading = "Training")]
    pub learning_rate: f64,

    /// Number of batches whose gradients are averaged into one step; without it, what `accelerate launch` was told counts
    #[arg(long, value_name = "N", value_parser = at_least_one, help_heading = "Training")]
    pub gradient_accumulation_steps: Option<usize>,

    /// Start of all random numbers: images, initial weights and shuffling
    #[arg(long, value_name = "N", default_value_t = 42, help_heading = "Training")]
    pub seed: u64,

    /// Number format of the forward pass; without it, what `accelerate launch` was told counts
    #[arg(long, value_enum, value_name = "FORMAT", help_heading = "Processes and devices")]
    pub mixed_precision: Option<Precision>,

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
}

impl Arguments {
    /// Reads a command line, the program's name first. Option names may be spelled with `-` or `_`.
    ///
    /// # Errors
    /// When the line makes no sense, or asks for help or the version; `clap::Error::exit` shows what to do.
    ///
    /// ```
    /// use cv_example::arguments::Arguments;
    ///
    /// let arguments = Arguments::parse_line(["cv_example", "--num-train=100", "--epochs", "1"])?;
    /// assert_eq!((arguments.num_train, arguments.num_epochs), (100, 1));
    /// # Ok::<(), clap::Error>(())
    /// ```
    pub fn parse_line(line: impl IntoIterator<Item = impl Into<OsString>>) -> Result<Self, clap::Error> {
        Self::try_parse_from(line.into_iter().map(|argument| with_underscores(argument.into())))
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

/// Batch normalisation needs several.
fn at_least_two(text: &str) -> Result<usize, String> {
    at_least(text, 2)
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok(number),
        _ => Err("wanted a number above 0".to_owned()),
    }
}
