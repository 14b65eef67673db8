//! Tables and properties of every decision, through the public interface only.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod accumulation;
mod checkpoint;
mod config;
mod config_file;
mod contradictions;
mod deep_speed;
mod deep_speed_objects;
mod deep_speed_resolve;
mod device_map;
mod environment;
mod environment_plugins;
mod exported_model;
mod golden;
#[allow(unreachable_pub, reason = "a file of another crate's tests")]
#[path = "../../../accelerate/tests/hostile/mod.rs"]
mod hostile;
mod hostile_settings;
mod hosts;
mod kubernetes;
mod launches;
mod layout;
mod leaving;
mod lora;
mod nested_states;
mod num_machines;
mod offload;
mod offload_index;
mod pickled_bombs;
mod plan;
mod plan_activations;
mod plan_axes;
mod plan_collectives;
mod plan_memory;
mod plan_sharded;
mod plan_step_time;
mod power_sgd;
mod profile;
mod python_checkpoints;
mod pytorch_files;
mod quantization;
mod questions;
mod restart;
mod sampler;
mod schedule;
mod settings;
mod slurm;
mod split;
mod status;
mod torch_dynamo;
mod tracking;
mod unasked;
mod weight_files;
