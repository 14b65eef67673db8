//! Which parameter of a model each number of a PyTorch optimizer stands for.

use super::PythonOptimizer;
use crate::Result;
use crate::error::python::PythonErrorKind as Kind;
use crate::weight_files::shown;
use safetensors::Dtype;
use std::collections::{BTreeMap, HashMap, HashSet};

/// What running averages of norms are called, which are tensors of a model and no parameters.
const BUFFERS: [&str; 3] = ["running_mean", "running_var", "num_batches_tracked"];

/// Name, element type and shape.
type Described = (String, Dtype, Vec<u64>);

/// The tensors of the models that an optimizer may train.
#[derive(Clone, Debug, Default)]
pub struct Parameters {
    /// Name, element type and shape. In the order of the model where `is_ordered`.
    pub tensors: Vec<(String, Dtype, Vec<u64>)>,
    /// The file keeps the order of the model. Safetensors files are in alphabetical order.
    pub is_ordered: bool,
}

/// How names were found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The user has given them.
    Given,
    /// The optimizer was made of named parameters, and says them.
    Saved,
    /// Parameters come in the order of the model's tensors.
    Order,
    /// No two parameters have the same shape.
    Shapes,
}

/// The name of each parameter of an optimizer, in the order of its groups: as the optimizer itself says, as `given`, in the
/// order of the model's tensors if all shapes agree and no other order would, or by the shapes of the states if only one
/// assignment is possible.
///
/// Where the optimizer says a name that no model has, as that of a tied weight, and another one is given, that one is taken.
///
/// # Errors
/// [`is_weight_files`](crate::Error::is_weight_files): none of these says it, one that was given is not the one that the optimizer says,
/// or a name is no tensor of the model, is there twice, or has another shape than the state.
///
/// ```
/// use accelerate_core::checkpoint::python::{Origin, Parameters, PythonGroup, PythonOptimizer, name_parameters};
/// use accelerate_core::weight_files::Plain;
/// use safetensors::Dtype::F32;
///
/// let group = PythonGroup { params: vec![0, 1], names: None, settings: Vec::new() };
/// let optimizer = PythonOptimizer::<Vec<u64>> { groups: vec![group], state: vec![
///     (0, vec![("exp_avg".into(), Plain::Tensor(vec![2, 3]))]), (1, vec![("exp_avg".into(), Plain::Tensor(vec![2]))]),
/// ], others: Vec::new() };
/// let tensors = vec![("bias".into(), F32, vec![2]), ("weight".into(), F32, vec![2, 3])];
/// let (names, origin) =
///     name_parameters(&optimizer, Clone::clone, &Parameters { tensors, is_ordered: false }, None)?;
/// assert_eq!((names, origin), (vec!["weight".into(), "bias".into()], Origin::Shapes));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
pub fn name_parameters<T>(
    optimizer: &PythonOptimizer<T>,
    shape_of: impl Fn(&T) -> Vec<u64>,
    parameters: &Parameters,
    given: Option<&[String]>,
) -> Result<(Vec<String>, Origin)> {
    let shapes = optimizer.shapes(shape_of);
    let saved = optimizer.saved_names();
    let said = match given {
        Some(given) => Some(agreed(&saved, given, parameters)?),
        None => all_of(&saved).map(|names| (names, Origin::Saved)),
    };
    if let Some((names, origin)) = said {
        check(&names, &shapes, parameters)?;
        return Ok((names, origin));
    }
    if let Some(names) = by_order(optimizer, &shapes, parameters) {
        return Ok((names, Origin::Order));
    }
    by_shapes(&shapes, parameters).map(|names| (names, Origin::Shapes))
}

/// The names, if all parameters have one.
fn all_of(saved: &[Option<&str>]) -> Option<Vec<String>> {
    saved.iter().map(|name| name.map(str::to_owned)).collect::<Option<Vec<_>>>().filter(|names| !names.is_empty())
}

/// The names that were given, if the optimizer does not say others. One that it says only gives way where no model has it, as of
/// weights that are tied.
fn agreed(saved: &[Option<&str>], given: &[String], parameters: &Parameters) -> Result<(Vec<String>, Origin)> {
    if given.len() != saved.len() {
        return Err(Kind::ParameterCount { found: given.len(), wanted: saved.len() }.into());
    }
    let known: HashSet<&str> = parameters.tensors.iter().map(|(name, ..)| name.as_str()).collect();
    let contradicts = |(_, (saved, given)): &(usize, (&Option<&str>, &String))| {
        saved.is_some_and(|saved| saved != *given && known.contains(saved))
    };
    match saved.iter().zip(given).enumerate().find(contradicts) {
        Some((number, (saved, given))) => {
            Err(Kind::OtherName { number, saved: shown(saved.unwrap_or_default()), given: shown(given) }.into())
        }
        None if all_of(saved).is_some_and(|saved| saved == given) => Ok((given.to_vec(), Origin::Saved)),
        None => Ok((given.to_vec(), Origin::Given)),
    }
}

/// The shape of each parameter's state. `None` where it has none.
type Shapes = Vec<Option<Vec<u64>>>;

fn check(names: &[String], shapes: &Shapes, parameters: &Parameters) -> Result<()> {
    if names.len() != shapes.len() {
        return Err(Kind::ParameterCount { found: names.len(), wanted: shapes.len() }.into());
    }
    let mut known: HashMap<&str, Vec<&Vec<u64>>> = HashMap::new();
    for (name, _, shape) in &parameters.tensors {
        known.entry(name).or_default().push(shape);
    }
    let mut seen = HashSet::new();
    for (name, shape) in names.iter().zip(shapes) {
        let Some(found) = known.get(name.as_str()) else {
            return Err(Kind::NoSuchParameter { name: shown(name) }.into());
        };
        if !seen.insert(name) {
            let name = shown(name);
            return Err(if found.len() > 1 { Kind::InTwoModels { name } } else { Kind::ParameterTwice { name } }.into());
        }
        if let (Some(wanted), [first, ..]) = (shape.as_ref().filter(|shape| !found.contains(shape)), &found[..]) {
            let (name, found, wanted) = (shown(name), (*first).clone(), wanted.clone());
            return Err(Kind::ParameterShape { name, found, wanted }.into());
        }
    }
    Ok(())
}

/// Of one group, the parameters are in the order of the model, if each shape agrees and no two are the same. An optimizer may be made
/// of parameters in any order, and shapes that are the same would hide it. Without any state there is nothing that could go
/// to another parameter.
fn by_order<T>(optimizer: &PythonOptimizer<T>, shapes: &Shapes, parameters: &Parameters) -> Option<Vec<String>> {
    if !parameters.is_ordered || optimizer.groups.len() != 1 {
        return None;
    }
    let is_parameter = |(name, dtype, _): &&Described| {
        let last = name.rsplit('.').next().unwrap_or_default();
        !BUFFERS.contains(&last) && matches!(dtype, Dtype::F16 | Dtype::BF16 | Dtype::F32 | Dtype::F64)
    };
    let candidates: Vec<_> = parameters.tensors.iter().filter(is_parameter).collect();
    let agrees = |((_, _, found), wanted): (&&Described, &Option<Vec<u64>>)| {
        wanted.as_ref().is_none_or(|wanted| wanted == found)
    };
    // Two models may have the same names.
    let mut names = HashSet::new();
    if !candidates.iter().all(|(name, ..)| names.insert(name)) {
        return None;
    }
    let mut known = HashSet::new();
    let is_certain = shapes.iter().all(Option::is_none) || candidates.iter().all(|(_, _, shape)| known.insert(shape));
    let is_it = is_certain && candidates.len() == shapes.len() && candidates.iter().zip(shapes).all(agrees);
    is_it.then(|| candidates.into_iter().map(|(name, ..)| name.clone()).collect())
}

/// Each state goes to the only tensor of its shape.
fn by_shapes(shapes: &Shapes, parameters: &Parameters) -> Result<Vec<String>> {
    let mut of_shape: BTreeMap<&[u64], Vec<&str>> = BTreeMap::new();
    for (name, _, shape) in &parameters.tensors {
        of_shape.entry(shape).or_default().push(name);
    }
    let mut taken = HashSet::new();
    let mut names = Vec::with_capacity(shapes.len());
    for (number, shape) in shapes.iter().enumerate() {
        let found = shape.as_ref().and_then(|shape| of_shape.get(shape.as_slice())).map_or(&[][..], Vec::as_slice);
        match found {
            [only] if taken.insert(*only) => names.push((*only).to_owned()),
            found => {
                if let Some(name) = in_two_models(found, parameters) {
                    return Err(Kind::InTwoModels { name: shown(name) }.into());
                }
                let candidates = found.iter().take(4).map(|name| shown(name)).collect();
                return Err(Kind::UnnamedParameter { number, shape: shape.clone(), candidates }.into());
            }
        }
    }
    Ok(names)
}

/// The first of these names that more than one model has.
fn in_two_models<'a>(names: &[&'a str], parameters: &Parameters) -> Option<&'a str> {
    let mut number_of: HashMap<&str, usize> = HashMap::new();
    parameters.tensors.iter().for_each(|(name, ..)| *number_of.entry(name).or_default() += 1);
    names.iter().find(|name| number_of.get(**name).is_some_and(|number| *number > 1)).copied()
}
