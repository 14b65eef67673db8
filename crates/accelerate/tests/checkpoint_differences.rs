//! Checkpoints where something differs: tensors from rank to rank, files of others in the folder, a model that has changed since.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod warnings;

use accelerate::data::{DataLoader, VecDataset};
use accelerate::nn::{BatchNorm1d, Init, Linear, ModuleFn, ParamStore};
use accelerate::optim::{AdamW, Optimizer, ParamGroup};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, FullyShardedDataParallelPlugin, ObjectState, ProjectConfiguration, Result,
    Stateful, testing,
};
use rstest::rstest;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::{Arc, Mutex};
use warnings::Warnings;

/// Tensors by name, as a program keeps an average of its weights.
#[derive(Default)]
struct Averages(Mutex<BTreeMap<String, Tensor>>);

impl Averages {
    fn set(&self, averages: &[(&str, f32)]) {
        let named = averages.iter().map(|(name, value)| ((*name).to_owned(), Tensor::from_slice(&[*value; 3])));
        *self.0.lock().unwrap() = named.collect();
    }

    fn get(&self) -> Vec<(String, f64)> {
        let averages = self.0.lock().unwrap();
        averages.iter().map(|(name, tensor)| (name.clone(), tensor.double_value(&[0]))).collect()
    }
}

impl Stateful for Averages {
    fn state_dict(&self) -> Result<ObjectState> {
        let averages = self.0.lock().unwrap();
        let tensors = averages.iter().map(|(name, tensor)| (name.clone(), tensor.copy())).collect();
        Ok(ObjectState { tensors, ..Default::default() })
    }

    fn load_state_dict(&self, state: &ObjectState) -> Result<()> {
        let tensors = state.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.copy())).collect();
        *self.0.lock().unwrap() = tensors;
        Ok(())
    }
}

fn sharded() -> AcceleratorBuilder {
    Accelerator::builder().fsdp_plugin(FullyShardedDataParallelPlugin::default())
}

#[test]
fn tensors_that_differ_from_rank_to_rank_stay_those_of_their_rank() {
    let folder = tempfile::tempdir().unwrap();
    let run = |world_size: usize, saves: bool| {
        testing::ranks(world_size, Accelerator::builder(), |accelerator| {
            let averages = Arc::new(Averages::default());
            accelerator.register_stateful(averages.clone());
            let rank = accelerator.process_index() as f32;
            if saves {
                averages.set(&[("shared", 1.0), ("own", 10.0 + rank)]);
                if rank == 1.0 {
                    averages.set(&[("shared", 1.0), ("only_here", 5.0)]);
                }
                accelerator.save_state(folder.path())?;
            } else {
                accelerator.load_state(folder.path())?;
            }
            Ok(averages.get())
        })
        .unwrap()
    };
    let saved = run(3, true);
    assert_eq!(saved[2], [("own".to_owned(), 12.0), ("shared".to_owned(), 1.0)]);
    assert_eq!(run(3, false), saved);
    // Another number of ranks has no use for what each of them had.
    assert_eq!(run(2, false), vec![saved[0].clone(); 2]);
}

#[test]
fn learning_rates_that_differ_from_rank_to_rank_stay_and_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let run = |saves: bool, differs: bool| {
        testing::ranks(2, Accelerator::builder(), |accelerator| {
            let warnings = Warnings::default();
            let _subscriber = tracing::subscriber::set_default(warnings.clone());
            let store = ParamStore::new(accelerator.device());
            let layer = Linear::new(store.root(), 2, 2, Default::default())?;
            let optimizer = AdamW::new(&store, 0.1)?;
            let model = ModuleFn::new(&store, move |rows: &Tensor| layer.forward(rows));
            let (_model, optimizer) = accelerator.prepare((model, optimizer))?;
            if saves {
                if differs && accelerator.process_index() == 1 {
                    optimizer.handle().set_lr(0, 0.5)?;
                }
                accelerator.save_state(folder.path())?;
            } else {
                accelerator.load_state(folder.path())?;
            }
            Ok((optimizer.handle().get_lr(0)?, warnings.taken()))
        })
        .unwrap()
    };
    run(true, true);
    let [(first, warnings), (second, others)] = run(false, false).try_into().unwrap();
    assert_eq!((first, second, others), (0.1, 0.5, Vec::new()));
    assert!(matches!(&warnings[..], [one] if one.contains("optimizer had other values on rank 1")), "{warnings:?}");
    run(true, false);
    assert!(run(false, false).iter().all(|(rate, warnings)| *rate == 0.1 && warnings.is_empty()));
}

#[rstest]
fn running_statistics_stay_those_of_their_rank(#[values(false, true)] is_sharded: bool) {
    let folder = tempfile::tempdir().unwrap();
    let run = |world_size: usize, saves: bool| {
        let builder = if is_sharded { sharded() } else { Accelerator::builder() };
        testing::ranks(world_size, builder, |accelerator| {
            let store = ParamStore::new(accelerator.device());
            let norm = BatchNorm1d::new(store.root(), 3, Default::default())?;
            let mean = norm.running_mean.clone().unwrap();
            let model = accelerator.prepare(ModuleFn::new(&store, move |rows: &Tensor| norm.forward(rows)))?;
            if saves {
                let rank = accelerator.process_index() as f64;
                let rows = Tensor::arange(12, (Kind::Float, Device::Cpu)).view([4, 3]) * (rank + 1.0);
                accelerator.backward(&model.forward(&rows)?.square().sum(None))?;
                accelerator.save_state(folder.path())?;
            } else {
                accelerator.load_state(folder.path())?;
            }
            Ok(Vec::<f32>::try_from(&mean.local().detach()).unwrap())
        })
        .unwrap()
    };
    let saved = run(2, true);
    // Replicas take over those of rank 0, before they are saved too.
    assert_eq!(saved[0] != saved[1], is_sharded);
    assert_eq!(run(2, false), saved);
    assert_eq!(run(1, false), saved[..1]);
}

#[rstest]
fn weights_that_the_model_does_not_have_are_named(
    #[values(1, 2)] world_size: usize,
    #[values(false, true)] is_sharded: bool,
) {
    let folder = tempfile::tempdir().unwrap();
    let run = |has_extra: bool| {
        let builder = if is_sharded { sharded() } else { Accelerator::builder() };
        testing::ranks(world_size, builder, |accelerator| {
            let store = ParamStore::new(accelerator.device());
            let layer = Linear::new(store.root() / "kept", 4, 4, Default::default())?;
            if has_extra {
                Linear::new(store.root() / "gone", 4, 4, Default::default())?;
            }
            let _model = accelerator.prepare(ModuleFn::new(&store, move |rows: &Tensor| layer.forward(rows)))?;
            Ok(match has_extra {
                true => accelerator.save_state(folder.path()).map(|_| String::new())?,
                false => accelerator.load_state(folder.path()).unwrap_err().to_string(),
            })
        })
        .unwrap()
    };
    run(true);
    for error in run(false) {
        assert!(error.contains("\"gone.weight\": the model has no tensor of this name"), "{error}");
    }
}

/// Two ranks write `model-00001-of-00002.safetensors`, beside which a reader takes `model.safetensors`.
#[test]
fn files_of_others_in_the_folder_are_neither_replaced_nor_taken_for_a_part_of_the_checkpoint() {
    let own =
        ["model.safetensors", "model-00001-of-00003.safetensors", "model.safetensors.index.json", "checkpoint.json"];
    for name in own.into_iter().chain(["config.json", "vocab-00001-of-00002.safetensors"]) {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(name), "of somebody else").unwrap();
        let errors = testing::ranks(2, Accelerator::builder(), |accelerator| {
            let store = ParamStore::new(accelerator.device());
            let layer = Linear::new(store.root(), 4, 4, Default::default())?;
            let _model = accelerator.prepare(ModuleFn::new(&store, move |rows: &Tensor| layer.forward(rows)))?;
            let first = accelerator.save_state(folder.path());
            // Over its own files a checkpoint may be written.
            if first.is_ok() {
                accelerator.save_state(folder.path())?;
            }
            Ok(first.err().map(|error| (error.is_weights(), error.to_string())))
        })
        .unwrap();
        for error in errors {
            assert_eq!(error.is_some(), own.contains(&name), "{name}");
            if let Some((is_weights, text)) = error {
                assert!(is_weights && text.contains("written by no save_state"), "{text}");
            }
        }
        assert_eq!(fs::read_to_string(folder.path().join(name)).unwrap(), "of somebody else");
    }
}

#[test]
fn all_ranks_say_of_what_kind_the_error_of_one_of_them_is() {
    let folder = tempfile::tempdir().unwrap();
    let kinds = testing::ranks(2, Accelerator::builder(), |accelerator| {
        let nothing = accelerator.load_state(folder.path().join("nothing")).unwrap_err();
        let damaged = folder.path().join("damaged");
        accelerator.save_state(&damaged)?;
        if accelerator.is_main_process() {
            fs::write(damaged.join("checkpoint.json"), "{}").unwrap();
        }
        accelerator.wait_for_everyone()?;
        let damaged = accelerator.load_state(&damaged).unwrap_err();
        Ok((nothing.is_checkpoint(), nothing.is_weights(), damaged.is_checkpoint(), damaged.is_weights()))
    })
    .unwrap();
    assert_eq!(kinds, [(true, false, false, true); 2]);
}

/// Hooks are called between the verification and the reading of the files.
#[test]
fn a_save_while_a_checkpoint_is_loaded_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let run = |value: f64| {
        let accelerator = Accelerator::builder().cpu(true).build().unwrap();
        let store = ParamStore::new(accelerator.device());
        let weight = store.root().param("weight", ([1000], Init::Constant(value))).unwrap();
        let model = accelerator.prepare(ModuleFn::new(&store, |rows: &Tensor| Ok(rows.shallow_clone()))).unwrap();
        (accelerator, model, weight)
    };
    // What is saved are the models that are there.
    let [(first, _first_model, _), (second, _second_model, _), (loading, _model, weight)] = [1.0, 2.0, 3.0].map(run);
    first.save_state(folder.path()).unwrap();
    let handle = loading.register_load_state_pre_hook(move |state| second.save_state(state.folder()).map(drop));
    let error = loading.load_state(folder.path()).unwrap_err();
    assert!(error.is_checkpoint() && error.to_string().contains("somebody saved into"), "{error}");
    assert_eq!(weight.local().double_value(&[0]), 3.0);
    handle.remove();
    loading.load_state(folder.path()).unwrap();
    assert_eq!(weight.local().double_value(&[0]), 2.0);
}

fn in_project(folder: &Path) -> AcceleratorBuilder {
    Accelerator::builder().cpu(true).project_config(ProjectConfiguration {
        project_dir: Some(folder.to_owned()),
        automatic_checkpoint_naming: Some(true),
        ..Default::default()
    })
}

/// A run that took them for nothing would begin anew, and save over them.
#[test]
fn a_list_of_files_that_is_none_is_called_that() {
    let spoil = |manifest: &Path| fs::write(manifest, "{").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let accelerator = in_project(folder.path()).build().unwrap();
    let saved = [(); 2].map(|()| accelerator.save_state(None).unwrap());
    spoil(&saved[1].join("checkpoint.manifest.json"));
    assert_eq!(accelerator.latest_checkpoint().unwrap().as_ref(), Some(&saved[0]));
    assert_eq!(accelerator.load_state(None).unwrap(), saved[0]);
    spoil(&saved[0].join("checkpoint.manifest.json"));
    for error in [accelerator.latest_checkpoint().unwrap_err(), accelerator.load_state(None).unwrap_err()] {
        let text = error.to_string();
        assert!(error.is_checkpoint() && text.contains("can be used"), "{text}");
        assert!(text.contains("checkpoint.manifest.json"), "{text}");
    }
}

/// What one process cannot read for a moment, another one would remove as the older checkpoint, once a newer one counts.
#[rstest]
fn a_later_checkpoint_that_cannot_be_read_is_not_passed_over(#[values(1, 2)] world_size: usize) {
    let folder = tempfile::tempdir().unwrap();
    testing::ranks(world_size, in_project(folder.path()), |accelerator| {
        let [earlier, later] = [accelerator.save_state(None)?, accelerator.save_state(None)?];
        let (manifest, hidden) = (later.join("checkpoint.manifest.json"), later.join("hidden"));
        accelerator.on_main_process(|| {
            fs::rename(&manifest, &hidden).unwrap();
            symlink(&manifest, &manifest).unwrap();
        });
        accelerator.wait_for_everyone()?;
        for error in [accelerator.latest_checkpoint().unwrap_err(), accelerator.load_state(None).unwrap_err()] {
            let text = error.to_string();
            assert!(error.is_checkpoint() && text.contains("cannot read whether"), "{text}");
            assert!(text.contains("checkpoint_1") && text.contains("name the folder"), "{text}");
        }
        assert_eq!(accelerator.load_state(earlier.clone())?, earlier);
        accelerator.wait_for_everyone()?;
        accelerator.on_main_process(|| fs::rename(&hidden, &manifest).unwrap());
        accelerator.wait_for_everyone()?;
        assert_eq!(accelerator.latest_checkpoint()?, Some(later));
        Ok(())
    })
    .unwrap();
}

/// The list of files says which of them belong to it, and only a later version can read that.
#[test]
fn files_of_an_interrupted_save_of_a_later_version_stay() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::builder().cpu(true).build().unwrap();
    accelerator.save_state(folder.path()).unwrap();
    let manifest = folder.path().join("checkpoint.manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    let later = text.replace("\"version\": 1", "\"version\": 2");
    assert_ne!(later, text);
    fs::write(&manifest, later).unwrap();
    let pending = folder.path().join(".checkpoint.x7Rt01.saving");
    fs::write(&pending, "of the later version").unwrap();
    accelerator.save_state(folder.path()).unwrap_err();
    assert!(pending.exists());
}

/// A checkpoint of what only some ranks have could be loaded by nobody.
#[test]
fn what_only_one_rank_has_registered_is_an_error_of_the_save() {
    let folder = tempfile::tempdir().unwrap();
    testing::ranks(2, Accelerator::builder().cpu(true), |accelerator| {
        let averages = Arc::new(Averages::default());
        if accelerator.is_main_process() {
            accelerator.register_stateful(averages.clone());
        }
        let error = accelerator.save_state(folder.path()).unwrap_err();
        assert!(error.to_string().contains("custom_checkpoint_0"), "{error}");
        assert!(error.to_string().contains("prepare and register the same objects"), "{error}");
        if !accelerator.is_main_process() {
            accelerator.register_stateful(averages);
        }
        accelerator.save_state(folder.path())?;
        accelerator.load_state(folder.path()).map(drop)
    })
    .unwrap();
}

/// The other ranks are not left waiting, and go on together.
#[rstest]
fn a_folder_on_one_rank_only_is_an_error_on_all(#[values(true, false)] names_checkpoints: bool) {
    let folder = tempfile::tempdir().unwrap();
    let builder = if names_checkpoints { in_project(folder.path()) } else { Accelerator::builder().cpu(true) };
    testing::ranks(2, builder, |accelerator| {
        let whole = folder.path().join("whole");
        let saved = accelerator.save_state((!names_checkpoints).then_some(whole))?;
        let on_one = || accelerator.is_main_process().then(|| saved.clone());
        accelerator.save_state(on_one()).unwrap_err();
        let error = accelerator.load_state(on_one()).unwrap_err();
        assert!(error.to_string().contains("on all processes, or on none"), "{error}");
        accelerator.load_state(saved.clone()).map(drop)
    })
    .unwrap();
}

#[test]
fn a_limit_of_checkpoints_whose_folders_the_program_names_is_told_of_once() {
    let folder = tempfile::tempdir().unwrap();
    let warnings = Warnings::default();
    tracing::subscriber::with_default(warnings.clone(), || {
        let project = ProjectConfiguration { total_limit: Some(1), ..Default::default() };
        let accelerator = Accelerator::builder().cpu(true).project_config(project).build().unwrap();
        for name in ["one", "two"] {
            accelerator.save_state(folder.path().join(name)).unwrap();
        }
    });
    let told = warnings.taken();
    assert_eq!(told.iter().filter(|text| text.contains("total_limit has no effect")).count(), 1, "{told:?}");
}

#[test]
fn a_folder_of_checkpoints_that_cannot_be_read_is_an_error_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("checkpoints"), "a file").unwrap();
    testing::ranks(2, in_project(folder.path()), |accelerator| {
        let calls = [
            accelerator.latest_checkpoint().map(drop),
            accelerator.load_state(None).map(drop),
            accelerator.save_state(None).map(drop),
        ];
        for error in calls.map(Result::unwrap_err) {
            assert!(error.is_weights() && error.to_string().contains("cannot read"), "{error}");
        }
        Ok(())
    })
    .unwrap();
}

/// What stands at `there` where the folder of a checkpoint is to be made, or one above it.
#[rstest]
#[case::a_file(|there: &Path| fs::write(there, "a file").unwrap(), "", "there is a file, where a folder is needed")]
#[case::a_link_to_nothing(|there: &Path| symlink("nothing", there).unwrap(), "", "there is a link to nothing, where")]
#[case::a_link_to_a_file(|there: &Path| symlink("/dev/null", there).unwrap(), "", "there is a link to /dev/null, where")]
#[case::a_file_and_no_slash(|there: &Path| fs::write(there, "a file").unwrap(), ".", "there is a file, where a folder is needed")]
#[case::a_file_above(|there: &Path| fs::write(there, "a file").unwrap(), "a/b", "there is a file, where a folder is needed")]
#[case::a_link_above(|there: &Path| symlink("nothing", there).unwrap(), "a/b", "there is a link to nothing, where")]
fn what_stands_where_a_checkpoint_is_to_be_made_is_named(
    #[case] put: fn(&Path),
    #[case] within: &str,
    #[case] words: &str,
    #[values(true, false)] has_hook: bool,
) {
    let folder = tempfile::tempdir().unwrap();
    let there = folder.path().join("there");
    put(&there);
    testing::ranks(2, Accelerator::builder().cpu(true), |accelerator| {
        if has_hook {
            accelerator.register_save_state_pre_hook(|_| Ok(()));
        }
        // Joined with nothing, it has a slash at its end.
        let output_dir = if within == "." { there.clone() } else { there.join(within) };
        let error = accelerator.save_state(output_dir).unwrap_err();
        let cure = "move it away, or name another folder";
        let text = error.to_string();
        assert!(
            error.is_weights() && [words, cure, "cannot create the folder"].iter().all(|it| text.contains(it)),
            "{text}"
        );
        Ok(())
    })
    .unwrap();
    assert!(there.symlink_metadata().unwrap().is_symlink() || there.is_file());
}

#[test]
fn a_pass_goes_no_further_after_its_loader_was_put_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::builder().cpu(true).build().unwrap();
    let rows = VecDataset::new((0..8i64).collect());
    let loader = accelerator.prepare(DataLoader::builder(rows).batch_size(2).build().unwrap()).unwrap();
    let first_of = |batch: Option<Result<Tensor>>| batch.unwrap().unwrap().int64_value(&[0]);
    let mut pass = loader.iter().unwrap();
    assert_eq!(first_of(pass.next()), 0);
    accelerator.save_state(folder.path()).unwrap();
    assert_eq!(first_of(pass.next()), 2);
    accelerator.load_state(folder.path()).unwrap();
    let error = pass.next().unwrap().unwrap_err();
    assert!(error.is_data() && error.to_string().contains("begin a new pass"), "{error}");
    assert!(pass.next().is_none());
    let mut pass = loader.iter().unwrap();
    assert_eq!(first_of(pass.next()), 2);
}

#[test]
fn settings_that_groups_share_have_to_be_the_same_in_all_groups_of_a_state() {
    let store = ParamStore::new(Device::Cpu);
    let layer = Linear::new(store.root(), 2, 2, Default::default()).unwrap();
    let group = |param: &accelerate::nn::Param| ParamGroup { params: vec![param.clone()], ..Default::default() };
    let groups = [&layer.weight, layer.bias.as_ref().unwrap()].map(group);
    let mut optimizer = AdamW::builder(&store).param_groups(groups.into()).build().unwrap();
    let with = |change: &dyn Fn(&mut serde_json::Map<String, serde_json::Value>)| {
        let mut state = optimizer.state_dict().unwrap();
        change(&mut state.groups[1].options);
        state
    };
    // The first beta is one that each group has for itself.
    let own_momentum = with(&|options| options["betas"] = serde_json::json!([0.5, 0.999]));
    let other_beta = with(&|options| options["betas"] = serde_json::json!([0.9, 0.5]));
    let other_eps = with(&|options| options["eps"] = serde_json::json!(1e-3));
    let of_adam = with(&|options| drop(options.insert("decoupled_weight_decay".to_owned(), false.into())));
    optimizer.load_state_dict(&own_momentum).unwrap();
    let error = optimizer.load_state_dict(&of_adam).unwrap_err().to_string();
    assert!(error.contains("in group 1; load it into Adam"), "{error}");
    for (state, name) in [(other_beta, "betas"), (other_eps, "eps")] {
        let error = optimizer.load_state_dict(&state).unwrap_err().to_string();
        assert!(error.contains(&format!("`{name}` is")) && error.contains("in group 1"), "{error}");
    }
}
