//! Ranks that die, stay away or stray: the others say who and where, and nobody hangs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::checkpoint::{LoadOptions, load_checkpoint_in_model};
use accelerate::nn::{Linear, ParamStore};
use accelerate::tch::Device;
use accelerate_launch::{LaunchConfig, PortReservation, Program, Silent, launch};
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Output, Stdio};

/// Starts the ranks as torchrun would, without a supervisor: what the others say is their own.
fn start(script: &str, world_size: usize) -> Vec<Child> {
    start_with(world_size, |_| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_conformance"));
        command.arg(script);
        command
    })
}

/// The same with a command for each rank.
fn start_with(world_size: usize, command: impl Fn(usize) -> Command) -> Vec<Child> {
    // Not one that an outgoing connection may take before rank 0 listens.
    let config = LaunchConfig::new(Program::Executable("true".into()), world_size);
    let port = PortReservation::for_config(&config).unwrap().number().to_string();
    (0..world_size)
        .map(|rank| {
            command(rank)
                .envs([("RANK", rank.to_string()), ("LOCAL_RANK", rank.to_string())])
                .envs([("WORLD_SIZE", world_size.to_string()), ("LOCAL_WORLD_SIZE", world_size.to_string())])
                .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port), ("OMP_NUM_THREADS", "1")])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect()
}

fn end(mut child: Child) -> Output {
    drop(child.stdin.take());
    child.wait_with_output().unwrap()
}

fn said(output: &Output) -> String {
    assert!(!output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Is `rank` said to be missing, alone or with a survivor that was still waiting for somebody else? Nobody can ask once rank 0
/// is gone.
fn is_missed(rank: usize, text: &str) -> bool {
    let before = text.match_indices(" not made this call").map(|(end, _)| &text[..end]);
    let mut lists = before.filter_map(|before| before.rsplit("rank").next());
    let rank = rank.to_string();
    lists.any(|list| list.split(|c: char| !c.is_ascii_digit()).any(|number| number == rank))
        || text.contains("rank 0, which keeps")
}

/// The first to leave may be rank 0, which serves the store.
#[test]
fn ranks_that_leave_at_once_leave_nobody_behind() {
    for _ in 0..2 {
        for child in start("leaving_at_once", 4) {
            let output = end(child);
            assert!(output.status.success(), "{output:?}");
        }
    }
}

#[test]
fn a_rank_that_dies_is_named_by_the_others() {
    let mut ranks = start("dying_rank", 3);
    let _ = end(ranks.remove(1));
    for text in ranks.into_iter().map(end).map(|output| said(&output)) {
        assert!(text.contains("all_reduce (collective 2) on [1] Float"), "{text}");
        assert!(is_missed(1, &text), "{text}");
    }
}

#[test]
fn a_rank_that_dies_or_is_stopped_in_the_middle_of_a_sum_is_named_by_the_others() {
    for script in ["dying_rank_in_sum", "stopped_rank_in_sum"] {
        let mut ranks = start(script, 3);
        let mut struck = ranks.remove(1);
        for text in ranks.into_iter().map(end).map(|output| said(&output)) {
            assert!(text.contains("all_reduce (collective ") && text.contains("on [10485760] Float"), "{text}");
            assert!(is_missed(1, &text), "{script}: {text}");
        }
        let _ = struck.kill();
        struck.wait().unwrap();
    }
}

#[test]
fn the_launcher_names_the_rank_that_failed_by_itself_and_not_one_that_lost_it() {
    for (failing, script) in [(0, "failing_rank_zero"), (1, "failing_rank_one"), (0, "unwritable_folder")] {
        for world_size in [2, 3] {
            let config = LaunchConfig {
                args: vec![script.into()],
                environment: vec![("ACCELERATE_USE_CPU".into(), "true".into())],
                num_cpu_threads_per_process: Some(1),
                ..LaunchConfig::new(Program::Executable(env!("CARGO_BIN_EXE_conformance").into()), world_size)
            };
            let error = launch(&config, &mut Silent).unwrap_err();
            let failure = error.failure().unwrap();
            assert_eq!(failure.rank, failing, "{failure}");
        }
    }
}

/// It keeps the store through which the others meet, so they fail, too, once it is gone.
#[test]
fn rank_zero_that_cannot_join_the_group_is_named_and_not_one_that_lost_it() {
    let line = "if [ $RANK = 0 ]; then export GLOO_SOCKET_IFNAME=nowhere; fi; exec \"$0\" leaving_at_once";
    for _ in 0..3 {
        let config = LaunchConfig {
            args: ["-c", line, env!("CARGO_BIN_EXE_conformance")].map(Into::into).into(),
            environment: vec![("ACCELERATE_USE_CPU".into(), "true".into())],
            num_cpu_threads_per_process: Some(1),
            ..LaunchConfig::new(Program::Executable("sh".into()), 3)
        };
        let error = launch(&config, &mut Silent).unwrap_err();
        let failure = error.failure().unwrap();
        assert!(failure.rank == 0 && failure.to_string().contains("nowhere"), "{failure}");
    }
}

#[test]
fn a_rank_that_waits_to_be_connected_is_told_of() {
    let mut ranks = start_with(2, |rank| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_conformance"));
        command.arg("absent_rank").env("ACCELERATE_PROCESS_GROUP_WAITING_NOTICE", "0.5");
        if rank == 1 {
            command.env("GLOO_SOCKET_IFNAME", "nowhere");
        }
        command
    });
    let failed = said(&end(ranks.pop().unwrap()));
    assert!(failed.contains("nowhere"), "{failed}");
    let waited = said(&end(ranks.pop().unwrap()));
    assert!(waited.contains("rank 0 is in init_process_group"), "{waited}");
}

/// Their deadline is half an hour away.
#[test]
fn a_rank_that_ends_well_before_it_meets_the_others_is_named_soon() {
    for (leaving, script) in [(0, "leaving_zero"), (1, "leaving_one")] {
        let config = LaunchConfig {
            args: vec![script.into()],
            environment: vec![("ACCELERATE_USE_CPU".into(), "true".into())],
            num_cpu_threads_per_process: Some(1),
            ..LaunchConfig::new(Program::Executable(env!("CARGO_BIN_EXE_conformance").into()), 3)
        };
        let error = launch(&config, &mut Silent).unwrap_err();
        let failure = error.failure().unwrap();
        let text = failure.to_string();
        assert_ne!(failure.rank, leaving, "{text}");
        let named = format!("rank {leaving} ended with exit code 0 before it met the others, and rank");
        assert!(text.contains(&named) && text.contains(" in init_process_group"), "{text}");
        assert!(text.contains(&format!("rank {leaving} had ended before, with code 0")), "{text}");
    }
}

#[test]
fn a_second_accelerator_is_told_to_be_made_from_the_first() {
    for rank in start("second_meeting", 2) {
        let output = end(rank);
        assert!(output.status.success(), "{}", said(&output));
    }
}

#[test]
fn a_rank_that_dies_while_others_gather_its_parts_is_named() {
    let mut ranks = start("dying_rank_in_gather", 3);
    let _ = end(ranks.remove(1));
    for text in ranks.into_iter().map(end).map(|output| said(&output)) {
        assert!(text.contains("all_gather (collective ") && text.contains("unit 1 (layers.1)"), "{text}");
        assert!(is_missed(1, &text), "{text}");
    }
}

#[test]
fn a_rank_that_dies_while_others_read_its_parts_is_named() {
    let mut ranks = start("dying_rank_in_reading", 3);
    let _ = end(ranks.remove(1));
    for text in ranks.into_iter().map(end).map(|output| said(&output)) {
        assert!(is_missed(1, &text), "{text}");
    }
}

#[test]
fn a_rank_that_is_killed_while_it_saves_is_named_and_leaves_the_old_files() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path().join("model");
    let save = |limit: Option<usize>| {
        start_with(3, |rank| {
            // The kernel kills a process that writes more than this many blocks of 512 bytes to a file.
            let limit = if limit == Some(rank) { "ulimit -f 1 && " } else { "" };
            let mut command = Command::new("sh");
            command.args(["-c", &format!("{limit}exec \"$0\" saved_sharded --folder \"$1\"")]);
            command.arg(env!("CARGO_BIN_EXE_conformance")).arg(&folder);
            command
        })
    };
    for rank in save(None) {
        let output = end(rank);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    for dying in 0..3 {
        let outputs: Vec<Output> = save(Some(dying)).into_iter().map(end).collect();
        assert_eq!(outputs[dying].status.signal(), Some(25), "SIGXFSZ");
        for (_, output) in outputs.iter().enumerate().filter(|(rank, _)| *rank != dying) {
            let text = said(output);
            assert!(is_missed(dying, &text), "{text}");
        }
        let store = ParamStore::new(Device::Cpu);
        for layer in 0..3 {
            Linear::new(store.root() / "layers" / layer, 32, 32, Default::default()).unwrap();
        }
        load_checkpoint_in_model(&store, &folder, &LoadOptions::default()).unwrap();
        for param in store.parameters() {
            assert_eq!(
                param.get().unwrap().detach(),
                param.get().unwrap().detach().ones_like(),
                "{} after {dying}",
                param.name()
            );
        }
    }
}

#[test]
fn a_disk_that_fills_while_state_is_offloaded_stops_all_ranks_and_leaves_what_was_saved() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path().join("model");
    let ranks = start_with(3, |_| {
        let mut command = Command::new("sh");
        command.args(["-c", "trap '' XFSZ; exec \"$0\" full_disk --folder \"$1\""]);
        command.arg(env!("CARGO_BIN_EXE_conformance")).arg(&folder);
        command
    });
    for (rank, output) in ranks.into_iter().map(end).enumerate() {
        let text = said(&output);
        assert!(text.contains("cannot write offloaded state in"), "rank {rank}: {text}");
        assert_eq!(text.contains("the optimizer's step failed on rank 1"), rank != 1, "rank {rank}: {text}");
        assert!(text.contains("offloaded state of this AdamW was lost in a step that failed"), "rank {rank}: {text}");
    }
    let store = ParamStore::new(Device::Cpu);
    Linear::new(store.root() / "layers" / 0, 32, 32, Default::default()).unwrap();
    load_checkpoint_in_model(&store, &folder, &LoadOptions::default()).unwrap();
    for param in store.parameters() {
        assert_eq!(param.get().unwrap().detach(), param.get().unwrap().detach().ones_like(), "{}", param.name());
    }
    assert_eq!(temporary.path().read_dir().unwrap().count(), 1, "no scratch file is left");
}

#[test]
fn a_rank_that_stays_away_is_named_before_and_after_the_deadline() {
    let mut ranks = start_with(2, |_| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_conformance"));
        command.arg("absent_rank").env("ACCELERATE_PROCESS_GROUP_WAITING_NOTICE", "0.5");
        command
    });
    let absent = ranks.pop().unwrap();
    let text = said(&end(ranks.pop().unwrap()));
    assert!(text.contains("rank 0 is in all_reduce (collective 1); rank 1 is in no call for long"), "{text}");
    assert!(text.contains("did not finish within 6s") && text.contains("rank 1 has not made this call"), "{text}");
    let _ = end(absent);
}

#[test]
fn ranks_that_stay_away_are_told_apart_from_one_that_is_late_before_its_own_deadline() {
    let mut ranks = start_with(4, |_| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_conformance"));
        command.arg("late_rank").env("ACCELERATE_PROCESS_GROUP_WAITING_NOTICE", "3");
        command
    });
    let mut late = ranks.remove(0);
    // Rank 0 comes when it tells that rank 1 waits for it, so both deadlines count from what rank 1 does.
    let mut lines = BufReader::new(late.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("rank 1 is in all_reduce")), "rank 0 tells who waits");
    drop(late.stdin.take());
    let text = said(&end(ranks.remove(0)));
    assert!(text.contains("ranks 2, 3 have not made this call"), "{text}");
    // It has not been waited for: its own deadline is later.
    let text = lines.collect::<Vec<_>>().join("\n");
    assert!(text.contains("lost the connection to another process: ranks 2, 3 have not"), "{text}");
    assert!(!late.wait().unwrap().success());
    ranks.into_iter().for_each(|rank| drop(end(rank)));
}

#[test]
fn rank_zero_that_is_stopped_is_named_after_the_deadline() {
    let mut ranks = start("stopped_rank_zero", 3);
    let mut stopped = ranks.remove(0);
    let texts: Vec<String> = ranks.into_iter().map(end).map(|output| said(&output)).collect();
    for text in &texts {
        assert!(text.contains("rank 0, which keeps the rendezvous store, does not answer"), "{text}");
    }
    // The first whose deadline passes tells the other one, which need not wait for its own.
    assert!(texts.iter().any(|text| text.contains("did not finish within 6s")), "{texts:?}");
    stopped.kill().unwrap();
    stopped.wait().unwrap();
}

/// A rank that meets the others at this port, with a deadline of 4 s.
fn rank_at(port: u16, rank: usize, world_size: usize) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_conformance"));
    command.arg("test_ops").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.envs([("RANK", rank.to_string()), ("LOCAL_RANK", rank.to_string()), ("MASTER_PORT", port.to_string())]);
    command.envs([("WORLD_SIZE", world_size.to_string()), ("LOCAL_WORLD_SIZE", world_size.to_string())]);
    command.envs([("MASTER_ADDR", "127.0.0.1"), ("ACCELERATE_PROCESS_GROUP_TIMEOUT", "4"), ("OMP_NUM_THREADS", "1")]);
    command
}

#[test]
fn the_time_to_meet_is_that_of_rdzv_conf() {
    let mut alone = rank_at(free_port(), 0, 2);
    alone.envs([("ACCELERATE_RDZV_CONF", "join_timeout=1.5"), ("ACCELERATE_PROCESS_GROUP_TIMEOUT", "1800")]);
    let texts = all_said([alone]);
    assert!(texts[0].contains("rank 1") && texts[0].contains("1.5s"), "{texts:?}");
}

fn free_port() -> u16 {
    let config = LaunchConfig::new(Program::Executable("true".into()), 2);
    PortReservation::for_config(&config).unwrap().number()
}

fn all_said(ranks: impl IntoIterator<Item = Command>) -> Vec<String> {
    let children: Vec<Child> = ranks.into_iter().map(|mut rank| rank.spawn().unwrap()).collect();
    children.into_iter().map(end).map(|output| said(&output)).collect()
}

#[test]
fn a_silent_program_at_the_port_is_named_after_the_deadline() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let texts = all_said([rank_at(port, 1, 2)]);
    assert!(
        texts[0].contains(&format!("127.0.0.1:{port}")) && texts[0].contains("has not answered within 4s"),
        "{texts:?}"
    );
    let texts = all_said([rank_at(port, 0, 2)]);
    assert!(texts[0].contains(&format!("port {port}")) && texts[0].contains("is taken"), "{texts:?}");
}

#[test]
fn a_rank_that_is_given_twice_is_told_and_ends_all() {
    let port = free_port();
    let texts = all_said([rank_at(port, 0, 3), rank_at(port, 1, 3), rank_at(port, 1, 3)]);
    assert!(texts.iter().any(|text| text.contains("rank 1 is taken by process")), "{texts:?}");
    assert!(texts.iter().any(|text| text.contains("another rank does not take part")), "{texts:?}");
}

#[test]
fn ranks_that_differ_on_their_number_are_told() {
    let port = free_port();
    let texts = all_said([rank_at(port, 0, 2), rank_at(port, 1, 3)]);
    assert!(texts.iter().any(|text| text.contains("WORLD_SIZE is")), "{texts:?}");
}

#[test]
fn a_rank_with_another_secret_does_not_take_part() {
    let port = free_port();
    let mut members = [rank_at(port, 0, 2), rank_at(port, 1, 2)];
    members[0].env("ACCELERATE_RUN_SECRET", "of this run");
    members[1].env("ACCELERATE_RUN_SECRET", "of another run");
    let texts = all_said(members);
    assert!(texts[0].contains("rank 1 of 2 did not arrive within 4s"), "{texts:?}");
    assert!(texts[1].contains("serves the store of a run with another secret"), "{texts:?}");
    assert!(
        texts.iter().all(|text| !text.contains("of this run\"") && !text.contains("of another run\"")),
        "{texts:?}"
    );
}

#[test]
fn a_collective_under_is_main_process_is_told_apart() {
    let texts: Vec<String> = start("straying_rank", 2).into_iter().map(end).map(|output| said(&output)).collect();
    let all = texts.join("\n");
    // Ranks that read each other's memory find it before they read; those that send, once the deadline has passed.
    let found = ["rank 0: all_gather of [3] Float; rank 1: barrier", "rank 1 is in barrier (collective 1)"];
    let from_rank_1 = "rank 0 is in all_gather (collective 1)";
    assert!(found.iter().chain([&from_rank_1]).any(|text| all.contains(text)), "{all}");
}

/// One rank that asks for debug mode is enough for all. Nobody waits for a deadline then.
#[test]
fn in_debug_mode_all_ranks_list_the_calls_of_all() {
    let ranks = start_with(3, |rank| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_conformance"));
        command.arg("straying_rank").envs((rank == 1).then_some(("ACCELERATE_DEBUG_MODE", "true")));
        command
    });
    for text in ranks.into_iter().map(end).map(|output| said(&output)) {
        let wanted = "ranks make different calls: rank 0: all_gather of [3] Float; rank 1: barrier; rank 2: barrier.";
        assert!(text.contains(wanted), "{text}");
    }
}

#[test]
fn a_rank_that_never_starts_is_named() {
    let mut ranks = start("absent_rank", 3);
    let mut missing = ranks.remove(2);
    missing.kill().unwrap();
    missing.wait().unwrap();
    let mut texts = Vec::new();
    for rank in ranks {
        texts.push(said(&end(rank)));
    }
    // Either it was killed before it arrived, or while the others waited for it.
    assert!(texts.iter().any(|text| text.contains("rank 2") || text.contains("onnect")), "{texts:?}");
}
