//! TorchScript files as modules whose parameters and buffers are at hand.

use crate::border::{Handle, adopt, check, handles};
use crate::error::{Error, Result};
use crate::push::{PushTensor, list_of, push_tensor, text};
use std::ffi::c_void;
use std::fmt;
use std::path::Path;
use tch::{Device, Tensor};

unsafe extern "C" {
    fn te_script_load(path: *const u8, length: usize, device_index: i32, module: *mut Handle) -> i32;
    fn te_script_free(module: Handle);
    fn te_script_tensors(module: Handle, push: PushNamed, list: *mut c_void) -> i32;
    fn te_script_set_training(module: Handle, training: bool) -> i32;
    fn te_script_forward(
        module: Handle,
        inputs: *const Handle,
        count: usize,
        push: PushTensor,
        list: *mut c_void,
    ) -> i32;
}

type PushNamed = extern "C" fn(*mut c_void, *const u8, usize, Handle, bool);

/// A parameter or buffer of a TorchScript module, sharing its storage.
#[derive(Debug)]
pub struct ScriptTensor {
    /// Its name in TorchScript: `encoder.weight`.
    pub name: String,
    /// The module's own tensor: what changes it changes the module.
    pub tensor: Tensor,
    /// It is state that is not learned.
    pub is_buffer: bool,
}

/// A TorchScript module, saved by `torch.jit.save`: what `tch::CModule` is, with buffers and with results of several
/// tensors.
///
/// ```no_run
/// use torch_ext::ScriptModule;
/// let module = ScriptModule::load("model.pt".as_ref(), tch::Device::Cpu)?;
/// let outputs = module.forward(&[&tch::Tensor::from_slice(&[1f32])])?;
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub struct ScriptModule {
    raw: Handle,
}

// SAFETY: a module is a counted pointer without ties to a thread, used by one thread at a time through this handle.
unsafe impl Send for ScriptModule {}

impl ScriptModule {
    /// Reads a file and puts its tensors on `device`, wherever they were when it was saved.
    ///
    /// # Errors
    /// A file that is missing or no TorchScript; a device that libtorch does not have.
    pub fn load(path: &Path, device: Device) -> Result<Self> {
        let operation = "ScriptModule::load";
        let path = utf8(operation, path)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the path is copied during the call; `raw` receives an owned module.
        check(operation, unsafe {
            te_script_load(path.as_ptr(), path.len(), device_index(operation, device)?, &mut raw)
        })?;
        Ok(Self { raw })
    }

    /// All parameters, then all buffers, each in the order of registration. Parameters that share
    /// their memory are one tensor, under each of its names.
    ///
    /// # Errors
    /// libtorch's.
    pub fn tensors(&self) -> Result<Vec<ScriptTensor>> {
        extern "C" fn push(list: *mut c_void, name: *const u8, length: usize, tensor: Handle, is_buffer: bool) {
            // SAFETY: `list` is the vector below, alive and unused during the call; the name is lent, the tensor given.
            unsafe {
                let (name, tensor) = (text(name, length), adopt(tensor));
                (*list.cast::<Vec<ScriptTensor>>()).push(ScriptTensor { name, tensor, is_buffer });
            }
        }
        let mut tensors: Vec<ScriptTensor> = Vec::new();
        // SAFETY: the module is alive, and `push` is given the vector that it expects.
        check("ScriptModule::tensors", unsafe {
            te_script_tensors(self.raw, push, std::ptr::from_mut(&mut tensors).cast())
        })?;
        Ok(tensors)
    }

    /// Training mode (`true`) or evaluation mode of the module and all modules in it; a frozen one stays in evaluation mode.
    ///
    /// # Errors
    /// libtorch's.
    pub fn set_training(&self, training: bool) -> Result<()> {
        // SAFETY: the module is alive.
        check("ScriptModule::set_training", unsafe { te_script_set_training(self.raw, training) })
    }

    /// Calls `forward` with tensors by position, and gives the tensors of the result from left to right: of tuples and
    /// lists, nested ones too. Gradients are recorded unless they are switched off.
    ///
    /// # Errors
    /// What TorchScript raises; a result that holds anything but tensors.
    pub fn forward(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let inputs = handles(inputs.iter().copied());
        let mut outputs = Vec::new();
        // SAFETY: the module and the inputs are alive during the call, and `push_tensor` is given the vector it expects.
        check("ScriptModule::forward", unsafe {
            te_script_forward(self.raw, inputs.as_ptr(), inputs.len(), push_tensor, list_of(&mut outputs))
        })?;
        Ok(outputs)
    }
}

impl Drop for ScriptModule {
    fn drop(&mut self) {
        // SAFETY: the handle is owned and dropped once.
        unsafe { te_script_free(self.raw) }
    }
}

impl fmt::Debug for ScriptModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptModule").finish_non_exhaustive()
    }
}

pub(crate) fn utf8<'a>(operation: &'static str, path: &'a Path) -> Result<&'a str> {
    path.to_str().ok_or_else(|| Error::invalid(operation, format!("{} is not valid UTF-8", path.display())))
}

/// -1 for the CPU, the index of a CUDA device.
pub(crate) fn device_index(operation: &'static str, device: Device) -> Result<i32> {
    match device {
        Device::Cpu => Ok(-1),
        // Larger numbers than libtorch counts devices with must not wrap around to one that exists.
        Device::Cuda(index) => Ok(i32::try_from(index).unwrap_or(i32::MAX).min(127)),
        other => Err(Error::invalid(operation, format!("the device is {other:?}; wanted the CPU or a CUDA device"))),
    }
}
