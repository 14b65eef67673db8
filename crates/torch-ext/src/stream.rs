//! Queues of a device's work: which one operations go to, and how one waits for another.
//!
//! Work of one stream is done in the order in which it was asked for; that of two streams in any, unless one
//! [waits](Stream::wait_for). libtorch gives the memory of a tensor that is gone to the next one *of the same stream* at once, because
//! there the order protects it. So a tensor that another stream uses has to be [told](Stream::record_use) to that stream, and memory that
//! a program keeps for using it again is safe on one stream only.
//!
//! Each thread has a current stream for each device, at first the default one. A backward pass runs each operation on the stream of its
//! forward pass. Everything on the CPU is done when it is asked for: there is one stream, and waiting for it is nothing.

use crate::border::{Handle, check, handle};
use crate::device::index_of;
use crate::error::Result;
use std::marker::PhantomData;
use tch::{Device, Tensor};

unsafe extern "C" {
    fn te_stream_current(index: i32, id: *mut i64) -> i32;
    fn te_stream_default(index: i32, id: *mut i64) -> i32;
    fn te_stream_from_pool(index: i32, id: *mut i64) -> i32;
    fn te_stream_enter(index: i32, id: i64, previous_device: *mut i32, previous_id: *mut i64) -> i32;
    fn te_stream_leave(index: i32, previous_device: i32, previous_id: i64) -> i32;
    fn te_stream_wait(index: i32, id: i64, other_index: i32, other: i64) -> i32;
    fn te_stream_synchronize(index: i32, id: i64) -> i32;
    fn te_stream_record_use(index: i32, id: i64, tensor: Handle) -> i32;
    fn te_device_synchronize(index: i32) -> i32;
}

/// A stream of a device (`torch.cuda.Stream`); the one that there is, on the CPU. It is a number: libtorch owns streams, and keeps all
/// that it has made.
///
/// ```
/// use tch::Device;
/// use torch_ext::stream::Stream;
///
/// let (current, side) = (Stream::current(Device::Cpu)?, Stream::from_pool(Device::Cpu)?);
/// side.wait_for(&current)?;
/// let sum = side.run(|| tch::Tensor::from_slice(&[1f32, 2.0]).sum(tch::Kind::Float))?;
/// current.wait_for(&side)?;
/// side.record_use(&sum)?;
/// assert_eq!(sum.double_value(&[]), 3.0);
/// # Ok::<(), torch_ext::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    place: Place,
    id: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Cpu,
    /// The index, as libtorch counts.
    Cuda(i32),
}

impl Place {
    fn of(operation: &'static str, device: Device) -> Result<Self> {
        if device == Device::Cpu { Ok(Self::Cpu) } else { index_of(operation, device).map(Self::Cuda) }
    }
}

impl Stream {
    /// The one that operations of this thread go to.
    ///
    /// # Errors
    /// A device that is neither the CPU nor a CUDA device of this process (`is_invalid_argument`).
    pub fn current(device: Device) -> Result<Self> {
        Self::found("Stream::current", device, te_stream_current)
    }

    /// The one that operations go to where nobody has asked for another one.
    ///
    /// # Errors
    /// As [`current`](Self::current).
    pub fn default_of(device: Device) -> Result<Self> {
        Self::found("Stream::default_of", device, te_stream_default)
    }

    /// Another one, of the 32 that libtorch hands out in turns.
    ///
    /// # Errors
    /// As [`current`](Self::current).
    pub fn from_pool(device: Device) -> Result<Self> {
        Self::found("Stream::from_pool", device, te_stream_from_pool)
    }

    fn found(
        operation: &'static str,
        device: Device,
        find: unsafe extern "C" fn(i32, *mut i64) -> i32,
    ) -> Result<Self> {
        let place = Place::of(operation, device)?;
        let mut id = 0;
        if let Place::Cuda(index) = place {
            // SAFETY: `find` is one of the three functions above, which take an index and fill a place.
            check(operation, unsafe { find(index, &raw mut id) })?;
        }
        Ok(Self { place, id })
    }

    /// Whose work it is.
    pub fn device(&self) -> Device {
        match self.place {
            Place::Cpu => Device::Cpu,
            Place::Cuda(index) => Device::Cuda(index.max(0) as usize),
        }
    }

    /// Operations of this thread go here until the guard is dropped; its device is the current one meanwhile.
    ///
    /// # Errors
    /// None that is expected.
    pub fn enter(&self) -> Result<StreamGuard> {
        let mut previous = None;
        if let Place::Cuda(index) = self.place {
            let (mut device, mut id) = (0, 0);
            // SAFETY: plain values in, two places of ours out.
            check("Stream::enter", unsafe { te_stream_enter(index, self.id, &raw mut device, &raw mut id) })?;
            previous = Some((index, device, id));
        }
        Ok(StreamGuard { previous, this_thread: PhantomData })
    }

    /// Runs `body` with this as the current stream.
    ///
    /// # Errors
    /// As [`enter`](Self::enter).
    pub fn run<R>(&self, body: impl FnOnce() -> R) -> Result<R> {
        let _guard = self.enter()?;
        Ok(body())
    }

    /// What is asked of this stream from here on begins once `other` has done what was asked of it so far. The host does not wait.
    ///
    /// # Errors
    /// Work of before failed.
    pub fn wait_for(&self, other: &Stream) -> Result<()> {
        match (self.place, other.place) {
            // SAFETY: plain values; the ids are libtorch's.
            (Place::Cuda(index), Place::Cuda(other_index)) => {
                check("Stream::wait_for", unsafe { te_stream_wait(index, self.id, other_index, other.id) })
            }
            // The host has done what it was asked for. What waits for a device on the host waits here.
            (Place::Cpu, Place::Cuda(_)) => other.synchronize(),
            (_, Place::Cpu) => Ok(()),
        }
    }

    /// Waits here until all that was asked of it is done.
    ///
    /// # Errors
    /// Work of before failed.
    pub fn synchronize(&self) -> Result<()> {
        match self.place {
            Place::Cpu => Ok(()),
            // SAFETY: plain values; the id is libtorch's.
            Place::Cuda(index) => check("Stream::synchronize", unsafe { te_stream_synchronize(index, self.id) }),
        }
    }

    /// This stream uses the tensor, which was made on another one: once it is gone, nobody gets its memory before this stream has done
    /// what was asked of it until then (`Tensor.record_stream`).
    ///
    /// # Errors
    /// The tensor is on another kind of device.
    pub fn record_use(&self, tensor: &Tensor) -> Result<()> {
        match self.place {
            Place::Cpu => Ok(()),
            // SAFETY: the handle is borrowed for the call.
            Place::Cuda(index) => {
                check("Stream::record_use", unsafe { te_stream_record_use(index, self.id, handle(tensor)) })
            }
        }
    }
}

/// While it lives, operations of this thread go to the stream that was [entered](Stream::enter). Guards are dropped in the reverse
/// order of their making, as scopes do by themselves.
#[derive(Debug)]
#[must_use = "the stream is left when the guard is dropped"]
pub struct StreamGuard {
    /// The device's index, the device that was the current one, and the stream that was.
    previous: Option<(i32, i32, i64)>,
    /// Current streams belong to the thread.
    this_thread: PhantomData<*const ()>,
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        if let Some((index, device, id)) = self.previous {
            // SAFETY: values that libtorch gave, so it cannot refuse them.
            unsafe { te_stream_leave(index, device, id) };
        }
    }
}

/// Waits here until all streams of a device have done what was asked of them (`torch.cuda.synchronize`). Nothing on the CPU.
///
/// ```
/// torch_ext::stream::synchronize(tch::Device::Cpu)?;
/// # Ok::<(), torch_ext::Error>(())
/// ```
///
/// # Errors
/// Work of before failed; a device as in [`Stream::current`].
pub fn synchronize(device: Device) -> Result<()> {
    match Place::of("synchronize", device)? {
        Place::Cpu => Ok(()),
        // SAFETY: a plain value.
        Place::Cuda(index) => check("synchronize", unsafe { te_device_synchronize(index) }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_has_one_stream_and_other_devices_are_refused() {
        let of_cpu = [Stream::current(Device::Cpu), Stream::default_of(Device::Cpu), Stream::from_pool(Device::Cpu)];
        let [current, other, pooled] = of_cpu.map(Result::unwrap);
        assert!(current == other && other == pooled && current.device() == Device::Cpu);
        drop(current.enter().unwrap());
        for device in [Device::Mps, Device::Cuda(usize::MAX), Device::Cuda(tch::Cuda::device_count() as usize)] {
            for found in [Stream::current(device).map(drop), synchronize(device)] {
                assert!(found.unwrap_err().is_invalid_argument(), "{device:?}");
            }
        }
    }
}
