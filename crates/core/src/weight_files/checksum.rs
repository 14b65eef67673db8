//! The checksum by which saved files are recognised.

use std::fmt;
use twox_hash::xxhash3_128::Hasher;

/// XXH3 with 128 bits ([its specification](https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md)) of bytes that come one
/// after the other. It is shown as 32 hexadecimal digits, the highest first, as `xxhsum -H2` does.
///
/// It finds what disks, networks and mistakes do to a file. Against somebody who means it, no checksum helps: who can write the
/// file can write the manifest, too.
///
/// ```
/// use accelerate_core::weight_files::Checksum;
/// let mut in_parts = Checksum::new();
/// in_parts.update(b"acceler");
/// in_parts.update(b"ate");
/// assert_eq!(in_parts.to_string(), Checksum::of(b"accelerate").to_string());
/// assert_eq!(Checksum::new().to_string(), "99aa06d3014798d86001c324468d497f");
/// ```
#[derive(Clone)]
pub struct Checksum(Hasher);

impl Checksum {
    /// As many as it is shown with.
    pub const NUM_DIGITS: usize = 32;

    /// Of nothing yet.
    pub fn new() -> Self {
        Self(Hasher::new())
    }

    /// Of all these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        let mut checksum = Self::new();
        checksum.update(bytes);
        checksum
    }

    /// Goes on with these bytes. Large pieces are the fastest, up to what the processor's cache holds.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The number that it is.
    pub fn value(&self) -> u128 {
        self.0.finish_128()
    }

    /// Is this how one is written?
    pub fn is_written_as(text: &str) -> bool {
        let is_digit = |digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f');
        text.len() == Self::NUM_DIGITS && text.bytes().all(is_digit)
    }
}

impl Default for Checksum {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:0width$x}", self.value(), width = Self::NUM_DIGITS)
    }
}

impl fmt::Debug for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checksum({self})")
    }
}
