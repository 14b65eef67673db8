//! Adapters that become a part of the weights.
//!
//! A merged weight is a tensor beside that of the layer, which stays as it is. So unmerging gives back the same bits, a
//! checkpoint that is saved meanwhile has the model's own weights, and a weight that two layers share is merged for one of them.

use super::PeftModel;
use super::kernels::Merged;
use super::layers::Wrapped;
use super::model::{Inner, State, distinct};
use crate::error::{BigModelError, LoraError, Result};
use crate::messages;
use crate::nn::Param;
use accelerate_core::weight_files::listed;
use std::collections::BTreeMap;
use tch::Tensor;
use torch_ext::scalar;

/// What a message has room for of a list of names.
const LIST_BYTES: usize = 600;

/// The adapters that are merged, in order, and the layers that they are merged into, by position.
pub(super) type MergedAdapters = (Vec<String>, BTreeMap<usize, Merged>);

impl PeftModel {
    /// Adds adapters into copies of the weights that they are for, which the layers compute with from now on: as fast as
    /// without adapters, for as much memory as those weights take. `None` stands for the active ones; of no adapters at all, nothing
    /// changes. Layers of quantised weights get theirs in full. Adapters that are merged are not trained: gradients do not reach them.
    ///
    /// # Errors
    /// [`is_config`](crate::Error::is_config): there is no such adapter; some are merged already; a sharded model; a bias of an
    /// adapter for a layer without one. A merged weight that is not finite. Nothing is changed then.
    ///
    /// ```
    /// use accelerate::lora::{InitLoraWeights, LoraConfig, get_peft_model};
    /// use accelerate::nn::{Linear, ParamStore};
    /// use accelerate::tch::{Device, Kind, Tensor};
    ///
    /// let store = ParamStore::new(Device::Cpu);
    /// let layer = Linear::new(store.root() / "proj", 4, 4, Default::default())?;
    /// let init_lora_weights = InitLoraWeights::Random;
    /// let config = LoraConfig { target_modules: Some(["proj"].into()), init_lora_weights, ..Default::default() };
    /// let model = get_peft_model(&store, config)?;
    /// let input = Tensor::ones([4], (Kind::Float, Device::Cpu));
    /// let adapted = layer.forward(&input)?;
    /// model.merge_adapter(None)?;
    /// assert!(layer.forward(&input)?.allclose(&adapted, 1e-5, 1e-6, false));
    /// model.unmerge_adapter();
    /// assert_eq!(layer.forward(&input)?, adapted);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn merge_adapter(&self, names: Option<&[&str]>) -> Result<()> {
        let mut state = self.state();
        state.check_unmerged("merge_adapter")?;
        let names = state.names_or_active(names)?;
        if names.is_empty() {
            return Ok(());
        }
        let merged = state.merged_weights(&names)?;
        state.merged = Some((names, merged));
        state.apply();
        Ok(())
    }

    /// Has layers compute with their own weights and the active adapters again.
    pub fn unmerge_adapter(&self) {
        let mut state = self.state();
        let merged = state.merged.take();
        state.apply();
        drop(state);
        drop(merged);
    }

    /// The adapters that are merged at the moment.
    pub fn merged_adapters(&self) -> Vec<String> {
        self.state().merged.as_ref().map(|(names, _)| names.clone()).unwrap_or_default()
    }

    /// Adds the adapters that are merged or active into the weights of the model for good, and takes all adapters away: the model is then as if
    /// there had never been any, with other weights, all of them frozen but for biases that were trained. Copies of
    /// `modules_to_save` take the place of the model's own.
    ///
    /// # Errors
    /// Those of [`merge_adapter`](Self::merge_adapter). [`is_config`](crate::Error::is_config): a weight that is quantised, which
    /// would be rounded; one that another layer has, too, which would change with it; a prepared model.
    /// [`is_big_model`](crate::Error::is_big_model): a weight that a device map keeps on a disk. Nothing is changed then.
    pub fn merge_and_unload(&self) -> Result<()> {
        self.check_unprepared("merge_and_unload")?;
        let changed = {
            let state = self.state();
            let names = state.merged_and_active();
            self.new_weights(&state, &state.merged_weights(&names)?)?
        };
        changed.iter().try_for_each(|(param, values)| param.copy_(values))?;
        self.unload()
    }

    /// Takes all adapters away: the model is the one that it was made of, to the bit, with all parameters frozen. Biases that
    /// were trained with an adapter are the model's own, and stay as they are.
    ///
    /// # Errors
    /// [`is_config`](crate::Error::is_config): a prepared model.
    pub fn unload(&self) -> Result<()> {
        self.check_unprepared("unload")?;
        let mut state = self.state();
        state.merged = None;
        state.active.clear();
        state.apply();
        state.wrapped.values().for_each(Wrapped::unwrap);
        state.wrapped.clear();
        let own: Vec<Param> = std::mem::take(&mut state.adapters)
            .iter()
            .flat_map(|adapter| adapter.own.iter().map(|(_, param)| param.clone()).collect::<Vec<_>>())
            .collect();
        self.0.store.remove(&own);
        Ok(())
    }

    /// The parameters that change, with their new values.
    fn new_weights(&self, state: &State, merged: &BTreeMap<usize, Merged>) -> Result<Vec<(Param, Tensor)>> {
        let mut changed: Vec<(Param, Tensor)> = Vec::new();
        for (position, Merged { weight, bias, .. }) in merged {
            let Some(wrapped) = state.wrapped.get(position) else { continue };
            changed.push((wrapped.weight().clone(), weight.shallow_clone()));
            if let (Some(param), Some(bias)) = (wrapped.bias(), bias) {
                changed.push((param.clone(), bias.shallow_clone()));
            }
        }
        for adapter in state.active.iter().filter_map(|name| state.adapter(name)) {
            for (position, copy) in &adapter.copies {
                let Some(wrapped) = state.wrapped.get(position) else { continue };
                changed.push((wrapped.weight().clone(), copy.weight.full_tensor()?));
                if let (Some(param), Some(bias)) = (wrapped.bias(), &copy.bias) {
                    changed.push((param.clone(), bias.full_tensor()?));
                }
            }
        }
        let Inner { layers, .. } = &*self.0;
        for (param, _) in &changed {
            let name = || param.name().to_owned();
            if param.is_offloaded() {
                return Err(BigModelError::Kept { parameter: name(), action: "written to" }.into());
            }
            if param.is_stored_as_several() {
                return Err(LoraError::MergedIntoCodes { parameter: name() }.into());
            }
            let uses = layers.iter().filter(|(_, layer)| layer.params().iter().any(|own| own.is_same(param)));
            if uses.count() > 1 {
                return Err(LoraError::MergedIntoShared { parameter: name() }.into());
            }
        }
        Ok(changed)
    }
}

impl State {
    fn names_or_active(&self, names: Option<&[&str]>) -> Result<Vec<String>> {
        let Some(names) = names else { return Ok(self.active.clone()) };
        self.check_names(names)?;
        Ok(distinct(names).into_iter().map(str::to_owned).collect())
    }

    /// The adapters that are merged, and after them those that are active besides.
    fn merged_and_active(&self) -> Vec<String> {
        let mut names = self.merged.as_ref().map(|(names, _)| names.clone()).unwrap_or_default();
        let others = self.active.iter().filter(|name| !names.contains(name)).cloned().collect::<Vec<_>>();
        if !names.is_empty() && !others.is_empty() {
            messages::warning_here!(
                "adapters are merged already ({}), and the active ones are merged beside them ({})",
                listed(&names, LIST_BYTES),
                listed(&others, LIST_BYTES)
            );
        }
        names.extend(others);
        names
    }

    fn merged_weights(&self, names: &[String]) -> Result<BTreeMap<usize, Merged>> {
        let _no_grad = tch::no_grad_guard();
        let mut merged = BTreeMap::new();
        for (position, wrapped) in &self.wrapped {
            let adapters = names.iter().filter_map(|name| Some((name, self.adapter(name)?.layers.get(position)?)));
            let adapters: Vec<_> = adapters.collect();
            if adapters.is_empty() {
                continue;
            }
            let param = wrapped.weight();
            if param.is_sharded() {
                return Err(LoraError::MergedSharded { parameter: param.name().to_owned() }.into());
            }
            let mut weight = param.get()?.f_detach_copy()?;
            let copied = |bias: &Param| -> Result<Tensor> { Ok(bias.get()?.f_detach_copy()?) };
            let mut bias = wrapped.bias().map(copied).transpose()?;
            let kind = weight.f_kind()?;
            for (name, adapter) in adapters {
                let _ = weight.f_add_(&adapter.delta(wrapped.adds_transposed())?.f_to_kind(kind)?)?;
                if let Some(own) = &adapter.b.bias {
                    let Some(bias) = &mut bias else {
                        return Err(LoraError::MergedWithoutBias { path: wrapped.path.clone() }.into());
                    };
                    let _ = bias.f_add_(&scalar::mul(&own.full_tensor()?, adapter.scaling)?.f_to_kind(kind)?)?;
                }
                check_finite(&weight, name, &wrapped.path)?;
            }
            let (is_transposed, is_of_codes) = (wrapped.is_transposed(), param.is_stored_as_several());
            merged.insert(*position, Merged { weight, bias, is_transposed, is_of_codes });
        }
        Ok(merged)
    }
}

fn check_finite(weight: &Tensor, adapter: &str, path: &str) -> Result<()> {
    if weight.f_isfinite()?.f_all()?.f_int64_value(&[])? == 0 {
        return Err(LoraError::MergedNotFinite { adapter: adapter.to_owned(), path: path.to_owned() }.into());
    }
    Ok(())
}
