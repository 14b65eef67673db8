//! The collectives that ranks make in each other's memory, and what they compare of them.

use super::ReduceOp;
use std::hash::{DefaultHasher, Hash, Hasher};
use tch::{Device, Kind, Tensor};

/// A collective on contiguous tensors of the CPU.
#[derive(Clone, Copy)]
pub(super) enum PeerCall<'a> {
    Barrier,
    /// Combined in place by `op`; every rank's numbers are multiplied by `factor` before. What the caller `asked` for may need
    /// more than that afterwards, and is to be the same on all ranks.
    AllReduce {
        tensor: &'a Tensor,
        asked: ReduceOp,
        op: torch_ext::ReduceOp,
        factor: Option<f64>,
    },
    Broadcast {
        tensor: &'a Tensor,
        source: usize,
    },
    /// Every rank's `input` in its place.
    AllGather {
        input: &'a Tensor,
        places: &'a [Tensor],
    },
    /// The same, where each rank's `input` stands for what it is about to do, whatever that is: ranks compare it themselves.
    Compare {
        input: &'a Tensor,
        places: &'a [Tensor],
    },
    /// Rank `r` combines the `r`-th of all ranks' `rows`, in the order of ranks, in its `shard`.
    ReduceScatter {
        rows: &'a Tensor,
        shard: &'a Tensor,
        op: ReduceOp,
    },
    /// Rank `r` gets the `r`-th of the equal parts of every rank's `input`, in the order of ranks.
    AllToAll {
        input: &'a Tensor,
        places: &'a [Tensor],
    },
    /// The `input` of the rank before, that of the last rank on the first one.
    Rotate {
        input: &'a Tensor,
        place: &'a Tensor,
    },
    /// Ranks compute with parts of a tensor of so many elements, which others read where `addresses` (int64) say.
    Parts {
        addresses: &'a Tensor,
        kind: Kind,
        numel: usize,
    },
}

impl PeerCall<'_> {
    /// What the call is about on this rank.
    pub(super) fn tensor(&self) -> Option<&Tensor> {
        match self {
            Self::Barrier => None,
            Self::AllReduce { tensor, .. } | Self::Broadcast { tensor, .. } => Some(tensor),
            Self::AllGather { input, .. }
            | Self::Compare { input, .. }
            | Self::AllToAll { input, .. }
            | Self::Rotate { input, .. } => Some(input),
            Self::ReduceScatter { rows, .. } => Some(rows),
            Self::Parts { addresses, .. } => Some(addresses),
        }
    }

    /// What others read of rank `rank`.
    pub(super) fn shown_by(&self, rank: usize) -> Option<&Tensor> {
        self.tensor().filter(|_| !matches!(self, Self::Broadcast { source, .. } if *source != rank))
    }

    /// Can it be made in memory?
    pub(super) fn is_readable(&self) -> bool {
        let lies_here = |tensor: &Tensor| tensor.device() == Device::Cpu && tensor.is_contiguous();
        match self {
            Self::AllGather { input, places } | Self::Compare { input, places } | Self::AllToAll { input, places } => {
                lies_here(input) && places.iter().all(lies_here)
            }
            Self::Rotate { input, place } => lies_here(input) && lies_here(place),
            _ => self.tensor().is_none_or(lies_here),
        }
    }

    pub(super) fn hash(&self, op: &str, number: i64) -> i64 {
        let (what, how) = match self {
            Self::Barrier => (0u8, 0),
            Self::AllReduce { asked, .. } => (1, *asked as usize),
            Self::Broadcast { source, .. } => (2, *source),
            Self::AllGather { .. } => (3, 0),
            Self::ReduceScatter { op, .. } => (4, *op as usize),
            Self::Compare { .. } => (5, 0),
            Self::AllToAll { .. } => (6, 0),
            Self::Rotate { .. } => (7, 0),
            Self::Parts { kind, numel, .. } => (8, *numel << 8 | *kind as usize),
        };
        let tensor = self.tensor().map(|tensor| (tensor.kind() as usize, tensor.numel()));
        let op = if matches!(self, Self::Compare { .. }) { "" } else { op };
        let mut hasher = DefaultHasher::new();
        (op, number, what, how, tensor).hash(&mut hasher);
        hasher.finish() as i64
    }
}
