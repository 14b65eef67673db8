//! Models out of folders in the layout of Hugging Face: sizes from `config.json`, weights by name.

use crate::causal_lm::OneOrMore;
use crate::config::{CONFIG_FILE, ConfigError, MOST_BYTES, PretrainedConfig, WrongValue};
use crate::files;
use crate::generation::GenerationFile;
use crate::hub::model_folder;
use accelerate::big_model::{DeviceMapTable, DispatchOptions, MaxMemory};
use accelerate::checkpoint::{
    self, DeviceMapChoice, LoadAndDispatchOptions, check_saved_files, checkpoint_shapes, load_checkpoint_and_dispatch,
    load_checkpoint_in_model, refuse_codes,
};
use accelerate::lora::ADAPTER_CONFIG;
use accelerate::nn::{Module, ParamStore, init};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    BnbQuantizationConfig, Error, FloatType, Result, load_and_quantize_model, load_quantize_and_dispatch, nn,
};
use serde::Deserialize;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// How [`PretrainedModel::from_pretrained`] loads.
///
/// ```
/// use accelerate::tch::Kind;
/// let options = accelerate_models::LoadOptions { dtype: Some(Kind::BFloat16), ..Default::default() };
/// assert!(options.strict);
/// ```
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Element type of the parameters, of quantised models of those that are not, unless `quantization_config` says it. `None`, the default: what `config.json` says (`dtype`, in older files `torch_dtype`), or
    /// float32 if it says nothing.
    pub dtype: Option<Kind>,
    /// Where the model is put. Default: the CPU.
    pub device: Device,
    /// Is it an error if parameters are missing that no new head explains, or if the files hold tensors that the model does not
    /// have (`true`), or are they reported alone (`false`)? Default true; Transformers only warns. A wrong shape is an error
    /// always.
    pub strict: bool,
    /// Has linear layers keep their weights as codes of 4 or 8 bits, as
    /// [`load_and_quantize_model`] does: of files with numbers, or with codes. Weights become codes
    /// one by one, so this takes the memory of the quantised model and of one tensor. Default: none.
    pub quantization_config: Option<BnbQuantizationConfig>,
    /// Has a model that does not fit into one memory be kept on several devices and a disk: a map, or the way to find one
    /// (`DeviceMapStrategy::Auto.into()`). Each tensor goes there as soon as it has been read.
    /// [`dispatch_model`](accelerate::big_model::dispatch_model) says how such a model is computed; `device` does not count then. Default:
    /// none.
    pub device_map: Option<DeviceMapChoice>,
    /// Bytes that each device may keep, for a map that is to be found. Default: what the machine has free now.
    pub max_memory: Option<MaxMemory>,
    /// Modules that such a map keeps on one device, as patterns of paths.
    pub no_split_module_classes: Vec<String>,
    /// The folder of what the map has on the disk (`offload_folder` of Transformers), and the like.
    pub dispatch: DispatchOptions,
    /// Branch, tag or commit of a model of the Hugging Face Hub. Default: `main`.
    pub revision: Option<String>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            dtype: None,
            device: Device::Cpu,
            strict: true,
            quantization_config: None,
            device_map: None,
            max_memory: None,
            no_split_module_classes: Vec::new(),
            dispatch: DispatchOptions::default(),
            revision: None,
        }
    }
}

/// What [`PretrainedModel::from_pretrained`] has done.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct LoadReport {
    /// Parameters and buffers that are new because the files do not have them.
    pub missing_keys: Vec<String>,
    /// Names of the files that the model does not have.
    pub unexpected_keys: Vec<String>,
    /// Where each module is (`hf_device_map` of Transformers), and its bytes, if [`LoadOptions::device_map`] asked for a map. It prints
    /// as a table.
    pub device_map: Option<DeviceMapTable>,
}

impl LoadReport {
    fn new(keys: nn::LoadReport, device_map: Option<DeviceMapTable>) -> Self {
        let nn::LoadReport { missing_keys, unexpected_keys, .. } = keys;
        Self { missing_keys, unexpected_keys, device_map }
    }
}

/// A model of which Hugging Face's folders hold sizes and weights.
pub trait PretrainedModel: Module + Sized {
    /// Its sizes.
    type Config: PretrainedConfig;

    /// What the names of the model without a head begin with, with the dot; `base_model_prefix` of Transformers. Files of the
    /// bare model lack it.
    const BASE: &'static str;

    /// What the names of parameters begin with that a file of the bare model need not have. The first is that of the head
    /// itself: a file that has it must have all of them.
    const HEADS: &'static [&'static str];

    /// A new model with random weights, whose parameters are registered under `path`.
    ///
    /// # Errors
    /// Sizes that make no model; the names are taken.
    fn from_config(path: &nn::Path, config: &Self::Config) -> Result<Self>;

    /// The name that a tensor has today, if files once called it something else.
    fn todays_name(name: &str) -> String {
        name.to_owned()
    }

    /// Is a tensor of this name, as it is called today, nothing that the model needs?
    fn is_of_no_use(_name: &str) -> bool {
        false
    }

    /// Builds the model that a folder describes, or a model of the Hugging Face Hub by its name
    /// ([`model_folder`](crate::hub::model_folder)), and loads its weights: `config.json`, and `model.safetensors` or any other form
    /// that [`load_checkpoint_in_model`] reads. The report tells which parameters are new because the files have no head
    /// (`missing_keys`), and what of the files was left over (`unexpected_keys`). The model is in training mode, as a new one.
    /// Not collective: each process reads for itself.
    ///
    /// No random numbers are drawn for parameters that the files hold, and their memory is taken once.
    ///
    /// ```
    /// use accelerate::checkpoint::save_model_weights;
    /// use accelerate::nn::{Module, ParamStore};
    /// use accelerate::tch::Device;
    /// use accelerate_models::gpt2::{GPT2Config, GPT2LMHeadModel};
    /// use accelerate_models::{PretrainedConfig, PretrainedModel};
    ///
    /// let folder = std::env::temp_dir().join(format!("accelerate-models-doc-{}", std::process::id()));
    /// let config = GPT2Config { vocab_size: 40, n_embd: 8, n_layer: 1, n_head: 2, n_positions: 16, ..Default::default() };
    /// let saved = GPT2LMHeadModel::new(&ParamStore::new(Device::Cpu).root(), &config)?;
    /// save_model_weights(saved.params(), &folder, &Default::default())?;
    /// std::fs::write(folder.join("config.json"), config.to_json().unwrap()).unwrap();
    ///
    /// let (model, report) = GPT2LMHeadModel::from_pretrained(&folder, &Default::default())?;
    /// assert!(report.missing_keys.is_empty() && report.unexpected_keys.is_empty());
    /// assert_eq!(model.params().num_parameters(), saved.params().num_parameters());
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// A [`HubError`](crate::hub::HubError) where there is no such folder; a [`ConfigError`] for `config.json`; [`is_weights`](Error::is_weights) for weights that are absent, damaged, or do not fit;
    /// [`is_config`](Error::is_config) for a `quantization_config` that contradicts itself or means no layer;
    /// [`is_big_model`](Error::is_big_model) for a map that cannot be carried out.
    fn from_pretrained(model: impl AsRef<Path>, options: &LoadOptions) -> Result<(Self, LoadReport)> {
        let folder = &model_folder(model, options.revision.as_deref()).map_err(Error::other)?;
        check_saved_files(folder)?;
        check_holds_model(folder).map_err(Error::other)?;
        let mut config = Self::Config::from_folder(folder).map_err(Error::other)?;
        let generation = GenerationFile::read(folder).map_err(Error::other)?.unwrap_or_default();
        if let Some(ids) = generation.eos_token_id {
            config.set_eos_token_id(OneOrMore::all(Some(ids)));
        }
        check_quantization(folder, options.quantization_config.is_some()).map_err(Error::other)?;
        let kind = match options.dtype {
            Some(kind) => kind,
            None => dtype_of(folder).map_err(Error::other)?,
        };
        let store = ParamStore::init_empty_weights(options.device);
        store.to_kind(kind)?;
        let model = Self::from_config(&store.root(), &config)?;
        let found = Found::of::<Self>(folder)?;
        let std = config.initializer_range();
        let names = found.names.clone();
        store.set_param_init_fn(move |name, tensor| match names.contains(name) {
            true => Ok(()),
            false => new_values(name, tensor, std),
        });
        if options.quantization_config.is_none() {
            let unexpected = found.names.iter().map(String::as_str).filter(|name| store.get(name).is_none());
            refuse_codes(folder, unexpected)?;
            found.check_shapes(&store)?;
            // What the loader refuses takes no memory.
            if options.device_map.is_none() && !found.is_refused::<Self>(&store, options) {
                store.materialize()?;
            }
        }
        let report = found.load::<Self>(&store, folder, options)?;
        // What the files do not have: a new head.
        store.materialize()?;
        Ok((model, report))
    }
}

/// Loads the weights of `folder` into a model that exists, as [`PretrainedModel::from_pretrained`] does. What it keeps of its own
/// values is in `missing_keys`.
///
/// # Errors
/// Those of [`PretrainedModel::from_pretrained`] for weights. Names and shapes are compared with the model before any tensor is
/// read.
pub fn load_weights<M: PretrainedModel>(store: &ParamStore, folder: &Path, strict: bool) -> Result<LoadReport> {
    Found::of::<M>(folder)?.load::<M>(store, folder, &LoadOptions { strict, ..Default::default() })
}

/// The names of tensors in `names`, a file's, as functions of these names: what they are called in the model.
pub(crate) fn names_in_model<'a, M: PretrainedModel>(
    mut names: impl Iterator<Item = &'a str>,
) -> impl Fn(&str) -> String + Clone + Send + Sync + 'static {
    let is_bare = !M::BASE.is_empty() && !names.any(|name| name.starts_with(M::BASE));
    move |name| {
        let name = M::todays_name(name);
        let has_own_place = M::HEADS.iter().any(|head| name.starts_with(head)) || M::is_of_no_use(&name);
        if is_bare && !has_own_place { format!("{}{name}", M::BASE) } else { name }
    }
}

/// What a folder holds, by the names of the model.
struct Found {
    names: HashSet<String>,
    shapes: Vec<(String, Vec<i64>)>,
    map: Box<dyn Fn(&str) -> String + Send + Sync>,
}

impl Found {
    fn of<M: PretrainedModel>(folder: &Path) -> Result<Self> {
        let shapes = checkpoint_shapes(folder)?;
        let map = names_in_model::<M>(shapes.iter().map(|(name, _)| name.as_str()));
        let shapes: Vec<_> = shapes.into_iter().map(|(name, shape)| (map(&name), shape)).collect();
        let names = shapes.iter().map(|(name, _)| name.clone()).collect();
        Ok(Self { names, shapes, map: Box::new(map) })
    }

    /// Sees to it that sizes which are not those of the weights are an error before memory is taken for them: the loader compares
    /// all of them, once the parameters are there.
    fn check_shapes(&self, store: &ParamStore) -> Result<()> {
        let differs =
            |(name, shape): &&(String, Vec<i64>)| store.get(name).is_some_and(|param| param.shape() != *shape);
        match self.shapes.iter().find(differs) {
            Some((name, found)) => {
                let wanted = store.get(name).map(|param| param.shape()).unwrap_or_default();
                let (name, found) = (name.clone(), found.clone());
                Err(Error::other(PretrainedError::OtherSizes { name, found, wanted }))
            }
            None => Ok(()),
        }
    }

    /// Is there something that the model does not have, or not what it needs, and does that matter?
    fn is_refused<M: PretrainedModel>(&self, store: &ParamStore, options: &LoadOptions) -> bool {
        let aliases = store.aliases();
        let has = |name: &str| {
            self.names.contains(name)
                || aliases.iter().any(|(alias, first)| first == name && self.names.contains(alias))
        };
        let buffers = store.buffers().into_iter().filter(nn::Param::is_persistent);
        let own: Vec<String> =
            store.parameters().into_iter().chain(buffers).map(|param| param.name().to_owned()).collect();
        // A head that is there must be whole; only one that is absent altogether is made anew.
        let head = M::HEADS.first().copied().unwrap_or_default();
        let has_head = !head.is_empty() && self.names.iter().any(|name| name.starts_with(head));
        let is_head = |name: &String| M::HEADS.iter().any(|head| name.starts_with(head));
        let is_complete = own.iter().filter(|name| !has(name)).all(|name| is_head(name) && !has_head);
        let is_quantised = options.quantization_config.is_some();
        let is_part = |name: &String| is_quantised && own.iter().any(|weight| is_part_of(name, weight));
        let is_known =
            |name: &String| aliases.contains_key(name) || own.contains(name) || is_part(name) || M::is_of_no_use(name);
        let has_strangers = !self.names.iter().all(is_known);
        options.strict && (has_strangers || !is_complete)
    }

    fn load<M: PretrainedModel>(self, store: &ParamStore, folder: &Path, options: &LoadOptions) -> Result<LoadReport> {
        let quantization = options.quantization_config.clone().map(|config| typed(config, options.dtype));
        let quantization = quantization.as_ref();
        let strict = self.is_refused::<M>(store, options);
        let dispatch = options.dispatch.clone();
        let strict_ties = Some(options.strict);
        let load = checkpoint::LoadOptions { strict, strict_ties, dispatch, ..Default::default() }.key_map(self.map);
        let mut report = match (quantization, &options.device_map) {
            (Some(config), None) => LoadReport::new(load_and_quantize_model(store, config, Some(folder), &load)?, None),
            (None, None) => LoadReport::new(load_checkpoint_in_model(store, folder, &load)?, None),
            (quantization, Some(device_map)) => {
                let options = LoadAndDispatchOptions {
                    device_map: device_map.clone(),
                    max_memory: options.max_memory.clone(),
                    no_split_module_classes: options.no_split_module_classes.clone(),
                    load,
                };
                let done = match quantization {
                    Some(config) => load_quantize_and_dispatch(store, config, folder, &options)?,
                    None => load_checkpoint_and_dispatch(store, folder, &options)?,
                };
                LoadReport::new(done.report, Some(done.table))
            }
        };
        report.unexpected_keys.retain(|name| !M::is_of_no_use(name));
        Ok(report)
    }
}

/// The type that somebody has asked for is that of what is not quantised, unless the configuration says another.
fn typed(config: BnbQuantizationConfig, dtype: Option<Kind>) -> BnbQuantizationConfig {
    let dtype = dtype.and_then(|kind| match kind {
        Kind::Float => Some(FloatType::Float32),
        Kind::Half => Some(FloatType::Float16),
        Kind::BFloat16 => Some(FloatType::BFloat16),
        _ => None,
    });
    BnbQuantizationConfig { torch_dtype: config.torch_dtype.or(dtype), ..config }
}

/// Is a tensor of a file one of those that bitsandbytes keeps beside the codes of this weight?
fn is_part_of(name: &str, weight: &str) -> bool {
    let is_beside = |layer: &str| name.strip_prefix(layer).is_some_and(|rest| matches!(rest, "SCB" | "weight_format"));
    name.strip_prefix(weight).is_some_and(|rest| rest.starts_with('.'))
        || weight.strip_suffix("weight").is_some_and(is_beside)
}

/// Weights that do not belong to the sizes beside them.
#[derive(Debug, thiserror::Error)]
enum PretrainedError {
    #[error(
        "the weights have {name} of shape {found:?}, and the sizes in {CONFIG_FILE} make {wanted:?} of it; the two are of different \
         models"
    )]
    OtherSizes { name: String, found: Vec<i64>, wanted: Vec<i64> },

    #[error(
        "{CONFIG_FILE} in {} says that linear layers have weights of 4 or 8 bits (quantization_config); say so in \
         LoadOptions::quantization_config",
        folder.display()
    )]
    NotAskedToQuantize { folder: PathBuf },

    #[error(
        "{CONFIG_FILE} in {} says that weights are quantised by {method:?}, which is not read here; wanted weights of bitsandbytes, or \
         numbers",
        folder.display()
    )]
    OtherQuantization { folder: PathBuf, method: String },

    #[error(
        "{} holds an adapter ({ADAPTER_CONFIG}) and no model ({CONFIG_FILE}); load the model that it was trained beside{}, then call \
         PeftModel::from_pretrained with this folder",
        folder.display(),
        base.as_ref().map(|base| format!(", {base:?}")).unwrap_or_default()
    )]
    OnlyAdapter { folder: PathBuf, base: Option<String> },
}

/// As a new head begins in Transformers: normal weights, zero biases.
fn new_values(name: &str, tensor: &Tensor, std: f64) -> Result<()> {
    match name.ends_with("weight") {
        true if tensor.dim() == 1 => init::ones_(tensor),
        true => init::normal_(tensor, 0.0, std),
        false => init::zeros_(tensor),
    }
}

/// Fails where an adapter is all that the folder holds.
fn check_holds_model(folder: &Path) -> Result<(), PretrainedError> {
    let adapter = folder.join(ADAPTER_CONFIG);
    if folder.join(CONFIG_FILE).exists() || !adapter.exists() {
        return Ok(());
    }
    // Whatever else is wrong with the file is told to who loads the adapter.
    let text = files::read_text(&adapter, MOST_BYTES).unwrap_or_default();
    let base = files::from_json::<AdapterKeys>(&text).unwrap_or_default().base_model_name_or_path;
    let base = base.filter(|base| !base.is_empty()).map(|base| files::shortened(&base));
    Err(PretrainedError::OnlyAdapter { folder: folder.to_owned(), base })
}

/// Fails where the weights are codes by what `config.json` says, and nobody has said how to load them.
fn check_quantization(folder: &Path, is_asked: bool) -> Result<(), PretrainedError> {
    // Whatever else is wrong with the file has been said, or will be.
    let text = files::read_text(&folder.join(CONFIG_FILE), MOST_BYTES).unwrap_or_default();
    let keys: QuantizationKeys = files::from_json(&text).unwrap_or_default();
    let Some(config) = keys.quantization_config else { return Ok(()) };
    let method = config.quant_method.unwrap_or_else(|| "bitsandbytes".to_owned());
    match (method.as_str(), is_asked) {
        ("bitsandbytes", true) => Ok(()),
        ("bitsandbytes", false) => Err(PretrainedError::NotAskedToQuantize { folder: folder.to_owned() }),
        _ => Err(PretrainedError::OtherQuantization { folder: folder.to_owned(), method }),
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct AdapterKeys {
    base_model_name_or_path: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct QuantizationKeys {
    quantization_config: Option<QuantizationMethod>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct QuantizationMethod {
    quant_method: Option<String>,
}

/// The key that says in which element type the weights are to be used.
#[derive(Default, Deserialize)]
#[serde(default)]
struct DtypeKeys {
    dtype: Option<String>,
    torch_dtype: Option<String>,
}

fn dtype_of(folder: &Path) -> Result<Kind, ConfigError> {
    let path = folder.join(CONFIG_FILE);
    let text = files::read_text(&path, MOST_BYTES)?;
    let keys: DtypeKeys = files::from_json(&text).map_err(|reason| ConfigError::Malformed {
        path: path.clone(),
        model: "Hugging Face",
        reason,
    })?;
    let Some(name) = keys.dtype.or(keys.torch_dtype) else { return Ok(Kind::Float) };
    match name.as_str() {
        "float32" | "float" => Ok(Kind::Float),
        "float16" | "half" => Ok(Kind::Half),
        "bfloat16" => Ok(Kind::BFloat16),
        "float64" | "double" => Ok(Kind::Double),
        _ => {
            let wanted = "float32, float16, bfloat16 or float64; LoadOptions::dtype overrides it";
            Err(WrongValue::new("dtype", format!("{name:?}"), wanted).of(&path))
        }
    }
}
