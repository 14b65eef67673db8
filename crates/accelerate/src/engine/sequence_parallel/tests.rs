//! Attention that ranks compute together, beside that of one rank, and what they learn of a sequence.

use super::Sequence;
use crate::error::Result;
use crate::nn::{AttentionKernel, AttentionOptions, DenseAttention, DividedSequence};
use crate::{Accelerator, ParallelismConfig, testing};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

/// Numbers that depend on the place alone, the same on all ranks.
fn heads(shape: [i64; 4], seed: f64, kind: Kind) -> Tensor {
    let numel: i64 = shape.iter().product();
    // In float32 sums of large numbers round in places that count here.
    let size = if kind == Kind::Double { 1.5 } else { 0.5 };
    let values = (Tensor::arange(numel, (Kind::Double, Device::Cpu)) * 0.37 + seed).sin() * size;
    values.view(shape).to_kind(kind)
}

#[derive(Clone, Copy)]
struct Shape {
    batch: i64,
    num_heads: i64,
    num_key_value_heads: i64,
    length: i64,
    head_dim: i64,
    value_dim: i64,
}

const PLAIN: Shape = Shape { batch: 2, num_heads: 12, num_key_value_heads: 12, length: 24, head_dim: 5, value_dim: 5 };
const GROUPED: Shape = Shape { num_key_value_heads: 2, ..PLAIN };
const ODD: Shape = Shape { batch: 1, length: 120, head_dim: 3, value_dim: 7, ..PLAIN };

#[derive(Clone, Copy, Debug)]
enum Looks {
    Everywhere,
    Causal,
    /// Two rows, the first with less tokens; causal as well.
    Padded,
    /// A window of five tokens.
    Window,
    /// Numbers added to the scores, others for each head.
    Biased,
}

/// Which query may look at which key: all rows of the mask.
fn mask(looks: Looks, shape: Shape, kind: Kind) -> Option<Tensor> {
    let ones = Tensor::ones([shape.length, shape.length], (Kind::Bool, Device::Cpu));
    match looks {
        Looks::Everywhere | Looks::Causal => None,
        Looks::Padded => {
            let is_token = Tensor::arange(shape.length, (Kind::Int64, Device::Cpu)).ge(3).view([1, 1, 1, -1]);
            let all = Tensor::ones([1, 1, 1, shape.length], (Kind::Bool, Device::Cpu));
            let rows = if shape.batch == 2 { Tensor::cat(&[is_token, all], 0) } else { is_token };
            let own = ones.tril(0).triu(0);
            Some(ones.tril(0).logical_and(&rows).logical_or(&own))
        }
        Looks::Window => Some(ones.tril(0).triu(-4).view([1, 1, shape.length, shape.length])),
        Looks::Biased => Some(heads([1, shape.num_heads, shape.length, shape.length], 0.2, kind)),
    }
}

/// Output and gradients of attention, of whole sequences.
fn dense(looks: Looks, shape: Shape, kind: Kind) -> [Tensor; 4] {
    let [query, key, value] = inputs(shape, kind).map(|heads| heads.set_requires_grad(true));
    let mask = mask(looks, shape, kind);
    let options = AttentionOptions {
        attn_mask: mask.as_ref(),
        is_causal: matches!(looks, Looks::Causal),
        scale: Some(0.4),
        ..Default::default()
    };
    let output = DenseAttention.attention(&query, &key, &value, options).unwrap();
    (&output * weight(&output)).sum(None).backward();
    [output.detach(), query.grad(), key.grad(), value.grad()]
}

fn inputs(shape: Shape, kind: Kind) -> [Tensor; 3] {
    let Shape { batch, num_heads, num_key_value_heads, length, head_dim, value_dim } = shape;
    [
        heads([batch, num_heads, length, head_dim], 0.0, kind),
        heads([batch, num_key_value_heads, length, head_dim], 1.0, kind),
        heads([batch, num_key_value_heads, length, value_dim], 2.0, kind),
    ]
}

/// What the output is multiplied by, so that each of its numbers has another gradient.
fn weight(output: &Tensor) -> Tensor {
    let (batch, num_heads, length, width) = output.size4().unwrap();
    heads([batch, num_heads, length, width], 0.5, output.kind())
}

/// The same, put together from the ranks' parts.
fn divided(accelerator: &Accelerator, looks: Looks, shape: Shape, kind: Kind) -> Result<[Tensor; 4]> {
    let settings = &accelerator.config().parallelism;
    let sequence = Sequence::divide(&accelerator.session().mesh, settings, shape.length as usize)?.unwrap();
    let own = |whole: &Tensor| sequence.own(whole, 2).unwrap().contiguous();
    let [query, key, value] = inputs(shape, kind).map(|whole| own(&whole).set_requires_grad(true));
    let queries = sequence.mask_positions(Device::Cpu)?;
    let mask = mask(looks, shape, kind).map(|mask| mask.index_select(2, &queries));
    let options = AttentionOptions {
        attn_mask: mask.as_ref(),
        is_causal: matches!(looks, Looks::Causal),
        scale: Some(0.4),
        ..Default::default()
    };
    let output = sequence.attention(&query, &key, &value, options)?;
    let width = Shape { head_dim: shape.value_dim, ..shape };
    let whole = Tensor::zeros([width.batch, width.num_heads, width.length, width.head_dim], (kind, Device::Cpu));
    let loss = (&output * own(&weight(&whole))).sum(None);
    torch_ext::autograd::backward(&[&loss], None, Default::default())?;
    let whole = |tensor: &Tensor| sequence.gather(tensor, 2);
    Ok([whole(&output)?, whole(&query.grad())?, whole(&key.grad())?, whole(&value.grad())?])
}

fn axes(axis: &str, size: usize, strategy: &str) -> ParallelismConfig {
    let (cp_size, sp_size) = if axis == "sp" { (None, Some(size)) } else { (Some(size), None) };
    ParallelismConfig { cp_size, sp_size, cp_comm_strategy: Some(strategy.to_owned()), ..Default::default() }
}

/// In float64, so that nothing but rounding in its last digits can differ, and in float32.
#[rstest]
fn attention_of_ranks_is_that_of_one(
    #[values(("sp", "allgather"), ("cp", "allgather"), ("cp", "alltoall"))] (axis, strategy): (&str, &str),
    #[values(1, 2, 3, 4)] num_ranks: usize,
) {
    let builder = Accelerator::builder().parallelism_config(axes(axis, num_ranks, strategy));
    let all = [Looks::Everywhere, Looks::Causal, Looks::Padded, Looks::Window, Looks::Biased];
    testing::ranks(num_ranks, builder, |accelerator| {
        // One rank divides nothing.
        if num_ranks == 1 {
            assert!(Sequence::divide(&accelerator.session().mesh, &accelerator.config().parallelism, 24)?.is_none());
            return Ok(());
        }
        for (shape, name) in [(PLAIN, "plain"), (GROUPED, "grouped"), (ODD, "odd")] {
            for looks in all {
                for (kind, tolerance) in [(Kind::Double, 1e-13), (Kind::Float, 1e-6)] {
                    let found = divided(&accelerator, looks, shape, kind)?;
                    for (index, (found, wanted)) in found.iter().zip(dense(looks, shape, kind)).enumerate() {
                        assert_eq!(found.size(), wanted.size());
                        let size = wanted.abs().max().double_value(&[]).max(1.0);
                        let largest = (found - &wanted).abs().max().double_value(&[]) / size;
                        assert!(
                            largest <= tolerance,
                            "{name} {looks:?} {kind:?}: tensor {index} differs by {largest:e}"
                        );
                    }
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

#[rstest]
#[case("sp")]
#[case("cp")]
fn what_ranks_learn_of_a_sequence(#[case] axis: &str) {
    let builder = Accelerator::builder().parallelism_config(axes(axis, 2, "allgather"));
    testing::ranks(2, builder, |accelerator| {
        let settings = &accelerator.config().parallelism;
        let sequence = Sequence::divide(&accelerator.session().mesh, settings, 8)?.unwrap();
        let labels = Tensor::from_slice2(&[[10i64, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22, 23, 24, 25, 26, 27]]);
        let own = sequence.own(&labels, 1)?;
        assert_eq!(sequence.gather(&own, -1)?, labels);
        let shifted = sequence.gather(&sequence.shift_labels(&own, -100)?, 1)?;
        let wanted = Tensor::from_slice2(&[[11i64, 12, 13, 14, 15, 16, 17, -100], [21, 22, 23, 24, 25, 26, 27, -100]]);
        assert_eq!(shifted, wanted);
        let positions = sequence.positions(4, Device::Cpu)?;
        assert_eq!(labels.select(0, 0).index_select(0, &positions), own.select(0, 0));
        // Ranks count different numbers of tokens: 1 + 2 of them add up to 3 * 1 + 5 * 2.
        let rank = accelerator.process_index() as f64;
        let sum = Tensor::from(3.0 + 2.0 * rank).set_requires_grad(true);
        let mean = sequence.mean(&(&sum * (1.0 + rank)), &Tensor::from(1.0 + rank))?;
        assert!((mean.double_value(&[]) - 13.0 / 3.0).abs() < 1e-12);
        torch_ext::autograd::backward(&[&mean], None, Default::default())?;
        assert!((sum.grad().double_value(&[]) - 2.0 * (1.0 + rank) / 3.0).abs() < 1e-12);
        let wrong = sequence.positions(5, Device::Cpu).unwrap_err().to_string();
        assert!(wrong.contains("5 tokens are given where this rank has 4 of a sequence of 8"), "{wrong}");
        Ok(())
    })
    .unwrap();
}
