//! Program and libtorch of several machines are compared before the start. Each pretended host has a folder of its own, which its
//! agent finds behind a descriptor, and a path of libraries of its own.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;

use rstest::rstest;

use crate::hosts::Ssh;
use crate::support::{Finished, finished};

const CONNECTS: &str =
    "export HOST=$1 LD_LIBRARY_PATH=\"${0%/*}/$1/lib\"; exec 9<\"${0%/*}/$1\"; shift; exec sh -c \"$*\"";

/// Hosts of which each has a folder.
fn machines(hosts: &[&str]) -> Ssh {
    let ssh = Ssh::new(CONNECTS);
    hosts.iter().for_each(|host| fs::create_dir_all(ssh.path(host).join("lib")).unwrap());
    symlink("/proc/self/fd/9/train", ssh.path("train")).unwrap();
    ssh
}

fn launch(ssh: &Ssh, hosts: &str, flags: &[&str]) -> Finished {
    let mut command = ssh.launch(hosts);
    command.args(flags).arg(ssh.path("train")).env_remove("LD_LIBRARY_PATH");
    finished(command)
}

fn write_script(ssh: &Ssh, host: &str, text: &str) {
    let path = ssh.path(host).join("train");
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
}

#[rstest]
#[case::of_two_the_second(&["a", "b"], "b", "a")]
#[case::of_three_the_odd_one(&["b", "a", "c"], "b", "a")]
fn a_program_that_differs_is_told_with_its_machine(#[case] hosts: &[&str], #[case] odd: &str, #[case] usual: &str) {
    let ssh = machines(hosts);
    hosts.iter().for_each(|host| write_script(&ssh, host, if *host == odd { "echo old" } else { "echo new" }));
    let list = hosts.join(":1,") + ":1";
    let ended = launch(&ssh, &list, &[]);
    let path = ssh.path("train").display().to_string();
    let words = format!(
        "error: nothing was started: {odd}: {path} has another content there than on {usual}; bring the same file"
    );
    ended.expect(1, &[&words]);
    assert!(ended.stdout.is_empty(), "{ended:?}");
    // Whoever means it starts.
    let ended = launch(&ssh, &list, &["--no_preflight", "--no_prefix"]);
    ended.expect(0, &[]);
    assert_eq!(ended.stdout.matches("old\n").count(), 1, "{ended:?}");
}

#[test]
fn a_machine_with_another_program_can_be_left_out() {
    let ssh = machines(&["a", "b"]);
    write_script(&ssh, "a", "echo new");
    write_script(&ssh, "b", "echo old");
    let ended = launch(&ssh, "a:1,b:1", &["--min_machines", "1", "--no_prefix"]);
    ended.expect(
        0,
        &["b: left out, so 1 machine starts 1 process without it, because ", "has another content there than on a"],
    );
    assert_eq!(ended.stdout, "new\n");
}

#[test]
fn a_script_in_python_is_compared_and_its_interpreter_is_not() {
    let ssh = machines(&["a", "b"]);
    symlink("/proc/self/fd/9/train.py", ssh.path("train.py")).unwrap();
    for host in ["a", "b"] {
        fs::write(ssh.path(host).join("train.py"), format!("print('{host}')\n")).unwrap();
    }
    let mut command = ssh.launch("a:1,b:1");
    // The interpreter is named, since a script that is not on this machine is none here.
    command.arg("python3").arg(ssh.path("train.py")).env_remove("LD_LIBRARY_PATH");
    finished(command)
        .expect(1, &["error: nothing was started: b: ", "/train.py has another content there than on a; "]);
}

/// A program that needs a libtorch, and the same on each host but for the version that it says.
fn with_libtorch(versions: &[(&str, Option<&str>)]) -> Ssh {
    let hosts: Vec<_> = versions.iter().map(|(host, _)| *host).collect();
    let ssh = machines(&hosts);
    let compile = |arguments: &[&str]| {
        let status = Command::new("cc").current_dir(ssh.path("")).args(arguments).status().unwrap();
        assert!(status.success());
    };
    fs::write(ssh.path("library.c"), "const char *torch_name(void) { return \"libtorch\"; }\n").unwrap();
    fs::write(
        ssh.path("train.c"),
        "#include <stdio.h>\nconst char *torch_name(void);\nint main(void) { puts(torch_name()); }\n",
    )
    .unwrap();
    compile(&["-shared", "-fPIC", "-o", "libtorch_cpu.so", "library.c"]);
    compile(&["-o", "program", "train.c", "-L.", "-ltorch_cpu"]);
    for (host, version) in versions {
        fs::copy(ssh.path("program"), ssh.path(host).join("train")).unwrap();
        fs::copy(ssh.path("libtorch_cpu.so"), ssh.path(host).join("lib/libtorch_cpu.so")).unwrap();
        version.iter().for_each(|version| fs::write(ssh.path(host).join("build-version"), version).unwrap());
    }
    ssh
}

#[test]
fn another_libtorch_is_told_with_both_versions() {
    let ssh = with_libtorch(&[("a", Some("2.11.0\n")), ("b", Some("2.10.0+cpu\n"))]);
    let words =
        "error: nothing was started: b: the program would load libtorch 2.10.0 there and 2.11.0 on a; install the same";
    launch(&ssh, "a:1,b:1", &[]).expect(1, &[words]);
}

/// For the CPU and for GPUs, and of one that does not say it nothing is made up.
#[test]
fn builds_of_one_version_go_together() {
    let ssh = with_libtorch(&[("a", Some("2.11.0+cu130")), ("b", None), ("c", Some("2.11.0+cpu"))]);
    let ended = launch(&ssh, "a:1,b:1,c:1", &[]);
    let told = "accelerate launch: b: of which version libtorch is there is not known, so it is not compared: ";
    ended.expect(0, &[told, "/b/build-version does not say it\n"]);
    assert_eq!(ended.stderr.matches("is not known").count(), 1, "{ended:?}");
    assert_eq!(ended.sorted_stdout(), ["[rank 0] libtorch", "[rank 1] libtorch", "[rank 2] libtorch"]);
}
