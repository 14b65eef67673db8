//! Settings as a configuration file that Python Accelerate reads, too.

use super::{ConfigFile, PartialRunConfig, settings};
use crate::config::MixedPrecision;
use crate::names::{ComputeEnvironment, DistributedType};
use crate::settings::{Setting, ValueKind, says_something};
use crate::yaml::yaml;
use serde_json::{Map, Number, Value};
use std::path::Path;

/// The language of a configuration file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FileFormat {
    /// YAML. The default.
    #[default]
    Yaml,
    /// JSON.
    Json,
}

impl FileFormat {
    /// The language that the name of a file stands for: JSON for `.json`, and YAML for everything else, as in Python Accelerate.
    ///
    /// ```
    /// use accelerate_core::config::FileFormat;
    /// assert_eq!(FileFormat::of_path("run.json".as_ref()), FileFormat::Json);
    /// assert_eq!(FileFormat::of_path("run.yaml".as_ref()), FileFormat::Yaml);
    /// ```
    pub fn of_path(path: &Path) -> Self {
        if path.extension().is_some_and(|extension| extension == "json") { Self::Json } else { Self::Yaml }
    }
}

/// Sections of a file that Python Accelerate knows. The top level is the one without a name.
const SECTIONS_OF_THE_REFERENCE: [&str; 7] =
    ["", "fsdp_config", "deepspeed_config", "dynamo_config", "parallelism_config", "fp8_config", "mpirun_config"];

/// Does Python Accelerate accept this setting in a file? It refuses a file whose top level has a key that it does not know.
///
/// ```
/// use accelerate_core::config::{is_in_files_of_reference, settings};
/// let knows = |path: &str| settings().find(|setting| setting.path == path).map(is_in_files_of_reference);
/// assert_eq!(knows("fsdp_config.sharding_strategy"), Some(true));
/// assert_eq!(knows("log_level"), Some(false));
/// ```
pub fn is_in_files_of_reference(setting: &Setting) -> bool {
    SECTIONS_OF_THE_REFERENCE.contains(&setting.section) && !setting.declaration.is_own_key && !setting.is_code_only()
}

impl ConfigFile {
    /// The text of a file that says what `said` says, in today's schema. [`read`](Self::read) gives
    /// [`said.in_file()`](PartialRunConfig::in_file) back.
    ///
    /// Python Accelerate reads the file as well, unless something is said for which it has no key
    /// ([`is_in_files_of_reference`]).
    ///
    /// ```
    /// use accelerate_core::config::{ConfigFile, FileFormat, PartialRunConfig, ShardingStrategy};
    /// let mut said = PartialRunConfig::default();
    /// said.cluster.use_fsdp = Some(true);
    /// said.fsdp.sharding_strategy = Some(ShardingStrategy::ShardGradOp);
    /// let text = ConfigFile::write(&said, FileFormat::Yaml);
    /// assert_eq!(
    ///     text,
    ///     "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n",
    /// );
    /// assert_eq!(ConfigFile::read(&text, "run.yaml".as_ref())?.into_partial(), said.in_file());
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn write(said: &PartialRunConfig, format: FileFormat) -> String {
        let said = said.in_file();
        let mut root = Map::new();
        for setting in settings().filter(|setting| !setting.is_code_only()) {
            let Some(text) = said.text(setting).filter(|text| says_something(setting, text)) else { continue };
            let value = setting.json(&text);
            match setting.section {
                "" => drop(root.insert(setting.key().to_owned(), value)),
                section => {
                    let section = root.entry(section).or_insert_with(|| Value::Object(Map::new()));
                    if let Value::Object(section) = section {
                        section.insert(written_key(setting).to_owned(), value);
                    }
                }
            }
        }
        match format {
            FileFormat::Json => format!("{:#}\n", Value::Object(root)),
            FileFormat::Yaml => yaml(&root),
        }
    }
}

impl PartialRunConfig {
    /// The same as a file says it: `distributed_type` stands for the switches that flags have, and it is there together with
    /// `compute_environment`, because Python Accelerate needs them.
    ///
    /// ```
    /// use accelerate_core::config::PartialRunConfig;
    /// use accelerate_core::names::DistributedType;
    /// let mut said = PartialRunConfig::default();
    /// said.cluster.use_deepspeed = Some(true);
    /// let said = said.in_file();
    /// assert_eq!(said.cluster.distributed_type, Some(DistributedType::DeepSpeed));
    /// assert_eq!(said.cluster.use_deepspeed, None);
    /// ```
    #[must_use]
    pub fn in_file(&self) -> Self {
        let mut said = self.clone();
        let cluster = &mut said.cluster;
        cluster.compute_environment.get_or_insert(ComputeEnvironment::LocalMachine);
        let asked = match (cluster.use_fsdp, cluster.use_deepspeed) {
            (Some(true), Some(true)) => None,
            (Some(true), _) => Some(DistributedType::Fsdp),
            (_, Some(true)) => Some(DistributedType::DeepSpeed),
            _ => None,
        };
        match (asked, cluster.distributed_type) {
            (Some(asked), None | Some(DistributedType::MultiGpu)) => cluster.distributed_type = Some(asked),
            // What the type said besides is said by other keys.
            (Some(asked), Some(DistributedType::MultiCpu)) => {
                cluster.distributed_type = Some(asked);
                cluster.use_cpu.get_or_insert(true);
            }
            (Some(asked), Some(DistributedType::No)) if cluster.num_processes.is_none_or(|number| number == 1) => {
                cluster.distributed_type = Some(asked);
                cluster.num_processes = Some(1);
            }
            _ => {}
        }
        let needed = match (cluster.num_processes, cluster.use_cpu) {
            (Some(1), _) => DistributedType::No,
            (_, Some(true)) => DistributedType::MultiCpu,
            _ => DistributedType::MultiGpu,
        };
        let distributed_type = *cluster.distributed_type.get_or_insert(needed);
        let stands_for = |switch: Option<bool>, of_type| match switch {
            Some(true) => distributed_type == of_type,
            Some(false) => distributed_type != of_type,
            None => false,
        };
        if stands_for(cluster.use_fsdp, DistributedType::Fsdp) {
            cluster.use_fsdp = None;
        }
        if stands_for(cluster.use_deepspeed, DistributedType::DeepSpeed) {
            cluster.use_deepspeed = None;
        }
        // It changes nothing, and Python has no key for it.
        cluster.multi_gpu = None;
        said
    }

    /// What a file without a type of machines means on one with this number of NVIDIA GPUs, so that [`in_file`](Self::in_file)
    /// writes that type. Python Accelerate reads no file without it.
    ///
    /// ```
    /// use accelerate_core::config::PartialRunConfig;
    /// use accelerate_core::names::DistributedType;
    /// let mut said = PartialRunConfig::default();
    /// said.cluster.num_processes = Some(2);
    /// assert_eq!(said.clone().on_machine(0).in_file().cluster.distributed_type, Some(DistributedType::MultiCpu));
    /// assert_eq!(said.on_machine(2).in_file().cluster.distributed_type, Some(DistributedType::MultiGpu));
    /// ```
    #[must_use]
    pub fn on_machine(mut self, num_gpus: usize) -> Self {
        let becomes = self.in_file().cluster.distributed_type;
        let cluster = &mut self.cluster;
        let is_said = cluster.distributed_type.is_some() || cluster.use_cpu.is_some() || cluster.gpu_ids.is_some();
        if num_gpus > 0 || is_said || cluster.multi_gpu == Some(true) || becomes != Some(DistributedType::MultiGpu) {
            return self;
        }
        match cluster.num_processes {
            // There is one, without GPUs.
            None => cluster.distributed_type = Some(DistributedType::No),
            Some(_) => cluster.use_cpu = Some(true),
        }
        self
    }
}

impl PartialRunConfig {
    /// What a file says for a machine with this number of NVIDIA GPUs: a process for each of them, or one on the CPU.
    ///
    /// ```
    /// use accelerate_core::config::{MixedPrecision, PartialRunConfig};
    /// use accelerate_core::names::DistributedType;
    /// let said = PartialRunConfig::for_machine(8, MixedPrecision::Bf16).cluster;
    /// assert_eq!((said.num_processes, said.distributed_type), (Some(8), Some(DistributedType::MultiGpu)));
    /// assert_eq!(PartialRunConfig::for_machine(0, MixedPrecision::No).cluster.use_cpu, Some(true));
    /// ```
    pub fn for_machine(num_gpus: usize, precision: MixedPrecision) -> Self {
        let mut said = Self::default();
        said.cluster.mixed_precision = Some(precision);
        said.cluster.num_processes = Some(num_gpus.max(1));
        said.cluster.use_cpu = Some(num_gpus == 0);
        said.in_file()
    }
}

impl Setting {
    /// What a file that is written calls it, with its section.
    ///
    /// ```
    /// use accelerate_core::config::settings;
    /// let setting = settings().find(|setting| setting.path == "fsdp_config.transformer_cls_names_to_wrap").unwrap();
    /// assert_eq!(setting.file_key(), "fsdp_config.fsdp_transformer_layer_cls_to_wrap");
    /// ```
    pub fn file_key(&self) -> String {
        match self.section {
            "" => self.key().to_owned(),
            section => format!("{section}.{}", written_key(self)),
        }
    }

    /// What `text`, which is a value of this setting, is in a file: a number, an answer, a word, or what is made of those.
    ///
    /// ```
    /// use accelerate_core::config::settings;
    /// let json = |path: &str, text: &str| settings().find(|setting| setting.path == path).map(|setting| setting.json(text));
    /// assert_eq!(json("num_processes", "2"), Some(2.into()));
    /// assert_eq!(json("mixed_precision", "no"), Some("no".into()));
    /// ```
    pub fn json(&self, text: &str) -> Value {
        if self.takes_object()
            && let Some(object) = serde_json::from_str(text).ok().filter(Value::is_object)
        {
            return object;
        }
        // Lists in sections are words with commas for Python, and those at the top level are lists.
        match (self.kind, self.section) {
            (ValueKind::List, "") => text.split(',').map(|word| Value::String(word.to_owned())).collect(),
            (kind, _) => scalar(kind, text),
        }
    }
}

/// The key in a section. Python's launcher knows those of its sections by the names of its flags.
fn written_key(setting: &Setting) -> &'static str {
    setting.flag().filter(|flag| setting.has_key(flag)).unwrap_or_else(|| setting.key())
}

fn scalar(kind: ValueKind, text: &str) -> Value {
    let word = || Value::String(text.to_owned());
    let number = || text.parse::<Number>().map_or_else(|_| word(), Value::Number);
    match kind {
        ValueKind::Bool => text.parse().map_or_else(|_| word(), Value::Bool),
        ValueKind::Integer { .. } | ValueKind::Number | ValueKind::Seconds => number(),
        // Names such as "true" and "3" are answers and numbers in files.
        ValueKind::Choice(_) => text.parse().map_or_else(|_| number(), Value::Bool),
        ValueKind::Auto(_) if text == "auto" => word(),
        ValueKind::Auto(kind) => scalar(*kind, text),
        ValueKind::Streams
        | ValueKind::RendezvousOptions
        | ValueKind::Text
        | ValueKind::Time
        | ValueKind::Path
        | ValueKind::List
        | ValueKind::Object
        | ValueKind::OffloadTarget => word(),
    }
}
