#![no_main]
//! Configurations of adapters: read, written, and read again; whatever they say of layers is decided.

use accelerate_core::lora::{LayerEntry, LayerKind, LoraConfig};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(config) = LoraConfig::from_json(text) else { return };
    let layers = ["embed", "layers.0.q_proj", "layers.1.q_proj", "layers.1.mlp.up_proj", "score"].map(|path| {
        let kind = if path == "embed" { LayerKind::Embedding } else { LayerKind::Linear };
        LayerEntry { has_bias: true, ..LayerEntry::new(path, kind, [8, 4]) }
    });
    if let Ok(resolved) = config.resolve(&layers) {
        assert!(resolved.layers.iter().all(|own| own.r > 0 && own.layer < layers.len()));
        let tensors = resolved.tensors("default", &layers);
        assert!(tensors.iter().all(|tensor| tensor.file_key.starts_with("base_model.model.")));
    }
    let written = LoraConfig::from_json(&config.to_json()).expect("what was written can be read");
    assert_eq!(written.all_modules_to_save(), config.all_modules_to_save());
    assert_eq!((written.r, &written.target_modules), (config.r, &config.target_modules));
});
