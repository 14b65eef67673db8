#![no_main]
//! States in files of `torch.save`: whatever is read can be written, and is the same when it is read again. An input is a pickle.

use accelerate_core::checkpoint::python::{Left, PythonOptimizer, to_json};
use accelerate_core::weight_files::{Pickled, Plain, StoredTensor, TorchArchive};
use libfuzzer_sys::fuzz_target;
use std::io::Cursor;

/// The bytes of the storage `0`.
const STORAGE: [u8; 64] = [7; 64];

fuzz_target!(|input: &[u8]| {
    let Ok(found) = Plain::read(&mut Cursor::new(archive(input, &STORAGE))) else { return };
    let _ = to_json(&found, "", &mut Left::default());
    if let Ok(optimizer) = PythonOptimizer::read(&found) {
        let names: Vec<String> = (0..optimizer.num_params()).map(|number| number.to_string()).collect();
        let _ = optimizer.to_groups(&names, &mut Left::default());
        let _ = optimizer.named_state(&names);
    }
    let describe = |tensor: &StoredTensor| (tensor.dtype(), tensor.shape().to_vec());
    let Ok(Pickled { bytes, tensors }) = Pickled::new(&found, describe) else { return };
    // Tensors that are written are contiguous, and have storages of their own.
    if tensors.is_empty() {
        let again = Plain::read(&mut Cursor::new(archive(&bytes, &STORAGE)));
        // A number that is none is not equal to itself.
        assert_eq!(format!("{:?}", again.ok()), format!("{:?}", Some(found)));
    }
});

fn archive(pickle: &[u8], storage: &[u8]) -> Vec<u8> {
    let mut archive = TorchArchive::new(Vec::new(), "a");
    for (name, content) in [("data.pkl", pickle), ("data/0", storage)] {
        archive.begin(name).and_then(|()| archive.append(content)).expect("a vector takes all");
    }
    archive.finish().expect("a vector takes all")
}
