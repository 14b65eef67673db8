//! What a program asks of its accelerator beside plugins.

use crate::accumulation::PartialWindow;
use crate::names::RngType;
use crate::schedule::SchedulerUnit;
use crate::settings::record::record;

record! {
    /// The arguments of `Accelerator` that are no plugin (`Accelerator.__init__` of the reference, `accelerator.py`).
    ///
    /// ```
    /// use accelerate_core::config::{AcceleratorConfig, AcceleratorSettings};
    /// assert!(AcceleratorSettings::from(AcceleratorConfig::default()).device_placement);
    /// ```
    AcceleratorConfig => AcceleratorSettings, section "accelerator_config", keys "", variables "ACCELERATE_ACCELERATOR_" {
        /// Move models and batches to the device. Default true.
        device_placement: bool = true => setting();
        /// How a window of micro-batches that the data cuts short is scaled. Default: to the true mean.
        partial_window: PartialWindow = PartialWindow::TrueMean => setting().reference_default("reference");
        /// The random number streams that all ranks take over from rank 0 when a pass over a prepared loader begins.
        rng_types: Vec<RngType> = vec![RngType::Generator] => setting();
        /// Whether schedulers move only when the optimizer does. Default true.
        step_scheduler_with_optimizer: bool = true => setting();
        /// What one scheduler step counts. Default: as the reference, one tick per process and optimizer step.
        scheduler_unit: SchedulerUnit = SchedulerUnit::Reference => setting();
        /// Give half-precision outputs of prepared models as float32. Default true, as the reference.
        outputs_to_fp32: bool = true => setting();
    }
}
