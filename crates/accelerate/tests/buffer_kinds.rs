//! Buffers of every element type that tensors of a model can have are made equal on all ranks.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{BufferOptions, Linear, ModuleFn, ParamStore};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{Accelerator, Result, testing};
use rstest::rstest;

/// Zeros, but for every other number on rank 0, which is one; `is_transposed`: it does not
/// lie in memory in its order.
fn numbers(rank: usize, shape: &[i64], kind: Kind, is_transposed: bool) -> Tensor {
    let numel: i64 = shape.iter().product();
    let ones = Tensor::arange(numel, (Kind::Int64, Device::Cpu)).remainder(2) * i64::from(rank == 0);
    let tensor = ones.view(shape).to_kind(kind);
    if is_transposed { tensor.transpose(0, -1) } else { tensor }
}

#[rstest]
fn all_ranks_have_the_buffers_of_rank_0(
    #[values(
        Kind::Uint8,
        Kind::Int8,
        Kind::Int16,
        Kind::Int,
        Kind::Int64,
        Kind::Half,
        Kind::BFloat16,
        Kind::Float,
        Kind::Double,
        Kind::ComplexHalf,
        Kind::ComplexFloat,
        Kind::ComplexDouble,
        Kind::Bool,
        Kind::Float8e5m2,
        Kind::Float8e4m3fn,
        Kind::Float8e5m2fnuz,
        Kind::Float8e4m3fnuz
    )]
    kind: Kind,
    // Those of 4 MiB and more travel by themselves.
    #[values(&[], &[0], &[6], &[2, 3], &[2048, 2049])] shape: &[i64],
    #[values(false, true)] is_transposed: bool,
) {
    if is_transposed && shape.len() < 2 {
        return;
    }
    let bytes = |tensor: &Tensor| tensor.contiguous().view([-1]).view_dtype(Kind::Uint8);
    testing::ranks(2, Accelerator::builder().cpu(true), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let head = Linear::new(store.root() / "head", 2, 1, Default::default())?;
        let own = numbers(accelerator.process_index(), shape, kind, is_transposed);
        let buffer = store.root().buffer("buffer", own, BufferOptions { persistent: true })?;
        let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| head.forward(x)))?;
        let wanted = numbers(0, shape, kind, is_transposed);
        let check = |when: &str| -> Result<()> {
            let found = buffer.local();
            assert_eq!((found.kind(), found.size()), (kind, wanted.size()), "{when}");
            assert!(bytes(&found).equal(&bytes(&wanted)), "rank {} {when}", accelerator.process_index());
            Ok(())
        };
        check("after prepare")?;
        // What a rank does to its buffers lasts until the next forward pass that trains.
        tch::no_grad(|| buffer.local().copy_(&numbers(accelerator.process_index(), shape, kind, is_transposed)));
        let _ = model.forward(&Tensor::ones([1, 2], (Kind::Float, Device::Cpu)))?;
        check("after a forward pass")
    })
    .unwrap();
}
