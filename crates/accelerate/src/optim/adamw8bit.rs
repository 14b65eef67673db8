//! AdamW with its state in 8 bits.

use super::Optimizer;
use super::batches::step_each;
use super::handle::{GroupDefaults, GroupSettings, OptimizerHandle, ParamGroup, at_least_zero, check_beta};
use super::quantized::{BLOCK_SIZE, Codebook, is_quantized};
use super::state::{Loading, OptimizerState, Wanted, save_groups, save_layouts, save_tensor};
use crate::error::Result;
use crate::nn::{Param, ParamStore};
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
/// step needs a few float32 copies of the largest parameter.
///
/// State is made at a parameter's first step with a gradient: `exp_avg` and `exp_avg_sq` (uint8, of its
/// shape), `exp_avg_scale` and `exp_avg_sq_scale` (float, one for each block), `step` (a float scalar).
/// Where averages are exact, they are floats, and there are no scales.
///
/// Three differences from torchao: scales are tensors of their own instead of parts of a tensor subclass;
/// the smallest scale is float32's smallest number instead of 1e-12, so tiny gradients count; and an
/// entry of `exp_avg_sq` that is above 0 is never rounded to 0, because the next step might divide
/// by it.
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
}

/// Settings that all groups share, under the names PyTorch saves such settings by.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Options {
    betas: (f64, f64),
    eps: f64,
}

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

/// The codebooks of both averages, on the device of a batch.
struct Codebooks {
    exp_avg: Codebook,
    exp_avg_sq: Codebook,
}

/// The dtype in which steps are computed, and exact averages kept.
fn exact_kind(param: &Tensor) -> Result<Kind> {
    Ok(if param.f_kind()? == Kind::Double { Kind::Double } else { Kind::Float })
}

impl Moment {
    fn zeros(param: &Tensor, book: &Codebook) -> Result<Self> {
        let zeros = Tensor::f_zeros(param.size(), (exact_kind(param)?, param.device()))?;
        if !is_quantized(zeros.numel() as i64) {
            return Ok(Self::Exact(zeros));
        }
        let (codes, scale) = book.quantize(&zeros)?;
        Ok(Self::Quantized { codes, scale })
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
    fn zeros(param: &Tensor, books: &Codebooks) -> Result<Self> {
        Ok(Self {
            step: Tensor::f_zeros([0i64; 0], (Kind::Float, Device::Cpu))?,
            exp_avg: Moment::zeros(param, &books.exp_avg)?,
            exp_avg_sq: Moment::zeros(param, &books.exp_avg_sq)?,
        })
    }

    /// What is saved for such a parameter, by name.
    ///
    /// The scale's name ends the state's name, not begins the parameter's: `exp_avg.scale.weight` would
    /// also be the `exp_avg` of a parameter `scale.weight`.
    fn wanted(param: &Tensor) -> Result<Vec<Wanted>> {
        let (shape, device, num_entries) = (param.size(), param.device(), param.numel() as i64);
        let wanted = |name, shape: &[i64], kind| Wanted { name, shape: shape.to_vec(), kind, device };
        let mut all = vec![Wanted::step(Device::Cpu)];
        for (name, scale_name) in [("exp_avg", "exp_avg_scale"), ("exp_avg_sq", "exp_avg_sq_scale")] {
            if is_quantized(num_entries) {
                all.push(wanted(name, &shape, Kind::Uint8));
                all.push(wanted(scale_name, &[num_entries / BLOCK_SIZE], Kind::Float));
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
        slot: usize,
        param: &Tensor,
        grad: &Tensor,
        books: &Codebooks,
        settings: GroupSettings,
    ) -> Result<()> {
        let Options { betas: (_, beta2), eps } = self.options;
        let beta1 = settings.momentum;
        if self.moments[slot].is_none() {
            self.moments[slot] = Some(Moments::zeros(param, books)?);
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
        let mut books: Option<(Device, Codebooks)> = None;
        step_each(&handle, |slot, param, grad, settings| {
            let device = param.device();
            let (_, books) = match &mut books {
                Some(books) if books.0 == device => books,
                other => {
                    let (exp_avg, exp_avg_sq) = (Codebook::signed(device)?, Codebook::unsigned(device)?);
                    other.insert((device, Codebooks { exp_avg, exp_avg_sq }))
                }
            };
            self.step_one(slot, param, grad, books, settings)
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
        let mut moments = Vec::with_capacity(self.moments.len());
        for param in self.handle.params() {
            let saved = loading.tensors_as(param, &Moments::wanted(&param.local())?)?;
            moments.push(saved.and_then(Moments::from_saved));
        }
        loading.finish()?;
        self.options = options;
        self.moments = moments;
        Ok(())
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
        let Options { betas: (beta1, beta2), eps } = self.options;
        at_least_zero(NAME, "eps", eps)?;
        check_beta(NAME, "beta1", beta1)?;
        check_beta(NAME, "beta2", beta2)?;
        for beta1 in self.groups.iter().filter_map(|group| group.momentum) {
            check_beta(NAME, "beta1", beta1)?;
        }
        let defaults = GroupDefaults { lr: self.lr, weight_decay: self.weight_decay, momentum: Some(beta1) };
        let handle = OptimizerHandle::new(NAME, self.groups, defaults)?;
        let moments = handle.params().map(|_| None).collect();
        Ok(AdamW8bit { handle, options: self.options, moments })
    }
}
