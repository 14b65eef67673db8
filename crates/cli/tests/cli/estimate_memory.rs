//! What a model takes of memory, read from files that each test writes.

use std::fs;
use std::path::Path;
use std::process::Command;

use rstest::rstest;

use crate::support::{Finished, accelerate, finished};

/// Bytes of a safetensors file with these tensors, all zeros: name, element type, bytes of one element, number of elements.
pub(crate) fn file_of(tensors: &[(&str, &str, usize, usize)]) -> Vec<u8> {
    let (mut items, mut end) = (Vec::new(), 0);
    for (name, dtype, element_bytes, size) in tensors {
        let start = end;
        end += element_bytes * size;
        items.push(format!(r#""{name}":{{"dtype":"{dtype}","shape":[{size}],"data_offsets":[{start},{end}]}}"#));
    }
    with_header(&format!("{{{}}}", items.join(",")), end)
}

pub(crate) fn with_header(header: &str, data_bytes: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data_bytes, 0);
    bytes
}

/// 100 elements outside of blocks, 50 in each of two blocks, and one integer.
pub(crate) const MODEL: [(&str, &str, usize, usize); 4] = [
    ("h.10.weight", "F32", 4, 50),
    ("embed.weight", "F32", 4, 100),
    ("h.9.weight", "F32", 4, 50),
    ("ids", "I64", 8, 1),
];

pub(crate) fn write(folder: &Path, name: &str, bytes: impl AsRef<[u8]>) {
    fs::write(folder.join(name), bytes).unwrap();
}

fn folder_with_model() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "model.safetensors", file_of(&MODEL));
    folder
}

pub(crate) fn estimate(folder: &Path, line: &str) -> Finished {
    let mut command: Command = accelerate();
    command.arg("estimate-memory").args(line.split_whitespace()).current_dir(folder).env("HF_HUB_OFFLINE", "1");
    finished(command)
}

#[track_caller]
fn expect_lines(found: &Finished, lines: &[&str]) {
    found.expect(0, &[]);
    let squeezed: Vec<String> =
        found.stdout.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    for line in lines {
        assert!(squeezed.iter().any(|found| found == line), "{line:?} is missing in\n{}", found.stdout);
    }
}

#[test]
fn the_table_has_a_line_for_each_dtype() {
    let folder = folder_with_model();
    let all = estimate(folder.path(), "model.safetensors");
    let lines = [
        "dtype largest layer total size training with Adam",
        "float32 400 B 808 B 3.23 KB",
        "float16 200 B 404 B 1.62 KB",
        "int8 100 B 202 B N/A",
        "int4 50 B 101 B N/A",
        "The largest layer is embed. Activations come on top.",
    ];
    expect_lines(&all, &lines);
    let some = estimate(folder.path(), "model.safetensors --dtypes int8 bfloat16");
    expect_lines(&some, &["int8 100 B 202 B N/A", "bfloat16 200 B 404 B 1.62 KB"]);
    assert!(!some.stdout.contains("float32"), "{}", some.stdout);
}

#[test]
fn columns_are_aligned() {
    let folder = folder_with_model();
    let found = estimate(folder.path(), "model.safetensors");
    let widths: Vec<usize> = found.stdout.lines().take(5).map(str::len).collect();
    assert_eq!(widths, [widths[0]; 5], "{}", found.stdout);
}

#[test]
fn json_counts_bytes() {
    let folder = folder_with_model();
    let found = estimate(folder.path(), "model.safetensors --dtypes float16 --json");
    found.expect(0, &[]);
    let json: serde_json::Value = serde_json::from_str(&found.stdout).unwrap();
    let wanted = serde_json::json!({
        "model": {"origin": "local", "place": "model.safetensors"},
        "estimates": [{
            "dtype": "float16", "largest_layer": "embed", "largest_layer_bytes": 200, "total_bytes": 404, "training_bytes": 1616,
        }],
    });
    assert_eq!(json, wanted);
}

/// Wherever the same tensors are, the same comes out.
#[rstest]
#[case("model.safetensors")]
#[case("single")]
#[case("sharded")]
#[case("sharded/model.safetensors.index.json")]
fn a_model_is_a_file_an_index_or_a_folder(#[case] model: &str) {
    let folder = folder_with_model();
    fs::create_dir(folder.path().join("single")).unwrap();
    write(&folder.path().join("single"), "weights.safetensors", file_of(&MODEL));
    let sharded = folder.path().join("sharded");
    fs::create_dir(&sharded).unwrap();
    let (first, second) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    write(&sharded, first, file_of(&MODEL[..2]));
    // What the index does not name is no part of the model.
    write(&sharded, second, file_of(&[MODEL[2], MODEL[3], ("left.over", "F32", 4, 1000)]));
    let index = format!(
        r#"{{"weight_map": {{"h.10.weight": "{first}", "embed.weight": "{first}", "h.9.weight": "{second}", "ids": "{second}"}}}}"#
    );
    write(&sharded, "model.safetensors.index.json", index);
    let found = estimate(folder.path(), &format!("{model} --plan --num_processes 2 --verbose"));
    let whole = estimate(folder.path(), "model.safetensors --plan --num_processes 2 --verbose");
    found.expect(0, &[]);
    assert_eq!(found.stdout, whole.stdout);
}

#[test]
fn a_plan_shows_units_and_the_memory_of_each_phase() {
    let folder = folder_with_model();
    let blocks = "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP";
    let found = estimate(folder.path(), &format!(". --plan --num_processes 2 {blocks}"));
    expect_lines(
        &found,
        &[
            "plan for 2 ranks: FULL_SHARD, 4 parameter tensors, 808 B in all",
            "unit 0: (root): 1 parameter tensor of float32, 100 elements, 50 on each rank",
            "unit 2: h.10: 1 parameter tensor of float32, 50 elements, 25 on each rank",
            "unit 3: (root): 1 parameter tensor of int64, frozen, 1 elements, 1 on each rank",
            "each rank parameters gradients optimizer state gathered units total",
            // The parts of the root come first, while all is whole.
            "load 1.01 KB - - - 1.01 KB ███████████",
            "forward 408 B - 800 B 616 B 1.82 KB █████████████████████",
            "backward 408 B 1 KB 800 B 616 B 2.82 KB ████████████████████████████████",
            "step 408 B 400 B 800 B - 1.61 KB ██████████████████",
            "At most 2.82 KB on each rank (backward). Activations come on top.",
        ],
    );
    assert!(!found.stdout.contains('\u{1b}'), "no colours outside of a terminal");
    assert!(!found.stdout.contains("h.9.weight"), "{}", found.stdout);
    let verbose = estimate(folder.path(), &format!(". --plan --num_processes 2 {blocks} --verbose"));
    expect_lines(&verbose, &["h.9.weight float32 [50] shard of unit 1"]);
}

/// Flags, and the first line of the plan with parameters, gradients and state between steps.
#[rstest]
#[case("", "plan for 1 ranks: FULL_SHARD, 4", [808, 800, 1600])]
#[case("--num_processes 2 --fsdp_sharding_strategy SHARD_GRAD_OP", "plan for 2 ranks: SHARD_GRAD_OP", [408, 400, 800])]
#[case("--num_processes 2 --fsdp_sharding_strategy 3", "plan for 2 ranks: NO_SHARD", [808, 800, 1600])]
#[case("--num_processes 2 --zero_stage 0", "plan for 2 ranks: NO_SHARD", [808, 800, 1600])]
#[case("--num-processes 4 --zero-stage 1", "plan for 4 ranks: OPTIMIZER_STATE,", [848, 816, 408])]
#[case("--num_processes 2 --zero_stage 2", "plan for 2 ranks: OPTIMIZER_STATE_AND_GRADIENTS,", [816, 400, 800])]
#[case("--num_processes 2 --zero_stage 3", "plan for 2 ranks: FULL_SHARD", [408, 400, 800])]
#[case("--num_processes 2 --dtypes bfloat16", "plan for 2 ranks: FULL_SHARD, 4 parameter tensors, 408 B", [208, 200, 400])]
#[case("--num_processes 2 --offload_optimizer_device cpu", "plan for 2 ranks: FULL_SHARD", [408, 400, 800])]
#[case("--num_processes 2 --zero_stage 1 --offload_optimizer_device nvme", "plan for 2 ranks: OPT", [816, 800, 0])]
#[case(
    "--num_processes 2 --offload-optimizer-device nvme --offload-param-device nvme",
    "plan for 2 ranks: FULL_SHARD, 4 parameter tensors, 808 B in all\n  optimizer state: on NVMe while not in use\n",
    [0, 400, 0]
)]
fn every_flag_has_its_effect_on_the_plan(#[case] flags: &str, #[case] head: &str, #[case] bytes: [u64; 3]) {
    let folder = folder_with_model();
    let text = estimate(folder.path(), &format!(". --plan {flags}"));
    text.expect(0, &[]);
    assert!(text.stdout.starts_with(head), "{}", text.stdout);
    let json = estimate(folder.path(), &format!(". --plan --json {flags}"));
    let json: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    let found =
        ["parameters", "gradients", "optimizer_state"].map(|name| json["bytes_per_rank"][name].as_u64().unwrap());
    assert_eq!(found, bytes);
    assert_eq!(json["phases"][json["peak_phase"].as_str().unwrap()]["total"], json["peak_bytes"]);
    assert_eq!(json["plan"]["inventory"]["parameters"].as_array().unwrap().len(), 4);
    // One rank sends nothing.
    let has_collectives = !json["collectives"].as_array().unwrap().is_empty();
    assert_eq!(has_collectives, !head.contains("for 1 ranks"));
    assert_eq!(text.stdout.contains("\n  collectives of a step: "), has_collectives, "{}", text.stdout);
}

#[rstest]
#[case("--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap h.10,embed", &["h.10", "embed"])]
#[case("--fsdp_auto_wrap_policy SIZE_BASED_WRAP --fsdp_min_num_params 60", &["embed", "h"])]
#[case("--fsdp-auto-wrap-policy NO_WRAP", &["(root)"])]
fn units_are_what_the_policy_says(#[case] flags: &str, #[case] units: &[&str]) {
    let folder = folder_with_model();
    let found = estimate(folder.path(), &format!(". --plan {flags}"));
    found.expect(0, &[]);
    for unit in units {
        assert!(found.stdout.contains(&format!(": {unit}: ")), "{unit} in\n{}", found.stdout);
    }
}

#[test]
fn buffers_of_batch_norms_and_integers_are_not_trained() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = [
        ("bn.weight", "F32", 4, 4),
        ("bn.running_mean", "F32", 4, 4),
        ("bn.running_var", "F32", 4, 4),
        ("bn.num_batches_tracked", "I64", 8, 1),
    ];
    write(folder.path(), "model.safetensors", file_of(&tensors));
    let found = estimate(folder.path(), ". --plan --zero_stage 0 --verbose");
    assert_eq!(found.stdout.matches("  frozen\n").count(), 3, "{}", found.stdout);
    assert_eq!(found.stdout.matches("  replicate\n").count(), 1, "{}", found.stdout);
}

#[test]
fn what_is_on_nvme_stands_beside_the_memory() {
    let folder = folder_with_model();
    let both = "--offload_optimizer_device nvme --offload_param_device nvme";
    let found = estimate(folder.path(), &format!(". --plan --zero_stage 3 --num_processes 2 {both}"));
    expect_lines(
        &found,
        &[
            "optimizer state: on NVMe while not in use",
            "parameters: on NVMe while not in use",
            "each rank parameters gradients gathered units NVMe blocks total",
            "forward - - 616 B 1.21 KB 1.82 KB █████████████████████",
            "At most 2.82 KB on each rank (backward). Activations come on top. On NVMe: 1.21 KB of each rank.",
        ],
    );
}

#[test]
fn memory_that_is_there_leaves_some_for_activations() {
    let folder = folder_with_model();
    let found = estimate(folder.path(), ". --plan --zero_stage 3 --num_processes 2 --memory 3KB");
    expect_lines(
        &found,
        &["At most 2.82 KB on each rank (backward). Activations come on top. For them 176 B are left."],
    );
}

#[test]
fn memory_that_is_not_there_is_an_error_with_a_cure() {
    let folder = folder_with_model();
    let found = estimate(folder.path(), ". --plan --zero_stage 1 --num_processes 2 --memory 2.9KB");
    let words = [
        "accelerate estimate-memory: error: OPTIMIZER_STATE on 2 ranks takes 3.02 KB of memory on each at its peak (backward)",
        "there is only 2.9 KB",
        "the largest unit is (root) with 400 B",
        "These fit:\n  - OPTIMIZER_STATE on 4 ranks takes 2.68 KB\n  - FULL_SHARD on 2 ranks takes 2.82 KB\n",
    ];
    found.expect(1, &words);
    assert!(found.stdout.starts_with("plan for 2 ranks"), "the plan is shown nevertheless");
}

/// Claims of files that would cost memory or bring the reader down, and what is said of them.
#[rstest]
#[case::nothing(vec![], "has only 0 bytes")]
#[case::half_a_length(vec![1, 2, 3], "has only 3 bytes")]
#[case::longer_than_the_file(with_header("{}", 0).into_iter().take(9).collect(), "claims 2 bytes, but the file has only 9 in all")]
#[case::longer_than_any(u64::MAX.to_le_bytes().to_vec(), "claims 18446744073709551615 bytes, more than")]
#[case::longer_than_allowed(100_000_001_u64.to_le_bytes().to_vec(), "more than the 100000000 allowed")]
#[case::no_json(
    with_header("this is not JSON", 0),
    "not a safetensors file, or damaged: its header cannot be understood: expected"
)]
#[case::no_text(with_header("{\"a\u{0}\"", 0), "not a safetensors file, or damaged")]
#[case::truncated(file_of(&MODEL).into_iter().take(400).collect(), "has 400 bytes where its header promises")]
#[case::too_long(file_of(&MODEL).into_iter().chain([0]).collect(), "so that it was lengthened")]
#[case::wrong_size(
    with_header(r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#, 4),
    "takes 8 bytes as F32, and its data_offsets are 4 apart"
)]
#[case::overflow(
    with_header(r#"{"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}"#, 4),
    "no countable number"
)]
#[case::hole(with_header(r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#, 8), "[4, 8], and 0 is where")]
#[case::backwards(
    with_header(r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[8,4]}}"#, 8),
    "[8, 4], and 0 is where"
)]
#[case::unknown_type(with_header(r#"{"w":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}"#, 4), "F33")]
#[case::narrow_type(
    with_header(r#"{"w":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}"#, 1),
    "the tensor w has the element type F4, of which libtorch has none"
)]
fn hostile_files_are_refused(#[case] bytes: Vec<u8>, #[case] words: &str) {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "model.safetensors", bytes);
    let found = estimate(folder.path(), "model.safetensors");
    found.expect(1, &["accelerate estimate-memory: error: ", "model.safetensors", words]);
    assert!(!found.stderr.contains("panicked"), "{found:?}");
}

/// An index beside one file with the tensor `there`.
#[rstest]
#[case("[1, 2]", "this is not an index of weight files")]
#[case(r#"{"weight_map": {"w": "../a.safetensors"}}"#, "\"../a.safetensors\" for \"w\"")]
#[case(r#"{"weight_map": {"a": "gone.safetensors", "b": "gone.safetensors"}}"#, "names gone.safetensors for 2 tensors")]
#[case(r#"{"weight_map": {"absent": "a.safetensors"}}"#, "says that absent is in a.safetensors")]
#[case(r#"{"weight_map": {"there": "damaged.safetensors"}}"#, "damaged.safetensors is not a safetensors file")]
fn a_wrong_index_is_refused(#[case] index: &str, #[case] words: &str) {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "a.safetensors", file_of(&[("there", "F32", 4, 1)]));
    write(folder.path(), "damaged.safetensors", "damaged");
    write(folder.path(), "model.safetensors.index.json", index);
    estimate(folder.path(), ".").expect(1, &[words]);
}

#[rstest]
#[case("bert-base-cased", &["bert-base-cased is neither a path of this machine nor complete in the cache", "HF_HUB_OFFLINE",
    "hf download bert-base-cased --local-dir bert-base-cased"])]
#[case("org/some.model-7b", &["hf download org/some.model-7b --local-dir some.model-7b"])]
#[case("a/longer/path", &["there is no file at a/longer/path; a .safetensors file"])]
#[case("absent/model.safetensors", &["there is no file at absent/model.safetensors; a .safetensors file"])]
#[case("model.bin", &["model.bin is in PyTorch's own format", "safetensors"])]
#[case("pickled", &["pickled/model.bin is in PyTorch's own format"])]
#[case("two", &["two/ has no weights to choose", "a.safetensors, b.safetensors"])]
#[case("empty", &["empty/ has no weights", "there are no files"])]
fn what_is_no_model_says_what_is_wanted(#[case] model: &str, #[case] words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "model.bin", "");
    for name in ["pickled", "two", "empty"] {
        fs::create_dir(folder.path().join(name)).unwrap();
    }
    write(folder.path(), "pickled/model.bin", "");
    write(folder.path(), "two/a.safetensors", "");
    write(folder.path(), "two/b.safetensors", "");
    let found = estimate(folder.path(), model);
    found.expect(1, words);
    let is_hub_name = ["bert", "org"].iter().any(|start| model.starts_with(start));
    assert_eq!(found.stderr.contains("hf download"), is_hub_name, "{}", found.stderr);
}

#[rstest]
#[case("--plan --dtypes int8", "int8 cannot be trained")]
#[case("--plan --dtypes float32 float16", "--dtypes names float32, float16; choose one")]
#[case("--plan --fsdp_min_num_params 5", "only SIZE_BASED_WRAP counts parameters")]
#[case("--plan --fsdp_auto_wrap_policy SIZE_BASED_WRAP", "without a number of parameters")]
#[case("--plan --offload_param_device nvme", "put both on NVMe")]
#[case("--plan --zero_stage 2 --offload_param_device cpu", "parameters are unsharded on every rank")]
fn what_cannot_be_planned_says_why(#[case] flags: &str, #[case] words: &str) {
    let folder = folder_with_model();
    estimate(folder.path(), &format!(". {flags}")).expect(1, &[words]);
}

#[rstest]
#[case("--dtypes float64", "the choices are \"float32\", \"float16\", \"bfloat16\", \"int8\", \"int4\"")]
#[case("--memory 1GB", "--plan")]
fn wrong_flags_are_usage_errors(#[case] flags: &str, #[case] words: &str) {
    let folder = folder_with_model();
    estimate(folder.path(), &format!(". {flags}")).expect(2, &[words]);
}

#[test]
fn nobody_has_to_read_the_output() {
    let folder = folder_with_model();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = accelerate();
    command.args(["estimate-memory", "."]).current_dir(folder.path()).stdout(writer);
    let ended = finished(command);
    ended.expect(0, &[]);
    assert_eq!(ended.stderr, "");
}

const CONFIG: &str = r#"{"model_type": "gpt2", "n_layer": 2, "n_embd": 10, "n_head": 2, "vocab_size": 100}"#;

#[test]
fn activations_stand_beside_the_table() {
    let folder = folder_with_model();
    write(folder.path(), "config.json", CONFIG);
    let shape = "--batch_size 3 --sequence_length 4";
    let found = estimate(folder.path(), &format!("model.safetensors {shape}"));
    // 34 * 120 + 5 * 2 * 4 * 4 * 3 bytes in each of two layers, 5 * 120 around them, 4 * 12 * 100 of logits.
    expect_lines(
        &found,
        &[
            "dtype largest layer total size training with Adam activations together",
            "float16 200 B 404 B 1.62 KB 14.52 KB 16.14 KB",
            "int8 100 B 202 B N/A N/A N/A",
            "The largest layer is embed.",
            "Activations are an estimate for 3 x 4 tokens (Korthikanti et al., 2022), 4.8 KB of it logits.",
        ],
    );
    let again = estimate(folder.path(), &format!(". {shape} --activation-checkpointing --dtypes float16"));
    expect_lines(&again, &["float16 200 B 404 B 1.62 KB 10.44 KB 12.06 KB"]);
    assert!(again.stdout.contains("computed again in the backward pass"), "{}", again.stdout);
    write(folder.path(), "config.json", CONFIG.replace("gpt2", "llama"));
    let other = estimate(folder.path(), &format!(". {shape}"));
    assert!(other.stdout.contains("Its layers are those of BERT and GPT-2: llama may keep more"), "{}", other.stdout);
}

#[test]
fn a_plan_counts_activations_and_tells_the_time_of_a_step() {
    let folder = folder_with_model();
    write(folder.path(), "config.json", CONFIG);
    let line = ". --plan --zero_stage 0 --num_processes 2 --batch_size 3 --sequence_length 4";
    // In float32: 2 * (66 * 120 + 9 * 96) + 9 * 120 + 4800 bytes.
    let found = estimate(folder.path(), &format!("{line} --flops 14.4K --bandwidth 100B/s"));
    expect_lines(
        &found,
        &[
            "backward 808 B 800 B 1.6 KB 800 B 23.45 KB 27.46 KB ████████████████████████████████",
            "At most 27.46 KB on each rank (backward).",
            "A step of 12 tokens on each rank computes for 1.00 s, at the rate of --flops, and sends 800 B in 8.00 s.",
            "8.00 s if all of it travels while something is computed: 3.00 tokens/s on 2 ranks",
            "9.00 s if nothing is computed meanwhile: 2.67 tokens/s",
        ],
    );
    let unknown = estimate(folder.path(), &format!("{line} --flops 14.4K"));
    assert!(unknown.stdout.contains("Each rank sends 800 B: --bandwidth says"), "{}", unknown.stdout);
    let alone = estimate(folder.path(), &format!("{line} --flops 14.4K").replace("_processes 2", "_processes 1"));
    assert!(alone.stdout.contains("at the rate of --flops; nothing is sent."), "{}", alone.stdout);
    let tight = estimate(folder.path(), &format!("{line} --memory 27.4KB"));
    tight.expect(1, &["27.46 KB of memory on each at its peak (backward), 23.45 KB of it activations"]);
    let json = estimate(folder.path(), &format!("{line} --flops 14.4K --bandwidth 100B/s --json"));
    json.expect(0, &[]);
    let json: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(json["phases"]["forward"]["activations"], 23_448);
    assert_eq!(json["step_time"]["overlapped_seconds"], 8.0);
    assert_eq!(json["step_time"]["not_overlapped_seconds"], 9.0);
    assert_eq!(json["activations"]["shape"]["num_layers"], 2);
    assert_eq!(json["speed"]["bandwidth"], 100);
}

#[test]
fn help_teaches_by_example() {
    let folder = tempfile::tempdir().unwrap();
    let help = estimate(folder.path(), "--help");
    help.expect(0, &[]);
    assert!(help.stdout.contains("accelerate estimate-memory models/bert-base-cased --plan --num_processes 4"));
    assert!(help.stdout.contains("--sequence_length 1024 --flops 312T --bandwidth 100Gbit"));
    assert!(help.stdout.contains("--offload_optimizer_device nvme --offload_param_device nvme"));
}
