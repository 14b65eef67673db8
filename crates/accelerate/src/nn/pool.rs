//! Pooling of images: one value for several places.

use super::layer::{forward_error, impl_layer};
use crate::error::Result;
use tch::{TchError, Tensor};

/// `torch.nn.MaxPool2d`: the largest value of each window, `[batch, channels, height, width]` or `[channels, height, width]` to the
/// same with fewer places.
///
/// ```
/// use accelerate::nn::MaxPool2d;
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let pool = MaxPool2d { stride: Some([2, 2]), padding: [1, 1], ..MaxPool2d::new([3, 3]) };
/// assert_eq!(pool.forward(&Tensor::ones([1, 4, 9, 8], (Kind::Float, Device::Cpu)))?.size(), [1, 4, 5, 4]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxPool2d {
    /// Height and width of a window.
    pub kernel_size: [i64; 2],
    /// Step between windows. `None`, PyTorch's default: `kernel_size`, so that they do not overlap.
    pub stride: Option<[i64; 2]>,
    /// Places around the input that are never the largest, at most half a window. PyTorch's default: none.
    pub padding: [i64; 2],
    /// Step between the places of a window. PyTorch's default: 1.
    pub dilation: [i64; 2],
    /// Is there a window for a rest that is smaller? PyTorch's default: false.
    pub ceil_mode: bool,
}

impl MaxPool2d {
    /// Windows of this size beside each other.
    pub fn new(kernel_size: [i64; 2]) -> Self {
        Self { kernel_size, stride: None, padding: [0; 2], dilation: [1; 2], ceil_mode: false }
    }

    /// The largest value of each window.
    ///
    /// # Errors
    /// Another number of dims; an input smaller than a window; a padding of more than half a window.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let Self { kernel_size, padding, dilation, ceil_mode, .. } = *self;
        let stride = self.stride.unwrap_or(kernel_size);
        let pooled = input.f_max_pool2d(kernel_size, stride, padding, dilation, ceil_mode);
        pooled.map_err(|source| pool_error("MaxPool2d", kernel_size, input, source))
    }
}

/// `torch.nn.AvgPool2d`: the mean of each window, `[batch, channels, height, width]` or `[channels, height, width]` to the same with
/// fewer places.
///
/// ```
/// use accelerate::nn::AvgPool2d;
/// use accelerate::tch::Tensor;
///
/// let image = Tensor::from_slice(&[1f32, 2.0, 3.0, 6.0]).view([1, 1, 2, 2]);
/// assert_eq!(AvgPool2d::new([2, 2]).forward(&image)?.double_value(&[0, 0, 0, 0]), 3.0);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AvgPool2d {
    /// Height and width of a window.
    pub kernel_size: [i64; 2],
    /// Step between windows. `None`, PyTorch's default: `kernel_size`, so that they do not overlap.
    pub stride: Option<[i64; 2]>,
    /// Zeros around the input, at most half a window. PyTorch's default: none.
    pub padding: [i64; 2],
    /// Is there a window for a rest that is smaller? PyTorch's default: false.
    pub ceil_mode: bool,
    /// Do the zeros around the input count in the mean? PyTorch's default: true.
    pub count_include_pad: bool,
    /// What the sum of a window is divided by, in place of the number of its places.
    pub divisor_override: Option<i64>,
}

impl AvgPool2d {
    /// Windows of this size beside each other.
    pub fn new(kernel_size: [i64; 2]) -> Self {
        let (stride, divisor_override) = (None, None);
        Self { kernel_size, stride, padding: [0; 2], ceil_mode: false, count_include_pad: true, divisor_override }
    }

    /// The mean of each window.
    ///
    /// # Errors
    /// Another number of dims; an input smaller than a window; a padding of more than half a window; a divisor of 0.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let Self { kernel_size, padding, ceil_mode, count_include_pad, divisor_override, .. } = *self;
        let stride = self.stride.unwrap_or(kernel_size);
        let pooled = input.f_avg_pool2d(kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override);
        pooled.map_err(|source| pool_error("AvgPool2d", kernel_size, input, source))
    }
}

/// `torch.nn.AdaptiveAvgPool2d`: means of windows that are chosen so that there are as many as asked for.
///
/// ```
/// use accelerate::nn::AdaptiveAvgPool2d;
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let pool = AdaptiveAvgPool2d { output_size: [1, 1] };
/// assert_eq!(pool.forward(&Tensor::ones([2, 4, 9, 8], (Kind::Float, Device::Cpu)))?.size(), [2, 4, 1, 1]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdaptiveAvgPool2d {
    /// Height and width of the output.
    pub output_size: [i64; 2],
}

impl AdaptiveAvgPool2d {
    /// `[batch, channels, height, width]` or `[channels, height, width]` to the same with `output_size`.
    ///
    /// # Errors
    /// Another number of dims; no places at all.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let pooled = input.f_adaptive_avg_pool2d(self.output_size);
        pooled.map_err(|source| pool_error("AdaptiveAvgPool2d", [1, 1], input, source))
    }
}

#[cold]
fn pool_error(layer: &'static str, [height, width]: [i64; 2], input: &Tensor, source: TchError) -> crate::Error {
    let wanted = format!("[batch, channels, height, width] or without batch, with windows of {height} by {width}");
    forward_error(layer, "without parameters", wanted, input, source)
}

/// `torch.nn.Flatten`: several dims as one, in the order of their elements.
///
/// ```
/// use accelerate::nn::Flatten;
/// use accelerate::tch::{Device, Kind, Tensor};
///
/// let image = Tensor::ones([2, 3, 4, 5], (Kind::Float, Device::Cpu));
/// assert_eq!(Flatten::default().forward(&image)?.size(), [2, 60]);
/// assert_eq!(Flatten { start_dim: 2, ..Default::default() }.forward(&image)?.size(), [2, 3, 20]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flatten {
    /// The first of them. PyTorch's default: 1, behind the batch.
    pub start_dim: i64,
    /// The last of them; negative numbers count from the end. PyTorch's default: -1.
    pub end_dim: i64,
}

impl Default for Flatten {
    fn default() -> Self {
        Self { start_dim: 1, end_dim: -1 }
    }
}

impl Flatten {
    /// The same elements in fewer dims.
    ///
    /// # Errors
    /// Dims that the input does not have.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let Self { start_dim, end_dim } = *self;
        input.f_flatten(start_dim, end_dim).map_err(|source| {
            let wanted = format!("dims {start_dim} to {end_dim}");
            forward_error("Flatten", "without parameters", wanted, input, source)
        })
    }
}

impl_layer!(MaxPool2d, AvgPool2d, AdaptiveAvgPool2d, Flatten);
