//! Which compiler models go through.

use crate::Result;
use crate::error::config::ConfigErrorKind;
use crate::names::spelled_enum;
use crate::settings::record::record;
use serde_json::{Map, Value};

spelled_enum! {
    /// A compiler of models (`DynamoBackend` of the reference, `utils/dataclasses.py`, and two more that need no Python).
    ///
    /// All names of the reference are known, so that its files and variables can be read; which of them can be used,
    /// [`DynamoSettings::compilation`] says.
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
        /// Packages of AOTInductor; not among the reference's names.
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

record! {
    /// Which compiler prepared models go through, and how (`TorchDynamoPlugin` of the reference, `utils/dataclasses.py`).
    ///
    /// ```
    /// use accelerate_core::config::{Compilation, DynamoBackend, DynamoSettings, TorchDynamoPlugin};
    /// let plugin = TorchDynamoPlugin { backend: Some(DynamoBackend::Ts), ..Default::default() };
    /// assert_eq!(DynamoSettings::from(plugin).compilation()?, Compilation::TorchScript);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    TorchDynamoPlugin => DynamoSettings, section "dynamo_config", keys "dynamo_", variables "ACCELERATE_DYNAMO_" {
        /// The compiler of models: no, eager, ts (TorchScript files), aot_inductor (packages).
        ///
        /// Default "no". The names of the reference's compilers are known too; those need Python.
        backend: DynamoBackend = DynamoBackend::No => setting().flag("dynamo_backend").seed_default("inductor");
        /// How hard the compiler tries: default, reduce-overhead, max-autotune.
        ///
        /// Default "default".
        mode: DynamoMode = DynamoMode::Default => setting().flag("dynamo_mode").seed_default("None");
        /// Fail where a model cannot be compiled as a whole.
        ///
        /// Default false.
        fullgraph: bool = false => setting()
            .keys(&["use_fullgraph", "fullgraph"]).variable("ACCELERATE_DYNAMO_USE_FULLGRAPH")
            .flag("dynamo_use_fullgraph").switch();
        /// Compile for any shape (true) or for each shape anew (false).
        ///
        /// Default: left to the compiler.
        dynamic: bool => setting()
            .keys(&["use_dynamic", "dynamic"]).variable("ACCELERATE_DYNAMO_USE_DYNAMIC")
            .flag("dynamo_use_dynamic").switch();
        /// Options of the compiler by name. Default `None`.
        options: Map<String, Value> => setting();
        /// Compile nothing, whatever the other settings say, for comparisons. Default false.
        disable: bool = false => setting();
        /// Compile the repeated blocks of a model only.
        ///
        /// Default false.
        use_regional_compilation: bool = false => setting().flag("dynamo_use_regional_compilation").switch();
    }
}

/// What is done to models: the decision that [`DynamoSettings::compilation`] takes.
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

impl DynamoSettings {
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
    /// use accelerate_core::config::{DynamoBackend, DynamoSettings};
    /// let settings = DynamoSettings { backend: DynamoBackend::Inductor, ..Default::default() };
    /// assert!(settings.compilation().unwrap_err().to_string().contains("needs Python"));
    /// ```
    pub fn compilation(&self) -> Result<Compilation> {
        if self.disable {
            return Ok(Compilation::None);
        }
        let backend = self.backend;
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
        if let Some(mode) = Some(self.mode).filter(|&mode| mode != DynamoMode::Default) {
            return Some(("mode", format!("\"{mode}\"")));
        }
        if self.fullgraph {
            return Some(("fullgraph", "true".to_owned()));
        }
        if self.dynamic == Some(true) {
            return Some(("dynamic", "true".to_owned()));
        }
        if let Some(options) = self.options.as_ref().filter(|options| !options.is_empty()) {
            return Some(("options", Value::Object(options.clone()).to_string()));
        }
        self.use_regional_compilation.then(|| ("use_regional_compilation", "true".to_owned()))
    }
}

impl From<DynamoBackend> for TorchDynamoPlugin {
    fn from(backend: DynamoBackend) -> Self {
        Self { backend: Some(backend), ..Self::default() }
    }
}
