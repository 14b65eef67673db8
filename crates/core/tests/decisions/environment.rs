//! Launchers as tables of variables.

use accelerate_core::config::{DynamoBackend, MixedPrecision, RunConfig, Sources};
use accelerate_core::environment::{Launcher, RankVariables, first_host, parse_flag, rank_variables};
use accelerate_core::names::LogLevel;
use proptest::prelude::*;
use rstest::rstest;
use std::collections::HashMap;

/// Variables written as `NAME=value` with spaces between; `_` in a value stands for a space.
fn lookup(text: &str) -> impl Fn(&str) -> Option<String> {
    let variables: HashMap<String, String> = text
        .split_whitespace()
        .map(|pair| pair.split_once('=').unwrap())
        .map(|(name, value)| (name.to_owned(), value.replace('_', " ")))
        .collect();
    move |name| variables.get(name).cloned()
}

fn read(text: &str) -> accelerate_core::Result<Option<RankVariables>> {
    rank_variables(&lookup(text))
}

/// (rank, world size, local rank, local world size), address:port, launcher
type Wanted<'a> = ((usize, usize, usize, usize), &'a str, Launcher);

#[rstest]
#[case::torchrun(
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=host MASTER_PORT=1234",
    ((3, 4, 1, 2), "host:1234", Launcher::Torchrun)
)]
#[case::torchrun_on_one_machine(
    "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2",
    ((1, 2, 1, 2), "127.0.0.1:29500", Launcher::Torchrun)
)]
#[case::a_world_of_one("RANK=0 WORLD_SIZE=1", ((0, 1, 0, 1), "127.0.0.1:29500", Launcher::Torchrun))]
#[case::local_rank_from_its_size(
    "RANK=5 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 MASTER_ADDR=a",
    ((5, 8, 1, 4), "a:29500", Launcher::Torchrun)
)]
#[case::a_local_address_means_one_machine(
    "RANK=2 WORLD_SIZE=3 MASTER_ADDR=localhost",
    ((2, 3, 2, 3), "localhost:29500", Launcher::Torchrun)
)]
#[case::a_local_address_of_version_six(
    "RANK=2 WORLD_SIZE=3 MASTER_ADDR=::1",
    ((2, 3, 2, 3), "::1:29500", Launcher::Torchrun)
)]
#[case::no_size_of_the_machine(
    "RANK=6 WORLD_SIZE=8 LOCAL_RANK=2 MASTER_ADDR=a",
    ((6, 8, 2, 3), "a:29500", Launcher::Torchrun)
)]
#[case::an_old_mark_of_no_local_rank(
    "RANK=1 WORLD_SIZE=2 LOCAL_RANK=-1 LOCAL_WORLD_SIZE=2",
    ((1, 2, 1, 2), "127.0.0.1:29500", Launcher::Torchrun)
)]
#[case::spaces_around_values(
    "RANK=_1_ WORLD_SIZE=2 LOCAL_WORLD_SIZE=2_",
    ((1, 2, 1, 2), "127.0.0.1:29500", Launcher::Torchrun)
)]
#[case::open_mpi(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
    ((1, 2, 1, 2), "127.0.0.1:29500", Launcher::OpenMpi)
)]
#[case::open_mpi_on_two_machines(
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 \
     OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=400",
    ((3, 4, 1, 2), "node1:400", Launcher::OpenMpi)
)]
#[case::mpich(
    "PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4",
    ((1, 4, 1, 4), "127.0.0.1:29500", Launcher::Mpich)
)]
#[case::mvapich(
    "MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=0 MV2_COMM_WORLD_LOCAL_SIZE=2",
    ((0, 2, 0, 2), "127.0.0.1:29500", Launcher::Mvapich)
)]
#[case::slurm(
    "SLURM_PROCID=5 SLURM_NTASKS=6 SLURM_LOCALID=1 SLURM_NTASKS_PER_NODE=2 \
     SLURM_STEP_NODELIST=node[03-05,7]",
    ((5, 6, 1, 2), "node03:29500", Launcher::Slurm)
)]
#[case::a_port_for_each_job_and_step(
    "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_JOB_ID=1251 SLURM_STEP_ID=3",
    ((1, 2, 0, 1), "n1:10019", Launcher::Slurm)
)]
#[case::a_port_that_is_said(
    "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_JOB_ID=1251 SLURM_STEP_ID=3 MASTER_PORT=5",
    ((1, 2, 0, 1), "n1:5", Launcher::Slurm)
)]
#[case::a_number_of_a_job_that_is_none(
    "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_JOB_ID=x SLURM_STEP_ID=3",
    ((1, 2, 0, 1), "n1:29500", Launcher::Slurm)
)]
#[case::the_largest_number_of_a_job(
    "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NNODES=1 SLURM_JOB_ID=18446744073709551615 SLURM_STEP_ID=3",
    ((1, 2, 0, 2), "127.0.0.1:21603", Launcher::Slurm)
)]
#[case::slurm_on_one_machine_with_a_name(
    "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=n2 SLURM_JOB_ID=7 SLURM_STEP_ID=0",
    ((1, 2, 1, 2), "127.0.0.1:10112", Launcher::Slurm)
)]
#[case::pmix_with_a_size(
    "PMIX_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 PMIX_LOCAL_SIZE=2",
    ((1, 2, 1, 2), "127.0.0.1:29500", Launcher::Pmix)
)]
#[case::pmix_within_slurm(
    "PMIX_RANK=1 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_NNODES=1 SLURM_JOB_ID=7 SLURM_STEP_ID=0",
    ((1, 2, 1, 2), "127.0.0.1:10112", Launcher::Slurm)
)]
#[case::slurm_with_pmi(
    "PMI_RANK=2 PMI_SIZE=3 SLURM_PROCID=2 SLURM_NTASKS=3 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=2,1 \
     SLURM_STEP_NODELIST=n[1-2] SLURM_JOB_ID=1 SLURM_STEP_ID=0",
    ((2, 3, 0, 1), "n1:10016", Launcher::Slurm)
)]
#[case::mpich_within_slurm(
    "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_JOB_ID=1 SLURM_STEP_ID=0",
    ((1, 2, 1, 2), "127.0.0.1:29500", Launcher::Mpich)
)]
#[case::slurm_on_one_machine(
    "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_NNODES=1 SLURM_JOB_ID=7 SLURM_STEP_ID=0",
    ((1, 2, 1, 2), "127.0.0.1:10112", Launcher::Slurm)
)]
#[case::slurm_with_fewer_tasks_on_the_last_machine(
    "SLURM_PROCID=4 SLURM_NTASKS=5 SLURM_LOCALID=0 SLURM_NODEID=2 SLURM_TASKS_PER_NODE=2(x2),1 \
     SLURM_NTASKS_PER_NODE=2 SLURM_JOB_NODELIST=a,b,c",
    ((4, 5, 0, 1), "a:29500", Launcher::Slurm)
)]
#[case::a_step_smaller_than_its_job(
    "SLURM_PROCID=1 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_STEP_NODELIST=a,b \
     SLURM_JOB_NODELIST=x,a,b",
    ((1, 2, 0, 1), "a:29500", Launcher::Slurm)
)]
#[case::torchrun_within_slurm(
    "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 SLURM_PROCID=0 SLURM_NTASKS=4",
    ((0, 2, 0, 2), "127.0.0.1:29500", Launcher::Torchrun)
)]
#[case::a_job_script_that_exports_the_size(
    "WORLD_SIZE=2 MASTER_ADDR=m MASTER_PORT=9 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0",
    ((1, 2, 0, 1), "m:9", Launcher::Slurm)
)]
#[case::a_cluster_with_a_rank_of_its_own(
    "RANK=7 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 \
     OMPI_COMM_WORLD_LOCAL_SIZE=2",
    ((1, 2, 1, 2), "127.0.0.1:29500", Launcher::OpenMpi)
)]
fn launchers(#[case] variables: &str, #[case] wanted: Wanted<'_>) {
    let found = read(variables).unwrap().unwrap();
    let RankVariables { rank, world_size, local_rank, local_world_size, .. } = found;
    let place = format!("{}:{}", found.master_addr, found.master_port);
    let numbers = (rank, world_size, local_rank, local_world_size);
    assert_eq!((numbers, place.as_str(), found.source), wanted);
}

#[rstest]
#[case::nothing("")]
#[case::empty_values("RANK= WORLD_SIZE= LOCAL_RANK=_")]
#[case::an_old_mark("LOCAL_RANK=-1")]
#[case::old_marks("RANK=-1 WORLD_SIZE=-1 LOCAL_RANK=-1")]
#[case::a_world_of_one_without_a_rank("WORLD_SIZE=1")]
#[case::an_address_alone("MASTER_ADDR=host MASTER_PORT=29500")]
#[case::one_slurm_task("SLURM_PROCID=0 SLURM_NTASKS=1")]
#[case::a_batch_script("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_JOB_ID=12 SLURM_JOB_NODELIST=a,b")]
#[case::a_shell_of_an_allocation(
    "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_JOB_ID=12 SLURM_STEP_ID=4294967290 SLURM_JOB_NODELIST=a,b"
)]
#[case::an_allocation("SLURM_NTASKS=4 SLURM_JOB_ID=12")]
#[case::half_an_mpi("PMI_RANK=0")]
#[case::the_first_of_pmix("PMIX_RANK=0")]
#[case::an_empty_address_alone("MASTER_ADDR= WORLD_SIZE=")]
fn a_single_process(#[case] variables: &str) {
    assert_eq!(read(variables).unwrap(), None);
}

#[rstest]
#[case::world_size_without_rank("WORLD_SIZE=2", "WORLD_SIZE is 2, but RANK is not set")]
#[case::rank_without_world_size("RANK=1", "RANK is 1, but WORLD_SIZE is not set")]
#[case::local_rank_alone("LOCAL_RANK=1", "LOCAL_RANK is 1, but RANK is not set")]
#[case::rank_outside_the_world(
    "RANK=2 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2",
    "RANK is 2, but WORLD_SIZE is 2: ranks are counted from 0 to 1"
)]
#[case::local_rank_outside_its_machine(
    "RANK=1 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2",
    "LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2"
)]
#[case::local_rank_outside_the_world(
    "RANK=1 WORLD_SIZE=2 LOCAL_RANK=2 MASTER_ADDR=a",
    "LOCAL_RANK is 2, but WORLD_SIZE is 2"
)]
#[case::a_machine_larger_than_the_world(
    "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=4",
    "LOCAL_WORLD_SIZE is 4, but WORLD_SIZE is 2"
)]
#[case::not_a_number("RANK=zero WORLD_SIZE=2", "RANK is \"zero\", but must be a whole number of at least 0")]
#[case::negative("RANK=-1 WORLD_SIZE=2", "WORLD_SIZE is 2, but RANK is not set")]
#[case::negative_in_an_mpi("PMI_RANK=-1 PMI_SIZE=2", "PMI_RANK is \"-1\"")]
#[case::an_empty_world("RANK=0 WORLD_SIZE=0", "WORLD_SIZE is \"0\", but must be a whole number from 1 to 1048576")]
#[case::too_large_a_world(
    "RANK=0 WORLD_SIZE=1000000000",
    "WORLD_SIZE is \"1000000000\", but must be a whole number from 1 to"
)]
#[case::too_large_a_machine("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1048577", "LOCAL_WORLD_SIZE is \"1048577\"")]
#[case::too_large_an_mpi("PMI_RANK=0 PMI_SIZE=1000000000", "PMI_SIZE is \"1000000000\"")]
#[case::too_large_a_step("SLURM_PROCID=0 SLURM_NTASKS=1000000000", "SLURM_NTASKS is \"1000000000\"")]
#[case::an_empty_address(
    "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=",
    "MASTER_ADDR is \"\", but must be the host name or address of the machine of rank 0"
)]
#[case::a_blank_address("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=_", "MASTER_ADDR is \"")]
#[case::no_port("RANK=0 WORLD_SIZE=1 MASTER_PORT=0", "MASTER_PORT is \"0\", but must be a port number from 1 to 65535")]
#[case::too_high_a_port("RANK=0 WORLD_SIZE=1 MASTER_PORT=65536", "MASTER_PORT is \"65536\"")]
#[case::no_local_rank("RANK=1 WORLD_SIZE=2 MASTER_ADDR=a", "rank 1 of 2 does not know its place on this machine")]
#[case::no_address(
    "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0",
    "rank 1 of 2 does not know where to meet the others: MASTER_ADDR is not set"
)]
#[case::no_address_of_an_mpi(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
    "MASTER_ADDR is not set"
)]
#[case::an_mpi_rank_outside_its_world(
    "PMI_RANK=4 PMI_SIZE=4",
    "PMI_RANK is 4, but PMI_SIZE is 4: ranks are counted from 0 to 3"
)]
#[case::pmix_without_a_size("PMIX_RANK=1", "PMIX_RANK is 1, but no variable says how many processes there are")]
#[case::two_sizes(
    "WORLD_SIZE=3 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0",
    "WORLD_SIZE is 3, but Slurm started 2 processes (SLURM_NTASKS)"
)]
#[case::a_broken_host_list(
    "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NODELIST=node[1-2",
    "SLURM_STEP_NODELIST is \"node[1-2\", which is not a Slurm host list"
)]
fn contradictions_are_named(#[case] variables: &str, #[case] message: &str) {
    let error = read(variables).unwrap_err();
    assert!(error.is_environment());
    assert!(error.to_string().contains(message), "{error}");
}

#[test]
fn a_malformed_number_keeps_its_cause() {
    let error = read("RANK=one WORLD_SIZE=2").unwrap_err();
    assert!(std::error::Error::source(&error).unwrap().to_string().contains("invalid digit"));
}

#[rstest]
#[case("node1", Some("node1"))]
#[case("node1,node2", Some("node1"))]
#[case("node[1-4]", Some("node1"))]
#[case("node[007,3-5]", Some("node007"))]
#[case("rack[1-2]node[5,6].local", Some("rack1node5.local"))]
#[case("a-b-[3],c", Some("a-b-3"))]
#[case("", None)]
#[case(",b", None)]
#[case("node[]", None)]
#[case("node[x]", None)]
#[case("node]1", None)]
#[case("node[1-3", None)]
#[case("two words", None)]
fn first_hosts(#[case] list: &str, #[case] wanted: Option<&str>) {
    assert_eq!(first_host(list).as_deref(), wanted, "{list}");
}

fn resolve(text: &str) -> accelerate_core::Result<RunConfig> {
    RunConfig::resolve(Sources { environment: Some(&lookup(text)), ..Default::default() })
}

#[test]
fn settings_of_the_launcher() {
    let config = resolve(
        "ACCELERATE_MIXED_PRECISION=fp16 ACCELERATE_USE_CPU=True ACCELERATE_DEBUG_MODE=on \
         ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 ACCELERATE_TORCH_DEVICE=cuda:1 \
         ACCELERATE_CPU_AFFINITY=1 ACCELERATE_LOG_LEVEL=DEBUG ACCELERATE_DYNAMO_BACKEND=TS",
    )
    .unwrap();
    let cluster = &config.cluster;
    assert_eq!((cluster.mixed_precision, cluster.torch_device.as_deref()), (MixedPrecision::Fp16, Some("cuda:1")));
    assert!(cluster.use_cpu && cluster.debug && cluster.enable_cpu_affinity);
    assert_eq!((cluster.log_level, config.dynamo.backend), (Some(LogLevel::Debug), DynamoBackend::Ts));
    assert_eq!(config.gradient_accumulation.num_steps, 4);
    let silent = resolve("ACCELERATE_GRADIENT_ACCUMULATION_STEPS=auto ACCELERATE_USE_CPU=").unwrap();
    assert_eq!(silent, resolve("").unwrap());
}

#[rstest]
#[case("ACCELERATE_MIXED_PRECISION=half", "ACCELERATE_MIXED_PRECISION is \"half\", but must be one of")]
#[case("ACCELERATE_USE_CPU=maybe", "ACCELERATE_USE_CPU is \"maybe\"")]
#[case("ACCELERATE_GRADIENT_ACCUMULATION_STEPS=0", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is \"0\"")]
#[case("ACCELERATE_GRADIENT_ACCUMULATION_STEPS=1.5", "must be a whole number of at least 1")]
fn settings_that_are_wrong(#[case] variables: &str, #[case] message: &str) {
    let error = resolve(variables).unwrap_err();
    assert!(error.is_environment());
    assert!(error.to_string().contains(message), "{error}");
}

#[test]
fn flags_are_read_with_space_around_them() {
    assert!(parse_flag(&lookup("X=_yes_"), "X", false).unwrap());
    assert!(parse_flag(&lookup("X=_"), "X", true).unwrap());
}

const NAMES: [&str; 22] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
    "SLURM_NNODES",
    "PMIX_RANK",
    "PMIX_LOCAL_RANK",
];

proptest! {
    /// Whatever is set, the answer is either consistent or an error about the environment.
    #[test]
    fn any_environment(values in prop::collection::vec(
        prop::option::of(prop_oneof![(0..5_usize).prop_map(|n| n.to_string()), "[a-z0-9,()x\\[\\]-]{0,8}"]),
        NAMES.len(),
    )) {
        let lookup = |name: &str| {
            NAMES.iter().position(|&known| known == name).and_then(|at| values[at].clone())
        };
        match rank_variables(&lookup) {
            Ok(None) => {}
            Ok(Some(found)) => {
                prop_assert!(found.rank < found.world_size);
                prop_assert!(found.local_rank < found.local_world_size);
                prop_assert!(found.local_world_size <= found.world_size);
                prop_assert!(!found.master_addr.is_empty() && found.master_port > 0);
            }
            Err(error) => prop_assert!(error.is_environment()),
        }
    }
}
