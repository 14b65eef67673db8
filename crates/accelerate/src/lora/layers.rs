//! The layers of a model as adapters see them.

use super::kernels::{LoraEmbedding, LoraLinear, SharedMode};
use crate::nn::{AnyLayer, Embedding, LinearLayer, Param, ParamStore};
use accelerate_core::lora::{LayerEntry, LayerKind};
use std::sync::Arc;

/// A layer that has, or has had, an adapter or a copy of an adapter's own.
#[derive(Debug)]
pub(super) struct Wrapped {
    pub(super) path: String,
    pub(super) layer: WrappedLayer,
    pub(super) mode: SharedMode,
}

/// The layer itself.
#[derive(Debug)]
pub(super) enum WrappedLayer {
    Linear(LinearLayer),
    Embedding(Embedding),
}

impl Wrapped {
    /// Goes around the kernel of the layer; nothing for a layer that is neither linear nor an embedding.
    pub(super) fn new(path: String, layer: &AnyLayer) -> Option<Self> {
        let mode = SharedMode::default();
        let layer = match layer {
            AnyLayer::Embedding(embedding) => {
                embedding.set_around(Some(Arc::new(LoraEmbedding { mode: mode.clone() })));
                WrappedLayer::Embedding(embedding.clone())
            }
            other => {
                let linear = other.linear()?;
                linear.set_around(Some(Arc::new(LoraLinear { mode: mode.clone() })));
                WrappedLayer::Linear(linear)
            }
        };
        Some(Self { path, layer, mode })
    }

    /// Leaves the layer to its kernel.
    pub(super) fn unwrap(&self) {
        match &self.layer {
            WrappedLayer::Linear(linear) => linear.set_around(None),
            WrappedLayer::Embedding(embedding) => embedding.set_around(None),
        }
    }

    pub(super) fn weight(&self) -> &Param {
        match &self.layer {
            WrappedLayer::Linear(linear) => linear.weight(),
            WrappedLayer::Embedding(embedding) => &embedding.weight,
        }
    }

    pub(super) fn bias(&self) -> Option<&Param> {
        match &self.layer {
            WrappedLayer::Linear(linear) => linear.bias(),
            WrappedLayer::Embedding(_) => None,
        }
    }

    /// Is its weight `[in_features, out_features]` now?
    pub(super) fn is_transposed(&self) -> bool {
        matches!(&self.layer, WrappedLayer::Linear(linear) if linear.is_transposed())
    }

    /// Is what adapters add to it the transposed product of their matrices?
    pub(super) fn adds_transposed(&self) -> bool {
        matches!(self.layer, WrappedLayer::Embedding(_)) || self.is_transposed()
    }
}

/// All layers of a model with parameters, in the order in which they were made.
pub(super) fn entries(layers: &[(String, AnyLayer)]) -> Vec<LayerEntry> {
    let tables: Vec<&Param> = layers
        .iter()
        .filter_map(|(_, layer)| match layer {
            AnyLayer::Embedding(embedding) => Some(&embedding.weight),
            _ => None,
        })
        .collect();
    let entry = |(path, layer): &(String, AnyLayer)| match layer {
        AnyLayer::Embedding(embedding) => {
            LayerEntry::new(path.clone(), LayerKind::Embedding, two_sizes(&embedding.weight))
        }
        other => match other.linear() {
            Some(linear) => LayerEntry {
                has_bias: linear.bias().is_some(),
                is_tied: tables.iter().any(|table| table.is_same(linear.weight())),
                is_transposed: linear.is_transposed(),
                ..LayerEntry::new(path.clone(), LayerKind::Linear, linear.sizes().map(|size| size.max(0) as usize))
            },
            None => LayerEntry::new(path.clone(), LayerKind::Other(other.kind().to_owned()), [0, 0]),
        },
    };
    layers.iter().map(entry).collect()
}

fn two_sizes(weight: &Param) -> [usize; 2] {
    let shape = weight.shape();
    [0, 1].map(|dim| shape.get(dim).map_or(0, |&size| size.max(0) as usize))
}

/// The biases of a model that it has beside adapters.
pub(super) fn model_biases(store: &ParamStore) -> Vec<Param> {
    let is_bias = |param: &Param| {
        let name = param.name();
        let is_of_adapter = name.split('.').any(|part| part == "modules_to_save" || part.starts_with("lora_"));
        (name == "bias" || name.ends_with(".bias")) && !is_of_adapter
    };
    store.parameters().into_iter().filter(is_bias).collect()
}
