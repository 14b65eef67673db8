//! The example in a process that gets little from the system.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use nlp_example::tokenize::{TextTokenizer, start_threads};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::process::Command;

/// Set in the process that gets little.
const LIMITED: &str = "NLP_EXAMPLE_TEST_LIMITED";

#[test]
fn texts_are_cut_where_the_system_gives_no_threads() {
    if std::env::var_os(LIMITED).is_none() {
        let mut limited = Command::new(std::env::current_exe().unwrap());
        limited.args(["--exact", "texts_are_cut_where_the_system_gives_no_threads", "--nocapture"]);
        let output = limited.env(LIMITED, "1").env("RAYON_NUM_THREADS", "64").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let num_pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
    // Less than the stacks of 64 threads take.
    let current = num_pages * rustix::param::page_size() as u64 + (32 << 20);
    setrlimit(Resource::As, Rlimit { current: Some(current), ..getrlimit(Resource::As) }).unwrap();
    assert!(rayon::ThreadPoolBuilder::new().num_threads(64).build().is_err(), "the limit has no effect");
    start_threads();
    let texts = ["the film was good", "the film was bad"];
    let tokenizer = TextTokenizer::train(&texts.repeat(4), 100).unwrap();
    assert_eq!(tokenizer.encode(&texts).unwrap().len(), 2);
}
