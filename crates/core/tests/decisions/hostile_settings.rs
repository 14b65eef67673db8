//! Settings files that somebody made to do harm, or by mistake: each is refused in little time and memory, by a short message
//! that names the file and the line or key.

use crate::hostile::check_refused;
use accelerate_core::config::{ConfigFile, DeepSpeedSettings, PartialRunConfig, RunConfig, Sources};
use accelerate_core::settings::read_file;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Reads a configuration file as a launcher does, for two processes.
fn read_settings(path: &Path) -> io::Result<RunConfig> {
    let text =
        read_file(path).map_err(|cause| io::Error::other(format!("{} cannot be read: {cause}", path.display())))?;
    let config = ConfigFile::read(&text, path).and_then(|file| {
        let run = RunConfig::resolve(Sources { file: Some(file), ..Default::default() })?;
        run.check_deepspeed(2, &read_file).map(|()| run)
    });
    config.map_err(io::Error::other)
}

/// Reads a DeepSpeed configuration as a launcher does, for two processes.
fn read_deepspeed(path: &Path) -> accelerate_core::Result<()> {
    let mut code = PartialRunConfig::default();
    code.cluster.use_deepspeed = Some(true);
    code.deepspeed.hf_ds_config = Some(path.display().to_string().parse()?);
    RunConfig::resolve(Sources { code, ..Default::default() })?.check_deepspeed(2, &read_file)
}

#[derive(Clone, Copy)]
enum Reader {
    Settings,
    DeepSpeed,
}

fn check(reader: Reader, case: &str, path: &Path, parts: &[&str]) {
    match reader {
        Reader::Settings => check_refused(case, path, parts, || read_settings(path)),
        Reader::DeepSpeed => check_refused(case, path, parts, || read_deepspeed(path)),
    };
}

fn check_all(reader: Reader, name: &str, cases: Vec<(&str, Vec<u8>, &[&str])>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    for (case, bytes, parts) in cases {
        fs::write(&path, bytes).unwrap();
        check(reader, case, &path, parts);
    }
}

fn case<'a>(name: &'a str, text: impl Into<Vec<u8>>, parts: &'a [&'a str]) -> (&'a str, Vec<u8>, &'a [&'a str]) {
    (name, text.into(), parts)
}

fn many(count: usize, line: impl Fn(usize) -> String) -> String {
    (0..count).map(line).collect()
}

#[test]
fn yaml_that_is_no_configuration() {
    let long = "x".repeat(1_000_000);
    let cases = vec![
        case("an alias", "a: &x [1, 1]\nb: *x\n", &["run.yaml:2", "aliases"]),
        case("a merged alias", "debug: &x true\nfsdp_config:\n  <<: *x\n", &["run.yaml:3", "aliases"]),
        case("a key twice", "debug: true\ndebug: false\n", &["run.yaml:2", "twice"]),
        case("a nested key twice", "fsdp_config:\n  a: 1\n  a: 2\n", &["run.yaml:3", "twice"]),
        case("a key of megabytes", format!("{long}: 1\n"), &["run.yaml:1"]),
        case("a quoted key of megabytes", format!("\"{long}\": 1\n"), &["run.yaml:1"]),
        case(
            "a text of megabytes",
            format!("mixed_precision: {long}\n"),
            &["run.yaml:1:18: mixed_precision", "xxx..."],
        ),
        case("a name of megabytes", format!("main_process_port: \"{long}\"\n"), &["run.yaml:1:20: main_process_port"]),
        case("too many keys", many(80_000, |k| format!("k{k}: 1\n")), &["run.yaml:1", "no key \"k0\""]),
        case(
            "too many nested keys",
            format!("fsdp_config:\n{}", many(80_000, |k| format!(" k{k}: 1\n"))),
            &["run.yaml:2"],
        ),
        case("too many elements", format!("num_processes: [{}]", "1,".repeat(400_000)), &["run.yaml:1", "is a list"]),
        case("too large", many(200_000, |k| format!("k{k}: 1\n")), &["1048576 bytes"]),
        case("lists in lists", format!("a: {}", "[".repeat(100_000)), &["run.yaml:1", "recursion limit"]),
        case("lists in lines", "- ".repeat(100_000), &["run.yaml:1"]),
        case("mappings in mappings", "{a: ".repeat(100_000), &["run.yaml:1", "recursion limit"]),
        case("mappings in lines", many(600, |k| format!("{}a:\n", " ".repeat(k))), &["run.yaml:", "nested"]),
        case("a list", "- 1\n", &["run.yaml:1", "mapping"]),
        case("a word", "word\n", &["run.yaml:1", "mapping"]),
        case("an empty list", "[]\n", &["run.yaml:1", "mapping"]),
        case("two documents", "---\ndebug: true\n---\nb: 2\n", &["run.yaml:3", "second document"]),
        case("a tab", "fsdp_config:\n\tx: 1\n", &["run.yaml:"]),
        case("an open quote", "main_process_ip: \"a\n", &["run.yaml:"]),
        case("an open list", "mixed_precision: [bf16\n", &["run.yaml:"]),
        case("an open mapping in JSON", "{\"num_processes\": 2", &["run.yaml:"]),
        case("a key twice in JSON", "{\"debug\": true,\n\"debug\": false}", &["run.yaml:2", "twice"]),
        case("a key that is a list", "? [a, b]\n: 1\n", &["run.yaml:1", "plain text"]),
        case("code", "debug: !!python/object/apply:os.system [ls]\n", &["run.yaml:1:8: debug is a list"]),
        case("bytes that are no text", b"debug: \xff\xfe\n".to_vec(), &["UTF-8"]),
        case("UTF-16", "debug".encode_utf16().flat_map(u16::to_be_bytes).chain([0xff]).collect::<Vec<_>>(), &["UTF-8"]),
        case("zeros", "\0\0\0\0", &["run.yaml:1"]),
        case("an escape sequence as a key", "\"\\e[31mdebug\": 1\n", &["run.yaml:1", "\\u{1b}[31m"]),
        case("text from right to left", "\"\u{202e}debug\": 1\n", &["run.yaml:1", "\\u{202e}"]),
        case("an escape sequence as a value", "use_cpu: \"\\e[2J\"\n", &["run.yaml:1:10: use_cpu is \"\\u{1b}[2J\""]),
    ];
    assert_eq!(cases.len(), 33);
    check_all(Reader::Settings, "run.yaml", cases);
}

/// Long because it is a table of cases.
#[test]
fn values_that_are_none_of_their_setting() {
    let cases = vec![
        case("no process", "num_processes: 0\n", &["run.yaml:1:16: num_processes is \"0\"", "at least 1"]),
        case("a negative count", "num_processes: -2\n", &["run.yaml:1:16: num_processes is \"-2\""]),
        case("a word for a count", "num_processes: two\n", &["run.yaml:1:16: num_processes is \"two\""]),
        case("more than 64 bits", "num_processes: 99999999999999999999\n", &["run.yaml:1:16: num_processes is \"999"]),
        case("half a process", "num_processes: 1.5\n", &["run.yaml:1:16: num_processes is \"1.5\""]),
        case("infinitely many", "num_processes: .inf\n", &["run.yaml:1:16: num_processes is \".inf\""]),
        case(
            "a number in base 8",
            "num_processes: 010\n",
            &["run.yaml:1:16: num_processes is 010 (which Python reads as 8; write it", "but must be a whole number"],
        ),
        case("a list for a count", "num_processes: [2]\n", &["run.yaml:1:16: num_processes is a list"]),
        case("an object for a count", "num_processes: {a: 2}\n", &["run.yaml:1:16: num_processes is an object"]),
        case("an object for a text", "main_process_ip: {a: 1}\n", &["run.yaml:1:18: main_process_ip is an object"]),
        case("a list for a yes", "use_cpu: [true]\n", &["run.yaml:1:10: use_cpu is a list"]),
        case("a port", "main_process_port: 65536\n", &["run.yaml:1:20: main_process_port", "from 0 to 65535"]),
        case("a number for a section", "fsdp_config: 3\n", &["run.yaml:1:14: fsdp_config must be a mapping"]),
        case("a list for a section", "fsdp_config: [a]\n", &["run.yaml:1:14: fsdp_config must be a mapping"]),
        case(
            "an object in a list",
            "fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: [a, {b: 1}]\n",
            &["run.yaml:2:39: fsdp_transformer_layer_cls_to_wrap is a list whose element 2 is an object"],
        ),
        case(
            "nothing in a list",
            "fsdp_config:\n  ignored_modules: [null, b]\n",
            &["run.yaml:2:20: ignored_modules is a list whose element 1 is nothing, but must be words"],
        ),
        case(
            "an object for a list",
            "fsdp_config: {ignored_modules: {a: 1, b: 2}}\n",
            &["run.yaml:1:32: ignored_modules is an object"],
        ),
        case("seconds before now", "process_group_config:\n  timeout: -1\n", &["run.yaml:2:12: timeout is \"-1\""]),
        case(
            "seconds without end",
            "process_group_config:\n  timeout: 1e400\n",
            &["run.yaml:2:12: timeout is \"1e400\""],
        ),
        case("no number of seconds", "process_group_config: {timeout: NaN}\n", &["run.yaml:1:33: timeout is \"NaN\""]),
        case("no steps", "gradient_accumulation_steps: 0\n", &["run.yaml:1", "at least 1"]),
        case(
            "no stage",
            "use_deepspeed: true\ndeepspeed_config: {zero_stage: 4}\n",
            &["run.yaml:2:32: zero_stage is \"4\""],
        ),
        case(
            "no folder on NVMe",
            "use_deepspeed: true\ndeepspeed_config:\n  offload_param_device: nvme\n",
            &["offload_param_nvme_path is missing", "run.yaml:3"],
        ),
        case("a slip", "mixed_precison: bf16\n", &["run.yaml:1", "nearest one is \"mixed_precision\""]),
        case(
            "a slip after a prefix",
            "deepspeed_config:\n  deepspeed_multinode_laucher: x\n",
            &["run.yaml:2", "nearest one is \"deepspeed_multinode_launcher\""],
        ),
        case(
            "a slip before which the prefix is missing",
            "deepspeed_config:\n  multinode_laucher: x\n",
            &["run.yaml:2", "nearest one is \"deepspeed_multinode_launcher\""],
        ),
        case(
            "a key of another section",
            "fsdp_sharding_strategy: FULL_SHARD\n",
            &["run.yaml:1", "it belongs to the section \"fsdp_config\""],
        ),
        case(
            "a key of the top level",
            "fsdp_config:\n  num_processes: 2\n",
            &["run.yaml:2", "it belongs to the top level of the file"],
        ),
        case("8 bits", "fp8_config: {backend: MSAMP}\n", &["run.yaml:1", "MS-AMP is not available"]),
        case("Megatron", "megatron_lm_config: {tp: 2}\n", &["run.yaml:1", "not available"]),
        case("a password", "tpu_env: [KEY=abc]\n", &["run.yaml:1", "(not shown)"]),
    ];
    assert_eq!(cases.len(), 31);
    check_all(Reader::Settings, "run.yaml", cases);
}

/// Long because it is a table of cases.
#[test]
fn json_that_is_no_deepspeed_configuration() {
    let long = "x".repeat(1_000_000);
    let zero = "\"zero_optimization\": {\"stage\": 3}";
    let cases = vec![
        case("nothing", "", &["ds.json: the DeepSpeed configuration is not a JSON object", "line 1"]),
        case("an open object", "{", &["line 1"]),
        case("a list", "[1]", &["it is [1], not an object"]),
        case("null", "null", &["it is null, not an object"]),
        case("a text of megabytes", format!("\"{long}\""), &["xxx..., not an object"]),
        case("a comma too many", "{\n\"a\": 1,\n}", &["trailing comma", "line 3"]),
        case("a comment", "{\n// no\n}", &["line 2", "comments"]),
        case("single quotes", "{'a': 1}", &["line 1"]),
        case("YAML", "train_batch_size: 2\n", &["line 1"]),
        case("no number", "{\"train_batch_size\": NaN}", &["line 1"]),
        case("infinity", "{\"gradient_clipping\": 1e999}", &["out of range"]),
        case("a key twice", "{\"a\": 1,\n\"a\": 2}", &["\"a\" is written twice", "line 2"]),
        case("a key of megabytes twice", format!("{{\"{0}\": 1, \"{0}\": 2}}", &long[..500_000]), &["written twice"]),
        case("two objects", "{} {}", &["trailing characters"]),
        case("a mark before the text", "\u{feff}{}", &["line 1"]),
        case("bytes that are no text", b"{\"\xff\": 1}".to_vec(), &["UTF-8"]),
        case("zeros", "\0\0", &["line 1"]),
        case("lists in lists", "[".repeat(1_000_000), &["recursion limit"]),
        case("objects in objects", "{\"a\":".repeat(200_000), &["recursion limit"]),
        case("too large", format!("{{\"a\": \"{long}{long}\"}}"), &["1048576 bytes"]),
    ];
    assert_eq!(cases.len(), 20);
    check_all(Reader::DeepSpeed, "ds.json", cases);
    let cases = vec![
        case("a key of megabytes", format!("{{\"{long}\": 1}}"), &["xxx... is not known"]),
        case("a nested key of megabytes", format!("{{\"fp16\": {{\"{long}\": 1}}}}"), &["fp16.xxx", "is not known"]),
        case(
            "keys below a long key",
            format!("{{\"{}\": {{{} \"z\": 1}}}}", &long[..500_000], many(30_000, |k| format!("\"k{k}\": 1,"))),
            &["is not known"],
        ),
        case(
            "too many keys",
            format!("{{{} {zero}}}", many(70_000, |k| format!("\"key{k}\": 1,\n"))),
            &["key0 is not known; remove it (line 1 column", "more"],
        ),
        case(
            "too many slips",
            format!("{{{} {zero}}}", many(40_000, |k| format!("\"train_batch_sie{k}\":1,\n"))),
            &["train_batch_sie0 is not known; train_batch_size is", "more"],
        ),
        case("a name of megabytes", format!("{{\"optimizer\": {{\"type\": \"{long}\"}}}}"), &["optimizer.type: \"xxx"]),
        case(
            "a value of megabytes",
            format!("{{\"zero_optimization\": {{\"stage\": \"{long}\"}}}}"),
            &["stage is \"xxx"],
        ),
        case(
            "no stage",
            "{\n\"zero_optimization\": {\n\"stage\": 7}}",
            &["zero_optimization.stage is 7", "(line 3 column"],
        ),
        case("a stage in quotes", "{\"zero_optimization\": {\"stage\": \"3\"}}", &["stage is \"3\"", "(line 1 column"]),
        case("yes for a section", "{\"zero_optimization\": true}", &["is true, but must be an object (line 1 column"]),
        case("a list for a section", "{\"fp16\": [true]}", &["fp16 is [true], but must be an object"]),
        case(
            "an object for a number",
            "{\"train_batch_size\": {\"a\": 1}}",
            &["train_batch_size is {\"a\":1}, but must be"],
        ),
        case("no rows", "{\"train_batch_size\": 0}", &["train_batch_size is 0"]),
        case("fewer than no rows", "{\"train_batch_size\": -4}", &["train_batch_size is -4"]),
        case("more than 64 bits", "{\"train_batch_size\": 99999999999999999999}", &["train_batch_size is 1e+20"]),
        case("half a row", "{\"train_batch_size\": 1.5}", &["train_batch_size is 1.5"]),
        case(
            "words for betas",
            "{\"optimizer\": {\"type\": \"Adam\", \"params\": {\"betas\": [\"a\", 0.9]}}}",
            &["optimizer.params.betas is [\"a\",0.9], but must be two numbers from 0 to 1 (line 1 column"],
        ),
        case("an optimizer without a name", "{\"optimizer\": {}}", &["optimizer.type is missing", "(line 1 column"]),
        case("no ZeRO", "{}", &["zero_optimization is missing"]),
        case(
            "an auto",
            format!("{{{zero}, \"steps_per_print\": \"auto\"}}"),
            &["steps_per_print: nothing", "(line 1 column"],
        ),
        case("two spellings", "{\"bf16\": {}, \"bfloat16\": {}}", &["bfloat16 is given"]),
        case(
            "two precisions",
            format!("{{{zero},\n\"fp16\": {{\"enabled\": true}},\n\"bf16\": {{\"enabled\": true}}}}"),
            &[
                "fp16.enabled and bf16.enabled contradict",
                "fp16.enabled: line 2 column 10, bf16.enabled: line 3 column 10",
            ],
        ),
        case(
            "no folder on NVMe",
            "{\"zero_optimization\": {\"stage\": 3,\n\"offload_optimizer\": {\"device\": \"nvme\"}}}",
            &["offload_optimizer.nvme_path is missing", "(line 2 column"],
        ),
        case(
            "a product of others",
            format!(
                "{{{zero},\n\"train_batch_size\": 10,\n\"train_micro_batch_size_per_gpu\": 2,\n\
                 \"gradient_accumulation_steps\": 2}}"
            ),
            &["* 2 processes is 8", "train_batch_size: line 2", "gradient_accumulation_steps: line 4"],
        ),
        case(
            "rows that cannot be dealt out",
            format!("{{{zero}, \"train_batch_size\": 9}}"),
            &["train_batch_size is 9, which cannot be divided", "train_batch_size: line 1"],
        ),
        case(
            "a feature",
            "{\"amp\": {\"enabled\": true}}",
            &["amp is {\"enabled\":true}, which is not available", "line 1"],
        ),
        case("a key of the plugin", "{\"deepspeed_gradient_clipping\": 1}", &["gradient_clipping is. Correct"]),
        case("half a key", "{\"stage3_prefetch_bucket\": 1}", &["zero_optimization.stage3_prefetch_bucket_size is"]),
    ];
    assert_eq!(cases.len(), 28);
    check_all(Reader::DeepSpeed, "ds.json", cases);
}

/// What stands where a file is wanted.
fn no_files(folder: &Path) -> Vec<(PathBuf, &'static str)> {
    let [fifo, link, sparse, folder_itself] = ["fifo", "link", "sparse", "folder"].map(|name| folder.join(name));
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    std::os::unix::fs::symlink(&link, &link).unwrap();
    File::create(&sparse).unwrap().set_len(256 << 30).unwrap();
    fs::create_dir(&folder_itself).unwrap();
    vec![
        ("/dev/zero".into(), "it is a device"),
        ("/dev/stdin".into(), "it is a "),
        (fifo, "it is a pipe"),
        (folder_itself, "it is a folder"),
        (sparse, "it has 274877906944 bytes"),
        (link, "symbolic links"),
        (folder.join("absent"), "No such file"),
    ]
}

#[test]
fn what_is_no_file_is_not_read() {
    let folder = tempfile::tempdir().unwrap();
    for (path, words) in no_files(folder.path()) {
        // Whether that is a file is up to who runs the tests.
        if path == Path::new("/dev/stdin") && path.metadata().is_ok_and(|stdin| stdin.is_file()) {
            continue;
        }
        check(Reader::Settings, words, &path, &[words]);
        check(Reader::DeepSpeed, words, &path, &[words, "cannot be read"]);
    }
}

/// A file of the greatest size that is allowed is read within the same bounds.
#[test]
fn a_large_file_that_is_right_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds.json");
    let aio = many(60_000, |k| format!("\"key{k}\":1,"));
    fs::write(&path, format!("{{\"aio\": {{{aio}\"z\": 1}}, \"zero_optimization\": {{\"stage\": 3}}}}")).unwrap();
    let plugin =
        DeepSpeedSettings { hf_ds_config: Some(path.display().to_string().parse().unwrap()), ..Default::default() };
    let read = crate::hostile::outcome("a large file", &path, 0, || plugin.config(&read_file));
    assert!(matches!(read, crate::hostile::Outcome::Read));
}
