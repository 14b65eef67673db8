//! Flat files of tokens.

use super::{assert_shareable, check_refused, file, rows};
use accelerate::data::Dataset;
use accelerate::data::readers::{Position, TokenDtype, TokenFileDataset, TokenFileOptions};
use accelerate::tch::{Kind, Tensor};
use std::fs::File;

fn options(dtype: TokenDtype, block_size: usize) -> TokenFileOptions {
    TokenFileOptions { dtype, block_size, ..TokenFileOptions::default() }
}

fn u16s(tokens: impl IntoIterator<Item = u16>) -> Vec<u8> {
    tokens.into_iter().flat_map(u16::to_le_bytes).collect()
}

fn numbers(tensor: &Tensor) -> Vec<i64> {
    assert_eq!((tensor.kind(), tensor.dim()), (Kind::Int64, 1));
    Vec::try_from(tensor).unwrap()
}

#[test]
fn every_dtype_becomes_int64() {
    let cases: [(TokenDtype, Vec<u8>, [i64; 2]); 4] = [
        (TokenDtype::U16, u16s([1, u16::MAX]), [1, 65_535]),
        (TokenDtype::U32, [1, u32::MAX].into_iter().flat_map(u32::to_le_bytes).collect(), [1, 4_294_967_295]),
        (TokenDtype::I32, [1, -100i32].into_iter().flat_map(i32::to_le_bytes).collect(), [1, -100]),
        (TokenDtype::I64, [1, i64::MIN].into_iter().flat_map(i64::to_le_bytes).collect(), [1, i64::MIN]),
    ];
    for (dtype, content, wanted) in cases {
        let (_folder, path) = file("a.bin", content);
        let dataset = TokenFileDataset::from_files([&path], &options(dtype, 2)).unwrap();
        assert_eq!(rows(&dataset).iter().map(numbers).collect::<Vec<_>>(), [wanted], "{dtype:?}");
    }
}

#[test]
fn blocks_stay_inside_of_their_file() {
    let (_a, first) = file("first.bin", u16s(0..7));
    let (_b, last) = file("last.bin", u16s(100..106));
    let dataset = TokenFileDataset::from_files([&first, &last], &options(TokenDtype::U16, 3)).unwrap();
    assert_shareable(&dataset);
    let found: Vec<_> = rows(&dataset).iter().map(numbers).collect();
    assert_eq!(found, [[0, 1, 2], [3, 4, 5], [100, 101, 102], [103, 104, 105]]);
    let place = dataset.place(3).unwrap();
    assert_eq!((place.path, place.position), (last, Position::Token(3)));
    check_refused(dataset.get(4), &["row 4 does not exist: the dataset has 4 rows"]);
}

#[test]
fn labels_are_one_token_further_on() {
    let (_a, first) = file("first.bin", u16s(0..7));
    // Six tokens: the second block lacks the token that would be its last label.
    let (_b, last) = file("last.bin", u16s(100..106));
    let dataset = TokenFileDataset::from_files([&first, &last], &options(TokenDtype::U16, 3)).unwrap();
    let dataset = dataset.with_labels().unwrap();
    assert_shareable(&dataset);
    let found: Vec<_> = rows(&dataset).iter().map(|(inputs, labels)| (numbers(inputs), numbers(labels))).collect();
    let wanted =
        [(vec![0, 1, 2], vec![1, 2, 3]), (vec![3, 4, 5], vec![4, 5, 6]), (vec![100, 101, 102], vec![101, 102, 103])];
    assert_eq!(found, wanted);
    assert_eq!(dataset.place(2).unwrap().position, Position::Token(0));
    check_refused(dataset.get(3), &["row 3 does not exist"]);
}

#[test]
fn a_header_is_skipped() {
    let (_folder, path) = file("a.bin", [b"magic!".to_vec(), u16s([7, 8])].concat());
    let with_header = |header_bytes| TokenFileOptions { header_bytes, ..options(TokenDtype::U16, 2) };
    let dataset = TokenFileDataset::from_files([&path], &with_header(6)).unwrap();
    assert_eq!(numbers(&dataset.get(0).unwrap()), [7, 8]);
    check_refused(TokenFileDataset::from_files([&path], &with_header(11)), &["has 10 bytes, fewer than", "is 11"]);
}

#[test]
fn files_that_do_not_fit_are_refused_when_they_are_opened() {
    let (folder, path) = file("a.bin", u16s(0..4));
    let open = |dtype, block_size| TokenFileDataset::from_files([&path], &options(dtype, block_size));
    check_refused(open(TokenDtype::U16, 5), &["a.bin holds 4 tokens", "at least 5"]);
    check_refused(open(TokenDtype::U16, usize::MAX), &["a.bin holds 4 tokens"]);
    check_refused(open(TokenDtype::U16, 0), &["block_size is \"0\", but must be at least 1"]);
    check_refused(open(TokenDtype::U16, 4).unwrap().with_labels(), &["a.bin holds 4 tokens", "at least 5"]);
    check_refused(open(TokenDtype::U16, usize::MAX), &["too few for one block"]);
    let small = options(TokenDtype::U16, 1);
    check_refused(TokenFileDataset::from_files([folder.path()], &small), &["is a folder"]);
    check_refused(TokenFileDataset::from_files([""; 0], &small), &["no file was given"]);

    let dataset = open(TokenDtype::U16, 2).unwrap();
    std::fs::write(&path, [0; 5]).unwrap();
    assert!(dataset.get(0).is_ok());
    check_refused(dataset.get(1), &["a.bin ends at byte 5, but had 8 bytes"]);
    check_refused(open(TokenDtype::U16, 2), &["5 bytes of tokens, which is not a multiple of 2, the size of one u16"]);
    std::fs::write(&path, []).unwrap();
    check_refused(open(TokenDtype::U16, 2), &["holds 0 tokens"]);
}

/// Resident memory of this process in bytes, where the system says it.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? * 1024)
}

#[test]
fn memory_does_not_grow_with_the_file() {
    const MIB: u64 = 1 << 20;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.bin");
    // Sparse: takes no room on the disk, but touching it through a map would take memory like any file.
    File::create(&path).unwrap().set_len(1024 * MIB).unwrap();
    // A small row of every 16th page, and an eighth of the file in large rows: of either, a map would keep 128 MiB.
    for (block_size, step) in [(64, 512), (64 * 1024, 8)] {
        let dataset = TokenFileDataset::from_files([&path], &options(TokenDtype::U16, block_size)).unwrap();
        let _warmed_up = dataset.get(0).unwrap();
        let Some(before) = resident_bytes() else {
            eprintln!("not checked: this system does not say how much memory a process has");
            return;
        };
        for index in (0..dataset.len()).step_by(step) {
            assert_eq!(dataset.get(index).unwrap().size(), [block_size as i64]);
        }
        let grown = resident_bytes().unwrap().saturating_sub(before);
        assert!(grown < 64 * MIB, "rows of {block_size} tokens made the process {} MiB larger", grown / MIB);
    }
}
