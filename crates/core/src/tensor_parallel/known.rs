//! Plans of models that are known by their `config.json`.

use super::{LayerEntry, LayerKind, LayerRule, ParallelStyle, TensorParallelPlan};
use crate::Result;
use crate::error::tensor_parallel::TensorParallelErrorKind as Kind;
use crate::plan::{Inventory, ParameterEntry};
use serde_json::{Map, Value};

impl TensorParallelPlan {
    /// How ranks divide the layers of a GPT-2 whose heads have `head_dim` features: heads stay whole.
    pub fn gpt2(head_dim: usize) -> Self {
        let packed = LayerRule::from(ParallelStyle::PackedColwise).with_parts(3).with_unit(head_dim);
        Self::default()
            .with("wte", ParallelStyle::EmbeddingRowwise)
            .with("h.*.attn.c_attn", packed)
            .with("h.*.attn.c_proj", LayerRule::from(ParallelStyle::Rowwise).with_unit(head_dim))
            .with("h.*.mlp.c_fc", ParallelStyle::Colwise)
            .with("h.*.mlp.c_proj", ParallelStyle::Rowwise)
            .with("lm_head", ParallelStyle::ColwiseGatherOutput)
            .in_sequence(&["wpe", "drop", "h.*.ln_1", "h.*.attn.resid_dropout", "h.*.ln_2", "h.*.mlp.dropout", "ln_f"])
    }

    /// How ranks divide the layers of a Llama whose heads have `head_dim` features, and of which `group_size` heads of queries share one
    /// of keys and values: they stay together.
    pub fn llama(head_dim: usize, group_size: usize) -> Self {
        let heads = |style: ParallelStyle, unit| LayerRule::from(style).with_unit(unit);
        let group = group_size.saturating_mul(head_dim);
        Self::default()
            .with("embed_tokens", ParallelStyle::EmbeddingRowwise)
            .with("layers.*.self_attn.q_proj", heads(ParallelStyle::Colwise, group))
            .with("layers.*.self_attn.k_proj", heads(ParallelStyle::Colwise, head_dim))
            .with("layers.*.self_attn.v_proj", heads(ParallelStyle::Colwise, head_dim))
            .with("layers.*.self_attn.o_proj", heads(ParallelStyle::Rowwise, group))
            .with("layers.*.mlp.gate_proj", ParallelStyle::Colwise)
            .with("layers.*.mlp.up_proj", ParallelStyle::Colwise)
            .with("layers.*.mlp.down_proj", ParallelStyle::Rowwise)
            .with("lm_head", ParallelStyle::ColwiseGatherOutput)
            .in_sequence(&["layers.*.input_layernorm", "layers.*.post_attention_layernorm", "norm"])
    }

    fn in_sequence(self, patterns: &[&str]) -> Self {
        patterns.iter().fold(self, |plan, &pattern| plan.with_sequence_rule(pattern, ParallelStyle::SequenceParallel))
    }
}

/// How ranks divide the weights of files, by the `config.json` beside them.
///
/// ```
/// use accelerate_core::plan::{Inventory, ParameterEntry};
/// use accelerate_core::tensor_parallel::KnownModel;
/// let model = KnownModel::from_config(r#"{"model_type": "gpt2", "n_embd": 8, "n_head": 2}"#)?;
/// let weight = ParameterEntry::new("h.0.mlp.c_fc.weight", &[8, 32], "float32", 4);
/// let own = model.first_slices(&Inventory { parameters: vec![weight] }, 4)?;
/// assert_eq!(own.parameters[0].shape, [8, 8]);
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownModel {
    plan: TensorParallelPlan,
    /// Layers whose weight is `[in_features, out_features]` in files, by the last part of their paths.
    transposed: &'static [&'static str],
}

impl KnownModel {
    /// Reads a `config.json`.
    ///
    /// # Errors
    /// [`Error::is_plan`](crate::Error::is_plan): no JSON, a `model_type` for which no plan is known, or numbers that no model has.
    pub fn from_config(text: &str) -> Result<Self> {
        let config: Map<String, Value> =
            serde_json::from_str(text).map_err(|error| Kind::Config { reason: error.to_string() })?;
        let number = |key: &str| config.get(key).and_then(Value::as_u64).and_then(|it| usize::try_from(it).ok());
        let quotient = |whole: Option<usize>, parts: Option<usize>| whole?.checked_div(parts?).filter(|it| *it > 0);
        let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
        let no_heads = || Kind::Config { reason: "it does not say how wide heads of attention are".to_owned() };
        match model_type {
            "gpt2" => {
                let head_dim = quotient(number("n_embd"), number("n_head")).ok_or_else(no_heads)?;
                Ok(Self { plan: TensorParallelPlan::gpt2(head_dim), transposed: &["c_attn", "c_proj", "c_fc"] })
            }
            "llama" | "mistral" | "qwen2" => {
                let heads = number("num_attention_heads");
                let head_dim = number("head_dim").or_else(|| quotient(number("hidden_size"), heads));
                let group = quotient(heads, number("num_key_value_heads").or(heads));
                let (head_dim, group) = head_dim.zip(group).ok_or_else(no_heads)?;
                Ok(Self { plan: TensorParallelPlan::llama(head_dim, group), transposed: &[] })
            }
            other => Err(Kind::UnknownModel { model_type: other.to_owned() }.into()),
        }
    }

    /// The parameters of the first of `tp_size` ranks, which has no less than any other.
    ///
    /// # Errors
    /// [`Error::is_plan`](crate::Error::is_plan): features that are no whole heads, or fewer heads than ranks.
    pub fn first_slices(&self, inventory: &Inventory, tp_size: usize) -> Result<Inventory> {
        let layers: Vec<LayerEntry> = inventory.parameters.iter().filter_map(|entry| self.layer(entry)).collect();
        let mut own = inventory.clone();
        for divided in self.plan.clone().of_layers(&layers).divide(&layers, tp_size)? {
            let layer = &layers[divided.layer];
            let features = divided.parts * divided.slices.first().map_or(0, ExactSizeIterator::len);
            let dim = if self.is_transposed(&layer.path) { 1 - divided.size_index() } else { divided.size_index() };
            let bias = layer.weight.strip_suffix("weight").map(|path| format!("{path}bias"));
            for entry in &mut own.parameters {
                let divided_dim = match Some(&entry.name) {
                    Some(name) if *name == layer.weight => Some(dim),
                    // A rowwise layer adds its bias to the sum of all ranks.
                    name if name == bias.as_ref() && divided.size_index() == 0 => Some(0),
                    _ => None,
                };
                if let Some(size) = divided_dim.and_then(|dim| entry.shape.get(dim).map(|_| dim)) {
                    entry.whole_shape = Some(entry.shape.clone());
                    entry.shape[size] = features;
                }
            }
        }
        Ok(own)
    }

    fn layer(&self, entry: &ParameterEntry) -> Option<LayerEntry> {
        let path = entry.name.strip_suffix(".weight")?;
        let [first, second] = entry.shape[..] else { return None };
        let sizes = if self.is_transposed(path) { [second, first] } else { [first, second] };
        let is_embedding = matches!(last_part(path), "wte" | "wpe" | "embed_tokens");
        let kind = if is_embedding { LayerKind::Embedding } else { LayerKind::Linear };
        Some(LayerEntry::new(path, kind, sizes))
    }

    fn is_transposed(&self, path: &str) -> bool {
        self.transposed.contains(&last_part(path))
    }
}

fn last_part(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}
