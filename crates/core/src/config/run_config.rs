//! The configuration of a run: every record, resolved once from all sources.

mod changes;
mod deep_speed;
mod display;
mod file;
mod here;
mod mesh;
mod misspelt;
mod normalise;
mod over;
mod place;
mod resolve;
mod to_fsdp2;
mod unasked;
mod warnings;
mod write;

pub use changes::changed_lines;
pub use file::ConfigFile;
pub use here::LaunchPlace;
pub use misspelt::misspelt_variables;
pub use over::PassedEnd;
pub use place::{default_config_files, hugging_face_home};
pub use resolve::{Lookup, Overridden, Sources};
pub use to_fsdp2::Fsdp2Conversion;
pub use write::{FileFormat, is_in_files_of_reference};

use super::{
    AcceleratorConfig, AcceleratorSettings, AutocastKwargs, AutocastSettings, BnbQuantizationConfig, ClusterConfig,
    ClusterSettings, DataLoaderConfiguration, DataLoaderSettings, DeepSpeedPlugin, DeepSpeedSettings,
    DistributedDataParallelKwargs, DistributedDataParallelSettings, DynamoSettings, FP8RecipeKwargs, FP8Settings,
    FullyShardedDataParallelPlugin, FullyShardedSettings, GradScalerKwargs, GradScalerSettings,
    GradientAccumulationPlugin, GradientAccumulationSettings, InitProcessGroupKwargs, MpirunConfig, MpirunSettings,
    ParallelismConfig, ParallelismSettings, ProcessGroupSettings, ProfileKwargs, ProfileSettings, ProjectConfiguration,
    ProjectSettings, QuantizationSettings, TensorParallelSettings, TorchDynamoPlugin, TorchTensorParallelPlugin,
};
use crate::Result;
use crate::settings::{Origin, Origins, Record, Setting, shortened_line};

/// Lists the records once: the field that holds one, the form that is written, the form that is read.
macro_rules! records {
    ($( $(#[doc = $doc:expr])* $field:ident: $record:ident => $settings:ident, )+) => {
        /// What one source says of a run, or several together, before defaults: every record with optional fields.
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct PartialRunConfig {
            $( $(#[doc = $doc])* pub $field: $record, )+
        }

        /// The one configuration of a run. Every value knows [where it came from](RunConfig::origin); printed, it is a table
        /// of values and origins.
        ///
        /// ```
        /// use accelerate_core::config::{MixedPrecision, RunConfig, Sources};
        /// let lookup = |name: &str| (name == "ACCELERATE_MIXED_PRECISION").then(|| "bf16".to_owned());
        /// let config = RunConfig::resolve(Sources { environment: Some(&lookup), ..Default::default() })?;
        /// assert_eq!(config.cluster.mixed_precision, MixedPrecision::Bf16);
        /// let origin = config.origin("mixed_precision").to_string();
        /// assert_eq!(origin, "environment variable ACCELERATE_MIXED_PRECISION");
        /// # Ok::<(), accelerate_core::Error>(())
        /// ```
        #[derive(Clone, Debug, PartialEq)]
        pub struct RunConfig {
            $( $(#[doc = $doc])* pub $field: $settings, )+
            origins: Origins,
            notes: Notes,
        }

        impl PartialRunConfig {
            /// The text of what `setting` says here, if anything.
            pub fn text(&self, setting: &Setting) -> Option<String> {
                $( if let Some(text) = find::<$record>(setting).and_then(|setting| self.$field.text(setting)) {
                    return Some(text);
                } )+
                None
            }

            /// What these texts say. A text that is no value of its setting says nothing; [`Setting::is_value`] tells.
            pub fn of_texts(said: &[(&'static Setting, String)]) -> Self {
                let mut all = Self::default();
                for (setting, text) in said {
                    all.say(setting, text);
                }
                all
            }

            /// Says what `text` writes down; `false` if it is no value of the setting.
            pub(crate) fn say(&mut self, setting: &Setting, text: &str) -> bool {
                $( if let Some(setting) = find::<$record>(setting) {
                    return self.$field.say(setting, text) && setting.is_in_range(text);
                } )+
                false
            }

            /// Takes over from `other` what nobody has said here, and returns which settings those were.
            pub(crate) fn fill(&mut self, other: &Self) -> Vec<&'static Setting> {
                let mut filled = Vec::new();
                $( filled.extend(self.$field.fill(&other.$field)); )+
                filled
            }

            fn settle(self, origins: Origins, notes: Notes) -> RunConfig {
                RunConfig { $( $field: self.$field.into(), )+ origins, notes }
            }
        }

        impl From<RunConfig> for PartialRunConfig {
            fn from(config: RunConfig) -> Self {
                Self { $( $field: config.$field.into(), )+ }
            }
        }

        /// The table of all settings of all records.
        ///
        /// ```
        /// use accelerate_core::config::settings;
        /// let setting = settings().find(|setting| setting.path == "fsdp_config.backward_prefetch").unwrap();
        /// assert_eq!(setting.flag(), Some("fsdp_backward_prefetch"));
        /// assert_eq!(setting.variable().as_deref(), Some("FSDP_BACKWARD_PREFETCH"));
        /// ```
        pub fn settings() -> impl Iterator<Item = &'static Setting> {
            [$( $record::settings(), )+].into_iter().flatten()
        }

        fn read_environment(
            lookup: &dyn Fn(&str) -> Option<String>,
        ) -> Result<(PartialRunConfig, Vec<(&'static Setting, Origin)>)> {
            let mut all = PartialRunConfig::default();
            let mut origins = Vec::new();
            $(
                let (record, said) = crate::settings::read_environment::<$record>(lookup)?;
                all.$field = record;
                origins.extend(said);
            )+
            Ok((all, origins))
        }
    };
}

/// The setting of the record `R` that this is, if it is one.
fn find<R: Record>(setting: &Setting) -> Option<&'static Setting> {
    R::settings().iter().find(|known| known.path == setting.path)
}

records! {
    /// What a launcher asks: how many processes, where, in which precision.
    cluster: ClusterConfig => ClusterSettings,
    /// The arguments of `Accelerator` that are no plugin.
    accelerator: AcceleratorConfig => AcceleratorSettings,
    /// How data loaders are shared between ranks.
    dataloader: DataLoaderConfiguration => DataLoaderSettings,
    /// Where a run writes.
    project: ProjectConfiguration => ProjectSettings,
    /// How gradients accumulate.
    gradient_accumulation: GradientAccumulationPlugin => GradientAccumulationSettings,
    /// How gradients are averaged over replicas.
    ddp: DistributedDataParallelKwargs => DistributedDataParallelSettings,
    /// How models are sharded, where `cluster.use_fsdp` says so.
    fsdp: FullyShardedDataParallelPlugin => FullyShardedSettings,
    /// The DeepSpeed configuration, where `cluster.use_deepspeed` says so.
    deepspeed: DeepSpeedPlugin => DeepSpeedSettings,
    /// How autocast is entered.
    autocast: AutocastKwargs => AutocastSettings,
    /// How losses are scaled in fp16.
    grad_scaler: GradScalerKwargs => GradScalerSettings,
    /// How ranks find each other.
    process_group: InitProcessGroupKwargs => ProcessGroupSettings,
    /// What a profiler records.
    profile: ProfileKwargs => ProfileSettings,
    /// Which compiler models go through.
    dynamo: TorchDynamoPlugin => DynamoSettings,
    /// Axes of ranks.
    parallelism: ParallelismConfig => ParallelismSettings,
    /// Tensor parallelism.
    tensor_parallel: TorchTensorParallelPlugin => TensorParallelSettings,
    /// Computing in FP8.
    fp8: FP8RecipeKwargs => FP8Settings,
    /// Quantised weights.
    quantization: BnbQuantizationConfig => QuantizationSettings,
    /// How mpirun starts processes.
    mpirun: MpirunConfig => MpirunSettings,
}

/// Something that whoever configured the run should know: a setting that changes nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The setting, as [`Setting::path`] spells it.
    pub setting: &'static str,
    /// What was said.
    pub found: String,
    /// Where.
    pub origin: Origin,
    /// Why it changes nothing.
    pub why: String,
}

/// What was said beside the values that hold.
#[derive(Clone, Debug, Default, PartialEq)]
struct Notes {
    messages: Vec<Message>,
    unused: Vec<Unused>,
    overridden: Vec<Overridden>,
    /// See [`Sources::is_for_python`].
    is_for_python: bool,
    /// Of a file's `deepspeed_config`, in the order of its lines.
    deepspeed_keys: Vec<&'static str>,
}

/// A value of a record whose switch is off.
#[derive(Clone, Debug)]
struct Unused {
    setting: &'static Setting,
    found: String,
    origin: Origin,
    /// What it would need to count.
    why: String,
}

impl PartialEq for Unused {
    fn eq(&self, other: &Self) -> bool {
        (self.setting.path, &self.found, &self.origin) == (other.setting.path, &other.found, &other.origin)
    }
}

impl std::fmt::Display for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { setting, found, origin, why } = self;
        let name = name_for(setting, origin);
        write!(f, "{name} is {} ({origin}), which has no effect: {why}", shortened_line(found))
    }
}

/// What messages call the setting with this path: whoever wrote a file looks for the key that is there.
fn name_for(path: &'static str, origin: &Origin) -> String {
    let in_file = || settings().find(|setting| setting.path == path).map(Setting::file_key);
    let is_in_file = matches!(origin, Origin::File { .. });
    if is_in_file { in_file() } else { None }.unwrap_or_else(|| path.to_owned())
}

impl RunConfig {
    /// Where the value of the setting with this [path](Setting::path) came from.
    pub fn origin(&self, path: &str) -> &Origin {
        self.origins.get(path)
    }

    /// What was said and changes nothing, to be told by the main process.
    pub fn messages(&self) -> &[Message] {
        &self.notes.messages
    }

    /// How models are sharded: `None` unless somebody asked for it, by a plugin or by a DeepSpeed configuration.
    ///
    /// ```
    /// use accelerate_core::config::{PartialRunConfig, RunConfig, Sources};
    /// let mut code = PartialRunConfig::default();
    /// code.cluster.use_fsdp = Some(true);
    /// let config = RunConfig::resolve(Sources { code, ..Default::default() })?;
    /// assert!(config.fsdp_in_use().is_some());
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn fsdp_in_use(&self) -> Option<&FullyShardedSettings> {
        (self.cluster.use_fsdp || self.cluster.use_deepspeed).then_some(&self.fsdp)
    }

    /// Takes over what another setting has decided, such as a DeepSpeed configuration: values that `change` changes come
    /// `from` there.
    pub fn derive(&mut self, from: &'static str, change: impl FnOnce(&mut Self)) {
        let before = PartialRunConfig::from(self.clone());
        change(self);
        let after = PartialRunConfig::from(self.clone());
        for setting in settings().filter(|setting| before.text(setting) != after.text(setting)) {
            self.origins.set_path(setting.path, Origin::Derived(from));
        }
    }

    /// The text of a value as it holds; `None` where nothing is a possible value and holds.
    pub fn text(&self, setting: &Setting) -> Option<String> {
        PartialRunConfig::from(self.clone()).text(setting)
    }
}
