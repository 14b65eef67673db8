//! Values made of tensors: batches, model outputs, whatever a user's struct holds.

use crate::error::Result;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hash};
use tch::Tensor;

/// A value whose tensors can be visited and replaced, as the reference's `recursively_apply` does
/// with lists, tuples and dictionaries.
///
/// Tensors are visited in the same order on every rank, which makes a tree fit for collectives:
/// hash maps go by sorted key. Derive it for your own structs with `#[derive(TensorTree)]`.
///
/// ```
/// use accelerate::{TensorTree, tch::Tensor};
///
/// let batch = (Tensor::from_slice(&[1i64, 2]), vec![Tensor::from_slice(&[0.5f32])]);
/// let mut num_elements = 0;
/// batch.for_each_tensor(&mut |tensor| num_elements += tensor.numel());
/// assert_eq!(num_elements, 3);
/// let doubled = batch.try_map_tensors(&mut |tensor| Ok(tensor.f_add(tensor)?))?;
/// assert_eq!(doubled.0, Tensor::from_slice(&[2i64, 4]));
/// # Ok::<(), accelerate::Error>(())
/// ```
pub trait TensorTree: Sized {
    /// A tree of the same form with every tensor replaced by what `f` returns for it.
    fn try_map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self>;

    /// Calls `f` with every tensor.
    fn for_each_tensor(&self, f: &mut dyn FnMut(&Tensor));
}

impl TensorTree for Tensor {
    fn try_map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        f(self)
    }
    fn for_each_tensor(&self, f: &mut dyn FnMut(&Tensor)) {
        f(self);
    }
}

impl<T: TensorTree> TensorTree for Vec<T> {
    fn try_map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        self.iter().map(|item| item.try_map_tensors(f)).collect()
    }
    fn for_each_tensor(&self, f: &mut dyn FnMut(&Tensor)) {
        self.iter().for_each(|item| item.for_each_tensor(f));
    }
}

impl<T: TensorTree> TensorTree for Option<T> {
    fn try_map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        self.as_ref().map(|item| item.try_map_tensors(f)).transpose()
    }
    fn for_each_tensor(&self, f: &mut dyn FnMut(&Tensor)) {
        if let Some(item) = self {
            item.for_each_tensor(f);
        }
    }
}

impl<T: TensorTree> TensorTree for Box<T> {
    fn try_map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Box::new((**self).try_map_tensors(f)?))
    }
    fn for_each_tensor(&self, f: &mut dyn FnMut(&Tensor)) {
        (**self).for_each_tensor(f);
    }
}

impl<T: TensorTree, const N: usize> TensorTree for [T; N] {
    fn try_map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let items: Vec<T> = self.iter().map(|item| item.try_map_tensors(f)).collect::<Result<_>>()?;
        // The length cannot differ: the vector was made from an array of N items.
        items.try_into().map_err(|_| crate::Error::other("the array changed its length"))
    }
    fn for_each_tensor(&self, f: &mut dyn FnMut(&Tensor)) {
        self.iter().for_each(|item| item.for_each_tensor(f));
    }
}

impl<K: Clone + Ord, T: TensorTree> TensorTree for BTreeMap<K, T> {
    fn try_map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        self.iter().map(|(key, item)| Ok((key.clone(), item.try_map_tensors(f)?))).collect()
    }
    fn for_each_tensor(&self, f: &mut dyn FnMut(&Tensor)) {
        self.values().for_each(|item| item.for_each_tensor(f));
    }
}

impl<K: Clone + Ord + Hash, T: TensorTree, S: BuildHasher + Default> TensorTree for HashMap<K, T, S> {
    fn try_map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        sorted(self).into_iter().map(|(key, item)| Ok((key.clone(), item.try_map_tensors(f)?))).collect()
    }
    fn for_each_tensor(&self, f: &mut dyn FnMut(&Tensor)) {
        sorted(self).into_iter().for_each(|(_, item)| item.for_each_tensor(f));
    }
}

fn sorted<K: Ord, T, S>(map: &HashMap<K, T, S>) -> Vec<(&K, &T)> {
    let mut entries: Vec<_> = map.iter().collect();
    entries.sort_by(|a, b| a.0.cmp(b.0));
    entries
}

macro_rules! leaf {
    ($($type:ty),*) => {$(
        impl TensorTree for $type {
            fn try_map_tensors(
                &self,
                _: &mut dyn FnMut(&Tensor) -> Result<Tensor>,
            ) -> Result<Self> {
                Ok(self.clone())
            }
            fn for_each_tensor(&self, _: &mut dyn FnMut(&Tensor)) {}
        }
    )*};
}

leaf!((), bool, char, String, i8, i16, i32, i64, i128, isize, u8, u16, u32, u64, u128, usize, f32, f64);

macro_rules! tuple {
    ($($name:ident $index:tt),*) => {
        impl<$($name: TensorTree),*> TensorTree for ($($name,)*) {
            fn try_map_tensors(
                &self,
                f: &mut dyn FnMut(&Tensor) -> Result<Tensor>,
            ) -> Result<Self> {
                Ok(($(self.$index.try_map_tensors(f)?,)*))
            }
            fn for_each_tensor(&self, f: &mut dyn FnMut(&Tensor)) {
                $(self.$index.for_each_tensor(f);)*
            }
        }
    };
}

tuple!(A 0);
tuple!(A 0, B 1);
tuple!(A 0, B 1, C 2);
tuple!(A 0, B 1, C 2, D 3);
tuple!(A 0, B 1, C 2, D 3, E 4);
tuple!(A 0, B 1, C 2, D 3, E 4, F 5);
tuple!(A 0, B 1, C 2, D 3, E 4, F 5, G 6);
tuple!(A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7);
