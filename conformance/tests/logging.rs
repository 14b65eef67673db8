//! What several processes write to standard error together.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate_launch::{LaunchConfig, Program, Silent, launch};
use rstest::rstest;

/// What three processes have written to one file, line by line.
fn written(script: &str, variables: &[(&str, &str)]) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("stderr");
    let variables = [("ACCELERATE_USE_CPU", "true")].iter().chain(variables);
    let config = LaunchConfig {
        args: vec!["-c".into(), "exec \"$0\" \"$1\" 2>>\"$2\"".into(), env!("CARGO_BIN_EXE_conformance").into()],
        environment: variables.map(|(name, value)| ((*name).into(), (*value).into())).collect(),
        num_cpu_threads_per_process: Some(1),
        ..LaunchConfig::new(Program::Executable("sh".into()), 3)
    };
    let config = LaunchConfig { args: [config.args, vec![script.into(), file.clone().into()]].concat(), ..config };
    let outcome = launch(&config, &mut Silent);
    let text = std::fs::read_to_string(&file).unwrap();
    if let Err(error) = outcome {
        panic!("{error}\n{text}");
    }
    text.lines().map(str::to_owned).collect()
}

const SETTING: &str = "accelerate: warning: ddp_config.check_reduction is true (code), which has no effect: ";

/// The messages of the script, each with the least level at which it is written.
fn messages() -> Vec<(usize, String)> {
    let fixed = [
        (2, SETTING),
        (0, "script: debug: a debug message"),
        (1, "script: info: an info"),
        (2, "script: warning: once"),
        (3, "script: error: an error"),
        (4, "script: critical: a critical error"),
    ];
    let in_order = (0..5).flat_map(|round| (0..3).map(move |rank| (round, rank)));
    let in_order =
        in_order.map(|(round, rank)| (2, format!("script: warning: rank {rank}: round {round}, process {rank}")));
    let fixed = fixed.map(|(level, text)| (level, text.to_owned())).into_iter();
    fixed.chain(in_order).chain([(3, "strict: error: said".to_owned())]).collect()
}

#[rstest]
#[case::default(None, 2)]
#[case::debug(Some("debug"), 0)]
#[case::info(Some("info"), 1)]
#[case::error(Some("error"), 3)]
#[case::critical(Some("CRITICAL"), 4)]
fn without_a_subscriber_the_main_process_speaks(#[case] level: Option<&str>, #[case] least: usize) {
    let variables: Vec<_> = level.map(|level| ("ACCELERATE_LOG_LEVEL", level)).into_iter().collect();
    let lines = written("test_logging", &variables);
    // A logger with a level of its own goes by that.
    let is_written = |(level, text): &(usize, String)| least <= *level || text.starts_with("strict");
    let wanted: Vec<String> = messages().into_iter().filter(is_written).map(|(_, text)| text).collect();
    assert_eq!(lines.len(), wanted.len(), "{lines:#?}");
    for (line, wanted) in lines.iter().zip(wanted) {
        assert!(if wanted == SETTING { line.starts_with(SETTING) } else { *line == wanted }, "{line}, not {wanted}");
    }
}

#[test]
fn a_subscriber_gets_everything_and_decides() {
    let lines = written("test_logging_with_subscriber", &[("ACCELERATE_LOG_LEVEL", "critical")]);
    assert!(lines.iter().all(|line| !line.starts_with("script:") && !line.starts_with("accelerate:")), "{lines:#?}");
    for wanted in [
        "DEBUG accelerate::logging message=a debug message logger=\"script\" rank=0",
        "WARN accelerate::logging message=once logger=\"script\" rank=0",
        "WARN accelerate::logging message=round 4, process 2 logger=\"script\" rank=2",
        "ERROR accelerate::logging message=a critical error logger=\"script\" rank=0 critical=true",
    ] {
        assert_eq!(lines.iter().filter(|line| *line == wanted).count(), 1, "{wanted}: {lines:#?}");
    }
    let of_library =
        |line: &&String| line.starts_with("WARN accelerate::accelerator::builder") && line.contains("check_reduction");
    assert_eq!(lines.iter().filter(of_library).count(), 1, "{lines:#?}");
    assert!(!lines.iter().any(|line| line.contains("not said")), "{lines:#?}");
}
