//! Rendezvous stores: the small key-value maps through which processes find each other.

mod backend;

pub use backend::StoreBackend;

use crate::border::{Handle, check};
use crate::error::{Error, Result};
use std::ffi::{CString, c_char};
use std::fmt;
use std::path::Path;
use std::time::Duration;

unsafe extern "C" {
    fn te_store_tcp(
        host: *const c_char,
        host_length: usize,
        port: u16,
        is_server: bool,
        num_workers: i64,
        wait_workers: bool,
        timeout_ms: i64,
        listen_fd: i32,
        out: *mut Handle,
    ) -> i32;
    fn te_store_tcp_port(store: Handle, out: *mut u16) -> i32;
    fn te_store_file(path: *const c_char, length: usize, num_workers: i32, out: *mut Handle) -> i32;
    fn te_store_hash(out: *mut Handle) -> i32;
    fn te_store_prefix(prefix: *const c_char, length: usize, inner: Handle, out: *mut Handle) -> i32;
    fn te_store_clone(store: Handle, out: *mut Handle) -> i32;
    fn te_store_free(store: Handle);
    fn te_bytes_free(data: *mut u8);
    fn te_store_set(store: Handle, key: *const c_char, key_length: usize, value: *const u8, length: usize) -> i32;
    fn te_store_get(store: Handle, key: *const c_char, key_length: usize, out: *mut *mut u8, length: *mut usize)
    -> i32;
    fn te_store_compare_set(
        store: Handle,
        key: *const c_char,
        key_length: usize,
        expected: *const u8,
        expected_length: usize,
        desired: *const u8,
        desired_length: usize,
        out: *mut *mut u8,
        length: *mut usize,
    ) -> i32;
    fn te_store_append(store: Handle, key: *const c_char, key_length: usize, value: *const u8, length: usize) -> i32;
    fn te_store_add(store: Handle, key: *const c_char, key_length: usize, amount: i64, out: *mut i64) -> i32;
    fn te_store_delete_key(store: Handle, key: *const c_char, key_length: usize, out: *mut bool) -> i32;
    fn te_store_num_keys(store: Handle, out: *mut i64) -> i32;
    fn te_store_check(
        store: Handle,
        keys: *const *const c_char,
        lengths: *const usize,
        count: usize,
        out: *mut bool,
    ) -> i32;
    fn te_store_wait(
        store: Handle,
        keys: *const *const c_char,
        lengths: *const usize,
        count: usize,
        timeout_ms: i64,
    ) -> i32;
    fn te_store_timeout(store: Handle, out: *mut i64) -> i32;
    fn te_store_set_timeout(store: Handle, timeout_ms: i64) -> i32;
}

/// Settings of a TCP store, named as in `torch.distributed.TCPStore`.
///
/// ```
/// use std::time::Duration;
/// use torch_ext::{Store, TcpStoreOptions};
///
/// let store = Store::tcp(&TcpStoreOptions {
///     host: "127.0.0.1".into(),
///     port: 0, // a free one
///     is_server: true,
///     num_workers: Some(1),
///     wait_for_workers: true,
///     timeout: Duration::from_secs(10),
///     listen_fd: None,
/// })?;
/// assert_ne!(store.port()?, 0);
/// # Ok::<(), torch_ext::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TcpStoreOptions {
    /// Name or address of the machine that serves the store.
    pub host: String,
    /// Port of the server; 0 lets the server choose a free one.
    pub port: u16,
    /// Whether this process serves the store (one process of the job does, usually rank 0).
    pub is_server: bool,
    /// How many processes will connect; `None` if unknown.
    pub num_workers: Option<usize>,
    /// Whether the server's constructor returns only after all workers have connected.
    pub wait_for_workers: bool,
    /// Deadline for connecting, and the default deadline of [`Store::get`] and [`Store::wait`].
    pub timeout: Duration,
    /// A listening socket that the server takes over, so that its port cannot be lost to another program.
    pub listen_fd: Option<i32>,
}

/// A key-value store shared by the processes of a job. Clones share one connection.
///
/// ```
/// use torch_ext::Store;
///
/// let store = Store::hash()?;
/// store.set("answer", b"42")?;
/// assert_eq!(store.get("answer")?, b"42");
/// assert_eq!(store.add("count", 2)?, 2);
/// assert!(store.check(&["answer"])?);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub struct Store(Handle);

// SAFETY: c10d's stores guard their connection or map with a mutex of their own; the handle is a
// reference-counted pointer whose count is atomic.
unsafe impl Send for Store {}
// SAFETY: as above; every method takes the store's own lock.
unsafe impl Sync for Store {}

impl Store {
    /// Connects to (and, on the server, opens) a store over TCP.
    ///
    /// # Errors
    /// [`Error::is_connection`] or [`Error::is_timeout`] when the server cannot be reached or the port is taken.
    pub fn tcp(options: &TcpStoreOptions) -> Result<Self> {
        let num_workers = options.num_workers.map_or(-1, to_i64);
        let mut out = std::ptr::null_mut();
        // SAFETY: the host's bytes live through the call; `out` is written on success only.
        check("TCPStore", unsafe {
            te_store_tcp(
                options.host.as_ptr().cast(),
                options.host.len(),
                options.port,
                options.is_server,
                num_workers,
                options.wait_for_workers,
                milliseconds(options.timeout),
                options.listen_fd.unwrap_or(-1),
                &mut out,
            )
        })?;
        Ok(Self(out))
    }

    /// A store in a file that all processes see. `num_workers` processes delete it when they are done.
    pub fn file(path: impl AsRef<Path>, num_workers: usize) -> Result<Self> {
        let path = path
            .as_ref()
            .to_str()
            .ok_or_else(|| Error::invalid("FileStore", "the path of the store is not valid UTF-8"))?;
        let num_workers = i32::try_from(num_workers)
            .map_err(|_| Error::invalid("FileStore", "the number of workers does not fit 31 bits"))?;
        let mut out = std::ptr::null_mut();
        // SAFETY: the path's bytes live through the call.
        check("FileStore", unsafe { te_store_file(path.as_ptr().cast(), path.len(), num_workers, &mut out) })?;
        Ok(Self(out))
    }

    /// A store for the threads of one process.
    pub fn hash() -> Result<Self> {
        let mut out = std::ptr::null_mut();
        // SAFETY: `out` is written on success only.
        check("HashStore", unsafe { te_store_hash(&mut out) })?;
        Ok(Self(out))
    }

    /// The same store, with `prefix` in front of every key: groups that share a store do not collide.
    pub fn prefix(&self, prefix: &str) -> Result<Self> {
        let mut out = std::ptr::null_mut();
        // SAFETY: the prefix's bytes live through the call; the shim keeps its own reference to the inner store.
        check("PrefixStore", unsafe { te_store_prefix(prefix.as_ptr().cast(), prefix.len(), self.0, &mut out) })?;
        Ok(Self(out))
    }

    /// The port of a TCP store; an error for other stores.
    pub fn port(&self) -> Result<u16> {
        let mut out = 0;
        // SAFETY: the handle is alive.
        check("Store::port", unsafe { te_store_tcp_port(self.0, &mut out) })?;
        Ok(out)
    }

    /// Writes a value.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        // SAFETY: key and value live through the call, the shim copies them.
        check("Store::set", unsafe {
            te_store_set(self.0, key.as_ptr().cast(), key.len(), value.as_ptr(), value.len())
        })
    }

    /// Reads a value, waiting until it is there or the store's timeout has passed.
    pub fn get(&self, key: &str) -> Result<Vec<u8>> {
        let (mut data, mut length) = (std::ptr::null_mut(), 0);
        // SAFETY: the key lives through the call; on success `data` and `length` describe a fresh buffer.
        check("Store::get", unsafe { te_store_get(self.0, key.as_ptr().cast(), key.len(), &mut data, &mut length) })?;
        // SAFETY: the buffer came from the successful call above.
        Ok(unsafe { take_bytes(data, length) })
    }

    /// Writes `desired` if the present value equals `expected` (empty: if the key is absent). Returns the value afterwards.
    pub fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let (mut data, mut length) = (std::ptr::null_mut(), 0);
        // SAFETY: all slices live through the call; on success the out-parameters describe a fresh buffer.
        check("Store::compare_set", unsafe {
            te_store_compare_set(
                self.0,
                key.as_ptr().cast(),
                key.len(),
                expected.as_ptr(),
                expected.len(),
                desired.as_ptr(),
                desired.len(),
                &mut data,
                &mut length,
            )
        })?;
        // SAFETY: the buffer came from the successful call above.
        Ok(unsafe { take_bytes(data, length) })
    }

    /// Appends to a value (TCP stores only).
    pub fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        // SAFETY: key and value live through the call.
        check("Store::append", unsafe {
            te_store_append(self.0, key.as_ptr().cast(), key.len(), value.as_ptr(), value.len())
        })
    }

    /// Adds to a counter, atomically over all processes, and returns the new value.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let mut out = 0;
        // SAFETY: the key lives through the call.
        check("Store::add", unsafe { te_store_add(self.0, key.as_ptr().cast(), key.len(), amount, &mut out) })?;
        Ok(out)
    }

    /// Removes a key; `true` if it was there.
    pub fn delete_key(&self, key: &str) -> Result<bool> {
        let mut out = false;
        // SAFETY: the key lives through the call.
        check("Store::delete_key", unsafe { te_store_delete_key(self.0, key.as_ptr().cast(), key.len(), &mut out) })?;
        Ok(out)
    }

    /// How many keys the store holds, its own bookkeeping included.
    pub fn num_keys(&self) -> Result<i64> {
        let mut out = 0;
        // SAFETY: the handle is alive.
        check("Store::num_keys", unsafe { te_store_num_keys(self.0, &mut out) })?;
        Ok(out)
    }

    /// Are all these keys there? Does not wait.
    pub fn check(&self, keys: &[&str]) -> Result<bool> {
        let (pointers, lengths) = key_parts(keys);
        let mut out = false;
        // SAFETY: the arrays and the keys they point to live through the call.
        check("Store::check", unsafe {
            te_store_check(self.0, pointers.as_ptr(), lengths.as_ptr(), keys.len(), &mut out)
        })?;
        Ok(out)
    }

    /// Waits until all keys are there. [`Error::is_timeout`] after `timeout`.
    pub fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let (pointers, lengths) = key_parts(keys);
        // SAFETY: the arrays and the keys they point to live through the call.
        check("Store::wait", unsafe {
            te_store_wait(self.0, pointers.as_ptr(), lengths.as_ptr(), keys.len(), milliseconds(timeout))
        })
    }

    /// The deadline of [`Store::get`].
    pub fn timeout(&self) -> Result<Duration> {
        let mut out = 0;
        // SAFETY: the handle is alive.
        check("Store::timeout", unsafe { te_store_timeout(self.0, &mut out) })?;
        Ok(Duration::from_millis(out.unsigned_abs()))
    }

    /// Changes the deadline of [`Store::get`].
    pub fn set_timeout(&self, timeout: Duration) -> Result<()> {
        // SAFETY: the handle is alive.
        check("Store::set_timeout", unsafe { te_store_set_timeout(self.0, milliseconds(timeout)) })
    }

    pub(crate) fn handle(&self) -> Handle {
        self.0
    }
}

impl Clone for Store {
    fn clone(&self) -> Self {
        let mut out = std::ptr::null_mut();
        // SAFETY: the handle is alive. Copying a reference-counted pointer fails only without memory,
        // where the null handle below makes every later call an error of the shim's allocator anyway.
        let status = unsafe { te_store_clone(self.0, &mut out) };
        assert!(status == 0, "out of memory while sharing a store");
        Self(out)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: this handle owns one reference and is dropped once.
        unsafe { te_store_free(self.0) }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Store")
    }
}

/// Milliseconds for the border, at least one: zero would mean "no deadline" there.
pub(crate) fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX).max(1)
}

fn to_i64(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn key_parts(keys: &[&str]) -> (Vec<*const c_char>, Vec<usize>) {
    (keys.iter().map(|key| key.as_ptr().cast()).collect(), keys.iter().map(|key| key.len()).collect())
}

/// A C string for the border, or an error that names the argument.
pub(crate) fn c_string(operation: &'static str, what: &str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::invalid(operation, format!("{what} contains a zero byte")))
}

/// # Safety
/// `data` must be a buffer of `length` bytes made by the shim's `give_bytes`, passed here once.
unsafe fn take_bytes(data: *mut u8, length: usize) -> Vec<u8> {
    // SAFETY: the caller upholds that the buffer is alive and `length` long.
    let bytes = unsafe { std::slice::from_raw_parts(data, length) }.to_vec();
    // SAFETY: the buffer is ours to free, once.
    unsafe { te_bytes_free(data) };
    bytes
}
