//! Folders that somebody has damaged, or made to do harm. Each command has to name the file that is wrong, in bounded memory.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use accelerate_core::checkpoint::{DESCRIPTION, STEM};
use accelerate_core::weight_files::SavedFile;
use rstest::rstest;
use rustix::process::geteuid;
use safetensors::Dtype;
use serde_json::{Value, json};

use super::folders::{
    Tensor, Values, describe_as, manifest, put_manifest, weight_file, write_checkpoint, write_manifest,
};
use super::{parsed, run, sharded, values};
use crate::support::{Finished, finished};

const FIRST: &str = "model.rank-00000-of-00002.safetensors";
const SECOND: &str = "model.rank-00001-of-00002.safetensors";
const MANIFEST: &str = "checkpoint.manifest.json";

/// What somebody does to the folder of a run on two processes.
type Harm = fn(&Path);

fn change_byte(path: &Path, place: usize) {
    let mut content = fs::read(path).unwrap();
    content[place] ^= 1;
    fs::write(path, content).unwrap();
}

fn last_byte(folder: &Path, name: &str) {
    let path = folder.join(name);
    change_byte(&path, fs::metadata(&path).unwrap().len() as usize - 1);
}

fn cut(folder: &Path, name: &str, num_bytes: u64) {
    File::options().write(true).open(folder.join(name)).unwrap().set_len(num_bytes).unwrap();
}

fn replace(folder: &Path, name: &str, put: impl Fn(&Path)) {
    fs::remove_file(folder.join(name)).unwrap();
    put(&folder.join(name));
}

fn copy(folder: &Path, from: &str, to: &str) {
    fs::copy(folder.join(from), folder.join(to)).unwrap();
}

fn pipe(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// The description as somebody else would have written it, with a manifest that fits.
fn redescribe(folder: &Path, change: impl Fn(&mut Value)) {
    let mut json = serde_json::from_slice(&fs::read(folder.join(DESCRIPTION)).unwrap()).unwrap();
    change(&mut json);
    describe_as(folder, &json.to_string());
}

fn first_piece(json: &mut Value) -> &mut Value {
    &mut json["objects"]["model"]["tensors"]["weight"]["pieces"][0]
}

/// The manifest as somebody else would have written it.
fn relist(folder: &Path, change: impl Fn(&mut Value)) {
    let path = folder.join(MANIFEST);
    let mut json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut json);
    fs::write(path, json.to_string()).unwrap();
}

/// Another weight file, with a manifest that fits.
fn reweigh(folder: &Path, content: &[u8]) {
    fs::write(folder.join(FIRST), content).unwrap();
    write_manifest(folder, STEM);
}

fn header(text: &str, data_bytes: usize) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &vec![0; data_bytes]].concat()
}

fn f32s(name: &str, shape: &[usize]) -> (String, Dtype, Vec<usize>, Vec<u8>) {
    (name.to_owned(), Dtype::F32, shape.to_vec(), vec![0; 4 * shape.iter().product::<usize>()])
}

fn reweigh_with(folder: &Path, tensors: &[(String, Dtype, Vec<usize>, Vec<u8>)]) {
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (name.as_str(), *dtype, shape.clone(), bytes.clone()))
        .collect();
    reweigh(folder, &weight_file(&tensors));
}

fn swap(folder: &Path) {
    fs::rename(folder.join(FIRST), folder.join("swapped")).unwrap();
    fs::rename(folder.join(SECOND), folder.join(FIRST)).unwrap();
    fs::rename(folder.join("swapped"), folder.join(SECOND)).unwrap();
}

/// A tensor of 2^40 rows in columns, so that each element of the file is a run of its own.
fn in_columns(json: &mut Value) {
    let column = |from: u64| json!({"shape": [1_u64 << 40, 2], "slice": {"dim": 1, "indices": {"start": from, "end": from + 1}}});
    let tensor = &mut json["objects"]["model"]["tensors"]["weight"];
    tensor["shape"] = json!([1_u64 << 40, 2]);
    tensor["pieces"] = json!([{"file": 0, "layout": column(0)}, {"file": 1, "layout": column(1)}]);
}

#[rstest]
// Files that are not what they were.
#[case::cut_by_a_byte(|f: &Path| cut(f, FIRST, fs::metadata(f.join(FIRST)).unwrap().len() - 1), FIRST, "bytes, and")]
#[case::cut_to_nothing(|f: &Path| cut(f, FIRST, 0), FIRST, "it has 0 bytes")]
#[case::lengthened(|f: &Path| cut(f, FIRST, 1 << 40), FIRST, "it has 1099511627776 bytes")]
#[case::a_flipped_bit_of_weights(|f: &Path| last_byte(f, SECOND), SECOND, "its content has changed")]
#[case::a_flipped_bit_of_a_header(|f: &Path| change_byte(&f.join(FIRST), 12), FIRST, "its content has changed")]
#[case::a_flipped_bit_of_the_length(|f: &Path| change_byte(&f.join(FIRST), 7), FIRST, "its content has changed")]
#[case::a_flipped_bit_of_the_description(|f: &Path| change_byte(&f.join(DESCRIPTION), 30), DESCRIPTION, "its content has changed")]
#[case::a_cut_description(|f: &Path| cut(f, DESCRIPTION, 10), DESCRIPTION, "it has 10 bytes")]
#[case::missing_weights(|f: &Path| fs::remove_file(f.join(SECOND)).unwrap(), SECOND, "it is missing")]
#[case::a_missing_description(|f: &Path| fs::remove_file(f.join(DESCRIPTION)).unwrap(), DESCRIPTION, "it is missing")]
#[case::a_missing_manifest(|f: &Path| fs::remove_file(f.join(MANIFEST)).unwrap(), MANIFEST, "the save was not completed")]
#[case::renamed(|f: &Path| fs::rename(f.join(FIRST), f.join("other.safetensors")).unwrap(), FIRST, "it is missing")]
#[case::swapped(swap, FIRST, "its content has changed")]
#[case::duplicated(|f: &Path| copy(f, FIRST, SECOND), SECOND, "its content has changed")]
// What is no file.
#[case::a_folder(|f: &Path| replace(f, FIRST, |path| fs::create_dir(path).unwrap()), FIRST, "it is a folder")]
#[case::a_pipe(|f: &Path| replace(f, FIRST, pipe), FIRST, "it is a pipe")]
#[case::a_pipe_as_description(|f: &Path| replace(f, DESCRIPTION, pipe), DESCRIPTION, "it is a pipe")]
#[case::a_pipe_as_manifest(|f: &Path| replace(f, MANIFEST, pipe), MANIFEST, "it is a pipe")]
#[case::endless(|f: &Path| replace(f, FIRST, |path| symlink("/dev/zero", path).unwrap()), FIRST, "it is a device")]
#[case::an_endless_manifest(|f: &Path| replace(f, MANIFEST, |path| symlink("/dev/zero", path).unwrap()), MANIFEST, "it is a device")]
#[case::a_link_to_nothing(|f: &Path| replace(f, FIRST, |path| symlink("nothing", path).unwrap()), FIRST, "it is missing")]
#[case::a_manifest_linked_to_nothing(|f: &Path| replace(f, MANIFEST, |path| symlink("nothing", path).unwrap()), MANIFEST, "it is missing")]
#[case::a_link_to_itself(|f: &Path| replace(f, FIRST, |path| symlink(FIRST, path).unwrap()), FIRST, "it cannot be read")]
#[case::a_link_to_another_file(|f: &Path| replace(f, FIRST, |path| symlink("/etc/passwd", path).unwrap()), FIRST, "bytes, and")]
// Manifests.
#[case::an_empty_manifest(|f: &Path| cut(f, MANIFEST, 0), MANIFEST, "")]
#[case::gigabytes_of_manifest(|f: &Path| cut(f, MANIFEST, 8 << 30), MANIFEST, "no such file is longer")]
#[case::a_manifest_of_zeros(|f: &Path| { cut(f, MANIFEST, 0); cut(f, MANIFEST, 1 << 20) }, MANIFEST, "")]
#[case::a_deep_manifest(|f: &Path| fs::write(f.join(MANIFEST), "[".repeat(1 << 20)).unwrap(), MANIFEST, "")]
#[case::a_later_manifest(|f: &Path| relist(f, |json| json["version"] = json!(2)), MANIFEST, "version 2")]
#[case::a_path_in_the_manifest(|f: &Path| relist(f, |json| json["files"][0]["name"] = json!("../../etc/passwd")), MANIFEST, "is not the name of a file in its folder")]
#[case::an_absolute_path(|f: &Path| relist(f, |json| json["files"][0]["name"] = json!("/etc/passwd")), MANIFEST, "is not the name of a file in its folder")]
#[case::a_foreign_temporary_name(|f: &Path| relist(f, |json| json["files"][0]["temporary_name"] = json!("../x")), MANIFEST, "which no save gives")]
#[case::a_file_listed_twice(|f: &Path| relist(f, |json| json["files"][1] = json["files"][0].clone()), MANIFEST, "twice")]
#[case::a_wrong_hash(|f: &Path| relist(f, |json| json["files"][1]["xxh3_128"] = json!("0".repeat(32))), FIRST, "its content has changed")]
#[case::a_wrong_sample(|f: &Path| relist(f, |json| json["files"][1]["sample"] = json!("0".repeat(32))), FIRST, "the sample in the manifest")]
#[case::no_hash(|f: &Path| relist(f, |json| json["files"][1]["xxh3_128"] = json!("no")), MANIFEST, "32 hexadecimal digits")]
#[case::an_absurd_size(|f: &Path| relist(f, |json| json["files"][1]["bytes"] = json!(u64::MAX)), FIRST, "bytes, and")]
#[case::without_the_description(|f: &Path| relist(f, |json| drop(json["files"].as_array_mut().unwrap().remove(0))), DESCRIPTION, "the manifest does not list it")]
#[case::without_weights(|f: &Path| relist(f, |json| drop(json["files"].as_array_mut().unwrap().remove(1))), FIRST, "the manifest does not list it, and the description does")]
#[case::more_weights(|f: &Path| { copy(f, FIRST, "more.safetensors"); write_manifest(f, STEM) }, "more.safetensors", "does not say what is in it")]
// Descriptions whose hash is right.
#[case::no_json(|f: &Path| describe_as(f, "weights"), DESCRIPTION, "")]
#[case::gigabytes_of_description(|f: &Path| { cut(f, DESCRIPTION, (1 << 30) + 1); relist(f, |json| json["files"][0]["bytes"] = json!((1_u64 << 30) + 1)) }, DESCRIPTION, "")]
#[case::another_format(|f: &Path| redescribe(f, |json| json["format"] = json!("other")), DESCRIPTION, "other")]
#[case::an_unknown_field(|f: &Path| redescribe(f, |json| json["surprise"] = json!(1)), DESCRIPTION, "surprise")]
#[case::another_world_size(|f: &Path| redescribe(f, |json| json["world_size"] = json!(4)), FIRST, "it is of rank 0 of 2, and the description is of a run of 4 processes")]
#[case::no_processes(|f: &Path| redescribe(f, |json| json["world_size"] = json!(0)), DESCRIPTION, "0 processes")]
#[case::a_path_in_the_description(|f: &Path| redescribe(f, |json| json["files"][0] = json!("../model.safetensors")), DESCRIPTION, "is not the name of a file in its folder")]
#[case::a_file_described_twice(|f: &Path| redescribe(f, |json| json["files"][1] = json["files"][0].clone()), DESCRIPTION, "lists the file `model.rank-00000-of-00002.safetensors` twice")]
#[case::a_piece_in_no_file(|f: &Path| redescribe(f, |json| first_piece(json)["file"] = json!(99)), DESCRIPTION, "file 99")]
#[case::a_piece_in_another_file(|f: &Path| redescribe(f, |json| first_piece(json)["file"] = json!(2)), "optimizer.rank-00000-of-00002.safetensors", "no tensor `weight`")]
#[case::another_dtype(|f: &Path| redescribe(f, |json| json["objects"]["model"]["tensors"]["weight"]["dtype"] = json!("F64")), FIRST, "has elements of type F32 in it, and F64 was saved")]
#[case::another_shape(|f: &Path| redescribe(f, |json| json["objects"]["model"]["tensors"]["weight"]["shape"] = json!([3, 2])), DESCRIPTION, "has shape [3, 2]")]
#[case::other_elements(|f: &Path| redescribe(f, |json| first_piece(json)["layout"]["elements"] = json!({"start": 0, "end": 2})), FIRST, "elements 0..2 of [2, 3] was saved")]
#[case::other_elements_of_the_same_number(|f: &Path| redescribe(f, |json| first_piece(json)["layout"]["elements"] = json!({"start": 1, "end": 4})), DESCRIPTION, "elements 0..1 of `weight` of `model` are in no file")]
#[case::elements_beyond_the_end(|f: &Path| redescribe(f, |json| first_piece(json)["layout"]["elements"] = json!({"start": 0, "end": 7})), DESCRIPTION, "")]
#[case::elements_backwards(|f: &Path| redescribe(f, |json| first_piece(json)["layout"]["elements"] = json!({"start": 4, "end": 1})), DESCRIPTION, "")]
#[case::a_piece_less(|f: &Path| redescribe(f, |json| drop(json["objects"]["model"]["tensors"]["weight"]["pieces"].as_array_mut().unwrap().pop())), DESCRIPTION, "elements 3..6 of `weight`")]
#[case::no_pieces(|f: &Path| redescribe(f, |json| json["objects"]["model"]["tensors"]["weight"]["pieces"] = json!([])), DESCRIPTION, "is in no file")]
#[case::a_tensor_less(|f: &Path| redescribe(f, |json| drop(json["objects"]["model"]["tensors"].as_object_mut().unwrap().remove("bias"))), FIRST, "tensors that the description does not list: bias")]
#[case::columns_without_end(|f: &Path| redescribe(f, in_columns), DESCRIPTION, "2199023255552 runs")]
#[case::two_pieces_in_one_file(|f: &Path| redescribe(f, |json| json["objects"]["model"]["tensors"]["weight"]["pieces"][1]["file"] = json!(0)), DESCRIPTION, "`weight` has two pieces in the file")]
#[case::more_elements_than_can_be_counted(|f: &Path| redescribe(f, |json| first_piece(json)["layout"]["shape"] = json!([u64::MAX, 3])), DESCRIPTION, "")]
#[case::values_of_no_rank(|f: &Path| redescribe(f, |json| json["objects"]["scheduler"]["values_of_ranks"] = json!({"7": 1})), DESCRIPTION, "rank 7")]
// Weight files whose hash is right.
#[case::no_header(|f: &Path| reweigh(f, b"1234"), FIRST, "it has only 4 bytes")]
#[case::an_oversized_header(|f: &Path| reweigh(f, &u64::MAX.to_le_bytes()), FIRST, "more than the")]
#[case::a_header_beyond_the_end(|f: &Path| reweigh(f, &1000_u64.to_le_bytes()), FIRST, "the file has only 8 in all")]
#[case::a_header_of_no_json(|f: &Path| reweigh(f, &header("weights", 0)), FIRST, "cannot be understood")]
#[case::overlapping_tensors(|f: &Path| reweigh(f, &header(r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#, 3)), FIRST, "data_offsets")]
#[case::a_size_that_overflows(|f: &Path| reweigh(f, &header(r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}}"#, 8)), FIRST, "")]
#[case::no_data(|f: &Path| reweigh(f, &header(r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#, 0)), FIRST, "it was cut off")]
#[case::other_tensors(|f: &Path| reweigh_with(f, &[f32s("evil\u{7}", &[1])]), FIRST, "")]
#[case::missing_tensors(|f: &Path| reweigh_with(f, &[]), FIRST, "it has no tensor `weight`, which the description says is in it")]
#[case::tensors_of_another_size(|f: &Path| reweigh_with(f, &[f32s("weight", &[2]), f32s("bias", &[1])]), FIRST, "`weight` has shape [2] in it")]
#[case::more_tensors(|f: &Path| reweigh_with(f, &[f32s("weight", &[3]), f32s("bias", &[1]), f32s("more", &[1])]), FIRST, "does not list: more")]
fn damage_is_named(#[case] harm: Harm, #[case] file: &str, #[case] words: &str) {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(&folder.path().join("good"), 2, &sharded(run()), &values());
    let bad = folder.path().join("bad");
    write_checkpoint(&bad, 2, &sharded(run()), &values());
    harm(&bad);

    let found = in_little_memory(folder.path(), "verify bad --json");
    assert_eq!(found.code, Some(1), "{found:?}");
    let report = &parsed(&found)["folders"][0];
    assert_eq!(report["ok"], json!(false));
    let faults = report["faults"].as_array().unwrap();
    let is_it = |fault: &Value| fault["file"] == json!(file) && fault["problem"].as_str().unwrap().contains(words);
    assert!(faults.iter().any(is_it), "{file}: {words:?} is missing in {faults:#?}");

    for (line, codes) in [
        ("verify bad", &[1][..]),
        ("ls bad", &[0, 1]),
        ("ls bad --tensors", &[0, 1]),
        ("diff bad good", &[0, 1, 2]),
        ("diff good bad", &[0, 1, 2]),
    ] {
        let found = in_little_memory(folder.path(), line);
        assert!(found.code.is_some_and(|code| codes.contains(&code)), "{line}: {found:?}");
        assert!(!found.stderr.contains("panicked"), "{line}: {found:?}");
        assert!(found.stdout.len() + found.stderr.len() < 20_000, "{line}: {found:?}");
        let controls = |text: &str| text.contains(|letter: char| letter.is_control() && letter != '\n');
        assert!(!controls(&found.stdout) && !controls(&found.stderr), "{line}: {found:?}");
    }
}

/// With as much memory as the program and its threads take.
fn in_little_memory(folder: &Path, line: &str) -> Finished {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -v 400000; exec \"$0\" checkpoint \"$@\"", env!("CARGO_BIN_EXE_accelerate")]);
    command.args(line.split_whitespace()).current_dir(folder);
    finished(command)
}

#[test]
fn all_faults_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let bad = folder.path().join("bad");
    write_checkpoint(&bad, 2, &sharded(run()), &values());
    last_byte(&bad, FIRST);
    cut(&bad, SECOND, 5);
    fs::remove_file(bad.join("optimizer.rank-00001-of-00002.safetensors")).unwrap();
    let report = &parsed(&in_little_memory(folder.path(), "verify bad --json"))["folders"][0];
    let files: Vec<&Value> = report["faults"].as_array().unwrap().iter().map(|fault| &fault["file"]).collect();
    assert_eq!(files, [FIRST, SECOND, "optimizer.rank-00001-of-00002.safetensors"]);
}

/// The command as a user who may not read everything, as root may.
fn as_ordinary_user(folder: &Path, line: &str) -> Finished {
    let program = env!("CARGO_BIN_EXE_accelerate");
    let mut command = Command::new(if geteuid().is_root() { "setpriv" } else { program });
    if geteuid().is_root() {
        command.args(["--bounding-set=-dac_override,-dac_read_search", program]);
    }
    command.args(line.split(' ')).current_dir(folder);
    finished(command)
}

/// What may not be read, or is in a version that is not known, may be whole.
#[rstest]
#[case::of_weights(FIRST, false, "not readable", &format!("{FIRST}: it cannot be read, as this user may not"))]
#[case::of_the_manifest(MANIFEST, false, "not readable", "run the command as a user who may")]
#[case::a_later_manifest(
    MANIFEST,
    true,
    "of a newer version",
    "it is in version 2 of the format `accelerate-save`, and versions up to 1 are read here"
)]
#[case::a_later_description(DESCRIPTION, true, "of a newer version", "update this one, or read it with that one")]
fn what_cannot_be_looked_at_is_not_called_damaged(
    #[case] name: &str,
    #[case] is_newer: bool,
    #[case] state: &str,
    #[case] words: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    let bad = folder.path().join("project/checkpoint_1");
    write_checkpoint(&bad, 2, &sharded(run()), &values());
    // Versions to come have other fields, too.
    let next = |json: &mut Value| {
        json["version"] = json!(2);
        json["more"] = json!([1]);
    };
    match (is_newer, name) {
        (true, MANIFEST) => relist(&bad, next),
        (true, _) => redescribe(&bad, next),
        (false, _) => fs::set_permissions(bad.join(name), Permissions::from_mode(0o000)).unwrap(),
    }
    let found = as_ordinary_user(folder.path(), "checkpoint verify project/checkpoint_1");
    found.expect(1, &[]);
    assert!(found.stdout.starts_with(&state.to_uppercase()) && found.stdout.contains(words), "{}", found.stdout);
    assert!(found.stdout.contains("It may be whole"), "{}", found.stdout);
    let found = as_ordinary_user(folder.path(), "checkpoint ls project");
    assert!(found.stdout.contains(&format!("{state}: {name}: it ")), "{}", found.stdout);
    for line in ["checkpoint convert project/checkpoint_1 out", "merge-weights project/checkpoint_1 out"] {
        let found = as_ordinary_user(folder.path(), line);
        found.expect(1, &[&format!("is {state}"), words]);
        assert!(!found.stderr.contains("not as they were saved"), "{}", found.stderr);
    }
}

/// Root may read everything, and sees nothing wrong.
#[rstest]
#[case(FIRST)]
#[case(DESCRIPTION)]
#[case(MANIFEST)]
fn unreadable_files_are_named(#[case] name: &str) {
    let folder = tempfile::tempdir().unwrap();
    let bad = folder.path().join("bad");
    write_checkpoint(&bad, 2, &sharded(run()), &values());
    fs::set_permissions(bad.join(name), Permissions::from_mode(0o000)).unwrap();
    let is_readable = File::open(bad.join(name)).is_ok();
    let found = in_little_memory(folder.path(), "verify bad");
    assert_eq!(found.code, Some(i32::from(!is_readable)), "{found:?}");
    assert!(is_readable || found.stdout.contains(&format!("{name}: it cannot be read")), "{found:?}");
}

/// Overlapping parts of which every file is as its description says.
#[test]
fn elements_in_two_files_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let bad = folder.path();
    let whole = Tensor::f32("model", "weight", &[0.0; 4]).sharded();
    write_checkpoint(bad, 2, &[whole], &Values::new());
    let file =
        |name: &str| fs::write(bad.join(name), weight_file(&[("weight", Dtype::F32, vec![3], vec![0; 12])])).unwrap();
    file(FIRST);
    file(SECOND);
    redescribe(bad, |json| {
        for (piece, start) in [(0, 0), (1, 1)] {
            json["objects"]["model"]["tensors"]["weight"]["pieces"][piece]["layout"]["elements"] =
                json!({"start": start, "end": start + 3});
        }
    });
    let found = in_little_memory(bad, "verify .");
    let told = "of `model`, `weight` has 4 elements, and 6 in its pieces";
    assert!(found.code == Some(1) && found.stdout.contains(told), "{found:?}");
}

/// A save over an earlier one that was ended in between: what is left of either is not the other.
#[test]
fn an_interrupted_save_whose_file_is_damaged_is_not_called_whole() {
    let folder = tempfile::tempdir().unwrap();
    let bad = folder.path();
    write_checkpoint(bad, 2, &sharded(run()), &values());
    super::interrupt(bad, STEM, &[FIRST]);
    let temporary = manifest(bad, STEM).file(FIRST).unwrap().temporary_name.clone().unwrap();
    last_byte(bad, &temporary);
    let found = in_little_memory(bad, "verify .");
    assert!(found.code == Some(1) && found.stdout.contains(&format!("{FIRST}: its content has changed")), "{found:?}");
    // Where it is, and that it is there, says the manifest alone.
    let mut listed = manifest(bad, STEM);
    listed.files.retain(|file| file.name != FIRST);
    put_manifest(bad, STEM, &listed);
    let found = in_little_memory(bad, "verify .");
    assert!(
        found.code == Some(1) && found.stdout.contains(&format!("{FIRST}: the manifest does not list it")),
        "{found:?}"
    );
}

/// Each of them is a fault, and time does not grow with their square.
#[test]
fn many_files_that_are_not_there_are_listed_in_their_order() {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), 1, &run(), &values());
    let mut manifest = manifest(folder.path(), STEM);
    let absent = |number: u32| SavedFile { name: format!("{number:x}"), ..manifest.files[0].clone() };
    let absent: Vec<SavedFile> = (0..60_000).rev().map(absent).collect();
    manifest.files.extend(absent);
    put_manifest(folder.path(), STEM, &manifest);
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -t 10; exec \"$0\" checkpoint verify . --json", env!("CARGO_BIN_EXE_accelerate")]);
    let found = finished({
        command.current_dir(folder.path());
        command
    });
    found.expect(1, &[]);
    let faults = parsed(&found)["folders"][0]["faults"].take();
    let names = [0, 1, 59_999].map(|place| faults[place]["file"].as_str().unwrap().to_owned());
    assert_eq!(names, ["ea5f", "ea5e", "0"]);
}
