//! Values made of tensors: batches, model outputs, whatever a user's struct holds.

mod parcel;

use crate::error::{CollectiveError, Result};
use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hash};
use tch::Tensor;

pub use parcel::Parcel;

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
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not known to be made of tensors",
    label = "has no `TensorTree`",
    note = "on a struct or an enum of your own, write `#[derive(TensorTree)]`, with `use accelerate::TensorTree;`",
    note = "a field that holds no tensors is left out by `#[tensor_tree(skip)]`"
)]
pub trait TensorTree: Sized {
    /// A tree of the same form with every tensor replaced by what `f` returns for it.
    fn try_map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self>;

    /// Calls `f` with every tensor.
    fn for_each_tensor(&self, f: &mut dyn FnMut(&Tensor));

    /// Takes the tree apart, so that another process can put it together: what `dispatch_batches` asks of batches.
    ///
    /// # Errors
    ///
    /// When a part of it cannot be sent: skipped fields, maps whose keys are not text or numbers, and types that
    /// implement this trait by hand without this method.
    fn pack(&self, parcel: &mut Parcel) -> Result<()> {
        let _ = parcel;
        Err(not_sendable::<Self>())
    }

    /// Puts together what [`TensorTree::pack`] took apart.
    ///
    /// # Errors
    ///
    /// When the parcel holds something else.
    fn unpack(parcel: &mut Parcel) -> Result<Self> {
        let _ = parcel;
        Err(not_sendable::<Self>())
    }
}

fn not_sendable<T>() -> crate::Error {
    CollectiveError::NotSendable { name: std::any::type_name::<T>() }.into()
}

impl TensorTree for Tensor {
    fn try_map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        f(self)
    }
    fn for_each_tensor(&self, f: &mut dyn FnMut(&Tensor)) {
        f(self);
    }
    fn pack(&self, parcel: &mut Parcel) -> Result<()> {
        parcel.put_tensor(self);
        Ok(())
    }
    fn unpack(parcel: &mut Parcel) -> Result<Self> {
        parcel.take_tensor()
    }
}

impl<T: TensorTree> TensorTree for Vec<T> {
    fn try_map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        self.iter().map(|item| item.try_map_tensors(f)).collect()
    }
    fn for_each_tensor(&self, f: &mut dyn FnMut(&Tensor)) {
        self.iter().for_each(|item| item.for_each_tensor(f));
    }
    fn pack(&self, parcel: &mut Parcel) -> Result<()> {
        parcel.put(&self.len())?;
        self.iter().try_for_each(|item| item.pack(parcel))
    }
    fn unpack(parcel: &mut Parcel) -> Result<Self> {
        let length: usize = parcel.take()?;
        (0..length).map(|_| T::unpack(parcel)).collect()
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
    fn pack(&self, parcel: &mut Parcel) -> Result<()> {
        parcel.put(&self.is_some())?;
        self.iter().try_for_each(|item| item.pack(parcel))
    }
    fn unpack(parcel: &mut Parcel) -> Result<Self> {
        let is_some = parcel.take()?;
        if is_some { Ok(Some(T::unpack(parcel)?)) } else { Ok(None) }
    }
}

impl<T: TensorTree> TensorTree for Box<T> {
    fn try_map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Box::new((**self).try_map_tensors(f)?))
    }
    fn for_each_tensor(&self, f: &mut dyn FnMut(&Tensor)) {
        (**self).for_each_tensor(f);
    }
    fn pack(&self, parcel: &mut Parcel) -> Result<()> {
        (**self).pack(parcel)
    }
    fn unpack(parcel: &mut Parcel) -> Result<Self> {
        Ok(Box::new(T::unpack(parcel)?))
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
    fn pack(&self, parcel: &mut Parcel) -> Result<()> {
        self.iter().try_for_each(|item| item.pack(parcel))
    }
    fn unpack(parcel: &mut Parcel) -> Result<Self> {
        let items = (0..N).map(|_| T::unpack(parcel)).collect::<Result<Vec<T>>>()?;
        items.try_into().map_err(|_| crate::Error::other("the array changed its length"))
    }
}

impl<K: Clone + Ord + 'static, T: TensorTree> TensorTree for BTreeMap<K, T> {
    fn try_map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        self.iter().map(|(key, item)| Ok((key.clone(), item.try_map_tensors(f)?))).collect()
    }
    fn for_each_tensor(&self, f: &mut dyn FnMut(&Tensor)) {
        self.values().for_each(|item| item.for_each_tensor(f));
    }
    fn pack(&self, parcel: &mut Parcel) -> Result<()> {
        pack_entries(parcel, self.iter().collect())
    }
    fn unpack(parcel: &mut Parcel) -> Result<Self> {
        unpack_entries(parcel)
    }
}

impl<K: Clone + Ord + Hash + 'static, T: TensorTree, S: BuildHasher + Default> TensorTree for HashMap<K, T, S> {
    fn try_map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        sorted(self).into_iter().map(|(key, item)| Ok((key.clone(), item.try_map_tensors(f)?))).collect()
    }
    fn for_each_tensor(&self, f: &mut dyn FnMut(&Tensor)) {
        sorted(self).into_iter().for_each(|(_, item)| item.for_each_tensor(f));
    }
    fn pack(&self, parcel: &mut Parcel) -> Result<()> {
        pack_entries(parcel, sorted(self))
    }
    fn unpack(parcel: &mut Parcel) -> Result<Self> {
        unpack_entries(parcel)
    }
}

fn pack_entries<K: 'static, T: TensorTree>(parcel: &mut Parcel, entries: Vec<(&K, &T)>) -> Result<()> {
    parcel.put(&entries.len())?;
    entries.into_iter().try_for_each(|(key, item)| {
        pack_key(parcel, key)?;
        item.pack(parcel)
    })
}

fn unpack_entries<K: 'static, T: TensorTree, M: FromIterator<(K, T)>>(parcel: &mut Parcel) -> Result<M> {
    let length: usize = parcel.take()?;
    (0..length).map(|_| Ok((unpack_key(parcel)?, T::unpack(parcel)?))).collect()
}

/// Keys are asked for nothing but an order, so those that can be sent are found by their type.
macro_rules! keys {
    ($($type:ty),*) => {
        fn pack_key<K: 'static>(parcel: &mut Parcel, key: &K) -> Result<()> {
            let key: &dyn Any = key;
            $(if let Some(key) = key.downcast_ref::<$type>() {
                return parcel.put(key);
            })*
            Err(not_sendable::<K>())
        }

        fn unpack_key<K: 'static>(parcel: &mut Parcel) -> Result<K> {
            let mut found: Option<K> = None;
            let place: &mut dyn Any = &mut found;
            $(if let Some(place) = place.downcast_mut::<Option<$type>>() {
                *place = Some(parcel.take()?);
                return found.ok_or_else(not_sendable::<K>);
            })*
            Err(not_sendable::<K>())
        }
    };
}

keys!(String, char, i8, i16, i32, i64, isize, u8, u16, u32, u64, usize);

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
            fn pack(&self, parcel: &mut Parcel) -> Result<()> {
                parcel.put(self)
            }
            fn unpack(parcel: &mut Parcel) -> Result<Self> {
                parcel.take()
            }
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
            fn pack(&self, parcel: &mut Parcel) -> Result<()> {
                $(self.$index.pack(parcel)?;)*
                Ok(())
            }
            fn unpack(parcel: &mut Parcel) -> Result<Self> {
                Ok(($($name::unpack(parcel)?,)*))
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
