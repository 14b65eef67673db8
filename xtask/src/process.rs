//! Running other programs: what is run is shown, and a failure says which program and how it ended.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::paths;

/// `cargo <arguments>` at the root of the repository, with the cargo that runs this program.
pub(crate) fn cargo<A: AsRef<OsStr>>(arguments: &[A]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(paths::repository_root());
    forget_this_package(&mut command);
    command
}

/// A line as a user types it, in the shell.
pub(crate) fn shell(line: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", line]);
    forget_this_package(&mut command);
    command
}

/// Cargo sets these for the program it runs; a build script of the next build must not see them.
fn forget_this_package(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("CARGO_PKG_") {
            command.env_remove(name);
        }
    }
    command.env_remove("CARGO_MANIFEST_DIR").env_remove("CARGO_MANIFEST_PATH");
}

/// Shows the command and runs it with this terminal; anything but success is an error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = show(command);
    let status = command.status().with_context(|| format!("could not start `{line}`"))?;
    if !status.success() {
        bail!("`{line}` ended with {status}");
    }
    Ok(())
}

/// Runs the command, shows its standard output as it comes, and returns it.
///
/// Standard error stays on this terminal.
pub(crate) fn run_and_read(command: &mut Command) -> Result<(bool, String)> {
    let line = show(command);
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("could not start `{line}`"))?;
    let mut text = String::new();
    if let Some(stdout) = child.stdout.take() {
        for row in BufReader::new(stdout).lines() {
            let row = row.with_context(|| format!("could not read what `{line}` printed"))?;
            println!("{row}");
            text.push_str(&row);
            text.push('\n');
        }
    }
    let status = child.wait().with_context(|| format!("could not wait for `{line}`"))?;
    Ok((status.success(), text))
}

/// Runs the command silently and returns its standard output; a failure shows what it printed.
pub(crate) fn read(command: &mut Command) -> Result<String> {
    let line = display(command);
    let output = command.output().with_context(|| format!("could not start `{line}`"))?;
    if !output.status.success() {
        let printed = String::from_utf8_lossy(&output.stderr);
        let last = last_lines(&printed, 20);
        bail!("`{line}` ended with {}:\n{last}", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The same command, which is ended with its process group after `limit`.
pub(crate) fn within(limit: Duration, command: &Command) -> Command {
    let mut limited = Command::new("timeout");
    limited.args(["--kill-after=5", &limit.as_secs().to_string()]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    limited
}

/// The last `count` lines of a text.
pub(crate) fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.trim_end().lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

fn show(command: &Command) -> String {
    let line = display(command);
    // A closed terminal is no reason not to run the command.
    let _ = writeln!(std::io::stderr(), "$ {line}");
    line
}

fn display(command: &Command) -> String {
    let root = paths::repository_root();
    let short = |text: &OsStr| {
        let path = std::path::Path::new(text);
        path.strip_prefix(&root).unwrap_or(path).display().to_string()
    };
    let program = std::path::Path::new(command.get_program());
    let name = program.file_name().map_or_else(|| program.display().to_string(), |n| n.display().to_string());
    std::iter::once(name).chain(command.get_args().map(short)).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use super::{last_lines, run_and_read, within};

    #[test]
    fn a_command_within_a_limit_keeps_its_arguments_and_variables_and_does_not_outlast_it() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $0 $SAID; exec cat /dev/zero > /dev/null", "one word"]).env("SAID", "two");
        let ended = run_and_read(&mut within(Duration::from_secs(1), &command));
        assert_eq!(ended.ok(), Some((false, "one word two\n".to_owned())));
    }

    #[test]
    fn the_last_lines_of_a_short_text_are_the_text() {
        for (text, count, want) in [("a\nb\nc\n", 2, "b\nc"), ("a\n", 5, "a"), ("", 3, ""), ("a\nb", 0, "")] {
            assert_eq!(last_lines(text, count), want, "{text:?} {count}");
        }
    }
}
