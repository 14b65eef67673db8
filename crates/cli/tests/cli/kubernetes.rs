//! `accelerate launch --emit kubernetes` and `trainjob`: manifests as a user gets them. The fields are tested beside their source.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use rstest::rstest;

use crate::support::{accelerate, finished};

fn emitted(words: &[&str]) -> crate::support::Finished {
    let mut command = accelerate();
    command.arg("launch").args(words);
    finished(command)
}

#[rstest]
#[case("kubernetes", "kind: JobSet\n", "--num_machines=2")]
#[case("trainjob", "kind: TrainJob\n", "--num_machines=$(PET_NNODES)")]
fn a_launch_becomes_a_manifest(#[case] format: &str, #[case] kind: &str, #[case] machines: &str) {
    let words = ["--nodes", "2", "--gpus-per-node=8", "--image", "registry.example/train:1", "--machine_rank=0"];
    let manifest = emitted(
        &[&["--emit", format][..], &words, &["--mixed_precision", "bf16", "bin/train", "--nodes", "3"]].concat(),
    );
    manifest.expect(0, &[]);
    for line in [kind, machines, "- \"--mixed_precision\"\n", "- bin/train\n", "- \"--nodes\"\n", "nvidia.com/gpu: 8\n"]
    {
        assert!(manifest.stdout.contains(line), "{line:?} is missing in\n{}", manifest.stdout);
    }
    for word in ["--machine_rank=0", "--gpus-per-node", "--emit"] {
        assert!(!manifest.stdout.contains(word), "{word} is in\n{}", manifest.stdout);
    }
}

/// Whoever says it.
#[rstest]
#[case(&["--main_process_port", "1234"], None)]
#[case(&[], Some("1234"))]
fn pods_meet_at_the_port_that_is_said(#[case] flags: &[&str], #[case] variable: Option<&str>) {
    let mut command = accelerate();
    command.args(["launch", "--emit", "kubernetes", "--image", "i"]).args(flags).arg("bin/train");
    command.envs(variable.map(|port| ("ACCELERATE_MAIN_PROCESS_PORT", port)));
    let manifest = finished(command);
    manifest.expect(0, &[]);
    let has = |text: &str| manifest.stdout.contains(text);
    assert!(has("--main_process_port=1234") && has("containerPort: 1234") && !has("29500"), "{manifest:?}");
}

#[rstest]
#[case("kubernetes")]
#[case("trainjob")]
#[case("slurm")]
fn a_job_has_the_name_that_it_is_given(#[case] format: &str) {
    let image: &[&str] = if format == "slurm" { &[] } else { &["--image", "i"] };
    let given = |name: &str| emitted(&[&["--emit", format, "--job-name", name][..], image, &["bin/train"]].concat());
    let manifest = given("run-7");
    manifest.expect(0, &[]);
    let line = if format == "slurm" { "#SBATCH --job-name=run-7\n" } else { "metadata:\n  name: run-7\n" };
    assert!(manifest.stdout.contains(line), "{manifest:?}");
    // The flag is about the job, so the launches in it do not get it.
    assert_eq!(manifest.stdout.matches("--job-name").count(), usize::from(format == "slurm"), "{manifest:?}");
    given("run 7").expect(2, &["--job_name \"run 7\" is no name that the cluster takes"]);
}

/// Pods have neither the files nor the variables of whoever writes the manifest.
#[rstest]
#[case("kubernetes")]
#[case("trainjob")]
fn settings_of_files_and_variables_reach_the_pods_and_secrets_do_not(#[case] format: &str) {
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir(home.path().join("accelerate")).unwrap();
    std::fs::write(home.path().join("accelerate/default_config.yaml"), "mixed_precision: bf16\n").unwrap();
    let mut command = accelerate();
    command.args(["launch", "--emit", format, "--image", "i", "--gradient_accumulation_steps", "3", "bin/train"]);
    command.env("HF_HOME", home.path()).env("ACCELERATE_DEBUG_MODE", "true");
    command.env("ACCELERATE_RUN_SECRET", "0123456789abcdef").env("OF_THIS_MACHINE", "x");
    let manifest = finished(command);
    manifest.expect(0, &[]);
    let plain = manifest.stdout.replace('"', "");
    for (name, value) in [("MIXED_PRECISION", "bf16"), ("DEBUG_MODE", "true"), ("GRADIENT_ACCUMULATION_STEPS", "3")] {
        let lines: Vec<_> = plain.lines().skip_while(|line| !line.ends_with(&format!("ACCELERATE_{name}"))).collect();
        assert!(lines.len() > 1 && lines[1].trim() == format!("value: {value}"), "{name} is missing in\n{plain}");
    }
    for word in ["0123456789abcdef", "OF_THIS_MACHINE"] {
        assert!(!plain.contains(word), "{word} is in\n{plain}");
    }
}

/// Nobody has named the file, and a cluster books what it is asked for.
#[rstest]
#[case("kubernetes")]
#[case("trainjob")]
#[case("slurm")]
fn where_values_come_from_that_no_flag_says_is_told(#[case] format: &str) {
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir(home.path().join("accelerate")).unwrap();
    let file = home.path().join("accelerate/default_config.yaml");
    std::fs::write(&file, "debug: false\nuse_cpu: true\n").unwrap();
    let emitted = |flags: &[&str]| {
        let mut command = accelerate();
        command.args(["launch", "--emit", format]).args(flags);
        if format != "slurm" {
            command.args(["--image", "i"]);
        }
        command.arg("bin/train").env("HF_HOME", home.path()).env("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3");
        command.env("ACCELERATE_RUN_SECRET", "0123456789abcdef");
        finished(command)
    };
    let place = format!("{}:2:1", file.display());
    let told = emitted(&[]);
    told.expect(
        0,
        &[
            &format!("settings of {} hold where flags and variables say nothing\n", file.display()),
            &format!("use_cpu true ({place})"),
            " 3 (environment variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS)",
        ],
    );
    assert!(!told.stderr.contains("0123456789abcdef") && !told.stderr.contains("debug"), "{told:?}");
    assert_eq!(emitted(&["--quiet"]).stderr, "");
    let refused = emitted(&["--gpus_per_node", "8", "--quiet"]);
    refused
        .expect(2, &[&format!("--gpus_per_node 8 asks for GPUs, and use_cpu: true ({place}) keeps all processes on")]);
    assert_eq!(refused.stdout, "");
}

/// GPUs that a node gets and no process uses.
#[rstest]
#[case("2", "0", false)]
#[case("1", "0,1", false)]
#[case("2", "0,3", true)]
#[case("2", "all", true)]
fn gpus_that_are_asked_for_are_as_many_as_those_that_are_named(
    #[values("kubernetes", "slurm")] format: &str,
    #[case] gpus: &str,
    #[case] ids: &str,
    #[case] is_taken: bool,
) {
    let image: &[&str] = if format == "slurm" { &[] } else { &["--image", "i"] };
    let flags = ["--emit", format, "--gpus_per_node", gpus, "--gpu_ids", ids];
    let ended = emitted(&[&flags[..], image, &["bin/train"]].concat());
    let words = format!("--gpus_per_node {gpus} gives each node so many GPUs, and gpu_ids {ids} (flag --gpu_ids)");
    match is_taken {
        true => ended.expect(0, &[]),
        false => ended.expect(2, &[&words]),
    }
}

/// What is for the launcher itself has no variable in the pods' launches that they would read as here.
#[test]
fn settings_of_the_launcher_are_flags_of_the_pods_and_the_file_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.yaml");
    std::fs::write(&path, "num_cpu_threads_per_process: 3\ntee: 1\nnum_processes: 8\nnum_machines: 2\n").unwrap();
    let mut command = accelerate();
    command
        .args(["launch", "--emit", "kubernetes", "--image", "i", "--config_file"])
        .arg(&path)
        .args(["--log_dir", "logs"]);
    command.arg("bin/train").env("ACCELERATE_NUM_PROCESSES", "4").env("ACCELERATE_SHUTDOWN_GRACE_PERIOD", "60");
    let manifest = finished(command);
    manifest.expect(0, &[]);
    let plain = manifest.stdout.replace(['"', '\''], "");
    let flags: Vec<_> = plain.lines().filter_map(|line| line.trim().strip_prefix("- --")).collect();
    for flag in ["num_processes=4", "num_cpu_threads_per_process=3", "tee=1", "shutdown_grace_period=60", "log_dir"] {
        assert!(flags.contains(&flag), "{flag} is missing in\n{plain}");
    }
    assert!(flags.iter().filter(|flag| flag.starts_with("num_machines")).count() == 1, "{plain}");
    assert!(!plain.contains("config_file") && !plain.contains("run.yaml"), "{plain}");
}

#[rstest]
#[case(&["--emit", "kubernetes"], "say --image")]
#[case(&["--emit", "kubernetes", "--image", "x", "--time", "1:00"], "--time is for Slurm")]
#[case(&["--emit", "trainjob", "--image", "x", "--requeue"], "--requeue has no place in a TrainJob")]
#[case(&["--emit", "trainjob", "--image", "x", "--main_process_port", "1234"], "--main_process_port has no place in a TrainJob")]
#[case(&["--emit", "kubernetes", "--image", "x", "--nodes", "2147483648"], "--nodes is 2147483648, and Kubernetes")]
#[case(&["--emit", "kubernetes", "--image", "x", "--max_restarts", "2147483648"], "--max_restarts is 2147483648, and Kubernetes")]
#[case(&["--emit", "kubernetes", "--image", "x", "--main_process_port", "0"], "--main_process_port is 0, and Kubernetes")]
#[case(&["--emit", "kubernetes", "--image", "x", "--nodes", "2", "--num_processes", "9000"], "at most 4096 processes")]
#[case(&["--emit", "trainjob", "--image", "x", "--max_restarts", "1"], "--max_restarts has no place in a TrainJob")]
#[case(&["--emit", "kubernetes", "--image", "x", "--nodes", "3", "--nnodes", "2:3"], "min_machines (or MIN of --nnodes MIN:MAX) is 2, but the pods")]
#[case(&["--emit", "kubernetes", "--image", "x y"], "--image is \"x y\", but must be the name of an image, such as")]
#[case(&["--emit", "trainjob", "--image", "x y"], "--image is \"x y\", but must be the name of an image, such as")]
#[case(&["--emit", "kubernetes", "--image", ""], "--image is \"\", but must be the name of an image")]
#[case(&["--emit", "slurm", "--image", "x"], "--image is for Kubernetes")]
#[case(&["--image", "x"], "--image is about a job of a cluster")]
fn what_a_manifest_cannot_say_is_refused(#[case] flags: &[&str], #[case] words: &str) {
    emitted(&[flags, &["train"]].concat()).expect(2, &[words]);
}

/// The job starts all pods again, which no launch within one of them could do.
#[test]
fn restarts_are_those_of_the_job() {
    let words = [
        "--emit",
        "kubernetes",
        "--image",
        "x",
        "--nnodes",
        "2",
        "--max-restarts",
        "4",
        "train",
        "--max_restarts",
        "9",
    ];
    let manifest = emitted(&words);
    manifest.expect(0, &[]);
    for line in [
        "JOBSET_RESTART_ATTEMPT",
        "jobset.sigs.k8s.io/restart-attempt",
        "maxRestarts: 4\n",
        "- \"--num_machines=2\"\n",
        "- \"--max_restarts=0\"\n",
        "- \"--max_restarts\"\n",
    ] {
        assert!(manifest.stdout.contains(line), "{line:?} is missing in\n{}", manifest.stdout);
    }
    assert!(!manifest.stdout.contains("nnodes") && !manifest.stdout.contains("--max-restarts"), "{}", manifest.stdout);
}

#[test]
fn a_word_that_a_manifest_cannot_hold_is_shown() {
    let mut command = accelerate();
    command.args(["launch", "--emit", "kubernetes", "--image", "x", "train"]).arg(OsStr::from_bytes(b"a\xff"));
    finished(command).expect(2, &["a\\xff is no UTF-8"]);
}
