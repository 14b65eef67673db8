//! Settings that change nothing where a launch takes place.

use super::{Message, RunConfig, settings};
use crate::config::ClusterSettings;
use crate::hosts::is_loopback;
use crate::settings::Origin;

/// Where the processes of a launch are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaunchPlace {
    /// One launcher starts processes on machines that are named, or on those of a Slurm job.
    pub is_on_machines: bool,
    /// There is one process, and it meets no others.
    pub is_alone: bool,
}

/// Who has to have said a setting, for it to be told. Files and variables are written once for many launches.
#[derive(Clone, Copy, PartialEq)]
enum Said {
    ByFlag,
    Anywhere,
}

impl RunConfig {
    /// Settings that somebody has said and that change nothing in such a `place`.
    ///
    /// ```
    /// use accelerate_core::config::{LaunchPlace, RunConfig, Sources, settings};
    /// let setting = settings().find(|setting| setting.flag() == Some("connection_timeout")).unwrap();
    /// let run = RunConfig::resolve(Sources { flags: vec![(setting, "5".to_owned())], ..Default::default() })?;
    /// let unused = run.unused_in(LaunchPlace::default());
    /// assert!(unused[0].to_string().contains("no machines are named"), "{}", unused[0]);
    /// assert!(run.unused_in(LaunchPlace { is_on_machines: true, is_alone: false }).is_empty());
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn unused_in(&self, place: LaunchPlace) -> Vec<Message> {
        let cluster = &self.cluster;
        let is_one_machine = !place.is_on_machines && cluster.num_machines == 1;
        let is_elsewhere = cluster.main_process_ip.as_deref().is_some_and(|address| !is_loopback(address));
        let without_machines =
            "no machines are named on which processes are started from here, as --hosts and --hostfile do";
        let rules = [
            ("ssh_command", Said::ByFlag, !place.is_on_machines, without_machines),
            ("connection_timeout", Said::ByFlag, !place.is_on_machines, without_machines),
            ("same_network", Said::ByFlag, true, "each machine must reach --main_process_ip, in one network or not"),
            (
                "stop_margin",
                Said::ByFlag,
                cluster.run_end().is_none(),
                "nobody says when the run is over; say it with --stop_at, unless the program does",
            ),
            ("main_process_port", Said::ByFlag, place.is_alone, "a single process meets no others"),
            (
                "role",
                Said::ByFlag,
                place.is_alone && cluster.role != ClusterSettings::default().role,
                "a single process is given no ROLE_NAME",
            ),
            (
                "main_process_ip",
                Said::Anywhere,
                is_one_machine && is_elsewhere,
                "num_machines is 1, and the processes of one machine meet at 127.0.0.1; set num_machines, and machine_rank on each",
            ),
            (
                "deepspeed_config.hostfile",
                Said::Anywhere,
                cluster.use_deepspeed && self.says_one_machine(),
                "num_machines is 1; leave that out, or set it to the number of hosts",
            ),
        ];
        let unused = rules.into_iter().filter_map(|(path, said, holds, why)| {
            let setting = settings().find(|setting| setting.path == path).filter(|_| holds)?;
            let origin = self.origin(path);
            let is_said = match origin {
                Origin::Flag(_) => true,
                Origin::Environment(_) | Origin::File { .. } => said == Said::Anywhere,
                Origin::Code | Origin::Derived(_) | Origin::Default => false,
            };
            let found = self.text(setting).filter(|found| is_said && !found.is_empty())?;
            Some(Message { setting: path, found, origin: origin.clone(), why: why.to_owned() })
        });
        unused.collect()
    }

    /// Has somebody said that there is one machine, beside nobody having said anything? Each file of the reference says a number.
    ///
    /// ```
    /// use accelerate_core::config::{ConfigFile, RunConfig, Sources};
    /// let file = Some(ConfigFile::read("num_machines: 1\n", "run.yaml".as_ref())?);
    /// assert!(RunConfig::resolve(Sources { file, ..Default::default() })?.says_one_machine());
    /// assert!(!RunConfig::resolve(Sources::default())?.says_one_machine());
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn says_one_machine(&self) -> bool {
        self.cluster.num_machines == 1 && !matches!(self.origin("num_machines"), Origin::Default)
    }
}
