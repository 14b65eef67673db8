//! Errors all look alike, and end the command with a documented code.

use rstest::rstest;

use crate::support::{Finished, accelerate, finished};

/// The codes that `accelerate --help` and the book explain.
const DOCUMENTED: [&str; 6] = ["0", "1", "2", "126, 127", "128 + N", "others"];

fn ended(words: &str) -> Finished {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("bad.yaml"), "num_process: 2\n").unwrap();
    let mut command = accelerate();
    command.args(words.split_whitespace()).current_dir(folder.path());
    finished(command)
}

#[rstest]
#[case::no_such_subcommand("lunch", 2, "accelerate: error: unrecognized subcommand 'lunch'")]
#[case::no_such_flag("launch --nonsense true", 2, "accelerate launch: error: unexpected argument '--nonsense'")]
#[case::refused_flag("launch --use_xpu true", 2, "accelerate launch: error: --use_xpu is refused")]
#[case::flag_of_torchrun(
    "launch --standalone true",
    2,
    "accelerate launch: error: --standalone is refused: it is torchrun's;"
)]
#[case::wrong_value("launch --num_processes x true", 2, "accelerate launch: error: --num_processes is \"x\"")]
#[case::no_program("launch", 2, "accelerate launch: error: the following required arguments were not provided")]
#[case::wrong_settings("launch --config_file bad.yaml true", 2, "accelerate launch: error: bad.yaml:1:")]
#[case::wrong_counts("launch --num_processes 0 true", 2, "accelerate launch: error: --num_processes is ")]
#[case::not_a_program("launch --num_processes 2 /dev/null", 126, "accelerate launch: error: /dev/null cannot be run")]
#[case::not_there(
    "launch --num_processes 2 ./train",
    127,
    "accelerate launch: error: the program ./train was not found"
)]
#[case::failed("launch --num_processes 1 false", 1, "accelerate launch: error: rank 0 ")]
#[case::wrong_settings_of_a_test("test --config_file bad.yaml", 2, "accelerate test: error: bad.yaml:1:")]
#[case::no_checks("test --program ./none", 2, "accelerate test: error: the program of the checks was not found")]
#[case::no_file_of_a_report(
    "env --config_file none.yaml",
    1,
    "accelerate env: error: there is no configuration file none.yaml"
)]
#[case::wrong_file("config explain --config_file bad.yaml", 1, "accelerate config: error: bad.yaml:1:")]
#[case::no_shell("completions dos", 2, "accelerate completions: error: invalid value 'dos'")]
#[case::no_tpu("tpu-config", 1, "accelerate tpu-config: error: the name of the TPU is not known")]
#[case::no_folder("man --out bad.yaml", 1, "accelerate man: error: the manual pages cannot be written into bad.yaml")]
fn an_error_says_who_speaks_and_has_its_code(#[case] words: &str, #[case] code: i32, #[case] wanted: &str) {
    let ended = ended(words);
    ended.expect(code, &[]);
    let line = ended.stderr.lines().find(|line| line.contains("error:")).unwrap_or_default();
    assert!(line.starts_with(wanted), "{wanted}\n{}", ended.stderr);
}

#[test]
fn checks_without_a_place_for_their_files_say_which() {
    let mut command = accelerate();
    command.args(["test", "--cpu", "--program", "true"]).env("TMPDIR", "/no/such/place");
    finished(command).expect(2, &["no folder for the checks can be made in /no/such/place; set TMPDIR", "caused by: "]);
}

#[test]
fn a_script_for_slurm_that_has_no_place_is_told_with_its_variable() {
    let mut command = accelerate();
    command.args(["launch", "--slurm", "true"]).env("TMPDIR", "/no/such/place");
    let place =
        "the script of the job cannot be written to /no/such/place, from where sbatch would read it; set TMPDIR";
    finished(command).expect(1, &[place, "caused by: "]);
}

/// A named file that cannot be read is an error, after a report of everything else.
#[test]
fn a_report_without_its_file_is_whole_otherwise() {
    for (file, why) in [
        ("none.yaml", "there is no configuration file none.yaml"),
        (".", "the configuration file . cannot be read: it is a folder"),
        ("/dev/zero", "the configuration file /dev/zero cannot be read: it is a device"),
    ] {
        let ended = ended(&format!("env --config_file {file}"));
        ended.expect(1, &[why]);
        assert!(ended.stdout.contains("- processor: ") && ended.stdout.contains(why), "{}", ended.stdout);
    }
}

#[test]
fn codes_are_explained_in_help_and_in_the_book() {
    let help = ended("--help").stdout;
    let rows: Vec<_> = help.lines().skip_while(|line| *line != "Exit codes:").skip(1).collect();
    let book = include_str!("../../../../docs/src/failures.md");
    assert_eq!(rows.len(), DOCUMENTED.len(), "{help}");
    for (row, code) in rows.iter().zip(DOCUMENTED) {
        assert!(row.trim_start().starts_with(code), "{row}");
        let cell: Vec<_> = code.split(", ").map(|code| format!("`{code}`")).collect();
        assert!(book.contains(&format!("| {} |", cell.join(", "))), "{code}");
    }
}

/// Variables with a slip in their names, and the settings that were meant.
#[rstest]
#[case("ACCELERATE_MIXED_PRECISON", Some("ACCELERATE_MIXED_PRECISION"))]
#[case("ACCELERATE_USE_FDSP", Some("ACCELERATE_USE_FSDP"))]
#[case("ACCELERATE_NUM_PROCESES", Some("ACCELERATE_NUM_PROCESSES"))]
#[case("FSDP_SHARDING_STRATEGIE", Some("FSDP_SHARDING_STRATEGY"))]
#[case::another_name("ACCELERATE_OF_MY_OWN", None)]
#[case::of_another_program("MIXED_PRECISON", None)]
#[case::of_the_launcher_itself("ACCELERATE_RUN_SECRET", None)]
#[case::a_setting("ACCELERATE_USE_CPU", None)]
fn a_variable_with_a_slip_is_told_of_and_stops_nothing(#[case] name: &str, #[case] meant: Option<&str>) {
    for flags in [&["--num_processes", "1"][..], &["--num_processes", "1", "--quiet"]] {
        let mut command = accelerate();
        command.arg("launch").args(flags).arg("true").env(name, "true");
        let ended = finished(command);
        ended.expect(0, &[]);
        let wanted = meant.filter(|_| flags.len() == 2).map(|meant| {
            format!("accelerate launch: the variable {name} is no setting and has no effect; {meant} would have one\n")
        });
        assert_eq!(ended.stderr, wanted.unwrap_or_default());
    }
}
