//! Is a model what the chosen compiler makes? Nothing is compiled here: that is done when a model is saved.

use crate::error::{Result, StateError};
use crate::messages;
use accelerate_core::config::{Compilation, DynamoBackend, MixedPrecision};

/// Machine code has its element types since it was compiled.
pub(super) fn tell_precision(compilation: Compilation, precision: MixedPrecision) {
    if compilation == Compilation::AotInductor && precision != MixedPrecision::No {
        messages::warning!(
            "mixed_precision {precision} has no effect on what a package of AOTInductor computes: export the model in the \
             precision that it is to have"
        );
    }
}

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
