//! How adapters are added, saved and loaded.

/// How [`PeftModel::add_adapter`](super::PeftModel::add_adapter) adds an adapter.
///
/// ```
/// assert!(accelerate::lora::AddAdapterOptions::default().autocast_adapter_dtype);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddAdapterOptions {
    /// Keep the matrices in float32 where the layer is in float16 or bfloat16? Default true. On quantised layers they are in
    /// float32 always.
    pub autocast_adapter_dtype: bool,
}

impl Default for AddAdapterOptions {
    fn default() -> Self {
        Self { autocast_adapter_dtype: true }
    }
}

/// How [`PeftModel::save_pretrained`](super::PeftModel::save_pretrained) saves.
///
/// ```
/// assert!(accelerate::lora::SavePretrainedOptions::default().is_main_process);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavePretrainedOptions {
    /// The adapters to save. Default: all.
    pub selected_adapters: Option<Vec<String>>,
    /// Does this process write? Default true. Of a sharded model all processes call, and one writes.
    pub is_main_process: bool,
}

impl Default for SavePretrainedOptions {
    fn default() -> Self {
        Self { selected_adapters: None, is_main_process: true }
    }
}

/// How an adapter is loaded.
///
/// ```
/// assert!(!accelerate::lora::LoadAdapterOptions::default().is_trainable);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadAdapterOptions {
    /// Will it be trained? Default false.
    pub is_trainable: bool,
    /// See [`AddAdapterOptions`]. Default true.
    pub autocast_adapter_dtype: bool,
}

impl Default for LoadAdapterOptions {
    fn default() -> Self {
        Self { is_trainable: false, autocast_adapter_dtype: true }
    }
}
