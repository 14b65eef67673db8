//! Models that are TorchScript files.

use super::compiled::{FromTensors, from_tensors, tensors_of};
use super::param::Role;
use super::{Module, Param, ParamStore, memory_of};
use crate::error::{NnError, Result};
use crate::tensor_tree::TensorTree;
use accelerate_core::config::Compilation;
use std::cell::Cell;
use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use tch::{Device, Tensor};
use torch_ext::{Error as TorchError, ScriptTensor};

/// A model saved by `torch.jit.save`: the compiler backend "ts".
///
/// Its parameters and buffers stand in a [`ParamStore`] under their TorchScript names, as the same tensors: it is trained,
/// saved and loaded as any model. `I` is what `forward` takes, tensors by position in the order in which a [`TensorTree`]
/// visits them; `O` is what it gives, a tensor, a tuple of tensors or a list of them.
///
/// ```no_run
/// use accelerate::nn::ScriptModule;
/// use accelerate::{Accelerator, DynamoBackend, optim::AdamW, tch::Tensor};
///
/// let accelerator = Accelerator::builder().dynamo_backend(DynamoBackend::Ts).build()?;
/// let model: ScriptModule = ScriptModule::load("model.pt", accelerator.device())?;
/// let optimizer = AdamW::new(model.params(), 1e-3)?;
/// let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
/// let loss = model.forward(&Tensor::from_slice(&[1.0f32, 2.0]))?.sum(None);
/// accelerator.backward(&loss)?;
/// optimizer.step()?;
/// # use accelerate::nn::Module;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct ScriptModule<I = Tensor, O = Tensor> {
    module: torch_ext::ScriptModule,
    path: PathBuf,
    store: ParamStore,
    /// The mode that TorchScript was last told; `None` before the first forward pass.
    training: Cell<Option<bool>>,
    signature: PhantomData<fn(&I) -> O>,
}

impl<I: TensorTree, O: FromTensors> ScriptModule<I, O> {
    /// Reads a file, wherever its tensors were when it was saved, and puts them on `device`.
    ///
    /// The model begins in training mode, as every model here. Parameters that share their memory are one parameter with
    /// [aliases](ParamStore::aliases). A frozen module (`torch.jit.freeze`) has no parameters and
    /// stays in evaluation mode.
    ///
    /// # Errors
    /// A file that is missing or no TorchScript; a device that is neither the CPU nor CUDA.
    pub fn load(path: impl AsRef<Path>, device: Device) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let failed = |source: TorchError| failed(&path, source);
        let module = torch_ext::ScriptModule::load(&path, device).map_err(failed)?;
        let store = ParamStore::new(device);
        store.set_tensor_holder("a ScriptModule");
        let mut params = HashMap::new();
        for ScriptTensor { name, tensor, is_buffer } in module.tensors().map_err(failed)? {
            if is_buffer {
                store.insert(Param::new(name, Role::Buffer { persistent: true }, tensor))?;
                continue;
            }
            // Empty tensors all have the same memory, none, and are not tied for that.
            let memory = (tensor.numel() > 0).then(|| memory_of(&tensor));
            match memory.as_ref().and_then(|memory| params.get(memory)) {
                Some(first) => store.insert_alias(name, first)?,
                None => {
                    let param = store.insert(Param::new(name, Role::Parameter, tensor))?;
                    params.extend(memory.map(|memory| (memory, param.clone())));
                    param
                }
            };
        }
        Ok(Self { module, path, store, training: Cell::new(None), signature: PhantomData })
    }
}

fn failed(path: &Path, source: TorchError) -> crate::Error {
    NnError::Compiled { module: "ScriptModule", path: path.display().to_string(), source }.into()
}

impl<I: TensorTree, O: FromTensors> Module for ScriptModule<I, O> {
    type Input = I;
    type Output = O;

    fn forward(&self, input: &I) -> Result<O> {
        let training = self.store.is_training();
        if self.training.get() != Some(training) {
            self.module.set_training(training).map_err(|source| failed(&self.path, source))?;
            self.training.set(Some(training));
        }
        let inputs = tensors_of(input);
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        let outputs = self.module.forward(&inputs).map_err(|source| failed(&self.path, source))?;
        from_tensors("ScriptModule", &self.path, outputs)
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }

    fn compilation(&self) -> Compilation {
        Compilation::TorchScript
    }
}

impl<I, O> fmt::Debug for ScriptModule<I, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptModule").field("path", &self.path).field("store", &self.store).finish_non_exhaustive()
    }
}
