#![doc = include_str!("../README.md")]

mod client;
mod error;
mod handshake;
mod memory;
mod server;
mod wire;

pub use client::{Client, ConnectOptions};
pub use error::{Error, Result};
pub use handshake::Secret;
pub use memory::Memory;
pub use server::{Server, ServerOptions};

use std::time::Duration;

/// Keys and values that all ranks of a run see. Each call returns within its `timeout`, and a little more for the way.
pub trait Store: Send + Sync {
    /// Writes a value.
    ///
    /// # Errors
    /// Of all calls: the server cannot be reached ([`Error::is_connection`]), has not answered in time
    /// ([`Error::is_timeout`]), or refuses what is too large.
    fn set(&self, key: &[u8], value: &[u8], timeout: Duration) -> Result<()>;

    /// Reads a value, and waits until it is there.
    fn get(&self, key: &[u8], timeout: Duration) -> Result<Vec<u8>>;

    /// Writes `desired` if the present value is `expected`, or if there is none and `expected` is empty. Returns the value
    /// afterwards, or `expected` where there is none.
    fn compare_set(&self, key: &[u8], expected: &[u8], desired: &[u8], timeout: Duration) -> Result<Vec<u8>>;

    /// Adds to the end of a value.
    fn append(&self, key: &[u8], value: &[u8], timeout: Duration) -> Result<()>;

    /// Adds to a number, written as decimal digits, and returns the sum. No value counts as 0.
    fn add(&self, key: &[u8], amount: i64, timeout: Duration) -> Result<i64>;

    /// Removes a key; `true` if it was there.
    fn delete_key(&self, key: &[u8], timeout: Duration) -> Result<bool>;

    /// Number of keys.
    fn num_keys(&self, timeout: Duration) -> Result<u64>;

    /// Are all these keys there? Does not wait for them.
    fn check(&self, keys: &[&[u8]], timeout: Duration) -> Result<bool>;

    /// Waits until all keys are there.
    fn wait(&self, keys: &[&[u8]], timeout: Duration) -> Result<()>;
}
