//! `adapter_config.json`, as PEFT writes and reads it.

use super::{InitLoraWeights, LoraConfig, Modules};
use crate::error::Result;
use crate::error::lora::LoraErrorKind as Kind;
use crate::weight_files::shown;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// What is written and has nothing to do with what an adapter computes.
const WITHOUT_EFFECT: [&str; 5] =
    ["auto_mapping", "peft_version", "runtime_config", "qalora_group_size", "megatron_core"];

/// What makes another adapter of it, or another model. Each is off where it is null, false or empty.
const UNSUPPORTED: [(&str, &str); 17] = [
    ("use_dora", "the magnitudes of DoRA are parameters that are not computed with"),
    ("use_qalora", "its inputs are averaged in groups"),
    ("use_bdlora", "its matrices are block-diagonal"),
    ("velora_config", "its gradients are compressed"),
    ("alora_invocation_tokens", "it acts on some tokens only"),
    ("monteclora_config", "its weights are sampled"),
    ("arrow_config", "it is mixed out of several adapters"),
    ("kasa_config", "it changes the weights of the model"),
    ("loftq_config", "it changes the weights of the model"),
    ("eva_config", "its matrices begin from activations"),
    ("corda_config", "it changes the weights of the model"),
    ("lora_ga_config", "it changes the weights of the model"),
    ("layer_replication", "it repeats layers of the model"),
    ("megatron_config", "it is for Megatron's layers"),
    ("target_parameters", "adapters go on layers, not on single parameters"),
    ("trainable_token_indices", "some rows of a table are trained"),
    ("ensure_weight_tying", "adapters of tied layers are not tied"),
];

const INIT_CHANGES: &str = "it begins from something else than true, false and \"gaussian\" do, and some of these change the \
                            weights of the model, too. Where it does not (eva, orthogonal), a trained adapter is the same with \
                            true in the file";

impl LoraConfig {
    /// The content of `adapter_config.json`, for PEFT and for [`from_json`](Self::from_json). It says `inference_mode: true`, as
    /// all of PEFT's files do.
    ///
    /// ```
    /// use accelerate_core::lora::LoraConfig;
    /// let config = LoraConfig { target_modules: Some(["q_proj"].into()), inference_mode: true, ..Default::default() };
    /// assert_eq!(LoraConfig::from_json(&config.to_json())?, config);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn to_json(&self) -> String {
        let modules = |modules: &Option<Modules>| match modules {
            None => Value::Null,
            Some(Modules::List(names)) => json!(names),
            Some(Modules::Pattern(pattern)) => json!(pattern),
        };
        let or_null = |names: &[String]| if names.is_empty() { Value::Null } else { json!(names) };
        let alphas: Map<String, Value> =
            self.alpha_pattern.iter().map(|(name, alpha)| (name.clone(), number(*alpha))).collect();
        let file = json!({
            "alpha_pattern": alphas,
            "auto_mapping": null,
            "base_model_name_or_path": self.base_model_name_or_path,
            "bias": self.bias.as_str(),
            "exclude_modules": modules(&self.exclude_modules),
            "fan_in_fan_out": self.fan_in_fan_out,
            "inference_mode": true,
            "init_lora_weights": match self.init_lora_weights {
                InitLoraWeights::Default => json!(true),
                InitLoraWeights::Random => json!(false),
                InitLoraWeights::Gaussian => json!("gaussian"),
            },
            "layers_pattern": or_null(&self.layers_pattern),
            "layers_to_transform": if self.layers_to_transform.is_empty() { Value::Null } else { json!(self.layers_to_transform) },
            "lora_alpha": number(self.lora_alpha),
            "lora_bias": self.lora_bias,
            "lora_dropout": self.lora_dropout,
            "modules_to_save": match &self.all_modules_to_save()[..] {
                [] => Value::Null,
                names => json!(names),
            },
            "peft_type": "LORA",
            "r": self.r,
            "rank_pattern": self.rank_pattern,
            "revision": self.revision,
            "target_modules": modules(&self.target_modules),
            "task_type": self.task_type.map(super::TaskType::as_str),
            "use_dora": false,
            "use_rslora": self.use_rslora,
        });
        format!("{file:#}")
    }

    /// Reads the content of `adapter_config.json`. Nothing in it is believed: each value is of the type and in the range that
    /// its key wants, what is not there is refused by name, and so are keys that are not known, unless they are off.
    ///
    /// # Errors
    /// [`is_config`](crate::Error::is_config), naming the first key that cannot be used.
    ///
    /// ```
    /// use accelerate_core::lora::LoraConfig;
    /// let error = LoraConfig::from_json(r#"{"peft_type": "LORA", "target_modules": ["q"], "use_dora": true}"#).unwrap_err();
    /// assert!(error.to_string().contains("`use_dora` is true"), "{error}");
    /// ```
    pub fn from_json(text: &str) -> Result<Self> {
        let file: Value = serde_json::from_str(text).map_err(|error| Kind::NotJson { reason: error.to_string() })?;
        let Value::Object(mut file) = file else {
            return Err(Kind::NotJson { reason: "it is not an object".to_owned() }.into());
        };
        match file.remove("peft_type") {
            Some(Value::String(kind)) if kind == "LORA" => {}
            Some(found) => return Err(Kind::PeftType { found: found_text(&found) }.into()),
            None => return Err(Kind::Missing { key: "peft_type" }.into()),
        }
        WITHOUT_EFFECT.iter().for_each(|key| drop(file.remove(*key)));
        let mut reader = Reader { file };
        let config = reader.config()?;
        reader.finish()?;
        config.check()?;
        Ok(config)
    }
}

/// Whole numbers as PEFT's files have them.
fn number(value: f64) -> Value {
    match value.fract() == 0.0 && value.abs() < 1e15 {
        true => json!(value as i64),
        false => json!(value),
    }
}

/// A value as messages show it.
fn found_text(value: &Value) -> String {
    shown(&value.to_string())
}

/// Is it what a feature has that is not used?
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(values) => values.is_empty(),
        Value::Object(values) => values.is_empty(),
        _ => false,
    }
}

/// What is left of a file.
struct Reader {
    file: Map<String, Value>,
}

impl Reader {
    fn config(&mut self) -> Result<LoraConfig> {
        let default = LoraConfig::default();
        Ok(LoraConfig {
            r: self.take("r", "a whole number", as_usize)?.unwrap_or(default.r),
            lora_alpha: self.take("lora_alpha", "a number", Value::as_f64)?.unwrap_or(default.lora_alpha),
            lora_dropout: self.take("lora_dropout", "a number", Value::as_f64)?.unwrap_or(default.lora_dropout),
            target_modules: self.modules("target_modules")?,
            exclude_modules: self.modules("exclude_modules")?,
            modules_to_save: self.names("modules_to_save")?,
            bias: self.text("bias")?.map_or(Ok(default.bias), |text| text.parse())?,
            use_rslora: self.flag("use_rslora")?,
            init_lora_weights: self.init()?,
            fan_in_fan_out: self.flag("fan_in_fan_out")?,
            layers_to_transform: self.take("layers_to_transform", "whole numbers", as_numbers)?.unwrap_or_default(),
            layers_pattern: self.names("layers_pattern")?,
            rank_pattern: self.table("rank_pattern", "names with whole numbers", as_usize)?,
            alpha_pattern: self.table("alpha_pattern", "names with numbers", Value::as_f64)?,
            lora_bias: self.flag("lora_bias")?,
            task_type: self.text("task_type")?.map(|text| text.parse()).transpose()?,
            base_model_name_or_path: self.text("base_model_name_or_path")?,
            revision: self.text("revision")?,
            inference_mode: self.flag("inference_mode")?,
        })
    }

    /// Nothing is left that says something.
    fn finish(self) -> Result<()> {
        let Some((key, value)) = self.file.iter().find(|(_, value)| !is_off(value)) else { return Ok(()) };
        let (name, found) = (shown(key), found_text(value));
        match UNSUPPORTED.iter().find(|(unsupported, _)| unsupported == key) {
            Some((_, why)) => Err(Kind::Unsupported { key: name, found, why }.into()),
            None => Err(Kind::UnknownKey { key: name, found }.into()),
        }
    }

    fn take<T>(
        &mut self,
        key: &str,
        wanted: &'static str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.file.remove(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match read(&value) {
                Some(read) => Ok(Some(read)),
                None => Err(Kind::Value { key: key.to_owned(), found: found_text(&value), wanted }.into()),
            },
        }
    }

    fn flag(&mut self, key: &str) -> Result<bool> {
        Ok(self.take(key, "true or false", Value::as_bool)?.unwrap_or_default())
    }

    fn text(&mut self, key: &str) -> Result<Option<String>> {
        self.take(key, "a text", |value| Some(value.as_str()?.to_owned()))
    }

    /// One name, or a list of them.
    fn names(&mut self, key: &str) -> Result<Vec<String>> {
        let read = |value: &Value| match value {
            Value::String(name) => Some(vec![name.clone()]),
            list => as_names(list),
        };
        Ok(self.take(key, "a list of names", read)?.unwrap_or_default())
    }

    fn modules(&mut self, key: &str) -> Result<Option<Modules>> {
        self.take(key, "a list of names, or a pattern", |value| match value {
            Value::String(pattern) => Some(Modules::Pattern(pattern.clone())),
            list => Some(Modules::List(as_names(list)?)),
        })
    }

    fn table<T>(
        &mut self,
        key: &str,
        wanted: &'static str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<BTreeMap<String, T>> {
        let table =
            |value: &Value| value.as_object()?.iter().map(|(name, value)| Some((name.clone(), read(value)?))).collect();
        Ok(self.take(key, wanted, table)?.unwrap_or_default())
    }

    fn init(&mut self) -> Result<InitLoraWeights> {
        let key = "init_lora_weights";
        match self.file.remove(key) {
            None | Some(Value::Null | Value::Bool(true)) => Ok(InitLoraWeights::Default),
            Some(Value::Bool(false)) => Ok(InitLoraWeights::Random),
            Some(Value::String(name)) if name.eq_ignore_ascii_case("gaussian") => Ok(InitLoraWeights::Gaussian),
            Some(Value::String(name)) => {
                Err(Kind::Unsupported { key: key.to_owned(), found: format!("{:?}", shown(&name)), why: INIT_CHANGES }
                    .into())
            }
            Some(other) => {
                let wanted = "true, false or \"gaussian\"";
                Err(Kind::Value { key: key.to_owned(), found: found_text(&other), wanted }.into())
            }
        }
    }
}

fn as_usize(value: &Value) -> Option<usize> {
    usize::try_from(value.as_u64()?).ok()
}

fn as_numbers(value: &Value) -> Option<Vec<usize>> {
    match value {
        Value::Array(numbers) => numbers.iter().map(as_usize).collect(),
        number => Some(vec![as_usize(number)?]),
    }
}

fn as_names(value: &Value) -> Option<Vec<String>> {
    value.as_array()?.iter().map(|name| Some(name.as_str()?.to_owned())).collect()
}
