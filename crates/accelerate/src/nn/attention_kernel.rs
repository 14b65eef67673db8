//! Scaled dot-product attention, with a slot for other ways to compute it.

use super::{Path, while_checkpointing};
use crate::error::{NnError, Result};
use std::cell::Cell;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use tch::{Device, Tensor};

/// What [`AttentionKernel::attention`] may be told besides its three tensors; names and defaults are those of
/// `torch.nn.functional.scaled_dot_product_attention`.
///
/// ```
/// let options = accelerate::nn::AttentionOptions::default();
/// assert!(options.attn_mask.is_none() && !options.is_causal && options.dropout_p == 0.0);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionOptions<'a> {
    /// Which query looks at which key, `[batch or 1, num_heads or 1, num_queries, num_keys]`: true where it does, or numbers that are
    /// added to the scores. Where ranks divide sequences, the queries are those at [`DividedSequence::mask_positions`], and the keys
    /// those of the whole sequence.
    pub attn_mask: Option<&'a Tensor>,
    /// Probability with which a weight is dropped. Default: 0.
    pub dropout_p: f64,
    /// A query looks at keys up to its own position. Needs no mask, and as many queries as keys. Default: false.
    pub is_causal: bool,
    /// What scores are multiplied by. Default: one over the root of a head's width.
    pub scale: Option<f64>,
}

/// How attention is computed: libtorch's own here; ranks that divide sequences replace it.
///
/// ```
/// use accelerate::nn::{AttentionKernel, AttentionOptions, DenseAttention, ParamStore, ScaledDotProductAttention};
/// use accelerate::tch::{Device, Kind, Tensor};
/// use std::sync::Arc;
///
/// /// Looks at nothing but the query's own place.
/// #[derive(Debug)]
/// struct Own;
///
/// impl AttentionKernel for Own {
///     fn attention(&self, _: &Tensor, _: &Tensor, value: &Tensor, _: AttentionOptions<'_>) -> accelerate::Result<Tensor> {
///         Ok(value.shallow_clone())
///     }
/// }
///
/// let store = ParamStore::new(Device::Cpu);
/// let attention = ScaledDotProductAttention::new(&store.root());
/// let heads = Tensor::randn([1, 2, 3, 4], (Kind::Float, Device::Cpu));
/// assert_ne!(attention.forward(&heads, &heads, &heads, Default::default())?, heads);
/// store.set_attention_kernel(Arc::new(Own));
/// assert_eq!(attention.forward(&heads, &heads, &heads, Default::default())?, heads);
/// store.set_attention_kernel(Arc::new(DenseAttention));
/// # Ok::<(), accelerate::Error>(())
/// ```
pub trait AttentionKernel: Send + Sync + Debug {
    /// `query [batch, num_heads, num_queries, head_dim]`, `key [batch, num_key_value_heads, num_keys, head_dim]` and `value [batch,
    /// num_key_value_heads, num_keys, value_dim]` to `[batch, num_heads, num_queries, value_dim]`, differentiable in all three. A head
    /// of keys serves as many heads of queries as there are times more of them. Collective where ranks divide sequences, and so is
    /// the backward pass.
    ///
    /// # Errors
    /// Shapes that do not fit, heads that ranks cannot divide; a failure between ranks.
    fn attention(&self, query: &Tensor, key: &Tensor, value: &Tensor, options: AttentionOptions<'_>) -> Result<Tensor>;

    /// Where ranks divide sequences: which tokens this rank has, and what it can learn of the others. Default: all tokens are here.
    fn sequence(&self) -> Option<&dyn DividedSequence> {
        None
    }

    /// Is it libtorch's own, which another one may take the place of unasked?
    #[doc(hidden)]
    fn is_dense(&self) -> bool {
        false
    }
}

/// Sequences of which each rank has some tokens: found by [`AttentionKernel::sequence`], and of use to models that count positions,
/// make masks or compute losses. All calls but those for positions are collective over the ranks that divide the sequence.
///
/// ```
/// use accelerate::nn::{ModuleFn, ParamStore, ScaledDotProductAttention};
/// use accelerate::tch::{Device, Kind, Tensor};
/// use accelerate::{Accelerator, ParallelismConfig, testing};
///
/// let axes = ParallelismConfig { sp_size: Some(2), ..Default::default() };
/// testing::ranks(2, Accelerator::builder().parallelism_config(axes), |accelerator| {
///     let store = ParamStore::new(accelerator.device());
///     let attention = ScaledDotProductAttention::new(&store.root());
///     let model = ModuleFn::new(&store, move |tokens: &Tensor| {
///         let kernel = attention.kernel();
///         let sequence = kernel.sequence().expect("sequences are divided");
///         assert_eq!(sequence.length(), 4);
///         sequence.positions(tokens.size()[1], Device::Cpu)
///     });
///     let model = accelerator.prepare(model)?;
///     let tokens = Tensor::from_slice2(&[[5i64, 6, 7, 8]]);
///     let positions = accelerator.maybe_context_parallel(&tokens, &Default::default(), |own| model.forward(&own))?;
///     let first = 2 * accelerator.process_index() as i64;
///     assert_eq!(positions, Tensor::from_slice(&[first, first + 1]));
///     Ok(())
/// })?;
/// # Ok::<(), accelerate::Error>(())
/// ```
pub trait DividedSequence: Send + Sync + Debug {
    /// Number of tokens of the whole sequence.
    fn length(&self) -> i64;

    /// Where the tokens that this rank has are in the whole sequence: `[num_own_tokens]`, int64. Not collective.
    ///
    /// # Errors
    /// `num_own_tokens` is another number: what the model got was not divided, or not along the dim of tokens.
    fn positions(&self, num_own_tokens: i64, device: Device) -> Result<Tensor>;

    /// Where the queries are for which a mask of attention has rows, int64: those of this rank, or all of them. Not collective.
    ///
    /// # Errors
    /// libtorch's.
    fn mask_positions(&self, device: Device) -> Result<Tensor>;

    /// All ranks' tokens along a dim, in the order of the sequence. Records no gradients.
    ///
    /// # Errors
    /// Another number of tokens than this rank has; a failure between ranks.
    fn gather(&self, own: &Tensor, dim: i64) -> Result<Tensor>;

    /// For each of this rank's tokens the label of the token that follows it in the whole sequence, wherever that is: `labels [batch,
    /// num_own_tokens]`, int64, to the same shape. After the last token of all comes `ignore_index`.
    ///
    /// # Errors
    /// As [`gather`](Self::gather).
    fn shift_labels(&self, labels: &Tensor, ignore_index: i64) -> Result<Tensor>;

    /// The mean over the tokens of all ranks, from this rank's `sum` (a scalar) and the `count` of what it added up (a scalar): the
    /// sum of all sums divided by the sum of all counts, the same on all ranks. Each rank's part of the gradient is multiplied by the
    /// number of ranks, because the gradients of parameters are averaged over them afterwards: so they are those of one rank with the
    /// whole sequence.
    ///
    /// # Errors
    /// A failure between ranks.
    fn mean(&self, sum: &Tensor, count: &Tensor) -> Result<Tensor>;
}

/// libtorch's `scaled_dot_product_attention`.
#[derive(Clone, Copy, Debug, Default)]
pub struct DenseAttention;

impl AttentionKernel for DenseAttention {
    fn attention(&self, query: &Tensor, key: &Tensor, value: &Tensor, options: AttentionOptions<'_>) -> Result<Tensor> {
        let is_grouped = query.size4()?.1 != key.size4()?.1;
        let AttentionOptions { attn_mask, dropout_p, is_causal, scale } = options;
        Ok(Tensor::f_scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, is_grouped,
        )?)
    }

    fn is_dense(&self) -> bool {
        true
    }
}

/// `torch.nn.functional.scaled_dot_product_attention` as a model calls it: by the kernel that holds for all of its store. It has no
/// parameters. Where ranks divide sequences, a model none of whose attention is computed by it is refused by `prepare`.
///
/// ```
/// use accelerate::nn::{AttentionOptions, ParamStore, ScaledDotProductAttention};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let attention = ScaledDotProductAttention::new(&ParamStore::new(Device::Cpu).root());
/// let heads = Tensor::ones([1, 2, 3, 4], (Kind::Float, Device::Cpu));
/// let options = AttentionOptions { is_causal: true, ..Default::default() };
/// assert_eq!(attention.forward(&heads, &heads, &heads, options)?.size(), [1, 2, 3, 4]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ScaledDotProductAttention(AttentionSlot);

impl ScaledDotProductAttention {
    /// The attention of the model that `path` belongs to.
    pub fn new(path: &Path) -> Self {
        let slot = path.store().attention_slot();
        slot.is_used.store(true, Ordering::Relaxed);
        Self(slot)
    }

    /// What computes it now. A model that is checkpointed takes the kernel once at the beginning of a forward pass, and hands it to its
    /// blocks: they are computed once more when another one may hold.
    pub fn kernel(&self) -> Arc<dyn AttentionKernel> {
        self.0.kernel()
    }

    /// As [`AttentionKernel::attention`] of [`kernel`](Self::kernel).
    ///
    /// # Errors
    /// The kernel's; within [`checkpoint`](super::checkpoint) where ranks divide sequences: there the kernel has to be taken before.
    pub fn forward(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        options: AttentionOptions<'_>,
    ) -> Result<Tensor> {
        let kernel = self.kernel();
        if kernel.sequence().is_some() && while_checkpointing() {
            return Err(NnError::AttentionWithinCheckpoint.into());
        }
        kernel.attention(query, key, value, options)
    }
}

thread_local! {
    /// How many scopes of this thread want attention to be computed by ranks that divide sequences.
    static REFUSALS: Cell<usize> = const { Cell::new(0) };
}

/// Until this is dropped, attention of this thread that knows nothing of divided sequences is an error.
#[derive(Debug)]
pub(crate) struct RefuseWholeAttention(PhantomData<Rc<()>>);

impl RefuseWholeAttention {
    pub(crate) fn enter() -> Self {
        REFUSALS.set(REFUSALS.get() + 1);
        Self(PhantomData)
    }
}

impl Drop for RefuseWholeAttention {
    fn drop(&mut self) {
        REFUSALS.set(REFUSALS.get().saturating_sub(1));
    }
}

/// Of a model that was not prepared, where ranks divide sequences.
#[derive(Debug)]
struct NotPrepared;

impl AttentionKernel for NotPrepared {
    fn attention(&self, _: &Tensor, _: &Tensor, _: &Tensor, _: AttentionOptions<'_>) -> Result<Tensor> {
        Err(NnError::AttentionNotPrepared.into())
    }
}

/// The kernel of a store, shared by all that compute attention with it.
#[derive(Clone, Debug)]
pub(super) struct AttentionSlot {
    kernel: Arc<RwLock<Arc<dyn AttentionKernel>>>,
    is_used: Arc<AtomicBool>,
}

impl Default for AttentionSlot {
    fn default() -> Self {
        Self { kernel: Arc::new(RwLock::new(Arc::new(DenseAttention))), is_used: Arc::default() }
    }
}

impl AttentionSlot {
    // A shared pointer: whole after every statement, also where another thread panicked.
    pub(super) fn kernel(&self) -> Arc<dyn AttentionKernel> {
        let kernel = Arc::clone(&self.kernel.read().unwrap_or_else(PoisonError::into_inner));
        if kernel.sequence().is_none() && 0 < REFUSALS.get() {
            return Arc::new(NotPrepared);
        }
        kernel
    }

    pub(super) fn set(&self, kernel: Arc<dyn AttentionKernel>) {
        let mut held = self.kernel.write().unwrap_or_else(PoisonError::into_inner);
        let replaced = std::mem::replace(&mut *held, kernel);
        drop(held);
        drop(replaced);
    }

    pub(super) fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Relaxed)
    }
}
