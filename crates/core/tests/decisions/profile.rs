//! Which steps a profiler records.

use accelerate_core::config::ScheduleOption;
use accelerate_core::profile::ProfilerAction::{self, Record, RecordAndSave, Warmup};
use accelerate_core::profile::{ProfilerTransition, transition};

fn letter(action: ProfilerAction) -> char {
    match action {
        ProfilerAction::None => 'n',
        Warmup => 'w',
        Record => 'r',
        RecordAndSave => 's',
    }
}

/// What `torch.profiler.schedule` of torch 2.11 gives for the first 24 steps, one letter a step.
#[test]
fn schedules_are_those_of_torch() {
    let option = |wait, warmup, active, repeat, skip_first, skip_first_wait| ScheduleOption {
        wait,
        warmup,
        active,
        repeat,
        skip_first,
        skip_first_wait,
    };
    for (schedule, wanted) in [
        (option(0, 0, 1, 0, 0, false), "ssssssssssssssssssssssss"),
        (option(1, 1, 1, 0, 0, false), "nwsnwsnwsnwsnwsnwsnwsnws"),
        (option(1, 1, 2, 2, 0, false), "nwrsnwrsnnnnnnnnnnnnnnnn"),
        (option(2, 0, 3, 1, 2, false), "nnnnrrsnnnnnnnnnnnnnnnnn"),
        (option(3, 1, 1, 2, 1, true), "nwsnnnwsnnnnnnnnnnnnnnnn"),
        (option(5, 1, 3, 2, 10, false), "nnnnnnnnnnnnnnnwrrsnnnnn"),
        (option(0, 2, 1, 0, 3, false), "nnnwwswwswwswwswwswwswws"),
    ] {
        schedule.check().unwrap();
        let found: String = (0..24).map(|step| letter(schedule.action(step))).collect();
        assert_eq!(found, wanted, "{schedule:?}");
    }
    assert_eq!(ScheduleOption { wait: u64::MAX, ..Default::default() }.action(7), ProfilerAction::None);
}

#[test]
fn schedules_are_read_from_files() {
    let schedule: ScheduleOption = serde_json::from_str(r#"{"wait": 5, "active": 3, "repeat": 2}"#).unwrap();
    assert_eq!(schedule, ScheduleOption { wait: 5, active: 3, repeat: 2, ..Default::default() });
    assert!(serde_json::from_str::<ScheduleOption>(r#"{"waits": 5}"#).is_err());
}

/// The table of actions that `torch.profiler.profile` keeps, as letters: finish, discard, prepare, record.
#[test]
fn transitions_are_those_of_torch() {
    let idle = ProfilerAction::None;
    for (current, next, wanted) in [
        (idle, Some(idle), ""),
        (idle, Some(Warmup), "p"),
        (idle, Some(Record), "pr"),
        (idle, Some(RecordAndSave), "pr"),
        (Warmup, Some(idle), "d"),
        (Warmup, Some(Warmup), ""),
        (Warmup, Some(Record), "r"),
        (Warmup, Some(RecordAndSave), "r"),
        (Record, Some(idle), "d"),
        (Record, Some(Warmup), "dp"),
        (Record, Some(Record), ""),
        (Record, Some(RecordAndSave), ""),
        (RecordAndSave, Some(idle), "f"),
        (RecordAndSave, Some(Warmup), "fp"),
        (RecordAndSave, Some(Record), "fpr"),
        (RecordAndSave, Some(RecordAndSave), "fpr"),
        (idle, None, ""),
        (Warmup, None, "d"),
        (Record, None, "f"),
        (RecordAndSave, None, "f"),
    ] {
        let ProfilerTransition { finish, discard, prepare, record } = transition(current, next);
        let found: String = [(finish, 'f'), (discard, 'd'), (prepare, 'p'), (record, 'r')]
            .into_iter()
            .filter_map(|(done, letter)| done.then_some(letter))
            .collect();
        assert_eq!(found, wanted, "{current:?} to {next:?}");
    }
}
