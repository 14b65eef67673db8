//! AdamW with its state in 8 bits.

use super::Optimizer;
use super::batches::step_each;
use super::handle::{GroupDefaults, GroupSettings, OptimizerHandle, ParamGroup, at_least_zero, beta1s, check_betas};
use super::quantized::{Codebook, is_quantized, num_blocks};
use super::state::{Loading, OptimizerState, SharedOptions, Wanted, save_groups, save_layouts, save_tensor};
use crate::error::{OptimError, Result};
use crate::messages;
use crate::nn::{Param, ParamStore};
use accelerate_core::names::counted;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};
use torch_ext::scalar;

/// AdamW that keeps its two averages in 8 bits: about 2 bytes of state per entry instead of 8.
///
/// Steps are those of [`AdamW`](super::AdamW), computed in float32 (in float64 for such parameters).
/// Between steps, the averages are codes in blocks of 256 entries, each with a scale (Dettmers and
/// others, "8-bit Optimizers via Block-wise Quantization", 2021; maps, blocks and order of arithmetic as in
/// `torchao.optim.AdamW8bit`). That changes an entry of `exp_avg` by at most 0.0071, one of `exp_avg_sq` by at
/// most 0.0036 of the largest in its block. So weights differ from AdamW's: in the tests, after ten steps,
/// on average by 1% of the way they went where gradients within a block differ by a factor of 10, by
/// 6% where it is 3000.
///
/// Parameters with fewer than 4096 entries, or with a number of entries that is no multiple of 256, keep
/// exact averages, and train as with AdamW but for rounding. One parameter is worked on at a time, so a
/// step needs a few float32 copies of the largest parameter. Of a sharded parameter the entries of all shards
/// count, so that its shards are all kept alike; blocks begin with a shard's first entry, and its last one may have fewer than 256.
///
/// State is made at a parameter's first step with a gradient: `exp_avg` and `exp_avg_sq` (uint8, of its
/// shape), `exp_avg_scale` and `exp_avg_sq_scale` (float, one for each block), `step` (a float scalar).
/// Where averages are exact, they are floats, and there are no scales. Averages that were saved as floats are taken, too, and
/// rounded to 8 bits anew, which a warning says: so a checkpoint goes on where shards are cut otherwise.
///
/// Four differences from torchao: scales are tensors of their own instead of parts of a tensor subclass;
/// the smallest scale is float32's smallest number instead of 1e-12, so tiny gradients count; an
/// entry of `exp_avg_sq` that is above 0 is never rounded to 0, because the next step might divide
/// by it; and a shard with any number of entries is in 8 bits.
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::{AdamW8bit, Optimizer}, tch::{Device, Kind}};
///
/// let store = ParamStore::new(Device::Cpu);
/// let weight = store.root().param("weight", ([64, 64], Init::Zeros))?;
/// let mut optimizer = AdamW8bit::new(&store, 0.1)?;
/// (weight.get()? * 5.0).sum(None).backward();
/// optimizer.step()?;
/// assert!((weight.get()?.double_value(&[0, 0]) + 0.1).abs() < 1e-6);
/// let state = optimizer.state_dict()?;
/// assert_eq!(state.tensors["exp_avg.weight"].kind(), Kind::Uint8);
/// assert_eq!(state.tensors["exp_avg_scale.weight"].size(), [16]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct AdamW8bit {
    handle: OptimizerHandle,
    options: Options,
    /// Group by group, in the order of the parameters.
    moments: Vec<Option<Moments>>,
    /// It has said so since its last step.
    has_told_of_rounding: bool,
}

/// Settings that all groups share, under the names PyTorch saves such settings by.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Options {
    betas: (f64, f64),
    eps: f64,
}

impl SharedOptions for Options {
    fn check(&self, owner: &'static str, momenta: &[f64]) -> Result<()> {
        at_least_zero(owner, "eps", self.eps)?;
        check_betas(owner, momenta, self.betas.1)
    }
}

/// Both averages, and what their scales are called.
const NAMES: [(&str, &str); 2] = [("exp_avg", "exp_avg_scale"), ("exp_avg_sq", "exp_avg_sq_scale")];

#[derive(Debug)]
struct Moments {
    step: Tensor,
    exp_avg: Moment,
    exp_avg_sq: Moment,
}

/// One average between two steps.
#[derive(Debug)]
enum Moment {
    Exact(Tensor),
    Quantized { codes: Tensor, scale: Tensor },
}

/// The codebooks of both averages, on one device.
struct Codebooks {
    device: Device,
    exp_avg: Codebook,
    exp_avg_sq: Codebook,
}

impl Codebooks {
    /// Those of this device, which are made where others are there.
    fn on(known: &mut Option<Self>, device: Device) -> Result<&Self> {
        let books = match known.take().filter(|books| books.device == device) {
            Some(books) => books,
            None => Self { device, exp_avg: Codebook::signed(device)?, exp_avg_sq: Codebook::unsigned(device)? },
        };
        Ok(known.insert(books))
    }
}

/// The dtype in which steps are computed, and exact averages kept.
fn exact_kind(param: &Tensor) -> Result<Kind> {
    Ok(if param.f_kind()? == Kind::Double { Kind::Double } else { Kind::Float })
}

impl Moment {
    fn zeros(param: &Tensor, is_quantized: bool, book: &Codebook) -> Result<Self> {
        let zeros = Self::Exact(Tensor::f_zeros(param.size(), (exact_kind(param)?, param.device()))?);
        zeros.kept(is_quantized, book, exact_kind(param)?)
    }

    /// The same average as it is to be kept.
    fn kept(self, is_quantized: bool, book: &Codebook, kind: Kind) -> Result<Self> {
        Ok(match self {
            Self::Exact(tensor) if is_quantized => {
                let (codes, scale) = book.quantize(&tensor)?;
                Self::Quantized { codes, scale }
            }
            Self::Quantized { .. } if !is_quantized => Self::Exact(self.read(book, kind)?),
            kept => kept,
        })
    }

    /// The average, to be changed and then given to [`write`](Self::write).
    fn read(&self, book: &Codebook, kind: Kind) -> Result<Tensor> {
        match self {
            Self::Exact(tensor) => Ok(tensor.shallow_clone()),
            Self::Quantized { codes, scale } => Ok(book.dequantize(codes, scale)?.f_to_kind(kind)?),
        }
    }

    fn write(&mut self, book: &Codebook, value: Tensor) -> Result<()> {
        *self = match self {
            Self::Exact(_) => Self::Exact(value),
            Self::Quantized { .. } => {
                let (codes, scale) = book.quantize(&value)?;
                Self::Quantized { codes, scale }
            }
        };
        Ok(())
    }

    fn save(
        &self,
        tensors: &mut BTreeMap<String, Tensor>,
        param: &Param,
        name: &'static str,
        scale_name: &'static str,
    ) -> Result<()> {
        match self {
            Self::Exact(tensor) => save_tensor(tensors, name, param, tensor),
            Self::Quantized { codes, scale } => {
                save_tensor(tensors, name, param, codes)?;
                save_tensor(tensors, scale_name, param, scale)
            }
        }
    }
}

impl Moments {
    fn zeros(param: &Tensor, is_quantized: bool, books: &Codebooks) -> Result<Self> {
        Ok(Self {
            step: Tensor::f_zeros([0i64; 0], (Kind::Float, Device::Cpu))?,
            exp_avg: Moment::zeros(param, is_quantized, &books.exp_avg)?,
            exp_avg_sq: Moment::zeros(param, is_quantized, &books.exp_avg_sq)?,
        })
    }

    /// What is saved for such a parameter, by name: codes and scales, or numbers.
    ///
    /// The scale's name ends the state's name, not begins the parameter's: `exp_avg.scale.weight` would
    /// also be the `exp_avg` of a parameter `scale.weight`.
    fn wanted(param: &Tensor, has_scales: bool) -> Result<Vec<Wanted>> {
        let (shape, device) = (param.size(), param.device());
        let wanted = |name, shape: &[i64], kind| Wanted { name, shape: shape.to_vec(), kind, device };
        let mut all = vec![Wanted::step(Device::Cpu)];
        for (name, scale_name) in NAMES {
            if has_scales {
                all.push(wanted(name, &shape, Kind::Uint8));
                all.push(wanted(scale_name, &[num_blocks(param.numel())], Kind::Float));
            } else {
                all.push(wanted(name, &shape, exact_kind(param)?));
            }
        }
        Ok(all)
    }

    /// Takes the tensors in the order of [`wanted`](Self::wanted).
    fn from_saved(tensors: Vec<Tensor>) -> Option<Self> {
        let is_exact = tensors.len() == 3;
        let mut tensors = tensors.into_iter();
        let step = tensors.next()?;
        let mut moment = || {
            let first = tensors.next()?;
            Some(if is_exact {
                Moment::Exact(first)
            } else {
                Moment::Quantized { codes: first, scale: tensors.next()? }
            })
        };
        Some(Self { step, exp_avg: moment()?, exp_avg_sq: moment()? })
    }

    /// The same averages as they are to be kept.
    fn kept(self, is_quantized: bool, books: &Codebooks, kind: Kind) -> Result<Self> {
        Ok(Self {
            step: self.step,
            exp_avg: self.exp_avg.kept(is_quantized, &books.exp_avg, kind)?,
            exp_avg_sq: self.exp_avg_sq.kept(is_quantized, &books.exp_avg_sq, kind)?,
        })
    }

    fn is_quantized(&self) -> bool {
        matches!(self.exp_avg, Moment::Quantized { .. })
    }
}

impl AdamW8bit {
    /// Trains every parameter of the store that requires a gradient, in one group.
    ///
    /// # Errors
    /// There is none, or `lr` is negative or not finite.
    pub fn new(store: &ParamStore, lr: f64) -> Result<Self> {
        Self::builder(store).lr(lr).build()
    }

    /// Chooses other settings than AdamW's defaults; see [`AdamW8bitBuilder`].
    pub fn builder(store: &ParamStore) -> AdamW8bitBuilder {
        AdamW8bitBuilder {
            groups: vec![ParamGroup::new(store.trainable_parameters())],
            lr: 1e-3,
            weight_decay: 1e-2,
            options: Options { betas: (0.9, 0.999), eps: 1e-8 },
        }
    }

    fn step_one(
        &mut self,
        (slot, is_quantized): (usize, bool),
        param: &Tensor,
        grad: &Tensor,
        books: &Codebooks,
        settings: GroupSettings,
    ) -> Result<()> {
        let Options { betas: (_, beta2), eps } = self.options;
        let beta1 = settings.momentum;
        if self.moments[slot].is_none() {
            self.moments[slot] = Some(Moments::zeros(param, is_quantized, books)?);
        }
        let Some(Moments { step, exp_avg: mean, exp_avg_sq: square }) = &mut self.moments[slot] else { return Ok(()) };
        let kind = exact_kind(param)?;
        // The parameter itself where it has that dtype, else a copy.
        let mut weight = param.f_to_kind(kind)?;
        let grad = grad.f_to_kind(kind)?;
        scalar::add_(step, 1.0)?;
        let step = step.f_double_value(&[])?;
        let (correction1, correction2) = (1.0 - beta1.powf(step), 1.0 - beta2.powf(step));

        scalar::mul_(&weight, 1.0 - settings.lr * settings.weight_decay)?;
        let exp_avg = mean.read(&books.exp_avg, kind)?;
        scalar::lerp_(&exp_avg, &grad, 1.0 - beta1)?;
        let exp_avg_sq = square.read(&books.exp_avg_sq, kind)?;
        scalar::lerp_(&exp_avg_sq, &grad.f_square()?, 1.0 - beta2)?;
        let denominator = exp_avg_sq.f_sqrt()?;
        scalar::div_(&denominator, correction2.sqrt())?;
        scalar::add_(&denominator, eps)?;
        let update = exp_avg.f_div(&denominator)?;
        scalar::mul_(&update, settings.lr / correction1)?;
        let _ = weight.f_sub_(&update)?;
        if param.f_kind()? != kind {
            param.shallow_clone().f_copy_(&weight)?;
        }
        mean.write(&books.exp_avg, exp_avg)?;
        square.write(&books.exp_avg_sq, exp_avg_sq)
    }
}

impl Optimizer for AdamW8bit {
    fn step(&mut self) -> Result<()> {
        let handle = self.handle.clone();
        self.has_told_of_rounding = false;
        let are_quantized: Vec<bool> = handle.params().map(|param| is_quantized(param.numel())).collect();
        let mut books = None;
        step_each(&handle, |slot, param, grad, settings| {
            let books = Codebooks::on(&mut books, param.device())?;
            self.step_one((slot, are_quantized[slot]), param, grad, books, settings)
        })
    }

    fn handle(&self) -> &OptimizerHandle {
        &self.handle
    }

    fn state_dict(&self) -> Result<OptimizerState> {
        self.state_views()?.into_copies()
    }

    fn state_views(&self) -> Result<OptimizerState> {
        let mut tensors = BTreeMap::new();
        for (param, moments) in self.handle.params().zip(&self.moments) {
            let Some(moments) = moments else { continue };
            save_tensor(&mut tensors, "step", param, &moments.step)?;
            moments.exp_avg.save(&mut tensors, param, "exp_avg", "exp_avg_scale")?;
            moments.exp_avg_sq.save(&mut tensors, param, "exp_avg_sq", "exp_avg_sq_scale")?;
        }
        let mut groups = save_groups(&self.handle, &self.options)?;
        for group in &mut groups {
            let betas = serde_json::json!([group.momentum, self.options.betas.1]);
            group.options.insert("betas".to_string(), betas);
        }
        Ok(OptimizerState { tensors, groups, layouts: save_layouts(&self.handle) })
    }

    fn load_state_dict(&mut self, state: &OptimizerState) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let mut loading = Loading::new(&self.handle, state);
        let options = loading.options(self.options.clone());
        let mut saved = Vec::with_capacity(self.moments.len());
        for param in self.handle.params() {
            let has_scales = NAMES.iter().any(|(_, scale_name)| loading.has(param, scale_name));
            let tensors = loading.tensors_as(param, &Moments::wanted(&param.local(), has_scales)?)?;
            saved.push(tensors.and_then(Moments::from_saved));
        }
        loading.finish()?;
        let (mut books, mut num_rounded) = (None, 0);
        let mut moments = Vec::with_capacity(saved.len());
        for (param, saved) in self.handle.params().zip(saved) {
            let (local, is_quantized) = (param.local(), is_quantized(param.numel()));
            let books = Codebooks::on(&mut books, local.device())?;
            num_rounded += usize::from(is_quantized && saved.as_ref().is_some_and(|saved| !saved.is_quantized()));
            let kind = exact_kind(&local)?;
            moments.push(saved.map(|saved| saved.kept(is_quantized, books, kind)).transpose()?);
        }
        (self.options, self.moments) = (options, moments);
        if num_rounded > 0 && !std::mem::replace(&mut self.has_told_of_rounding, true) {
            messages::warning!(
                "AdamW8bit goes on with averages of {} that were not saved in blocks of 8 bits as they are kept here, and are \
                 rounded anew: the run does not go on to the bit, which it does with as many processes and the same sharding, \
                 saved in parts",
                counted(num_rounded, "parameter")
            );
        }
        Ok(())
    }

    fn dequantized(&self, mut tensors: BTreeMap<String, Tensor>) -> Result<BTreeMap<String, Tensor>> {
        let (_no_grad, mut books) = (tch::no_grad_guard(), None);
        let mut problems = Vec::new();
        for (name, scale_name) in NAMES {
            let parameter = |key: &String| Some(key.strip_prefix(scale_name)?.strip_prefix('.')?.to_owned());
            for parameter in tensors.keys().filter_map(parameter).collect::<Vec<_>>() {
                let key = format!("{name}.{parameter}");
                let Some(scale) = tensors.remove(&format!("{scale_name}.{parameter}")) else { continue };
                let Some(codes) = tensors.get_mut(&key) else {
                    problems.push(format!("\"{key}\" is missing"));
                    continue;
                };
                let (wanted, found) = (vec![num_blocks(codes.numel())], scale.size());
                if codes.f_kind()? != Kind::Uint8 || wanted != found {
                    problems
                        .push(format!("\"{key}\" has {} codes and {found:?} scales, not {wanted:?}", codes.numel()));
                    continue;
                }
                let books = Codebooks::on(&mut books, codes.device())?;
                let book = if name == NAMES[0].0 { &books.exp_avg } else { &books.exp_avg_sq };
                *codes = book.dequantize(codes, &scale.f_to_kind(Kind::Float)?)?;
            }
        }
        match problems.is_empty() {
            true => Ok(tensors),
            false => Err(OptimError::StateMismatch { optimizer: self.handle.optimizer_name(), problems }.into()),
        }
    }
}

/// Settings of [`AdamW8bit`].
///
/// ```
/// use accelerate::{nn::{Init, ParamStore}, optim::{AdamW8bit, no_decay}, tch::Device};
///
/// let store = ParamStore::new(Device::Cpu);
/// store.root().param("weight", ([64, 64], Init::Zeros))?;
/// store.root().param("bias", ([64], Init::Zeros))?;
/// let groups = no_decay(&store, &["bias"]);
/// let optimizer = AdamW8bit::builder(&store).lr(5e-5).weight_decay(0.1).param_groups(groups).build()?;
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct AdamW8bitBuilder {
    groups: Vec<ParamGroup>,
    lr: f64,
    weight_decay: f64,
    options: Options,
}

impl AdamW8bitBuilder {
    settings! {
        /// Learning rate (default 0.001).
        lr: f64 => lr;
        /// How much of the averages of gradient and squared gradient each step keeps (default 0.9, 0.999).
        betas: (f64, f64) => options.betas;
        /// Added to the root of the squared average (default 1e-8).
        eps: f64 => options.eps;
        /// Weight decay, apart from the gradient (default 0.01).
        weight_decay: f64 => weight_decay;
        /// Train these groups instead of all parameters of the store.
        param_groups: Vec<ParamGroup> => groups;
    }

    /// Checks the settings and makes the optimizer.
    ///
    /// # Errors
    /// A setting out of range, no parameters, or a parameter in two groups.
    pub fn build(self) -> Result<AdamW8bit> {
        const NAME: &str = "AdamW8bit";
        let beta1 = self.options.betas.0;
        self.options.check(NAME, &beta1s(beta1, &self.groups))?;
        let defaults = GroupDefaults { lr: self.lr, weight_decay: self.weight_decay, momentum: Some(beta1) };
        let handle = OptimizerHandle::new(NAME, self.groups, defaults)?;
        let moments = handle.params().map(|_| None).collect();
        Ok(AdamW8bit { handle, options: self.options, moments, has_told_of_rounding: false })
    }
}
