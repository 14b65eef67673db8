#![no_main]
//! Descriptions of checkpoints: read, written, and read again; whatever they say of elements can be asked.

use accelerate_core::checkpoint::Checkpoint;
use accelerate_core::layout::Layout;
use accelerate_core::weight_files::is_saved_file_name;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(checkpoint) = Checkpoint::from_json(text) else { return };
    assert!(checkpoint.files.iter().all(|file| is_saved_file_name(file)));
    for object in checkpoint.objects.values() {
        let _ = object.values_of(checkpoint.world_size - 1);
        for tensor in object.tensors.values() {
            let _ = tensor.num_bytes();
            let layouts: Vec<&Layout> = tensor.pieces.iter().filter_map(|piece| piece.layout.as_ref()).collect();
            assert!(tensor.pieces.iter().all(|piece| piece.file < checkpoint.files.len()));
            // So many runs are read in no time, but not as often as a fuzzer does it.
            if layouts.iter().all(|layout| layout.full_numel() < 1 << 16) {
                let _ = layouts.first().map(|layout| Layout::full(layout.shape()).copies_from(layouts.iter().copied()));
            }
        }
    }
    let written = checkpoint.to_json().expect("what was read can be written");
    assert_eq!(Checkpoint::from_json(&written).expect("what was written can be read"), checkpoint);
});
