//! Low-rank adapters: a model is fine-tuned by small matrices beside its layers, while its own weights stay as they are.
//!
//! [`get_peft_model`] puts an adapter on layers of a model, whatever struct holds them, and freezes everything else. From then on
//! each of these layers gives `base(x) + scaling * B(A(dropout(x)))`, whatever kernel computes `base`. Optimizers, engines and
//! checkpoints see parameters as always: those of the adapter are trained, the others have `requires_grad` false. A
//! [`PeftModel`] switches between adapters, merges them and takes them away again.
//!
//! Names, numbers and files are those of Hugging Face PEFT: [`PeftModel::save_pretrained`] writes what
//! `PeftModel.from_pretrained` reads, and the other way round.
//!
//! Method: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685.
//!
//! ```
//! use accelerate::lora::{LoraConfig, get_peft_model};
//! use accelerate::nn::{Linear, ParamStore};
//! use accelerate::optim::{AdamW, Optimizer};
//! use accelerate::tch::{Device, Kind, Tensor};
//!
//! let store = ParamStore::new(Device::Cpu);
//! let query = Linear::new(store.root() / "layers" / 0 / "q_proj", 8, 8, Default::default())?;
//! let head = Linear::new(store.root() / "head", 8, 2, Default::default())?;
//!
//! let config = LoraConfig { r: 2, target_modules: Some(["q_proj"].into()), ..Default::default() };
//! let model = get_peft_model(&store, config)?;
//! assert_eq!(model.num_parameters(), (2 * 8 + 8 * 2, 8 * 8 + 8 + 8 * 2 + 2 + 32));
//!
//! let mut optimizer = AdamW::new(&store, 1e-2)?;
//! let before = query.weight.get()?.copy();
//! head.forward(&query.forward(&Tensor::ones([1, 8], (Kind::Float, Device::Cpu)))?)?.sum(None).backward();
//! optimizer.step()?;
//! assert_eq!(query.weight.get()?, before);
//! assert!(store.get("layers.0.q_proj.lora_B.default.weight").unwrap().get()?.abs().max().double_value(&[]) > 0.0);
//! # Ok::<(), accelerate::Error>(())
//! ```

mod adapter;
mod kernels;
mod layers;
mod merge;
mod model;
mod options;
mod switch;

pub use accelerate_core::lora::{ADAPTER_CONFIG, InitLoraWeights, LoraBias, LoraConfig, Modules, TaskType};
pub use model::{PeftModel, get_peft_model};
pub use options::{AddAdapterOptions, LoadAdapterOptions, SavePretrainedOptions};
