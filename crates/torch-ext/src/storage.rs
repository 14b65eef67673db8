//! Storages: whose memory a tensor uses, and memory that goes and comes back under tensors that stay.

use crate::border::{Handle, check, handle};
pub use crate::copy::CopyMode;
use crate::copy::{add_and_copy, copy_with};
use crate::error::Result;
use crate::file::memory_of;
use std::ffi::c_void;
use std::fmt;
use std::io;
use tch::Tensor;

unsafe extern "C" {
    fn te_storage_id(tensor: Handle) -> usize;
    fn te_tensor_id(tensor: Handle) -> usize;
    fn te_storage_use_count(tensor: Handle) -> usize;
    fn te_storage_bytes(tensor: Handle, bytes: *mut usize) -> i32;
    fn te_storage_offset(tensor: Handle) -> i64;
    fn te_storage_free(tensor: Handle) -> i32;
    fn te_storage_allocate(tensor: Handle, bytes: usize) -> i32;
    fn te_storage_is_allocated(tensor: Handle) -> bool;
    fn te_storage_downgrade(tensor: Handle) -> *mut c_void;
    fn te_weak_storage_expired(weak: *mut c_void) -> bool;
    fn te_weak_storage_free(weak: *mut c_void);
    fn te_empty_cache() -> i32;
}

#[cfg(target_os = "linux")]
unsafe extern "C" {
    fn madvise(address: *mut c_void, length: usize, advice: i32) -> i32;
    fn sysconf(name: i32) -> i64;
}

/// Gives device memory that libtorch keeps for later, and no tensor uses, back to the device
/// (`torch.cuda.empty_cache`). Nothing happens on the CPU, where none is kept.
///
/// ```
/// torch_ext::storage::empty_cache()?;
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn empty_cache() -> Result<()> {
    // SAFETY: no arguments; only memory that no tensor uses is released.
    check("storage::empty_cache", unsafe { te_empty_cache() })
}

/// The identity of a tensor's storage: equal for tensors that share one (views, detached copies), different for
/// any two storages alive at the same time, 0 for tensors without storage.
///
/// A storage that is gone may pass its number on to a new one; a [`WeakStorage`] kept beside the number tells.
///
/// ```
/// use torch_ext::storage::storage_id;
/// let x = tch::Tensor::from_slice(&[1f32, 2.0]);
/// assert_eq!(storage_id(&x), storage_id(&x.narrow(0, 1, 1)));
/// assert_ne!(storage_id(&x), storage_id(&x.copy()));
/// ```
pub fn storage_id(tensor: &Tensor) -> usize {
    // SAFETY: the handle is borrowed for the call.
    unsafe { te_storage_id(handle(tensor)) }
}

/// Copies `num_bytes` bytes of a tensor, from byte `start` on, to byte `place` of another one, whatever their dtypes are. Autograd sees
/// nothing of it. Other tensors over the memory see it; nobody may be using it.
///
/// ```
/// use tch::Tensor;
/// use torch_ext::storage::{CopyMode, copy_bytes};
/// let (from, to) = (Tensor::from_slice(&[1f32, 2.0, 3.0]), Tensor::from_slice(&[0f32; 2]));
/// copy_bytes((&from, 8), (&to, 4), 4, CopyMode::Cached)?;
/// assert_eq!(to, Tensor::from_slice(&[0f32, 3.0]));
/// assert!(copy_bytes((&from, 8), (&to, 4), 8, CopyMode::Cached).is_err());
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] where a tensor has not as many bytes, is not contiguous, or not on the CPU; where both ranges
/// have bytes in common.
pub fn copy_bytes(
    (from, start): (&Tensor, usize),
    (to, place): (&Tensor, usize),
    num_bytes: usize,
    mode: CopyMode,
) -> io::Result<()> {
    let from = place_of(from, start, num_bytes, false)?;
    let to = place_of(to, place, num_bytes, true)?;
    check_apart(&[from, to], num_bytes)?;
    // SAFETY: both ranges are within their tensors, as has just been seen, whose memory lives as long as they are borrowed, and have
    // no address in common. That nobody else uses them meanwhile is the caller's promise, as for all memory that is shared.
    unsafe { copy_with(mode, from, to, num_bytes) };
    Ok(())
}

/// Adds `numel` float32 numbers of a tensor, from byte `start` on, to as many of `sum`, and copies the results to a third tensor as
/// well: [`copy_bytes`] after an addition, while the results are in the first cache. Whatever the dtypes are, bytes are taken for float32.
///
/// ```
/// use tch::Tensor;
/// use torch_ext::storage::{CopyMode, add_and_copy_floats};
/// let (addend, sum) = (Tensor::from_slice(&[1f32, 2.0, 3.0]), Tensor::from_slice(&[10f32, 20.0]));
/// let copy = Tensor::from_slice(&[0f32; 3]);
/// add_and_copy_floats((&addend, 4), (&sum, 0), (&copy, 4), 2, CopyMode::Cached)?;
/// assert_eq!(sum, Tensor::from_slice(&[12f32, 23.0]));
/// assert_eq!(copy, Tensor::from_slice(&[0f32, 12.0, 23.0]));
/// assert!(add_and_copy_floats((&addend, 4), (&sum, 0), (&copy, 8), 2, CopyMode::Cached).is_err());
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
/// As [`copy_bytes`].
pub fn add_and_copy_floats(
    (addend, addend_start): (&Tensor, usize),
    (sum, sum_start): (&Tensor, usize),
    (to, place): (&Tensor, usize),
    numel: usize,
    mode: CopyMode,
) -> io::Result<()> {
    let num_bytes = numel.saturating_mul(size_of::<f32>());
    let addend = place_of(addend, addend_start, num_bytes, false)?;
    let sum = place_of(sum, sum_start, num_bytes, true)?;
    let to = place_of(to, place, num_bytes, true)?;
    check_apart(&[addend, sum, to], num_bytes)?;
    // SAFETY: the ranges are within their tensors, as has just been seen, whose memory lives as long as they are borrowed, and no two
    // have an address in common; any bytes are a float. Nobody else uses them meanwhile, as above.
    unsafe { add_and_copy(addend.cast(), sum.cast(), to.cast(), numel, mode) };
    Ok(())
}

/// The first of `num_bytes` bytes of a tensor from byte `start` on, which will be `changed` or only read.
fn place_of(tensor: &Tensor, start: usize, num_bytes: usize, changed: bool) -> io::Result<*mut u8> {
    let (address, all) = memory_of(tensor, changed)?;
    if start.checked_add(num_bytes).is_none_or(|end| all < end) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a tensor has not as many bytes"));
    }
    Ok(address.wrapping_add(start))
}

fn check_apart(places: &[*mut u8], num_bytes: usize) -> io::Result<()> {
    for (number, place) in places.iter().enumerate() {
        if places[..number].iter().any(|other| place.addr().abs_diff(other.addr()) < num_bytes) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "bytes would be copied over themselves"));
        }
    }
    Ok(())
}

/// The identity of a tensor: equal for clones of one handle (`shallow_clone`), different for any two other tensors alive at the
/// same time, also for views and detached copies; 0 for an undefined one.
///
/// A tensor that is gone may pass its number on to a new one.
///
/// ```
/// use torch_ext::storage::tensor_id;
/// let x = tch::Tensor::from_slice(&[1f32, 2.0]);
/// assert_eq!(tensor_id(&x), tensor_id(&x.shallow_clone()));
/// assert_ne!(tensor_id(&x), tensor_id(&x.detach()));
/// ```
pub fn tensor_id(tensor: &Tensor) -> usize {
    // SAFETY: the handle is borrowed for the call.
    unsafe { te_tensor_id(handle(tensor)) }
}

/// How many tensors look at the storage now, views and detached copies included, also those that graphs and unfinished
/// collectives hold; 0 for tensors without storage. Clones of one handle (`shallow_clone`) count once.
///
/// ```
/// use torch_ext::storage::storage_use_count;
/// let x = tch::Tensor::from_slice(&[1f32, 2.0]);
/// let view = x.narrow(0, 0, 1);
/// assert_eq!(storage_use_count(&x), 2);
/// drop(view);
/// assert_eq!(storage_use_count(&x.shallow_clone()), 1);
/// ```
pub fn storage_use_count(tensor: &Tensor) -> usize {
    // SAFETY: the handle is borrowed for the call.
    unsafe { te_storage_use_count(handle(tensor)) }
}

/// The size of the whole storage, which may be more than the tensor's own entries; 0 when it is freed.
///
/// ```
/// let x = tch::Tensor::from_slice(&[1f32, 2.0, 3.0]);
/// assert_eq!(torch_ext::storage::storage_bytes(&x.narrow(0, 0, 1))?, 12);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn storage_bytes(tensor: &Tensor) -> Result<usize> {
    let mut bytes = 0;
    // SAFETY: the handle is borrowed for the call.
    check("storage_bytes", unsafe { te_storage_bytes(handle(tensor), &mut bytes) })?;
    Ok(bytes)
}

/// Where the tensor begins in its storage, counted in entries of its kind; 0 for tensors without storage.
///
/// With size and stride it says how to make the same view of another storage (`as_strided`).
///
/// ```
/// let x = tch::Tensor::from_slice(&[1f32, 2.0, 3.0]);
/// assert_eq!(torch_ext::storage::storage_offset(&x.narrow(0, 2, 1)), 2);
/// ```
pub fn storage_offset(tensor: &Tensor) -> i64 {
    // SAFETY: the handle is borrowed for the call.
    unsafe { te_storage_offset(handle(tensor)) }
}

/// Gives the memory of a tensor's storage back, for every tensor over it. Shapes stay; the entries are lost.
///
/// Until [`allocate_storage`], using the data of any of these tensors is an error that says so, not a crash, and new
/// views of them are refused.
/// The counterpart of `tensor.untyped_storage().resize_(0)`. Freeing twice is fine. Nothing may be using the memory
/// meanwhile: wait for asynchronous collectives on the tensor first.
///
/// # Errors
/// The memory is not libtorch's (a mapped file, a borrowed buffer), or the tensor has none (meta, sparse).
///
/// ```
/// use torch_ext::storage;
/// let x = tch::Tensor::from_slice(&[1f32, 2.0]).copy();
/// storage::free_storage(&x)?;
/// assert_eq!((x.size(), storage::storage_bytes(&x)?), (vec![2], 0));
/// assert!(x.f_exp().is_err());
/// storage::allocate_storage(&x, 8)?;
/// torch_ext::foreach::zero_(&[&x])?;
/// assert_eq!(x, tch::Tensor::from_slice(&[0f32, 0.0]));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn free_storage(tensor: &Tensor) -> Result<()> {
    // SAFETY: the handle is borrowed for the call.
    check("free_storage", unsafe { te_storage_free(handle(tensor)) })
}

/// Gives a freed storage memory again, `num_bytes` of it, with undefined contents.
///
/// # Errors
/// The storage is not freed, or `num_bytes` is less than it held: other tensors may reach that far.
///
/// See [`free_storage`] for an example.
pub fn allocate_storage(tensor: &Tensor, num_bytes: usize) -> Result<()> {
    // SAFETY: the handle is borrowed for the call.
    check("allocate_storage", unsafe { te_storage_allocate(handle(tensor), num_bytes) })
}

/// Whether the tensor's data can be used: it has a storage with memory that was not freed. `false` for meta tensors.
///
/// ```
/// let x = tch::Tensor::from_slice(&[1f32]).copy();
/// assert!(torch_ext::storage::is_allocated(&x));
/// torch_ext::storage::free_storage(&x)?;
/// assert!(!torch_ext::storage::is_allocated(&x));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn is_allocated(tensor: &Tensor) -> bool {
    // SAFETY: the handle is borrowed for the call.
    unsafe { te_storage_is_allocated(handle(tensor)) }
}

/// Lends the memory of a tensor's entries back to the system until they are written to again; until then they are
/// anything. For a tensor on the CPU that is kept for its memory: nothing may use it meanwhile. Contiguous tensors only, and
/// only whole pages go. Elsewhere, and on other systems than Linux, nothing happens.
///
/// The allocator keeps the memory, and so do its tensors: only what is resident shrinks.
///
/// ```
/// let buffer = tch::Tensor::zeros([1 << 20], (tch::Kind::Float, tch::Device::Cpu));
/// torch_ext::storage::release_pages(&buffer);
/// assert_eq!(buffer.shallow_clone().fill_(1.0).double_value(&[77]), 1.0);
/// ```
pub fn release_pages(tensor: &Tensor) {
    #[cfg(target_os = "linux")]
    if let Some(pages) = whole_pages(tensor) {
        const MADV_DONTNEED: i32 = 4;
        // SAFETY: the pages hold entries of this tensor and nothing else, so only these change: to zeros in private
        // memory, to what a file says in a mapping of it. A failure leaves everything as it is.
        unsafe { madvise(pages.start as *mut c_void, pages.len(), MADV_DONTNEED) };
    }
}

/// Has the system read the entries of a tensor that maps a file, if it does not have them, and does not wait for it. Contiguous tensors
/// on the CPU only; on other systems than Linux, nothing happens (`MADV_WILLNEED` of `madvise(2)`).
pub fn read_pages_ahead(tensor: &Tensor) {
    #[cfg(target_os = "linux")]
    if let Some(pages) = whole_pages(tensor) {
        const MADV_WILLNEED: i32 = 3;
        // SAFETY: what is in the pages stays as it is.
        unsafe { madvise(pages.start as *mut c_void, pages.len(), MADV_WILLNEED) };
    }
}

/// Does the system have the entries of a tensor that maps a file, so that to look at them waits for no disk? True as well where that
/// cannot be told: on other systems than Linux, of a tensor that is no contiguous one on the CPU, and of a file that this process may not
/// write to (`mincore(2)`).
pub fn are_pages_cached(tensor: &Tensor) -> bool {
    #[cfg(target_os = "linux")]
    if let Some(pages) = whole_pages(tensor) {
        const IS_CACHED: u8 = 1;
        let mut found = vec![IS_CACHED; pages.len().div_ceil(page_bytes())];
        // SAFETY: it writes one byte for each page, for which there is room.
        let told = unsafe { libc::mincore(pages.start as *mut c_void, pages.len(), found.as_mut_ptr()) } == 0;
        return !told || found.iter().all(|page| page & IS_CACHED != 0);
    }
    true
}

/// Brings the entries of a tensor that maps a file into memory, all at once, so that the first look at them does not wait for each
/// page: reads what the system does not have yet, and returns when everything is there. Contiguous tensors on the CPU only, and only
/// whole pages come. Returns whether they did: not from a file that has become too short, nor before Linux 5.14
/// (`MADV_POPULATE_READ` of `madvise(2)`).
///
/// ```no_run
/// use tch::{Device, Kind, Tensor};
/// let weight = Tensor::f_from_file("weight.bin", false, 1 << 20, (Kind::Float, Device::Cpu))?;
/// torch_ext::storage::populate_pages(&weight);
/// # Ok::<(), tch::TchError>(())
/// ```
pub fn populate_pages(tensor: &Tensor) -> bool {
    #[cfg(target_os = "linux")]
    if let Some(pages) = whole_pages(tensor) {
        const MADV_POPULATE_READ: i32 = 22;
        // SAFETY: what is in the pages stays as it is. A page that cannot be read is an error here, and no signal.
        return unsafe { madvise(pages.start as *mut c_void, pages.len(), MADV_POPULATE_READ) } == 0;
    }
    false
}

/// Lends the memory that the C library's allocator keeps for later back to the system. Where large tensors of one size come and go, that of
/// glibc may put each behind the free memory of the one before, because an aligned block leaves a gap that is a little too small.
/// The next use of such memory takes it from the system anew. With another C library, nothing happens.
///
/// ```
/// drop(tch::Tensor::zeros([1 << 22], (tch::Kind::Float, tch::Device::Cpu)));
/// torch_ext::storage::release_free_memory();
/// ```
pub fn release_free_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: asks for nothing but memory that nobody has; the allocator locks itself.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// The size of a large page, where there are any.
pub const LARGE_PAGE_BYTES: usize = 2 << 20;

/// Has the system put a tensor on the CPU on pages of [`LARGE_PAGE_BYTES`] where whole ones fit; its entries become anything. It
/// should begin at a multiple of that ([`aligned_bytes`](crate::file::aligned_bytes)). A disk's requests to and from such
/// memory are of one piece, where they would be of hundreds. Contiguous tensors only. Elsewhere, and where there are no such
/// pages, nothing happens.
///
/// ```
/// use torch_ext::storage::{LARGE_PAGE_BYTES, prefer_large_pages};
/// let mut bytes = torch_ext::file::aligned_bytes(2 * LARGE_PAGE_BYTES, LARGE_PAGE_BYTES)?;
/// prefer_large_pages(&bytes);
/// assert_eq!(bytes.fill_(1).double_value(&[77]), 1.0);
/// # Ok::<(), tch::TchError>(())
/// ```
pub fn prefer_large_pages(tensor: &Tensor) {
    #[cfg(target_os = "linux")]
    if let Some(pages) = whole_pages(tensor) {
        const MADV_HUGEPAGE: i32 = 14;
        // SAFETY: what is in the pages stays as it is, whether they become large ones or not.
        unsafe { madvise(pages.start as *mut c_void, pages.len(), MADV_HUGEPAGE) };
        // The allocator may have handed out small ones that were in use before.
        release_pages(tensor);
    }
}

/// The addresses of pages that hold entries of a tensor and nothing else; `None` if there are none, or not on the CPU.
#[cfg(target_os = "linux")]
fn whole_pages(tensor: &Tensor) -> Option<std::ops::Range<usize>> {
    if tensor.device() != tch::Device::Cpu || !tensor.is_contiguous() || !is_allocated(tensor) {
        return None;
    }
    let page = page_bytes();
    let (start, num_bytes) = (tensor.data_ptr() as usize, tensor.numel() * tensor.kind().elt_size_in_bytes());
    let (first, end) = (start.next_multiple_of(page), (start + num_bytes) / page * page);
    (first < end).then_some(first..end)
}

#[cfg(target_os = "linux")]
fn page_bytes() -> usize {
    const SC_PAGESIZE: i32 = 30;
    // SAFETY: asks for a number.
    unsafe { sysconf(SC_PAGESIZE) }.max(1) as usize
}

/// Knows a storage without keeping it alive.
///
/// ```
/// use torch_ext::storage::WeakStorage;
/// let x = tch::Tensor::from_slice(&[1f32]);
/// let weak = WeakStorage::new(&x);
/// assert!(weak.is_alive());
/// drop(x);
/// assert!(!weak.is_alive());
/// ```
pub struct WeakStorage {
    /// Null for a tensor without storage.
    raw: *mut c_void,
}

// SAFETY: the counts behind the pointer are atomic, and nothing else is read.
unsafe impl Send for WeakStorage {}
// SAFETY: as above.
unsafe impl Sync for WeakStorage {}

impl WeakStorage {
    /// Remembers the storage of a tensor.
    pub fn new(tensor: &Tensor) -> Self {
        // SAFETY: the handle is borrowed for the call; the result is owned by this value.
        Self { raw: unsafe { te_storage_downgrade(handle(tensor)) } }
    }

    /// Whether any tensor, the graph included, still holds the storage.
    pub fn is_alive(&self) -> bool {
        // SAFETY: the pointer is valid while `self` lives.
        !self.raw.is_null() && unsafe { !te_weak_storage_expired(self.raw) }
    }
}

impl Drop for WeakStorage {
    fn drop(&mut self) {
        // SAFETY: made by the shim, freed once; deleting null is nothing.
        unsafe { te_weak_storage_free(self.raw) }
    }
}

impl fmt::Debug for WeakStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeakStorage").field("is_alive", &self.is_alive()).finish()
    }
}
