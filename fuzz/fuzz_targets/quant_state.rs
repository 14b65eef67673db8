#![no_main]
//! What a file says of a weight of four bits. What is read is written again as the same, and its sizes are those of a tensor.

use accelerate_core::config::QuantType;
use accelerate_core::quantization::QuantState;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|json: &[u8]| {
    for quant_type in QuantType::ALL {
        let Ok(state) = QuantState::from_json("weight", *quant_type, json) else { continue };
        assert!(state.num_blocks() > 0 && state.num_blocks() <= state.numel());
        let again = QuantState::from_json("weight", *quant_type, state.to_json().as_bytes());
        assert_eq!(again.expect("what was written can be read"), state);
    }
});
