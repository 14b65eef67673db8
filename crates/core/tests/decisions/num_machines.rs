//! Numbers of machines: what was asked for, and what is there.

use accelerate_core::hosts::{MachineSource, NumMachines};
use rstest::rstest;

const HOSTS_2: MachineSource<'static> = MachineSource::Hosts { num_hosts: 2 };
const NODES_2: MachineSource<'static> = MachineSource::SlurmJob { job_id: "7", num_nodes: 2 };
const BY_ITSELF: MachineSource<'static> = MachineSource::EachByItself;

/// What is told, `error: ` or `unused: ` before it; nothing where everything has its effect.
fn told(most: Option<usize>, least: Option<usize>, source: MachineSource<'_>) -> String {
    match (NumMachines { most, least }).check(source) {
        Ok(None) => String::new(),
        Ok(Some(unused)) => format!("unused: {unused}"),
        Err(error) => {
            assert!(error.is_config());
            format!("error: {error}")
        }
    }
}

#[rstest]
#[case::nobody_says(None, None, HOSTS_2)]
#[case::nobody_says(None, None, NODES_2)]
#[case::nobody_says(None, None, BY_ITSELF)]
#[case::as_many(Some(2), None, HOSTS_2)]
#[case::as_many(Some(2), None, NODES_2)]
#[case::as_many(Some(2), Some(2), HOSTS_2)]
#[case::one_by_one(Some(2), None, BY_ITSELF)]
#[case::the_whole_range(Some(2), Some(1), HOSTS_2)]
#[case::the_whole_range(Some(2), Some(1), NODES_2)]
#[case::only_the_lower_end(None, Some(1), HOSTS_2)]
#[case::only_the_lower_end(None, Some(2), NODES_2)]
fn what_has_its_effect(#[case] most: Option<usize>, #[case] least: Option<usize>, #[case] source: MachineSource<'_>) {
    assert_eq!(told(most, least, source), "");
}

#[rstest]
#[case(
    Some(3),
    None,
    HOSTS_2,
    "error: --num_machines (or --nnodes) is 3, but 2 hosts are named; leave it out, or name as many"
)]
#[case(
    Some(3),
    Some(3),
    HOSTS_2,
    "error: --min_machines (or MIN of --nnodes MIN:MAX) is 3, but 2 hosts are named; name as many or more, or ask for fewer"
)]
#[case(None, Some(3), HOSTS_2, "error: --min_machines (or MIN of --nnodes MIN:MAX) is 3, but 2 hosts are named")]
#[case::upper_end_below(Some(2), Some(1), MachineSource::Hosts { num_hosts: 3 }, "error: --num_machines (or --nnodes) is 2, but 3 hosts are named")]
#[case::one(
    Some(1),
    None,
    HOSTS_2,
    "error: --num_machines (or --nnodes) is 1, but 2 hosts are named; leave it out, or name as many"
)]
#[case::one(
    Some(1),
    None,
    NODES_2,
    "error: --num_machines (or --nnodes) is 1, but the Slurm job 7 has 2 nodes; leave it out"
)]
#[case::one(Some(1), Some(1), HOSTS_2, "error: --num_machines (or --nnodes) is 1, but 2 hosts are named")]
#[case(Some(3), None, MachineSource::Hosts { num_hosts: 1 }, "error: --num_machines (or --nnodes) is 3, but 1 host is named")]
#[case(Some(3), None, NODES_2, "error: --num_machines (or --nnodes) is 3, but the Slurm job 7 has 2 nodes")]
#[case(
    None,
    Some(3),
    NODES_2,
    "error: --min_machines (or MIN of --nnodes MIN:MAX) is 3, but the Slurm job 7 has 2 nodes; ask Slurm for as many or more"
)]
#[case(
    Some(4),
    Some(2),
    HOSTS_2,
    "unused: num_machines (or --nnodes) is 4, but 2 hosts are named, and no others can join a run later"
)]
#[case(
    Some(4),
    Some(2),
    NODES_2,
    "unused: num_machines (or --nnodes) is 4, but the Slurm job 7 has 2 nodes, and no others can join"
)]
#[case(
    Some(2),
    Some(1),
    BY_ITSELF,
    "error: a range of machines, 1 to 2 (--nnodes 1:2), needs one launcher that starts all of them"
)]
#[case(
    Some(1),
    Some(2),
    BY_ITSELF,
    "error: --min_machines (or MIN of --nnodes MIN:MAX) is 2 and --num_machines 1; name 2 machines or more with --hosts"
)]
#[case::of_one(
    Some(1),
    Some(1),
    BY_ITSELF,
    "unused: min_machines (or MIN of --nnodes MIN:MAX) is 1, which has no effect here"
)]
#[case::of_all(
    Some(3),
    Some(3),
    BY_ITSELF,
    "unused: min_machines (or MIN of --nnodes MIN:MAX) is 3, which has no effect here"
)]
fn what_has_none_is_told_with_the_cure(
    #[case] most: Option<usize>,
    #[case] least: Option<usize>,
    #[case] source: MachineSource<'_>,
    #[case] words: &str,
) {
    let text = told(most, least, source);
    assert!(text.starts_with(words), "{text}");
}
