//! Cross-entropy of logits of which each rank has some classes.

use crate::error::{NnError, Result};
use crate::group::{Group, ReduceOp};
use std::ops::Range;
use tch::{Kind, Reduction, Tensor};
use torch_ext::{apply_function, scalar};

/// `logits [rows, own classes]` and `classes [rows]` to the mean or sum over rows whose class is not `ignore_index`, or to one number
/// for each row.
///
/// Of each row its largest logit travels, then the sum of its exponentials and the logit of its class. Gradients need no exchange.
pub(super) fn cross_entropy(
    group: &Group,
    logits: &Tensor,
    classes: &Tensor,
    (own, num_classes): (Range<i64>, i64),
    (reduction, ignore_index): (Reduction, i64),
) -> Result<Tensor> {
    if let Reduction::Other(found) = reduction {
        return Err(NnError::NoSuchReduction { found }.into());
    }
    let is_counted = scalar::ne(classes, ignore_index)?;
    check_classes(classes, &is_counted, num_classes)?;
    let logits = logits.f_to_kind(Kind::Float)?;
    let forward = || forward(group, &logits, (classes, &is_counted), &own, reduction);
    let outputs = apply_function(
        "TensorParallelCrossEntropy",
        &[&logits],
        |context| {
            context.once_differentiable();
            let (loss, [difference, weight]) = forward()?;
            context.save_for_backward(&[&difference, &weight]);
            Ok(vec![loss])
        },
        |context, mut gradients| {
            let Some(gradient) = gradients.pop().flatten() else { return Ok(vec![None]) };
            let saved = context.saved_tensors()?;
            // The gradient is that of one number, or has one for each row.
            let weight = saved[1].f_mul(&gradient)?.f_unsqueeze(-1)?;
            Ok(vec![Some(saved[0].f_mul(&weight)?)])
        },
    )?;
    Ok(outputs.into_iter().next().unwrap_or_else(Tensor::new))
}

/// The loss, and what its gradient needs: probabilities less one where a row's class is, and what each row counts.
fn forward(
    group: &Group,
    logits: &Tensor,
    (classes, is_counted): (&Tensor, &Tensor),
    own: &Range<i64>,
    reduction: Reduction,
) -> Result<(Tensor, [Tensor; 2])> {
    let largest = match own.is_empty() {
        true => scalar::full(&classes.size(), f64::NEG_INFINITY, (Kind::Float, logits.device()))?,
        false => logits.f_amax([-1i64], false)?,
    };
    group.all_reduce(&largest, ReduceOp::Max)?;
    let shifted = logits.f_sub(&largest.f_unsqueeze(-1)?)?;
    let is_own =
        scalar::ge(classes, own.start)?.f_logical_and(&scalar::lt(classes, own.end)?)?.f_logical_and(is_counted)?;
    let place = scalar::add(classes, -own.start)?.f_mul(&is_own.f_to_kind(Kind::Int64)?)?.f_unsqueeze(-1)?;
    let target = shifted.f_gather(-1, &place, false)?.f_squeeze_dim(-1)?;
    let zero = Tensor::f_zeros([0i64; 0], (Kind::Float, logits.device()))?;
    let target = target.f_where_self(&is_own, &zero)?;
    let mut exponentials = shifted;
    let _ = exponentials.f_exp_()?;
    let sums = Tensor::f_stack(&[exponentials.f_sum_dim_intlist([-1i64].as_slice(), false, Kind::Float)?, target], 0)?;
    group.all_reduce(&sums, ReduceOp::Sum)?;
    let (sum, target) = (sums.f_select(0, 0)?, sums.f_select(0, 1)?);
    let losses = sum.f_log()?.f_sub(&target)?.f_where_self(is_counted, &zero)?;
    let mut weight = is_counted.f_to_kind(Kind::Float)?;
    let loss = match reduction {
        Reduction::None | Reduction::Other(_) => losses,
        Reduction::Sum => losses.f_sum(Kind::Float)?,
        Reduction::Mean => {
            let count = weight.f_sum(Kind::Float)?;
            let _ = weight.f_div_(&count)?;
            losses.f_sum(Kind::Float)?.f_div(&count)?
        }
    };
    let _ = exponentials.f_div_(&sum.f_unsqueeze(-1)?)?;
    let is_own = is_own.f_to_kind(Kind::Float)?.f_unsqueeze(-1)?;
    let _ = exponentials.f_scatter_add_(-1, &place, &is_own.f_neg()?)?;
    Ok((loss, [exponentials, weight]))
}

/// A rank looks at its own classes alone, and so would not miss one that does not exist.
fn check_classes(classes: &Tensor, is_counted: &Tensor, num_classes: i64) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let is_wrong = scalar::lt(classes, 0)?.f_logical_or(&scalar::ge(classes, num_classes)?)?;
    match is_wrong.f_logical_and(is_counted)?.f_any()?.f_int64_value(&[])? {
        0 => Ok(()),
        _ => Err(NnError::NoSuchClass { num_classes }.into()),
    }
}
