//! How often ranks that compute layers together have to hear of each other.

use crate::error::Result;
use crate::lora::{LoraConfig, get_peft_model};
use crate::nn::{Linear, ModuleFn, ParamStore};
use crate::{Accelerator, TorchTensorParallelPlugin, testing};
use accelerate_core::mesh::Axis;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

/// Calls of a forward pass and of its backward pass, of divided layers: two comparisons of inputs are among the former.
fn calls(accelerator: &Accelerator, num_first: usize, with_adapters: bool) -> Result<[u64; 2]> {
    let store = ParamStore::new(accelerator.device());
    let embed = Linear::new(store.root() / "embed", 4, 4, Default::default())?;
    let first: Vec<Linear> = (0..num_first)
        .map(|number| Linear::new(store.root() / "first" / number, 4, 6, Default::default()))
        .collect::<Result<_>>()?;
    let second = Linear::new(store.root() / "second", 6, 4, Default::default())?;
    if with_adapters {
        get_peft_model(&store, LoraConfig { target_modules: Some("all-linear".into()), ..Default::default() })?;
    }
    let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| {
        let x = embed.forward(x)?;
        let inner = first.iter().map(|layer| layer.forward(&x)).collect::<Result<Vec<_>>>()?;
        second.forward(&Tensor::f_stack(&inner, 0)?.f_prod_dim_int(0, false, Kind::Float)?)
    }))?;
    let group = accelerator.session().mesh.group(&[Axis::Tp])?;
    // Ranks find out at their first call how they reach each other.
    for _ in 0..2 {
        let before = group.num_calls();
        let loss = model.forward(&Tensor::ones([3, 4], (Kind::Float, Device::Cpu)))?.f_sum(Kind::Float)?;
        let forward = group.num_calls();
        accelerator.backward(&loss)?;
        if before > 0 {
            return Ok([forward - before, group.num_calls() - forward]);
        }
    }
    unreachable!("the second pass returns")
}

#[test]
fn a_colwise_and_a_rowwise_layer_need_one_sum_each_way() {
    let pair = json!({ "first.*": "colwise", "second": "rowwise" });
    let gathered = json!({ "first.*": "colwise_gather_output" });
    for (plan, num_first, wanted) in [(&pair, 1, [3, 1]), (&pair, 3, [3, 1]), (&gathered, 1, [3, 1])] {
        let plugin = TorchTensorParallelPlugin {
            tensor_parallel_degree: Some(2),
            parallelize_plan: Value::as_object(plan).cloned(),
            ..Default::default()
        };
        let builder = Accelerator::builder().torch_tp_plugin(plugin);
        let found = testing::ranks(2, builder, |accelerator| calls(&accelerator, num_first, false)).unwrap();
        assert_eq!(found, [wanted; 2], "{plan} {num_first}");
    }
}

/// The few features between the two layers of an adapter: of a rowwise layer they are added up in the forward pass, of a colwise layer
/// their gradients in the backward pass. The input of several layers is still one.
#[test]
fn an_adapter_needs_one_small_sum() {
    let plan = json!({ "first.*": "colwise", "second": "rowwise" });
    for num_first in [1, 3] {
        let plugin = TorchTensorParallelPlugin {
            tensor_parallel_degree: Some(2),
            parallelize_plan: plan.as_object().cloned(),
            ..Default::default()
        };
        let builder = Accelerator::builder().torch_tp_plugin(plugin);
        let found = testing::ranks(2, builder, |accelerator| calls(&accelerator, num_first, true)).unwrap();
        assert_eq!(found, [[4, 1 + num_first as u64]; 2]);
    }
}
