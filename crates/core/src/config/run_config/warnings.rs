//! What whoever wrote settings should know before a launch: what changes nothing, and what will not be found.

use super::{Message, RunConfig, settings};
use crate::config::{FP8BackendType, Float8LinearRecipeName, MixedPrecision, OffloadDevice, ZeroStage};
use crate::names::DistributedType;
use crate::settings::{Origin, Setting, shortened, shortened_line};

/// Settings that count only beside others: the section, their field, what they need, and whether that is so. What ends with `_` is how
/// fields begin; an empty one is all of them.
struct Condition {
    section: &'static str,
    field: &'static str,
    needed: &'static str,
    is_met: fn(&RunConfig) -> bool,
}

impl Condition {
    fn is_about(&self, field: &str) -> bool {
        let is_beginning = self.field.is_empty() || self.field.ends_with('_');
        if is_beginning { field.starts_with(self.field) } else { field == self.field }
    }
}

const CONDITIONS: [Condition; 10] = [
    Condition {
        section: "grad_scaler_config",
        field: "",
        needed: "only losses in fp16 are scaled; set mixed_precision to fp16",
        is_met: |run| run.cluster.mixed_precision == MixedPrecision::Fp16,
    },
    Condition {
        section: "deepspeed_config",
        field: "offload_param_nvme_path",
        needed: "the parameters are not on a disk; set offload_param_device to nvme",
        is_met: |run| has_file(run) || run.deepspeed.offload_param_device == Some(OffloadDevice::Nvme),
    },
    Condition {
        section: "deepspeed_config",
        field: "offload_optimizer_nvme_path",
        needed: "the optimizer's state is not on a disk; set offload_optimizer_device to nvme",
        is_met: |run| has_file(run) || run.deepspeed.offload_optimizer_device == Some(OffloadDevice::Nvme),
    },
    Condition {
        section: "deepspeed_config",
        field: "zero3_",
        needed: "the parameters are not sharded; set zero_stage to 3",
        is_met: |run| has_file(run) || run.deepspeed.zero_stage == Some(ZeroStage::Parameters),
    },
    Condition {
        section: "project_config",
        field: "keep_",
        needed: "no checkpoint is removed; set total_limit",
        is_met: |run| run.project.total_limit.is_some(),
    },
    Condition {
        section: "fp8_config",
        field: "",
        needed: "nothing is computed in FP8; set mixed_precision to fp8",
        is_met: |run| run.cluster.mixed_precision == MixedPrecision::Fp8,
    },
    Condition {
        section: "fp8_config",
        field: "enable_fsdp_float8_all_gather",
        needed: "weights are whole on every process or gathered in bfloat16; set use_fsdp to true, backend to AO and recipe_name to tensorwise",
        is_met: |run| {
            let is_dynamic = run.fp8.backend.is_none_or(|backend| backend == FP8BackendType::AO);
            run.fsdp_in_use().is_some() && is_dynamic && run.fp8.recipe_name == Float8LinearRecipeName::Tensorwise
        },
    },
    Condition {
        section: "parallelism_config",
        field: "cp_",
        needed: "sequences are not divided; set cp_size to more than 1",
        is_met: |run| run.parallelism.cp_size > 1,
    },
    Condition {
        section: "parallelism_config",
        field: "sp_",
        needed: "sequences are not divided; set sp_size to more than 1",
        is_met: |run| run.parallelism.sp_size > 1,
    },
    Condition {
        section: "parallelism_config",
        field: "sp_seq_length",
        needed: "sequences may have any length; set sp_seq_length_is_variable to false",
        is_met: |run| run.parallelism.sp_size == 1 || run.parallelism.fixed_sequence_length().is_some(),
    },
];

fn has_file(run: &RunConfig) -> bool {
    run.deepspeed.hf_ds_config.is_some()
}

impl RunConfig {
    /// What somebody should know before a launch on a machine with `num_gpus` GPUs, a sentence each: settings that change
    /// nothing, what asks for GPUs that will not be used, and Python classes where a program of this library has modules.
    ///
    /// ```
    /// use accelerate_core::config::{ConfigFile, RunConfig, Sources};
    /// let file = Some(ConfigFile::read("distributed_type: MULTI_GPU\n", "run.yaml".as_ref())?);
    /// let run = RunConfig::resolve(Sources { file, ..Default::default() })?;
    /// assert!(run.warnings(0)[0].contains("no NVIDIA GPU was found"));
    /// assert!(run.warnings(8).is_empty());
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn warnings(&self, num_gpus: usize) -> Vec<String> {
        let messages = self.messages().iter().map(ToString::to_string);
        let replaced = self.replaced_by_variables();
        messages.chain(replaced).chain(self.without_gpus(num_gpus)).chain(self.classes_of_python()).collect()
    }

    /// Settings that somebody has said and that change nothing because of others: beside those of
    /// [`messages`](Self::messages), which name one for each section that is switched off, all of them.
    ///
    /// ```
    /// use accelerate_core::config::{ConfigFile, RunConfig, Sources};
    /// let text = "fsdp_config: {fsdp_version: 2, fsdp_offload_params: true}\n";
    /// let file = Some(ConfigFile::read(text, "run.yaml".as_ref())?);
    /// let run = RunConfig::resolve(Sources { file, ..Default::default() })?;
    /// assert_eq!((run.messages().len(), run.unused().len()), (1, 1));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn unused(&self) -> Vec<Message> {
        let is_told = |path: &str| self.messages().iter().any(|message| message.setting == path);
        let switched_off = self.notes.unused.iter().filter(|unused| !is_told(unused.setting.path)).map(|unused| {
            let (setting, found, origin) = (unused.setting.path, unused.found.clone(), unused.origin.clone());
            Message { setting, found, origin, why: unused.why.clone() }
        });
        let unmet = settings().filter_map(|setting| self.unmet(setting)).filter(|message| !is_told(message.setting));
        switched_off.chain(unmet).collect()
    }

    /// Variables that hold in the place of what a file says otherwise, a sentence each: whoever reads the file would not know.
    ///
    /// ```
    /// use accelerate_core::config::{ConfigFile, RunConfig, Sources};
    /// let file = Some(ConfigFile::read("num_processes: 4\n", "run.yaml".as_ref())?);
    /// let lookup = |name: &str| (name == "ACCELERATE_NUM_PROCESSES").then(|| "2".to_owned());
    /// let run = RunConfig::resolve(Sources { file, environment: Some(&lookup), ..Default::default() })?;
    /// let replaced = "num_processes is 2 (environment variable ACCELERATE_NUM_PROCESSES), not 4 (run.yaml:1:1)";
    /// assert_eq!(run.replaced_by_variables(), [replaced]);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn replaced_by_variables(&self) -> Vec<String> {
        let replaced = settings().filter_map(|setting| {
            let by_variable = self.origin(setting.path);
            let of_file = self.overridden(setting.path).find(|other| matches!(other.origin, Origin::File { .. }))?;
            let holds = self.text(setting).filter(|_| matches!(by_variable, Origin::Environment(_)))?;
            let name = super::name_for(setting.path, &of_file.origin);
            let show =
                |value: &str| if setting.hides(value) { "(not shown)".to_owned() } else { shortened_line(value) };
            let line = || {
                format!("{name} is {} ({by_variable}), not {} ({})", show(&holds), show(&of_file.value), of_file.origin)
            };
            (holds != of_file.value).then(line)
        });
        replaced.collect()
    }

    fn unmet(&self, setting: &'static Setting) -> Option<Message> {
        let origin = self.origin(setting.path);
        if !matches!(origin, Origin::Flag(_) | Origin::Environment(_) | Origin::File { .. }) {
            return None;
        }
        let is_about = |condition: &&Condition| {
            setting.section == condition.section
                && condition.is_about(setting.field)
                && !["cp_size", "sp_size"].contains(&setting.field)
        };
        let condition = CONDITIONS.iter().filter(is_about).find(|condition| !(condition.is_met)(self))?;
        let found = self.text(setting).filter(|found| !setting.asks_for_nothing(found))?;
        Some(Message { setting: setting.path, found, origin: origin.clone(), why: condition.needed.to_owned() })
    }

    /// What asks for GPUs where processes will have none.
    fn without_gpus(&self, num_gpus: usize) -> Option<String> {
        let cluster = &self.cluster;
        let asks = match (&cluster.gpu_ids, cluster.distributed_type) {
            (Some(gpu_ids), _) if !gpu_ids.eq_ignore_ascii_case("all") => Some(("gpu_ids", gpu_ids.clone())),
            (_, Some(DistributedType::MultiGpu)) => Some(("distributed_type", DistributedType::MultiGpu.to_string())),
            _ => None,
        };
        let (path, value) = asks?;
        let why = match (cluster.use_cpu, num_gpus) {
            (true, _) => "the processes are kept on the CPU",
            (false, 0) => "no NVIDIA GPU was found, so the processes compute on the CPU",
            (false, _) => return None,
        };
        Some(format!("{path} {} ({}) has no effect: {why}", shortened_line(&value), self.origin(path)))
    }

    /// A model of this library has no classes, so that preparing it fails where a block is looked for by one.
    fn classes_of_python(&self) -> Option<String> {
        const PATH: &str = "fsdp_config.transformer_cls_names_to_wrap";
        let is_said_outside = !matches!(self.origin(PATH), Origin::Code | Origin::Default);
        let names = &self.fsdp.transformer_cls_names_to_wrap;
        let class = names.iter().find(|name| is_class_name(name)).filter(|_| is_said_outside)?;
        if self.notes.is_for_python {
            return None;
        }
        let name = settings().find(|setting| setting.path == PATH).map(Setting::file_key)?;
        Some(format!(
            "{name} is {} ({}), and {:?} looks like a class of Python: a program of this library looks for modules by their \
             paths, such as encoder.layer.*, and fails where its model has none of that name; leave the setting out, so that \
             blocks are found by themselves",
            shortened_line(&names.join(",")),
            self.origin(PATH),
            shortened(class),
        ))
    }
}

/// `BertLayer`, and not `encoder.layer.*` or `h`.
fn is_class_name(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_uppercase())
        && name.chars().any(|letter| letter.is_ascii_lowercase())
        && name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
}
