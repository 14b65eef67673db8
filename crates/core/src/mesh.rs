//! The ranks of a job as a grid with named axes.

use crate::Result;
use crate::error::config::ConfigErrorKind;
use serde::Serialize;
use std::fmt;

/// A dimension of a [`Mesh`], by the name that it has in PyTorch's `DeviceMesh` and Accelerate's `ParallelismConfig`. The last one
/// runs fastest: neighbours in number are neighbours along `tp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
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

/// Ranks in a grid (PyTorch's `DeviceMesh`). A model is divided along [`Axis::DpShard`] and [`Axis::Tp`], and repeated along
/// [`Axis::DpReplicate`]; sequences are divided along [`Axis::Cp`] or [`Axis::Sp`].
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

    /// Ranks along the axes that are named, and one along each other axis (`ParallelismConfig` of the reference).
    ///
    /// Two rules of the reference do not hold here: `tp` and `cp` go with `dp_replicate` alone, and `dp_replicate` needs no
    /// `dp_shard`.
    ///
    /// ```
    /// use accelerate_core::mesh::{Axis, Mesh};
    /// let mesh = Mesh::of(8, &[(Axis::DpReplicate, 2), (Axis::Cp, 2), (Axis::Tp, 2)])?;
    /// assert_eq!(mesh.coordinates(6), [1, 0, 1, 0, 0]);
    /// assert_eq!(mesh.rank_in(Mesh::DP, 6), 1);
    /// assert_eq!(mesh.ranks_in(Mesh::DP_CP, 6), [0, 2, 4, 6]);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::is_config`](crate::Error::is_config): sizes that do not multiply to the number of ranks, an axis of no ranks or that
    /// is named twice, and `cp` beside `sp`, which divide the same sequences.
    pub fn of(world_size: usize, sizes: &[(Axis, usize)]) -> Result<Self> {
        let mut mesh = Self { sizes: [1; Axis::ALL.len()] };
        let mut named: Vec<Axis> = Vec::new();
        for &(axis, size) in sizes {
            if named.contains(&axis) || size == 0 {
                return Err(ConfigErrorKind::MeshAxis { axis: axis.name(), size, is_named_twice: size > 0 }.into());
            }
            named.push(axis);
            mesh.sizes[axis as usize] = size;
        }
        if mesh.size(Axis::Cp) > 1 && mesh.size(Axis::Sp) > 1 {
            return Err(ConfigErrorKind::TwoWaysToDivideSequences.into());
        }
        let product = mesh.sizes.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        if product != Some(world_size) {
            return Err(ConfigErrorKind::MeshIsNotWorld { mesh: mesh.to_string(), world_size }.into());
        }
        Ok(mesh)
    }

    /// Ranks that read different rows (the reference's joint axis `dp`).
    pub const DP: &[Axis] = &[Axis::DpReplicate, Axis::DpShard];

    /// Ranks that divide a model's parameters, where those that divide a sequence share them, too (`dp_shard_cp`).
    pub const DP_SHARD_CP: &[Axis] = &[Axis::DpShard, Axis::Cp];

    /// Ranks whose losses make one mean (`dp_cp`).
    pub const DP_CP: &[Axis] = &[Axis::DpReplicate, Axis::DpShard, Axis::Cp];

    /// Ranks that divide a sequence, in whichever of the two ways.
    pub const SEQUENCE: &[Axis] = &[Axis::Cp, Axis::Sp];

    /// [`DP_SHARD_CP`](Self::DP_SHARD_CP) in whichever way sequences are divided: the ranks that divide a model's parameters.
    pub const SHARD: &[Axis] = &[Axis::DpShard, Axis::Cp, Axis::Sp];

    /// Ranks that keep copies of parameters that are not sharded, and average their gradients.
    pub const REPLICATE: &[Axis] = &[Axis::DpReplicate, Axis::Cp, Axis::Sp];

    /// [`DP_CP`](Self::DP_CP) in whichever way sequences are divided: the ranks whose gradients make one mean.
    pub const GRADIENTS: &[Axis] = &[Axis::DpReplicate, Axis::DpShard, Axis::Cp, Axis::Sp];

    /// The place of rank `rank` along each axis, in the order of [`Axis::ALL`].
    pub fn coordinates(&self, rank: usize) -> [usize; Axis::ALL.len()] {
        let mut rest = rank;
        let mut places = [0; Axis::ALL.len()];
        for (place, size) in places.iter_mut().zip(self.sizes).rev() {
            (*place, rest) = (rest % size, rest / size);
        }
        places
    }

    /// The ranks that differ from rank `rank` along these axes alone, in order.
    pub fn ranks_in(&self, axes: &[Axis], rank: usize) -> Vec<usize> {
        let own = self.coordinates(rank);
        let is_fixed = |axis: &Axis| !axes.contains(axis);
        let fixed: Vec<Axis> = Axis::ALL.into_iter().filter(is_fixed).collect();
        let is_one = |other: &usize| {
            let places = self.coordinates(*other);
            fixed.iter().all(|&axis| places[axis as usize] == own[axis as usize])
        };
        (0..self.world_size()).filter(is_one).collect()
    }

    /// The place of rank `rank` among [those](Self::ranks_in): along [`Mesh::DP`] its `data_parallel_rank`, which says which rows
    /// it reads, and along [`Axis::Tp`] its `tensor_parallel_rank`.
    pub fn rank_in(&self, axes: &[Axis], rank: usize) -> usize {
        self.ranks_in(axes, rank).into_iter().position(|other| other == rank).unwrap_or_default()
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

    /// The ranks of [`Mesh::GRADIENTS`] by two axes: those that divide a sequence shard parameters as those along `dp_shard` do.
    pub fn data(&self) -> Self {
        let shard_size = Self::SHARD.iter().map(|&axis| self.size(axis)).product();
        Self { sizes: [self.num_replicas(), shard_size, 1, 1, 1] }
    }

    /// The axis along which sequences are divided, and by how many ranks; `None` where each rank has whole ones.
    ///
    /// ```
    /// use accelerate_core::mesh::{Axis, Mesh};
    /// assert_eq!(Mesh::of(6, &[(Axis::DpReplicate, 2), (Axis::Sp, 3)])?.divided_sequences(), Some((Axis::Sp, 3)));
    /// assert_eq!(Mesh::replicated(2).divided_sequences(), None);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn divided_sequences(&self) -> Option<(Axis, usize)> {
        Self::SEQUENCE.iter().map(|&axis| (axis, self.size(axis))).find(|(_, size)| *size > 1)
    }

    /// How many neighbours hold all of a model together, and differ in what they hold of it.
    pub fn model_size(&self) -> usize {
        self.world_size() / self.num_replicas()
    }

    /// Into how many shares rows of data are dealt: the number of ranks along [`Mesh::DP`].
    pub fn num_shares(&self) -> usize {
        Self::DP.iter().map(|&axis| self.size(axis)).product()
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
#[allow(clippy::unwrap_used)]
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
        for rank in 0..mesh.world_size() {
            for axis in Axis::ALL {
                assert_eq!(mesh.ranks_in(&[axis], rank), mesh.ranks_along(axis, rank));
                assert_eq!(mesh.rank_in(&[axis], rank), mesh.coordinates(rank)[axis as usize]);
            }
            // Ranks that share rows are those that differ along no axis of data.
            let same_rows: Vec<usize> =
                (0..48).filter(|&other| mesh.rank_in(Mesh::DP, other) == mesh.rank_in(Mesh::DP, rank)).collect();
            assert_eq!(same_rows, mesh.ranks_in(&[Axis::Cp, Axis::Sp, Axis::Tp], rank));
        }
        assert_eq!(
            (mesh.num_shares(), mesh.model_size(), mesh.data().to_string().as_str()),
            (6, 24, "dp_replicate 2 x dp_shard 6")
        );
        assert_eq!(mesh.ranks_along(Axis::Tp, 6), [4, 5, 6, 7]);
        assert_eq!(mesh.ranks_along(Axis::DpReplicate, 6), [6, 30]);
    }

    #[test]
    fn any_combination_that_multiplies_to_the_world_is_a_mesh() {
        use Axis::{Cp, DpReplicate, DpShard, Sp, Tp};
        for (world_size, sizes, wanted) in [
            (1, vec![], "one rank"),
            (8, vec![(Tp, 2), (DpReplicate, 4)], "dp_replicate 4 x tp 2"),
            (8, vec![(DpReplicate, 2), (DpShard, 2), (Tp, 2)], "dp_replicate 2 x dp_shard 2 x tp 2"),
            (6, vec![(Sp, 3), (DpShard, 2)], "dp_shard 2 x sp 3"),
            (4, vec![(Cp, 4), (Sp, 1)], "cp 4"),
        ] {
            assert_eq!(Mesh::of(world_size, &sizes).unwrap().to_string(), wanted);
        }
        for (world_size, sizes, wanted) in [
            (8, vec![(Tp, 3)], "tp 3 is not a mesh of 8 ranks"),
            (2, vec![], "one rank is not a mesh of 2 ranks"),
            (0, vec![], "one rank is not a mesh of 0 ranks"),
            (4, vec![(Tp, 0)], "tp_size is 0"),
            (4, vec![(Tp, 2), (Tp, 2)], "tp_size is said twice"),
            (4, vec![(Cp, 2), (Sp, 2)], "cp_size and sp_size"),
            (0, vec![(DpShard, 1 << 40), (Tp, 1 << 40)], "is not a mesh of 0 ranks"),
        ] {
            let error = Mesh::of(world_size, &sizes).unwrap_err();
            assert!(error.is_config() && error.to_string().contains(wanted), "{error}");
        }
    }
}
