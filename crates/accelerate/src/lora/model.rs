//! A model with adapters.

use super::adapter::{Adapter, Model, biases};
use super::kernels::Mode;
use super::layers::{Wrapped, entries};
use super::merge::MergedAdapters;
use super::options::AddAdapterOptions;
use super::switch::Switch;
use crate::error::{LoraError, Result};
use crate::messages;
use crate::nn::{AnyLayer, Param, ParamStore};
use accelerate_core::lora::{LayerEntry, LoraBias, LoraConfig, Modules, Resolved, check_adapter_name};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What the first adapter is called.
pub(super) const DEFAULT: &str = "default";

/// A model with adapters (`peft.PeftModel`); clones are the same. The model itself is used as before: its layers have the active
/// adapters in them.
///
/// Adapters are added, taken away and activated before `prepare`, because which parameters are trained is then fixed.
/// [`disable_adapter`](Self::disable_adapter) is possible always.
#[derive(Clone)]
pub struct PeftModel(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub(super) store: ParamStore,
    /// Of the model without adapters.
    pub(super) layers: Vec<(String, AnyLayer)>,
    pub(super) entries: Vec<LayerEntry>,
    pub(super) state: Mutex<State>,
}

pub(super) struct State {
    /// In the order in which they were added.
    pub(super) adapters: Vec<Adapter>,
    pub(super) active: Vec<String>,
    pub(super) is_enabled: bool,
    /// By the position of the layer: those that have a kernel of ours.
    pub(super) wrapped: BTreeMap<usize, Wrapped>,
    pub(super) merged: Option<MergedAdapters>,
}

/// Puts an adapter called `default` on the layers of a model that `config` means, activates it, and freezes all other parameters
/// (`peft.get_peft_model`).
///
/// The layers are those of [`ParamStore::named_layers`]. The adapter's parameters are in the same store, under the layer's path:
/// `layers.0.q_proj.lora_A.default.weight`. Random numbers are drawn as PEFT draws them, so one seed gives the same
/// adapter, if the layers were made in the order of the Python model. In a store without memory
/// ([`ParamStore::init_empty_weights`]) they are drawn now, before those of the model.
///
/// # Errors
/// [`is_config`](crate::Error::is_config): a configuration that cannot be used or that means no layer of the model; a model that
/// has adapters already, or that is prepared. Nothing is changed then.
///
/// ```
/// use accelerate::lora::{LoraConfig, get_peft_model};
/// use accelerate::nn::{Linear, ParamStore};
/// use accelerate::tch::Device;
///
/// let store = ParamStore::new(Device::Cpu);
/// Linear::new(store.root() / "q_proj", 4, 4, Default::default())?;
/// let config = LoraConfig { target_modules: Some(["k_proj"].into()), ..Default::default() };
/// let error = get_peft_model(&store, config).unwrap_err();
/// assert!(error.to_string().contains("its layers are q_proj"), "{error}");
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn get_peft_model(store: &ParamStore, config: LoraConfig) -> Result<PeftModel> {
    let model = PeftModel::without_adapters(store)?;
    let params = store.parameters();
    model.add_adapter(DEFAULT, config, AddAdapterOptions::default())?;
    model.freeze(&params)?;
    model.set_adapter(&[DEFAULT])?;
    Ok(model)
}

impl PeftModel {
    /// The layers of a model, none of which has an adapter yet.
    pub(crate) fn without_adapters(store: &ParamStore) -> Result<Self> {
        let is_of_adapter = |param: &&Param| {
            let mut parts = param.name().split('.');
            parts.any(|part| matches!(part, "lora_A" | "lora_embedding_A" | "modules_to_save"))
        };
        let params = store.parameters();
        if let Some(param) = params.iter().find(is_of_adapter) {
            return Err(LoraError::HasAdapters { parameter: param.name().to_owned() }.into());
        }
        let layers = store.named_layers();
        let entries = entries(&layers);
        let state = State {
            adapters: Vec::new(),
            active: Vec::new(),
            is_enabled: true,
            wrapped: BTreeMap::new(),
            merged: None,
        };
        let model = Self(Arc::new(Inner { store: store.clone(), layers, entries, state: Mutex::new(state) }));
        model.check_unprepared("get_peft_model")?;
        Ok(model)
    }

    /// Freezes parameters of the model without adapters.
    pub(crate) fn freeze(&self, params: &[Param]) -> Result<()> {
        params.iter().try_for_each(|param| param.set_requires_grad(false))
    }

    // Every statement leaves the state whole, so a panic elsewhere does not spoil it.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The parameters of the model and of all adapters.
    pub fn store(&self) -> &ParamStore {
        &self.0.store
    }

    /// Adds an adapter, which is not active until [`set_adapter`](Self::set_adapter) says so.
    ///
    /// # Errors
    /// [`is_config`](crate::Error::is_config): the name is taken, or cannot name an adapter; a configuration that cannot be used;
    /// a second adapter that trains biases, which are not its own; a prepared model. Nothing is changed then.
    pub fn add_adapter(&self, name: &str, config: LoraConfig, options: AddAdapterOptions) -> Result<()> {
        check_adapter_name(name)?;
        self.check_unprepared("add_adapter")?;
        let mut state = self.state();
        if state.adapters.iter().any(|adapter| adapter.name == name) {
            return Err(LoraError::NameTaken { name: name.to_owned() }.into());
        }
        let with_bias = state.adapters.iter().find(|adapter| adapter.config.bias != LoraBias::None);
        if let Some(first) = with_bias.filter(|_| config.bias != LoraBias::None) {
            return Err(LoraError::BiasTwice { first: first.name.clone(), second: name.to_owned() }.into());
        }
        let Inner { store, layers, entries, .. } = &*self.0;
        let model = Model { store, layers, entries };
        let adapter = Adapter::new(&model, name, config, options.autocast_adapter_dtype)?;
        tell(&adapter);
        let positions: Vec<usize> = adapter.layers.keys().chain(adapter.copies.keys()).copied().collect();
        for position in positions {
            let (path, layer) = &layers[position];
            if !state.wrapped.contains_key(&position)
                && let Some(wrapped) = Wrapped::new(path.clone(), layer)
            {
                state.wrapped.insert(position, wrapped);
            }
        }
        state.adapters.push(adapter);
        Ok(())
    }

    /// Activates these adapters and no others: layers add up what each of them gives, and their parameters are trained, unless
    /// they are for inference only. An empty list leaves the model as it was without adapters. What a device map keeps elsewhere is
    /// frozen as long as it is there, which a warning says.
    ///
    /// # Errors
    /// [`is_config`](crate::Error::is_config): there is no such adapter; two that have copies of one layer; others than those that
    /// are merged, which would stay in effect; a prepared model, of which other parameters would be trained. Nothing is changed then.
    pub fn set_adapter(&self, names: &[&str]) -> Result<()> {
        let names = &distinct(names)[..];
        let mut state = self.state();
        state.check_names(names)?;
        if state.active != names {
            state.check_unmerged("set_adapter")?;
        }
        let mut copied = HashSet::new();
        for adapter in names.iter().filter_map(|name| state.adapter(name)) {
            if let Some(position) = adapter.copies.keys().find(|position| !copied.insert(**position)) {
                let path = self.0.layers[*position].0.clone();
                return Err(LoraError::TwoCopies { path }.into());
            }
        }
        let mut wanted: Vec<(Param, bool)> = Vec::new();
        for adapter in &state.adapters {
            let is_trained = names.contains(&adapter.name.as_str()) && !adapter.config.inference_mode;
            wanted.extend(adapter.own.iter().map(|(_, param)| (param.clone(), is_trained)));
            wanted.extend(adapter.biases.iter().map(|param| (param.clone(), is_trained)));
        }
        wanted.retain(|(param, is_trained)| param.is_trained_when_replicated() != *is_trained);
        if let Some((param, _)) = wanted.iter().find(|(param, _)| param.is_of_prepared_model() || param.is_sharded()) {
            return Err(LoraError::Prepared { operation: "set_adapter", parameter: param.name().to_owned() }.into());
        }
        let is_frozen = |(param, is_trained): &&(Param, bool)| *is_trained && param.is_dispatched();
        if let Some((param, _)) = wanted.iter().find(is_frozen) {
            messages::warning!(
                "parameters of the adapters that are active now, such as {}, are kept elsewhere than where the model is computed, by a \
                 device map; they are frozen until another map brings them back",
                param.name()
            );
        }
        wanted.iter().try_for_each(|(param, is_trained)| param.set_trained_when_replicated(*is_trained))?;
        state.active = names.iter().map(|name| (*name).to_owned()).collect();
        state.apply();
        Ok(())
    }

    /// Takes an adapter away, with its parameters. If no other is active, the first that is left is activated.
    ///
    /// # Errors
    /// [`is_config`](crate::Error::is_config): there is no such adapter, or it is merged; a prepared model.
    pub fn delete_adapter(&self, name: &str) -> Result<()> {
        self.check_unprepared("delete_adapter")?;
        let active = {
            let mut state = self.state();
            state.check_names(&[name])?;
            state.check_unmerged("delete_adapter")?;
            let position = state.adapters.iter().position(|adapter| adapter.name == name);
            let Some(position) = position else { return Ok(()) };
            let adapter = state.adapters.remove(position);
            adapter.biases.iter().try_for_each(|bias| bias.set_trained_when_replicated(false))?;
            let own: Vec<Param> = adapter.own.iter().map(|(_, param)| param.clone()).collect();
            self.0.store.remove(&own);
            state.active.retain(|active| active != name);
            match (&state.active[..], state.adapters.first()) {
                ([], Some(first)) => vec![first.name.clone()],
                (active, _) => active.to_vec(),
            }
        };
        self.set_adapter(&active.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Calls `body` while no adapter has an effect: the model is the one that it was made of, to the bit (`with
    /// model.disable_adapter()`). Biases that are trained with an adapter are the model's own, and stay as they are.
    ///
    /// ```
    /// use accelerate::lora::{InitLoraWeights, LoraConfig, get_peft_model};
    /// use accelerate::nn::{Linear, ParamStore};
    /// use accelerate::tch::{Device, Kind, Tensor};
    ///
    /// let store = ParamStore::new(Device::Cpu);
    /// let layer = Linear::new(store.root() / "proj", 4, 4, Default::default())?;
    /// let input = Tensor::ones([4], (Kind::Float, Device::Cpu));
    /// let before = layer.forward(&input)?;
    /// let init_lora_weights = InitLoraWeights::Random;
    /// let config = LoraConfig { target_modules: Some(["proj"].into()), init_lora_weights, ..Default::default() };
    /// let model = get_peft_model(&store, config)?;
    /// assert_ne!(layer.forward(&input)?, before);
    /// assert_eq!(model.disable_adapter(|| layer.forward(&input))?, before);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn disable_adapter<R>(&self, body: impl FnOnce() -> R) -> R {
        let _switch = Switch::off(self);
        body()
    }

    /// The same until [`enable_adapter_layers`](Self::enable_adapter_layers). Which parameters are trained does not change.
    pub fn disable_adapter_layers(&self) {
        self.set_enabled(false);
    }

    /// Has active adapters have their effect again.
    pub fn enable_adapter_layers(&self) {
        self.set_enabled(true);
    }

    /// Returns what held before.
    pub(super) fn set_enabled(&self, is_enabled: bool) -> bool {
        let mut state = self.state();
        let before = std::mem::replace(&mut state.is_enabled, is_enabled);
        state.apply();
        before
    }

    /// The active adapters.
    pub fn active_adapters(&self) -> Vec<String> {
        self.state().active.clone()
    }

    /// All adapters, in the order in which they were added.
    pub fn adapters(&self) -> Vec<String> {
        self.state().adapters.iter().map(|adapter| adapter.name.clone()).collect()
    }

    /// The configuration of an adapter. Where it said `all-linear`, the layers that are meant are listed.
    ///
    /// # Errors
    /// There is no such adapter.
    pub fn peft_config(&self, name: &str) -> Result<LoraConfig> {
        let state = self.state();
        state.check_names(&[name])?;
        let Some(adapter) = state.adapter(name) else { return Ok(LoraConfig::default()) };
        let mut config = adapter.config.clone();
        if config.is_all_linear() {
            let paths = adapter.resolved.layers.iter().map(|adapted| self.0.entries[adapted.layer].path.clone());
            config.target_modules = Some(Modules::List(paths.collect()));
        }
        Ok(config)
    }

    /// The paths of the layers that any adapter is on.
    pub fn targeted_module_names(&self) -> Vec<String> {
        let state = self.state();
        let is_adapted = |position: &usize| state.adapters.iter().any(|own| own.layers.contains_key(position));
        state.wrapped.iter().filter(|(position, _)| is_adapted(position)).map(|(_, own)| own.path.clone()).collect()
    }

    /// How many numbers are trained, and how many there are with those of the model (`get_nb_trainable_parameters`).
    pub fn num_parameters(&self) -> (usize, usize) {
        let trained = self.0.store.trainable_parameters().iter().map(Param::numel).sum();
        (trained, self.0.store.num_parameters())
    }

    /// The parameters of an adapter by the names that files have for them, and the biases that are trained with it.
    pub(crate) fn parameters_in_files(&self, name: &str) -> Result<Vec<(String, Param)>> {
        let state = self.state();
        state.check_names(&[name])?;
        Ok(state.adapter(name).map_or_else(Vec::new, |adapter| adapter.in_files(&self.0.entries)))
    }

    /// The biases of the model that a configuration trains.
    pub(crate) fn biases_of(&self, config: &LoraConfig, resolved: &Resolved) -> Vec<Param> {
        let Inner { store, layers, entries, .. } = &*self.0;
        biases(&Model { store, layers, entries }, config, resolved)
    }

    /// Would an adapter of this configuration compute, and train, what the adapter `name` does with the same numbers?
    pub(crate) fn is_alike(&self, name: &str, config: &LoraConfig) -> Result<bool> {
        let resolved = config.resolve(self.entries())?;
        let alike = |own: &Adapter| {
            let Resolved { layers, saved, lora_bias, .. } = &own.resolved;
            (layers, saved, *lora_bias, own.config.bias)
                == (&resolved.layers, &resolved.saved, resolved.lora_bias, config.bias)
        };
        Ok(self.state().adapter(name).is_some_and(alike))
    }

    pub(crate) fn check_unmerged(&self, operation: &'static str) -> Result<()> {
        self.state().check_unmerged(operation)
    }

    /// The layers of the model without adapters.
    pub(crate) fn entries(&self) -> &[LayerEntry] {
        &self.0.entries
    }

    pub(super) fn check_unprepared(&self, operation: &'static str) -> Result<()> {
        let params = self.0.store.parameters();
        match params.iter().find(|param| param.is_of_prepared_model() || param.shard_group().is_some()) {
            Some(param) => Err(LoraError::Prepared { operation, parameter: param.name().to_owned() }.into()),
            None => Ok(()),
        }
    }
}

/// Each name once: twice the same adapter would count twice.
pub(super) fn distinct<'a>(names: &[&'a str]) -> Vec<&'a str> {
    let mut seen = HashSet::new();
    names.iter().copied().filter(|name| seen.insert(*name)).collect()
}

/// Says what of a configuration has no effect.
fn tell(adapter: &Adapter) {
    for (field, name) in &adapter.resolved.unmatched {
        messages::warning!("adapter {}: {field} has {name:?}, which means no layer of the model", adapter.name);
    }
}

impl State {
    pub(super) fn adapter(&self, name: &str) -> Option<&Adapter> {
        self.adapters.iter().find(|adapter| adapter.name == name)
    }

    pub(super) fn check_names(&self, names: &[&str]) -> Result<()> {
        match names.iter().find(|name| self.adapter(name).is_none()) {
            Some(name) => {
                let known = self.adapters.iter().map(|adapter| adapter.name.clone()).collect();
                Err(LoraError::NoAdapter { name: (*name).to_owned(), known }.into())
            }
            None => Ok(()),
        }
    }

    pub(super) fn check_unmerged(&self, operation: &'static str) -> Result<()> {
        match &self.merged {
            Some((names, _)) => Err(LoraError::Merged { operation, names: names.clone() }.into()),
            None => Ok(()),
        }
    }

    /// Has each layer compute what the state says.
    pub(super) fn apply(&self) {
        for (position, wrapped) in &self.wrapped {
            wrapped.mode.set(self.mode(*position));
        }
    }

    fn mode(&self, position: usize) -> Mode {
        let enabled = self.enabled_mode(position);
        if self.is_enabled || matches!(enabled, Mode::Base) { enabled } else { Mode::Off(Box::new(enabled)) }
    }

    fn enabled_mode(&self, position: usize) -> Mode {
        let active = || self.active.iter().filter_map(|name| self.adapter(name));
        if let Some(copy) = active().find_map(|adapter| adapter.copies.get(&position)) {
            return Mode::Copy(copy.clone());
        }
        if let Some((_, merged)) = &self.merged {
            return merged.get(&position).map_or(Mode::Base, |merged| Mode::Merged(merged.shallow_clone()));
        }
        let adapters: Vec<_> = active().filter_map(|adapter| adapter.layers.get(&position).cloned()).collect();
        if adapters.is_empty() { Mode::Base } else { Mode::Adapters(adapters.into()) }
    }
}

impl fmt::Debug for PeftModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        let names: Vec<&str> = state.adapters.iter().map(|adapter| adapter.name.as_str()).collect();
        f.debug_struct("PeftModel").field("adapters", &names).field("active", &state.active).finish_non_exhaustive()
    }
}
