//! The settings of a run, from flags, variables and a configuration file.

use std::error::Error;
use std::path::Path;

use accelerate_core::config::{ConfigFile, Lookup, RunConfig, Sources};
use accelerate_core::settings::{ORIGINS_VARIABLE, Setting, read_file};
use accelerate_launch::num_visible_gpus;

use crate::config_file::{self, Found};
use crate::launch::hosts::Machines;

/// The settings, and the file that some of them may come from.
#[derive(Debug)]
pub(crate) struct Resolved {
    pub(crate) run: RunConfig,
    pub(crate) file: Option<Found>,
}

/// Puts flags, variables and the file together. Fails on what every rank would fail on, before there are any.
pub(crate) fn resolve(
    flags: Vec<(&'static Setting, String)>,
    config_file: Option<&Path>,
    is_for_python: bool,
    lookup: Lookup<'_>,
) -> Result<Resolved, Box<dyn Error>> {
    // Where another launch has started this one, its flags are part of the environment here.
    let environment = |name: &str| lookup(name).filter(|_| name != ORIGINS_VARIABLE);
    let found = config_file::find(config_file, lookup);
    let file = match &found {
        Some(found) => Some(ConfigFile::read(&config_file::read(&found.path)?, &found.path)?),
        None => None,
    };
    let sources = Sources { flags, environment: Some(&environment), file, is_for_python, ..Default::default() };
    let run = RunConfig::resolve(sources)?;
    if !is_for_python {
        run.check_deepspeed(num_processes(&run), &read_file)?;
    }
    Ok(Resolved { run, file: found })
}

/// How many processes there will be, whether somebody has said it or not.
pub(crate) fn num_processes(run: &RunConfig) -> usize {
    // What is wrong with a list of machines is told where they are needed.
    match machines(run) {
        Ok(Some(machines)) => machines.total(),
        _ => run.cluster.num_processes.unwrap_or_else(|| per_machine(run).saturating_mul(run.cluster.num_machines)),
    }
}

/// The machines that are started on from here; `None` where there is only this one.
pub(crate) fn machines(run: &RunConfig) -> Result<Option<Machines>, Box<dyn Error>> {
    Machines::of_run(run, per_machine(run))
}

fn per_machine(run: &RunConfig) -> usize {
    if run.cluster.use_cpu { 1 } else { num_gpus(run).max(1) }
}

pub(crate) fn num_gpus(run: &RunConfig) -> usize {
    let chosen = run.cluster.gpu_ids.clone().filter(|gpu_ids| !gpu_ids.eq_ignore_ascii_case("all"));
    num_visible_gpus(Path::new("/dev"), chosen.or_else(|| config_file::variable("CUDA_VISIBLE_DEVICES")).as_deref())
}

/// What is worth knowing of the settings on this machine: what a launch tells, and everything else that changes nothing.
pub(crate) fn warnings(run: &RunConfig) -> Vec<String> {
    let unused = run.unused();
    run.warnings(num_gpus(run)).into_iter().chain(unused.iter().map(ToString::to_string)).collect()
}

/// Why it is that number where nobody has said it.
pub(crate) fn why_num_processes(run: &RunConfig) -> String {
    match (run.cluster.use_cpu, num_gpus(run)) {
        (true, _) => "with --cpu".to_string(),
        (false, 0) => "no NVIDIA GPU found".to_string(),
        (false, 1) => "one for the only NVIDIA GPU".to_string(),
        (false, num_gpus) => format!("one for each of {num_gpus} NVIDIA GPUs"),
    }
}
