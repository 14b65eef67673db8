//! One adapter of a model: its parameters, made in the order of PEFT's random numbers.

use super::kernels::LayerAdapter;
use super::layers::model_biases;
use crate::error::{LoraError, NnError, Result};
use crate::messages;
use crate::nn::{AnyLayer, Init, Linear, Param, ParamStore, Path, TransposedKernel, default_bias};
use accelerate_core::lora::{
    AdaptedLayer, AdapterTensor, InitLoraWeights, LayerEntry, LoraBias, LoraConfig, Resolved, file_key,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use tch::{Device, Kind, Tensor};

/// An adapter that is in the model.
#[derive(Debug)]
pub(super) struct Adapter {
    pub(super) name: String,
    pub(super) config: LoraConfig,
    pub(super) resolved: Resolved,
    /// By the position of the layer.
    pub(super) layers: BTreeMap<usize, Arc<LayerAdapter>>,
    /// By the position of the layer.
    pub(super) copies: BTreeMap<usize, Linear>,
    /// Biases of the model that are trained with it.
    pub(super) biases: Vec<Param>,
    /// Its own parameters with their names in files, in order.
    pub(super) own: Vec<(String, Param)>,
}

/// What adapters are made of.
pub(super) struct Model<'a> {
    pub(super) store: &'a ParamStore,
    pub(super) layers: &'a [(String, AnyLayer)],
    pub(super) entries: &'a [LayerEntry],
}

impl Adapter {
    /// Registers the parameters of an adapter, frozen. Nothing stays registered where that fails.
    pub(super) fn new(model: &Model<'_>, name: &str, config: LoraConfig, widens: bool) -> Result<Self> {
        let resolved = config.resolve(model.entries)?;
        // As PEFT does it, the configuration says how the weights of the layers are stored.
        let is_conv1d = |adapted: &AdaptedLayer| matches!(model.layers[adapted.layer].1, AnyLayer::Conv1D(_));
        let fan_in_fan_out = resolved.layers.iter().any(is_conv1d);
        if config.fan_in_fan_out && !fan_in_fan_out {
            messages::warning!(
                "adapter {name}: fan_in_fan_out has no effect, these linear layers are kept as [out_features, in_features]"
            );
        }
        let config = LoraConfig { fan_in_fan_out, ..config };
        let mut maker = Maker { model, adapter: name, config: &config, widens, made: Vec::new() };
        let made = maker.layers(&resolved).and_then(|layers| Ok((layers, maker.copies(&resolved)?)));
        let own = maker.made;
        let (layers, copies) = match made {
            Ok(made) => made,
            Err(error) => {
                model.store.remove(&own);
                return Err(error);
            }
        };
        let own = named_in_files(&resolved.tensors(name, model.entries), model.entries, own);
        let biases = biases(model, &config, &resolved);
        Ok(Self { name: name.to_owned(), config, resolved, layers, copies, biases, own })
    }

    /// Everything that is trained with it, with the names that files have for it.
    pub(super) fn in_files(&self, entries: &[LayerEntry]) -> Vec<(String, Param)> {
        let bias = |param: &Param| (self.resolved.bias_key(param.name(), entries), param.clone());
        self.own.iter().cloned().chain(self.biases.iter().map(bias)).collect()
    }
}

/// Pairs the names in files with the parameters, which were made in another order.
fn named_in_files(tensors: &[AdapterTensor], entries: &[LayerEntry], own: Vec<Param>) -> Vec<(String, Param)> {
    let name_of = |tensor: &AdapterTensor| join(&entries[tensor.layer].path, &tensor.name);
    let keys: BTreeMap<String, &String> = tensors.iter().map(|tensor| (name_of(tensor), &tensor.file_key)).collect();
    let key = |param: &Param| keys.get(param.name()).map_or_else(|| file_key(param.name()), |key| (*key).clone());
    own.into_iter().map(|param| (key(&param), param)).collect()
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// The biases of the model that a configuration trains.
pub(super) fn biases(model: &Model<'_>, config: &LoraConfig, resolved: &Resolved) -> Vec<Param> {
    match config.bias {
        LoraBias::None => Vec::new(),
        LoraBias::All => {
            // A layer of which the adapter has a copy is not used itself.
            let saved = resolved.saved.iter().filter_map(|&layer| model.layers[layer].1.linear()?.bias().cloned());
            let saved: Vec<Param> = saved.collect();
            let is_used = |bias: &Param| !saved.iter().any(|saved| saved.is_same(bias));
            model_biases(model.store).into_iter().filter(is_used).collect()
        }
        LoraBias::LoraOnly => {
            let bias = |adapted: &AdaptedLayer| model.layers[adapted.layer].1.linear()?.bias().cloned();
            resolved.layers.iter().filter_map(bias).collect()
        }
    }
}

/// Makes parameters, and remembers which.
struct Maker<'a> {
    model: &'a Model<'a>,
    adapter: &'a str,
    config: &'a LoraConfig,
    /// Are adapters of layers in half precision kept in float32?
    widens: bool,
    made: Vec<Param>,
}

impl Maker<'_> {
    fn layers(&mut self, resolved: &Resolved) -> Result<BTreeMap<usize, Arc<LayerAdapter>>> {
        let make = |adapted: &AdaptedLayer| Ok((adapted.layer, Arc::new(self.layer(adapted)?)));
        resolved.layers.iter().map(make).collect()
    }

    fn layer(&mut self, adapted: &AdaptedLayer) -> Result<LayerAdapter> {
        let (path, layer) = &self.model.layers[adapted.layer];
        let path = self.path(path);
        let (r, adapter) = (adapted.r as i64, self.adapter);
        let (a, b, bias) = match layer {
            AnyLayer::Embedding(embedding) => {
                let [a, b] = self.drawn_for_embedding(r, &embedding.weight)?;
                let kind = self.kind(&embedding.weight);
                let a = self.param(&path, &format!("lora_embedding_A.{adapter}"), a, kind)?;
                (a, self.param(&path, &format!("lora_embedding_B.{adapter}"), b, kind)?, None)
            }
            other => {
                let Some(linear) = other.linear() else {
                    return Err(LoraError::NoKernel { path: path.name().to_owned(), kind: other.kind() }.into());
                };
                let (a, b, bias) = self.drawn_for_linear(r, linear.sizes())?;
                let kind = self.kind(linear.weight());
                let a = self.param(&path, &format!("lora_A.{adapter}.weight"), a, kind)?;
                let b = self.param(&path, &format!("lora_B.{adapter}.weight"), b, kind)?;
                let bias = bias.map(|bias| self.param(&path, &format!("lora_B.{adapter}.bias"), bias, kind));
                (a, b, bias.transpose()?)
            }
        };
        let training = self.model.store.training_flag();
        let (a, b) = (Linear::within(a, None), Linear::within(b, bias));
        Ok(LayerAdapter { a, b, scaling: adapted.scaling, dropout: self.config.lora_dropout, training })
    }

    /// Two new linear layers of PyTorch, of which the first is filled once more.
    fn drawn_for_linear(
        &self,
        r: i64,
        [out_features, in_features]: [i64; 2],
    ) -> Result<(Tensor, Tensor, Option<Tensor>)> {
        let (a, b) = (empty(&[r, in_features])?, empty(&[out_features, r])?);
        Init::default_weight().apply(&a)?;
        Init::default_weight().apply(&b)?;
        let bias = self.config.lora_bias.then(|| empty(&[out_features])).transpose()?;
        if let Some(bias) = &bias {
            default_bias(r).apply(bias)?;
        }
        match self.config.init_lora_weights {
            InitLoraWeights::Random => return Ok((a, b, bias)),
            InitLoraWeights::Default => Init::default_weight().apply(&a)?,
            InitLoraWeights::Gaussian => Init::Normal { mean: 0.0, std: 1.0 / r as f64 }.apply(&a)?,
        }
        Init::Zeros.apply(&b)?;
        if let Some(bias) = &bias {
            Init::Zeros.apply(bias)?;
        }
        Ok((a, b, bias))
    }

    /// Two random tables, of which the second is filled once more.
    fn drawn_for_embedding(&self, r: i64, weight: &Param) -> Result<[Tensor; 2]> {
        let [num_embeddings, embedding_dim] = sizes(weight);
        let standard_normal = Init::Normal { mean: 0.0, std: 1.0 };
        let (a, b) = (empty(&[r, num_embeddings])?, empty(&[embedding_dim, r])?);
        standard_normal.apply(&a)?;
        standard_normal.apply(&b)?;
        if self.config.init_lora_weights != InitLoraWeights::Random {
            Init::Zeros.apply(&a)?;
            standard_normal.apply(&b)?;
        }
        Ok([a, b])
    }

    fn copies(&mut self, resolved: &Resolved) -> Result<BTreeMap<usize, Linear>> {
        let mut copies = BTreeMap::new();
        for &position in &resolved.saved {
            let (path, layer) = &self.model.layers[position];
            let path = self.path(path).sub("modules_to_save").sub(self.adapter);
            let (weight, bias, is_transposed) = match (layer, layer.linear()) {
                (_, Some(linear)) => (linear.weight().clone(), linear.bias().cloned(), linear.is_transposed()),
                (AnyLayer::Embedding(embedding), None) => (embedding.weight.clone(), None, false),
                (other, None) => {
                    return Err(LoraError::NoKernel { path: path.name().to_owned(), kind: other.kind() }.into());
                }
            };
            let weight = self.copy(&path, "weight", &weight)?;
            let bias = bias.map(|bias| self.copy(&path, "bias", &bias)).transpose()?;
            let copy = Linear::within(weight, bias);
            if is_transposed {
                copy.set_kernel(Arc::new(TransposedKernel));
            }
            copies.insert(position, copy);
        }
        Ok(copies)
    }

    fn copy(&mut self, path: &Path, name: &str, of: &Param) -> Result<Param> {
        if of.is_deferred() {
            return Err(NnError::Deferred { parameter: of.name().to_owned() }.into());
        }
        let values = of.get()?.f_detach_copy()?;
        let kind = values.f_kind()?;
        self.param(path, name, values, kind)
    }

    fn param(&mut self, path: &Path, name: &str, values: Tensor, kind: Kind) -> Result<Param> {
        let param = path.param(name, values.f_to_kind(kind)?)?;
        self.made.push(param.clone());
        param.set_requires_grad(false)?;
        Ok(param)
    }

    /// Adapters are as exact as the layer, and in float32 where it is in half precision or quantised.
    fn kind(&self, weight: &Param) -> Kind {
        match weight.kind() {
            Kind::Double => Kind::Double,
            half @ (Kind::Half | Kind::BFloat16) if !self.widens => half,
            _ => Kind::Float,
        }
    }

    fn path(&self, path: &str) -> Path {
        let root = self.model.store.root();
        if path.is_empty() { root } else { root.sub(path) }
    }
}

fn sizes(weight: &Param) -> [i64; 2] {
    let shape = weight.shape();
    [0, 1].map(|dim| shape.get(dim).copied().unwrap_or_default())
}

fn empty(shape: &[i64]) -> Result<Tensor> {
    Ok(Tensor::f_empty(shape, (Kind::Float, Device::Cpu))?)
}
