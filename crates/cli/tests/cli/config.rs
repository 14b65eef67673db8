//! Configuration files: the default one at launch, and the commands that write, check, explain and convert files.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rstest::rstest;
use serde_json::Value;

use crate::support::{Finished, accelerate, finished};

/// A folder of a test with a home for Accelerate's files.
struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// With this text in the default file of this name.
    fn with(name: &str, text: &str) -> Self {
        let home = Self::new();
        fs::create_dir(home.path("accelerate")).unwrap();
        fs::write(home.path("accelerate").join(name), text).unwrap();
        home
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn default_file(&self) -> PathBuf {
        self.path("accelerate/default_config.yaml")
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        path
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = accelerate();
        command.args(words).env("HF_HOME", self.0.path());
        command
    }

    fn run(&self, words: &[&str]) -> Finished {
        finished(self.command(words))
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

const SAY: [&str; 6] = ["launch", "--no_prefix", "--num_cpu_threads_per_process", "1", "sh", "-c"];
const PRECISION: &str = "echo $ACCELERATE_MIXED_PRECISION $ACCELERATE_USE_CPU";

#[rstest]
#[case("default_config.yaml", "mixed_precision: bf16\nuse_cpu: true\nnum_processes: 2\n")]
#[case("default_config.json", r#"{"mixed_precision": "bf16", "use_cpu": true, "num_processes": 2}"#)]
fn a_launch_without_a_file_takes_the_default_one_and_says_so(#[case] name: &str, #[case] file: &str) {
    let home = Home::with(name, file);
    let said = home.run(&[&SAY[..], &[PRECISION]].concat());
    said.expect(0, &[&format!("settings of {} hold", home.path("accelerate").join(name).display())]);
    assert_eq!((said.sorted_stdout(), said.stderr.lines().count()), (vec!["bf16 true"; 2], 1), "{said:?}");
    let mut quiet = home.command(&[&["launch", "--quiet"], &SAY[1..], &[PRECISION]].concat());
    quiet.env("ACCELERATE_USE_CPU", "false");
    let quiet = finished(quiet);
    assert_eq!((quiet.sorted_stdout(), quiet.stderr.as_str()), (vec!["bf16 false"; 2], ""));
}

/// A flag goes before a variable, that before the file, and --cpu leaves the rest of the file in force.
#[test]
fn the_default_file_gives_way_to_flags_and_variables_setting_by_setting() {
    let home = Home::with("default_config.yaml", "mixed_precision: bf16\nnum_processes: 3\ndebug: true\n");
    let flags = ["launch", "--cpu", "--no_prefix", "--num_cpu_threads_per_process", "1", "sh", "-c"];
    let mut command =
        home.command(&[&flags[..], &["echo $ACCELERATE_MIXED_PRECISION $ACCELERATE_DEBUG_MODE"]].concat());
    command.env("ACCELERATE_NUM_PROCESSES", "2").env("ACCELERATE_MIXED_PRECISION", "fp16");
    assert_eq!(finished(command).sorted_stdout(), ["fp16 true"; 2]);
}

#[test]
fn a_file_that_is_named_takes_the_place_of_the_default_one() {
    let home = Home::with("default_config.yaml", "no such key: 1\n");
    let named = home.file("run.yaml", "mixed_precision: fp16\nnum_processes: 1\n");
    let said = home.run(&["launch", "--config_file", text(&named), "sh", "-c", PRECISION]);
    assert_eq!((said.code, said.stdout.as_str(), said.stderr.as_str()), (Some(0), "fp16 False\n", ""));
    home.run(&[&SAY[..], &[PRECISION]].concat()).expect(2, &["default_config.yaml:1:1: there is no key"]);
}

#[test]
fn what_is_in_the_place_of_the_default_file_is_not_waited_for() {
    let home = Home::new();
    fs::create_dir_all(home.default_file()).unwrap();
    home.run(&[&SAY[..], &["echo started"]].concat())
        .expect(2, &["default_config.yaml cannot be read: it is a folder"]);
    fs::remove_dir(home.default_file()).unwrap();
    assert!(Command::new("mkfifo").arg(home.default_file()).status().unwrap().success());
    home.run(&["config", "validate"]).expect(1, &["it is a pipe"]);
    home.run(&["config", "default", "--overwrite"])
        .expect(1, &["is a pipe, and a configuration is written to a regular"]);
}

#[test]
fn a_default_file_is_written_once() {
    let home = Home::new();
    home.run(&["config", "default", "--mixed-precision", "bf16"]).expect(0, &["default_config.yaml says"]);
    let written = fs::read_to_string(home.default_file()).unwrap();
    assert!(written.starts_with("compute_environment: LOCAL_MACHINE\ndistributed_type: "), "{written}");
    assert!(written.contains("\nmixed_precision: bf16\nnum_processes: "), "{written}");
    // As with others' files, everybody may read it whom the umask lets.
    assert_ne!(fs::metadata(home.default_file()).unwrap().permissions().mode() & 0o077, 0);
    home.run(&["config", "default"]).expect(1, &["exists already, and stays as it is", "--overwrite"]);
    assert_eq!(fs::read_to_string(home.default_file()).unwrap(), written);
    home.run(&["config", "default", "--overwrite"]).expect(0, &[]);
    assert!(fs::read_to_string(home.default_file()).unwrap().contains("mixed_precision: \"no\"\n"));
    home.run(&["config", "validate"]).expect(0, &[]);
    assert_eq!(fs::read_dir(home.path("accelerate")).unwrap().count(), 1, "nothing else is left there");
}

#[rstest]
#[case(&["--mixed_precision", "fp7"], 2, "fp7")]
#[case(&["--config_file", "/dev/null"], 1, "is a device")]
#[case(&["--config_file", "/proc/nowhere/a.yaml"], 1, "/proc/nowhere/a.yaml cannot be written")]
fn what_cannot_be_written_is_told(#[case] flags: &[&str], #[case] code: i32, #[case] words: &str) {
    Home::new().run(&[&["config", "default", "--overwrite"], flags].concat()).expect(code, &[words]);
}

#[test]
fn without_a_home_there_is_no_default_file() {
    let mut command = accelerate();
    command.args(["config", "default"]);
    for name in ["HF_HOME", "XDG_CACHE_HOME", "HOME"] {
        command.env_remove(name);
    }
    finished(command).expect(1, &["none of HF_HOME, XDG_CACHE_HOME and HOME is set", "--config_file"]);
    Home::new()
        .run(&["config", "update"])
        .expect(1, &["there is no default configuration file", "accelerate config default"]);
}

#[test]
fn a_file_in_json_is_written_in_json() {
    let home = Home::new();
    let path = home.path("deep/er/run.json");
    home.run(&["config", "default", "--config_file", text(&path)]).expect(0, &[]);
    let written: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(written["compute_environment"], "LOCAL_MACHINE");
    assert!(written["num_processes"].is_number() && written["use_cpu"].is_boolean());
}

#[test]
fn an_old_file_is_brought_up_to_date_and_every_change_is_named() {
    let home = Home::new();
    let path = home.file(
        "old.yaml",
        "# ours\ncompute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfp16: true\nmachine_rank: 0\n\
         main_process_ip: null\nfsdp_config:\n  sharding_strategy: 2\n  fsdp_transformer_layer_cls_to_wrap: A,B\n",
    );
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let link = home.path("link.yaml");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let said = home.run(&["config", "update", "--config_file", text(&link)]);
    said.expect(0, &["up to date now", "- fp16: true", "+ mixed_precision: fp16", "- main_process_ip: null"]);
    assert!(said.stderr.contains("+ fsdp_config.fsdp_sharding_strategy: SHARD_GRAD_OP"), "{}", said.stderr);
    let wanted = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  \
                  fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_transformer_layer_cls_to_wrap: \"A,B\"\n\
                  machine_rank: 0\nmixed_precision: fp16\n";
    assert_eq!(fs::read_to_string(&path).unwrap(), wanted);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(link.is_symlink());
    home.run(&["config", "update", "--config_file", text(&path)]).expect(0, &["is up to date, and stays as it is"]);
    let wrong = home.file("wrong.yaml", "fp16: perhaps\n");
    home.run(&["config", "update", "--config_file", text(&wrong)]).expect(1, &["wrong.yaml:1:7: fp16 is \"perhaps\""]);
    assert_eq!(fs::read_to_string(wrong).unwrap(), "fp16: perhaps\n");
}

/// Python Accelerate reads no file without a type of machines.
#[test]
fn a_file_without_a_type_of_machines_gets_that_of_this_one() {
    let home = Home::new();
    let path = home.file("run.yaml", "num_processes: 2\n");
    let mut command = home.command(&["config", "update", "--config_file", text(&path)]);
    command.env("CUDA_VISIBLE_DEVICES", "");
    finished(command).expect(0, &["+ distributed_type: MULTI_CPU", "+ use_cpu: true"]);
    let validated = home.run(&["config", "validate", text(&path)]);
    assert!(validated.stdout.contains("0 errors, 0 warnings"), "{}", validated.stdout);
}

/// It is up to date, and still of no use here.
#[test]
fn an_update_says_that_a_file_cannot_be_used() {
    let home = Home::new();
    let path =
        home.file("run.yaml", "distributed_type: MULTI_CPU\nnum_processes: 2\nmpirun_config: {mpirun_hostfile: h}\n");
    let said = home.run(&["config", "update", "--config_file", text(&path)]);
    said.expect(0, &["accelerate config validate says why"]);
    home.run(&["config", "validate", text(&path)]).expect(1, &[]);
}

/// YAML has commas after the last value, and JSON has none.
#[test]
fn a_file_that_python_cannot_read_is_mentioned() {
    let home = Home::new();
    for (name, written, is_fine) in [
        ("run.json", "{\"num_processes\": 2,}", false),
        ("run.json", "{\"num_processes\": 2}", true),
        ("run.yaml", "{\"num_processes\": 2,}", true),
    ] {
        let path = home.file(name, written);
        let said = home.run(&["config", "validate", text(&path)]);
        let is_mentioned = said.stdout.contains("warning: Python Accelerate does not read this file");
        assert_eq!((said.code, is_mentioned), (Some(0), !is_fine), "{written} {}", said.stdout);
    }
}

#[test]
fn all_mistakes_of_a_file_are_listed_with_their_lines() {
    let home = Home::new();
    let path = home.file(
        "run.yaml",
        "num_proceses: 2\nmixed_precision: bf61\ntpu_name: a\nmonitor_interval: 3\nfsdp_config: {fsdp_version: x}\n",
    );
    let said = home.run(&["config", "validate", text(&path)]);
    assert_eq!((said.code, said.stderr.as_str()), (Some(1), ""));
    let lines: Vec<_> = said.stdout.lines().collect();
    for (line, words) in lines.iter().zip([
        "run.yaml:1:1: there is no key \"num_proceses\" in a configuration file; the nearest one is \"num_processes\"",
        "run.yaml:2:18: mixed_precision is \"bf61\", but must be one of no, fp16, bf16",
        "run.yaml:5:29: fsdp_version is \"x\"",
        "tpu_name is a (",
        "warning: monitor_interval is 3 (",
        "run.yaml: 4 errors, 1 warning",
    ]) {
        assert!(line.contains(words), "{words} in {line}");
    }
    assert_eq!(lines.len(), 6, "{lines:#?}");
}

#[rstest]
#[case::syntax("a: [1\n", 1, "error: ")]
#[case::not_a_mapping("- 1\n", 1, "must be a mapping of keys to values")]
#[case::empty("", 0, "0 errors, 0 warnings")]
#[case::contradiction("distributed_type: \"NO\"\nnum_processes: 2\n", 1, "run.yaml:1:1) and num_processes 2 (")]
#[case::unused("num_processes: 1\nfsdp_config: {fsdp_version: 2}\n", 0, "warning: fsdp_config.fsdp_version is 2 (")]
#[case::for_python("dynamo_config: {dynamo_backend: INDUCTOR}\n", 1, "note: a program in Python may be launched")]
#[case::unused_by_name(
    "fsdp_config: {fsdp_version: 2, offload_params: true}\n",
    0,
    "fsdp_config.fsdp_offload_params is true ("
)]
#[case::a_gpu_that_is_not_there("distributed_type: MULTI_GPU\n", 0, "warning: distributed_type MULTI_GPU (")]
#[case::a_class_of_python(
    "distributed_type: FSDP\nfsdp_config: {fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, transformer_layer_cls_to_wrap: BertLayer}\n",
    0,
    "fails where its model has none of that name"
)]
#[case::sagemaker("compute_environment: AMAZON_SAGEMAKER\n", 1, "Amazon SageMaker is not available")]
fn what_validate_says_of(#[case] file: &str, #[case] code: i32, #[case] words: &str) {
    let home = Home::new();
    let path = home.file("run.yaml", file);
    let said = home.run(&["config", "validate", text(&path)]);
    assert_eq!(said.code, Some(code), "{said:?}");
    assert!(said.stdout.contains(words), "{said:?}");
}

/// One that is wrong, or is not there, is no reason to pass over the others.
#[test]
fn several_files_are_all_looked_at() {
    let home = Home::new();
    let (wrong, fine) = (home.file("wrong.yaml", "num_proceses: 2\n"), home.file("fine.yaml", "num_processes: 2\n"));
    let validate = |files: &[&str]| home.run(&[&["config", "validate"], files].concat());
    let said = validate(&[text(&wrong), "none.yaml", text(&fine)]);
    said.expect(1, &["accelerate config: error: there is no configuration file none.yaml"]);
    assert!(said.stdout.contains("wrong.yaml: 1 error,") && said.stdout.contains("fine.yaml: 0 errors,"), "{said:?}");
    validate(&[text(&fine), text(&wrong)]).expect(1, &[]);
    validate(&[text(&fine), text(&fine)]).expect(0, &[]);
}

#[test]
fn explain_shows_who_said_what_and_what_that_goes_before() {
    let home = Home::with("default_config.yaml", "num_processes: 4\nmixed_precision: fp16\ntpu_env: null\n");
    let mut command = home.command(&["config", "explain", "--num-processes", "2"]);
    command.env("ACCELERATE_NUM_PROCESSES", "3");
    let said = finished(command);
    said.expect(0, &[]);
    let line = |path: &str| said.stdout.lines().find(|line| line.starts_with(path)).unwrap_or_default().to_owned();
    let file = home.default_file();
    let wanted = format!(
        "2     flag --num_processes, goes before 3 (environment variable ACCELERATE_NUM_PROCESSES) and 4 ({}:1:1)",
        file.display()
    );
    assert!(line("num_processes").ends_with(&wanted), "{}", said.stdout);
    assert!(line("mixed_precision").ends_with(&format!("fp16  {}:2:1", file.display())), "{}", said.stdout);
    assert!(said.stdout.starts_with(&format!("configuration file: {} (the default one)\n", file.display())));
    assert!(said.stdout.contains(" settings have their defaults; --all shows them, too.\n"));
    assert_eq!(said.stdout.lines().count(), 6, "{}", said.stdout);
    let all = home.run(&["config", "explain", "--all"]).stdout;
    assert!(all.lines().count() > 150 && all.contains("main_process_ip ") && !all.contains("--all"), "{all}");
}

#[test]
fn explain_in_json_has_every_setting() {
    let home = Home::new();
    let path = home.file("run.yaml", "num_processes: 4\nfsdp_config: {fsdp_version: 2}\ndistributed_type: FSDP\n");
    let mut command =
        home.command(&["config", "explain", "--json", "--config_file", text(&path), "--num_processes=2", "train.py"]);
    command.env("ACCELERATE_CONFIG_ORIGINS", "{}").env("ACCELERATE_DEBUG_MODE", "yes");
    let said = finished(command);
    said.expect(0, &[]);
    let all: Value = serde_json::from_str(&said.stdout).unwrap();
    assert_eq!(all["config_file"], serde_json::json!({"path": text(&path), "is_default": false}));
    assert_eq!(all["num_processes"], 2);
    let one = |name: &str| {
        all["settings"].as_array().unwrap().iter().find(|setting| setting["setting"] == name).unwrap().clone()
    };
    let wanted = serde_json::json!({
        "setting": "num_processes", "value": 2, "default": null,
        "origin": {"kind": "flag", "name": "--num_processes"},
        "overridden": [{"value": 4, "origin": {"kind": "file", "path": text(&path), "line": 1, "column": 1}}],
    });
    assert_eq!(one("num_processes"), wanted);
    assert_eq!(one("debug")["origin"], serde_json::json!({"kind": "variable", "name": "ACCELERATE_DEBUG_MODE"}));
    assert_eq!(one("debug")["value"], true);
    assert_eq!(one("mixed_precision")["origin"], serde_json::json!({"kind": "default"}));
    assert_eq!(one("fsdp_config.fsdp_version")["value"], 2);
    assert!(all["settings"].as_array().unwrap().len() > 150);
}

#[test]
fn explain_fails_as_the_launch_would() {
    let home = Home::new();
    home.run(&["config", "explain", "--zero_stage", "2"])
        .expect(1, &["--zero_stage 2 has no effect without --use_deepspeed"]);
    home.run(&["config", "explain", "--num_processes", "two"]).expect(2, &["two"]);
    let inductor = ["config", "explain", "--dynamo_backend", "inductor"];
    home.run(&inductor).expect(1, &["needs Python"]);
    home.run(&[&inductor[..], &["train.py", "--num_processes"]].concat()).expect(0, &[]);
}

#[test]
fn the_environment_report_shows_the_default_file_without_secrets() {
    let home = Home::with(
        "default_config.yaml",
        "num_processes: 4\ntpu_env: [TOKEN=hf_secret]\ncommands: [hf_secret]\nx: 1\n",
    );
    let report = home.run(&["env"]);
    report.expect(0, &[]);
    let wanted = [
        format!("- configuration file: {} (the default one)", home.default_file().display()),
        "  num_processes: 4".to_owned(),
        "  tpu_env: (not shown)".to_owned(),
        "  commands: (not shown)".to_owned(),
    ];
    assert!(report.stdout.contains(&wanted.join("\n")), "{}", report.stdout);
    assert!(report.stdout.contains("default_config.yaml:4:1: there is no key \"x\""), "{}", report.stdout);
    assert!(!report.stdout.contains("hf_secret"));
    let named = home.file("run.yaml", "debug: true\n");
    assert!(home.run(&["env", "--config-file", text(&named)]).stdout.ends_with("run.yaml\n  debug: true\n"));
    assert!(Home::new().run(&["env"]).stdout.ends_with("- configuration file: none\n"));
}

const VERSION_1: &str = "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n  \
                         fsdp_backward_prefetch: BACKWARD_PRE\n  fsdp_offload_params: false\ntpu_env: []\n";
const VERSION_2: &str = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  \
                         fsdp_offload_params: false\n  fsdp_reshard_after_forward: false\n  fsdp_version: 2\n";

#[test]
fn a_file_is_converted_to_version_2_where_it_is_asked_for() {
    let home = Home::new();
    let [input, output] = [home.file("1.yaml", VERSION_1), home.path("2.yaml")];
    let (input, output) = (text(&input), text(&output));
    home.run(&["to-fsdp2", "--config_file", input]).expect(2, &["--overwrite", "--output_file"]);
    let to_output = ["to-fsdp2", "--config-file", input, "--output-file", output];
    home.run(&to_output).expect(
        0,
        &[
            "backward_prefetch BACKWARD_PRE is left out",
            "2.yaml is written; beside the order of its keys it differs by:",
            "- fsdp_config.fsdp_backward_prefetch: BACKWARD_PRE",
            "- tpu_env: []",
            "+ fsdp_config.fsdp_version: 2",
        ],
    );
    assert_eq!(fs::read_to_string(output).unwrap(), VERSION_2);
    assert_eq!(fs::read_to_string(input).unwrap(), VERSION_1);
    home.run(&to_output).expect(1, &["2.yaml exists already", "--overwrite"]);
    home.run(&[&to_output[..], &["--overwrite"]].concat()).expect(0, &[]);
    home.run(&["to-fsdp2", "--config_file", input, "--overwrite"]).expect(0, &["1.yaml is written"]);
    assert_eq!(fs::read_to_string(input).unwrap(), VERSION_2);
    home.run(&["to-fsdp2", "--config_file", input, "--overwrite"]).expect(0, &["is 2 already"]);
}

#[rstest]
#[case("fsdp_config: {fsdp_sharding_strategy: OPTIMIZER_STATE}\n", "version 2 has no word for it")]
#[case("fsdp_config: {fsdp_sharding: 1}\n", "run.yaml:1:15: there is no key \"fsdp_sharding\"")]
fn what_cannot_be_converted_stays_as_it_is(#[case] file: &str, #[case] words: &str) {
    let home = Home::new();
    let path = home.file("run.yaml", file);
    home.run(&["to-fsdp2", "--config_file", text(&path), "--overwrite"]).expect(1, &[words]);
    assert_eq!(fs::read_to_string(&path).unwrap(), file);
    home.run(&["to-fsdp2", "--config_file", text(&home.path("none.yaml")), "--overwrite"])
        .expect(1, &["there is no configuration file", "none.yaml"]);
}

/// Explain calls settings as the file does, with the section, and tells what changes nothing.
#[test]
fn explain_calls_settings_as_files_do() {
    let home = Home::new();
    let text_of_file = "distributed_type: FSDP\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  \
                        fsdp_transformer_layer_cls_to_wrap: h.*\ngpu_ids: \"0\"\ngrad_scaler_config: {init_scale: 2.0}\n";
    let path = home.file("run.yaml", text_of_file);
    let mut command = home.command(&["config", "explain", "--config_file", text(&path)]);
    command.env("CUDA_VISIBLE_DEVICES", "");
    let said = finished(command).stdout;
    let line = "fsdp_config.fsdp_transformer_layer_cls_to_wrap  h.*";
    assert!(said.lines().any(|said| said.starts_with(line) && said.ends_with("run.yaml:4:3")), "{said}");
    assert!(!said.contains("transformer_cls_names"), "{said}");
    assert!(said.contains("warning: grad_scaler_config.init_scale is 2 ("), "{said}");
    let json = home.run(&["config", "explain", "--json", "--config_file", text(&path)]).stdout;
    assert!(json.contains("\"setting\": \"fsdp_config.fsdp_transformer_layer_cls_to_wrap\""), "{json}");
}

#[test]
fn a_file_in_the_place_of_the_program_is_not_explained_as_another_one() {
    let mut command = accelerate();
    command.args(["config", "explain", "run.yaml"]);
    finished(command).expect(1, &["run.yaml stands where a program does", "--config_file run.yaml"]);
}

/// All that a launch computes in.
#[test]
fn the_default_file_may_say_any_precision() {
    let folder = tempfile::tempdir().unwrap();
    for precision in ["no", "fp16", "bf16", "fp8"] {
        let path = folder.path().join(format!("{precision}.yaml"));
        let mut command = accelerate();
        command.args(["config", "default", "--mixed_precision", precision, "--config_file"]).arg(&path);
        finished(command).expect(0, &[]);
        assert!(std::fs::read_to_string(&path).unwrap().contains(precision));
        let mut command = accelerate();
        command.args(["config", "validate"]).arg(&path);
        finished(command).expect(0, &[]);
    }
    let mut command = accelerate();
    command.args(["launch", "--help"]);
    let help = finished(command).stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains("no, fp16, bf16, fp8."), "{help}");
}
