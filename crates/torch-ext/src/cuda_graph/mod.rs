//! Work of a CUDA device that is recorded once and done again: graphs with the cargo feature `cuda`, an error that names it without.

#[cfg(not(feature = "cuda"))]
mod disabled;
#[cfg(feature = "cuda")]
mod enabled;

#[cfg(not(feature = "cuda"))]
use disabled as border;
#[cfg(feature = "cuda")]
use enabled as border;

use crate::autograd::CallbackResult;
use crate::error::{Error, Result};
use crate::generator::Generator;
use crate::storage::empty_cache;
use crate::stream::{Stream, synchronize};
use std::fmt;

/// Memory that graphs share, and that nothing else is given (`torch.cuda.graph_pool_handle`).
///
/// Graphs of one pool use the memory of each other's intermediate results. So they have to be replayed in the order in which they
/// were captured, and never at the same time.
///
/// ```
/// # #[cfg(not(feature = "cuda"))]
/// assert!(torch_ext::GraphPool::new().is_err_and(|error| error.is_feature_disabled()));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphPool([u64; 2]);

impl GraphPool {
    /// A pool of its own.
    ///
    /// # Errors
    /// A build without CUDA (`is_feature_disabled`).
    pub fn new() -> Result<Self> {
        border::pool().map(Self)
    }
}

/// The work that a closure asked of a CUDA device, which is done again as one piece (`torch.cuda.CUDAGraph`).
///
/// A replay runs the same kernels at the same addresses: it reads what the same memory holds now, and writes its results over those of
/// the time before. The closure is not run again, so whatever it decided and computed on the host stays as it was. Memory that it was
/// given from outside has to live as long as the graph, which does not keep it. Random numbers go on: a replay takes as many of the
/// generator as the closure did.
///
/// ```
/// use tch::Device;
/// use torch_ext::{CudaGraph, GraphPool, stream::Stream};
///
/// if tch::Cuda::is_available() && cfg!(feature = "cuda") {
///     let stream = Stream::from_pool(Device::Cuda(0))?;
///     let x = tch::Tensor::ones([4], (tch::Kind::Float, Device::Cuda(0)));
///     let (graph, twice) = CudaGraph::capture(GraphPool::new()?, &stream, &[], || Ok(x.f_add(&x)?))?;
///     graph.replay()?;
///     assert_eq!(twice.double_value(&[0]), 2.0);
/// }
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub struct CudaGraph {
    raw: border::Raw,
}

impl CudaGraph {
    /// Records what `work` asks of `stream`, which is the current stream meanwhile and must not be the device's default one, and whose
    /// memory comes from `pool`. Nothing of it is done yet: [`replay`](Self::replay) does it for the first time. The generator of the
    /// device takes part by itself; others that the closure uses have to be named.
    ///
    /// Libraries have to be warm, by the same work done on another stream before. One capture at a time in a process.
    ///
    /// # Errors
    /// `work` failed; it did what cannot be recorded, such as waiting for the device or reading a value of it; another thread did; a
    /// build without CUDA (`is_feature_disabled`).
    pub fn capture<T>(
        pool: GraphPool,
        stream: &Stream,
        generators: &[&Generator],
        work: impl FnOnce() -> CallbackResult<T>,
    ) -> Result<(Self, T)> {
        const OPERATION: &str = "CudaGraph::capture";
        if !stream.device().is_cuda() {
            return Err(Error::invalid(
                OPERATION,
                format!("{:?} is no CUDA device, whose work could be recorded", stream.device()),
            ));
        }
        let raw = border::Raw::new()?;
        for generator in generators {
            raw.register_generator(generator)?;
        }
        synchronize(stream.device())?;
        // What is kept for later cannot serve the pool.
        empty_cache()?;
        let _on_stream = stream.enter()?;
        raw.begin(pool.0)?;
        let recording = Recording { raw: &raw, has_ended: false };
        let outcome = work();
        let ended = recording.end();
        // A closure that failed also spoils the recording; its own words say why.
        let value = outcome.map_err(|source| Error::callback(OPERATION, source))?;
        ended?;
        Ok((Self { raw }, value))
    }

    /// Does the work once more, on the current stream.
    ///
    /// # Errors
    /// The device refuses it, or work of before failed.
    pub fn replay(&self) -> Result<()> {
        self.raw.replay()
    }
}

impl fmt::Debug for CudaGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaGraph").finish_non_exhaustive()
    }
}

/// A stream that records leaves that state in any case, also where the work panics.
struct Recording<'a> {
    raw: &'a border::Raw,
    has_ended: bool,
}

impl Recording<'_> {
    fn end(mut self) -> Result<()> {
        self.has_ended = true;
        self.raw.end()
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            let _ = self.raw.end();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tch::Device;

    #[test]
    fn a_device_without_streams_is_refused_by_name() {
        let stream = Stream::current(Device::Cpu).unwrap();
        let error = CudaGraph::capture(GraphPool([0, 0]), &stream, &[], || Ok(())).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("Cpu is no CUDA device"), "{error}");
    }

    #[test]
    #[cfg(not(feature = "cuda"))]
    fn a_build_without_cuda_names_the_feature() {
        let error = GraphPool::new().unwrap_err();
        assert!(error.is_feature_disabled() && error.to_string().contains("feature `cuda`"), "{error}");
        assert!(border::Raw::new().is_err());
    }
}
