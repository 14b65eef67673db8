//! A model's parameters as plans see them.

use crate::nn::{AnyLayer, Param, ParamStore};
use accelerate_core::plan::{Inventory, ParameterEntry};
use std::collections::{BTreeMap, BTreeSet};
use tch::Kind;

/// The parameters that plans divide: of a layer that ranks compute together, this rank's slices. Those that are stored as several
/// tensors are frozen, and are divided on their own.
pub(crate) fn dividable(store: &ParamStore) -> Vec<Param> {
    store.own_parameters().into_iter().filter(|param| !param.is_stored_as_several()).collect()
}

/// The parameters of a model that nobody has divided yet, or that is whole on every rank.
pub(crate) fn inventory(store: &ParamStore) -> Inventory {
    let aliases = store.aliases();
    let sizes = |param: &Param| param.shape().into_iter().map(|size| size.max(0) as usize).collect::<Vec<_>>();
    let of_batch_norms: BTreeSet<String> = store
        .named_layers()
        .iter()
        .filter(|(_, layer)| matches!(layer, AnyLayer::BatchNorm(_)))
        .flat_map(|(_, layer)| layer.params())
        .map(|param| param.name().to_owned())
        .collect();
    let in_fp8: BTreeSet<String> = store
        .named_layers()
        .iter()
        .filter_map(|(_, layer)| match layer {
            AnyLayer::Linear(linear) if linear.kernel().gathers_codes() => Some(linear.weight.name().to_owned()),
            _ => None,
        })
        .collect();
    let whole: BTreeMap<String, Param> = store.named_parameters().into_iter().collect();
    let entry = |param: &Param| {
        let (kind, shape) = (param.kind(), sizes(param));
        let ties: Vec<String> =
            aliases.iter().filter(|(_, first)| *first == param.name()).map(|(alias, _)| alias.clone()).collect();
        ParameterEntry {
            name: param.name().to_owned(),
            whole_shape: whole.get(param.name()).map(sizes).filter(|whole| *whole != shape),
            shape,
            dtype: dtype_name(kind),
            element_bytes: kind.elt_size_in_bytes(),
            original_element_bytes: None,
            requires_grad: param.requires_grad(),
            keeps_dtype: of_batch_norms.contains(param.name()),
            // Another layer may compute with it otherwise.
            in_fp8: ties.is_empty() && in_fp8.contains(param.name()),
            ties,
        }
    };
    Inventory { parameters: dividable(store).iter().map(entry).collect() }
}

/// As PyTorch writes it.
fn dtype_name(kind: Kind) -> String {
    match kind {
        Kind::Float => "float32".to_owned(),
        Kind::Double => "float64".to_owned(),
        Kind::Half => "float16".to_owned(),
        Kind::BFloat16 => "bfloat16".to_owned(),
        other => format!("{other:?}").to_lowercase(),
    }
}
