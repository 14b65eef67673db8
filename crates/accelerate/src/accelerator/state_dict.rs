//! A model's weights as a value, and values to a file.

use super::models::single_store;
use super::{Accelerator, HasParameters};
use crate::amp::float_kind;
use crate::checkpoint::save_file;
use crate::error::Result;
use crate::nn::{Param, ParamStore, StateDict};
use accelerate_core::config::FloatType;
use std::path::Path;
use tch::{Device, Kind, Tensor};

const OP: &str = "get_state_dict";

impl Accelerator {
    /// The parameters and persistent buffers of a model by name, whole (`get_state_dict` of the reference).
    ///
    /// Of a model that is sharded over several ranks, rank 0 gets all of them, in the memory of its host, and the other ranks
    /// get an empty state: units are gathered one after the other, so that no device holds more than one of them whole. Then the
    /// call is collective. Of any other model every rank gets its own, which share their memory with the model.
    ///
    /// Prepared models have the names of the model inside, so there is no `unwrap` to say. With DeepSpeed's
    /// `zero3_save_16bit_model`, floating-point ones are copies in the 16 bits of the mixed precision; without it they are as
    /// they are, also at stage 3, where the reference has an error.
    ///
    /// # Errors
    /// Not one model; a failure between ranks, and rank 0 out of memory, on every rank.
    ///
    /// ```
    /// use accelerate::checkpoint::load_file;
    /// use accelerate::nn::{Linear, ModuleFn, ParamStore};
    /// use accelerate::{Accelerator, FullyShardedDataParallelPlugin, tch::Tensor, testing};
    ///
    /// let path = std::env::temp_dir().join(format!("accelerate-state-{}.safetensors", std::process::id()));
    /// let builder = Accelerator::builder().fsdp_plugin(FullyShardedDataParallelPlugin::default());
    /// testing::ranks(2, builder, |accelerator| {
    ///     let store = ParamStore::new(accelerator.device());
    ///     let linear = Linear::new(store.root(), 3, 3, Default::default())?;
    ///     let model = accelerator.prepare(ModuleFn::new(&store, move |input: &Tensor| linear.forward(input)))?;
    ///     let state = accelerator.get_state_dict(&model)?;
    ///     assert_eq!(state.len(), if accelerator.is_main_process() { 2 } else { 0 });
    ///     accelerator.save(&state, &path)
    /// })?;
    /// assert_eq!(load_file(&path)?.get("weight").unwrap().size(), [3, 3]);
    /// # std::fs::remove_file(&path).map_err(accelerate::Error::other)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    #[track_caller]
    pub fn get_state_dict<M: HasParameters + ?Sized>(&self, model: &M) -> Result<StateDict> {
        let _called = crate::status::here();
        let store = single_store(model, OP)?;
        let dtype = self.deep_speed().and_then(|deep_speed| deep_speed.saved_dtype());
        if self.num_processes() > 1 && store.shard_group().is_some() {
            return self.gather_state_dict(&store, dtype);
        }
        let state = store.state_dict()?;
        let aliases = state.aliases().clone();
        let cast = state.into_iter().map(|(name, tensor)| Ok((name, cast(tensor, dtype)?)));
        Ok(cast.collect::<Result<StateDict>>()?.with_aliases(aliases))
    }

    /// Of a sharded model. Collective.
    fn gather_state_dict(&self, store: &ParamStore, dtype: Option<FloatType>) -> Result<StateDict> {
        let params = store.persistent();
        let units = units(&params);
        let description = format!("{} tensors in {} units", params.len(), units.len());
        self.group().agree(OP, &description, "ask for the state of the same model on all ranks")?;
        let mut own: Result<Vec<Option<Tensor>>> = Ok(params.iter().map(|_| None).collect());
        for members in &units {
            let Some(first) = members.first().and_then(|&place| params.get(place)) else { continue };
            let unit = first.unit().map_or_else(|| Ok(Vec::new()), |_| first.full_unit())?;
            for &place in members {
                let full = match params[place].unit() {
                    Some(member) => unit[member.member].shallow_clone(),
                    None => params[place].full_tensor()?,
                };
                // Who fails goes on gathering for the others.
                let copied = own.as_mut().map_or(Ok(()), |tensors| {
                    if let Some(tensor) = tensors.get_mut(place).filter(|_| self.is_main_process()) {
                        *tensor = Some(host_copy(&full, dtype)?);
                    }
                    Ok(())
                });
                if let Err(error) = copied {
                    own = Err(error);
                }
            }
        }
        let tensors = self.group().agree_on_success(OP, own)?;
        if !self.is_main_process() {
            return Ok(StateDict::default());
        }
        let named = params.iter().zip(tensors).filter_map(|(param, tensor)| Some((param.name().to_owned(), tensor?)));
        Ok(named.collect::<StateDict>().with_aliases(store.aliases()))
    }

    /// Writes named tensors into one file (`save` of the reference): safetensors, or where the path ends in `.bin`, `.pt`, `.pth`
    /// or `.ckpt` as `torch.save` does. The main process writes, or with
    /// `save_on_each_node` of the project the first process of each machine. The others return at once, so that what only rank 0
    /// has, as [`get_state_dict`](Self::get_state_dict) gives it, can be passed by all. Not collective: call
    /// [`wait_for_everyone`](Self::wait_for_everyone) before other processes read the file.
    ///
    /// # Errors
    /// [`is_weights`](crate::Error::is_weights), on the process that writes: a disk that is full, a folder that is missing or cannot
    /// be written. What was there before is as it was.
    pub fn save(&self, state: &StateDict, path: impl AsRef<Path>) -> Result<()> {
        let on_each_node = self.project_configuration().save_on_each_node;
        match if on_each_node { self.is_local_main_process() } else { self.is_main_process() } {
            true => save_file(state, path),
            false => Ok(()),
        }
    }
}

/// The places of parameters that are gathered together, those of a unit in the order of its first.
fn units(params: &[Param]) -> Vec<Vec<usize>> {
    let mut units: Vec<(Option<usize>, Vec<usize>)> = Vec::new();
    for (place, param) in params.iter().enumerate() {
        let unit = param.unit().map(|member| member.unit);
        match units.iter_mut().find(|(known, _)| unit.is_some() && *known == unit) {
            Some((_, members)) => members.push(place),
            None => units.push((unit, vec![place])),
        }
    }
    units.into_iter().map(|(_, members)| members).collect()
}

/// What outlives the unit that it was gathered with.
fn host_copy(full: &Tensor, dtype: Option<FloatType>) -> Result<Tensor> {
    let host = cast(full.f_detach()?, dtype)?.f_to(Device::Cpu)?;
    Ok(if host.data_ptr() == full.data_ptr() { host.f_detach_copy()? } else { host })
}

fn cast(tensor: Tensor, dtype: Option<FloatType>) -> Result<Tensor> {
    let kind = tensor.f_kind()?;
    let is_real = matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16);
    Ok(dtype.filter(|_| is_real).map_or(Ok(tensor.shallow_clone()), |dtype| tensor.f_to_kind(float_kind(dtype)))?)
}
