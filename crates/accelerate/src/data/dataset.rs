//! Datasets: rows that can be counted and fetched by number.

use super::random;
use crate::TensorTree;
use crate::error::{DataError, Result};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::Tensor;
use torch_ext::Generator;

/// Rows that can be counted and fetched by number: PyTorch's map-style `torch.utils.data.Dataset`.
///
/// Loaders share a dataset between threads, hence `Send + Sync`. A `tch` tensor is not `Sync`; keep
/// tensors in a [`TensorDataset`] or [`VecDataset`], or behind a `Mutex`.
///
/// ```
/// use accelerate::data::Dataset;
///
/// struct Squares(usize);
/// impl Dataset for Squares {
///     type Item = i64;
///     fn len(&self) -> usize {
///         self.0
///     }
///     fn get(&self, index: usize) -> accelerate::Result<i64> {
///         Ok((index * index) as i64)
///     }
/// }
/// assert_eq!(Squares(4).get(3)?, 9);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a dataset",
    label = "has no `Dataset`",
    note = "rows in memory become one by `VecDataset::new(rows)`, tensors by `TensorDataset::new(tensors)?`",
    note = "implement `accelerate::data::Dataset` for rows that come from elsewhere"
)]
pub trait Dataset: Send + Sync {
    /// One row.
    type Item;

    /// Number of rows.
    fn len(&self) -> usize;

    /// Row `index`, counted from 0.
    ///
    /// # Errors
    ///
    /// When the row does not exist or cannot be read. A loader adds the row's number to the message and
    /// keeps the cause.
    fn get(&self, index: usize) -> Result<Self::Item>;

    /// Several rows at once, for datasets that can do that faster than one by one: a row whose tensors have one
    /// dimension more, in front, over the rows. `None`, the default, for datasets that cannot.
    ///
    /// Loaders ask for it where batches are made as [`Collate`](crate::data::Collate) says. The tensors must not share
    /// memory with the dataset: a loop may change its batches in place.
    ///
    /// ```
    /// use accelerate::data::{Dataset, TensorDataset};
    /// use accelerate::tch::Tensor;
    ///
    /// let dataset = TensorDataset::new(Tensor::from_slice(&[10i64, 11, 12]))?;
    /// assert_eq!(dataset.get_stacked(&[2, 0]).unwrap()?, Tensor::from_slice(&[12i64, 10]));
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As those of [`Dataset::get`]. A loader then fetches the rows one by one, to find the one at fault.
    fn get_stacked(&self, indices: &[usize]) -> Option<Result<Self::Item>> {
        let _ = indices;
        None
    }

    /// Has the dataset no rows?
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Called by a loader at the start of every pass, for datasets whose rows depend on the epoch, such as
    /// those with random augmentation.
    fn set_epoch(&self, epoch: usize) {
        let _ = epoch;
    }
}

macro_rules! forward {
    ($($type:ty),*) => {$(
        impl<D: Dataset + ?Sized> Dataset for $type {
            type Item = D::Item;
            fn len(&self) -> usize {
                (**self).len()
            }
            fn get(&self, index: usize) -> Result<D::Item> {
                (**self).get(index)
            }
            fn get_stacked(&self, indices: &[usize]) -> Option<Result<D::Item>> {
                (**self).get_stacked(indices)
            }
            fn set_epoch(&self, epoch: usize) {
                (**self).set_epoch(epoch);
            }
        }
    )*};
}

forward!(Arc<D>, Box<D>, &D);

/// Tensors in step: row `i` holds entry `i` of every tensor's first dimension
/// (`torch.utils.data.TensorDataset`).
///
/// The tensors come as one [`TensorTree`]: a tuple, a vector, a map, or a struct of your own. Rows have the
/// same form, are views of the tensors (nothing is copied), and keep what is not a tensor as it is.
///
/// ```
/// use accelerate::data::{Dataset, TensorDataset};
/// use accelerate::tch::{Kind, Tensor};
///
/// let inputs = Tensor::arange(6, (Kind::Float, accelerate::tch::Device::Cpu)).reshape([3, 2]);
/// let labels = Tensor::from_slice(&[0i64, 1, 0]);
/// let dataset = TensorDataset::new((inputs, labels))?;
/// assert_eq!(dataset.len(), 3);
/// let (input, label) = dataset.get(1)?;
/// assert_eq!(input, Tensor::from_slice(&[2f32, 3.0]));
/// assert_eq!(label.int64_value(&[]), 1);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct TensorDataset<T> {
    tensors: Mutex<T>,
    num_rows: usize,
}

impl<T> TensorDataset<T> {
    /// A dataset over tensors of shapes `[num_rows, ...]`, of any dtypes, on any device.
    ///
    /// # Errors
    ///
    /// When there is no tensor, one has no dimensions, or their numbers of rows differ.
    pub fn new(tensors: T) -> Result<Self>
    where
        T: TensorTree + Send,
    {
        let mut shapes = Vec::new();
        tensors.for_each_tensor(&mut |tensor| shapes.push(tensor.size()));
        let mut num_rows = None;
        for (position, shape) in shapes.into_iter().enumerate() {
            let Some(&rows) = shape.first() else {
                return Err(DataError::NoRowDimension { position }.into());
            };
            let wanted = *num_rows.get_or_insert(rows);
            if rows != wanted {
                return Err(DataError::UnequalRows { position, found: shape, wanted }.into());
            }
        }
        let num_rows = num_rows.ok_or(DataError::NoTensors)? as usize;
        Ok(Self { tensors: Mutex::new(tensors), num_rows })
    }
}

impl<T: TensorTree + Send> TensorDataset<T> {
    fn copy_rows(&self, indices: &[usize]) -> Result<T> {
        if let Some(&index) = indices.iter().find(|&&index| self.num_rows <= index) {
            return Err(DataError::NoSuchRow { index, num_rows: self.num_rows }.into());
        }
        // Other threads need not wait for the copying.
        let tensors = lock(&self.tensors).try_map_tensors(&mut |tensor| Ok(tensor.shallow_clone()))?;
        if let Some(&first) = indices.first().filter(|_| indices.windows(2).all(|pair| pair[0] + 1 == pair[1])) {
            return tensors.try_map_tensors(&mut |tensor| {
                let rows = tensor.f_narrow(0, first as i64, indices.len() as i64)?;
                let mut copy = Tensor::f_empty(rows.size(), (rows.kind(), rows.device()))?;
                copy.f_copy_(&rows)?;
                Ok(copy)
            });
        }
        let indices: Vec<i64> = indices.iter().map(|&index| index as i64).collect();
        let indices = Tensor::f_from_slice(&indices)?;
        tensors.try_map_tensors(&mut |tensor| Ok(tensor.f_index_select(0, &indices.f_to_device(tensor.device())?)?))
    }
}

impl<T: TensorTree + Send> Dataset for TensorDataset<T> {
    type Item = T;
    fn len(&self) -> usize {
        self.num_rows
    }
    fn get(&self, index: usize) -> Result<T> {
        if index >= self.num_rows {
            return Err(DataError::NoSuchRow { index, num_rows: self.num_rows }.into());
        }
        lock(&self.tensors).try_map_tensors(&mut |tensor| Ok(tensor.f_select(0, index as i64)?))
    }
    fn get_stacked(&self, indices: &[usize]) -> Option<Result<T>> {
        Some(self.copy_rows(indices))
    }
}

impl<T> fmt::Debug for TensorDataset<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorDataset").field("num_rows", &self.num_rows).finish_non_exhaustive()
    }
}

/// Rows held in memory, one value per row: numbers, text, tensors, tuples and lists of them, or a struct with
/// `#[derive(TensorTree)]`.
///
/// Fetched rows share the storage of their tensors with the dataset. (A plain `Vec` is no dataset: its own
/// `get` would give way to that of [`Dataset`] wherever the trait is imported.)
///
/// ```
/// use accelerate::data::{Dataset, VecDataset};
/// use accelerate::tch::Tensor;
///
/// let dataset = VecDataset::new(vec![(Tensor::from_slice(&[1f32, 2.0]), 0i64), (Tensor::from_slice(&[3f32]), 1)]);
/// assert_eq!(dataset.get(1)?.0.size(), [1]);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct VecDataset<T> {
    rows: Mutex<Vec<T>>,
    num_rows: usize,
}

impl<T> VecDataset<T> {
    /// A dataset of these rows.
    // Bounds stand at the functions that users call: the compiler shows a trait's own advice only there.
    pub fn new(rows: Vec<T>) -> Self
    where
        T: TensorTree + Send,
    {
        Self { num_rows: rows.len(), rows: Mutex::new(rows) }
    }
}

impl<T: TensorTree + Send> From<Vec<T>> for VecDataset<T> {
    fn from(rows: Vec<T>) -> Self {
        Self::new(rows)
    }
}

impl<T: TensorTree + Send> Dataset for VecDataset<T> {
    type Item = T;
    fn len(&self) -> usize {
        self.num_rows
    }
    fn get(&self, index: usize) -> Result<T> {
        match lock(&self.rows).get(index) {
            Some(row) => row.try_map_tensors(&mut |tensor: &Tensor| Ok(tensor.shallow_clone())),
            None => Err(DataError::NoSuchRow { index, num_rows: self.num_rows }.into()),
        }
    }
}

impl<T> fmt::Debug for VecDataset<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VecDataset").field("num_rows", &self.num_rows).finish_non_exhaustive()
    }
}

/// A dataset whose rows go through a function when they are fetched (the `map` of Hugging Face `datasets`,
/// done on the fly).
///
/// ```
/// use accelerate::data::{Dataset, MapDataset, VecDataset};
///
/// let words = VecDataset::new(vec!["a".to_owned(), "bcd".to_owned()]);
/// let lengths = MapDataset::new(words, |text: String| Ok(text.len() as i64));
/// assert_eq!(lengths.get(1)?, 3);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone)]
pub struct MapDataset<D, F> {
    dataset: D,
    function: F,
}

impl<D: Dataset, F, T> MapDataset<D, F>
where
    F: Fn(D::Item) -> Result<T> + Send + Sync,
{
    /// Applies `function` to every row of `dataset`, each time the row is fetched.
    pub fn new(dataset: D, function: F) -> Self {
        Self { dataset, function }
    }
}

impl<D: Dataset, F, T> Dataset for MapDataset<D, F>
where
    F: Fn(D::Item) -> Result<T> + Send + Sync,
{
    type Item = T;
    fn len(&self) -> usize {
        self.dataset.len()
    }
    fn get(&self, index: usize) -> Result<T> {
        (self.function)(self.dataset.get(index)?)
    }
    fn set_epoch(&self, epoch: usize) {
        self.dataset.set_epoch(epoch);
    }
}

impl<D: fmt::Debug, F> fmt::Debug for MapDataset<D, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MapDataset").field("dataset", &self.dataset).finish_non_exhaustive()
    }
}

/// Some rows of a dataset, in an order of their own (`torch.utils.data.Subset`).
///
/// ```
/// use accelerate::data::{Dataset, Subset, VecDataset};
///
/// let subset = Subset::new(VecDataset::new(vec![10i64, 11, 12, 13]), vec![3, 1])?;
/// assert_eq!((subset.len(), subset.get(0)?), (2, 13));
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Subset<D> {
    dataset: D,
    indices: Vec<usize>,
}

impl<D: Dataset> Subset<D> {
    /// The rows of `dataset` that `indices` name; naming a row twice is allowed.
    ///
    /// # Errors
    ///
    /// When an index is not a row of the dataset.
    pub fn new(dataset: D, indices: Vec<usize>) -> Result<Self> {
        let num_rows = dataset.len();
        match indices.iter().find(|&&index| num_rows <= index) {
            Some(&index) => Err(DataError::NoSuchRow { index, num_rows }.into()),
            None => Ok(Self { dataset, indices }),
        }
    }

    /// The rows of the whole dataset that this one holds, in order.
    pub fn indices(&self) -> &[usize] {
        &self.indices
    }
}

impl<D: Dataset> Dataset for Subset<D> {
    type Item = D::Item;
    fn len(&self) -> usize {
        self.indices.len()
    }
    fn get(&self, index: usize) -> Result<D::Item> {
        match self.indices.get(index) {
            Some(&inner) => self.dataset.get(inner),
            None => Err(DataError::NoSuchRow { index, num_rows: self.indices.len() }.into()),
        }
    }
    fn get_stacked(&self, indices: &[usize]) -> Option<Result<D::Item>> {
        let inner: Option<Vec<usize>> = indices.iter().map(|&index| self.indices.get(index).copied()).collect();
        self.dataset.get_stacked(&inner?)
    }
    fn set_epoch(&self, epoch: usize) {
        self.dataset.set_epoch(epoch);
    }
}

/// Cuts a dataset into parts of random rows that do not overlap (`torch.utils.data.random_split`).
///
/// Draws one permutation, from the default generator without one. On several processes, give all ranks a
/// generator with the same seed: they must cut alike.
///
/// ```
/// use accelerate::data::{Dataset, Generator, VecDataset, random_split};
///
/// let generator = Generator::new_cpu()?;
/// generator.manual_seed(42)?;
/// let mut parts = random_split(VecDataset::new((0..10i64).collect()), &[8, 2], Some(&generator))?;
/// let (validation, training) = (parts.pop().unwrap(), parts.pop().unwrap());
/// assert_eq!((training.len(), validation.len()), (8, 2));
/// # Ok::<(), accelerate::Error>(())
/// ```
///
/// # Errors
///
/// When the lengths do not add up to that of the dataset.
pub fn random_split<D: Dataset>(
    dataset: D,
    lengths: &[usize],
    generator: Option<&Generator>,
) -> Result<Vec<Subset<Arc<D>>>> {
    let (num_rows, total) = (dataset.len(), lengths.iter().sum::<usize>());
    if total != num_rows {
        return Err(DataError::BadSplit { num_rows, lengths: lengths.to_vec(), total }.into());
    }
    let order = random::permutation(generator, num_rows)?;
    let dataset = Arc::new(dataset);
    let mut rest = order.as_slice();
    let part = |&length: &usize| {
        let (indices, others) = rest.split_at(length);
        rest = others;
        Subset { dataset: Arc::clone(&dataset), indices: indices.to_vec() }
    };
    Ok(lengths.iter().map(part).collect())
}

// Rows are only read or replaced whole, so a panic elsewhere cannot leave them half-changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    fn text<T>(result: Result<T>) -> String {
        result.map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn a_tensor_dataset_yields_rows_of_every_tensor() {
        let x = Tensor::arange(8, (Kind::Float, Device::Cpu)).reshape([4, 2]);
        let y = Tensor::from_slice(&[4i64, 5, 6, 7]);
        let dataset = TensorDataset::new((x, vec![y])).unwrap();
        let (x, y) = dataset.get(3).unwrap();
        assert_eq!(x, Tensor::from_slice(&[6f32, 7.0]));
        assert_eq!((y[0].size(), y[0].int64_value(&[])), (vec![], 7));
    }

    #[test]
    fn rows_that_do_not_fit_are_refused_by_name() {
        let zeros = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
        let unequal = text(TensorDataset::new((zeros(&[3, 2]), zeros(&[4]))));
        assert!(unequal.contains("tensor 1 has shape [4]") && unequal.contains("3 rows"), "{unequal}");
        assert!(text(TensorDataset::new(zeros(&[]))).contains("tensor 0 of the TensorDataset"));
        assert!(text(TensorDataset::new(Vec::<Tensor>::new())).contains("at least one tensor"));
    }

    #[test]
    fn a_row_outside_the_dataset_is_refused_by_number() {
        let wanted = "row 2 does not exist: the dataset has 2 rows, counted from 0";
        let tensors = Tensor::from_slice(&[1i64, 2]);
        assert_eq!(text(TensorDataset::new(tensors.shallow_clone()).unwrap().get(2)), wanted);
        assert_eq!(text(VecDataset::new(vec![1i64, 2]).get(2)), wanted);
        assert_eq!(text(Subset::new(VecDataset::new(vec![1i64, 2]), vec![0, 2])), wanted);
        assert_eq!(text(Subset::new(VecDataset::new(vec![1i64, 2, 3]), vec![0, 2]).unwrap().get(2)), wanted);
    }

    #[test]
    fn rows_fetched_at_once_are_those_fetched_one_by_one() {
        let rows = || Tensor::arange(24, (Kind::Float, Device::Cpu)).reshape([6, 2, 2]).transpose(1, 2);
        let dataset = TensorDataset::new((rows(), vec![Tensor::arange(6, (Kind::Int64, Device::Cpu))])).unwrap();
        let subset = Subset::new(&dataset, vec![5, 1, 2, 3, 3]).unwrap();
        for indices in [&[1usize, 2, 3][..], &[4], &[3, 1, 1], &[2, 1], &[0, 4], &[]] {
            let (inputs, labels) = subset.get_stacked(indices).unwrap().unwrap();
            assert_eq!((inputs.size()[0], labels[0].size()), (indices.len() as i64, vec![indices.len() as i64]));
            assert!(inputs.is_contiguous(), "{indices:?}");
            for (position, &index) in indices.iter().enumerate() {
                let (input, label) = subset.get(index).unwrap();
                assert_eq!((inputs.get(position as i64), labels[0].get(position as i64)), (input, label[0].copy()));
            }
            let _ = (inputs + 1.0, labels[0].shallow_clone().fill_(-1));
        }
        assert_eq!(dataset.get(5).unwrap().1[0].int64_value(&[]), 5, "a batch must not share memory with the dataset");
        assert!(subset.get_stacked(&[5]).is_none() && dataset.get_stacked(&[6]).unwrap().is_err());
    }

    #[test]
    fn a_random_split_is_that_of_pytorch_and_loses_nothing() {
        let generator = Generator::new_cpu().unwrap();
        generator.manual_seed(0).unwrap();
        let rows = VecDataset::new((0..10i64).collect());
        let parts = random_split(rows, &[6, 0, 4], Some(&generator)).unwrap();
        let indices: Vec<_> = parts.iter().map(Subset::indices).collect();
        // torch.utils.data.random_split(range(10), [6, 0, 4], torch.Generator().manual_seed(0))
        assert_eq!(indices, [&[4usize, 1, 7, 5, 3, 9][..], &[], &[0, 8, 6, 2]]);
        let message = text(random_split(VecDataset::new(vec![1i64, 2]), &[1, 2], None));
        assert!(message.contains("2 rows into parts of [1, 2], which add up to 3"), "{message}");
    }

    #[test]
    fn map_and_subset_compose_and_pass_the_epoch_on() {
        #[derive(Default)]
        struct Epochs(std::sync::atomic::AtomicUsize);
        impl Dataset for Epochs {
            type Item = usize;
            fn len(&self) -> usize {
                5
            }
            fn get(&self, index: usize) -> Result<usize> {
                Ok(100 * self.0.load(std::sync::atomic::Ordering::Relaxed) + index)
            }
            fn set_epoch(&self, epoch: usize) {
                self.0.store(epoch, std::sync::atomic::Ordering::Relaxed);
            }
        }
        let mapped = MapDataset::new(Arc::new(Epochs::default()), |row| Ok(row * 2));
        let subset = Subset::new(mapped, vec![4, 0]).unwrap();
        assert_eq!((subset.get(0).unwrap(), subset.get(1).unwrap()), (8, 0));
        subset.set_epoch(3);
        assert_eq!(subset.get(0).unwrap(), 608);
    }
}
