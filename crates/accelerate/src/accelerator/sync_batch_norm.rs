//! Batch normalisation over the batches of all processes.

use super::Accelerator;
use crate::error::Result;
use crate::nn::{AnyLayer, ParamStore};
use accelerate_core::mesh::Mesh;

impl Accelerator {
    /// Has all batch normalisations of a model normalise, while it trains, by the batches of all processes as if they were one:
    /// `torch.nn.SyncBatchNorm.convert_sync_batchnorm`, on the CPU too. Returns how many layers that are. Call it on all processes,
    /// before training.
    ///
    /// Worth it where each process has only a few examples. A forward pass then sends mean, variance and count of each channel, and a
    /// backward pass two sums, for each layer. Outputs, gradients and running statistics are those of one process with the whole batch
    /// (gradients of weights once the engine has averaged them, if losses are means over batches of one size). Batches may differ in
    /// size, and be empty. Evaluation stays as it was, and so do names in files.
    ///
    /// Forward and backward passes of such a model are collective over the processes that read different rows. So all of them have to
    /// have a batch: [`join_uneven_inputs`](Self::join_uneven_inputs) does not help processes that have none.
    ///
    /// # Errors
    /// A failure between processes.
    ///
    /// ```
    /// use accelerate::nn::{BatchNorm1d, ParamStore};
    /// use accelerate::tch::Tensor;
    /// use accelerate::testing;
    ///
    /// let outputs = testing::ranks(2, Default::default(), |accelerator| {
    ///     let store = ParamStore::new(accelerator.device());
    ///     let norm = BatchNorm1d::new(store.root(), 1, Default::default())?;
    ///     assert_eq!(accelerator.convert_sync_batchnorm(&store)?, 1);
    ///     // One value is not enough for a variance, but two processes have two.
    ///     let own = Tensor::from_slice(&[2.0 * accelerator.process_index() as f32]).view([1, 1]);
    ///     Ok(norm.forward(&own)?.double_value(&[0, 0]))
    /// })?;
    /// assert!((outputs[0] + 1.0).abs() < 1e-4 && (outputs[1] - 1.0).abs() < 1e-4);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    #[doc(alias = "SyncBatchNorm")]
    pub fn convert_sync_batchnorm(&self, model: &ParamStore) -> Result<usize> {
        let _called = crate::status::here();
        let group = self.session().mesh.group(Mesh::DP)?;
        let layers = model.named_layers();
        let norms = layers.iter().filter_map(|(_, layer)| match layer {
            AnyLayer::BatchNorm(norm) => Some(norm),
            _ => None,
        });
        Ok(norms.inspect(|norm| norm.synchronise(&group)).count())
    }
}
