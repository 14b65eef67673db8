//! Which compiler models go through.

use crate::Result;
use crate::environment::str_to_bool;
use crate::error::config::ConfigErrorKind;
use crate::error::environment::EnvironmentErrorKind;
use crate::names::spelled_enum;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

spelled_enum! {
    /// A compiler of models (`DynamoBackend` of the reference, `utils/dataclasses.py`, and two more that need no Python).
    ///
    /// All names of the reference are known, so that its files and variables can be read; which of them can be used,
    /// [`TorchDynamoPlugin::compilation`] says.
    ///
    /// ```
    /// use accelerate_core::config::DynamoBackend;
    /// assert_eq!("INDUCTOR".parse::<DynamoBackend>()?, DynamoBackend::Inductor);
    /// assert_eq!(DynamoBackend::default().to_string(), "no");
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    #[derive(Default)]
    DynamoBackend, "dynamo backend", false_is = No {
        /// Nothing is compiled. The default.
        #[default]
        No = "no",
        /// Operation by operation, as without a compiler.
        Eager = "eager",
        /// TorchScript files; not among the reference's names.
        Ts = "ts",
        /// Packages of AOTInductor, for inference; not among the reference's names.
        AotInductor = "aot_inductor",
        /// CUDA graphs.
        Cudagraphs = "cudagraphs",
        /// AotAutograd without a compiler; needs Python.
        AotEager = "aot_eager",
        /// TorchInductor while the program runs; needs Python.
        Inductor = "inductor",
        /// nvFuser with AotAutograd; needs Python.
        AotTsNvfuser = "aot_ts_nvfuser",
        /// nvFuser with PrimTorch; needs Python.
        NvprimsNvfuser = "nvprims_nvfuser",
        /// `optimize_for_inference` of TorchScript; needs Python.
        Ofi = "ofi",
        /// TensorRT through FX; needs Python.
        Fx2trt = "fx2trt",
        /// ONNX Runtime; needs Python.
        Onnxrt = "onnxrt",
        /// TensorRT through ONNX Runtime; needs Python.
        Tensorrt = "tensorrt",
        /// PyTorch/XLA for training; needs Python.
        AotTorchxlaTraceOnce = "aot_torchxla_trace_once",
        /// PyTorch/XLA for inference; needs Python.
        TorchxlaTraceOnce = "torchxla_trace_once",
        /// Apache TVM; needs Python.
        Tvm = "tvm",
        /// Gaudi devices; needs Python.
        HpuBackend = "hpu_backend",
        /// Trainium and Inferentia devices; needs Python.
        Neuron = "neuron",
    }
}

spelled_enum! {
    /// How hard a compiler tries (`mode` of `torch.compile`).
    ///
    /// ```
    /// use accelerate_core::config::DynamoMode;
    /// assert_eq!("reduce-overhead".parse::<DynamoMode>()?, DynamoMode::ReduceOverhead);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    #[derive(Default)]
    DynamoMode, "dynamo mode" {
        /// Between speed and the time that compiling takes. The default.
        #[default]
        Default = "default",
        /// Fewer launches, by CUDA graphs.
        ReduceOverhead = "reduce-overhead",
        /// The fastest of several kernels.
        MaxAutotune = "max-autotune",
        /// The same without CUDA graphs.
        MaxAutotuneNoCudagraphs = "max-autotune-no-cudagraphs",
    }
}

/// Which compiler prepared models go through, and how (`TorchDynamoPlugin` of the reference, `utils/dataclasses.py`).
///
/// What is `None` is taken from the launcher's variables `ACCELERATE_DYNAMO_*`, else from the defaults.
///
/// ```
/// use accelerate_core::config::{Compilation, DynamoBackend, TorchDynamoPlugin};
/// let plugin = TorchDynamoPlugin { backend: Some(DynamoBackend::Ts), ..Default::default() };
/// assert_eq!(plugin.compilation()?, Compilation::TorchScript);
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TorchDynamoPlugin {
    /// The compiler. Default `None`: `ACCELERATE_DYNAMO_BACKEND`, else "no".
    pub backend: Option<DynamoBackend>,
    /// How hard it tries. Default `None`: `ACCELERATE_DYNAMO_MODE`, else "default".
    pub mode: Option<DynamoMode>,
    /// Fail where a model cannot be compiled as a whole. Default `None`: `ACCELERATE_DYNAMO_USE_FULLGRAPH`, else false.
    pub fullgraph: Option<bool>,
    /// Compile for any shape (true) or for each shape anew (false). Default `None`: `ACCELERATE_DYNAMO_USE_DYNAMIC`, else
    /// left to the compiler.
    pub dynamic: Option<bool>,
    /// Options of the compiler by name. Default `None`.
    pub options: Option<Map<String, Value>>,
    /// Compile nothing, whatever the other fields say, for comparisons. Default false.
    pub disable: bool,
    /// Compile the repeated blocks of a model only. Default `None`: `ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION`, else
    /// false.
    pub use_regional_compilation: Option<bool>,
}

/// What is done to models: the decision that [`TorchDynamoPlugin::compilation`] takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compilation {
    /// Nothing.
    #[default]
    None,
    /// Models are TorchScript files.
    TorchScript,
    /// Models are packages of AOTInductor.
    AotInductor,
    /// Forward passes are captured in CUDA graphs.
    CudaGraphs,
}

impl TorchDynamoPlugin {
    /// What the launcher's variables say; what they do not mention is `None`. Variables that are set but empty count as
    /// not set.
    ///
    /// # Errors
    ///
    /// [`Error::is_environment`](crate::Error::is_environment), naming the variable, its value and what it must be.
    ///
    /// ```
    /// use accelerate_core::config::{DynamoBackend, TorchDynamoPlugin};
    /// let lookup = |name: &str| (name == "ACCELERATE_DYNAMO_BACKEND").then(|| "TS".to_owned());
    /// let plugin = TorchDynamoPlugin::from_environment(&lookup)?;
    /// assert_eq!((plugin.backend, plugin.mode), (Some(DynamoBackend::Ts), None));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn from_environment(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let text = |name: &str| lookup(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let flag = |name: &str| match text(name) {
            None => Ok(None),
            Some(value) => match str_to_bool(&value) {
                Some(flag) => Ok(Some(flag)),
                None => Err(wrong(name, value, "one of y, yes, t, true, on, 1 or n, no, f, false, off, 0")),
            },
        };
        let (backend, mode) = ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE");
        Ok(Self {
            backend: match text(backend) {
                Some(value) => Some(value.parse().map_err(|cause| {
                    wrong(backend, value, "a dynamo backend, such as no, eager, ts or aot_inductor").caused_by(cause)
                })?),
                None => None,
            },
            mode: match text(mode) {
                Some(value) => Some(value.parse().map_err(|cause| {
                    wrong(mode, value, "one of default, reduce-overhead, max-autotune").caused_by(cause)
                })?),
                None => None,
            },
            fullgraph: flag("ACCELERATE_DYNAMO_USE_FULLGRAPH")?,
            dynamic: flag("ACCELERATE_DYNAMO_USE_DYNAMIC")?,
            options: None,
            disable: false,
            use_regional_compilation: flag("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")?,
        })
    }

    /// Fills what is `None` from `other`.
    ///
    /// ```
    /// use accelerate_core::config::{DynamoBackend, TorchDynamoPlugin};
    /// let given = TorchDynamoPlugin { fullgraph: Some(false), ..Default::default() };
    /// let launcher =
    ///     TorchDynamoPlugin { backend: Some(DynamoBackend::Ts), fullgraph: Some(true), ..Default::default() };
    /// let both = given.or(launcher);
    /// assert_eq!((both.backend, both.fullgraph), (Some(DynamoBackend::Ts), Some(false)));
    /// ```
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            backend: self.backend.or(other.backend),
            mode: self.mode.or(other.mode),
            fullgraph: self.fullgraph.or(other.fullgraph),
            dynamic: self.dynamic.or(other.dynamic),
            options: self.options.or(other.options),
            disable: self.disable || other.disable,
            use_regional_compilation: self.use_regional_compilation.or(other.use_regional_compilation),
        }
    }

    /// What is to be done to models.
    ///
    /// Settings that ask for nothing (mode "default", `fullgraph` false, `dynamic` false, no options), which a launcher
    /// writes whether they were asked for or not, go with every backend.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): a backend that needs Python; a setting that the backend has no use
    /// for, by name.
    ///
    /// ```
    /// use accelerate_core::config::{DynamoBackend, TorchDynamoPlugin};
    /// let plugin = TorchDynamoPlugin { backend: Some(DynamoBackend::Inductor), ..Default::default() };
    /// assert!(plugin.compilation().unwrap_err().to_string().contains("needs Python"));
    /// ```
    pub fn compilation(&self) -> Result<Compilation> {
        if self.disable {
            return Ok(Compilation::None);
        }
        let backend = self.backend.unwrap_or_default();
        let (compilation, why) = match backend {
            DynamoBackend::No => (Compilation::None, "nothing is compiled; choose a backend with it"),
            DynamoBackend::Eager => (Compilation::None, "nothing is compiled"),
            DynamoBackend::Ts => (
                Compilation::TorchScript,
                "a TorchScript file is compiled as a whole, for all shapes, when it is saved",
            ),
            DynamoBackend::AotInductor => {
                (Compilation::AotInductor, "a package is compiled when it is made; say it there")
            }
            DynamoBackend::Cudagraphs => {
                (Compilation::CudaGraphs, "a CUDA graph repeats one forward pass as it was, for one shape")
            }
            backend => return Err(ConfigErrorKind::DynamoNeedsPython { backend: backend.as_str() }.into()),
        };
        match self.first_wish() {
            Some((field, found)) => {
                Err(ConfigErrorKind::DynamoSetting { field, found, backend: backend.as_str(), why }.into())
            }
            None => Ok(compilation),
        }
    }

    /// The first setting that asks for something.
    fn first_wish(&self) -> Option<(&'static str, String)> {
        let wanted = |flag: Option<bool>| flag == Some(true);
        if let Some(mode) = self.mode.filter(|&mode| mode != DynamoMode::Default) {
            return Some(("mode", format!("\"{mode}\"")));
        }
        if wanted(self.fullgraph) {
            return Some(("fullgraph", "true".to_owned()));
        }
        if wanted(self.dynamic) {
            return Some(("dynamic", "true".to_owned()));
        }
        if let Some(options) = self.options.as_ref().filter(|options| !options.is_empty()) {
            return Some(("options", Value::Object(options.clone()).to_string()));
        }
        wanted(self.use_regional_compilation).then(|| ("use_regional_compilation", "true".to_owned()))
    }
}

impl From<DynamoBackend> for TorchDynamoPlugin {
    fn from(backend: DynamoBackend) -> Self {
        Self { backend: Some(backend), ..Self::default() }
    }
}

fn wrong(name: &str, value: String, wanted: &'static str) -> crate::Error {
    EnvironmentErrorKind::Value { name: name.to_owned(), value, wanted }.into()
}
