//! Whether libtorch may use algorithms whose result depends on the order in which threads finish.

use crate::border::check;
use crate::error::Result;

unsafe extern "C" {
    fn te_set_deterministic_algorithms(enabled: bool, warn_only: bool) -> i32;
    fn te_deterministic_algorithms(enabled: *mut bool) -> i32;
}

/// From here on libtorch uses deterministic algorithms only, in the whole process (`torch.use_deterministic_algorithms`).
/// An operation that has none is an error, or with `warn_only` a warning.
///
/// On NVIDIA GPUs, cuBLAS asks for `CUBLAS_WORKSPACE_CONFIG=:4096:8` in the environment of the process as well.
///
/// # Errors
/// None that is expected.
///
/// ```
/// torch_ext::use_deterministic_algorithms(true, false)?;
/// assert!(torch_ext::are_deterministic_algorithms_enabled()?);
/// torch_ext::use_deterministic_algorithms(false, false)?;
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn use_deterministic_algorithms(enabled: bool, warn_only: bool) -> Result<()> {
    // SAFETY: sets two flags of libtorch's own context; no pointer is passed.
    check("use_deterministic_algorithms", unsafe { te_set_deterministic_algorithms(enabled, warn_only) })
}

/// Does libtorch use deterministic algorithms only?
///
/// # Errors
/// None that is expected.
///
/// ```
/// assert!(!torch_ext::are_deterministic_algorithms_enabled()?);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn are_deterministic_algorithms_enabled() -> Result<bool> {
    let mut enabled = false;
    // SAFETY: the place is ours and lives through the call.
    check("are_deterministic_algorithms_enabled", unsafe { te_deterministic_algorithms(&raw mut enabled) })?;
    Ok(enabled)
}
