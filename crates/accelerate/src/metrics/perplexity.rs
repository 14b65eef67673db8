//! How surprised a model is by a text.

use crate::{Accelerator, Result};
use tch::{Kind, Reduction, Tensor};
use torch_ext::scalar;

/// Labels that are not counted, as in PyTorch's losses.
const IGNORED: i64 = -100;

/// The exponential of the mean cross-entropy of all tokens of a data set: each token counts once, whatever batch it was in, which a
/// mean over the losses of batches does not do.
///
/// ```
/// use accelerate::metrics::Perplexity;
/// use accelerate::{Accelerator, tch::{Device, Kind, Tensor}};
///
/// let accelerator = Accelerator::builder().cpu(true).build()?;
/// let mut perplexity = Perplexity::default();
/// let logits = Tensor::zeros([2, 3, 8], (Kind::Float, Device::Cpu));
/// let labels = Tensor::from_slice2(&[[0i64, 5, 7], [0, 1, -100]]);
/// perplexity.add_batch(&accelerator, &logits, &labels)?;
/// assert!((perplexity.compute() - 8.0).abs() < 1e-5);
/// assert_eq!(perplexity.num_tokens(), 3);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Perplexity {
    sum: f64,
    num_tokens: u64,
}

impl Perplexity {
    /// Counts a batch of texts: `logits [batch, length, vocab_size]`, and `labels [batch, length]`, int64, in which -100 is not
    /// counted. `logits[:, i]` are the scores of `labels[:, i + 1]`, as models for language modelling give them. Collective.
    ///
    /// # Errors
    /// Those of [`Accelerator::gather_for_metrics`]; shapes that do not fit each other; a label that there is no score for.
    #[track_caller]
    pub fn add_batch(&mut self, accelerator: &Accelerator, logits: &Tensor, labels: &Tensor) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let (batch, length, vocab_size) = logits.size3()?;
        let rest = (length - 1).max(0);
        let scores = logits.f_narrow(1, 0, rest)?.f_reshape([-1, vocab_size])?.f_to_kind(Kind::Float)?;
        let wanted = labels.f_narrow(1, length - rest, rest)?;
        let flat = wanted.f_reshape([-1])?;
        let losses = scores.f_cross_entropy_loss(&flat, None::<Tensor>, Reduction::None, IGNORED, 0.0)?;
        let sums = losses.f_view([batch, rest])?.f_sum_dim_intlist(1, false, Kind::Double)?;
        let counts = scalar::ne(&wanted, IGNORED)?.f_sum_dim_intlist(1, false, Kind::Double)?;
        // One row for each text, so that texts that fill up a batch are left out.
        let rows = accelerator.gather_for_metrics(&Tensor::f_stack(&[sums, counts], 1)?)?;
        let totals = Vec::<f64>::try_from(&rows.f_sum_dim_intlist(0, false, Kind::Double)?)?;
        if let [sum, count] = totals[..] {
            self.sum += sum;
            self.num_tokens += count as u64;
        }
        Ok(())
    }

    /// At least 1; not a number where nothing was counted.
    pub fn compute(&self) -> f64 {
        self.mean_loss().exp()
    }

    /// The mean cross-entropy of a token, in nats.
    pub fn mean_loss(&self) -> f64 {
        if self.num_tokens == 0 { f64::NAN } else { self.sum / self.num_tokens as f64 }
    }

    /// Tokens that were counted.
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }
}
