//! Parameters, where they live, and the layers that compute with them.
//!
//! - [`Param`] is a cheap handle on one parameter or buffer. Layers ask it for the tensor to compute
//!   with; *how* it is stored (replicated, sharded, offloaded) is a strategy behind the handle.
//! - [`ParamStore`] owns all of them by name, [`Path`] makes them: `&path / "encoder" / 0`. Names equal
//!   the keys of PyTorch's `state_dict`, so weight files are exchanged by name.
//! - Layers are plain structs with public fields; a model is whatever struct holds them and implements
//!   [`Module`].
//! - [`ScriptModule`] is a TorchScript file as a model; [`ExportedModule`] is a model compiled ahead of time with its backward pass, and
//!   [`AotInductorModule`] one without.
//! - [`init`] holds PyTorch's initialisations: the same seed gives the same bits.
//!
//! ```
//! use accelerate::nn::{Linear, Module, ParamStore};
//! use accelerate::tch::{Device, Kind, Tensor};
//!
//! struct Classifier { store: ParamStore, hidden: Linear, output: Linear }
//!
//! impl Module for Classifier {
//!     type Input = Tensor;
//!     type Output = Tensor;
//!     fn forward(&self, input: &Tensor) -> accelerate::Result<Tensor> {
//!         self.output.forward(&self.hidden.forward(input)?.f_relu()?)
//!     }
//!     fn params(&self) -> &ParamStore { &self.store }
//! }
//!
//! let store = ParamStore::new(Device::Cpu);
//! let path = store.root();
//! let model = Classifier {
//!     hidden: Linear::new(&path / "hidden", 4, 8, Default::default())?,
//!     output: Linear::new(&path / "output", 8, 2, Default::default())?,
//!     store,
//! };
//! let logits = model.forward(&Tensor::ones([3, 4], (Kind::Float, Device::Cpu)))?;
//! assert_eq!(logits.size(), [3, 2]);
//! assert_eq!(model.params().parameters()[0].name(), "hidden.weight");
//! # Ok::<(), accelerate::Error>(())
//! ```

mod activation;
mod activation_checkpointing;
mod aot_inductor;
mod attention;
mod attention_kernel;
mod batch_norm;
mod compiled;
mod conv;
mod conv1d_linear;
mod conv_transpose;
mod deferred;
mod deferred_weight_grad;
mod dropout;
mod embedding;
mod exported_module;
mod float8;
mod functional;
mod graphed;
pub mod init;
mod layer;
mod linear;
mod loss;
mod matching;
mod module_fn;
mod named_layers;
mod norm;
mod param;
mod path;
mod pipelined;
mod pool;
mod replicated;
mod rnn;
mod script_module;
mod sequential;
mod sharded_output;
mod sharded_state;
mod state_dict;
mod storage;
mod store;
mod sync_batch_norm;
mod tied_embedding;
mod tiled;
mod token_wise;

pub use accelerate_core::layout::Layout;
pub use activation::{Gelu, LogSoftmax, Relu, Sigmoid, Silu, Softmax, Tanh};
pub use activation_checkpointing::{CheckpointOptions, Checkpointed, checkpoint};
pub(crate) use activation_checkpointing::{is_recomputing, while_checkpointing, while_recomputing};
pub use aot_inductor::AotInductorModule;
pub use attention::{AttentionMask, InProjection, MultiheadAttention, MultiheadAttentionConfig};
pub(crate) use attention_kernel::RefuseWholeAttention;
pub use attention_kernel::{
    AttentionKernel, AttentionOptions, DenseAttention, DividedSequence, ScaledDotProductAttention,
};
pub use batch_norm::{AnyBatchNorm, BatchNorm, BatchNorm1d, BatchNorm2d, BatchNormConfig};
pub use compiled::FromTensors;
pub use conv::{Conv, Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, ConvConfig, Padding};
pub use conv_transpose::{ConvTranspose, ConvTranspose1d, ConvTranspose2d, ConvTransposeConfig};
pub use conv1d_linear::{Conv1D, Conv1DConfig};
pub(crate) use conv1d_linear::{LinearLayer, TransposedKernel};
pub use deferred::ParamInitFn;
pub(crate) use deferred_weight_grad::{DeferWeightGrad, DeferredWeightGrad};
pub use dropout::Dropout;
pub(crate) use embedding::{AroundEmbedding, padding_row};
pub use embedding::{DenseEmbeddingKernel, Embedding, EmbeddingConfig, EmbeddingKernel};
pub use exported_module::ExportedModule;
pub(crate) use float8::{Float8Codes, float8_scale};
#[doc(hidden)]
pub use graphed::{CudaGraphs, GraphedModule, Recorder};
pub use init::Init;
pub(crate) use init::{default_bias, is_floating};
pub(crate) use layer::forward_error;
pub use layer::{Layer, Module};
pub(crate) use linear::{AroundLinear, InnerPlace};
pub use linear::{DenseKernel, Linear, LinearConfig, LinearKernel};
pub use loss::{BCEWithLogitsLoss, CrossEntropyLoss, KLDivLoss, KLDivReduction, MSELoss};
pub(crate) use matching::{found_twice, match_names, memory_of};
pub use module_fn::ModuleFn;
pub use named_layers::AnyLayer;
pub use norm::{GroupNorm, GroupNormConfig, LayerNorm, LayerNormConfig, RMSNorm, RMSNormConfig};
pub use param::Param;
pub(crate) use param::{Role, WeakParam};
pub use path::{BufferOptions, Initial, Path, PathName};
pub use pipelined::Pipelined;
pub use pool::{AdaptiveAvgPool2d, AvgPool2d, Flatten, MaxPool2d};
pub use rnn::{GRU, LSTM, RNNConfig};
pub use script_module::ScriptModule;
pub use sequential::Sequential;
pub use sharded_output::ShardedOutput;
pub use sharded_state::ShardedStateDict;
pub(crate) use sharded_state::{Pieces, assemble, flat_elements};
pub use state_dict::{LoadReport, LoadStateDictOptions, StateDict};
pub(crate) use storage::{Resident, Storage, UnitMember};
pub use store::{ParamStore, TrainingFlag};
pub use tiled::{CrossEntropyHead, tiled, tiled_cross_entropy};
pub(crate) use token_wise::AroundTokens;
pub use token_wise::TokenWise;
pub use torch_ext::InputSpec;
