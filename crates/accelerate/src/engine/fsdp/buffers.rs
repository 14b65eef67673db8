//! Memory for unsharded units, used again and again: taking it from the system anew for every gather costs more than the gather.

use crate::error::Result;
use std::sync::{Mutex, PoisonError};
use tch::{Device, Kind, Tensor};
use torch_ext::storage::{release_pages, storage_use_count};

/// What the C library never keeps for later: `DEFAULT_MMAP_THRESHOLD_MAX` of glibc.
const LARGE_BYTES: usize = 32 << 20;

/// Flat tensors, each in use as long as anything looks at its memory: parameters, graphs, unfinished collectives.
///
/// There are as many as were ever in use at once, but for large ones: those are taken from the system and given back
/// every time, which the C library does with them anyway, and which is little against what it takes to fill them. While
/// one is in use a rank needs the most memory, so idle buffers lend theirs to the system then.
///
/// On a GPU a buffer that nobody on the host looks at may still be read by work that waits in a stream. The next unit's work is behind it
/// in the same stream: nothing here changes the current stream, an operation of the backward pass runs on that of the forward pass, and
/// collectives wait for it before they begin.
#[derive(Default)]
pub(super) struct Buffers(Mutex<Vec<Tensor>>);

impl Buffers {
    /// A flat tensor with anything in it: an idle buffer of this size, or a new one.
    pub(super) fn take(&self, num_elements: usize, (kind, device): (Kind, Device)) -> Result<Tensor> {
        let fits = |buffer: &&Tensor| {
            num_elements == buffer.numel()
                && buffer.device() == device
                && buffer.f_kind().is_ok_and(|own| own == kind)
                && is_idle(buffer)
        };
        let size = num_elements as i64;
        // A list that only grows: whole after every statement.
        let mut buffers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if LARGE_BYTES <= num_elements * kind.elt_size_in_bytes() {
            buffers.iter().filter(|buffer| is_idle(buffer)).for_each(release_pages);
            return Ok(Tensor::f_empty([size], (kind, device))?);
        }
        if let Some(buffer) = buffers.iter().find(fits) {
            return Ok(buffer.f_narrow(0, 0, size)?);
        }
        let buffer = Tensor::f_empty([size], (kind, device))?;
        // A view counts as a user of the memory; a clone of the handle would not.
        let all = buffer.f_narrow(0, 0, size)?;
        buffers.push(buffer);
        Ok(all)
    }

    #[cfg(test)]
    #[allow(clippy::unwrap_used)]
    pub(super) fn num_in_use(&self) -> usize {
        self.0.lock().unwrap().iter().filter(|buffer| !is_idle(buffer)).count()
    }

    #[cfg(test)]
    #[allow(clippy::unwrap_used)]
    pub(super) fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

/// Does nobody but the list look at it?
fn is_idle(buffer: &Tensor) -> bool {
    storage_use_count(buffer) == 1
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

    #[test]
    fn what_is_in_use_is_never_handed_out() {
        let buffers = Buffers::default();
        let small = buffers.take(4, FLOAT).unwrap();
        let large = buffers.take(8, FLOAT).unwrap();
        let view = small.narrow(0, 1, 2).detach();
        drop(small);
        let other = buffers.take(3, FLOAT).unwrap();
        assert_eq!((buffers.len(), buffers.num_in_use()), (3, 3), "a view keeps a buffer in use");
        drop((view, large, other));
        assert_eq!(buffers.num_in_use(), 0);
        let fitting = buffers.take(4, FLOAT).unwrap();
        assert_eq!((fitting.numel(), buffers.take(8, FLOAT).unwrap().numel()), (4, 8));
        assert_eq!(buffers.len(), 3, "nothing new was needed");
        let _double = buffers.take(8, (Kind::Double, Device::Cpu)).unwrap();
        assert_eq!(buffers.len(), 4);
        let large = buffers.take(LARGE_BYTES / 4, FLOAT).unwrap();
        assert_eq!((large.numel(), buffers.len()), (LARGE_BYTES / 4, 4), "large ones are not kept");
    }

    #[test]
    fn idle_buffers_lend_their_memory_while_a_large_one_is_in_use() {
        let buffers = Buffers::default();
        let (mut idle, mut in_use) = (buffers.take(1 << 16, FLOAT).unwrap(), buffers.take(1 << 16, FLOAT).unwrap());
        let _ = (idle.fill_(1.0), in_use.fill_(2.0));
        drop(idle);
        let _large = buffers.take(LARGE_BYTES / 4, FLOAT).unwrap();
        let again = buffers.take(1 << 16, FLOAT).unwrap();
        // What the system hands out is zeros.
        assert_eq!(again.double_value(&[1 << 15]), if cfg!(target_os = "linux") { 0.0 } else { 1.0 });
        assert_eq!(in_use, in_use.full_like(2.0));
    }
}
