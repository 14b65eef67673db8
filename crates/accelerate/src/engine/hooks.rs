//! Communication hooks of data parallelism: what travels in place of full-precision gradients.

use super::power_sgd::PowerSgd;
use crate::error::Result;
use accelerate_core::config::{DDPCommunicationHookType as Hook, DistributedDataParallelSettings};
use std::sync::Arc;
use tch::Kind;
use torch_ext::{ProcessGroup, Reducer};

/// Puts the hook that `kwargs` name on the reducer.
pub(super) fn register(
    reducer: &Reducer,
    group: &Arc<ProcessGroup>,
    kwargs: &DistributedDataParallelSettings,
) -> Result<()> {
    let wire = |hook| match hook {
        Hook::Fp16 => Some(Kind::Half),
        Hook::Bf16 => Some(Kind::BFloat16),
        Hook::No | Hook::PowerSgd | Hook::BatchedPowerSgd => None,
    };
    match kwargs.comm_hook {
        // The reference applies a wrapper to a hook, so without a hook there is nothing to wrap.
        Hook::No => Ok(()),
        Hook::Fp16 | Hook::Bf16 => {
            // Casting twice is casting to the narrower of the two; the wrapper is the outer one.
            let kind = wire(kwargs.comm_wrapper).or(wire(kwargs.comm_hook)).unwrap_or(Kind::Half);
            Ok(reducer.compress(kind)?)
        }
        hook @ (Hook::PowerSgd | Hook::BatchedPowerSgd) => {
            let state = kwargs.power_sgd_state()?;
            let mut compression = PowerSgd::new(state, group.clone(), hook == Hook::BatchedPowerSgd);
            Ok(reducer.register_comm_hook(wire(kwargs.comm_wrapper), move |bucket| Ok(compression.reduce(&bucket)?))?)
        }
    }
}
