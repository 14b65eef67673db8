//! The README and the chapters of the book as documentation tests: every Rust block in them is compiled, and run unless it
//! says `no_run`.

macro_rules! pages {
    ($($name:ident: $path:literal;)*) => {$(
        #[doc = include_str!(concat!("../../../", $path))]
        struct $name;
    )*};
}

pages! {
    Readme: "README.md";
    Introduction: "docs/src/index.md";
    Installation: "docs/src/installation.md";
    QuickTour: "docs/src/quick_tour.md";
    ComingFromPython: "docs/src/coming_from_python.md";
    Launching: "docs/src/launching.md";
    Failures: "docs/src/failures.md";
    Notebooks: "docs/src/notebooks.md";
    Clusters: "docs/src/clusters.md";
    SeveralMachines: "docs/src/several_machines.md";
    Configuration: "docs/src/configuration.md";
    Data: "docs/src/data.md";
    Optimizers: "docs/src/optimizers.md";
    MixedPrecision: "docs/src/mixed_precision.md";
    CommunicationHooks: "docs/src/communication_hooks.md";
    Sharding: "docs/src/sharding.md";
    TensorParallel: "docs/src/tensor_parallel.md";
    SequenceParallel: "docs/src/sequence_parallel.md";
    DeepSpeed: "docs/src/deepspeed.md";
    Offload: "docs/src/offload.md";
    BigModels: "docs/src/big_models.md";
    FineTuning: "docs/src/fine_tuning.md";
    Quantization: "docs/src/quantization.md";
    Checkpoints: "docs/src/checkpoints.md";
    CheckpointFormat: "docs/src/checkpoint_format.md";
    PythonCheckpoints: "docs/src/python_checkpoints.md";
    Tracking: "docs/src/tracking.md";
    Logging: "docs/src/logging.md";
    Profiling: "docs/src/profiling.md";
    Gpu: "docs/src/gpu.md";
    Settings: "docs/src/settings.md";
    Differences: "docs/src/differences.md";
}
