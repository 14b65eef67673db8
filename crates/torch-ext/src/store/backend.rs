//! Stores whose requests Rust answers.

use super::{Store, milliseconds};
use crate::border::{Handle, check};
use crate::error::{Error, ErrorKind, Result};
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// Answers the requests of a [`Store`], from any thread of libtorch's. Each request has its deadline, also those that need not
/// wait for anybody. Failures are [`Error::timeout`] and [`Error::connection`]; libtorch passes them on.
pub trait StoreBackend: Send + Sync {
    /// Writes a value.
    fn set(&self, key: &[u8], value: &[u8], timeout: Duration) -> Result<()>;
    /// Reads a value, and waits until it is there.
    fn get(&self, key: &[u8], timeout: Duration) -> Result<Vec<u8>>;
    /// As [`Store::compare_set`].
    fn compare_set(&self, key: &[u8], expected: &[u8], desired: &[u8], timeout: Duration) -> Result<Vec<u8>>;
    /// Adds to the end of a value.
    fn append(&self, key: &[u8], value: &[u8], timeout: Duration) -> Result<()>;
    /// Adds to a number and returns the sum.
    fn add(&self, key: &[u8], amount: i64, timeout: Duration) -> Result<i64>;
    /// Removes a key; `true` if it was there.
    fn delete_key(&self, key: &[u8], timeout: Duration) -> Result<bool>;
    /// Number of keys.
    fn num_keys(&self, timeout: Duration) -> Result<i64>;
    /// Are all these keys there? Does not wait for them.
    fn check(&self, keys: &[&[u8]], timeout: Duration) -> Result<bool>;
    /// Waits until all keys are there.
    fn wait(&self, keys: &[&[u8]], timeout: Duration) -> Result<()>;
}

/// Mirrors `te_store_request` in shim/store_backend.cpp.
#[repr(C)]
struct Request {
    operation: i32,
    keys: *const *const u8,
    key_lengths: *const usize,
    num_keys: usize,
    values: [*const u8; 2],
    value_lengths: [usize; 2],
    amount: i64,
    timeout_ms: i64,
}

unsafe extern "C" {
    fn te_store_backend(
        data: *mut c_void,
        call: unsafe extern "C" fn(*mut c_void, *const Request, Handle, *mut i64) -> i32,
        drop: unsafe extern "C" fn(*mut c_void),
        timeout_ms: i64,
        out: *mut Handle,
    ) -> i32;
    fn te_store_answer(answer: Handle, data: *const u8, length: usize) -> i32;
    fn te_store_fork(store: Handle, timeout_ms: i64, out: *mut Handle) -> i32;
}

type Backend = Box<dyn StoreBackend>;

impl Store {
    /// A store whose requests `backend` answers. `timeout` is the deadline of requests that are given none.
    ///
    /// # Errors
    /// There is no memory.
    pub fn from_backend(backend: impl StoreBackend + 'static, timeout: Duration) -> Result<Self> {
        let backend: *mut Backend = Box::into_raw(Box::new(Box::new(backend)));
        let mut out = std::ptr::null_mut();
        // SAFETY: the shim takes the backend over, in any case, and drops it once, after the last call.
        check("Store::from_backend", unsafe {
            te_store_backend(backend.cast(), call_backend, drop_backend, milliseconds(timeout), &mut out)
        })?;
        Ok(Self(out))
    }

    /// The same store for requests with another deadline. A [TCP store](Self::tcp) waits for answers as long as they take all
    /// the same, where it has asked for what is there.
    ///
    /// # Errors
    /// There is no memory.
    ///
    /// ```
    /// # use std::time::Duration;
    /// use torch_ext::Store;
    /// let store = Store::hash()?;
    /// store.set("answer", b"42")?;
    /// let hurried = store.with_timeout(Duration::from_millis(10))?;
    /// assert_eq!(hurried.get("answer")?, b"42");
    /// assert_eq!(hurried.timeout()?, Duration::from_millis(10));
    /// assert_ne!(store.timeout()?, Duration::from_millis(10));
    /// # Ok::<(), torch_ext::Error>(())
    /// ```
    pub fn with_timeout(&self, timeout: Duration) -> Result<Self> {
        let mut out = std::ptr::null_mut();
        // SAFETY: the handle is alive; `out` is written on success only.
        check("Store::with_timeout", unsafe { te_store_fork(self.0, milliseconds(timeout), &mut out) })?;
        Ok(Self(out))
    }
}

enum Answer {
    Done,
    Bytes(Vec<u8>),
    Number(i64),
}

/// # Safety
/// `data` and `request` must be what the shim was given and what it describes, alive through the call.
unsafe extern "C" fn call_backend(data: *mut c_void, request: *const Request, answer: Handle, number: *mut i64) -> i32 {
    // SAFETY: the shim passes the backend that it owns, which may be shared between threads.
    let backend = unsafe { &*data.cast::<Backend>() };
    // SAFETY: the request lives through the call.
    let request = unsafe { &*request };
    let answered = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: as above, with all that it points to.
        unsafe { answer_request(&**backend, request) }
    }));
    let give = |bytes: &[u8]| {
        // SAFETY: the answer is the shim's own list, which copies the bytes.
        unsafe { te_store_answer(answer, bytes.as_ptr(), bytes.len()) }
    };
    let fail = |kind: ErrorKind, text: &str| {
        // An error without a text is an error all the same.
        let _without_memory = give(text.as_bytes());
        kind as i32 + 1
    };
    match answered {
        Ok(Ok(Answer::Done)) => 0,
        Ok(Ok(Answer::Number(value))) => {
            // SAFETY: the shim passes a place for the number.
            unsafe { *number = value };
            0
        }
        Ok(Ok(Answer::Bytes(bytes))) if give(&bytes) == 0 => 0,
        Ok(Ok(Answer::Bytes(_))) => fail(ErrorKind::Torch, "there is no memory for a value of the store"),
        Ok(Err(error)) => fail(error.kind(), error.message()),
        Err(_panic) => fail(ErrorKind::Torch, "the backend of the store panicked"),
    }
}

/// # Safety
/// As [`call_backend`].
unsafe fn answer_request(backend: &dyn StoreBackend, request: &Request) -> Result<Answer> {
    let bytes = |data: *const u8, length: usize| match length {
        0 => &[][..],
        // SAFETY: the caller upholds that the request describes memory that is alive.
        _ => unsafe { std::slice::from_raw_parts(data, length) },
    };
    let key = |index: usize| {
        // SAFETY: as above; both arrays have `num_keys` entries.
        let (data, length) = unsafe { (*request.keys.add(index), *request.key_lengths.add(index)) };
        bytes(data, length)
    };
    let keys: Vec<&[u8]> = (0..request.num_keys).map(key).collect();
    let [first, second] = [0, 1].map(|index| bytes(request.values[index], request.value_lengths[index]));
    let timeout = Duration::from_millis(u64::try_from(request.timeout_ms).unwrap_or(0));
    match (request.operation, &keys[..]) {
        (0, [key]) => backend.set(key, first, timeout).map(|()| Answer::Done),
        (1, [key]) => backend.get(key, timeout).map(Answer::Bytes),
        (2, [key]) => backend.compare_set(key, first, second, timeout).map(Answer::Bytes),
        (3, [key]) => backend.append(key, first, timeout).map(|()| Answer::Done),
        (4, [key]) => backend.add(key, request.amount, timeout).map(Answer::Number),
        (5, [key]) => backend.delete_key(key, timeout).map(|was_there| Answer::Number(was_there.into())),
        (6, _) => backend.num_keys(timeout).map(Answer::Number),
        (7, keys) => backend.check(keys, timeout).map(|are_there| Answer::Number(are_there.into())),
        (8, keys) => backend.wait(keys, timeout).map(|()| Answer::Done),
        (other, keys) => Err(Error::invalid("Store", format!("there is no operation {other} of {} keys", keys.len()))),
    }
}

/// # Safety
/// `data` must come from [`Store::from_backend`] and be passed here once.
unsafe extern "C" fn drop_backend(data: *mut c_void) {
    // SAFETY: the caller upholds that this is the box that was given away.
    let backend = unsafe { Box::from_raw(data.cast::<Backend>()) };
    // A panic must not unwind into C++, and there is nobody to tell.
    let _panic = catch_unwind(AssertUnwindSafe(|| drop(backend)));
}
