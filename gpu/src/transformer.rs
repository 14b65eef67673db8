//! Transformers of the races: a layer of GPT-2, or with its norms behind the additions one of BERT. `python/race.py` has the same.

use accelerate::nn::{Embedding, LayerNorm, Linear, Module, ParamStore, Path};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Result, tch};

/// Sizes of a model and of its batches; `python/race.py` has the same numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) vocabulary: i64,
    pub(crate) width: i64,
    pub(crate) layers: usize,
    pub(crate) heads: i64,
    pub(crate) length: i64,
    pub(crate) batch_size: i64,
}

/// Numbers between -0.5 and 0.5, float32, made where they are used: both programs compute them with the same kernels.
pub(crate) fn noise(shape: &[i64], seed: f64, device: Device) -> Result<Tensor> {
    let numbers = Tensor::f_arange(shape.iter().product::<i64>(), (Kind::Double, device))?;
    let numbers = numbers.f_mul_scalar(12.9898)?.f_add_scalar(seed)?.f_sin()?.f_mul_scalar(43758.5453)?;
    let numbers = numbers.f_sub(&numbers.f_floor()?)?.f_sub_scalar(0.5)?;
    Ok(numbers.f_to_kind(Kind::Float)?.f_reshape(shape)?)
}

/// Gives logits of two classes from the first token as BERT, of the next tokens by its own table as GPT-2.
pub(crate) struct Transformer {
    store: ParamStore,
    tokens: Embedding,
    positions: Embedding,
    norm: LayerNorm,
    layers: Vec<Block>,
    end: End,
    length: i64,
}

enum End {
    Classes { pooler: Linear, head: Linear },
    Tokens { head: Linear },
}

impl Transformer {
    pub(crate) fn new(size: Size, is_bert: bool, device: Device) -> Result<Self> {
        let Size { vocabulary, width, layers, heads, length, .. } = size;
        let store = ParamStore::new(device);
        let root = store.root();
        let tokens = Embedding::new(&root / "wte", vocabulary, width, Default::default())?;
        let positions = Embedding::new(&root / "wpe", length, width, Default::default())?;
        let norm = LayerNorm::new(&root / "norm", [width], Default::default())?;
        let layer = |index: usize| Block::new(&(&root / "h" / index), width, heads, is_bert);
        let layers = (0..layers).map(layer).collect::<Result<Vec<_>>>()?;
        let end = if is_bert {
            let pooler = Linear::new(&root / "pooler", width, width, Default::default())?;
            End::Classes { pooler, head: Linear::new(&root / "head", width, 2, Default::default())? }
        } else {
            let weight = (&root / "head").alias("weight", &tokens.weight)?;
            End::Tokens { head: Linear::from_params(&root / "head", weight, None) }
        };
        for (index, param) in store.parameters().iter().enumerate() {
            let shape = param.shape();
            let value = match shape.len() {
                0 | 1 if param.name().ends_with("bias") => Tensor::f_zeros(&shape, (Kind::Float, device))?,
                0 | 1 => Tensor::f_ones(&shape, (Kind::Float, device))?,
                _ => noise(&shape, index as f64, device)?.f_mul_scalar(0.1)?,
            };
            param.copy_(&value)?;
        }
        Ok(Self { store, tokens, positions, norm, layers, end, length })
    }
}

impl Module for Transformer {
    type Input = Tensor;
    type Output = Tensor;

    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let places = Tensor::f_arange(self.length, (Kind::Int64, tokens.device()))?;
        let mut x = self.tokens.forward(tokens)?.f_add(&self.positions.forward(&places)?)?;
        if let End::Classes { .. } = self.end {
            x = self.norm.forward(&x)?;
        }
        for layer in &self.layers {
            x = layer.forward(&x)?;
        }
        match &self.end {
            End::Classes { pooler, head } => head.forward(&pooler.forward(&x.f_select(1, 0)?)?.f_tanh()?),
            End::Tokens { head } => head.forward(&self.norm.forward(&x)?),
        }
    }

    fn params(&self) -> &ParamStore {
        &self.store
    }
}

struct Block {
    norm_1: LayerNorm,
    qkv: Linear,
    out: Linear,
    norm_2: LayerNorm,
    up: Linear,
    down: Linear,
    heads: i64,
    is_bert: bool,
}

impl Block {
    fn new(path: &Path, width: i64, heads: i64, is_bert: bool) -> Result<Self> {
        Ok(Self {
            norm_1: LayerNorm::new(path / "norm_1", [width], Default::default())?,
            qkv: Linear::new(path / "qkv", width, 3 * width, Default::default())?,
            out: Linear::new(path / "out", width, width, Default::default())?,
            norm_2: LayerNorm::new(path / "norm_2", [width], Default::default())?,
            up: Linear::new(path / "up", width, 4 * width, Default::default())?,
            down: Linear::new(path / "down", 4 * width, width, Default::default())?,
            heads,
            is_bert,
        })
    }

    fn attend(&self, x: &Tensor) -> Result<Tensor> {
        let heads = self.qkv.forward(x)?.f_unflatten(2, [3, self.heads, -1])?.f_permute([2, 0, 3, 1, 4])?;
        let heads = heads.f_unbind(0)?;
        let (none, is_causal) = (None::<Tensor>, !self.is_bert);
        let attended = tch::Tensor::f_scaled_dot_product_attention(
            &heads[0], &heads[1], &heads[2], none, 0.0, is_causal, None, false,
        )?;
        self.out.forward(&attended.f_transpose(1, 2)?.f_flatten(2, 3)?)
    }

    fn widen(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&self.up.forward(x)?.f_gelu("none")?)
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if self.is_bert {
            let x = self.norm_1.forward(&x.f_add(&self.attend(x)?)?)?;
            return self.norm_2.forward(&x.f_add(&self.widen(&x)?)?);
        }
        let x = x.f_add(&self.attend(&self.norm_1.forward(x)?)?)?;
        Ok(x.f_add(&self.widen(&self.norm_2.forward(&x)?)?)?)
    }
}
