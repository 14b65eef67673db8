//! Models whose blocks several processes compute one after the other, beside the same models on one.

#![allow(clippy::unwrap_used)]

use accelerate::nn::{Module, ParamStore, Pipelined};
use accelerate::tch::{Device, Kind, Tensor, no_grad};
use accelerate::{Accelerator, MixedPrecision, PippyOptions, PrepareModelOptions, prepare_pippy, testing};
use accelerate_models::gpt2::{GPT2Config, GPT2LMHeadModel};
use accelerate_models::llama::{LlamaConfig, LlamaForCausalLM};
use accelerate_models::{CausalLMInput, CausalLMOutput};
use rstest::rstest;

const VOCABULARY: i64 = 40;

/// Values that depend on the place and on `shift` alone.
fn fill(store: &ParamStore, shift: i64) {
    for (index, param) in store.parameters().iter().enumerate() {
        let values = Tensor::arange(param.numel() as i64, (Kind::Double, Device::Cpu)) * 0.7 + (index as i64 + shift);
        param.copy_(&(values.sin() * 0.3).reshape(param.shape())).unwrap();
    }
}

fn gpt2(shift: i64) -> GPT2LMHeadModel {
    let store = ParamStore::new(Device::Cpu);
    let config =
        GPT2Config { vocab_size: VOCABULARY, n_embd: 8, n_layer: 5, n_head: 2, n_positions: 16, ..Default::default() };
    let model = GPT2LMHeadModel::new(&store.root(), &config).unwrap();
    fill(&store, shift);
    model
}

fn llama(shift: i64) -> LlamaForCausalLM {
    let store = ParamStore::new(Device::Cpu);
    let config = LlamaConfig {
        vocab_size: VOCABULARY,
        hidden_size: 8,
        intermediate_size: 16,
        num_hidden_layers: 4,
        sliding_windows: vec![None, Some(2), None, Some(2)],
        ..Default::default()
    };
    let model = LlamaForCausalLM::new(&store.root(), &config.with_heads(4, 2)).unwrap();
    fill(&store, shift);
    model
}

/// Texts of six tokens, of which some rows have fewer.
fn input(rows: i64, has_mask: bool) -> CausalLMInput {
    let input_ids = Tensor::arange(rows * 6, (Kind::Int64, Device::Cpu)).view([rows, 6]).remainder(VOCABULARY);
    let mask = Tensor::ones([rows, 6], (Kind::Int64, Device::Cpu));
    let _ = mask.narrow(0, 0, 1).narrow(1, 4, 2).fill_(0);
    CausalLMInput { input_ids, attention_mask: has_mask.then_some(mask), labels: None }
}

fn wanted<M: Module<Input = CausalLMInput, Output = CausalLMOutput>>(model: &M, input: &CausalLMInput) -> Tensor {
    model.params().eval();
    no_grad(|| model.forward(input)).unwrap().logits
}

fn compare<M>(make: fn(i64) -> M, world_size: usize, rows: i64, has_mask: bool, options: &PippyOptions)
where
    M: Pipelined<Input = CausalLMInput> + Module<Input = CausalLMInput, Output = CausalLMOutput>,
{
    let wanted = wanted(&make(7), &input(rows, has_mask));
    let outputs = testing::ranks(world_size, Accelerator::builder().cpu(true), |accelerator| {
        // Other ranks begin with other weights, and give other inputs.
        let rank = accelerator.process_index() as i64;
        let model = prepare_pippy(&accelerator, make(7 + rank), options)?;
        let own = if rank == 0 { input(rows, has_mask) } else { input(1, false) };
        for _ in 0..2 {
            model.forward(&own)?;
        }
        model.forward(&own)
    })
    .unwrap();
    for (rank, output) in outputs.into_iter().enumerate() {
        let has_output = options.gather_output || rank + 1 == world_size;
        assert_eq!(output.is_some(), has_output, "rank {rank}");
        if let Some(output) = output {
            assert!(output.allclose(&wanted, 1e-5, 1e-6, false), "rank {rank} of {world_size}, {rows} rows");
        }
    }
}

#[rstest]
fn logits_are_those_of_one_process(
    #[values(1, 2, 3, 4)] world_size: usize,
    #[values(1, 4, 5)] rows: i64,
    #[values(false, true)] has_mask: bool,
) {
    compare(gpt2, world_size, rows, has_mask, &PippyOptions::default());
    let gather_output = PippyOptions { gather_output: true, num_chunks: Some(3), ..Default::default() };
    compare(llama, world_size, rows, has_mask, &gather_output);
}

#[test]
fn stages_begin_where_points_say() {
    let split_points = vec!["transformer.h.1".to_owned(), "transformer.h.4".to_owned()];
    let options = PippyOptions { split_points, ..Default::default() };
    compare(gpt2, 3, 4, true, &options);
    let stages = testing::ranks(3, Accelerator::builder().cpu(true), |accelerator| {
        let model = gpt2(1);
        let params = model.params().parameters();
        let model = prepare_pippy(&accelerator, model, &options)?;
        let found: Vec<bool> = (0..5)
            .map(|block| {
                let name = format!("transformer.h.{block}.attn.c_attn.weight");
                params.iter().find(|param| param.name() == name).unwrap().get().is_ok()
            })
            .collect();
        assert_eq!(found, (0..5).map(|block| model.stage().contains(&block)).collect::<Vec<_>>());
        let absent = params.iter().find_map(|param| param.get().err()).unwrap().to_string();
        assert!(absent.contains("belongs to a block that rank"), "{absent}");
        Ok(model.stage())
    })
    .unwrap();
    assert_eq!(stages, [0..1, 1..4, 4..5]);
}

#[rstest]
#[case::too_few_blocks(6, PippyOptions::default(), "too few for 6 processes")]
#[case::no_block(2, PippyOptions { split_points: vec!["transformer.h.9".to_owned()], ..Default::default() }, "no block")]
fn what_cannot_be_divided_is_an_error_on_all_ranks(
    #[case] world_size: usize,
    #[case] options: PippyOptions,
    #[case] wanted: &str,
) {
    let errors = testing::ranks(world_size, Accelerator::builder().cpu(true), |accelerator| {
        Ok(prepare_pippy(&accelerator, gpt2(1), &options).unwrap_err().to_string())
    })
    .unwrap();
    assert!(errors.iter().all(|error| error.contains(wanted)), "{errors:?}");
}

#[test]
fn a_process_that_fails_is_told_on_all_of_them_and_the_next_pass_is_right() {
    testing::ranks(3, Accelerator::builder().cpu(true), |accelerator| {
        let model = prepare_pippy(&accelerator, gpt2(7), &PippyOptions::default())?;
        // A token in the last chunk that the model does not have.
        let mut wrong = input(4, false);
        let _ = wrong.input_ids.narrow(0, 3, 1).fill_(VOCABULARY + 1);
        assert!(model.forward(&wrong).is_err());
        wrong.input_ids = Tensor::zeros([0, 6], (Kind::Int64, Device::Cpu));
        let error = model.forward(&wrong).unwrap_err().to_string();
        assert!(error.contains("rows"), "{error}");
        if let Some(output) = model.forward(&input(4, false))? {
            let wanted = wanted(&gpt2(7), &input(4, false));
            assert!(output.allclose(&wanted, 1e-5, 1e-6, false));
        }
        Ok(())
    })
    .unwrap();
}

/// The output of a chunk has fewer rows than the chunk.
struct Shrinking(GPT2LMHeadModel);

impl Module for Shrinking {
    type Input = CausalLMInput;
    type Output = CausalLMOutput;

    fn forward(&self, input: &CausalLMInput) -> accelerate::Result<CausalLMOutput> {
        self.0.forward(input)
    }

    fn params(&self) -> &ParamStore {
        self.0.params()
    }
}

impl Pipelined for Shrinking {
    fn block_paths(&self) -> Vec<String> {
        self.0.block_paths()
    }

    fn begin(&self, input: &CausalLMInput) -> accelerate::Result<Vec<Tensor>> {
        self.0.begin(input)
    }

    fn blocks(&self, blocks: std::ops::Range<usize>, carried: Vec<Tensor>) -> accelerate::Result<Vec<Tensor>> {
        self.0.blocks(blocks, carried)
    }

    fn end(&self, carried: Vec<Tensor>) -> accelerate::Result<Tensor> {
        Ok(self.0.end(carried)?.narrow(0, 0, 1))
    }
}

#[test]
fn outputs_with_too_few_rows_are_an_error_on_all_ranks() {
    testing::ranks(3, Accelerator::builder().cpu(true), |accelerator| {
        let options = PippyOptions { gather_output: true, ..Default::default() };
        let model = prepare_pippy(&accelerator, Shrinking(gpt2(1)), &options)?;
        assert!(model.forward(&input(6, false)).is_err());
        Ok(())
    })
    .unwrap();
}

#[test]
fn blocks_of_other_ranks_are_not_saved_as_something_else() {
    testing::ranks(2, Accelerator::builder().cpu(true), |accelerator| {
        let model = gpt2(1);
        let store = model.params().clone();
        let _model = prepare_pippy(&accelerator, model, &PippyOptions::default())?;
        let error = store.sharded_state_dict().err().unwrap().to_string();
        assert!(error.contains("belongs to a block that rank"), "{error}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn passes_are_in_the_precision_of_the_accelerator() {
    let builder = || Accelerator::builder().cpu(true).mixed_precision(MixedPrecision::Bf16);
    let wanted = testing::ranks(1, builder(), |accelerator| {
        let model =
            accelerator.prepare_model(gpt2(7), PrepareModelOptions { evaluation_mode: true, ..Default::default() })?;
        model.params().eval();
        let logits = no_grad(|| model.forward(&input(4, true)))?.logits;
        Ok(Vec::<f32>::try_from(logits.reshape([-1]))?)
    });
    let found = testing::ranks(2, builder(), |accelerator| {
        let model = prepare_pippy(&accelerator, gpt2(7), &PippyOptions::default())?;
        let logits = model.forward(&input(4, true))?;
        Ok(logits.map(|logits| Vec::<f32>::try_from(logits.reshape([-1]))).transpose()?)
    });
    let (wanted, found) = (wanted.unwrap().swap_remove(0), found.unwrap().swap_remove(1).unwrap());
    assert!(wanted.iter().zip(&found).all(|(a, b)| (a - b).abs() < 2e-2));
    assert!(found.iter().all(|value| value.to_bits() & 0xffff == 0), "logits of bfloat16 have no further digits");
}

#[test]
fn ranks_with_different_options_or_models_are_told() {
    testing::ranks(2, Accelerator::builder().cpu(true), |accelerator| {
        let num_chunks = Some(2 + accelerator.process_index());
        let options = PippyOptions { num_chunks, ..Default::default() };
        let error = prepare_pippy(&accelerator, gpt2(1), &options).unwrap_err().to_string();
        assert!(error.contains("same options"), "{error}");
        Ok(())
    })
    .unwrap();
}
