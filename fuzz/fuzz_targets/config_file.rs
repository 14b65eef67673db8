#![no_main]
//! Settings files, YAML and JSON: read, put together with the defaults, and handed on as variables.

use accelerate_core::config::{ConfigFile, RunConfig, Sources};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(file) = ConfigFile::read(text, "run.yaml".as_ref()) else { return };
    if let Ok(config) = RunConfig::resolve(Sources { file: Some(file), ..Default::default() }) {
        config.variables();
    }
});
