//! What PowerSGD compresses, and how the factors of a bucket lie in memory.
//!
//! Method: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression", arXiv 1905.13727; layout and
//! order are those of PyTorch's `powerSGD_hook.py`, so that the same seed gives the same numbers.

use crate::config::PowerSGDState;

/// Gradients of one bucket that are compressed in one batched product: `batch` matrices of `rows` x `columns`.
///
/// ```
/// use accelerate_core::config::PowerSGDState;
/// let plan = accelerate_core::power_sgd::plan(&[&[8, 2, 4], &[8]], &PowerSGDState::default());
/// let matrices = &plan.compressed[0];
/// assert_eq!((matrices.rows, matrices.columns, matrices.rank), (8, 8, 1));
/// assert_eq!(plan.uncompressed, vec![1]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matrices {
    /// Positions of the gradients in their bucket.
    pub gradients: Vec<usize>,
    /// Size of the first dimension.
    pub rows: usize,
    /// Product of all other dimensions.
    pub columns: usize,
    /// Columns of the factors P (`rows` x `rank`) and Q (`columns` x `rank`) of each matrix.
    pub rank: usize,
}

/// How the gradients of a bucket travel.
///
/// ```
/// use accelerate_core::config::PowerSGDState;
/// let plan = accelerate_core::power_sgd::plan(&[&[100, 100]], &PowerSGDState::default());
/// assert_eq!((plan.elements_before(), plan.elements_after()), (10_000, 200));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BucketPlan {
    /// As two factors each, in the order in which the factors lie in memory.
    pub compressed: Vec<Matrices>,
    /// In full: positions of the gradients in their bucket.
    pub uncompressed: Vec<usize>,
    uncompressed_elements: usize,
}

/// Decides for the gradients of a bucket, given by their shapes.
///
/// Matrices of equal shape lie together, shapes in the order of their first gradient.
///
/// ```
/// use accelerate_core::config::PowerSGDState;
/// let state = PowerSGDState { batch_tensors_with_same_shape: true, ..Default::default() };
/// let plan = accelerate_core::power_sgd::plan(&[&[9, 9], &[8, 9], &[9, 9]], &state);
/// assert_eq!(plan.compressed[0].gradients, vec![0, 2]);
/// ```
pub fn plan(shapes: &[&[usize]], state: &PowerSGDState) -> BucketPlan {
    let mut plan = BucketPlan::default();
    for (position, shape) in shapes.iter().enumerate() {
        let elements: usize = shape.iter().product();
        let rows = shape.first().copied().unwrap_or(0);
        let columns = elements.checked_div(rows).unwrap_or(0);
        let rank = state.matrix_approximation_rank.min(rows).min(columns);
        let compressed = (rows + columns) * rank;
        if rank == 0 || compressed as f64 * state.min_compression_rate >= elements as f64 {
            plan.uncompressed.push(position);
            plan.uncompressed_elements += elements;
            continue;
        }
        match plan.compressed.iter_mut().find(|other| (other.rows, other.columns) == (rows, columns)) {
            Some(same) => same.gradients.push(position),
            None => plan.compressed.push(Matrices { gradients: vec![position], rows, columns, rank }),
        }
    }
    if !state.batch_tensors_with_same_shape {
        let single = |matrices: Matrices| {
            matrices
                .gradients
                .clone()
                .into_iter()
                .map(move |position| Matrices { gradients: vec![position], ..matrices.clone() })
        };
        plan.compressed = plan.compressed.into_iter().flat_map(single).collect();
    }
    plan
}

impl BucketPlan {
    /// Elements of all factors P together.
    ///
    /// ```
    /// # use accelerate_core::{config::PowerSGDState, power_sgd::plan};
    /// assert_eq!(plan(&[&[10, 100]], &PowerSGDState::default()).p_elements(), 10);
    /// ```
    pub fn p_elements(&self) -> usize {
        self.compressed.iter().map(|matrices| matrices.gradients.len() * matrices.rows * matrices.rank).sum()
    }

    /// Elements of all factors Q together.
    ///
    /// ```
    /// # use accelerate_core::{config::PowerSGDState, power_sgd::plan};
    /// assert_eq!(plan(&[&[10, 100]], &PowerSGDState::default()).q_elements(), 100);
    /// ```
    pub fn q_elements(&self) -> usize {
        self.compressed.iter().map(|matrices| matrices.gradients.len() * matrices.columns * matrices.rank).sum()
    }

    /// Elements of the gradients.
    ///
    /// ```
    /// # use accelerate_core::{config::PowerSGDState, power_sgd::plan};
    /// assert_eq!(plan(&[&[10, 100], &[7]], &PowerSGDState::default()).elements_before(), 1007);
    /// ```
    pub fn elements_before(&self) -> usize {
        let matrices = self.compressed.iter().map(|m| m.gradients.len() * m.rows * m.columns);
        matrices.sum::<usize>() + self.uncompressed_elements
    }

    /// Elements that each rank sends.
    ///
    /// ```
    /// # use accelerate_core::{config::PowerSGDState, power_sgd::plan};
    /// assert_eq!(plan(&[&[10, 100], &[7]], &PowerSGDState::default()).elements_after(), 117);
    /// ```
    pub fn elements_after(&self) -> usize {
        self.p_elements() + self.q_elements() + self.uncompressed_elements
    }
}

/// The side of the smallest square that holds a flat bucket, for `batched_power_sgd`.
///
/// ```
/// assert_eq!(accelerate_core::power_sgd::square_side(10), 4);
/// ```
pub fn square_side(elements: usize) -> usize {
    let floor = elements.isqrt();
    if floor * floor == elements { floor } else { floor + 1 }
}

/// Seeds for the random factors, one per drawing: `numpy.random.RandomState(seed).randint(1_000_000_000)`.
///
/// ```
/// let seeds: Vec<u32> = accelerate_core::power_sgd::Seeds::new(0).take(2).collect();
/// assert_eq!(seeds, vec![209652396, 398764591]);
/// ```
#[derive(Clone, Debug)]
pub struct Seeds(rand_mt::Mt);

impl Seeds {
    /// The sequence that starts from `seed`.
    ///
    /// ```
    /// # use accelerate_core::power_sgd::Seeds;
    /// assert_ne!(Seeds::new(1).next(), Seeds::new(2).next());
    /// ```
    pub fn new(seed: u32) -> Self {
        Self(rand_mt::Mt::new(seed))
    }
}

impl Iterator for Seeds {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        const LARGEST: u32 = 999_999_999;
        // Numbers past the largest are drawn again, which keeps all of them equally likely.
        loop {
            let bits = self.0.next_u32() & LARGEST.next_power_of_two().wrapping_sub(1);
            if bits <= LARGEST {
                return Some(bits);
            }
        }
    }
}
