//! The schedules that are one formula each.

use std::f64::consts::PI;

/// 1, always.
///
/// ```
/// assert_eq!(accelerate_core::schedule::constant(1000), 1.0);
/// ```
pub const fn constant(_step: usize) -> f64 {
    1.0
}

/// From 0 to 1 in `num_warmup_steps`, then 1.
///
/// ```
/// # use accelerate_core::schedule::constant_with_warmup;
/// assert_eq!([0, 5, 10, 20].map(|step| constant_with_warmup(step, 10)), [0.0, 0.5, 1.0, 1.0]);
/// ```
pub fn constant_with_warmup(step: usize, num_warmup_steps: usize) -> f64 {
    warmup(step, num_warmup_steps).unwrap_or(1.0)
}

/// From 0 to 1 in `num_warmup_steps`, then straight down to 0 at `num_training_steps`, and 0 after.
///
/// ```
/// # use accelerate_core::schedule::linear_with_warmup;
/// let multipliers = [0, 1, 2, 6, 10, 11].map(|step| linear_with_warmup(step, 2, 10));
/// assert_eq!(multipliers, [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]);
/// ```
pub fn linear_with_warmup(step: usize, num_warmup_steps: usize, num_training_steps: usize) -> f64 {
    warmup(step, num_warmup_steps).unwrap_or_else(|| {
        let left = num_training_steps.saturating_sub(step) as f64;
        left / num_training_steps.saturating_sub(num_warmup_steps).max(1) as f64
    })
}

/// From 0 to 1 in `num_warmup_steps`, then along a cosine of `num_cycles` waves until `num_training_steps`.
/// Half a wave (0.5) comes down to 0 once, and is what is usually meant.
///
/// ```
/// # use accelerate_core::schedule::cosine_with_warmup;
/// let multipliers = [0, 2, 6, 10].map(|step| cosine_with_warmup(step, 2, 10, 0.5));
/// for (found, wanted) in multipliers.into_iter().zip([0.0, 1.0, 0.5, 0.0]) {
///     assert!((found - wanted).abs() < 1e-12);
/// }
/// ```
pub fn cosine_with_warmup(step: usize, num_warmup_steps: usize, num_training_steps: usize, num_cycles: f64) -> f64 {
    warmup(step, num_warmup_steps).unwrap_or_else(|| {
        let progress = progress(step, num_warmup_steps, num_training_steps);
        (0.5 * (1.0 + (PI * num_cycles * 2.0 * progress).cos())).max(0.0)
    })
}

/// From 0 to 1 in `num_warmup_steps`, then `num_cycles` times along a half cosine from 1 to 0 until
/// `num_training_steps`, and 0 after.
///
/// ```
/// # use accelerate_core::schedule::cosine_with_hard_restarts_with_warmup as schedule;
/// assert_eq!(schedule(0, 0, 10, 2), 1.0);
/// assert_eq!(schedule(5, 0, 10, 2), 1.0); // the restart
/// assert_eq!(schedule(10, 0, 10, 2), 0.0);
/// ```
pub fn cosine_with_hard_restarts_with_warmup(
    step: usize,
    num_warmup_steps: usize,
    num_training_steps: usize,
    num_cycles: usize,
) -> f64 {
    warmup(step, num_warmup_steps).unwrap_or_else(|| {
        let progress = progress(step, num_warmup_steps, num_training_steps);
        if progress >= 1.0 {
            return 0.0;
        }
        (0.5 * (1.0 + (PI * ((num_cycles as f64 * progress) % 1.0)).cos())).max(0.0)
    })
}

/// From 0 to 1 in `num_warmup_steps`, then along `power` of a straight line from 1 down to `end_multiplier`
/// at `num_training_steps`, and `end_multiplier` after.
///
/// With no warmup and an `end_multiplier` of 0 this is PyTorch's `PolynomialLR`.
///
/// ```
/// # use accelerate_core::schedule::polynomial_with_warmup;
/// let multipliers = [0, 5, 10, 99].map(|step| polynomial_with_warmup(step, 0, 10, 2.0, 0.0));
/// assert_eq!(multipliers, [1.0, 0.25, 0.0, 0.0]);
/// ```
pub fn polynomial_with_warmup(
    step: usize,
    num_warmup_steps: usize,
    num_training_steps: usize,
    power: f64,
    end_multiplier: f64,
) -> f64 {
    warmup(step, num_warmup_steps).unwrap_or_else(|| {
        if step > num_training_steps {
            return end_multiplier;
        }
        let left = 1.0 - progress(step, num_warmup_steps, num_training_steps);
        (1.0 - end_multiplier) * left.powf(power) + end_multiplier
    })
}

/// From 0 to 1 in `num_warmup_steps`, then down with the inverse square root of the step. `timescale` is
/// the length of the square root's unit; `transformers` takes `num_warmup_steps`, or 10,000 without any.
///
/// ```
/// # use accelerate_core::schedule::inverse_sqrt_with_warmup;
/// assert_eq!([4, 16, 64].map(|step| inverse_sqrt_with_warmup(step, 4, 4)), [1.0, 0.5, 0.25]);
/// ```
pub fn inverse_sqrt_with_warmup(step: usize, num_warmup_steps: usize, timescale: usize) -> f64 {
    warmup(step, num_warmup_steps).unwrap_or_else(|| {
        let timescale = timescale.max(1);
        let shifted = (step - num_warmup_steps).saturating_add(timescale) as f64;
        (timescale as f64 / shifted).sqrt()
    })
}

/// `gamma` to the power of the number of whole `step_size` periods so far (PyTorch's `StepLR`).
///
/// ```
/// # use accelerate_core::schedule::step_decay;
/// assert_eq!([0, 2, 3, 6].map(|step| step_decay(step, 3, 0.5)), [1.0, 1.0, 0.5, 0.25]);
/// ```
pub fn step_decay(step: usize, step_size: usize, gamma: f64) -> f64 {
    power(gamma, step / step_size.max(1))
}

/// `gamma` to the power of the number of `milestones` reached (PyTorch's `MultiStepLR`). Order does not
/// matter; a milestone that is listed twice counts twice.
///
/// ```
/// # use accelerate_core::schedule::multi_step;
/// assert_eq!([0, 3, 7].map(|step| multi_step(step, &[3, 7], 0.5)), [1.0, 0.5, 0.25]);
/// ```
pub fn multi_step(step: usize, milestones: &[usize], gamma: f64) -> f64 {
    power(gamma, milestones.iter().filter(|&&milestone| milestone <= step).count())
}

/// `gamma` to the power of the step (PyTorch's `ExponentialLR`).
///
/// ```
/// # use accelerate_core::schedule::exponential;
/// assert_eq!(exponential(3, 0.5), 0.125);
/// ```
pub fn exponential(step: usize, gamma: f64) -> f64 {
    power(gamma, step)
}

/// Along a cosine from 1 at step 0 to `end_multiplier` at `t_max`, and up again after
/// (PyTorch's `CosineAnnealingLR` in closed form; `end_multiplier` is `eta_min` over the initial rate).
///
/// ```
/// # use accelerate_core::schedule::cosine_annealing;
/// assert_eq!(cosine_annealing(0, 10, 0.0), 1.0);
/// assert!((cosine_annealing(5, 10, 0.0) - 0.5).abs() < 1e-12);
/// ```
pub fn cosine_annealing(step: usize, t_max: usize, end_multiplier: f64) -> f64 {
    let angle = PI * step as f64 / t_max.max(1) as f64;
    end_multiplier + (1.0 - end_multiplier) * (1.0 + angle.cos()) / 2.0
}

/// The multiplier while warming up; `None` once warm.
fn warmup(step: usize, num_warmup_steps: usize) -> Option<f64> {
    (step < num_warmup_steps).then(|| step as f64 / num_warmup_steps as f64)
}

/// How much of the way from the end of the warmup to the end of training is done; may exceed 1.
fn progress(step: usize, num_warmup_steps: usize, num_training_steps: usize) -> f64 {
    let way = num_training_steps.saturating_sub(num_warmup_steps).max(1);
    step.saturating_sub(num_warmup_steps) as f64 / way as f64
}

fn power(base: f64, exponent: usize) -> f64 {
    base.powf(exponent as f64)
}
