//! What models that continue texts have in common.

use crate::KeyValueCache;
use accelerate::nn::{AttentionKernel, DividedSequence, Linear, Module};
use accelerate::tch::{Kind, Reduction, Tensor};
use accelerate::{Result, TensorTree};
use torch_ext::scalar;

/// What a model that continues texts takes in training and evaluation.
#[derive(Debug, TensorTree)]
pub struct CausalLMInput {
    /// Tokens `[batch, length]`, int64.
    pub input_ids: Tensor,
    /// 1 for a token, 0 for what fills up the row `[batch, length]`. `None`: tokens alone.
    pub attention_mask: Option<Tensor>,
    /// The same tokens `[batch, length]`, int64, with -100 where nothing is to be learned: what follows `input_ids[i]` is
    /// `labels[i + 1]`, as in Transformers. `None`: no loss.
    pub labels: Option<Tensor>,
}

/// What a forward pass gives.
#[derive(Debug, TensorTree)]
pub struct CausalLMOutput {
    /// Mean cross-entropy over the labels that are not -100: a scalar, float32. `None` without labels. Where ranks divide sequences, it
    /// is the mean over the tokens of all of them, the same on all, and gradients are to be averaged over these ranks.
    pub loss: Option<Tensor>,
    /// Scores before softmax `[batch, length, vocab_size]`, of the token that follows. Where ranks divide `lm_head` and do not gather
    /// its output (the style `colwise`), `[batch, length, this rank's slice of the vocabulary]`. Where they divide sequences, the length is
    /// that of this rank's tokens.
    pub logits: Tensor,
}

impl CausalLMOutput {
    /// What `head` makes of `hidden [batch, length, hidden_size]`, compared with the labels that follow.
    ///
    /// # Errors
    /// Labels of another shape, or that the vocabulary does not have.
    pub(crate) fn of_head(
        head: &Linear,
        hidden: &Tensor,
        labels: Option<&Tensor>,
        kernel: &dyn AttentionKernel,
    ) -> Result<Self> {
        let logits = head.forward(hidden)?;
        let loss = |labels: &Tensor| match kernel.sequence() {
            None => causal_lm_loss(head, &logits, labels),
            Some(sequence) => divided_loss(head, &logits, labels, sequence),
        };
        let loss = labels.map(loss).transpose()?;
        Ok(Self { loss, logits })
    }
}

/// Labels that are not counted.
const IGNORED: i64 = -100;

/// Of tokens whose followers other ranks may have.
fn divided_loss(head: &Linear, logits: &Tensor, labels: &Tensor, sequence: &dyn DividedSequence) -> Result<Tensor> {
    let labels = sequence.shift_labels(labels, IGNORED)?.f_reshape([-1])?;
    let sum = cross_entropy(head, logits, &labels, Reduction::Sum)?;
    sequence.mean(&sum, &scalar::ne(&labels, IGNORED)?.f_sum(Kind::Float)?)
}

fn causal_lm_loss(head: &Linear, logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    let (_, length, _) = logits.size3()?;
    let rest = (length - 1).max(0);
    let labels = labels.f_narrow(1, length - rest, rest)?.f_reshape([-1])?;
    cross_entropy(head, &logits.f_narrow(1, 0, rest)?, &labels, Reduction::Mean)
}

/// Of logits `[batch, length, classes]`, or of the slice of the classes that this rank has.
fn cross_entropy(head: &Linear, logits: &Tensor, labels: &Tensor, reduction: Reduction) -> Result<Tensor> {
    let (_, _, num_classes) = logits.size3()?;
    let logits = logits.f_reshape([-1, num_classes])?.f_to_kind(Kind::Float)?;
    match head.sharded_output() {
        Some(divided) => divided.cross_entropy(&logits, labels, reduction, IGNORED),
        None => Ok(logits.f_cross_entropy_loss(labels, None::<Tensor>, reduction, IGNORED, 0.0)?),
    }
}

/// Scores `[batch, vocab_size]` of the whole vocabulary for the last of `hidden [batch, length, hidden_size]`.
pub(crate) fn last_logits(head: &Linear, hidden: &Tensor) -> Result<Tensor> {
    let logits = head.forward(&hidden.f_select(1, -1)?)?;
    head.sharded_output().map_or(Ok(logits.shallow_clone()), |divided| divided.gather(&logits))
}

/// A model that continues texts token by token.
pub trait CausalLM: Module<Input = CausalLMInput, Output = CausalLMOutput> {
    /// Scores `[batch, vocab_size]` of the token that follows the last of `input_ids [batch, length]`. These come after those that
    /// `cache` has seen, and are part of it afterwards. `attention_mask [batch, all tokens so far]` is 1 for a token and 0 for
    /// what fills up a row *in front* of a text. Records no gradients.
    ///
    /// # Errors
    /// A token or a position that the model does not have; another cache.
    fn next_logits(
        &self,
        input_ids: &Tensor,
        attention_mask: Option<&Tensor>,
        cache: &mut KeyValueCache,
    ) -> Result<Tensor>;

    /// The longest text in tokens, where the model has a place for so many and no more.
    fn max_length(&self) -> Option<i64>;

    /// Tokens that end a text, as the configuration has them.
    fn eos_token_id(&self) -> &[i64];

    /// What fills up texts, as the configuration has it.
    fn pad_token_id(&self) -> Option<i64> {
        None
    }
}

/// One token or several: Hugging Face's configurations write both.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(untagged, expecting = "wanted the number of a token, or a list of such numbers")]
pub(crate) enum OneOrMore {
    One(i64),
    More(Vec<i64>),
}

impl OneOrMore {
    pub(crate) fn all(this: Option<Self>) -> Vec<i64> {
        match this {
            None => Vec::new(),
            Some(Self::One(id)) => vec![id],
            Some(Self::More(ids)) => ids,
        }
    }

    pub(crate) fn of(ids: &[i64]) -> Option<Self> {
        match ids {
            [] => None,
            [id] => Some(Self::One(*id)),
            ids => Some(Self::More(ids.to_vec())),
        }
    }
}
