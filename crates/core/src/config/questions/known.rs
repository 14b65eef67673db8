//! What the answers so far say to the rows of the table: whether a question comes up, its words, its default and its checks.

use super::row::Words;
use super::{Known, MachineFacts};
use crate::config::cluster::{GPU_IDS, names_gpus};
use crate::config::{Compilation, DynamoSettings};
use crate::names::DistributedType;

/// Who is started: a program of this library, or one in Python.
pub(super) const PROGRAM: &str = "program";
/// On which devices a run without sharding computes.
pub(super) const MACHINE_TYPE: &str = "machine_type";
/// How the model is divided.
pub(super) const SHARDING: &str = "sharding";
pub(super) const CUSTOM_DYNAMO: &str = "custom_dynamo";
pub(super) const HAS_DEEPSPEED_FILE: &str = "use_deepspeed_config";

pub(super) const BACKEND: &str = "dynamo_config.backend";
pub(super) const DEEPSPEED_FILE: &str = "deepspeed_config.hf_ds_config";
pub(super) const ZERO_STAGE: &str = "deepspeed_config.zero_stage";
pub(super) const OPTIMIZER_DEVICE: &str = "deepspeed_config.offload_optimizer_device";
pub(super) const PARAM_DEVICE: &str = "deepspeed_config.offload_param_device";
pub(super) const FSDP_VERSION: &str = "fsdp_config.fsdp_version";
pub(super) const WRAP_POLICY: &str = "fsdp_config.auto_wrap_policy";
pub(super) const STRATEGY: &str = "fsdp_config.sharding_strategy";
pub(super) const EFFICIENT_LOADING: &str = "fsdp_config.cpu_ram_efficient_loading";
/// Are there several axes of processes? In a file the section of the axes stands for the answer.
pub(super) const AXES: &str = "use_parallelism_config";
pub(super) const REPLICATE: &str = "parallelism_config.dp_replicate_size";
pub(super) const SHARD: &str = "parallelism_config.dp_shard_size";
pub(super) const TENSOR: &str = "parallelism_config.tp_size";
pub(super) const CONTEXT: &str = "parallelism_config.cp_size";
pub(super) const PRECISION: &str = "mixed_precision";
pub(super) const FP8_BACKEND: &str = "fp8_config.backend";

pub(super) const MACHINE_TYPES: [(&str, &str); 4] = [
    ("NO", "one process, on the GPU if there is one"),
    ("MULTI_CPU", "several processes on CPUs"),
    ("MULTI_GPU", "several processes with a GPU each"),
    ("TPU", ""),
];

impl Known {
    pub(super) fn is(&self, name: &str, text: &str) -> bool {
        self.answers.get(name) == Some(text)
    }

    pub(super) fn is_yes(&self, name: &str) -> bool {
        self.is(name, "true")
    }

    /// The answer as a number; 1 where it was not asked for.
    pub(super) fn number(&self, name: &str) -> usize {
        self.answers.get(name).and_then(|text| text.parse().ok()).unwrap_or(1)
    }

    pub(super) fn is_for_python(&self) -> bool {
        self.is(PROGRAM, "python")
    }

    pub(super) fn is_on_several_cpus(&self) -> bool {
        self.is(MACHINE_TYPE, "MULTI_CPU")
    }

    pub(super) fn is_on_cpu(&self) -> bool {
        self.is_on_several_cpus() || self.is_yes("use_cpu")
    }

    pub(super) fn is_distributed(&self) -> bool {
        !self.is(MACHINE_TYPE, "NO")
    }

    pub(super) fn has_machines(&self) -> bool {
        self.number("num_machines") > 1
    }

    /// Will no GPU be used, on this machine or by what was said?
    pub(super) fn computes_on_cpu(&self) -> bool {
        self.is_on_cpu() || (self.is(MACHINE_TYPE, "NO") && self.machine.num_gpus == 0)
    }

    pub(super) fn refuses_backend(&self, text: &str) -> Option<&'static str> {
        let backend = text.parse().unwrap_or_default();
        let compilation = DynamoSettings { backend, ..Default::default() }.compilation();
        match compilation {
            Ok(Compilation::CudaGraphs) if self.computes_on_cpu() => {
                Some("there is no NVIDIA GPU to capture graphs on; choose another one")
            }
            Err(_) if !self.is_for_python() => {
                Some("they need Python, which compiles models while they run; choose ts or aot_inductor for files")
            }
            _ => None,
        }
    }

    pub(super) fn has_machines_of_deepspeed(&self) -> bool {
        self.uses_deepspeed() && self.has_machines()
    }

    pub(super) fn has_axes(&self) -> bool {
        self.is_yes(AXES)
    }

    pub(super) fn uses_transformer_engine(&self) -> bool {
        self.is(FP8_BACKEND, "TE")
    }

    pub(super) fn check_num_processes(&self, text: &str) -> Result<(), String> {
        match self.num_processes_of_axes() {
            Some(number) if text.trim() != number.to_string() => {
                Err(format!("{number}, which is the product of the sizes of all axes"))
            }
            _ => multiple_of(text, self.number("num_machines")),
        }
    }

    pub(super) fn num_processes_of_axes(&self) -> Option<usize> {
        let sizes = [REPLICATE, SHARD, TENSOR, CONTEXT].map(|axis| self.number(axis));
        self.has_axes().then(|| sizes.into_iter().fold(1, usize::saturating_mul))
    }

    /// The least number of processes for each layer with which the axes so far fill all machines alike.
    pub(super) fn processes_for_machines(&self) -> usize {
        let machines = self.number("num_machines").max(1);
        // Of both axes together it may be more than a number holds, and only what they share with the machines counts.
        [REPLICATE, SHARD].iter().fold(machines, |left, axis| left / greatest_common_divisor(left, self.number(axis)))
    }

    pub(super) fn check_machines_of_axes(&self, text: &str) -> Result<(), String> {
        let step = self.processes_for_machines();
        let is_multiple = text.trim().parse::<usize>().is_ok_and(|size| size.is_multiple_of(step));
        let machines = self.number("num_machines");
        let why = format!("a multiple of {step}, so that each of the {machines} machines starts as many processes");
        if is_multiple { Ok(()) } else { Err(why) }
    }

    pub(super) fn has_custom_dynamo(&self) -> bool {
        self.is_yes(CUSTOM_DYNAMO)
    }

    pub(super) fn uses_deepspeed(&self) -> bool {
        self.is(SHARDING, DistributedType::DeepSpeed.as_str())
    }

    /// The configuration is made from the answers.
    pub(super) fn makes_deepspeed(&self) -> bool {
        self.is(HAS_DEEPSPEED_FILE, "false")
    }

    pub(super) fn has_stage(&self, least: usize) -> bool {
        self.answers.get(ZERO_STAGE).and_then(|stage| stage.parse::<usize>().ok()).is_some_and(|stage| stage >= least)
    }

    pub(super) fn uses_fsdp(&self) -> bool {
        self.is(SHARDING, DistributedType::Fsdp.as_str())
    }

    /// Version 2 fetches ahead by itself, and with `NO_SHARD` nothing is gathered.
    pub(super) fn gathers_in_version_1(&self) -> bool {
        self.is(FSDP_VERSION, "1") && !self.is(STRATEGY, "NO_SHARD")
    }

    /// Will states be in parts? The reference asks in any case.
    pub(super) fn has_parts(&self) -> bool {
        self.uses_fsdp() && (self.is_for_python() || !self.is(STRATEGY, "NO_SHARD"))
    }

    /// What the file says of both together: the way to shard goes before the devices.
    pub(super) fn distributed_type(&self) -> Option<String> {
        let sharding = self.answers.get(SHARDING).filter(|sharding| *sharding != DistributedType::No.as_str());
        sharding.or(self.answers.get(MACHINE_TYPE)).map(str::to_owned)
    }

    pub(super) fn ways_to_shard(&self) -> Words {
        let whole = ("NO", "every process keeps the whole model");
        let deepspeed = ("DEEPSPEED", "by a DeepSpeed configuration (ZeRO)");
        let fsdp = ("FSDP", "fully sharded data parallel");
        // Among one process there is nothing to divide, but DeepSpeed's offload helps there, too.
        match self.is_distributed() {
            true => vec![whole, deepspeed, fsdp, ("MEGATRON_LM", "")],
            false => vec![whole, deepspeed],
        }
    }

    /// Python knows the first five.
    pub(super) fn strategies(&self) -> Words {
        const ALL: [(&str, &str); 7] = [
            ("FULL_SHARD", "parameters, gradients and optimizer state"),
            ("SHARD_GRAD_OP", "gradients and optimizer state"),
            ("NO_SHARD", "nothing"),
            ("HYBRID_SHARD", "FULL_SHARD within a machine"),
            ("HYBRID_SHARD_ZERO2", "SHARD_GRAD_OP within a machine"),
            ("OPTIMIZER_STATE", "optimizer state"),
            ("OPTIMIZER_STATE_AND_GRADIENTS", "optimizer state and gradients, with whole parameters at all times"),
        ];
        ALL[..if self.is_for_python() { 5 } else { 7 }].to_vec()
    }

    pub(super) fn state_dict_types(&self) -> Words {
        const ALL: [(&str, &str); 3] = [("SHARDED_STATE_DICT", ""), ("FULL_STATE_DICT", ""), ("LOCAL_STATE_DICT", "")];
        ALL[..if self.is(FSDP_VERSION, "1") { 3 } else { 2 }].to_vec()
    }

    /// One for each GPU. On CPUs a few, because the processes of a machine share its cores.
    pub(super) fn default_num_processes(&self) -> String {
        if let Some(number) = self.num_processes_of_axes().filter(|_| self.answers.get(TENSOR).is_some()) {
            return number.to_string();
        }
        let MachineFacts { num_gpus, num_cores } = self.machine;
        let on_each = match self.answers.get(MACHINE_TYPE) {
            Some("MULTI_CPU") => (num_cores / 4).clamp(2, 16),
            Some("MULTI_GPU") => num_gpus.max(1),
            _ => 1,
        };
        on_each.saturating_mul(self.number("num_machines")).to_string()
    }
}

fn greatest_common_divisor(mut a: usize, mut b: usize) -> usize {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a.max(1)
}

pub(super) fn less_than(text: &str, end: usize) -> Result<(), String> {
    let is_less = text.trim().parse::<usize>().is_ok_and(|number| number < end);
    if is_less { Ok(()) } else { Err(format!("less than the number of machines, {end}")) }
}

/// FSDP shards over this axis or over that of sequences, and replicas need the first.
pub(super) fn shard_size(text: &str, num_replicas: usize) -> Result<(), String> {
    match text.trim() {
        "0" => above_zero(text),
        "1" if num_replicas > 1 => Err("more than 1: replicas that nobody shards need no FSDP".to_owned()),
        _ => Ok(()),
    }
}

pub(super) fn context_size(text: &str, shard_size: usize) -> Result<(), String> {
    match text.trim() {
        "0" => above_zero(text),
        "1" if shard_size == 1 => Err("more than 1: FSDP has nothing to shard over otherwise".to_owned()),
        _ => Ok(()),
    }
}

pub(super) fn at_most(text: &str, most: usize) -> Result<(), String> {
    let is_small = text.trim().parse::<usize>().is_ok_and(|number| number <= most);
    if is_small { Ok(()) } else { Err(format!("at most {most}")) }
}

pub(super) fn above_zero(text: &str) -> Result<(), String> {
    if text.trim() == "0" { Err("more than 0".to_owned()) } else { Ok(()) }
}

pub(super) fn multiple_of(text: &str, num_machines: usize) -> Result<(), String> {
    let is_multiple = text.trim().parse::<usize>().is_ok_and(|number| number.is_multiple_of(num_machines.max(1)));
    let wanted = || format!("a multiple of the number of machines, {num_machines}: each starts as many processes");
    if is_multiple { Ok(()) } else { Err(wanted()) }
}

pub(super) fn one_word(text: &str) -> Result<(), String> {
    match text.contains(char::is_whitespace) {
        true => Err("an address or a host name, without spaces".to_owned()),
        false => Ok(()),
    }
}

pub(super) fn gpu_ids(text: &str) -> Result<(), String> {
    // Who is asked has something to say.
    let is_answer = !text.trim().is_empty() && names_gpus(text);
    if is_answer { Ok(()) } else { Err(GPU_IDS.to_owned()) }
}
