//! Runs one script on this rank; `accelerate launch` or the tests start as many ranks as they want.

mod awaited;
mod checkpointed;
mod failing;
mod killed_and_resumed;
mod loader_checks;
mod regression;
mod soak;
mod test_checkpointing;
mod test_ddp_comm_hook;
mod test_distributed_data_loop;
mod test_kwargs_handlers;
mod test_logging;
mod test_memory_utils;
mod test_metrics;
mod test_notebook;
mod test_ops;
mod test_optimizer;
mod test_profile;
mod test_scheduler;
mod test_script;
mod test_state_checkpointing;
mod test_sync;
mod test_tensor_parallel;
mod test_tracking;
mod training_check;

use clap::{Parser, ValueEnum};
use rustix::process::Signal;

/// Ports of the reference's own test scripts.
#[derive(Debug, Parser)]
struct Arguments {
    /// Which script to run
    script: Script,
    /// A folder that all ranks share, for scripts that need one
    #[arg(long)]
    folder: Option<std::path::PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Script {
    /// Process control, loaders, training, splitting
    #[value(name = "test_script")]
    Control,
    /// Gradient accumulation and synchronisation
    TestSync,
    /// Batch sizes per rank, even and uneven
    TestDistributedDataLoop,
    /// Collectives
    TestOps,
    /// Metrics over uneven data
    TestMetrics,
    /// Batch sizes that do not fit on one rank
    TestMemoryUtils,
    /// Saved state, windows and skipped steps of optimizers
    TestOptimizer,
    /// How far schedules move with their optimizers
    TestScheduler,
    /// Accuracy and learning rates of runs that go on from checkpoints
    TestCheckpointing,
    /// Checkpoints: what goes on, names, limits
    TestStateCheckpointing,
    /// Compressed gradients
    TestDdpCommHook,
    /// Settings of single mechanisms
    TestKwargsHandlers,
    /// Messages of all ranks
    TestLogging,
    /// The same in a program with a subscriber of `tracing`
    TestLoggingWithSubscriber,
    /// Functions launched from a program
    TestNotebook,
    /// Trace files of all ranks
    TestProfile,
    /// Files of trackers, and trackers of the program's own
    TestTracking,
    /// Layers that all ranks compute together, and the random numbers that they share
    TestTensorParallel,
    /// Reads an epoch until it is told to die, and goes on where the run before stopped
    KilledAndResumed,
    /// Rank 1 keeps the others waiting
    AwaitedRank,
    /// Rank 1 kills itself while the others reduce
    DyingRank,
    /// The same in the middle of a large all-reduce.
    DyingRankInSum,
    /// Or it is stopped there.
    StoppedRankInSum,
    /// Rank 0 fails by itself while the others reduce
    FailingRankZero,
    /// Rank 1 does
    FailingRankOne,
    /// Only the main process cannot save, and takes its time to end
    UnwritableFolder,
    /// Meets the other ranks, and has nothing more to do
    LeavingAtOnce,
    /// Rank 0 ends well before it makes its accelerator
    LeavingZero,
    /// Rank 1 does
    LeavingOne,
    /// Makes two accelerators that would each meet the other ranks
    SecondMeeting,
    /// Rank 1 kills itself while the others gather a sharded model
    DyingRankInGather,
    /// Rank 1 kills itself while the others read its parts of a sharded model
    DyingRankInReading,
    /// Saves a sharded model, of ones or, over that, of twos
    SavedSharded,
    /// Saves a sharded model, then trains it over a disk that fills for rank 1
    FullDisk,
    /// Rank 1 never makes the call the others make
    AbsentRank,
    /// Rank 0 comes late to a call that only rank 1 waits in
    LateRank,
    /// Rank 0 stops itself while the others wait for it
    StoppedRankZero,
    /// Rank 1 makes another call than the others
    StrayingRank,
    /// Trains, saves a checkpoint at every step, and goes on from the newest one
    Checkpointed,
    /// Trains and saves, for `attack` to attack
    SoakTrain,
    /// Fails unless what the attacked training has saved is whole
    SoakCheckSaved,
}

fn main() -> anyhow::Result<()> {
    let workers = test_notebook::workers();
    let arguments = Arguments::parse();
    match arguments.script {
        Script::Control => test_script::run(arguments.folder.as_deref()),
        Script::TestSync => test_sync::run(),
        Script::TestDistributedDataLoop => test_distributed_data_loop::run(),
        Script::TestOps => test_ops::run(),
        Script::TestMetrics => test_metrics::run(),
        Script::TestMemoryUtils => test_memory_utils::run(),
        Script::TestOptimizer => test_optimizer::run(),
        Script::TestScheduler => test_scheduler::run(),
        Script::TestCheckpointing => test_checkpointing::run(arguments.folder.as_deref()),
        Script::TestStateCheckpointing => test_state_checkpointing::run(arguments.folder.as_deref()),
        Script::TestDdpCommHook => test_ddp_comm_hook::run(),
        Script::TestKwargsHandlers => test_kwargs_handlers::run(),
        Script::TestLogging => test_logging::run(),
        Script::TestLoggingWithSubscriber => test_logging::run_with_subscriber(),
        Script::TestNotebook => test_notebook::run(&workers),
        Script::TestProfile => test_profile::run(arguments.folder.as_deref()),
        Script::TestTracking => test_tracking::run(arguments.folder.as_deref()),
        Script::TestTensorParallel => test_tensor_parallel::run(),
        Script::KilledAndResumed => killed_and_resumed::run(arguments.folder.as_deref()),
        Script::AwaitedRank => awaited::run(arguments.folder.as_deref()),
        Script::DyingRank => failing::dying_rank(),
        Script::DyingRankInSum => failing::struck_in_sum(Signal::KILL),
        Script::StoppedRankInSum => failing::struck_in_sum(Signal::STOP),
        Script::FailingRankZero => failing::failing_rank(0),
        Script::FailingRankOne => failing::failing_rank(1),
        Script::UnwritableFolder => failing::unwritable_folder(),
        Script::LeavingAtOnce => failing::leaving_at_once(),
        Script::LeavingZero => failing::leaving_before(0),
        Script::LeavingOne => failing::leaving_before(1),
        Script::SecondMeeting => failing::second_meeting(),
        Script::DyingRankInGather => failing::dying_rank_in_gather(false),
        Script::DyingRankInReading => failing::dying_rank_in_gather(true),
        Script::SavedSharded => failing::saved_sharded(arguments.folder.as_deref()),
        Script::FullDisk => failing::full_disk(arguments.folder.as_deref()),
        Script::AbsentRank => failing::absent_rank(),
        Script::LateRank => failing::late_rank(),
        Script::StoppedRankZero => failing::stopped_rank_zero(),
        Script::StrayingRank => failing::straying_rank(),
        Script::Checkpointed => checkpointed::run(arguments.folder.as_deref()),
        Script::SoakTrain => soak::train(arguments.folder.as_deref()),
        Script::SoakCheckSaved => soak::check_saved(arguments.folder.as_deref()),
    }
}
