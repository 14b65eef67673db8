//! What libtorch says of its devices: how exactly they multiply float32, and how much of their memory it has taken.

use crate::border::{Handle, adopt, check, handle, handles};
use crate::error::{Error, Result};
use std::ffi::c_char;
use tch::{Device, Tensor};

unsafe extern "C" {
    fn te_set_float32_matmul_precision(precision: *const c_char) -> i32;
    fn te_float32_matmul_precision(precision: *mut i32) -> i32;
    fn te_device_memory(index: i32, figures: *mut DeviceMemory) -> i32;
    fn te_reset_peak_device_memory(index: i32) -> i32;
    fn te_pinned_bytes(num_bytes: i64, bytes: *mut Handle) -> i32;
    fn te_pin_memory(source: Handle, result: *mut Handle) -> i32;
    fn te_copy_to_host(places: *const Handle, sources: *const Handle, count: usize) -> i32;
}

/// How exactly products of float32 matrices are computed (`torch.set_float32_matmul_precision`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MatmulPrecision {
    /// In float32. libtorch's default.
    Highest = 0,
    /// In TF32 on NVIDIA GPUs that have it: inputs are rounded to 10 bits of mantissa, sums stay float32.
    High = 1,
    /// As low as bfloat16 allows.
    Medium = 2,
}

/// From here on products of float32 matrices are computed so, in the whole process.
///
/// # Errors
/// None that is expected.
///
/// ```
/// use torch_ext::device::{MatmulPrecision, float32_matmul_precision, set_float32_matmul_precision};
///
/// assert_eq!(float32_matmul_precision()?, MatmulPrecision::Highest);
/// set_float32_matmul_precision(MatmulPrecision::High)?;
/// assert_eq!(float32_matmul_precision()?, MatmulPrecision::High);
/// set_float32_matmul_precision(MatmulPrecision::Highest)?;
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn set_float32_matmul_precision(precision: MatmulPrecision) -> Result<()> {
    let name = match precision {
        MatmulPrecision::Highest => c"highest",
        MatmulPrecision::High => c"high",
        MatmulPrecision::Medium => c"medium",
    };
    // SAFETY: the text is static and ends with a zero byte.
    check("set_float32_matmul_precision", unsafe { te_set_float32_matmul_precision(name.as_ptr()) })
}

/// How products of float32 matrices are computed now.
///
/// # Errors
/// None that is expected.
///
/// ```
/// use torch_ext::device::{MatmulPrecision, float32_matmul_precision};
/// assert_eq!(float32_matmul_precision()?, MatmulPrecision::Highest);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn float32_matmul_precision() -> Result<MatmulPrecision> {
    let mut precision = 0;
    // SAFETY: the place is ours and lives through the call.
    check("float32_matmul_precision", unsafe { te_float32_matmul_precision(&raw mut precision) })?;
    Ok(match precision {
        0 => MatmulPrecision::Highest,
        1 => MatmulPrecision::High,
        _ => MatmulPrecision::Medium,
    })
}

/// Memory of a device, in bytes, as libtorch's allocator counts it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// In tensors now.
    pub allocated_bytes: i64,
    /// In tensors at the highest, since the process began or [`reset_peak_device_memory`] was called.
    pub peak_allocated_bytes: i64,
    /// Taken from the device now: tensors, and what is kept for later ones.
    pub reserved_bytes: i64,
    /// Free on the device, whoever might use it.
    pub free_bytes: i64,
    /// What the device has.
    pub total_bytes: i64,
}

/// What of a CUDA device's memory is in use (`torch.cuda.memory_allocated` and others).
///
/// # Errors
/// A device that is not CUDA's (`is_invalid_argument`), or that this process does not have.
///
/// ```
/// use tch::Device;
/// assert!(torch_ext::device::device_memory(Device::Cpu).is_err_and(|error| error.is_invalid_argument()));
/// ```
pub fn device_memory(device: Device) -> Result<DeviceMemory> {
    const OPERATION: &str = "device_memory";
    let index = index_of(OPERATION, device)?;
    let mut figures = DeviceMemory::default();
    // SAFETY: the place is ours, has the shim's layout, and lives through the call.
    check(OPERATION, unsafe { te_device_memory(index, &raw mut figures) })?;
    Ok(figures)
}

/// Lets [`DeviceMemory::peak_allocated_bytes`] count from what is allocated now.
///
/// # Errors
/// As [`device_memory`].
///
/// ```
/// use tch::Device;
/// assert!(torch_ext::device::reset_peak_device_memory(Device::Cpu).is_err());
/// ```
pub fn reset_peak_device_memory(device: Device) -> Result<()> {
    const OPERATION: &str = "reset_peak_device_memory";
    let index = index_of(OPERATION, device)?;
    // SAFETY: no pointers.
    check(OPERATION, unsafe { te_reset_peak_device_memory(index) })
}

/// Memory of the host, `[num_bytes]` of uint8 with anything in it, between which and CUDA devices copies go without a detour and
/// without being waited for. libtorch keeps it for later ones once it is free, in sizes of powers of two.
///
/// # Errors
/// There is no CUDA device; the system gives no more of such memory.
///
/// ```
/// let is_there = tch::Cuda::is_available();
/// assert_eq!(torch_ext::device::pinned_bytes(4096).is_ok(), is_there);
/// ```
pub fn pinned_bytes(num_bytes: usize) -> Result<Tensor> {
    let mut raw = std::ptr::null_mut();
    // SAFETY: `raw` receives an owned tensor.
    check("pinned_bytes", unsafe { te_pinned_bytes(num_bytes as i64, &raw mut raw) })?;
    // SAFETY: the shim has just made it and handed it over.
    Ok(unsafe { adopt(raw) })
}

/// The tensor itself if it is in pinned memory, else a copy of it there (`Tensor.pin_memory`). It is on the CPU.
///
/// tch asks for it with a device, which libtorch warns of.
///
/// # Errors
/// A tensor of a device; a machine without CUDA.
///
/// ```
/// let is_there = tch::Cuda::is_available();
/// assert_eq!(torch_ext::device::pin_memory(&tch::Tensor::from(1f32)).is_ok(), is_there);
/// ```
pub fn pin_memory(tensor: &Tensor) -> Result<Tensor> {
    let mut raw = std::ptr::null_mut();
    // SAFETY: the handle is borrowed for the call; `raw` receives an owned tensor.
    check("pin_memory", unsafe { te_pin_memory(handle(tensor), &raw mut raw) })?;
    // SAFETY: the shim has just made it and handed it over.
    Ok(unsafe { adopt(raw) })
}

/// Copies tensors pairwise into places on the CPU, and returns when all have arrived. Those of CUDA devices are on their way at once
/// if their places are [pinned](pinned_bytes), and come when all that was asked of their device before on its present stream
/// is done. No gradients are recorded.
///
/// # Errors
/// Lists of different lengths; shapes that cannot be broadcast; libtorch's own.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// let (place, source) = (Tensor::zeros([2], (Kind::Float, Device::Cpu)), Tensor::from_slice(&[1f32, 2.0]));
/// torch_ext::device::copy_to_host(&[&place], &[&source])?;
/// assert_eq!(place, source);
/// assert!(torch_ext::device::copy_to_host(&[&place], &[]).is_err());
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn copy_to_host(places: &[&Tensor], sources: &[&Tensor]) -> Result<()> {
    const OPERATION: &str = "copy_to_host";
    if places.len() != sources.len() {
        return Err(Error::invalid(OPERATION, format!("{} places and {} tensors", places.len(), sources.len())));
    }
    let (places, sources) = (handles(places.iter().copied()), handles(sources.iter().copied()));
    // SAFETY: both lists are of borrowed handles and as long as said; the tensors live through the call, which waits for the copies.
    check(OPERATION, unsafe { te_copy_to_host(places.as_ptr(), sources.as_ptr(), places.len()) })
}

pub(crate) fn index_of(operation: &'static str, device: Device) -> Result<i32> {
    match device {
        Device::Cuda(index) if index < tch::Cuda::device_count().max(0) as usize => Ok(index as i32),
        other => Err(Error::invalid(operation, format!("{other:?} is no CUDA device of this process"))),
    }
}
