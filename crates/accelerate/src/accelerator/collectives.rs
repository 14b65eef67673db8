//! Collectives on whatever is made of tensors, and on objects.

use super::Accelerator;
use super::operations::{self, PadOptions, ReduceOptions};
use crate::error::Result;
use crate::tensor_tree::TensorTree;
use accelerate_core::names::RngType;
use serde::Serialize;
use serde::de::DeserializeOwned;

impl Accelerator {
    /// Every tensor of all ranks, joined along dim 0 in rank order: `[n, ...]` becomes `[num_processes * n, ...]`,
    /// a 0-d tensor `[num_processes]`. Collective.
    ///
    /// # Errors
    /// Shapes that differ between ranks: all of them are shown, with the call that evens them out.
    ///
    /// ```
    /// use accelerate::{testing, tch::Tensor};
    ///
    /// testing::ranks(2, Default::default(), |accelerator| {
    ///     let mine = Tensor::from_slice(&[accelerator.process_index() as i64]);
    ///     assert_eq!(accelerator.gather(&mine)?, Tensor::from_slice(&[0i64, 1]));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    #[track_caller]
    pub fn gather<T: TensorTree>(&self, tensor: &T) -> Result<T> {
        let _called = crate::status::here();
        operations::gather(self.group(), tensor)
    }

    /// The objects of all ranks in rank order. Collective.
    #[track_caller]
    pub fn gather_object<T: Serialize + DeserializeOwned>(&self, objects: &[T]) -> Result<Vec<T>> {
        let _called = crate::status::here();
        operations::gather_object(self.group(), objects)
    }

    /// As [`Accelerator::gather`], with each row of the data set exactly once: rows that a loader added only to keep
    /// ranks even are left out. To be called inside the loop over a prepared loader, on tensors whose dim 0 are
    /// the rows of the batch (0-d tensors give one value per rank). Collective.
    ///
    /// In a round in which some ranks have no batch (without `even_batches`), it works inside of
    /// [`Accelerator::join_uneven_inputs`] only, where the ranks that have one get the rows of all of them.
    ///
    /// # Errors
    /// Tensors that do not have the rows of the batch; other dims that differ between ranks, with all shapes and the
    /// cure; ranks without a batch outside of a join.
    ///
    /// ```
    /// use accelerate::{data::{DataLoader, VecDataset}, testing};
    ///
    /// testing::ranks(2, Default::default(), |accelerator| {
    ///     let loader = DataLoader::builder(VecDataset::new(vec![0i64, 1, 2, 3, 4])).batch_size(2).build()?;
    ///     let loader = accelerator.prepare(loader)?;
    ///     let mut seen = Vec::new();
    ///     for batch in loader.iter()? {
    ///         seen.extend(Vec::<i64>::try_from(&accelerator.gather_for_metrics(&batch?)?)?);
    ///     }
    ///     assert_eq!(seen, [0, 1, 2, 3, 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    #[track_caller]
    pub fn gather_for_metrics<T: TensorTree>(&self, input_data: &T) -> Result<T> {
        let _called = crate::status::here();
        self.check_whole_sequences("gather_for_metrics")?;
        self.compare_whole_sequences(input_data, "gather_for_metrics")?;
        let position = self.session().gradient_state.active_position();
        let join = self.session().join();
        operations::gather_for_metrics(self.group(), input_data, position.as_ref(), join.as_deref())
    }

    /// As [`Accelerator::gather_for_metrics`], for one object per row of the batch: for whatever has no common shape, such
    /// as texts or lists of boxes. Collective.
    #[track_caller]
    pub fn gather_object_for_metrics<T: Serialize + DeserializeOwned>(&self, objects: &[T]) -> Result<Vec<T>> {
        let _called = crate::status::here();
        self.check_whole_sequences("gather_object_for_metrics")?;
        let position = self.session().gradient_state.active_position();
        let join = self.session().join();
        operations::gather_object_for_metrics(self.group(), objects, position.as_ref(), join.as_deref())
    }

    /// Every tensor combined over ranks; the inputs stay as they are. `options` is how: a [`ReduceOp`], or [`ReduceOptions`]
    /// to multiply the results too. Collective.
    ///
    /// ```
    /// use accelerate::{ReduceOp, ReduceOptions, testing, tch::Tensor};
    ///
    /// testing::ranks(2, Default::default(), |accelerator| {
    ///     let mine = Tensor::from(accelerator.process_index() as f32 + 1.0);
    ///     assert_eq!(accelerator.reduce(&mine, ReduceOp::Sum)?.double_value(&[]), 3.0);
    ///     let options = ReduceOptions { scale: 10.0, ..Default::default() };
    ///     assert_eq!(accelerator.reduce(&mine, options)?.double_value(&[]), 30.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// Dtypes stay as they are. Sums of integers wrap around, and a sum of `Bool` is whether any rank has true, as in PyTorch.
    ///
    /// # Errors
    /// Shapes that differ between ranks: all of them are shown. The mean of integers or `Bool` over several ranks, and the
    /// largest or smallest of complex numbers, as in the reference. A [`scale`](ReduceOptions::scale) that a dtype cannot hold.
    #[track_caller]
    pub fn reduce<T: TensorTree>(&self, tensor: &T, options: impl Into<ReduceOptions>) -> Result<T> {
        let _called = crate::status::here();
        operations::reduce(self.group(), tensor, options.into())
    }

    /// Every tensor padded along a dim to its length on the rank where it is longest, in its own dtype. A tensor without that
    /// dim stays as it is. Collective.
    ///
    /// ```
    /// use accelerate::{PadOptions, testing, tch::Tensor};
    ///
    /// testing::ranks(2, Default::default(), |accelerator| {
    ///     let mine = Tensor::from_slice(&vec![7i64; accelerator.process_index() + 1]);
    ///     let padded = accelerator.pad_across_processes(&mine, PadOptions { pad_first: true, ..Default::default() })?;
    ///     let expected = if accelerator.is_main_process() { [0, 7] } else { [7, 7] };
    ///     assert_eq!(padded, Tensor::from_slice(&expected));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// Other dims that differ between ranks; a [`pad_index`](PadOptions::pad_index) that the dtype of a tensor with that dim
    /// cannot hold, whether or not this tensor is too short.
    #[track_caller]
    pub fn pad_across_processes<T: TensorTree>(&self, tensor: &T, options: PadOptions) -> Result<T> {
        let _called = crate::status::here();
        operations::pad_across_processes(self.group(), tensor, options)
    }

    /// Every tensor as it is on rank `from_process`; the other ranks give tensors of the same shapes. Collective.
    #[track_caller]
    pub fn broadcast<T: TensorTree>(&self, tensor: &T, from_process: usize) -> Result<T> {
        let _called = crate::status::here();
        operations::broadcast(self.group(), tensor, from_process)
    }

    /// Sets random number streams of this process to the states of rank 0's. Collective.
    ///
    /// ```
    /// use accelerate::{Accelerator, RngType};
    ///
    /// Accelerator::builder().cpu(true).build()?.synchronize_rng_states(&[RngType::Torch])?;
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// When a stream does not exist on this device.
    #[track_caller]
    pub fn synchronize_rng_states(&self, rng_types: &[RngType]) -> Result<()> {
        let _called = crate::status::here();
        crate::data::synchronize_rng_states(self.session(), rng_types, Some(self.device()))
    }

    /// Replaces the objects by those of rank `from_process`. Collective.
    #[track_caller]
    pub fn broadcast_object_list<T: Serialize + DeserializeOwned>(
        &self,
        objects: &mut Vec<T>,
        from_process: usize,
    ) -> Result<()> {
        let _called = crate::status::here();
        operations::broadcast_object_list(self.group(), objects, from_process)
    }
}
