//! Adapters in files, as PEFT has them: `adapter_model.safetensors` and `adapter_config.json`.

use super::save::{SaveModelOptions, save_state_dict};
use super::saved_files::read_saved_file;
use super::source::Source;
use crate::error::{LoraError, Result, WeightsError};
use crate::lora::{AddAdapterOptions, LoadAdapterOptions, LoraConfig, PeftModel, SavePretrainedOptions};
use crate::nn::{Param, ParamStore, StateDict, flat_elements, is_floating};
use accelerate_core::layout::Layout;
use accelerate_core::lora::{ADAPTER_CONFIG, ADAPTER_STEM, file_key};
use accelerate_core::weight_files::{listed, shown};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use tch::Tensor;

/// Longer configurations are an attack or a damaged file.
const MAX_CONFIG_BYTES: usize = 1 << 20;

impl PeftModel {
    /// The tensors of an adapter by the names that PEFT's files have for them (`get_peft_model_state_dict`): the matrices, copies
    /// of `modules_to_save`, and biases that are trained with it. Detached; in the memory of the parameters, unless these are
    /// sharded: then copies, in full on every rank, and the call is collective.
    ///
    /// # Errors
    /// There is no such adapter.
    pub fn adapter_state_dict(&self, name: &str) -> Result<StateDict> {
        let params = self.parameters_in_files(name)?;
        params.into_iter().map(|(key, param)| Ok((key, param.full_tensor()?))).collect()
    }

    /// Writes each adapter as PEFT does, `adapter_model.safetensors` and `adapter_config.json`: the one called `default` into
    /// `folder`, others into a folder of their name in it. Both files of an adapter are saved as one, as
    /// [`save_model_weights`](super::save_model_weights) saves. Returns the files with weights.
    ///
    /// Collective if the model is sharded. [`Accelerator::save_adapter`](crate::Accelerator::save_adapter) has the main process write.
    ///
    /// # Errors
    /// There is no such adapter. [`is_weights`](crate::Error::is_weights): a file that cannot be written.
    ///
    /// ```
    /// use accelerate::lora::{LoraConfig, PeftModel, get_peft_model};
    /// use accelerate::nn::{Linear, ParamStore};
    /// use accelerate::tch::Device;
    ///
    /// let folder = std::env::temp_dir().join(format!("accelerate-adapter-{}", std::process::id()));
    /// let base = || -> accelerate::Result<ParamStore> {
    ///     let store = ParamStore::new(Device::Cpu);
    ///     Linear::new(store.root() / "proj", 4, 4, Default::default())?;
    ///     Ok(store)
    /// };
    /// let config = LoraConfig { target_modules: Some(["proj"].into()), ..Default::default() };
    /// let trained = get_peft_model(&base()?, config)?;
    /// trained.save_pretrained(&folder, &Default::default())?;
    /// let loaded = PeftModel::from_pretrained(&base()?, &folder, Default::default())?;
    /// let names = |model: &PeftModel| -> accelerate::Result<Vec<String>> {
    ///     Ok(model.adapter_state_dict("default")?.names().map(str::to_owned).collect())
    /// };
    /// assert_eq!(names(&loaded)?, ["base_model.model.proj.lora_A.weight", "base_model.model.proj.lora_B.weight"]);
    /// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn save_pretrained(&self, folder: impl AsRef<Path>, options: &SavePretrainedOptions) -> Result<Vec<PathBuf>> {
        let folder = folder.as_ref();
        let names = options.selected_adapters.clone().unwrap_or_else(|| self.adapters());
        let mut written = Vec::new();
        for name in &names {
            // First, because it may be collective.
            let state = self.adapter_state_dict(name)?;
            let config = self.peft_config(name)?;
            if !options.is_main_process {
                continue;
            }
            let folder = if name == "default" { folder.to_owned() } else { folder.join(name) };
            let files = BTreeMap::from([(ADAPTER_CONFIG.to_owned(), config.to_json().into_bytes())]);
            let options = SaveModelOptions {
                // PEFT reads one file.
                max_shard_size: format!("{}B", i64::MAX),
                stem: ADAPTER_STEM.to_owned(),
                files,
                ..Default::default()
            };
            written.extend(save_state_dict(&state, &folder, &options)?);
        }
        Ok(written)
    }

    /// A model with an adapter out of a folder that PEFT or [`save_pretrained`](Self::save_pretrained) has written, called
    /// `default` and active; everything else is frozen (`PeftModel.from_pretrained`).
    ///
    /// Names, shapes and element types are compared with what the configuration means for this model before anything is
    /// changed. Not collective.
    ///
    /// # Errors
    /// [`is_weights`](crate::Error::is_weights): files that are absent or damaged, a configuration that cannot be used or that means
    /// no layer of this model, tensors that are missing, too many, of other shapes, or not finite. Then nothing is changed.
    pub fn from_pretrained(store: &ParamStore, folder: impl AsRef<Path>, options: LoadAdapterOptions) -> Result<Self> {
        let model = Self::without_adapters(store)?;
        let params = store.parameters();
        model.load_adapter(folder, "default", options)?;
        model.freeze(&params)?;
        model.set_adapter(&["default"])?;
        Ok(model)
    }

    /// Adds an adapter out of such a folder, which is not active until [`set_adapter`](Self::set_adapter) says so; or gives one
    /// that is there the values in the folder, also where it is sharded or prepared.
    ///
    /// # Errors
    /// As [`from_pretrained`](Self::from_pretrained); those of [`add_adapter`](Self::add_adapter). Then nothing is changed. Adapters
    /// that are merged.
    pub fn load_adapter(&self, folder: impl AsRef<Path>, name: &str, options: LoadAdapterOptions) -> Result<()> {
        let folder = folder.as_ref();
        self.check_unmerged("load_adapter")?;
        let mut config = read_config(folder)?;
        config.inference_mode = !options.is_trainable;
        let wanted = self.tensors_of(&config, name, folder)?;
        let tensors = self.read_tensors(folder, &wanted)?;
        let is_new = !self.adapters().iter().any(|known| known == name);
        if !is_new && !self.is_alike(name, &config)? {
            let problems = vec![format!("its layers, ranks, factors or copies are not those of the adapter {name:?}")];
            return Err(LoraError::DoesNotFit { path: folder.join(ADAPTER_CONFIG), problems }.into());
        }
        if is_new {
            let options = AddAdapterOptions { autocast_adapter_dtype: options.autocast_adapter_dtype };
            self.add_adapter(name, config, options)?;
        }
        let loaded = self.take_over(name, folder, &tensors);
        if loaded.is_err() && is_new {
            self.delete_adapter(name)?;
        }
        loaded
    }

    fn read_tensors(&self, folder: &Path, wanted: &BTreeMap<String, Vec<i64>>) -> Result<BTreeMap<String, Tensor>> {
        let of_model = |key: &str| {
            let name = key.strip_prefix(&file_key(""))?.replace(".base_layer.", ".").replace(".original_module.", ".");
            self.store().get(&name)
        };
        read_tensors(folder, wanted, of_model)
    }

    /// Names in files and shapes of all that belongs to an adapter.
    fn tensors_of(&self, config: &LoraConfig, name: &str, folder: &Path) -> Result<BTreeMap<String, Vec<i64>>> {
        let entries = self.entries();
        let refused = |source| LoraError::Config { path: folder.join(ADAPTER_CONFIG), source };
        let resolved = config.resolve(entries).map_err(refused)?;
        let signed = |shape: &[usize]| shape.iter().map(|&size| size as i64).collect::<Vec<i64>>();
        let own = resolved.tensors(name, entries).into_iter().map(|own| (own.file_key, signed(&own.shape)));
        let biases = self.biases_of(config, &resolved).into_iter();
        Ok(own.chain(biases.map(|bias| (resolved.bias_key(bias.name(), entries), bias.shape()))).collect())
    }

    /// Copies tensors into the parameters of an adapter.
    fn take_over(&self, name: &str, folder: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<()> {
        let params = self.parameters_in_files(name)?;
        let fits =
            |(key, param): &(String, Param)| tensors.get(key).is_some_and(|tensor| tensor.size() == param.shape());
        let problems: Vec<String> = params.iter().filter(|own| !fits(own)).map(|(key, _)| different(key)).collect();
        if !problems.is_empty() || tensors.len() != params.len() {
            return Err(LoraError::DoesNotFit { path: weights_path(folder), problems }.into());
        }
        for (key, param) in &params {
            if let Some(tensor) = tensors.get(key) {
                param.copy_shard_(&flat_elements(tensor, &param.layout())?)?;
            }
        }
        Ok(())
    }
}

fn different(key: &str) -> String {
    format!("{} is not as in the adapter that is there", shown(key))
}

fn read_config(folder: &Path) -> Result<LoraConfig> {
    let path = folder.join(ADAPTER_CONFIG);
    if folder.is_dir() && !path.exists() {
        return Err(LoraError::NoAdapterFile { folder: folder.to_owned(), hint: what_is_there(folder) }.into());
    }
    let content = read_saved_file(folder, ADAPTER_CONFIG)?;
    if content.len() > MAX_CONFIG_BYTES {
        let (found_bytes, most_bytes) = (content.len() as u64, MAX_CONFIG_BYTES as u64);
        return Err(WeightsError::NotASmallFile { path, found_bytes, most_bytes }.into());
    }
    let config = LoraConfig::from_json(&String::from_utf8_lossy(&content));
    Ok(config.map_err(|source| LoraError::Config { path, source })?)
}

/// What a folder holds that is no adapter, for people.
fn what_is_there(folder: &Path) -> String {
    const MOST_BYTES: usize = 200;
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let with_adapter = entries.filter(|entry| entry.path().join(ADAPTER_CONFIG).exists());
    let mut names: Vec<String> = with_adapter.map(|entry| shown(&entry.file_name().to_string_lossy())).collect();
    names.sort_unstable();
    match names.is_empty() {
        false => format!("; adapters are in its folders {}: name one of these", listed(&names, MOST_BYTES)),
        true if folder.join("config.json").exists() => {
            "; there is a model (config.json): name the folder of an adapter that was trained beside it".to_owned()
        }
        true => "; name the folder that `save_pretrained` of an adapter wrote".to_owned(),
    }
}

/// `adapter_model.safetensors`, or the file of older versions where that alone is there.
fn weights_path(folder: &Path) -> PathBuf {
    let path = folder.join(format!("{ADAPTER_STEM}.safetensors"));
    let older = folder.join(format!("{ADAPTER_STEM}.bin"));
    if !path.exists() && older.exists() { older } else { path }
}

/// Are these numbers those of a parameter, in either's precision? Codes stand for numbers that nobody has any more.
fn is_alike(param: &Param, found: &Tensor) -> Result<bool> {
    if param.is_stored_as_several() {
        return Ok(param.numel() == found.numel());
    }
    let values = param.full_tensor()?.f_to(found.device())?;
    if values.size() != found.size() {
        return Ok(false);
    }
    let [own_kind, kind] = [values.f_kind()?, found.f_kind()?];
    Ok(values.f_to_kind(kind)?.f_equal(found)? || found.f_to_kind(own_kind)?.f_equal(&values)?)
}

/// Is this a further name that PEFT writes for a copy of a layer, beside the one that it reads?
fn is_second_name(key: &str, wanted: &BTreeMap<String, Vec<i64>>) -> bool {
    let copy = ".modules_to_save.";
    key.contains(copy) && wanted.contains_key(&key.replace(copy, "."))
}

/// All tensors of an adapter, once all names and shapes are those that are wanted.
fn read_tensors(
    folder: &Path,
    wanted: &BTreeMap<String, Vec<i64>>,
    of_model: impl Fn(&str) -> Option<Param>,
) -> Result<BTreeMap<String, Tensor>> {
    let path = weights_path(folder);
    let mut source = Source::open(&path)?;
    let found: BTreeMap<&str, &Vec<i64>> =
        source.tensors.iter().map(|(name, shape, _)| (name.as_str(), shape)).collect();
    let mut problems = Vec::new();
    for (name, shape) in wanted {
        match found.get(name.as_str()) {
            None => problems.push(format!("{} is missing", shown(name))),
            Some(found) if *found != shape => {
                problems.push(format!("{} has shape {found:?}, not {shape:?}", shown(name)));
            }
            Some(_) => {}
        }
    }
    // PEFT also writes weights of the model: of embeddings and output layers with an adapter, and biases that copies stand for.
    let besides = found.keys().filter(|name| !wanted.contains_key(**name) && !is_second_name(name, wanted));
    let (own, unknown): (Vec<&str>, Vec<&str>) = besides.copied().partition(|name| of_model(name).is_some());
    problems.extend(unknown.into_iter().map(|name| format!("{} is of no layer of it", shown(name))));
    let own: BTreeSet<String> = own.into_iter().map(str::to_owned).collect();
    let mut tensors = BTreeMap::new();
    if problems.is_empty() {
        for (name, shape, file) in &source.tensors {
            let layout = Layout::full(shape.iter().map(|&size| size.max(0) as usize).collect::<Vec<_>>());
            if is_second_name(name, wanted) {
                continue;
            }
            let tensor = source.files[*file].read_elements(name, &layout)?.f_reshape(&shape[..])?;
            let kind = tensor.f_kind()?;
            if let Some(param) = of_model(name).filter(|_| own.contains(name)) {
                if !is_alike(&param, &tensor)? {
                    problems.push(format!("{} is other than the model's own", shown(name)));
                }
                continue;
            }
            if !is_floating(kind) {
                problems.push(format!("{} has elements of type {kind:?}", shown(name)));
            } else if tensor.f_isfinite()?.f_all()?.f_int64_value(&[])? == 0 {
                problems.push(format!("{} has numbers that are not finite", shown(name)));
            }
            tensors.insert(name.clone(), tensor);
        }
    }
    if problems.is_empty() { Ok(tensors) } else { Err(LoraError::DoesNotFit { path, problems }.into()) }
}
