//! How losses are scaled against underflow in fp16.

use crate::Result;
use crate::error::config::ConfigErrorKind;
use crate::settings::record::record;

record! {
    /// How the loss is scaled against underflow in fp16 training (`GradScalerKwargs` of the reference,
    /// `utils/dataclasses.py`).
    ///
    /// ```
    /// use accelerate_core::config::GradScalerSettings;
    /// let settings = GradScalerSettings::default();
    /// assert_eq!((settings.init_scale, settings.growth_interval), (65536.0, 2000));
    /// ```
    GradScalerKwargs => GradScalerSettings, section "grad_scaler_config", keys "", variables "ACCELERATE_GRAD_SCALER_" {
        /// Scale of the first step, above 0. Default 65,536.
        init_scale: f64 = 65_536.0 => setting();
        /// Factor by which the scale grows, above 1. Default 2.
        growth_factor: f64 = 2.0 => setting();
        /// Factor by which the scale shrinks after an overflow, between 0 and 1. Default 0.5.
        backoff_factor: f64 = 0.5 => setting();
        /// Steps without overflow after which the scale grows, at least 1. Default 2000.
        growth_interval: u32 = 2000 => setting().at_least(1);
        /// Whether losses are scaled at all. Default true.
        enabled: bool = true => setting();
    }
}

impl GradScalerSettings {
    /// Checks that the scale can grow and shrink.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config), naming the field, its value and its range.
    ///
    /// ```
    /// # use accelerate_core::config::GradScalerSettings;
    /// let kwargs = GradScalerSettings { growth_factor: 1.0, ..Default::default() };
    /// assert_eq!(kwargs.check().unwrap_err().to_string(), "growth_factor is 1, but must be above 1");
    /// ```
    pub fn check(&self) -> Result<()> {
        let in_range = [
            ("init_scale", self.init_scale, self.init_scale > 0.0 && self.init_scale.is_finite(), "above 0"),
            ("growth_factor", self.growth_factor, self.growth_factor > 1.0, "above 1"),
            (
                "backoff_factor",
                self.backoff_factor,
                self.backoff_factor > 0.0 && self.backoff_factor < 1.0,
                "between 0 and 1",
            ),
        ];
        for (name, found, holds, wanted) in in_range {
            if !holds {
                return Err(ConfigErrorKind::OutOfRange { name, found, wanted }.into());
            }
        }
        if self.growth_interval == 0 {
            return Err(ConfigErrorKind::MustBePositive { name: "growth_interval" }.into());
        }
        Ok(())
    }
}
