//! `accelerate merge-weights` beside what Python made of the same checkpoints, and on everything that is no checkpoint.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use accelerate_core::weight_files::{Header, Index};
use rstest::rstest;
use safetensors::Dtype;
use serde::Deserialize;
use tempfile::TempDir;

use crate::checkpoint::folders::{Tensor as OwnTensor, Values, write_checkpoint};
use crate::support::{Finished, accelerate, finished};

/// What a tensor is, with the names of torch.
#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Tensor {
    dtype: String,
    shape: Vec<usize>,
    data: String,
}

type Tensors = BTreeMap<String, Tensor>;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../parity/weights")
}

fn expected() -> BTreeMap<String, Tensors> {
    serde_json::from_str(&fs::read_to_string(fixtures().join("expected.json")).unwrap()).unwrap()
}

/// A copy of a fixture in a folder of its own. A file is called as Python calls it there.
fn copied(name: &str) -> TempDir {
    let (folder, from) = (tempfile::tempdir().unwrap(), fixtures().join(name));
    if from.is_file() {
        fs::copy(&from, folder.path().join("pytorch_model.bin")).unwrap();
        return folder;
    }
    for entry in fs::read_dir(&from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

fn merge(input: &Path, output: &Path, flags: &[&str]) -> Finished {
    let mut command = accelerate();
    command.arg("merge-weights").args([input, output]).args(flags);
    finished(command)
}

fn torch_name(dtype: safetensors::Dtype) -> String {
    use safetensors::Dtype as D;
    let names = [
        (D::F32, "float32"),
        (D::F64, "float64"),
        (D::F16, "float16"),
        (D::BF16, "bfloat16"),
        (D::F8_E4M3, "float8_e4m3fn"),
        (D::F8_E5M2, "float8_e5m2"),
        (D::C64, "complex64"),
        (D::BOOL, "bool"),
        (D::U8, "uint8"),
        (D::I8, "int8"),
        (D::I16, "int16"),
        (D::U16, "uint16"),
        (D::I32, "int32"),
        (D::U32, "uint32"),
        (D::I64, "int64"),
        (D::U64, "uint64"),
    ];
    names.iter().find(|(known, _)| *known == dtype).unwrap().1.to_owned()
}

fn read(path: &Path) -> Tensors {
    let file = fs::read(path).unwrap();
    let header = Header::read(&mut file.as_slice(), file.len() as u64).unwrap();
    assert_eq!(header.data_at() % 8, 0, "tensors can be mapped");
    let tensor = |entry: &accelerate_core::weight_files::HeaderEntry| {
        let at = header.data_at() as usize;
        let data = &file[at + entry.start as usize..at + entry.end as usize];
        let data = data.iter().map(|byte| format!("{byte:02x}")).collect();
        (entry.name.clone(), Tensor { dtype: torch_name(entry.dtype), shape: entry.shape.clone(), data })
    };
    header.entries().iter().map(tensor).collect()
}

/// Tensors that are tied in files of torch.save are written once.
fn tied(name: &str) -> Option<&'static str> {
    match name {
        "views.bin" => Some("tied_too"),
        "model.bin" => Some("head.weight"),
        _ => None,
    }
}

#[test]
fn every_tensor_has_the_bytes_that_python_gives_it() {
    let expected = expected();
    assert!(expected.len() >= 10, "{:?}", expected.keys());
    for (name, mut wanted) in expected {
        let (input, output) = (copied(&name), tempfile::tempdir().unwrap());
        let ended = merge(input.path(), output.path(), &[]);
        ended.expect(0, &["model.safetensors"]);
        assert_eq!(ended.stdout, "");
        if let Some(tied) = tied(&name) {
            assert!(wanted.remove(tied).is_some());
            ended.expect(0, &["they are other names of tensors that are written", tied]);
        }
        let found = read(&output.path().join("model.safetensors"));
        assert_eq!(found.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>(), "{name}");
        for (tensor, wanted) in wanted {
            assert_eq!(found[&tensor], wanted, "{tensor} of {name}");
        }
        assert_eq!(fs::read_dir(output.path()).unwrap().count(), 1, "nothing else is left in the folder");
    }
}

#[test]
fn what_is_no_tensor_is_left_out_and_named() {
    let output = tempfile::tempdir().unwrap();
    let ended = merge(copied("dcp_nested_2").path(), output.path(), &[]);
    ended.expect(0, &["left out, because they are no tensors: optimizer.state.a.weight.step", "1 tensor, 32 B, is in"]);
}

/// Accelerate saves several models of a run side by side.
#[test]
fn further_models_of_a_run_are_told_of() {
    let folder = copied("model.bin");
    for name in ["pytorch_model_1.bin", "model_2.safetensors", "model_12-00001-of-00002.safetensors", "model_card.bin"]
    {
        fs::copy(folder.path().join("pytorch_model.bin"), folder.path().join(name)).unwrap();
    }
    let ended = merge(folder.path(), &folder.path().join("merged"), &[]);
    ended.expect(0, &["left out, because they are further models", "model_1, model_12, model_2"]);
    assert!(!ended.stderr.contains("model_card") && !ended.stdout.contains("model_card"));
}

/// With FULL_STATE_DICT, Python Accelerate gives whole models of runs with FSDP a name of their own.
#[test]
fn whole_models_of_fsdp_are_merged_by_their_own_name() {
    let folder = copied("model.bin");
    let path = |name: &str| folder.path().join(name);
    merge(folder.path(), &path("a"), &[]).expect(0, &[]);
    fs::rename(path("pytorch_model.bin"), path("pytorch_model_fsdp.bin")).unwrap();
    fs::copy(path("pytorch_model_fsdp.bin"), path("pytorch_model_fsdp_1.bin")).unwrap();
    merge(folder.path(), &path("b"), &[])
        .expect(0, &["left out, because they are further models", "writes: model_1\n"]);
    assert_eq!(fs::read(path("a/model.safetensors")).unwrap(), fs::read(path("b/model.safetensors")).unwrap());
    fs::copy(path("pytorch_model_fsdp.bin"), path("pytorch_model.bin")).unwrap();
    merge(folder.path(), &path("c"), &[])
        .expect(0, &["weights of pytorch_model.bin", "looked at: pytorch_model_fsdp.bin"]);
}

#[test]
fn shards_are_written_and_become_one_file_again() {
    let folder = tempfile::tempdir().unwrap();
    let [shards, whole] = ["shards", "a/whole"].map(|name| folder.path().join(name));
    merge(copied("dcp_fsdp_2").path(), &shards, &["--max_shard_size", "100B"])
        .expect(0, &["model.safetensors.index.json"]);
    let index = Index::from_json(&fs::read_to_string(shards.join("model.safetensors.index.json")).unwrap()).unwrap();
    assert!(index.files().len() > 2, "{index:?}");
    let mut together = Tensors::new();
    for file in index.files() {
        let tensors = read(&shards.join(file));
        assert!(tensors.keys().all(|name| index.weight_map[name] == file));
        together.extend(tensors);
    }
    merge(&shards, &whole, &[]).expect(0, &["whole/model.safetensors"]);
    let found = read(&whole.join("model.safetensors"));
    assert_eq!(found, together);
    assert_eq!(found, expected()["dcp_fsdp_2"]);
}

#[test]
fn the_checkpoint_is_removed_when_asked_for_and_when_its_weights_are_safe() {
    let (input, output) = (copied("dcp_fsdp_1"), tempfile::tempdir().unwrap());
    let checkpoint = input.path().join("checkpoint");
    fs::create_dir(&checkpoint).unwrap();
    let move_in = |name: &str| fs::rename(input.path().join(name), checkpoint.join(name)).unwrap();
    [".metadata", "__0_0.distcp"].into_iter().for_each(move_in);
    let within = merge(&checkpoint, &checkpoint.join("a/b"), &["--remove-checkpoint-dir"]);
    within.expect(1, &["which --remove_checkpoint_dir removes after merging"]);
    fs::write(output.path().join("model.safetensors"), "").unwrap();
    merge(&checkpoint, output.path(), &["--remove_checkpoint_dir"]).expect(1, &["exists already"]);
    assert!(checkpoint.join(".metadata").exists());
    fs::remove_file(output.path().join("model.safetensors")).unwrap();
    merge(&checkpoint, output.path(), &["--remove_checkpoint_dir"]).expect(0, &["checkpoint is removed"]);
    assert!(!checkpoint.exists() && output.path().join("model.safetensors").exists());
}

/// A folder that is removed is known by whatever path leads there, also by one on which something is missing.
#[rstest]
#[case::itself("in")]
#[case::below_it("in/a/b")]
#[case::by_a_folder_that_is_not_there("nope/../in")]
#[case::by_two_folders_that_are_not_there("nope/more/../../in/a")]
#[case::by_a_link("link/a")]
#[case::by_a_link_to_a_folder_that_is_not_there("dangling/a")]
#[case::by_a_link_from_within("in/up/in")]
fn a_result_in_the_folder_that_is_removed_is_refused(#[case] output: &str) {
    let (folder, copy) = (tempfile::tempdir().unwrap(), copied("dcp_fsdp_1"));
    let path = |name: &str| folder.path().join(name);
    fs::rename(copy.path(), path("in")).unwrap();
    for (link, to) in [("link", "in"), ("dangling", "in/new"), ("in/up", "..")] {
        symlink(to, path(link)).unwrap();
    }
    let mut command = accelerate();
    command.args(["merge-weights", "in", output, "--remove_checkpoint_dir"]).current_dir(folder.path());
    finished(command).expect(1, &["which --remove_checkpoint_dir removes after merging"]);
    assert!(path("in/.metadata").exists() && !path("in/model.safetensors").exists());
    assert!(!path("nope").exists() && !path("in/new").exists() && !path("in/a").exists());
}

/// Weights of two models would be mixed.
#[test]
fn weights_in_a_folder_that_is_named_by_way_of_another_are_seen() {
    let (folder, copy) = (tempfile::tempdir().unwrap(), copied("dcp_fsdp_1"));
    let output = folder.path().join("out");
    fs::create_dir(&output).unwrap();
    fs::write(output.join("model-00001-of-00002.safetensors"), "").unwrap();
    merge(copy.path(), &folder.path().join("nope/../out"), &[])
        .expect(1, &["model-00001-of-00002.safetensors exists already"]);
    assert_eq!(names(&output), Some(vec!["model-00001-of-00002.safetensors".to_owned()]));
}

/// Changes a copy of a checkpoint of two ranks, and the folder for the result, before they are merged.
type Change = fn(input: &Path, output: &Path);

fn replaced(input: &Path, from: &[u8], to: &[u8]) {
    let path = input.join(".metadata");
    let metadata = fs::read(&path).unwrap();
    let at = metadata.windows(from.len()).position(|bytes| bytes == from).unwrap();
    fs::write(&path, [&metadata[..at], to, &metadata[at + from.len()..]].concat()).unwrap();
}

fn fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

const FIRST: &str = "__0_0.distcp";
const SECOND: &str = "__1_0.distcp";

#[rstest]
#[case::absent(|input: &Path, _: &Path| fs::remove_dir_all(input).unwrap(), "there is no folder ")]
#[case::a_file(|input: &Path, _: &Path| { fs::remove_dir_all(input).unwrap(); fs::write(input, "").unwrap(); }, "is a file, and the folder of a checkpoint is wanted")]
#[case::a_pipe(|input: &Path, _: &Path| { fs::remove_dir_all(input).unwrap(); fifo(input); }, "is a pipe, and the folder of a checkpoint is wanted")]
#[case::nothing_in_it(|input: &Path, _: &Path| fs::read_dir(input).unwrap().for_each(|entry| fs::remove_file(entry.unwrap().path()).unwrap()), "has no checkpoint")]
#[case::a_checkpoint_below(|input: &Path, _: &Path| {
    let below = input.join("pytorch_model_fsdp_0");
    fs::create_dir(&below).unwrap();
    fs::rename(input.join(".metadata"), below.join(".metadata")).unwrap();
}, "pytorch_model_fsdp_0")]
#[case::no_part(|input: &Path, _: &Path| fs::remove_file(input.join(SECOND)).unwrap(), "__1_0.distcp is missing")]
#[case::an_empty_part(|input: &Path, _: &Path| fs::write(input.join(SECOND), "").unwrap(), "__1_0.distcp has 0 bytes")]
#[case::a_folder_as_part(|input: &Path, _: &Path| { fs::remove_file(input.join(FIRST)).unwrap(); fs::create_dir(input.join(FIRST)).unwrap(); }, "__0_0.distcp is a folder, and a file is wanted")]
#[case::a_pipe_as_part(|input: &Path, _: &Path| { fs::remove_file(input.join(FIRST)).unwrap(); fifo(&input.join(FIRST)); }, "__0_0.distcp is a pipe, and a file is wanted")]
#[case::a_device_as_part(|input: &Path, _: &Path| { fs::remove_file(input.join(FIRST)).unwrap(); symlink("/dev/zero", input.join(FIRST)).unwrap(); }, "__0_0.distcp is a device, and a file is wanted")]
#[case::a_pipe_as_metadata(|input: &Path, _: &Path| { fs::remove_file(input.join(".metadata")).unwrap(); fifo(&input.join(".metadata")); }, ".metadata is a pipe")]
#[case::empty_metadata(|input: &Path, _: &Path| fs::write(input.join(".metadata"), "").unwrap(), ".metadata cannot be understood")]
#[case::lists_in_metadata(|input: &Path, _: &Path| fs::write(input.join(".metadata"), vec![b']'; 2 << 20]).unwrap(), ".metadata cannot be understood")]
#[case::metadata_without_end(|input: &Path, _: &Path| fs::File::create(input.join(".metadata")).unwrap().set_len(1 << 40).unwrap(), ".metadata has 1099511627776 bytes")]
#[case::swapped_parts(|input: &Path, _: &Path| {
    let [first, second, other] = [FIRST, SECOND, "other"].map(|name| input.join(name));
    fs::rename(&first, &other).unwrap();
    fs::rename(&second, &first).unwrap();
    fs::rename(&other, &second).unwrap();
}, ".distcp")]
#[case::a_part_of_zeros(|input: &Path, _: &Path| fs::write(input.join(FIRST), vec![0; 100_000]).unwrap(), "__0_0.distcp cannot be understood where")]
#[case::a_part_elsewhere(|input: &Path, _: &Path| replaced(input, b"__1_0.distcp", b"../_0.distcp"), "../_0.distcp")]
#[case::weights_in_the_output(|_: &Path, output: &Path| { fs::create_dir(output).unwrap(); fs::write(output.join("model-00001-of-00002.safetensors"), "").unwrap(); }, "model-00001-of-00002.safetensors exists already")]
#[case::a_link_to_nowhere_in_the_output(|_: &Path, output: &Path| { fs::create_dir(output).unwrap(); symlink("/nowhere", output.join("model.safetensors")).unwrap(); }, "model.safetensors exists already")]
#[case::a_file_as_output(|_: &Path, output: &Path| fs::write(output, "").unwrap(), "is a file, and a folder for the result is wanted")]
#[case::a_device_as_output(|_: &Path, output: &Path| symlink("/dev/full", output).unwrap(), "is a device, and a folder for the result is wanted")]
#[case::a_link_to_nowhere_as_output(|_: &Path, output: &Path| symlink("/dev/null/nowhere", output).unwrap(), "cannot be written")]
fn what_is_wrong_is_named_and_nothing_is_written(#[case] change: Change, #[case] wanted: &str) {
    let folder = tempfile::tempdir().unwrap();
    let [input, output] = ["in", "out"].map(|name| folder.path().join(name));
    let copy = copied("dcp_fsdp_2");
    fs::rename(copy.path(), &input).unwrap();
    change(&input, &output);
    let before = names(&output);
    // Less memory than the largest of these files would take.
    let ended = with_little_memory(&input, &output);
    ended.expect(1, &[wanted]);
    assert!(!ended.stderr.contains("panicked"), "{ended:?}");
    assert_eq!(names(&output), before, "nothing is written");
}

/// The names in a folder, or nothing if there is none.
fn names(folder: &Path) -> Option<Vec<String>> {
    let entries = fs::read_dir(folder).ok()?;
    Some(entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect())
}

fn with_little_memory(input: &Path, output: &Path) -> Finished {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -v 300000; exec \"$0\" merge-weights \"$@\"", env!("CARGO_BIN_EXE_accelerate")]);
    command.args([input, output]);
    finished(command)
}

#[rstest]
#[case::serialization(&["in", "out", "--unsafe_serialization"], 1, "asks for pytorch_model.bin, a pickle that can run any program")]
#[case::the_other_spelling(&["in", "out", concat!("--uns", "afe-serialization")], 1, "every library that loads .bin files")]
#[case::a_size(&["in", "out", "--max_shard_size", "large"], 2, "\"large\" is not a size")]
#[case::no_output(&["in"], 2, "OUTPUT_PATH")]
fn flags_are_answered(#[case] words: &[&str], #[case] code: i32, #[case] wanted: &str) {
    let mut command = accelerate();
    command.arg("merge-weights").args(words);
    finished(command).expect(code, &[wanted]);
}

/// Data have checksums, and all around them is compared with the metadata.
#[test]
fn a_flipped_bit_is_an_error_or_changes_nothing() {
    let input = copied("dcp_fsdp_2");
    let wanted = &expected()["dcp_fsdp_2"];
    let path = input.path().join(FIRST);
    let file = fs::read(&path).unwrap();
    let mut num_refused = 0;
    for number in 0..80_usize {
        let (at, mut flipped) = (number * 7919 % file.len(), file.clone());
        flipped[at] ^= 1 << (number % 8);
        fs::write(&path, flipped).unwrap();
        let output = tempfile::tempdir().unwrap();
        let ended = merge(input.path(), output.path(), &[]);
        match ended.code {
            Some(0) => assert_eq!(&read(&output.path().join("model.safetensors")), wanted, "byte {at}"),
            _ => {
                ended.expect(1, &[FIRST]);
                assert_eq!(names(output.path()), Some(Vec::new()), "byte {at}");
                num_refused += 1;
            }
        }
    }
    assert!(num_refused > 10, "{num_refused}");
}

#[test]
fn a_changed_element_is_found_by_its_checksum() {
    let input = copied("views.bin");
    let path = input.path().join("pytorch_model.bin");
    let mut file = fs::read(&path).unwrap();
    // The first element of the first tensor, which is -15.
    let at = file.windows(4).position(|bytes| bytes == (-15_f32).to_le_bytes()).unwrap();
    file[at] ^= 1;
    fs::write(&path, file).unwrap();
    let output = input.path().join("out");
    merge(input.path(), &output, &[]).expect(1, &["the data of `base` in", "their checksum is another one"]);
    assert!(!output.exists());
}

/// A file system with no room: `/dev/shm` is not everywhere, and a limit on the length of files is.
#[test]
fn a_full_disk_leaves_nothing_behind() {
    let (input, folder) = (copied("dcp_types_1"), tempfile::tempdir().unwrap());
    let output = folder.path().join("out");
    let mut command = Command::new("sh");
    command.args([
        "-c",
        "ulimit -f 1; trap '' XFSZ; exec \"$0\" merge-weights \"$@\"",
        env!("CARGO_BIN_EXE_accelerate"),
    ]);
    command.args([input.path(), &output]);
    finished(command).expect(1, &["model.safetensors cannot be written", "File too large"]);
    assert!(!output.exists());
}

/// A folder with a checkpoint of this library, as far as this command looks at it.
#[rstest]
#[case::removing_more_than_weights(&["checkpoint.manifest.json"], &["--remove_checkpoint_dir"], "of which weights are only a part")]
#[case::parts_of_ranks(&["checkpoint.json", "model.rank-00000-of-00002.safetensors"], &[], "was not completed")]
#[case::not_completed(&["checkpoint.json", "model.safetensors"], &[], "was not completed")]
#[case::another_manifest(&["model.manifest.json", "model.safetensors"], &[], "are not as they were saved")]
fn own_checkpoints_are_merged_whole_or_not_at_all(
    #[case] names: &[&str],
    #[case] flags: &[&str],
    #[case] wanted: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    fs::create_dir(&input).unwrap();
    names.iter().for_each(|name| fs::write(input.join(name), "{}").unwrap());
    let mut command = accelerate();
    command.arg("merge-weights").args([&input, &folder.path().join("out")]).args(flags);
    finished(command).expect(1, &[wanted]);
    assert!(input.join(names[0]).exists() && !folder.path().join("out").exists());
}

/// A model of two ranks, and the same in one piece.
fn own_pair(folder: &Path, world_size: usize, divide: fn(OwnTensor) -> OwnTensor) -> Vec<OwnTensor> {
    let numbers: Vec<f32> = (0..24).map(|number| number as f32 / 7.0).collect();
    let tensors = || {
        let half =
            OwnTensor { dtype: Dtype::F16, shape: vec![6, 4], ..OwnTensor::f32("model", "half", &numbers[..12]) };
        vec![
            OwnTensor::f32("model", "weight", &numbers).of_shape(&[6, 4]),
            half,
            OwnTensor::f32("optimizer", "exp_avg.weight", &numbers).of_shape(&[6, 4]),
        ]
    };
    write_checkpoint(&folder.join("whole"), 1, &tensors(), &Values::new());
    let parts: Vec<OwnTensor> = tensors().into_iter().map(divide).collect();
    write_checkpoint(&folder.join("parts"), world_size, &parts, &Values::new());
    tensors()
}

#[rstest]
#[case::flat(2, OwnTensor::sharded)]
#[case::uneven(5, OwnTensor::sharded)]
#[case::columns(2, OwnTensor::in_columns)]
#[case::columns_of_four(4, OwnTensor::in_columns)]
fn parts_of_ranks_become_the_file_of_a_run_that_was_not_sharded(
    #[case] world_size: usize,
    #[case] divide: fn(OwnTensor) -> OwnTensor,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let tensors = own_pair(folder.path(), world_size, divide);
    merge(&path("whole"), &path("a"), &[]).expect(0, &["2 tensors"]);
    merge(&path("parts"), &path("b"), &[]).expect(0, &["2 tensors"]);
    let [a, b] = ["a/model.safetensors", "b/model.safetensors"].map(|name| fs::read(path(name)).unwrap());
    assert_eq!(a, b);
    let found = read(&path("b/model.safetensors"));
    for tensor in tensors.iter().filter(|tensor| tensor.object == "model") {
        let digits: String = tensor.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!((&found[tensor.name].shape, &found[tensor.name].data), (&tensor.shape, &digits));
    }
    merge(&path("parts"), &path("c"), &["--max_shard_size", "60B"]).expect(0, &["model.safetensors.index.json"]);
    let shards = ["c/model-00001-of-00002.safetensors", "c/model-00002-of-00002.safetensors"];
    let together: Tensors = shards.iter().flat_map(|name| read(&path(name))).collect();
    assert_eq!(together, read(&path("a/model.safetensors")));
}

#[test]
fn a_changed_byte_of_one_rank_is_found_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    own_pair(folder.path(), 2, OwnTensor::sharded);
    let path = folder.path().join("parts/model.rank-00001-of-00002.safetensors");
    let mut file = fs::read(&path).unwrap();
    *file.last_mut().unwrap() ^= 1;
    fs::write(&path, file).unwrap();
    merge(&folder.path().join("parts"), &folder.path().join("b"), &[]).expect(1, &["are not as they were saved"]);
    assert!(!folder.path().join("b").exists());
}

#[test]
fn a_link_is_not_removed_in_place_of_what_it_leads_to() {
    let folder = tempfile::tempdir().unwrap();
    let copy = copied("dcp_fsdp_2");
    let link = folder.path().join("link");
    symlink(copy.path(), &link).unwrap();
    let mut command = accelerate();
    command.arg("merge-weights").args([&link, &folder.path().join("out")]).arg("--remove_checkpoint_dir");
    finished(command).expect(1, &["is a link"]);
    let mut command = accelerate();
    command.arg("merge-weights").arg(format!("{}/", link.display())).arg(folder.path().join("out"));
    finished({
        command.arg("--remove_checkpoint_dir");
        command
    })
    .expect(1, &["is a link"]);
    assert!(copy.path().exists());
}

#[test]
fn what_only_an_index_says_is_not_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    fs::create_dir(&input).unwrap();
    let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[7]].concat();
    fs::write(input.join("model-1.safetensors"), file).unwrap();
    let index =
        |more: &str| format!(r#"{{"metadata":{{"total_size":1{more}}},"weight_map":{{"a":"model-1.safetensors"}}}}"#);
    fs::write(input.join("model.safetensors.index.json"), index(r#","author":"me""#)).unwrap();
    merge(&input, &output, &["--remove_checkpoint_dir"]).expect(1, &["`author` in model.safetensors.index.json"]);
    fs::write(input.join("model.safetensors.index.json"), index("")).unwrap();
    merge(&input, &output, &["--remove_checkpoint_dir"]).expect(0, &["is removed"]);
}

/// The names of tied tensors that are not in the result are in that folder only.
#[test]
fn names_of_tied_tensors_are_not_removed() {
    let (input, output) = (copied("model.bin"), tempfile::tempdir().unwrap());
    let tied = tied("model.bin").unwrap();
    let words = format!("what is not in the result: {tied}; move it elsewhere, or leave --remove_checkpoint_dir out");
    merge(input.path(), output.path(), &["--remove_checkpoint_dir"]).expect(1, &[&words]);
    assert!(input.path().join("pytorch_model.bin").exists() && !output.path().join("model.safetensors").exists());
    merge(input.path(), output.path(), &[]).expect(0, &[tied]);
}

/// What is not in the result is not removed, and nothing is no result.
#[rstest]
#[case::another_file("model.safetensors", true, &["adapter.bin"], 1, "what is not in the result: adapter.bin")]
#[case::other_weights("model.safetensors", true, &["pytorch_model.bin"], 1, "what is not in the result: pytorch_model.bin")]
#[case::of_a_whole_run("model.safetensors", true, &["optimizer.bin", "random_states_0.pkl"], 1, "optimizer.bin, random_states_0.pkl")]
#[case::nothing_else("model.safetensors", true, &[], 0, "is removed")]
#[case::no_tensors("model.safetensors", false, &[], 1, "in holds no tensors; name the folder of")]
#[case::one_of_several("model-00001-of-00002.safetensors", true, &[], 1, "one of several files by its name")]
#[case::one_of_one("model-00001-of-00001.safetensors", true, &[], 0, "is removed")]
fn only_what_is_merged_is_removed(
    #[case] name: &str,
    #[case] has_tensors: bool,
    #[case] others: &[&str],
    #[case] code: i32,
    #[case] wanted: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    fs::create_dir(&input).unwrap();
    let tensors = [("weight", safetensors::Dtype::F32, vec![1], vec![0, 0, 128, 63])];
    fs::write(input.join(name), crate::checkpoint::weight_file(if has_tensors { &tensors } else { &[] })).unwrap();
    others.iter().for_each(|name| fs::write(input.join(name), "precious").unwrap());
    merge(&input, &output, &["--remove_checkpoint_dir"]).expect(code, &[wanted]);
    assert_eq!(input.exists(), code != 0);
    assert_eq!(output.exists(), code == 0);
}
