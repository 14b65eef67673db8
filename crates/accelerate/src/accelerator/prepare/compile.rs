//! Is a model what the chosen compiler makes? Nothing is compiled here: that is done when a model is saved.

use crate::error::{Result, StateError};
use accelerate_core::config::{Compilation, DynamoBackend};

/// A compiled model goes with an accelerator that asks for no compiler, as with the reference.
pub(super) fn check(wanted: Compilation, found: Compilation) -> Result<()> {
    let (backend, cure) = match wanted {
        Compilation::TorchScript => {
            (DynamoBackend::Ts, "save it with torch.jit.save and load that file as an nn::ScriptModule")
        }
        Compilation::AotInductor => (
            DynamoBackend::AotInductor,
            "make a package with `accelerate export-model` and load it as an nn::ExportedModule, or one for inference with \
             torch._inductor.aoti_compile_and_package as an nn::AotInductorModule",
        ),
        // The builder refuses to ask for graphs.
        Compilation::None | Compilation::CudaGraphs => return Ok(()),
    };
    if wanted == found {
        return Ok(());
    }
    let found = match found {
        Compilation::TorchScript => "TorchScript",
        Compilation::AotInductor => "a package of AOTInductor",
        Compilation::None | Compilation::CudaGraphs => "not compiled",
    };
    Err(StateError::NotCompiled { backend, found, cure }.into())
}
