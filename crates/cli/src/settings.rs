//! Flags that the table of settings gives: help, completion and reading of each come from its declaration.

use std::ffi::OsStr;
use std::marker::PhantomData;

use accelerate_core::config::settings;
use accelerate_core::files::ShownPath;
use accelerate_core::settings::{Setting, Standing, ValueKind, shortened};
use clap::builder::{PossibleValue, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

/// Which settings a subcommand has flags for.
pub(crate) trait Selection: std::fmt::Debug {
    /// Is it one of them?
    fn includes(setting: &Setting) -> bool;

    /// The flag as the subcommand has it.
    fn adjust(_flag: &str, argument: Arg) -> Arg {
        argument
    }
}

/// Every flag of the table is one of `accelerate launch`, and of what explains a launch.
#[derive(Debug)]
pub(crate) struct AllSettings;

impl Selection for AllSettings {
    fn includes(_: &Setting) -> bool {
        true
    }

    fn adjust(flag: &str, argument: Arg) -> Arg {
        argument.hide_short_help(!IN_SHORT_HELP.contains(&flag))
    }
}

/// The flags of settings that `-h` shows of a subcommand that is not `launch`.
const IN_SHORT_HELP: [&str; 6] =
    ["num_processes", "mixed_precision", "cpu", "num_machines", "use_fsdp", "use_deepspeed"];

/// Where the others are.
pub(crate) const SHORT_HELP: &str =
    "Every other setting of `accelerate launch` has its flag here, too: --help shows all of them, and examples.";

/// What was typed, in the order of the table.
#[derive(Debug)]
pub(crate) struct SettingFlags<S> {
    pub(crate) said: Vec<(&'static Setting, String)>,
    selection: PhantomData<S>,
}

impl<S: Selection> SettingFlags<S> {
    fn selected() -> impl Iterator<Item = (&'static Setting, &'static str)> {
        settings().filter(|setting| S::includes(setting)).filter_map(|setting| Some((setting, setting.flag()?)))
    }
}

impl<S: Selection> FromArgMatches for SettingFlags<S> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self { said: Vec::new(), selection: PhantomData };
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for (setting, flag) in Self::selected() {
            if setting.is_switch() && matches.get_flag(flag) {
                self.said.push((setting, "true".to_owned()));
            } else if !setting.is_switch()
                && let Some(text) = matches.get_one::<String>(flag)
            {
                self.said.push((setting, text.clone()));
            }
        }
        Ok(())
    }
}

impl<S: Selection> Args for SettingFlags<S> {
    fn augment_args(command: Command) -> Command {
        Self::selected().fold(command, |command, (setting, flag)| command.arg(S::adjust(flag, argument(setting, flag))))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// Both spellings of a flag and its other names, with `-` and `_`.
fn spellings(flag: &'static str, aliases: &'static [&'static str]) -> Vec<String> {
    let names = std::iter::once(flag).chain(aliases.iter().copied());
    let all = names.flat_map(|name| [name.to_owned(), name.replace('_', "-")]);
    all.filter(|name| name != flag).collect()
}

fn argument(setting: &'static Setting, flag: &'static str) -> Arg {
    let argument = Arg::new(flag)
        .long(flag)
        .aliases(spellings(flag, setting.flag_aliases()))
        .help(setting.help())
        .long_help(long_help(setting))
        // What is refused is known, so that it is refused by name; nobody needs to read of it.
        .hide(matches!(setting.standing(), Standing::Refused(_)));
    let argument = match heading(setting.section) {
        Some(heading) => argument.help_heading(heading),
        None => argument,
    };
    match setting.is_switch() {
        true => argument.action(ArgAction::SetTrue),
        false => argument
            .value_name(setting.kind.placeholder())
            .value_parser(SettingParser(setting))
            .hide_possible_values(true),
    }
}

/// The group of flags that a section of files is.
pub(crate) fn heading(section: &str) -> Option<&'static str> {
    match section {
        "fsdp_config" => Some("Sharding (FSDP), for a program that leaves it open"),
        "deepspeed_config" => Some("Sharding (DeepSpeed configurations), for a program that leaves it open"),
        "dynamo_config" => Some("Compiled models, for a program that leaves it open"),
        "fp8_config" => Some("Computing in FP8"),
        "parallelism_config" => Some("Several axes of processes"),
        _ => None,
    }
}

fn long_help(setting: &Setting) -> String {
    let mut paragraphs = vec![setting.help(), setting.details()];
    match setting.standing() {
        Standing::Honoured => {}
        Standing::WithoutEffect(why) => paragraphs.push(format!("It is accepted and has no effect: {why}.")),
        Standing::Refused(why) if setting.is_for_python() => {
            paragraphs.push(format!("Programs in Python get it; for others it is refused: {why}."));
        }
        Standing::Refused(why) => paragraphs.push(format!("It is refused: {why}.")),
    }
    let variable = setting.variable().map(|name| format!("Variable {name}, ")).unwrap_or_default();
    paragraphs.push(format!("[{variable}key {} of a file]", setting.path.replace(setting.field, setting.key())));
    paragraphs.retain(|paragraph| !paragraph.is_empty());
    paragraphs.join("\n\n")
}

/// Takes what the setting's type reads, and says otherwise what would be possible.
#[derive(Clone, Debug)]
struct SettingParser(&'static Setting);

impl TypedValueParser for SettingParser {
    type Value = String;

    fn parse_ref(&self, command: &Command, argument: Option<&Arg>, value: &OsStr) -> Result<String, clap::Error> {
        let flag = argument.and_then(Arg::get_long).unwrap_or(self.0.field);
        let Some(text) = value.to_str().map(str::to_owned) else {
            let message = format!("--{flag} is {}, which is no UTF-8; settings are texts in UTF-8\n", value.shown());
            return Err(clap::Error::raw(ErrorKind::InvalidUtf8, message).with_cmd(command));
        };
        if self.0.is_value(&text) {
            return Ok(text);
        }
        let message = format!("--{flag} is {:?}, but must be {}\n", shortened(&text), self.0.wanted_for(&text));
        Err(clap::Error::raw(ErrorKind::ValueValidation, message).with_cmd(command))
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        match self.0.kind {
            ValueKind::Choice(names) => Some(Box::new(names.iter().map(PossibleValue::new))),
            ValueKind::Bool => Some(Box::new(["true", "false"].into_iter().map(PossibleValue::new))),
            _ => None,
        }
    }
}
