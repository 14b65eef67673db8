#![doc = include_str!("../README.md")]

pub mod accumulation;
pub mod checkpoint;
pub mod config;
pub mod device_map;
pub mod environment;
mod error;
pub mod exported_model;
pub mod files;
pub mod fp8;
pub mod hosts;
pub mod kubernetes;
pub mod layout;
pub mod lora;
pub mod mesh;
pub mod names;
pub mod offload;
pub mod pipeline;
pub mod plan;
pub mod power_sgd;
pub mod profile;
pub mod quantization;
pub mod restart;
pub mod ring;
pub mod sampler;
pub mod schedule;
pub mod sequence_parallel;
pub mod settings;
pub mod signals;
pub mod slurm;
pub mod split;
pub mod status;
pub mod tensor_parallel;
pub mod tracking;
pub mod weight_files;
mod yaml;

pub use error::{Error, Result};
