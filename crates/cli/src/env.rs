//! `accelerate env`: what to put into a report when something does not work.
//!
//! Nothing is linked for it, and only Python is started, which says its version. All other facts are read from files and
//! variables.

use accelerate_core::names::counted;
use std::error::Error;
use std::ffi::{CStr, OsString};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use accelerate_core::config::{ConfigFile, settings};
use accelerate_core::files::{ShownPath, printable};
use accelerate_core::settings::{ORIGINS_VARIABLE, Setting, shortened};
use accelerate_launch::{Program, ProgramSearch, num_visible_gpus, resolve_program};
use accelerate_setup::{Libtorch, VERSION};
use clap::Args;

use crate::config_file::{self, ConfigFileError, Found};
use crate::versions::version;

/// Show versions, machine and settings, for a report when something does not work.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    accelerate env\n  \
    accelerate env --config_file run.yaml")]
pub(crate) struct Arguments {
    /// The configuration file to show. Without it, the default one if it exists.
    #[arg(long = "config_file", alias = "config-file", value_name = "FILE")]
    config_file: Option<PathBuf>,
}

/// # Errors
///
/// A file that somebody has named and that cannot be read, after everything else has been shown.
pub(crate) fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let mut text = String::new();
    for (name, value) in facts() {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "- {name}: {value}");
    }
    let found = config_file::find(arguments.config_file.as_deref(), &config_file::variable);
    let content = found.as_ref().map(|found| config_file::read(&found.path));
    text += &configuration(found.as_ref(), content.as_ref());
    crate::print_result(&text)?;
    match content {
        Some(Err(unreadable)) if arguments.config_file.is_some() => Err(unreadable.into()),
        _ => Ok(()),
    }
}

fn facts() -> Vec<(&'static str, String)> {
    let executable = std::env::current_exe().map_or_else(|error| error.to_string(), |path| path.shown());
    let mut facts = vec![
        ("accelerate version", env!("CARGO_PKG_VERSION").to_string()),
        ("accelerate executable", executable),
        ("libtorch", libtorch()),
        ("platform", platform()),
        ("processor", processor()),
        ("memory", memory(&read("/proc/meminfo"))),
        ("GPU", gpus()),
        ("Python", python()),
    ];
    let mut variables: Vec<_> =
        std::env::vars_os().map(|(name, value)| (name.to_string_lossy().into_owned(), value)).collect();
    variables.sort();
    let relevant = variables.iter().filter(|(name, _)| is_relevant(name));
    // One line, whatever is in a variable.
    let in_a_line =
        |(name, value): &(String, OsString)| shown(name, &value.to_string_lossy()).escape_debug().to_string();
    let settings: Vec<_> = relevant.map(in_a_line).collect();
    facts.push(("environment", if settings.is_empty() { "nothing set".to_string() } else { settings.join(" ") }));
    facts
}

/// The configuration file and what it says, one setting in a line. A report is for others, so what may be secret is not shown.
fn configuration(found: Option<&Found>, content: Option<&Result<String, ConfigFileError>>) -> String {
    let (Some(Found { path, is_default }), Some(content)) = (found, content) else {
        return "- configuration file: none\n".to_owned();
    };
    let which = if *is_default { " (the default one)" } else { "" };
    let mut text = format!("- configuration file: {}{which}\n", path.shown());
    let (file, errors) = match content {
        Ok(content) => ConfigFile::read_all(content, path),
        Err(error) => return text + &format!("  error: {}\n", printable(&error.to_string())),
    };
    for (setting, value, _) in file.said() {
        let is_hidden = setting.hides(&value) || (is_secret(setting.field) && !setting.is_secret());
        let value = if is_hidden { "(not shown)".to_owned() } else { shortened(&value).escape_debug().to_string() };
        let _ = writeln!(text, "  {}: {value}", setting.path);
    }
    for error in errors {
        let _ = writeln!(text, "  error: {}", printable(&error.to_string()));
    }
    text
}

/// A variable as the report has it. That a secret is set may matter, and what it is never does.
pub(crate) fn shown(name: &str, value: &str) -> String {
    let value = if is_secret(name) { "(not shown)" } else { value };
    format!("{name}={value}")
}

/// May the variable hold something that nobody else is to know?
pub(crate) fn is_secret(name: &str) -> bool {
    const SECRETS: [&str; 7] = ["KEY", "PASSWORD", "PASSWD", "SECRET", "TOKEN", "CREDENTIAL", "AUTH"];
    let name = name.to_ascii_uppercase();
    let is_named = |setting: &Setting| setting.is_secret() && setting.variable().as_ref() == Some(&name);
    SECRETS.iter().any(|secret| name.contains(secret)) || settings().any(is_named)
}

/// Variables that change how ranks are started or what they do. Never everything: there are secrets among the others.
fn is_relevant(name: &str) -> bool {
    const NAMES: [&str; 17] = [
        ORIGINS_VARIABLE,
        "CUDA_VISIBLE_DEVICES",
        "HF_HOME",
        "LD_LIBRARY_PATH",
        "LIBTORCH",
        "LIBTORCH_USE_PYTORCH",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "RANK",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "WORLD_SIZE",
        "XDG_CACHE_HOME",
    ];
    const PREFIXES: [&str; 4] = ["ACCELERATE_", "GLOO_", "NCCL_", "TORCH_"];
    let is_setting = || settings().any(|setting| setting.variable().as_deref() == Some(name));
    NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix)) || is_setting()
}

/// Which libtorch a build in the current folder uses, or would use after `accelerate setup`.
fn libtorch() -> String {
    let current_folder = std::env::current_dir().unwrap_or_default();
    match accelerate_setup::find(&current_folder) {
        Ok(Some(Libtorch { folder, origin })) => format!("{VERSION} in {} ({origin})", folder.shown()),
        Ok(None) => format!("not found; {VERSION} is wanted, and `accelerate setup` installs it"),
        Err(error) => error.to_string(),
    }
}

fn platform() -> String {
    let system = rustix::system::uname();
    let text = |value: &CStr| value.to_string_lossy().into_owned();
    let distribution = quoted_value(&read("/etc/os-release"), "PRETTY_NAME").unwrap_or_else(|| "unknown system".into());
    format!("{distribution}, {} {} on {}", text(system.sysname()), text(system.release()), text(system.machine()))
}

fn quoted_value(os_release: &str, name: &str) -> Option<String> {
    let value = os_release.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))?;
    Some(value.trim_matches('"').to_string())
}

fn processor() -> String {
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{}, {}", model_name(&read("/proc/cpuinfo")).unwrap_or("unknown model"), counted(usable, "usable core"))
}

fn model_name(cpuinfo: &str) -> Option<&str> {
    cpuinfo.lines().find(|line| line.starts_with("model name"))?.split_once(':').map(|(_, name)| name.trim())
}

fn memory(meminfo: &str) -> String {
    let gib = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib / f64::from(1 << 20))
    };
    match (gib("MemTotal"), gib("MemAvailable")) {
        (Some(total), Some(available)) => format!("{total:.1} GiB, {available:.1} GiB available"),
        _ => "unknown".to_string(),
    }
}

fn gpus() -> String {
    let visible = num_visible_gpus(Path::new("/dev"), std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref());
    let mut models: Vec<String> = fs::read_dir("/proc/driver/nvidia/gpus")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| gpu_model(&fs::read_to_string(entry.path().join("information")).ok()?))
        .collect();
    models.sort();
    let driver = fs::read_to_string("/sys/module/nvidia/version").map(|text| format!(", driver {}", text.trim()));
    match (visible, models.is_empty()) {
        (0, true) => "none".to_string(),
        (_, true) => format!("{visible} visible{}", driver.unwrap_or_default()),
        _ => format!("{visible} visible of {}{}", models.join(", "), driver.unwrap_or_default()),
    }
}

fn gpu_model(information: &str) -> Option<String> {
    information.lines().find_map(|line| line.strip_prefix("Model:")).map(|model| model.trim().to_string())
}

/// The version of the interpreter that `accelerate launch` would use for a script, and where it is.
fn python() -> String {
    let found = resolve_program(&Program::PythonModule("x".into()), &ProgramSearch::of_this_process());
    let Some(program) = found.ok().and_then(|command| command.into_iter().next()) else { return "none".to_string() };
    let path = Path::new(&program).shown();
    match version(&program) {
        Ok(Some(version)) if !version.is_empty() => {
            format!("{} in {path}", version.strip_prefix("Python ").unwrap_or(&version))
        }
        Ok(_) => format!("unknown version in {path}"),
        Err(error) => format!("unknown version in {path}: {}", printable(&error)),
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_found_in_the_kernels_files() {
        assert_eq!(memory("MemTotal:  25165824 kB\nMemAvailable: 1048576 kB\n"), "24.0 GiB, 1.0 GiB available");
        assert_eq!(memory(""), "unknown");
        assert_eq!(model_name("processor: 0\nmodel name\t: Some CPU @ 2 GHz\n"), Some("Some CPU @ 2 GHz"));
        assert_eq!(quoted_value("NAME=x\nPRETTY_NAME=\"Debian 12\"\n", "PRETTY_NAME"), Some("Debian 12".into()));
        assert_eq!(gpu_model("Model: \t\t NVIDIA H200\nIRQ: 1\n"), Some("NVIDIA H200".into()));
    }

    #[test]
    fn secrets_stay_secret() {
        assert!(
            is_relevant("ACCELERATE_USE_CPU")
                && is_relevant("FSDP_VERSION")
                && is_relevant("NCCL_DEBUG")
                && is_relevant("RANK")
        );
        for name in [
            "HF_TOKEN",
            "ACCELERATE_SECRET_KEY",
            "ACCELERATE_API_KEY",
            "ACCELERATE_RUN_SECRET",
            "ACCELERATE_HUB_TOKEN",
            "ACCELERATE_hub_token",
            "ACCELERATE_DB_PASSWORD",
            "ACCELERATE_TPU_ENV",
            "NCCL_TOKEN",
            "AWS_SECRET_ACCESS_KEY",
            "HOME",
            "PATH",
            "WANDB_API_KEY",
        ] {
            assert!(!is_relevant(name) || shown(name, "abc123") == format!("{name}=(not shown)"), "{name}");
        }
        assert_eq!(shown("ACCELERATE_USE_CPU", "true"), "ACCELERATE_USE_CPU=true");
    }
}
