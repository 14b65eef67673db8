//! Whether libtorch may use algorithms whose result depends on the order in which threads finish.

use crate::border::check;
use crate::error::Result;

unsafe extern "C" {
    fn te_set_deterministic_algorithms(enabled: bool, warn_only: bool) -> i32;
    fn te_deterministic_algorithms(enabled: *mut bool) -> i32;
}

/// How strict [`use_deterministic_algorithms`] is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeterministicOptions {
    /// Is an operation that has no deterministic algorithm a warning? Default false: it is an error.
    pub warn_only: bool,
}

/// From here on libtorch uses deterministic algorithms only, in the whole process, or any again
/// (`torch.use_deterministic_algorithms`).
///
/// On NVIDIA GPUs, cuBLAS asks for `CUBLAS_WORKSPACE_CONFIG=:4096:8` in the environment of the process as well.
///
/// # Errors
/// None that is expected.
///
/// ```
/// torch_ext::use_deterministic_algorithms(true, Default::default())?;
/// assert!(torch_ext::are_deterministic_algorithms_enabled()?);
/// torch_ext::use_deterministic_algorithms(false, Default::default())?;
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn use_deterministic_algorithms(enabled: bool, options: DeterministicOptions) -> Result<()> {
    // SAFETY: sets two flags of libtorch's own context; no pointer is passed.
    check("use_deterministic_algorithms", unsafe { te_set_deterministic_algorithms(enabled, options.warn_only) })
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
