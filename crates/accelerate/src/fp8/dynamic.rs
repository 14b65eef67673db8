//! Dynamic scaling: a scale is made of the tensor that it is for.
//!
//! Method and arithmetic: torchao 0.18, `torchao/float8` (`Float8Linear` and its three recipes).

use super::cast::Codes;
use super::product::{ProductOptions, Products};
use super::{check_input, computed_in, dense, rows, shaped_like, without_autocast};
use crate::error::Result;
use crate::nn::{DenseKernel, LinearKernel, Param};
use accelerate_core::config::Float8LinearRecipeName;
use accelerate_core::fp8::{DynamicScaling, Float8};
use std::sync::Arc;
use tch::Tensor;
use torch_ext::function::apply_function;

/// `x W^T + b` of codes, each product of which has codes of its own.
#[derive(Clone, Debug)]
pub(super) struct DynamicLinear {
    /// The layer's path.
    pub(super) path: Arc<str>,
    pub(super) scaling: DynamicScaling,
    pub(super) products: Products,
}

/// Along what elements of a matrix have a scale together in one product.
#[derive(Clone, Copy)]
enum Along {
    /// They all have.
    All,
    /// Those of a row.
    Row,
    /// Those of a column.
    Column,
}

impl DynamicLinear {
    fn codes(&self, matrix: &Tensor, format: Float8, along: Along) -> Result<Codes> {
        let dim = match along {
            Along::All => None,
            Along::Row => Some(1),
            Along::Column => Some(0),
        };
        Codes::dynamic(matrix, format, dim, self.scaling.has_powers_of_two())
    }

    /// Of matrices between which elements are multiplied along a row, or along a column.
    fn along(&self, along: Along) -> Along {
        match self.scaling.recipe {
            Float8LinearRecipeName::Tensorwise => Along::All,
            Float8LinearRecipeName::Rowwise | Float8LinearRecipeName::RowwiseWithGwHp => along,
        }
    }

    fn options(&self, adds_fast: bool) -> ProductOptions<'_> {
        ProductOptions { path: &self.path, pad_inner_dim: self.scaling.pad_inner_dim, adds_fast }
    }

    fn output(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let x_codes = self.codes(&rows(x)?, Float8::E4M3, self.along(Along::Row))?;
        let weight_codes = self.codes(weight, Float8::E4M3, self.along(Along::Row))?.transposed()?;
        let output = self.products.product(&x_codes, &weight_codes, x.f_kind()?, self.options(true))?;
        shaped_like(&output, x)
    }

    fn input_gradient(&self, gradient: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let along = match self.scaling.recipe {
            Float8LinearRecipeName::Rowwise => Along::Column,
            Float8LinearRecipeName::Tensorwise | Float8LinearRecipeName::RowwiseWithGwHp => Along::All,
        };
        let codes = self.codes(&rows(gradient)?, self.scaling.gradient_format(), self.along(Along::Row))?;
        let weight_codes = self.codes(weight, Float8::E4M3, along)?;
        let product = self.products.product(&codes, &weight_codes, gradient.f_kind()?, self.options(false))?;
        shaped_like(&product, gradient)
    }

    fn weight_gradient(&self, gradient: &Tensor, x: &Tensor) -> Result<Tensor> {
        let (gradient, x) = (rows(gradient)?, rows(x)?);
        if self.scaling.recipe == Float8LinearRecipeName::RowwiseWithGwHp {
            return Ok(gradient.f_transpose(0, 1)?.f_mm(&x)?);
        }
        let codes = self.codes(&gradient, self.scaling.gradient_format(), self.along(Along::Column))?.transposed()?;
        let x_codes = self.codes(&x, Float8::E4M3, self.along(Along::Column))?;
        self.products.product(&codes, &x_codes, gradient.f_kind()?, self.options(false))
    }
}

impl LinearKernel for DynamicLinear {
    fn linear(&self, input: &Tensor, weight: &Param, bias: Option<&Param>) -> Result<Tensor> {
        check_input(&self.path, input, weight)?;
        if input.numel() == 0 {
            return DenseKernel.linear(input, weight, bias);
        }
        let kind = computed_in(input)?;
        let (x, full) = (input.f_to_kind(kind)?, weight.get()?);
        let (kernel, weight_kind) = (self.clone(), full.f_kind()?);
        let output = apply_function(
            "Float8Linear",
            &[&x, &full],
            |context| {
                context.save_for_backward(&[&x, &full]);
                Ok(vec![without_autocast(&x, || self.output(&x, &full))?])
            },
            move |context, gradients| {
                let Some(Some(gradient)) = gradients.first() else { return Ok(vec![None, None]) };
                let saved = context.saved_tensors()?;
                let [x, full] = &saved[..] else { return Err("two tensors were saved".into()) };
                let gradients = without_autocast(gradient, || {
                    let of_input = context.needs_input_grad(0).then(|| kernel.input_gradient(gradient, full));
                    let of_weight = context
                        .needs_input_grad(1)
                        .then(|| Ok::<_, crate::Error>(kernel.weight_gradient(gradient, x)?.f_to_kind(weight_kind)?));
                    Ok(vec![of_input.transpose()?, of_weight.transpose()?])
                });
                Ok(gradients?)
            },
        )?
        .swap_remove(0);
        match bias {
            Some(bias) => Ok(output.f_add(&bias.get()?.f_to_kind(kind)?)?),
            None => Ok(output),
        }
    }

    fn is_dense(&self) -> bool {
        true
    }

    fn replaced(&self) -> Option<Arc<dyn LinearKernel>> {
        dense()
    }
}
