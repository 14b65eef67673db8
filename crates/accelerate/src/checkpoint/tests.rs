//! Saves that are killed, that fail, and that others meddle with.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::atomic::PendingFile;
use super::fault::{self, Fault};
use super::*;
use crate::error::WeightsError;
use crate::nn::{Init, ParamStore};
use accelerate_core::weight_files::{SaveManifest, SavedFile};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitStatus};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

/// What the process that is to be killed is told.
const FOLDER: &str = "ACCELERATE_TEST_SAVE_FOLDER";
const STEP: &str = "ACCELERATE_TEST_SAVE_STEP";
const KIND: &str = "ACCELERATE_TEST_SAVE_KIND";

fn model(value: f64) -> ParamStore {
    let store = ParamStore::new(Device::Cpu);
    for name in ["first", "second", "third"] {
        let param = store.root().param(name, ([4], Init::Zeros)).unwrap();
        param.copy_(&Tensor::full([4], value, (Kind::Float, Device::Cpu))).unwrap();
    }
    store
}

/// Two kinds of saves follow one another: in one file, or in three with an index.
fn options(value: f64, in_shards: bool) -> SaveModelOptions {
    let max_shard_size = if in_shards { "16B" } else { "1GB" };
    let files = BTreeMap::from([
        ("config.json".to_owned(), format!("{{\"value\": {value}}}").into_bytes()),
        ("tokenizer.json".to_owned(), format!("tokenizer of {value}").into_bytes()),
    ]);
    SaveModelOptions { max_shard_size: max_shard_size.to_owned(), files, ..Default::default() }
}

fn save(folder: &Path, value: f64, in_shards: bool) -> crate::Result<()> {
    save_model_weights(&model(value), folder, &options(value, in_shards)).map(drop)
}

/// The value of which the folder is a save, whole.
#[track_caller]
fn whole_save_in(folder: &Path) -> f64 {
    let config = String::from_utf8(read_saved_file(folder, "config.json").unwrap()).unwrap();
    let value: f64 = config.strip_prefix("{\"value\": ").unwrap().strip_suffix('}').unwrap().parse().unwrap();
    let store = model(-1.0);
    load_checkpoint_in_model(&store, folder, &LoadOptions::default()).unwrap();
    for param in store.parameters() {
        assert_eq!(param.get().unwrap(), Tensor::full([4], value, (Kind::Float, Device::Cpu)), "{}", param.name());
    }
    assert_eq!(read_saved_file(folder, "tokenizer.json").unwrap(), format!("tokenizer of {value}").into_bytes());
    verify_saved_files(folder).unwrap();
    value
}

fn listing(folder: &Path) -> Vec<String> {
    atomic::names_in(folder).unwrap()
}

/// The four ways in which a save can follow another.
const FORMS: [(bool, bool); 4] = [(false, false), (false, true), (true, false), (true, true)];

/// How many operations on the disk a save over another one takes.
fn num_steps(before: bool, after: bool) -> u64 {
    let folder = TempDir::new().unwrap();
    save(folder.path(), 1.0, before).unwrap();
    fault::plan(None);
    save(folder.path(), 2.0, after).unwrap();
    fault::num_steps()
}

/// Runs as a process of its own, by the test below.
#[test]
fn save_and_be_killed() {
    let (Ok(folder), Ok(step), Ok(kind)) = (std::env::var(FOLDER), std::env::var(STEP), std::env::var(KIND)) else {
        return;
    };
    fault::plan(Some((step.parse().unwrap(), Fault::Kills)));
    save(Path::new(&folder), 2.0, kind == "shards").unwrap();
}

fn killed_save(folder: &Path, step: u64, in_shards: bool) -> ExitStatus {
    Command::new(std::env::current_exe().unwrap())
        .args(["checkpoint::tests::save_and_be_killed", "--exact"])
        .env(FOLDER, folder)
        .env(STEP, step.to_string())
        .env(KIND, if in_shards { "shards" } else { "one file" })
        .output()
        .unwrap()
        .status
}

#[cfg(unix)]
#[test]
fn a_kill_at_any_moment_of_a_save_leaves_the_whole_earlier_save_or_the_whole_new_one() {
    use std::os::unix::process::ExitStatusExt;
    for (before, after) in FORMS {
        let mut found = Vec::new();
        for step in 0..num_steps(before, after) {
            let folder = TempDir::new().unwrap();
            save(folder.path(), 1.0, before).unwrap();
            let status = killed_save(folder.path(), step, after);
            assert_eq!(status.signal(), Some(9), "step {step}: {status}");
            found.push(whole_save_in(folder.path()));
            // The next save leaves nothing behind.
            save(folder.path(), 3.0, before).unwrap();
            assert_eq!(whole_save_in(folder.path()), 3.0);
            assert!(listing(folder.path()).iter().all(|name| !name.starts_with('.')), "{:?}", listing(folder.path()));
        }
        // Once the new save counts, it counts for good.
        assert!(found.is_sorted() && found.first() == Some(&1.0) && found.last() == Some(&2.0), "{found:?}");
    }
}

#[test]
fn a_disk_that_fails_at_any_moment_of_a_save_leaves_the_earlier_save_or_the_new_one() {
    for (before, after) in FORMS {
        for step in 0..num_steps(before, after) {
            let folder = TempDir::new().unwrap();
            save(folder.path(), 1.0, before).unwrap();
            let earlier = listing(folder.path());
            fault::plan(Some((step, Fault::Fails)));
            let result = save(folder.path(), 2.0, after);
            fault::plan(None);
            let error = result.expect_err("what fails is an error");
            assert!(error.is_weights(), "step {step}: {error}");
            if whole_save_in(folder.path()) == 1.0 {
                assert_eq!(listing(folder.path()), earlier, "step {step}: {error}");
            }
        }
    }
}

#[test]
fn a_first_save_that_is_interrupted_is_no_save_or_a_whole_one() {
    let steps = {
        let folder = TempDir::new().unwrap();
        fault::plan(None);
        save(folder.path(), 2.0, true).unwrap();
        fault::num_steps()
    };
    for step in 0..steps {
        let folder = TempDir::new().unwrap();
        killed_save(folder.path(), step, true);
        match read_saved_file(folder.path(), "config.json") {
            Ok(_) => assert_eq!(whole_save_in(folder.path()), 2.0),
            Err(error) => {
                assert!(error.to_string().contains("config.json"), "{error}");
                let error = load_checkpoint_in_model(&model(0.0), folder.path(), &LoadOptions::default()).unwrap_err();
                assert!(error.to_string().contains("holds no weights"), "{error}");
            }
        }
    }
}

#[test]
fn whoever_changes_a_file_that_was_saved_with_weights_is_told_when_they_are_loaded() {
    type Change = fn(&Path);
    let weights_of_another = |path: &Path| {
        let folder = TempDir::new().unwrap();
        save(folder.path(), 2.0, false).unwrap();
        fs::copy(folder.path().join("model.safetensors"), path).map(drop).unwrap();
    };
    let changes: [(&str, Change, &str); 5] = [
        ("model.safetensors", weights_of_another, "content has changed"),
        ("config.json", |path| fs::write(path, "{\"value\": 7}").unwrap(), "config.json"),
        ("config.json", |path| fs::remove_file(path).unwrap(), "config.json"),
        ("tokenizer.json", |path| fs::write(path, "tokenizer of 10").unwrap(), "bytes"),
        ("model.safetensors", |path| fs::write(path, "short").unwrap(), "model.safetensors"),
    ];
    for (name, change, part) in changes {
        let folder = TempDir::new().unwrap();
        save(folder.path(), 1.0, false).unwrap();
        change(&folder.path().join(name));
        for path in [folder.path().to_owned(), folder.path().join("model.safetensors")] {
            let text = load_checkpoint_in_model(&model(0.0), path, &LoadOptions::default()).unwrap_err().to_string();
            assert!(text.contains(name) && text.contains(part) && text.contains("model.manifest.json"), "{text}");
        }
        assert!(read_saved_file(folder.path(), "config.json").is_err());
    }
}

#[test]
fn a_bit_that_turned_in_the_weights_is_found_by_verifying() {
    let folder = TempDir::new().unwrap();
    save(folder.path(), 1.0, false).unwrap();
    let path = folder.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    let text = verify_saved_files(folder.path()).unwrap_err().to_string();
    assert!(text.contains("model.safetensors") && text.contains("content has changed"), "{text}");
}

/// Readers who know no manifest, such as those of other libraries, go by the index.
#[test]
fn an_index_never_stands_beside_shards_of_two_saves() {
    for step in 0..num_steps(true, true) {
        let folder = TempDir::new().unwrap();
        save(folder.path(), 1.0, true).unwrap();
        killed_save(folder.path(), step, true);
        fs::remove_file(folder.path().join("model.manifest.json")).unwrap();
        let store = model(-1.0);
        if load_checkpoint_in_model(&store, folder.path(), &LoadOptions::default()).is_ok() {
            let values: Vec<f64> =
                store.parameters().iter().map(|param| param.get().unwrap().double_value(&[0])).collect();
            assert!(values == [1.0; 3] || values == [2.0; 3], "step {step}: {values:?}");
        }
    }
}

/// Where a file system has no locks, somebody else may have given a file its name, or removed it.
#[test]
fn a_temporary_file_that_is_gone_has_to_be_in_its_place() {
    let folder = TempDir::new().unwrap();
    save(folder.path(), 1.0, false).unwrap();
    let json = fs::read_to_string(folder.path().join("model.manifest.json")).unwrap();
    let manifest = accelerate_core::weight_files::SaveManifest::from_json(&json, "model").unwrap();
    let config = manifest.file("config.json").unwrap();
    let renamed = || folder::rename(folder.path(), "model", &(folder.path().join(".gone"), config));
    renamed().unwrap();
    fs::write(folder.path().join("config.json"), "{\"value\": 7}").unwrap();
    assert!(renamed().unwrap_err().to_string().contains("config.json is not as it was saved"));
}

#[test]
fn verifying_reads_what_loading_only_takes_samples_of() {
    let folder = TempDir::new().unwrap();
    let store = ParamStore::new(Device::Cpu);
    store.root().param("large", ([1 << 20], Init::Zeros)).unwrap();
    save_model_weights(&store, folder.path(), &Default::default()).unwrap();
    let path = folder.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    // Between two of the 64 blocks of 4 KiB that are looked at.
    let between = bytes.len() / 63 * 10 + 8192;
    bytes[between] ^= 1;
    fs::write(&path, bytes).unwrap();
    load_checkpoint_in_model(&store, folder.path(), &LoadOptions::default()).unwrap();
    let text = verify_saved_files(folder.path()).unwrap_err().to_string();
    assert!(text.contains("model.safetensors") && text.contains("content has changed"), "{text}");
}

#[test]
fn files_of_an_interrupted_save_are_not_lost_where_the_next_one_does_not_have_them() {
    let folder = interrupted();
    save_model_weights(&model(3.0), folder.path(), &Default::default()).unwrap();
    assert_eq!(fs::read(folder.path().join("config.json")).unwrap(), b"{\"value\": 2}");
}

#[test]
fn without_its_manifest_a_folder_is_read_as_it_is() {
    let folder = TempDir::new().unwrap();
    save(folder.path(), 1.0, false).unwrap();
    fs::remove_file(folder.path().join("model.manifest.json")).unwrap();
    fs::write(folder.path().join("config.json"), "own").unwrap();
    assert_eq!(read_saved_file(folder.path(), "config.json").unwrap(), b"own");
    load_checkpoint_in_model(&model(0.0), folder.path(), &LoadOptions::default()).unwrap();
    let error = verify_saved_files(folder.path()).unwrap_err();
    assert!(error.to_string().contains("no manifest"), "{error}");
}

/// A folder in which a save ended after its manifest was written.
fn interrupted() -> TempDir {
    let folder = TempDir::new().unwrap();
    save(folder.path(), 1.0, false).unwrap();
    let steps = num_steps(false, false);
    let before_first_rename = (0..steps).find(|&step| {
        let folder = TempDir::new().unwrap();
        save(folder.path(), 1.0, false).unwrap();
        killed_save(folder.path(), step, false);
        whole_save_in(folder.path()) == 2.0
    });
    killed_save(folder.path(), before_first_rename.unwrap(), false);
    assert_eq!(fs::read(folder.path().join("config.json")).unwrap(), b"{\"value\": 1}");
    folder
}

#[test]
fn what_was_written_after_an_interrupted_save_is_not_replaced_by_it() {
    let folder = interrupted();
    let manifest = folder.path().join("model.manifest.json");
    // A file that the save has, and weights that it would remove.
    for name in ["config.json", "model-00001-of-00002.safetensors"] {
        let path = folder.path().join(name);
        fs::write(&path, "newer").unwrap();
        let later = fs::metadata(&manifest).unwrap().modified().unwrap() + std::time::Duration::from_secs(1);
        fs::File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
        let loaded = load_checkpoint_in_model(&model(0.0), folder.path(), &LoadOptions::default());
        let text = loaded.unwrap_err().to_string();
        assert!(text.contains(name) && text.contains("has been written since"), "{text}");
        assert_eq!(fs::read(&path).unwrap(), b"newer");
        fs::remove_file(&path).unwrap();
    }
    assert_eq!(whole_save_in(folder.path()), 2.0);
}

#[test]
fn what_is_in_the_way_of_a_save_is_named_and_the_next_load_finishes_it() {
    let folder = TempDir::new().unwrap();
    save(folder.path(), 1.0, false).unwrap();
    let config = folder.path().join("config.json");
    fs::remove_file(&config).unwrap();
    fs::create_dir_all(config.join("in the way")).unwrap();
    // It was made before the save.
    let text = save(folder.path(), 2.0, false).unwrap_err().to_string();
    assert!(text.contains("config.json") && text.contains("free what is in the way"), "{text}");
    fs::remove_dir_all(&config).unwrap();
    assert_eq!(whole_save_in(folder.path()), 2.0);
}

#[cfg(unix)]
#[test]
fn a_link_that_somebody_put_there_does_not_lead_a_save_elsewhere() {
    let (folder, elsewhere) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let victim = elsewhere.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    for name in ["config.json", "model.safetensors", "model.manifest.json"] {
        std::os::unix::fs::symlink(&victim, folder.path().join(name)).unwrap();
    }
    save(folder.path(), 1.0, false).unwrap();
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
    assert_eq!(whole_save_in(folder.path()), 1.0);
}

#[test]
fn temporary_names_differ_from_save_to_save() {
    let folder = TempDir::new().unwrap();
    let name = || PendingFile::write(&folder.path().join("file"), "model", b"text").unwrap().temporary_name();
    assert_ne!(name(), name());
}

#[test]
fn the_same_save_gives_the_same_bytes() {
    let folders = [TempDir::new().unwrap(), TempDir::new().unwrap()];
    for folder in &folders {
        save(folder.path(), 1.0, true).unwrap();
    }
    for name in listing(folders[0].path()) {
        let [first, second] = folders.each_ref().map(|folder| fs::read(folder.path().join(&name)).unwrap());
        assert_eq!(first, second, "{name}");
    }
}

#[test]
fn files_of_a_save_that_is_under_way_are_not_taken_for_abandoned_ones() {
    let folder = TempDir::new().unwrap();
    let target = folder.path().join("model.safetensors");
    let writing = atomic::OpenFile::create(atomic::NewFile::buffered(&target, "model")).unwrap();
    save(folder.path(), 1.0, false).unwrap();
    let pending = writing.finish().unwrap();
    assert!(folder.path().join(pending.temporary_name()).exists());
    drop(pending);
    fs::write(folder.path().join(".model.abc123.saving"), "left behind").unwrap();
    save(folder.path(), 1.0, false).unwrap();
    assert!(listing(folder.path()).iter().all(|name| !name.starts_with('.')), "{:?}", listing(folder.path()));
}

#[test]
fn names_that_lead_elsewhere_or_belong_to_weights_are_refused_before_anything_is_written() {
    let bad = ["../config.json", "a/b", "", ".hidden", "/etc/passwd", "model.safetensors", "model.manifest.json"];
    for name in bad {
        let folder = TempDir::new().unwrap();
        let files = BTreeMap::from([(name.to_owned(), Vec::new())]);
        let options = SaveModelOptions { files, ..Default::default() };
        let error = save_model_weights(&model(1.0), folder.path(), &options).unwrap_err();
        assert!(error.is_weights() && error.to_string().contains(&format!("{name:?}")), "{error}");
        assert!(listing(folder.path()).is_empty(), "{name}");
    }
}

#[test]
fn two_who_save_into_one_folder_leave_one_of_the_two_saves() {
    let folder = TempDir::new().unwrap();
    let path = folder.path();
    save(path, 1.0, false).unwrap();
    std::thread::scope(|scope| {
        for value in [2.0, 3.0] {
            scope.spawn(move || (0..20).for_each(|turn| save(path, value, turn % 3 == 0).unwrap()));
        }
    });
    assert!([2.0, 3.0].contains(&whole_save_in(path)));
}

/// Three ranks save a sharded model with its configuration; on `failing`, an operation on the disk fails. Their errors.
fn failed_sharded_save(folder: &Path, failing: usize, step: u64) -> Vec<Option<String>> {
    sharded_save(folder, 2.0, |rank| (rank == failing).then_some((step, Fault::Fails)))
}

fn sharded_save(
    folder: &Path,
    value: f64,
    fault: impl Fn(usize) -> Option<(u64, Fault)> + Sync,
) -> Vec<Option<String>> {
    let builder = crate::Accelerator::builder().fsdp_plugin(Default::default());
    crate::testing::ranks(3, builder, |accelerator| {
        let store = model(value);
        accelerator.prepare(crate::nn::ModuleFn::new(&store, |input: &Tensor| Ok(input.shallow_clone())))?;
        fault::plan(fault(accelerator.process_index()));
        let saved = accelerator.save_model(&store, folder, &options(value, false));
        fault::plan(None);
        Ok(saved.err().map(|error| error.to_string()))
    })
    .unwrap()
}

#[test]
fn a_disk_that_fails_on_any_rank_at_any_moment_leaves_the_earlier_save_or_the_new_one() {
    for failing in 0..3 {
        for step in 0.. {
            let folder = TempDir::new().unwrap();
            assert!(sharded_save(folder.path(), 1.0, |_| None).iter().all(Option::is_none));
            let earlier = listing(folder.path());
            let errors = failed_sharded_save(folder.path(), failing, step);
            if errors.iter().all(Option::is_none) {
                assert!(step > 2, "rank {failing} writes something");
                assert_eq!(whole_save_in(folder.path()), 2.0);
                break;
            }
            for text in errors {
                let text = text.expect("what fails on one rank fails on all");
                assert!(text.contains(&format!("because rank {failing} failed")), "step {step}: {text}");
            }
            if whole_save_in(folder.path()) == 1.0 {
                // What was written is removed by those who wrote it, or by the next save.
                assert!(sharded_save(folder.path(), 1.0, |_| None).iter().all(Option::is_none));
                assert_eq!(listing(folder.path()), earlier, "rank {failing}, step {step}");
            }
        }
    }
}

#[cfg(unix)]
#[test]
fn files_that_an_interrupted_save_did_not_write_so_replace_nothing() {
    type Change = fn(&Path);
    let changes: [(Change, &str); 3] = [
        (|path| fs::write(path, "").unwrap(), "has 0 bytes"),
        (|path| fs::write(path, "{\"value\": 9}").unwrap(), "content has changed"),
        (
            |path| {
                fs::remove_file(path).unwrap();
                std::os::unix::fs::symlink("/etc/passwd", path).unwrap();
            },
            "is not as it was saved",
        ),
    ];
    for (change, part) in changes {
        let folder = interrupted();
        let json = fs::read_to_string(folder.path().join("model.manifest.json")).unwrap();
        let manifest = accelerate_core::weight_files::SaveManifest::from_json(&json, "model").unwrap();
        let config = manifest.file("config.json").unwrap();
        change(&folder.path().join(config.temporary_name.as_ref().unwrap()));
        let loaded = load_checkpoint_in_model(&model(0.0), folder.path(), &LoadOptions::default());
        let text = loaded.unwrap_err().to_string();
        assert!(text.contains(part), "{text}");
        assert_eq!(fs::read(folder.path().join("config.json")).unwrap(), b"{\"value\": 1}");
        // A new save replaces all of it.
        save(folder.path(), 3.0, false).unwrap();
        assert_eq!(whole_save_in(folder.path()), 3.0);
    }
}

#[test]
fn a_folder_that_somebody_else_has_locked_can_be_saved_into() {
    let folder = TempDir::new().unwrap();
    let lock = fs::File::open(folder.path()).unwrap();
    lock.lock_shared().unwrap();
    save(folder.path(), 1.0, false).unwrap();
    assert_eq!(whole_save_in(folder.path()), 1.0);
}

#[test]
fn what_is_in_the_way_of_weights_is_found_before_training() {
    for name in ["model.safetensors", "model.manifest.json", "model.safetensors.index.json"] {
        let folder = TempDir::new().unwrap();
        fs::create_dir(folder.path().join(name)).unwrap();
        let error = check_save_directory(folder.path()).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    }
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join(".check.abc.saving"), "left behind").unwrap();
    check_save_directory(folder.path()).unwrap();
    assert!(listing(folder.path()).is_empty());
}

#[test]
fn a_save_that_lost_a_file_before_it_was_finished_replaces_nothing() {
    let folder = interrupted();
    let json = fs::read_to_string(folder.path().join("model.manifest.json")).unwrap();
    let manifest = accelerate_core::weight_files::SaveManifest::from_json(&json, "model").unwrap();
    let weights = manifest.file("model.safetensors").unwrap();
    fs::remove_file(folder.path().join(weights.temporary_name.as_ref().unwrap())).unwrap();
    let loaded = load_checkpoint_in_model(&model(0.0), folder.path(), &LoadOptions::default());
    let text = loaded.unwrap_err().to_string();
    assert!(text.contains("model.safetensors is not as it was saved"), "{text}");
    assert_eq!(fs::read(folder.path().join("config.json")).unwrap(), b"{\"value\": 1}");
}

#[test]
fn a_stem_that_no_manifest_could_have_is_refused_and_so_is_that_of_checkpoints() {
    for stem in ["", ".best", "a/b", "..", "checkpoint"] {
        let folder = TempDir::new().unwrap();
        let options = SaveModelOptions { stem: stem.to_owned(), ..Default::default() };
        let error = save_model_weights(&model(1.0), folder.path(), &options).unwrap_err();
        assert!(error.is_weights() && error.to_string().contains(&format!("{stem:?}")), "{error}");
    }
}

#[test]
fn whoever_loads_while_others_save_gets_one_of_the_saves() {
    let folder = TempDir::new().unwrap();
    let path = folder.path();
    save(path, 2.0, true).unwrap();
    std::thread::scope(|scope| {
        let saving = scope.spawn(move || (0..30).for_each(|turn| save(path, 3.0 + f64::from(turn), true).unwrap()));
        let mut num_loads = 0;
        while !saving.is_finished() || num_loads == 0 {
            let store = model(-1.0);
            load_checkpoint_in_model(&store, path, &LoadOptions::default()).unwrap();
            let values: Vec<f64> =
                store.parameters().iter().map(|param| param.get().unwrap().double_value(&[0])).collect();
            assert!(values.iter().all(|value| *value == values[0] && *value >= 2.0), "{values:?}");
            num_loads += 1;
        }
    });
}

/// What would not be read again is not written.
#[test]
fn a_manifest_that_is_too_long_is_an_error_when_it_is_saved() {
    let folder = TempDir::new().unwrap();
    let file = |number: usize| SavedFile {
        name: format!("{number:0200}"),
        temporary_name: None,
        bytes: 0,
        xxh3_128: "0".repeat(32),
        sample: "0".repeat(32),
    };
    let manifest = |num_files| SaveManifest::new((0..num_files).map(file).collect());
    let error = folder::write_manifest(folder.path(), "model", &manifest(60_000)).unwrap_err();
    assert!(error.is_weights() && error.to_string().contains("for 60000 files, more than is read again"), "{error}");
    assert!(listing(folder.path()).is_empty());
    folder::write_manifest(folder.path(), "model", &manifest(30_000)).unwrap();
}

/// Without its manifest a checkpoint is none, so no cure may be to remove it.
#[test]
fn cures_never_remove_a_checkpoint() {
    let (path, reason) = (Path::new("run/optimizer.safetensors").to_owned(), "it has other numbers".to_owned());
    for (stem, is_removed) in [("model", true), ("checkpoint", false)] {
        let manifest = SaveManifest::file_name(stem);
        let error = WeightsError::NotAsSaved { path: path.clone(), reason: reason.clone(), manifest: manifest.clone() };
        assert_eq!(error.to_string().contains(&format!("remove {manifest}")), is_removed, "{error}");
        let manifest = Path::new("run").join(manifest);
        let text = WeightsError::NewerThanSave { path: path.clone(), manifest: manifest.clone() }.to_string();
        assert_eq!(text.contains(&format!("remove {}", manifest.display())), is_removed, "{text}");
    }
}
