//! What `tch` leaves out of libtorch.

pub mod amp;
pub mod autocast;
pub mod autograd;
mod border;
mod deterministic;
mod error;
pub mod foreach;
pub mod function;
pub mod fused;
pub mod generator;
pub mod hooks;
mod kinds;
pub mod meta;
mod nccl;
mod process_group;
pub mod profiler;
mod reducer;
pub mod saved_tensors;
pub mod storage;
mod store;
mod work;

pub use autocast::{Autocast, AutocastGuard};
pub use autograd::{CallbackResult, GradOptions};
pub use deterministic::{are_deterministic_algorithms_enabled, use_deterministic_algorithms};
pub use error::{Error, Result};
pub use function::apply_function;
pub use generator::Generator;
pub use hooks::HookHandle;
pub use kinds::{kind_from_scalar_type, scalar_type};
pub use nccl::NcclOptions;
pub use process_group::{GlooInterface, GlooOptions, ProcessGroup, ReduceOp};
pub use reducer::{GradBucket, Reducer, ReducerOptions, compute_bucket_assignment_by_size};
pub use store::{Store, TcpStoreOptions};
pub use work::Work;
