//! What a program has called before the state of a run is saved or loaded.

use super::Accelerator;
use crate::checkpoint::{EarlierFiles, make_checkpoint_folder};
use crate::error::{CheckpointError, Result};
use crate::nn::ParamStore;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, ThreadId};

type Hook = Arc<dyn Fn(&mut StateHookContext<'_>) -> Result<()> + Send + Sync>;

/// The hooks before one of the two calls, in the order in which they were registered.
#[derive(Default)]
pub(super) struct StateHooks {
    next: AtomicU64,
    hooks: Mutex<BTreeMap<u64, Hook>>,
    /// The threads that call them just now.
    callers: Mutex<HashSet<ThreadId>>,
}

/// The hooks are called by this thread until this is dropped.
struct Calling<'a>(&'a StateHooks);

impl Drop for Calling<'_> {
    fn drop(&mut self) {
        self.0.callers().remove(&thread::current().id());
    }
}

impl StateHooks {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Hook>> {
        // A map that is whole after every statement.
        self.hooks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn callers(&self) -> MutexGuard<'_, HashSet<ThreadId>> {
        self.callers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(&self) -> Calling<'_> {
        self.callers().insert(thread::current().id());
        Calling(self)
    }

    fn add(self: &Arc<Self>, hook: Hook) -> RemovableHandle {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.lock().insert(number, hook);
        RemovableHandle { hooks: Arc::downgrade(self), number }
    }
}

/// Takes back a hook that was registered. Dropped, it does nothing: the hook stays.
#[derive(Clone)]
pub struct RemovableHandle {
    hooks: Weak<StateHooks>,
    number: u64,
}

impl RemovableHandle {
    /// From now on the hook is not called. Once more, it does nothing.
    pub fn remove(&self) {
        if let Some(hooks) = self.hooks.upgrade() {
            hooks.lock().remove(&self.number);
        }
    }
}

impl fmt::Debug for RemovableHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemovableHandle").field("number", &self.number).finish_non_exhaustive()
    }
}

/// What a hook before [`Accelerator::save_state`] or [`Accelerator::load_state`] sees, and may change.
#[derive(Debug)]
pub struct StateHookContext<'a> {
    accelerator: &'a Accelerator,
    folder: &'a Path,
    models: Vec<(String, ParamStore)>,
    objects: Vec<String>,
    left_out: BTreeSet<String>,
}

impl StateHookContext<'_> {
    /// Whose state it is. A hook that kept an accelerator of its own would keep it for ever.
    pub fn accelerator(&self) -> &Accelerator {
        self.accelerator
    }

    /// The folder of the checkpoint. It is there, and files of the program's own in it stay as they are. They may not have the names
    /// of files of a checkpoint that is in the folder already, because a save replaces those.
    pub fn folder(&self) -> &Path {
        self.folder
    }

    /// The models by name (`model`, `model_1`), in the order of `prepare`, without those that are left out.
    pub fn models(&self) -> impl Iterator<Item = (&str, &ParamStore)> {
        let models = self.models.iter().filter(|(name, _)| !self.left_out.contains(name));
        models.map(|(name, store)| (name.as_str(), store))
    }

    /// The names of everything whose state is saved or loaded (`model`, `optimizer`, `scheduler`, `custom_checkpoint_0`), without
    /// what is left out.
    pub fn objects(&self) -> impl Iterator<Item = &str> {
        self.objects.iter().filter(|name| !self.left_out.contains(*name)).map(String::as_str)
    }

    /// Leaves a model out, because the hook saves or loads it itself: what it is in the reference to take it from the list. All
    /// ranks have to leave out the same ones.
    ///
    /// # Errors
    /// [`is_checkpoint`](crate::Error::is_checkpoint): there is no model of this name.
    pub fn leave_out(&mut self, model: &str) -> Result<()> {
        if !self.models.iter().any(|(name, _)| name == model) {
            let known = self.models.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
            return Err(CheckpointError::NoModelToLeaveOut { model: model.to_owned(), known }.into());
        }
        self.left_out.insert(model.to_owned());
        Ok(())
    }
}

impl Accelerator {
    /// Has `hook` called on every rank by [`save_state`](Self::save_state), before anything is saved
    /// (`register_save_state_pre_hook` of the reference). It may write files of its own into the folder, and save models in
    /// its own way. The handle takes it back.
    ///
    /// Hooks are called in the order in which they were registered. All ranks register the same ones, so that they may call
    /// collectives; an error on one rank is an error of `save_state` on all, and nothing is saved.
    ///
    /// ```
    /// use accelerate::{Accelerator, nn::{Init, ModuleFn, ParamStore}, tch::Tensor};
    ///
    /// let folder = std::env::temp_dir().join(format!("accelerate-pre-hook-{}", std::process::id()));
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let store = ParamStore::new(accelerator.device());
    /// let weight = store.root().param("weight", ([2], Init::Ones))?;
    /// let model = accelerator.prepare(ModuleFn::new(&store, |input: &Tensor| Ok(input.shallow_clone())))?;
    /// // The model is saved as for Hugging Face's libraries, in place of a part of the checkpoint.
    /// let handle = accelerator.register_save_state_pre_hook(|state| {
    ///     let models: Vec<_> = state.models().map(|(name, store)| (name.to_owned(), store.clone())).collect();
    ///     for (name, store) in models {
    ///         state.accelerator().save_model(&store, state.folder().join(&name), &Default::default())?;
    ///         state.leave_out(&name)?;
    ///     }
    ///     Ok(())
    /// });
    /// accelerator.register_load_state_pre_hook(|state| {
    ///     let models: Vec<_> = state.models().map(|(name, store)| (name.to_owned(), store.clone())).collect();
    ///     for (name, store) in models {
    ///         state.accelerator().load_checkpoint_in_model(&store, state.folder().join(&name))?;
    ///         state.leave_out(&name)?;
    ///     }
    ///     Ok(())
    /// });
    /// accelerator.save_state(&folder)?;
    /// weight.copy_(&Tensor::from_slice(&[2f32, 3.0]))?;
    /// accelerator.load_state(&folder)?;
    /// assert_eq!(weight.get()?, Tensor::from_slice(&[1f32, 1.0]));
    /// handle.remove();
    /// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn register_save_state_pre_hook(
        &self,
        hook: impl Fn(&mut StateHookContext<'_>) -> Result<()> + Send + Sync + 'static,
    ) -> RemovableHandle {
        self.0.save_hooks.add(Arc::new(hook))
    }

    /// The same for [`load_state`](Self::load_state) (`register_load_state_pre_hook` of the reference): `hook` is called on every
    /// rank when the content of the folder has been verified, before anything is changed. A model that it leaves out keeps what
    /// it has, and need not be in the checkpoint.
    pub fn register_load_state_pre_hook(
        &self,
        hook: impl Fn(&mut StateHookContext<'_>) -> Result<()> + Send + Sync + 'static,
    ) -> RemovableHandle {
        self.0.load_hooks.add(Arc::new(hook))
    }

    /// Fails where a hook makes a call that would run hooks again, without end if it is its own. On this rank alone, and before anything else: what other ranks'
    /// hooks do is not known, and an error of a hook is one on all ranks.
    pub(super) fn check_outside_of_hooks(&self, call: &'static str) -> Result<()> {
        let own = thread::current().id();
        match [&self.0.save_hooks, &self.0.load_hooks].iter().any(|hooks| hooks.callers().contains(&own)) {
            true => Err(CheckpointError::WithinHook { call }.into()),
            false => Ok(()),
        }
    }

    /// Calls the hooks before a save into `folder`, which `makes_folder` says who makes. Returns the models that are not
    /// saved. Collective.
    pub(super) fn run_save_hooks(&self, folder: &Path, makes_folder: bool) -> Result<BTreeSet<String>> {
        let mut earlier = None;
        let make_folder = || {
            if makes_folder {
                make_checkpoint_folder(folder)?;
                earlier = Some(EarlierFiles::of(folder)?);
            }
            Ok(())
        };
        let left_out = self.run_hooks("save_state", &self.0.save_hooks, folder, make_folder)?;
        let checked = earlier.map_or(Ok(()), |earlier| earlier.check_unchanged());
        self.group().agree_on_success("save_state", checked)?;
        Ok(left_out)
    }

    /// Calls the hooks before `folder` is loaded. Returns the models that are not. Collective.
    pub(super) fn run_load_hooks(&self, folder: &Path) -> Result<BTreeSet<String>> {
        self.run_hooks("load_state", &self.0.load_hooks, folder, || Ok(()))
    }

    fn run_hooks(
        &self,
        call: &'static str,
        registered: &StateHooks,
        folder: &Path,
        make_folder: impl FnOnce() -> Result<()>,
    ) -> Result<BTreeSet<String>> {
        // Not locked while they run: a hook may take itself back.
        let hooks: Vec<Hook> = registered.lock().values().cloned().collect();
        let cure = "register and remove the same hooks on all ranks";
        self.group().agree(call, &format!("{} hooks before it", hooks.len()), cure)?;
        if hooks.is_empty() {
            return Ok(BTreeSet::new());
        }
        self.group().agree_on_success(call, make_folder())?;
        let objects = self.session().objects();
        let models = objects.named_models().map(|(name, model)| (name, model.store.clone())).collect();
        let objects = objects.layouts().into_keys().collect();
        let mut context = StateHookContext { accelerator: self, folder, models, objects, left_out: BTreeSet::new() };
        let ran = {
            let _calling = registered.call();
            hooks.iter().try_for_each(|hook| hook(&mut context))
        };
        self.group().agree_on_success(call, ran)?;
        let left_out = context.left_out;
        let names = left_out.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        self.group().agree(call, &format!("without [{names}]"), "leave out the same models on all ranks")?;
        Ok(left_out)
    }
}
