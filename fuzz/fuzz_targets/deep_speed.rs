#![no_main]
//! DeepSpeed's configuration files: read, and filled with what a run knows.

use accelerate_core::config::{DeepSpeedConfig, DeepSpeedFacts, DeepSpeedSettings, PreparedFacts};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(config) = DeepSpeedConfig::from_json(text) else { return };
    let objects = PreparedFacts { batch_sizes: vec![Some(8)], ..Default::default() };
    for (world_size, objects) in [(1, PreparedFacts::default()), (2, objects)] {
        let facts = DeepSpeedFacts { world_size, objects, ..Default::default() };
        if let Ok(resolved) = DeepSpeedSettings::default().resolve(&config, &facts) {
            resolved.summary();
        }
    }
});
