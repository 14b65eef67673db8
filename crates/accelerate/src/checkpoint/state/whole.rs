//! Whole tensors out of the parts that ranks hold, before they are written: `FULL_STATE_DICT`.
//!
//! One tensor after the other travels to the rank that writes it, which holds it in the memory of the host; the parts go as
//! they are sent. So no rank has more of the state at a time than what it writes, and what it has not sent yet.

use super::save::{FolderWriters, RunState, held_tensors, is_model, layout_of};
use crate::checkpoint::dtype::to_kind;
use crate::error::{Error, Result, WeightsError};
use crate::group::Group;
use crate::session::ObjectState;
use accelerate_core::checkpoint::{HeldTensor, WholeTensor, WrittenBy, plan_whole_tensors};
use accelerate_core::config::FullStateDict;
use accelerate_core::layout::{Copied, Layout};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use tch::{Device, Tensor};

const OP: &str = "save_state";

/// What a rank tells the others.
#[derive(Serialize, Deserialize)]
struct Own {
    held: Vec<HeldTensor>,
    /// Who writes into the folder that it sees.
    folder: Range<usize>,
}

/// Leaves in `run` what this rank is to write of models and optimizers, in whole tensors. Collective.
pub(crate) fn gather_whole(
    run: &mut RunState,
    group: &Group,
    folder: &Path,
    writers: &FolderWriters,
    full: FullStateDict,
) -> Result<()> {
    // All of it is in memory before any of it is sent: a disk that fails on one rank must not keep the others waiting.
    let own = group.agree_on_success(OP, run.bring_into_memory().and_then(|()| held_tensors(run, folder)))?;
    let own = serde_json::to_vec(&Own { held: own, folder: writers.0.clone() }).map_err(Error::other)?;
    let all = group.all_gather_bytes(&own)?;
    let all: Vec<Own> =
        all.iter().map(|own| serde_json::from_slice(own)).collect::<Result<_, _>>().map_err(Error::other)?;
    let folders: BTreeMap<usize, Range<usize>> = all.iter().map(|own| (own.folder.start, own.folder.clone())).collect();
    let folders: Vec<_> = folders.into_values().collect();
    let held: Vec<_> = all.into_iter().map(|own| own.held).collect();

    let form = |object: &str| written_by(object, full);
    let plan = plan_whole_tensors(&held, &folders, &form)?;
    // Who is short of memory says so before the others send.
    let places = group.agree_on_success(OP, places(&plan, group.rank(), folder))?;
    let mut made = BTreeMap::new();
    for (number, (whole, place)) in plan.iter().zip(places).enumerate() {
        let state = run.objects.get_mut(&whole.object);
        let own = state.as_ref().and_then(|state| state.tensors.get(&whole.name));
        if let Some(tensor) = gather(whole, group, own, place)? {
            made.insert((whole.object.clone(), whole.name.clone()), tensor);
        }
        let is_last =
            plan.get(number + 1).is_none_or(|next| (&next.object, &next.name) != (&whole.object, &whole.name));
        // What is whole may have to be written where it is, too. A part may have all elements, and that of another rank none.
        let is_part = |state: &ObjectState| {
            let has_dims = state.tensors.get(&whole.name).is_some_and(|own| own.dim() != 0);
            has_dims && layout_of(&whole.object, &state.layouts, &whole.name).is_some()
        };
        if let Some(state) = state.filter(|state| is_last && is_part(state)) {
            state.tensors.remove(&whole.name);
        }
    }
    for (object, state) in &mut run.objects {
        let Some(written_by) = form(object) else { continue };
        // What was whole is left with those who may write it.
        let is_kept = written_by == WrittenBy::AllRanks || group.rank() == writers.0.start;
        state.tensors.retain(|_, _| is_kept);
        state.layouts.clear();
    }
    run.unshared.extend(made.keys().cloned());
    for ((object, name), tensor) in made {
        run.objects.entry(object).or_default().tensors.insert(name, tensor);
    }
    Ok(())
}

/// Who writes the whole tensors of an object, if it is one of which ranks have parts.
fn written_by(object: &str, full: FullStateDict) -> Option<WrittenBy> {
    let is_optimizer = object == "optimizer" || object.starts_with("optimizer_");
    let is_on_rank0 = match () {
        () if is_model(object) => full.is_model_on_rank0,
        () if is_optimizer => full.is_optimizer_on_rank0,
        () => return None,
    };
    Some(if is_on_rank0 { WrittenBy::FirstRank } else { WrittenBy::AllRanks })
}

/// Memory for the tensors that this rank makes, flat, in the order of the plan. The system gives it when it is written to.
fn places(plan: &[WholeTensor], rank: usize, folder: &Path) -> Result<Vec<Option<Tensor>>> {
    let place = |whole: &WholeTensor| {
        let (path, name, dtype) = (folder.to_owned(), whole.name.clone(), whole.dtype.to_string());
        let Some(kind) = to_kind(whole.dtype) else { return Err(WeightsError::UnknownDtype { path, name, dtype }) };
        let numel = whole.shape.iter().product::<usize>() as i64;
        let num_bytes = numel as u64 * kind.elt_size_in_bytes() as u64;
        Tensor::f_empty([numel], (kind, Device::Cpu)).map_err(|_| WeightsError::NoMemory { path, name, num_bytes })
    };
    Ok(plan.iter().map(|whole| (whole.writer == rank).then(|| place(whole)).transpose()).collect::<Result<_, _>>()?)
}

/// A tensor in its `place` on the rank that makes it, and nothing elsewhere. Collective.
fn gather(whole: &WholeTensor, group: &Group, own: Option<&Tensor>, place: Option<Tensor>) -> Result<Option<Tensor>> {
    let sources: Vec<usize> = whole.parts.iter().map(|(rank, _)| *rank).collect();
    let Some(place) = place else {
        group.gather_parts(whole.writer, &sources, own, &[])?;
        return Ok(None);
    };
    let mut parts = Vec::with_capacity(sources.len());
    for (rank, layout) in &whole.parts {
        parts.push(match own.filter(|_| *rank == group.rank()) {
            Some(own) => own.f_to(Device::Cpu)?.f_reshape([-1])?,
            None => received(&place, layout)?,
        });
    }
    group.gather_parts(whole.writer, &sources, own, &parts)?;
    let full = Layout::full(whole.shape.clone());
    let copies = full.copies_from(whole.parts.iter().map(|(_, layout)| layout));
    for Copied { source, from, to } in copies.unwrap_or_default() {
        let part = parts[source].f_narrow(0, from.start as i64, from.len() as i64)?;
        place.f_narrow(0, to as i64, from.len() as i64)?.f_copy_(&part)?;
    }
    let shape: Vec<i64> = whole.shape.iter().map(|&size| size as i64).collect();
    Ok(Some(place.f_reshape(shape)?))
}

/// Where a part arrives.
fn received(place: &Tensor, layout: &Layout) -> Result<Tensor> {
    Ok(Tensor::f_empty([layout.numel() as i64], (place.f_kind()?, Device::Cpu))?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::{OpenCheckpoint, PlannedSave};
    use super::*;
    use crate::checkpoint::IoMode;
    use crate::{Accelerator, testing};
    use rstest::rstest;
    use tch::Kind;

    const NAMES: [&str; 4] = ["a", "b", "c", "d"];

    fn numbers(name: &str) -> Tensor {
        let first = NAMES.iter().position(|known| *known == name).unwrap_or_default() as i64;
        Tensor::arange(24, (Kind::Float, Device::Cpu)) + first * 100
    }

    /// A model of which each rank has a quarter, by flat ranges or by columns, and a scalar that only rank 1 has.
    fn run_state(rank: usize, by_columns: bool) -> RunState {
        let (mut model, mut optimizer) = (ObjectState::default(), ObjectState::default());
        for name in NAMES {
            let full = Layout::full([3, 8]);
            let layout = match by_columns {
                true => full.slice(1, rank * 2..rank * 2 + 2).unwrap(),
                false => full.flat(rank * 6..rank * 6 + 6).unwrap(),
            };
            let part = crate::nn::flat_elements(&numbers(name), &layout).unwrap();
            optimizer.tensors.insert(format!("exp_avg.{name}"), part.copy());
            model.tensors.insert(name.to_owned(), part);
            model.layouts.insert(name.to_owned(), layout.clone());
            optimizer.layouts.insert(name.to_owned(), layout);
        }
        if rank == 1 {
            optimizer.tensors.insert("step.a".to_owned(), Tensor::from(7f32));
        }
        let objects = BTreeMap::from([("model".to_owned(), model), ("optimizer".to_owned(), optimizer)]);
        RunState { objects, shard_size: 4, ..Default::default() }
    }

    /// Machines of two ranks that share no folder get all of a model that is sharded over both.
    #[rstest]
    fn each_folder_gets_everything_once(
        #[values(true, false)] is_on_rank0: bool,
        #[values(true, false)] by_columns: bool,
        #[values(2, 4)] per_machine: usize,
    ) {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let full = FullStateDict { is_model_on_rank0: is_on_rank0, is_optimizer_on_rank0: is_on_rank0 };
        let held = testing::ranks(4, Accelerator::builder().cpu(true), |accelerator| {
            let (rank, group) = (accelerator.process_index(), accelerator.group());
            let first = rank / per_machine * per_machine;
            let (folder, writers) = (folders[rank / per_machine].path(), FolderWriters(first..first + per_machine));
            let mut run = run_state(rank, by_columns);
            gather_whole(&mut run, group, folder, &writers, full)?;
            let numels = run.objects.values().flat_map(|state| state.tensors.values()).map(Tensor::numel);
            let numel = numels.sum::<usize>();
            let mut save = PlannedSave::new(run, group, folder, writers)?;
            let places = |save: &PlannedSave| -> Vec<_> {
                save.files.iter().flat_map(|file| &file.tensors).map(|it| it.tensor.data_ptr()).collect()
            };
            let before = places(&save);
            save.copy_to_host()?;
            // Only the scalar was not made here.
            let num_moved = places(&save).iter().zip(&before).filter(|(after, before)| after != before).count();
            assert!(num_moved <= 1, "{num_moved} tensors were copied a second time");
            save.write(group, IoMode::Direct)?;
            Ok(numel)
        })
        .unwrap();
        let group = Group::single_process();
        for folder in &folders[..4 / per_machine] {
            let mut opened = OpenCheckpoint::open(&group, folder.path(), &FolderWriters(0..1)).unwrap();
            let model = opened.object("model", &BTreeMap::new(), &BTreeMap::new(), (0, 1), &Ok).unwrap().unwrap();
            let optimizer =
                opened.object("optimizer", &BTreeMap::new(), &BTreeMap::new(), (0, 1), &Ok).unwrap().unwrap();
            for name in NAMES {
                let wanted = numbers(name).view([3, 8]);
                assert_eq!(model.tensors[name], wanted, "{name}");
                assert_eq!(optimizer.tensors[&format!("exp_avg.{name}")], wanted, "{name}");
            }
            assert_eq!(optimizer.tensors["step.a"], Tensor::from(7f32));
        }
        // Nobody has more than it writes: all where one writes, and a share where all do.
        let wanted = if is_on_rank0 { 8 * 24 } else { 8 * 24 / per_machine };
        assert!(held.iter().all(|&numel| numel <= wanted + 1), "{held:?}");
        assert!(!is_on_rank0 || held[1] == 0, "{held:?}");
    }
}
