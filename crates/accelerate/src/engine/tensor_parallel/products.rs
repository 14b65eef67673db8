//! Products beside which tokens travel, where ranks divide the tokens of what is between divided layers. The product of the tokens that
//! a rank has is computed while those of others are on their way, and what others wait for is computed first.
//!
//! Results are those of a product of all tokens, but for the order in which a matrix product adds. Several small products take longer
//! than one of their size, and there is little to wait for: see `bench/README.md`. So only long sequences are divided in this way.

use super::region::Region;
use crate::error::Result;
use crate::group::Group;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tch::{Device, Kind, Tensor};
use torch_ext::apply_function;
use torch_ext::autocast::{autocast_dtype, is_autocast_enabled};
use torch_ext::function::BackwardContext;

/// With fewer tokens on a rank, products of some tokens take longer than one of all.
const LEAST_TOKENS: usize = 512;

/// A product of tokens with the slice of a weight, `[out_features, in_features]`.
#[derive(Clone)]
pub(super) struct ProductOfTokens {
    group: Group,
    /// Which tokens each rank has.
    shares: Vec<Range<usize>>,
    /// What it is computed in: under autocast, not the type of the input.
    kind: Kind,
}

/// What autocast makes of a tensor of this type.
fn cast_kind(kind: Kind) -> Result<Kind> {
    let is_cast = kind != Kind::Double && is_autocast_enabled(Device::Cpu)?;
    Ok(if is_cast { autocast_dtype(Device::Cpu)? } else { kind })
}

/// `[.., features]` as rows.
fn rows(tensor: &Tensor) -> Result<Tensor> {
    let features = tensor.size().last().copied().unwrap_or_default();
    Ok(tensor.f_reshape([tensor.numel() as i64 / features.max(1), features])?)
}

/// The sizes of `[.., tokens, features]` with others.
fn resized(tensor: &Tensor, tokens: usize, features: i64) -> Vec<i64> {
    let mut sizes = tensor.size();
    if let [.., own_tokens, own_features] = &mut sizes[..] {
        (*own_tokens, *own_features) = (tokens as i64, features);
    }
    sizes
}

/// `[.., tokens, features]` as `[batch, tokens, features]`, the same memory where it is contiguous.
fn batched(tensor: &Tensor) -> Result<Tensor> {
    Ok(match tensor.dim() as i64 {
        ..3 => tensor.f_unsqueeze(0)?,
        3 => tensor.shallow_clone(),
        dim => tensor.f_flatten(0, dim - 3)?,
    })
}

/// Writes `input matrix + bias` to a place of `[batch, tokens, features]`, which need not be contiguous.
fn write_product(place: &Tensor, input: &Tensor, matrix: &Tensor, bias: Option<&Tensor>) -> Result<()> {
    let batch = input.size().first().copied().unwrap_or_default();
    let matrix = matrix.f_unsqueeze(0)?.f_expand([batch, -1, -1], false)?;
    match bias {
        Some(bias) => drop(bias.f_expand_as(place)?.f_baddbmm_out(place, input, &matrix)?),
        None => drop(input.f_bmm_out(place, &matrix)?),
    }
    Ok(())
}

/// Of the weight and the bias of a product with `full`, as far as somebody needs them.
fn gradients_of_weights(
    context: &BackwardContext<'_>,
    of_product: &Tensor,
    full: &Tensor,
) -> Result<[Option<Tensor>; 2]> {
    let gradient = rows(of_product)?;
    let weight = match context.needs_input_grad(1) {
        true => Some(gradient.f_tr()?.f_mm(&rows(full)?.f_to_kind(gradient.f_kind()?)?)?),
        false => None,
    };
    // libtorch sums it over rows.
    Ok([weight, Some(gradient)])
}

impl ProductOfTokens {
    /// `None` where tokens cannot travel beside it, or it would not be worth while. Where sizes do not fit, libtorch's product says so.
    pub(super) fn new(
        region: &Region,
        factors: (&Tensor, &Tensor, Option<&Tensor>),
        shares: &[Range<usize>],
    ) -> Result<Option<Self>> {
        match shares.iter().all(|share| LEAST_TOKENS <= share.len()) {
            true => Self::of_any_length(region, factors, shares),
            false => Ok(None),
        }
    }

    /// The same with any number of tokens. `factors` are an input, the slice of a weight, and that of a bias.
    fn of_any_length(
        region: &Region,
        (input, matrix, bias): (&Tensor, &Tensor, Option<&Tensor>),
        shares: &[Range<usize>],
    ) -> Result<Option<Self>> {
        let (size, features) = (input.size(), matrix.size());
        let fits = size.len() >= 2 && features.len() == 2 && size.last() == features.last();
        if !fits || !region.group().overlaps(input) || !region.group().overlaps(matrix) {
            return Ok(None);
        }
        let kind = cast_kind(input.f_kind()?)?;
        let bias_fits = match bias {
            Some(bias) => bias.size() == features[..1] && cast_kind(bias.f_kind()?)? == kind,
            None => true,
        };
        if kind != cast_kind(matrix.f_kind()?)? || !bias_fits {
            return Ok(None);
        }
        Ok(Some(Self { group: region.group().clone(), shares: shares.to_vec(), kind }))
    }

    fn num_tokens(&self) -> usize {
        self.shares.last().map_or(0, |last| last.end)
    }

    fn own(&self) -> Range<usize> {
        self.shares.get(self.group.rank()).cloned().unwrap_or(0..0)
    }

    /// The tokens of a rank.
    fn tokens(&self, full: &Tensor, rank: usize) -> Result<Tensor> {
        let share = self.shares.get(rank).cloned().unwrap_or(0..0);
        Ok(full.f_narrow(-2, share.start as i64, share.len() as i64)?)
    }

    /// The product of the tokens of a rank with a matrix: `[.., tokens, features]`.
    fn product(&self, full: &Tensor, rank: usize, matrix: &Tensor) -> Result<Tensor> {
        let input = self.tokens(full, rank)?;
        let mut sizes = input.size();
        let batched = batched(&input)?;
        let batch = batched.size()[0];
        let product = batched.f_bmm(&matrix.f_unsqueeze(0)?.f_expand([batch, -1, -1], false)?)?;
        if let (Some(features), Some(found)) = (sizes.last_mut(), matrix.size().last()) {
            *features = *found;
        }
        Ok(product.f_view(sizes.as_slice())?)
    }

    /// Memory for the tokens of each rank, where this rank's stand.
    fn places(&self, own: &Tensor) -> Result<Vec<Tensor>> {
        let features = own.size().last().copied().unwrap_or_default();
        let place = |(rank, share): (usize, &Range<usize>)| match rank == self.group.rank() {
            true => Ok(own.f_detach()?.f_contiguous()?),
            false => Ok(Tensor::f_empty(resized(own, share.len(), features), (own.f_kind()?, own.device()))?),
        };
        self.shares.iter().enumerate().map(place).collect()
    }

    /// All tokens of `own`, of which each rank has some, and their product with this rank's slice of a colwise layer. The gradient of
    /// `own` is the sum of all ranks' parts. `is_used` is set by the backward pass. Collective in both passes.
    pub(super) fn of_gathered(
        self,
        own: &Tensor,
        (matrix, bias): (&Tensor, Option<&Tensor>),
        is_used: Arc<AtomicBool>,
    ) -> Result<[Tensor; 2]> {
        let inputs: Vec<&Tensor> = [Some(own), Some(matrix), bias].into_iter().flatten().collect();
        let (num_inputs, kind) = (inputs.len(), own.f_kind()?);
        let forward = self.clone();
        let outputs = apply_function(
            "TensorParallelGatheredProduct",
            &inputs,
            |context| {
                context.once_differentiable();
                let [full, product] = forward.gather(own, (matrix, bias))?;
                // Under autocast, half the memory.
                let cast = full.f_to_kind(forward.kind)?;
                // A sharded weight is gathered once more for the gradient of the input only.
                match own.requires_grad() {
                    true => context.save_for_backward(&[&cast, matrix]),
                    false => {
                        context.mark_non_differentiable(&full);
                        context.save_for_backward(&[&cast]);
                    }
                }
                Ok(vec![full, product])
            },
            move |context, mut gradients| {
                is_used.store(true, Ordering::Relaxed);
                let (of_product, of_full) = (gradients.pop().flatten(), gradients.pop().flatten());
                let mut results: Vec<Option<Tensor>> = (0..num_inputs).map(|_| None).collect();
                let saved = context.saved_tensors()?;
                let full = &saved[0];
                let of_weights =
                    || of_product.as_ref().map_or(Ok([None, None]), |it| gradients_of_weights(context, it, full));
                if (of_product.is_none() && of_full.is_none()) || !context.needs_input_grad(0) {
                    results.splice(1.., of_weights()?.into_iter().take(num_inputs - 1));
                    return Ok(results);
                }
                let factors = of_product.as_ref().zip(saved.get(1));
                let gradients = (factors, of_full.as_ref());
                let mut made = [None, None];
                let sum = self.scatter(gradients, (full, kind), &mut || {
                    made = of_weights()?;
                    Ok(())
                })?;
                results[0] = Some(sum);
                results.splice(1.., made.into_iter().take(num_inputs - 1));
                Ok(results)
            },
        )?;
        let [full, product] = outputs
            .try_into()
            .map_err(|_| crate::Error::other("a product of gathered tokens has not given two tensors"))?;
        Ok([full, product])
    }

    /// All tokens and their product. Collective.
    fn gather(&self, own: &Tensor, (matrix, bias): (&Tensor, Option<&Tensor>)) -> Result<[Tensor; 2]> {
        let places = self.places(own)?;
        let size = resized(own, self.num_tokens(), matrix.size()[0]);
        let cast = matrix.f_to_kind(self.kind)?.f_transpose(0, 1)?;
        let bias = bias.map(|bias| bias.f_to_kind(self.kind)).transpose()?;
        let product = Tensor::f_empty(&size, (self.kind, own.device()))?;
        let of_batch = batched(&product)?;
        self.group.all_gather_overlapped(&places, &mut |rank| {
            let part = batched(&places[rank].f_to_kind(self.kind)?)?;
            write_product(&self.tokens(&of_batch, rank)?, &part, &cast, bias.as_ref())
        })?;
        Ok([Tensor::f_cat(&places, -2)?, product])
    }

    /// The gradient of this rank's tokens, of type `kind`: the sum of what all ranks have, as gradient and weight of the product and as the
    /// gradient of all tokens, `full`, from elsewhere. `meanwhile` computes what nobody waits for. Collective.
    fn scatter(
        &self,
        (factors, of_full): (Option<(&Tensor, &Tensor)>, Option<&Tensor>),
        (full, kind): (&Tensor, Kind),
        meanwhile: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Tensor> {
        let in_features = full.size().last().copied().unwrap_or_default();
        let cast = match factors {
            Some((gradient, matrix)) => Some((gradient, matrix.f_to_kind(gradient.f_kind()?)?)),
            None => None,
        };
        let sum = Tensor::f_empty(resized(full, self.own().len(), in_features), (kind, full.device()))?;
        self.group.reduce_scatter_overlapped((&sum, full.numel()), &mut |rank| {
            let product = match &cast {
                Some((gradient, matrix)) => Some(self.product(gradient, rank, matrix)?.f_to_kind(kind)?),
                None => None,
            };
            let others = of_full.map(|gradient| self.tokens(gradient, rank)).transpose()?;
            let part = match (product, others) {
                (Some(mut product), Some(others)) => product.f_add_(&others)?,
                (Some(part), None) | (None, Some(part)) => part.f_contiguous()?,
                (None, None) => Tensor::f_zeros(sum.size(), (kind, sum.device()))?,
            };
            if rank == self.group.rank() {
                meanwhile()?;
            }
            Ok(part)
        })?;
        Ok(sum)
    }

    /// This rank's tokens of the sum over ranks of products with slices of a rowwise layer, of an input of all tokens. Collective in
    /// both passes.
    pub(super) fn summed(self, input: &Tensor, matrix: &Tensor) -> Result<Tensor> {
        let out_features = matrix.size()[0];
        let (forward, saves_input, saves_matrix) = (self.clone(), matrix.requires_grad(), input.requires_grad());
        let input_size = input.size();
        let mut outputs = apply_function(
            "TensorParallelProductSum",
            &[input, matrix],
            |context| {
                context.once_differentiable();
                let cast = matrix.f_to_kind(forward.kind)?.f_transpose(0, 1)?;
                let size = resized(input, forward.own().len(), out_features);
                let sum = Tensor::f_empty(size, (forward.kind, input.device()))?;
                let numel = resized(input, forward.num_tokens(), out_features).iter().product::<i64>() as usize;
                let full = input.f_to_kind(forward.kind)?;
                forward
                    .group
                    .reduce_scatter_overlapped((&sum, numel), &mut |rank| forward.product(&full, rank, &cast))?;
                let saved = [saves_input.then_some(input), saves_matrix.then_some(matrix)];
                context.save_for_backward(&saved.into_iter().flatten().collect::<Vec<_>>());
                Ok(vec![sum])
            },
            move |context, mut gradients| {
                let Some(gradient) = gradients.pop().flatten() else { return Ok(vec![None, None]) };
                let mut saved = context.saved_tensors()?.into_iter();
                let input = if saves_input { saved.next() } else { None };
                let kind = gradient.f_kind()?;
                let matrix = saved.next().filter(|_| context.needs_input_grad(0));
                let of_input = match matrix {
                    Some(matrix) => {
                        let full = Tensor::f_empty(&input_size, (kind, gradient.device()))?;
                        Some((full, matrix.f_to_kind(kind)?))
                    }
                    None => None,
                };
                let places = self.places(&gradient)?;
                self.group.all_gather_overlapped(&places, &mut |rank| {
                    let Some((full, matrix)) = &of_input else { return Ok(()) };
                    let place = self.tokens(&batched(full)?, rank)?;
                    write_product(&place, &batched(&places[rank])?, matrix, None)
                })?;
                let of_matrix = match input.filter(|_| context.needs_input_grad(1)) {
                    Some(input) => {
                        let full = Tensor::f_cat(&places, -2)?;
                        Some(rows(&full)?.f_tr()?.f_mm(&rows(&input)?.f_to_kind(kind)?)?)
                    }
                    None => None,
                };
                // libtorch casts a gradient to the type of what it belongs to.
                Ok(vec![of_input.map(|(full, _)| full), of_matrix])
            },
        )?;
        Ok(outputs.swap_remove(0))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{ReduceOp, testing};
    use torch_ext::autocast::Autocast;

    const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);
    /// Features that each rank has between the two layers.
    const SLICE: i64 = 2;

    #[derive(Clone, Copy, Debug)]
    struct Case {
        batch: &'static [i64],
        /// By rank.
        tokens: [usize; 4],
        has_bias: bool,
        is_frozen: bool,
        is_first: bool,
        is_autocast: bool,
    }

    const PLAIN: Case = Case {
        batch: &[2],
        tokens: [2, 2, 2, 2],
        has_bias: true,
        is_frozen: false,
        is_first: false,
        is_autocast: false,
    };
    const CASES: [Case; 8] = [
        PLAIN,
        Case { batch: &[], ..PLAIN },
        Case { batch: &[3, 2], ..PLAIN },
        Case { tokens: [3, 2, 2, 2], has_bias: false, ..PLAIN },
        Case { tokens: [1, 1, 0, 0], ..PLAIN },
        Case { is_frozen: true, ..PLAIN },
        Case { is_first: true, ..PLAIN },
        Case { is_autocast: true, ..PLAIN },
    ];

    /// The same numbers on all ranks.
    fn numbers(sizes: &[i64], seed: f64) -> Tensor {
        let count = sizes.iter().product::<i64>();
        ((Tensor::arange(count, FLOAT) + seed) * 0.7).sin().view(sizes)
    }

    fn gradient(tensor: &Tensor) -> Option<Tensor> {
        let gradient = tensor.grad();
        gradient.defined().then_some(gradient)
    }

    /// Input, weight and bias of a colwise layer, and weight of the rowwise one behind it.
    fn tensors(case: Case, num_ranks: usize) -> [Tensor; 4] {
        let whole: usize = case.tokens[..num_ranks].iter().sum();
        let features = SLICE * num_ranks as i64;
        [
            numbers(&[case.batch, &[whole as i64, 5]].concat(), 1.0),
            numbers(&[features, 5], 2.0),
            numbers(&[features], 3.0),
            numbers(&[3, features], 4.0),
        ]
    }

    /// Output and gradients of one rank that has everything. What each rank has of the first input counts as often as its number says.
    fn on_one_rank(case: Case, num_ranks: usize) -> [Option<Tensor>; 5] {
        let [input, first, bias, second] = tensors(case, num_ranks);
        let input = input.set_requires_grad(!case.is_first);
        let [first, bias, second] = [first, bias, second].map(|weight| weight.set_requires_grad(!case.is_frozen));
        let output =
            under(case, || input.linear(&first, case.has_bias.then_some(&bias)).linear(&second, None::<&Tensor>));
        let factor = (1..=num_ranks).sum::<usize>() as f64;
        let loss = input.sin().sum(Kind::Float) * factor + output.to_kind(Kind::Float).square().sum(Kind::Float);
        loss.backward();
        [Some(output), gradient(&input), gradient(&first), gradient(&bias), gradient(&second)]
    }

    fn under<T>(case: Case, compute: impl FnOnce() -> T) -> T {
        let autocast = Autocast { enabled: case.is_autocast, ..Autocast::off(Device::Cpu) };
        autocast.run(compute).unwrap()
    }

    fn on_each_rank(region: &Region, case: Case) -> Result<[Option<Tensor>; 5]> {
        let (rank, num_ranks) = (region.rank(), region.group().world_size());
        let ends: Vec<usize> = (0..num_ranks).map(|rank| case.tokens[..=rank].iter().sum()).collect();
        let shares: Vec<Range<usize>> = (0..num_ranks).map(|rank| ends[rank] - case.tokens[rank]..ends[rank]).collect();
        let [input, first, bias, second] = tensors(case, num_ranks);
        let input = input.narrow(-2, shares[rank].start as i64, shares[rank].len() as i64).contiguous();
        let input = input.set_requires_grad(!case.is_first);
        let slice = |full: Tensor, dim: i64| {
            full.narrow(dim, SLICE * rank as i64, SLICE).contiguous().set_requires_grad(!case.is_frozen)
        };
        let (first, bias, second) = (slice(first, 0), slice(bias, 0), slice(second, 1));
        let (full, output) = under(case, || -> Result<_> {
            let product = |input: &Tensor, matrix: &Tensor, bias: Option<&Tensor>| {
                Ok::<_, crate::Error>(ProductOfTokens::of_any_length(region, (input, matrix, bias), &shares)?.unwrap())
            };
            let with_bias = (&first, case.has_bias.then_some(&bias));
            let [full, inner] = product(&input, &first, with_bias.1)?.of_gathered(&input, with_bias, Arc::default())?;
            assert_eq!(full.requires_grad(), input.requires_grad());
            Ok((full, product(&inner, &second, None)?.summed(&inner, &second)?))
        })?;
        let loss =
            full.sin().sum(Kind::Float) * (rank + 1) as f64 + output.to_kind(Kind::Float).square().sum(Kind::Float);
        loss.f_backward()?;
        Ok([Some(output), gradient(&input), gradient(&first), gradient(&bias), gradient(&second)])
    }

    #[test]
    fn outputs_and_gradients_are_those_of_one_rank() {
        for (case, num_ranks) in CASES.iter().flat_map(|case| (2..=4).map(move |num_ranks| (*case, num_ranks))) {
            let wanted = on_one_rank(case, num_ranks);
            let start: Vec<i64> = (0..num_ranks).map(|rank| case.tokens[..rank].iter().sum::<usize>() as i64).collect();
            let found = testing::ranks(num_ranks, Default::default(), |accelerator| {
                accelerator.group().all_reduce(&Tensor::zeros([1], FLOAT), ReduceOp::Sum)?;
                on_each_rank(&Region::new(accelerator.group().clone(), true)?, case)
            });
            let tolerance = if case.is_autocast { 5e-2 } else { 1e-5 };
            for (rank, found) in found.unwrap().into_iter().enumerate() {
                // Output, input, weight and bias of the first layer, weight of the second.
                for (place, dim) in [-2, -2, 0, 0, 1].into_iter().enumerate() {
                    let (start, length) = match dim {
                        -2 => (start[rank], case.tokens[rank] as i64),
                        _ => (SLICE * rank as i64, SLICE),
                    };
                    let wanted = wanted[place].as_ref().map(|full| full.narrow(dim, start, length));
                    let is_equal = match (&found[place], &wanted) {
                        (Some(found), Some(wanted)) => {
                            found.size() == wanted.size() && found.allclose(wanted, tolerance, tolerance, false)
                        }
                        (found, wanted) => found.is_none() && wanted.is_none(),
                    };
                    assert!(
                        is_equal,
                        "{case:?} rank {rank} of {num_ranks}, place {place}: {:?} {wanted:?}",
                        found[place]
                    );
                }
            }
        }
    }

    #[test]
    fn products_of_few_tokens_are_not_divided() {
        testing::ranks(2, Default::default(), |accelerator| {
            accelerator.group().all_reduce(&Tensor::zeros([1], FLOAT), ReduceOp::Sum)?;
            let region = Region::new(accelerator.group().clone(), true)?;
            let (input, matrix) = (Tensor::zeros([1, 4, 5], FLOAT), Tensor::zeros([3, 5], FLOAT));
            for (tokens, wanted) in [(LEAST_TOKENS - 1, false), (LEAST_TOKENS, true)] {
                let shares = [0..LEAST_TOKENS, LEAST_TOKENS..LEAST_TOKENS + tokens];
                assert_eq!(ProductOfTokens::new(&region, (&input, &matrix, None), &shares)?.is_some(), wanted);
            }
            // The product itself says what is wrong with these.
            let bias = Tensor::zeros([3], FLOAT);
            for (input, matrix, bias) in [
                (input.to_kind(Kind::Double), matrix.shallow_clone(), bias.shallow_clone()),
                (input.shallow_clone(), matrix.to_kind(Kind::Int64), bias.shallow_clone()),
                (input.narrow(-1, 0, 4), matrix.shallow_clone(), bias.shallow_clone()),
                (input.shallow_clone(), matrix.shallow_clone(), bias.to_kind(Kind::Double)),
                (input.shallow_clone(), matrix.shallow_clone(), Tensor::zeros([1], FLOAT)),
            ] {
                assert!(ProductOfTokens::of_any_length(&region, (&input, &matrix, Some(&bias)), &[])?.is_none());
            }
            Ok(())
        })
        .unwrap();
    }
}
