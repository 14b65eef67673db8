//! Models with their backward pass, compiled ahead of time.

use super::aot_inductor::failed;
use super::compiled::{FromTensors, from_tensors, tensors_of};
use super::param::Role;
use super::{Module, Param, ParamStore};
use crate::error::{NnError, Result};
use crate::tensor_tree::TensorTree;
use accelerate_core::config::Compilation;
use accelerate_core::exported_model::{EVAL, METADATA_KEY, Signature, TRAIN, TensorType};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Device, Kind, TchError, Tensor};
use torch_ext::autograd::CallbackResult;
use torch_ext::foreach::mul_tensor_;
use torch_ext::function::{BackwardContext, apply_function};
use torch_ext::storage::storage_id;
use torch_ext::{AotInductorModel, InputSpec};

const MODULE: &str = "ExportedModule";

/// A package made by `accelerate export-model`: a model of PyTorch that is trained as compiled code, without Python. The compiler
/// backend is "aot_inductor".
///
/// In training mode a forward pass computes outputs and gradients at once. Its first output is the loss, a scalar through which
/// `backward` gives these gradients, times that of the loss, to the parameters; all other outputs are detached from the graph.
/// Without gradients (`no_grad`) they are computed all the same and dropped. In evaluation mode another program computes
/// the outputs alone, and `backward` through the loss is an error.
///
/// Parameters and buffers stand in a [`ParamStore`] under their names in PyTorch. The compiled code takes them from there in each
/// pass: it is trained, sharded, saved and loaded as any model. It computes in the element types that it was exported with; autocast
/// does not reach into it. Random numbers, as for dropout, come from the generator of the device, but are not those
/// of the same model that is not compiled.
///
/// `I` is what `forward` takes, tensors by position in the order in which a [`TensorTree`] visits them; `O` is what it gives,
/// a tensor, a tuple of tensors or a list of them.
///
/// Method: `torch.export` with one graph for both directions, AOTInductor.
///
/// ```no_run
/// use accelerate::nn::{ExportedModule, Module};
/// use accelerate::tch::Tensor;
/// use accelerate::{Accelerator, DynamoBackend, optim::AdamW};
/// # let (images, labels) = (Tensor::from(0f32), Tensor::from(0i64));
///
/// let accelerator = Accelerator::builder().dynamo_backend(DynamoBackend::AotInductor).build()?;
/// let model: ExportedModule<(Tensor, Tensor), (Tensor, Tensor)> = ExportedModule::load("model.pt2", accelerator.device())?;
/// let optimizer = AdamW::new(model.params(), 1e-3)?;
/// let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
/// let (loss, logits) = model.forward(&(images, labels))?;
/// accelerator.backward(&loss)?;
/// optimizer.step()?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct ExportedModule<I = Tensor, O = Tensor> {
    train: AotInductorModel,
    eval: AotInductorModel,
    path: PathBuf,
    store: ParamStore,
    /// All parameters and then all buffers, in the order in which the programs take them.
    stored: Vec<Param>,
    /// Positions in `stored`, in the order in which "train" gives their gradients.
    gradients: Vec<usize>,
    signature: PhantomData<fn(&I) -> O>,
}

impl<I: TensorTree, O: FromTensors> ExportedModule<I, O> {
    /// Loads a package for the kind of device that it was exported for, and the values of its parameters and buffers from the
    /// file beside it, whose name ends in ".safetensors".
    ///
    /// This runs code of the package. Load only what you trust.
    ///
    /// # Errors
    /// A file that is missing or no package; a package for inference only, or for another device; values that are not
    /// those of the package.
    pub fn load(path: impl AsRef<Path>, device: Device) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let signature = signature(&path)?;
        let values = Values::read(&path)?;
        let mut stored = Vec::new();
        let store = ParamStore::new(device);
        for parameter in &signature.parameters {
            let value = values.get(&path, &parameter.name, &parameter.tensor)?.to_device(device);
            let value = value.set_requires_grad(parameter.requires_grad && value.is_floating_point());
            stored.push(store.insert(Param::new(parameter.name.clone(), Role::Parameter, value))?);
        }
        for buffer in &signature.buffers {
            let value = values.get(&path, &buffer.name, &buffer.tensor)?.to_device(device);
            let role = Role::Buffer { persistent: buffer.persistent };
            stored.push(store.insert(Param::new(buffer.name.clone(), role, value))?);
        }
        for (alias, name) in &signature.aliases {
            if let Some(param) = stored.iter().find(|param| param.name() == name) {
                store.insert_alias(alias.clone(), param)?;
            }
        }
        let of_stored = stored.iter().map(|param| Ok(InputSpec::new(&param.shape(), param.kind())));
        let of_inputs = signature.inputs.iter().map(|input| Ok(InputSpec::new(&input.shape, kind_of(&path, input)?)));
        let inputs = of_stored.chain(of_inputs).collect::<Result<Vec<_>>>()?;
        let program = |name| {
            AotInductorModel::load_program(&path, name, device, &inputs).map_err(|source| failed(MODULE, &path, source))
        };
        let (train, eval) = (program(TRAIN)?, program(EVAL)?);
        Ok(Self { train, eval, path, store, stored, gradients: signature.gradients, signature: PhantomData })
    }

    /// Outputs and gradients as one node of the graph, whose derivative is known already.
    fn train(&self, stored: &[Tensor], inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let params: Vec<&Tensor> = self.gradients.iter().map(|&index| &stored[index]).collect();
        let all: Vec<&Tensor> = stored.iter().chain(inputs).collect();
        let gradients = Arc::new(Mutex::new(Vec::new()));
        let for_backward = Arc::clone(&gradients);
        let num_gradients = params.len();
        let outputs = apply_function(
            MODULE,
            &params,
            |context| {
                context.once_differentiable();
                let mut outputs = self.train.run(&all)?;
                let found = outputs.len();
                if found <= num_gradients {
                    return Err(format!("{found} tensors came out, with {num_gradients} gradients among them").into());
                }
                let own = outputs.split_off(found - num_gradients);
                if context.is_differentiated() {
                    let others = all.iter().copied().chain(&outputs);
                    *lock(&gradients) = with_own_memory(own, others)?;
                }
                outputs[1..].iter().for_each(|output| context.mark_non_differentiable(output));
                Ok(outputs)
            },
            move |context, of_outputs| chain(context, of_outputs, &mut lock(&for_backward)),
        );
        outputs.map_err(|source| failed(MODULE, &self.path, source))
    }

    /// The outputs, of which the loss says why there is no backward pass.
    fn eval(&self, stored: &[Tensor], inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let params: Vec<&Tensor> = self.gradients.iter().map(|&index| &stored[index]).collect();
        let all: Vec<&Tensor> = stored.iter().chain(inputs).collect();
        let path = self.path.display().to_string();
        let outputs = apply_function(
            MODULE,
            &params,
            |context| {
                let outputs = self.eval.run(&all)?;
                outputs.iter().skip(1).for_each(|output| context.mark_non_differentiable(output));
                Ok(outputs)
            },
            move |_, _| Err(NnError::NoBackwardInEvaluation { path: path.clone() }.into()),
        );
        outputs.map_err(|source| failed(MODULE, &self.path, source))
    }

    /// What the programs take of the store. Buffers are changed in place, so a copy will not do.
    fn stored(&self) -> Result<Vec<Tensor>> {
        let wants_gradient: HashSet<usize> = self.gradients.iter().copied().collect();
        let tensor = |(index, param): (usize, &Param)| {
            let (path, name) = (self.path.display().to_string(), param.name().to_owned());
            let tensor = param.get()?;
            if param.requires_grad() && !wants_gradient.contains(&index) {
                return Err(NnError::ExportedWithoutGradient { path, name }.into());
            }
            if param.is_buffer() && !tensor.is_contiguous() {
                return Err(NnError::BufferNotContiguous { path, name }.into());
            }
            Ok(tensor)
        };
        self.stored.iter().enumerate().map(tensor).collect()
    }
}

fn lock(gradients: &Mutex<Vec<Tensor>>) -> MutexGuard<'_, Vec<Tensor>> {
    gradients.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The gradients of the parameters: those of the loss with respect to them, times that of the loss.
fn chain(
    context: &BackwardContext<'_>,
    of_outputs: Vec<Option<Tensor>>,
    gradients: &mut Vec<Tensor>,
) -> CallbackResult<Vec<Option<Tensor>>> {
    let Some(Some(of_loss)) = of_outputs.into_iter().next() else {
        return Ok(gradients.iter().map(|_| None).collect());
    };
    let own = if context.keeps_graph() {
        gradients.iter().map(Tensor::f_detach_copy).collect::<Result<_, _>>()?
    } else {
        std::mem::take(gradients)
    };
    // A read of the value costs less than a product on the CPU, and waits for the device elsewhere.
    if of_loss.device() != Device::Cpu || of_loss.f_double_value(&[])? != 1.0 {
        mul_tensor_(&own.iter().collect::<Vec<_>>(), &of_loss)?;
    }
    let needed = |(index, gradient)| context.needs_input_grad(index).then_some(gradient);
    Ok(own.into_iter().enumerate().map(needed).collect())
}

/// The same values, none of which shares its memory with another one or with `others`: compiled code may give one piece of memory
/// for two equal gradients, or an input for a gradient, and gradients are accumulated in place.
fn with_own_memory<'a>(
    gradients: Vec<Tensor>,
    others: impl Iterator<Item = &'a Tensor>,
) -> Result<Vec<Tensor>, TchError> {
    let mut taken: HashSet<usize> = others.map(storage_id).collect();
    let own = |gradient: Tensor| match taken.insert(storage_id(&gradient)) {
        true => Ok(gradient),
        false => gradient.f_detach_copy(),
    };
    gradients.into_iter().map(own).collect()
}

/// What the package says of itself.
fn signature(path: &Path) -> Result<Signature> {
    let metadata = |program| AotInductorModel::metadata(path, program);
    let shown = || path.display().to_string();
    let text = match metadata(TRAIN) {
        Ok(mut metadata) => metadata.remove(METADATA_KEY),
        // Made by others, for inference.
        Err(_) if metadata(AotInductorModel::PROGRAM).is_ok() => None,
        Err(source) => return Err(failed(MODULE, path, source)),
    };
    let text = text.ok_or_else(|| NnError::OnlyForInference { path: shown() })?;
    Signature::parse(&text).map_err(|source| NnError::Signature { path: shown(), source }.into())
}

/// The values that are written beside a package.
struct Values {
    path: PathBuf,
    by_name: HashMap<String, Tensor>,
}

impl Values {
    fn read(package: &Path) -> Result<Self> {
        let path = package.with_extension("safetensors");
        let tensors = Tensor::read_safetensors(&path)
            .map_err(|source| NnError::ExportedValues { path: path.display().to_string(), source })?;
        Ok(Self { path, by_name: tensors.into_iter().collect() })
    }

    fn get(&self, package: &Path, name: &str, wanted: &TensorType) -> Result<Tensor> {
        let kind = kind_of(package, wanted)?;
        let problem = match self.by_name.get(name) {
            Some(value) if value.size() == wanted.shape && value.kind() == kind => return Ok(value.shallow_clone()),
            Some(value) => format!("is {:?} of shape {:?} there", value.kind(), value.size()),
            None => "is not there".to_owned(),
        };
        let (path, name, shape) = (self.path.display().to_string(), name.to_owned(), wanted.shape.clone());
        Err(NnError::ExportedValue { path, name, problem, kind, shape }.into())
    }
}

/// The type of elements by its name in PyTorch.
fn kind_of(path: &Path, tensor: &TensorType) -> Result<Kind> {
    let kind = match tensor.dtype.as_str() {
        "float32" => Kind::Float,
        "float64" => Kind::Double,
        "float16" => Kind::Half,
        "bfloat16" => Kind::BFloat16,
        "int64" => Kind::Int64,
        "int32" => Kind::Int,
        "int16" => Kind::Int16,
        "int8" => Kind::Int8,
        "uint8" => Kind::Uint8,
        "bool" => Kind::Bool,
        _ => {
            let (path, dtype) = (path.display().to_string(), tensor.dtype.clone());
            return Err(NnError::ExportedDtype { path, dtype }.into());
        }
    };
    Ok(kind)
}

impl<I: TensorTree, O: FromTensors> Module for ExportedModule<I, O> {
    type Input = I;
    type Output = O;

    fn forward(&self, input: &I) -> Result<O> {
        let (stored, inputs) = (self.stored()?, tensors_of(input));
        if torch_ext::autograd::is_grad_enabled() && inputs.iter().any(Tensor::requires_grad) {
            return Err(NnError::NoGradientOfInputs { path: self.path.display().to_string() }.into());
        }
        let outputs = match self.store.is_training() {
            true => self.train(&stored, &inputs)?,
            false => self.eval(&stored, &inputs)?,
        };
        from_tensors(MODULE, &self.path, outputs)
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }

    fn compilation(&self) -> Compilation {
        Compilation::AotInductor
    }
}

impl<I, O> fmt::Debug for ExportedModule<I, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(MODULE).field("path", &self.path).field("store", &self.store).finish_non_exhaustive()
    }
}
