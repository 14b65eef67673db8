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
        Compilation::CudaGraphs => (DynamoBackend::Cudagraphs, "give prepare an nn::GraphedModule of it"),
        Compilation::None => return Ok(()),
    };
    if wanted == found {
        return Ok(());
    }
    let found = match found {
        Compilation::TorchScript => "TorchScript",
        Compilation::AotInductor => "a package of AOTInductor",
        Compilation::CudaGraphs => "an nn::GraphedModule",
        Compilation::None => "not compiled",
    };
    Err(StateError::NotCompiled { backend, found, cure }.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_what_the_backend_makes_or_the_error_says_how_to_get_there() {
        use Compilation::{AotInductor, CudaGraphs, None, TorchScript};
        for wanted in [TorchScript, AotInductor, CudaGraphs] {
            for found in [None, TorchScript, AotInductor, CudaGraphs] {
                let outcome = check(wanted, found);
                assert_eq!(outcome.is_ok(), wanted == found, "{wanted:?} {found:?}");
                let Err(error) = outcome else { continue };
                let module = match wanted {
                    TorchScript => "ScriptModule",
                    AotInductor => "ExportedModule",
                    CudaGraphs | None => "GraphedModule",
                };
                assert!(error.is_config() && error.to_string().contains(module), "{error}");
            }
        }
        for found in [None, TorchScript, AotInductor, CudaGraphs] {
            check(None, found).unwrap();
        }
    }
}
