//! Ranks that divide sequences, as a program sees them: settings, buffers, layers and what is refused. Models as a whole are tested in
//! `crates/models/tests/sequence_parallel.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{
    AttentionKernel, AttentionMask, AttentionOptions, BatchNorm1d, CheckpointOptions, DenseAttention, Init, Linear,
    Module, ModuleFn, MultiheadAttention, MultiheadAttentionConfig, ParamStore, ScaledDotProductAttention, checkpoint,
};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, ContextParallelOptions, LocalSGD, ParallelismConfig, Result, testing,
};
use rstest::rstest;
use std::sync::Arc;

fn builder(axis: &str, size: usize) -> AcceleratorBuilder {
    let (strategy, cp_size, sp_size) = match axis {
        "sp" => ("allgather", None, Some(size)),
        "ring" => ("alltoall", Some(size), None),
        _ => ("allgather", Some(size), None),
    };
    let cp_comm_strategy = Some(strategy.to_owned());
    Accelerator::builder().parallelism_config(ParallelismConfig {
        cp_size,
        sp_size,
        cp_comm_strategy,
        ..Default::default()
    })
}

type Inputs = (Tensor, Tensor);

/// Self-attention with a residual; inputs are `[batch, length, 8]` and what fills up rows `[batch, length]`, true there.
fn attention(is_causal: bool, is_padded: bool) -> impl Module<Input = Inputs, Output = Tensor> {
    let store = ParamStore::new(Device::Cpu);
    let config = MultiheadAttentionConfig { batch_first: true, ..Default::default() };
    let layer = MultiheadAttention::new(store.root() / "attention", 8, 4, config).unwrap();
    for (index, param) in store.parameters().iter().enumerate() {
        let values = Tensor::arange(param.numel() as i64, (Kind::Double, Device::Cpu)) * 0.7 + index as f64;
        param.copy_(&(values.sin() * 0.4).reshape(param.shape())).unwrap();
    }
    ModuleFn::new(&store, move |(x, padding): &Inputs| {
        let key_padding_mask = is_padded.then_some(padding);
        let mask = AttentionMask { is_causal, key_padding_mask, ..Default::default() };
        Ok(layer.forward(x, x, x, mask)? + x)
    })
}

fn inputs(length: i64) -> Inputs {
    let x = Tensor::arange(2 * length * 8, (Kind::Float, Device::Cpu)).sin().view([2, length, 8]);
    let columns = Tensor::arange(length, (Kind::Int64, Device::Cpu)).view([1, length]);
    (x, columns.ge_tensor(&Tensor::from_slice(&[length, length - 2]).view([2, 1])))
}

/// Outputs of whole sequences, and all gradients in a row.
fn outcome(accelerator: &Accelerator, is_causal: bool, is_padded: bool) -> Result<Vec<f64>> {
    let model = accelerator.prepare(attention(is_causal, is_padded))?;
    let output = accelerator.maybe_context_parallel(&inputs(12), &Default::default(), |own| {
        let output = model.forward(&own)?;
        // The sum over all tokens: gradients of ranks are averaged afterwards.
        let num_ranks = accelerator.num_processes() as f64;
        accelerator.backward(&(output.square().sum(None) * num_ranks))?;
        accelerator.gather_sequence(&output.detach(), 1)
    })?;
    let mut values = Vec::<f64>::try_from(output.to_kind(Kind::Double).reshape([-1]))?;
    for param in model.params().parameters() {
        values.extend(Vec::<f64>::try_from(param.grad().unwrap().to_kind(Kind::Double).reshape([-1]))?);
    }
    Ok(values)
}

#[rstest]
fn multi_head_attention_is_that_of_one_rank(
    #[values("sp", "cp", "ring")] axis: &str,
    #[values((false, false), (true, false), (false, true), (true, true))] (is_causal, is_padded): (bool, bool),
) {
    let wanted = testing::ranks(1, Default::default(), |accelerator| outcome(&accelerator, is_causal, is_padded));
    let wanted = wanted.unwrap().remove(0);
    let found = testing::ranks(2, builder(axis, 2), |accelerator| outcome(&accelerator, is_causal, is_padded));
    for own in found.unwrap() {
        assert_eq!(own.len(), wanted.len());
        // The gradient of the keys' bias is none but for rounding.
        let size = wanted.iter().fold(0f64, |size, value| size.max(value.abs()));
        for (found, wanted) in own.iter().zip(&wanted) {
            assert!((found - wanted).abs() <= 1e-6 * size, "{found} {wanted} of {size}");
        }
    }
}

/// Settings come from the environment of a launcher, too; those of axes of one rank change nothing.
#[test]
fn buffers_are_divided_along_their_dims() {
    let found = testing::ranks(2, builder("cp", 2), |accelerator| {
        assert_eq!(accelerator.mesh().to_string(), "cp 2");
        let tokens = Tensor::arange(8, (Kind::Int64, Device::Cpu));
        let buffers = (tokens.view([1, 8]), Some(vec![tokens.view([8, 1])]));
        let options = ContextParallelOptions { buffer_seq_dims: vec![1, -2] };
        let own = accelerator.maybe_context_parallel(&buffers, &options, Ok)?;
        assert_eq!(buffers.0.size(), [1, 8], "buffers stay as they are");
        let lists = own.1.unwrap();
        assert_eq!(lists[0].view([1, 4]), own.0);
        Ok((accelerator.context_parallel_rank(), Vec::<i64>::try_from(own.0.view([-1]))?))
    });
    assert_eq!(found.unwrap(), [(0, vec![0, 1, 6, 7]), (1, vec![2, 3, 4, 5])]);
    let axes = ParallelismConfig { cp_size: Some(1), dp_replicate_size: Some(2), ..Default::default() };
    testing::ranks(2, Accelerator::builder().parallelism_config(axes), |accelerator| {
        let whole = inputs(7);
        let own = accelerator.maybe_context_parallel(&whole, &Default::default(), Ok)?;
        assert_eq!(own.0, whole.0);
        assert_eq!(accelerator.gather_sequence(&own.0, 1)?, whole.0);
        Ok(())
    })
    .unwrap();
}

fn within<T>(accelerator: &Accelerator, body: impl FnOnce(&Inputs) -> Result<T>) -> Result<T> {
    accelerator.maybe_context_parallel(&inputs(8), &Default::default(), |own| body(&own))
}

type Case = (&'static str, &'static str, fn(&Accelerator) -> Result<()>);

const CASES: [Case; 16] = [
    ("sp", "a sequence of 7 tokens", |it| it.maybe_context_parallel(&inputs(7), &Default::default(), |_| Ok(()))),
    ("cp", "for example to 8", |it| it.maybe_context_parallel(&inputs(6), &Default::default(), |_| Ok(()))),
    ("sp", "maybe_context_parallel is called within maybe_context_parallel", |it| {
        within(it, |_| within(it, |_| Ok(())))
    }),
    ("cp", "gather_for_metrics is called within", |it| within(it, |own| it.gather_for_metrics(&own.0)).map(drop)),
    ("cp", "prepare is called within", |it| within(it, |_| it.prepare(attention(false, false))).map(drop)),
    ("sp", "buffer_seq_dims has 3 dims for 2 tensors", |it| {
        let options = ContextParallelOptions { buffer_seq_dims: vec![1, 1, 1] };
        it.maybe_context_parallel(&inputs(8), &options, |_| Ok(()))
    }),
    ("sp", "does not have the 8 tokens of the first one along dim 1", |it| {
        let buffers = (inputs(8).0, inputs(6).0);
        it.maybe_context_parallel(&buffers, &Default::default(), |_| Ok(()))
    }),
    ("sp", "has no dim 1", |it| {
        it.maybe_context_parallel(&Tensor::from_slice(&[1i64, 2]), &Default::default(), |_| Ok(()))
    }),
    ("cp", "have to give it the same input", |it| {
        it.maybe_context_parallel(
            &(inputs(8).1.to_kind(Kind::Int64) + it.process_index() as i64),
            &Default::default(),
            |_| Ok(()),
        )
    }),
    ("sp", "attn_mask of MultiheadAttention", |it| {
        let store = ParamStore::new(Device::Cpu);
        let config = MultiheadAttentionConfig { batch_first: true, ..Default::default() };
        let layer = MultiheadAttention::new(store.root(), 8, 2, config)?;
        let model = it.prepare(ModuleFn::new(&store, move |x: &Tensor| {
            let mask = Tensor::zeros([8, 8], (Kind::Float, Device::Cpu));
            layer.forward(x, x, x, AttentionMask { attn_mask: Some(&mask), ..Default::default() })
        }))?;
        within(it, |own| model.forward(&own.0)).map(drop)
    }),
    ("cp", "dropout_p 0.5", |it| attend(it, AttentionOptions { dropout_p: 0.5, ..Default::default() }, false)),
    ("cp", "take ScaledDotProductAttention::kernel before the segment", |it| {
        attend(it, AttentionOptions::default(), true)
    }),
    ("sp", "does not compute attention by nn::ScaledDotProductAttention", |it| {
        let store = ParamStore::new(Device::Cpu);
        let layer = Linear::new(store.root(), 8, 8, Default::default())?;
        it.prepare(ModuleFn::new(&store, move |x: &Tensor| layer.forward(x))).map(drop)
    }),
    ("sp", "norm is a BatchNorm1d, which mixes tokens", |it| {
        let store = ParamStore::new(Device::Cpu);
        let (_attention, norm) = (
            ScaledDotProductAttention::new(&store.root()),
            BatchNorm1d::new(store.root() / "norm", 8, Default::default())?,
        );
        it.prepare(ModuleFn::new(&store, move |x: &Tensor| norm.forward(x))).map(drop)
    }),
    ("cp", "LocalSGD is not available where ranks divide sequences", |it| {
        LocalSGD::new(it, &it.prepare(attention(false, false))?, 2).map(drop)
    }),
    ("sp", "join_uneven_inputs is not available where ranks divide sequences", |it| {
        it.join_uneven_inputs(&it.prepare(attention(false, false))?, Default::default(), || Ok(()))
    }),
];

/// The text is the same on all ranks, and comes long before the deadline.
#[test]
fn what_cannot_be_is_named_on_every_rank() {
    for (axis, words, case) in CASES {
        let texts = testing::ranks(2, builder(axis, 2), |accelerator| {
            let error = case(&accelerator).expect_err(words);
            Ok((error.is_timeout(), error.to_string()))
        });
        for (is_timeout, text) in texts.unwrap() {
            assert!(!is_timeout && text.contains(words), "{text}");
        }
    }
}

/// Attention of one head in a model of its own, in a segment that is computed twice or not.
fn attend(accelerator: &Accelerator, options: AttentionOptions<'static>, is_checkpointed: bool) -> Result<()> {
    let store = ParamStore::new(Device::Cpu);
    let layer = ScaledDotProductAttention::new(&store.root());
    let scale = store.root().param("scale", ([1], Init::Ones))?;
    let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| {
        let heads = (x * scale.get()?).unsqueeze(1);
        if !is_checkpointed {
            return layer.forward(&heads, &heads, &heads, options);
        }
        let layer = layer.clone();
        checkpoint(&[&heads], CheckpointOptions::default(), move |inputs| {
            layer.forward(&inputs[0], &inputs[0], &inputs[0], AttentionOptions::default())
        })
    }))?;
    within(accelerator, |own| model.forward(&own.0)).map(drop)
}

/// A failure within the closure leaves models as they were before it.
#[test]
fn models_compute_whole_sequences_after_a_failure() {
    testing::ranks(2, builder("sp", 2), |accelerator| {
        let model = accelerator.prepare(attention(true, false))?;
        let before = model.forward(&inputs(8))?;
        let failed = within(&accelerator, |_| Err::<(), _>(accelerate::Error::other("of the program's own")));
        assert!(failed.unwrap_err().to_string().contains("own"));
        assert_eq!(model.forward(&inputs(8))?, before);
        Ok(())
    })
    .unwrap();
}

#[test]
fn all_sequences_have_the_length_that_was_said() {
    let axes = ParallelismConfig {
        sp_size: Some(2),
        sp_seq_length: Some(8),
        sp_seq_length_is_variable: Some(false),
        ..Default::default()
    };
    testing::ranks(2, Accelerator::builder().parallelism_config(axes), |accelerator| {
        within(&accelerator, |_| Ok(()))?;
        let other = accelerator.maybe_context_parallel(&inputs(4), &Default::default(), |_| Ok(())).unwrap_err();
        assert!(other.is_data() && other.to_string().contains("sp_seq_length is 8"), "{other}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_kernel_of_the_programs_own_is_not_replaced() {
    testing::ranks(2, builder("cp", 2), |accelerator| {
        let model = accelerator.prepare(attention(false, false))?;
        #[derive(Debug)]
        struct Own;
        impl AttentionKernel for Own {
            fn attention(&self, q: &Tensor, k: &Tensor, v: &Tensor, options: AttentionOptions<'_>) -> Result<Tensor> {
                DenseAttention.attention(q, k, v, options)
            }
        }
        model.params().set_attention_kernel(Arc::new(Own));
        let refused = within(&accelerator, |own| model.forward(own)).unwrap_err().to_string();
        assert!(refused.contains("a kernel of the program's own"), "{refused}");
        Ok(())
    })
    .unwrap();
}
