//! `accelerate tpu-config`: the command by which the reference prepares the machines of a TPU.

use std::error::Error;
use std::path::{Path, PathBuf};

use accelerate_core::config::{ClusterConfig, ConfigFile};
use accelerate_core::files::ShownPath;
use accelerate_core::settings::{read_file, shortened};
use clap::Args;

use crate::config_file::{self, Found};

/// Print the command that runs commands on all machines of a TPU.
///
/// There is no TPU for libtorch without Python, so nothing is run: print it, look at it, and run it yourself. The commands are
/// those of --command, or of a file.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    accelerate tpu-config --tpu_name my-tpu --tpu_zone us-central1-a --command \"echo hello\"\n  \
    accelerate tpu-config --config_file tpu.yaml --install_accelerate | sh")]
pub(crate) struct Arguments {
    /// A configuration file (YAML or JSON) whose tpu_name, tpu_zone, command_file and commands fill what flags leave open.
    /// Without it, the default one if it exists.
    #[arg(long = "config_file", alias = "config-file", value_name = "FILE")]
    config_file: Option<PathBuf>,

    /// The name of the TPU.
    #[arg(long = "tpu_name", alias = "tpu-name", value_name = "NAME")]
    tpu_name: Option<String>,

    /// Its zone.
    #[arg(long = "tpu_zone", alias = "tpu-zone", value_name = "NAME")]
    tpu_zone: Option<String>,

    /// Print `gcloud alpha` in place of `gcloud`.
    #[arg(long = "use_alpha", alias = "use-alpha")]
    use_alpha: bool,

    /// A file whose lines are the commands.
    #[arg(long = "command_file", alias = "command-file", value_name = "FILE")]
    command_file: Option<PathBuf>,

    /// A command. May be given several times.
    #[arg(long, value_name = "COMMAND", num_args = 1..)]
    command: Vec<String>,

    /// Begin with installing Python Accelerate.
    #[arg(long = "install_accelerate", alias = "install-accelerate")]
    install_accelerate: bool,

    /// Which version of it: latest, dev, or a number.
    #[arg(long = "accelerate_version", alias = "accelerate-version", value_name = "VERSION", default_value = "latest")]
    accelerate_version: String,

    /// Print the command and run nothing: what happens without it, too.
    #[arg(long)]
    debug: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let file = match config_file::find(arguments.config_file.as_deref(), &config_file::variable) {
        Some(Found { path, is_default }) => {
            if is_default {
                let path = path.shown();
                crate::print_message(&format!(
                    "accelerate tpu-config: settings of {path} hold where flags say nothing"
                ));
            }
            ConfigFile::read(&config_file::read(&path)?, &path)?.into_partial().cluster
        }
        None => ClusterConfig::default(),
    };
    let words = words(arguments, file, &text_of)?;
    let command = shlex::try_join(words.iter().map(String::as_str))?;
    // As it is: what a filter of colours takes out of quoted words is missing in what a shell reads.
    Ok(crate::print_result(&format!("{command}\n"))?)
}

fn text_of(path: &Path) -> Result<String, String> {
    read_file(path).map_err(|cause| format!("{} cannot be read: {cause}", shortened(&path.shown())))
}

/// The words of the command. Flags go before the file's keys, and a file of commands before single ones, as in the reference.
fn words(
    arguments: &Arguments,
    file: ClusterConfig,
    read: &dyn Fn(&Path) -> Result<String, String>,
) -> Result<Vec<String>, String> {
    let wanted = |what: &str| {
        format!("the {what} of the TPU is not known; say --tpu_{what}, or tpu_{what} in a configuration file")
    };
    let name = arguments.tpu_name.clone().or(file.tpu_name).ok_or_else(|| wanted("name"))?;
    let zone = arguments.tpu_zone.clone().or(file.tpu_zone).ok_or_else(|| wanted("zone"))?;
    let is_in_flags = arguments.command_file.is_some() || !arguments.command.is_empty();
    let command_file = arguments.command_file.clone().or(file.command_file.filter(|_| !is_in_flags));
    let commands = match (command_file, arguments.command.as_slice()) {
        (Some(path), _) => read(&path)?.lines().map(str::to_owned).collect(),
        (None, []) => file.commands.unwrap_or_default(),
        (None, commands) => commands.to_vec(),
    };
    if commands.is_empty() {
        return Err("there is no command to run on the TPU; say --command or --command_file".to_owned());
    }
    let install =
        arguments.install_accelerate.then(|| format!("pip install {}", package(&arguments.accelerate_version)));
    let commands: Vec<_> = ["cd /usr/share".to_owned()].into_iter().chain(install).chain(commands).collect();

    let alpha = arguments.use_alpha.then_some("alpha");
    let words = ["gcloud"].into_iter().chain(alpha).chain(["compute", "tpus", "tpu-vm", "ssh", &name, "--zone", &zone]);
    let commands = commands.join("; ");
    Ok(words.chain(["--command", &commands, "--worker", "all"]).map(str::to_owned).collect())
}

/// What pip is to install.
fn package(version: &str) -> String {
    match version {
        "latest" => "accelerate -U".to_owned(),
        "dev" => "git+https://github.com/huggingface/accelerate.git".to_owned(),
        version => format!("accelerate=={version}"),
    }
}
