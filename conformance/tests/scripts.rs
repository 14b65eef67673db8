//! Every script on 1, 2, 3 and 4 real processes, and some in debug mode.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate_launch::{Capture, LaunchConfig, Program, Reporter, Source, launch};
use rstest::rstest;

/// What all ranks have printed.
#[derive(Default)]
struct Printed(Vec<u8>);

impl Reporter for Printed {
    fn output(&mut self, _: Source, bytes: &[u8]) -> std::io::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }
}

#[rstest]
fn script(
    #[values(
        "test_script",
        "test_sync",
        "test_distributed_data_loop",
        "test_ops",
        "test_metrics",
        "test_memory_utils",
        "test_optimizer",
        "test_scheduler",
        "test_checkpointing",
        "test_state_checkpointing",
        "test_ddp_comm_hook",
        "test_kwargs_handlers",
        "test_profile",
        "test_tracking",
        "test_tensor_parallel"
    )]
    name: &str,
    #[values(1, 2, 3, 4)] num_processes: usize,
) {
    run(name, num_processes, &[]);
}

/// Where all ranks make the same calls, comparing them changes nothing.
#[rstest]
fn script_in_debug_mode(
    #[values(
        "test_script",
        "test_sync",
        "test_distributed_data_loop",
        "test_ops",
        "test_metrics",
        "test_memory_utils",
        "test_optimizer",
        "test_state_checkpointing",
        "test_ddp_comm_hook",
        "test_tensor_parallel"
    )]
    name: &str,
) {
    run(name, 3, &[("ACCELERATE_DEBUG_MODE", "true")]);
}

fn run(name: &str, num_processes: usize, variables: &[(&str, &str)]) {
    let variables = [("ACCELERATE_USE_CPU", "true")].iter().chain(variables);
    let folder = tempfile::tempdir().unwrap();
    let program = Program::Executable(env!("CARGO_BIN_EXE_conformance").into());
    let config = LaunchConfig {
        args: vec![name.into(), "--folder".into(), folder.path().into()],
        capture: Capture::Always,
        environment: variables.map(|(name, value)| ((*name).into(), (*value).into())).collect(),
        num_cpu_threads_per_process: Some(1),
        ..LaunchConfig::new(program, num_processes)
    };
    let mut printed = Printed::default();
    if let Err(error) = launch(&config, &mut printed) {
        panic!("{name} on {num_processes} processes: {error}\n{:#?}", error.failure());
    }
    let printed = String::from_utf8_lossy(&printed.0);
    let wanted = format!("{name}: all checks passed\n");
    assert_eq!(printed.matches(&wanted).count(), 1, "only the first process of a machine prints: {printed}");
}
