//! Collectives in which every rank sends other ranks parts of what it has: all to all, or to its neighbour in a ring.

use super::peer_call::PeerCall;
use super::{Group, shape_text, wire};
use crate::error::{CollectiveError, Result};
use crate::status;
use tch::Tensor;

impl Group {
    /// Sends rank `r` the `r`-th of the equal parts of `[world_size * n, ...]` along dim 0; the parts that all ranks sent here, in the
    /// order of ranks, are the result, of the same shape. Any dtype. Its own inverse. Records no gradients. Collective.
    ///
    /// ```
    /// use accelerate::{tch::Tensor, testing};
    ///
    /// let received = testing::ranks(2, Default::default(), |accelerator| {
    ///     let rank = accelerator.process_index() as i64;
    ///     let received = accelerator.group().all_to_all_single(&Tensor::from_slice(&[10 * rank, 10 * rank + 1]))?;
    ///     Ok(Vec::<i64>::try_from(&received)?)
    /// })?;
    /// assert_eq!(received, [[0, 10], [1, 11]]);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// A first dim that is not a multiple of the world size.
    #[track_caller]
    pub fn all_to_all_single(&self, tensor: &Tensor) -> Result<Tensor> {
        let _called = status::here();
        const OP: &str = "all_to_all_single";
        let world_size = self.world_size() as i64;
        if tensor.size().first().is_none_or(|rows| rows % world_size != 0) {
            let shape = shape_text(tensor);
            return Err(CollectiveError::Indivisible { op: OP, shape, world_size: self.world_size() }.into());
        }
        let input = wire::movable(tensor)?;
        if world_size == 1 {
            return wire::restore(&input.f_detach_copy()?, tensor);
        }
        let output = input.f_empty_like()?;
        let places = output.f_view([world_size, input.numel() as i64 / world_size])?.f_unbind(0)?;
        let call = PeerCall::AllToAll { input: &input, places: &places };
        self.run(OP, &|| shape_text(tensor), &call, |group| group.all_to_all_single(&output, &input, &[], &[], None))?;
        wire::restore(&output, tensor)
    }

    /// Sends the tensor to the next rank, the last one's to the first; the result is that of the rank before. Shapes and dtypes are
    /// equal on all ranks. Records no gradients. Collective.
    pub(crate) fn rotate(&self, tensor: &Tensor) -> Result<Tensor> {
        const OP: &str = "rotate";
        let (rank, world_size) = (self.rank(), self.world_size());
        let input = wire::movable(tensor)?;
        if world_size == 1 {
            return wire::restore(&input.f_detach_copy()?, tensor);
        }
        let output = input.f_empty_like()?;
        let (before, next) = ((rank + world_size - 1) % world_size, (rank + 1) % world_size);
        let call = PeerCall::Rotate { input: &input, place: &output };
        let all_of = |rank: usize| {
            let mut sizes = vec![0; world_size];
            sizes[rank] = input.numel() as i64;
            sizes
        };
        let (sent, received) = (input.f_view([-1])?, output.f_view([-1])?);
        self.run(OP, &|| shape_text(tensor), &call, |group| {
            group.all_to_all_single(&received, &sent, &all_of(before), &all_of(next), None)
        })?;
        wire::restore(&output, tensor)
    }
}
