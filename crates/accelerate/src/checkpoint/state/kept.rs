//! Tensors that ranks hold otherwise than the first rank of their folder: running statistics of batches, what the program has
//! registered, and what ranks have trained by themselves. Those of rank 3 are the object `kept_by_rank_3`, so that a run of as many ranks goes on with what each of them had.

use super::save::{FolderWriters, RunState};
use crate::error::{Error, Result};
use crate::group::Group;
use crate::offload::is_outline;
use crate::session::ObjectState;
use accelerate_core::checkpoint::{KEPT_BY_RANK, SavedObject};
use accelerate_core::weight_files::Checksum;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};

const OP: &str = "save_state";
/// Among the values: how many tensors there are.
const NUM_TENSORS: &str = "num_tensors";
/// Among the values: what the first rank has and this one has not.
const ABSENT: &str = "absent";

/// Object and name of a tensor.
type ObjectAndName = (String, String);

pub(crate) fn kept_by_rank(rank: usize) -> String {
    format!("{KEPT_BY_RANK}{rank}")
}

/// What a rank tells the others of its tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Content {
    kind: String,
    shape: Vec<i64>,
    checksum: String,
}

impl Content {
    fn of(tensor: &Tensor) -> Result<Self> {
        let bytes = tensor.f_detach()?.f_to(Device::Cpu)?.f_contiguous()?.f_reshape([-1])?.f_view_dtype(Kind::Uint8)?;
        let mut checksum = Checksum::new();
        checksum.update(&Vec::<u8>::try_from(&bytes)?);
        let kind = format!("{:?}", tensor.f_kind()?);
        Ok(Self { kind, shape: tensor.size(), checksum: checksum.to_string() })
    }
}

/// Puts those of this rank's tensors that may differ, and do, into an object of its own. Collective.
pub(crate) fn keep_differing(run: &mut RunState, group: &Group, writers: &FolderWriters) -> Result<()> {
    let own = group.agree_on_success(OP, contents(run))?;
    let text = serde_json::to_vec(&own.iter().collect::<Vec<_>>()).map_err(Error::other)?;
    let all = group.all_gather_bytes(&text)?;
    let first = writers.0.start;
    let Some(of_first) = all.get(first).filter(|_| first != group.rank()) else { return Ok(()) };
    let of_first: Vec<(ObjectAndName, Content)> = serde_json::from_slice(of_first).map_err(Error::other)?;
    let of_first: BTreeMap<ObjectAndName, Content> = of_first.into_iter().collect();
    let full_name = |(object, name): &ObjectAndName| format!("{object}.{name}");
    let mut kept = ObjectState::default();
    for (key, _) in own.iter().filter(|(key, content)| of_first.get(*key) != Some(*content)) {
        let tensor = run.objects.get_mut(&key.0).and_then(|state| state.tensors.remove(&key.1));
        kept.tensors.extend(tensor.map(|tensor| (full_name(key), tensor)));
    }
    let absent: Vec<String> = of_first.keys().filter(|key| !own.contains_key(*key)).map(full_name).collect();
    if kept.tensors.is_empty() && absent.is_empty() {
        return Ok(());
    }
    kept.values = json!({ NUM_TENSORS: kept.tensors.len(), ABSENT: absent });
    run.objects.insert(kept_by_rank(group.rank()), kept);
    Ok(())
}

/// Those tensors that ranks may hold otherwise. What is without memory is never written to.
fn contents(run: &RunState) -> Result<BTreeMap<ObjectAndName, Content>> {
    let tensor = |(object, name): &ObjectAndName| run.objects.get(object)?.tensors.get(name);
    let differing = run.may_differ.iter().filter_map(|key| Some((key, tensor(key)?)));
    let in_memory = differing.filter(|(_, tensor)| !is_outline(tensor));
    in_memory.map(|(key, tensor)| Ok((key.clone(), Content::of(tensor)?))).collect()
}

/// Puts what the rank itself had in the place of what the first one had.
pub(crate) fn put_back(kept: ObjectState, states: &mut BTreeMap<String, ObjectState>) {
    let absent = kept.values[ABSENT].as_array().into_iter().flatten().filter_map(|name| name.as_str());
    for (object, name) in absent.filter_map(object_and_name) {
        states.get_mut(&object).map(|state| state.tensors.remove(&name));
    }
    for (full, tensor) in kept.tensors {
        let Some((object, name)) = object_and_name(&full) else { continue };
        states.get_mut(&object).map(|state| state.tensors.insert(name, tensor));
    }
}

/// Object and name of each tensor that a rank of the run held otherwise than the first one, or not at all.
pub(crate) fn differing_in(kept: &SavedObject) -> impl Iterator<Item = ObjectAndName> {
    let absent = kept.values[ABSENT].as_array().into_iter().flatten().filter_map(|name| name.as_str());
    kept.tensors.keys().map(String::as_str).chain(absent).filter_map(object_and_name)
}

/// Are tensors of the rank in the folder of another machine?
pub(crate) fn is_kept_elsewhere(kept: &ObjectState) -> bool {
    kept.values[NUM_TENSORS].as_u64() != Some(kept.tensors.len() as u64)
}

/// Names of objects have no full stop in them.
fn object_and_name(full: &str) -> Option<ObjectAndName> {
    full.split_once('.').map(|(object, name)| (object.to_owned(), name.to_owned()))
}
