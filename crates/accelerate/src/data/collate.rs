//! From rows to a batch.

use crate::TensorTree;
use crate::error::{DataError, Result};
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hash};
use tch::Tensor;

/// Rows that know how to become a batch: PyTorch's `default_collate`.
///
/// | row | batch |
/// |---|---|
/// | tensor of shape `s` | tensor of shape `[rows, s...]` |
/// | `bool`, `u8`, `i8`, `i16`, `i32`, `i64`, `f32`, `f64` | tensor of shape `[rows]` of the same dtype |
/// | `u16`, `u32`, `usize`, `u64`, `isize` | tensor of shape `[rows]`, `Int64` |
/// | `Vec<n>` or `[n; N]` of these numbers | tensor of shape `[rows, N]` |
/// | tuple up to eight | tuple of batches |
/// | `BTreeMap`, `HashMap` | map of batches |
/// | `Option` | batch if every row has a value, `None` if no row has one |
/// | `String`, `&'static str` | `Vec` of them |
///
/// Two rows differ from PyTorch: a list of numbers becomes one tensor of two dimensions there as here only
/// when it is a NumPy array (a Python list is taken apart into one tensor per position), and a Python
/// `float` is an `f64`.
///
/// ```
/// use accelerate::data::Collate;
/// use accelerate::tch::Tensor;
///
/// let (features, labels) = Collate::collate(vec![(vec![0.5f32, 1.0], 3i64), (vec![1.5, 2.0], 4)])?;
/// assert_eq!(features.size(), [2, 2]);
/// assert_eq!(labels, Tensor::from_slice(&[3i64, 4]));
/// # Ok::<(), accelerate::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "nothing says how rows of type `{Self}` become a batch",
    label = "has no `Collate`",
    note = "for a struct of tensors, write `#[derive(TensorTree)]` on it and give the loader `.collate_fn(stack_tensors)`",
    note = "or give the loader a `.collate_fn(...)` of your own, or implement `accelerate::data::Collate`"
)]
pub trait Collate: Sized {
    /// What a list of rows becomes.
    type Batch;

    /// Builds the batch. Gradients do not flow: rows are data.
    ///
    /// # Errors
    ///
    /// When there are no rows or they do not agree in shape, dtype or keys; the message names the row.
    fn collate(items: Vec<Self>) -> Result<Self::Batch>;

    /// The batch from a row whose tensors have one dimension more, in front, over all rows of the batch: what
    /// [`Dataset::get_stacked`](crate::data::Dataset::get_stacked) fetches. The same as [`Collate::collate`] makes of
    /// the rows one by one; `None`, the default, where such a row does not say enough for that.
    ///
    /// ```
    /// use accelerate::{data::Collate, tch::Tensor};
    ///
    /// let stacked = Tensor::from_slice2(&[[1i64, 2], [3, 4]]);
    /// assert_eq!(Tensor::from_stacked(stacked).unwrap().size(), [2, 2]);
    /// assert!(i64::from_stacked(1).is_none()); // the first of how many?
    /// ```
    fn from_stacked(stacked: Self) -> Option<Self::Batch> {
        let _ = stacked;
        None
    }
}

/// Builds a batch from rows as [`Collate`] says; what a loader does when it is not given a
/// [`collate_fn`](crate::data::DataLoaderBuilder::collate_fn).
///
/// ```
/// use accelerate::data::default_collate;
///
/// assert_eq!(default_collate(vec![1f32, 2.0])?.size(), [2]);
/// # Ok::<(), accelerate::Error>(())
/// ```
///
/// # Errors
///
/// Those of [`Collate::collate`].
pub fn default_collate<T: Collate>(items: Vec<T>) -> Result<T::Batch> {
    T::collate(items)
}

/// Builds a batch from rows of any [`TensorTree`], such as a struct of your own, by stacking their tensors.
///
/// Tensor `k` of the batch has shape `[rows, s...]` where tensor `k` of each row has shape `s`; what is not
/// a tensor comes from the first row. Meant for `collate_fn(stack_tensors)`.
///
/// ```
/// use accelerate::{TensorTree, data::stack_tensors, tch::Tensor};
///
/// #[derive(TensorTree)]
/// struct Example {
///     input: Tensor,
///     label: Tensor,
/// }
/// let row = |value: f32| Example { input: Tensor::from_slice(&[value, value]), label: Tensor::from(1i64) };
/// let batch = stack_tensors(vec![row(0.0), row(1.0), row(2.0)])?;
/// assert_eq!((batch.input.size(), batch.label.size()), (vec![3, 2], vec![3]));
/// # Ok::<(), accelerate::Error>(())
/// ```
///
/// # Errors
///
/// When there are no rows, or their tensors do not agree in number, shape or dtype.
pub fn stack_tensors<T: TensorTree>(items: Vec<T>) -> Result<T> {
    merge_trees(&items, &mut |tensors| stack(tensors))
}

/// A tree of the form of the first, whose tensor `k` is what `merge` makes of tensor `k` of every tree.
pub(crate) fn merge_trees<T: TensorTree>(items: &[T], merge: &mut dyn FnMut(&[Tensor]) -> Result<Tensor>) -> Result<T> {
    let first = items.first().ok_or(DataError::EmptyBatch)?;
    let mut columns: Vec<Vec<Tensor>> = Vec::new();
    first.for_each_tensor(&mut |tensor| columns.push(vec![tensor.shallow_clone()]));
    for (position, item) in items.iter().enumerate().skip(1) {
        let mut tensors = Vec::with_capacity(columns.len());
        item.for_each_tensor(&mut |tensor| tensors.push(tensor.shallow_clone()));
        if tensors.len() != columns.len() {
            let (found, wanted) = (tensors.len(), columns.len());
            return Err(DataError::UnequalForm { num_values: items.len(), position, found, wanted }.into());
        }
        columns.iter_mut().zip(tensors).for_each(|(column, tensor)| column.push(tensor));
    }
    let mut columns = columns.into_iter();
    first.try_map_tensors(&mut |_| merge(&columns.next().unwrap_or_default()))
}

/// Stacks tensors of equal shape and dtype along a new first dimension.
pub(crate) fn stack(tensors: &[Tensor]) -> Result<Tensor> {
    let first = tensors.first().ok_or(DataError::EmptyBatch)?;
    let (shape, kind) = (first.size(), first.kind());
    for (position, tensor) in tensors.iter().enumerate() {
        agree(position, "shape", &tensor.size(), &shape)?;
        agree(position, "dtype", &tensor.kind(), &kind)?;
    }
    Ok(Tensor::f_stack(tensors, 0)?)
}

fn agree<T: PartialEq + std::fmt::Debug>(position: usize, what: &'static str, found: &T, wanted: &T) -> Result<()> {
    if found == wanted {
        return Ok(());
    }
    let (found, wanted) = (format!("{found:?}"), format!("{wanted:?}"));
    Err(DataError::UnequalItems { position, what, found, wanted }.into())
}

impl Collate for Tensor {
    type Batch = Tensor;
    fn collate(items: Vec<Self>) -> Result<Tensor> {
        stack(&items)
    }
    fn from_stacked(stacked: Self) -> Option<Tensor> {
        Some(stacked)
    }
}

fn matrix<T: tch::kind::Element + Copy>(rows: &[&[T]]) -> Result<Tensor> {
    let first = rows.first().ok_or(DataError::EmptyBatch)?;
    for (position, row) in rows.iter().enumerate() {
        agree(position, "length", &row.len(), &first.len())?;
    }
    let flat = Tensor::f_from_slice(&rows.concat())?;
    Ok(flat.f_view([rows.len() as i64, first.len() as i64])?)
}

macro_rules! numbers {
    ($($type:ty),*) => {$(
        impl Collate for $type {
            type Batch = Tensor;
            fn collate(items: Vec<Self>) -> Result<Tensor> {
                Ok(Tensor::f_from_slice(&items)?)
            }
        }
        impl Collate for Vec<$type> {
            type Batch = Tensor;
            fn collate(items: Vec<Self>) -> Result<Tensor> {
                matrix(&items.iter().map(Vec::as_slice).collect::<Vec<_>>())
            }
        }
        impl<const N: usize> Collate for [$type; N] {
            type Batch = Tensor;
            fn collate(items: Vec<Self>) -> Result<Tensor> {
                matrix(&items.iter().map(<[$type; N]>::as_slice).collect::<Vec<_>>())
            }
        }
    )*};
}

numbers!(bool, u8, i8, i16, i32, i64, f32, f64);

// libtorch's unsigned types wider than a byte have almost no kernels; labels and token numbers are Int64.
macro_rules! unsigned {
    ($($type:ty),*) => {$(
        impl Collate for $type {
            type Batch = Tensor;
            fn collate(items: Vec<Self>) -> Result<Tensor> {
                i64::collate(items.into_iter().map(to_i64).collect::<Result<_>>()?)
            }
        }
        impl Collate for Vec<$type> {
            type Batch = Tensor;
            fn collate(items: Vec<Self>) -> Result<Tensor> {
                let row = |row: Vec<$type>| row.into_iter().map(to_i64).collect::<Result<Vec<i64>>>();
                Collate::collate(items.into_iter().map(row).collect::<Result<_>>()?)
            }
        }
        impl<const N: usize> Collate for [$type; N] {
            type Batch = Tensor;
            fn collate(items: Vec<Self>) -> Result<Tensor> {
                Collate::collate(items.into_iter().map(|row| row.to_vec()).collect::<Vec<_>>())
            }
        }
    )*};
}

unsigned!(u16, u32, u64, usize, isize);

fn to_i64<T: TryInto<i64> + Copy + std::fmt::Display>(value: T) -> Result<i64> {
    value.try_into().map_err(|_| DataError::TooLarge { value: value.to_string() }.into())
}

macro_rules! lists {
    ($($type:ty),*) => {$(
        impl Collate for $type {
            type Batch = Vec<$type>;
            fn collate(items: Vec<Self>) -> Result<Vec<$type>> {
                Ok(items)
            }
        }
    )*};
}

lists!(String, &'static str);

impl Collate for () {
    type Batch = ();
    fn collate(_: Vec<Self>) -> Result<()> {
        Ok(())
    }
    fn from_stacked((): ()) -> Option<()> {
        Some(())
    }
}

impl<T: Collate> Collate for Option<T> {
    type Batch = Option<T::Batch>;
    fn collate(items: Vec<Self>) -> Result<Self::Batch> {
        let has_value = items.first().ok_or(DataError::EmptyBatch)?.is_some();
        let word = |is_some| if is_some { "Some" } else { "None" };
        let mut values = Vec::with_capacity(items.len());
        for (position, item) in items.into_iter().enumerate() {
            if item.is_some() != has_value {
                let (found, wanted) = (word(!has_value).to_owned(), word(has_value).to_owned());
                return Err(DataError::UnequalItems { position, what: "value", found, wanted }.into());
            }
            values.extend(item);
        }
        if has_value { T::collate(values).map(Some) } else { Ok(None) }
    }
    fn from_stacked(stacked: Self) -> Option<Self::Batch> {
        match stacked {
            Some(value) => T::from_stacked(value).map(Some),
            None => Some(None),
        }
    }
}

impl<K: Ord + std::fmt::Debug, T: Collate> Collate for BTreeMap<K, T> {
    type Batch = BTreeMap<K, T::Batch>;
    fn collate(items: Vec<Self>) -> Result<Self::Batch> {
        let mut columns: BTreeMap<K, Vec<T>> = BTreeMap::new();
        for (position, item) in items.into_iter().enumerate() {
            if position > 0 {
                agree(position, "list of keys", &item.keys().collect::<Vec<_>>(), &columns.keys().collect::<Vec<_>>())?;
            }
            for (key, value) in item {
                columns.entry(key).or_default().push(value);
            }
        }
        columns.into_iter().map(|(key, column)| Ok((key, T::collate(column)?))).collect()
    }
    fn from_stacked(stacked: Self) -> Option<Self::Batch> {
        stacked.into_iter().map(|(key, value)| Some((key, T::from_stacked(value)?))).collect()
    }
}

impl<K, T, S> Collate for HashMap<K, T, S>
where
    K: Ord + Hash + std::fmt::Debug,
    T: Collate,
    S: BuildHasher + Default,
{
    type Batch = HashMap<K, T::Batch, S>;
    fn collate(items: Vec<Self>) -> Result<Self::Batch> {
        let sorted = items.into_iter().map(|item| item.into_iter().collect()).collect();
        Ok(BTreeMap::collate(sorted)?.into_iter().collect())
    }
    fn from_stacked(stacked: Self) -> Option<Self::Batch> {
        stacked.into_iter().map(|(key, value)| Some((key, T::from_stacked(value)?))).collect()
    }
}

macro_rules! tuples {
    ($($name:ident $column:ident),*) => {
        impl<$($name: Collate),*> Collate for ($($name,)*) {
            type Batch = ($($name::Batch,)*);
            fn collate(items: Vec<Self>) -> Result<Self::Batch> {
                $(let mut $column = Vec::with_capacity(items.len());)*
                #[allow(non_snake_case)] // The type's letter doubles as the name of its value.
                for ($($name,)*) in items {
                    $($column.push($name);)*
                }
                Ok(($($name::collate($column)?,)*))
            }
            fn from_stacked(($($column,)*): Self) -> Option<Self::Batch> {
                Some(($($name::from_stacked($column)?,)*))
            }
        }
    };
}

tuples!(A a);
tuples!(A a, B b);
tuples!(A a, B b, C c);
tuples!(A a, B b, C c, D d);
tuples!(A a, B b, C c, D d, E e);
tuples!(A a, B b, C c, D d, E e, F f);
tuples!(A a, B b, C c, D d, E e, F f, G g);
tuples!(A a, B b, C c, D d, E e, F f, G g, H h);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tch::Kind;

    fn text<T>(result: Result<T>) -> String {
        result.map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn numbers_become_tensors_of_their_dtype() {
        assert_eq!(default_collate(vec![1f32, 2.0]).unwrap().kind(), Kind::Float);
        assert_eq!(default_collate(vec![1f64]).unwrap().kind(), Kind::Double);
        assert_eq!(default_collate(vec![1i32]).unwrap().kind(), Kind::Int);
        assert_eq!(default_collate(vec![true, false]).unwrap().kind(), Kind::Bool);
        assert_eq!(default_collate(vec![7usize, 8]).unwrap(), Tensor::from_slice(&[7i64, 8]));
        assert_eq!(default_collate(vec![[1i64, 2, 3], [4, 5, 6]]).unwrap().size(), [2, 3]);
        assert_eq!(default_collate(vec![vec![3u32], vec![4]]).unwrap().kind(), Kind::Int64);
        assert!(text(default_collate(vec![u64::MAX])).contains("does not fit the Int64"));
    }

    #[test]
    fn tensors_are_stacked_and_tuples_taken_apart() {
        let row = |value: i64| (Tensor::from_slice(&[value, value + 1]), format!("row {value}"), value);
        let (tensors, names, numbers) = default_collate(vec![row(0), row(10)]).unwrap();
        assert_eq!(tensors, Tensor::from_slice2(&[[0i64, 1], [10, 11]]));
        assert_eq!(names, ["row 0", "row 10"]);
        assert_eq!(numbers, Tensor::from_slice(&[0i64, 10]));
    }

    #[test]
    fn maps_and_options_are_taken_apart() {
        let row = |value: i64| HashMap::from([("ids", vec![value]), ("mask", vec![1])]);
        let batch: HashMap<_, _> = default_collate(vec![row(5), row(6)]).unwrap();
        assert_eq!(batch["ids"], Tensor::from_slice2(&[[5i64], [6]]));
        assert_eq!(default_collate(vec![Some(1i64), Some(2)]).unwrap().unwrap().size(), [2]);
        assert!(default_collate(vec![None::<i64>, None]).unwrap().is_none());
    }

    #[test]
    fn rows_that_do_not_agree_are_refused_by_number() {
        let tensors = vec![Tensor::from_slice(&[1i64]), Tensor::from_slice(&[1i64, 2])];
        assert!(
            text(default_collate(tensors)).contains("the shape of row 1 of the batch is [2], but that of row 0 is [1]")
        );
        let kinds = vec![Tensor::from_slice(&[1i64]), Tensor::from_slice(&[1f32])];
        assert!(text(default_collate(kinds)).contains("the dtype of row 1 of the batch is Float"));
        assert!(
            text(default_collate(vec![vec![1i64], vec![1], vec![]])).contains("the length of row 2 of the batch is 0")
        );
        let keys = vec![BTreeMap::from([("a", 1i64)]), BTreeMap::from([("b", 1i64)])];
        assert!(text(default_collate(keys)).contains(r#"the list of keys of row 1 of the batch is ["b"]"#));
        assert!(text(default_collate(vec![Some(1i64), None])).contains("the value of row 1 of the batch is None"));
        assert!(text(default_collate(Vec::<Tensor>::new())).contains("no rows"));
    }

    #[test]
    fn trees_are_stacked_tensor_by_tensor() {
        let row = |value: i64| (Tensor::from(value), vec![Tensor::from_slice(&[value])], "kept".to_owned());
        let (scalar, list, text_leaf) = stack_tensors(vec![row(1), row(2)]).unwrap();
        assert_eq!(scalar, Tensor::from_slice(&[1i64, 2]));
        assert_eq!(list[0], Tensor::from_slice2(&[[1i64], [2]]));
        assert_eq!(text_leaf, "kept");
    }

    #[test]
    fn trees_of_different_forms_are_refused() {
        let tensors = |count: i64| (0..count).map(Tensor::from).collect::<Vec<_>>();
        for (first, second) in [(2, 3), (3, 2), (0, 1), (1, 0)] {
            let message = text(stack_tensors(vec![tensors(first), tensors(second)]));
            let wanted = format!("value 1 holds {second} tensors, but value 0 holds {first}");
            assert!(message.contains(&wanted), "{message}");
        }
    }
}
