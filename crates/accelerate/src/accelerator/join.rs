//! `join_uneven_inputs`: ranks that run out of batches go along with the others.

use super::models::for_each_engine;
use super::{Accelerator, HasParameters};
use crate::error::{Error, Fp8Error, Result, StateError};
use crate::messages;
use crate::optim::GradScalerState;
use crate::session::{Engine, GradientState, Join, Session, Summary};
use accelerate_core::mesh::Axis;
use std::sync::Arc;

/// How [`Accelerator::join_uneven_inputs`] treats loaders.
///
/// ```
/// assert_eq!(accelerate::JoinOptions::default().even_batches, None);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JoinOptions {
    /// Overrides the setting of all prepared loaders for passes that begin inside. Default `None`: they keep theirs.
    pub even_batches: Option<bool>,
}

impl Accelerator {
    /// Runs `body`, a training loop in which some ranks may have fewer batches than others: a rank that is through with
    /// it goes along with the reductions of the others until all are (`join_uneven_inputs` of the reference,
    /// `accelerator.py`; the method is that of `torch.distributed.algorithms.Join` with `DistributedDataParallel`).
    ///
    /// [`JoinOptions::even_batches`] overrides the setting of all prepared loaders for passes that begin inside `body`. With even
    /// batches no rank runs out first, and `body` is merely run. One process merely runs it too. Unlike in
    /// the reference, CPU ranks join as GPU ranks do. Collective.
    ///
    /// Streams that every rank reads (`dispatch_batches: Some(false)`) have no fillers either without even batches; the reference
    /// fills them up all the same. What rank 0 reads for all is always even.
    ///
    /// - Gradients are divided by the number of *all* ranks; those without a batch add zeros. So every row of equal
    ///   batches counts the same, and the last, incomplete round makes a smaller step.
    /// - Where a rank ran out in the middle of an accumulation window, what it has accumulated is part of the others'
    ///   next reduction. (PyTorch leaves it out.)
    /// - Buffers come from the first rank that has a batch. At the end all ranks take over the parameters, buffers,
    ///   loss scale and place in the accumulation window of a rank that had most batches.
    /// - [`Accelerator::gather_for_metrics`] works in all rounds; ranks without a batch are not part of the result and
    ///   do not see it.
    ///
    /// # Limits
    /// - Optimizers and schedulers of ranks that ran out earlier have made fewer steps, as in PyTorch: with momentum or
    ///   Adam their states differ afterwards, and checkpoints keep those of each rank. A warning is logged. With even batches they stay equal.
    /// - `body` makes one pass over each loader, and within it no other collective than training steps and
    ///   `gather_for_metrics`. Calls on whole accelerators (`gather`, `reduce`, ...) become an error on all ranks;
    ///   others, such as `wait_for_everyone`, end by their deadline.
    /// - A forward pass with gradients has to be followed by its backward pass; run evaluation under `tch::no_grad`.
    /// - Models with `static_graph` are refused.
    /// - When `body` fails, this rank leaves at once with that error, and the others notice by their deadline or when its
    ///   process ends.
    ///
    /// ```
    /// use accelerate::data::{DataLoader, VecDataset};
    /// use accelerate::{nn::{Linear, ModuleFn, ParamStore}, optim::Sgd, tch::Tensor, testing, JoinOptions};
    ///
    /// let weights = testing::ranks(2, Default::default(), |accelerator| {
    ///     let store = ParamStore::new(accelerator.device());
    ///     let linear = Linear::new(store.root(), 1, 1, Default::default())?;
    ///     linear.weight.copy_(&Tensor::from(0f32))?;
    ///     let weight = linear.weight.clone();
    ///     let optimizer = Sgd::new(&store, 1.0)?;
    ///     let model = ModuleFn::new(&store, move |x: &Tensor| linear.forward(x));
    ///     let loader = DataLoader::builder(VecDataset::new(vec![1f32, 2.0, 4.0])).build()?;
    ///     let (model, mut optimizer, loader) = accelerator.prepare((model, optimizer, loader))?;
    ///     accelerator.join_uneven_inputs(&model, JoinOptions { even_batches: Some(false) }, || {
    ///         for batch in loader.iter()? { // two batches on rank 0, one on rank 1
    ///             accelerator.backward(&model.forward(&batch?)?.sum(None))?;
    ///             optimizer.step()?;
    ///             optimizer.zero_grad()?;
    ///         }
    ///         Ok(())
    ///     })?;
    ///     Ok(weight.get()?.f_double_value(&[0, 0])?)
    /// })?;
    /// assert_eq!(weights, [-3.5, -3.5]); // -(1 + 2) / 2 - (4 + 0) / 2
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of `body`; a model that was not prepared; ranks that begin different joins or make different calls; a failed peer.
    pub fn join_uneven_inputs<T>(
        &self,
        models: &(impl HasParameters + ?Sized),
        options: JoinOptions,
        body: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let session = self.session();
        let _even_batches = EvenBatches::override_with(&session.gradient_state, options.even_batches);
        let mut engines: Vec<Arc<dyn Engine>> = Vec::new();
        for_each_engine(models, "join_uneven_inputs", &mut |engine| engines.push(engine.clone()))?;
        let even = session.gradient_state.even_batches().unwrap_or(self.config().dataloader.even_batches);
        if !self.use_distributed() {
            return body();
        }
        let description = format!("{} models, even_batches {even}", engines.len());
        if self.mesh().size(Axis::Tp) > 1 {
            return Err(StateError::NotWithTensorParallel { feature: "join_uneven_inputs" }.into());
        }
        if self.mesh().divided_sequences().is_some() {
            return Err(StateError::NotWithDividedSequences { feature: "join_uneven_inputs" }.into());
        }
        if !even && session.objects().models().any(|model| model.scaling.is_some()) {
            return Err(Fp8Error::Join.into());
        }
        if let Some(texts) = self.group().disagreement("join_uneven_inputs", &description)? {
            return Err(StateError::DifferentJoins { per_rank: texts.join("; ") }.into());
        }
        if even {
            return body();
        }
        let joined = Joined::begin(session, &engines)?;
        let value = body()?;
        let summary = joined.join.follow(&engines, self.optimizer_steps())?;
        drop(joined);
        self.take_over(&engines, &summary)?;
        Ok(value)
    }

    /// Steps of all prepared optimizers together.
    fn optimizer_steps(&self) -> usize {
        self.session().objects().optimizers().map(|optimizer| optimizer.num_steps()).sum()
    }

    /// Makes this rank's state that of a rank that had most batches, as far as the accelerator keeps it. Collective.
    fn take_over(&self, engines: &[Arc<dyn Engine>], summary: &Summary) -> Result<()> {
        let authority = summary.authority();
        engines.iter().try_for_each(|engine| engine.copy_from(authority))?;
        if let Some(scaler) = self.scaler()
            && let Some(state) = scaler.state_dict()?
        {
            let mine = serde_json::to_vec(&state).map_err(Error::other)?;
            let state: GradScalerState =
                serde_json::from_slice(&self.group().broadcast_bytes(&mine, authority)?).map_err(Error::other)?;
            scaler.load_state_dict(&state)?;
        }
        let (Some(mine), Some(theirs)) = (summary.done.get(self.process_index()), summary.done.get(authority)) else {
            return Ok(());
        };
        if mine.followed > theirs.followed {
            self.session().gradient_state.restore_window(theirs.window);
        }
        if summary.done.iter().any(|done| done.optimizer_steps != theirs.optimizer_steps) {
            // A checkpoint keeps the states of all ranks from now on.
            let joined = |engine: &Arc<dyn Engine>| engines.iter().any(|own| Arc::ptr_eq(own, engine));
            let objects = self.session().objects();
            objects.models().filter(|model| joined(&model.engine)).for_each(|model| model.train_alone());
        }
        if mine.optimizer_steps < theirs.optimizer_steps {
            messages::warning_here!(
                "rank {} made {} optimizer steps, rank {authority} {}: with momentum or Adam, the states of their \
                 optimizers differ from now on, also in checkpoints, which keep those of each rank. Use even_batches to keep them equal",
                self.process_index(),
                mine.optimizer_steps,
                theirs.optimizer_steps
            );
        }
        Ok(())
    }
}

/// Puts the loaders' own setting back, however the block is left.
struct EvenBatches<'a> {
    state: &'a GradientState,
    before: Option<bool>,
}

impl<'a> EvenBatches<'a> {
    fn override_with(state: &'a GradientState, even_batches: Option<bool>) -> Self {
        let before = state.even_batches();
        state.set_even_batches(even_batches.or(before));
        Self { state, before }
    }
}

impl Drop for EvenBatches<'_> {
    fn drop(&mut self) {
        self.state.set_even_batches(self.before);
    }
}

/// Reductions are announced as long as this lives.
struct Joined<'a> {
    session: &'a Session,
    engines: &'a [Arc<dyn Engine>],
    join: Arc<Join>,
}

impl<'a> Joined<'a> {
    fn begin(session: &'a Session, engines: &'a [Arc<dyn Engine>]) -> Result<Self> {
        if session.join().is_some() {
            return Err(StateError::NestedJoin.into());
        }
        let join = Arc::new(Join::new(session.group.clone(), session.gradient_state.clone()));
        let joined = Self { session, engines, join };
        for (model, engine) in engines.iter().enumerate() {
            engine.set_join(Some((joined.join.clone(), model)))?;
        }
        session.set_join(Some(joined.join.clone()));
        Ok(joined)
    }
}

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        self.session.set_join(None);
        for engine in self.engines {
            // Ending never fails; only beginning does.
            let _ = engine.set_join(None);
        }
    }
}
