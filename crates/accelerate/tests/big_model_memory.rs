//! A model on the disk takes the memory of the layer in use, and of what its budget has room for. Alone in its program: the
//! kernel counts the memory of a process.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use accelerate::big_model::{DispatchOptions, disk_offload};
use accelerate::nn::{Linear, LinearConfig, ParamStore};
use accelerate::tch::{self, Device, Kind, Tensor};
use std::fs;

const NUM_LAYERS: usize = 24;
const WIDTH: i64 = 1024;
const LAYER_BYTES: u64 = 4 * (WIDTH * WIDTH) as u64;

/// Bytes of a line of `/proc/self/status`.
fn status_bytes(key: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}

/// How much more than before was resident at the highest while `work` ran.
fn peak_growth(work: impl FnOnce()) -> u64 {
    // Lets the kernel count from what is resident now (`man 5 proc`).
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status_bytes("VmRSS:");
    work();
    status_bytes("VmHWM:").saturating_sub(before)
}

#[test]
fn no_more_than_the_budget_and_a_layer_is_resident() {
    tch::set_num_threads(1);
    let folder = tempfile::tempdir().unwrap();
    let store = ParamStore::new(Device::Cpu);
    let config = LinearConfig { bias: false, ..Default::default() };
    let layer = |number: usize| Linear::new(store.root() / "layers" / number, WIDTH, WIDTH, config).unwrap();
    let layers: Vec<Linear> = (0..NUM_LAYERS).map(layer).collect();
    let input = Tensor::ones([1, WIDTH], (Kind::Float, Device::Cpu));
    let forward = || {
        let _no_grad = tch::no_grad_guard();
        layers.iter().fold(input.shallow_clone(), |input, layer| layer.forward(&input).unwrap())
    };
    // What libtorch takes for its first product is no matter of weights.
    let wanted = forward();
    for num_resident in [0, 6] {
        let resident_bytes = num_resident * LAYER_BYTES;
        let options = DispatchOptions { resident_bytes, ..Default::default() };
        disk_offload(&store, folder.path(), &options).unwrap();
        assert_eq!(forward(), wanted);
        for pass in 0..3 {
            let growth = peak_growth(|| assert_eq!(forward(), wanted));
            // The layers that may stay are resident by now, as is the last one of the pass before.
            assert!(growth <= LAYER_BYTES + LAYER_BYTES / 4, "pass {pass}: {growth} bytes for layers of {LAYER_BYTES}");
        }
        let resident = status_bytes("RssFile:");
        disk_offload(&store, folder.path(), &options).unwrap();
        let let_go = resident.saturating_sub(status_bytes("RssFile:"));
        let most = (num_resident + 1) * LAYER_BYTES + LAYER_BYTES / 4;
        let least = num_resident.max(1) * LAYER_BYTES - LAYER_BYTES / 4;
        assert!((least..=most).contains(&let_go), "{let_go} bytes were mapped, of layers of {LAYER_BYTES}");
    }
}
