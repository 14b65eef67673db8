#![no_main]
//! Metadata of `torch.distributed.checkpoint`: what is read has parts that make up its tensors, in files of its own folder.

use accelerate_core::weight_files::{DistributedCheckpoint, DistributedItem, Plain};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|metadata: &[u8]| {
    let Ok(checkpoint) = DistributedCheckpoint::read(metadata) else { return };
    for file in &checkpoint.files {
        assert!(!file.contains('/') && file != "..");
    }
    for tensor in &checkpoint.tensors {
        let numel = |sizes: &[u64]| sizes.iter().product::<u64>();
        let parts: u64 = tensor.chunks.iter().map(|chunk| numel(&chunk.sizes)).sum();
        assert_eq!(parts, numel(&tensor.shape));
        assert!(tensor.chunks.iter().all(|chunk| chunk.file < checkpoint.files.len()));
    }
    // Everything is once in what it was in.
    let Ok((nested, state)) = DistributedCheckpoint::read_nested(metadata) else { return };
    assert_eq!(nested.tensors, checkpoint.tensors);
    let mut numbers = Vec::new();
    let items = state.try_map(&mut |item| {
        match item {
            DistributedItem::Tensor(number) => numbers.push(number),
            DistributedItem::Value { file, .. } => assert!(file < nested.files.len()),
        }
        Ok::<Plain<()>, ()>(Plain::None)
    });
    assert!(items.is_ok());
    numbers.sort_unstable();
    assert!(numbers.into_iter().eq(0..checkpoint.tensors.len()));
});
