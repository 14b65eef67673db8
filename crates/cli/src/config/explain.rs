//! `accelerate config explain`: which settings hold, and who said so.

use std::error::Error;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use accelerate_core::config::{PartialRunConfig, RunConfig, settings};
use accelerate_core::files::{ShownPath, printable};
use accelerate_core::settings::{Origin, Setting, shortened};
use accelerate_launch::Program;
use clap::Args;
use serde_json::{Value, json};

use crate::config_file;
use crate::resolve::{Resolved, num_processes, resolve, warnings, why_num_processes};
use crate::settings::{AllSettings, SHORT_HELP, SettingFlags};

/// Show which settings hold for a launch, where each one comes from, and what it goes before.
///
/// It takes the flags of `accelerate launch`, so put `config explain` in the place of `launch`. Nothing is started. A
/// flag goes before a variable, a variable before the configuration file, and that before the default. Settings are called as
/// configuration files call them, with their sections.
#[derive(Debug, Args)]
#[command(after_help = SHORT_HELP)]
#[command(after_long_help = "Examples:\n  \
    accelerate config explain\n  \
    accelerate config explain --config_file run.yaml --mixed_precision bf16\n  \
    accelerate config explain --all\n  \
    accelerate config explain --json | jq '.settings[] | select(.origin.kind == \"file\")'")]
pub(crate) struct Arguments {
    /// Show all settings, not only those that somebody has said.
    #[arg(long)]
    all: bool,

    /// Print an object in JSON with all settings.
    ///
    /// Its keys are config_file (path and is_default, or null), num_processes, settings and messages. Of each setting it
    /// has the key that files have for it (setting), value, default, origin (kind: flag, variable, file, derived or default; with name, or path,
    /// line and column) and overridden (a list of values with their origins).
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    settings: SettingFlags<AllSettings>,

    /// A configuration file (YAML or JSON). Without it, the default one if it exists.
    #[arg(long = "config_file", alias = "config-file", value_name = "FILE")]
    config_file: Option<PathBuf>,

    /// The program is the name of a Python module.
    #[arg(short = 'm', long)]
    module: bool,

    /// The program, if that matters: engines in Python have some settings that those here refuse.
    #[arg(value_names = ["PROGRAM", "ARGUMENTS"], num_args = 0.., trailing_var_arg = true)]
    program: Vec<OsString>,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Box<dyn Error>> {
    if let (Some(program), None) = (arguments.program.first(), &arguments.config_file) {
        refuse_file(Path::new(program))?;
    }
    let flags = arguments.settings.said.clone();
    let is_python = |program: &OsString| arguments.module || Program::guess(Path::new(program)).is_python();
    let is_for_python = arguments.program.first().is_some_and(is_python);
    let resolved = resolve(flags, arguments.config_file.as_deref(), is_for_python, &config_file::variable)?;
    let text = match arguments.json {
        true => format!("{:#}\n", as_json(&resolved)),
        false => as_table(&resolved, arguments.all),
    };
    crate::print_result(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// A file of settings in the place of the program.
#[derive(Debug, thiserror::Error)]
#[error("{shown} stands where a program does, and looks like a configuration file; write --config_file {shown}")]
struct FileAsProgram {
    shown: String,
}

fn refuse_file(program: &Path) -> Result<(), FileAsProgram> {
    let is_file = program.extension().is_some_and(|it| ["yaml", "yml", "json"].iter().any(|known| it == *known));
    let shown = program.shown();
    if is_file { Err(FileAsProgram { shown }) } else { Ok(()) }
}

/// What a value is shown as: one line, and no secret.
fn shown(setting: &Setting, value: &str) -> String {
    match setting.hides(value) {
        true => "(not shown)".to_owned(),
        false => shortened(value).escape_debug().to_string().replace("\\\"", "\"").replace("\\'", "'"),
    }
}

fn as_table(Resolved { run, file }: &Resolved, is_all: bool) -> String {
    let said = PartialRunConfig::from(run.clone());
    let (explained, defaults): (Vec<_>, Vec<_>) = settings().partition(|setting| is_said(run, setting));
    let num_hidden = if is_all { 0 } else { defaults.len() };
    let shown_defaults = defaults.into_iter().filter(|_| is_all);
    let rows: Vec<_> = explained
        .into_iter()
        .chain(shown_defaults)
        .map(|setting| {
            let value = said.text(setting).map_or_else(|| "(nothing)".to_owned(), |value| shown(setting, &value));
            (setting.file_key(), value, origin_with_overridden(run, setting))
        })
        .collect();
    let width = |column: fn(&(String, String, String)) -> usize| rows.iter().map(column).max().unwrap_or(0);
    let (keys, values) = (width(|row| row.0.len()), width(|row| row.1.chars().count()).min(40));
    let mut text = match file {
        Some(file) if file.is_default => format!("configuration file: {} (the default one)\n\n", file.path.shown()),
        Some(file) => format!("configuration file: {}\n\n", file.path.shown()),
        None => "configuration file: none\n\n".to_owned(),
    };
    // Writing to a string cannot fail.
    for (key, value, origin) in &rows {
        let _ = writeln!(text, "{key:keys$}  {value:values$}  {origin}");
    }
    if num_hidden > 0 {
        let gap = if rows.is_empty() { "" } else { "\n" };
        let _ = writeln!(text, "{gap}{num_hidden} settings have their defaults; --all shows them, too.");
    }
    if run.cluster.num_processes.is_none() {
        let _ = writeln!(text, "{} would start ({}).", counted_processes(run), why_num_processes(run));
    }
    for warning in warnings(run) {
        let _ = writeln!(text, "warning: {}", printable(&warning));
    }
    text
}

fn counted_processes(run: &RunConfig) -> String {
    match num_processes(run) {
        1 => "1 process".to_owned(),
        number => format!("{number} processes"),
    }
}

/// Has anybody said anything about it?
fn is_said(run: &RunConfig, setting: &Setting) -> bool {
    *run.origin(setting.path) != Origin::Default || run.overridden(setting.path).next().is_some()
}

fn origin_with_overridden(run: &RunConfig, setting: &Setting) -> String {
    let mut text = run.origin(setting.path).to_string();
    for (number, other) in run.overridden(setting.path).enumerate() {
        let joint = if number == 0 { ", goes before" } else { " and" };
        let _ = write!(text, "{joint} {} ({})", shown(setting, &other.value), other.origin);
    }
    text
}

fn as_json(Resolved { run, file }: &Resolved) -> Value {
    let said = PartialRunConfig::from(run.clone());
    let value = |setting: &Setting, text: Option<String>| match text {
        Some(text) if setting.hides(&text) => json!("(not shown)"),
        Some(text) => setting.json(&text),
        None => Value::Null,
    };
    let one = |setting: &'static Setting| {
        let others = run.overridden(setting.path);
        let overridden = others.map(|other| {
            json!({"value": value(setting, Some(other.value.clone())), "origin": origin_as_json(&other.origin)})
        });
        json!({
            "setting": setting.file_key(),
            "value": value(setting, said.text(setting)),
            "default": value(setting, setting.default()),
            "origin": origin_as_json(run.origin(setting.path)),
            "overridden": overridden.collect::<Vec<_>>(),
        })
    };
    json!({
        "config_file": file.as_ref().map(|file| json!({"path": file.path.to_string_lossy(), "is_default": file.is_default})),
        "num_processes": num_processes(run),
        "settings": settings().map(one).collect::<Vec<_>>(),
        "messages": warnings(run),
    })
}

fn origin_as_json(origin: &Origin) -> Value {
    match origin {
        Origin::Code => json!({"kind": "code"}),
        Origin::Flag(name) => json!({"kind": "flag", "name": name}),
        Origin::Environment(name) => json!({"kind": "variable", "name": name}),
        Origin::File { path, position } => {
            let (line, column) = (position.map(|position| position.line), position.map(|position| position.column));
            json!({"kind": "file", "path": path.to_string_lossy(), "line": line, "column": column})
        }
        Origin::Derived(from) => json!({"kind": "derived", "name": from}),
        Origin::Default => json!({"kind": "default"}),
    }
}
