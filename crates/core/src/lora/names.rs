//! How an adapter's tensors are called, in the model and in files.

use super::{LayerKind, Resolved};
use crate::error::Result;
use crate::error::lora::LoraErrorKind as Kind;
use crate::weight_files::shown;

/// What PEFT puts before every name in a file.
const FILE_PREFIX: &str = "base_model.model.";

/// What a tensor of an adapter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AdapterTensorKind {
    /// A of a linear layer, `[r, in_features]`.
    LoraA,
    /// B of a linear layer, `[out_features, r]`.
    LoraB,
    /// The bias of B, `[out_features]`.
    LoraBBias,
    /// A of an embedding, `[r, num_embeddings]`.
    EmbeddingA,
    /// B of an embedding, `[embedding_dim, r]`.
    EmbeddingB,
    /// The weight of a module that is saved, in the shape of the model's own.
    SavedWeight,
    /// Its bias.
    SavedBias,
    /// A bias of the model that is trained where it is.
    ModelBias,
}

/// A tensor of an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterTensor {
    /// What it is.
    pub kind: AdapterTensorKind,
    /// The position of its layer in the list that was resolved.
    pub layer: usize,
    /// Its name in the model, after the path of the layer; of [`AdapterTensorKind::ModelBias`] that of the bias.
    pub name: String,
    /// Its name in files.
    pub file_key: String,
    /// Sizes of its dims.
    pub shape: Vec<usize>,
}

/// The name in a file of what is called `name` in the model.
///
/// ```
/// assert_eq!(accelerate_core::lora::file_key("score.weight"), "base_model.model.score.weight");
/// ```
pub fn file_key(name: &str) -> String {
    format!("{FILE_PREFIX}{name}")
}

/// Whether an adapter can be called so.
///
/// # Errors
/// [`is_config`](crate::Error::is_config): a name that is empty, that is made of anything but letters, digits, `_` and `-`, or that
/// could be taken for a part of the adapter.
///
/// ```
/// use accelerate_core::lora::check_adapter_name;
/// assert!(check_adapter_name("default").is_ok());
/// assert!(check_adapter_name("a.b").is_err() && check_adapter_name("lora_A").is_err());
/// ```
pub fn check_adapter_name(name: &str) -> Result<()> {
    let is_plain = name.chars().all(|letter| letter.is_alphanumeric() || letter == '_' || letter == '-');
    let is_part = name.contains("lora_") || name.contains("modules_to_save");
    if name.is_empty() || name.len() > 200 || !is_plain || is_part {
        return Err(Kind::AdapterName { name: shown(name) }.into());
    }
    Ok(())
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

impl Resolved {
    /// All tensors of an adapter that is called `adapter`, in the order of the layers.
    ///
    /// ```
    /// use accelerate_core::lora::{LayerEntry, LayerKind, LoraConfig};
    /// let layers = [LayerEntry { has_bias: true, ..LayerEntry::new("proj", LayerKind::Linear, [2, 3]) }];
    /// let config = LoraConfig { r: 4, target_modules: Some(["proj"].into()), ..Default::default() };
    /// let tensors = config.resolve(&layers)?.tensors("default", &layers);
    /// assert_eq!(tensors[0].name, "lora_A.default.weight");
    /// assert_eq!(tensors[0].file_key, "base_model.model.proj.lora_A.weight");
    /// assert_eq!((&tensors[0].shape[..], &tensors[1].shape[..]), (&[4, 3][..], &[2, 4][..]));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn tensors(&self, adapter: &str, layers: &[super::LayerEntry]) -> Vec<AdapterTensor> {
        use AdapterTensorKind as Tensor;
        let mut tensors = Vec::new();
        for adapted in &self.layers {
            let layer = adapted.layer;
            let entry = &layers[layer];
            let mut add = |kind, name: String, in_file: &str, shape: &[usize]| {
                let file_key = file_key(&join(&entry.path, in_file));
                tensors.push(AdapterTensor { kind, layer, name, file_key, shape: shape.to_vec() });
            };
            let (r, [rows, columns]) = (adapted.r, entry.shape);
            if entry.kind == LayerKind::Embedding {
                add(Tensor::EmbeddingA, format!("lora_embedding_A.{adapter}"), "lora_embedding_A", &[r, rows]);
                add(Tensor::EmbeddingB, format!("lora_embedding_B.{adapter}"), "lora_embedding_B", &[columns, r]);
                continue;
            }
            add(Tensor::LoraA, format!("lora_A.{adapter}.weight"), "lora_A.weight", &[r, columns]);
            add(Tensor::LoraB, format!("lora_B.{adapter}.weight"), "lora_B.weight", &[rows, r]);
            if self.lora_bias {
                add(Tensor::LoraBBias, format!("lora_B.{adapter}.bias"), "lora_B.bias", &[rows]);
            }
        }
        for &layer in &self.saved {
            let entry = &layers[layer];
            let mut add = |kind, name: &str, shape: &[usize]| {
                let file_key = file_key(&join(&entry.path, name));
                let name = format!("modules_to_save.{adapter}.{name}");
                tensors.push(AdapterTensor { kind, layer, name, file_key, shape: shape.to_vec() });
            };
            let [rows, columns] = entry.shape;
            let stored = if entry.is_transposed { [columns, rows] } else { [rows, columns] };
            add(Tensor::SavedWeight, "weight", &stored);
            if entry.has_bias {
                add(Tensor::SavedBias, "bias", &entry.shape[..1]);
            }
        }
        tensors
    }

    /// The name in files of a bias of the model, which PEFT finds below the adapted layer where it belongs to one.
    pub fn bias_key(&self, name: &str, layers: &[super::LayerEntry]) -> String {
        let path = name.strip_suffix("bias").map(|path| path.strip_suffix('.').unwrap_or(path));
        let is_adapted = self.layers.iter().any(|adapted| Some(layers[adapted.layer].path.as_str()) == path);
        match path.filter(|_| is_adapted) {
            Some(path) => file_key(&join(path, "base_layer.bias")),
            None => file_key(name),
        }
    }
}
