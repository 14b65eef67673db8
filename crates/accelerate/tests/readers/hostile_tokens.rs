//! Token files that were made to do harm, or damaged.

use super::file;
use super::hostile::{Outcome, check_refused, outcome};
use accelerate::data::Dataset;
use accelerate::data::readers::{TokenDtype, TokenFileDataset, TokenFileOptions};
use std::fs::File;

fn options(dtype: TokenDtype, block_size: usize, header_bytes: u64) -> TokenFileOptions {
    TokenFileOptions { dtype, block_size, header_bytes }
}

#[test]
fn files_that_cannot_be_tokens_are_refused() {
    use TokenDtype::{I32, I64, U16, U32};
    let cases = [
        ("nothing", 0, options(U16, 1, 0), "holds 0 tokens"),
        ("half of a token", 1, options(U16, 1, 0), "not a multiple of 2"),
        ("a token that was cut off", 4095, options(U32, 8, 0), "not a multiple of 4"),
        ("tokens of another size", 4, options(I64, 1, 0), "not a multiple of 8"),
        ("a header alone", 1024, options(I32, 1, 1024), "holds 0 tokens"),
        ("a header that was cut off", 1000, options(I32, 1, 1024), "has 1000 bytes, fewer than"),
        ("a header without an end", 1000, options(U16, 1, u64::MAX), "fewer than TokenFileOptions.header_bytes"),
        ("a header that shifts tokens", 4096, options(U32, 8, 6), "header_bytes is wrong"),
        ("less than a block", 4096, options(U16, 2049, 0), "holds 2048 tokens, too few for one block"),
        ("a block of all there is", 4096, options(U16, usize::MAX, 0), "or a smaller block_size"),
        ("a block beyond all numbers", 4096, options(I64, usize::MAX / 2, 0), "too few for one block"),
    ];
    for (case, length, options, message) in cases {
        let (_folder, path) = file("a.bin", vec![0; length]);
        check_refused(case, &path, &[message], || TokenFileDataset::from_files([&path], &options)?.get(0));
    }
    let (_folder, path) = file("a.bin", [0; 8]);
    let options = options(U16, 4, 0);
    check_refused("no token for the last label", &path, &["wanted at least 5"], || {
        TokenFileDataset::from_files([&path], &options)?.with_labels()
    });
}

#[test]
fn a_file_with_a_hole_takes_no_memory() {
    let (_folder, path) = file("a.bin", [1; 4096]);
    File::options().write(true).open(&path).unwrap().set_len(256 << 30).unwrap();
    let options = options(TokenDtype::U16, 1024, 0);
    let read = outcome("a hole of 256 GB", &path, 0, || {
        let dataset = TokenFileDataset::from_files([&path], &options)?.with_labels()?;
        dataset.get(dataset.len() - 1)
    });
    assert!(matches!(read, Outcome::Read), "{read:?}");
}

#[test]
fn a_file_that_becomes_shorter_is_an_error() {
    let (_folder, path) = file("a.bin", vec![0; 4096]);
    let dataset = TokenFileDataset::from_files([&path], &options(TokenDtype::U16, 512, 0)).unwrap();
    for length in [4095, 3072, 1, 0] {
        File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
        let ends = format!("ends at byte {length}, but had 4096 bytes");
        check_refused(&format!("to {length} bytes"), &path, &[&ends], || dataset.get(3));
    }
}
