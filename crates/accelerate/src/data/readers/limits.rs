//! What a file may ask for. Numbers in files are promises of whoever wrote them, and a small file can become a large
//! value; a training program shares its machine with others.

/// Default for the longest row of a text file, in bytes.
pub(super) const MAX_ROW_BYTES: u64 = 16 << 20;

/// The most columns that a file may have.
#[cfg(any(feature = "arrow", feature = "csv", feature = "parquet"))]
pub(super) const MAX_COLUMNS: usize = 100_000;

/// The longest name of a column, in bytes: libraries copy it for each row.
#[cfg(any(feature = "arrow", feature = "csv", feature = "parquet"))]
pub(super) const MAX_NAME_BYTES: usize = 4096;

/// The longest description of columns and of what else is where in a Parquet or Arrow file, in bytes.
#[cfg(any(feature = "arrow", feature = "parquet"))]
pub(super) const MAX_METADATA_BYTES: u64 = 64 << 20;

/// The deepest that lists and structs may be nested in each other in a column: libraries go down by recursion.
#[cfg(feature = "parquet")]
pub(super) const MAX_NESTED_TYPES: usize = 64;

/// What a part of a file may take in memory in any case.
#[cfg(any(feature = "arrow", feature = "parquet"))]
const UNPACKED_BYTES: u64 = 128 << 20;

/// How many times its size in the file a part may take. Text shrinks to a tenth, and seldom to a hundredth of its size.
#[cfg(any(feature = "arrow", feature = "parquet"))]
const MAX_EXPANSION: u64 = 1000;

/// How many bytes of memory a part may take that takes `stored_bytes` in its file. `chosen` is the user's own limit.
#[cfg(any(feature = "arrow", feature = "parquet"))]
pub(super) fn unpacked_limit(stored_bytes: u64, chosen: Option<u64>) -> u64 {
    chosen.unwrap_or_else(|| stored_bytes.saturating_mul(MAX_EXPANSION).max(UNPACKED_BYTES))
}
