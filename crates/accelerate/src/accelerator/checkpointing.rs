//! Checkpoints of the whole run.

use super::Accelerator;
use super::between_steps::{BetweenSteps, comm_hook_of_rank, gradients_of_rank, is_elsewhere};
use super::left_out::without_frozen;
use super::pending_save::{CheckpointSave, Outdated};
use crate::checkpoint::{
    FolderWriters, FoundCheckpoint, IoMode, OpenCheckpoint, PlannedSave, RANDOM_STATES, RunState, checkpoints_in,
    differing_in, gather_whole, keep_differing, kept_by_rank, put_back, random_states, restore_random_states,
};
use crate::error::{CheckpointError, Error, Result, shortened_to};
use crate::messages;
use crate::optim::GradScaler;
use crate::session::{ObjectState, check_same_objects};
use accelerate_core::accumulation::WindowState;
use accelerate_core::checkpoint::{GRADIENTS, KEPT_BY_RANK, checkpoint_name, is_of_one_rank};
use accelerate_core::config::FullyShardedSettings;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

/// Before the number of a registered object.
const REGISTERED: &str = "custom_checkpoint_";

/// How much of what an object says of a state that it does not take is repeated.
const MOST_REASON_CHARS: usize = 1200;

/// Which folder: a path, or `None` for an automatically named one.
pub trait CheckpointFolder {
    /// The path, if it is one.
    fn path(self) -> Option<PathBuf>;
}

macro_rules! folder_of_path {
    ($($type:ty),*) => {$(
        impl CheckpointFolder for $type {
            fn path(self) -> Option<PathBuf> {
                Some(self.into())
            }
        }
    )*};
}

folder_of_path!(&str, &String, String, &Path, &PathBuf, PathBuf);

impl CheckpointFolder for Option<PathBuf> {
    fn path(self) -> Option<PathBuf> {
        self
    }
}

pub(super) fn does_not_fit(checkpoint: &OpenCheckpoint, error: &Error) -> CheckpointError {
    let (path, reason) = (checkpoint.description_path(), shortened_to(&error.to_string(), MOST_REASON_CHARS));
    CheckpointError::DoesNotFit { path, reason }
}

impl Accelerator {
    /// Saves everything that the run needs to go on from here: the objects that were prepared (parameters, states of
    /// optimizers, learning rates, positions of loaders, the loss scale), what was registered, and the random numbers of each
    /// process. Returns the folder.
    ///
    /// The folder is `output_dir`, or with [`ProjectConfiguration::automatic_checkpoint_naming`] and `None` the next
    /// `checkpoints/checkpoint_<number>` of the project, the oldest of which go then: `total_limit`, `keep_every` and
    /// `keep_best` say which.
    ///
    /// Every process writes a part of the state, and each number is written once. The checkpoint counts from the moment
    /// at which all of it is on the disk: a run that is killed before leaves what was there, an earlier checkpoint in the same
    /// folder included. Weights of models that are not sharded are files as Hugging Face's libraries read them, and those of
    /// sharded ones with the plugin's `state_dict_type` [`Full`](accelerate_core::config::StateDictType::Full). The folder
    /// has to be on a file system that all processes see, unless `save_on_each_node` says that each machine has its own.
    ///
    /// Where standard error is a terminal, the main process shows a progress bar there if it takes longer than a second.
    ///
    /// Collective.
    ///
    /// [`ProjectConfiguration::automatic_checkpoint_naming`]: accelerate_core::config::ProjectConfiguration
    ///
    /// # Errors
    /// [`is_checkpoint`](Error::is_checkpoint): a folder that is missing or too many;
    /// [`is_weights`](Error::is_weights): a disk that is full, or a folder that cannot be written or that ranks do not share.
    /// Those of the objects, by name; that of an earlier save in the background. An error on every rank.
    ///
    /// ```
    /// use accelerate::{Accelerator, ProjectConfiguration, nn::{Init, ParamStore}, optim::Sgd};
    ///
    /// let folder = std::env::temp_dir().join(format!("accelerate-save-state-{}", std::process::id()));
    /// let project = ProjectConfiguration {
    ///     project_dir: Some(folder.clone()),
    ///     automatic_checkpoint_naming: Some(true),
    ///     total_limit: Some(2),
    ///     ..Default::default()
    /// };
    /// let accelerator = Accelerator::builder().cpu(true).project_config(project).build()?;
    /// let store = ParamStore::new(accelerator.device());
    /// let weight = store.root().param("weight", ([2], Init::Zeros))?;
    /// let optimizer = accelerator.prepare(Sgd::new(&store, 0.1)?)?;
    /// for number in 0..3 {
    ///     assert!(accelerator.save_state(None)?.ends_with(format!("checkpoints/checkpoint_{number}")));
    /// }
    /// assert!(accelerator.load_state(None)?.ends_with("checkpoint_2"));
    /// assert!(!folder.join("checkpoints/checkpoint_0").exists());
    /// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    #[track_caller]
    pub fn save_state(&self, output_dir: impl CheckpointFolder) -> Result<PathBuf> {
        let _called = crate::status::here();
        let save = self.plan_save(output_dir.path())?;
        let folder = save.folder().to_owned();
        save.progress().shown_while(|| save.write(self.group(), IoMode::Buffered))?;
        Ok(folder)
    }

    /// As [`save_state`](Self::save_state), but returns as soon as the state is copied: it is written in the background while the
    /// training goes on (`async_save` of `torch.distributed.checkpoint`). The checkpoint counts once all of it is on the disk:
    /// [`wait_for_save`](Self::wait_for_save) says so.
    ///
    /// Takes as much of the host's memory as this process writes, its part of the state, until that is done. A save that is
    /// still being written is waited for first; who would rather leave this one out asks [`is_saving`](Self::is_saving).
    /// Whoever writes has a low priority where training needs the cores, and bypasses the page cache (`O_DIRECT`) where the file system
    /// supports that: the training keeps what it has there, and whoever reads the files right afterwards reads them from the disk.
    /// Nothing is drawn meanwhile; a progress bar appears where a later call waits for the save.
    ///
    /// Collective.
    ///
    /// # Errors
    /// As [`save_state`](Self::save_state); those of writing come with the next call that saves or loads, or with
    /// [`wait_for_save`](Self::wait_for_save) or [`end_training`](Self::end_training). An error on every rank.
    ///
    /// ```
    /// use accelerate::{Accelerator, nn::{Init, ParamStore}, optim::Sgd};
    ///
    /// let folder = std::env::temp_dir().join(format!("accelerate-save-state-async-{}", std::process::id()));
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let store = ParamStore::new(accelerator.device());
    /// let weight = store.root().param("weight", ([2], Init::Ones))?;
    /// let optimizer = accelerator.prepare(Sgd::new(&store, 0.1)?)?;
    /// accelerator.save_state_async(&folder)?;
    /// // The training goes on here.
    /// accelerator.wait_for_save()?;
    /// assert!(folder.join("checkpoint.manifest.json").exists());
    /// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    #[track_caller]
    pub fn save_state_async(&self, output_dir: impl CheckpointFolder) -> Result<PathBuf> {
        let _called = crate::status::here();
        let mut save = self.plan_save(output_dir.path())?;
        let folder = save.folder().to_owned();
        self.group().agree_on_success("save_state_async", save.copy_to_host())?;
        self.start_save(save)?;
        Ok(folder)
    }

    /// Says how good the run is now, for `keep_best` of [`ProjectConfiguration`]: larger is better, so a loss is given as its
    /// negative. Checkpoints that are saved from now on have it with them, until another is set; that of the main process counts.
    /// NaN is none.
    ///
    /// [`ProjectConfiguration`]: accelerate_core::config::ProjectConfiguration
    pub fn set_checkpoint_metric(&self, metric: f64) {
        // JSON has no infinities.
        let metric = (!metric.is_nan()).then_some(metric.clamp(f64::MIN, f64::MAX));
        *self.0.checkpoint_metric.lock().unwrap_or_else(PoisonError::into_inner) = metric;
    }

    /// Decides what each process writes, after the save that is under way. Collective.
    fn plan_save(&self, output_dir: Option<PathBuf>) -> Result<CheckpointSave> {
        self.check_outside_of_hooks("save_state")?;
        self.wait_for_save()?;
        let (iteration, folder) = self.folder_to_save(output_dir)?;
        // Who writes in the background does not follow a program that changes its working folder.
        let folder = std::path::absolute(&folder).unwrap_or(folder);
        let writers = self.checkpoint_writers();
        let left_out = self.run_save_hooks(&folder, self.process_index() == writers.0.start)?;
        self.session().before_save()?;
        self.agree_on_lone_training()?;
        let frozen = self.frozen_in_models(&left_out);
        let state = frozen.and_then(|frozen| Ok(without_frozen(self.run_state(iteration, &left_out)?, frozen)));
        let mut state = self.group().agree_on_success("save_state", state)?;
        // A checkpoint of what only some ranks have could be loaded by nobody.
        let names: Vec<&str> = state.objects.keys().map(String::as_str).filter(|name| !is_of_one_rank(name)).collect();
        let cure = "prepare and register the same objects on all processes, in the same order";
        self.group().agree("save_state", &format!("[{}]", names.join(", ")), cure)?;
        keep_differing(&mut state, self.group(), &writers)?;
        if let Some(full) = self.config().fsdp_in_use().and_then(FullyShardedSettings::full_state_dict) {
            let are_numbers = self.session().objects().dequantize_parts(&mut state.objects);
            self.group().agree_on_success("save_state", are_numbers)?;
            gather_whole(&mut state, self.group(), &folder, &writers, full)?;
        }
        let save = PlannedSave::new(state, self.group(), &folder, writers)?;
        let Some(iteration) = iteration else { return Ok(CheckpointSave { save, outdated: None }) };
        self.0.checkpoint_iteration.store(iteration.saturating_add(1), Ordering::Relaxed);
        let project = self.project_configuration();
        let removes = if project.save_on_each_node { self.is_local_main_process() } else { self.is_main_process() };
        let retention = project.retention();
        let outdated = folder.parent().filter(|_| removes).map(Path::to_owned);
        let outdated = outdated.map(|folder| Outdated { folder, newest: iteration, retention });
        Ok(CheckpointSave { save, outdated })
    }

    /// Brings everything back to where [`save_state`](Self::save_state) found it: the same objects have to be prepared and
    /// registered, in the same order. Of a number of processes as before, the run goes on to the bit. On any other number,
    /// each process takes the elements of parameters and states that it keeps, loaders go on with the rows that the epoch
    /// has not seen, and each process draws new random numbers, which are the same whenever this checkpoint is loaded by
    /// as many. Returns the folder.
    ///
    /// `None` takes the newest checkpoint of the project that was completed, and says which later ones were not; one that a process
    /// cannot read is an error. All bytes
    /// are compared with the checksums in the checkpoint before anything changes. A program that saves after this numbers
    /// its checkpoints on.
    ///
    /// Collective.
    ///
    /// # Errors
    /// [`is_checkpoint`](Error::is_checkpoint): there is no checkpoint, or what it has of an object does not fit, by name;
    /// [`is_weights`](Error::is_weights): a file is not as it was saved, by path; [`is_config`](Error::is_config): other objects
    /// were prepared. An error on every rank. Where the files are wrong, or other objects were prepared, nothing has changed on
    /// any rank but what a hook has done; where an object refuses its state, nothing on those ranks whose objects do. After all of this, tensors on the
    /// CPU are read into the memory where they are: if a disk fails then, the error says that the run has to load again.
    #[track_caller]
    pub fn load_state(&self, input_dir: impl CheckpointFolder) -> Result<PathBuf> {
        let _called = crate::status::here();
        self.check_outside_of_hooks("load_state")?;
        self.wait_for_save()?;
        let folder = self.folder_to_load(input_dir.path())?;
        let mut checkpoint = OpenCheckpoint::open(self.group(), &folder, &self.checkpoint_writers())?;
        let left_out = self.run_load_hooks(&folder)?;
        let states = self.states_in(&mut checkpoint, &left_out);
        let mut states = self.group().agree_on_success("load_state", states)?;
        let mut models: Vec<_> = self.session().objects().named_models().collect();
        models.retain(|(name, _)| !left_out.contains(name));
        self.check_left_out(&checkpoint, &states, &models)?;
        let of_steps = self.between_steps(&checkpoint, &mut states, &models);
        let of_steps = self.group().agree_on_success("load_state", of_steps)?;
        let mut in_place = BTreeMap::new();
        for name in checkpoint.objects_in_place() {
            in_place.extend(states.get(&name).map(|state| (name, state.shallow_clone())));
        }
        let loaded = self.go_on_from(&checkpoint, states, &left_out, of_steps);
        self.group().agree_on_success("load_state", loaded)?;
        // All objects of all ranks have taken their states, so that now nothing is wrong but a disk.
        let filled = checkpoint.read_in_place().and_then(|()| self.take_again(in_place));
        self.group().agree_on_success("load_state", filled)?;
        self.go_on_alone(&checkpoint);
        Ok(folder)
    }

    /// The folder of the newest checkpoint of the project that was completed, which [`load_state`](Self::load_state) with `None` goes on
    /// from; `None` if there is none yet, as in the first start of a run that is started again after a failure. Collective.
    ///
    /// ```
    /// use accelerate::{Accelerator, ProjectConfiguration};
    ///
    /// let folder = std::env::temp_dir().join(format!("accelerate-latest-{}", std::process::id()));
    /// let project = ProjectConfiguration {
    ///     project_dir: Some(folder.clone()),
    ///     automatic_checkpoint_naming: Some(true),
    ///     ..Default::default()
    /// };
    /// let accelerator = Accelerator::builder().cpu(true).project_config(project).build()?;
    /// assert_eq!(accelerator.latest_checkpoint()?, None);
    /// let saved = accelerator.save_state(None)?;
    /// assert_eq!(accelerator.latest_checkpoint()?, Some(saved));
    /// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`is_weights`](Error::is_weights): the folder of the checkpoints cannot be read; [`is_checkpoint`](Error::is_checkpoint):
    /// there are some, and none that can be used, so that a run which began anew would write over them, or a process cannot read a later
    /// one. An error on every rank.
    pub fn latest_checkpoint(&self) -> Result<Option<PathBuf>> {
        let found = self.found_checkpoints("latest_checkpoint")?;
        let newest = self.newest_committed(&found)?;
        let is_sure = newest.is_some() || found.iter().all(|it| it.problem.is_none());
        let sure = if is_sure { Ok(()) } else { Err(self.no_checkpoint(&found).into()) };
        self.group().agree_on_success("latest_checkpoint", sure)?;
        Ok(newest.map(|number| self.project_configuration().checkpoint_dir(number)))
    }

    /// Gives objects the states whose tensors were still to be read when they took them.
    fn take_again(&self, states: BTreeMap<String, ObjectState>) -> Result<()> {
        let objects = self.session().objects();
        let others = objects.layouts().into_keys().filter(|name| !states.contains_key(name)).collect();
        objects.take_state_dict(states, &others)
    }

    /// Everything to be saved. The name of a checkpoint is taken to be free.
    fn run_state(&self, iteration: Option<usize>, left_out: &BTreeSet<String>) -> Result<RunState> {
        let session = self.session();
        let window = session.gradient_state.window_state();
        let accumulation = match session.gradient_state.sync_gradients() {
            true => WindowState { step: window.step, ..Default::default() },
            false => window,
        };
        let mut objects = session.objects().state_views(left_out)?;
        objects.insert(RANDOM_STATES.to_owned(), random_states(self.process_index(), self.device())?);
        if accumulation.seen > 0 || session.objects().optimizers().any(|optimizer| optimizer.has_fresh_gradients()) {
            let tensors = self.gradients()?;
            if !tensors.is_empty() && self.scaler().is_some_and(GradScaler::has_unscaled) {
                return Err(CheckpointError::UnscaledGradients.into());
            }
            let state = ObjectState { tensors, values: session.objects().model_layouts(), ..Default::default() };
            objects.extend((!state.tensors.is_empty()).then_some((gradients_of_rank(self.process_index()), state)));
        }
        let hooks = self.hook_states(left_out)?;
        objects.extend(hooks.map(|state| (comm_hook_of_rank(self.process_index()), state)));
        let shard_size = session.mesh.shape().model_size();
        let may_differ = self.may_differ(&objects);
        let metric = *self.0.checkpoint_metric.lock().unwrap_or_else(PoisonError::into_inner);
        let (readers, unshared) = (session.objects().state_readers(), BTreeSet::new());
        Ok(RunState { objects, readers, may_differ, unshared, accumulation, shard_size, iteration, metric })
    }

    /// A model that any rank has trained by itself counts as such on all of them. Collective.
    fn agree_on_lone_training(&self) -> Result<()> {
        let models: Vec<_> = self.session().objects().models().collect();
        let own: Vec<u8> = models.iter().map(|model| u8::from(model.was_trained_alone())).collect();
        let all = self.group().all_gather_bytes(&own)?;
        let is_alone = |place: usize| all.iter().any(|rank| rank.get(place) == Some(&1));
        models.iter().enumerate().filter(|(place, _)| is_alone(*place)).for_each(|(_, model)| model.train_alone());
        Ok(())
    }

    /// Object and name of each tensor that other ranks may hold otherwise: buffers, what the program has registered, and what ranks
    /// that train by themselves have trained.
    fn may_differ(&self, objects: &BTreeMap<String, ObjectState>) -> BTreeSet<(String, String)> {
        let session = self.session();
        let mut may_differ = BTreeSet::new();
        let mut whole_objects: BTreeSet<String> = BTreeSet::new();
        for (name, model) in session.objects().named_models() {
            may_differ.extend(model.store.buffers().iter().map(|buffer| (name.clone(), buffer.name().to_owned())));
            if model.was_trained_alone() {
                // Which of the optimizers have trained it, nobody says.
                whole_objects.extend(session.objects().named_optimizers().map(|(name, _)| name));
                whole_objects.insert(name);
            }
        }
        whole_objects.extend(objects.keys().filter(|name| name.starts_with(REGISTERED)).cloned());
        for (name, state) in whole_objects.iter().filter_map(|name| Some((name, objects.get(name)?))) {
            let whole = state.tensors.keys().filter(|tensor| !state.layouts.contains_key(*tensor));
            may_differ.extend(whole.map(|tensor| (name.clone(), tensor.clone())));
        }
        may_differ
    }

    /// The states of this process's objects in a checkpoint.
    fn states_in(
        &self,
        checkpoint: &mut OpenCheckpoint,
        left_out: &BTreeSet<String>,
    ) -> Result<BTreeMap<String, ObjectState>> {
        let place = (self.process_index(), self.num_processes());
        let mut layouts = self.session().objects().layouts();
        layouts.retain(|name, _| !left_out.contains(name));
        let names = checkpoint.description.objects.keys().filter(|name| !left_out.contains(*name));
        let names: Vec<String> = names.cloned().collect();
        // Before anything is read.
        let own = layouts.keys().map(String::as_str);
        let is_object = |name: &&str| *name != RANDOM_STATES && !is_of_one_rank(name);
        check_same_objects(own, names.iter().map(String::as_str).filter(is_object))
            .map_err(|error| error.context(checkpoint.description_path().display().to_string()))?;
        let mut of_this_rank = vec![gradients_of_rank(place.0)];
        // What hooks keep of gradients is of use to as many processes only.
        of_this_rank.extend((place.1 == checkpoint.description.world_size).then(|| comm_hook_of_rank(place.0)));
        of_this_rank.extend((place.1 == checkpoint.description.world_size).then(|| kept_by_rank(place.0)));
        self.warn_of_what_is_not_kept(checkpoint);
        let places = self.session().objects().state_places(left_out)?;
        let nowhere = BTreeMap::new();
        let optimizers: BTreeMap<_, _> = self.session().objects().named_optimizers().collect();
        let mut states = BTreeMap::new();
        for name in names {
            if is_of_one_rank(&name) && !of_this_rank.contains(&name) {
                continue;
            }
            let own = layouts.get(&name).cloned().unwrap_or_default();
            let places = places.get(&name).unwrap_or(&nowhere);
            let optimizer = optimizers.get(&name);
            let dequantize = |tensors| match optimizer {
                Some(optimizer) => optimizer.dequantized(tensors),
                None => Ok(tensors),
            };
            let state = checkpoint.object(&name, &own, places, place, &dequantize)?;
            if state.as_ref().is_some_and(|state| is_elsewhere(&name, state)) {
                let path = checkpoint.description_path().display().to_string();
                return Err(Error::from(CheckpointError::OnAnotherMachine { object: name }).context(path));
            }
            states.extend(state.map(|state| (name, state)));
        }
        if let Some(own) = states.remove(&kept_by_rank(place.0)) {
            put_back(own, &mut states);
        }
        checkpoint.check_unchanged()?;
        Ok(states)
    }

    /// Where ranks have parameters or states of optimizers of their own, the next checkpoint keeps those, too.
    fn go_on_alone(&self, checkpoint: &OpenCheckpoint) {
        let objects = self.session().objects();
        let kept = checkpoint.description.objects.iter().filter(|(name, _)| name.starts_with(KEPT_BY_RANK));
        let differing: BTreeSet<_> = kept.flat_map(|(_, object)| differing_in(object)).collect();
        let optimizers: BTreeSet<String> = objects.named_optimizers().map(|(name, _)| name).collect();
        // Which of the models such an optimizer trains, nobody says.
        let is_any_optimizer = differing.iter().any(|(object, _)| optimizers.contains(object));
        for (name, model) in objects.named_models() {
            let buffers: BTreeSet<String> = model.store.buffers().iter().map(|it| it.name().to_owned()).collect();
            let is_parameter = |(object, tensor): &(String, String)| *object == name && !buffers.contains(tensor);
            if is_any_optimizer || differing.iter().any(is_parameter) {
                model.train_alone();
            }
        }
    }

    /// Another number of processes has no use for what each of them held otherwise than the first.
    fn warn_of_what_is_not_kept(&self, checkpoint: &OpenCheckpoint) {
        let (now, before) = (self.num_processes(), checkpoint.description.world_size);
        let has = |prefix: &str| checkpoint.description.objects.keys().any(|name| name.starts_with(prefix));
        // Gradients of another number of processes are an error.
        if now != before && self.is_main_process() && has(KEPT_BY_RANK) && !has(GRADIENTS) {
            messages::warning_here!(
                "processes of the run had other buffers, registered tensors, parameters or states of optimizers (LocalSGD, \
                 join_uneven_inputs, steps within no_sync) than process 0; all go on with those of process 0, because there are {now} now and there were {before}"
            );
        }
    }

    fn go_on_from(
        &self,
        checkpoint: &OpenCheckpoint,
        mut states: BTreeMap<String, ObjectState>,
        left_out: &BTreeSet<String>,
        BetweenSteps { gradients, hooks }: BetweenSteps<'_>,
    ) -> Result<()> {
        let does_not_fit = |error: Error| does_not_fit(checkpoint, &error);
        let place = (self.process_index(), self.device());
        let is_same_size = checkpoint.description.world_size == self.num_processes();
        let before = random_states(place.0, place.1)?;
        if let Some(random) = states.remove(RANDOM_STATES) {
            restore_random_states(&random, place.0, is_same_size, place.1).map_err(does_not_fit)?;
        }
        self.session().objects().take_state_dict(states, left_out).map_err(|error| {
            // The error that led here is the one to report.
            let _ = restore_random_states(&before, place.0, true, place.1);
            does_not_fit(error)
        })?;
        self.load_gradients(&gradients)?;
        hooks.into_iter().for_each(|take_over| take_over());
        let seen = checkpoint.description.accumulation.seen;
        if seen > 0 && gradients.iter().all(|(_, saved)| saved.is_empty()) {
            messages::warning!(
                "the checkpoint stands in a window of gradient accumulation, {seen} micro-batches into it, and has no gradients of them: \
                 the next step is made without these"
            );
        }
        let gradient_state = &self.session().gradient_state;
        gradient_state.restart();
        gradient_state.restore_window(checkpoint.description.accumulation);
        gradient_state.set_sync_gradients(checkpoint.description.accumulation.seen == 0);
        if let Some(iteration) = checkpoint.description.iteration {
            self.0.checkpoint_iteration.store(iteration.saturating_add(1), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Who writes into, and reads from, the folder that this process sees.
    fn checkpoint_writers(&self) -> FolderWriters {
        if !self.project_configuration().save_on_each_node {
            return FolderWriters(0..self.num_processes());
        }
        let first = self.process_index() - self.local_process_index().min(self.process_index());
        FolderWriters(first..first + self.state().num_local_processes())
    }

    /// The folder that is to be written, and its number. Collective.
    fn folder_to_save(&self, output_dir: Option<PathBuf>) -> Result<(Option<usize>, PathBuf)> {
        let project = self.project_configuration();
        let named = match output_dir {
            Some(folder) if project.names_checkpoints() => Err(CheckpointError::TwoNames { folder }.into()),
            Some(folder) if folder.as_os_str().is_empty() => Err(CheckpointError::NoFolder.into()),
            None if !project.names_checkpoints() => Err(CheckpointError::NoFolder.into()),
            named => Ok(named),
        };
        // Where this succeeds, all ranks name a folder or none does, so that all of them make the calls below.
        if let Some(folder) = self.group().agree_on_success("save_state", named)? {
            self.warn_of_unused_retention();
            return Ok((None, folder));
        }
        let own = self.0.checkpoint_iteration.load(Ordering::Relaxed);
        let found = self.found_checkpoints("save_state")?;
        let free = found.last().map_or(0, |last| last.number.saturating_add(1));
        // Machines that share no folder may have others.
        let number = self.values_of_all(own.max(free))?.into_iter().max().unwrap_or(own);
        Ok((Some(number), project.checkpoint_dir(number)))
    }

    /// A program that limits the number of its checkpoints, and names their folders itself, would find its disk full.
    fn warn_of_unused_retention(&self) {
        let is_limited = self.project_configuration().total_limit.is_some();
        if is_limited && self.is_main_process() && !self.0.has_told_of_limit.swap(true, Ordering::Relaxed) {
            messages::warning_here!(
                "total_limit has no effect on checkpoints whose folders the program names itself: none is removed; set \
                 automatic_checkpoint_naming in ProjectConfiguration, and give save_state None"
            );
        }
    }

    /// The folder that is to be read. Collective.
    fn folder_to_load(&self, input_dir: Option<PathBuf>) -> Result<PathBuf> {
        let asked_for = if input_dir.is_some() { "a checkpoint that is named" } else { "the newest checkpoint" };
        self.group().agree("load_state", asked_for, "name a folder on all processes, or on none")?;
        if let Some(folder) = input_dir {
            return Ok(folder);
        }
        let found = self.found_checkpoints("load_state")?;
        let newest = self.newest_committed(&found)?;
        let newest = newest.ok_or_else(|| self.no_checkpoint(&found).into());
        // Machines that share no folder have not found the same.
        let newest = self.group().agree_on_success("load_state", newest)?;
        if self.is_main_process() {
            for FoundCheckpoint { number, problem, .. } in found.iter().filter(|it| it.number > newest) {
                let name = checkpoint_name(*number);
                match problem {
                    Some(problem) => messages::warning_here!("{name} is passed over: {problem}"),
                    None => messages::warning_here!("{name} was not completed and is passed over"),
                }
            }
        }
        Ok(self.project_configuration().checkpoint_dir(newest))
    }

    /// The checkpoints of the project. Collective.
    fn found_checkpoints(&self, op: &'static str) -> Result<Vec<FoundCheckpoint>> {
        self.group().agree_on_success(op, checkpoints_in(&self.checkpoints_dir()))
    }

    /// Where none of those that were found can be used.
    fn no_checkpoint(&self, found: &[FoundCheckpoint]) -> CheckpointError {
        let problems: Vec<&str> = found.iter().filter_map(|it| it.problem.as_deref()).collect();
        let found = match (found.len(), problems.is_empty()) {
            (0, _) => "no checkpoint_<number> is there".to_owned(),
            (number, true) => format!("none of the {number} folders there was completed"),
            (number, false) => format!("none of the {number} folders there can be used: {}", problems.join("; ")),
        };
        CheckpointError::NoCheckpoint { folder: self.checkpoints_dir(), found }
    }

    /// The number of the newest checkpoint that has been completed on all machines. A later one that a process cannot read, which
    /// may have been completed, is an error on all of them: a run that went on from an earlier one would remove it. Collective.
    fn newest_committed(&self, found: &[FoundCheckpoint]) -> Result<Option<usize>> {
        let committed: BTreeSet<usize> = found.iter().filter(|it| it.is_committed).map(|it| it.number).collect();
        let unreadable = found.iter().filter(|it| it.is_unreadable);
        let unreadable: BTreeMap<usize, Option<String>> =
            unreadable.map(|it| (it.number, it.problem.clone())).collect();
        let all = self.values_of_all((committed, unreadable))?;
        // Machines that share no folder may have been killed at different saves.
        let everywhere = all.iter().map(|(committed, _)| committed.clone()).reduce(|one, other| &one & &other);
        let newest = everywhere.and_then(|numbers| numbers.last().copied());
        let unreadable =
            all.iter().enumerate().flat_map(|(rank, (_, unreadable))| unreadable.iter().map(move |it| (rank, it)));
        match unreadable.filter(|(_, (number, _))| Some(**number) > newest).max_by_key(|(_, (number, _))| **number) {
            None => Ok(newest),
            Some((rank, (&number, problem))) => {
                let (folder, problem) = (self.project_configuration().checkpoint_dir(number), problem.clone());
                Err(CheckpointError::Unreadable { folder, rank, problem: problem.unwrap_or_default() }.into())
            }
        }
    }

    /// The values of all processes, by rank. Collective.
    pub(super) fn values_of_all<T: Serialize + DeserializeOwned>(&self, own: T) -> Result<Vec<T>> {
        let bytes = serde_json::to_vec(&own).map_err(Error::other)?;
        let all = self.group().all_gather_bytes(&bytes)?;
        all.iter().map(|bytes| serde_json::from_slice(bytes).map_err(Error::other)).collect()
    }

    fn checkpoints_dir(&self) -> PathBuf {
        self.project_configuration().checkpoints_dir()
    }
}
