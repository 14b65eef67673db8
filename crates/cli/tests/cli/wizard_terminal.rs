//! `accelerate config` with questions, at a terminal: arrow keys, Enter, Esc and Ctrl-C.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Child;

use accelerate_core::config::ConfigFile;
use rstest::rstest;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use crate::support::{accelerate, send};

const DOWN_ENTER: &str = "\x1b[B\r";
const DOWN_DOWN_ENTER: &str = "\x1b[B\x1b[B\r";
const UP_ENTER: &str = "\x1b[A\r";
const ENTER: &str = "\r";
const ESC: &str = "\x1b";
const CONTROL_C: &str = "\x03";

/// What stands below every question while it is open.
const HELP: &str = "Esc to go back]";

/// Whoever waits for longer has found a mistake.
const PATIENCE: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };

/// The command at a terminal, and what has appeared there.
struct Session {
    terminal: File,
    child: Child,
    /// Without colours and movements.
    screen: String,
    /// Up to where it was looked at.
    looked_at: usize,
    escape: String,
    is_cursor_hidden: bool,
}

impl Session {
    fn start(folder: &Path, flags: &[&str]) -> Self {
        let modes = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let near = openpt(modes).unwrap();
        unlockpt(&near).unwrap();
        let far: OwnedFd = ioctl_tiocgptpeer(&near, modes).unwrap();
        tcsetwinsize(&near, Winsize { ws_row: 50, ws_col: 160, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let mut command = accelerate();
        command.arg("config").args(flags).current_dir(folder);
        command.env("HF_HOME", folder.join("hf")).env("CUDA_VISIBLE_DEVICES", "").env("TERM", "xterm");
        command.stdin(far.try_clone().unwrap()).stdout(far.try_clone().unwrap()).stderr(far);
        let child = command.spawn().unwrap();
        Self {
            terminal: near.into(),
            child,
            screen: String::new(),
            looked_at: 0,
            escape: String::new(),
            is_cursor_hidden: false,
        }
    }

    /// Waits until `words` appear, and gives what came before them. `None` if the command ends instead.
    fn wait_for(&mut self, words: &str) -> Option<String> {
        loop {
            let new = &self.screen[self.looked_at..];
            if let Some(at) = new.find(words) {
                let before = new[..at].to_owned();
                self.looked_at += at + words.len();
                return Some(before);
            }
            let mut ready = [PollFd::new(&self.terminal, PollFlags::IN)];
            assert_ne!(poll(&mut ready, Some(&PATIENCE)).unwrap(), 0, "{words:?} does not come:\n{}", self.screen);
            let mut bytes = [0; 4096];
            // The end of a terminal is reported as an error.
            let number = self.terminal.read(&mut bytes).unwrap_or(0);
            if number == 0 {
                return None;
            }
            self.show(&String::from_utf8_lossy(&bytes[..number]));
        }
    }

    fn show(&mut self, text: &str) {
        for letter in text.chars() {
            if letter == '\x1b' || !self.escape.is_empty() {
                // One that is cut off by the next is void, as at every terminal.
                if letter == '\x1b' {
                    self.escape.clear();
                }
                self.escape.push(letter);
                let is_end = self.escape.len() > 2 && letter.is_ascii_alphabetic();
                if is_end {
                    match self.escape.as_str() {
                        "\x1b[?25l" => self.is_cursor_hidden = true,
                        "\x1b[?25h" => self.is_cursor_hidden = false,
                        _ => {}
                    }
                    self.escape.clear();
                }
            } else {
                self.screen.push(letter);
            }
        }
    }

    fn type_keys(&mut self, keys: &str) {
        self.terminal.write_all(keys.as_bytes()).unwrap();
    }

    /// The key of the question that comes next; `None` if the command ends.
    fn question(&mut self) -> Option<String> {
        let page = self.wait_for(HELP)?;
        let (_, line) = page.rsplit_once("? ")?;
        Some(line.split_whitespace().next()?.to_owned())
    }

    /// Types these keys at these questions, one after the other where one comes again, and Enter at all others. Gives the
    /// questions in order and the exit code.
    fn converse(mut self, keys: &[(&str, &str)]) -> Ended {
        let mut waiting: BTreeMap<&str, VecDeque<&str>> = BTreeMap::new();
        for (key, typed) in keys {
            waiting.entry(key).or_default().push_back(typed);
        }
        let mut asked = Vec::new();
        while let Some(key) = self.question() {
            let typed = waiting.get_mut(key.as_str()).and_then(VecDeque::pop_front).unwrap_or(ENTER);
            self.type_keys(typed);
            let left = if typed == ESC { format!("? {key} <canceled>") } else { format!("> {key}") };
            asked.push(key);
            if typed == CONTROL_C || self.wait_for(&left).is_none() {
                break;
            }
        }
        while self.wait_for("\0").is_some() {}
        let left: Vec<_> = waiting.iter().filter(|(_, typed)| !typed.is_empty()).collect();
        assert!(left.is_empty(), "{left:?} were never asked for:\n{}", self.screen);
        Ended { asked, code: self.child.wait().unwrap().code(), screen: std::mem::take(&mut self.screen) }
    }

    /// The terminal is closed; gives the exit code.
    fn hang_up(mut self) -> Option<i32> {
        self.terminal = File::open("/dev/null").unwrap();
        self.child.wait().unwrap().code()
    }
}

/// A test that fails leaves no process behind.
impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Ended {
    asked: Vec<String>,
    code: Option<i32>,
    screen: String,
}

/// Lists are chosen from with the arrow keys, and texts typed.
#[rstest]
#[case::one_process(
    &[("machine_type", ENTER), ("use_cpu", UP_ENTER), ("num_cpu_threads_per_process", "2\r"),
      ("mixed_precision", DOWN_DOWN_ENTER)],
    "program compute_environment machine_type use_cpu num_cpu_threads_per_process dynamo_config.dynamo_backend sharding mixed_precision",
    "distributed_type=NO mixed_precision=bf16 use_cpu=true num_cpu_threads_per_process=2"
)]
#[case::several_machines(
    &[("machine_type", DOWN_ENTER), ("num_machines", "2\r"), ("machine_rank", "1\r"), ("main_process_ip", "ai-1\r"),
      ("debug", UP_ENTER), ("num_processes", "6\r")],
    "program compute_environment machine_type num_machines machine_rank main_process_ip main_process_port debug \
     num_cpu_threads_per_process dynamo_config.dynamo_backend sharding num_processes enable_cpu_affinity mixed_precision",
    "distributed_type=MULTI_CPU debug=true num_processes=6 num_machines=2 machine_rank=1 main_process_ip=ai-1 main_process_port=29500"
)]
#[case::deepspeed_on_disks(
    &[("machine_type", DOWN_DOWN_ENTER), ("sharding", DOWN_ENTER),
      ("deepspeed_config.zero_stage", DOWN_ENTER),
      ("deepspeed_config.offload_optimizer_device", "nvme\r"), ("deepspeed_config.offload_param_device", "nvme\r"),
      ("deepspeed_config.offload_param_nvme_path", "/a\r")],
    "program compute_environment machine_type num_machines debug dynamo_config.dynamo_backend sharding use_deepspeed_config \
     deepspeed_config.zero_stage deepspeed_config.offload_optimizer_device deepspeed_config.offload_param_device \
     deepspeed_config.offload_param_nvme_path deepspeed_config.offload_optimizer_nvme_path \
     deepspeed_config.gradient_accumulation_steps deepspeed_config.gradient_clipping deepspeed_config.zero3_save_16bit_model \
     deepspeed_config.zero3_init_flag num_processes mixed_precision",
    "distributed_type=DEEPSPEED num_processes=1 deepspeed_config.zero_stage=3 deepspeed_config.offload_optimizer_device=nvme \
     deepspeed_config.offload_optimizer_nvme_path=/nvme deepspeed_config.offload_param_nvme_path=/a"
)]
#[case::deepspeed_file_of_a_script_in_python(
    &[("program", DOWN_ENTER), ("sharding", "DEEP\r"), ("use_deepspeed_config", UP_ENTER),
      ("deepspeed_config.deepspeed_config_file", "ds.json\r"), ("deepspeed_config.deepspeed_moe_layer_cls_names", "Experts\r")],
    "program compute_environment machine_type use_cpu dynamo_config.dynamo_backend sharding use_deepspeed_config \
     deepspeed_config.deepspeed_config_file deepspeed_config.zero3_init_flag deepspeed_config.deepspeed_moe_layer_cls_names \
     num_processes",
    "deepspeed_config.hf_ds_config=ds.json deepspeed_config.transformer_moe_cls_names=Experts"
)]
#[case::fsdp_2(
    &[("machine_type", DOWN_ENTER), ("sharding", UP_ENTER),
      ("fsdp_config.fsdp_reshard_after_forward", DOWN_ENTER),
      ("fsdp_config.fsdp_transformer_layer_cls_to_wrap", "encoder.layer.*\r")],
    "program compute_environment machine_type num_machines debug num_cpu_threads_per_process dynamo_config.dynamo_backend sharding \
     fsdp_config.fsdp_version fsdp_config.fsdp_reshard_after_forward fsdp_config.fsdp_offload_params fsdp_config.fsdp_auto_wrap_policy \
     fsdp_config.fsdp_transformer_layer_cls_to_wrap fsdp_config.fsdp_state_dict_type fsdp_config.fsdp_activation_checkpointing \
     use_parallelism_config num_processes enable_cpu_affinity mixed_precision",
    "distributed_type=FSDP fsdp_config.reshard_after_forward=false fsdp_config.transformer_cls_names_to_wrap=encoder.layer.*"
)]
#[case::fsdp_1_of_a_script_in_python(
    &[("program", DOWN_ENTER), ("machine_type", DOWN_DOWN_ENTER), ("sharding", "FSDP\r"),
      ("fsdp_config.fsdp_version", UP_ENTER), ("fsdp_config.fsdp_auto_wrap_policy", DOWN_ENTER),
      ("fsdp_config.fsdp_min_num_params", "1000\r"), ("fsdp_config.fsdp_cpu_ram_efficient_loading", DOWN_ENTER)],
    "program compute_environment machine_type num_machines debug dynamo_config.dynamo_backend sharding fsdp_config.fsdp_version \
     fsdp_config.fsdp_sharding_strategy fsdp_config.fsdp_offload_params fsdp_config.fsdp_auto_wrap_policy fsdp_config.fsdp_min_num_params \
     fsdp_config.fsdp_backward_prefetch fsdp_config.fsdp_state_dict_type fsdp_config.fsdp_forward_prefetch fsdp_config.fsdp_use_orig_params \
     fsdp_config.fsdp_cpu_ram_efficient_loading fsdp_config.fsdp_sync_module_states fsdp_config.fsdp_activation_checkpointing num_processes \
     mixed_precision",
    "fsdp_config.fsdp_version=1 fsdp_config.sharding_strategy=FULL_SHARD fsdp_config.min_num_params=1000 \
     fsdp_config.state_dict_type=FULL_STATE_DICT fsdp_config.cpu_ram_efficient_loading=false"
)]
#[case::dynamo_of_a_script_in_python(
    &[("program", DOWN_ENTER), ("dynamo_config.dynamo_backend", "aot_eager\r"), ("custom_dynamo", UP_ENTER),
      ("dynamo_config.dynamo_mode", DOWN_ENTER)],
    "program compute_environment machine_type use_cpu dynamo_config.dynamo_backend custom_dynamo dynamo_config.dynamo_mode \
     dynamo_config.dynamo_use_fullgraph dynamo_config.dynamo_use_dynamic dynamo_config.dynamo_use_regional_compilation sharding mixed_precision",
    "dynamo_config.backend=aot_eager dynamo_config.mode=reduce-overhead"
)]
fn every_page_can_be_answered_with_keys(#[case] keys: &[(&str, &str)], #[case] asked: &str, #[case] wanted: &str) {
    let folder = tempfile::tempdir().unwrap();
    let ended = Session::start(folder.path(), &["--config_file", "run.yaml"]).converse(keys);
    assert_eq!(ended.code, Some(0), "{}", ended.screen);
    let asked: Vec<_> = asked.split_whitespace().chain(["config_file"]).collect();
    assert_eq!(ended.asked, asked, "{}", ended.screen);
    let text = fs::read_to_string(folder.path().join("run.yaml")).unwrap();
    let said = ConfigFile::read(&text, Path::new("run.yaml")).unwrap().into_partial();
    for pair in wanted.split_whitespace() {
        let (path, value) = pair.split_once('=').unwrap();
        let setting = accelerate_core::config::settings().find(|setting| setting.path == path).unwrap();
        assert_eq!(said.text(setting).as_deref(), Some(value), "{path} in\n{text}");
    }
}

#[test]
fn escape_goes_back_one_question() {
    let folder = tempfile::tempdir().unwrap();
    let keys = [
        ("program", ESC),
        ("machine_type", "MULTI_CPU\r"),
        ("num_machines", ESC),
        ("machine_type", ENTER),
        ("mixed_precision", ENTER),
        ("config_file", ESC),
        ("mixed_precision", "bf16\r"),
    ];
    let ended = Session::start(folder.path(), &["--config_file", "run.yaml"]).converse(&keys);
    assert_eq!(ended.code, Some(0), "{}", ended.screen);
    assert!(ended.screen.contains("this is the first question"), "{}", ended.screen);
    let wanted = "program program compute_environment machine_type num_machines machine_type use_cpu dynamo_config.dynamo_backend sharding \
                  mixed_precision config_file mixed_precision config_file";
    assert_eq!(ended.asked.join(" "), wanted);
    assert!(fs::read_to_string(folder.path().join("run.yaml")).unwrap().contains("mixed_precision: bf16\n"));
}

/// A list shows more, finds by number and goes back; what cannot be had is not in it.
#[test]
fn a_list_takes_what_is_typed_and_tells_what_is_not_available() {
    let folder = tempfile::tempdir().unwrap();
    let keys = [
        ("machine_type", "?\r"),
        ("machine_type", "back\r"),
        ("machine_type", "2\r"),
        ("sharding", "3\r"),
        ("fsdp_config.fsdp_version", "?\r"),
        ("config_file", "/\r"),
        ("config_file", "?\r"),
        ("config_file", "back\r"),
    ];
    let ended = Session::start(folder.path(), &["--config_file", "run.yaml"]).converse(&keys);
    assert_eq!(ended.code, Some(0), "{}", ended.screen);
    assert!(
        ended
            .asked
            .join(" ")
            .starts_with("program compute_environment machine_type machine_type compute_environment machine_type")
    );
    for words in [
        "Not available: AMAZON_SAGEMAKER (Amazon SageMaker is not available; write a file for LOCAL_MACHINE",
        "Not available: TPU (libtorch has no TPUs",
        "There is no more to say about it.",
        "They differ in names only.",
        "Not available: MEGATRON_LM (Megatron-LM is not available; choose FSDP or DEEPSPEED)",
        "Not available: cudagraphs (there is no NVIDIA GPU to capture graphs on",
        "Not taken: / is a folder",
        "JSON if the name ends in .json",
    ] {
        assert!(ended.screen.contains(words), "{words:?} is missing in\n{}", ended.screen);
    }
    let written = fs::read_to_string(folder.path().join("run.yaml")).unwrap();
    assert!(written.contains("distributed_type: FSDP\n") && written.contains("use_cpu: true\n"), "{written}");
}

/// Whoever ends it from outside finds the terminal as it was: keys are shown, lines are lines, and there is a cursor.
#[rstest]
#[case(Signal::TERM, 143)]
#[case(Signal::HUP, 129)]
#[case(Signal::INT, 130)]
#[case(Signal::QUIT, 131)]
fn a_signal_leaves_the_terminal_as_it_was(#[case] signal: Signal, #[case] code: i32) {
    let folder = tempfile::tempdir().unwrap();
    let mut session = Session::start(folder.path(), &[]);
    let modes = |session: &Session| tcgetattr(&session.terminal).unwrap().local_modes;
    let before = modes(&session);
    assert!(before.contains(LocalModes::ICANON | LocalModes::ECHO));
    assert_eq!(session.question().as_deref(), Some("program"));
    assert!(!modes(&session).contains(LocalModes::ICANON), "a menu is open");
    send(&session.child, signal);
    assert_eq!(session.child.wait().unwrap().code(), Some(code));
    assert_eq!(modes(&session), before);
    while session.wait_for("\0").is_some() {}
    assert!(!session.is_cursor_hidden, "{}", session.screen);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_file_that_is_there_is_replaced_only_after_a_yes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.yaml");
    fs::write(&path, "debug: true\n").unwrap();
    let keys = [("overwrite", ENTER), ("overwrite", ESC), ("overwrite", UP_ENTER)];
    let ended = Session::start(folder.path(), &["--config_file", "run.yaml"]).converse(&keys);
    assert_eq!(ended.code, Some(0), "{}", ended.screen);
    assert!(ended.asked.ends_with(&["overwrite", "config_file", "overwrite"].map(str::to_owned)), "{:?}", ended.asked);
    assert!(fs::read_to_string(&path).unwrap().contains("distributed_type"));
}

/// At the first question, in a menu, at a text, and at the last question.
#[rstest]
#[case("program")]
#[case("mixed_precision")]
#[case("config_file")]
#[case("overwrite")]
fn control_c_ends_with_130_and_writes_nothing(#[case] key: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.yaml");
    fs::write(&path, "debug: true\n").unwrap();
    let ended = Session::start(folder.path(), &["--config_file", "run.yaml"]).converse(&[(key, CONTROL_C)]);
    assert_eq!(ended.code, Some(130), "{}", ended.screen);
    assert!(ended.screen.contains("nothing was written"), "{}", ended.screen);
    assert_eq!(fs::read_to_string(&path).unwrap(), "debug: true\n");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// The test's own process has another terminal, so no signal tells of it.
#[test]
fn a_terminal_that_has_gone_ends_the_questions() {
    let folder = tempfile::tempdir().unwrap();
    let mut session = Session::start(folder.path(), &[]);
    assert_eq!(session.question().as_deref(), Some("program"));
    assert_eq!(session.hang_up(), Some(129));
}
