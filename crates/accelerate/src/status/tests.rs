//! A page is written as it is read, by one process at a time, and nothing else ever is.
#![allow(clippy::unwrap_used)]

use super::*;
use accelerate_core::environment::Launcher;
use accelerate_core::status::{FILE_NAME, PAGE_BYTES, RankStatus, RunPart, rank_word};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicBool;

/// A launcher's file, of a launcher that is this process, with two ranks.
fn file(seals: SealFlags, process_id: u32) -> File {
    let file = File::from(memfd_create(FILE_NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap());
    let info = RunInfo {
        version: "1".to_owned(),
        process_id,
        command: vec!["train".to_owned()],
        num_processes: 2,
        first_rank: 0,
        num_local_processes: 2,
        started: 1,
        restart_count: 0,
        max_restarts: 0,
        part: RunPart::Launcher,
    };
    file.set_len(3 * PAGE_BYTES as u64).unwrap();
    file.write_all_at(&info.encode(), 0).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

fn launchers_file() -> File {
    file(SealFlags::SHRINK | SealFlags::GROW, process::id())
}

fn status_at(text: &str) -> Status {
    Status::of_process(&|name| (name == VARIABLE).then(|| text.to_owned()))
}

fn status_in(file: &File, page: u32) -> Status {
    status_at(&format!("{}:{}:{page}", process::id(), file.as_raw_fd()))
}

fn read(file: &File, page: u64) -> RankStatus {
    let mut bytes = vec![0; PAGE_BYTES];
    file.read_exact_at(&mut bytes, page * PAGE_BYTES as u64).unwrap();
    let (status, is_whole) = RankStatus::decode(&bytes, &bytes);
    assert!(is_whole);
    status
}

#[test]
fn steps_and_samples_are_read_in_the_page_of_the_rank() {
    let file = launchers_file();
    let status = status_in(&file, 2);
    status.stepped(3);
    // Another optimizer has taken fewer.
    status.stepped(1);
    for _ in 0..20 {
        status.handed_out(8);
    }
    let found = read(&file, 2);
    assert_eq!((found.owner, found.steps, found.progress.samples()), (Some(process::id()), 3, 160));
    assert_eq!(found.progress.times.len(), words::NUM_TIMES);
    assert!(found.progress.times.is_sorted());
    let elsewhere = read(&file, 1);
    assert_eq!((elsewhere.owner, elsewhere.steps), (None, 0));
}

#[test]
fn a_page_has_one_writer_at_a_time() {
    let file = launchers_file();
    let first = status_in(&file, 1);
    assert!(first.0.is_some() && status_in(&file, 1).0.is_none());
    first.stepped(3);
    first.handed_out(1);
    drop(first);
    assert_eq!((read(&file, 1).owner, read(&file, 1).steps), (Some(process::id()), 3), "what it has told stays");
    let _second = status_in(&file, 1);
    assert_eq!((read(&file, 1).steps, read(&file, 1).progress.times.len()), (0, 0));
    // That of a process that has ended without letting go.
    let owner = PAGE_BYTES as u64 * 2;
    file.write_all_at(&u64::from(u32::MAX).to_ne_bytes(), owner).unwrap();
    assert!(status_in(&file, 2).0.is_some());
    // That of one that lives.
    file.write_all_at(&1u64.to_ne_bytes(), owner).unwrap();
    assert!(status_in(&file, 2).0.is_none());
}

#[test]
fn what_is_no_launchers_file_is_not_written() {
    let sealed = launchers_file();
    let number = sealed.as_raw_fd();
    let own = process::id();
    for text in [
        String::new(),
        "1".to_owned(),
        format!("{own}:{number}:0"),
        format!("{own}:{number}:3"),
        format!("{own}:999999:1"),
    ] {
        assert!(status_at(&text).0.is_none(), "{text}");
    }
    let unsealed = file(SealFlags::GROW, own);
    let of_another = file(SealFlags::SHRINK, own + 1);
    let with_a_name = tempfile::NamedTempFile::new().unwrap().into_file();
    for file in [unsealed, of_another, with_a_name] {
        assert!(status_in(&file, 1).0.is_none(), "{file:?}");
    }
    assert!(Status::of_process(&|_| None).0.is_none());
}

#[test]
fn calls_are_in_the_place_of_their_group_until_the_group_is_gone() {
    let file = launchers_file();
    let mut log = status_in(&file, 1).call_log().unwrap();
    let call = |op, sequence| LoggedCall { op, sequence, site: None, began: Instant::now() };
    let (job, side): (Arc<str>, Arc<str>) = ("".into(), "/fork/0".into());
    log.add(LoggedGroup { name: &job, num_members: 2, is_in_background: false });
    log.add(LoggedGroup { name: &side, num_members: 2, is_in_background: true });
    log.begin(&job, &call("barrier", 1));
    log.begin(&side, &call("broadcast", 4));
    log.end(&job);
    let calls = read(&file, 1).calls;
    let shown: Vec<_> = calls.iter().map(|call| (&*call.group, &*call.op, call.sequence, call.is_running())).collect();
    assert_eq!(shown, [("", "barrier", 1, false), ("/fork/0", "broadcast", 4, true)]);
    assert!(calls[1].is_in_background && calls[0].began <= calls[0].ended.unwrap());
    drop(side);
    let next: Arc<str> = "/fork/1".into();
    log.add(LoggedGroup { name: &next, num_members: 2, is_in_background: false });
    let names: Vec<String> = read(&file, 1).calls.into_iter().map(|call| call.group).collect();
    assert_eq!(names, ["", "/fork/1"]);
}

#[test]
fn more_groups_than_places_are_left_out() {
    let file = launchers_file();
    let mut log = status_in(&file, 1).call_log().unwrap();
    let names: Vec<Arc<str>> = (0..20).map(|number| format!("/fork/{number}").into()).collect();
    for name in &names {
        log.add(LoggedGroup { name, num_members: 2, is_in_background: false });
        log.begin(name, &LoggedCall { op: "barrier", sequence: 1, site: None, began: Instant::now() });
    }
    assert_eq!(read(&file, 1).calls.len(), words::NUM_CALLS);
}

#[test]
fn the_first_rank_that_has_ended_is_known_to_ranks_of_that_run_alone() {
    let ranks = |rank, world_size| RankVariables {
        rank,
        local_rank: rank,
        world_size,
        local_world_size: world_size,
        master_addr: "node0".into(),
        master_port: 29_500,
        source: Launcher::Torchrun,
    };
    let file = launchers_file();
    let status = status_in(&file, 2);
    assert_eq!(status.first_ended(&ranks(1, 2)), None);
    let place = 2 * PAGE_BYTES + 8 * words::FIRST_ENDED;
    file.write_all_at(&rank_word(0).to_ne_bytes(), place as u64).unwrap();
    for (rank, world_size, wanted) in [(1, 2, Some(0)), (0, 2, None), (1, 4, None)] {
        assert_eq!(status.first_ended(&ranks(rank, world_size)), wanted, "{rank} of {world_size}");
    }
    assert_eq!(status_at("").first_ended(&ranks(1, 2)), None);
}

/// Reading beside writing never shows half of each.
#[test]
fn a_reader_never_sees_half_of_a_call() {
    let file = launchers_file();
    let mut log = status_in(&file, 1).call_log().unwrap();
    let name: Arc<str> = "".into();
    log.add(LoggedGroup { name: &name, num_members: 2, is_in_background: false });
    let read = || {
        let mut bytes = vec![0; PAGE_BYTES];
        file.read_exact_at(&mut bytes, PAGE_BYTES as u64).unwrap();
        bytes
    };
    std::thread::scope(|scope| {
        let is_over = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&is_over);
        scope.spawn(move || {
            for number in 0.. {
                // The number is told by the name, too.
                let op = ["zero", "one", "two"][number % 3];
                log.begin(
                    &name,
                    &LoggedCall { op, sequence: 1 + number as u64 % 3, site: None, began: Instant::now() },
                );
                // Now and then there is time to read.
                if number % 7 == 0 {
                    std::thread::yield_now();
                }
                if until.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        for _ in 0..20_000 {
            let (status, _) = RankStatus::decode(&read(), &read());
            if let Some(call) = status.calls.first().filter(|call| call.sequence > 0) {
                assert_eq!(call.op, ["", "zero", "one", "two"][call.sequence as usize]);
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
}
