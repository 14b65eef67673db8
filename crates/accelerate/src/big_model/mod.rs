//! Models that do not fit where they are computed: device maps, and parameters that are kept on several devices or a disk.
//!
//! A map says where each module is kept; [`infer_auto_device_map`] finds one for what the machine has, and [`dispatch_model`] carries it
//! out: it is a choice of storage for each parameter. Layers ask for their parameters as ever. The format on the disk is the reference's.
//!
//! To load a model that never fits into memory, see
//! [`load_checkpoint_and_dispatch`](crate::checkpoint::load_checkpoint_and_dispatch).

mod dispatch;
mod dtype;
mod fetch;
mod folder;
mod hook;
mod machine;
mod storage;
#[cfg(test)]
mod tests;
mod tree;
mod window;

pub use accelerate_core::device_map::{
    DeviceMap, DeviceMapStrategy, DeviceMapTable, ElementType, InferOptions, InferredDeviceMap, MachineMemory,
    MapDevice, MapTensor, MaxMemory, ModuleTree, SizeOptions, check_device_map, clean_device_map, get_balanced_memory,
    get_max_memory, infer_auto_device_map,
};
pub(crate) use dispatch::{Dispatch, Value};
pub use dispatch::{DispatchOptions, cpu_offload, disk_offload, dispatch_model};
pub(crate) use dtype::element_type;
pub use hook::{UserCpuOffloadHook, cpu_offload_with_hook};
pub use machine::machine_memory;
pub(crate) use machine::map_device;
pub use tree::module_tree;
pub(crate) use tree::{Taken, module_tree_of, taken};
