//! Graphs of CUDA through the C++ shim.

use crate::border::{Handle, check};
use crate::error::Result;
use crate::generator::Generator;

unsafe extern "C" {
    fn te_cuda_graph_new(graph: *mut Handle) -> i32;
    fn te_cuda_graph_free(graph: Handle);
    fn te_cuda_graph_pool(first: *mut u64, second: *mut u64) -> i32;
    fn te_cuda_graph_register_generator(graph: Handle, generator: Handle) -> i32;
    fn te_cuda_graph_begin(graph: Handle, first: u64, second: u64) -> i32;
    fn te_cuda_graph_end(graph: Handle) -> i32;
    fn te_cuda_graph_replay(graph: Handle) -> i32;
}

/// Owns an `at::cuda::CUDAGraph`.
pub(super) struct Raw(Handle);

// SAFETY: a graph is a heap object without ties to a thread, used by one thread at a time through this handle.
unsafe impl Send for Raw {}

pub(super) fn pool() -> Result<[u64; 2]> {
    let (mut first, mut second) = (0, 0);
    // SAFETY: both places are ours and live through the call.
    check("GraphPool::new", unsafe { te_cuda_graph_pool(&mut first, &mut second) })?;
    Ok([first, second])
}

impl Raw {
    pub(super) fn new() -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` receives an owned graph.
        check("CudaGraph", unsafe { te_cuda_graph_new(&mut raw) })?;
        Ok(Self(raw))
    }

    pub(super) fn register_generator(&self, generator: &Generator) -> Result<()> {
        // SAFETY: both handles live through the call; the graph keeps a reference to the generator's state.
        check("CudaGraph::capture", unsafe { te_cuda_graph_register_generator(self.0, generator.handle()) })
    }

    pub(super) fn begin(&self, pool: [u64; 2]) -> Result<()> {
        // SAFETY: the handle is valid while `self` lives.
        check("CudaGraph::capture", unsafe { te_cuda_graph_begin(self.0, pool[0], pool[1]) })
    }

    pub(super) fn end(&self) -> Result<()> {
        // SAFETY: the handle is valid while `self` lives.
        check("CudaGraph::capture", unsafe { te_cuda_graph_end(self.0) })
    }

    pub(super) fn replay(&self) -> Result<()> {
        // SAFETY: the handle is valid while `self` lives. Whoever captured keeps the memory that was not of the pool.
        check("CudaGraph::replay", unsafe { te_cuda_graph_replay(self.0) })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: made by the shim, freed once.
        unsafe { te_cuda_graph_free(self.0) }
    }
}
