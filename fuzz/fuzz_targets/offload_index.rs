#![no_main]
//! Indices of offloaded weights and device maps: read, written, and read again.

use accelerate_core::device_map::{DeviceMap, clean_device_map};
use accelerate_core::weight_files::OffloadIndex;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(index) = OffloadIndex::from_json(text) {
        assert!(index.weights.keys().all(|name| !name.contains('/')));
        let written = index.to_json().expect("what was read can be written");
        assert_eq!(OffloadIndex::from_json(&written).expect("what was written can be read"), index);
    }
    if let Ok(map) = DeviceMap::from_json(text) {
        let cleaned = clean_device_map(&map);
        assert_eq!(clean_device_map(&cleaned), cleaned);
    }
});
