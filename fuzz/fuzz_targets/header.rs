#![no_main]
//! Headers of safetensors files. An input is a whole file; or the number of bytes of the data, a line break, and the
//! text of the header, so that the length in front of it is right.

use accelerate_core::weight_files::Header;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    check(input, input.len() as u64);
    if let Some((data_bytes, json)) = split(input) {
        let file = [&(json.len() as u64).to_le_bytes()[..], json].concat();
        check(&file, data_bytes.saturating_add(file.len() as u64));
    }
});

fn split(input: &[u8]) -> Option<(u64, &[u8])> {
    let at = input.iter().position(|&byte| byte == b'\n')?;
    let data_bytes = std::str::from_utf8(&input[..at]).ok()?.parse().ok()?;
    Some((data_bytes, &input[at + 1..]))
}

fn check(mut file: &[u8], file_bytes: u64) {
    let Ok(header) = Header::read(&mut file, file_bytes) else { return };
    let mut end = 0;
    for entry in header.entries() {
        assert_eq!(entry.start, end);
        assert_eq!(header.get(&entry.name), Some(entry));
        // What is made of such an entry computes with numbers that have a sign.
        entry.shape.iter().try_fold(1_i64, |numel, &size| numel.checked_mul(size.try_into().ok()?)).expect("an i64");
        end = entry.end;
    }
    assert_eq!(header.data_at() + end, file_bytes);
}
