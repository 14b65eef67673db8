//! A Slurm of our own: one controller and two nodes, on free ports, without munge.

use std::env;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::geteuid;

/// The folder that the Debian packages of Slurm have been unpacked into.
const PACKAGES: &str = "ACCELERATE_TEST_SLURM";
/// A Slurm that has not started, or not ended something, by then never will.
const PATIENCE: Duration = Duration::from_secs(60);

/// Everything of it has gone when the value has.
pub(crate) struct Cluster {
    folder: tempfile::TempDir,
    packages: PathBuf,
    daemons: Vec<Child>,
}

impl Cluster {
    /// `None`, after saying why, where there can be none.
    pub(crate) fn start() -> Option<Self> {
        let packages = env::var_os(PACKAGES).map(PathBuf::from);
        let reason = match &packages {
            None => format!("{PACKAGES} names no folder; `cargo xtask soak slurm` gets the packages"),
            Some(packages) if !packages.join("usr/sbin/slurmctld-wlm").is_file() => {
                format!("{} holds no packages of Slurm", packages.display())
            }
            Some(_) if !geteuid().is_root() => "only root may give its nodes names".to_owned(),
            Some(_) => String::new(),
        };
        match packages.filter(|_| reason.is_empty()) {
            Some(packages) => Some(Self::started(packages)),
            None => {
                println!("skipped, because {reason}");
                None
            }
        }
    }

    fn started(packages: PathBuf) -> Self {
        let mut cluster = Self { folder: tempfile::tempdir().unwrap(), packages, daemons: Vec::new() };
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let host = host.trim().split('.').next().unwrap().to_owned();
        for folder in ["state", "work"] {
            fs::create_dir(cluster.folder.path().join(folder)).unwrap();
        }
        fs::write(cluster.path("slurm.conf"), cluster.configuration(&host)).unwrap();
        let names = format!("127.0.0.1 localhost n1 n2 {host}\n");
        fs::write(cluster.path("hosts"), names).unwrap();
        cluster.start_daemon("usr/sbin/slurmctld-wlm", &["-D"]);
        let step = cluster.packages.join("usr/sbin/slurmstepd-wlm");
        for node in ["n1", "n2"] {
            cluster.start_daemon("usr/sbin/slurmd-wlm", &["-D", "-N", node, "-d", step.to_str().unwrap()]);
        }
        cluster.wait_until("sinfo", &["--noheader", "--Node", "--format", "%T"], |answer| answer == "idle\nidle\n");
        cluster
    }

    fn configuration(&self, host: &str) -> String {
        // Held together, so that they are different ones.
        let listeners: Vec<_> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let port = |number: usize| listeners[number].local_addr().unwrap().port();
        let here = self.folder.path().display();
        let plugins = self.packages.join("usr/lib/x86_64-linux-gnu/slurm-wlm");
        format!(
            "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nSlurmdUser=root\n\
             AuthType=auth/none\nCredType=cred/none\nPluginDir={}\nSlurmctldPort={}\n\
             StateSaveLocation={here}/state\nSlurmdSpoolDir={here}/spool-%n\n\
             SlurmctldPidFile={here}/controller.pid\nSlurmdPidFile={here}/%n.pid\n\
             SlurmctldLogFile={here}/controller.log\nSlurmdLogFile={here}/%n.log\n\
             ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSwitchType=switch/none\nMpiDefault=none\n\
             SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\nSlurmdParameters=config_overrides\n\
             JobAcctGatherType=jobacct_gather/none\nAccountingStorageType=accounting_storage/none\n\
             ReturnToService=2\nKillWait=5\nSchedulerParameters=sched_interval=2,bf_interval=2\n\
             NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={} CPUs=4 RealMemory=1000\n\
             NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={} CPUs=4 RealMemory=1000\n\
             PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP\n",
            plugins.display(),
            port(0),
            port(1),
            port(2),
        )
    }

    /// A daemon with the names of the nodes in a view of the file system of its own.
    fn start_daemon(&mut self, program: &str, arguments: &[&str]) {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", "mount --bind \"$0\" /etc/hosts && exec \"$@\""]);
        command.arg(self.path("hosts")).arg(self.packages.join(program)).args(arguments);
        self.prepare(&mut command);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.daemons.push(command.spawn().unwrap());
    }

    /// The folder that commands run in.
    pub(crate) fn folder(&self) -> PathBuf {
        self.path("work")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Lets a command find this Slurm, as on a login node.
    pub(crate) fn prepare(&self, command: &mut Command) {
        let libraries = self.packages.join("usr/lib/x86_64-linux-gnu");
        let path = env::var_os("PATH").unwrap();
        let paths = [self.packages.join("usr/bin")].into_iter().chain(env::split_paths(&path));
        command
            .env("SLURM_CONF", self.path("slurm.conf"))
            .env("LD_LIBRARY_PATH", env::join_paths([libraries.clone(), libraries.join("slurm-wlm")]).unwrap())
            .env("PATH", env::join_paths(paths).unwrap())
            .current_dir(self.folder());
    }

    fn answer(&self, tool: &str, arguments: &[&str]) -> Result<String, String> {
        let mut command = Command::new(self.packages.join("usr/bin").join(tool));
        command.args(arguments);
        self.prepare(&mut command);
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    /// What a command of Slurm prints.
    #[track_caller]
    pub(crate) fn ask(&self, tool: &str, arguments: &[&str]) -> String {
        self.answer(tool, arguments).unwrap()
    }

    /// Asks until the answer is what is waited for.
    #[track_caller]
    pub(crate) fn wait_until(&self, tool: &str, arguments: &[&str], is_there: impl Fn(&str) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        let mut last = Ok(String::new());
        while Instant::now() < deadline {
            last = self.answer(tool, arguments);
            if last.as_ref().is_ok_and(|answer| is_there(answer)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let logs = ["controller.log", "n1.log"].map(|name| fs::read_to_string(self.path(name)).unwrap_or_default());
        panic!("{tool} says {last:?} only\n{}", logs.join("\n"));
    }

    /// Waits until a file in the folder has this many lines.
    #[track_caller]
    pub(crate) fn wait_for_lines(&self, name: &str, count: usize) {
        let deadline = Instant::now() + PATIENCE;
        let lines = |place: &Path| fs::read_to_string(place).map_or(0, |text| text.lines().count());
        while lines(&self.folder().join(name)) < count {
            assert!(Instant::now() < deadline, "{name} never has {count} lines");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.answer("scancel", &["--user", "root", "--signal", "KILL"]);
        let _ = self.answer("scancel", &["--user", "root"]);
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline && self.answer("squeue", &["--noheader"]).is_ok_and(|jobs| !jobs.is_empty()) {
            std::thread::sleep(Duration::from_millis(50));
        }
        for daemon in &mut self.daemons {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}
