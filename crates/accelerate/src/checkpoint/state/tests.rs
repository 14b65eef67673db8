//! Checkpoints that are killed, and that fail, at every operation on the disk.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::super::block_file::IoMode;
use super::super::fault::{self, Fault};
use super::*;
use crate::Accelerator;
use crate::group::Group;
use crate::offload::outline;
use crate::session::{ObjectState, StateReader};
use crate::{Result, testing};
use accelerate_core::layout::Layout;
use std::collections::BTreeMap;
use std::process::{Command, ExitStatus};
use std::sync::{Arc, Mutex};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

/// What the process that is to be killed is told: folder, number of ranks, the rank to be killed, and at which operation.
const KILLED: &str = "ACCELERATE_TEST_KILLED_CHECKPOINT";

fn builder() -> crate::AcceleratorBuilder {
    Accelerator::builder().cpu(true)
}

/// What a rank holds of a run in which every number is `value`: a model that all have whole, or each a part of, and what is not
/// a tensor.
fn run_state(value: f64, group: &Group, is_sharded: bool) -> RunState {
    let full = |size: usize| Tensor::full([size as i64], value, (Kind::Float, Device::Cpu));
    let mut model = ObjectState { values: serde_json::json!({ "value": value }), ..Default::default() };
    for name in ["first", "second", "third"] {
        let size = 12 / group.world_size();
        let layout = Layout::full([12]).flat(group.rank() * size..(group.rank() + 1) * size).unwrap();
        model.tensors.insert(name.to_owned(), full(if is_sharded { size } else { 12 }));
        model.layouts.extend(is_sharded.then(|| (name.to_owned(), layout)));
    }
    RunState { objects: BTreeMap::from([("model".to_owned(), model)]), shard_size: 1, ..Default::default() }
}

fn writers(group: &Group) -> FolderWriters {
    FolderWriters(0..group.world_size())
}

fn save(folder: &Path, value: f64, group: &Group, is_sharded: bool) -> Result<()> {
    save_by(IoMode::Buffered, folder, value, group, is_sharded)
}

fn save_by(mode: IoMode, folder: &Path, value: f64, group: &Group, is_sharded: bool) -> Result<()> {
    PlannedSave::new(run_state(value, group, is_sharded), group, folder, writers(group))?.write(group, mode)
}

/// The value of which the folder is a checkpoint, whole.
fn whole_checkpoint_in(folder: &Path) -> Result<f64> {
    let group = Group::single_process();
    let mut checkpoint = OpenCheckpoint::open(&group, folder, &writers(&group))?;
    let state = checkpoint.object("model", &BTreeMap::new(), &BTreeMap::new(), (0, 1), &Ok)?.unwrap();
    let value = state.values["value"].as_f64().unwrap();
    for name in ["first", "second", "third"] {
        assert_eq!(state.tensors[name], Tensor::full([12], value, (Kind::Float, Device::Cpu)), "{name}");
    }
    Ok(value)
}

#[test]
fn each_rank_counts_the_bytes_of_the_tensors_that_it_writes() {
    let folder = TempDir::new().unwrap();
    let totals = testing::ranks(3, builder(), |accelerator| {
        let group = accelerator.group();
        let save = PlannedSave::new(run_state(1.0, group, true), group, folder.path(), writers(group))?;
        let progress = save.progress().clone();
        assert_eq!((progress.written.get(), progress.is_main_process), (0, group.rank() == 0));
        save.write(group, IoMode::Direct)?;
        assert_eq!(progress.written.get(), progress.total_bytes);
        Ok(progress.total_bytes)
    })
    .unwrap();
    assert_eq!(totals, [3 * 12 * 4 / 3; 3]);
}

/// How many operations on the disk each rank makes for a save over another one.
fn num_steps(world_size: usize, is_sharded: bool) -> Vec<u64> {
    let folder = TempDir::new().unwrap();
    testing::ranks(world_size, builder(), |accelerator| {
        save(folder.path(), 1.0, accelerator.group(), !is_sharded)?;
        fault::plan(None);
        save(folder.path(), 2.0, accelerator.group(), is_sharded)?;
        Ok(fault::num_steps())
    })
    .unwrap()
}

/// Runs as a process of its own, by the test below.
#[test]
fn save_a_checkpoint_and_be_killed() {
    let Ok(told) = std::env::var(KILLED) else { return };
    let (folder, world_size, rank, step): (String, usize, usize, u64) = serde_json::from_str(&told).unwrap();
    testing::ranks(world_size, builder(), |accelerator| {
        fault::plan((accelerator.process_index() == rank).then_some((step, Fault::Kills)));
        save(Path::new(&folder), 2.0, accelerator.group(), true)
    })
    .unwrap();
}

fn killed_save(folder: &Path, world_size: usize, rank: usize, step: u64) -> ExitStatus {
    Command::new(std::env::current_exe().unwrap())
        .args(["checkpoint::state::tests::save_a_checkpoint_and_be_killed", "--exact"])
        .env(KILLED, serde_json::to_string(&(folder, world_size, rank, step)).unwrap())
        .output()
        .unwrap()
        .status
}

#[test]
fn a_kill_at_any_moment_leaves_the_whole_earlier_checkpoint_or_the_whole_new_one() {
    use std::os::unix::process::ExitStatusExt;
    for world_size in [1, 2] {
        for (rank, steps) in num_steps(world_size, true).into_iter().enumerate() {
            let mut found = Vec::new();
            for step in 0..steps {
                let folder = TempDir::new().unwrap();
                let save = |value, is_sharded| {
                    testing::ranks(world_size, builder(), |accelerator| {
                        save(folder.path(), value, accelerator.group(), is_sharded)
                    })
                    .unwrap();
                };
                save(1.0, false);
                let status = killed_save(folder.path(), world_size, rank, step);
                assert_eq!(status.signal(), Some(9), "rank {rank}, step {step}: {status}");
                found.push(whole_checkpoint_in(folder.path()).unwrap());
                // The next save leaves nothing behind.
                save(3.0, false);
                assert_eq!(whole_checkpoint_in(folder.path()).unwrap(), 3.0);
                let names = names_in(folder.path()).unwrap();
                assert!(names.iter().all(|name| !name.starts_with('.') && !name.contains("rank-")), "{names:?}");
            }
            // Once the new checkpoint counts, it counts for good; other ranks than the first make it count nowhere.
            assert!(found.is_sorted() && found.first() == Some(&1.0), "rank {rank}: {found:?}");
            assert_eq!(found.last(), Some(if rank == 0 { &2.0 } else { &1.0 }), "rank {rank}");
        }
    }
}

#[test]
fn a_disk_that_fails_at_any_moment_on_any_rank_is_an_error_on_all_and_leaves_a_whole_checkpoint() {
    for (world_size, mode) in [(1, IoMode::Direct), (3, IoMode::Buffered)] {
        for (rank, steps) in num_steps(world_size, true).into_iter().enumerate() {
            for step in 0..steps {
                let folder = TempDir::new().unwrap();
                let errors = testing::ranks(world_size, builder(), |accelerator| {
                    save(folder.path(), 1.0, accelerator.group(), false)?;
                    fault::plan((accelerator.process_index() == rank).then_some((step, Fault::Fails)));
                    let saved = save_by(mode, folder.path(), 2.0, accelerator.group(), true);
                    fault::plan(None);
                    Ok(saved.err().map(|error| error.to_string()))
                })
                .unwrap();
                assert!(errors.iter().all(Option::is_some), "rank {rank}, step {step}: {errors:?}");
                let found = whole_checkpoint_in(folder.path()).unwrap();
                assert!(found == 1.0 || rank == 0 && found == 2.0, "rank {rank}, step {step}: {found}");
            }
        }
    }
}

#[test]
fn a_first_checkpoint_that_is_killed_is_none_or_a_whole_one() {
    let steps = {
        let folder = TempDir::new().unwrap();
        fault::plan(None);
        save(folder.path(), 2.0, &Group::single_process(), true).unwrap();
        fault::num_steps()
    };
    for step in 0..steps {
        let folder = TempDir::new().unwrap();
        killed_save(folder.path(), 1, 0, step);
        match whole_checkpoint_in(folder.path()) {
            Ok(value) => assert_eq!(value, 2.0),
            Err(error) => assert!(error.to_string().contains("is not a checkpoint"), "{error}"),
        }
    }
}

#[test]
fn a_checkpoint_that_is_removed_is_there_or_gone() {
    let save_in = |folder: &Path| save(folder, 1.0, &Group::single_process(), false).unwrap();
    let parent = TempDir::new().unwrap();
    let folder = parent.path().join("checkpoint_3");
    save_in(&folder);
    fault::plan(None);
    remove_checkpoint(&folder).unwrap();
    for step in 0..fault::num_steps() {
        save_in(&folder);
        fault::plan(Some((step, Fault::Fails)));
        remove_checkpoint(&folder).unwrap_err();
        fault::plan(None);
        match checkpoints_in(parent.path()).unwrap()[..] {
            [FoundCheckpoint { number: 3, is_committed: true, .. }] => {
                assert_eq!(whole_checkpoint_in(&folder).unwrap(), 1.0)
            }
            [] => {}
            ref other => panic!("{other:?}"),
        }
        // The next one that is removed takes along what is left.
        save_in(&folder);
        remove_checkpoint(&folder).unwrap();
        assert_eq!(names_in(parent.path()).unwrap(), [""; 0]);
    }
}

#[test]
fn what_a_killed_save_has_left_goes_and_what_somebody_else_put_there_stays() {
    let parent = TempDir::new().unwrap();
    let folder = parent.path().join("checkpoint_0");
    let kill_while_files_are_written = || {
        let wrote = (0..).any(|step| {
            killed_save(&folder, 1, 0, step);
            folder.exists() && names_in(&folder).unwrap().iter().any(|name| name.ends_with(".saving"))
        });
        assert!(wrote && !is_committed(&folder, STEM).unwrap());
    };
    kill_while_files_are_written();
    remove_abandoned_checkpoint(&folder);
    assert!(!folder.exists());
    kill_while_files_are_written();
    fs::write(folder.join("notes.txt"), "precious").unwrap();
    remove_abandoned_checkpoint(&folder);
    assert_eq!(names_in(&folder).unwrap(), ["notes.txt"]);
}

/// Nobody would read it.
#[test]
fn a_tensor_in_too_many_runs_is_an_error_when_it_is_saved() {
    let (folder, group) = (TempDir::new().unwrap(), Group::single_process());
    let rows = accelerate_core::checkpoint::MOST_RUNS + 1;
    let column = Layout::full([rows, 2]).slice(1, 0..1).unwrap();
    let mut state = run_state(1.0, &group, true);
    let model = state.objects.get_mut("model").unwrap();
    model.tensors.insert("table".to_owned(), Tensor::zeros([rows as i64], (Kind::Uint8, Device::Cpu)));
    model.layouts.insert("table".to_owned(), column);
    let error = PlannedSave::new(state, &group, folder.path(), writers(&group)).unwrap_err();
    assert!(error.is_checkpoint() && error.to_string().contains("divided into 8388609 runs"), "{error}");
}

/// A program may keep weights of its own under this name; what a checkpoint has is in its manifest.
#[test]
fn files_of_others_that_are_called_checkpoint_stay() {
    let names = ["", "-00001-of-00002"].map(|part| format!("checkpoint{part}.safetensors"));
    let names = names.into_iter().chain(["checkpoint.safetensors.index.json".to_owned()]);
    let folder = TempDir::new().unwrap();
    let paths: Vec<_> = names.map(|name| folder.path().join(name)).collect();
    paths.iter().for_each(|path| fs::write(path, "precious").unwrap());
    for value in [1.0, 2.0] {
        save(folder.path(), value, &Group::single_process(), false).unwrap();
        assert_eq!(whole_checkpoint_in(folder.path()).unwrap(), value);
        for path in &paths {
            assert_eq!(fs::read(path).unwrap(), b"precious", "{}", path.display());
        }
    }
}

#[test]
fn what_fits_is_read_into_the_memory_that_is_there_and_only_when_all_is_known_to_be_right() {
    for (world_size, is_sharded) in [(1, false), (2, false), (3, true)] {
        let folder = TempDir::new().unwrap();
        let saved = |accelerator: Accelerator| save(folder.path(), 2.0, accelerator.group(), is_sharded);
        testing::ranks(world_size, builder(), saved).unwrap();
        let group = Group::single_process();
        let mut checkpoint = OpenCheckpoint::open(&group, folder.path(), &writers(&group)).unwrap();
        let zeros = |kind| Tensor::zeros([12], (kind, Device::Cpu));
        // Of another type, and with other strides.
        let wide = Tensor::zeros([12, 2], (Kind::Float, Device::Cpu)).select(1, 0);
        let places = [("first", zeros(Kind::Float)), ("second", zeros(Kind::Double)), ("third", wide)];
        let places = BTreeMap::from(places.map(|(name, place)| (name.to_owned(), place)));
        let state = checkpoint.object("model", &BTreeMap::new(), &places, (0, 1), &Ok).unwrap().unwrap();
        let value = |tensor: &Tensor| Vec::<f64>::try_from(tensor.to_kind(Kind::Double).contiguous()).unwrap();
        assert_eq!(state.tensors["first"].data_ptr(), places["first"].data_ptr());
        assert_eq!(value(&state.tensors["first"]), [0.0; 12]);
        assert_eq!(checkpoint.objects_in_place().into_iter().collect::<Vec<_>>(), ["model"]);
        checkpoint.read_in_place().unwrap();
        assert_eq!(value(&places["first"]), [2.0; 12]);
        for name in ["second", "third"] {
            assert_eq!((value(&places[name]), value(&state.tensors[name])), (vec![0.0; 12], vec![2.0; 12]), "{name}");
        }
        assert!(checkpoint.objects_in_place().is_empty());
    }
}

#[test]
fn a_file_that_is_cut_off_while_it_is_loaded_is_named_with_what_to_do() {
    let folder = TempDir::new().unwrap();
    let group = Group::single_process();
    save(folder.path(), 2.0, &group, false).unwrap();
    let mut checkpoint = OpenCheckpoint::open(&group, folder.path(), &writers(&group)).unwrap();
    let places = BTreeMap::from([("third".to_owned(), Tensor::zeros([12], (Kind::Float, Device::Cpu)))]);
    checkpoint.object("model", &BTreeMap::new(), &places, (0, 1), &Ok).unwrap();
    let file = folder.path().join("model.safetensors");
    std::fs::File::options().write(true).open(&file).unwrap().set_len(64).unwrap();
    let error = checkpoint.read_in_place().unwrap_err().to_string();
    assert!(error.contains("model.safetensors") && error.contains("load a checkpoint again"), "{error}");
}

/// Has tensors of 8 MiB, each full of its number, and counts what it is asked for.
#[derive(Default)]
struct CountingReader {
    /// The bytes of each call.
    calls: Mutex<Vec<usize>>,
    names: Mutex<Vec<String>>,
}

impl StateReader for CountingReader {
    fn read_state(&self, wanted: &[(&str, &Tensor)]) -> Result<()> {
        let bytes = wanted.iter().map(|(_, place)| place.numel() * place.kind().elt_size_in_bytes()).sum();
        self.calls.lock().unwrap().push(bytes);
        for (name, place) in wanted {
            self.names.lock().unwrap().push((*name).to_owned());
            let _ = place.shallow_clone().fill_(name[1..].parse::<f64>().unwrap());
        }
        Ok(())
    }
}

const NUM_ELSEWHERE: usize = 12;

/// Tensors `t00` and so on, of which every fourth is in memory and a second object has one that is larger than all others.
fn state_elsewhere(readers: [&Arc<CountingReader>; 2]) -> RunState {
    let mut model = ObjectState::default();
    for number in 0..NUM_ELSEWHERE {
        let tensor = match number % 4 {
            3 => Tensor::full([2 << 20], number as f64, (Kind::Float, Device::Cpu)),
            _ => outline(&[2 << 20], Kind::Float).unwrap(),
        };
        model.tensors.insert(format!("t{number:02}"), tensor);
    }
    let large = BTreeMap::from([("t77".to_owned(), outline(&[3, 4 << 20], Kind::Float).unwrap())]);
    let optimizer = ObjectState { tensors: large, ..Default::default() };
    let named = [("model", readers[0]), ("optimizer", readers[1])];
    let readers = named.map(|(name, reader)| (name.to_owned(), Arc::clone(reader) as Arc<dyn StateReader>));
    let objects = BTreeMap::from([("model".to_owned(), model), ("optimizer".to_owned(), optimizer)]);
    RunState { objects, readers: readers.into_iter().collect(), shard_size: 1, ..Default::default() }
}

/// What is on a disk is written a few tensors at a time, and each is read once; in the background all of it is copied, once.
#[test]
fn what_is_elsewhere_is_never_in_memory_as_a_whole() {
    const MIB: usize = 1 << 20;
    for is_copied in [false, true] {
        let folder = TempDir::new().unwrap();
        let group = Group::single_process();
        let readers = [Arc::default(), Arc::default()];
        let state = state_elsewhere([&readers[0], &readers[1]]);
        let mut planned = PlannedSave::new(state, &group, folder.path(), writers(&group)).unwrap();
        if is_copied {
            planned.copy_to_host().unwrap();
            assert_eq!(Arc::strong_count(&readers[0]), 1, "the object is kept alive");
        }
        planned.write(&group, if is_copied { IoMode::Direct } else { IoMode::Buffered }).unwrap();

        let calls: Vec<usize> = readers.iter().flat_map(|reader| reader.calls.lock().unwrap().clone()).collect();
        let wanted: &[usize] = if is_copied { &[72, 48] } else { &[24, 24, 24, 48] };
        assert_eq!(calls, wanted.iter().map(|mib| mib * MIB).collect::<Vec<_>>());
        let mut names = readers[0].names.lock().unwrap().clone();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), NUM_ELSEWHERE / 4 * 3, "{names:?}");

        let mut checkpoint = OpenCheckpoint::open(&group, folder.path(), &writers(&group)).unwrap();
        for (object, numbers) in [("model", 0..NUM_ELSEWHERE), ("optimizer", 77..78)] {
            let state = checkpoint.object(object, &BTreeMap::new(), &BTreeMap::new(), (0, 1), &Ok).unwrap().unwrap();
            for number in numbers {
                let found = &state.tensors[&format!("t{number:02}")];
                assert!(found.eq(number as f64).all().double_value(&[]) != 0.0, "{object} {number}");
            }
        }
    }
}

#[test]
fn a_save_while_files_are_opened_is_an_error() {
    let (folder, group) = (TempDir::new().unwrap(), Group::single_process());
    save(folder.path(), 1.0, &group, false).unwrap();
    let checkpoint = OpenCheckpoint::open(&group, folder.path(), &writers(&group)).unwrap();
    checkpoint.check_unchanged().unwrap();
    save(folder.path(), 2.0, &group, false).unwrap();
    let error = checkpoint.check_unchanged().unwrap_err();
    assert!(error.is_checkpoint() && error.to_string().contains("somebody saved into"), "{error}");
}

/// What the manifest lists may be the files of a whole checkpoint.
#[test]
fn where_a_manifest_cannot_be_read_nothing_is_removed_and_nothing_replaced() {
    let (parent, group) = (TempDir::new().unwrap(), Group::single_process());
    let folder = parent.path().join("checkpoint_3");
    save(&folder, 1.0, &group, false).unwrap();
    let manifest = folder.join(SaveManifest::file_name(STEM));
    fs::rename(folder.join("model.safetensors"), folder.join(".checkpoint.0123abcd.saving")).unwrap();
    fs::remove_file(&manifest).unwrap();
    // A link to itself, which is an error of the system that is not "not found".
    std::os::unix::fs::symlink(&manifest, &manifest).unwrap();
    let before = names_in(&folder).unwrap();
    let store = crate::nn::ParamStore::new(Device::Cpu);
    let saves = [
        make_checkpoint_folder(&folder),
        save(&folder, 2.0, &group, false),
        super::super::save_model_weights(&store, &folder, &Default::default()).map(drop),
    ];
    for saved in saves {
        let error = saved.unwrap_err();
        assert!(error.is_weights() && error.to_string().contains("checkpoint.manifest.json"), "{error}");
    }
    remove_abandoned_checkpoint(&folder);
    assert_eq!(names_in(&folder).unwrap(), before);
    let found = checkpoints_in(parent.path()).unwrap();
    assert!(!found[0].is_committed && found[0].problem.is_some(), "{found:?}");
}

#[test]
fn a_folder_that_cannot_be_read_is_not_one_without_checkpoints() {
    let parent = TempDir::new().unwrap();
    let file = parent.path().join("checkpoints");
    assert!(checkpoints_in(&file).unwrap().is_empty());
    fs::write(&file, "a file").unwrap();
    let error = checkpoints_in(&file).unwrap_err();
    assert!(error.is_weights() && error.to_string().contains("cannot read"), "{error}");
}

/// A checkpoint that nobody has finished, and one that is damaged, may be the best.
#[test]
fn what_may_be_the_best_checkpoint_stays() {
    let retention = Retention { total_limit: Some(1), keep_best: Some(1), ..Default::default() };
    let change: [fn(&Path); 3] = [
        |_| {},
        |folder| {
            // As it is between the manifest and the last of the names.
            let (path, pending) = (folder.join(DESCRIPTION), ".checkpoint.0123abcd.saving");
            fs::rename(&path, folder.join(pending)).unwrap();
            let manifest = folder.join(SaveManifest::file_name(STEM));
            let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&manifest).unwrap()).unwrap();
            let files = json["files"].as_array_mut().unwrap().iter_mut();
            files.filter(|file| file["name"] == DESCRIPTION).for_each(|file| file["temporary_name"] = pending.into());
            fs::write(&manifest, json.to_string()).unwrap();
        },
        |folder| fs::write(folder.join(DESCRIPTION), "{").unwrap(),
    ];
    for change in change {
        let (parent, group) = (TempDir::new().unwrap(), Group::single_process());
        for (number, metric) in [0.1, 0.9, 0.2].into_iter().enumerate() {
            let run = RunState { metric: Some(metric), ..run_state(1.0, &group, false) };
            let folder = parent.path().join(checkpoint_name(number));
            PlannedSave::new(run, &group, &folder, writers(&group)).unwrap().write(&group, IoMode::Direct).unwrap();
        }
        change(&parent.path().join("checkpoint_1"));
        remove_outdated_checkpoints(parent.path(), 2, retention);
        let left: Vec<usize> = checkpoints_in(parent.path()).unwrap().into_iter().map(|found| found.number).collect();
        assert_eq!(left, [1, 2]);
    }
}

#[test]
fn only_what_was_being_removed_is_removed() {
    let (parent, group) = (TempDir::new().unwrap(), Group::single_process());
    for name in [".removing_mine", ".removing_checkpoint_7", "checkpoint_0"] {
        save(&parent.path().join(name), 1.0, &group, false).unwrap();
    }
    fs::write(parent.path().join(".removing_checkpoint_8"), "a file").unwrap();
    remove_checkpoint(&parent.path().join("checkpoint_0")).unwrap();
    let mut left = names_in(parent.path()).unwrap();
    left.sort();
    assert_eq!(left, [".removing_checkpoint_8", ".removing_mine"]);
}
