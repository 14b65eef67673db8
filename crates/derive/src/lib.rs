#![doc = include_str!("../README.md")]

use proc_macro::TokenStream;

mod attribute;
mod bounds;
mod expand;

/// Derives `accelerate::TensorTree`: a value is mapped field by field, and its tensors are visited in the
/// order of declaration.
///
/// Fields marked `#[tensor_tree(skip)]` hold no tensors; they are cloned. A type without such fields can be sent to
/// other processes (`dispatch_batches`).
///
/// ```
/// # // A stand-in for the accelerate crate, which this one cannot depend on.
/// # extern crate self as accelerate;
/// # pub mod tch { #[derive(Clone, Debug, PartialEq)] pub struct Tensor(pub i64); }
/// # pub type Result<T> = std::result::Result<T, String>;
/// # pub trait TensorTree: Sized {
/// #     fn try_map_tensors(&self, f: &mut dyn FnMut(&tch::Tensor) -> Result<tch::Tensor>) -> Result<Self>;
/// #     fn for_each_tensor(&self, f: &mut dyn FnMut(&tch::Tensor));
/// # }
/// # impl TensorTree for tch::Tensor {
/// #     fn try_map_tensors(&self, f: &mut dyn FnMut(&tch::Tensor) -> Result<tch::Tensor>) -> Result<Self> { f(self) }
/// #     fn for_each_tensor(&self, f: &mut dyn FnMut(&tch::Tensor)) { f(self) }
/// # }
/// # fn main() {
/// # use accelerate_derive::TensorTree;
/// use accelerate::tch::Tensor;
///
/// #[derive(TensorTree)]
/// struct Batch {
///     input_ids: Tensor,
///     labels: Tensor,
///     #[tensor_tree(skip)]
///     source: String,
/// }
///
/// let batch = Batch { input_ids: Tensor(1), labels: Tensor(2), source: "dev".to_owned() };
/// let doubled = batch.try_map_tensors(&mut |tensor| Ok(Tensor(2 * tensor.0))).unwrap();
/// assert_eq!((doubled.input_ids, doubled.labels), (Tensor(2), Tensor(4)));
/// assert_eq!(doubled.source, "dev");
/// # }
/// ```
#[proc_macro_derive(TensorTree, attributes(tensor_tree))]
pub fn derive_tensor_tree(input: TokenStream) -> TokenStream {
    expand::derive(input.into()).into()
}
