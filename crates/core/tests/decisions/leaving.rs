//! When a run has to be over, from every form in which people and Slurm write it.

use accelerate_core::config::{ClusterConfig, ClusterSettings, ConfigFile, RunConfig, Sources};
use rstest::rstest;
use std::time::{Duration, SystemTime};

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

fn said_by(name: &str, value: &str) -> accelerate_core::Result<ClusterSettings> {
    let lookup = |asked: &str| (asked == name).then(|| value.to_owned());
    RunConfig::resolve(Sources { environment: Some(&lookup), ..Default::default() }).map(|run| run.cluster)
}

#[rstest]
#[case::with_offset("2030-01-31T18:00:00+01:00", 1_896_109_200)]
#[case::utc("2030-01-31T17:00:00Z", 1_896_109_200)]
#[case::as_date_rfc_3339_prints_it("2030-01-31 18:00:00+01:00", 1_896_109_200)]
#[case::seconds("1896109200", 1_896_109_200)]
#[case::surrounded(" 1896109200\n", 1_896_109_200)]
fn a_time_is_a_date_with_its_offset_or_seconds_since_1970(#[case] text: &str, #[case] seconds: u64) {
    assert_eq!(said_by("ACCELERATE_STOP_AT", text).unwrap().run_end(), Some(at(seconds)));
    let file = Some(ConfigFile::read(&format!("stop_at: \"{}\"\n", text.trim()), "run.yaml".as_ref()).unwrap());
    let run = RunConfig::resolve(Sources { file, ..Default::default() }).unwrap();
    assert_eq!(run.cluster.stop_at, Some(at(seconds)));
    // What a launcher hands on means the same.
    let variables = run.variables();
    assert_eq!(said_by("ACCELERATE_STOP_AT", &variables["ACCELERATE_STOP_AT"]).unwrap().stop_at, Some(at(seconds)));
}

#[rstest]
#[case::no_offset("ACCELERATE_STOP_AT", "2030-01-31T18:00:00")]
#[case::no_time("ACCELERATE_STOP_AT", "2030-01-31")]
#[case::no_date("ACCELERATE_STOP_AT", "18:00")]
#[case::a_length_of_time("ACCELERATE_STOP_AT", "3600")]
#[case::a_year("ACCELERATE_STOP_AT", "2030")]
#[case::milliseconds("ACCELERATE_STOP_AT", "1896109200000")]
#[case::beyond_all_numbers("ACCELERATE_STOP_AT", "99999999999999999999999")]
#[case::negative("ACCELERATE_STOP_AT", "-1896109200")]
#[case::no_such_day("ACCELERATE_STOP_AT", "2030-02-31T18:00:00Z")]
#[case::slurm("SLURM_JOB_END_TIME", "Unknown")]
fn what_is_no_time_is_named_with_what_is_wanted(#[case] name: &str, #[case] text: &str) {
    let error = said_by(name, text).unwrap_err().to_string();
    let wanted = [name, text, "a time with its offset such as 2030-01-31T18:00:00+01:00, or whole seconds since 1970"];
    assert!(wanted.iter().all(|wanted| error.contains(wanted)), "{error}");
}

#[rstest]
#[case::nobody_says("ACCELERATE_STOP_AT", "")]
#[case::slurm_does_not_know("SLURM_JOB_END_TIME", "0")]
fn without_a_time_nothing_ends(#[case] name: &str, #[case] text: &str) {
    let cluster = said_by(name, text).unwrap();
    assert_eq!((cluster.run_end(), cluster.stops_from()), (None, None));
}

#[test]
fn the_end_of_an_allocation_needs_no_other_setting() {
    let cluster = said_by("SLURM_JOB_END_TIME", "1896109200").unwrap();
    assert_eq!(cluster.stops_from(), Some(at(1_896_109_200 - 120)));
}

#[test]
fn times_survive_the_record() {
    let config = ClusterConfig {
        stop_at: Some(at(1_896_109_200)),
        stop_margin: Some(Duration::from_millis(1_500)),
        shutdown_grace_period: Some(Duration::from_secs(60)),
        ..Default::default()
    };
    let json = serde_json::to_string(&config).unwrap();
    assert!(json.contains(r#""stop_at":"2030-01-31T17:00:00Z""#) && json.contains(r#""stop_margin":1.5"#), "{json}");
    assert_eq!(serde_json::from_str::<ClusterConfig>(&json).unwrap(), config);
    let in_seconds: ClusterConfig = serde_json::from_str(r#"{"stop_at": 1896109200, "allocation_end": null}"#).unwrap();
    assert_eq!(in_seconds.stop_at, config.stop_at);
    let error = serde_json::from_str::<ClusterConfig>(r#"{"stop_at": 3600}"#).unwrap_err().to_string();
    assert!(error.contains("\"3600\" is not a time"), "{error}");
}
