//! Models whose blocks several processes compute one after the other.

use super::Module;
use crate::error::Result;
use std::ops::Range;
use tch::Tensor;

/// A model that is a row of blocks: what [`prepare_pippy`](crate::prepare_pippy) takes.
///
/// A forward pass is [`begin`](Self::begin), all blocks, and [`end`](Self::end). What goes from block to block is a list of tensors, of
/// which dim 0 is that of the rows. GPT-2 and Llama of `accelerate-models` implement it.
///
/// ```
/// use accelerate::nn::{Linear, Module, ParamStore, Pipelined};
/// use accelerate::tch::Tensor;
/// use std::ops::Range;
///
/// struct Stack { store: ParamStore, layers: Vec<Linear> }
///
/// impl Module for Stack {
///     type Input = Tensor;
///     type Output = Tensor;
///     fn forward(&self, input: &Tensor) -> accelerate::Result<Tensor> {
///         self.end(self.blocks(0..self.layers.len(), self.begin(input)?)?)
///     }
///     fn params(&self) -> &ParamStore { &self.store }
/// }
///
/// impl Pipelined for Stack {
///     fn block_paths(&self) -> Vec<String> {
///         (0..self.layers.len()).map(|layer| layer.to_string()).collect()
///     }
///     fn begin(&self, input: &Tensor) -> accelerate::Result<Vec<Tensor>> { Ok(vec![input.shallow_clone()]) }
///     fn blocks(&self, blocks: Range<usize>, mut carried: Vec<Tensor>) -> accelerate::Result<Vec<Tensor>> {
///         for layer in &self.layers[blocks] {
///             carried[0] = layer.forward(&carried[0])?;
///         }
///         Ok(carried)
///     }
///     fn end(&self, mut carried: Vec<Tensor>) -> accelerate::Result<Tensor> { Ok(carried.swap_remove(0)) }
/// }
/// ```
pub trait Pipelined: Module {
    /// The path of each block in order: its parameters are those whose names begin with it.
    fn block_paths(&self) -> Vec<String>;

    /// What comes before the blocks, such as embeddings.
    ///
    /// # Errors
    /// An input that the model does not take.
    fn begin(&self, input: &Self::Input) -> Result<Vec<Tensor>>;

    /// Some of the blocks, one after the other; these exist.
    ///
    /// # Errors
    /// Those of the layers.
    fn blocks(&self, blocks: Range<usize>, carried: Vec<Tensor>) -> Result<Vec<Tensor>>;

    /// What comes after the blocks, such as a head. Dim 0 is that of the rows.
    ///
    /// # Errors
    /// Those of the layers.
    fn end(&self, carried: Vec<Tensor>) -> Result<Tensor>;
}
