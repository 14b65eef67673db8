//! What a launch makes of its surroundings: another launcher's ranks, one machine of several, a file and what replaces it.

use accelerate_core::config::{ConfigFile, LaunchPlace, RunConfig, Sources, settings};
use accelerate_core::environment::{InnerLaunch, outer_world, unusable_numbers};
use accelerate_core::hosts::machine_rank;
use rstest::rstest;
use std::collections::HashMap;

/// `A=1 B=2` as an environment.
fn variables(text: &str) -> impl Fn(&str) -> Option<String> + use<> {
    let pairs = text.split_whitespace().map(|pair| pair.split_once('=').unwrap());
    let variables: HashMap<String, String> = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    move |name| variables.get(name).cloned()
}

/// A run by `--flag=value` words, variables and a file.
fn run(flags: &str, environment: &str, file: &str, is_for_python: bool) -> RunConfig {
    let by_flag = |flag: &str| settings().find(|setting| setting.flag() == Some(flag)).unwrap();
    let said = flags.split_whitespace().map(|word| word.trim_start_matches('-').split_once('=').unwrap());
    let flags = said.map(|(flag, value)| (by_flag(flag), value.to_owned())).collect();
    let file = Some(ConfigFile::read(file, "run.yaml".as_ref()).unwrap());
    let lookup = variables(environment);
    RunConfig::resolve(Sources { flags, environment: Some(&lookup), file, is_for_python, ..Default::default() })
        .unwrap()
}

#[rstest]
#[case::open_mpi("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", "rank 1 of 2 (OMPI_COMM_WORLD_SIZE)")]
#[case::mvapich("MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_SIZE=2", "rank 0 of 2 (MV2_COMM_WORLD_SIZE)")]
#[case::mpich("PMI_RANK=3 PMI_SIZE=4", "rank 3 of 4 (PMI_SIZE)")]
#[case::pmix("PMIX_RANK=1 WORLD_SIZE=2", "rank 1 of 2 (WORLD_SIZE)")]
#[case::a_pod("RANK=1 WORLD_SIZE=2 MASTER_ADDR=pod-0", "rank 1 of 2 (WORLD_SIZE)")]
#[case::a_number_that_differs("WORLD_SIZE=8 PMI_RANK=0 PMI_SIZE=2", "rank 0 of 2 (PMI_SIZE)")]
#[case::a_world_of_one("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", "none")]
#[case::a_size_alone("WORLD_SIZE=8", "none")]
#[case::a_rank_alone("RANK=3", "none")]
#[case::no_numbers("RANK=a WORLD_SIZE=b", "none")]
#[case::outside_of_its_world("RANK=8 WORLD_SIZE=8", "none")]
#[case::old_marks("RANK=-1 WORLD_SIZE=-1", "none")]
#[case::of_our_own_launch("RANK=1 WORLD_SIZE=2 ACCELERATE_LAUNCH_ID=7-a", "none")]
#[case::a_task_of_slurm(
    "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=4 SLURM_STEP_ID=0 SLURM_JOB_ID=7",
    "rank 1 of 2 (SLURM_STEP_NUM_TASKS)"
)]
#[case::a_task_of_slurm_with_pmi(
    "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_JOB_ID=7 PMI_RANK=1 PMI_SIZE=2",
    "rank 1 of 2 (SLURM_NTASKS)"
)]
#[case::the_only_task("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=4 SLURM_STEP_ID=0 SLURM_JOB_ID=7", "none")]
#[case::a_batch_script("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_JOB_ID=7", "none")]
#[case::a_batch_script_that_is_a_step("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_ID=4294967291 SLURM_JOB_ID=7", "none")]
#[case::a_shell_of_an_allocation("SLURM_NTASKS=4 SLURM_JOB_ID=7", "none")]
#[case::a_shell_at_a_terminal(
    "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_ID=0 SLURM_JOB_ID=7 SLURM_PTY_PORT=40001",
    "none"
)]
#[case::within_a_rank_of_a_launch(
    "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_JOB_ID=7 ACCELERATE_LAUNCH_ID=7-a",
    "none"
)]
fn which_rank_of_another_launcher_a_launch_is(#[case] environment: &str, #[case] wanted: &str) {
    let found = outer_world(&variables(environment)).map_or("none".to_owned(), |world| world.to_string());
    assert_eq!(found, wanted);
}

#[rstest]
#[case::a_world("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1", Some(1))]
#[case::of_mpi("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0", Some(0))]
#[case::not_said("RANK=1 WORLD_SIZE=2 MASTER_ADDR=pod-0", None)]
fn a_rank_of_another_launcher_knows_its_place_where_that_says_it(
    #[case] environment: &str,
    #[case] local_rank: Option<usize>,
) {
    assert_eq!(outer_world(&variables(environment)).unwrap().local_rank, local_rank);
}

/// A program that is started with these refuses to start, and a launch goes on without them.
#[rstest]
#[case::a_size_alone("WORLD_SIZE=2", Some("WORLD_SIZE=2"))]
#[case::a_rank_alone("RANK=3 MASTER_ADDR=a", Some("RANK=3"))]
#[case::a_local_rank_alone("LOCAL_RANK=0", Some("LOCAL_RANK=0"))]
#[case::no_numbers("RANK=x WORLD_SIZE=2", Some("RANK=x, WORLD_SIZE=2"))]
#[case::outside_of_its_world("RANK=5 WORLD_SIZE=2", Some("RANK=5, WORLD_SIZE=2"))]
#[case::of_mpi("PMI_RANK=2 PMI_SIZE=2", Some("PMI_RANK=2, PMI_SIZE=2"))]
#[case::a_rank_of_pmix("PMIX_RANK=1", Some("PMIX_RANK=1"))]
#[case::of_a_step(
    "SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_ID=0 SLURM_JOB_ID=7",
    Some("SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=2")
)]
#[case::in_a_batch_script("RANK=3 SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_JOB_ID=7", Some("RANK=3"))]
#[case::a_rank_of_a_world("RANK=1 WORLD_SIZE=2", None)]
#[case::of_one("WORLD_SIZE=1", None)]
#[case::alone("RANK=0 WORLD_SIZE=1", None)]
#[case::old_marks("RANK=-1 WORLD_SIZE=-1", None)]
#[case::empty("RANK= WORLD_SIZE=", None)]
#[case::of_our_own_launch("RANK=1 ACCELERATE_LAUNCH_ID=7-a", None)]
#[case::a_task_of_slurm("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_JOB_ID=7", None)]
#[case::nothing("", None)]
fn numbers_that_name_no_rank_are_told(#[case] environment: &str, #[case] wanted: Option<&str>) {
    assert_eq!(unusable_numbers(&variables(environment)).as_deref(), wanted);
}

#[rstest]
#[case::one_process(InnerLaunch { num_processes: 1, ..Default::default() }, None)]
#[case::several(
    InnerLaunch { num_processes: 3, ..Default::default() },
    Some("start 3 processes as a run of its own. The launches of the other ranks would do the same; start the program itself with that \
          launcher, or say --num_processes 1 for one process as that rank, or make one run of all these launches with --num_machines 2 \
          --machine_rank 1 --num_processes 6")
)]
#[case::machines(
    InnerLaunch { num_processes: 1, flag_of_machines: Some("--hosts"), max_restarts: 0 },
    Some("--hosts starts processes on other machines")
)]
#[case::restarts(
    InnerLaunch { num_processes: 1, flag_of_machines: None, max_restarts: 3 },
    Some("--max_restarts 3 cannot start the other ranks again")
)]
fn what_a_launch_may_be_within_the_ranks_of_another(#[case] launch: InnerLaunch<'_>, #[case] refused: Option<&str>) {
    let world = outer_world(&variables("PMI_RANK=1 PMI_SIZE=2")).unwrap();
    let error = world.check(launch).err().map(|error| error.to_string());
    assert_eq!(error.is_some(), refused.is_some(), "{error:?}");
    assert!(error.is_none_or(|error| error.contains(refused.unwrap()) && error.contains("rank 1 of 2 (PMI_SIZE)")));
}

/// In a job the launch itself is the cure.
#[rstest]
#[case::several(InnerLaunch { num_processes: 3, ..Default::default() }, "or start the launch once, without srun: in the job it starts")]
#[case::machines(
    InnerLaunch { num_processes: 1, flag_of_machines: Some("--hosts"), max_restarts: 0 },
    "or start the launch once, without srun"
)]
fn what_a_launch_may_not_be_within_a_step_of_slurm(#[case] launch: InnerLaunch<'_>, #[case] words: &str) {
    let step = "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_ID=0 SLURM_JOB_ID=7";
    let world = outer_world(&variables(step)).unwrap();
    assert!(world.check(InnerLaunch { num_processes: 1, ..Default::default() }).is_ok());
    let error = world.check(launch).unwrap_err().to_string();
    assert!(error.contains(words) && error.contains("rank 1 of 2 (SLURM_STEP_NUM_TASKS)"), "{error}");
}

#[rstest]
#[case::a_step("SLURM_STEP_ID=0 SLURM_NNODES=2 SLURM_NODEID=1", Some(1))]
#[case::of_more_nodes("SLURM_STEP_ID=0 SLURM_NNODES=3 SLURM_NODEID=1", None)]
#[case::a_batch_script("SLURM_NNODES=2 SLURM_NODEID=0", None)]
#[case::no_number("SLURM_STEP_ID=0 SLURM_NNODES=2", None)]
#[case::nothing("", None)]
fn which_machine_this_is(#[case] environment: &str, #[case] wanted: Option<usize>) {
    let found = machine_rank(2, &variables(environment));
    if let Err(error) = &found {
        assert!(error.to_string().contains("say --machine_rank on each"), "{error}");
    }
    assert_eq!(found.ok(), wanted);
}

/// `--multi_gpu` takes the place of what is said further from the program.
#[rstest]
#[case::a_file("--multi_gpu=true", "", "distributed_type: FSDP\n", (false, false, false))]
#[case::a_file("--multi_gpu=true", "", "distributed_type: DEEPSPEED\n", (false, false, false))]
#[case::a_file("--multi_gpu=true", "", "distributed_type: MULTI_CPU\nuse_cpu: true\n", (false, false, false))]
#[case::a_variable("", "ACCELERATE_MULTI_GPU=true", "distributed_type: FSDP\n", (false, false, false))]
#[case::in_one_file("", "", "distributed_type: FSDP\nmulti_gpu: true\n", (true, false, false))]
#[case::a_switch_of_its_own("--multi_gpu=true --use_fsdp=true", "", "distributed_type: FSDP\n", (true, false, false))]
#[case::a_switch_of_its_own("--multi_gpu=true --cpu=true", "", "distributed_type: MULTI_CPU\n", (false, false, true))]
#[case::nobody("", "", "distributed_type: MULTI_CPU\n", (false, false, true))]
fn one_process_for_each_gpu_is_a_way_to_train(
    #[case] flags: &str,
    #[case] environment: &str,
    #[case] file: &str,
    #[case] wanted: (bool, bool, bool),
) {
    let cluster = run(flags, environment, file, false).cluster;
    assert_eq!((cluster.use_fsdp, cluster.use_deepspeed, cluster.use_cpu), wanted);
}

/// It has an effect where it overrules a file, and only there.
#[rstest]
#[case("distributed_type: FSDP\n", 0)]
#[case("distributed_type: MULTI_GPU\n", 1)]
#[case("", 1)]
fn a_switch_that_overrules_is_not_without_effect(#[case] file: &str, #[case] num_messages: usize) {
    let run = run("--multi_gpu=true", "", file, false);
    let about = run.messages().iter().filter(|message| message.setting == "multi_gpu").count();
    assert_eq!(about, num_messages);
    let overridden: Vec<_> = run.overridden("distributed_type").map(|other| other.value.as_str()).collect();
    assert_eq!(overridden, if num_messages == 0 { vec!["FSDP"] } else { vec![] });
}

const ALONE: LaunchPlace = LaunchPlace { is_on_machines: false, is_alone: true };
const HERE: LaunchPlace = LaunchPlace { is_on_machines: false, is_alone: false };
const MACHINES: LaunchPlace = LaunchPlace { is_on_machines: true, is_alone: false };
const IP: &str = "main_process_ip is 10.0.0.9 (run.yaml:1:1), which has no effect: num_machines is 1";
const HOST_FILE: &str = "use_deepspeed: true\ndeepspeed_config:\n  deepspeed_hostfile: hosts\n";

#[rstest]
#[case("--ssh_command=a", "", HERE, &["ssh_command is a (flag --ssh_command), which has no effect: no machines"])]
#[case("--ssh_command=a", "", MACHINES, &[])]
#[case("--connection_timeout=30", "", ALONE, &["connection_timeout is 30"])]
#[case::for_many_launches("", "connection_timeout: 5\n", HERE, &[])]
#[case("--same_network=true", "", HERE, &["same_network is true"])]
#[case("", "same_network: true\n", HERE, &[])]
#[case("--stop_margin=60", "", HERE, &["stop_margin is 60"])]
#[case("--stop_margin=60 --stop_at=2030-01-31T18:00:00Z", "", HERE, &[])]
#[case("--main_process_port=4000", "", ALONE, &["main_process_port is 4000"])]
#[case("--main_process_port=4000", "", HERE, &[])]
#[case("", "main_process_ip: 10.0.0.9\nnum_machines: 1\n", HERE, &[IP])]
#[case("", "main_process_ip: 10.0.0.9\nnum_machines: 2\n", HERE, &[])]
#[case("", "main_process_ip: 10.0.0.9\n", MACHINES, &[])]
#[case("", "main_process_ip: 127.0.0.1\n", HERE, &[])]
#[case("", HOST_FILE, MACHINES, &[])]
#[case("--num_machines=1", HOST_FILE, HERE, &["num_machines is 1; leave that out"])]
#[case("--num_machines=2", HOST_FILE, MACHINES, &[])]
fn what_changes_nothing_in_a_place(
    #[case] flags: &str,
    #[case] file: &str,
    #[case] place: LaunchPlace,
    #[case] wanted: &[&str],
) {
    let found: Vec<_> = run(flags, "", file, false).unused_in(place).iter().map(ToString::to_string).collect();
    assert_eq!(found.len(), wanted.len(), "{found:?}");
    assert!(found.iter().zip(wanted).all(|(found, words)| found.contains(words)), "{found:?}");
}

#[rstest]
#[case::another("ACCELERATE_MIXED_PRECISION=bf16", "mixed_precision: fp16\n", &["mixed_precision is bf16", "not fp16 (run.yaml:1:1)"])]
#[case::the_same("ACCELERATE_MIXED_PRECISION=bf16", "mixed_precision: bf16\n", &[])]
#[case::nothing("ACCELERATE_MIXED_PRECISION=bf16", "debug: true\n", &[])]
fn a_variable_that_replaces_a_line_of_a_file_is_told(
    #[case] environment: &str,
    #[case] file: &str,
    #[case] words: &[&str],
) {
    let found = run("", environment, file, false).warnings(8);
    assert_eq!(found.is_empty(), words.is_empty(), "{found:?}");
    assert!(words.iter().all(|word| found[0].contains(word)), "{found:?}");
    assert!(run("--mixed_precision=no", environment, file, false).warnings(8).is_empty());
}

/// What files of the reference say by these is nothing.
#[rstest]
#[case("num_processes: -1\n", None, "no")]
#[case("fp16: false\nmixed_precision: bf16\n", None, "bf16")]
#[case("mixed_precision: bf16\nfp16: no\n", None, "bf16")]
#[case("fp16: false\nnum_processes: 2\n", Some(2), "no")]
#[case("fp16: true\n", None, "fp16")]
fn what_a_file_leaves_open(#[case] file: &str, #[case] num_processes: Option<usize>, #[case] precision: &str) {
    let cluster = run("", "", file, false).cluster;
    assert_eq!((cluster.num_processes, cluster.mixed_precision.to_string().as_str()), (num_processes, precision));
}

#[rstest]
#[case("distributed_type: MULTI_GPU\n", "", true)]
#[case("distributed_type: MULTI_GPU\n", "--cpu=true", false)]
#[case("distributed_type: NO\n", "--multi_gpu=true", true)]
#[case("", "", false)]
fn ranks_even_of_one_process(#[case] file: &str, #[case] flags: &str, #[case] wanted: bool) {
    let run = run(flags, "", file, true);
    assert_eq!(run.is_multi_gpu(), wanted);
    assert_eq!(run.unasked_variables(1).contains_key("ACCELERATE_USE_CPU"), !wanted && flags.is_empty());
}

/// PyTorch's engine passes over what this one refuses.
#[test]
fn a_strategy_of_version_1_is_handed_on_to_programs_in_python() {
    let file = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n";
    let run = run("", "", file, true);
    assert_eq!(run.variables()["FSDP_SHARDING_STRATEGY"], "SHARD_GRAD_OP");
    let told = run.warnings(8);
    assert!(told.iter().any(|line| line.contains("reshard_after_forward only")), "{told:?}");
    let file = Some(ConfigFile::read(file, "run.yaml".as_ref()).unwrap());
    assert!(RunConfig::resolve(Sources { file, ..Default::default() }).is_err());
}
