//! `accelerate completions`: what a shell needs to complete flags and commands.

use std::error::Error;

use clap::{Args, CommandFactory};
use clap_complete::Shell;

/// Print a script that teaches a shell to complete this command.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    accelerate completions bash > ~/.local/share/bash-completion/completions/accelerate\n  \
    accelerate completions zsh > \"${fpath[1]}/_accelerate\"\n  \
    accelerate completions fish > ~/.config/fish/completions/accelerate.fish")]
pub(crate) struct Arguments {
    /// The shell to write for.
    shell: Shell,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut crate::Cli::command(), "accelerate", &mut script);
    Ok(crate::print_result(&String::from_utf8(script)?)?)
}
