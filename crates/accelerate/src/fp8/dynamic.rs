//! Dynamic scaling: a scale is made of the tensor that it is for.
//!
//! Method and arithmetic: torchao 0.18, `torchao/float8` (`Float8Linear` and its three recipes).

use super::cast::Codes;
use super::product::{ProductOptions, Products};
use super::{check_input, computed_in, dense, rows, shaped_like, without_autocast};
use crate::error::Result;
use crate::nn::{DenseKernel, Float8Codes, LinearKernel, Param};
use accelerate_core::config::Float8LinearRecipeName;
use accelerate_core::fp8::{DynamicScaling, Float8};
use std::sync::Arc;
use tch::{Kind, Tensor};
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

/// The weight of a layer: numbers, or codes with their scale.
#[derive(Clone, Copy)]
struct Weight<'a> {
    tensor: &'a Tensor,
    scale: Option<&'a Tensor>,
}

impl DynamicLinear {
    fn weight_codes(&self, weight: Weight<'_>, along: Along) -> Result<Codes> {
        match weight.scale {
            Some(scale) => Ok(Codes { data: weight.tensor.shallow_clone(), scale: scale.shallow_clone() }),
            None => self.codes(weight.tensor, Float8::E4M3, along),
        }
    }

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

    fn output(&self, x: &Tensor, weight: Weight<'_>) -> Result<Tensor> {
        let x_codes = self.codes(&rows(x)?, Float8::E4M3, self.along(Along::Row))?;
        let weight_codes = self.weight_codes(weight, self.along(Along::Row))?.transposed()?;
        let output = self.products.product(&x_codes, &weight_codes, x.f_kind()?, self.options(true))?;
        shaped_like(&output, x)
    }

    /// The gradients of the input and of the weight, as far as they are `needed`.
    fn gradients(
        &self,
        gradient: &Tensor,
        (x, weight): (&Tensor, Weight<'_>),
        needed: [bool; 2],
    ) -> Result<[Option<Tensor>; 2]> {
        let matrix = rows(gradient)?;
        let (recipe, format) = (self.scaling.recipe, self.scaling.gradient_format());
        // Where all elements have one scale, both products have the same codes.
        let of_all = (recipe == Float8LinearRecipeName::Tensorwise)
            .then(|| self.codes(&matrix, format, Along::All))
            .transpose()?;
        let codes = |along| match &of_all {
            Some(codes) => Ok(codes.shallow_clone()),
            None => self.codes(&matrix, format, along),
        };
        let of_input = || shaped_like(&self.input_gradient(&codes(Along::Row)?, weight, gradient.f_kind()?)?, gradient);
        let of_weight = || match recipe {
            Float8LinearRecipeName::RowwiseWithGwHp => Ok(matrix.f_transpose(0, 1)?.f_mm(&rows(x)?)?),
            _ => self.weight_gradient(&codes(Along::Column)?.transposed()?, x, gradient.f_kind()?),
        };
        Ok([needed[0].then(of_input).transpose()?, needed[1].then(of_weight).transpose()?])
    }

    fn input_gradient(&self, gradient: &Codes, weight: Weight<'_>, kind: Kind) -> Result<Tensor> {
        let along = match self.scaling.recipe {
            Float8LinearRecipeName::Rowwise => Along::Column,
            Float8LinearRecipeName::Tensorwise | Float8LinearRecipeName::RowwiseWithGwHp => Along::All,
        };
        self.products.product(gradient, &self.weight_codes(weight, along)?, kind, self.options(false))
    }

    fn weight_gradient(&self, gradient: &Codes, x: &Tensor, kind: Kind) -> Result<Tensor> {
        let x_codes = self.codes(&rows(x)?, Float8::E4M3, self.along(Along::Column))?;
        self.products.product(gradient, &x_codes, kind, self.options(false))
    }
}

impl LinearKernel for DynamicLinear {
    fn linear(&self, input: &Tensor, weight: &Param, bias: Option<&Param>) -> Result<Tensor> {
        check_input(&self.path, input, weight)?;
        if input.numel() == 0 {
            return DenseKernel.linear(input, weight, bias);
        }
        let kind = computed_in(input)?;
        let x = input.f_to_kind(kind)?;
        let (in_graph, full, scale) = match weight.codes()? {
            Some(Float8Codes { codes, scale, stand_in }) => (stand_in, codes, Some(scale)),
            None => {
                let full = weight.get()?;
                (full.shallow_clone(), full, None)
            }
        };
        let (kernel, weight_kind) = (self.clone(), in_graph.f_kind()?);
        let scale_in_graph = scale.as_ref().map(Tensor::shallow_clone);
        let output = apply_function(
            "Float8Linear",
            &[&x, &in_graph],
            |context| {
                context.save_for_backward(&[&x, &full]);
                let weight = Weight { tensor: &full, scale: scale.as_ref() };
                Ok(vec![without_autocast(&x, || self.output(&x, weight))?])
            },
            move |context, gradients| {
                let Some(Some(gradient)) = gradients.first() else { return Ok(vec![None, None]) };
                let saved = context.saved_tensors()?;
                let [x, full] = &saved[..] else { return Err("two tensors were saved".into()) };
                let weight = Weight { tensor: full, scale: scale_in_graph.as_ref() };
                let needed = [context.needs_input_grad(0), context.needs_input_grad(1)];
                let [of_input, of_weight] =
                    without_autocast(gradient, || kernel.gradients(gradient, (x, weight), needed))?;
                Ok(vec![of_input, of_weight.map(|found| found.f_to_kind(weight_kind)).transpose()?])
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

    fn gathers_codes(&self) -> bool {
        self.scaling.gathers_codes
    }

    fn replaced(&self) -> Option<Arc<dyn LinearKernel>> {
        dense()
    }
}
