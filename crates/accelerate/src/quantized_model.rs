//! A model whose weights become codes while they are loaded.

use crate::big_model::{self, Dispatch, ModuleTree, Taken, element_type, module_tree_of, taken};
use crate::checkpoint::{
    LoadAndDispatchOptions, LoadOptions, LoadedAndDispatched, PlannedDispatch, WeightSource, check_ties,
};
use crate::error::{BigModelError, NnError, Result, WeightsError};
use crate::messages;
use crate::nn::{AnyLayer, LinearLayer, LoadReport, Param, ParamStore, is_floating, match_names};
use crate::quant::{FourBitTensors, Int8Tensors, Quantized, Quantizer, kind_of, put_in};
use accelerate_core::config::{BnbQuantizationConfig, QuantizationSettings};
use accelerate_core::quantization::{
    FourBitNames, Int8Names, LayerFacts, Quantization, StoredWeight, is_under, layers_to_quantize, recognise,
    weight_of_part,
};
use accelerate_core::weight_files::shown;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use tch::{Device, Kind, Tensor};

/// Loads weights into a model, those of its linear layers as codes of 4 or 8 bits: `load_and_quantize_model` of the reference.
///
/// Each weight becomes codes as soon as it has been read, so the memory that this takes is that of the quantised model and of
/// one tensor; let layers be made by a store of [`ParamStore::init_empty_weights`], so that they take none before. Without
/// `weights_location` the weights that the model has are quantised, and those that have no memory yet get the values that their layers
/// begin with, one tensor after the other.
///
/// Files may also hold weights that are quantised already, by this function or by bitsandbytes, in its layout. What they
/// say of themselves is compared with what they are. Models that this function has made are saved in that layout, too, by
/// [`save_model_weights`](crate::checkpoint::save_model_weights) and
/// [`Accelerator::save_model`](crate::Accelerator::save_model).
///
/// Quantised layers are frozen: their weights have no gradient, and their biases get none unless they are told to. Call it before
/// [`Accelerator::prepare`](crate::Accelerator::prepare). Not collective.
///
/// With `device_map` of the options, each weight goes to where the map has it as soon as it has become codes, and layers compute with the
/// codes as [`dispatch_model`](crate::big_model::dispatch_model) brings them. `llm_int8_enable_fp32_cpu_offload` has modules that are kept
/// elsewhere than where the model is computed keep their numbers, in 32 bits. [`load_quantize_and_dispatch`] finds a map.
///
/// `config` says which layers keep their weights: without `llm_int8_skip_modules` the last module at the top of the model, which
/// is its head, and layers that share a weight with another. Parameters that are not quantised get the type `torch_dtype`,
/// and 32 bits under `keep_in_fp32_modules`.
///
/// # Errors
/// [`is_config`](crate::Error::is_config): settings that contradict each other; modules that the model does not have; no layer
/// that is left. [`is_weights`](crate::Error::is_weights): what
/// [`load_checkpoint_in_model`](crate::checkpoint::load_checkpoint_in_model) refuses; weights that are quantised in another way
/// than `config` says, of which a part is missing, or whose `quant_state` does not fit them or the model. Then nothing has been
/// changed.
///
/// ```
/// use accelerate::checkpoint::{LoadOptions, save_model_weights};
/// use accelerate::nn::{Linear, ParamStore};
/// use accelerate::tch::{Device, Kind, Tensor};
/// use accelerate::{BnbQuantizationConfig, QuantType, load_and_quantize_model};
///
/// fn model(store: &ParamStore) -> accelerate::Result<[Linear; 2]> {
///     let body = Linear::new(store.root() / "body", 64, 64, Default::default())?;
///     Ok([body, Linear::new(store.root() / "head", 64, 2, Default::default())?])
/// }
/// let folder = std::env::temp_dir().join(format!("accelerate-quantised-{}", std::process::id()));
/// let trained = ParamStore::new(Device::Cpu);
/// let exact = model(&trained)?;
/// save_model_weights(&trained, &folder, &Default::default())?;
///
/// let store = ParamStore::init_empty_weights(Device::Cpu);
/// let [body, head] = model(&store)?;
/// let config = BnbQuantizationConfig {
///     load_in_4bit: Some(true),
///     bnb_4bit_quant_type: Some(QuantType::Nf4),
///     ..Default::default()
/// };
/// load_and_quantize_model(&store, &config, Some(&folder), &LoadOptions::default())?;
/// assert_eq!(store.state_dict()?.get("body.weight").unwrap().size(), [64 * 64 / 2, 1]);
/// let input = Tensor::ones([1, 64], (Kind::Float, Device::Cpu));
/// let error = (body.forward(&input)? - exact[0].forward(&input)?).abs().max().double_value(&[]);
/// assert!(error > 0.0 && error < 0.2);
/// assert_eq!(head.weight.kind(), Kind::Float);
/// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn load_and_quantize_model(
    store: &ParamStore,
    config: &BnbQuantizationConfig,
    weights_location: Option<&Path>,
    options: &LoadOptions,
) -> Result<LoadReport> {
    let settings = QuantizationSettings::from(config.clone());
    let quantization = settings.check()?;
    let unused = settings.without_use(options.device_map.is_some());
    unused.into_iter().for_each(|text| messages::warning!("{text}"));
    let dispatch = options.device_map.as_ref().map(|map| Dispatch::new(store, map, &options.dispatch)).transpose()?;
    let targets = Targets::choose(store, &settings, quantization, dispatch.as_ref())?;
    let values = Values { dispatch, values: Vec::new(), placed: HashSet::new() };
    match weights_location {
        Some(path) => {
            load(&targets, WeightSource::open(path, options)?, (options.strict, options.refuses_ties()), values)
        }
        None => quantize_in_place(&targets, values),
    }
}

/// Finds a device map for a model with quantised weights, or takes the one that there is, and loads the model by
/// [`load_and_quantize_model`]: its counterpart to
/// [`load_checkpoint_and_dispatch`](crate::checkpoint::load_checkpoint_and_dispatch). Sizes are those of codes and scales. Where
/// `llm_int8_enable_fp32_cpu_offload` leaves open which weights become codes, the map that is found has room for all numbers. Not
/// collective.
///
/// # Errors
/// Those of [`load_and_quantize_model`], and of [`dispatch_model`](crate::big_model::dispatch_model).
///
/// ```
/// use accelerate::big_model::{DispatchOptions, MapDevice, MaxMemory};
/// use accelerate::checkpoint::{LoadAndDispatchOptions, LoadOptions, save_model_weights};
/// use accelerate::nn::{Linear, ParamStore};
/// use accelerate::tch::{Device, Kind, Tensor};
/// use accelerate::{BnbQuantizationConfig, load_quantize_and_dispatch};
///
/// let layers = |store: &ParamStore| -> accelerate::Result<Vec<Linear>> {
///     (0..4).map(|number| Linear::new(store.root() / number, 64, 64, Default::default())).collect()
/// };
/// let folder = std::env::temp_dir().join(format!("accelerate-quantised-map-{}", std::process::id()));
/// let saved = ParamStore::new(Device::Cpu);
/// layers(&saved)?;
/// save_model_weights(&saved, &folder, &Default::default())?;
///
/// let store = ParamStore::init_empty_weights(Device::Cpu);
/// let layers = layers(&store)?;
/// // The last one, too, which would be taken for a head.
/// let skip = Some(Vec::new());
/// let config = BnbQuantizationConfig { load_in_4bit: Some(true), llm_int8_skip_modules: skip, ..Default::default() };
/// let dispatch = DispatchOptions { offload_dir: Some(folder.join("offload")), ..Default::default() };
/// let options = LoadAndDispatchOptions {
///     // Codes and bias of a layer take 2.6 KB, and room for one is left free; with its numbers it would take 17.
///     max_memory: Some(MaxMemory::from_texts([("cpu", "9KB")])?),
///     load: LoadOptions { dispatch, ..Default::default() },
///     ..Default::default()
/// };
/// let done = load_quantize_and_dispatch(&store, &config, &folder, &options)?;
/// assert_eq!(done.device_map.device_of("0.weight"), Some(MapDevice::Cpu));
/// assert_eq!(done.device_map.device_of("3.weight"), Some(MapDevice::Disk));
/// let input = Tensor::ones([1, 64], (Kind::Float, Device::Cpu));
/// layers.iter().try_fold(input, |input, layer| layer.forward(&input))?;
/// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn load_quantize_and_dispatch(
    store: &ParamStore,
    config: &BnbQuantizationConfig,
    checkpoint: impl AsRef<Path>,
    options: &LoadAndDispatchOptions,
) -> Result<LoadedAndDispatched> {
    let planned = PlannedDispatch::of(&quantized_module_tree(store, config)?, options)?;
    let report = load_and_quantize_model(store, config, Some(checkpoint.as_ref()), &planned.load)?;
    Ok(planned.done(report))
}

/// The modules of a model with what they will take once `config` has been carried out.
fn quantized_module_tree(store: &ParamStore, config: &BnbQuantizationConfig) -> Result<ModuleTree> {
    let settings = QuantizationSettings::from(config.clone());
    let quantization = settings.check()?;
    let targets = Targets::choose(store, &settings, quantization, None)?;
    module_tree_of(store, |param| targets.will_take(param))
}

/// What is to become of each parameter of a model.
struct Targets<'a> {
    store: &'a ParamStore,
    settings: &'a QuantizationSettings,
    quantization: Quantization,
    quantizer: Quantizer,
    /// Weights that are quantised, with the layers that have them, by name.
    layers: BTreeMap<String, Vec<LinearLayer>>,
    /// The names of weights that embeddings look rows up in.
    tables: HashSet<String>,
    /// Weights that are kept elsewhere than where the model is computed keep their numbers, in 32 bits, and all that is not quantised
    /// is of that type.
    offloads_in_fp32: bool,
    /// Where weights become codes.
    device: Device,
}

impl<'a> Targets<'a> {
    fn choose(
        store: &'a ParamStore,
        settings: &'a QuantizationSettings,
        quantization: Quantization,
        dispatch: Option<&Dispatch<'_>>,
    ) -> Result<Self> {
        let mut offloaded_in_fp32 = HashSet::new();
        if let Some(dispatch) = dispatch.filter(|_| settings.llm_int8_enable_fp32_cpu_offload) {
            for param in store.parameters() {
                if dispatch.is_elsewhere(&param)? {
                    offloaded_in_fp32.insert(param.name().to_owned());
                }
            }
        }
        if let Some(holder) = store.tensor_holder() {
            return Err(NnError::HeldElsewhere { holder }.into());
        }
        for param in store.parameters() {
            let parameter = param.name().to_owned();
            if param.is_stored_as_several() {
                return Err(NnError::AlreadyQuantized { parameter }.into());
            }
            if param.shard_group().is_some() {
                return Err(NnError::ShardedData { parameter }.into());
            }
        }
        let named = store.named_layers();
        let is_offloaded = |linear: &LinearLayer| offloaded_in_fp32.contains(linear.weight().name());
        let linear: Vec<LinearLayer> = named.iter().filter_map(|(_, layer)| layer.linear()).collect();
        if !linear.is_empty() && linear.iter().all(is_offloaded) {
            return Err(BigModelError::NothingToQuantize.into());
        }
        let facts: Vec<LayerFacts<'_>> = named
            .iter()
            .map(|(path, layer)| LayerFacts {
                path,
                is_linear: layer.linear().is_some_and(|linear| !is_offloaded(&linear)),
                is_tied: layer.params().iter().any(Param::is_tied),
            })
            .collect();
        let skip = settings.llm_int8_skip_modules.as_deref();
        let keep = settings.keep_in_fp32_modules.as_deref().unwrap_or_default();
        let quantizer = Quantizer::new(quantization, store.training_flag());
        let mut layers: BTreeMap<String, Vec<LinearLayer>> = BTreeMap::new();
        for position in layers_to_quantize(&facts, skip, keep)? {
            let (path, layer) = &named[position];
            let Some(linear) = layer.linear() else { continue };
            if linear.is_conv1d() && quantizer.fp16_kernel().is_some() {
                return Err(NnError::Conv1DInFp16 { path: path.clone() }.into());
            }
            layers.entry(linear.weight().name().to_owned()).or_default().push(linear);
        }
        let offloads_in_fp32 = dispatch.is_some() && settings.llm_int8_enable_fp32_cpu_offload;
        let device = dispatch.map_or_else(|| store.device(), Dispatch::device);
        let tables = tables_of(&named);
        Ok(Self { store, settings, quantization, quantizer, layers, tables, offloads_in_fp32, device })
    }

    /// The type of a parameter that is not quantised.
    fn kind(&self, param: &Param) -> Kind {
        let keep = self.settings.keep_in_fp32_modules.as_deref().unwrap_or_default();
        let layer = param.name().rsplit_once('.').map_or("", |(layer, _)| layer);
        let kind = param.kind();
        match (is_floating(kind), self.settings.other_dtype()) {
            (false, _) => kind,
            // All of them, so that layers take what the layer before gives.
            (true, _) if self.offloads_in_fp32 => Kind::Float,
            (true, _) if keep.iter().any(|module| is_under(layer, module)) => Kind::Float,
            (true, Some(dtype)) => kind_of(dtype),
            (true, None) => kind,
        }
    }

    /// Numbers that are to be the weight of a quantised layer, or else of a layer that is not.
    fn take(&self, param: &Param, full: &Tensor) -> Result<Value> {
        let full = full.f_detach()?.f_to(self.device)?;
        let layer = self.layers.get(param.name()).and_then(|layers| layers.first());
        if let Some(layer) = layer.filter(|_| self.quantizer.fp16_kernel().is_none()) {
            let full = if layer.is_transposed() { full.f_transpose(0, 1)?.f_contiguous()? } else { full };
            // As in the reference, codes are made of numbers of the type that was asked for. A table gives numbers of that type, which
            // the other layers have to take.
            let unasked = if self.tables.contains(param.name()) { param.kind() } else { full.f_kind()? };
            let kind = self.settings.other_dtype().map_or(unasked, kind_of);
            return Ok(Value::Codes(self.quantizer.quantize(param.name(), &full.f_to_kind(kind)?)?));
        }
        let values = full.f_to_kind(self.kind(param))?;
        Ok(Value::Numbers(values))
    }

    /// What a parameter will take.
    fn will_take(&self, param: &Param) -> Result<Taken> {
        if param.is_buffer() {
            return taken(param);
        }
        let is_quantised = self.layers.contains_key(param.name()) && self.quantizer.fp16_kernel().is_none();
        if is_quantised && !self.settings.llm_int8_enable_fp32_cpu_offload {
            return Ok((self.quantization.num_bytes(&param.shape()), element_type(Kind::Uint8)?));
        }
        let kind = if self.settings.llm_int8_enable_fp32_cpu_offload { Kind::Float } else { self.kind(param) };
        Ok((param.numel() as u64, element_type(kind)?))
    }

    /// From here on nothing fails that depends on files.
    fn put_in(&self, values: Vec<(Param, Value)>) -> Result<()> {
        for (param, value) in values {
            self.store.forget_initialisation(&param);
            match value {
                Value::Numbers(values) => param.set_replicated(values)?,
                Value::Codes(quantized) => {
                    let layers = self.layers.get(param.name()).map_or(&[][..], Vec::as_slice);
                    put_in(&param, layers, quantized)?;
                }
            }
        }
        if let Some(kernel) = self.quantizer.fp16_kernel() {
            self.layers.values().flatten().for_each(|layer| layer.set_kernel(kernel.clone()));
        }
        Ok(())
    }
}

/// The names of weights that embeddings look rows up in.
fn tables_of(layers: &[(String, AnyLayer)]) -> HashSet<String> {
    let table = |(_, layer): &(String, AnyLayer)| match layer {
        AnyLayer::Embedding(table) => Some(table.weight.name().to_owned()),
        _ => None,
    };
    layers.iter().filter_map(table).collect()
}

/// What a parameter becomes.
enum Value {
    Numbers(Tensor),
    Codes(Quantized),
}

/// What parameters become, before any of them has: a read that fails changes nothing. What a map has elsewhere is there already.
struct Values<'a> {
    dispatch: Option<Dispatch<'a>>,
    values: Vec<(Param, Value)>,
    /// The names of parameters that have a value.
    placed: HashSet<String>,
}

impl Values<'_> {
    fn put(&mut self, param: &Param, value: Value) -> Result<()> {
        self.placed.insert(param.name().to_owned());
        match (&mut self.dispatch, value) {
            (Some(dispatch), Value::Numbers(values)) => {
                dispatch.place(param, big_model::Value::Here(values.f_reshape(param.shape())?))
            }
            (Some(dispatch), Value::Codes(quantized)) => {
                let (parts, num_large) = quantized.parts();
                dispatch.place_new_parts(param, &parts, num_large)?;
                self.values.push((param.clone(), Value::Codes(quantized)));
                Ok(())
            }
            (None, value) => {
                self.values.push((param.clone(), value));
                Ok(())
            }
        }
    }

    /// Gives what has no value yet the one that it has, or that it begins with. One after the other is drawn and becomes codes.
    fn put_rest(&mut self, targets: &Targets<'_>) -> Result<()> {
        for param in targets.store.parameters_and_buffers() {
            if !param.is_deferred() && !self.placed.contains(param.name()) {
                self.put(&param, targets.take(&param, &param.full_tensor()?)?)?;
            }
        }
        let has_deferred = |param: &Param| param.is_deferred() && !self.placed.contains(param.name());
        if !targets.store.parameters_and_buffers().iter().any(has_deferred) {
            return Ok(());
        }
        targets.store.initialise_each(|param, full| match self.placed.contains(param.name()) {
            true => Ok(()),
            false => self.put(param, targets.take(param, &full)?),
        })
    }

    fn finish(self, targets: &Targets<'_>) -> Result<()> {
        if let Some(dispatch) = self.dispatch {
            dispatch.finish()?;
        }
        targets.put_in(self.values)
    }
}

fn quantize_in_place(targets: &Targets<'_>, mut values: Values<'_>) -> Result<LoadReport> {
    values.put_rest(targets)?;
    values.finish(targets)?;
    Ok(LoadReport { missing_keys: Vec::new(), unexpected_keys: Vec::new() })
}

fn load(
    targets: &Targets<'_>,
    mut source: WeightSource,
    (strict, refuses_ties): (bool, bool),
    mut values: Values<'_>,
) -> Result<LoadReport> {
    let positions: HashMap<String, usize> =
        source.tensors().iter().enumerate().map(|(position, (name, _))| (name.clone(), position)).collect();
    let stored = how_stored(targets, &source, &positions)?;
    // For the comparison with the model, a weight that is stored as codes is what it stands for.
    let mut found = Vec::new();
    let mut origins = Vec::new();
    for (position, (name, shape)) in source.tensors().iter().enumerate() {
        let is_part = weight_of_part(name).is_some_and(|weight| stored.contains_key(&weight));
        if is_part {
            continue;
        }
        let shape = match (stored.get(name), targets.layers.get(name).and_then(|layers| layers.first())) {
            (Some(_), Some(layer)) => layer.weight().shape(),
            _ => shape.clone(),
        };
        found.push((name.clone(), shape));
        origins.push(position);
    }
    let (mut pairs, mismatch) = match_names(targets.store, &found);
    if mismatch.is_fatal(strict) {
        return Err(WeightsError::DoesNotFit { path: source.path().to_owned(), mismatch }.into());
    }
    let path = source.path().to_owned();
    check_ties(targets.store, &found, (&path, refuses_ties), |place, _| source.read(origins[place]))?;
    // Tensors are listed file by file in the order of their data, which a disk reads fastest.
    pairs.sort_by_key(|(place, _)| *place);
    for (place, param) in pairs {
        let value = match stored.get(&found[place].0) {
            Some(kind) => Value::Codes(read_codes(targets, &mut source, &positions, &param, *kind)?),
            None => targets.take(&param, &source.read(origins[place])?)?,
        };
        values.put(&param, value)?;
    }
    if values.dispatch.is_some() {
        values.put_rest(targets)?;
    }
    values.finish(targets)?;
    messages::debug!("read {} bytes of weights from {}", source.num_bytes_read(), source.path().display());
    Ok(LoadReport { missing_keys: mismatch.missing, unexpected_keys: mismatch.unexpected })
}

/// The weights that are codes in the file.
fn how_stored(
    targets: &Targets<'_>,
    source: &WeightSource,
    positions: &HashMap<String, usize>,
) -> Result<BTreeMap<String, StoredWeight>> {
    let refused = |source| WeightsError::Quantized { source };
    let mut stored = BTreeMap::new();
    let weights = source.tensors().iter().filter_map(|(name, _)| weight_of_part(name));
    for weight in weights.collect::<std::collections::BTreeSet<_>>() {
        let kind = recognise(&weight, |name| positions.contains_key(name)).map_err(refused)?;
        let is_wanted = match (targets.layers.get(&weight), kind, targets.quantization) {
            // The model may have a tensor of this name itself.
            (_, StoredWeight::Plain, _) => continue,
            (None, ..) => Some("numbers, because the layer is not quantised".to_owned()),
            (_, StoredWeight::FourBit { quant_type, .. }, Quantization::FourBit { quant_type: wanted, .. }) => {
                (quant_type != wanted).then(|| format!("4 bits ({wanted})"))
            }
            (_, StoredWeight::EightBit, Quantization::EightBit { has_fp16_weight: false, .. }) => None,
            (_, _, Quantization::FourBit { .. }) => Some("4 bits".to_owned()),
            (_, _, Quantization::EightBit { has_fp16_weight: false, .. }) => Some("8 bits".to_owned()),
            (_, _, Quantization::EightBit { .. }) => Some("16 bits (llm_int8_has_fp16_weight)".to_owned()),
        };
        if let Some(wanted) = is_wanted {
            let path = source.path().to_owned();
            return Err(WeightsError::OtherWeight { path, weight: shown(&weight), found: kind.text(), wanted }.into());
        }
        stored.insert(weight, kind);
    }
    Ok(stored)
}

/// Reads a weight that is codes in the file.
fn read_codes(
    targets: &Targets<'_>,
    source: &mut WeightSource,
    positions: &HashMap<String, usize>,
    param: &Param,
    stored: StoredWeight,
) -> Result<Quantized> {
    let (name, device) = (param.name(), targets.device);
    let layer = targets.layers.get(name).and_then(|layers| layers.first());
    let shape = layer.map_or_else(|| param.shape(), |layer| layer.sizes().to_vec());
    let mut read = |part: &str| -> Result<Tensor> {
        let parameter = name.to_owned();
        let position = *positions.get(part).ok_or(NnError::NotQuantized { parameter })?;
        Ok(source.read(position)?.f_to(device)?)
    };
    if let StoredWeight::FourBit { quant_type, is_nested } = stored {
        let names = FourBitNames::of(name, quant_type, is_nested);
        let nested = match &names.nested {
            Some([absmax, map]) => Some([read(absmax)?, read(map)?]),
            None => None,
        };
        let tensors = FourBitTensors {
            packed: read(name)?,
            absmax: read(&names.absmax)?,
            quant_map: read(&names.quant_map)?,
            nested,
            quant_state: read(&names.quant_state)?,
        };
        return targets.quantizer.four_bit_from_file(name, &shape, quant_type, tensors);
    }
    let names = Int8Names::of(name);
    if positions.contains_key(&names.weight_format) {
        let format = read(&names.weight_format)?;
        if format.numel() != 1 || format.f_to_kind(Kind::Int64)?.f_reshape([-1])?.f_int64_value(&[0])? != 0 {
            return Err(WeightsError::WeightFormat { weight: shown(name) }.into());
        }
    }
    let tensors = Int8Tensors { codes: read(name)?, scb: read(&names.scb)? };
    targets.quantizer.int8_from_file(name, &shape, targets.kind(param), tensors)
}
