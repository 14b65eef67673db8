//! Which program runs, with what, and the ways in which it cannot.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;

use rstest::rstest;

use crate::support::{Witness, finished, launch, launch_script};

fn write(path: &Path, text: &str, mode: u32) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
}

#[test]
fn every_rank_learns_its_place() {
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR \
                  ${MASTER_PORT:+port} ${OMP_NUM_THREADS:+threads} \"$@\"";
    let mut command = launch(3, &["--cpu", "--mixed_precision", "bf16"]);
    command.args(["sh", "-c", script, "name", "--epochs", "3 4"]);
    assert_eq!(
        finished(command).sorted_stdout(),
        [0, 1, 2].map(|rank| format!("[rank {rank}] {rank} {rank} 3 3 127.0.0.1 port threads --epochs 3 4"))
    );
    let ended = finished(launch_script(
        2,
        &["--cpu", "--mixed-precision", "bf16", "--gradient-accumulation-steps=4"],
        "echo $ACCELERATE_USE_CPU $ACCELERATE_MIXED_PRECISION $ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    ));
    assert_eq!(ended.sorted_stdout(), ["[rank 0] true bf16 4", "[rank 1] true bf16 4"]);
}

#[test]
fn a_machine_of_several_starts_its_share() {
    let flags = ["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1"];
    let ended = finished(launch_script(4, &flags, "echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR:$MASTER_PORT"));
    assert_eq!(ended.sorted_stdout(), ["[rank 2] 2 0 4 10.0.0.1:29500", "[rank 3] 3 1 4 10.0.0.1:29500"]);
    finished(launch_script(5, &flags, "true")).expect(2, &["--num_processes 5", "use 4 or 6"]);
}

#[test]
fn without_a_number_of_processes_the_choice_is_announced() {
    let mut command = crate::support::accelerate();
    command.args(["launch", "--cpu", "true"]);
    finished(command).expect(0, &["--num_processes was not given, starting 1 (with --cpu)"]);
}

#[test]
fn python_scripts_and_modules_run_and_speak_at_once() {
    let folder = tempfile::tempdir().unwrap();
    // Not flushed, then killed: what was printed must arrive all the same.
    let text = "import os, sys\nprint(os.environ['RANK'], *sys.argv[1:])\nos.kill(os.getpid(), 9)\n";
    let script = folder.path().join("script.py");
    write(&script, text, 0o644);
    let mut command = launch(2, &["--grace_period", "20"]);
    command.arg(&script).args(["--flag", "x"]);
    let ended = finished(command);
    ended.expect(137, &["SIGKILL"]);
    assert!(ended.stdout.contains("] 0 --flag x") || ended.stdout.contains("] 1 --flag x"), "{ended:?}");

    let mut command = launch(2, &["-m"]);
    command.args(["script", "--flag", "x"]).current_dir(folder.path());
    let ended = finished(command);
    ended.expect(137, &[]);
    assert!(ended.stdout.contains("--flag x"), "{ended:?}");
}

#[test]
fn a_python_exception_is_shown_again() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script.py");
    write(
        &script,
        "import os, time\nif os.environ['RANK'] == '1': raise ValueError('shape mismatch')\ntime.sleep(30)\n",
        0o644,
    );
    let mut command = launch(2, &[]);
    command.arg(&script);
    let ended = finished(command);
    ended.expect(
        1,
        &["last lines of rank 1:\n    Traceback (most recent call last):", "    ValueError: shape mismatch\n"],
    );
}

#[test]
fn no_python_runs_a_py_file_by_its_own_first_line() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script.py");
    write(&script, "#!/bin/sh\necho shell\n", 0o755);
    let mut command = launch(1, &["--no_python"]);
    command.arg(&script);
    assert_eq!(finished(command).stdout, "shell\n");
}

#[test]
fn a_program_that_cannot_run_is_named_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    let plain = folder.path().join("plain");
    write(&plain, "text", 0o644);
    let cases = [
        ("./no/such/program", 127, "the program ./no/such/program was not found"),
        ("no-such-program-in-path", 127, "no-such-program-in-path was not found in PATH"),
        ("no/such/script.py", 127, "no/such/script.py was not found"),
        (plain.to_str().unwrap(), 126, "chmod +x"),
        (folder.path().to_str().unwrap(), 126, "it is a folder"),
    ];
    for (program, code, words) in cases {
        let mut command = launch(2, &[]);
        command.arg(program);
        finished(command).expect(code, &[words, program]);
    }
}

/// What people name in place of a program. The cure depends on what stands there.
#[rstest]
#[case::folder(
    "logs",
    126,
    "logs cannot be run: it is a folder, and a program is a file; name the binary or the .py file in it"
)]
#[case::folder_of_a_project(
    "demo",
    126,
    "run `cargo build --release` in it, and name the program in demo/target/release"
)]
#[case::folder_by_path("./logs", 126, "./logs cannot be run: it is a folder")]
#[case::folder_like_a_script("folder.py", 126, "folder.py cannot be run: it is a folder, not a Python file")]
#[case::settings(
    "run.yaml",
    126,
    "looks like a configuration file; write --config_file run.yaml, and then the program"
)]
#[case::source("main.rs", 126, "it is source code; build it with `cargo build --release`")]
#[case::data("data.bin", 126, "run: chmod +x data.bin")]
#[case::device("/dev/null", 126, "/dev/null cannot be run: it is a device")]
#[case::pipe("pipe", 126, "pipe cannot be run: it is a pipe")]
#[case::program_of_this_folder("tool", 127, "write ./tool for it")]
#[case::interpreter(
    "./lost",
    126,
    "lost cannot be run: its first line names the interpreter /no/such/interpreter, which"
)]
#[case::empty("", 2, "the program is an empty word, perhaps of a variable that is not set")]
fn what_is_no_program_is_named_with_its_cure(#[case] program: &str, #[case] code: i32, #[case] words: &str) {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, mode| write(&folder.path().join(name), "#!/no/such/interpreter\n", mode);
    for name in ["logs", "demo", "folder.py"] {
        std::fs::create_dir(folder.path().join(name)).unwrap();
    }
    for name in ["demo/Cargo.toml", "run.yaml", "main.rs", "data.bin"] {
        file(name, 0o644);
    }
    ["tool", "lost"].into_iter().for_each(|name| file(name, 0o755));
    assert!(std::process::Command::new("mkfifo").arg(folder.path().join("pipe")).status().unwrap().success());
    let mut command = launch(2, &[]);
    command.arg(program).current_dir(folder.path());
    finished(command).expect(code, &[words]);
}

#[test]
fn a_taken_port_is_named_before_anything_starts() {
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = holder.local_addr().unwrap().port().to_string();
    let ended = finished(launch_script(2, &["--main_process_port", &port], "echo started"));
    ended.expect(
        1,
        &[&format!("port {port} of --main_process_port is already in use"), "--main_process_port 0", "caused by"],
    );
    assert_eq!(ended.stdout, "");
}

#[test]
fn a_free_port_is_used_as_given() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ended = finished(launch_script(2, &["--main_process_port", &port.to_string()], "echo $MASTER_PORT"));
    assert_eq!(ended.sorted_stdout(), [format!("[rank 0] {port}"), format!("[rank 1] {port}")]);
}

#[test]
fn launches_at_the_same_time_choose_different_ports() {
    const NUM_LAUNCHES: usize = 8;
    let launches: Vec<_> = (0..NUM_LAUNCHES)
        .map(|_| {
            let mut witness = Witness::new();
            // Nobody ends before all have chosen.
            let script = "echo $MASTER_PORT; echo ready >/dev/fd/$WITNESS; cat >/dev/null";
            let mut command = launch_script(2, &["--main_process_port", "0"], script);
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
            let child = witness.start(command);
            (witness, child)
        })
        .collect();
    let mut children = Vec::new();
    for (mut witness, child) in launches {
        witness.wait_for("ready", 2);
        children.push(child);
    }
    let mut ports: Vec<_> = children
        .into_iter()
        .map(|child| {
            let output = child.wait_with_output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let mut ports: Vec<u16> = text.lines().map(|line| line[9..].parse().unwrap()).collect();
            ports.dedup();
            assert_eq!(ports.len(), 1, "both ranks of a launch meet at one port");
            ports[0]
        })
        .collect();
    ports.sort_unstable();
    ports.dedup();
    assert_eq!(ports.len(), NUM_LAUNCHES);
}

#[test]
fn flags_about_sharding_reach_all_ranks_or_none() {
    let script = "echo $ACCELERATE_USE_FSDP $FSDP_VERSION";
    let told = finished(launch_script(2, &["--no_prefix", "--use_fsdp", "--fsdp_version", "2"], script));
    assert_eq!((told.code, told.sorted_stdout()), (Some(0), vec!["true 2", "true 2"]));
    let flags = ["--use_fsdp", "--fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"];
    let refused = finished(launch_script(2, &flags, "echo started"));
    assert_eq!((refused.code, refused.stdout.as_str()), (Some(2), ""), "{refused:?}");
    assert!(refused.stderr.contains("min_num_params"), "{refused:?}");
}

/// What a program in Python prints of its environment, the variables of one name to a line.
const PRINT: &str = "import os, sys\nprint(*(name + '=' + os.environ.get(name, '-') for name in sys.argv[1:]))\n";

/// What the reference's launcher sets whether somebody asks or not, as torch and the plugin in Python read it.
#[test]
fn a_python_script_that_is_sharded_finds_what_it_finds_under_the_reference() {
    let wanted = [
        "ACCELERATE_DYNAMO_BACKEND=NO",
        "ACCELERATE_MIXED_PRECISION=no",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=-",
        "ACCELERATE_USE_FSDP=true",
        "FSDP_ACTIVATION_CHECKPOINTING=false",
        "FSDP_CPU_RAM_EFFICIENT_LOADING=true",
        "FSDP_MIN_NUM_PARAMS=100000000",
        "FSDP_OFFLOAD_PARAMS=false",
        "FSDP_RESHARD_AFTER_FORWARD=true",
        "FSDP_SHARDING_STRATEGY=SHARD_GRAD_OP",
        "FSDP_SYNC_MODULE_STATES=true",
        "FSDP_USE_ORIG_PARAMS=true",
        "FSDP_VERSION=1",
        "GROUP_WORLD_SIZE=1",
        "ROLE_NAME=default",
        "TORCHELASTIC_RUN_ID=none",
        "TORCHELASTIC_USE_AGENT_STORE=False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
    ];
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script.py");
    write(&script, PRINT, 0o644);
    for (num_processes, places) in
        [(2, &["RANK=0 WORLD_SIZE=2", "RANK=1 WORLD_SIZE=2"][..]), (1, &["RANK=0 WORLD_SIZE=1"])]
    {
        let flags =
            ["--no_prefix", "--use_fsdp", "--fsdp_sharding_strategy", "2", "--gradient_accumulation_steps", "4"];
        let mut command = launch(num_processes, &flags);
        for (name, _) in wanted.iter().filter_map(|pair| pair.split_once('=')) {
            command.env_remove(name);
        }
        command.arg(&script).args(["RANK", "WORLD_SIZE"]);
        command.args(wanted.iter().filter_map(|pair| pair.split('=').next()));
        let ended = finished(command);
        ended.expect(0, &["gradient_accumulation_config.num_steps is 4", "in its constructor"]);
        let lines: Vec<_> = places.iter().map(|place| format!("{place} {}", wanted.join(" "))).collect();
        assert_eq!(ended.sorted_stdout(), lines);
    }
}

/// A Cargo project in which nothing is built.
fn project(folder: &Path) {
    write(&folder.join("Cargo.toml"), "[package]\nname = \"demo\"\nversion = \"0.1.0\"\n[workspace]\n", 0o644);
    std::fs::create_dir(folder.join("src")).unwrap();
    write(&folder.join("src/main.rs"), "fn main() {}\n", 0o644);
}

#[test]
fn a_program_of_this_project_is_found_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    project(folder);
    let demo = || {
        let mut command = launch(2, &["--no_prefix"]);
        command.arg("demo").current_dir(folder).env_remove("CARGO_TARGET_DIR");
        finished(command)
    };
    demo().expect(127, &["the program demo was not found", "of the package demo", "cargo build --release"]);
    let mut command = launch(2, &[]);
    command.arg("demos").current_dir(folder).env_remove("CARGO_TARGET_DIR");
    finished(command).expect(127, &["in PATH, and no program of this Cargo project has that name"]);

    std::fs::create_dir_all(folder.join("target/debug")).unwrap();
    write(&folder.join("target/debug/demo"), "#!/bin/sh\necho debug $RANK\n", 0o755);
    let ended = demo();
    ended.expect(0, &["accelerate launch: running ", "target/debug/demo\n"]);
    assert_eq!(ended.sorted_stdout(), ["debug 0", "debug 1"]);
}

/// As in a shell: what PATH has is what a name alone means, and it is said that there is another.
#[test]
fn path_goes_before_the_project() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    project(folder);
    std::fs::create_dir_all(folder.join("target/release")).unwrap();
    write(&folder.join("target/release/true"), "#!/bin/sh\nexit 3\n", 0o755);
    let mut command = launch(1, &[]);
    command.arg("true").current_dir(folder).env_remove("CARGO_TARGET_DIR");
    finished(command).expect(0, &["/true of PATH; write ", "target/release/true for the one of this project"]);
    let mut command = launch(1, &["--quiet"]);
    command.arg("target/release/true").current_dir(folder);
    let ended = finished(command);
    assert_eq!(ended.code, Some(3));
}

/// Found before any process starts, with the name of what is missing.
#[rstest]
#[case::missing("#!/no/such/interp -x\n", "names the interpreter /no/such/interp, which does not exist; install it")]
#[case::of_windows("#!/bin/sh\r\ntrue\r\n", "carriage return of Windows")]
fn a_script_whose_interpreter_is_missing_is_not_started(#[case] text: &str, #[case] words: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("script");
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = launch(2, &[]);
    command.arg(&path);
    let ended = finished(command);
    ended.expect(126, &[words]);
    assert!(!ended.stderr.contains("rank"), "{}", ended.stderr);
}
