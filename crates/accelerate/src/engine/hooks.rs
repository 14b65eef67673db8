//! Communication hooks of data parallelism: what travels in place of full-precision gradients.

use super::comm_hook::CommHook;
use super::power_sgd::PowerSgd;
use crate::error::{Result, StateError};
use crate::group::Group;
use accelerate_core::config::{
    Callback, DDPCommunicationHook, DDPCommunicationHookType as Hook, DistributedDataParallelSettings,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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

/// A PowerSGD hook, which outlives the reducers that it is put on.
pub(super) type SharedPowerSgd = Arc<Mutex<PowerSgd>>;

/// The PowerSGD hook that `kwargs` name, if they do.
pub(super) fn power_sgd(
    kwargs: &DistributedDataParallelSettings,
    process_group: &Arc<ProcessGroup>,
) -> Result<Option<SharedPowerSgd>> {
    let DDPCommunicationHook::Named(hook @ (Hook::PowerSgd | Hook::BatchedPowerSgd)) = &kwargs.comm_hook else {
        return Ok(None);
    };
    let (state, is_batched) = (kwargs.power_sgd_state()?, *hook == Hook::BatchedPowerSgd);
    Ok(Some(Arc::new(Mutex::new(PowerSgd::new(state, process_group.clone(), is_batched)))))
}

pub(super) fn lock(power_sgd: &Mutex<PowerSgd>) -> MutexGuard<'_, PowerSgd> {
    // A backward pass that panicked has failed on this rank, and says so.
    power_sgd.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Puts the hook that `kwargs` name or bring on the reducer of `group`. Without one, where ranks share memory, that is one that
/// reads the others' gradients in place of sending.
pub(super) fn register(
    reducer: &Reducer,
    group: &Group,
    kwargs: &DistributedDataParallelSettings,
    (power_sgd, shares_memory): (Option<&SharedPowerSgd>, bool),
) -> Result<()> {
    let wire = |hook| match hook {
        Hook::Fp16 => Some(Kind::Half),
        Hook::Bf16 => Some(Kind::BFloat16),
        Hook::No | Hook::PowerSgd | Hook::BatchedPowerSgd => None,
    };
    let wrapper = wire(kwargs.comm_wrapper);
    match &kwargs.comm_hook {
        // The reference applies a wrapper to a hook, so without a hook there is nothing to wrap.
        DDPCommunicationHook::Named(Hook::No) if shares_memory => {
            let group = group.clone();
            Ok(reducer.register_comm_hook(None, move |bucket| {
                group.mean_of_gradients(bucket.buffer)?;
                Ok(Some(bucket.buffer.shallow_clone()))
            })?)
        }
        DDPCommunicationHook::Named(Hook::No) => Ok(()),
        DDPCommunicationHook::Named(hook @ (Hook::Fp16 | Hook::Bf16)) => {
            // Casting twice is casting to the narrower of the two; the wrapper is the outer one.
            Ok(reducer.compress(wrapper.or(wire(*hook)).unwrap_or(Kind::Half))?)
        }
        DDPCommunicationHook::Named(Hook::PowerSgd | Hook::BatchedPowerSgd) => {
            let Some(power_sgd) = power_sgd.cloned() else { return Ok(()) };
            Ok(reducer.register_comm_hook(wrapper, move |bucket| Ok(lock(&power_sgd).reduce(&bucket)?))?)
        }
        DDPCommunicationHook::Function(function) => {
            let mut hook = own_hook(function)?.begin(group);
            Ok(reducer.register_comm_hook(wrapper, move |bucket| Ok(hook(&bucket)?))?)
        }
    }
}
