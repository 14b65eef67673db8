//! Copies of bytes, and sums, whose stores go through the processor's caches, or past them.

use std::ptr;

/// How a copy writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CopyMode {
    /// Into the caches of this processor.
    #[default]
    Cached,
    /// Past the caches, into memory: for what this processor does not need again soon, and for what one needs that has caches of its
    /// own, to which reading memory is cheaper than asking this one's caches. Where the processor has no such stores, as
    /// [`Cached`](Self::Cached).
    NonTemporal,
}

/// # Safety
/// As [`ptr::copy_nonoverlapping`].
pub(crate) unsafe fn copy_with(mode: CopyMode, from: *const u8, to: *mut u8, num_bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    if mode == CopyMode::NonTemporal && std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the caller's promise; the processor has AVX.
        return unsafe { copy_streamed(from, to, num_bytes) };
    }
    let _ = mode;
    // SAFETY: the caller's promise.
    unsafe { ptr::copy_nonoverlapping(from, to, num_bytes) };
}

/// # Safety
/// As [`ptr::copy_nonoverlapping`], on a processor with AVX.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn copy_streamed(from: *const u8, to: *mut u8, num_bytes: usize) {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    const LINE: usize = 64;
    let head = to.align_offset(LINE).min(num_bytes);
    let num_lines = (num_bytes - head) / LINE;
    // SAFETY: head, lines and tail are parts of the two ranges that the caller vouches for; a line of `to` begins at a multiple of
    // 64 bytes, as the stores ask for.
    unsafe {
        ptr::copy_nonoverlapping(from, to, head);
        let (mut from, mut to) = (from.add(head), to.add(head));
        for _ in 0..num_lines {
            let first = _mm256_loadu_si256(from.cast::<__m256i>());
            let second = _mm256_loadu_si256(from.add(32).cast::<__m256i>());
            _mm256_stream_si256(to.cast::<__m256i>(), first);
            _mm256_stream_si256(to.add(32).cast::<__m256i>(), second);
            (from, to) = (from.add(LINE), to.add(LINE));
        }
        _mm_sfence();
        ptr::copy_nonoverlapping(from, to, num_bytes - head - num_lines * LINE);
    }
}

/// Adds numbers to those of `sum`, and copies the results.
///
/// # Safety
/// `numel` floats may be read at `addend`, read and written at `sum`, and written at `to`; no two of these ranges overlap.
pub(crate) unsafe fn add_and_copy(addend: *const f32, sum: *mut f32, to: *mut f32, numel: usize, mode: CopyMode) {
    /// What was added is in the first cache when it is copied.
    const STEP: usize = 2048;
    for start in (0..numel).step_by(STEP) {
        let step = STEP.min(numel - start);
        // SAFETY: a part of the ranges that the caller vouches for.
        unsafe {
            let (addend, sum, to) = (addend.add(start), sum.add(start), to.add(start));
            add(addend, sum, step);
            copy_with(mode, sum.cast(), to.cast(), step * size_of::<f32>());
        }
    }
}

/// # Safety
/// As [`add_and_copy`].
unsafe fn add(addend: *const f32, sum: *mut f32, numel: usize) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the caller's promise; the processor has AVX2.
        return unsafe { add_avx2(addend, sum, numel) };
    }
    // SAFETY: the caller's promise.
    unsafe { add_each(addend, sum, numel) };
}

/// # Safety
/// As [`add_and_copy`], on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn add_avx2(addend: *const f32, sum: *mut f32, numel: usize) {
    // SAFETY: the caller's promise.
    unsafe { add_each(addend, sum, numel) };
}

/// # Safety
/// As [`add_and_copy`].
#[inline(always)]
unsafe fn add_each(addend: *const f32, sum: *mut f32, numel: usize) {
    for at in 0..numel {
        // SAFETY: within the ranges that the caller vouches for. Tensors may begin anywhere.
        unsafe {
            let added = sum.add(at).read_unaligned() + addend.add(at).read_unaligned();
            sum.add(at).write_unaligned(added);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of which sums round.
    fn floats(numel: usize, from: f32) -> Vec<f32> {
        (0..numel).map(|at| (at as f32 * 0.7 + from).sin() * 1e3).collect()
    }

    #[test]
    fn copies_of_any_length_and_place_write_their_bytes_and_no_others() {
        for mode in [CopyMode::Cached, CopyMode::NonTemporal] {
            for num_bytes in [0, 1, 31, 63, 64, 65, 127, 128, 200, 5000] {
                for (start, place) in [(0, 0), (1, 0), (0, 1), (7, 60), (64, 63)] {
                    let from: Vec<u8> = (0..6000_usize).map(|at| (at * 7 % 251) as u8).collect();
                    let mut to = vec![255; 6000];
                    // SAFETY: both have more than 5000 + 64 bytes.
                    unsafe { copy_with(mode, from.as_ptr().add(start), to.as_mut_ptr().add(place), num_bytes) };
                    assert_eq!(to[place..place + num_bytes], from[start..start + num_bytes], "{mode:?} {num_bytes}");
                    let beside = to[..place].iter().chain(&to[place + num_bytes..]);
                    assert!(beside.into_iter().all(|byte| *byte == 255), "{mode:?} {num_bytes} {place}");
                }
            }
        }
    }

    #[test]
    fn sums_have_the_bits_of_additions_and_are_in_both_places() {
        for mode in [CopyMode::Cached, CopyMode::NonTemporal] {
            for numel in [0, 1, 7, 8, 1023, 1024, 1025, 3000] {
                let (addend, mut sum, mut to) = (floats(numel, 0.0), floats(numel, 0.4), vec![0.0; numel + 1]);
                let wanted: Vec<f32> = addend.iter().zip(&sum).map(|(addend, own)| own + addend).collect();
                // SAFETY: all three have as many floats.
                unsafe { add_and_copy(addend.as_ptr(), sum.as_mut_ptr(), to.as_mut_ptr(), numel, mode) };
                assert_eq!(sum, wanted);
                assert_eq!((&to[..numel], to[numel]), (&*wanted, 0.0), "{mode:?} {numel}");
            }
        }
    }
}
