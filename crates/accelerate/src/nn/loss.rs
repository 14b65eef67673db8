//! Losses with the names, defaults and numbers of `torch.nn`.

use super::layer::forward_error;
use crate::error::Result;
use tch::{Reduction, TchError, Tensor};
use torch_ext::scalar;

/// `torch.nn.CrossEntropyLoss`: how far scores are from the classes that were wanted.
///
/// ```
/// use accelerate::nn::CrossEntropyLoss;
/// use accelerate::tch::Tensor;
///
/// let loss = CrossEntropyLoss { label_smoothing: 0.1, ..Default::default() };
/// let scores = Tensor::from_slice2(&[[2f32, 0.0], [0.0, 1.0]]);
/// // The second row is not counted.
/// let value = loss.forward(&scores, &Tensor::from_slice(&[0i64, -100]))?;
/// assert!((value.double_value(&[]) - 0.226928).abs() < 1e-6);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct CrossEntropyLoss {
    /// Weight of each class `[num_classes]`. Default: all weigh the same.
    pub weight: Option<Tensor>,
    /// A class that is not counted, neither in the sum nor in the mean. PyTorch's default: -100.
    pub ignore_index: i64,
    /// What becomes of the values of the rows. PyTorch's default: their mean (with `weight` the weighted one), which is not a
    /// number if all rows are ignored.
    pub reduction: Reduction,
    /// This part of each wanted probability is spread evenly over all classes. PyTorch's default: 0.
    pub label_smoothing: f64,
}

impl Default for CrossEntropyLoss {
    fn default() -> Self {
        Self { weight: None, ignore_index: -100, reduction: Reduction::Mean, label_smoothing: 0.0 }
    }
}

impl CrossEntropyLoss {
    /// `input [batch, num_classes, ..]`, scores before softmax. `target [batch, ..]` of int64 are classes, and a `target` of the
    /// input's own shape are probabilities, of which `ignore_index` leaves out none.
    ///
    /// # Errors
    /// Shapes that do not fit; a class that there is no score for; a smoothing outside of 0 to 1.
    pub fn forward(&self, input: &Tensor, target: &Tensor) -> Result<Tensor> {
        let (weight, smoothing) = (self.weight.as_ref(), self.label_smoothing);
        let loss = input.f_cross_entropy_loss(target, weight, self.reduction, self.ignore_index, smoothing);
        let wanted = || format!("[batch, num_classes, ..] for a target of {:?}", target.size());
        loss.map_err(|source| loss_error("CrossEntropyLoss", wanted(), input, source))
    }
}

/// `torch.nn.MSELoss`: the square of the difference.
///
/// ```
/// use accelerate::{nn::MSELoss, tch::Tensor};
/// let loss = MSELoss::default().forward(&Tensor::from_slice(&[1f32, 4.0]), &Tensor::from_slice(&[1f32, 2.0]))?;
/// assert_eq!(loss.double_value(&[]), 2.0);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct MSELoss {
    /// What becomes of the values of the elements. PyTorch's default: their mean.
    pub reduction: Reduction,
}

impl Default for MSELoss {
    fn default() -> Self {
        Self { reduction: Reduction::Mean }
    }
}

impl MSELoss {
    /// `input` and `target` of one shape. Shapes that merely expand to each other, such as `[8, 1]` and `[8]`, are an error: PyTorch
    /// warns, and compares each with each.
    ///
    /// # Errors
    /// Other shapes.
    pub fn forward(&self, input: &Tensor, target: &Tensor) -> Result<Tensor> {
        same_shape("MSELoss", input, target)?;
        let loss = input.f_mse_loss(target, self.reduction);
        loss.map_err(|source| loss_error("MSELoss", format!("{:?}", target.size()), input, source))
    }
}

/// `torch.nn.BCEWithLogitsLoss`: cross-entropy of yes and no for each element, from scores before the logistic function.
///
/// ```
/// use accelerate::{nn::BCEWithLogitsLoss, tch::Tensor};
/// let loss = BCEWithLogitsLoss::default().forward(&Tensor::from_slice(&[0f32]), &Tensor::from_slice(&[1f32]))?;
/// assert!((loss.double_value(&[]) - 2f64.ln()).abs() < 1e-6);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Debug)]
pub struct BCEWithLogitsLoss {
    /// Weight of each element, of a shape that expands to the input's. Default: all weigh the same.
    pub weight: Option<Tensor>,
    /// Weight of yes, for each class. Default: that of no.
    pub pos_weight: Option<Tensor>,
    /// What becomes of the values of the elements. PyTorch's default: their mean.
    pub reduction: Reduction,
}

impl Default for BCEWithLogitsLoss {
    fn default() -> Self {
        Self { weight: None, pos_weight: None, reduction: Reduction::Mean }
    }
}

impl BCEWithLogitsLoss {
    /// `input` and `target`, numbers from 0 to 1, of one shape and floating point.
    ///
    /// # Errors
    /// Other shapes.
    pub fn forward(&self, input: &Tensor, target: &Tensor) -> Result<Tensor> {
        same_shape("BCEWithLogitsLoss", input, target)?;
        let (weight, pos_weight) = (self.weight.as_ref(), self.pos_weight.as_ref());
        let loss = input.f_binary_cross_entropy_with_logits(target, weight, pos_weight, self.reduction);
        loss.map_err(|source| loss_error("BCEWithLogitsLoss", format!("{:?}", target.size()), input, source))
    }
}

/// What becomes of the values of a [`KLDivLoss`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KLDivReduction {
    /// They stay.
    None,
    /// The mean over all elements, which is PyTorch's default, and not the divergence.
    #[default]
    Mean,
    /// The divergence, summed over the batch.
    Sum,
    /// The divergence, as a mean over the batch.
    BatchMean,
}

/// `torch.nn.KLDivLoss`: the divergence of Kullback and Leibler of one distribution from another.
///
/// ```
/// use accelerate::{nn::{KLDivLoss, KLDivReduction}, tch::{Kind, Tensor}};
/// let loss = KLDivLoss { reduction: KLDivReduction::BatchMean, ..Default::default() };
/// let target = Tensor::from_slice2(&[[0.5f32, 0.5]]);
/// assert!(loss.forward(&target.log(), &target)?.double_value(&[]).abs() < 1e-6);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KLDivLoss {
    /// What becomes of the values of the elements.
    pub reduction: KLDivReduction,
    /// Are the targets logarithms of probabilities as well? PyTorch's default: false.
    pub log_target: bool,
}

impl KLDivLoss {
    /// `input`, logarithms of probabilities, and `target`, probabilities, of one shape `[batch, ..]`.
    ///
    /// # Errors
    /// Other shapes.
    pub fn forward(&self, input: &Tensor, target: &Tensor) -> Result<Tensor> {
        same_shape("KLDivLoss", input, target)?;
        let reduction = match self.reduction {
            KLDivReduction::None => Reduction::None,
            KLDivReduction::Mean => Reduction::Mean,
            KLDivReduction::Sum | KLDivReduction::BatchMean => Reduction::Sum,
        };
        let loss = input.f_kl_div(target, reduction, self.log_target);
        let loss = loss.map_err(|source| loss_error("KLDivLoss", format!("{:?}", target.size()), input, source))?;
        match (self.reduction, input.size().first()) {
            (KLDivReduction::BatchMean, Some(&batch)) => {
                let batch = scalar::full(&[], batch as f64, (loss.f_kind()?, loss.device()))?;
                Ok(loss.f_divide(&batch)?)
            }
            _ => Ok(loss),
        }
    }
}

fn same_shape(layer: &'static str, input: &Tensor, target: &Tensor) -> Result<()> {
    if input.size() == target.size() {
        return Ok(());
    }
    let source = TchError::Shape(format!("the target is {:?}", target.size()));
    Err(loss_error(layer, format!("the shape of the target, {:?}", target.size()), input, source))
}

#[cold]
fn loss_error(layer: &'static str, wanted: String, input: &Tensor, source: TchError) -> crate::Error {
    forward_error(layer, "without parameters", wanted, input, source)
}
