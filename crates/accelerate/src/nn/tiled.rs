//! Long sequences in tiles: what lies between two tensors is there for one tile at a time.
//!
//! Method: Bekman et al., "Arctic Long Sequence Training", arXiv 2506.13996: tiled MLP and tiled loss. Neither needs another rank.

use super::{CheckpointOptions, Linear, checkpoint};
use crate::error::{NnError, Result};
use std::sync::Arc;
use tch::{Kind, Reduction, Tensor};
use torch_ext::scalar;
use torch_ext::storage::release_free_memory;

/// Applies `function` to `num_tiles` tiles of `input` along `dim`, and joins what it gives along `dim` in the same order: the same as
/// `function(input)` where that goes position by position, as a feed-forward layer does.
///
/// The activations of one tile are there at a time, because the backward pass computes each tile once more (as
/// [`checkpoint`](super::checkpoint()) does, with the same random numbers). Tiles are as large as each other, but for the last ones, which
/// may have one position less; there are fewer where there are fewer positions. Collective where `function` is: ranks need the same
/// number of tiles.
///
/// ```
/// use accelerate::nn::{Linear, ParamStore, tiled};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let store = ParamStore::new(Device::Cpu);
/// let up = Linear::new(store.root() / "up", 4, 64, Default::default())?;
/// let down = Linear::new(store.root() / "down", 64, 4, Default::default())?;
/// let x = Tensor::randn([2, 10, 4], (Kind::Float, Device::Cpu));
/// let whole = down.forward(&up.forward(&x)?.f_relu()?)?;
/// let tiles = tiled(&x, 1, 3, move |x| Ok(down.forward(&up.forward(x)?.f_relu()?)?))?;
/// assert!(tiles.allclose(&whole, 1e-5, 1e-6, false));
/// # Ok::<(), accelerate::Error>(())
/// ```
///
/// # Errors
/// No tiles; a dim that the input does not have; those of `function`.
pub fn tiled(
    input: &Tensor,
    dim: i64,
    num_tiles: usize,
    function: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    let function = Arc::new(function);
    let outputs: Vec<Tensor> = tiles(input, dim, num_tiles)?
        .iter()
        .map(|tile| {
            let function = Arc::clone(&function);
            checkpoint(&[tile], CheckpointOptions::default(), move |inputs| {
                release_free_memory();
                function(&inputs[0])
            })
        })
        .collect::<Result<_>>()?;
    Ok(Tensor::f_cat(&outputs, dim)?)
}

/// Mean cross-entropy of what `head` makes of `hidden [rows, features]` and the classes `labels [rows]`, int64, over the rows whose label
/// is not `ignore_index`: a scalar, float32, as [`CrossEntropyLoss`](super::CrossEntropyLoss) of all logits gives it. Not a number if all
/// rows are ignored.
///
/// The logits of one tile of rows are there at a time, in both passes: with a large vocabulary and a long text they would be most of the
/// memory. `head` is a closure that gives logits `[rows of the tile, classes]`, or a [`Linear`]. Where ranks divide the layer
/// ([`Linear::sharded_output`]), no rank has more than its slice of the logits of one tile; this is collective then, in both passes. A closure
/// has to give all logits: from a slice of them the loss would be another one.
///
/// ```
/// use accelerate::nn::{Linear, ParamStore, tiled_cross_entropy};
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let store = ParamStore::new(Device::Cpu);
/// let head = Linear::new(store.root() / "lm_head", 8, 100, Default::default())?;
/// let hidden = Tensor::randn([10, 8], (Kind::Float, Device::Cpu));
/// let labels = Tensor::arange(10, (Kind::Int64, Device::Cpu));
/// let whole = head.forward(&hidden)?.cross_entropy_for_logits(&labels);
/// let tiles = tiled_cross_entropy(&hidden, &labels, -100, 4, head.clone())?;
/// let scaled = tiled_cross_entropy(&hidden, &labels, -100, 4, move |rows: &Tensor| Ok(head.forward(rows)? * 1.0))?;
/// for loss in [tiles, scaled] {
///     assert!((loss.double_value(&[]) - whole.double_value(&[])).abs() < 1e-5);
/// }
/// # Ok::<(), accelerate::Error>(())
/// ```
///
/// # Errors
/// No tiles; another number of labels than rows; a class that there is no logit for; those of `head`.
///
pub fn tiled_cross_entropy(
    hidden: &Tensor,
    labels: &Tensor,
    ignore_index: i64,
    num_tiles: usize,
    head: impl CrossEntropyHead,
) -> Result<Tensor> {
    let (rows, found) = (hidden.size().first().copied(), labels.size());
    if hidden.dim() != 2 || rows != found.first().copied() || found.len() != 1 {
        return Err(NnError::LabelsOfTiles { hidden: hidden.size(), labels: found }.into());
    }
    let head = Arc::new(head);
    let mut total: Option<Tensor> = None;
    for (tile, labels) in tiles(hidden, 0, num_tiles)?.iter().zip(tiles(labels, 0, num_tiles)?) {
        let head = Arc::clone(&head);
        let sum = checkpoint(&[tile], CheckpointOptions::default(), move |inputs| {
            release_free_memory();
            head.sum_of_losses(&inputs[0], &labels, ignore_index)
        })?;
        total = Some(match total {
            Some(total) => total.f_add(&sum)?,
            None => sum,
        });
    }
    let total = total.map_or_else(|| Tensor::f_zeros([0i64; 0], (Kind::Float, hidden.device())), Ok)?;
    Ok(total.f_div(&scalar::ne(labels, ignore_index)?.f_sum(Kind::Float)?)?)
}

/// What makes logits of hidden states for [`tiled_cross_entropy`]: a layer, which ranks may divide, or any closure that gives all logits.
pub trait CrossEntropyHead: Send + Sync + 'static {
    /// The sum (not the mean) of the cross-entropy of `hidden [rows, features]` and `labels [rows]`, int64, over the rows whose label is not
    /// `ignore_index`: a scalar, float32, whose gradient reaches `hidden` and the parameters. Collective in both passes where ranks divide
    /// the layer.
    ///
    /// # Errors
    /// Those of the layer or the closure; a class that there is no logit for; a peer that is gone or does not take part.
    fn sum_of_losses(&self, hidden: &Tensor, labels: &Tensor, ignore_index: i64) -> Result<Tensor>;
}

impl<F: Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static> CrossEntropyHead for F {
    fn sum_of_losses(&self, hidden: &Tensor, labels: &Tensor, ignore_index: i64) -> Result<Tensor> {
        sum_of_losses(&self(hidden)?, labels, ignore_index)
    }
}

fn sum_of_losses(logits: &Tensor, labels: &Tensor, ignore_index: i64) -> Result<Tensor> {
    let logits = logits.f_to_kind(Kind::Float)?;
    Ok(logits.f_cross_entropy_loss(labels, None::<Tensor>, Reduction::Sum, ignore_index, 0.0)?)
}

impl CrossEntropyHead for Linear {
    fn sum_of_losses(&self, hidden: &Tensor, labels: &Tensor, ignore_index: i64) -> Result<Tensor> {
        let logits = self.forward(hidden)?;
        match self.sharded_output() {
            Some(sharded) => sharded.cross_entropy(&logits, labels, Reduction::Sum, ignore_index),
            None => sum_of_losses(&logits, labels, ignore_index),
        }
    }
}

/// The tiles of a tensor: views whose gradients are joined, and not each added to one of the full size.
fn tiles(input: &Tensor, dim: i64, num_tiles: usize) -> Result<Vec<Tensor>> {
    if num_tiles == 0 {
        return Err(NnError::NoTiles.into());
    }
    let dims = input.dim() as i64;
    let place = if dim < 0 { dim + dims } else { dim };
    let size = usize::try_from(place).ok().and_then(|place| input.size().get(place).copied());
    let size = size.ok_or(NnError::NoDimOfTiles { dim, dims })?;
    let num_tiles = (num_tiles as i64).clamp(1, size.max(1));
    let sizes: Vec<i64> = (0..num_tiles).map(|tile| size / num_tiles + i64::from(tile < size % num_tiles)).collect();
    Ok(input.f_split_with_sizes(sizes, dim)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::nn::{Linear, ParamStore};
    use rstest::rstest;
    use tch::Device;

    fn layers() -> (ParamStore, Linear, Linear, Tensor) {
        let store = ParamStore::new(Device::Cpu);
        let up = Linear::new(store.root() / "up", 3, 8, Default::default()).unwrap();
        let head = Linear::new(store.root() / "head", 8, 5, Default::default()).unwrap();
        for (index, param) in store.parameters().iter().enumerate() {
            let values = Tensor::arange(param.numel() as i64, (Kind::Float, Device::Cpu)) + index as f64;
            param.copy_(&values.sin().reshape(param.shape())).unwrap();
        }
        let input = Tensor::arange(7 * 3, (Kind::Float, Device::Cpu)).cos().view([7, 3]).set_requires_grad(true);
        (store, up, head, input)
    }

    fn gradients(store: &ParamStore, input: &Tensor) -> Vec<Tensor> {
        let all = store.parameters().iter().map(|param| param.grad().unwrap()).chain([input.grad()]).collect();
        store.parameters().iter().for_each(|param| param.local().zero_grad());
        input.shallow_clone().zero_grad();
        all
    }

    #[rstest]
    fn tiles_give_the_loss_and_gradients_of_the_whole(#[values(1, 2, 3, 7, 100)] num_tiles: usize) {
        let (store, up, head, input) = layers();
        let labels = Tensor::from_slice(&[0i64, 4, -100, 2, 1, -100, 3]);
        let whole = {
            let hidden = up.forward(&input).unwrap().tanh();
            head.forward(&hidden).unwrap().cross_entropy_loss::<Tensor>(&labels, None, Reduction::Mean, -100, 0.0)
        };
        whole.backward();
        let wanted: Vec<Tensor> = gradients(&store, &input).iter().map(Tensor::copy).collect();

        let hidden = tiled(&input, 0, num_tiles, move |tile| Ok(up.forward(tile)?.f_tanh()?)).unwrap();
        let loss =
            tiled_cross_entropy(&hidden, &labels, -100, num_tiles, move |rows: &Tensor| head.forward(rows)).unwrap();
        loss.backward();
        assert!((loss.double_value(&[]) - whole.double_value(&[])).abs() < 1e-6);
        for (found, wanted) in gradients(&store, &input).iter().zip(&wanted) {
            assert!((found - wanted).abs().max().double_value(&[]) < 1e-6, "{found} {wanted}");
        }
    }

    #[test]
    fn what_makes_no_tiles_is_refused() {
        let (_, up, _, input) = layers();
        let labels = Tensor::from_slice(&[0i64; 6]);
        let other = up.clone();
        for (result, words) in [
            (tiled(&input, 0, 0, move |tile| other.forward(tile)), "at least one tile"),
            (tiled_cross_entropy(&input, &labels, -100, 2, move |rows: &Tensor| up.forward(rows)), "[7, 3]"),
            (
                tiled_cross_entropy(&input, &Tensor::from_slice(&[9i64; 7]), -100, 2, |rows: &Tensor| {
                    Ok(rows.shallow_clone())
                }),
                "9",
            ),
        ] {
            let text = result.unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        }
        let empty = Tensor::from_slice(&[-100i64; 7]);
        let loss = tiled_cross_entropy(&input, &empty, -100, 2, |rows: &Tensor| Ok(rows.shallow_clone())).unwrap();
        assert!(loss.double_value(&[]).is_nan());
    }
}
