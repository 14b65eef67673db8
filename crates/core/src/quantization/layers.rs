//! Which layers of a model are quantised.

use crate::Result;
use crate::error::quantization::QuantizationErrorKind as Kind;
use crate::weight_files::{listed, shown};
use std::collections::BTreeSet;

/// What a message has room for of a list of layers.
const LIST_BYTES: usize = 400;

/// What is known of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerFacts<'a> {
    /// Its path in the model.
    pub path: &'a str,
    /// Is it a product with a weight?
    pub is_linear: bool,
    /// Is its weight another layer's, too?
    pub is_tied: bool,
}

/// Is `path` the module that `module` names, or below it? A module may be named by its whole path or by the last parts of
/// it, as in the reference: `lm_head`, `0.mlp`.
///
/// ```
/// use accelerate_core::quantization::is_under;
/// assert!(is_under("transformer.h.0.mlp.fc", "mlp") && is_under("lm_head", "lm_head"));
/// assert!(!is_under("transformer.h.10.mlp", "h.1") && !is_under("smlp.fc", "mlp"));
/// ```
pub fn is_under(path: &str, module: &str) -> bool {
    let wanted: Vec<&str> = module.split('.').collect();
    let parts: Vec<&str> = path.split('.').collect();
    parts.windows(wanted.len()).any(|some| some == wanted)
}

/// The positions of the layers that are quantised: linear ones that are not skipped and do not stay in 32 bits.
///
/// Without `skip`, the reference keeps the head of a model and layers with tied weights as they are; so the last module at the
/// top of the model is skipped here, unless it is the only one.
///
/// # Errors
/// A path under which there is no layer; no layer that is left.
pub fn layers_to_quantize(
    layers: &[LayerFacts<'_>],
    skip: Option<&[String]>,
    keep_in_fp32: &[String],
) -> Result<Vec<usize>> {
    let known = || listed(layers.iter().map(|layer| layer.path).collect::<BTreeSet<_>>(), LIST_BYTES);
    let given = [("llm_int8_skip_modules", skip.unwrap_or_default()), ("keep_in_fp32_modules", keep_in_fp32)];
    for (field, modules) in given {
        if let Some(module) = modules.iter().find(|module| !layers.iter().any(|layer| is_under(layer.path, module))) {
            return Err(Kind::NoSuchModule { field, found: shown(module), known: known() }.into());
        }
    }
    let top = |layer: &LayerFacts<'_>| layer.path.split('.').next().unwrap_or_default().to_owned();
    let head = layers.last().map(top).filter(|head| layers.iter().any(|layer| top(layer) != *head));
    let is_skipped = |layer: &LayerFacts<'_>| match skip {
        Some(modules) => modules.iter().any(|module| is_under(layer.path, module)),
        None => layer.is_tied || head.as_deref() == Some(top(layer).as_str()),
    };
    let is_kept = |layer: &LayerFacts<'_>| keep_in_fp32.iter().any(|module| is_under(layer.path, module));
    let chosen: Vec<usize> = (0..layers.len())
        .filter(|place| {
            let layer = &layers[*place];
            layer.is_linear && !is_skipped(layer) && !is_kept(layer)
        })
        .collect();
    if chosen.is_empty() {
        let num_linear = layers.iter().filter(|layer| layer.is_linear).count();
        return Err(Kind::Nothing { num_linear }.into());
    }
    Ok(chosen)
}
