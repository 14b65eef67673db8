//! Files into a model whose parameters go to several devices and a disk.

use super::load::{LoadOptions, load_checkpoint_in_model};
use crate::big_model::{
    DeviceMap, DeviceMapStrategy, DeviceMapTable, DispatchOptions, InferOptions, MapDevice, MaxMemory, ModuleTree,
    SizeOptions, element_type, machine_memory, module_tree,
};
use crate::error::Result;
use crate::messages;
use crate::nn::{LoadReport, ParamStore};
use std::path::Path;

/// The map of [`load_checkpoint_and_dispatch`]: one that there is, or the way to find one.
///
/// ```
/// use accelerate::big_model::{DeviceMap, DeviceMapStrategy, MapDevice};
/// use accelerate::checkpoint::DeviceMapChoice;
/// assert_eq!(DeviceMapChoice::default(), DeviceMapChoice::from(DeviceMapStrategy::Auto));
/// assert_ne!(DeviceMapChoice::default(), DeviceMapChoice::from(DeviceMap::all_on(MapDevice::Cpu)));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceMapChoice {
    /// Find one, for what the machine has or `max_memory` says.
    Strategy(DeviceMapStrategy),
    /// This one.
    Map(DeviceMap),
}

impl Default for DeviceMapChoice {
    fn default() -> Self {
        Self::Strategy(DeviceMapStrategy::Auto)
    }
}

impl From<DeviceMapStrategy> for DeviceMapChoice {
    fn from(strategy: DeviceMapStrategy) -> Self {
        Self::Strategy(strategy)
    }
}

impl From<DeviceMap> for DeviceMapChoice {
    fn from(map: DeviceMap) -> Self {
        Self::Map(map)
    }
}

/// How [`load_checkpoint_and_dispatch`] goes about it.
///
/// ```
/// use accelerate::checkpoint::LoadAndDispatchOptions;
/// assert!(LoadAndDispatchOptions::default().load.strict);
/// ```
#[derive(Clone, Debug, Default)]
pub struct LoadAndDispatchOptions {
    /// Where each module goes. Default: found by `auto`.
    pub device_map: DeviceMapChoice,
    /// Bytes that each device may keep. Default: what the machine has free now.
    pub max_memory: Option<MaxMemory>,
    /// Modules that stay on one device, as patterns of paths: see [`InferOptions`].
    pub no_split_module_classes: Vec<String>,
    /// How names are compared, in which type weights are loaded, and, by [`LoadOptions::dispatch`], the folder for the disk. Its
    /// `device_map` does not count.
    pub load: LoadOptions,
}

/// What [`load_checkpoint_and_dispatch`] has done.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LoadedAndDispatched {
    /// Where each module is (`hf_device_map` of the reference).
    pub device_map: DeviceMap,
    /// The same with bytes; it prints as a table.
    pub table: DeviceMapTable,
    /// What was not loaded, where that is no error.
    pub report: LoadReport,
}

/// Loads a checkpoint into a model, each parameter to where a map has it, and makes the model ready to be computed
/// (`load_checkpoint_and_dispatch` of the reference). Make the model by [`ParamStore::init_empty_weights`], so that nothing is in memory
/// that the map has elsewhere: then memory is that of the map and one tensor more, in both types where it is cast.
///
/// The map is found, or given; [`dispatch_model`](crate::big_model::dispatch_model) says what it does. If the model is computed on
/// the CPU, layers that are kept on the disk stay in memory as far as its budget has room. Not collective.
///
/// # Errors
/// Those of [`load_checkpoint_in_model`] and [`dispatch_model`](crate::big_model::dispatch_model). The model is as it was then.
///
/// ```
/// use accelerate::big_model::{MapDevice, MaxMemory};
/// use accelerate::checkpoint::{LoadAndDispatchOptions, LoadOptions, load_checkpoint_and_dispatch, save_model_weights};
/// use accelerate::big_model::DispatchOptions;
/// use accelerate::nn::{Linear, ParamStore};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let folder = std::env::temp_dir().join(format!("accelerate-big-{}", std::process::id()));
/// let saved = ParamStore::new(Device::Cpu);
/// for number in 0..4 {
///     Linear::new(saved.root() / "layers" / number, 8, 8, Default::default())?;
/// }
/// save_model_weights(&saved, &folder, &Default::default())?;
///
/// let store = ParamStore::init_empty_weights(Device::Cpu);
/// let layers = (0..4).map(|number| Linear::new(store.root() / "layers" / number, 8, 8, Default::default()));
/// let layers: Vec<Linear> = layers.collect::<Result<_, _>>()?;
/// let dispatch = DispatchOptions { offload_dir: Some(folder.join("offload")), ..Default::default() };
/// let options = LoadAndDispatchOptions {
///     max_memory: Some(MaxMemory::from_texts([("cpu", "700")])?),
///     load: LoadOptions { dispatch, ..Default::default() },
///     ..Default::default()
/// };
/// let done = load_checkpoint_and_dispatch(&store, &folder, &options)?;
/// // A layer takes 288 bytes; room for one more is kept.
/// assert_eq!(done.device_map.device_of("layers.0.weight"), Some(MapDevice::Cpu));
/// assert_eq!(done.device_map.device_of("layers.3.weight"), Some(MapDevice::Disk));
/// let input = Tensor::ones([1, 8], (Kind::Float, Device::Cpu));
/// layers.iter().try_fold(input, |input, layer| layer.forward(&input))?;
/// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn load_checkpoint_and_dispatch(
    store: &ParamStore,
    checkpoint: impl AsRef<Path>,
    options: &LoadAndDispatchOptions,
) -> Result<LoadedAndDispatched> {
    let planned = PlannedDispatch::of(&module_tree(store)?, options)?;
    let report = load_checkpoint_in_model(store, checkpoint, &planned.load)?;
    Ok(planned.done(report))
}

/// Where each module is to go, and how files are loaded then.
pub(crate) struct PlannedDispatch {
    device_map: DeviceMap,
    table: DeviceMapTable,
    pub(crate) load: LoadOptions,
}

impl PlannedDispatch {
    /// Takes the map that there is, or finds one for these sizes.
    pub(crate) fn of(tree: &ModuleTree, options: &LoadAndDispatchOptions) -> Result<Self> {
        let sizes = SizeOptions { dtype: options.load.dtype.map(element_type).transpose()?, ..Default::default() };
        let infer = InferOptions {
            no_split_module_classes: options.no_split_module_classes.clone(),
            sizes: sizes.clone(),
            offload_buffers: options.load.dispatch.offload_buffers,
            ..Default::default()
        };
        let unknown = tree.without_module(&options.no_split_module_classes);
        if !unknown.is_empty() {
            messages::warning!(
                "no_split_module_classes names no module of the model: {}; wanted are patterns of paths, such as `model.layers.*`, and no \
                 classes of Python",
                unknown.join(", ")
            );
        }
        let asked = options.max_memory.as_ref();
        let (device_map, budgets) = match &options.device_map {
            DeviceMapChoice::Map(map) => (map.clone(), asked.cloned().unwrap_or_default()),
            DeviceMapChoice::Strategy(strategy) => {
                let (inferred, budgets) = strategy.device_map(tree, asked, &machine_memory(), &infer);
                if let Some(bytes) = inferred.buffers_without_room {
                    messages::warning!(
                        "buffers of modules that are offloaded take {bytes} bytes, and no accelerator has room for them; set \
                     offload_buffers"
                    );
                }
                (inferred.device_map, budgets)
            }
        };
        let table = device_map.table(tree, &sizes, &budgets);
        let mut load = options.load.clone();
        load.dispatch = DispatchOptions { resident_bytes: room_for_layers(&load.dispatch, &table), ..load.dispatch };
        load.device_map = Some(device_map.clone());
        Ok(Self { device_map, table, load })
    }

    pub(crate) fn done(self, report: LoadReport) -> LoadedAndDispatched {
        LoadedAndDispatched { device_map: self.device_map, table: self.table, report }
    }
}

/// What of the CPU's budget the map leaves.
fn room_for_layers(dispatch: &DispatchOptions, table: &DeviceMapTable) -> u64 {
    let left = match table.devices.get(&MapDevice::Cpu) {
        Some((used, Some(budget))) => budget.saturating_sub(*used),
        _ => 0,
    };
    dispatch.resident_bytes.max(left)
}
