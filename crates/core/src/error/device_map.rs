//! What can be wrong with a device map.

use crate::device_map::MapDevice;
use crate::weight_files::{listed, shown};

/// What a message has room for of a list of names.
const LIST_BYTES: usize = 600;

#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceMapErrorKind {
    #[error(
        "{:?} is not a device of a device map; write the index of an accelerator (0 or \"cuda:0\"), \"mps\", \"cpu\" or \"disk\"",
        shown(found)
    )]
    Device { found: String },
    #[error(
        "this is not a device map: {reason}; write an object of paths and devices, {{\"embed\": 0, \"layers\": \"cpu\"}}"
    )]
    Json { reason: String },
    #[error("max_memory names the device {device} twice; say once how much it may keep")]
    DeviceTwice { device: MapDevice },
    #[error(
        "{:?} is not an element type; write PyTorch's name, such as \"float16\", \"bfloat16\" or \"int8\", or \"int4\" or \"fp8\"",
        shown(found)
    )]
    ElementType { found: String },
    #[error("the name `{}` {problem}; each tensor of a model has a name of its own below its module", shown(name))]
    Name { name: String, problem: &'static str },
    #[error("`{}` is tied to `{}`, which is not the first name of a parameter of the model", shown(name), shown(first))]
    TiedToNothing { name: String, first: String },
    #[error(
        "the device map does not give any device for {} tensors: {}. Name their modules in it, or give the empty path a device \
         for all that is not named",
        missing.len(), listed(missing, LIST_BYTES)
    )]
    NotCovered { missing: Vec<String> },
}
