//! Parameters that are kept elsewhere than where they are computed with.

use super::window::{Place, Window};
use crate::error::{BigModelError, Result};
use crate::nn::{Init, Param, Storage, TrainingFlag, is_floating};
use accelerate_core::device_map::MapDevice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tch::{Device, Kind, Tensor};
use torch_ext::scalar;

/// Where a parameter is between uses.
pub(super) enum Kept {
    /// In the memory of another device.
    Memory(Tensor),
    /// In a file.
    Disk {
        window: Arc<Window>,
        place: Place,
        /// Of its shape and type, with one element for all.
        placeholder: Tensor,
    },
}

/// What stands for a parameter whose elements are in a file. libtorch refuses to write to it, and computing with it shows.
pub(super) fn placeholder(param: &Param, kind: Kind, device: Device) -> Result<Tensor> {
    let element = match is_floating(kind) {
        true => scalar::full(&[1], f64::NAN, (kind, device))?,
        false => Tensor::f_zeros([1], (kind, device))?,
    };
    Ok(element.f_squeeze_dim(0)?.f_expand(param.shape(), false)?)
}

/// The storage of a parameter that is brought to where the model is computed for each use.
pub(super) struct Elsewhere {
    pub(super) name: String,
    pub(super) kept: Kept,
    /// Where the map has it.
    pub(super) map_device: MapDevice,
    /// Where the model is computed.
    pub(super) device: Device,
    /// Of the model, if this is a buffer, which layers may write to.
    pub(super) training: Option<TrainingFlag>,
    /// Is it trained once it is back?
    pub(super) is_trained_when_back: AtomicBool,
}

impl Elsewhere {
    fn refuse<T>(&self, action: &'static str) -> Result<T> {
        Err(BigModelError::Kept { parameter: self.name.clone(), action }.into())
    }
}

impl Storage for Elsewhere {
    fn materialize(&self) -> Result<Tensor> {
        if self.training.as_ref().is_some_and(TrainingFlag::get) {
            return Err(BigModelError::TrainingBuffer { buffer: self.name.clone(), device: self.map_device }.into());
        }
        let tensor = match &self.kept {
            Kept::Memory(tensor) => tensor.shallow_clone(),
            Kept::Disk { window, place, .. } => window.tensor(*place)?,
        };
        Ok(tensor.f_to_device(self.device)?)
    }

    fn local(&self) -> Tensor {
        match &self.kept {
            Kept::Memory(tensor) => tensor.shallow_clone(),
            Kept::Disk { placeholder, .. } => placeholder.shallow_clone(),
        }
    }

    fn full_tensor(&self) -> Result<Tensor> {
        match &self.kept {
            Kept::Memory(tensor) => Ok(tensor.f_detach()?),
            Kept::Disk { window, place, .. } => window.look_at(*place),
        }
    }

    fn overwrite(&self, full: &Tensor) -> Result<()> {
        match &self.kept {
            Kept::Memory(tensor) => Ok(tensor.shallow_clone().f_copy_(full).map(drop)?),
            Kept::Disk { .. } => self.refuse("written to"),
        }
    }

    fn overwrite_shard(&self, shard: &Tensor) -> Result<()> {
        self.overwrite(&shard.f_reshape(self.local().size())?)
    }

    fn initialise(&self, _row: Option<i64>, _init: Init) -> Result<()> {
        self.refuse("initialised")
    }

    fn is_offloaded(&self) -> bool {
        matches!(self.kept, Kept::Disk { .. })
    }

    fn is_dispatched(&self) -> bool {
        true
    }

    fn set_requires_grad(&self, requires_grad: bool) -> Result<()> {
        if requires_grad {
            return self.refuse("trained");
        }
        self.is_trained_when_back.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn set_trained_when_replicated(&self, is_trained: bool) -> Result<()> {
        self.is_trained_when_back.store(is_trained, Ordering::Relaxed);
        Ok(())
    }

    fn is_trained_when_replicated(&self) -> bool {
        self.is_trained_when_back.load(Ordering::Relaxed)
    }
}
