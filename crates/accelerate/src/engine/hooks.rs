//! Communication hooks of data parallelism: what travels in place of full-precision gradients.

use crate::error::{Result, StateError};
use crate::group::Group;
use accelerate_core::config::{DDPCommunicationHookType as Hook, DistributedDataParallelKwargs};
use tch::Kind;
use torch_ext::Reducer;

/// Puts the hook that `kwargs` name on the reducer.
pub(super) fn register(reducer: &Reducer, _group: &Group, kwargs: &DistributedDataParallelKwargs) -> Result<()> {
    let wire = |hook| match hook {
        Hook::Fp16 => Some(Kind::Half),
        Hook::Bf16 => Some(Kind::BFloat16),
        _ => None,
    };
    match kwargs.comm_hook {
        // The reference applies a wrapper to a hook, so without a hook there is nothing to wrap.
        Hook::No => Ok(()),
        Hook::Fp16 | Hook::Bf16 => {
            // Casting twice is casting to the narrower of the two; the wrapper is the outer one.
            let kind = wire(kwargs.comm_wrapper).or(wire(kwargs.comm_hook)).unwrap_or(Kind::Half);
            Ok(reducer.compress(kind)?)
        }
        Hook::PowerSgd | Hook::BatchedPowerSgd => Err(StateError::NotAvailable {
            feature: format!("DistributedDataParallelKwargs.comm_hook \"{}\"", kwargs.comm_hook),
            cure: "use \"fp16\" or \"bf16\"",
        }
        .into()),
    }
}
