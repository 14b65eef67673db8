//! The modules of a model, for device maps.

use super::dtype::element_type;
use crate::error::Result;
use crate::nn::{Param, ParamStore};
use accelerate_core::device_map::{ElementType, MapTensor, ModuleTree};
use std::collections::HashMap;
use tch::Kind;

/// The tree of modules of a model, as [`infer_auto_device_map`](super::infer_auto_device_map) takes it. Nothing is read of the values, so
/// the model may be without memory ([`ParamStore::init_empty_weights`]).
///
/// Tied parameters stand under each of their names. Modules come in the order in which their first parameters were registered.
///
/// # Errors
/// An element type that maps have no name for.
///
/// ```
/// use accelerate::big_model::module_tree;
/// use accelerate::nn::{Linear, ParamStore};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::init_empty_weights(Device::Cpu);
/// Linear::new(store.root() / "decoder", 1000, 1000, Default::default())?;
/// let tree = module_tree(&store)?;
/// assert_eq!(tree.module_bytes("decoder", &Default::default()), Some(4 * 1_001_000));
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn module_tree(store: &ParamStore) -> Result<ModuleTree> {
    module_tree_of(store, taken)
}

/// The same, as parameters will be.
pub(crate) fn module_tree_of(store: &ParamStore, taken: impl Fn(&Param) -> Result<Taken>) -> Result<ModuleTree> {
    let tensor = |name: &str, param: &Param| -> Result<MapTensor> {
        let (num_elements, dtype) = taken(param)?;
        Ok(MapTensor { name: name.to_owned(), num_elements, dtype, is_buffer: param.is_buffer(), tied_to: None })
    };
    let mut tensors = Vec::new();
    let mut aliases = aliases_by_layer(store);
    for param in store.parameters_and_buffers() {
        let module = module_of(param.name());
        // A second name stands where its layer was made.
        for alias in aliases.remove(module).unwrap_or_default() {
            tensors.push(tensor(&alias.0, &alias.1)?.tied_to(alias.1.name()));
        }
        tensors.push(tensor(param.name(), &param)?);
    }
    let mut rest: Vec<(String, Param)> = aliases.into_values().flatten().collect();
    rest.sort_by(|(one, _), (other, _)| one.cmp(other));
    for (alias, param) in rest {
        tensors.push(tensor(&alias, &param)?.tied_to(param.name()));
    }
    Ok(ModuleTree::new(tensors)?)
}

/// The path of the module that a tensor is in.
pub(super) fn module_of(tensor: &str) -> &str {
    tensor.rsplit_once('.').map_or("", |(module, _)| module)
}

fn aliases_by_layer(store: &ParamStore) -> HashMap<String, Vec<(String, Param)>> {
    let mut aliases: HashMap<String, Vec<(String, Param)>> = HashMap::new();
    for (alias, first) in store.aliases() {
        if let Some(param) = store.get(&first) {
            aliases.entry(module_of(&alias).to_owned()).or_default().push((alias, param));
        }
    }
    aliases
}

/// What a parameter takes: as many elements of such a type.
pub(crate) type Taken = (u64, ElementType);

/// What it takes now.
pub(crate) fn taken(param: &Param) -> Result<Taken> {
    if !param.is_stored_as_several() {
        return Ok((param.numel() as u64, element_type(param.kind())?));
    }
    // Types differ between the parts.
    let bytes = |part: &Param| (part.numel() * part.kind().elt_size_in_bytes()) as u64;
    Ok((param.stored_as().iter().map(bytes).sum(), element_type(Kind::Uint8)?))
}
