//! The ranks of a job as a grid with named axes.

use crate::Result;
use crate::error::config::ConfigErrorKind;
use std::fmt;

/// A dimension of a [`Mesh`], by the name that it has in PyTorch's `DeviceMesh` and Accelerate's `ParallelismConfig`. The last one
/// runs fastest: neighbours in number are neighbours along `tp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Axis {
    /// Ranks along it hold the same shard of a model.
    DpReplicate,
    /// Ranks along it divide a model's parameters.
    DpShard,
    /// Ranks along it divide sequences, and exchange keys and values.
    Cp,
    /// Ranks along it divide sequences, and exchange heads of attention.
    Sp,
    /// Ranks along it divide each layer's computation.
    Tp,
}

impl Axis {
    /// All axes, the slowest first.
    pub const ALL: [Self; 5] = [Self::DpReplicate, Self::DpShard, Self::Cp, Self::Sp, Self::Tp];

    /// As the reference writes it: `dp_shard`.
    pub fn name(self) -> &'static str {
        match self {
            Self::DpReplicate => "dp_replicate",
            Self::DpShard => "dp_shard",
            Self::Cp => "cp",
            Self::Sp => "sp",
            Self::Tp => "tp",
        }
    }
}

/// Ranks in a grid (PyTorch's `DeviceMesh`). Today a model is divided along [`Axis::DpShard`] and repeated along
/// [`Axis::DpReplicate`]; the other axes have one rank.
///
/// ```
/// use accelerate_core::mesh::{Axis, Mesh};
/// let mesh = Mesh::new(6, 2)?;
/// assert_eq!((mesh.num_replicas(), mesh.shard_size()), (3, 2));
/// assert_eq!(mesh.ranks_along(Axis::DpShard, 3), [2, 3]);
/// assert_eq!(mesh.ranks_along(Axis::DpReplicate, 3), [1, 3, 5]);
/// assert_eq!(mesh.to_string(), "dp_replicate 3 x dp_shard 2");
/// assert!(Mesh::new(6, 4).is_err());
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// By axis.
    sizes: [usize; Axis::ALL.len()],
}

impl Mesh {
    /// `world_size` ranks, of which `shard_size` neighbours each divide a model.
    ///
    /// # Errors
    /// [`Error::is_config`](crate::Error::is_config): they do not fill whole groups.
    pub fn new(world_size: usize, shard_size: usize) -> Result<Self> {
        if shard_size == 0 || world_size == 0 || !world_size.is_multiple_of(shard_size) {
            return Err(ConfigErrorKind::IncompleteMesh { world_size, shard_size }.into());
        }
        Ok(Self { sizes: [world_size / shard_size, shard_size, 1, 1, 1] })
    }

    /// Every rank has all of a model.
    pub fn replicated(world_size: usize) -> Self {
        Self { sizes: [world_size.max(1), 1, 1, 1, 1] }
    }

    /// Number of ranks along an axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.sizes[axis as usize]
    }

    /// How many ranks hold the same.
    pub fn num_replicas(&self) -> usize {
        self.size(Axis::DpReplicate)
    }

    /// Among how many ranks a model is divided.
    pub fn shard_size(&self) -> usize {
        self.size(Axis::DpShard)
    }

    /// All ranks.
    pub fn world_size(&self) -> usize {
        self.sizes.iter().product()
    }

    /// The ranks that have the coordinates of rank `rank` on all other axes, in order.
    pub fn ranks_along(&self, axis: Axis, rank: usize) -> Vec<usize> {
        let (index, size) = (axis as usize, self.size(axis));
        let stride: usize = self.sizes[index + 1..].iter().product();
        let first = rank - rank / stride % size * stride;
        (0..size).map(|place| first + place * stride).collect()
    }
}

/// Every rank has another shard.
impl From<usize> for Mesh {
    fn from(world_size: usize) -> Self {
        Self { sizes: [1, world_size.max(1), 1, 1, 1] }
    }
}

/// The axes that have more than one rank.
impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes = Axis::ALL.into_iter().filter(|&axis| self.size(axis) > 1);
        let axes: Vec<_> = axes.map(|axis| format!("{} {}", axis.name(), self.size(axis))).collect();
        f.write_str(if axes.is_empty() { "one rank" } else { "" })?;
        f.write_str(&axes.join(" x "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_cross_in_one_rank_and_lines_cover_the_job() {
        let mesh = Mesh { sizes: [2, 3, 1, 2, 4] };
        for rank in 0..mesh.world_size() {
            for axis in Axis::ALL {
                let line = mesh.ranks_along(axis, rank);
                assert_eq!(line.len(), mesh.size(axis), "{axis:?}");
                assert!(line.iter().all(|&other| mesh.ranks_along(axis, other) == line), "{axis:?} {line:?}");
                assert!(line.is_sorted() && line.contains(&rank), "{axis:?} {line:?}");
                for other in Axis::ALL.into_iter().filter(|&other| other != axis) {
                    let crossing = mesh.ranks_along(other, rank);
                    let common: Vec<_> = line.iter().filter(|&rank| crossing.contains(rank)).collect();
                    assert_eq!(common, [&rank], "{axis:?} {other:?}");
                }
            }
        }
        assert_eq!(mesh.ranks_along(Axis::Tp, 6), [4, 5, 6, 7]);
        assert_eq!(mesh.ranks_along(Axis::DpReplicate, 6), [6, 30]);
    }
}
