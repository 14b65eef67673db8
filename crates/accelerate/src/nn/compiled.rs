//! How tensors go into compiled models and come out of them.

use crate::error::{NnError, Result};
use crate::tensor_tree::TensorTree;
use std::path::Path;
use tch::Tensor;

/// What can be made of the tensors that a compiled model gives: a tensor, a tuple of two to four, a vector of any number.
///
/// ```
/// use accelerate::nn::FromTensors;
/// use accelerate::tch::Tensor;
/// let one = || vec![Tensor::from_slice(&[1.0f32])];
/// assert!(Tensor::from_tensors(one()).is_some());
/// assert!(<(Tensor, Tensor)>::from_tensors(one()).is_none());
/// ```
pub trait FromTensors: TensorTree {
    /// The number of tensors wanted, in words.
    const WANTED: &'static str;

    /// `None` if it is another number.
    fn from_tensors(tensors: Vec<Tensor>) -> Option<Self>;
}

impl FromTensors for Tensor {
    const WANTED: &'static str = "1";
    fn from_tensors(tensors: Vec<Tensor>) -> Option<Self> {
        let [tensor] = <[Tensor; 1]>::try_from(tensors).ok()?;
        Some(tensor)
    }
}

impl FromTensors for Vec<Tensor> {
    const WANTED: &'static str = "any number";
    fn from_tensors(tensors: Vec<Tensor>) -> Option<Self> {
        Some(tensors)
    }
}

macro_rules! tuple {
    ($wanted:literal, $count:literal, $($name:ident: $type:ty),*) => {
        impl FromTensors for ($($type,)*) {
            const WANTED: &'static str = $wanted;
            fn from_tensors(tensors: Vec<Tensor>) -> Option<Self> {
                let [$($name),*] = <[Tensor; $count]>::try_from(tensors).ok()?;
                Some(($($name,)*))
            }
        }
    };
}

tuple!("2", 2, a: Tensor, b: Tensor);
tuple!("3", 3, a: Tensor, b: Tensor, c: Tensor);
tuple!("4", 4, a: Tensor, b: Tensor, c: Tensor, d: Tensor);

pub(super) fn tensors_of(input: &impl TensorTree) -> Vec<Tensor> {
    let mut tensors = Vec::new();
    input.for_each_tensor(&mut |tensor| tensors.push(tensor.shallow_clone()));
    tensors
}

pub(super) fn from_tensors<O: FromTensors>(module: &'static str, path: &Path, outputs: Vec<Tensor>) -> Result<O> {
    let (path, found) = (path.display().to_string(), outputs.len());
    O::from_tensors(outputs).ok_or_else(|| NnError::NumOutputs { module, path, found, wanted: O::WANTED }.into())
}
