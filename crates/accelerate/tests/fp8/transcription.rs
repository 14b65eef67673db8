//! The definitions of both ways to scale, written down with plain operations, without graph and kernels.

use accelerate::tch::{Kind, Tensor};

/// Largest numbers and types of both formats.
pub(crate) const E4M3: (f64, Kind) = (448.0, Kind::Float8e4m3fn);
pub(crate) const E5M2: (f64, Kind) = (57344.0, Kind::Float8e5m2);

/// The numbers that a matrix is rounded to under a scale.
fn rounded(matrix: &Tensor, (largest, kind): (f64, Kind), scale: &Tensor) -> Tensor {
    let scaled = matrix.detach().to_kind(Kind::Float) * scale;
    scaled.clamp(-largest, largest).to_kind(kind).to_kind(Kind::Float) / scale
}

/// Dynamic scaling: of all elements, or of those along `dim` with powers of two.
pub(crate) fn dynamic(matrix: &Tensor, format: (f64, Kind), dim: Option<i64>, powers_of_two: bool) -> Tensor {
    let absolute = matrix.detach().abs();
    let amax = dim.map_or_else(|| absolute.max(), |dim| absolute.amax([dim].as_slice(), true));
    let amax = amax.to_kind(Kind::Double).clamp_min(1e-12);
    let mut scale = (amax.ones_like() * format.0 / amax).to_kind(Kind::Float);
    if powers_of_two {
        scale = scale.log2().floor().exp2();
    }
    rounded(matrix, format, &scale)
}

/// What one layer gives: output, and the gradients of input, weight and bias.
#[derive(Debug)]
pub(crate) struct Results {
    pub(crate) output: Tensor,
    pub(crate) of_input: Tensor,
    pub(crate) of_weight: Tensor,
    pub(crate) of_bias: Tensor,
}

/// `kind` is the type that the layer computes in.
pub(crate) fn dynamic_linear(recipe: &str, kind: Kind, tensors: [&Tensor; 4]) -> Results {
    let [x, weight, bias, gradient] = tensors.map(Tensor::detach);
    let (x, gradient) = (x.to_kind(kind), gradient.to_kind(kind));
    let is_rowwise = recipe != "tensorwise";
    let along = |dim| is_rowwise.then_some(dim);
    let of_gradient = if is_rowwise { E4M3 } else { E5M2 };
    let row = |matrix: &Tensor, format| dynamic(matrix, format, along(1), is_rowwise);
    let column = |matrix: &Tensor, format| dynamic(matrix, format, along(0), is_rowwise);
    let output = row(&x, E4M3).mm(&row(&weight, E4M3).tr()).to_kind(kind) + bias.to_kind(kind);
    let for_input = match recipe {
        "rowwise_with_gw_hp" => dynamic(&weight, E4M3, None, true),
        _ => column(&weight, E4M3),
    };
    let of_weight = match recipe {
        "rowwise_with_gw_hp" => gradient.tr().mm(&x),
        _ => column(&gradient, of_gradient).tr().mm(&column(&x, E4M3)).to_kind(kind),
    };
    Results {
        output,
        of_input: row(&gradient, of_gradient).mm(&for_input).to_kind(kind),
        of_weight: of_weight.to_kind(weight.kind()),
        of_bias: gradient.sum_dim_intlist([0i64].as_slice(), false, kind).to_kind(bias.kind()),
    }
}

/// TransformerEngine's settings of delayed scaling.
#[derive(Clone, Copy)]
pub(crate) struct Delayed {
    pub(crate) margin: i32,
    pub(crate) interval: usize,
    pub(crate) is_hybrid: bool,
    pub(crate) length: usize,
    pub(crate) is_most_recent: bool,
}

/// One tensor's history and scale, as `_amax_and_scale_update` of TransformerEngine's `pytorch/quantization.py` has them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct History {
    pub(crate) amaxes: Vec<f32>,
    pub(crate) scale: f32,
    updates: usize,
}

impl History {
    pub(crate) fn new(length: usize) -> Self {
        Self { amaxes: vec![0.0; length], scale: 1.0, updates: 0 }
    }

    fn record(&mut self, matrix: &Tensor) {
        let amax = matrix.detach().abs().max().double_value(&[]) as f32;
        self.amaxes[0] = self.amaxes[0].max(amax);
    }

    fn update(&mut self, recipe: Delayed, largest: f64) {
        let amax = match recipe.is_most_recent {
            true => self.amaxes[0],
            false => self.amaxes.iter().copied().fold(0.0, f32::max),
        };
        self.amaxes.rotate_left(1);
        self.amaxes[0] = 0.0;
        if self.updates.is_multiple_of(recipe.interval) && amax > 0.0 {
            self.scale = (largest as f32 * 2f32.powi(-recipe.margin)) / amax;
        }
        self.updates += 1;
    }
}

/// A layer with delayed scaling: what it remembers of input, weight and gradient.
#[derive(Clone)]
pub(crate) struct DelayedLinear {
    pub(crate) recipe: Delayed,
    pub(crate) histories: [History; 3],
}

impl DelayedLinear {
    pub(crate) fn new(recipe: Delayed) -> Self {
        Self { recipe, histories: [0; 3].map(|_| History::new(recipe.length)) }
    }

    fn of_gradient(&self) -> (f64, Kind) {
        if self.recipe.is_hybrid { E5M2 } else { E4M3 }
    }

    /// One pass forward and back.
    pub(crate) fn pass(&mut self, kind: Kind, tensors: [&Tensor; 4]) -> Results {
        let [x, weight, bias, gradient] = tensors.map(Tensor::detach);
        let (x, gradient) = (x.to_kind(kind), gradient.to_kind(kind));
        let round =
            |place: usize, matrix: &Tensor, format| rounded(matrix, format, &Tensor::from(self.histories[place].scale));
        let [x_8, weight_8] = [round(0, &x, E4M3), round(1, &weight, E4M3)];
        let gradient_8 = round(2, &gradient, self.of_gradient());
        let product = x_8.mm(&weight_8.tr()) + bias.to_kind(kind).to_kind(Kind::Float);
        for (history, matrix) in self.histories.iter_mut().zip([&x, &weight, &gradient]) {
            history.record(matrix);
        }
        Results {
            output: product.to_kind(kind),
            of_input: gradient_8.mm(&weight_8).to_kind(kind),
            of_weight: gradient_8.tr().mm(&x_8).to_kind(kind).to_kind(weight.kind()),
            of_bias: gradient.sum_dim_intlist([0i64].as_slice(), false, bias.kind()),
        }
    }

    /// The end of the pass.
    pub(crate) fn update(&mut self) {
        let largest = [E4M3.0, E4M3.0, self.of_gradient().0];
        for (history, largest) in self.histories.iter_mut().zip(largest) {
            history.update(self.recipe, largest);
        }
    }
}
