//! Completions and manual pages: from the same definition as the flags, so that they know all of them.

use std::fs;

use accelerate_core::config::settings;
use accelerate_core::settings::{Setting, Standing};

use crate::support::{accelerate, finished};

/// Flags that somebody may want to type. What is refused is not offered.
fn flags() -> Vec<&'static str> {
    let offered = settings().filter(|setting| !matches!(setting.standing(), Standing::Refused(_)));
    offered.filter_map(Setting::flag).chain(["config_file", "no_python", "dry_run", "shutdown_grace_period"]).collect()
}

#[test]
fn completions_know_every_flag_and_every_command() {
    let mut command = accelerate();
    command.arg("--help");
    let help = finished(command).stdout;
    let commands =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| line.starts_with("  "));
    // What is indented further goes on with the line before.
    let commands = commands.filter(|line| !line.starts_with("   "));
    let commands: Vec<_> = commands.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(commands.contains(&"launch") && commands.contains(&"tpu-config"), "{help}");
    for shell in ["bash", "zsh", "fish"] {
        let mut command = accelerate();
        command.args(["completions", shell]);
        let script = finished(command);
        script.expect(0, &[]);
        for word in flags().iter().chain(&commands) {
            assert!(script.stdout.contains(word), "{word} is missing for {shell}");
        }
        for flag in flags().iter().filter(|flag| flag.contains('_')) {
            let spelled = flag.replace('_', "-");
            assert!(script.stdout.contains(&spelled), "{spelled} is missing for {shell}");
        }
    }
}

#[test]
fn manual_pages_know_every_flag() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("man/man1");
    let mut command = accelerate();
    command.args(["man", "--out"]).arg(&folder);
    finished(command).expect(0, &["wrote the manual pages into"]);
    let page = fs::read_to_string(folder.join("accelerate-launch.1")).unwrap();
    for flag in flags() {
        assert!(page.contains(&format!("\\-\\-{flag}")), "--{flag}");
    }
    assert!(page.contains("Start a program on one or many processes"));
    assert!(fs::read_to_string(folder.join("accelerate.1")).unwrap().contains("accelerate\\-launch(1)"));
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let mut command = accelerate();
    command.args(["man", "--out"]).arg(&file);
    finished(command).expect(1, &["the manual pages cannot be written into", file.to_str().unwrap()]);
}

#[test]
fn pages_take_the_place_of_links_and_pipes() {
    let folder = tempfile::tempdir().unwrap();
    let [victim, out] = ["victim", "pages"].map(|name| folder.path().join(name));
    fs::write(&victim, "mine").unwrap();
    fs::create_dir(&out).unwrap();
    std::os::unix::fs::symlink(&victim, out.join("accelerate.1")).unwrap();
    let mut command = accelerate();
    command.args(["man", "--out"]).arg(&out);
    finished(command).expect(0, &[]);
    assert_eq!(fs::read_to_string(&victim).unwrap(), "mine");
    assert!(fs::read_to_string(out.join("accelerate.1")).unwrap().contains("accelerate"));
}

/// What is outside of .nf and .fi is filled into paragraphs.
#[test]
fn examples_in_manual_pages_stay_as_they_are_typed() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = accelerate();
    command.args(["man", "--out"]).arg(folder.path());
    finished(command).expect(0, &[]);
    for (name, example) in [
        ("accelerate-launch.1", "    accelerate launch \\-\\-num_processes 2 target/release/train \\-\\-epochs 3"),
        ("accelerate-completions.1", "  accelerate completions fish > ~/.config/fish/completions/accelerate.fish"),
        ("accelerate.1", "  126, 127  the program of a launch cannot be run, or does not exist"),
    ] {
        let page = fs::read_to_string(folder.path().join(name)).unwrap();
        let (before, _) = page.split_once(&format!("\n{example}\n")).unwrap_or_else(|| panic!("{name}: {page}"));
        let [begun, ended] = ["\n.nf\n", "\n.fi\n"].map(|control| before.rfind(control));
        assert!(begun > ended, "{name}: {before}");
        assert!(!page.contains(".SH EXTRA"), "{name}");
    }
}
