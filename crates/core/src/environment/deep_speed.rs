//! What the launcher says about DeepSpeed, in `ACCELERATE_DEEPSPEED_*` variables.

use super::Variables;
use crate::Result;
use crate::config::{Auto, DeepSpeedPlugin, ZeroStage};
use crate::error::environment::EnvironmentErrorKind as Kind;

impl DeepSpeedPlugin {
    /// What the launcher's variables say (`DeepSpeedPlugin.__post_init__` of the reference, `utils/dataclasses.py`);
    /// what they do not mention is `None`. Variables that are set but empty count as not set, and so does "none" for a
    /// path or a norm.
    ///
    /// Read are `ACCELERATE_DEEPSPEED_{CONFIG_FILE, ZERO_STAGE, OFFLOAD_OPTIMIZER_DEVICE, OFFLOAD_PARAM_DEVICE,
    /// OFFLOAD_OPTIMIZER_NVME_PATH, OFFLOAD_PARAM_NVME_PATH, ZERO3_INIT, ZERO3_SAVE_16BIT_MODEL}`,
    /// `ACCELERATE_GRADIENT_ACCUMULATION_STEPS` and `ACCELERATE_GRADIENT_CLIPPING`. `ACCELERATE_CONFIG_DS_FIELDS` is not
    /// needed: [`config`](Self::config) compares the values themselves with the configuration.
    ///
    /// # Errors
    ///
    /// [`Error::is_environment`](crate::Error::is_environment), naming the variable, its value and what it must be;
    /// `ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES` and `ACCELERATE_FP8_BACKEND=MSAMP`, which are not available.
    ///
    /// ```
    /// use accelerate_core::config::{Auto, DeepSpeedPlugin, ZeroStage};
    /// let lookup = |name: &str| match name {
    ///     "ACCELERATE_DEEPSPEED_ZERO_STAGE" => Some("3".to_owned()),
    ///     "ACCELERATE_GRADIENT_CLIPPING" => Some("auto".to_owned()),
    ///     _ => None,
    /// };
    /// let plugin = DeepSpeedPlugin::from_environment(&lookup)?;
    /// assert_eq!((plugin.zero_stage, plugin.gradient_clipping), (Some(ZeroStage::Parameters), Some(Auto::Auto)));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn from_environment(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let variables = Variables { lookup };
        for (name, only, instead) in [
            (
                "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
                None,
                "unset it, and name modules in transformer_cls_names_to_wrap of a FullyShardedDataParallelPlugin",
            ),
            ("ACCELERATE_FP8_BACKEND", Some("MSAMP"), "choose another backend"),
        ] {
            if let Some(value) = variables.text(name).filter(|value| only.is_none_or(|only| only == value)) {
                return Err(Kind::Unavailable { name: name.to_owned(), value, instead }.into());
            }
        }
        let (stage, device) = ("0, 1, 2 or 3", "none, cpu or nvme");
        Ok(Self {
            hf_ds_config: variables
                .parsed("ACCELERATE_DEEPSPEED_CONFIG_FILE", "a path or a JSON object", |text| match text {
                    "none" => Ok(None),
                    text => text.parse().map(Some),
                })?
                .flatten(),
            gradient_accumulation_steps: variables
                .auto("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", |name| variables.count(name))?,
            gradient_clipping: variables.auto("ACCELERATE_GRADIENT_CLIPPING", |name| clipping(&variables, name))?,
            zero_stage: variables
                .number("ACCELERATE_DEEPSPEED_ZERO_STAGE", stage)?
                .map(|number| {
                    let name = "ACCELERATE_DEEPSPEED_ZERO_STAGE".to_owned();
                    ZeroStage::new(number).ok_or(Kind::Value { name, value: number.to_string(), wanted: stage })
                })
                .transpose()?,
            is_train_batch_min: true,
            offload_optimizer_device: variables.parsed(
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
                device,
                str::parse,
            )?,
            offload_param_device: variables.parsed("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", device, str::parse)?,
            offload_optimizer_nvme_path: path(&variables, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH"),
            offload_param_nvme_path: path(&variables, "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"),
            zero3_init_flag: variables.flag("ACCELERATE_DEEPSPEED_ZERO3_INIT")?,
            zero3_save_16bit_model: variables.flag("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL")?,
        })
    }
}

fn path(variables: &Variables<'_>, name: &str) -> Option<std::path::PathBuf> {
    variables.text(name).filter(|path| path != "none").map(Into::into)
}

fn clipping(variables: &Variables<'_>, name: &str) -> Result<Option<f64>> {
    if variables.text(name).is_some_and(|text| text.eq_ignore_ascii_case("none")) {
        return Ok(None);
    }
    let wanted = "a number of at least 0, or auto";
    match variables.number::<f64>(name, wanted)? {
        Some(norm) if !(norm.is_finite() && norm >= 0.0) => {
            Err(Kind::Value { name: name.to_owned(), value: norm.to_string(), wanted }.into())
        }
        norm => Ok(norm),
    }
}

impl Variables<'_> {
    /// A value that may be "auto".
    fn auto<T>(&self, name: &str, read: impl FnOnce(&str) -> Result<Option<T>>) -> Result<Option<Auto<T>>> {
        if self.text(name).is_some_and(|text| text.eq_ignore_ascii_case("auto")) {
            return Ok(Some(Auto::Auto));
        }
        Ok(read(name)?.map(Auto::Value))
    }
}
