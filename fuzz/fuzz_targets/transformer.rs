#![no_main]
//! `config.json` of transformers, from wherever a model comes from.

use accelerate_core::plan::{MicroBatch, TransformerShape};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(shape) = TransformerShape::from_config(text) else { return };
    assert!(shape.num_layers > 0 && shape.hidden_size > 0 && shape.num_heads > 0 && shape.vocab_size > 0);
    for activation_checkpointing in [false, true] {
        let batch = MicroBatch { batch_size: 3, sequence_length: 1 << 40, activation_checkpointing };
        let bytes = shape.activation_bytes(&batch, 4);
        assert!(bytes.total() >= bytes.layers);
    }
});
