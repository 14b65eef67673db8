//! Records from files, and what they refuse.

use accelerate_core::config::*;
use rstest::rstest;
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::time::Duration;

fn read<T: DeserializeOwned>(json: &str) -> Result<T, String> {
    serde_json::from_str(json).map_err(|error| error.to_string())
}

/// An empty record is the default, an unknown key is named, and every record reads back.
#[track_caller]
fn check_record<T>()
where
    T: DeserializeOwned + serde::Serialize + Default + PartialEq + Debug,
{
    assert_eq!(read::<T>("{}").unwrap(), T::default());
    let error = read::<T>(r#"{"no_such_key": 1}"#).unwrap_err();
    assert!(error.contains("unknown field `no_such_key`"), "{error}");
    let json = serde_json::to_string(&T::default()).unwrap();
    assert_eq!(read::<T>(&json).unwrap(), T::default(), "{json}");
}

#[test]
fn records() {
    check_record::<AutocastKwargs>();
    check_record::<DataLoaderConfiguration>();
    check_record::<DeepSpeedPlugin>();
    check_record::<DistributedDataParallelKwargs>();
    check_record::<FullyShardedDataParallelPlugin>();
    check_record::<GradScalerKwargs>();
    check_record::<GradientAccumulationPlugin>();
    check_record::<InitProcessGroupKwargs>();
    check_record::<ProfileKwargs>();
    check_record::<ProjectConfiguration>();
    check_record::<TorchDynamoPlugin>();
}

#[test]
fn null_is_the_default() {
    let plugin: GradientAccumulationPlugin = read(r#"{"num_steps": null}"#).unwrap();
    assert_eq!(GradientAccumulationSettings::from(plugin).num_steps, 1);
    let kwargs: DistributedDataParallelKwargs =
        read(r#"{"comm_hook": null, "comm_wrapper": null, "comm_state_option": null}"#).unwrap();
    assert_eq!(DistributedDataParallelSettings::from(kwargs), Default::default());
    let kwargs: InitProcessGroupKwargs = read(r#"{"timeout": null}"#).unwrap();
    assert_eq!(kwargs.timeout, None);
}

#[rstest]
#[case::text("\"fp16\"", MixedPrecision::Fp16)]
#[case::upper_case("\"BF16\"", MixedPrecision::Bf16)]
#[case::yaml_no("false", MixedPrecision::No)]
fn mixed_precision(#[case] json: &str, #[case] wanted: MixedPrecision) {
    assert_eq!(read::<MixedPrecision>(json).unwrap(), wanted);
    assert_eq!(read::<MixedPrecision>(&serde_json::to_string(&wanted).unwrap()).unwrap(), wanted);
}

#[rstest]
#[case::yaml_yes("true", "expected a mixed precision")]
#[case::unknown("\"half\"", "the choices are")]
#[case::number("16", "the choices are")]
fn no_mixed_precision(#[case] json: &str, #[case] message: &str) {
    let error = read::<MixedPrecision>(json).unwrap_err();
    assert!(error.contains(message), "{error}");
}

#[rstest]
#[case::whole_seconds("90", Duration::from_secs(90), "90")]
#[case::fraction("0.25", Duration::from_millis(250), "0.25")]
fn timeouts(#[case] json: &str, #[case] wanted: Duration, #[case] written: &str) {
    let kwargs: InitProcessGroupKwargs = read(&format!("{{\"timeout\": {json}}}")).unwrap();
    assert_eq!(kwargs.timeout, Some(wanted));
    assert_eq!(ProcessGroupSettings::from(kwargs.clone()).timeout_for("nccl"), wanted);
    let json = serde_json::to_string(&kwargs).unwrap();
    assert!(json.contains(&format!("\"timeout\":{written}")), "{json}");
}

#[rstest]
#[case::negative("-1")]
#[case::endless("1e300")]
#[case::text("\"soon\"")]
fn no_timeouts(#[case] json: &str) {
    assert!(read::<InitProcessGroupKwargs>(&format!("{{\"timeout\": {json}}}")).is_err());
}

#[rstest]
#[case::gloo("gloo", 1800)]
#[case::nccl("nccl", 600)]
#[case::both("cuda:nccl,cpu:gloo", 600)]
fn the_backend_has_a_default_timeout(#[case] backend: &str, #[case] seconds: u64) {
    let timeout = ProcessGroupSettings::default().timeout_for(backend);
    assert_eq!(timeout, Duration::from_secs(seconds));
}

#[rstest]
#[case::seedable(DataLoaderSettings { use_seedable_sampler: true, ..configured() }, "use_seedable_sampler")]
#[case::split(DataLoaderSettings { split_batches: true, ..configured() }, "split_batches")]
#[case::dispatch(DataLoaderSettings { dispatch_batches: Some(true), ..configured() }, "dispatch_batches")]
fn a_configured_sampler_is_left_alone(#[case] configuration: DataLoaderSettings, #[case] second: &str) {
    configured().check().unwrap();
    let error = configuration.check().unwrap_err().to_string();
    let start = format!("use_configured_sampler and {second} contradict each other");
    assert!(error.starts_with(&start), "{error}");
}

fn configured() -> DataLoaderSettings {
    DataLoaderSettings { use_configured_sampler: true, ..Default::default() }
}

#[rstest]
#[case(GradScalerSettings { init_scale: 0.0, ..Default::default() }, "init_scale is 0, but must be above 0")]
#[case(GradScalerSettings { init_scale: f64::NAN, ..Default::default() }, "init_scale is NaN")]
#[case(GradScalerSettings { init_scale: f64::INFINITY, ..Default::default() }, "init_scale is inf")]
#[case(GradScalerSettings { growth_factor: 0.5, ..Default::default() }, "growth_factor is 0.5")]
#[case(GradScalerSettings { backoff_factor: 1.0, ..Default::default() }, "backoff_factor is 1")]
#[case(GradScalerSettings { growth_interval: 0, ..Default::default() }, "growth_interval is 0")]
fn impossible_scales(#[case] kwargs: GradScalerSettings, #[case] message: &str) {
    GradScalerSettings::default().check().unwrap();
    let error = kwargs.check().unwrap_err();
    assert!(error.is_config() && error.to_string().starts_with(message), "{error}");
}

#[rstest]
#[case(DistributedDataParallelSettings { dim: 1, ..Default::default() }, "dim is 1")]
#[case(DistributedDataParallelSettings { bucket_cap_mb: -1.0, ..Default::default() }, "bucket_cap_mb is -1")]
#[case(DistributedDataParallelSettings { bucket_cap_mb: f64::NAN, ..Default::default() }, "bucket_cap_mb is NaN")]
#[case(
    DistributedDataParallelSettings { comm_wrapper: DDPCommunicationHookType::PowerSgd, ..Default::default() },
    "\"power_sgd\" is not a comm_wrapper; the choices are \"no\", \"fp16\", \"bf16\""
)]
fn impossible_replicas(#[case] kwargs: DistributedDataParallelSettings, #[case] message: &str) {
    DistributedDataParallelSettings::default().check().unwrap();
    let error = kwargs.check().unwrap_err();
    assert!(error.is_config() && error.to_string().starts_with(message), "{error}");
}

#[test]
fn a_bucket_has_room_for_something() {
    let tiny = DistributedDataParallelSettings { bucket_cap_mb: 1e-9, ..Default::default() };
    assert_eq!(tiny.bucket_cap_bytes(), 1);
    let half = DistributedDataParallelSettings { bucket_cap_mb: 0.5, ..Default::default() };
    assert_eq!(half.bucket_cap_bytes(), 524_288);
}

#[test]
fn folders_of_a_project() {
    let project: ProjectConfiguration =
        read(r#"{"project_dir": "runs", "automatic_checkpoint_naming": true}"#).unwrap();
    let project = ProjectSettings::from(project);
    assert!(project.names_checkpoints());
    assert_eq!(project.resolved_logging_dir(), std::path::Path::new("runs"));
    assert!(!ProjectSettings::default().names_checkpoints());
}
