//! Profiling: what ran when, recorded by libtorch, over the steps of a loop.

mod kwargs;
mod profiler;
mod trace;

pub use accelerate_core::config::ProfileKwargs;
pub use kwargs::OnTraceReady;
pub use profiler::Profiler;
pub use torch_ext::profiler::{Event, KeyAverage, KeyAverages, KeyAveragesOptions, SortBy};
pub use trace::ProfileTrace;
