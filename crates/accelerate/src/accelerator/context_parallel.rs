//! Sequences that ranks divide for the time of a call (`maybe_context_parallel` of the reference).

use super::Accelerator;
use crate::engine::{self, Sequence};
use crate::error::{Result, StateError};
use crate::messages;
use crate::nn::{AttentionKernel, DenseAttention, DividedSequence, ParamStore, RefuseWholeAttention};
use crate::tensor_tree::TensorTree;
use accelerate_core::mesh::Mesh;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tch::Tensor;

/// The dims that [`Accelerator::maybe_context_parallel`] divides.
///
/// ```
/// assert!(accelerate::ContextParallelOptions::default().buffer_seq_dims.is_empty());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContextParallelOptions {
    /// Along which dim each tensor has its tokens, in the order in which the tree of buffers has them. Default: empty, which is 1 for
    /// all of them, as in `[batch, length]`.
    pub buffer_seq_dims: Vec<i64>,
}

impl Accelerator {
    /// Runs `body` with this rank's tokens of `buffers`, where ranks divide sequences (`cp_size` or `sp_size` of
    /// [`ParallelismConfig`](crate::ParallelismConfig)); elsewhere with all of them. Meanwhile the prepared models compute attention
    /// together with the other ranks.
    ///
    /// `buffers` is anything made of tensors, such as the input of a model: tokens, labels, an attention mask, positions, all of one
    /// length. They are the same on all ranks that divide a sequence, as a prepared loader gives them. Labels are not shifted
    /// before: [`DividedSequence::shift_labels`] looks across ranks. The buffers themselves stay as they are.
    ///
    /// Forward and backward passes belong into `body`. What is outside, such as the generation of a text, computes whole sequences on
    /// each of the ranks, with the same result. Models of `accelerate-models` count positions and compute losses rightly in both
    /// cases; a model of your own asks [`AttentionKernel::sequence`](crate::nn::AttentionKernel::sequence). All models that `body` uses
    /// are prepared before: attention of another one is an error.
    ///
    /// Collective over the ranks that divide a sequence.
    ///
    /// ```
    /// use accelerate::nn::{Linear, Module, ModuleFn, ParamStore, ScaledDotProductAttention};
    /// use accelerate::{Accelerator, ParallelismConfig, tch::{Device, Kind, Tensor}, testing};
    ///
    /// // Each token looks at all tokens.
    /// let run = |accelerator: Accelerator| {
    ///     let store = ParamStore::new(accelerator.device());
    ///     let attention = ScaledDotProductAttention::new(&store.root());
    ///     let scale = store.root().param("scale", ([1], accelerate::nn::Init::Ones))?;
    ///     let model = ModuleFn::new(&store, move |x: &Tensor| {
    ///         let heads = (x * scale.get()?).unsqueeze(1);
    ///         Ok(attention.forward(&heads, &heads, &heads, Default::default())?.squeeze_dim(1))
    ///     });
    ///     let model = accelerator.prepare(model)?;
    ///     let x = Tensor::arange(16, (Kind::Float, Device::Cpu)).sin().view([1, 4, 4]);
    ///     accelerator.maybe_context_parallel(&x, &Default::default(), |own| {
    ///         let output = model.forward(&own)?;
    ///         accelerator.backward(&output.square().mean(None))?;
    ///         accelerator.gather_sequence(&output.detach(), 1)
    ///     })
    /// };
    /// let axes = ParallelismConfig { cp_size: Some(2), ..Default::default() };
    /// let divided = testing::ranks(2, Accelerator::builder().parallelism_config(axes), run)?;
    /// let whole = testing::ranks(1, Accelerator::builder(), run)?;
    /// assert!(divided[1].allclose(&whole[0], 1e-5, 1e-6, false));
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`is_data`](crate::Error::is_data): a length that does not divide. Ranks with other buffers; a tensor of another length than the
    /// first; a call within such a call; a prepared model whose attention is libtorch's own. Those of `body`.
    #[track_caller]
    pub fn maybe_context_parallel<B: TensorTree, T>(
        &self,
        buffers: &B,
        options: &ContextParallelOptions,
        body: impl FnOnce(B) -> Result<T>,
    ) -> Result<T> {
        let _called = crate::status::here();
        let mesh = &self.session().mesh;
        let Some((axis, _)) = mesh.shape().divided_sequences() else {
            return body(buffers.try_map_tensors(&mut |tensor| Ok(tensor.shallow_clone()))?);
        };
        if self.sequence().is_some() {
            return Err(StateError::WithinDividedSequences { call: "maybe_context_parallel" }.into());
        }
        let mut tensors = Vec::new();
        buffers.for_each_tensor(&mut |tensor| tensors.push(tensor.shallow_clone()));
        let group = mesh.group(&[axis])?;
        let dims = &options.buffer_seq_dims;
        if let Some(per_rank) = engine::compare_buffers(&group, "maybe_context_parallel", &tensors, dims)? {
            return Err(StateError::DifferentInputs { per_rank }.into());
        }
        let dims = match options.buffer_seq_dims.len() {
            0 => vec![1; tensors.len()],
            found if found == tensors.len() => options.buffer_seq_dims.clone(),
            found => return Err(StateError::SequenceDims { found, wanted: tensors.len() }.into()),
        };
        let length = engine::sequence_length(tensors.first(), dims.first().copied())?;
        let Some(sequence) = Sequence::divide(mesh, &self.config().parallelism, length)?.map(Arc::new) else {
            return Err(StateError::SequenceDims { found: dims.len(), wanted: tensors.len() }.into());
        };
        let mut dims = dims.into_iter();
        let own = buffers.try_map_tensors(&mut |tensor| sequence.own(tensor, dims.next().unwrap_or(1)))?;
        let _scope = DividedScope::enter(self, &sequence)?;
        body(own)
    }

    /// Whole sequences from this rank's tokens, along a dim, for what is to be seen of them after
    /// [`maybe_context_parallel`](Self::maybe_context_parallel): outputs for metrics, above all. It is called in the `body`; where ranks
    /// do not divide sequences, it gives the tensor back. Any dtype; records no gradients. Collective over the ranks that divide a
    /// sequence.
    ///
    /// # Errors
    /// A call outside of `body`, where nobody knows which tokens a rank has; another number of tokens than this rank has; a failure
    /// between ranks.
    #[track_caller]
    pub fn gather_sequence(&self, own: &Tensor, dim: i64) -> Result<Tensor> {
        let _called = crate::status::here();
        match self.sequence() {
            Some(sequence) => sequence.gather(own, dim),
            None if self.mesh().divided_sequences().is_some() => {
                Err(StateError::OutsideDividedSequences { call: "gather_sequence" }.into())
            }
            None => Ok(own.shallow_clone()),
        }
    }

    /// Number of this process among those that divide sequences with it along `cp` or `sp`, from 0 (`context_parallel_rank` of the
    /// reference, which has none yet).
    pub fn context_parallel_rank(&self) -> usize {
        self.mesh().rank_in(Mesh::SEQUENCE, self.process_index())
    }

    fn sequence(&self) -> Option<Arc<Sequence>> {
        self.0.sequence.get()
    }

    /// Makes sure that ranks which divide sequences have the same tensors: of others, some would be dropped as rows that come twice.
    /// Collective over these ranks.
    pub(super) fn compare_whole_sequences<T: TensorTree>(&self, tree: &T, call: &'static str) -> Result<()> {
        let mesh = &self.session().mesh;
        let Some((axis, _)) = mesh.shape().divided_sequences() else { return Ok(()) };
        let group = mesh.group(&[axis])?;
        let mut tensors = Vec::new();
        tree.for_each_tensor(&mut |tensor| tensors.push(tensor.shallow_clone()));
        match engine::compare_buffers(&group, call, &tensors, &[])? {
            Some(per_rank) => Err(StateError::DifferentSequences { call, per_rank }.into()),
            None => Ok(()),
        }
    }

    /// Tells, once, that ranks are to divide sequences and the program does not let them.
    pub(super) fn tell_of_undivided_sequences(&self) {
        let Some((axis, num_ranks)) = self.mesh().divided_sequences() else { return };
        if self.is_main_process() && self.0.sequence.is_first_without() {
            let axis = axis.name();
            messages::warning!(
                "{axis}_size is {num_ranks}, and this training step is outside of Accelerator::maybe_context_parallel: each of these ranks \
                 computes whole sequences, all of them the same"
            );
        }
    }

    /// A call that is not for rows of which this rank has some tokens alone.
    pub(super) fn check_whole_sequences(&self, call: &'static str) -> Result<()> {
        match self.sequence() {
            Some(_) => Err(StateError::WithinDividedSequences { call }.into()),
            None => Ok(()),
        }
    }
}

/// The sequence that is divided just now.
#[derive(Debug, Default)]
pub(super) struct DividedNow {
    sequence: Mutex<Option<Arc<Sequence>>>,
    /// Has one been divided, or has the program been told that none is?
    is_settled: AtomicBool,
}

impl DividedNow {
    // Replaced as a whole.
    fn get(&self) -> Option<Arc<Sequence>> {
        self.sequence.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, sequence: Option<Arc<Sequence>>) {
        self.is_settled.store(true, Ordering::Relaxed);
        *self.sequence.lock().unwrap_or_else(PoisonError::into_inner) = sequence;
    }

    fn is_first_without(&self) -> bool {
        !self.is_settled.swap(true, Ordering::Relaxed)
    }
}

/// Until this is dropped, prepared models compute attention together, also after a panic.
struct DividedScope<'a> {
    divided: &'a DividedNow,
    stores: Vec<ParamStore>,
    _others: RefuseWholeAttention,
}

impl<'a> DividedScope<'a> {
    fn enter(accelerator: &'a Accelerator, sequence: &Arc<Sequence>) -> Result<Self> {
        let stores: Vec<ParamStore> =
            accelerator.session().objects().models().map(|model| model.store.clone()).collect();
        stores.iter().try_for_each(engine::check_divides_sequences)?;
        let scope = Self { divided: &accelerator.0.sequence, stores, _others: RefuseWholeAttention::enter() };
        scope.divided.set(Some(Arc::clone(sequence)));
        for store in &scope.stores {
            store.set_attention_kernel(Arc::clone(sequence) as Arc<dyn AttentionKernel>);
        }
        Ok(scope)
    }
}

impl Drop for DividedScope<'_> {
    fn drop(&mut self) {
        self.divided.set(None);
        self.stores.iter().for_each(|store| store.set_attention_kernel(Arc::new(DenseAttention)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_told_once_and_not_after_it_has_divided_a_sequence() {
        let told = DividedNow::default();
        assert!(told.is_first_without() && !told.is_first_without());
        let divided = DividedNow::default();
        divided.set(None);
        assert!(!divided.is_first_without());
    }
}
