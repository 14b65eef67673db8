//! What Python Accelerate's launcher says unasked: programs in Python are told it, and programs in Rust hear nothing.

use accelerate_core::config::{
    ConfigFile, FullyShardedDataParallelPlugin, PartialRunConfig, RunConfig, Sources, settings,
};
use accelerate_core::settings::{DEFAULTS_VARIABLE, Origin};
use rstest::rstest;
use std::collections::BTreeMap;
use std::path::Path;

type Variables = BTreeMap<String, String>;

/// A launch by flags, with `inherited` variables.
fn launch(flags: &[(&str, &str)], inherited: &Variables) -> RunConfig {
    let setting = |flag: &str| settings().find(|setting| setting.flag() == Some(flag)).unwrap();
    let flags = flags.iter().map(|(flag, text)| (setting(flag), (*text).to_owned())).collect();
    let lookup = |name: &str| inherited.get(name).cloned();
    RunConfig::resolve(Sources { flags, environment: Some(&lookup), ..Default::default() }).unwrap()
}

fn in_process(variables: &Variables, code: PartialRunConfig) -> RunConfig {
    let lookup = |name: &str| variables.get(name).cloned();
    RunConfig::resolve(Sources { code, environment: Some(&lookup), ..Default::default() }).unwrap()
}

const FSDP: &[(&str, &str)] = &[("use_fsdp", "true")];
const DEEPSPEED: &[(&str, &str)] = &[("use_deepspeed", "true")];

#[rstest]
#[case(&[], 1, &["ACCELERATE_DYNAMO_BACKEND=NO", "ACCELERATE_DYNAMO_MODE=default",
    "ACCELERATE_DYNAMO_USE_DYNAMIC=False", "ACCELERATE_DYNAMO_USE_FULLGRAPH=False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=False", "ACCELERATE_MIXED_PRECISION=no", "ACCELERATE_USE_CPU=False"])]
#[case(&[("dynamo_backend", "eager"), ("mixed_precision", "bf16")], 2, &["ACCELERATE_DYNAMO_MODE=default",
    "ACCELERATE_DYNAMO_USE_DYNAMIC=False", "ACCELERATE_DYNAMO_USE_FULLGRAPH=False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=False"])]
#[case(DEEPSPEED, 1, &["ACCELERATE_CONFIG_DS_FIELDS=", "ACCELERATE_MIXED_PRECISION=no"])]
#[case(FSDP, 2, &["ACCELERATE_DYNAMO_BACKEND=NO", "ACCELERATE_DYNAMO_MODE=default",
    "ACCELERATE_DYNAMO_USE_DYNAMIC=False", "ACCELERATE_DYNAMO_USE_FULLGRAPH=False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=False", "ACCELERATE_MIXED_PRECISION=no",
    "FSDP_ACTIVATION_CHECKPOINTING=false", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD=false",
    "FSDP_CPU_RAM_EFFICIENT_LOADING=true", "FSDP_FORWARD_PREFETCH=false", "FSDP_MIN_NUM_PARAMS=100000000",
    "FSDP_OFFLOAD_PARAMS=false", "FSDP_RESHARD_AFTER_FORWARD=true", "FSDP_SHARDING_STRATEGY=FULL_SHARD",
    "FSDP_SYNC_MODULE_STATES=true", "FSDP_USE_ORIG_PARAMS=true", "FSDP_VERSION=1"])]
fn every_variable_is_there(#[case] flags: &[(&str, &str)], #[case] num_processes: usize, #[case] wanted: &[&str]) {
    let mut unasked = launch(flags, &Variables::new()).unasked_variables(num_processes);
    let list: Variables = serde_json::from_str(&unasked.remove(DEFAULTS_VARIABLE).unwrap()).unwrap();
    assert_eq!(unasked.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>(), wanted);
    assert_eq!(list, unasked);
}

/// What flags and the environment say is not said again.
#[rstest]
#[case(&[("use_fsdp", "true"), ("fsdp_version", "2")], &[], "FSDP_VERSION")]
#[case(&[("use_fsdp", "true"), ("fsdp_sharding_strategy", "2")], &[], "FSDP_SHARDING_STRATEGY")]
#[case(&[("use_fsdp", "true"), ("fsdp_reshard_after_forward", "SHARD_GRAD_OP")], &[], "FSDP_SHARDING_STRATEGY")]
#[case(FSDP, &[("FSDP_MIN_NUM_PARAMS", "5")], "FSDP_MIN_NUM_PARAMS")]
#[case(&[], &[("ACCELERATE_MIXED_PRECISION", "bf16")], "ACCELERATE_MIXED_PRECISION")]
#[case(&[("cpu", "true")], &[], "ACCELERATE_USE_CPU")]
fn what_somebody_says_is_left_to_them(
    #[case] flags: &[(&str, &str)],
    #[case] inherited: &[(&str, &str)],
    #[case] name: &str,
) {
    let inherited = inherited.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    assert!(!launch(flags, &inherited).unasked_variables(1).contains_key(name));
}

/// Values, origins and messages of a program in Rust are as if nothing had been said unasked.
#[rstest]
#[case(&[], None)]
#[case(FSDP, None)]
#[case(DEEPSPEED, None)]
#[case(&[("mixed_precision", "bf16"), ("dynamo_backend", "eager")], None)]
#[case(&[("use_fsdp", "true"), ("fsdp_version", "2"), ("fsdp_reshard_after_forward", "false")], None)]
#[case(&[("use_fsdp", "true"), ("fsdp_sharding_strategy", "NO_SHARD")], None)]
#[case(FSDP, Some("HYBRID_SHARD"))]
#[case(&[], Some("SHARD_GRAD_OP"))]
fn programs_in_rust_hear_nothing_of_it(#[case] flags: &[(&str, &str)], #[case] strategy_in_code: Option<&str>) {
    let code = || {
        let mut code = PartialRunConfig::default();
        if let Some(strategy) = strategy_in_code {
            let sharding_strategy = Some(strategy.parse().unwrap());
            code.cluster.use_fsdp = Some(true);
            code.fsdp = FullyShardedDataParallelPlugin { sharding_strategy, ..Default::default() };
        }
        code
    };
    let launcher = launch(flags, &Variables::new());
    let said = launcher.variables();
    let all: Variables = launcher.unasked_variables(1).into_iter().chain(said.clone()).collect();
    let (with, without) = (in_process(&all, code()), in_process(&said, code()));
    assert_eq!(with, without);
    assert_eq!(with.to_string(), without.to_string());
}

/// A variable that was changed on the way says something, and a launch inside of another hears only what was said to that.
#[test]
fn a_value_that_somebody_changed_is_said() {
    let mut variables = launch(FSDP, &Variables::new()).unasked_variables(2);
    let inner = launch(FSDP, &variables);
    assert_eq!(*inner.origin("mixed_precision"), Origin::Default);
    assert_eq!(inner.unasked_variables(2), variables);
    variables.insert("ACCELERATE_MIXED_PRECISION".to_owned(), "bf16".to_owned());
    let process = in_process(&variables, PartialRunConfig::default());
    assert_eq!(process.origin("mixed_precision").to_string(), "environment variable ACCELERATE_MIXED_PRECISION");
}

/// DeepSpeed's plugin in Python refuses keys of Accelerate's file beside a file of its own, so it is told which there are.
#[rstest]
#[case("zero_stage: 3, gradient_clipping: 1.0", "", "zero_stage,gradient_clipping")]
#[case(
    "gradient_clipping: 1.0, zero_stage: 3",
    "mixed_precision: bf16",
    "gradient_clipping,zero_stage,mixed_precision"
)]
#[case::beside_a_flag("zero_stage: 3", "num_processes: 2", "zero_stage")]
#[case("deepspeed_config_file: ds.json", "mixed_precision: 'no'", "deepspeed_config_file,mixed_precision")]
fn keys_of_deepspeed(#[case] keys: &str, #[case] more: &str, #[case] wanted: &str) {
    let keys = keys.replace(", ", "\n  ");
    let text = format!("distributed_type: DEEPSPEED\ndeepspeed_config:\n  {keys}\n{more}\n");
    let file = Some(ConfigFile::read(&text, Path::new("run.yaml")).unwrap());
    let stage = settings().find(|setting| setting.flag() == Some("zero_stage")).unwrap();
    let flags = if more.contains("num_processes") { vec![(stage, "2".to_owned())] } else { Vec::new() };
    let run = RunConfig::resolve(Sources { file, flags, ..Default::default() }).unwrap();
    assert_eq!(run.unasked_variables(2)["ACCELERATE_CONFIG_DS_FIELDS"], wanted);
}
