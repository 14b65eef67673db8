//! A tree on its way to another process: one run of bytes, its tensors included.

use crate::error::{CollectiveError, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::Cursor;
use tch::{Device, Kind, Tensor};
use torch_ext::{kind_from_scalar_type, scalar_type};

/// Tensors begin at multiples of this, so that they can be used where they lie.
const ALIGNMENT: usize = 64;

/// A [`TensorTree`](crate::TensorTree) taken apart: its tensors, and in order whatever else is needed to put it
/// together.
///
/// ```
/// use accelerate::{Parcel, TensorTree, tch::Tensor};
///
/// let mut parcel = Parcel::default();
/// ("row".to_owned(), vec![Tensor::from_slice(&[1i64, 2])]).pack(&mut parcel)?;
/// let (name, tensors) = <(String, Vec<Tensor>)>::unpack(&mut parcel)?;
/// assert_eq!((name.as_str(), &tensors[0]), ("row", &Tensor::from_slice(&[1i64, 2])));
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Default)]
pub struct Parcel {
    form: Cursor<Vec<u8>>,
    tensors: Vec<Tensor>,
    num_taken: usize,
}

/// What stands in front of the tensors.
#[derive(Serialize, Deserialize)]
struct Header {
    form: Vec<u8>,
    /// `c10::ScalarType`, shape, and where it begins after the header.
    tensors: Vec<(i32, Vec<i64>, usize)>,
}

impl Parcel {
    /// Adds a tensor.
    pub fn put_tensor(&mut self, tensor: &Tensor) {
        self.tensors.push(tensor.shallow_clone());
    }

    /// The next tensor.
    ///
    /// # Errors
    ///
    /// When all have been taken.
    pub fn take_tensor(&mut self) -> Result<Tensor> {
        let tensor = self.tensors.get(self.num_taken).map(Tensor::shallow_clone);
        self.num_taken += 1;
        tensor.ok_or_else(|| spoiled("there are no more tensors"))
    }

    /// Adds any other value.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn put<T: Serialize>(&mut self, value: &T) -> Result<()> {
        rmp_serde::encode::write(self.form.get_mut(), value).map_err(|error| spoiled(error.to_string()))
    }

    /// The next other value.
    ///
    /// # Errors
    ///
    /// When it is of another type, or all have been taken.
    pub fn take<T: DeserializeOwned>(&mut self) -> Result<T> {
        rmp_serde::from_read(&mut self.form).map_err(|error| spoiled(error.to_string()))
    }

    /// What derived code says to a number that stands for none of the type's variants.
    #[doc(hidden)]
    pub fn unknown_variant(&self, number: u32) -> crate::Error {
        spoiled(format!("there is no such variant: {number}"))
    }

    /// All of it as one tensor, `Uint8` on the CPU, of any length.
    pub(crate) fn to_bytes(&self) -> Result<Tensor> {
        let flat: Vec<Tensor> = self
            .tensors
            .iter()
            .map(|tensor| Ok(tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?))
            .collect::<Result<_>>()?;
        let mut end = 0;
        let mut tensors = Vec::with_capacity(flat.len());
        for tensor in &flat {
            let start = end;
            end = (start + size_in_bytes(tensor)).next_multiple_of(ALIGNMENT);
            tensors.push((scalar_type(tensor.kind()), tensor.size(), start));
        }
        let starts: Vec<usize> = tensors.iter().map(|(_, _, start)| *start).collect();
        let header = Header { form: self.form.get_ref().clone(), tensors };
        let header = rmp_serde::to_vec(&header).map_err(|error| spoiled(error.to_string()))?;
        let data_start = (8 + header.len()).next_multiple_of(ALIGNMENT);
        let bytes = Tensor::f_empty([(data_start + end) as i64], (Kind::Uint8, Device::Cpu))?;
        let mut front = (header.len() as u64).to_le_bytes().to_vec();
        front.extend(&header);
        bytes.f_narrow(0, 0, front.len() as i64)?.f_copy_(&Tensor::f_from_slice(&front)?)?;
        for (tensor, start) in flat.iter().zip(starts) {
            let length = size_in_bytes(tensor) as i64;
            if 0 < length {
                let plain = tensor.f_resolve_conj()?.f_resolve_neg()?;
                let source = plain.f_reshape([-1])?.f_view_dtype(Kind::Uint8)?;
                bytes.f_narrow(0, (data_start + start) as i64, length)?.f_copy_(&source)?;
            }
        }
        Ok(bytes)
    }

    /// What [`Parcel::to_bytes`] wrote; the tensors share its memory.
    pub(crate) fn from_bytes(bytes: &Tensor) -> Result<Self> {
        let total = bytes.numel();
        let part = |start: usize, length: usize| -> Result<Tensor> {
            if start.checked_add(length).is_none_or(|end| end > total) {
                return Err(spoiled(format!("{total} bytes end before byte {}", start.saturating_add(length))));
            }
            Ok(bytes.f_narrow(0, start as i64, length as i64)?)
        };
        let mut length = [0; 8];
        length.copy_from_slice(&Vec::<u8>::try_from(&part(0, 8)?)?);
        let length = usize::try_from(u64::from_le_bytes(length)).unwrap_or(usize::MAX);
        let header: Vec<u8> = Vec::try_from(&part(8, length)?)?;
        let header: Header = rmp_serde::from_slice(&header).map_err(|error| spoiled(error.to_string()))?;
        let data_start = (8 + length).next_multiple_of(ALIGNMENT);
        let tensors = header.tensors.iter().map(|(number, shape, start)| {
            let kind = kind_from_scalar_type(*number).ok_or_else(|| spoiled(format!("dtype {number} is not known")))?;
            let length =
                bytes_of(shape, kind).ok_or_else(|| spoiled(format!("there is no tensor of shape {shape:?}")))?;
            if length == 0 {
                return Ok(Tensor::f_empty(shape, (kind, Device::Cpu))?);
            }
            let data = part(data_start.saturating_add(*start), length)?;
            Ok(data.f_view_dtype(kind)?.f_view(shape.as_slice())?)
        });
        Ok(Self { tensors: tensors.collect::<Result<_>>()?, form: Cursor::new(header.form), num_taken: 0 })
    }
}

fn size_in_bytes(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

/// `None` for a shape that no tensor can have.
fn bytes_of(shape: &[i64], kind: Kind) -> Option<usize> {
    let mut length = kind.elt_size_in_bytes();
    for &size in shape {
        length = length.checked_mul(usize::try_from(size).ok()?)?;
    }
    Some(length)
}

fn spoiled(why: impl Into<String>) -> crate::Error {
    CollectiveError::Parcel { why: why.into() }.into()
}

impl fmt::Debug for Parcel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parcel").field("num_tensors", &self.tensors.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::TensorTree;
    use std::collections::{BTreeMap, HashMap};

    fn there_and_back<T: TensorTree>(tree: &T) -> T {
        let mut parcel = Parcel::default();
        tree.pack(&mut parcel).unwrap();
        T::unpack(&mut Parcel::from_bytes(&parcel.to_bytes().unwrap()).unwrap()).unwrap()
    }

    #[test]
    fn every_dtype_and_shape_arrives() {
        for kind in (0..16).filter(|number| !(12..15).contains(number)).filter_map(kind_from_scalar_type) {
            for shape in [vec![], vec![0], vec![3], vec![2, 0, 4], vec![3, 5]] {
                let tensor = Tensor::ones(&shape, (kind, Device::Cpu));
                let back = there_and_back(&(tensor.shallow_clone(), tensor.shallow_clone())).1;
                assert_eq!((back.kind(), back.size()), (kind, shape));
                assert!(bool::try_from(back.eq_tensor(&tensor).all()).unwrap());
            }
        }
    }

    #[test]
    fn every_form_arrives() {
        let tensor = || Tensor::from_slice(&[1i64, 2]);
        let map = BTreeMap::from([("a".to_owned(), Some(tensor())), ("b".to_owned(), None)]);
        let back = there_and_back(&(map, [1.5f64, 2.5], vec![(7u8, 'x'); 3], Box::new(tensor())));
        assert_eq!(back.0["a"], Some(tensor()));
        assert!(back.0["b"].is_none());
        assert_eq!((back.1, back.2), ([1.5, 2.5], vec![(7, 'x'); 3]));
        let numbers = HashMap::from([(3usize, tensor())]);
        assert_eq!(there_and_back(&numbers)[&3], tensor());
    }

    #[test]
    fn strided_tensors_arrive_in_their_own_order() {
        let tensor = Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]).tr();
        assert_eq!(there_and_back(&tensor), tensor);
    }

    #[test]
    fn what_cannot_be_sent_is_named() {
        let tree = BTreeMap::from([("static", Tensor::from_slice(&[1i64]))]);
        let error = tree.pack(&mut Parcel::default()).unwrap_err().to_string();
        assert!(error.contains("&str"), "{error}");
    }

    #[test]
    fn spoiled_bytes_are_an_error() {
        let mut parcel = Parcel::default();
        (Tensor::from_slice(&[1i64, 2]), 5i64).pack(&mut parcel).unwrap();
        let bytes = Vec::<u8>::try_from(&parcel.to_bytes().unwrap()).unwrap();
        for length in [0, 7, 8, 20, bytes.len() / 2] {
            let cut = Tensor::from_slice(&bytes[..length]);
            let whole = Parcel::from_bytes(&cut).and_then(|mut parcel| <(Tensor, i64)>::unpack(&mut parcel));
            assert!(whole.is_err(), "{length} bytes");
        }
        let mut longer = bytes.clone();
        longer[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(Parcel::from_bytes(&Tensor::from_slice(&longer)).is_err());
    }

    #[test]
    fn tensors_that_cannot_be_are_an_error() {
        let entries =
            [(4, vec![i64::MAX, 2], 0), (4, vec![-1], 0), (4, vec![1], usize::MAX), (22, vec![1], 0), (-1, vec![1], 0)];
        for entry in entries {
            let header = rmp_serde::to_vec(&Header { form: Vec::new(), tensors: vec![entry.clone()] }).unwrap();
            let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend(header);
            bytes.resize(256, 0);
            assert!(Parcel::from_bytes(&Tensor::from_slice(&bytes)).is_err(), "{entry:?}");
        }
    }
}
