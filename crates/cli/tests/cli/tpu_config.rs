//! `accelerate tpu-config` prints the command that the reference would run.

use std::fs;

use rstest::rstest;

use crate::support::{accelerate, finished};

const FILE: &str = "tpu_name: of-file\ntpu_zone: there\ncommands:\n  - echo \"from a file\"\n";

#[rstest]
#[case::flags(
    &["--tpu_name", "a", "--tpu_zone", "b", "--command", "echo hello"],
    "gcloud compute tpus tpu-vm ssh a --zone b --command 'cd /usr/share; echo hello' --worker all"
)]
#[case::several_commands(
    &["--tpu-name", "a", "--tpu-zone", "b", "--command", "one", "--command", "two", "--debug"],
    "gcloud compute tpus tpu-vm ssh a --zone b --command 'cd /usr/share; one; two' --worker all"
)]
#[case::of_a_file(
    &["--config_file", "FILE"],
    "gcloud compute tpus tpu-vm ssh of-file --zone there --command 'cd /usr/share; echo \"from a file\"' --worker all"
)]
#[case::flags_before_a_file(
    &["--config_file", "FILE", "--tpu_name", "a", "--command", "x"],
    "gcloud compute tpus tpu-vm ssh a --zone there --command 'cd /usr/share; x' --worker all"
)]
#[case::installed(
    &["--config_file", "FILE", "--use_alpha", "--install_accelerate", "--accelerate_version", "1.2.0"],
    "gcloud alpha compute tpus tpu-vm ssh of-file --zone there --command 'cd /usr/share; pip install accelerate==1.2.0; echo \"from a file\"' --worker all"
)]
#[case::the_newest(
    &["--config_file", "FILE", "--install_accelerate"],
    "gcloud compute tpus tpu-vm ssh of-file --zone there --command 'cd /usr/share; pip install accelerate -U; echo \"from a file\"' --worker all"
)]
#[case::a_file_of_commands(
    &["--config_file", "FILE", "--command_file", "COMMANDS"],
    "gcloud compute tpus tpu-vm ssh of-file --zone there --command 'cd /usr/share; first; second' --worker all"
)]
fn the_command_is_printed(#[case] words: &[&str], #[case] wanted: &str) {
    let folder = tempfile::tempdir().unwrap();
    let [file, commands] = ["FILE", "COMMANDS"].map(|name| folder.path().join(name));
    fs::write(&file, FILE).unwrap();
    fs::write(&commands, "first\nsecond\n").unwrap();
    let mut command = accelerate();
    command.arg("tpu-config").args(words).current_dir(folder.path());
    let ended = finished(command);
    ended.expect(0, &[]);
    assert_eq!(ended.stdout, format!("{wanted}\n"));
}

#[rstest]
#[case(&["--tpu_zone", "b", "--command", "x"], "the name of the TPU is not known; say --tpu_name")]
#[case(&["--tpu_name", "a", "--command", "x"], "the zone of the TPU is not known")]
#[case(&["--tpu_name", "a", "--tpu_zone", "b"], "there is no command to run on the TPU")]
#[case(&["--tpu_name", "a", "--tpu_zone", "b", "--command_file", "/"], "/ cannot be read: it is a folder")]
#[case(&["--config_file", "nowhere.yaml"], "there is no configuration file nowhere.yaml")]
fn what_is_missing_is_named(#[case] words: &[&str], #[case] wanted: &str) {
    let mut command = accelerate();
    command.arg("tpu-config").args(words);
    let ended = finished(command);
    ended.expect(1, &[wanted]);
    assert_eq!(ended.stdout, "");
}

/// As with Python's command, the default file counts where no other one is named.
#[test]
fn the_default_file_fills_what_flags_leave_open() {
    let home = tempfile::tempdir().unwrap();
    fs::create_dir(home.path().join("accelerate")).unwrap();
    fs::write(home.path().join("accelerate/default_config.yaml"), FILE).unwrap();
    let run = |words: &[&str]| {
        let mut command = accelerate();
        command.arg("tpu-config").args(words).env("HF_HOME", home.path());
        finished(command)
    };
    let ended = run(&["--tpu_zone", "here"]);
    ended.expect(0, &["default_config.yaml hold where flags say nothing"]);
    assert!(
        ended.stdout.contains("ssh of-file --zone here --command 'cd /usr/share; echo \"from a file\"'"),
        "{ended:?}"
    );
    fs::write(home.path().join("accelerate/default_config.yaml"), "tpu_nam: a\n").unwrap();
    run(&[]).expect(1, &["default_config.yaml:1:1: there is no key \"tpu_nam\"", "\"tpu_name\""]);
}

/// What a shell is to read arrives as it was quoted.
#[test]
fn control_sequences_stay_within_their_quotes() {
    let mut command = accelerate();
    command.args(["tpu-config", "--tpu_name", "x\u{1b}]", "--tpu_zone", "z", "--command", "\u{7}'; touch pwned; #"]);
    let words = shlex::split(&finished(command).stdout).unwrap();
    assert!(words.contains(&"x\u{1b}]".to_owned()), "{words:?}");
    assert!(words.contains(&"cd /usr/share; \u{7}'; touch pwned; #".to_owned()), "{words:?}");
}
