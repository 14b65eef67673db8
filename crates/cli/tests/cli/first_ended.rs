//! Ranks learn from their pages which rank of the run was the first to end with code 0, so that none waits for one that never comes.

use accelerate_core::status::words;
use rstest::rstest;

use crate::hosts::{CONNECTS, Ssh};
use crate::support::{finished, launch};

/// Rank 0 ends, and the others as soon as they are told so, as the library looks for it while it waits.
fn program() -> String {
    format!(
        "import os, struct, sys, time\n\
         if os.environ['RANK'] == '0': sys.exit(0)\n\
         process, descriptor, page = map(int, os.environ['ACCELERATE_STATUS'].split(':'))\n\
         file = os.open(f'/proc/{{process}}/fd/{{descriptor}}', os.O_RDONLY)\n\
         word = lambda: struct.unpack('=Q', os.pread(file, 8, 4096 * page + {place}))[0]\n\
         while not word(): time.sleep(0.01)\n\
         print('without rank', word() - 1)",
        place = 8 * words::FIRST_ENDED,
    )
}

#[test]
fn ranks_of_one_machine_are_told() {
    let mut command = launch(3, &[]);
    command.args(["python3", "-c", &program()]);
    let ended = finished(command);
    ended.expect(0, &[]);
    assert_eq!(ended.sorted_stdout(), ["[rank 1] without rank 0", "[rank 2] without rank 0"]);
}

/// Of a machine that has other ranks left, these know; once it has none, the other machines are told.
#[rstest]
#[case::the_only_one_of_its_machine("a:1,b:2")]
#[case::one_of_two("a:2,b:1")]
fn ranks_of_other_machines_are_told(#[case] hosts: &str) {
    let ssh = Ssh::new(CONNECTS);
    let mut command = ssh.launch(hosts);
    command.args(["python3", "-c", &program()]);
    let ended = finished(command);
    ended.expect(0, &[]);
    assert_eq!(ended.sorted_stdout(), ["[rank 1] without rank 0", "[rank 2] without rank 0"]);
}
