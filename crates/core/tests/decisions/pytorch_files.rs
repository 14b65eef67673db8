//! Files of PyTorch: what Python has written is read as Python reads it, and whatever else there is in a file is an error.

use accelerate_core::weight_files::{DistributedCheckpoint, StoredTensor, TorchFile};
use rstest::rstest;
use std::io::Cursor;
use std::path::Path;
use std::time::{Duration, Instant};

/// What `parity/weights/generate.py` has written.
fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../parity/weights").join(name)).unwrap()
}

fn read(file: &[u8]) -> accelerate_core::Result<TorchFile> {
    TorchFile::read(&mut Cursor::new(file))
}

/// An entry of an archive: its name, its content, and what the list says of both in another way than it is.
#[derive(Clone, Default)]
struct Entry {
    name: String,
    content: Vec<u8>,
    method: u16,
    flags: u16,
    listed_at: Option<u32>,
    listed_bytes: Option<u32>,
    listed_name: Option<String>,
    crc32: u32,
}

fn entry(name: &str, content: &[u8]) -> Entry {
    Entry { name: name.to_owned(), content: content.to_vec(), ..Entry::default() }
}

/// A zip archive, without compression.
fn archive(entries: &[Entry]) -> Vec<u8> {
    let (mut file, mut list) = (Vec::new(), Vec::new());
    for entry in entries {
        let at = file.len() as u32;
        let length = entry.content.len() as u32;
        file.extend(
            [
                0x0403_4b50_u32.to_le_bytes().as_slice(),
                &[0; 2],
                &entry.flags.to_le_bytes(),
                &entry.method.to_le_bytes(),
                &[0; 16],
            ]
            .concat(),
        );
        file.extend([(entry.name.len() as u16).to_le_bytes(), [0; 2]].concat());
        file.extend(entry.name.bytes().chain(entry.content.iter().copied()));
        let listed_name = entry.listed_name.as_ref().unwrap_or(&entry.name);
        let bytes = entry.listed_bytes.unwrap_or(length).to_le_bytes();
        list.extend(
            [
                0x0201_4b50_u32.to_le_bytes().as_slice(),
                &[0; 4],
                &entry.flags.to_le_bytes(),
                &entry.method.to_le_bytes(),
                &[0; 4],
            ]
            .concat(),
        );
        list.extend([entry.crc32.to_le_bytes(), bytes, bytes].concat());
        list.extend([(listed_name.len() as u16).to_le_bytes().as_slice(), &[0; 12]].concat());
        list.extend(entry.listed_at.unwrap_or(at).to_le_bytes());
        list.extend(listed_name.bytes());
    }
    let (at, length, count) = (file.len() as u32, list.len() as u32, entries.len() as u16);
    file.extend(list);
    file.extend([b"PK\x05\x06".as_slice(), &[0; 4], &count.to_le_bytes(), &count.to_le_bytes()].concat());
    file.extend([length.to_le_bytes().as_slice(), &at.to_le_bytes(), &[0; 2]].concat());
    file
}

/// What `torch.save` writes of this pickle, with a storage `0` of eight bytes.
fn saved(pickle: &[u8]) -> Vec<u8> {
    archive(&entries(pickle))
}

fn entries(pickle: &[u8]) -> Vec<Entry> {
    let storage = [1, 2, 3, 4, 5, 6, 7, 8];
    vec![entry("a/data.pkl", pickle), entry("a/byteorder", b"little"), entry("a/data/0", &storage)]
}

/// A dictionary with the tensor `x` of these arguments, of which the first is the storage.
fn tensor(class: &str, numel: &str, arguments: &[&[u8]]) -> Vec<u8> {
    let storage =
        [b"(X\x07\0\0\0storagec", class.as_bytes(), b"\nX\x01\0\0\x000X\x03\0\0\0cpu", numel.as_bytes(), b"tQ"]
            .concat();
    let call = [b"}X\x01\0\0\0xctorch._utils\n_rebuild_tensor_v2\n(".as_slice(), &storage].concat();
    [&call, arguments.concat().as_slice(), b"\x89}tRs."].concat()
}

const FLOATS: &str = "torch\nFloatStorage";
const TWO: &str = "K\x02";

#[test]
fn a_file_made_by_hand_is_read() {
    let file = read(&saved(&tensor(FLOATS, TWO, &[b"K\0", b"K\x02\x85", b"K\x01\x85"]))).unwrap();
    let [found] = &file.tensors[..] else { panic!("{file:?}") };
    assert_eq!((found.name.as_str(), found.stored.shape()), ("x", [2].as_slice()));
}

/// Everything in a pickle that is not what PyTorch writes for tensors, with a part of the message.
#[rstest]
#[case::a_program(b"cos\nsystem\n.", "names `os.system`")]
#[case::a_program_of_protocol_4(b"\x8c\x05posix\x8c\x06system\x93.", "names `posix.system`")]
#[case::an_expression(b"cbuiltins\neval\n.", "names `builtins.eval`")]
#[case::an_attribute(
    b"c__builtin__\ngetattr\nctorch\nSize\nX\x01\0\0\0a\x86R.",
    "uses `__builtin__.getattr` in another way"
)]
#[case::an_attribute_of_a_member(
    b"cbuiltins\ngetattr\nctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nN\x86R.",
    "uses `builtins.getattr` in another way"
)]
#[case::a_loader(b"ctorch\nload\n.", "names `torch.load`")]
#[case::a_name_with_dots(b"ctorch\nserialization.load\n.", "names `torch.serialization.load`")]
#[case::a_name_that_would_move_the_cursor(b"cos\n\x1b[2J\n.", "\\u{1b}[2J")]
#[case::a_name_without_end(&[b'c'; 5000], "cut off")]
#[case::a_call_of_a_text(b"X\x01\0\0\0a)R.", "needs a function")]
#[case::a_call_of_a_type(b"ctorch\nfloat32\n)R.", "uses `torch.float32` in another way")]
#[case::a_call_without_tuple(b"ctorch\nSize\n]R.", "needs a function and its arguments")]
#[case::a_dictionary_with_arguments(
    b"ccollections\nOrderedDict\nK\x01\x85R.",
    "uses `collections.OrderedDict` in another way"
)]
#[case::an_object_of_a_function(b"ctorch\nSize\n)\x81.", "uses `torch.Size` in another way")]
#[case::an_object_with_arguments(b"ctorch.distributed.checkpoint.metadata\nMetadata\nK\x01\x85\x81.", "in another way")]
#[case::a_state_of_a_text(b"X\x01\0\0\0a}b.", "needs an object")]
#[case::a_state_of_a_call(b"ctorch\nSize\n)R}b.", "needs an object")]
#[case::two_states(b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}b}b.", "without a state")]
#[case::an_instance(b"(ios\nsystem\n.", "instruction 0x69 at byte 1")]
#[case::an_old_object(b"(o.", "instruction 0x6f")]
#[case::an_extension(b"\x82\x01.", "instruction 0x82")]
#[case::a_persistent_id_in_text(b"P0\n.", "instruction 0x50")]
#[case::an_out_of_band_buffer(b"\x97.", "instruction 0x97")]
#[case::no_mark(b"t.", "needs a mark")]
#[case::a_tuple_of_too_few(b"N\x86.", "needs values for a tuple")]
#[case::a_tuple_across_a_mark(b"N(N\x86.", "needs values for a tuple")]
#[case::an_item_for_no_list(b"NNa.", "needs a list")]
#[case::items_for_nothing(b"(e.", "needs a list")]
#[case::a_key_without_value(b"}(Nu.", "needs a dictionary, and a value for each key")]
#[case::items_for_a_list(b"](NNu.", "needs a dictionary")]
#[case::nothing_to_remember(b"q\0.", "needs a value to remember")]
#[case::nothing_remembered(b"h\0.", "needs a value that was remembered")]
#[case::nothing_at_all(b".", "needs a value at the end")]
#[case::no_end(b"}", "the instruction at byte 1 is cut off")]
#[case::an_empty_file(b"", "cut off")]
#[case::too_many_values(b"NN.", "1 value is left over")]
#[case::an_open_mark(b"(N.", "1 value is left over")]
#[case::bytes_behind(b"}.}", "are left over at its end, which is byte 2, or other bytes follow")]
#[case::a_text_longer_than_the_file(b"X\xff\xff\xff\xffa.", "cut off")]
#[case::a_text_of_2_to_the_64(b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffa.", "cut off")]
#[case::bytes_longer_than_the_file(b"B\xff\xff\xff\x7fa.", "cut off")]
#[case::a_number_longer_than_the_file(b"\x8b\xff\xff\xff\x7fa.", "cut off")]
#[case::a_text_of_no_letters(b"X\x01\0\0\0\xff.", "needs a text in UTF-8")]
#[case::a_list(b"].", "holds a list, where a dictionary of tensors by name is wanted")]
#[case::a_key_that_is_a_number(b"}K\x01K\x01s.", "holds a number, where the name of a tensor is wanted")]
#[case::a_name_twice(b"}(X\x01\0\0\0aNX\x01\0\0\0aNu.", "the name `a` is there twice")]
#[case::a_name_with_a_bell(b"}X\x01\0\0\0\x07Ns.", "control characters")]
fn what_pytorch_does_not_write_is_refused(#[case] pickle: &[u8], #[case] wanted: &str) {
    let error = read(&saved(pickle)).unwrap_err();
    assert!(error.is_weight_files() && error.to_string().contains(wanted), "{wanted:?} is not in: {error}");
}

#[rstest]
#[case::too_many_elements(tensor(FLOATS, TWO, &[b"K\0", b"K\x03\x85", b"K\x01\x85"]), "reach to byte 12 of a storage that has 8")]
#[case::a_late_beginning(tensor(FLOATS, TWO, &[b"K\x01", b"K\x02\x85", b"K\x01\x85"]), "reach to byte 12")]
#[case::a_wide_stride(tensor(FLOATS, TWO, &[b"K\0", b"K\x02\x85", b"K\x02\x85"]), "reach to byte 12")]
#[case::a_negative_stride(tensor(FLOATS, TWO, &[b"K\x01", b"K\x02\x85", b"J\xff\xff\xff\xff\x85"]), "not one that PyTorch writes")]
#[case::a_negative_size(tensor(FLOATS, TWO, &[b"K\0", b"J\xff\xff\xff\xff\x85", b"K\x01\x85"]), "not one that PyTorch writes")]
#[case::a_negative_beginning(tensor(FLOATS, TWO, &[b"J\xff\xff\xff\xff", b"K\x01\x85", b"K\x01\x85"]), "not one that PyTorch writes")]
#[case::a_beginning_of_2_to_the_62(tensor(FLOATS, TWO, &[b"\x8a\x08\0\0\0\0\0\0\0\x40", b"K\x01\x85", b"K\x01\x85"]), "reach to byte")]
#[case::a_size_of_2_to_the_62(tensor(FLOATS, TWO, &[b"K\0", b"\x8a\x08\0\0\0\0\0\0\0\x40\x85", b"K\0\x85"]), "more elements or dims than can be read")]
#[case::a_size_of_2_to_the_70(tensor(FLOATS, TWO, &[b"K\0", b"\x8a\x09\0\0\0\0\0\0\0\0\x40\x85", b"K\0\x85"]), "not one that PyTorch writes")]
#[case::one_element_for_ever(tensor(FLOATS, TWO, &[b"K\0", b"J\0\0\0\x7f\x85", b"K\0\x85"]), "its tensors repeat their elements")]
#[case::fewer_strides_than_sizes(tensor(FLOATS, TWO, &[b"K\0", b"K\x01K\x01\x86", b"K\x01\x85"]), "not one that PyTorch writes")]
#[case::sizes_that_are_no_tuple(tensor(FLOATS, TWO, &[b"K\0", b"K\x02", b"K\x01\x85"]), "not one that PyTorch writes")]
#[case::too_few_arguments(tensor(FLOATS, TWO, &[b"K\0"]), "not one that PyTorch writes")]
#[case::a_storage_that_is_longer(tensor(FLOATS, "K\x03", &[b"K\0", b"K\x02\x85", b"K\x01\x85"]), "its storage `0` has 8 bytes, and 12 are said")]
#[case::a_storage_that_is_shorter(tensor(FLOATS, "K\x01", &[b"K\0", b"K\x01\x85", b"K\x01\x85"]), "its storage `0` has 8 bytes, and 4 are said")]
#[case::a_storage_of_another_type(tensor("torch\nDoubleStorage", TWO, &[b"K\0", b"K\x02\x85", b"K\x01\x85"]), "has 8 bytes, and 16 are said")]
#[case::a_type_without_a_name(tensor("torch.storage\nUntypedStorage", "K\x08", &[b"K\0", b"K\x02\x85", b"K\x01\x85"]), "UntypedStorage")]
#[case::a_type_that_is_none(tensor("torch\nSize", TWO, &[b"K\0", b"K\x02\x85", b"K\x01\x85"]), "the element type is torch.Size")]
#[case::quantized(tensor("torch\nQInt8Storage", "K\x08", &[b"K\0", b"K\x08\x85", b"K\x01\x85"]), "the element type is torch.QInt8Storage, which safetensors does not have")]
#[case::complex(tensor("torch\nComplexDoubleStorage", "K\x01", &[b"K\0", b")", b")"]), "the element type is torch.ComplexDoubleStorage")]
#[case::conjugated(tensor(FLOATS, TWO, &[b"K\0", b"K\x02\x85", b"K\x01\x85", b"\x89}", b"}X\x04\0\0\0conj\x88s"]), "stored in another form")]
#[case::sparse(b"}X\x01\0\0\0xctorch._utils\n_rebuild_sparse_tensor\n)Rs.".to_vec(), "stored in another form (sparse tensor)")]
#[case::without_data(b"}X\x01\0\0\0xctorch._utils\n_rebuild_meta_tensor_no_storage\n)Rs.".to_vec(), "stored in another form")]
#[case::a_storage_outside(tensor(FLOATS, TWO, &[b"K\0", b"K\x02\x85", b"K\x01\x85"]).split(|&byte| byte == b'0').collect::<Vec<_>>().join(b"9".as_slice()), "not one that PyTorch writes")]
fn tensors_that_cannot_be_are_refused(#[case] pickle: Vec<u8>, #[case] wanted: &str) {
    let error = read(&saved(&pickle)).unwrap_err();
    assert!(error.is_weight_files() && error.to_string().contains(wanted), "{wanted:?} is not in: {error}");
}

/// Changes one of the entries, the pickle being the first.
fn changed(change: impl Fn(&mut Vec<Entry>)) -> Vec<u8> {
    let mut all = entries(b"}.");
    change(&mut all);
    archive(&all)
}

#[rstest]
#[case::no_archive(b"{}".to_vec(), "a zip archive ends with a list")]
#[case::an_archive_of_before_1_6(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.".to_vec(), "before version 1.6")]
#[case::a_list_elsewhere(changed(|all| all.truncate(1)).into_iter().skip(1).collect(), "its list of entries does not fit")]
#[case::bytes_behind([changed(|_| ()), vec![0]].concat(), "a zip archive ends with a list")]
#[case::compressed(changed(|all| all[0].method = 8), "`a/data.pkl` is compressed or encrypted")]
#[case::encrypted(changed(|all| all[2].flags = 1), "`a/data/0` is compressed or encrypted")]
#[case::another_name_in_the_list(changed(|all| all[2].listed_name = Some("a/data/1".to_owned())), "`a/data/1` is not where")]
#[case::an_entry_elsewhere(changed(|all| all[2].listed_at = Some(1)), "`a/data/0` is not where")]
#[case::an_entry_beyond_the_end(changed(|all| all[2].listed_at = Some(u32::MAX - 1)), "`a/data/0` is not where")]
#[case::an_entry_into_the_list(changed(|all| all[2].listed_bytes = Some(100)), "`a/data/0` is not where")]
#[case::an_entry_across_the_next(changed(|all| all[0].listed_bytes = Some(20)), "lie on top of each other")]
#[case::a_large_number_that_is_absent(changed(|all| all[2].listed_at = Some(u32::MAX)), "entry 2 of its list is damaged")]
#[case::a_name_twice(changed(|all| all.push(all[2].clone())), "twice")]
#[case::no_pickle(changed(|all| all[0].name = "a/b".to_owned()), "has no entry `data.pkl`")]
#[case::the_highest_byte_first(changed(|all| all[1].content = b"big".to_vec()), "puts the highest byte of a number first")]
#[case::another_checksum(changed(|all| all[0].crc32 = 7), "the content of `a/data.pkl` has changed")]
#[case::more_entries_than_listed({ let mut file = changed(|_| ()); let at = file.len() - 12; file[at] = 9; file }, "its list of entries")]
fn archives_that_cannot_be_are_refused(#[case] file: Vec<u8>, #[case] wanted: &str) {
    let error = read(&file).unwrap_err();
    assert!(error.is_weight_files() && error.to_string().contains(wanted), "{wanted:?} is not in: {error}");
}

/// Values that hold each other in every way that a pickle can say shortly. Nothing walks through them.
#[rstest]
#[case::lists_within_lists([vec![b']'; 1_000_000], vec![b'a'; 999_999], b".".to_vec()].concat())]
#[case::tuples_within_tuples([b")".to_vec(), vec![0x85; 1_000_000], b".".to_vec()].concat())]
#[case::each_twice_the_one_before([b")".to_vec(), b"q\0h\0\x86".repeat(200_000), b".".to_vec()].concat())]
#[case::a_list_that_holds_itself(b"]q\0h\0a.".to_vec())]
#[case::marks([vec![b'('; 1_000_000], b".".to_vec()].concat())]
#[case::memories([b"N".to_vec(), (0..200_000_u32).flat_map(|n| [vec![b'r'], n.to_le_bytes().to_vec()].concat()).collect(), b".".to_vec()].concat())]
#[case::an_object_that_is_its_own_state(b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81q\0h\0b.".to_vec())]
#[case::one_parameter_within_another([b"}X\x01\0\0\0x".to_vec(), b"ctorch._utils\n_rebuild_parameter\n".repeat(1000), b"N".to_vec(), b"\x85R".repeat(1000), b"s.".to_vec()].concat())]
fn values_within_values_take_no_time(#[case] pickle: Vec<u8>) {
    let began = Instant::now();
    assert!(read(&saved(&pickle)).is_err());
    assert!(DistributedCheckpoint::read(&pickle).is_err());
    // Milliseconds, even without optimisation on a busy machine. What grows as a power would never end.
    assert!(began.elapsed() < Duration::from_secs(60));
}

const ARCHIVES: [&str; 4] = ["dtypes.bin", "views.bin", "model.bin", "no_checksums.bin"];

#[test]
fn files_that_end_early_are_refused_wherever_they_end() {
    for name in ARCHIVES {
        let file = fixture(name);
        read(&file).unwrap();
        for length in (0..file.len()).step_by(64).chain([file.len() - 1]) {
            assert!(read(&file[..length]).is_err(), "{name} of {length} bytes");
        }
    }
    let metadata = fixture("dcp_fsdp_2/.metadata");
    for length in 0..metadata.len() {
        assert!(DistributedCheckpoint::read(&metadata[..length]).is_err(), "{length} bytes");
    }
}

/// Pseudo-random numbers, the same in every run.
fn next(state: &mut u64) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as usize
}

#[test]
fn flipped_bits_are_refused_or_stay_within_the_file() {
    let mut state = 7;
    for name in ARCHIVES {
        let file = fixture(name);
        for _ in 0..3000 {
            let mut flipped = file.clone();
            let at = next(&mut state) % file.len();
            flipped[at] ^= 1 << (next(&mut state) % 8);
            let Ok(found) = read(&flipped) else { continue };
            for tensor in found.tensors {
                assert!(tensor.stored.span().end <= file.len() as u64, "byte {at} of {name}");
            }
        }
    }
    for name in ["dcp_fsdp_2/.metadata", "dcp_flat_3/.metadata", "dcp_nested_2/.metadata"] {
        let metadata = fixture(name);
        for _ in 0..3000 {
            let mut flipped = metadata.clone();
            let at = next(&mut state) % metadata.len();
            flipped[at] ^= 1 << (next(&mut state) % 8);
            let Ok(found) = DistributedCheckpoint::read(&flipped) else { continue };
            for tensor in found.tensors {
                let numel = |sizes: &[u64]| sizes.iter().product::<u64>();
                let parts: u64 = tensor.chunks.iter().map(|chunk| numel(&chunk.sizes)).sum();
                assert_eq!(parts, numel(&tensor.shape), "byte {at} of {name}");
            }
        }
    }
}

/// The metadata of two ranks, with some bytes in the place of others.
fn with(from: &[u8], to: &[u8]) -> Vec<u8> {
    let metadata = fixture("dcp_flat_2/.metadata");
    let at = metadata.windows(from.len()).position(|bytes| bytes == from).expect("the fixture has these bytes");
    [&metadata[..at], to, &metadata[at + from.len()..]].concat()
}

#[rstest]
#[case::a_folder_above(
    with(b"__0_0.distcp", b"../0_0.distc"),
    "`../0_0.distc`; a file has to lie in the folder itself"
)]
#[case::a_device(with(b"__0_0.distcp", b"/dev/zero/.."), "`/dev/zero/..`; a file has to lie")]
#[case::a_folder_below(with(b"__0_0.distcp", b"__0/0.distcp"), "a file has to lie in the folder itself")]
#[case::a_control_character(with(b"__0_0.distcp", b"__0\x1b0.distcp"), "`__0\\u{1b}0.distcp`")]
#[case::a_name_of_two_dots(with(b"\x8c\x0c__0_0.distcp", b"\x8c\x02.."), "`..`; a file has to lie")]
#[case::another_class(
    with(b"ChunkStorageMetadata", b"ChonkStorageMetadata"),
    "ChonkStorageMetadata`, which weights do not need"
)]
#[case::a_program(with(b"filesystem\x94\x8c\x0c_StorageInfo", b"filesystem\x94\x8c\x0c_StorageTnfo"), "_StorageTnfo")]
#[case::a_larger_tensor(
    with(b"K\x03K\x05\x86", b"K\x04K\x05\x86"),
    "`columns`: its parts overlap, or leave a gap, at [3, 0]"
)]
#[case::a_smaller_tensor(with(b"K\x03K\x05\x86", b"K\x03K\x04\x86"), "does not fit into the shape [3, 4]")]
#[case::other_dims(with(b"K\x03K\x05\x86", b"K\x0fK\x01\x86"), "does not fit into the shape [15, 1]")]
#[case::an_unknown_type(with(b"\x8c\x07float32", b"\x8c\x07flaot32"), "names `torch.flaot32`")]
#[case::a_type_that_is_none(with(b"\x8c\x07float32", b"\x8c\x07strided"), "the element type is torch.strided")]
#[case::a_key_without_files(with(b"\x8c\x07columns", b"\x8c\x07colunms"), "`colunms`: no file is named")]
#[case::no_metadata(b"}.".to_vec(), "it is another object")]
#[case::metadata_of_nothing(b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}b.".to_vec(), "it describes no state")]
#[case::an_empty_file(Vec::new(), "cut off")]
fn metadata_that_cannot_be_are_refused(#[case] metadata: Vec<u8>, #[case] wanted: &str) {
    let error = DistributedCheckpoint::read(&metadata).unwrap_err();
    assert!(error.is_weight_files() && error.to_string().contains(wanted), "{wanted:?} is not in: {error}");
}

#[test]
fn a_part_has_to_be_the_one_that_the_metadata_describe() {
    let checkpoint = DistributedCheckpoint::read(&fixture("dcp_fsdp_2/.metadata")).unwrap();
    let file = fixture(&format!("dcp_fsdp_2/{}", checkpoint.files[0]));
    let parts: Vec<_> = checkpoint
        .tensors
        .iter()
        .flat_map(|tensor| tensor.chunks.iter().map(move |chunk| (tensor, chunk)))
        .filter(|(_, chunk)| chunk.file == 0)
        .collect();
    for (tensor, chunk) in &parts {
        let stored = StoredTensor::read(&mut Cursor::new(&file), chunk.range.clone()).unwrap();
        chunk.check(&stored, tensor).unwrap();
        let others = parts.iter().filter(|(_, other)| other.sizes != chunk.sizes);
        for (other, part) in others {
            let error = part.check(&stored, other).unwrap_err();
            assert!(error.to_string().contains("and the metadata say"), "{error}");
        }
    }
}
