//! Models that were compiled to machine code ahead of time.

use super::compiled::{FromTensors, from_tensors, tensors_of};
use super::{Module, ParamStore};
use crate::error::{NnError, Result};
use crate::tensor_tree::TensorTree;
use accelerate_core::config::Compilation;
use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use tch::{Device, Tensor};
use torch_ext::{AotInductorModel, InputSpec};

const MODULE: &str = "AotInductorModule";

/// A package made by `torch._inductor.aoti_compile_and_package`, for inference: the compiler backend "aot_inductor".
///
/// Its weights are in the package, so its store is empty, and it cannot be trained: that can [`ExportedModule`](super::ExportedModule).
/// It computes in the precision that it
/// was compiled in: autocast does not reach into it. `I` is what `forward` takes, tensors by position in the order in which a
/// [`TensorTree`] visits them; `O` is what it gives, a tensor, a tuple of tensors or a list of them.
///
/// ```no_run
/// use accelerate::nn::{AotInductorModule, InputSpec};
/// use accelerate::tch::{Kind, Tensor, no_grad};
/// use accelerate::{Accelerator, DynamoBackend};
///
/// let accelerator = Accelerator::builder().dynamo_backend(DynamoBackend::AotInductor).build()?;
/// let inputs = [InputSpec::new(&[-1, 4], Kind::Float)];
/// let model: AotInductorModule = AotInductorModule::load("model.pt2", accelerator.device(), &inputs)?;
/// let model = accelerator.prepare(model)?;
/// let logits = no_grad(|| model.forward(&Tensor::ones([8, 4], (Kind::Float, accelerator.device()))))?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct AotInductorModule<I = Tensor, O = Tensor> {
    model: AotInductorModel,
    path: PathBuf,
    store: ParamStore,
    signature: PhantomData<fn(&I) -> O>,
}

impl<I: TensorTree, O: FromTensors> AotInductorModule<I, O> {
    /// Loads a package for the kind of device that it was compiled for. `inputs` are the shapes and types that it was
    /// exported with; every forward pass is checked against them, because the compiled code itself is not.
    ///
    /// This runs code of the file. Load only what you trust.
    ///
    /// # Errors
    /// A file that is missing or no package; a package for another device; another number of inputs.
    pub fn load(path: impl AsRef<Path>, device: Device, inputs: &[InputSpec]) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let model = AotInductorModel::load(&path, device, inputs).map_err(|source| failed(MODULE, &path, source))?;
        Ok(Self { model, path, store: ParamStore::new(device), signature: PhantomData })
    }
}

pub(super) fn failed(module: &'static str, path: &Path, source: torch_ext::Error) -> crate::Error {
    NnError::Compiled { module, path: path.display().to_string(), source }.into()
}

impl<I: TensorTree, O: FromTensors> Module for AotInductorModule<I, O> {
    type Input = I;
    type Output = O;

    fn forward(&self, input: &I) -> Result<O> {
        let inputs = tensors_of(input);
        if torch_ext::autograd::is_grad_enabled() && inputs.iter().any(Tensor::requires_grad) {
            return Err(NnError::NoBackward { path: self.path.display().to_string() }.into());
        }
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        let outputs = self.model.run(&inputs).map_err(|source| failed(MODULE, &self.path, source))?;
        from_tensors(MODULE, &self.path, outputs)
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }

    fn compilation(&self) -> Compilation {
        Compilation::AotInductor
    }
}

impl<I, O> fmt::Debug for AotInductorModule<I, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(MODULE).field("path", &self.path).field("model", &self.model).finish_non_exhaustive()
    }
}
