//! Packages of AOTInductor: models that `torch._inductor.aoti_compile_and_package` compiled to machine code.

use crate::border::{Handle, check, handles};
use crate::error::{Error, Result};
use crate::push::{PushTensor, list_of, push_tensor, text};
use crate::script_module::{device_index, utf8};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::path::Path;
use tch::{Device, Kind, Tensor};

unsafe extern "C" {
    fn te_aoti_load(
        path: *const u8,
        length: usize,
        program: *const u8,
        program_length: usize,
        device_index: i32,
        model: *mut Handle,
    ) -> i32;
    fn te_aoti_free(model: Handle);
    fn te_aoti_num_inputs(model: Handle, count: *mut usize) -> i32;
    fn te_aoti_metadata(
        path: *const u8,
        length: usize,
        program: *const u8,
        program_length: usize,
        push: PushText,
        list: *mut c_void,
    ) -> i32;
    fn te_aoti_run(model: Handle, inputs: *const Handle, count: usize, push: PushTensor, list: *mut c_void) -> i32;
}

type PushText = extern "C" fn(*mut c_void, *const u8, usize, *const u8, usize);

/// What a package was exported for: the shape and element type of one input.
///
/// ```
/// use tch::Kind;
/// use torch_ext::InputSpec;
/// let spec = InputSpec { shape: vec![None, Some(4)], kind: Kind::Float }; // any batch size
/// assert_eq!(spec, InputSpec::new(&[-1, 4], Kind::Float));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputSpec {
    /// Sizes of the dims; `None` for one that was exported as dynamic.
    pub shape: Vec<Option<i64>>,
    /// The element type.
    pub kind: Kind,
}

impl InputSpec {
    /// Sizes of the dims, -1 for one that was exported as dynamic.
    pub fn new(shape: &[i64], kind: Kind) -> Self {
        Self { shape: shape.iter().map(|&size| (size >= 0).then_some(size)).collect(), kind }
    }

    fn fits(&self, input: &Tensor) -> bool {
        let size = input.size();
        let same = |(wanted, found): (&Option<i64>, &i64)| wanted.is_none_or(|wanted| wanted == *found);
        input.kind() == self.kind && size.len() == self.shape.len() && self.shape.iter().zip(&size).all(same)
    }
}

/// A loaded package.
///
/// The compiled code trusts its inputs: it reads memory by the shapes it was compiled for. So they are declared when the
/// package is loaded, and every call is checked against that.
///
/// ```no_run
/// use tch::{Device, Kind, Tensor};
/// use torch_ext::{AotInductorModel, InputSpec};
/// let model = AotInductorModel::load("model.pt2".as_ref(), Device::Cpu, &[InputSpec::new(&[-1, 4], Kind::Float)])?;
/// let outputs = model.run(&[&Tensor::ones([8, 4], (Kind::Float, Device::Cpu))])?;
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub struct AotInductorModel {
    raw: Handle,
    device: Device,
    inputs: Vec<InputSpec>,
}

// SAFETY: a model is a heap object without ties to a thread, used by one thread at a time through this handle.
unsafe impl Send for AotInductorModel {}

impl AotInductorModel {
    /// The name of the program in a package that has only one.
    pub const PROGRAM: &str = "model";

    /// Loads the only program of a package; see [`load_program`](Self::load_program).
    ///
    /// # Errors
    /// Those of `load_program`.
    pub fn load(path: &Path, device: Device, inputs: &[InputSpec]) -> Result<Self> {
        Self::load_program(path, Self::PROGRAM, device, inputs)
    }

    /// Loads a program of a package for `device`, the kind of device it was compiled for, with the inputs that it was exported with.
    ///
    /// This runs code of the file. Load only what you trust.
    ///
    /// # Errors
    /// A file that is missing or no package; a package for another device; another number of inputs than declared. Wrong
    /// shapes here cannot be noticed: the package does not tell them.
    pub fn load_program(path: &Path, program: &str, device: Device, inputs: &[InputSpec]) -> Result<Self> {
        let operation = "AotInductorModel::load";
        let compiled_for = Self::metadata(path, program)?.remove("AOTI_DEVICE_KEY");
        let wanted = if device == Device::Cpu { "cpu" } else { "cuda" };
        if compiled_for.as_deref() != Some(wanted) {
            let found = compiled_for.unwrap_or_else(|| "no device that it names".to_owned());
            let message = format!(
                "{} was compiled for {found} and is loaded for {wanted}; export and compile the model on {wanted}",
                path.display()
            );
            return Err(Error::invalid(operation, message));
        }
        let text = utf8(operation, path)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: path and name are copied during the call; `raw` receives an owned model.
        check(operation, unsafe {
            let device_index = device_index(operation, device)?;
            te_aoti_load(text.as_ptr(), text.len(), program.as_ptr(), program.len(), device_index, &mut raw)
        })?;
        let model = Self { raw, device, inputs: inputs.to_vec() };
        let mut found = 0;
        // SAFETY: the model is alive.
        check(operation, unsafe { te_aoti_num_inputs(model.raw, &mut found) })?;
        if found != inputs.len() {
            let message = format!("{} takes {found} inputs, {} are declared", path.display(), inputs.len());
            return Err(Error::invalid(operation, message));
        }
        Ok(model)
    }

    /// What a program of a package says of itself, without loading its code: `AOTI_DEVICE_KEY`, `AOTI_CPU_ISA`, ...
    ///
    /// # Errors
    /// A file that is missing or no package, or has no program of this name.
    pub fn metadata(path: &Path, program: &str) -> Result<BTreeMap<String, String>> {
        extern "C" fn push(list: *mut c_void, key: *const u8, key_length: usize, value: *const u8, length: usize) {
            // SAFETY: `list` is the map below, alive and unused during the call; both texts are lent for it.
            unsafe {
                let (key, value) = (text(key, key_length), text(value, length));
                (*list.cast::<BTreeMap<String, String>>()).insert(key, value);
            }
        }
        let operation = "AotInductorModel::metadata";
        // libtorch reports a file that it cannot open as damaged.
        std::fs::File::open(path).map_err(|error| Error::invalid(operation, format!("{}: {error}", path.display())))?;
        let path = utf8(operation, path)?;
        let mut metadata: BTreeMap<String, String> = BTreeMap::new();
        // SAFETY: path and name are lent for the call, and `push` is given the map that it expects.
        check(operation, unsafe {
            let list = std::ptr::from_mut(&mut metadata).cast();
            te_aoti_metadata(path.as_ptr(), path.len(), program.as_ptr(), program.len(), push, list)
        })?;
        Ok(metadata)
    }

    /// Runs the program. The outputs have no graph: there is no backward pass through compiled code.
    ///
    /// A program that changes its inputs does so in place where they are contiguous, and changes a copy where they are not.
    ///
    /// # Errors
    /// Inputs that are not as declared or on another device; what the compiled code reports.
    pub fn run(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let operation = "AotInductorModel::run";
        if inputs.len() != self.inputs.len() {
            let message = format!("{} inputs are given, the package takes {}", inputs.len(), self.inputs.len());
            return Err(Error::invalid(operation, message));
        }
        for (position, (input, spec)) in inputs.iter().zip(&self.inputs).enumerate() {
            if !spec.fits(input) || input.device() != self.device {
                let message = format!(
                    "input {position} is {:?} of shape {:?} on {:?}; the package was declared to take {:?} of shape \
                     {:?} on {:?}",
                    input.kind(),
                    input.size(),
                    input.device(),
                    spec.kind,
                    spec.shape.iter().map(|size| size.unwrap_or(-1)).collect::<Vec<_>>(),
                    self.device,
                );
                return Err(Error::invalid(operation, message));
            }
        }
        // Compiled for the strides of its example inputs too, which are almost always those of contiguous tensors.
        let mut contiguous = Vec::with_capacity(inputs.len());
        for input in inputs {
            contiguous.push(input.f_contiguous().map_err(|error| Error::invalid(operation, error.to_string()))?);
        }
        let inputs = handles(&contiguous);
        let mut outputs = Vec::new();
        // SAFETY: the model and the inputs are alive during the call, the inputs have the number, shapes, types and device
        // that the package was declared to take, and `push_tensor` is given the vector it expects.
        check(operation, unsafe {
            te_aoti_run(self.raw, inputs.as_ptr(), inputs.len(), push_tensor, list_of(&mut outputs))
        })?;
        Ok(outputs)
    }
}

impl Drop for AotInductorModel {
    fn drop(&mut self) {
        // SAFETY: the handle is owned and dropped once.
        unsafe { te_aoti_free(self.raw) }
    }
}

impl fmt::Debug for AotInductorModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AotInductorModel").field("device", &self.device).field("inputs", &self.inputs).finish()
    }
}
