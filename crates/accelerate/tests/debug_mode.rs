//! Debug mode: every call of a group is compared before it is made, also those of engines, objects and barriers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::data::{DataLoader, TensorDataset};
use accelerate::nn::{Init, Linear, ModuleFn, ParamStore};
use accelerate::optim::{AdamW, clip_grad_norm_};
use accelerate::testing::ranks;
use accelerate::{
    Accelerator, AcceleratorBuilder, AutoWrapPolicy, DataLoaderConfiguration, FullyShardedDataParallelPlugin, ReduceOp,
    Result,
};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

fn floats(count: usize) -> Tensor {
    Tensor::ones([count as i64], (Kind::Float, Device::Cpu))
}

fn debug() -> AcceleratorBuilder {
    Accelerator::builder().debug(true)
}

fn sharded() -> FullyShardedDataParallelPlugin {
    let auto_wrap_policy = Some(AutoWrapPolicy::TransformerBasedWrap);
    // What is read out of another rank's memory is no call.
    FullyShardedDataParallelPlugin { auto_wrap_policy, direct_all_gather: Some(false), ..Default::default() }
}

type Call = fn(&Accelerator) -> Result<()>;

fn sum(accelerator: &Accelerator) -> Result<()> {
    accelerator.group().all_reduce(&floats(2), ReduceOp::Sum)
}

fn barrier(accelerator: &Accelerator) -> Result<()> {
    accelerator.wait_for_everyone()
}

fn forward(accelerator: &Accelerator) -> Result<()> {
    let store = ParamStore::new(accelerator.device());
    let linear = Linear::new(store.root() / "layers" / 0, 2, 2, Default::default())?;
    let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| linear.forward(x)))?;
    if accelerator.is_main_process() {
        drop(model.forward(&floats(2))?)
    } else {
        accelerator.wait_for_everyone()?
    }
    Ok(())
}

fn save(accelerator: &Accelerator) -> Result<()> {
    let store = ParamStore::new(accelerator.device());
    let weight = store.root().param("weight", ([4], Init::Ones))?;
    let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| Ok(weight.get()? * x)))?;
    match accelerator.is_main_process() {
        true => accelerator.save_model(&model, "never written", &Default::default()),
        false => accelerator.wait_for_everyone(),
    }
}

/// Rank 0 makes the first call, rank 1 the second. Both learn of both.
#[test]
fn calls_that_differ_are_listed_on_all_ranks() {
    let rows: [(Call, Call, &str); 10] = [
        (sum, barrier, "rank 0: all_reduce of [2] Float (Sum); rank 1: barrier."),
        (
            sum,
            |accelerator| accelerator.group().all_reduce(&floats(3), ReduceOp::Sum),
            "rank 0: all_reduce of [2] Float (Sum); rank 1: all_reduce of [3] Float (Sum).",
        ),
        (
            sum,
            |accelerator| accelerator.group().all_reduce(&floats(2).to_kind(Kind::Int64), ReduceOp::Sum),
            "[2] Float (Sum); rank 1: all_reduce of [2] Int64 (Sum).",
        ),
        (
            sum,
            |accelerator| accelerator.group().all_reduce(&floats(2), ReduceOp::Max),
            "[2] Float (Sum); rank 1: all_reduce of [2] Float (Max).",
        ),
        (
            |accelerator| accelerator.group().broadcast(&floats(2), 0),
            |accelerator| accelerator.group().broadcast(&floats(2), 1),
            "rank 0: broadcast of [2] Float from rank 0; rank 1: broadcast of [2] Float from rank 1.",
        ),
        (
            |accelerator| accelerator.group().all_gather(&floats(2)).map(drop),
            |accelerator| accelerator.group().all_gather_into_tensor(&floats(2)).map(drop),
            "rank 0: all_gather of [2] Float; rank 1: all_gather_into_tensor of [2] Float.",
        ),
        (
            |accelerator| accelerator.group().reduce_scatter_tensor(&floats(2), ReduceOp::Sum).map(drop),
            |accelerator| accelerator.group().reduce_scatter_tensor(&floats(4), ReduceOp::Sum).map(drop),
            "rank 0: reduce_scatter_tensor of [2] Float (Sum); rank 1: reduce_scatter_tensor of [4] Float (Sum).",
        ),
        (
            |accelerator| accelerator.gather_object(&[1]).map(drop),
            |accelerator| accelerator.broadcast_object_list(&mut vec![1], 0),
            "rank 0: all_gather_bytes; rank 1: broadcast_bytes of rank 0.",
        ),
        (
            |accelerator| accelerator.gather(&floats(2)).map(drop),
            barrier,
            "rank 0: gather of [2] Float; rank 1: barrier.",
        ),
        (forward, forward, "rank 0: forward of a model of 2 parameters; rank 1: barrier."),
    ];
    for (first, second, wanted) in rows {
        let texts = ranks(2, debug(), |accelerator| {
            let call = if accelerator.is_main_process() { first } else { second };
            Ok(call(&accelerator).unwrap_err().to_string())
        });
        for text in texts.unwrap() {
            assert!(text.contains("ranks make different calls: ") && text.contains(wanted), "{text}");
        }
    }
}

#[test]
fn calls_of_the_sharded_engine_are_compared() {
    let rows: [(Call, &str); 2] = [(forward, "rank 0: all_gather of unit "), (save, "rank 0: save_model")];
    for (call, wanted) in rows {
        let texts =
            ranks(2, debug().fsdp_plugin(sharded()), |accelerator| Ok(call(&accelerator).unwrap_err().to_string()));
        for text in texts.unwrap() {
            assert!(text.contains(wanted) && text.contains("; rank 1: barrier."), "{text}");
        }
    }
}

/// Trains with everything that ranks send each other; the parameters afterwards.
fn train(builder: AcceleratorBuilder) -> Vec<Vec<f32>> {
    let config = DataLoaderConfiguration { dispatch_batches: Some(true), ..Default::default() };
    let trained = ranks(2, builder.dataloader_config(config).gradient_accumulation_steps(2), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        let layers = [0, 1].map(|layer| Linear::new(store.root() / "layers" / layer, 4, 4, Default::default()));
        for param in store.parameters() {
            let numbers = Tensor::arange(param.shape().iter().product::<i64>(), (Kind::Float, Device::Cpu));
            param.copy_(&(numbers.view(&param.shape()[..]) / 16.0))?;
        }
        let [first, second] = layers;
        let (first, second) = (first?, second?);
        let optimizer = AdamW::new(&store, 0.1)?;
        let model = ModuleFn::new(&store, move |x: &Tensor| second.forward(&first.forward(x)?.f_tanh()?));
        let rows = Tensor::arange(40, (Kind::Float, Device::Cpu)).view([10, 4]) / 40.0;
        let loader = DataLoader::builder(TensorDataset::new(rows)?).batch_size(2).shuffle(false).build()?;
        let (model, mut optimizer, loader) = accelerator.prepare((model, optimizer, loader))?;
        for batch in loader.iter()? {
            let batch = batch?;
            accelerator.accumulate(&model, || {
                let output = model.forward(&batch)?;
                accelerator.backward(&output.square().sum(Kind::Float))?;
                drop(accelerator.gather_for_metrics(&output)?);
                if accelerator.sync_gradients() {
                    accelerator.clip_grad_norm_(&model, 1.0)?;
                }
                optimizer.step()?;
                optimizer.zero_grad()
            })?;
        }
        clip_grad_norm_(&store.parameters(), 1.0)?;
        accelerator.gather_object(&[accelerator.process_index()])?;
        let state = store.state_dict()?;
        Ok(state.iter().flat_map(|(_, tensor)| Vec::<f32>::try_from(tensor.reshape(-1)).unwrap()).collect::<Vec<_>>())
    });
    trained.unwrap()
}

#[rstest]
#[case::replicas(|builder: AcceleratorBuilder| builder)]
#[case::shards(|builder: AcceleratorBuilder| builder.fsdp_plugin(sharded()))]
#[case::shards_that_are_read(|builder: AcceleratorBuilder| {
    builder.fsdp_plugin(FullyShardedDataParallelPlugin { direct_all_gather: Some(true), ..sharded() })
})]
fn equal_calls_go_through_and_change_nothing(#[case] of: fn(AcceleratorBuilder) -> AcceleratorBuilder) {
    let plain = train(of(Accelerator::builder()));
    assert_eq!(train(of(debug())), plain);
    assert_eq!(plain[0], plain[1]);
}

#[test]
fn an_accelerator_of_the_same_run_compares_where_it_asks_for_it() {
    let texts = ranks(2, Accelerator::builder(), |accelerator| {
        let debugging = debug().build_from(&accelerator)?;
        sum(&accelerator)?;
        let call = if accelerator.is_main_process() { sum } else { barrier };
        Ok(call(&debugging).unwrap_err().to_string())
    });
    assert!(texts.unwrap().iter().all(|text| text.contains("rank 1: barrier")));
}
