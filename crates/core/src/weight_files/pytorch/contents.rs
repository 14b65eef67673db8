//! What the values of a pickle say of tensors.

use super::archive::{Archive, StoredBytes};
use super::pickle::{Data, Items, Value};
use super::strided::{StoredTensor, element_bytes};
use crate::error::pytorch::TensorProblem as Problem;
use crate::weight_files::{Header, shown};
use safetensors::Dtype;

/// Parameters hold tensors, and subclasses hold what makes up a tensor.
const MOST_LAYERS: usize = 4;

/// The tensor that this value is. `None` if it is something else.
pub(super) fn tensor(value: Value<'_>, archive: &Archive, root: &str) -> Result<Option<StoredTensor>, Problem> {
    let Data::Call(function, mut arguments) = value.data() else { return Ok(None) };
    let mut function = function.path();
    for _ in 0..MOST_LAYERS {
        let argument = |place| arguments.get(place).map(Value::data);
        (function, arguments) = match function.rsplit('.').next().unwrap_or_default() {
            "_rebuild_tensor_v2" => return strided(arguments, None, 6, archive, root).map(Some),
            "_rebuild_tensor_v3" => {
                let Some(Data::Global(dtype)) = argument(6) else { return Err(Problem::Description) };
                let unknown = || Problem::ElementType { found: dtype.path().to_owned() };
                return strided(arguments, Some(dtype.dtype().ok_or_else(unknown)?), 7, archive, root).map(Some);
            }
            "_rebuild_parameter" | "_rebuild_parameter_with_state" => match argument(0) {
                Some(Data::Call(function, arguments)) => (function.path(), arguments),
                _ => return Err(Problem::Description),
            },
            "_rebuild_from_type_v2" => match (argument(0), argument(2)) {
                (Some(Data::Global(function)), Some(Data::Tuple(arguments))) => (function.path(), arguments),
                _ => return Err(Problem::Description),
            },
            name if name.starts_with("_rebuild") => {
                return Err(Problem::Form { found: name.trim_start_matches("_rebuild_").replace('_', " ") });
            }
            _ => return Ok(None),
        };
    }
    Err(Problem::Description)
}

/// A tensor from storage, place of the first element, sizes and strides. What else is said begins at `notes_at`.
fn strided(
    arguments: Items<'_>,
    dtype: Option<Dtype>,
    notes_at: usize,
    archive: &Archive,
    root: &str,
) -> Result<StoredTensor, Problem> {
    let description = || Problem::Description;
    let argument = |place| arguments.get(place).ok_or_else(description);
    if let Some(notes) = arguments.get(notes_at) {
        check_notes(notes)?;
    }
    let (dtype, storage) = storage(argument(0)?, dtype, archive, root)?;
    let first = count(argument(1)?).ok_or_else(description)?;
    let shape = counts(argument(2)?).ok_or_else(description)?;
    let stride = counts(argument(3)?).ok_or_else(description)?;
    StoredTensor::new(dtype, shape, stride, first, storage)
}

/// Whether values are stored as they are, and not conjugated or negated.
fn check_notes(notes: Value<'_>) -> Result<(), Problem> {
    let Data::Dict(pairs) = notes.data() else { return Err(Problem::Description) };
    // There are two. Many tensors may have the same ones.
    if pairs.len() > 8 {
        return Err(Problem::Description);
    }
    match pairs.iter().find(|(_, value)| !matches!(value.data(), Data::Bool(false))) {
        None => Ok(()),
        Some((key, _)) => {
            let found = if let Data::Text(key) = key.data() { shown(key) } else { key.kind() };
            Err(Problem::Form { found })
        }
    }
}

/// The element type and the place of a storage. Its type says the elements if `dtype` does not.
fn storage(
    value: Value<'_>,
    dtype: Option<Dtype>,
    archive: &Archive,
    root: &str,
) -> Result<(Dtype, StoredBytes), Problem> {
    let Data::Persistent(identity) = value.data() else { return Err(Problem::Description) };
    let Data::Tuple(parts) = identity.data() else { return Err(Problem::Description) };
    let part = |place| parts.get(place).map(Value::data);
    let (Some(Data::Text("storage")), Some(Data::Global(class)), Some(Data::Text(key)), Some(numel)) =
        (part(0), part(1), part(2), parts.get(4).and_then(count))
    else {
        return Err(Problem::Description);
    };
    // Without a type of its own, a storage counts bytes.
    let (dtype, counted_bytes) = match (class.path() == "torch.storage.UntypedStorage", class.dtype(), dtype) {
        (true, _, Some(dtype)) => (dtype, 1),
        (false, Some(counted), dtype) => (dtype.unwrap_or(counted), element_bytes(counted)),
        _ => return Err(Problem::ElementType { found: class.path().to_owned() }),
    };
    let stored = archive.find(&format!("{root}/data/{key}")).ok_or(Problem::Description)?;
    let (found_bytes, wanted_bytes) = (stored.len(), numel.saturating_mul(counted_bytes));
    if found_bytes != wanted_bytes {
        return Err(Problem::StorageSize { key: shown(key), found_bytes, wanted_bytes });
    }
    Ok((dtype, stored.clone()))
}

/// A number that can be a size, an offset or a length.
pub(super) fn count(value: Value<'_>) -> Option<u64> {
    match value.data() {
        Data::Int(number) => u64::try_from(number).ok(),
        _ => None,
    }
}

/// Sizes, strides or offsets: a tuple of numbers, or a `torch.Size` of one.
pub(super) fn counts(value: Value<'_>) -> Option<Vec<u64>> {
    let items = match value.data() {
        Data::Tuple(items) | Data::List(items) => items,
        Data::Call(function, arguments) if function.path() == "torch.Size" => match arguments.get(0)?.data() {
            Data::Tuple(items) | Data::List(items) => items,
            _ => return None,
        },
        _ => return None,
    };
    if items.len() > Header::MAX_DIMS {
        return None;
    }
    items.iter().map(count).collect()
}
