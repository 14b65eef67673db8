#![no_main]
//! Flat files of token ids. The first byte says how long a block is, and the second how long the header.

use accelerate::data::readers::{TokenDtype, TokenFileDataset, TokenFileOptions};
use accelerate_fuzz::{check, with_file};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, u8, &[u8])| {
    let (block_size, header_bytes, tokens) = input;
    with_file(tokens, |path| {
        for dtype in [TokenDtype::U16, TokenDtype::U32] {
            let options = TokenFileOptions { dtype, block_size: block_size.into(), header_bytes: header_bytes.into() };
            let blocks = || TokenFileDataset::from_files([path], &options);
            check(blocks(), |rows, index| drop(rows.place(index)));
            check(blocks().and_then(TokenFileDataset::with_labels), |rows, index| drop(rows.place(index)));
        }
    });
});
