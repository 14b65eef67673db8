//! The environment of each rank: who it is, how many threads it has, and what nobody else may have told it.

use std::ffi::{OsStr, OsString};

use accelerate_core::environment::{CORES_VARIABLE, UnusableThreads, check_num_threads};

use crate::config::LaunchConfig;
use crate::machine::Machine;
use crate::placement::core_list;
use crate::{logs, reference};

/// Variables with which other launchers than torchrun describe *their* ranks. A rank of ours must not inherit them: a
/// launch inside a job of several processes would otherwise mix up the two. The exception is [`LaunchConfig::outer_world`].
const VARIABLES_OF_OTHER_LAUNCHERS: &[&str] = &[
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_LOCAL_RANK",
    "PMI_LOCAL_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "PMIX_RANK",
    "SLURM_PROCID",
    "SLURM_LOCALID",
];

/// What a rank finds in its environment beside what it inherits; `None` is what it does not inherit.
pub(super) fn environment(
    config: &LaunchConfig,
    local_rank: usize,
    main_process_port: u16,
    captured: bool,
    machine: &Machine,
    cores: Option<&[usize]>,
) -> Vec<(OsString, Option<OsString>)> {
    let num_local = config.num_local_processes();
    let is_distributed = config.is_numbered();
    let mut variables: Vec<(OsString, Option<OsString>)> = Vec::new();
    let mut set = |name: &str, value: Option<OsString>| variables.push((name.into(), value));

    let rank = config.first_rank() + local_rank;
    let main_process_ip = config.main_process_ip.as_deref().unwrap_or("127.0.0.1");
    let of_torchrun = reference::of_torchrun(config, rank);
    VARIABLES_OF_OTHER_LAUNCHERS.iter().filter(|_| config.outer_world.is_none()).for_each(|name| set(name, None));
    for (name, value) in [
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", local_rank.to_string()),
        ("WORLD_SIZE", config.num_processes.to_string()),
        ("LOCAL_WORLD_SIZE", num_local.to_string()),
        ("GROUP_RANK", config.machine_rank.to_string()),
        ("MASTER_ADDR", main_process_ip.to_string()),
        ("MASTER_PORT", main_process_port.to_string()),
    ]
    .into_iter()
    .chain(of_torchrun)
    {
        let is_told = is_distributed || (config.max_restarts > 0 && reference::OF_RESTARTS.contains(&name));
        if is_told || config.outer_world.is_none() {
            set(name, is_told.then_some(value.into()));
        }
    }

    set(CORES_VARIABLE, cores.map(|cores| core_list(cores).into()));
    if let Some(file) = logs::error_file(config, local_rank) {
        set("TORCHELASTIC_ERROR_FILE", Some(file.into()));
    }
    if let Some(num_threads) = num_threads(config, machine, cores) {
        set("OMP_NUM_THREADS", Some(num_threads.to_string().into()));
    }
    // Python holds back output that does not go to a terminal, and with it the reason of a crash.
    if captured && config.program.is_python() && !machine.pythonunbuffered_is_set {
        set("PYTHONUNBUFFERED", Some("1".into()));
    }
    for (name, value) in reference::of_python(config, machine) {
        set(name, Some(value));
    }
    config.reference.unasked.iter().for_each(|(name, value)| set(name, Some(value.into())));

    let is_overridden = |name: &OsStr| config.environment.iter().any(|(other, _)| other == name);
    variables.retain(|(name, _): &(OsString, _)| !is_overridden(name));
    variables.extend(config.environment.iter().map(|(name, value)| (name.clone(), Some(value.clone()))));
    variables
}

/// `OMP_NUM_THREADS` for each rank; `None` leaves it as it is. Without a limit every rank would start as many threads as there
/// are cores. A rank that is kept on `cores` has a thread for each, unless a container's limit is lower.
fn num_threads(config: &LaunchConfig, machine: &Machine, cores: Option<&[usize]>) -> Option<usize> {
    let is_shared = config.num_local_processes() > 1 && machine.omp_num_threads.is_none();
    let in_place = || unusable_threads(config, machine).map(|unusable| unusable.used);
    let own = || match cores {
        Some(cores) if machine.num_cores >= machine.cores.len() => cores.len().max(1),
        _ => even_share(config, machine),
    };
    config.num_cpu_threads_per_process.or_else(in_place).or_else(|| is_shared.then(own))
}

fn even_share(config: &LaunchConfig, machine: &Machine) -> usize {
    (machine.num_cores / config.num_local_processes().max(1)).max(1)
}

/// The `OMP_NUM_THREADS` that the ranks would inherit, if nobody can mean it: 0, a word, more than
/// [`MAX_THREADS_PER_CORE`](accelerate_core::environment::MAX_THREADS_PER_CORE) allow. They get an even share of the cores
/// instead; who starts them says so.
///
/// ```
/// use accelerate_launch::{LaunchConfig, Machine, Program, unusable_threads};
/// let machine = Machine { num_cores: 8, omp_num_threads: Some("0".to_owned()), ..Machine::probe() };
/// let config = LaunchConfig::new(Program::Executable("train".into()), 4);
/// assert_eq!(unusable_threads(&config, &machine).unwrap().used, 2);
/// let config = LaunchConfig { num_cpu_threads_per_process: Some(1), ..config };
/// assert!(unusable_threads(&config, &machine).is_none());
/// ```
pub fn unusable_threads(config: &LaunchConfig, machine: &Machine) -> Option<UnusableThreads> {
    let is_said = config.num_cpu_threads_per_process.is_some()
        || config.environment.iter().any(|(name, _)| name == "OMP_NUM_THREADS");
    let inherited = machine.omp_num_threads.as_deref().filter(|_| !is_said)?;
    check_num_threads(inherited, machine.num_cores, even_share(config, machine))
}
#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use super::*;
    use crate::config::{Helper, LocalRanks, Program};
    use crate::plan::plan;
    use crate::stdin::Stdin;
    use accelerate_core::config::{RunConfig, Sources, Tee, settings};
    use accelerate_core::environment::{OuterWorld, outer_world};
    use accelerate_core::settings::SettingValue;
    use rstest::rstest;

    pub(in crate::plan) const MACHINE: Machine = Machine {
        num_cores: 8,
        cores: Vec::new(),
        gpu_cores: Vec::new(),
        cuda_visible_devices: None,
        stdin_is_terminal: false,
        stdout_is_terminal: false,
        stderr_is_terminal: false,
        terminal_size: None,
        omp_num_threads: None,
        pythonunbuffered_is_set: false,
        set_variables: Vec::new(),
        python_path: None,
        working_folder: None,
    };

    pub(in crate::plan) fn config(num_processes: usize) -> LaunchConfig {
        LaunchConfig::new(Program::Executable("train".into()), num_processes)
    }

    /// The value each rank gets for `name`: "-" for one that is not touched, "removed" for one taken away.
    fn values(config: &LaunchConfig, machine: &Machine, name: &str) -> Vec<String> {
        config.check().unwrap();
        plan(config, &["bin/train".into()], 4000, machine)
            .ranks
            .iter()
            .map(|rank| {
                let found: Vec<_> = rank.environment.iter().filter(|(other, _)| other == name).collect();
                match found[..] {
                    [] => "-".to_string(),
                    [(_, None)] => "removed".to_string(),
                    [(_, Some(value))] => value.to_str().unwrap().to_string(),
                    _ => format!("{name} twice"),
                }
            })
            .collect()
    }

    #[rstest]
    #[case("RANK", &["0", "1", "2"])]
    #[case("LOCAL_RANK", &["0", "1", "2"])]
    #[case("WORLD_SIZE", &["3", "3", "3"])]
    #[case("LOCAL_WORLD_SIZE", &["3", "3", "3"])]
    #[case("GROUP_RANK", &["0", "0", "0"])]
    #[case("MASTER_ADDR", &["127.0.0.1", "127.0.0.1", "127.0.0.1"])]
    #[case("MASTER_PORT", &["4000", "4000", "4000"])]
    #[case("OMP_NUM_THREADS", &["2", "2", "2"])]
    #[case("ACCELERATE_USE_CPU", &["-", "-", "-"])]
    #[case("ACCELERATE_MIXED_PRECISION", &["-", "-", "-"])]
    #[case("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", &["-", "-", "-"])]
    #[case("GROUP_WORLD_SIZE", &["1", "1", "1"])]
    #[case("ROLE_RANK", &["0", "1", "2"])]
    #[case("ROLE_WORLD_SIZE", &["3", "3", "3"])]
    #[case("ROLE_NAME", &["default", "default", "default"])]
    #[case("TORCHELASTIC_RUN_ID", &["none", "none", "none"])]
    #[case("TORCHELASTIC_RESTART_COUNT", &["0", "0", "0"])]
    #[case("TORCHELASTIC_MAX_RESTARTS", &["0", "0", "0"])]
    #[case::no_agent_serves_a_store("TORCHELASTIC_USE_AGENT_STORE", &["False", "False", "False"])]
    #[case("TORCH_NCCL_ASYNC_ERROR_HANDLING", &["-", "-", "-"])]
    fn three_ranks_on_one_machine(#[case] name: &str, #[case] expected: &[&str]) {
        assert_eq!(values(&config(3), &MACHINE, name), expected);
    }

    #[rstest]
    #[case("RANK", &["2", "3"])]
    #[case("LOCAL_RANK", &["0", "1"])]
    #[case("WORLD_SIZE", &["6", "6"])]
    #[case("LOCAL_WORLD_SIZE", &["2", "2"])]
    #[case("GROUP_RANK", &["1", "1"])]
    #[case("GROUP_WORLD_SIZE", &["3", "3"])]
    #[case("ROLE_RANK", &["2", "3"])]
    #[case("MASTER_ADDR", &["10.0.0.7", "10.0.0.7"])]
    #[case("OMP_NUM_THREADS", &["4", "4"])]
    fn the_second_of_three_machines(#[case] name: &str, #[case] expected: &[&str]) {
        let config =
            LaunchConfig { num_machines: 3, machine_rank: 1, main_process_ip: Some("10.0.0.7".into()), ..config(6) };
        assert_eq!(values(&config, &MACHINE, name), expected);
    }

    #[rstest]
    #[case("RANK", &["1", "2", "3"])]
    #[case("LOCAL_RANK", &["0", "1", "2"])]
    #[case("WORLD_SIZE", &["5", "5", "5"])]
    #[case("LOCAL_WORLD_SIZE", &["3", "3", "3"])]
    #[case("GROUP_RANK", &["1", "1", "1"])]
    #[case("ROLE_RANK", &["1", "2", "3"])]
    fn the_second_of_three_machines_with_unequal_numbers(#[case] name: &str, #[case] expected: &[&str]) {
        let local_ranks = Some(LocalRanks { first_rank: 1, num_processes: 3 });
        let main_process_ip = Some("10.0.0.7".into());
        let config = LaunchConfig { num_machines: 3, machine_rank: 1, main_process_ip, local_ranks, ..config(5) };
        assert_eq!(values(&config, &MACHINE, name), expected);
        let without_input = LaunchConfig { hands_on_input: false, ..config };
        let plan = plan(&without_input, &["train".into()], 1, &MACHINE);
        assert!(plan.ranks.iter().all(|rank| rank.stdin == Stdin::Nothing));
    }

    #[rstest]
    #[case("RANK", "removed")]
    #[case("WORLD_SIZE", "removed")]
    #[case("MASTER_PORT", "removed")]
    #[case("SLURM_PROCID", "removed")]
    #[case("OMPI_COMM_WORLD_RANK", "removed")]
    #[case("TORCHELASTIC_USE_AGENT_STORE", "removed")]
    #[case("GROUP_WORLD_SIZE", "removed")]
    #[case("OMP_NUM_THREADS", "-")]
    fn one_process_is_not_distributed(#[case] name: &str, #[case] expected: &str) {
        assert_eq!(values(&config(1), &MACHINE, name), [expected]);
    }

    fn second_of_two() -> OuterWorld {
        let variables = |name: &str| match name {
            "PMI_RANK" => Some("1".to_owned()),
            "PMI_SIZE" => Some("2".to_owned()),
            _ => None,
        };
        outer_world(&variables).unwrap()
    }

    #[test]
    fn a_rank_of_another_launcher_is_called_what_that_calls_it() {
        let config = LaunchConfig { outer_world: Some(second_of_two()), ..config(1) };
        let plan = plan(&config, &["train".into()], 1, &MACHINE);
        assert_eq!((plan.ranks.len(), plan.ranks[0].rank, plan.ranks[0].local_rank, plan.world_size), (1, 1, 0, 2));
    }

    /// What another launcher says of this rank stays as it is, restarts included.
    #[rstest]
    #[case("RANK", "-")]
    #[case("LOCAL_RANK", "-")]
    #[case("MASTER_ADDR", "-")]
    #[case("OMPI_COMM_WORLD_SIZE", "-")]
    #[case("PMIX_RANK", "-")]
    #[case("TORCHELASTIC_RESTART_COUNT", "-")]
    #[case("ACCELERATE_MIXED_PRECISION", "no")]
    fn a_rank_of_another_launcher_keeps_its_numbers(#[case] name: &str, #[case] expected: &str) {
        let run = RunConfig::resolve(Sources::default()).unwrap();
        let of_run = LaunchConfig::of_run(&run, Program::guess("train.py".as_ref()), 1);
        let config = LaunchConfig { outer_world: Some(second_of_two()), ..of_run };
        assert_eq!(values(&config, &MACHINE, name), [expected]);
    }

    /// A single process is told of restarts where there may be some.
    #[rstest]
    #[case("TORCHELASTIC_RESTART_COUNT", "2")]
    #[case("TORCHELASTIC_MAX_RESTARTS", "5")]
    #[case("RANK", "removed")]
    #[case("TORCHELASTIC_RUN_ID", "removed")]
    fn processes_learn_that_they_have_been_restarted(#[case] name: &str, #[case] of_one: &str) {
        let config = |num_processes| LaunchConfig { max_restarts: 5, restart_count: 2, ..config(num_processes) };
        assert_eq!(values(&config(1), &MACHINE, name), [of_one]);
        if of_one != "removed" {
            assert_eq!(values(&config(2), &MACHINE, name), [of_one, of_one]);
        }
    }

    #[test]
    fn one_process_that_is_left_keeps_its_numbers() {
        let local_ranks = Some(LocalRanks { first_rank: 0, num_processes: 1 });
        let of_several = LaunchConfig { min_machines: Some(1), local_ranks, ..config(1) };
        assert_eq!(values(&of_several, &MACHINE, "RANK"), ["0"]);
        assert_eq!(values(&of_several, &MACHINE, "WORLD_SIZE"), ["1"]);
        // Where nobody has named machines, none can be left out.
        let of_one = LaunchConfig { local_ranks: None, ..of_several };
        assert_eq!(values(&of_one, &MACHINE, "RANK"), ["removed"]);
    }

    #[test]
    fn one_process_per_machine_is_distributed() {
        let config = LaunchConfig { num_machines: 2, machine_rank: 1, main_process_ip: Some("a".into()), ..config(2) };
        assert_eq!(values(&config, &MACHINE, "RANK"), ["1"]);
        assert_eq!(values(&config, &MACHINE, "LOCAL_WORLD_SIZE"), ["1"]);
    }

    #[test]
    fn flags_become_variables() {
        let flags = [
            ("use_cpu", "true"),
            ("mixed_precision", "bf16"),
            ("gradient_accumulation_config.num_steps", "4"),
            ("num_cpu_threads_per_process", "3"),
            ("gpu_ids", "0,2"),
        ];
        let by_path = |path: &str| settings().find(|setting| setting.path == path).unwrap();
        let flags = flags.map(|(path, text)| (by_path(path), text.to_owned())).to_vec();
        let run = RunConfig::resolve(Sources { flags, ..Default::default() }).unwrap();
        let config = LaunchConfig::of_run(&run, Program::Executable("train".into()), 1);
        assert_eq!(values(&config, &MACHINE, "ACCELERATE_USE_CPU"), ["true"]);
        assert_eq!(values(&config, &MACHINE, "ACCELERATE_MIXED_PRECISION"), ["bf16"]);
        assert_eq!(values(&config, &MACHINE, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"), ["4"]);
        assert_eq!(values(&config, &MACHINE, "CUDA_VISIBLE_DEVICES"), ["0,2"]);
        assert_eq!(values(&config, &MACHINE, "OMP_NUM_THREADS"), ["3"]);
    }

    /// What a rank of `program` gets for `name` with these switches.
    fn value_of(program: &str, num_processes: usize, switches: &[&str], machine: &Machine, name: &str) -> String {
        let by_flag = |flag: &&str| settings().find(|setting| setting.flag() == Some(*flag)).unwrap();
        let flags = switches.iter().map(|flag| (by_flag(flag), "true".to_owned())).collect();
        let run = RunConfig::resolve(Sources { flags, ..Default::default() }).unwrap();
        let config = LaunchConfig::of_run(&run, Program::guess(program.as_ref()), num_processes);
        values(&config, machine, name)[0].clone()
    }

    #[rstest]
    #[case::a_setting_that_nobody_said("train", 2, &[], "ACCELERATE_MIXED_PRECISION", "no")]
    #[case::sharded("train", 2, &["use_fsdp"], "FSDP_USE_ORIG_PARAMS", "true")]
    #[case::sharded("train", 1, &["use_fsdp"], "FSDP_SYNC_MODULE_STATES", "true")]
    #[case::no_rank_alone("train", 1, &["use_fsdp"], "RANK", "removed")]
    #[case::rank_0_of_one("train.py", 1, &["use_fsdp"], "RANK", "0")]
    #[case::rank_0_of_one("train.py", 1, &["use_deepspeed"], "TORCHELASTIC_RUN_ID", "none")]
    #[case::no_rank_alone("train.py", 1, &[], "RANK", "removed")]
    #[case::by_name("/usr/bin/python3.11", 1, &["use_fsdp"], "WORLD_SIZE", "1")]
    #[case("train.py", 1, &["cpu"], "KMP_AFFINITY", "granularity=fine,compact,1,0")]
    #[case("train.py", 1, &["cpu"], "KMP_BLOCKTIME", "-")]
    #[case::would_share_cores("train.py", 2, &["cpu"], "KMP_AFFINITY", "-")]
    #[case("train", 1, &["cpu"], "KMP_AFFINITY", "-")]
    #[case("train.py", 2, &[], "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")]
    #[case("train", 2, &["use_fsdp"], "TORCH_NCCL_ASYNC_ERROR_HANDLING", "-")]
    #[case("train.py", 2, &["use_deepspeed"], "PYTHONPATH", "/modules:/here")]
    #[case("train", 2, &["use_deepspeed"], "PYTHONPATH", "-")]
    #[case("train.py", 2, &["use_fsdp"], "PYTHONPATH", "-")]
    fn what_the_reference_would_set(
        #[case] program: &str,
        #[case] num_processes: usize,
        #[case] switches: &[&str],
        #[case] name: &str,
        #[case] expected: &str,
    ) {
        let machine = Machine {
            set_variables: vec!["KMP_BLOCKTIME"],
            python_path: Some("/modules".into()),
            working_folder: Some("/here".into()),
            ..MACHINE
        };
        assert_eq!(value_of(program, num_processes, switches, &machine, name), expected);
    }

    #[rstest]
    #[case(None, None, 16, "1")]
    #[case(None, None, 2, "4")]
    #[case(None, Some("3"), 2, "-")]
    #[case(None, Some("4,2"), 2, "-")]
    #[case(None, Some("64"), 2, "-")]
    #[case(Some(5), Some("3"), 2, "5")]
    #[case(Some(5), Some("abc"), 2, "5")]
    #[case::none(None, Some("0"), 2, "4")]
    #[case::a_word(None, Some("abc"), 2, "4")]
    #[case::negative(None, Some("-1"), 1, "8")]
    #[case::far_too_many(None, Some("100000"), 4, "2")]
    #[case::half_a_list(None, Some("4,"), 2, "4")]
    fn threads_are_shared_unless_somebody_said_otherwise(
        #[case] flag: Option<usize>,
        #[case] inherited: Option<&str>,
        #[case] num_processes: usize,
        #[case] expected: &str,
    ) {
        let config = LaunchConfig { num_cpu_threads_per_process: flag, ..config(num_processes) };
        let machine = Machine { omp_num_threads: inherited.map(str::to_owned), ..MACHINE };
        assert!(values(&config, &machine, "OMP_NUM_THREADS").iter().all(|value| value == expected));
    }

    #[rstest]
    #[case::a_thread_for_each_core(8, 3, None, &["0-2", "3-5", "6-7"], &["3", "3", "2"])]
    #[case::a_limit_of_a_container(4, 2, None, &["0-3", "4-7"], &["2", "2"])]
    #[case::somebody_said(8, 2, Some("1"), &["0-3", "4-7"], &["-", "-"])]
    #[case::one_rank(8, 1, None, &["0-7"], &["-"])]
    fn ranks_that_are_kept_on_cores_have_threads_for_these(
        #[case] num_cores: usize,
        #[case] num_processes: usize,
        #[case] inherited: Option<&str>,
        #[case] cores: &[&str],
        #[case] threads: &[&str],
    ) {
        let omp_num_threads = inherited.map(str::to_owned);
        let machine = Machine { num_cores, cores: (0..8).collect(), omp_num_threads, ..MACHINE };
        let helper = Some(Helper::this_executable());
        let config = LaunchConfig { enable_cpu_affinity: true, helper, ..config(num_processes) };
        assert_eq!(values(&config, &machine, CORES_VARIABLE), cores);
        assert_eq!(values(&config, &machine, "OMP_NUM_THREADS"), threads);
        let free = LaunchConfig { enable_cpu_affinity: false, ..config };
        assert!(values(&free, &machine, CORES_VARIABLE).iter().all(|value| value == "removed"));
    }

    #[rstest]
    #[case(0)]
    #[case(3)]
    fn files_are_those_of_torchrun(#[case] restart_count: usize) {
        let tee = Tee::read("0:1,1:3").unwrap();
        let config = LaunchConfig { tee, log_dir: Some("logs/none_x".into()), restart_count, ..config(2) };
        let plan = plan(&config, &["bin/train".into()], 1, &MACHINE);
        let files: Vec<_> =
            plan.ranks.iter().flat_map(|rank| [&rank.log_files.stdout, &rank.log_files.stderr]).collect();
        let attempt = format!("logs/none_x/attempt_{restart_count}");
        let path = |rest: &str| Some(std::path::PathBuf::from(format!("{attempt}/{rest}")));
        assert_eq!(files, [&path("0/stdout.log"), &None, &path("1/stdout.log"), &path("1/stderr.log")]);
        let wanted = ["0", "1"].map(|local_rank| format!("{attempt}/{local_rank}/error.json"));
        assert_eq!(values(&config, &MACHINE, "TORCHELASTIC_ERROR_FILE"), wanted);
    }

    #[test]
    fn extra_variables_win_and_appear_once() {
        let config = LaunchConfig {
            environment: vec![("MASTER_ADDR".into(), "::1".into()), ("NCCL_DEBUG".into(), "INFO".into())],
            ..config(2)
        };
        assert_eq!(values(&config, &MACHINE, "MASTER_ADDR"), ["::1", "::1"]);
        assert_eq!(values(&config, &MACHINE, "NCCL_DEBUG"), ["INFO", "INFO"]);
    }
}
