//! Processes that share their data: which of them get the same batches.

use crate::error::{DataError, Result};
use crate::group::Group;
use crate::session::LoaderPosition;
use accelerate_core::mesh::Mesh;
use std::sync::Arc;
use tch::{Device, Tensor};

/// Which share of the rows each rank gets.
#[derive(Clone, Debug)]
pub(crate) struct Shares {
    num_shares: usize,
    of_rank: Arc<[usize]>,
}

impl Shares {
    /// One for each place along the axes of data: ranks that compute one model together get the same rows.
    pub(crate) fn of_mesh(mesh: &Mesh) -> Self {
        let of_rank = (0..mesh.world_size()).map(|rank| mesh.rank_in(Mesh::DP, rank)).collect();
        Self { num_shares: mesh.num_shares(), of_rank }
    }

    /// What all ranks have asked for. Collective.
    pub(crate) fn agree(group: &Group, device: Device, num_shares: usize, share: usize) -> Result<Self> {
        let mine = Tensor::f_from_slice(&[num_shares as i64, share as i64])?.f_to_device(device)?;
        let all = group.all_gather(&mine)?;
        let number = |tensor: &Tensor, index: i64| -> Result<usize> {
            // A number that is too large for a share is none that exists.
            Ok(usize::try_from(tensor.f_int64_value(&[index])?).unwrap_or(usize::MAX))
        };
        let wishes: Vec<(usize, usize)> =
            all.iter().map(|wish| Ok((number(wish, 0)?, number(wish, 1)?))).collect::<Result<_>>()?;
        Self::of_wishes(&wishes)
    }

    /// From number of shares and share, rank by rank.
    fn of_wishes(wishes: &[(usize, usize)]) -> Result<Self> {
        let bad = |why: String| Err(DataError::BadShares { why }.into());
        let num_shares = wishes.first().map_or(0, |(num_shares, _)| *num_shares);
        for (rank, &(found, share)) in wishes.iter().enumerate() {
            if found != num_shares {
                return bad(format!("rank {rank} wants {found} shares, rank 0 wants {num_shares}"));
            }
            if num_shares <= share {
                return bad(format!("rank {rank} wants share {share} of {num_shares}, counted from 0"));
            }
        }
        let holders = |share| wishes.iter().filter(|(_, held)| *held == share).count();
        for share in 0..num_shares {
            if num_shares.saturating_mul(holders(share)) != wishes.len() {
                let (found, world_size) = (holders(share), wishes.len());
                return bad(format!("{found} of {world_size} ranks want share {share} of {num_shares}"));
            }
        }
        Ok(Self { num_shares, of_rank: wishes.iter().map(|(_, share)| *share).collect() })
    }

    pub(crate) fn len(&self) -> usize {
        self.num_shares
    }

    pub(crate) fn of_rank(&self, rank: usize) -> usize {
        self.of_rank.get(rank).copied().unwrap_or(0)
    }

    /// From shares to ranks: rows count on the first rank that has them.
    pub(crate) fn for_all_ranks(&self, position: LoaderPosition) -> LoaderPosition {
        if self.num_shares == self.of_rank.len() && self.of_rank.is_sorted() || position.counted_rows.is_empty() {
            return position;
        }
        let mut seen = vec![false; self.num_shares];
        let counted = self.of_rank.iter().map(|&share| {
            let rows = position.counted_rows.get(share).cloned().unwrap_or_default();
            if std::mem::replace(&mut seen[share], true) { vec![false; rows.len()] } else { rows }
        });
        LoaderPosition { counted_rows: counted.collect(), ..position }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn rows_count_on_the_first_rank_that_has_them() {
        let position =
            || LoaderPosition { end_of_dataloader: true, counted_rows: vec![vec![true, true], vec![true, false]] };
        let shares = Shares::of_wishes(&[(2, 1), (2, 0), (2, 1), (2, 0)]).unwrap();
        let told = shares.for_all_ranks(position());
        assert_eq!(told.counted_rows, [[true, false], [true, true], [false, false], [false, false]]);
        assert!(told.end_of_dataloader);
        let swapped = Shares::of_wishes(&[(2, 1), (2, 0)]).unwrap().for_all_ranks(position());
        assert_eq!(swapped.counted_rows, [[true, false], [true, true]]);
        assert_eq!(Shares::of_mesh(&Mesh::replicated(2)).for_all_ranks(position()), position());
    }

    #[test]
    fn shares_that_do_not_add_up_are_refused() {
        for (wishes, words) in [
            (&[(2, 0), (3, 1)][..], "rank 1 wants 3 shares, rank 0 wants 2"),
            (&[(2, 0), (2, 2)], "rank 1 wants share 2 of 2"),
            (&[(0, 0)], "share 0 of 0"),
            (&[(2, 0), (2, 0), (2, 1)], "2 of 3 ranks want share 0 of 2"),
            (&[(2, 0), (2, 0)], "2 of 2 ranks want share 0 of 2"),
        ] {
            let error = Shares::of_wishes(wishes).unwrap_err();
            assert!(error.is_data() && error.to_string().contains(words), "{error}");
        }
    }
}
