//! The two kernels of loss scaling (what `torch.amp.GradScaler` is made of); neither waits for the device.

use crate::border::{Handle, check, handle};
use crate::error::Result;
use crate::tensor_vec::TensorList;
use tch::Tensor;

unsafe extern "C" {
    fn te_amp_unscale(grads: Handle, found_inf: Handle, inv_scale: Handle) -> i32;
    fn te_amp_update_scale(
        scale: Handle,
        growth_tracker: Handle,
        found_inf: Handle,
        growth_factor: f64,
        backoff_factor: f64,
        growth_interval: i64,
    ) -> i32;
}

/// Multiplies each gradient by `inv_scale` in place, and sets `found_inf` to one if any entry is not finite.
///
/// `found_inf` and `inv_scale` are float tensors of one entry on the gradients' device. `found_inf` is never set back
/// to zero, so that several lists can share one. The gradients of one call share their device.
/// `torch._amp_foreach_non_finite_check_and_unscale_`.
///
/// ```
/// use tch::Tensor;
/// let gradient = Tensor::from_slice(&[2f32, f32::INFINITY]);
/// let found_inf = Tensor::from(0f32);
/// torch_ext::amp::non_finite_check_and_unscale_(&[&gradient], &found_inf, &Tensor::from(0.5f32))?;
/// assert_eq!(gradient.double_value(&[0]), 1.0);
/// assert_eq!(found_inf.double_value(&[]), 1.0);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn non_finite_check_and_unscale_(grads: &dyn TensorList, found_inf: &Tensor, inv_scale: &Tensor) -> Result<()> {
    let grads = grads.lend();
    if grads.is_empty() {
        return Ok(());
    }
    // SAFETY: all handles are borrowed for the call.
    check("amp::non_finite_check_and_unscale_", unsafe {
        te_amp_unscale(grads.raw(), handle(found_inf), handle(inv_scale))
    })
}

/// How [`update_scale_`] moves the scale. Python's defaults: 2.0, 0.5, 2000.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScaleUpdate {
    /// The scale is multiplied by this after `growth_interval` steps in a row without infinities.
    pub growth_factor: f64,
    /// The scale is multiplied by this after a step with infinities.
    pub backoff_factor: f64,
    /// Steps without infinities before the scale grows.
    pub growth_interval: i64,
}

/// Moves the loss scale after a step, in place.
///
/// `scale` and `found_inf` are float scalars on the same device, `growth_tracker` an `Int` scalar that counts the steps
/// since the last change. `torch._amp_update_scale_`.
///
/// ```
/// use tch::Tensor;
/// use torch_ext::amp::{ScaleUpdate, update_scale_};
/// let (scale, tracker) = (Tensor::from(1024f32), Tensor::from(0i32));
/// let rule = ScaleUpdate { growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 1 };
/// update_scale_(&scale, &tracker, &Tensor::from(1f32), &rule)?;
/// assert_eq!(scale.double_value(&[]), 512.0);
/// update_scale_(&scale, &tracker, &Tensor::from(0f32), &rule)?;
/// assert_eq!(scale.double_value(&[]), 1024.0);
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub fn update_scale_(scale: &Tensor, growth_tracker: &Tensor, found_inf: &Tensor, rule: &ScaleUpdate) -> Result<()> {
    // SAFETY: all handles are borrowed for the call.
    check("amp::update_scale_", unsafe {
        te_amp_update_scale(
            handle(scale),
            handle(growth_tracker),
            handle(found_inf),
            rule.growth_factor,
            rule.backoff_factor,
            rule.growth_interval,
        )
    })
}
