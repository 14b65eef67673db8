#![no_main]
//! Files of `torch.save`: what is read has all its elements in the file. An input is a whole file; or a pickle, of which an
//! archive with a storage is made, so that it is reached without a zip archive that fits.

use accelerate_core::weight_files::TorchFile;
use libfuzzer_sys::fuzz_target;
use std::io::Cursor;

/// The bytes of the storage `0`.
const STORAGE: [u8; 64] = [7; 64];

fuzz_target!(|input: &[u8]| {
    check(input);
    check(&archive(&[("a/data.pkl", input), ("a/data/0", &STORAGE)]));
});

fn check(file: &[u8]) {
    let Ok(found) = TorchFile::read(&mut Cursor::new(file)) else { return };
    for tensor in found.tensors.iter().map(|tensor| &tensor.stored) {
        assert!(tensor.span().end <= file.len() as u64);
        let mut end = 0;
        for run in tensor.runs().take(1000) {
            assert!(tensor.span().start <= run.from && run.from + run.bytes <= tensor.span().end);
            assert_eq!(run.to, end, "a tensor of its own is filled from its beginning");
            end += run.bytes;
        }
    }
}

fn archive(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut file, mut list) = (Vec::new(), Vec::new());
    for (name, content) in entries {
        let (at, length) = ((file.len() as u32).to_le_bytes(), (content.len() as u32).to_le_bytes());
        let name_length = (name.len() as u16).to_le_bytes();
        file.extend([b"PK\x03\x04".as_slice(), &[0; 22], &name_length, &[0; 2], name.as_bytes(), content].concat());
        list.extend([b"PK\x01\x02".as_slice(), &[0; 16], &length, &length, &name_length, &[0; 12], &at].concat());
        list.extend(name.as_bytes());
    }
    let (at, length) = ((file.len() as u32).to_le_bytes(), (list.len() as u32).to_le_bytes());
    let count = (entries.len() as u16).to_le_bytes();
    file.extend(list);
    file.extend([b"PK\x05\x06".as_slice(), &[0; 4], &count, &count, &length, &at, &[0; 2]].concat());
    file
}
