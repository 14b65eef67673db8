//! When a run on several machines fails, what the ranks of all of them were doing is told.

use std::fs;
use std::process::Stdio;

use accelerate_core::status::{CallEntry, words};
use accelerate_launch::status::now;
use rstest::rstest;

use crate::hosts::Ssh;
use crate::support::{Finished, Witness, named_pipe};

/// Each rank tells what it is doing, as the library does: rank 1 computes, and the others are in this call. Rank 1 then waits for a
/// line, and does what that says.
fn program(pipe: &str) -> String {
    let site = Some(("src/train.rs", 40));
    let call = CallEntry {
        group: "",
        num_members: 3,
        op: "all_reduce",
        sequence: 17,
        site,
        began: now(),
        ..Default::default()
    };
    let call: String =
        call.encode().iter().flat_map(|word| word.to_ne_bytes()).map(|byte| format!("{byte:02x}")).collect();
    format!(
        "import os, struct, sys, time\n\
         process, descriptor, page = map(int, os.environ['ACCELERATE_STATUS'].split(':'))\n\
         file = os.open(f'/proc/{{process}}/fd/{{descriptor}}', os.O_RDWR)\n\
         is_late = os.environ['RANK'] == '1'\n\
         if not is_late: os.pwrite(file, bytes.fromhex('{call}'), 4096 * page + {first_word})\n\
         os.pwrite(file, struct.pack('=Q', os.getpid()), 4096 * page + {owner})\n\
         open('/dev/fd/' + os.environ['WITNESS'], 'w').write('ready\\n')\n\
         if is_late: exec(open('{pipe}').read())\n\
         while True: time.sleep(0.05)",
        // Behind the count of the first place.
        first_word = 8 * (words::CALLS + 1),
        owner = 8 * words::OWNER,
    )
}

#[rstest]
#[case::a_rank_fails("sys.exit(7)", 7, "error: rank 1 on b (process ", &["ranks 0, 2 were in", "rank 1 was computing and had made no call"])]
#[case::a_machine_is_lost(
    "os.kill(int(os.environ['SSH_PROCESS']), 10)", 1, "error: b: the connection broke while ranks 1-2 were running", &["rank 0 was in"]
)]
fn the_calls_of_all_machines_are_told(
    #[case] end: &str,
    #[case] code: i32,
    #[case] error: &str,
    #[case] told: &[&str],
) {
    let (_folder, pipe) = named_pipe();
    let ssh = Ssh::new(
        "export HOST=$1 SSH_PROCESS=$$; shift; trap 'exit 255' USR1
         exec 3<&0; sh -c \"$*\" <&3 3<&- & exec 3<&-; wait $!",
    );
    let mut witness = Witness::new();
    let mut command = ssh.launch("a:1,b:2");
    command.args(["python3", "-c", &program(&pipe)]).stderr(Stdio::piped());
    let child = witness.start(command);
    witness.wait_for("ready", 3);
    fs::write(&pipe, end).unwrap();
    let ended = Finished::from(child.wait_with_output().unwrap());
    ended.expect(code, &[error]);
    for told in told {
        let line = ended.stderr.lines().find(|line| line.contains(told)).unwrap_or_else(|| panic!("{told}: {ended:?}"));
        assert!(
            !told.ends_with(" in") || line.contains(" in all_reduce (collective 17) at src/train.rs:40 for "),
            "{line}"
        );
    }
    witness.expect_nobody_survives();
}
