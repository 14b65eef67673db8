//! Adapters on layers that ranks compute together: they are divided as their layers are, and train as on one rank.

use super::model::formula;
use accelerate::lora::{LoraBias, LoraConfig, PeftModel, get_peft_model};
use accelerate::nn::{Conv1D, Dropout, Embedding, Linear, LinearConfig, Module, ModuleFn, ParamStore, StateDict};
use accelerate::optim::AdamW;
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    Accelerator, AcceleratorBuilder, AutoWrapPolicy, Axis, FullyShardedDataParallelPlugin, MixedPrecision, Result,
    ShardingStrategy, TorchTensorParallelPlugin, testing,
};
use rstest::rstest;
use serde_json::{Value, json};

const VOCAB: i64 = 11;
const STEPS: i64 = 4;

/// Two blocks with packed projections and sizes that are odd.
fn model(device: Device) -> Result<(ParamStore, impl Module<Input = Tensor, Output = Tensor>)> {
    let store = ParamStore::new(device);
    let root = store.root();
    let embed = Embedding::new(&root / "embed", VOCAB, 6, Default::default())?;
    // It drops nothing: a plan may divide the tokens from here on.
    let drop = Dropout::new(&root / "drop", 0.0)?;
    let mut blocks = Vec::new();
    for block in 0..2 {
        let path = &root / "blocks" / block;
        let qkv = Conv1D::new(&path / "qkv", 6, 21, Default::default())?;
        let out = Conv1D::new(&path / "out", 7, 6, Default::default())?;
        let up = Linear::new(&path / "up", 6, 9, Default::default())?;
        let gate = Linear::new(&path / "gate", 6, 9, LinearConfig { bias: false, ..Default::default() })?;
        let down = Linear::new(&path / "down", 9, 6, Default::default())?;
        blocks.push((qkv, out, up, gate, down));
    }
    let head = Linear::new(&root / "head", 6, VOCAB, Default::default())?;
    fill(&store)?;
    let module = ModuleFn::new(&store, move |tokens: &Tensor| {
        let mut x = drop.forward(&embed.forward(tokens)?)?;
        for (qkv, out, up, gate, down) in &blocks {
            let packed = qkv.forward(&x)?.f_unflatten(-1, [3, -1])?;
            let mixed = packed.f_select(-2, 0)?.f_mul(&packed.f_select(-2, 1)?.f_sigmoid()?)?;
            x = x.f_add(&out.forward(&mixed.f_add(&packed.f_select(-2, 2)?)?)?)?;
            let inner = up.forward(&x)?.f_gelu("none")?.f_mul(&gate.forward(&x)?)?;
            x = x.f_add(&down.forward(&inner)?)?;
        }
        head.forward(&x)
    });
    Ok((store, module))
}

fn fill(store: &ParamStore) -> Result<()> {
    store
        .parameters()
        .iter()
        .enumerate()
        .try_for_each(|(index, param)| param.copy_(&(formula(&param.shape(), index as f64) * 0.4)))
}

fn plan(head: &str, embed: &str) -> Value {
    json!({
        "embed": embed,
        "blocks.*.qkv": { "style": "packed_colwise", "parts": 3 },
        "blocks.*.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.gate": "colwise",
        "blocks.*.down": "rowwise",
        "head": head,
    })
}

fn divided(degree: usize, plan: Value) -> AcceleratorBuilder {
    let plugin = TorchTensorParallelPlugin {
        tensor_parallel_degree: Some(degree),
        parallelize_plan: plan.as_object().cloned(),
        ..Default::default()
    };
    Accelerator::builder().torch_tp_plugin(plugin)
}

/// Adapters on these layers.
fn on(layers: &[&str]) -> LoraConfig {
    let target_modules = layers.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    LoraConfig { target_modules: Some(target_modules.into()), r: 2, lora_alpha: 4.0, ..Default::default() }
}

/// Adapters on everything, with biases of their own where layers have some.
fn everywhere() -> LoraConfig {
    on(&["embed", "qkv", "out", "up", "gate", "down", "head"])
}

struct Outcome {
    losses: Vec<f64>,
    /// Logits without adapters, before training.
    base: Tensor,
    adapter: StateDict,
    changed: Vec<String>,
}

fn tokens(accelerator: &Accelerator, step: i64) -> Tensor {
    let num_shares = (accelerator.num_processes() / accelerator.mesh().size(Axis::Tp)) as i64;
    let all = (Tensor::arange(20, (Kind::Int64, Device::Cpu)) * 3 + step).remainder(VOCAB).view([4, 5]);
    let share = 4 / num_shares;
    all.narrow(0, accelerator.data_parallel_rank() as i64 * share, share)
}

fn train(accelerator: &Accelerator, config: LoraConfig, check: impl Fn(&PeftModel)) -> Result<Outcome> {
    let (store, module) = model(accelerator.device())?;
    let before: Vec<(String, Tensor)> =
        store.named_parameters().iter().map(|(name, param)| (name.clone(), param.local().copy())).collect();
    let peft = get_peft_model(&store, config)?;
    let is_own = |name: &str| name.contains("lora_") || name.contains("modules_to_save");
    for (index, (_, param)) in store.named_parameters().iter().enumerate() {
        if is_own(param.name()) {
            param.copy_(&(formula(&param.shape(), index as f64) * 0.3))?;
        }
    }
    let (model, mut optimizer) = accelerator.prepare((module, AdamW::new(&store, 0.02)?))?;
    check(&peft);
    let base = peft.disable_adapter(|| model.forward(&tokens(accelerator, 0)))?.detach();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let tokens = tokens(accelerator, step);
        let labels = (&tokens + 1).remainder(VOCAB).view([-1]);
        let loss = model.forward(&tokens)?.view([-1, VOCAB]).cross_entropy_for_logits(&labels);
        losses.push(loss.double_value(&[]));
        accelerator.backward(&loss)?;
        accelerator.clip_grad_norm_(&model, 0.5)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    let after = store.state_dict()?;
    let changed = before.iter().filter(|(name, values)| after.get(name).unwrap() != values);
    let changed = changed.map(|(name, _)| name.clone()).collect();
    let adapter = peft.adapter_state_dict("default")?.into_iter().map(|(name, tensor)| (name, tensor.copy())).collect();
    Ok(Outcome { losses, base, adapter, changed })
}

fn assert_same(outcomes: &[Outcome], one: &Outcome, degree: usize, tolerance: f64) {
    let num_shares = outcomes.len() / degree;
    for (rank, outcome) in outcomes.iter().enumerate() {
        let rows = 4 / num_shares as i64;
        let base = one.base.narrow(0, (rank / degree) as i64 * rows, rows);
        assert!(outcome.base.allclose(&base, 1e-4, tolerance, false), "without adapters");
        for step in 0..STEPS as usize {
            let of_share = |share: usize| outcomes[share * degree].losses[step];
            let mean = (0..num_shares).map(of_share).sum::<f64>() / num_shares as f64;
            assert!((mean - one.losses[step]).abs() < tolerance, "step {step}: {mean} and not {:?}", one.losses);
        }
        assert_eq!(outcome.changed, one.changed);
        assert_eq!(outcome.adapter.len(), one.adapter.len());
        for (name, wanted) in one.adapter.iter() {
            let found = outcome.adapter.get(name).unwrap();
            let apart = (found - wanted).abs().max().double_value(&[]);
            assert!(apart < 10.0 * tolerance, "{name} differs by {apart:e}");
        }
    }
}

fn on_one_rank(config: &LoraConfig) -> Outcome {
    testing::ranks(1, Default::default(), |accelerator| train(&accelerator, config.clone(), |_| ())).unwrap().remove(0)
}

#[rstest]
#[case::everywhere(everywhere())]
#[case::own_biases(LoraConfig { lora_bias: true, ..on(&["qkv", "out", "up", "down"]) })]
#[case::biases(LoraConfig { bias: LoraBias::LoraOnly, ..on(&["qkv", "out", "down"]) })]
#[case::copies(LoraConfig { modules_to_save: vec!["head".into(), "blocks.0.out".into(), "blocks.1.qkv".into()], ..on(&["up", "down"]) })]
fn adapters_of_divided_layers_train_as_on_one_rank(#[case] config: LoraConfig, #[values(1, 2, 3)] degree: usize) {
    let one = on_one_rank(&config);
    assert!(one.losses[0] - one.losses[STEPS as usize - 1] > 0.02, "it learns: {:?}", one.losses);
    for (head, embed) in [("colwise_gather_output", "embedding_rowwise"), ("rowwise_split_input", "embedding_colwise")]
    {
        let found = testing::ranks(degree, divided(degree, plan(head, embed)), |accelerator| {
            train(&accelerator, config.clone(), |_| ())
        });
        assert_same(&found.unwrap(), &one, degree, 2e-6);
    }
}

#[rstest]
#[case::linear_layers(on(&["qkv", "out", "up", "gate", "down", "head"]))]
#[case::own_biases(LoraConfig { lora_bias: true, ..on(&["qkv", "out", "up", "down"]) })]
#[case::biases(LoraConfig { bias: LoraBias::LoraOnly, ..on(&["qkv", "out", "down"]) })]
#[case::copies(LoraConfig { modules_to_save: vec!["head".into(), "blocks.0.out".into(), "blocks.1.qkv".into()], ..on(&["up", "down"]) })]
fn adapters_train_where_ranks_divide_tokens(#[case] config: LoraConfig, #[values(2, 3)] degree: usize) {
    let one = on_one_rank(&config);
    let mut plan = plan("colwise_gather_output", "embedding_rowwise");
    plan["drop"] = json!("sequence_parallel");
    let found =
        testing::ranks(degree, divided(degree, plan), |accelerator| train(&accelerator, config.clone(), |_| ()));
    assert_same(&found.unwrap(), &one, degree, 2e-6);
}

/// Layers that each rank has whole, and uses for some tokens.
#[test]
fn adapters_of_whole_layers_train_where_ranks_divide_tokens() {
    let config = on(&["up", "gate"]);
    let one = on_one_rank(&config);
    let mut plan = plan("colwise_gather_output", "embedding_rowwise");
    plan["drop"] = json!("sequence_parallel");
    plan["blocks.*.up"] = json!("replicated_with_grad_allreduce");
    plan["blocks.*.gate"] = json!("replicated_with_grad_allreduce");
    plan["blocks.*.down"] = json!("rowwise_split_input");
    let found = testing::ranks(2, divided(2, plan), |accelerator| train(&accelerator, config.clone(), |_| ()));
    assert_same(&found.unwrap(), &one, 2, 2e-6);
}

#[rstest]
#[case("embedding_rowwise")]
#[case("sequence_parallel")]
fn a_table_with_adapters_does_not_divide_tokens(#[case] embed: &str) {
    let mut plan = plan("colwise_gather_output", embed);
    plan["drop"] = json!("sequence_parallel");
    let errors = testing::ranks(2, divided(2, plan), |accelerator| {
        let (store, module) = model(accelerator.device())?;
        get_peft_model(&store, everywhere())?;
        Ok(accelerator.prepare(module).err().map(|error| error.to_string()))
    });
    for error in errors.unwrap() {
        assert!(error.as_ref().is_some_and(|text| text.contains("embed, because it has adapters")), "{error:?}");
    }
}

#[rstest]
fn replicas_of_divided_layers_with_adapters_train_as_one(
    #[values(None, Some(ShardingStrategy::FullShard), Some(ShardingStrategy::ShardGradOp))] sharding: Option<
        ShardingStrategy,
    >,
) {
    let config = everywhere();
    let one = on_one_rank(&config);
    let mut builder = divided(2, plan("colwise_gather_output", "embedding_rowwise"));
    if sharding.is_some() {
        let auto_wrap_policy = Some(AutoWrapPolicy::NoWrap);
        let plugin =
            FullyShardedDataParallelPlugin { sharding_strategy: sharding, auto_wrap_policy, ..Default::default() };
        builder = builder.fsdp_plugin(plugin);
    }
    let found = testing::ranks(4, builder, |accelerator| train(&accelerator, config.clone(), |_| ()));
    assert_same(&found.unwrap(), &one, 2, 2e-6);
}

#[test]
fn adapters_of_divided_layers_train_in_half_precision() {
    let config = everywhere();
    let builder = Accelerator::builder().mixed_precision(MixedPrecision::Bf16);
    let one = testing::ranks(1, builder, |accelerator| train(&accelerator, config.clone(), |_| ())).unwrap().remove(0);
    let plan = plan("colwise_gather_output", "embedding_rowwise");
    let found = testing::ranks(2, divided(2, plan).mixed_precision(MixedPrecision::Bf16), |accelerator| {
        train(&accelerator, config.clone(), |_| ())
    });
    assert_same(&found.unwrap(), &one, 2, 2e-2);
}

#[test]
fn of_a_divided_layer_each_rank_has_a_part_of_its_adapter() {
    let plan = plan("colwise_gather_output", "embedding_rowwise");
    testing::ranks(3, divided(3, plan), |accelerator| {
        train(&accelerator, everywhere(), |peft| {
            let numel = |name: &str| peft.store().get(name).unwrap().local().numel();
            // Of 9 features each of three ranks has 3; rank 2.
            assert_eq!(numel("blocks.0.up.lora_A.default.weight"), 2 * 6);
            assert_eq!(numel("blocks.0.up.lora_B.default.weight"), 3 * 2);
            assert_eq!(numel("blocks.0.down.lora_A.default.weight"), 2 * 3);
            assert_eq!(numel("blocks.0.down.lora_B.default.weight"), 6 * 2);
            assert!(peft.merge_adapter(None).unwrap_err().is_config());
        })
    })
    .unwrap();
}

/// Files of an adapter are the same, whoever has trained it.
#[test]
fn a_divided_adapter_is_saved_whole_and_goes_on_without_division() {
    let folder = tempfile::tempdir().unwrap();
    let plan = plan("colwise_gather_output", "embedding_rowwise");
    let logits = testing::ranks(2, divided(2, plan), |accelerator| {
        let (store, module) = model(accelerator.device())?;
        let peft = get_peft_model(&store, everywhere())?;
        for (index, param) in store.parameters().iter().enumerate().filter(|(_, param)| param.name().contains("lora_"))
        {
            param.copy_(&(formula(&param.shape(), index as f64) * 0.3))?;
        }
        let model = accelerator.prepare(module)?;
        let logits = model.forward(&tokens(&accelerator, 0))?.detach();
        accelerator.save_adapter(&peft, folder.path(), &Default::default())?;
        Ok(logits)
    })
    .unwrap();
    let (store, module) = model(Device::Cpu).unwrap();
    PeftModel::from_pretrained(&store, folder.path(), Default::default()).unwrap();
    let alone = Accelerator::builder().cpu(true).build().unwrap();
    let wanted = module.forward(&tokens(&alone, 0)).unwrap();
    for own in logits {
        assert!(own.allclose(&wanted, 1e-5, 1e-5, false));
    }
}

#[test]
fn a_layer_into_which_adapters_are_merged_is_not_divided() {
    let plan = plan("colwise_gather_output", "embedding_rowwise");
    let errors = testing::ranks(2, divided(2, plan), |accelerator| {
        let (store, module) = model(accelerator.device())?;
        get_peft_model(&store, on(&["up", "down"]))?.merge_adapter(None)?;
        Ok(accelerator.prepare(module).err().map(|error| error.to_string()))
    });
    for error in errors.unwrap() {
        assert!(error.as_ref().is_some_and(|text| text.contains("adapters are merged into it")), "{error:?}");
    }
}
