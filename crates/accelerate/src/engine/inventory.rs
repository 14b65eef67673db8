//! A model's parameters as plans see them.

use crate::nn::{Param, ParamStore};
use accelerate_core::plan::{Inventory, ParameterEntry};
use tch::Kind;

/// The parameters of a model that nobody has divided yet, or that is whole on every rank.
pub(crate) fn inventory(store: &ParamStore, is_mixed: bool) -> Inventory {
    let aliases = store.aliases();
    let entry = |param: &Param| {
        let kind = kept_kind(param, is_mixed);
        ParameterEntry {
            name: param.name().to_owned(),
            shape: param.shape().into_iter().map(|size| size.max(0) as usize).collect(),
            dtype: dtype_name(kind),
            element_bytes: kind.elt_size_in_bytes(),
            requires_grad: param.requires_grad(),
            ties: aliases.iter().filter(|(_, first)| *first == param.name()).map(|(alias, _)| alias.clone()).collect(),
        }
    };
    Inventory { parameters: store.parameters().iter().map(entry).collect() }
}

/// The element type in which a parameter of a sharded model is kept and trained: in mixed precision 16 bits are for computing,
/// and steps would be lost in them (`_prepare_fsdp` and `fsdp2_prepare_model` of the reference).
pub(super) fn kept_kind(param: &Param, is_mixed: bool) -> Kind {
    match param.kind() {
        Kind::Half | Kind::BFloat16 if is_mixed && param.requires_grad() => Kind::Float,
        own => own,
    }
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
