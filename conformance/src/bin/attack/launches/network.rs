//! Machines for a run: network namespaces of this one, each with a link to a bridge in the namespace of the launcher. They are
//! gone with the processes that hold them.

use anyhow::{Context, Result, ensure};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use super::login;

/// Machine 0 follows the launcher, which has the first address.
const FIRST_ADDRESS: usize = 10;

pub(super) fn address(machine: usize) -> String {
    format!("10.77.0.{}", FIRST_ADDRESS + machine)
}

/// What is wrong with a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// It is unplugged, which both ends can see.
    Down,
    /// Whatever is sent is lost, and nobody is told.
    Silent,
}

/// How much a link carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rate {
    pub(super) bits_per_second: u64,
}

/// The namespaces, each held by a process whose input ends with this one.
pub(super) struct Machines {
    launcher: Child,
    machines: Vec<Child>,
}

impl Machines {
    /// Why this process cannot make any, if it cannot.
    pub(super) fn obstacle() -> Option<String> {
        match Self::start(1, "probe") {
            Ok(_) => None,
            Err(error) => Some(format!("{error:#}")),
        }
    }

    /// Why links cannot be made slow, if they cannot.
    pub(super) fn obstacle_of_slow_links() -> Option<String> {
        let slow = Self::start(1, "probe").and_then(|probe| probe.slow_link(0, Rate { bits_per_second: 1_000_000 }));
        slow.err().map(|error| format!("{error:#}"))
    }

    /// Whatever is run by a login gets `mark`.
    pub(super) fn start(count: usize, mark: &str) -> Result<Self> {
        let launcher = hold(mark)?;
        let machines = (0..count).map(|_| hold(mark)).collect::<Result<Vec<_>>>()?;
        let made = Self { launcher, machines };
        // Without an address of its own the bridge takes that of a link, which goes on receiving what is sent there once it has
        // left the bridge, and is not silent.
        let mut script = "ip link set lo up && ip link add bridge0 address 02:00:00:00:00:01 type bridge \
                          && ip addr add 10.77.0.1/24 dev bridge0 && ip link set bridge0 up"
            .to_owned();
        for (number, machine) in made.machines.iter().enumerate() {
            let holder = machine.id();
            script += &format!(
                " && ip link add link{number} type veth peer name eth0 netns {holder} \
                 && ip link set link{number} master bridge0 up"
            );
        }
        inside(&made.launcher, &script)?;
        for (number, machine) in made.machines.iter().enumerate() {
            let address = address(number);
            // Its name is its address, which needs nobody who knows names.
            let script = format!(
                "ip link set lo up && ip addr add {address}/24 dev eth0 && ip link set eth0 up \
                 && echo {address} >/proc/sys/kernel/hostname"
            );
            inside(machine, &script)?;
        }
        Ok(made)
    }

    /// A command in the namespace of the launcher, to be followed by a program.
    pub(super) fn launcher_command(&self) -> Command {
        entering(&self.launcher)
    }

    pub(super) fn break_link(&self, machine: usize, fault: Fault) -> Result<()> {
        let change = if fault == Fault::Down { "down" } else { "nomaster" };
        inside(&self.launcher, &format!("ip link set link{machine} {change}"))
    }

    pub(super) fn mend_link(&self, machine: usize) -> Result<()> {
        inside(&self.launcher, &format!("ip link set link{machine} master bridge0 up"))
    }

    /// From now on, no more than this passes the link of this machine in either direction. What is more waits in line, which is
    /// long enough for everything: nothing is lost, and everything comes late.
    pub(super) fn slow_link(&self, machine: usize, rate: Rate) -> Result<()> {
        let change = |device: &str| {
            // The bucket holds one packet of the longest length.
            format!(
                "tc qdisc replace dev {device} root tbf rate {}bit burst 1600 limit 100000000",
                rate.bits_per_second
            )
        };
        inside(&self.launcher, &change(&format!("link{machine}")))?;
        inside(self.holder(machine)?, &change("eth0"))
    }

    /// Lets pass at once what still waits in the lines of a slow link, and everything after it.
    pub(super) fn quicken_link(&self, machine: usize) -> Result<()> {
        let change =
            |device: &str| format!("tc qdisc change dev {device} root tbf rate 10gbit burst 1000000 limit 100000000");
        inside(&self.launcher, &change(&format!("link{machine}")))?;
        inside(self.holder(machine)?, &change("eth0"))
    }

    fn holder(&self, machine: usize) -> Result<&Child> {
        self.machines.get(machine).context("there is no such machine")
    }

    /// A command in the namespace of a machine, to be followed by a program.
    pub(super) fn command_on(&self, machine: usize) -> Result<Command> {
        Ok(entering(self.holder(machine)?))
    }

    /// What `/proc` calls the network of a machine.
    pub(super) fn network(&self, machine: usize) -> Option<PathBuf> {
        network_of(self.machines.get(machine)?.id() as i32)
    }
}

pub(super) fn network_of(process: i32) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{process}/ns/net")).ok()
}

impl Drop for Machines {
    fn drop(&mut self) {
        for holder in self.machines.iter_mut().chain([&mut self.launcher]) {
            // It may have ended by itself.
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}

/// Starts a login server in a new network, under a new name.
fn hold(mark: &str) -> Result<Child> {
    let mut command = Command::new("unshare");
    command.args(["--net", "--uts"]).arg(std::env::current_exe()?).args([login::SERVER, mark]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("`unshare` cannot be run")?;
    let mut line = String::new();
    let said = child.stdout.take().map(|stream| BufReader::new(stream).read_line(&mut line));
    if !matches!(said, Some(Ok(_))) || line != "ready\n" {
        let _ = child.kill();
        let _ = child.wait();
    }
    ensure!(line == "ready\n", "`unshare --net --uts` makes no network, which root may");
    Ok(child)
}

fn entering(holder: &Child) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["--target", &holder.id().to_string(), "--net", "--uts"]);
    command
}

fn inside(holder: &Child, script: &str) -> Result<()> {
    let output = entering(holder).args(["sh", "-c", script]).output().context("`nsenter` cannot be run")?;
    let words = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`{script}` failed: {}", words.trim());
    Ok(())
}
