//! What kind of processor the tests run on.

/// Is it one of Intel's, on which the values that tests compare with were recorded? MKL computes in another way on those of
/// other makers, so the last bits of products and of functions such as `erfinv` and `sqrt` differ there.
pub(crate) fn is_intel() -> bool {
    std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains("GenuineIntel"))
}
