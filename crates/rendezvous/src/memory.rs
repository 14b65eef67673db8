//! The keys and values of a run, and who waits for them.

use crate::error::{Error, Result, shown};
use crate::{Store, wire};
use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most that all keys and values take together.
const MAX_BYTES: usize = 1 << 28;

/// A store in the memory of one process: for its threads, and behind a [`Server`](crate::Server) for other processes.
///
/// ```
/// use accelerate_rendezvous::{Memory, Store};
/// use std::time::Duration;
///
/// let (store, soon) = (Memory::default(), Duration::from_secs(1));
/// store.set(b"answer", b"42", soon)?;
/// assert_eq!(store.add(b"answer", 1, soon)?, 43);
/// assert_eq!(store.get(b"answer", soon)?, b"43");
/// assert!(store.wait(&[b"question"], Duration::from_millis(1)).unwrap_err().is_timeout());
/// # Ok::<(), accelerate_rendezvous::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Memory {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    values: HashMap<Vec<u8>, Vec<u8>>,
    num_bytes: usize,
    is_closed: bool,
}

impl State {
    fn put(&mut self, key: &[u8], value: Vec<u8>) -> Result<()> {
        wire::check_sizes(key, &value)?;
        let old = self.values.get(key).map_or(0, |old| key.len() + old.len());
        let num_bytes = self.num_bytes - old + key.len() + value.len();
        if num_bytes > MAX_BYTES {
            return Err(Error::TooLarge { what: "a store", found: num_bytes, limit: MAX_BYTES });
        }
        self.num_bytes = num_bytes;
        self.values.insert(key.to_vec(), value);
        Ok(())
    }

    fn has(&self, keys: &[&[u8]]) -> bool {
        keys.iter().all(|key| self.values.contains_key(*key))
    }
}

impl Memory {
    // Every statement leaves the state whole, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all waits, now and later, with an error.
    pub(crate) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
        let changed = change(&mut self.lock());
        self.changed.notify_all();
        changed
    }

    fn wait_until(&self, keys: &[&[u8]], timeout: Duration) -> Result<MutexGuard<'_, State>> {
        let begin = Instant::now();
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return Err(Error::Closed);
            }
            if state.has(keys) {
                return Ok(state);
            }
            let Some(left) = timeout.checked_sub(begin.elapsed()).filter(|left| !left.is_zero()) else {
                let missing: Vec<&[u8]> = keys.iter().copied().filter(|key| !state.values.contains_key(*key)).collect();
                return Err(Error::NotSet { keys: shown(&missing), timeout });
            };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Store for Memory {
    fn set(&self, key: &[u8], value: &[u8], _timeout: Duration) -> Result<()> {
        self.change(|state| state.put(key, value.to_vec()))
    }

    fn get(&self, key: &[u8], timeout: Duration) -> Result<Vec<u8>> {
        let state = self.wait_until(&[key], timeout)?;
        Ok(state.values.get(key).cloned().unwrap_or_default())
    }

    fn compare_set(&self, key: &[u8], expected: &[u8], desired: &[u8], _timeout: Duration) -> Result<Vec<u8>> {
        self.change(|state| match state.values.get(key) {
            Some(present) if present != expected => Ok(present.clone()),
            None if !expected.is_empty() => Ok(expected.to_vec()),
            _ => {
                state.put(key, desired.to_vec())?;
                Ok(desired.to_vec())
            }
        })
    }

    fn append(&self, key: &[u8], value: &[u8], _timeout: Duration) -> Result<()> {
        self.change(|state| {
            let present = state.values.get(key).map(Vec::as_slice).unwrap_or_default();
            let value = [present, value].concat();
            state.put(key, value)
        })
    }

    fn add(&self, key: &[u8], amount: i64, _timeout: Duration) -> Result<i64> {
        self.change(|state| {
            let wrong = |reason| Error::NotANumber { key: shown(&[key]), reason };
            let present = match state.values.get(key) {
                Some(text) => std::str::from_utf8(text)
                    .ok()
                    .and_then(|text| text.parse::<i64>().ok())
                    .ok_or_else(|| wrong("it is not a decimal number of 64 bits"))?,
                None => 0,
            };
            let sum = present.checked_add(amount).ok_or_else(|| wrong("the sum has more than 64 bits"))?;
            state.put(key, sum.to_string().into_bytes())?;
            Ok(sum)
        })
    }

    fn delete_key(&self, key: &[u8], _timeout: Duration) -> Result<bool> {
        self.change(|state| {
            let removed = state.values.remove(key);
            state.num_bytes -= removed.as_ref().map_or(0, |value| key.len() + value.len());
            Ok(removed.is_some())
        })
    }

    fn num_keys(&self, _timeout: Duration) -> Result<u64> {
        Ok(self.lock().values.len() as u64)
    }

    fn check(&self, keys: &[&[u8]], _timeout: Duration) -> Result<bool> {
        Ok(self.lock().has(keys))
    }

    fn wait(&self, keys: &[&[u8]], timeout: Duration) -> Result<()> {
        self.wait_until(keys, timeout).map(drop)
    }
}
