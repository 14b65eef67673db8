//! Machines for a run: network namespaces of this one, each with a link to a bridge in the namespace of the launcher. They are
//! gone with the processes that hold them.

use anyhow::{Context, Result, ensure};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

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

    /// Whatever is run by a login gets `mark`.
    pub(super) fn start(count: usize, mark: &str) -> Result<Self> {
        let launcher = hold(mark)?;
        let machines = (0..count).map(|_| hold(mark)).collect::<Result<Vec<_>>>()?;
        let made = Self { launcher, machines };
        let mut script =
            "ip link set lo up && ip link add bridge0 type bridge && ip addr add 10.77.0.1/24 dev bridge0 \
                          && ip link set bridge0 up"
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

    /// From now on, whatever this machine is sent arrives so much later.
    pub(super) fn delay_link(&self, machine: usize, delay: Duration) -> Result<()> {
        let millis = delay.as_millis();
        inside(&self.launcher, &format!("tc qdisc add dev link{machine} root netem delay {millis}ms"))
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
