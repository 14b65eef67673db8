//! The random numbers of each rank.

use super::RANDOM_STATES;
use crate::error::Result;
use crate::messages;
use crate::session::ObjectState;
use accelerate_core::weight_files::Checksum;
use tch::{Device, Tensor};
use torch_ext::Generator;

/// The states of the default generators of a rank: of the CPU's, and of its GPU's if it has one.
pub(crate) fn random_states(rank: usize, device: Device) -> Result<ObjectState> {
    let mut state = ObjectState::default();
    for (name, generator) in generators(device)? {
        state.tensors.insert(key(rank, name), generator.state()?);
    }
    Ok(state)
}

/// Lets a rank draw on where it was. A rank that the run did not have, or whose run had another number of processes, gets a
/// seed of its own, which rank 0's state and its own number decide.
pub(crate) fn restore_random_states(
    state: &ObjectState,
    rank: usize,
    is_same_size: bool,
    device: Device,
) -> Result<()> {
    for (name, generator) in generators(device)? {
        let own = state.tensors.get(&key(rank, name)).filter(|_| is_same_size);
        // Where each machine has a folder of its own, rank 0 may have written into another one.
        let first = state.tensors.get(&key(0, "cpu")).or_else(|| state.tensors.values().next());
        match (own, first) {
            (Some(own), _) => {
                generator.set_state(own).map_err(crate::Error::from).map_err(|it| it.context(RANDOM_STATES))?
            }
            (None, Some(first)) => {
                if is_same_size && state.tensors.contains_key(&key(rank, "cpu")) {
                    messages::warning_here!(
                        "the run of the checkpoint drew no random numbers for {name} devices; new ones are drawn"
                    );
                } else if is_same_size {
                    messages::warning_here!(
                        "the random numbers of this process are in the folder of another machine, since each has those of its own \
                         processes; new ones are drawn"
                    );
                }
                generator.manual_seed(derived_seed(first, rank)?)?
            }
            (None, None) => {}
        }
    }
    Ok(())
}

fn generators(device: Device) -> Result<Vec<(&'static str, Generator)>> {
    let mut generators = vec![("cpu", Generator::default_cpu()?)];
    if let Device::Cuda(index) = device {
        generators.push(("cuda", Generator::default_cuda(index)?));
    }
    Ok(generators)
}

fn key(rank: usize, generator: &str) -> String {
    format!("rank_{rank}.{generator}")
}

fn derived_seed(first: &Tensor, rank: usize) -> Result<u64> {
    let mut bytes = vec![0; first.numel()];
    first.f_copy_data_u8(&mut bytes, first.numel())?;
    bytes.extend((rank as u64).to_le_bytes());
    Ok(Checksum::of(&bytes).value() as u64)
}
