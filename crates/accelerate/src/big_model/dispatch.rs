//! Parameters go where a map says.

use super::folder::{DatFile, Found, OffloadFolder};
use super::machine::{device_of, map_device};
use super::storage::{Elsewhere, Kept, placeholder};
use super::tree::{module_of, module_tree};
use super::window::{Place, Window};
use crate::error::{BigModelError, Result};
use crate::messages;
use crate::nn::{Param, ParamStore, is_floating};
use accelerate_core::device_map::{DeviceMap, MapDevice, check_device_map};
use accelerate_core::weight_files::listed;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use tch::{Device, Tensor};

/// How [`dispatch_model`] goes about it.
///
/// ```
/// use accelerate::big_model::DispatchOptions;
/// assert!(!DispatchOptions::default().offload_buffers);
/// ```
#[derive(Clone, Debug, Default)]
pub struct DispatchOptions {
    /// Where the model is computed. Default: the first accelerator in the map, or the CPU if there is none.
    pub main_device: Option<MapDevice>,
    /// The folder of weights on the disk. Weights that are in memory are written there; for those without memory
    /// ([`ParamStore::init_empty_weights`]) it has to hold files already, which Python may have written.
    pub offload_dir: Option<PathBuf>,
    /// Do buffers, too, go where the map says? Default false: they stay where the model is computed. Buffers that are kept
    /// elsewhere can be used in evaluation mode only.
    pub offload_buffers: bool,
    /// Bytes of weights on the disk that may stay in the CPU's memory besides the layer in use, if the model is computed on the CPU.
    /// Default 0.
    pub resident_bytes: u64,
}

/// Puts each parameter where `device_map` says, and computes the model on one device: the reference's `dispatch_model`.
///
/// Layers notice nothing. A parameter that the map puts elsewhere is brought to `main_device` when a layer asks for it, and let go
/// when the next layer does; from the second pass on, the disk is read ahead in the order of the first. Other accelerators than
/// `main_device` are memory only; the reference computes on them. What is kept elsewhere is frozen until another map brings it back: it
/// has no gradient, and cannot be written to. What stays on `main_device` can be trained. Results are the same to the bit as those of the
/// model in memory on
/// `main_device`. Tied parameters go where the map has their first name.
///
/// Memory on `main_device` is that of the modules which the map has there and, at most, that of one layer more; on the CPU
/// [`resident_bytes`](DispatchOptions::resident_bytes) on top. Of a quantised weight, codes and scales are kept elsewhere. A backward pass through layers on the disk brings them back one by one,
/// and the next forward pass lets them go. Weights on the disk are files that are mapped into memory: nobody may
/// write into them meanwhile. Not collective.
///
/// Nothing has changed after an error, but for files in the folder.
///
/// # Errors
/// [`is_big_model`](crate::Error::is_big_model): a device that is not there; no folder for the disk; a parameter without a value; a
/// prepared model; files in the folder that are not of this model. A map that leaves tensors out.
///
/// ```
/// use accelerate::big_model::{DeviceMap, DispatchOptions, MapDevice, dispatch_model};
/// use accelerate::nn::{Linear, ParamStore};
/// use accelerate::tch::{Device, Tensor};
///
/// let folder = std::env::temp_dir().join(format!("accelerate-dispatch-{}", std::process::id()));
/// let store = ParamStore::new(Device::Cpu);
/// let first = Linear::new(store.root() / "first", 4, 4, Default::default())?;
/// let second = Linear::new(store.root() / "second", 4, 2, Default::default())?;
/// let input = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0]);
/// let before = second.forward(&first.forward(&input)?)?;
///
/// let map: DeviceMap = [("first", MapDevice::Disk), ("second", MapDevice::Cpu)].into_iter().collect();
/// dispatch_model(&store, &map, &DispatchOptions { offload_dir: Some(folder.clone()), ..Default::default() })?;
/// assert_eq!(second.forward(&first.forward(&input)?)?, before);
/// assert!(first.weight.set_requires_grad(true).is_err() && second.weight.requires_grad());
/// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn dispatch_model(store: &ParamStore, device_map: &DeviceMap, options: &DispatchOptions) -> Result<()> {
    let mut dispatch = Dispatch::new(store, device_map, options)?;
    for param in store.parameters_and_buffers() {
        if param.is_stored_as_several() {
            dispatch.place_parts(&param, &param.stored_as(), param.piece_sizes().len())?;
        } else if !param.is_deferred() {
            dispatch.place(&param, Value::Here(param.full_tensor()?))?;
        } else if dispatch.place_of(&param)? == MapDevice::Disk {
            dispatch.place(&param, Value::InFolder)?;
        } else {
            return Err(BigModelError::WithoutValue { parameter: param.name().to_owned() }.into());
        }
    }
    dispatch.finish()
}

/// Keeps all parameters in the CPU's memory and computes on `execution_device`, by default the first accelerator: the reference's
/// `cpu_offload`. Where there is none, the model is computed on the CPU and nothing moves. Of the options, `main_device` and `offload_buffers`
/// count; see [`dispatch_model`].
///
/// # Errors
/// As [`dispatch_model`].
///
/// ```
/// use accelerate::big_model::cpu_offload;
/// use accelerate::nn::{Linear, ParamStore};
/// use accelerate::tch::{Device, Tensor};
///
/// let store = ParamStore::new(Device::Cpu);
/// let layer = Linear::new(store.root(), 2, 2, Default::default())?;
/// cpu_offload(&store, &Default::default())?;
/// layer.forward(&Tensor::from_slice(&[1f32, 2.0]))?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn cpu_offload(store: &ParamStore, options: &DispatchOptions) -> Result<()> {
    let main_device = options.main_device.unwrap_or_else(|| default_device(store));
    let options = DispatchOptions { main_device: Some(main_device), ..options.clone() };
    dispatch_model(store, &DeviceMap::all_on(MapDevice::Cpu), &options)
}

/// Keeps all parameters in files of `offload_dir` and computes where the model is, or on `main_device` of the options: the reference's
/// `disk_offload`. See [`dispatch_model`].
///
/// # Errors
/// As [`dispatch_model`].
///
/// ```
/// use accelerate::big_model::disk_offload;
/// use accelerate::nn::{Linear, ParamStore};
/// use accelerate::tch::{Device, Tensor};
///
/// let folder = std::env::temp_dir().join(format!("accelerate-disk-offload-{}", std::process::id()));
/// let store = ParamStore::new(Device::Cpu);
/// let layer = Linear::new(store.root() / "proj", 2, 2, Default::default())?;
/// disk_offload(&store, &folder, &Default::default())?;
/// layer.forward(&Tensor::from_slice(&[1f32, 2.0]))?;
/// assert!(folder.join("proj.weight.dat").exists() && folder.join("index.json").exists());
/// # std::fs::remove_dir_all(&folder).map_err(accelerate::Error::other)?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn disk_offload(store: &ParamStore, offload_dir: impl Into<PathBuf>, options: &DispatchOptions) -> Result<()> {
    let main_device = options.main_device.unwrap_or_else(|| default_device(store));
    let options =
        DispatchOptions { main_device: Some(main_device), offload_dir: Some(offload_dir.into()), ..options.clone() };
    dispatch_model(store, &DeviceMap::all_on(MapDevice::Disk), &options)
}

/// The device of the model, or the first accelerator for a model on the CPU.
pub(super) fn default_device(store: &ParamStore) -> MapDevice {
    match map_device(store.device()) {
        Ok(device) if device.is_accelerator() => device,
        _ if tch::Cuda::device_count() > 0 => MapDevice::Accelerator(0),
        _ => MapDevice::Cpu,
    }
}

/// The value of a parameter that is to be placed.
pub(crate) enum Value {
    Here(Tensor),
    /// In the folder of the disk.
    InFolder,
}

/// Where a parameter will be.
enum Placed {
    /// Where the model is computed; `None` if it is there already.
    Main(Option<Tensor>),
    Memory(Tensor),
    Disk(DatFile),
}

/// A parameter, or a part of a quantised one, that has a place.
struct Target {
    param: Param,
    /// The layer that uses it.
    module: String,
    map_device: MapDevice,
    /// Layers may write to it in training mode.
    is_buffer: bool,
    placed: Placed,
}

/// A model on its way to its devices. Parameters change when all have a place.
pub(crate) struct Dispatch<'a> {
    store: &'a ParamStore,
    map: &'a DeviceMap,
    options: &'a DispatchOptions,
    main: MapDevice,
    device: Device,
    folder: Option<OffloadFolder>,
    placed: Vec<Target>,
    has_written: bool,
}

impl<'a> Dispatch<'a> {
    /// Checks all that can be checked before a value is there.
    pub(crate) fn new(store: &'a ParamStore, map: &'a DeviceMap, options: &'a DispatchOptions) -> Result<Self> {
        let tree = module_tree(store)?;
        let unknown = check_device_map(&tree, map)?;
        if !unknown.is_empty() {
            messages::warning!(
                "the device map names modules that the model does not have, or that have no parameters: {}",
                listed(&unknown, 600)
            );
        }
        let devices = map.devices();
        devices.iter().try_for_each(|&device| device_of(device).map(drop))?;
        let first = devices.into_iter().find(|device| device.is_accelerator()).unwrap_or(MapDevice::Cpu);
        let main = options.main_device.unwrap_or(first);
        let device = device_of(main)?.ok_or(BigModelError::ComputesOnDisk)?;
        let tensors = store.parameters_and_buffers();
        let is_bound = |param: &&Param| param.is_of_prepared_model() || param.shard_group().is_some();
        if let Some(param) = tensors.iter().find(is_bound) {
            return Err(BigModelError::Prepared { parameter: param.name().to_owned() }.into());
        }
        let folder = None;
        let mut dispatch = Self { store, map, options, main, device, folder, placed: Vec::new(), has_written: false };
        dispatch.open_folder(&tensors)?;
        dispatch.warn_of_ties();
        Ok(dispatch)
    }

    fn open_folder(&mut self, tensors: &[Param]) -> Result<()> {
        let mut names = Vec::new();
        for param in tensors {
            if self.place_of(param)? == MapDevice::Disk {
                names.push(param.name().to_owned());
            }
        }
        if names.is_empty() {
            return Ok(());
        }
        let path = self.options.offload_dir.as_ref().filter(|path| !path.as_os_str().is_empty());
        let path = path.ok_or(BigModelError::NoFolder { names })?;
        self.folder = Some(OffloadFolder::create(path)?);
        Ok(())
    }

    fn warn_of_ties(&self) {
        for (alias, first) in self.store.aliases() {
            let devices = [&alias, &first].map(|name| self.map.device_of(name));
            if let [Some(one), Some(other)] = devices
                && one != other
            {
                messages::warning!(
                    "the device map puts {alias} on {one}, and {first}, which is the same parameter, on {other}; it goes to {other}"
                );
            }
        }
    }

    /// Where a parameter will be kept.
    pub(crate) fn place_of(&self, param: &Param) -> Result<MapDevice> {
        if param.is_buffer() && !self.options.offload_buffers {
            return Ok(self.main);
        }
        // All tensors have been found in the map.
        Ok(self.map.device_of(param.name()).unwrap_or(self.main))
    }

    /// Where the model will be computed.
    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// Will a parameter be kept elsewhere than where the model is computed?
    pub(crate) fn is_elsewhere(&self, param: &Param) -> Result<bool> {
        Ok(self.place_of(param)? != self.main)
    }

    /// Takes a value to its device, or its file.
    pub(crate) fn place(&mut self, param: &Param, value: Value) -> Result<()> {
        let (map_device, module) = (self.place_of(param)?, module_of(param.name()).to_owned());
        let placed = self.placed(param, map_device, value)?;
        self.placed.push(Target { param: param.clone(), module, map_device, is_buffer: param.is_buffer(), placed });
        Ok(())
    }

    /// Takes what a quantised weight is stored as to where the map has the weight. Its tables are small and always in use, so they stay
    /// where the model is computed.
    pub(crate) fn place_parts(&mut self, weight: &Param, parts: &[Param], num_large: usize) -> Result<()> {
        let (map_device, module) = (self.place_of(weight)?, module_of(weight.name()).to_owned());
        for (number, part) in parts.iter().enumerate() {
            let map_device = if number < num_large { map_device } else { self.main };
            let placed = self.placed(part, map_device, Value::Here(part.full_tensor()?))?;
            let (param, module) = (part.clone(), module.clone());
            self.placed.push(Target { param, module, map_device, is_buffer: false, placed });
        }
        Ok(())
    }

    /// The same for parts that no model has yet: those that are in files now take no memory from here on.
    pub(crate) fn place_new_parts(&mut self, weight: &Param, parts: &[Param], num_large: usize) -> Result<()> {
        let begin = self.placed.len();
        self.place_parts(weight, parts, num_large)?;
        for target in &self.placed[begin..] {
            if let Placed::Disk(file) = &target.placed {
                target.param.set_replicated(placeholder(&target.param, file.kind, self.device)?)?;
            }
        }
        Ok(())
    }

    fn placed(&mut self, param: &Param, map_device: MapDevice, value: Value) -> Result<Placed> {
        Ok(match (device_of(map_device)?, value, self.folder.as_mut()) {
            (Some(device), Value::Here(tensor), _) => {
                let is_own = !param.is_deferred() && !param.is_dispatched();
                let is_unchanged = is_own && tensor.data_ptr() == param.local().data_ptr() && tensor.device() == device;
                // What has been on the disk is a part of a file until it is copied.
                let tensor = if param.is_offloaded() { tensor.f_detach_copy()? } else { tensor };
                let tensor = tensor.f_to_device(device)?;
                match device == self.device {
                    true => Placed::Main((!is_unchanged).then_some(tensor)),
                    false => Placed::Memory(tensor),
                }
            }
            // There is nothing to keep of it.
            (None, Value::Here(tensor), _) if tensor.numel() == 0 => {
                Placed::Main(Some(tensor.f_to_device(self.device)?))
            }
            (None, Value::Here(tensor), Some(folder)) => {
                self.has_written = true;
                Placed::Disk(folder.write(param.name(), &tensor)?)
            }
            (None, Value::InFolder, Some(folder)) => match folder.find(param.name(), &param.shape())? {
                Found::Dat(file) => Placed::Disk(file),
                // Such a file has no place of its own in memory that could be let go.
                Found::Read(tensor) => {
                    self.has_written = true;
                    Placed::Disk(folder.write(param.name(), &tensor)?)
                }
            },
            (Some(_), Value::InFolder, _) | (None, _, None) => {
                return Err(BigModelError::WithoutValue { parameter: param.name().to_owned() }.into());
            }
        })
    }

    /// Writes the index and changes the parameters.
    pub(crate) fn finish(mut self) -> Result<()> {
        if let Some(folder) = self.folder.as_ref().filter(|_| self.has_written) {
            folder.finish()?;
        }
        let placed = std::mem::take(&mut self.placed);
        let (changes, files) = self.changes(placed)?;
        let room = if self.device == Device::Cpu { self.options.resident_bytes } else { 0 };
        let window = Arc::new(Window::new(files.blocks, room));
        self.warn_of_training(&changes);
        // What can fail has come before the first change.
        for (target, change) in changes {
            let kept = match change {
                Change::Replicate(tensor) => {
                    target.param.set_replicated(tensor)?;
                    continue;
                }
                Change::Memory(tensor) => Kept::Memory(tensor),
                Change::Disk { place, placeholder } => Kept::Disk { window: Arc::clone(&window), place, placeholder },
            };
            let storage = self.elsewhere(&target, kept);
            drop(target.param.replace_storage(Box::new(storage)));
        }
        self.store.set_device(self.device);
        Ok(())
    }

    /// Gradients do not move. And where a program has said what is to be trained, such as adapters, it does not want that frozen.
    fn warn_of_training(&self, changes: &[(Target, Change)]) {
        let is_chosen = self.store.parameters().iter().any(|param| {
            is_floating(param.kind()) && !param.is_stored_as_several() && !param.is_trained_when_replicated()
        });
        let with_gradient = changes.iter().filter(|(target, _)| target.param.grad().is_some());
        let names: Vec<String> = with_gradient.map(|(target, _)| target.param.name().to_owned()).collect();
        if !names.is_empty() {
            messages::warning!(
                "gradients of parameters that the device map moves are dropped ({}); take the optimizer's step before the map",
                listed(&names, 600)
            );
        }
        let is_moved = |change: &Change| !matches!(change, Change::Replicate(_));
        let moved = changes.iter().filter(|(target, change)| is_moved(change) && target.param.requires_grad());
        let names: Vec<String> = moved.map(|(target, _)| target.param.name().to_owned()).collect();
        if is_chosen && !names.is_empty() {
            messages::warning!(
                "the device map keeps parameters elsewhere that are to be trained ({}), and what is kept elsewhere is frozen; \
                 put them on the device that computes, which a device map can say of each module",
                listed(&names, 600)
            );
        }
    }

    fn changes(&self, placed: Vec<Target>) -> Result<(Vec<(Target, Change)>, Files)> {
        let mut files = Files::default();
        let mut changes = Vec::with_capacity(placed.len());
        for mut target in placed {
            let change = match std::mem::replace(&mut target.placed, Placed::Main(None)) {
                Placed::Main(None) => continue,
                Placed::Main(Some(tensor)) => Change::Replicate(tensor),
                Placed::Memory(tensor) => Change::Memory(tensor),
                Placed::Disk(file) => {
                    let placeholder = placeholder(&target.param, file.kind, self.device)?;
                    Change::Disk { place: files.add(&target.module, file), placeholder }
                }
            };
            changes.push((target, change));
        }
        Ok((changes, files))
    }

    fn elsewhere(&self, target: &Target, kept: Kept) -> Elsewhere {
        let training = target.is_buffer.then(|| self.store.training_flag());
        let (name, map_device) = (target.param.name().to_owned(), target.map_device);
        let is_trained_when_back = AtomicBool::new(target.param.is_trained_when_replicated());
        Elsewhere { name, kept, map_device, device: self.device, training, is_trained_when_back }
    }
}

/// What becomes of a parameter.
enum Change {
    Replicate(Tensor),
    Memory(Tensor),
    Disk { place: Place, placeholder: Tensor },
}

/// Files by module: what one layer has is used together.
#[derive(Default)]
struct Files {
    blocks: Vec<Vec<DatFile>>,
    by_module: HashMap<String, usize>,
}

impl Files {
    fn add(&mut self, module: &str, file: DatFile) -> Place {
        let block = *self.by_module.entry(module.to_owned()).or_insert(self.blocks.len());
        if block == self.blocks.len() {
            self.blocks.push(Vec::new());
        }
        let files = &mut self.blocks[block];
        files.push(file);
        Place { block, member: files.len() - 1 }
    }
}
