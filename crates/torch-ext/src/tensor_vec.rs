//! Lists of tensors, as libtorch's operations over lists take them.

use crate::border::{Handle, adopt, check, handle};
use crate::error::Result;
use std::fmt;
use std::ops::Deref;
use tch::Tensor;

// Those that return no status end the process if there is no memory, as Rust's own lists do.
unsafe extern "C" {
    fn te_tensor_vec_new(capacity: usize) -> Handle;
    fn te_tensor_vec_free(list: Handle);
    fn te_tensor_vec_len(list: Handle) -> usize;
    fn te_tensor_vec_push(list: Handle, tensor: Handle);
    fn te_tensor_vec_get(list: Handle, index: usize, result: *mut Handle) -> i32;
    fn te_tensor_vec_clear(list: Handle);
    fn te_tensor_vec_gradients(list: Handle, gradients: Handle) -> bool;
    fn te_tensor_vec_has_gradient(list: Handle) -> bool;
    fn te_tensor_vec_drop_gradients(list: Handle) -> i32;
}

/// A `std::vector<at::Tensor>`: a list that is made once and used in many calls.
///
/// It holds tensors as `shallow_clone` does: they are the same tensors, and live at least as long as the list. A call
/// over it takes no memory for the list itself, and asks for all gradients in one step over the border.
///
/// ```
/// use tch::Tensor;
/// use torch_ext::{TensorVec, foreach};
/// let (x, y) = (Tensor::from_slice(&[1f32]), Tensor::from_slice(&[2f32, 3.0]));
/// let list = TensorVec::from_iter([&x, &y]);
/// foreach::mul_scalar_(&list, 2.0)?;
/// assert_eq!((list.len(), y), (2, Tensor::from_slice(&[4f32, 6.0])));
/// # Ok::<(), torch_ext::Error>(())
/// ```
pub struct TensorVec(Handle);

// SAFETY: the vector is owned, and tensors count their owners atomically; tch's Tensor is Send for the same reason.
unsafe impl Send for TensorVec {}

impl TensorVec {
    /// An empty list with room for `capacity` tensors.
    pub fn with_capacity(capacity: usize) -> Self {
        // SAFETY: returns an owned vector, which `Drop` frees.
        Self(unsafe { te_tensor_vec_new(capacity) })
    }

    /// Adds a tensor at the end.
    pub fn push(&mut self, tensor: &Tensor) {
        // SAFETY: both handles are valid for the call; the vector keeps a counted reference of its own.
        unsafe { te_tensor_vec_push(self.0, handle(tensor)) }
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        // SAFETY: reads the owned vector.
        unsafe { te_tensor_vec_len(self.0) }
    }

    /// Is there none?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The tensor at a position, as `shallow_clone` would give it.
    ///
    /// # Errors
    /// There is no such position.
    pub fn get(&self, index: usize) -> Result<Tensor> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the position is checked on the other side, and a fresh handle is adopted once.
        unsafe {
            check("TensorVec::get", te_tensor_vec_get(self.0, index, &raw mut raw))?;
            Ok(adopt(raw))
        }
    }

    /// The tensors in their order, as `shallow_clone` would give them.
    pub fn iter(&self) -> impl Iterator<Item = Tensor> {
        (0..self.len()).filter_map(|index| self.get(index).ok())
    }

    /// Lets go of all tensors. The room for them stays, so that filling the list again takes no memory.
    pub fn clear(&mut self) {
        // SAFETY: changes the vector, which nobody else uses now.
        unsafe { te_tensor_vec_clear(self.0) }
    }

    /// Fills the list with the gradients of `leaves`, in their order, those that exist. Returns whether all do.
    ///
    /// The list keeps the gradients alive until it is cleared or filled anew.
    ///
    /// ```
    /// use tch::Tensor;
    /// use torch_ext::TensorVec;
    /// let weight = Tensor::from(3f32).set_requires_grad(true);
    /// (&weight * &weight).backward();
    /// let mut gradients = TensorVec::with_capacity(1);
    /// assert!(gradients.fill_with_gradients_of(&TensorVec::from_iter([&weight])));
    /// assert_eq!(gradients.get(0)?.double_value(&[]), 6.0);
    /// # Ok::<(), torch_ext::Error>(())
    /// ```
    pub fn fill_with_gradients_of(&mut self, leaves: &TensorVec) -> bool {
        // SAFETY: two different vectors, because one of the references is exclusive.
        unsafe { te_tensor_vec_gradients(leaves.0, self.0) }
    }

    /// Does any of the tensors have a gradient?
    pub fn has_gradient(&self) -> bool {
        // SAFETY: reads the owned vector.
        unsafe { te_tensor_vec_has_gradient(self.0) }
    }

    /// Drops the gradient of every tensor, as `zero_grad(set_to_none=True)` in PyTorch.
    ///
    /// # Errors
    /// libtorch's own.
    pub fn drop_gradients(&self) -> Result<()> {
        // SAFETY: changes the tensors' own meta data.
        check("TensorVec::drop_gradients", unsafe { te_tensor_vec_drop_gradients(self.0) })
    }

    pub(crate) fn raw(&self) -> Handle {
        self.0
    }
}

impl Drop for TensorVec {
    fn drop(&mut self) {
        // SAFETY: owned, and freed once.
        unsafe { te_tensor_vec_free(self.0) }
    }
}

impl fmt::Debug for TensorVec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorVec").field("len", &self.len()).finish()
    }
}

impl<'a> FromIterator<&'a Tensor> for TensorVec {
    fn from_iter<T: IntoIterator<Item = &'a Tensor>>(tensors: T) -> Self {
        let tensors = tensors.into_iter();
        let mut list = Self::with_capacity(tensors.size_hint().0);
        tensors.for_each(|tensor| list.push(tensor));
        list
    }
}

/// What the operations over lists accept: a [`TensorVec`], or references to tensors, of which a list is made for the
/// call.
pub trait TensorList: fmt::Debug {
    /// The list, borrowed if there is one already.
    fn lend(&self) -> LentList<'_>;
}

/// The list without tensors.
pub(crate) const NO_TENSORS: &dyn TensorList = &([] as [&Tensor; 0]);

/// A list for the length of one call; see [`TensorList`].
#[derive(Debug)]
pub enum LentList<'a> {
    /// Of the caller.
    Borrowed(&'a TensorVec),
    /// Made for the call.
    Owned(TensorVec),
}

impl Deref for LentList<'_> {
    type Target = TensorVec;
    fn deref(&self) -> &TensorVec {
        match self {
            Self::Borrowed(list) => list,
            Self::Owned(list) => list,
        }
    }
}

impl TensorList for TensorVec {
    fn lend(&self) -> LentList<'_> {
        LentList::Borrowed(self)
    }
}

impl TensorList for &[&Tensor] {
    fn lend(&self) -> LentList<'_> {
        LentList::Owned(self.iter().copied().collect())
    }
}

impl<const N: usize> TensorList for [&Tensor; N] {
    fn lend(&self) -> LentList<'_> {
        LentList::Owned(self.iter().copied().collect())
    }
}

impl TensorList for Vec<&Tensor> {
    fn lend(&self) -> LentList<'_> {
        LentList::Owned(self.iter().copied().collect())
    }
}
