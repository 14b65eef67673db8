//! `accelerate completions`: what a shell needs to complete flags and commands.

use std::error::Error;

use clap::{Arg, Args, Command, CommandFactory};
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
    clap_complete::generate(arguments.shell, &mut with_all_spellings(crate::Cli::command()), "accelerate", &mut script);
    Ok(crate::print_result(&String::from_utf8(script)?)?)
}

/// The command, in which shells see that each flag may be spelled with `-` in place of `_`, too. Help leaves that out.
fn with_all_spellings(command: Command) -> Command {
    let shown = |argument: Arg| match argument.get_long().filter(|long| long.contains('_')) {
        Some(long) => {
            let spelled = long.replace('_', "-");
            // Among those that help leaves out it would be there twice.
            let others: Vec<String> =
                argument.get_all_aliases().unwrap_or_default().into_iter().map(String::from).collect();
            let others = others.into_iter().filter(|alias| *alias != spelled);
            argument.alias(None::<&str>).aliases(others).visible_alias(spelled)
        }
        None => argument,
    };
    command.mut_args(shown).mut_subcommands(with_all_spellings)
}
