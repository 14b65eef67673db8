//! What can go wrong while a run is profiled.

use accelerate_core::config::ProfilerActivity;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub(crate) enum ProfileError {
    #[error(
        "ProfileKwargs.activities names \"{found}\", which this libtorch cannot record; wanted \"cpu\", or \"cuda\" on \
         machines that have it"
    )]
    Activity { found: ProfilerActivity },

    #[error("ProfileKwargs.activities is empty, so nothing would be recorded; name \"cpu\" or \"cuda\", or give none")]
    NoActivities,

    #[error(
        "ProfileKwargs.activities names \"cuda\", but this process has no CUDA device; leave it out, or run where there is \
         one with a libtorch for CUDA"
    )]
    NoCuda,

    #[error(
        "a profiler is running in this process already, and libtorch has one for all threads; end that one before, or \
         profile ranks that are processes, not threads"
    )]
    AlreadyRunning { source: torch_ext::Error },

    #[error("could not make the folder {} for traces: {source}", path.display())]
    Write { path: PathBuf, source: std::io::Error },

    #[error(
        "could not copy the trace {} to {}: {source}. libtorch writes a recording once; keep that file until all are written",
        from.display(),
        to.display()
    )]
    Copy { from: PathBuf, to: PathBuf, source: std::io::Error },
}

impl ProfileError {
    /// Why a profiler did not start.
    pub(crate) fn of_start(source: torch_ext::Error) -> crate::Error {
        if source.is_busy() { Self::AlreadyRunning { source }.into() } else { source.into() }
    }

    pub(crate) fn is_config(&self) -> bool {
        matches!(self, Self::Activity { .. } | Self::NoActivities | Self::NoCuda)
    }
}
