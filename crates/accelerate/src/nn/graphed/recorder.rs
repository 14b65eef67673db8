//! Who records work of a device and does it again.

use crate::error::{NnError, Result};
use tch::Device;
use torch_ext::autograd::without_stream_mismatch_warning;
use torch_ext::stream::{Stream, synchronize};
use torch_ext::{CudaGraph, Generator, GraphPool};

/// Work of a device as a graph keeps it. A replay does the same at the same addresses.
pub trait Recorder: Send + Sized + 'static {
    /// What was recorded.
    type Recording: Send;

    /// For one recording of each direction. A backward pass of an earlier recording may still come, so memory is not shared with that.
    ///
    /// # Errors
    /// The device's.
    fn fresh(&self) -> Result<Self>;

    /// Does the work apart from everything else, so that libraries are ready when it is recorded.
    ///
    /// # Errors
    /// The work's, the device's.
    fn warm_up(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<()>;

    /// Records the work. What it leaves behind holds nothing yet.
    ///
    /// # Errors
    /// The work's; work that cannot be recorded.
    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Self::Recording>;

    /// Does what was recorded once more. `work` is what it was recorded from, for whoever records nothing: a graph never runs it.
    ///
    /// # Errors
    /// The device's.
    fn replay(&self, recording: &Self::Recording, work: &mut dyn FnMut() -> Result<()>) -> Result<()>;
}

/// Graphs of CUDA, which share one pool of memory.
#[derive(Debug)]
pub struct CudaGraphs {
    pool: GraphPool,
    /// All recordings are of this stream: a backward pass goes where its forward pass went.
    stream: Stream,
    generator: Generator,
}

impl CudaGraphs {
    /// For work of `device`.
    ///
    /// # Errors
    /// A device that is not CUDA's, or not of this process; a build without the feature `cuda`.
    pub fn new(device: Device) -> Result<Self> {
        if !device.is_cuda() {
            return Err(NnError::GraphedDevice { device }.into());
        }
        let pool = GraphPool::new()?;
        let stream = Stream::from_pool(device)?;
        Ok(Self { pool, stream, generator: Generator::default_for(device)? })
    }
}

impl Recorder for CudaGraphs {
    type Recording = CudaGraph;

    fn fresh(&self) -> Result<Self> {
        Self::new(self.stream.device())
    }

    fn warm_up(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let device = self.stream.device();
        let side = Stream::from_pool(device)?;
        synchronize(device)?;
        without_stream_mismatch_warning(|| side.run(work))??;
        Ok(synchronize(device)?)
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<CudaGraph> {
        let capture = || CudaGraph::capture(self.pool, &self.stream, &[&self.generator], || Ok(work()?));
        Ok(without_stream_mismatch_warning(capture)?.0)
    }

    fn replay(&self, recording: &CudaGraph, _work: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        Ok(recording.replay()?)
    }
}
