//! Files that are read out of the page cache, where the system maps it, without a call to the kernel for each piece.

use crate::copy::{CopyMode, copy_with};
use crate::file::memory_of;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, compiler_fence};
use tch::Tensor;

/// A file of a known length that is read at any place. What is in the page cache is copied from there, and faster than
/// [`read_at`](crate::file::read_at) does it: the processor need not enter the kernel for each piece, and what is copied to large
/// tensors does not go through its caches. Where a file cannot be mapped, it is read by calls.
///
/// Who touches a mapped page that is gone, because somebody cut the file off or because its disk failed, is sent the signal
/// `SIGBUS`, which ends a process. The first file that is mapped installs a handler of this signal for the process. For files
/// that are mapped here it lets the read go on, which is an error afterwards; for all other memory it does what was done before it.
///
/// ```
/// use torch_ext::file::write_at;
/// use torch_ext::mapped_file::MappedFile;
/// let file = tempfile::tempfile()?;
/// write_at(&file, &tch::Tensor::from_slice(&[1f32, 2.0, 3.0]), 0)?;
/// let mapped = MappedFile::new(file)?;
/// let two = tch::Tensor::from_slice(&[0f32; 2]);
/// mapped.read_tensor_at(&two, 4)?;
/// assert_eq!((two, mapped.num_bytes()), (tch::Tensor::from_slice(&[2f32, 3.0]), 12));
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct MappedFile {
    file: File,
    num_bytes: u64,
    mapping: Option<Mapping>,
}

impl MappedFile {
    /// A file as long as it is now.
    ///
    /// # Errors
    /// The system's own: its length cannot be asked for.
    pub fn new(file: File) -> io::Result<Self> {
        let num_bytes = file.metadata()?.len();
        let mapping = usize::try_from(num_bytes).ok().and_then(|num_bytes| Mapping::new(&file, num_bytes));
        Ok(Self { file, num_bytes, mapping })
    }

    /// How long the file was when it was mapped.
    pub fn num_bytes(&self) -> u64 {
        self.num_bytes
    }

    /// The file itself.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Shows all bytes in their order, a block at a time. They were in the file if the call succeeds.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] if the file has become shorter; the system's own: the disk failed.
    ///
    /// ```
    /// use std::io::Write;
    /// let mut file = tempfile::tempfile()?;
    /// file.write_all(&[1; 100_000])?;
    /// let mut sum = 0;
    /// torch_ext::mapped_file::MappedFile::new(file)?
    ///     .visit_blocks(|block| sum += block.iter().map(|&byte| usize::from(byte)).sum::<usize>())?;
    /// assert_eq!(sum, 100_000);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn visit_blocks(&self, mut visit: impl FnMut(&[u8])) -> io::Result<()> {
        let block_bytes = if self.mapping.is_some() { MAPPED_BLOCK_BYTES } else { READ_BLOCK_BYTES };
        let mut block = vec![0; block_bytes];
        for start in (0..self.num_bytes).step_by(block_bytes) {
            let num_bytes = (self.num_bytes - start).min(block_bytes as u64) as usize;
            let block = &mut block[..num_bytes];
            match &self.mapping {
                // SAFETY: as many bytes are mapped from there on, and `block` is borrowed alone.
                Some(mapping) => unsafe {
                    ptr::copy_nonoverlapping(mapping.address_of(start), block.as_mut_ptr(), num_bytes);
                },
                None => self.file.read_exact_at(block, start)?,
            }
            visit(block);
        }
        self.mapping.as_ref().map_or(Ok(()), |mapping| self.check(mapping))
    }

    /// Fills a tensor with the bytes from `offset` on. Other tensors over the same memory see them; nobody may be using it
    /// meanwhile.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] if the file ends before, or did when it was mapped; [`io::ErrorKind::InvalidInput`] for a tensor
    /// that is not contiguous, or not on the CPU; the system's own: the disk failed. What the tensor holds is not defined then.
    pub fn read_tensor_at(&self, tensor: &Tensor, offset: u64) -> io::Result<()> {
        let (place, num_bytes) = memory_of(tensor, true)?;
        self.check_range(offset, num_bytes)?;
        let Some(mapping) = &self.mapping else { return crate::file::read_at(&self.file, tensor, offset) };
        let from = mapping.address_of(offset);
        // SAFETY: `from` is the first of as many mapped bytes, and `place` of as many that belong to the tensor's storage, which
        // lives as long as the tensor is borrowed.
        unsafe { copy(from, place, num_bytes) };
        self.check(mapping)
    }

    fn check_range(&self, offset: u64, num_bytes: usize) -> io::Result<()> {
        let end = offset.checked_add(num_bytes as u64).filter(|&end| end <= self.num_bytes);
        end.map(drop).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// Whether what has been copied was in the file.
    fn check(&self, mapping: &Mapping) -> io::Result<()> {
        // The handler ran in this thread, if it ran, before what follows here.
        compiler_fence(Ordering::SeqCst);
        // Behind the end of a file, the rest of its last page is zeros, and no signal tells.
        if self.file.metadata()?.len() < self.num_bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match mapping.region.is_lost.load(Ordering::SeqCst) {
            true => Err(io::Error::other("a part of the file could not be read")),
            false => Ok(()),
        }
    }
}

/// A page. What is looked at once stays in the first cache of a core meanwhile: hashing 256 MiB took 12 ms on a Zen 4, where blocks of
/// 8 KiB took 16 ms and blocks of 2 KiB 21 ms.
const MAPPED_BLOCK_BYTES: usize = 4 << 10;
/// Each is a call of the kernel.
const READ_BLOCK_BYTES: usize = 128 << 10;

/// Large tensors are not read again soon: their bytes go past the processor's caches, which halves what travels.
const STREAMED_BYTES: usize = 256 << 10;

/// # Safety
/// As [`ptr::copy_nonoverlapping`].
unsafe fn copy(from: *const u8, to: *mut u8, num_bytes: usize) {
    let mode = if num_bytes < STREAMED_BYTES { CopyMode::Cached } else { CopyMode::NonTemporal };
    // SAFETY: the caller's promise.
    unsafe { copy_with(mode, from, to, num_bytes) };
}

/// Mapped bytes, which the handler knows.
#[derive(Debug)]
struct Mapping {
    address: NonNull<u8>,
    num_bytes: usize,
    region: &'static Region,
}

// SAFETY: the memory belongs to no thread, and is only ever read.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `None` where files cannot be mapped, for an empty one, and where the handler cannot be installed.
    fn new(file: &File, num_bytes: usize) -> Option<Self> {
        if num_bytes == 0 || !install_handler() {
            return None;
        }
        let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED);
        // SAFETY: the kernel chooses an address where nothing is, so no memory of this process changes; what is wrong with the
        // other arguments is the kernel's to find.
        let address = unsafe { libc::mmap(ptr::null_mut(), num_bytes, protection, flags, file.as_raw_fd(), 0) };
        let address =
            NonNull::new(address.cast::<u8>()).filter(|address| address.as_ptr().cast() != libc::MAP_FAILED)?;
        let region = Region::claim(address.as_ptr() as usize, num_bytes);
        Some(Self { address, num_bytes, region })
    }

    /// Of a byte of the file.
    fn address_of(&self, offset: u64) -> *const u8 {
        self.address.as_ptr().wrapping_add(offset as usize)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.region.release();
        // SAFETY: the mapping was made by `new` with this length, and nobody reads from it any more.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.num_bytes) };
    }
}

/// Addresses of a mapped file. Regions are used again and never freed, because a handler may be looking at them at any time.
#[derive(Debug)]
struct Region {
    /// Grows whenever the addresses change, so that nobody takes the beginning of one file with the end of another.
    version: AtomicUsize,
    /// 0 while nobody has claimed it.
    start: AtomicUsize,
    end: AtomicUsize,
    /// Has a page been missing?
    is_lost: AtomicBool,
    is_claimed: AtomicBool,
    next: AtomicPtr<Region>,
}

/// All regions, the newest first. A signal has one handler in a process, so what it looks at is the process's, too.
static REGIONS: AtomicPtr<Region> = AtomicPtr::new(ptr::null_mut());

/// What was done on the signal before.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();
static PAGE_BYTES: AtomicUsize = AtomicUsize::new(0);

impl Region {
    fn claim(start: usize, num_bytes: usize) -> &'static Self {
        let free = regions().find(|region| {
            region.is_claimed.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        });
        let region = free.unwrap_or_else(|| {
            let new = Box::leak(Box::new(Self {
                version: AtomicUsize::new(0),
                start: AtomicUsize::new(0),
                end: AtomicUsize::new(0),
                is_lost: AtomicBool::new(false),
                is_claimed: AtomicBool::new(true),
                next: AtomicPtr::new(ptr::null_mut()),
            }));
            let mut first = REGIONS.load(Ordering::Acquire);
            loop {
                new.next.store(first, Ordering::Release);
                match REGIONS.compare_exchange_weak(first, new, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => return &*new,
                    Err(found) => first = found,
                }
            }
        });
        region.is_lost.store(false, Ordering::SeqCst);
        region.version.fetch_add(1, Ordering::SeqCst);
        region.end.store(start + num_bytes, Ordering::SeqCst);
        region.start.store(start, Ordering::SeqCst);
        region
    }

    fn release(&self) {
        self.version.fetch_add(1, Ordering::SeqCst);
        self.start.store(0, Ordering::SeqCst);
        self.is_claimed.store(false, Ordering::SeqCst);
    }

    /// Where the region that the address is in ends, if it is in this one. Of a region that changes meanwhile it is not: whoever reads a
    /// mapping keeps its region.
    fn end_behind(&self, address: usize) -> Option<usize> {
        let version = self.version.load(Ordering::SeqCst);
        let (start, end) = (self.start.load(Ordering::SeqCst), self.end.load(Ordering::SeqCst));
        let is_within = start != 0 && (start..end).contains(&address);
        (is_within && self.version.load(Ordering::SeqCst) == version).then_some(end)
    }
}

fn regions() -> impl Iterator<Item = &'static Region> {
    let at = |place: &AtomicPtr<Region>| {
        // SAFETY: null, or a region that has been leaked.
        unsafe { place.load(Ordering::Acquire).as_ref() }
    };
    std::iter::successors(at(&REGIONS), move |region| at(&region.next))
}

/// Installs the handler once. False where the system does not let it.
fn install_handler() -> bool {
    static IS_INSTALLED: OnceLock<bool> = OnceLock::new();
    *IS_INSTALLED.get_or_init(|| {
        // SAFETY: asks the kernel for a number.
        let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        PAGE_BYTES.store(usize::try_from(page_bytes).unwrap_or(4096), Ordering::Release);
        // SAFETY: all zeros are an action: the default.
        let (mut previous, mut action): (libc::sigaction, libc::sigaction) = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes what is done now into `previous`.
        if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut previous) } != 0 {
            return false;
        }
        let _ = PREVIOUS.set(previous);
        action.sa_sigaction = on_bus_error as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler calls nothing that a handler may not call.
        unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) == 0 }
    })
}

/// Puts zeros where a page of a mapped file is gone, and all behind it, and notes that. The instruction then reads them.
extern "C" fn on_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands a valid `info` to a handler that asked for one.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    // Another one was sent by a process, and has no address.
    let is_of_memory = 0 < code;
    let found = regions().find_map(|region| region.end_behind(address).map(|end| (region, end)));
    if let Some((region, end)) = found.filter(|_| is_of_memory) {
        let page_bytes = PAGE_BYTES.load(Ordering::Acquire);
        let page = address - address % page_bytes;
        let num_bytes = end.next_multiple_of(page_bytes) - page;
        region.is_lost.store(true, Ordering::SeqCst);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: replaces pages of a mapping of this module, which is there as long as its region is claimed; whoever reads them
        // asks afterwards whether they were lost. The call may be made in a handler: it is one to the kernel. It does not change
        // `errno` unless it fails.
        let place = unsafe { libc::mmap(page as *mut libc::c_void, num_bytes, libc::PROT_READ, flags, -1, 0) };
        if place != libc::MAP_FAILED {
            return;
        }
    }
    if !is_of_memory && PREVIOUS.get().is_some_and(|action| action.sa_sigaction == libc::SIG_IGN) {
        return;
    }
    let previous = PREVIOUS.get().filter(|action| ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction));
    match previous {
        Some(action) if action.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: with this flag, what was installed is a handler of this type.
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { std::mem::transmute(action.sa_sigaction) };
            handler(signal, info, context);
        }
        Some(action) => {
            // SAFETY: without it, one of this type.
            let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(action.sa_sigaction) };
            handler(signal);
        }
        None => {
            // SAFETY: both may be called in a handler. The signal is blocked until this one returns, and then ends the process.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                libc::raise(signal);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::Write;
    use tch::{Device, Kind};

    fn file_of(content: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        file
    }

    fn numbered(num_bytes: usize) -> Vec<u8> {
        (0..num_bytes).map(|number| (number % 251) as u8).collect()
    }

    #[test]
    fn any_range_is_read_into_memory_and_tensors_of_any_alignment() {
        let content = numbered(STREAMED_BYTES * 2 + 4099);
        let mapped = MappedFile::new(file_of(&content)).unwrap();
        assert!(mapped.mapping.is_some());
        let all = Tensor::zeros([content.len() as i64 + 64], (Kind::Uint8, Device::Cpu));
        for (start, num_bytes, shift) in
            [(0, content.len(), 0), (1, STREAMED_BYTES, 3), (4097, STREAMED_BYTES + 77, 63), (5, 0, 0), (13, 100, 1)]
        {
            let place = all.narrow(0, shift, num_bytes as i64);
            mapped.read_tensor_at(&place, start as u64).unwrap();
            assert_eq!(place, Tensor::from_slice(&content[start..start + num_bytes]), "{start} {num_bytes} {shift}");
        }
    }

    #[test]
    fn all_blocks_are_seen_once_and_in_order() {
        for num_bytes in [0, 1, MAPPED_BLOCK_BYTES, 3 * MAPPED_BLOCK_BYTES + 5, 2 * READ_BLOCK_BYTES + 1] {
            let content = numbered(num_bytes);
            let mapped = MappedFile::new(file_of(&content)).unwrap();
            let read = MappedFile { mapping: None, ..MappedFile::new(file_of(&content)).unwrap() };
            for file in [mapped, read] {
                let mut seen = Vec::new();
                file.visit_blocks(|block| seen.extend_from_slice(block)).unwrap();
                assert!(seen == content, "{num_bytes} {:?}", file.mapping);
            }
        }
    }

    #[test]
    fn what_is_behind_the_end_is_an_error() {
        for content in [vec![], numbered(10)] {
            let mapped = MappedFile::new(file_of(&content)).unwrap();
            let tensor = Tensor::zeros([1], (Kind::Uint8, Device::Cpu));
            for offset in [content.len() as u64, 1 << 40, i64::MAX as u64] {
                assert_eq!(mapped.read_tensor_at(&tensor, offset).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
            }
        }
    }

    #[test]
    fn tensors_that_are_not_in_one_piece_are_refused() {
        let mapped = MappedFile::new(file_of(&numbered(100))).unwrap();
        let gaps = Tensor::zeros([4, 4], (Kind::Uint8, Device::Cpu)).tr();
        assert_eq!(mapped.read_tensor_at(&gaps, 0).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    /// Without the handler the process would end here.
    #[test]
    fn a_file_that_was_cut_off_is_an_error_and_its_region_is_used_again() {
        let content = numbered(1 << 20);
        for cut in [0, 4096, (1 << 20) - 10] {
            let file = file_of(&content);
            let mapped = MappedFile::new(file.try_clone().unwrap()).unwrap();
            file.set_len(cut).unwrap();
            let tensor = Tensor::zeros([1 << 20], (Kind::Uint8, Device::Cpu));
            assert!(mapped.read_tensor_at(&tensor, 0).is_err(), "{cut}");
            assert!(mapped.visit_blocks(|_| {}).is_err(), "{cut}");
            // Also after it has its length again.
            file.set_len(1 << 20).unwrap();
            assert_eq!(mapped.read_tensor_at(&tensor, 0).is_err(), cut < 1 << 19, "{cut}");
            drop(mapped);
            let whole = MappedFile::new(file_of(&content)).unwrap();
            whole.read_tensor_at(&tensor, 0).unwrap();
            assert_eq!(tensor, Tensor::from_slice(&content));
        }
    }

    /// Other memory that is gone still ends the process: one of its own here.
    #[test]
    fn other_memory_that_is_gone_ends_the_process() {
        let mapped = MappedFile::new(file_of(&numbered(10))).unwrap();
        let other = file_of(&numbered(10));
        // SAFETY: maps a file at an address of the kernel's choice.
        let gone = unsafe { libc::mmap(ptr::null_mut(), 10, libc::PROT_READ, libc::MAP_SHARED, other.as_raw_fd(), 0) };
        assert_ne!(gone, libc::MAP_FAILED);
        other.set_len(0).unwrap();
        // SAFETY: the child calls nothing but the kernel.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: touches the mapping, which ends the child, or leaves at once.
            unsafe { libc::_exit(i32::from(gone.cast::<u8>().read_volatile()) + 1) };
        }
        let mut status = 0;
        // SAFETY: waits for the child, whose status is written to `status`.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGBUS, "{status}");
        // SAFETY: nobody reads it any more.
        unsafe { libc::munmap(gone, 10) };
        drop(mapped);
    }
}
