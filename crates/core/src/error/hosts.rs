//! What can be wrong with lists of machines.

use crate::names::counted;

#[derive(Debug, thiserror::Error)]
pub(crate) enum HostsErrorKind {
    #[error("{place} names no machine; name at least one, such as node1:4")]
    Empty { place: String },
    #[error(
        "{place}: \"{name}\" is no host; a name or an address is wanted, such as node1, user@node1, 10.0.0.1 or [fe80::1], with \
         the number of processes behind a colon"
    )]
    Name { name: String, place: String },
    #[error(
        "{place}: \"{entry}\" does not say a number of processes from 1 to {most}; leave the machine out if it is to have none"
    )]
    Count { entry: String, place: String, most: usize },
    #[error(
        "{place}: \"{entry}\" may mean the address {address} with {number} processes, or an address without a number; write it with \
         brackets, as {ways}"
    )]
    TwoMeanings { entry: String, address: String, number: String, ways: String, place: String },
    #[error("{place}: the host {host} is there twice; name it once, with the number of all of its processes")]
    Twice { host: String, place: String },
    #[error("{place}: \"{word}\" means nothing in a host file; write lines such as `node1 slots=4` or `node1:4`")]
    Word { word: String, place: String },
    #[error("the filter \"{filter}\" cannot be applied: in \"{part}\", {why}; write it as node1@node2:0,2")]
    Filter { part: String, filter: String, why: &'static str },
    #[error(
        "--num_processes is {wanted}, but the hosts have {said} processes{}; leave --num_processes out, or change the numbers",
        match num_open {
            0 => String::new(),
            _ => format!(", and what is left cannot be shared evenly by {num_open} without a number"),
        }
    )]
    Total { wanted: usize, said: usize, num_open: usize },
    #[error("--num_machines (or --nnodes) is {said}, but {} named; leave it out, or name as many", hosts_are(*found))]
    NumMachines { said: usize, found: usize },
    #[error(
        "--min_machines (or MIN of --nnodes MIN:MAX) is {least}, but {} named; name as many or more, or ask for fewer",
        hosts_are(*found)
    )]
    MinMachines { least: usize, found: usize },
    #[error(
        "--num_machines (or --nnodes) is {said}, but the Slurm job {job_id} has {}; leave it out, or ask Slurm for as \
         many",
        counted(*found, "node")
    )]
    NumNodes { said: usize, job_id: String, found: usize },
    #[error(
        "--min_machines (or MIN of --nnodes MIN:MAX) is {least}, but the Slurm job {job_id} has {}; ask Slurm for as many or \
         more, or for fewer here",
        counted(*found, "node")
    )]
    MinNodes { least: usize, job_id: String, found: usize },
    #[error(
        "--min_machines (or MIN of --nnodes MIN:MAX) is {least} and --num_machines {most}; name {least} machines or more \
         with --hosts or --hostfile, of which some can be left out then, or leave --min_machines out"
    )]
    LeastAboveMost { least: usize, most: usize },
    #[error(
        "a range of machines, {least} to {most} (--nnodes {least}:{most}), needs one launcher that starts all of them: name them with \
         --hosts or --hostfile, or start it in a Slurm job; where a command on each machine starts its own, say one number, such as \
         --nnodes {most}"
    )]
    RangeWithoutList { least: usize, most: usize },
    #[error(
        "there are {num_machines} machines, and nothing says which one this is, so each would take itself for machine 0; say \
         --machine_rank on each, counted from 0 (unlike torchrun, a launch gets no number from the rdzv_backend), or name the machines with --hosts and \
         start all of them from one place"
    )]
    NoMachineRank { num_machines: usize },
    #[error("the hosts have {total} processes, but a run may have at most {most}; use fewer")]
    TooMany { total: usize, most: usize },
}

/// `1 host is`, `2 hosts are`.
pub(crate) fn hosts_are(number: usize) -> String {
    format!("{} {}", counted(number, "host"), if number == 1 { "is" } else { "are" })
}
