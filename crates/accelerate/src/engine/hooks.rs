//! Communication hooks of data parallelism: what travels in place of full-precision gradients.

use super::comm_hook::CommHook;
use super::power_sgd::PowerSgd;
use crate::error::{Result, StateError};
use crate::group::Group;
use accelerate_core::config::{
    Callback, DDPCommunicationHook, DDPCommunicationHookType as Hook, DistributedDataParallelSettings,
};
use std::sync::Arc;
use tch::Kind;
use torch_ext::{ProcessGroup, Reducer};

/// Fails if the function that `kwargs` bring is no hook.
pub(super) fn check(kwargs: &DistributedDataParallelSettings) -> Result<()> {
    match &kwargs.comm_hook {
        DDPCommunicationHook::Function(function) => own_hook(function).map(drop),
        DDPCommunicationHook::Named(_) => Ok(()),
    }
}

fn own_hook(function: &Callback) -> Result<&CommHook> {
    Ok(function.downcast_ref().ok_or(StateError::NoCommHook)?)
}

/// Puts the hook that `kwargs` name or bring on the reducer of `group`, whose backend is `process_group`.
pub(super) fn register(
    reducer: &Reducer,
    (group, process_group): (&Group, &Arc<ProcessGroup>),
    kwargs: &DistributedDataParallelSettings,
) -> Result<()> {
    let wire = |hook| match hook {
        Hook::Fp16 => Some(Kind::Half),
        Hook::Bf16 => Some(Kind::BFloat16),
        Hook::No | Hook::PowerSgd | Hook::BatchedPowerSgd => None,
    };
    let wrapper = wire(kwargs.comm_wrapper);
    match &kwargs.comm_hook {
        // The reference applies a wrapper to a hook, so without a hook there is nothing to wrap.
        DDPCommunicationHook::Named(Hook::No) => Ok(()),
        DDPCommunicationHook::Named(hook @ (Hook::Fp16 | Hook::Bf16)) => {
            // Casting twice is casting to the narrower of the two; the wrapper is the outer one.
            Ok(reducer.compress(wrapper.or(wire(*hook)).unwrap_or(Kind::Half))?)
        }
        DDPCommunicationHook::Named(hook @ (Hook::PowerSgd | Hook::BatchedPowerSgd)) => {
            let state = kwargs.power_sgd_state()?;
            let mut compression = PowerSgd::new(state, process_group.clone(), *hook == Hook::BatchedPowerSgd);
            Ok(reducer.register_comm_hook(wrapper, move |bucket| Ok(compression.reduce(&bucket)?))?)
        }
        DDPCommunicationHook::Function(function) => {
            let mut hook = own_hook(function)?.begin(group);
            Ok(reducer.register_comm_hook(wrapper, move |bucket| Ok(hook(&bucket)?))?)
        }
    }
}
