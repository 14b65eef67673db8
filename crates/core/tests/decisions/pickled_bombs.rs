//! Short files of `torch.save` and `torch.distributed.checkpoint` that would take much memory, disk or time.

use accelerate_core::weight_files::{DistributedCheckpoint, Plain, TorchArchive, TorchFile};
use rstest::rstest;
use std::io::Cursor;

fn text(text: &str) -> Vec<u8> {
    [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
}

fn number(number: i64) -> Vec<u8> {
    [&[0x8a, 8][..], &number.to_le_bytes()].concat()
}

fn tuple(items: &[Vec<u8>]) -> Vec<u8> {
    [b"(".to_vec(), items.concat(), b"t".to_vec()].concat()
}

fn dict(entries: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let entries = entries.iter().flat_map(|(key, value)| [text(key), value.clone()]);
    [b"}(".to_vec(), entries.collect::<Vec<_>>().concat(), b"u".to_vec()].concat()
}

fn pickle(value: &[u8]) -> Vec<u8> {
    [&b"\x80\x02"[..], value, b"."].concat()
}

/// What `torch.save` writes of this value, with a storage of one number.
fn saved(value: &[u8]) -> Cursor<Vec<u8>> {
    let mut archive = TorchArchive::new(Vec::new(), "archive");
    for (name, content) in [("data.pkl", pickle(value).as_slice()), ("byteorder", b"little"), ("data/0", &[0; 4])] {
        archive.begin(name).unwrap();
        archive.append(content).unwrap();
    }
    Cursor::new(archive.finish().unwrap())
}

/// A text of 4096 bytes, and so many times the same one.
fn repeated_text(times: usize) -> Vec<u8> {
    [b"](".to_vec(), text(&"x".repeat(4096)), b"q\x00".to_vec(), b"h\x00".repeat(times), b"e".to_vec()].concat()
}

/// So many dictionaries of one entry.
fn dicts(times: usize) -> Vec<u8> {
    [b"(".to_vec(), b"}NNs".repeat(times), b"t".to_vec()].concat()
}

/// A tensor of so many elements, all of which are one.
fn expanded(size: i64) -> Vec<u8> {
    dict(&[("mask", tensor(&[size]))])
}

/// A tensor of 64 dims and one element, and then the same one, so many in all.
fn repeated_tensor(times: usize) -> Vec<u8> {
    [b"](".to_vec(), tensor(&[1; 64]), b"q\x00".to_vec(), b"h\x00".repeat(times - 1), b"e".to_vec()].concat()
}

/// A tensor of this shape, all elements of which are one.
fn tensor(shape: &[i64]) -> Vec<u8> {
    let numbers = |numbers: Vec<i64>| tuple(&numbers.into_iter().map(number).collect::<Vec<_>>());
    let storage = tuple(&[text("storage"), b"ctorch\nFloatStorage\n".to_vec(), text("0"), text("cpu"), number(1)]);
    let arguments = [
        [storage, b"Q".to_vec()].concat(),
        number(0),
        numbers(shape.to_vec()),
        numbers(vec![0; shape.len()]),
        b"\x89".to_vec(),
        b"ccollections\nOrderedDict\n)R".to_vec(),
    ];
    [b"ctorch._utils\n_rebuild_tensor_v2\n".to_vec(), tuple(&arguments), b"R".to_vec()].concat()
}

#[rstest]
#[case::texts(repeated_text(200), "")]
#[case::many_texts(repeated_text(300), "its texts have more than")]
#[case::dictionaries(dicts(10_000), "")]
#[case::many_dictionaries(dicts((1 << 20) + 1), "there are more than 1048576 lists and dictionaries")]
#[case::tensors(repeated_tensor(1 << 16), "")]
#[case::many_tensors(repeated_tensor((1 << 16) + 1), "its tensors have more than 8388608 sizes and strides")]
#[case::a_large_mask(expanded(4096 * 4096), "")]
#[case::an_endless_mask(expanded(4096 * 8192), "its tensors repeat their elements")]
fn what_is_held_very_often_is_refused(#[case] value: Vec<u8>, #[case] words: &str) {
    match Plain::read(&mut saved(&value)) {
        Ok(_) => assert!(words.is_empty()),
        Err(error) => assert!(!words.is_empty() && error.to_string().contains(words), "{error}"),
    }
}

#[rstest]
#[case(4096 * 4096, true)]
#[case(4096 * 8192, false)]
fn weights_repeat_no_more_than_a_mask_does(#[case] size: i64, #[case] is_read: bool) {
    assert_eq!(TorchFile::read(&mut saved(&expanded(size))).is_ok(), is_read);
}

fn object(module: &str, class: &str, state: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let module = format!("ctorch.distributed.checkpoint.{module}\n{class}\n");
    [module.into_bytes(), b")\x81".to_vec(), dict(state), b"b".to_vec()].concat()
}

/// The metadata of tensors of one element, each with the file that it is in and its place there.
fn metadata(places: &[(&str, &str, i64, i64)]) -> Vec<u8> {
    let one = || tuple(&[number(1)]);
    let zero = || tuple(&[number(0)]);
    let tensor = || {
        // As Python 3.11.0 to 3.11.3 write a member of an enumeration.
        let encodings = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n".to_vec();
        let member = tuple(&[encodings, text("TORCH_CONTIGUOUS_FORMAT")]);
        let memory_format = [b"cbuiltins\ngetattr\n".to_vec(), member, b"R".to_vec()].concat();
        let dtype = [("dtype", b"ctorch\nfloat32\n".to_vec()), ("memory_format", memory_format)];
        let chunk = object("metadata", "ChunkStorageMetadata", &[("offsets", zero()), ("sizes", one())]);
        let chunks = [b"](".to_vec(), chunk, b"e".to_vec()].concat();
        let properties = object("metadata", "TensorProperties", &dtype);
        object("metadata", "TensorStorageMetadata", &[("properties", properties), ("size", one()), ("chunks", chunks)])
    };
    let described: Vec<_> = places.iter().map(|(key, ..)| (*key, tensor())).collect();
    let stored = places.iter().flat_map(|(key, file, start, length)| {
        let place = [("relative_path", text(file)), ("offset", number(*start)), ("length", number(*length))];
        let index = object("metadata", "MetadataIndex", &[("fqn", text(key)), ("offset", zero())]);
        [index, object("filesystem", "_StorageInfo", &place)]
    });
    let stored = [b"}(".to_vec(), stored.collect::<Vec<_>>().concat(), b"u".to_vec()].concat();
    let fields = [("state_dict_metadata", dict(&described)), ("storage_data", stored)];
    pickle(&object("metadata", "Metadata", &fields))
}

/// What is in a file is read once for each tensor that is said to be there.
#[rstest]
#[case::behind_each_other(&[("a", "f", 0, 100), ("b", "f", 100, 50)], "")]
#[case::in_two_files(&[("a", "f", 0, 100), ("b", "g", 0, 100)], "")]
#[case::in_another_order(&[("a", "f", 100, 50), ("b", "f", 0, 100)], "")]
#[case::in_one_place(&[("a", "f", 0, 100), ("b", "f", 0, 100)], "said to be in the same place of the file `f`")]
#[case::within(&[("a", "f", 0, 100), ("b", "f", 50, 10)], "`a` and `b` are said to be")]
#[case::one_byte(&[("a", "f", 99, 10), ("b", "f", 0, 100)], "`b` and `a` are said to be")]
fn each_part_has_a_place_of_its_own(#[case] places: &[(&str, &str, i64, i64)], #[case] words: &str) {
    match DistributedCheckpoint::read(&metadata(places)) {
        Ok(read) => assert!(words.is_empty() && read.tensors.len() == places.len()),
        Err(error) => assert!(!words.is_empty() && error.to_string().contains(words), "{error}"),
    }
}
