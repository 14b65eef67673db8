//! Which device keeps which module of a model that one device cannot keep: decided from names and sizes, without libtorch.
//!
//! A map says for paths of modules whether an accelerator, the memory of the CPU or a disk keeps their tensors. The tree of
//! modules is the tree of the paths of parameters. Method and answers are those of the reference (`utils/modeling.py`), bar
//! what `docs/src/differences.md` lists.

mod balanced;
mod clean;
mod device;
mod display;
mod dtype;
mod infer;
mod map;
mod max_memory;
mod pattern;
mod queue;
mod tree;

pub use balanced::{DeviceMapStrategy, get_balanced_memory};
pub use clean::clean_device_map;
pub use device::MapDevice;
pub use display::DeviceMapTable;
pub use dtype::ElementType;
pub use infer::{InferOptions, InferredDeviceMap, infer_auto_device_map};
pub use map::{DeviceMap, check_device_map};
pub use max_memory::{MachineMemory, MaxMemory, get_max_memory};
pub use tree::{MapTensor, ModuleTree, SizeOptions};
