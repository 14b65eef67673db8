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

#[rstest]
#[case(&["--emit", "kubernetes"], "say --image")]
#[case(&["--emit", "kubernetes", "--image", "x", "--time", "1:00"], "--time is for Slurm")]
#[case(&["--emit", "trainjob", "--image", "x", "--requeue"], "--requeue has no place in a TrainJob")]
#[case(&["--emit", "slurm", "--image", "x"], "--image is for Kubernetes")]
#[case(&["--image", "x"], "--image is about a job of a cluster")]
fn what_a_manifest_cannot_say_is_refused(#[case] flags: &[&str], #[case] words: &str) {
    emitted(&[flags, &["train"]].concat()).expect(2, &[words]);
}

#[test]
fn a_word_that_a_manifest_cannot_hold_is_shown() {
    let mut command = accelerate();
    command.args(["launch", "--emit", "kubernetes", "--image", "x", "train"]).arg(OsStr::from_bytes(b"a\xff"));
    finished(command).expect(2, &["a\\xff is no UTF-8"]);
}
