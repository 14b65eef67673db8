//! Models that take turns on a device, each whole.

use super::dispatch::default_device;
use super::machine::device_of;
use crate::error::{BigModelError, Result};
use crate::nn::{Param, ParamStore, Storage};
use accelerate_core::device_map::MapDevice;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Device, Tensor};

/// Keeps a model in the CPU's memory until it is used, and then on `execution_device` (by default the first accelerator, or the CPU where
/// there is none) until [`offload`](UserCpuOffloadHook::offload) is called: the reference's `cpu_offload_with_hook`.
///
/// The models of a pipeline take turns: when this one is used, that of `prev_module_hook` is offloaded first. So a loop over one model
/// moves it once, where [`cpu_offload`](super::cpu_offload) moves each layer for each pass. What was written on the device comes back
/// with the model. Not collective.
///
/// # Errors
/// [`is_big_model`](crate::Error::is_big_model): the device is not there; the model is prepared, dispatched already, or has parameters
/// without a value.
///
/// ```
/// use accelerate::big_model::cpu_offload_with_hook;
/// use accelerate::nn::{Linear, ParamStore};
/// use accelerate::tch::{Device, Tensor};
///
/// let model = |size| -> accelerate::Result<_> {
///     let store = ParamStore::new(Device::Cpu);
///     Ok((Linear::new(store.root(), 2, size, Default::default())?, store))
/// };
/// let ((first, first_store), (second, second_store)) = (model(2)?, model(1)?);
/// let first_hook = cpu_offload_with_hook(&first_store, None, None)?;
/// let second_hook = cpu_offload_with_hook(&second_store, None, Some(&first_hook))?;
/// let mut hidden = Tensor::from_slice(&[1f32, 2.0]);
/// for _step in 0..3 {
///     hidden = first.forward(&hidden)?;
/// }
/// assert!(first_hook.is_on_device());
/// second.forward(&hidden)?;
/// assert!(second_hook.is_on_device() && !first_hook.is_on_device());
/// second_hook.offload()?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn cpu_offload_with_hook(
    store: &ParamStore,
    execution_device: Option<MapDevice>,
    prev_module_hook: Option<&UserCpuOffloadHook>,
) -> Result<UserCpuOffloadHook> {
    let device = device_of(execution_device.unwrap_or_else(|| default_device(store)))?;
    let device = device.ok_or(BigModelError::ComputesOnDisk)?;
    let params = store.parameters_and_buffers();
    for param in &params {
        let parameter = || param.name().to_owned();
        if param.is_deferred() {
            return Err(BigModelError::WithoutValue { parameter: parameter() }.into());
        }
        if param.is_of_prepared_model() || param.shard_group().is_some() || param.is_stored_as_several() {
            return Err(BigModelError::Prepared { parameter: parameter() }.into());
        }
        if param.is_dispatched() {
            return Err(BigModelError::Kept { parameter: parameter(), action: "moved as a whole" }.into());
        }
    }
    let tensors: Result<Vec<Tensor>> = params.iter().map(|param| moved(&param.local(), Device::Cpu)).collect();
    let state = Mutex::new(State { tensors: tensors?, is_on_device: false });
    let previous = prev_module_hook.map(|hook| Arc::clone(&hook.model));
    let model = Arc::new(Turn { device, previous, state });
    for (place, param) in params.iter().enumerate() {
        drop(param.replace_storage(Box::new(OnDemand { model: Arc::clone(&model), place })));
    }
    store.set_device(device);
    Ok(UserCpuOffloadHook { model, params, store: store.clone() })
}

/// Says when a model of [`cpu_offload_with_hook`] leaves the device.
pub struct UserCpuOffloadHook {
    model: Arc<Turn>,
    /// Those of `model`, in its order. The store may have others by now.
    params: Vec<Param>,
    store: ParamStore,
}

impl UserCpuOffloadHook {
    /// Moves the model to the CPU's memory, until it is used again.
    ///
    /// # Errors
    /// The memory does not suffice.
    pub fn offload(&self) -> Result<()> {
        self.model.offload()
    }

    /// Is the model on the device?
    pub fn is_on_device(&self) -> bool {
        self.model.state().is_on_device
    }

    /// Leaves the model where it is now, as if there had never been a hook.
    ///
    /// # Errors
    /// Never in practice.
    pub fn remove(self) -> Result<()> {
        let tensors: Vec<Tensor> = self.model.state().tensors.iter().map(Tensor::shallow_clone).collect();
        let device = if self.is_on_device() { self.model.device } else { Device::Cpu };
        for (param, tensor) in self.params.iter().zip(tensors) {
            param.set_replicated(tensor)?;
        }
        self.store.set_device(device);
        Ok(())
    }
}

impl fmt::Debug for UserCpuOffloadHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UserCpuOffloadHook").field("is_on_device", &self.is_on_device()).finish_non_exhaustive()
    }
}

/// A model, and the one whose place it takes.
struct Turn {
    device: Device,
    previous: Option<Arc<Turn>>,
    state: Mutex<State>,
}

struct State {
    tensors: Vec<Tensor>,
    is_on_device: bool,
}

impl Turn {
    // Every change leaves the state whole, so a panic elsewhere does not spoil it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn offload(&self) -> Result<()> {
        self.state().move_to(Device::Cpu, false)
    }

    fn tensor(&self, place: usize) -> Result<Tensor> {
        let mut state = self.state();
        if !state.is_on_device {
            if let Some(previous) = &self.previous {
                previous.offload()?;
            }
            state.move_to(self.device, true)?;
        }
        Ok(state.tensors[place].shallow_clone())
    }
}

impl State {
    /// All of it or, after an error, nothing.
    fn move_to(&mut self, device: Device, is_on_device: bool) -> Result<()> {
        let tensors: Result<Vec<Tensor>> = self.tensors.iter().map(|tensor| moved(tensor, device)).collect();
        (self.tensors, self.is_on_device) = (tensors?, is_on_device);
        Ok(())
    }
}

/// The same parameter on another device; itself if it is there.
fn moved(tensor: &Tensor, device: Device) -> Result<Tensor> {
    if tensor.device() == device {
        return Ok(tensor.shallow_clone());
    }
    let requires_grad = tensor.requires_grad();
    Ok(tensor.f_detach()?.f_to_device(device)?.f_set_requires_grad(requires_grad)?)
}

/// The storage of a parameter of such a model.
struct OnDemand {
    model: Arc<Turn>,
    place: usize,
}

impl Storage for OnDemand {
    fn materialize(&self) -> Result<Tensor> {
        self.model.tensor(self.place)
    }

    fn local(&self) -> Tensor {
        self.model.state().tensors[self.place].shallow_clone()
    }

    fn is_dispatched(&self) -> bool {
        true
    }
}
