//! Collectives during which a rank computes with the parts that are there already, while others are still on their way.
//!
//! Method: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023;
//! here ranks read what others have made out of their memory.

use super::peer_calls::{CallError, Made, PeerCalls};
use super::{Group, Links};
use crate::error::Result;
use tch::{Device, Kind, Tensor};

impl Group {
    /// Can ranks compute during collectives of such a tensor? The answer is the same on all ranks that have such ones.
    pub(crate) fn overlaps(&self, tensor: &Tensor) -> bool {
        let is_here = tensor.device() == Device::Cpu && !tensor.is_sparse();
        let is_floating = matches!(tensor.f_kind(), Ok(Kind::Float | Kind::Double | Kind::BFloat16 | Kind::Half));
        is_here && is_floating && self.reads_peers()
    }

    /// Collects every rank's part, by rank, in `places`: contiguous, of any sizes, where this rank's own stands already. `compute` is
    /// called with each rank as soon as its part is there, this rank first, and makes no call of this group. For tensors that can be
    /// [overlapped](Self::overlaps). Collective.
    pub(crate) fn all_gather_overlapped(
        &self,
        places: &[Tensor],
        compute: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        let numel: usize = places.iter().map(Tensor::numel).sum();
        let kind = places.first().map_or_else(String::new, |place| format!(" {:?}", place.kind()));
        let shape = || format!("{numel} elements{kind}");
        self.run_overlapped("all_gather", &shape, |peers, made| peers.gather_parts(made, places, compute))
    }

    /// The sum of all ranks' contributions to this rank's part, added in the order of ranks. `compute` makes this rank's contribution to
    /// the part of a rank, this rank's own last, and makes no call of this group. `sum` is where the sum goes, contiguous, and
    /// all parts together have `numel` elements. For tensors that can be [overlapped](Self::overlaps). Collective.
    pub(crate) fn reduce_scatter_overlapped(
        &self,
        (sum, numel): (&Tensor, usize),
        compute: &mut dyn FnMut(usize) -> Result<Tensor>,
    ) -> Result<()> {
        let shape = || format!("{numel} elements {:?} (Sum)", sum.kind());
        self.run_overlapped("reduce_scatter", &shape, |peers, made| peers.sum_parts(made, (sum, numel), compute))
    }

    fn run_overlapped(
        &self,
        op: &'static str,
        shape: &dyn Fn() -> String,
        run: impl FnOnce(&PeerCalls, &Made<'_>) -> std::result::Result<(), CallError>,
    ) -> Result<()> {
        self.compare_call(op, shape)?;
        let found = self.inner.links.as_ref().and_then(|links| Some((links, links.peer_calls.get()?.as_ref()?)));
        let found: (&Links, &PeerCalls) =
            found.ok_or_else(|| crate::Error::other("ranks do not read each other's memory"))?;
        self.run_in_memory_with(op, shape, found, run)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing;

    /// Ranks have parts of these sizes.
    const SIZES: [[i64; 4]; 3] = [[3, 3, 3, 3], [2, 1, 1, 0], [9000, 8999, 8999, 1]];

    fn numbers(rank: usize, part: usize, size: i64) -> Tensor {
        Tensor::arange(size, (Kind::Float, Device::Cpu)) + (100 * rank + 7 * part) as f64
    }

    #[test]
    fn parts_are_computed_with_as_soon_as_they_are_there_the_own_one_first() {
        for world_size in 2..=4 {
            testing::ranks(world_size, Default::default(), |accelerator| {
                let group = accelerator.group();
                let (rank, kind) = (group.rank(), (Kind::Float, Device::Cpu));
                group.all_reduce(&Tensor::zeros([1], kind), crate::ReduceOp::Sum)?;
                assert!(group.overlaps(&Tensor::zeros([1], kind)));
                assert!(!group.overlaps(&Tensor::zeros([1], (Kind::Int64, Device::Cpu))));
                for sizes in SIZES {
                    let mut places: Vec<Tensor> =
                        (0..world_size).map(|part| Tensor::zeros([sizes[part]], kind)).collect();
                    places[rank] = numbers(rank, 0, sizes[rank]);
                    let mut computed = Vec::new();
                    group.all_gather_overlapped(&places, &mut |part| {
                        assert_eq!(places[part], numbers(part, 0, sizes[part]));
                        computed.push(part);
                        Ok(())
                    })?;
                    assert_eq!(computed, (0..world_size).map(|step| (rank + step) % world_size).collect::<Vec<_>>());

                    let sum = Tensor::zeros([sizes[rank]], kind);
                    let numel = sizes[..world_size].iter().sum::<i64>() as usize;
                    computed.clear();
                    group.reduce_scatter_overlapped((&sum, numel), &mut |part| {
                        computed.push(part);
                        Ok(numbers(rank, part, sizes[part]))
                    })?;
                    let wanted = (0..world_size).map(|from| numbers(from, rank, sizes[rank]));
                    assert_eq!(sum, wanted.reduce(|sum, next| sum + next).unwrap());
                    assert_eq!(computed, (1..=world_size).map(|step| (rank + step) % world_size).collect::<Vec<_>>());
                }
                // Calls of the other kind go on in step.
                let ones = Tensor::ones([100_000], kind);
                group.all_reduce(&ones, crate::ReduceOp::Sum)?;
                assert_eq!(ones, Tensor::full([100_000], world_size as f64, kind));
                Ok(())
            })
            .unwrap();
        }
    }

    #[test]
    fn ranks_that_gather_other_tensors_are_told() {
        testing::ranks(3, Default::default(), |accelerator| {
            let (group, kind) = (accelerator.group(), (Kind::Float, Device::Cpu));
            group.all_reduce(&Tensor::zeros([1], kind), crate::ReduceOp::Sum)?;
            let size = if group.rank() == 2 { 4 } else { 3 };
            let places = [0, 1, 2].map(|_| Tensor::zeros([size], kind));
            let error = group.all_gather_overlapped(&places, &mut |_| Ok(())).unwrap_err().to_string();
            assert!(error.contains("9 elements") && error.contains("12 elements"), "{error}");
            Ok(())
        })
        .unwrap();
    }

    /// Rank 0 makes its parts while the others wait for them already.
    #[test]
    fn after_different_calls_nothing_of_them_is_taken_for_what_comes_next() {
        let barrier = std::sync::Barrier::new(3);
        testing::ranks(3, Default::default(), |accelerator| {
            let (group, kind) = (accelerator.group(), (Kind::Float, Device::Cpu));
            group.all_reduce(&Tensor::zeros([1], kind), crate::ReduceOp::Sum)?;
            let scatter = || {
                let sum = Tensor::zeros([3], kind);
                group.reduce_scatter_overlapped((&sum, 9), &mut |_| Ok(Tensor::ones([3], kind))).map(|()| sum)
            };
            let scatter_late = || {
                let (sum, rank) = (Tensor::zeros([3], kind), group.rank());
                group.reduce_scatter_overlapped((&sum, 9), &mut |part| {
                    let is_late = rank == 0 && part == 1;
                    if is_late || (rank != 0 && part == rank) {
                        barrier.wait();
                    }
                    let size = if is_late { 700 } else { 1 };
                    let numbers = Tensor::full([size, size], 1, kind);
                    Ok((numbers.mm(&numbers).max() / size as f64).expand([3], false).contiguous())
                })?;
                Ok::<_, crate::Error>(sum)
            };
            for _ in 0..3 {
                let made = if group.rank() == 0 { scatter().map(drop) } else { group.barrier() };
                let error = made.unwrap_err().to_string();
                assert!(error.contains("barrier") && error.contains("9 elements"), "{error}");
                assert_eq!(scatter_late()?, Tensor::full([3], 3, kind));
                let numbers = Tensor::full([100_000], 1 + group.rank() as i64, kind);
                group.all_reduce(&numbers, crate::ReduceOp::Sum)?;
                assert_eq!(numbers, Tensor::full([100_000], 6, kind));
                assert_eq!(scatter()?, Tensor::full([3], 3, kind));
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_rank_whose_computation_fails_is_named_by_the_others() {
        testing::ranks(2, Default::default(), |accelerator| {
            let (group, kind) = (accelerator.group(), (Kind::Float, Device::Cpu));
            group.all_reduce(&Tensor::zeros([1], kind), crate::ReduceOp::Sum)?;
            let places = [0, 1].map(|_| Tensor::zeros([3], kind));
            let made = group.all_gather_overlapped(&places, &mut |part| match (group.rank(), part) {
                (1, 0) => Err(crate::Error::other("no memory left")),
                _ => Ok(()),
            });
            // It may have given the others all that they need before.
            let made = made.and_then(|()| group.all_reduce(&Tensor::zeros([1], kind), crate::ReduceOp::Sum));
            let error = made.unwrap_err().to_string();
            let wanted = ["rank 1", "no memory left"][group.rank()];
            assert!(error.contains(wanted), "{error}");
            Ok(())
        })
        .unwrap();
    }
}
