//! What a launcher in code can be told, and what that means for a launch.

use super::workers::Workers;
use crate::error::{LauncherError, Result};
use crate::state::Lookup;
use accelerate_core::config::{MixedPrecision, PartialRunConfig, RendezvousOptions, RunConfig, Sources};
use accelerate_launch::{Capture, LaunchConfig};

/// How [`notebook_launcher`](crate::notebook_launcher) starts processes, under the names of the reference.
///
/// ```
/// let options = accelerate::NotebookLauncherOptions { num_processes: Some(2), ..Default::default() };
/// assert_eq!((options.num_nodes, options.max_restarts), (1, 0));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct NotebookLauncherOptions {
    /// Number of processes on each machine. Without it: what `ACCELERATE_NUM_PROCESSES` says for all machines together, or an
    /// error.
    pub num_processes: Option<usize>,
    /// Precision of the computation, for a function that does not choose one itself.
    pub mixed_precision: Option<MixedPrecision>,
    /// TCP port on machine 0 where the processes find each other. Without it: any free one on one machine, 29500 on several.
    pub use_port: Option<u16>,
    /// Address of machine 0. Needed on several machines.
    pub master_addr: Option<String>,
    /// Which machine this is, counted from 0.
    pub node_rank: usize,
    /// Number of machines. The same program calls the launcher on each.
    pub num_nodes: usize,
    /// How machines find each other: `static` or `c10d`, which are the same here. Others are refused.
    pub rdzv_backend: Option<String>,
    /// `address:port`, in the place of `master_addr` and `use_port`.
    pub rdzv_endpoint: Option<String>,
    /// How long the processes may take to meet. Without it: as long as any collective may take.
    pub rdzv_conf: Option<RendezvousOptions>,
    /// What processes find in `TORCHELASTIC_RUN_ID`.
    pub rdzv_id: Option<String>,
    /// Number of times that all processes are started again after one has failed, as by `accelerate launch --max_restarts`. The
    /// function learns of it by [`Accelerator::restart_count`](crate::Accelerator::restart_count). Only on one machine.
    pub max_restarts: usize,
    /// Seconds between two looks at the processes; without effect, because their end is told at once.
    pub monitor_interval: Option<f64>,
    /// What stands before each line of a process, in the place of `[rank N] `. `${role_name}`, `${rank}` and `${local_rank}` are
    /// replaced.
    pub log_line_prefix_template: Option<String>,
}

impl Default for NotebookLauncherOptions {
    fn default() -> Self {
        Self {
            num_processes: None,
            mixed_precision: None,
            use_port: None,
            master_addr: None,
            node_rank: 0,
            num_nodes: 1,
            rdzv_backend: None,
            rdzv_endpoint: None,
            rdzv_conf: None,
            rdzv_id: None,
            max_restarts: 0,
            monitor_interval: None,
            log_line_prefix_template: None,
        }
    }
}

/// What both launchers are about.
pub(super) struct Settings {
    pub(super) options: NotebookLauncherOptions,
    pub(super) use_cpu: bool,
}

impl Settings {
    /// The launch, but for what [`Workers::settle`] says of the program.
    pub(super) fn resolve(&self, lookup: Lookup<'_>) -> Result<(RunConfig, LaunchConfig)> {
        let options = &self.options;
        let (address, port) = options.meeting()?;
        let mut code = PartialRunConfig::default();
        let cluster = &mut code.cluster;
        cluster.num_processes = options.num_processes.map(|number| number.saturating_mul(options.num_nodes));
        cluster.num_machines = Some(options.num_nodes);
        cluster.machine_rank = Some(options.node_rank);
        cluster.main_process_ip = address;
        cluster.main_process_port = port;
        cluster.mixed_precision = options.mixed_precision;
        cluster.use_cpu = self.use_cpu.then_some(true);
        cluster.rdzv_backend = options.rdzv_backend.clone();
        cluster.rdzv_conf = options.rdzv_conf;
        cluster.max_restarts = Some(options.max_restarts);
        cluster.monitor_interval = options.monitor_interval;
        let run = RunConfig::resolve(Sources { code, environment: Some(lookup), ..Default::default() })?;
        let num_processes = run.cluster.num_processes.ok_or(LauncherError::NoNumProcesses)?;
        // The reason of a failure is in the output, also in that of a single process.
        let mut config =
            LaunchConfig { capture: Capture::Always, ..LaunchConfig::of_run(&run, Workers::program(), num_processes) };
        let precision = options.mixed_precision.map(|precision| ("ACCELERATE_MIXED_PRECISION", precision.to_string()));
        let cpu = self.use_cpu.then(|| ("ACCELERATE_USE_CPU", "true".to_owned()));
        let id = options.rdzv_id.clone().map(|id| ("TORCHELASTIC_RUN_ID", id));
        for (name, value) in precision.into_iter().chain(cpu).chain(id) {
            config.environment.retain(|(other, _)| other != name);
            config.environment.push((name.into(), value.into()));
        }
        Ok((run, config))
    }
}

impl NotebookLauncherOptions {
    /// Where machines meet, after a look at what could not be said in the launcher's own words.
    fn meeting(&self) -> Result<(Option<String>, Option<u16>)> {
        let refused = |problem: String| Err(LauncherError::Options { problem }.into());
        if self.num_processes == Some(0) {
            return refused("num_processes is 0, but at least 1 process is needed to run anything".into());
        }
        if self.num_nodes == 0 {
            return refused("num_nodes is 0; it counts this machine too, so 1 is the least".into());
        }
        if self.max_restarts > 0 && self.num_nodes > 1 {
            return refused(format!(
                "max_restarts is {} and num_nodes {}, but no program can start the processes of the other machines again; leave \
                 max_restarts out, or start a program on all of them by `accelerate launch --hosts ... --max_restarts {0}`",
                self.max_restarts, self.num_nodes
            ));
        }
        if self.node_rank >= self.num_nodes {
            return refused(format!(
                "node_rank is {}, but must be less than num_nodes, which is {}",
                self.node_rank, self.num_nodes
            ));
        }
        let (mut address, mut port) = (self.master_addr.clone(), self.use_port);
        if let Some(endpoint) = self.rdzv_endpoint.as_deref().filter(|endpoint| !endpoint.is_empty()) {
            let parts = endpoint.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
            let Some((host, number)) = parts.filter(|(host, _)| !host.is_empty()) else {
                return refused(format!("rdzv_endpoint is \"{endpoint}\"; wanted an address, a colon and a port"));
            };
            let host = host.trim_start_matches('[').trim_end_matches(']');
            if address.as_deref().is_some_and(|address| address != host) || port.is_some_and(|port| port != number) {
                return refused(format!(
                    "rdzv_endpoint is {endpoint}, and master_addr and use_port say otherwise; give the one or the others"
                ));
            }
            (address, port) = (Some(host.to_owned()), Some(number));
        }
        if self.num_nodes > 1 && address.is_none() {
            return refused(format!(
                "num_nodes is {}, and machines only find each other with master_addr, the address of machine 0, given on all",
                self.num_nodes
            ));
        }
        Ok((address, port))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn options() -> NotebookLauncherOptions {
        NotebookLauncherOptions { num_processes: Some(2), ..Default::default() }
    }

    fn resolve(options: NotebookLauncherOptions) -> Result<LaunchConfig> {
        Settings { options, use_cpu: false }.resolve(&|_| None).map(|(_, config)| config)
    }

    #[test]
    fn every_option_reaches_the_launch() {
        let config = resolve(NotebookLauncherOptions {
            mixed_precision: Some(MixedPrecision::Bf16),
            use_port: Some(4000),
            master_addr: Some("10.0.0.1".into()),
            node_rank: 1,
            num_nodes: 3,
            rdzv_backend: Some("c10d".into()),
            rdzv_id: Some("night".into()),
            monitor_interval: Some(0.01),
            ..options()
        })
        .unwrap();
        config.check().unwrap();
        assert_eq!((config.num_processes, config.num_machines, config.machine_rank), (6, 3, 1));
        assert_eq!((config.main_process_ip.as_deref(), config.main_process_port), (Some("10.0.0.1"), Some(4000)));
        assert!(config.environment.contains(&("ACCELERATE_MIXED_PRECISION".into(), "bf16".into())));
        assert!(config.environment.contains(&("TORCHELASTIC_RUN_ID".into(), "night".into())));
    }

    #[test]
    fn restarts_are_those_of_any_launch() {
        let config = resolve(NotebookLauncherOptions { max_restarts: 3, ..options() }).unwrap();
        config.check().unwrap();
        assert_eq!((config.max_restarts, config.restart_count), (3, 0));
    }

    #[test]
    fn an_endpoint_stands_for_address_and_port() {
        for (endpoint, address, port) in
            [("10.0.0.1:4000", "10.0.0.1", 4000), ("node0:1", "node0", 1), ("[fe80::1]:9", "fe80::1", 9)]
        {
            let config =
                resolve(NotebookLauncherOptions { rdzv_endpoint: Some(endpoint.into()), num_nodes: 2, ..options() })
                    .unwrap();
            let found = (config.main_process_ip.as_deref(), config.main_process_port);
            assert_eq!(found, (Some(address), Some(port)), "{endpoint}");
        }
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_its_name() {
        let some = |text: &str| Some(text.to_owned());
        let rows = [
            (NotebookLauncherOptions::default(), "num_processes"),
            (NotebookLauncherOptions { num_processes: Some(0), ..options() }, "num_processes is 0"),
            (NotebookLauncherOptions { num_nodes: 0, ..options() }, "num_nodes is 0"),
            (NotebookLauncherOptions { node_rank: 1, ..options() }, "node_rank is 1, but must be less than num_nodes"),
            (NotebookLauncherOptions { num_nodes: 2, ..options() }, "master_addr"),
            (
                NotebookLauncherOptions { num_nodes: 2, max_restarts: 3, ..options() },
                "max_restarts is 3 and num_nodes 2",
            ),
            (NotebookLauncherOptions { rdzv_backend: some("etcd"), ..options() }, "rdzv_backend"),
            (NotebookLauncherOptions { rdzv_endpoint: some("node0"), ..options() }, "rdzv_endpoint is \"node0\""),
            (NotebookLauncherOptions { rdzv_endpoint: some(":1"), ..options() }, "rdzv_endpoint is \":1\""),
            (
                NotebookLauncherOptions { rdzv_endpoint: some("a:1"), use_port: Some(2), ..options() },
                "master_addr and use_port say otherwise",
            ),
        ];
        for (options, expected) in rows {
            let text = resolve(options.clone()).unwrap_err().to_string();
            assert!(text.contains(expected), "{options:?}: {text}");
        }
    }

    #[test]
    fn variables_say_what_the_program_leaves_open() {
        let lookup = |name: &str| {
            ["ACCELERATE_NUM_PROCESSES", "ACCELERATE_MAX_RESTARTS"].contains(&name).then(|| "3".to_owned())
        };
        let settings = Settings { options: Default::default(), use_cpu: true };
        let (_, config) = settings.resolve(&lookup).unwrap();
        // The number of restarts is not open: the program says none.
        assert_eq!((config.num_processes, config.use_cpu, config.max_restarts), (3, true, 0));
        assert!(config.environment.contains(&("ACCELERATE_USE_CPU".into(), "true".into())));
    }
}
