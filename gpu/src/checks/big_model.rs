//! Models that are larger than the device: what is kept in the host's memory or on the disk comes when a layer asks for it.

use accelerate::big_model::{DeviceMap, DispatchOptions, MapDevice, cpu_offload, disk_offload, dispatch_model};
use accelerate::nn::{Linear, ParamStore};
use accelerate::tch::{Device, Kind, Tensor, no_grad};
use anyhow::{Result, ensure};
use torch_ext::device::{device_memory, reset_peak_device_memory};

use crate::check::{Context, Found};
use crate::models::wave;

const NUM_LAYERS: usize = 8;
/// 4 MiB for each layer.
const WIDTH: i64 = 1024;

struct Stack {
    store: ParamStore,
    layers: Vec<Linear>,
}

impl Stack {
    fn new(device: Device) -> Result<Self> {
        let store = ParamStore::new(device);
        let layer = |index: usize| Linear::new(store.root() / "layers" / index, WIDTH, WIDTH, Default::default());
        let layers = (0..NUM_LAYERS).map(layer).collect::<accelerate::Result<Vec<_>>>()?;
        for (index, param) in store.parameters().iter().enumerate() {
            param.copy_(&wave(&param.shape(), index as f64)?.f_mul_scalar(0.05)?)?;
        }
        Ok(Self { store, layers })
    }

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let layer = |x: Tensor, layer: &Linear| layer.forward(&x.f_relu()?);
        Ok(no_grad(|| self.layers.iter().try_fold(input.shallow_clone(), layer))?)
    }
}

/// Half of the layers where the model is computed, the others by turns in the host's memory and on the disk.
fn map(context: &Context<'_>) -> DeviceMap {
    let here = if context.is_cuda() { MapDevice::Accelerator(0) } else { MapDevice::Cpu };
    let place = |index: usize| match index % 4 {
        1 => MapDevice::Cpu,
        3 => MapDevice::Disk,
        _ => here,
    };
    (0..NUM_LAYERS).map(|index| (format!("layers.{index}"), place(index))).collect()
}

/// To the bit what the model gives that is on the device as a whole. The device is kept busy before each pass, so that a copy that did
/// not wait for its turn would be read half made.
pub(crate) fn dispatched(context: &Context<'_>) -> Result<Found> {
    let input = wave(&[4, WIDTH], 0.2)?.f_to_device(context.device)?;
    let wanted = Stack::new(context.device)?.forward(&input)?;
    let busy = Tensor::f_ones([2048, 2048], (Kind::Float, context.device))?;
    let folder = |name: &str| context.folder.join(name);
    let dispatch = DispatchOptions { offload_dir: Some(folder("map")), ..Default::default() };
    let main = context.is_cuda().then_some(MapDevice::Accelerator(0));
    let options = DispatchOptions { main_device: main, ..Default::default() };
    type Way<'a> = (&'a str, Box<dyn Fn(&ParamStore) -> accelerate::Result<()> + 'a>);
    let ways: [Way<'_>; 3] = [
        ("device map", Box::new(|store| dispatch_model(store, &map(context), &dispatch))),
        ("cpu_offload", Box::new(|store| cpu_offload(store, &options))),
        ("disk_offload", Box::new(|store| disk_offload(store, folder("disk"), &options))),
    ];
    let mut figures = Vec::new();
    for (name, way) in ways {
        let model = Stack::new(Device::Cpu)?;
        way(&model.store)?;
        if context.is_cuda() {
            reset_peak_device_memory(context.device)?;
        }
        let before = if context.is_cuda() { device_memory(context.device)?.allocated_bytes } else { 0 };
        for pass in 0..3 {
            if context.is_cuda() {
                for _ in 0..20 {
                    let _ = busy.f_matmul(&busy)?;
                }
            }
            let found = model.forward(&input)?;
            ensure!(found.device() == context.device, "{name}: the result is on {:?}", found.device());
            context.same(&format!("{name}: pass {pass}"), &found, &wanted)?;
        }
        if context.is_cuda() {
            // A layer, one that comes, activations, and what the work beside it takes.
            let mib = (device_memory(context.device)?.peak_allocated_bytes - before) as f64 / f64::from(1 << 20);
            context.close(&format!("{name}: MiB at the peak"), mib, 0.0, 56.0)?;
            figures.push(format!("{name} {mib:.0} MiB more"));
        } else {
            figures.push(name.to_owned());
        }
    }
    Found::figure(format!("3 passes each to the bit: {}", figures.join(", ")))
}
