//! Files into a model's parameters.

use super::source::Source;
use crate::big_model::{DeviceMap, Dispatch, DispatchOptions, Value, map_device};
use crate::error::{NnError, Result, WeightsError};
use crate::messages;
use crate::nn::{LoadReport, Param, ParamStore, found_twice, is_floating, match_names};
use accelerate_core::weight_files::shown;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use tch::{Kind, Tensor};

/// From the name in a file to the name in the model.
type KeyMap = Arc<dyn Fn(&str) -> String + Send + Sync>;

/// How [`load_checkpoint_in_model`] compares names, and where parameters go.
///
/// ```
/// use accelerate::checkpoint::LoadOptions;
/// let options = LoadOptions { strict: false, ..Default::default() }
///     .key_map(|name| name.strip_prefix("bert.").unwrap_or(name).to_owned());
/// assert!(!options.strict);
/// ```
#[derive(Clone)]
pub struct LoadOptions {
    /// Is a name that only the model or only the file has an error (`true`), or reported (`false`)?
    /// Default: true; Python Accelerate's default is false, which lets a misspelt model train from scratch
    /// unnoticed.
    pub strict: bool,
    /// Is it an error if a file has one parameter under two names with other values (`true`), or is the first loaded and the other told
    /// of (`false`)? Default: as `strict`.
    pub strict_ties: Option<bool>,
    /// Applied to every name in the file before comparing.
    pub key_map: Option<KeyMap>,
    /// Where each module goes: see [`dispatch_model`](crate::big_model::dispatch_model). Parameters may be without memory before
    /// ([`ParamStore::init_empty_weights`]). Default: parameters stay where they are.
    pub device_map: Option<DeviceMap>,
    /// Parameters and buffers with numbers with a point become of this type. Default: each keeps its own.
    pub dtype: Option<Kind>,
    /// The folder of what `device_map` puts on the disk, and the like.
    pub dispatch: DispatchOptions,
}

impl LoadOptions {
    /// Is a parameter that a file has twice, with other values, an error?
    pub(crate) fn refuses_ties(&self) -> bool {
        self.strict_ties.unwrap_or(self.strict)
    }

    /// Sets [`key_map`](Self::key_map).
    #[must_use]
    pub fn key_map(mut self, map: impl Fn(&str) -> String + Send + Sync + 'static) -> Self {
        self.key_map = Some(Arc::new(map));
        self
    }
}

impl Default for LoadOptions {
    fn default() -> Self {
        let (key_map, device_map, dtype) = (None, None, None);
        let dispatch = DispatchOptions::default();
        Self { strict: true, strict_ties: None, key_map, device_map, dtype, dispatch }
    }
}

impl fmt::Debug for LoadOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadOptions")
            .field("strict", &self.strict)
            .field("has_key_map", &self.key_map.is_some())
            .field("device_map", &self.device_map)
            .field("dtype", &self.dtype)
            .field("dispatch", &self.dispatch)
            .finish()
    }
}

/// The name without the `gamma` and `beta` that TensorFlow's layer norms left in old BERT files, as
/// Hugging Face's loader has it.
///
/// ```
/// use accelerate::checkpoint::modern_layer_norm_names;
/// assert_eq!(modern_layer_norm_names("encoder.LayerNorm.gamma"), "encoder.LayerNorm.weight");
/// assert_eq!(modern_layer_norm_names("encoder.LayerNorm.beta"), "encoder.LayerNorm.bias");
/// assert_eq!(modern_layer_norm_names("gamma.weight"), "gamma.weight");
/// ```
pub fn modern_layer_norm_names(name: &str) -> String {
    match name.rsplit_once('.') {
        Some((layer, "gamma")) => format!("{layer}.weight"),
        Some((layer, "beta")) => format!("{layer}.bias"),
        _ => name.to_owned(),
    }
}

/// Reads weights by name into existing parameters and buffers, casting element types and devices.
///
/// `path` is a safetensors file, a file of `torch.save` (`pytorch_model.bin`), the index of either's shards
/// (`*.safetensors.index.json`), or a folder that holds one of them or is one of `torch.distributed.checkpoint`. Of
/// PyTorch's formats tensors are read, and nothing is executed. A tied weight may be present under any of its names, or several. Headers of all files are checked
/// and compared with the model before anything is changed; tensors are then read one at a time. Of a sharded
/// parameter, only the elements that this process keeps are read: files of any number of ranks load on any other.
/// Not collective.
///
/// With a `device_map`, each parameter goes to where the map has it while the file is read, one at a time. What the checkpoint lacks
/// (`strict = false`) is initialised as its layer has it, if it was without memory.
///
/// # Errors
/// [`is_weights`](crate::Error::is_weights): a file is absent, truncated or damaged; an index names what is not
/// there; names or shapes do not fit (they are listed as far as a message has room). A read error in the middle leaves the
/// parameters read so far changed, but for a load with a `device_map`, after which nothing has changed.
/// [`is_big_model`](crate::Error::is_big_model): the map cannot be carried out.
///
/// ```
/// use accelerate::checkpoint::{LoadOptions, load_checkpoint_in_model, save_file};
/// use accelerate::nn::{Linear, ParamStore, StateDict};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let path = std::env::temp_dir().join(format!("accelerate-load-{}.safetensors", std::process::id()));
/// let ones = Tensor::ones([2, 2], (Kind::Half, Device::Cpu));
/// save_file(&[("bert.proj.weight".to_string(), ones)].into_iter().collect::<StateDict>(), &path)?;
///
/// let store = ParamStore::new(Device::Cpu);
/// let proj = Linear::new(store.root() / "proj", 2, 2, Default::default())?;
/// let options = LoadOptions { strict: false, ..Default::default() }
///     .key_map(|name| name.trim_start_matches("bert.").to_owned());
/// let report = load_checkpoint_in_model(&store, &path, &options)?;
/// assert_eq!(report.missing_keys, ["proj.bias"]);
/// assert_eq!(proj.weight.get()?.double_value(&[1, 1]), 1.0);
/// # std::fs::remove_file(&path).map_err(accelerate::Error::other)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn load_checkpoint_in_model(
    store: &ParamStore,
    path: impl AsRef<Path>,
    options: &LoadOptions,
) -> Result<LoadReport> {
    load_source(store, &mut Source::open(path.as_ref())?, options)
}

/// Names and shapes of all tensors of a checkpoint, file by file in the order of their data, out of headers alone.
///
/// `path` is what [`load_checkpoint_in_model`] takes. Not collective.
///
/// # Errors
/// [`is_weights`](crate::Error::is_weights): a file is absent, truncated or damaged; an index names what is not there.
///
/// ```
/// use accelerate::checkpoint::{checkpoint_shapes, save_file};
/// use accelerate::nn::StateDict;
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let path = std::env::temp_dir().join(format!("accelerate-shapes-{}.safetensors", std::process::id()));
/// let bias = Tensor::zeros([3], (Kind::Float, Device::Cpu));
/// save_file(&[("bias".to_string(), bias)].into_iter().collect::<StateDict>(), &path)?;
/// assert_eq!(checkpoint_shapes(&path)?, [("bias".to_string(), vec![3])]);
/// # std::fs::remove_file(&path).map_err(accelerate::Error::other)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn checkpoint_shapes(path: impl AsRef<Path>) -> Result<Vec<(String, Vec<i64>)>> {
    let source = Source::open(path.as_ref())?;
    Ok(source.tensors.into_iter().map(|(name, shape, _)| (name, shape)).collect())
}

/// An error where one of these names, which a model does not have, belongs to codes of 4 or 8 bits: read as numbers they are nonsense.
#[doc(hidden)]
pub fn refuse_codes<'a>(path: &Path, mut unexpected: impl Iterator<Item = &'a str>) -> Result<()> {
    match unexpected.find(|name| is_beside_codes(name)) {
        Some(name) => Err(WeightsError::Codes { path: path.to_owned(), name: name.to_owned() }.into()),
        None => Ok(()),
    }
}

fn load_source(store: &ParamStore, source: &mut Source, options: &LoadOptions) -> Result<LoadReport> {
    let found = mapped_names(source, options)?;
    let (mut pairs, mismatch) = match_names(store, &found);
    refuse_codes(&source.path, mismatch.unexpected.iter().map(String::as_str))?;
    if mismatch.is_fatal(options.strict) {
        return Err(WeightsError::DoesNotFit { path: source.path.clone(), mismatch }.into());
    }
    let path = source.path.clone();
    check_ties(store, &found, (&path, options.refuses_ties()), |position, param| source.read(position, param))?;
    // Tensors are listed file by file in the order of their data, which a disk reads fastest.
    pairs.sort_by_key(|(position, _)| *position);
    if options.device_map.is_some() || options.dtype.is_some() {
        load_placed(store, source, options, pairs)?;
    } else {
        store.check_writable()?;
        for (position, param) in pairs {
            param.copy_shard_(&source.read(position, &param)?)?;
        }
    }
    messages::debug!("read {} bytes of weights from {}", source.num_bytes_read(), source.path.display());
    Ok(LoadReport { missing_keys: mismatch.missing, unexpected_keys: mismatch.unexpected })
}

/// Is it the name of what bitsandbytes keeps beside codes? Without it they would be taken for numbers.
fn is_beside_codes(name: &str) -> bool {
    name.ends_with(".SCB") || name.contains(".quant_state.bitsandbytes__")
}

/// A file may have a tied parameter under several names, and then has to have the same values.
/// Otherwise it is an error, or, unless `strict`, a warning. `read` gives the tensor at a position of `found`.
pub(crate) fn check_ties(
    store: &ParamStore,
    found: &[(String, Vec<i64>)],
    (path, strict): (&Path, bool),
    mut read: impl FnMut(usize, &Param) -> Result<Tensor>,
) -> Result<()> {
    for (position, other, param) in found_twice(store, found) {
        // Bits, so that what is not a number is equal to itself.
        let bits = |tensor: Tensor| -> Result<Tensor> {
            Ok(tensor.f_contiguous()?.f_reshape([-1])?.f_view_dtype(Kind::Uint8)?)
        };
        let [first, second] = [read(position, &param)?, read(other, &param)?];
        let is_same = first.f_kind()? == second.f_kind()? && bits(first)?.f_equal(&bits(second)?)?;
        if is_same {
            continue;
        }
        let [first, second] = [position, other].map(|place| shown(&found[place].0));
        let error = WeightsError::TiedApart { path: path.to_owned(), first, second };
        if strict {
            return Err(error.into());
        }
        messages::warning!("{error}");
    }
    Ok(())
}

/// Gives each parameter a place, with the value that was found for it, or else its own.
fn load_placed(
    store: &ParamStore,
    source: &mut Source,
    options: &LoadOptions,
    pairs: Vec<(usize, Param)>,
) -> Result<()> {
    let map = match &options.device_map {
        Some(map) => map.clone(),
        None => DeviceMap::all_on(map_device(store.device())?),
    };
    if let Some(param) = store.parameters().iter().find(|param| param.is_stored_as_several()) {
        return Err(NnError::AlreadyQuantized { parameter: param.name().to_owned() }.into());
    }
    let mut dispatch = Dispatch::new(store, &map, &options.dispatch)?;
    let cast = |tensor: Tensor, param: &Param| {
        let kind = options.dtype.filter(|_| is_floating(param.kind())).unwrap_or_else(|| param.kind());
        tensor.f_to_kind(kind)
    };
    let mut loaded: HashSet<String> = HashSet::new();
    for (position, param) in pairs {
        let tensor = cast(source.read(position, &param)?, &param)?.f_reshape(param.shape())?;
        dispatch.place(&param, Value::Here(tensor))?;
        loaded.insert(param.name().to_owned());
    }
    for param in store.parameters_and_buffers() {
        if !loaded.contains(param.name()) && !param.is_deferred() {
            dispatch.place(&param, Value::Here(cast(param.full_tensor()?, &param)?))?;
        }
    }
    if store.parameters().iter().any(|param| param.is_deferred() && !loaded.contains(param.name())) {
        store.initialise_each(|param, full| match loaded.contains(param.name()) {
            true => Ok(()),
            false => dispatch.place(param, Value::Here(cast(full, param)?)),
        })?;
    }
    dispatch.finish()
}

pub(super) fn mapped_names(source: &Source, options: &LoadOptions) -> Result<Vec<(String, Vec<i64>)>> {
    let mut found = Vec::with_capacity(source.tensors.len());
    let mut origins: HashMap<String, &str> = HashMap::new();
    for (name, shape, _) in &source.tensors {
        let mapped = options.key_map.as_ref().map_or_else(|| name.clone(), |map| map(name));
        if let Some(first) = origins.insert(mapped.clone(), name) {
            let [first, second, mapped] = [first, name, mapped.as_str()].map(shown);
            return Err(WeightsError::SameName { path: source.path.clone(), first, second, mapped }.into());
        }
        found.push((mapped, shape.clone()));
    }
    Ok(found)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::nn::{Init, Layout, ModuleFn};
    use crate::{Accelerator, FullyShardedDataParallelPlugin, testing};
    use tch::{Kind, Tensor};

    #[test]
    fn a_slice_of_a_dim_is_read_run_by_run() {
        let folder = tempfile::tempdir().unwrap();
        let store = ParamStore::new(tch::Device::Cpu);
        let values = Tensor::arange(24, (Kind::Float, tch::Device::Cpu)).view([4, 6]);
        store.root().param("weight", values.shallow_clone()).unwrap();
        crate::checkpoint::save_model_weights(&store, folder.path(), &Default::default()).unwrap();
        let mut source = Source::open(folder.path()).unwrap();
        let columns = Layout::full([4, 6]).slice(1, 2..5).unwrap();
        let found = source.files[0].read_elements("weight", &columns).unwrap();
        assert_eq!(found, values.narrow(1, 2, 3).reshape(-1));
        let part = columns.flat(1..7).unwrap();
        let found = source.files[0].read_elements("weight", &part).unwrap();
        assert_eq!(found, values.narrow(1, 2, 3).reshape(-1).narrow(0, 1, 6));
        assert_eq!(source.num_bytes_read(), 4 * (12 + 6));
        let error = source.files[0].read_elements("weight", &Layout::full([4, 7])).unwrap_err();
        assert!(error.to_string().contains("`weight` has 24 elements, and [4, 7] was asked for"), "{error}");
    }

    #[test]
    fn each_rank_reads_its_part_and_no_more() {
        let folder = tempfile::tempdir().unwrap();
        for world_size in 1..=4u64 {
            let builder = Accelerator::builder().fsdp_plugin(FullyShardedDataParallelPlugin::default());
            let read = testing::ranks(world_size as usize, builder, |accelerator| {
                let store = ParamStore::new(accelerator.device());
                for (name, shape) in [("a", &[13, 7][..]), ("b", &[101]), ("c", &[])] {
                    store.root().param(name, (shape, Init::Ones))?;
                }
                store.root().buffer(
                    "mean",
                    Tensor::ones([4], (Kind::Float, accelerator.device())),
                    Default::default(),
                )?;
                accelerator.prepare(ModuleFn::new(&store, |input: &Tensor| Ok(input.shallow_clone())))?;
                accelerator.save_model(&store, folder.path(), &Default::default())?;
                let mut source = Source::open(folder.path())?;
                load_source(&store, &mut source, &LoadOptions::default())?;
                Ok(source.num_bytes_read())
            })
            .unwrap();
            let (parameters, buffer) = (4 * (13 * 7 + 101 + 1), 4 * 4);
            assert_eq!(read.iter().sum::<u64>(), parameters + world_size * buffer, "{read:?}");
            assert!(read.iter().all(|&bytes| bytes <= parameters.div_ceil(4 * world_size) * 4 + buffer), "{read:?}");
        }
    }
}
