//! Hooks before the state of a run is saved and loaded.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{Init, Module, ModuleFn, ParamStore};
use accelerate::optim::Sgd;
use accelerate::tch::{Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, Error, FullyShardedDataParallelPlugin, PreparedModel, Result, StateHookContext,
    testing,
};
use rstest::rstest;
use std::sync::{Arc, Mutex};

fn model(accelerator: &Accelerator, value: f64) -> Result<PreparedModel<impl Module + use<>>> {
    let store = ParamStore::new(accelerator.device());
    store.root().param("weight", ([5], Init::Constant(value)))?;
    accelerator.prepare(ModuleFn::new(&store, |input: &Tensor| Ok(input.shallow_clone())))
}

fn value(model: &PreparedModel<impl Module>) -> Result<f64> {
    Ok(model.params().state_dict()?.get("weight").unwrap().double_value(&[4]))
}

fn set(model: &PreparedModel<impl Module>, value: f64) -> Result<()> {
    let weight = model.params().get("weight").unwrap();
    weight.copy_(&Tensor::full([5], value, (Kind::Float, weight.local().device())))
}

fn fsdp() -> AcceleratorBuilder {
    Accelerator::builder().fsdp_plugin(FullyShardedDataParallelPlugin::default())
}

/// Names, on each rank.
#[rstest]
fn hooks_see_the_folder_and_everything_by_name_on_every_rank(#[values(1, 2, 4)] world_size: usize) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new");
    let seen = testing::ranks(world_size, fsdp(), |accelerator| {
        let [_first, second] = [model(&accelerator, 1.0)?, model(&accelerator, 2.0)?];
        let _optimizer = accelerator.prepare(Sgd::new(second.params(), 0.1)?)?;
        let _best = accelerator.register_for_checkpointing(0.5);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let hook = |call: &'static str| {
            let seen = Arc::clone(&seen);
            move |state: &mut StateHookContext<'_>| {
                assert!(state.folder().is_dir());
                let models: Vec<_> =
                    state.models().map(|(name, store)| format!("{name} of {}", store.num_parameters())).collect();
                let objects = state.objects().collect::<Vec<_>>().join(" ");
                seen.lock().unwrap().push(format!("{call} {}: {objects}", models.join(", ")));
                let name = format!("{call}-{}", state.accelerator().process_index());
                std::fs::write(state.folder().join(name), "the hook's own").map_err(Error::other)
            }
        };
        let save = accelerator.register_save_state_pre_hook(hook("save"));
        let load = accelerator.register_load_state_pre_hook(hook("load"));
        accelerator.save_state(&path)?;
        accelerator.load_state(&path)?;
        save.remove();
        load.remove();
        load.remove();
        accelerator.save_state(&path)?;
        accelerator.load_state(&path)?;
        let seen = seen.lock().unwrap().clone();
        Ok(seen)
    })
    .unwrap();
    let names = "model of 5, model_1 of 5: custom_checkpoint_0 model model_1 optimizer";
    assert_eq!(seen, vec![[format!("save {names}"), format!("load {names}")]; world_size]);
    for rank in 0..world_size {
        assert!(path.join(format!("save-{rank}")).exists() && path.join(format!("load-{rank}")).exists());
    }
}

/// The second model is none of the checkpoint's; the first is.
#[rstest]
fn a_model_that_a_hook_takes_over_is_neither_saved_nor_loaded(#[values(1, 2, 3)] world_size: usize) {
    let folder = tempfile::tempdir().unwrap();
    testing::ranks(world_size, fsdp(), |accelerator| {
        let models = [model(&accelerator, 1.0)?, model(&accelerator, 2.0)?];
        let leave_out = |state: &mut StateHookContext<'_>| {
            state.leave_out("model_1")?;
            assert!(state.models().all(|(name, _)| name == "model") && !state.objects().any(|name| name == "model_1"));
            Ok(())
        };
        let handle = accelerator.register_save_state_pre_hook(leave_out);
        accelerator.save_state(folder.path())?;
        handle.remove();
        models.iter().try_for_each(|model| set(model, 9.0))?;
        // It is missed where no hook takes it over.
        let error = accelerator.load_state(folder.path()).unwrap_err().to_string();
        assert!(error.contains("model_1"), "{error}");
        assert_eq!([value(&models[0])?, value(&models[1])?], [9.0, 9.0]);
        accelerator.register_load_state_pre_hook(leave_out);
        accelerator.load_state(folder.path())?;
        assert_eq!([value(&models[0])?, value(&models[1])?], [1.0, 9.0]);
        // What is in the checkpoint, and left out, is not loaded.
        models.iter().try_for_each(|model| set(model, 3.0))?;
        accelerator.save_state(folder.path())?;
        models.iter().try_for_each(|model| set(model, 4.0))?;
        accelerator.load_state(folder.path())?;
        assert_eq!([value(&models[0])?, value(&models[1])?], [3.0, 4.0]);
        Ok(())
    })
    .unwrap();
    let names: Vec<_> = folder.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.iter().any(|name| name.to_string_lossy().starts_with("model_1.")), "{names:?}");
}

/// What `register` does on rank 1 only, and what it leads to on all ranks.
#[rstest]
#[case::fails(|accelerator: &Accelerator| {
    let fails = accelerator.process_index() == 1;
    accelerator.register_save_state_pre_hook(move |_| {
        if fails { Err(Error::other("the disk of the hook is full")) } else { Ok(()) }
    });
}, "the disk of the hook is full")]
#[case::leaves_out_another_model(|accelerator: &Accelerator| {
    let leaves_out = accelerator.process_index() == 1;
    accelerator.register_save_state_pre_hook(move |state| if leaves_out { state.leave_out("model") } else { Ok(()) });
}, "leave out the same models on all ranks")]
#[case::is_there_on_one_rank(|accelerator: &Accelerator| {
    if accelerator.process_index() == 1 {
        accelerator.register_save_state_pre_hook(|_| Ok(()));
    }
}, "register and remove the same hooks on all ranks")]
#[case::leaves_out_what_is_not_there(|accelerator: &Accelerator| {
    accelerator.register_save_state_pre_hook(|state| state.leave_out("model_7"));
}, "no model has that name; there are model")]
fn what_is_wrong_on_one_rank_is_an_error_on_all_and_nothing_is_saved(
    #[case] register: fn(&Accelerator),
    #[case] wanted: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    let errors = testing::ranks(3, fsdp(), |accelerator| {
        let _model = model(&accelerator, 1.0)?;
        register(&accelerator);
        Ok(accelerator.save_state(folder.path()).unwrap_err().to_string())
    })
    .unwrap();
    assert!(errors.iter().all(|error| error.contains(wanted)), "{errors:?}");
    assert!(!folder.path().join("checkpoint.manifest.json").exists());
}

/// It would call itself until the stack is full. After the error, a save without such a hook succeeds.
#[rstest]
#[case::save(false, "save_state cannot be called in a save or load hook")]
#[case::load(true, "load_state cannot be called in a save or load hook")]
fn a_hook_cannot_call_what_calls_it(#[values(1, 2)] world_size: usize, #[case] loads: bool, #[case] wanted: &str) {
    let folder = tempfile::tempdir().unwrap();
    let (path, other) = (folder.path().join("checkpoint"), folder.path().join("other"));
    let said = testing::ranks(world_size, fsdp(), |accelerator| {
        let _model = model(&accelerator, 1.0)?;
        accelerator.save_state(&path)?;
        let other = other.clone();
        let hook = move |state: &mut StateHookContext<'_>| match loads {
            true => state.accelerator().load_state(state.folder()).map(drop),
            false => state.accelerator().save_state(&other).map(drop),
        };
        let handle = match loads {
            true => accelerator.register_load_state_pre_hook(hook),
            false => accelerator.register_save_state_pre_hook(hook),
        };
        let call = || if loads { accelerator.load_state(&path) } else { accelerator.save_state(&path) };
        let error = call().unwrap_err();
        assert!(error.is_checkpoint(), "{error}");
        handle.remove();
        call()?;
        Ok(error.to_string())
    })
    .unwrap();
    assert!(said.iter().all(|said| said.contains(wanted)), "{said:?}");
}

/// The save would remove it as a file of the earlier checkpoint.
#[rstest]
fn a_hook_that_writes_into_the_checkpoint_of_the_folder_is_an_error(#[values(0, 1)] writer: usize) {
    let folder = tempfile::tempdir().unwrap();
    testing::ranks(2, Accelerator::builder().cpu(true), |accelerator| {
        let _model = model(&accelerator, 1.0)?;
        accelerator.save_state(folder.path())?;
        let is_writer = accelerator.process_index() == writer;
        let handle = accelerator.register_save_state_pre_hook(move |state| {
            if is_writer {
                std::fs::write(state.folder().join("model.safetensors"), "of the hook").unwrap();
            }
            state.leave_out("model")
        });
        let error = accelerator.save_state(folder.path()).unwrap_err();
        assert!(
            error.to_string().contains("model.safetensors") && error.to_string().contains("other names"),
            "{error}"
        );
        assert_eq!(std::fs::read(folder.path().join("model.safetensors")).unwrap(), b"of the hook");
        handle.remove();
        accelerator.save_state(folder.path()).map(drop)
    })
    .unwrap();
}
