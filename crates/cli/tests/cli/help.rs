//! What `accelerate launch -h` shows, alone and beside the flags that choose something.

use rstest::rstest;

use crate::support::{accelerate, finished};

fn help(words: &str) -> String {
    let mut command = accelerate();
    command.args(words.split_whitespace()).env("COLUMNS", "100");
    let ended = finished(command);
    ended.expect(0, &[]);
    ended.stdout
}

/// Words of help that stand for a group of flags.
const GROUPS: [(&str, &str); 7] = [
    ("machines", "--same_network"),
    ("clusters", "--sbatch"),
    ("fsdp", "--fsdp_sharding_strategy"),
    ("deepspeed", "--zero3_init_flag"),
    ("dynamo", "--dynamo_use_fullgraph"),
    ("fp8", "--fp8_margin"),
    ("tpu", "--tpu_use_sudo"),
];

#[rstest]
#[case::alone("launch -h", &[])]
#[case::explained("launch --help", &[])]
#[case::by_name("help launch", &[])]
#[case("launch --cpu -h", &["machines"])]
#[case("launch --multi_gpu -h", &["machines"])]
#[case("launch --multi-gpu --help", &["machines"])]
#[case("launch --slurm -h", &["clusters"])]
#[case("launch --emit kubernetes --help", &["clusters"])]
#[case("launch --use_fsdp -h", &["fsdp"])]
#[case("launch --use_deepspeed --help", &["deepspeed"])]
#[case("launch --dynamo_backend=no -h", &["dynamo"])]
#[case("launch --fp8_backend ao -h", &["fp8"])]
#[case("launch --tpu -h", &["tpu"])]
#[case::several("launch --use-fsdp --multi_gpu -h", &["machines", "fsdp"])]
fn help_shows_the_flags_that_matter(#[case] words: &str, #[case] wanted: &[&str]) {
    let help = help(words);
    let of_machines = ["--num_machines", "--machine_rank", "--main_process_ip", "--main_process_port"];
    let others = [
        "--num_processes",
        "--cpu",
        "--mixed_precision",
        "--use_fsdp",
        "--config_file",
        "--dry_run",
        "--max_restarts",
        "--grace_period",
    ];
    for always in of_machines.iter().chain(&others) {
        assert!(help.contains(always), "{always} in\n{help}");
    }
    let text = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains("or with -m a module"), "{help}");
    let shown: Vec<_> = GROUPS.iter().filter(|(_, flag)| help.contains(flag)).map(|(group, _)| *group).collect();
    assert_eq!(shown, wanted, "{help}");
    for way in ["--num_machines 2 -h", "--slurm -h", "--use_fsdp -h", "--use_deepspeed -h", "--tpu -h"] {
        assert!(help.contains(&format!("accelerate launch {way}")), "{way} in\n{help}");
    }
}

/// Others take all flags of `launch`, too; most people want none of them.
#[rstest]
#[case("test", "--checks")]
#[case("config explain", "--all")]
fn help_of_commands_that_take_settings_is_short_and_says_where_the_others_are(#[case] words: &str, #[case] own: &str) {
    let [short, long] = ["-h", "--help"].map(|flag| help(&format!("{words} {flag}")));
    assert!(short.lines().count() <= 40, "{short}");
    for flag in ["--num_processes", "--config_file", own] {
        assert!(short.contains(flag) && long.contains(flag), "{flag} in\n{short}");
    }
    assert!(short.contains("--help shows all of them"), "{short}");
    for (_, flag) in GROUPS.iter().filter(|(group, _)| !["clusters", "fp8", "tpu"].contains(group)) {
        assert!(long.contains(flag) && !short.contains(flag), "{flag}");
    }
}

/// A launch takes one process where there is no GPU, a test two.
#[test]
fn the_number_of_processes_is_explained_as_it_is_chosen() {
    for (command, wanted) in [("launch", "visible; one if there is none"), ("test", "visible; two if there is none")] {
        let text = help(&format!("{command} --help")).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains(wanted), "{command}: {text}");
    }
}

/// Lines that somebody may copy.
fn commands(words: &[&str], columns: &str) -> Vec<String> {
    let mut command = accelerate();
    command.args(words).arg("--help").env("COLUMNS", columns);
    let help = finished(command).stdout;
    assert!(!help.contains('\u{a0}'), "{help}");
    let is_command = |line: &&str| line.starts_with(' ') && line.trim_start().starts_with("accelerate ");
    help.lines().filter(is_command).map(str::to_owned).collect()
}

#[rstest]
#[case(&["launch"], 15)]
#[case(&["test"], 2)]
#[case(&["config"], 5)]
#[case(&["config", "explain"], 4)]
#[case(&["completions"], 3)]
#[case(&["man"], 1)]
#[case(&["env"], 2)]
#[case(&["tpu-config"], 2)]
fn examples_can_be_copied_from_a_narrow_terminal(#[case] words: &[&str], #[case] at_least: usize) {
    let [narrow, wide] = ["40", "300"].map(|columns| commands(words, columns));
    assert!(narrow.len() >= at_least, "{narrow:?}");
    assert_eq!(narrow, wide);
}

/// As of the reference, whose groups are shown beside the flag that chooses one.
#[rstest]
#[case("launch --use_megatron_lm -h", 0)]
#[case("launch --use_mps_device --use_megatron_lm --help", 0)]
#[case("launch --use_megatron_lm train -h", 2)]
fn help_is_given_beside_what_is_refused(#[case] words: &str, #[case] code: i32) {
    let mut command = accelerate();
    command.args(words.split(' '));
    let found = finished(command);
    found.expect(code, &[]);
    assert_eq!(found.stdout.contains("Usage: accelerate launch"), code == 0, "{found:?}");
}

#[test]
fn what_is_refused_says_so_where_it_is_asked_for() {
    let short = help("launch --tpu -h").split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(short.contains("Train on a TPU. Refused: libtorch without Python has no TPU"), "{short}");
    let long = help("launch --fp8_backend ao --help").split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(long.contains("for others it is refused: MS-AMP is not available"), "{long}");
}

/// What comes after the program is the program's.
#[test]
fn help_of_a_program_is_its_own() {
    let mut command = accelerate();
    command.args(["launch", "--num_processes", "1", "echo", "--use_fsdp", "-h"]);
    assert_eq!(finished(command).stdout, "--use_fsdp -h\n");
}

#[test]
fn a_flag_that_nobody_knows_gets_no_wrong_tip() {
    for (flag, tip) in [("--nonsense", None), ("--num_proceses", Some("--num_processes"))] {
        let mut command = accelerate();
        command.args(["launch", flag, "true"]);
        let ended = finished(command);
        ended.expect(2, &[flag]);
        assert!(!ended.stderr.contains("'-- "), "{}", ended.stderr);
        assert_eq!(ended.stderr.contains("tip:"), tip.is_some(), "{}", ended.stderr);
        assert!(tip.is_none_or(|tip| ended.stderr.contains(tip)), "{}", ended.stderr);
    }
}
