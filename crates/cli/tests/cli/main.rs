//! The `accelerate` command from the outside: real processes, real signals, real terminals.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod checkpoint;
mod commands;
mod config;
mod convert;
mod cores;
mod dry_run;
mod errors;
mod estimate_memory;
mod estimate_memory_hub;
mod failures;
mod first_ended;
mod first_hour;
mod flags;
mod help;
mod hosts;
mod hosts_activities;
mod hosts_restarts;
mod hosts_ssh;
mod hosts_versions;
mod kubernetes;
mod logs;
mod man;
mod merge_weights;
mod names;
mod num_machines;
mod orphans;
mod output;
mod place;
mod programs;
mod restarts;
mod results;
mod seed_commands;
mod settings;
mod slurm;
mod status;
mod status_agents;
mod stopping;
mod support;
mod survivors;
mod terminal;
mod test_command;
mod tpu_config;
mod wizard;
mod wizard_terminal;
