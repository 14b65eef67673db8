//! `cargo xtask parity`: the same training in Python and here must give the same numbers, and the same launch the same
//! environment.

mod batch_norm;
mod checkpoint;
mod compare;
mod config;
mod data;
pub(crate) mod exported;
mod fp8;
mod fsdp;
mod grid;
mod launch;
mod lora;
mod models;
mod precision;
mod quant;
mod trackers;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};

use crate::python::Environment;
use crate::{libtorch, paths, process, ranks};
use compare::Difference;

/// Compare numbers with Python Accelerate.
///
/// Installs Accelerate into a folder of its own on first use. Both sides start from the same weights and read the
/// same rows; prints one line per case and fails if any case is out of bounds.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Losses of every step and final parameters of data-parallel training; buffers of a model with batch norm
    Ddp(Ddp),
    /// Rows of every rank in every epoch, over a grid of loader configurations
    Data(data::Data),
    /// Losses, learning rates and skipped steps in every precision, with accumulation and clipping
    Precision(precision::Precision),
    /// Losses and final parameters of sharded training
    Fsdp(fsdp::Fsdp),
    /// Losses and scales of training in FP8, beside torchao and a transcription of TransformerEngine's delayed scaling
    Fp8(fp8::Fp8),
    /// Losses, evaluations and final parameters of models that `accelerate export-model` has compiled
    Exported(exported::Exported),
    /// Logits, losses and tokens of BERT, GPT-2, Llama, Mistral, Qwen2, ViT and ResNet, beside Transformers
    Models(models::Models),
    /// The environment of every rank under both launchers, for many flags and files
    Launch(launch::Launch),
    /// Adapters beside PEFT's: losses of training, and files in both directions
    Lora(lora::Lora),
    /// Checkpoints of each side, converted, and what the other one goes on with
    Checkpoint(checkpoint::Checkpoint),
    /// What configuration files of all versions mean, read and written by both sides
    Config(config::Config),
    /// Codes, files and products of weights of 4 and 8 bits, beside bitsandbytes on the CPU
    Quant,
    /// Event files of trackers, read by TensorBoard
    Trackers(trackers::Trackers),
}

#[derive(Debug, Args)]
struct Ddp {
    /// Steps to train
    #[arg(long, default_value_t = 50)]
    steps: usize,
    /// Rows per rank and step
    #[arg(long = "batch_size", default_value_t = 8)]
    batch_size: usize,
    /// Numbers of ranks
    #[arg(long = "world_sizes", value_delimiter = ',', default_values_t = [1, 2, 4])]
    world_sizes: Vec<usize>,
    /// Numbers of ranks of the model with batch norm
    #[arg(long = "batch_norm_world_sizes", value_delimiter = ',', default_values_t = [1, 2, 3, 5])]
    batch_norm_world_sizes: Vec<usize>,
    /// Optimizers, out of sgd and adamw
    #[arg(long, value_delimiter = ',', default_values_t = ["sgd".to_owned(), "adamw".to_owned()])]
    optimizers: Vec<String>,
}

/// Of trainings in float32.
const BOUND: Difference = Difference { loss: 1e-5, parameter: 1e-5 };

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    match &arguments.what {
        What::Ddp(ddp) => run_ddp(ddp),
        What::Data(data) => data::run(data),
        What::Precision(precision) => precision::run(precision),
        What::Fp8(fp8) => fp8::run(fp8),
        What::Fsdp(fsdp) => fsdp::run(fsdp),
        What::Exported(exported) => exported::run(exported),
        What::Models(models) => models::run(models),
        What::Launch(launch) => launch::run(launch),
        What::Lora(lora) => lora::run(lora),
        What::Checkpoint(checkpoint) => checkpoint::run(checkpoint),
        What::Config(config) => config::run(config),
        What::Quant => quant::run(),
        What::Trackers(trackers) => trackers::run(trackers),
    }
}

fn run_ddp(arguments: &Ddp) -> Result<()> {
    libtorch::ensure()?;
    let environment = Environment::ensure()?;
    ranks::build()?;
    let work = paths::target_folder().join("parity");
    let most_ranks = arguments.world_sizes.iter().copied().max().context("no world size was given")?;
    let case = make_case(&environment, &work.join("case"), arguments.steps * arguments.batch_size * most_ranks)?;
    println!("reference: {}", environment.versions);

    let mut failed = 0;
    for optimizer in &arguments.optimizers {
        for &world_size in &arguments.world_sizes {
            let run = Run { case: &case, optimizer, world_size, arguments };
            let (theirs, ours) = (work.join("python"), work.join("rust"));
            run.train_theirs(&environment, &theirs)?;
            run.train_ours(&ours)?;
            let difference = compare::folders(&ours, &theirs)?;
            let Difference { loss, parameter } = difference;
            let is_equal = difference.is_within(BOUND);
            failed += usize::from(!is_equal);
            println!(
                "parity=ddp optimizer={optimizer} world_size={world_size} steps={} max_loss_diff={loss:.3e} \
                 max_param_rel_diff={parameter:.3e} {}",
                arguments.steps,
                if is_equal { "ok" } else { "FAILED" },
            );
        }
    }
    let batch_norm = batch_norm::run(&arguments.batch_norm_world_sizes);
    if failed > 0 {
        bail!("{failed} cases differ by more than {:e} (losses) or {:e} (parameters)", BOUND.loss, BOUND.parameter);
    }
    batch_norm
}

/// Writes weights and rows with the Python generator, and returns the folder.
pub(crate) fn make_case(environment: &Environment, folder: &Path, rows: usize) -> Result<PathBuf> {
    let script = paths::repository_root().join("parity/make_case.py");
    let mut generator = environment.command();
    process::read(generator.arg(script).arg(folder).args(["--rows", &rows.to_string()]))?;
    Ok(folder.to_path_buf())
}

/// One case: an optimizer at a number of ranks.
struct Run<'a> {
    case: &'a Path,
    optimizer: &'a str,
    world_size: usize,
    arguments: &'a Ddp,
}

impl Run<'_> {
    fn train_theirs(&self, environment: &Environment, output: &Path) -> Result<()> {
        let mut command = environment.torchrun(self.world_size)?;
        command.arg(paths::repository_root().join("parity/ddp_train.py"));
        self.train(command, output)
    }

    fn train_ours(&self, output: &Path) -> Result<()> {
        let mut command = ranks::launch(self.world_size, &paths::release_binary("parity_ddp"));
        command.arg("--");
        self.train(command, output)
    }

    /// Both programs take the same arguments and write the same files.
    fn train(&self, mut command: std::process::Command, output: &Path) -> Result<()> {
        if output.exists() {
            fs::remove_dir_all(output).with_context(|| format!("could not remove {}", output.display()))?;
        }
        command.arg("--case").arg(self.case).args(["--optimizer", self.optimizer]);
        command.args(["--steps", &self.arguments.steps.to_string()]);
        command.args(["--batch_size", &self.arguments.batch_size.to_string()]);
        command.args(["--world_size", &self.world_size.to_string()]).arg("--output").arg(output);
        process::read(&mut command).map(drop)
    }
}
