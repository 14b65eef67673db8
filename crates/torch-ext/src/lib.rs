//! What `tch` leaves out of libtorch.

mod border;
mod error;
mod process_group;
mod reducer;
mod store;

pub use error::{Error, Result};
pub use process_group::{GlooInterface, GlooOptions, ProcessGroup, ReduceOp, Work};
pub use reducer::{GradBucket, Reducer, ReducerOptions, compute_bucket_assignment_by_size};
pub use store::{Store, TcpStoreOptions};
