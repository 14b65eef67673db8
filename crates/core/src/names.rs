//! Names that users meet in configuration files and logs, spelled as the reference spells them.

use std::fmt::Display;

/// A number of things in English: `1 rank`, `2 ranks`, `2 processes`.
///
/// ```
/// use accelerate_core::names::counted;
/// assert_eq!((counted(1, "process"), counted(0, "process")), ("1 process".to_owned(), "0 processes".to_owned()));
/// assert_eq!((counted(1_u64, "rank"), counted(2_u64, "rank")), ("1 rank".to_owned(), "2 ranks".to_owned()));
/// ```
pub fn counted<N: Display + PartialEq + From<u8>>(number: N, thing: &str) -> String {
    let ending = match number == N::from(1) {
        true => "",
        false if thing.ends_with('s') || thing.ends_with("ch") => "es",
        false => "s",
    };
    format!("{number} {thing}{ending}")
}

/// Declares an enum whose variants have one spelling each, with `as_str`, `Display`, `FromStr` and serde.
///
/// Reading takes upper and lower case alike, and the listed aliases; writing gives the spelling. `no`
/// without quotes is the boolean `false` in YAML 1.1, so an enum with `false_is` reads `false` as that variant.
macro_rules! spelled_enum {
    (
        $(#[$meta:meta])*
        $name:ident, $what:literal $(, false_is = $false_variant:ident)? {
            $( $(#[$variant_meta:meta])* $variant:ident = $spelling:literal $(| $alias:literal)* ),+ $(,)?
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $( $(#[$variant_meta])* $variant, )+
        }

        impl $name {
            /// Every value, in the order in which they are declared.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The spelling that configuration files and logs use.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $( Self::$variant => $spelling, )+
                }
            }

            fn from_name(name: &str) -> Option<Self> {
                $(
                    if [$spelling $(, $alias)*].iter().any(|known| known.eq_ignore_ascii_case(name)) {
                        return Some(Self::$variant);
                    }
                )+
                None
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::Error;

            fn from_str(name: &str) -> $crate::Result<Self> {
                Self::from_name(name.trim()).ok_or_else(|| {
                    $crate::Error::new($crate::error::config::ConfigErrorKind::UnknownName {
                        what: $what,
                        found: name.to_owned(),
                        choices: &[$($spelling),+],
                    })
                })
            }
        }

        impl $crate::settings::SettingValue for $name {
            const KIND: $crate::settings::ValueKind = $crate::settings::ValueKind::Choice(&[$($spelling),+]);

            fn read(text: &str) -> Option<Self> {
                $( if $crate::environment::str_to_bool(text) == Some(false) && Self::from_name(text).is_none() {
                    return Some(Self::$false_variant);
                } )?
                Self::from_name(text.trim())
            }

            fn write(&self) -> String {
                self.as_str().to_owned()
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Visitor;
                impl serde::de::Visitor<'_> for Visitor {
                    type Value = $name;

                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str(concat!("a ", $what))
                    }

                    fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<$name, E> {
                        name.parse().map_err(E::custom)
                    }

                    // The reference's enums may be written as their numbers.
                    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<$name, E> {
                        self.visit_str(&number.to_string())
                    }

                    $(
                        fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<$name, E> {
                            if value {
                                return Err(E::invalid_type(serde::de::Unexpected::Bool(true), &self));
                            }
                            Ok($name::$false_variant)
                        }
                    )?
                }
                deserializer.deserialize_any(Visitor)
            }
        }
    };
}
pub(crate) use spelled_enum;

spelled_enum! {
    /// How the processes of a run work together (`DistributedType` of the reference, `utils/dataclasses.py`).
    ///
    /// Types of devices that libtorch does not know here are names only, so that configuration files of the reference can be
    /// read and refused by name.
    ///
    /// ```
    /// use accelerate_core::names::DistributedType;
    /// assert_eq!(DistributedType::MultiGpu.to_string(), "MULTI_GPU");
    /// assert_eq!("TPU".parse::<DistributedType>()?, DistributedType::Xla);
    /// assert!(DistributedType::MultiGpu.is_multi_device());
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    DistributedType, "distributed type", false_is = No {
        /// One process.
        No = "NO",
        /// Several processes that compute on the CPU.
        MultiCpu = "MULTI_CPU",
        /// Several processes with one CUDA device each.
        MultiGpu = "MULTI_GPU",
        /// Ascend devices.
        MultiNpu = "MULTI_NPU",
        /// Cambricon devices.
        MultiMlu = "MULTI_MLU",
        /// Tecorigin devices.
        MultiSdaa = "MULTI_SDAA",
        /// Moore Threads devices.
        MultiMusa = "MULTI_MUSA",
        /// Intel devices.
        MultiXpu = "MULTI_XPU",
        /// Gaudi devices.
        MultiHpu = "MULTI_HPU",
        /// Trainium and Inferentia devices.
        MultiNeuron = "MULTI_NEURON",
        /// A DeepSpeed configuration: sharding by ZeRO stages.
        DeepSpeed = "DEEPSPEED",
        /// Fully sharded data parallel.
        Fsdp = "FSDP",
        /// XLA devices; called `TPU` in older configuration files.
        Xla = "XLA" | "TPU",
        /// A Megatron-LM configuration.
        MegatronLm = "MEGATRON_LM",
    }
}

impl DistributedType {
    /// Several processes with one accelerator each: every `MULTI_*` type but `MULTI_CPU`.
    ///
    /// ```
    /// use accelerate_core::names::DistributedType;
    /// assert!(!DistributedType::MultiCpu.is_multi_device());
    /// ```
    pub const fn is_multi_device(self) -> bool {
        matches!(
            self,
            Self::MultiGpu
                | Self::MultiNpu
                | Self::MultiMlu
                | Self::MultiSdaa
                | Self::MultiMusa
                | Self::MultiXpu
                | Self::MultiHpu
                | Self::MultiNeuron
        )
    }
}

spelled_enum! {
    /// Where processes run (`ComputeEnvironment` of the reference, `utils/dataclasses.py`).
    ///
    /// ```
    /// use accelerate_core::names::ComputeEnvironment;
    /// assert_eq!(ComputeEnvironment::LocalMachine.to_string(), "LOCAL_MACHINE");
    /// ```
    ComputeEnvironment, "compute environment" {
        /// On this machine, and on others where the same command is run.
        LocalMachine = "LOCAL_MACHINE",
        /// Known by name only.
        AmazonSagemaker = "AMAZON_SAGEMAKER",
    }
}

spelled_enum! {
    /// How much a program logs (the levels of Python's `logging`, which the reference takes by these names).
    ///
    /// ```
    /// use accelerate_core::names::LogLevel;
    /// assert_eq!("WARN".parse::<LogLevel>()?, LogLevel::Warning);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    LogLevel, "log level" {
        /// Everything.
        Debug = "debug",
        /// What happens.
        Info = "info",
        /// What is likely a mistake.
        Warning = "warning" | "warn",
        /// What went wrong.
        Error = "error",
        /// What ends the program.
        Critical = "critical" | "fatal",
    }
}

spelled_enum! {
    /// A stream of random numbers that can be synchronised over ranks at the start of each pass over a
    /// data loader (`RNGType` of the reference, `utils/dataclasses.py`).
    ///
    /// ```
    /// use accelerate_core::names::RngType;
    /// assert_eq!("generator".parse::<RngType>()?, RngType::Generator);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    RngType, "random number stream" {
        /// libtorch's default generator of the CPU.
        Torch = "torch",
        /// The default generators of the CUDA devices.
        Cuda = "cuda",
        /// The default generators of Cambricon devices.
        Mlu = "mlu",
        /// The default generators of Tecorigin devices.
        Sdaa = "sdaa",
        /// The default generators of Moore Threads devices.
        Musa = "musa",
        /// The default generators of Ascend devices.
        Npu = "npu",
        /// The generator of XLA devices.
        Xla = "xla",
        /// The default generators of Intel devices.
        Xpu = "xpu",
        /// The default generators of Gaudi devices.
        Hpu = "hpu",
        /// The default generators of Trainium and Inferentia devices.
        Neuron = "neuron",
        /// The generator that shuffles the data loader, and nothing else. The default.
        Generator = "generator",
    }
}

spelled_enum! {
    /// Where the values of a run are written (`LoggerType` of the reference, `utils/dataclasses.py`). Trackers of services are names
    /// only, so that they can be refused by name.
    ///
    /// ```
    /// use accelerate_core::names::LoggerType;
    /// assert_eq!("comet_ml".parse::<LoggerType>()?, LoggerType::CometMl);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    LoggerType, "tracker" {
        /// All that need no service.
        All = "all",
        /// Files that TensorBoard reads.
        TensorBoard = "tensorboard",
        /// One file with a JSON object in each line. The reference has no such tracker.
        Jsonl = "jsonl",
        /// Aim.
        Aim = "aim",
        /// Weights & Biases.
        Wandb = "wandb",
        /// Trackio.
        Trackio = "trackio",
        /// Comet.
        CometMl = "comet_ml",
        /// MLflow.
        Mlflow = "mlflow",
        /// ClearML.
        ClearMl = "clearml",
        /// DVCLive.
        DvcLive = "dvclive",
        /// SwanLab.
        SwanLab = "swanlab",
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back_in_either_case() {
        for &value in DistributedType::ALL {
            assert_eq!(value.as_str().parse::<DistributedType>().unwrap(), value);
            assert_eq!(value.as_str().to_lowercase().parse::<DistributedType>().unwrap(), value);
        }
        for &value in RngType::ALL {
            assert_eq!(value.as_str().parse::<RngType>().unwrap(), value);
        }
    }

    #[test]
    fn multi_device_is_every_multi_type_but_cpu() {
        for &value in DistributedType::ALL {
            let by_name = value.as_str().starts_with("MULTI_") && value.as_str() != "MULTI_CPU";
            assert_eq!(value.is_multi_device(), by_name, "{value}");
        }
    }

    #[test]
    fn serde_uses_the_spelling_and_takes_a_yaml_no() {
        let json = serde_json::to_string(&DistributedType::MultiCpu).unwrap();
        assert_eq!(json, "\"MULTI_CPU\"");
        assert_eq!(serde_json::from_str::<DistributedType>("false").unwrap(), DistributedType::No);
        let error = serde_json::from_str::<DistributedType>("true").unwrap_err().to_string();
        assert!(error.contains("a distributed type"), "{error}");
        assert!(serde_json::from_str::<RngType>("false").is_err());
    }

    #[test]
    fn an_unknown_name_lists_the_choices() {
        let error = "MULTI".parse::<DistributedType>().unwrap_err();
        assert!(error.is_config());
        assert!(error.to_string().starts_with("\"MULTI\" is not a distributed type; the choices are \"NO\""));
    }
}
