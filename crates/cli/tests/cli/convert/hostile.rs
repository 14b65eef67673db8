//! Folders that somebody has damaged, or made to do harm. Each has to be named, nothing is written, and memory is bounded.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use accelerate_core::weight_files::{Pickled, Plain, TorchArchive};
use rstest::rstest;
use safetensors::Dtype;
use serde_json::{Value, json};

use super::{NAMED, copied, copy_folder, own};
use crate::checkpoint::folders::{Tensor, Values, weight_file, write_checkpoint};
use crate::support::{Finished, finished};

/// What somebody does to a folder with `src` and `names.txt`.
type Harm = fn(&Path);

fn raw(path: &Path, pickle: &[u8]) {
    let mut archive = TorchArchive::new(Vec::new(), "archive");
    for (name, content) in [("data.pkl", pickle), ("byteorder", b"little"), ("data/0", &[0; 4]), ("version", b"3\n")] {
        archive.begin(name).unwrap();
        archive.append(content).unwrap();
    }
    fs::write(path, archive.finish().unwrap()).unwrap();
}

fn torch(folder: &Path, name: &str, value: &Plain<()>) {
    raw(&folder.join("src").join(name), &Pickled::new(value, |()| (Dtype::F32, vec![1])).unwrap().bytes);
}

fn group(settings: Vec<(&str, Plain<()>)>) -> Plain<()> {
    Plain::dict(settings)
}

fn ints(numbers: &[i64]) -> Plain<()> {
    Plain::List(numbers.iter().copied().map(Plain::Int).collect())
}

/// An optimizer of these groups and this state.
fn optimizer(folder: &Path, groups: Vec<Plain<()>>, state: Vec<(Plain<()>, Plain<()>)>) {
    torch(
        folder,
        "optimizer.bin",
        &Plain::dict([("state", Plain::Dict(state)), ("param_groups", Plain::List(groups))]),
    );
}

fn one_group(folder: &Path, state: Vec<(Plain<()>, Plain<()>)>) {
    let settings = vec![("lr", Plain::Float(0.1)), ("params", ints(&[0, 1, 2, 3, 4, 5]))];
    optimizer(folder, vec![group(settings)], state);
}

fn scale(folder: &Path, scale: Plain<()>) {
    let rest = [("growth_factor", 2.0), ("backoff_factor", 0.5), ("growth_interval", 1.0), ("_growth_tracker", 0.0)];
    let rest = rest.map(|(name, number)| (name, Plain::Float(number)));
    torch(folder, "scaler.pt", &Plain::dict([("scale", scale)].into_iter().chain(rest)));
}

fn names(folder: &Path, change: fn(&mut Vec<String>)) {
    let path = folder.join("names.txt");
    let mut names: Vec<String> = fs::read_to_string(&path).unwrap().lines().map(str::to_owned).collect();
    change(&mut names);
    fs::write(path, names.join("\n")).unwrap();
}

fn gone(folder: &Path, name: &str) {
    fs::remove_file(folder.join(name)).unwrap();
}

fn cut(folder: &Path, name: &str, num_bytes: u64) {
    File::options().write(true).open(folder.join(name)).unwrap().set_len(num_bytes).unwrap();
}

fn copy(folder: &Path, from: &str, to: &str) {
    fs::copy(folder.join(from), folder.join(to)).unwrap();
}

fn pipe(folder: &Path, name: &str) {
    gone(folder, name);
    assert!(Command::new("mkfifo").arg(folder.join(name)).status().unwrap().success());
}

fn device(folder: &Path, name: &str) {
    gone(folder, name);
    symlink("/dev/zero", folder.join(name)).unwrap();
}

/// A dictionary whose only value is this pickled one.
fn holding(value: &[u8]) -> Vec<u8> {
    [&b"\x80\x02}X\x01\x00\x00\x00a"[..], value, b"s."].concat()
}

/// A tensor of this shape, all of whose elements are one.
fn repeated(size: u64) -> Vec<u8> {
    let text = |text: &str| [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
    let size = [&[0x8a, 8][..], &size.to_le_bytes()].concat();
    [
        b"ctorch._utils\n_rebuild_tensor_v2\n((".to_vec(),
        text("storage"),
        b"ctorch\nFloatStorage\n".to_vec(),
        text("0"),
        text("cpu"),
        b"K\x01tQK\x00".to_vec(),
        size,
        b"\x85K\x00\x85\x89ccollections\nOrderedDict\n)RtR".to_vec(),
    ]
    .concat()
}

fn limited(folder: &Path, limits: &str, line: &str) -> Finished {
    let mut command = Command::new("sh");
    let script = format!("{limits}; exec \"$0\" checkpoint {line}");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_accelerate")]).current_dir(folder);
    finished(command)
}

#[track_caller]
fn check(folder: &Path, limits: &str, line: &str, words: &str) {
    let before = listing(folder);
    let found = limited(folder, limits, line);
    found.expect(1, &[words]);
    assert!(!found.stderr.contains("panicked"), "{found:?}");
    assert_eq!(listing(folder), before, "nothing is written");
}

fn listing(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[rstest]
#[case::no_folder(|it: &Path| fs::remove_dir_all(it.join("src")).unwrap(), "there is no folder src")]
#[case::nothing_in_it(|it: &Path| { fs::remove_dir_all(it.join("src")).unwrap(); fs::create_dir(it.join("src")).unwrap(); }, "src is no checkpoint")]
#[case::of_dcp(|it: &Path| { fs::remove_dir_all(it.join("src")).unwrap(); fs::create_dir(it.join("src")).unwrap(); fs::write(it.join("src/.metadata"), "").unwrap(); }, "`accelerate merge-weights` makes a model of")]
#[case::no_model(|it: &Path| gone(it, "src/model.safetensors"), "no model has a tensor of that name")]
#[case::an_empty_model(|it: &Path| fs::write(it.join("src/model.safetensors"), "").unwrap(), "src/model.safetensors cannot be understood")]
#[case::a_model_without_tensors(|it: &Path| fs::write(it.join("src/model.safetensors"), weight_file(&[])).unwrap(), "src/model.safetensors holds no tensors; name the folder")]
#[case::a_model_of_numbers(|it: &Path| { gone(it, "src/model.safetensors"); torch(it, "pytorch_model.bin", &Plain::dict([("a", Plain::Int(1)), ("b", Plain::None)])); }, "src/pytorch_model.bin holds no tensors: a, b are of other types")]
#[case::a_short_model(|it: &Path| cut(it, "src/model.safetensors", 850), "src/model.safetensors cannot be understood")]
#[case::a_long_header(|it: &Path| fs::write(it.join("src/model.safetensors"), [0xff; 16]).unwrap(), "its header claims")]
#[case::a_folder_as_model(|it: &Path| { gone(it, "src/model.safetensors"); fs::create_dir(it.join("src/model.safetensors")).unwrap(); }, "is a folder, and a file is wanted")]
#[case::a_pipe_as_model(|it: &Path| pipe(it, "src/model.safetensors"), "is a pipe, and a file is wanted")]
#[case::a_device_as_model(|it: &Path| device(it, "src/model.safetensors"), "is a device, and a file is wanted")]
#[case::an_index_that_leads_out(|it: &Path| { gone(it, "src/model.safetensors"); fs::write(it.join("src/model.safetensors.index.json"), json!({ "weight_map": { "a": "../secret" } }).to_string()).unwrap(); }, "../secret")]
#[case::an_index_of_nothing(|it: &Path| { gone(it, "src/model.safetensors"); fs::write(it.join("src/model.safetensors.index.json"), json!({ "weight_map": { "a": "a.safetensors" } }).to_string()).unwrap(); }, "src/a.safetensors is missing")]
#[case::a_gap_of_models(|it: &Path| copy(it, "src/model.safetensors", "src/model_2.safetensors"), "model_2.safetensors, and the model with number 1 before it is missing")]
#[case::a_pipe_as_optimizer(|it: &Path| pipe(it, "src/optimizer.bin"), "src/optimizer.bin is a pipe")]
#[case::a_device_as_optimizer(|it: &Path| device(it, "src/optimizer.bin"), "src/optimizer.bin is a device")]
#[case::an_empty_optimizer(|it: &Path| fs::write(it.join("src/optimizer.bin"), "").unwrap(), "no archive of torch.save")]
#[case::a_cut_optimizer(|it: &Path| cut(it, "src/optimizer.bin", 5000), "no archive of torch.save")]
#[case::a_text_as_optimizer(|it: &Path| fs::write(it.join("src/optimizer.bin"), "lr: 0.1\n".repeat(99)).unwrap(), "no archive of torch.save")]
#[case::code(|it: &Path| raw(&it.join("src/optimizer.bin"), b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."), "it names `os.system`")]
#[case::code_in_a_schedule(|it: &Path| raw(&it.join("src/scheduler.bin"), b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R."), "it names `builtins.eval`")]
#[case::code_in_random_states(|it: &Path| raw(&it.join("src/random_states_0.pkl"), b"\x80\x02csubprocess\nPopen\n)R."), "it names `subprocess.Popen`")]
#[case::a_list_as_optimizer(|it: &Path| torch(it, "optimizer.bin", &Plain::List(vec![])), "it has no list `param_groups`")]
#[case::no_state(|it: &Path| torch(it, "optimizer.bin", &Plain::dict([("param_groups", Plain::List(vec![]))])), "it has no dictionary `state`")]
#[case::groups_of_numbers(|it: &Path| optimizer(it, vec![Plain::Int(1)], vec![]), "a group is no dictionary of settings")]
#[case::no_params(|it: &Path| optimizer(it, vec![group(vec![("lr", Plain::Float(0.1))])], vec![]), "a group has no list `params`")]
#[case::params_of_lists(|it: &Path| optimizer(it, vec![group(vec![("params", Plain::List(vec![ints(&[0])]))])], vec![]), "neither numbers nor names")]
#[case::twice_in_groups(|it: &Path| optimizer(it, vec![group(vec![("params", ints(&[0, 1, 0]))])], vec![]), "a parameter is in two groups")]
#[case::state_of_nothing(|it: &Path| one_group(it, vec![(Plain::Int(9), Plain::dict([("step", Plain::Int(1))]))]), "state of a parameter that is in no group")]
#[case::state_that_is_a_number(|it: &Path| one_group(it, vec![(Plain::Int(0), Plain::Int(1))]), "the state of parameter 0 is a number")]
#[case::state_of_lists(|it: &Path| one_group(it, vec![(Plain::Int(0), Plain::dict([("step", ints(&[1]))]))]), "its state `step.first.weight` is a list")]
#[case::no_rate(|it: &Path| optimizer(it, vec![group(vec![("params", ints(&[0, 1, 2, 3, 4, 5]))])], vec![]), "group 0 has no learning rate `lr`")]
#[case::a_rate_that_is_none(|it: &Path| optimizer(it, vec![group(vec![("params", ints(&[0, 1, 2, 3, 4, 5])), ("lr", Plain::Float(f64::NAN))])], vec![]), "group 0 has no learning rate `lr`")]
#[case::an_optimizer_that_is_not_here(|it: &Path| optimizer(it, vec![group(vec![("lr", Plain::Float(1.0)), ("history_size", Plain::Int(100)), ("tolerance_grad", Plain::Float(1e-7)), ("params", ints(&[0]))])], vec![]), "it is the state of LBFGS, an optimizer of PyTorch that this library does not have; move the file out of the folder")]
#[case::too_few_names(|it: &Path| names(it, |names| drop(names.pop())), "5 names of parameters are said, and the optimizer has 6")]
#[case::a_name_twice(|it: &Path| names(it, |names| names[1] = names[0].clone()), "two of its parameters are called `first.weight`")]
#[case::an_unknown_name(|it: &Path| names(it, |names| names[0] = "other".to_owned()), "one of its parameters is called `other`")]
#[case::another_order(|it: &Path| names(it, |names| names.swap(0, 1)), "the order of names is another one")]
#[case::no_names(|it: &Path| gone(it, "names.txt"), "names.txt cannot be read: it is missing")]
#[case::a_pipe_of_names(|it: &Path| pipe(it, "names.txt"), "names.txt cannot be read: it is a pipe")]
#[case::names_in_bytes(|it: &Path| fs::write(it.join("names.txt"), [0xff, 0xfe]).unwrap(), "it is no text in UTF-8")]
#[case::a_gap_of_optimizers(|it: &Path| copy(it, "src/optimizer.bin", "src/optimizer_2.bin"), "optimizer_2.bin, and the one with number 1 before it is missing")]
#[case::two_optimizers_and_names_of_one(|it: &Path| copy(it, "src/optimizer.bin", "src/optimizer_1.bin"), "--parameter_names is there 1 times, and the checkpoint has 2 optimizers")]
#[case::a_gap_of_processes(|it: &Path| fs::rename(it.join("src/random_states_0.pkl"), it.join("src/random_states_3.pkl")).unwrap(), "random_states_3.pkl, and the one with number 0 before it is missing")]
#[case::random_states_in_a_list(|it: &Path| torch(it, "random_states_0.pkl", &ints(&[1])), "it holds a list, and a dictionary of random states is wanted")]
#[case::a_step_before_the_first(|it: &Path| torch(it, "random_states_0.pkl", &Plain::dict([("step", Plain::Int(-1))])), "its step is -1")]
#[case::a_step_after_the_last(|it: &Path| torch(it, "random_states_0.pkl", &Plain::dict([("step", Plain::Int(i64::MAX))])), "its counts are not those of a run")]
#[case::a_list_as_schedule(|it: &Path| torch(it, "scheduler.bin", &ints(&[1])), "it holds a list, and the state of a schedule is wanted")]
#[case::a_scale_of_nan(|it: &Path| scale(it, Plain::Float(f64::NAN)), "its `scale` is missing or no number")]
#[case::a_scale_in_words(|it: &Path| scale(it, Plain::text("large")), "its `scale` is missing or no number")]
#[case::a_list_in_itself(|it: &Path| raw(&it.join("src/scheduler.bin"), &holding(b"]q\x00h\x00a")), "more than 32 deep")]
#[case::lists_of_lists(|it: &Path| {
    // Each of them is held four times by the next.
    let mut pickle = b")q\x00".to_vec();
    (0..24).for_each(|_| pickle.extend(b"(h\x00h\x00h\x00h\x00tq\x00"));
    // All of them are left on the stack below the last.
    pickle.extend(b"t");
    raw(&it.join("src/scheduler.bin"), &holding(&[b"(", pickle.as_slice()].concat()));
}, "counted as often as they are held")]
#[case::one_list_very_often(|it: &Path| {
    let mut pickle = [&b"(]("[..], &[b'N'; 64], b"eq\x00"].concat();
    (0..5000).for_each(|_| pickle.extend(b"h\x00"));
    pickle.extend(b"t");
    raw(&it.join("src/scheduler.bin"), &holding(&pickle));
}, "counted as often as they are held")]
#[case::a_tensor_of_one_element(|it: &Path| raw(&it.join("src/custom_checkpoint_1.pkl"), &holding(&repeated(1 << 40))), "its tensors repeat their elements")]
#[case::a_tensor_without_end(|it: &Path| raw(&it.join("src/custom_checkpoint_1.pkl"), &holding(&repeated(1 << 62))), "more elements or dims than can be read")]
#[case::a_cut_registered_object(|it: &Path| cut(it, "src/custom_checkpoint_0.pkl", 700), "src/custom_checkpoint_0.pkl cannot be converted")]
fn what_is_wrong_with_a_checkpoint_of_pythons_is_named(#[case] harm: Harm, #[case] words: &str) {
    let folder = copied("adamw");
    harm(folder.path());
    check(folder.path(), "ulimit -v 400000", NAMED, words);
}

/// One tensor that safetensors does not have does not make the rest useless.
#[rstest]
#[case::a_type(
    b"ComplexDoubleStorage",
    b"",
    "w (a tensor of torch.ComplexDoubleStorage, which safetensors does not have)"
)]
#[case::a_form(b"FloatStorage", b"}X\x04\x00\x00\x00conj\x88s", "w (a tensor that is stored in another form: conj)")]
fn a_registered_tensor_that_cannot_be_read_stays_behind(
    #[case] storage: &[u8],
    #[case] notes: &[u8],
    #[case] words: &str,
) {
    let text = |text: &str| [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
    let tensor = [
        b"ctorch._utils\n_rebuild_tensor_v2\n((".to_vec(),
        text("storage"),
        [&b"ctorch\n"[..], storage, b"\n"].concat(),
        text("0"),
        text("cpu"),
        b"K\x01tQK\x00K\x01\x85K\x01\x85".to_vec(),
        [&b"\x89ccollections\nOrderedDict\n)R"[..], notes].concat(),
        b"tR".to_vec(),
    ];
    let folder = copied("adamw");
    let pickle = [&b"\x80\x02}"[..], &text("w"), &tensor.concat(), b"s", &text("k"), b"K\x01s."].concat();
    raw(&folder.path().join("src/custom_checkpoint_0.pkl"), &pickle);
    let found = limited(folder.path(), "true", NAMED);
    found.expect(0, &[]);
    assert!(found.stdout.contains(words), "{}", found.stdout);
    assert_eq!(super::description(&folder.path().join("dst")).objects["custom_checkpoint_0"].values, json!({ "k": 1 }));
}

/// Nothing is left of these. What is said begins so.
#[rstest]
#[case::a_tensor(Plain::Tensor(()), "a tensor: values are JSON here")]
#[case::a_list_of_tensors(Plain::List(vec![Plain::Tensor(())]), "the whole list, because of [0] (a tensor): values")]
#[case::keys_that_are_numbers(Plain::Dict(vec![(Plain::Int(0), Plain::Tensor(()))]), "the whole dictionary, because it has keys that are no texts: ")]
#[case::a_control_character(Plain::dict([("a\u{7}b", Plain::Tensor(()))]), "has control characters, and no tensor may be called so")]
#[case::a_long_name(Plain::dict([("x".repeat(1200), Plain::Tensor(()))]), "is 1200 bytes long, and at most 1000 are read")]
fn a_registered_object_of_which_nothing_is_left_stays_behind(#[case] value: Plain<()>, #[case] words: &str) {
    let folder = copied("adamw");
    torch(folder.path(), "custom_checkpoint_0.pkl", &value);
    let found = limited(folder.path(), "true", NAMED);
    found.expect(0, &[]);
    let line = found.stdout.lines().find(|line| line.contains("custom_checkpoint_0.pkl: ")).unwrap_or_default();
    assert!(line.contains(words), "{}", found.stdout);
    assert!(!super::description(&folder.path().join("dst")).objects.contains_key("custom_checkpoint_0"));
}

/// Of protocol 4, which has instructions for sets, and of protocol 2, which calls their classes.
#[rstest]
#[case::a_set(b"\x8f(K\x01K\x02\x90", "a (a set)")]
#[case::an_empty_set(b"\x8f", "a (a set)")]
#[case::a_frozen_set(b"(K\x01\x91", "a (a set)")]
#[case::a_set_of_protocol_2(b"c__builtin__\nset\n(](K\x01etR", "a (__builtin__.set)")]
fn a_set_stays_behind_by_name(#[case] set: &[u8], #[case] words: &str) {
    let folder = copied("adamw");
    let entry = [&b"X\x01\x00\x00\x00k"[..], b"K\x01s"].concat();
    let pickle = [&b"\x80\x04}"[..], &entry, b"X\x01\x00\x00\x00a", set, b"s."].concat();
    raw(&folder.path().join("src/custom_checkpoint_0.pkl"), &pickle);
    let found = limited(folder.path(), "true", NAMED);
    found.expect(0, &[]);
    assert!(found.stdout.contains(&format!("custom_checkpoint_0.pkl: {words}: values are")), "{}", found.stdout);
    assert_eq!(super::description(&folder.path().join("dst")).objects["custom_checkpoint_0"].values, json!({ "k": 1 }));
}

/// A whole number that has no place is named, and none that is near it is put there.
#[rstest]
#[case::the_first_that_is_too_large(b"\x8a\x09\0\0\0\0\0\0\0\0\x01", Err("k (a number of more than 64 bits)"))]
#[case::the_last_that_is_not(b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\0", Ok(json!(u64::MAX)))]
#[case::the_first_that_is_too_small(
    b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\x7f\xff",
    Err("k (a number of more than 64 bits)")
)]
#[case::the_first_that_is_not(b"\x8a\x08\0\0\0\0\0\0\0\x80", Ok(json!(i64::MIN)))]
#[case::a_very_large_one(b"\x8b\x20\0\0\0aaaaaaaabbbbbbbbccccccccdddddddd", Err("k (a number of more than 64 bits)"))]
fn whole_numbers_are_exact_or_stay_behind(#[case] number: &[u8], #[case] wanted: Result<Value, &str>) {
    let folder = copied("adamw");
    let pickle = [b"\x80\x02}X\x01\0\0\0k", number, b"sX\x01\0\0\0oK\x01s."].concat();
    raw(&folder.path().join("src/custom_checkpoint_0.pkl"), &pickle);
    let found = limited(folder.path(), "true", NAMED);
    found.expect(0, &[]);
    let values = &super::description(&folder.path().join("dst")).objects["custom_checkpoint_0"].values;
    match wanted {
        Ok(number) => assert_eq!(*values, json!({ "k": number, "o": 1 })),
        Err(words) => {
            assert_eq!(*values, json!({ "o": 1 }));
            assert!(found.stdout.contains(&format!("custom_checkpoint_0.pkl: {words}")), "{}", found.stdout);
        }
    }
}

#[rstest]
#[case::items_of_no_set(b"\x80\x04}(K\x01\x90.")]
#[case::items_of_nothing(b"\x80\x04(K\x01\x90.")]
#[case::items_beyond_a_mark(b"\x80\x04\x8f((\x90.")]
#[case::a_frozen_set_without_a_mark(b"\x80\x04\x91.")]
fn a_set_that_is_none_is_an_error(#[case] pickle: &[u8]) {
    let folder = copied("adamw");
    raw(&folder.path().join("src/custom_checkpoint_0.pkl"), pickle);
    check(folder.path(), "true", NAMED, "its pickle cannot be understood");
}

/// Writes something else over a part of a file.
fn overwrite(path: &Path, at: usize, bytes: &[u8]) {
    let mut file = fs::read(path).unwrap();
    file[at..at + bytes.len()].copy_from_slice(bytes);
    fs::write(path, file).unwrap();
}

#[rstest]
#[case::no_metadata(|it: &Path| gone(it, "src/optimizer_0/.metadata"), "src/optimizer_0/.metadata cannot be read")]
#[case::cut_metadata(|it: &Path| cut(it, "src/optimizer_0/.metadata", 900), "src/optimizer_0/.metadata cannot be understood")]
#[case::a_pipe_as_metadata(|it: &Path| pipe(it, "src/optimizer_0/.metadata"), ".metadata is a pipe")]
#[case::a_file_less(|it: &Path| gone(it, "src/optimizer_0/__1_0.distcp"), "__1_0.distcp is missing, and `optimizer.state.0.weight.exp_avg` is said to be in it")]
#[case::a_cut_file(|it: &Path| cut(it, "src/optimizer_0/__1_0.distcp", 100), "the file was cut off, or is of another checkpoint")]
#[case::a_device_as_file(|it: &Path| device(it, "src/optimizer_0/__1_0.distcp"), "__1_0.distcp is a device")]
#[case::a_damaged_value(|it: &Path| overwrite(&it.join("src/optimizer_0/__1_0.distcp"), 60, &[0; 200]), "where `optimizer.param_groups.0.lr` is said to be")]
#[case::a_model_in_its_place(|it: &Path| { fs::remove_dir_all(it.join("src/optimizer_0")).unwrap(); copy_folder(&it.join("src/pytorch_model_fsdp_0"), &it.join("src/optimizer_0")); }, "it has no `optimizer`, in which save_state")]
#[case::a_file_in_its_place(|it: &Path| { fs::remove_dir_all(it.join("src/optimizer_0")).unwrap(); fs::write(it.join("src/optimizer_0"), "").unwrap(); }, "no archive of torch.save")]
#[case::a_gap(|it: &Path| fs::rename(it.join("src/optimizer_0"), it.join("src/optimizer_1")).unwrap(), "has optimizer_1, and the one with number 0 before it is missing")]
#[case::a_gap_of_models(|it: &Path| fs::rename(it.join("src/pytorch_model_fsdp_0"), it.join("src/pytorch_model_fsdp_1")).unwrap(), "has pytorch_model_fsdp_1, and the model with number 0 before it is missing")]
#[case::no_model(|it: &Path| fs::remove_dir_all(it.join("src/pytorch_model_fsdp_0")).unwrap(), "no model has a tensor of that name")]
fn what_is_wrong_with_a_sharded_run_of_pythons_is_named(#[case] harm: Harm, #[case] words: &str) {
    let folder = copied("fsdp2");
    harm(folder.path());
    check(folder.path(), "ulimit -v 400000", "convert src dst", words);
}

#[rstest]
#[case::a_folder_with_something(|it: &Path| { fs::create_dir(it.join("dst")).unwrap(); fs::write(it.join("dst/mine"), "").unwrap(); }, "dst", "dst exists already")]
#[case::a_file(|it: &Path| fs::write(it.join("dst"), "").unwrap(), "dst", "dst exists already")]
#[case::a_link_to_nowhere(|it: &Path| symlink("/nowhere", it.join("dst")).unwrap(), "dst", "name the folder itself")]
#[case::a_link_to_an_empty_folder(|it: &Path| { fs::create_dir(it.join("empty")).unwrap(); symlink("empty", it.join("dst")).unwrap(); }, "dst/", "name the folder itself")]
#[case::a_file_with_a_slash(|it: &Path| fs::write(it.join("dst"), "").unwrap(), "dst/", "dst exists already")]
#[case::here(|_: &Path| (), ".", "name the folder itself")]
#[case::itself_by_another_name(|_: &Path| (), "src/../src/.", "src exists already")]
#[case::itself(|_: &Path| (), "src", "src exists already")]
#[case::below_itself(|_: &Path| (), "src/below/dst", "which is read; name a folder elsewhere")]
#[case::below_itself_by_a_link(|it: &Path| symlink("src", it.join("link")).unwrap(), "link/dst", "which is read; name a folder elsewhere")]
#[case::below_itself_by_a_folder_that_is_not_there(|_: &Path| (), "nope/../src/below/dst", "which is read; name a folder elsewhere")]
#[case::below_itself_by_a_link_to_nothing(|it: &Path| symlink("src/below", it.join("link")).unwrap(), "link/dst", "which is read; name a folder elsewhere")]
#[case::itself_by_a_folder_that_is_not_there(|_: &Path| (), "nope/../src", "src exists already")]
#[case::a_link_by_a_folder_that_is_not_there(|it: &Path| symlink("/nowhere", it.join("dst")).unwrap(), "nope/../dst", "name the folder itself")]
#[case::below_a_device(|_: &Path| (), "/dev/full/dst", "/dev/full/dst cannot be written")]
#[case::no_name(|_: &Path| (), "..", "name the folder itself")]
fn what_is_there_stays(#[case] harm: Harm, #[case] destination: &str, #[case] words: &str) {
    let folder = copied("adamw");
    harm(folder.path());
    let line = format!("convert src {destination} --parameter_names names.txt");
    check(folder.path(), "ulimit -v 400000", &line, words);
    assert!(!folder.path().join("src/below").exists());
}

#[test]
fn a_full_disk_leaves_nothing_behind() {
    let folder = copied("adamw");
    check(folder.path(), "ulimit -f 1; trap '' XFSZ", NAMED, "cannot be written");
}

#[test]
fn an_empty_folder_gives_way() {
    let folder = copied("adamw");
    fs::create_dir(folder.path().join("dst")).unwrap();
    limited(folder.path(), "true", NAMED).expect(0, &[]);
    assert_eq!(listing(folder.path()), ["dst", "names.txt", "src"]);
}

/// What somebody does to a run of this library before it is saved.
type OwnHarm = fn(&mut Vec<Tensor>, &mut Values);

#[rstest]
#[case::in_eight_bits(|tensors: &mut Vec<Tensor>, _: &mut Values| tensors[2].dtype = Dtype::U8, "is in 8 bits")]
#[case::no_groups(|_: &mut Vec<Tensor>, values: &mut Values| { values.insert("optimizer", json!({})); }, "it has no `param_groups`")]
#[case::groups_without_names(|_: &mut Vec<Tensor>, values: &mut Values| { values.insert("optimizer", json!({ "param_groups": [{ "params": [1] }] })); }, "a group has no names of parameters")]
#[case::a_name_in_two_groups(|_: &mut Vec<Tensor>, values: &mut Values| { values.insert("optimizer", json!({ "param_groups": [{ "params": ["a", "a"], "lr": 0.1 }] })); }, "`a` is in two groups")]
#[case::a_group_without_rate(|_: &mut Vec<Tensor>, values: &mut Values| { values.insert("optimizer", json!({ "param_groups": [{ "params": ["weight"] }] })); }, "a group has no learning rate")]
#[case::state_of_nothing(|tensors: &mut Vec<Tensor>, _: &mut Values| tensors[2].name = "exp_avg.other", "`exp_avg.other` is state of no parameter")]
#[case::a_model_without_tensors(|tensors: &mut Vec<Tensor>, values: &mut Values| { tensors.retain(|it| it.object != "model"); values.insert("model", json!({ "left_out": {} })); }, "it has no tensors, so that Python could go on from nothing")]
fn what_python_could_not_load_is_not_written(#[case] harm: OwnHarm, #[case] words: &str) {
    let folder = tempfile::tempdir().unwrap();
    let (mut tensors, mut values) = own();
    harm(&mut tensors, &mut values);
    if let Some(tensor) = tensors.iter_mut().find(|tensor| tensor.dtype == Dtype::U8) {
        tensor.bytes.truncate(6);
    }
    write_checkpoint(&folder.path().join("own"), 1, &tensors, &values);
    check(folder.path(), "ulimit -v 400000", "convert own dst", words);
}

#[test]
fn a_changed_byte_is_found_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let (tensors, values) = own();
    write_checkpoint(&folder.path().join("own"), 1, &tensors, &values);
    let path = folder.path().join("own/optimizer.safetensors");
    let mut file = fs::read(&path).unwrap();
    *file.last_mut().unwrap() ^= 1;
    fs::write(&path, file).unwrap();
    check(folder.path(), "true", "convert own dst", "are not as they were saved");
}
