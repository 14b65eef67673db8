//! Computing in FP8, where accelerators are made and models are prepared.

use super::Accelerator;
use crate::amp::MixedPrecision;
use crate::error::{Fp8Error, Result};
use crate::fp8::{self, Installed, Products};
use crate::messages;
use crate::nn::ParamStore;
use crate::session::Scaling;
use crate::state::PartialState;
use accelerate_core::config::RunConfig;
use accelerate_core::fp8::Fp8Recipe;
use accelerate_core::mesh::Axis;
use std::sync::Arc;

/// The kind of handlers that say how: those of the reference's libraries are this one, too, so that one is given at most.
pub(super) const HANDLER: &str = "FP8RecipeKwargs";

/// Can this process compute in FP8, if it is to? On a CPU that is told, once. `has_recipe`: a handler was given.
///
/// # Errors
/// A recipe that cannot be had; one that goes with another precision; a GPU that cannot multiply FP8 numbers.
pub(super) fn check(config: &RunConfig, has_recipe: bool, state: &PartialState) -> Result<()> {
    let precision = config.cluster.mixed_precision;
    if precision != MixedPrecision::Fp8 {
        let found = precision.to_string();
        return if has_recipe { Err(Fp8Error::WithoutPrecision { found }.into()) } else { Ok(()) };
    }
    Fp8Recipe::of_settings(&config.fp8)?;
    Products::of_device(state.device())?;
    if !state.device().is_cuda() && state.is_main_process() {
        messages::warning!(
            "mixed_precision is fp8 on a CPU, which multiplies no FP8 numbers: what they mean is computed exactly, in 32 bits, and \
             slower than without; it shows what a training on a GPU will do"
        );
    }
    Ok(())
}

/// Makes the layers of a model compute in FP8, if that is the precision; what delayed scaling remembers of them.
///
/// # Errors
/// A layer that would take part and is computed in another way already.
pub(super) fn prepare(accelerator: &Accelerator, store: &ParamStore) -> Result<Option<Arc<dyn Scaling>>> {
    if accelerator.mixed_precision() != MixedPrecision::Fp8 {
        fp8::take_out(store);
        return Ok(None);
    }
    let session = accelerator.session();
    let recipe = Fp8Recipe::of_settings(&accelerator.config().fp8)?;
    let is_tensor_parallel = session.mesh.shape().size(Axis::Tp) > 1;
    let Installed { num_layers, scales } = fp8::put_in(store, recipe, &session.group, is_tensor_parallel)?;
    if num_layers == 0 && accelerator.is_main_process() {
        messages::warning!(
            "mixed_precision is fp8, and no layer of the model computes in FP8: the first and the last linear layer do not, and \
             neither do those with a size that 16 does not divide"
        );
    }
    Ok(scales.map(|scales| scales as Arc<dyn Scaling>))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::accelerator::AcceleratorBuilder;
    use crate::accelerator::builder::tests::build;
    use accelerate_core::config::{AORecipeKwargs, FP8BackendType, FP8RecipeKwargs, TERecipeKwargs};

    #[test]
    fn what_does_not_go_together_is_named() {
        let fp8 = || AcceleratorBuilder::default().mixed_precision(MixedPrecision::Fp8);
        for (builder, variables, words) in [
            (
                AcceleratorBuilder::default().kwargs_handler(FP8RecipeKwargs::default()),
                &[][..],
                "mixed_precision is no",
            ),
            (fp8(), &[("ACCELERATE_FP8_BACKEND", "msamp")], "MS-AMP is not available"),
            (
                fp8().kwargs_handler(TERecipeKwargs::default()).kwargs_handler(AORecipeKwargs::default()),
                &[],
                "two handlers of kind FP8RecipeKwargs",
            ),
        ] {
            let error = build(builder, variables).unwrap_err();
            assert!(error.is_config() && error.to_string().contains(words), "{words}: {error}");
        }
    }

    /// Who speaks of TransformerEngine's recipe wants it.
    #[test]
    fn settings_choose_the_backend() {
        for (variables, wanted) in [
            (&[][..], FP8BackendType::AO),
            (&[("ACCELERATE_FP8_BACKEND", "TE")], FP8BackendType::TE),
            (&[("ACCELERATE_FP8_AMAX_COMPUTE_ALGO", "max")], FP8BackendType::TE),
            (&[("ACCELERATE_FP8_RECIPE_NAME", "rowwise")], FP8BackendType::AO),
        ] {
            let builder = AcceleratorBuilder::default().mixed_precision(MixedPrecision::Fp8);
            assert_eq!(build(builder, variables).unwrap().fp8_backend(), Some(wanted), "{variables:?}");
        }
    }
}
