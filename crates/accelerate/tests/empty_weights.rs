//! Models whose parameters get their memory late are the models that they would have been at once.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::*;
use accelerate::optim::AdamW;
use accelerate::tch::{self, Device, Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, AutoWrapPolicy, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin,
    Result, ShardingStrategy, testing,
};
use std::sync::{Arc, Mutex};

/// Every layer that draws, and those that overwrite what they have drawn.
fn layers(store: &ParamStore) -> Result<impl Module<Input = Tensor, Output = Tensor> + use<>> {
    let root = store.root();
    let embed = Embedding::new(&root / "embed", 7, 6, EmbeddingConfig { padding_idx: Some(2), ..Default::default() })?;
    let attention = MultiheadAttention::new(&root / "attention", 6, 2, Default::default())?;
    let separate = MultiheadAttentionConfig { kdim: Some(4), ..Default::default() };
    MultiheadAttention::new(&root / "unused", 6, 2, separate)?;
    Conv2d::new(&root / "conv", 3, 2, [3, 3], Default::default())?;
    BatchNorm2d::new(&root / "norm", 3, Default::default())?;
    let up = Linear::new(&root / "blocks" / 0, 6, 5, Default::default())?;
    let down = Linear::new(&root / "blocks" / 1, 5, 7, Default::default())?;
    let scale = root.param("scale", Tensor::from(2f32))?;
    root.param("temperature", ([], Init::Normal { mean: 1.0, std: 0.1 }))?;
    root.param("nothing", ([0, 3], Init::Ones))?;
    (&root / "head").alias("weight", &embed.weight)?;
    Ok(ModuleFn::new(store, move |tokens: &Tensor| {
        let x = embed.forward(tokens)?.f_unsqueeze(1)?;
        let x = attention.forward(&x, &x, &x, Default::default())?.f_squeeze_dim(1)?;
        Ok(down.forward(&up.forward(&x)?.f_relu()?)? * scale.get()?)
    }))
}

fn sharded(sharding_strategy: ShardingStrategy) -> AcceleratorBuilder {
    Accelerator::builder().fsdp_plugin(FullyShardedDataParallelPlugin {
        sharding_strategy: Some(sharding_strategy),
        auto_wrap_policy: Some(AutoWrapPolicy::TransformerBasedWrap),
        ..Default::default()
    })
}

fn assert_same(found: &StateDict, wanted: &StateDict, context: &str) {
    assert_eq!(found.names().collect::<Vec<_>>(), wanted.names().collect::<Vec<_>>());
    for (name, wanted) in wanted.iter() {
        let found = found.get(name).unwrap();
        assert_eq!((found.size(), found.kind()), (wanted.size(), wanted.kind()), "{name}, {context}");
        assert_eq!(found, wanted, "{name}, {context}");
    }
}

#[test]
fn the_model_is_the_same_to_the_bit() {
    tch::manual_seed(5);
    let eager = ParamStore::new(Device::Cpu);
    layers(&eager).unwrap();
    let after = Tensor::rand([3], (Kind::Float, Device::Cpu));
    tch::manual_seed(5);
    let deferred = ParamStore::init_empty_weights(Device::Cpu);
    layers(&deferred).unwrap();
    deferred.materialize().unwrap();
    assert_same(&deferred.state_dict().unwrap(), &eager.state_dict().unwrap(), "alone");
    assert_eq!(Tensor::rand([3], (Kind::Float, Device::Cpu)), after, "as many numbers were drawn");
    deferred.materialize().unwrap();
    assert_same(&deferred.state_dict().unwrap(), &eager.state_dict().unwrap(), "materialised twice");
}

#[test]
fn the_model_is_that_of_the_main_process_on_every_number_of_ranks() {
    tch::manual_seed(9);
    let eager = ParamStore::new(Device::Cpu);
    layers(&eager).unwrap();
    let wanted = Mutex::new(eager.state_dict().unwrap());
    for strategy in [ShardingStrategy::NoShard, ShardingStrategy::FullShard, ShardingStrategy::OptimizerState] {
        for world_size in 1..=3 {
            let unused = DistributedDataParallelKwargs { find_unused_parameters: Some(true), ..Default::default() };
            let builder = sharded(strategy).kwargs_handler(unused);
            tch::manual_seed(9);
            testing::ranks(world_size, builder, |accelerator| {
                let store = ParamStore::init_empty_weights(accelerator.device());
                let module = layers(&store)?;
                // Ranks are threads here and share a generator: only one of them may draw.
                if !accelerator.is_main_process() {
                    store.set_param_init_fn(|_, tensor| init::constant_(tensor, 7.0));
                }
                let frozen = store.get("blocks.0.bias").unwrap();
                frozen.set_requires_grad(false)?;
                let optimizer = AdamW::new(&store, 0.1)?;
                let (model, mut optimizer) = accelerator.prepare((module, optimizer))?;
                let state = store.state_dict()?;
                assert_same(&state, &wanted.lock().unwrap(), &format!("{strategy} on {world_size} ranks"));
                let loss = model.forward(&Tensor::from_slice(&[0i64, 1, 2]))?.f_sum(None)?;
                accelerator.backward(&loss)?;
                optimizer.step()?;
                assert!(!frozen.requires_grad() && frozen.grad().is_none());
                let weight = store.get("blocks.1.weight").unwrap();
                assert_ne!(&weight.get().unwrap(), wanted.lock().unwrap().get("blocks.1.weight").unwrap(), "it learns");
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn no_more_than_one_parameter_is_whole_at_a_time() {
    // The threads of Gloo hold what they have sent for a moment longer.
    let plugin = FullyShardedDataParallelPlugin { sync_module_states: Some(false), ..Default::default() };
    let builder = Accelerator::builder().fsdp_plugin(plugin);
    testing::ranks(2, builder, |accelerator| {
        let store = ParamStore::init_empty_weights(accelerator.device());
        let module = layers(&store)?;
        let seen: Arc<Mutex<Vec<Tensor>>> = Arc::default();
        let all = Arc::clone(&seen);
        store.set_param_init_fn(move |_, tensor| {
            let mut seen = all.lock().unwrap();
            // Only this list looks at those before.
            let in_use: Vec<_> = seen.iter().map(torch_ext::storage::storage_use_count).collect();
            assert!(in_use.iter().all(|&count| count == 1), "{in_use:?}");
            // Not a view, which would keep the tensor.
            seen.push(Tensor::empty([0], (tensor.kind(), tensor.device())).set_source_tensor(tensor));
            init::ones_(tensor)
        });
        let _model = accelerator.prepare(module)?;
        assert_eq!(seen.lock().unwrap().len(), store.parameters().len() - 1, "all but one, which was made of a tensor");
        Ok(())
    })
    .unwrap();
}

#[test]
fn what_needs_memory_says_so() {
    let store = ParamStore::init_empty_weights(Device::Cpu);
    let linear = Linear::new(store.root(), 2, 2, Default::default()).unwrap();
    let other = ParamStore::new(Device::Cpu);
    Linear::new(other.root(), 2, 2, Default::default()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::builder().cpu(true).build().unwrap();
    accelerator.save_model(&other, folder.path(), &Default::default()).unwrap();
    let copied = linear.weight.copy_(&Tensor::from(1f32));
    let loaded = store.load_state_dict(&other.state_dict().unwrap(), Default::default()).map(drop);
    let read = accelerator.load_checkpoint_in_model(&store, folder.path()).map(drop);
    let saved = accelerator.save_model(&store, folder.path().join("new"), &Default::default());
    for result in [copied, loaded, read, saved] {
        let text = result.unwrap_err().to_string();
        assert!(text.contains("has no memory yet"), "{text}");
    }
    assert!(
        linear.forward(&Tensor::ones([2], (Kind::Float, Device::Cpu))).unwrap().isnan().all().int64_value(&[]) == 1
    );
}

#[test]
fn it_may_become_another_kind_first() {
    let store = ParamStore::init_empty_weights(Device::Cpu);
    let linear = Linear::new(store.root(), 1000, 1000, Default::default()).unwrap();
    store.to_kind(Kind::BFloat16).unwrap();
    store.to_device(Device::Cpu).unwrap();
    assert_eq!(
        (linear.weight.kind(), linear.weight.local().stride()),
        (Kind::BFloat16, vec![0, 0]),
        "still without memory"
    );
    store.materialize().unwrap();
    assert_eq!((linear.weight.kind(), linear.weight.shape()), (Kind::BFloat16, vec![1000, 1000]));
}
