//! What a model's author relies on: names, ties, state dicts, modes, and errors that say what is wrong.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::*;
use accelerate::tch::{self, Device, Kind, Tensor};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

fn store() -> ParamStore {
    ParamStore::new(Device::Cpu)
}

fn state(entries: &[(&str, &[i64])]) -> StateDict {
    entries.iter().map(|(name, shape)| (name.to_string(), Tensor::full(*shape, 3.0, CPU))).collect()
}

fn names(params: &[Param]) -> Vec<&str> {
    params.iter().map(Param::name).collect()
}

#[test]
fn a_path_spells_names_as_pytorch_does() {
    let root = store().root();
    let layer = &root / "bert" / "encoder".to_string() / "layer" / 0 / "attention.self";
    assert_eq!(layer.name(), "bert.encoder.layer.0.attention.self");
    assert_eq!([&root / 3usize, &root / 3i64].map(|path| path.name().to_owned()), ["3", "3"]);
}

#[test]
fn parameters_come_in_the_order_of_their_making_without_buffers() {
    let store = store();
    let root = store.root();
    Linear::new(&root / "b", 2, 3, Default::default()).unwrap();
    BatchNorm1d::new(&root / "a", 3, Default::default()).unwrap();
    assert_eq!(names(&store.parameters()), ["b.weight", "b.bias", "a.weight", "a.bias"]);
    let buffers = ["a.running_mean", "a.running_var", "a.num_batches_tracked"];
    assert_eq!(names(&store.buffers()), buffers);
    assert_eq!(store.num_parameters(), 6 + 3 + 3 + 3);
    let state = store.state_dict().unwrap();
    let all: Vec<_> = ["b.weight", "b.bias", "a.weight", "a.bias"].into_iter().chain(buffers).collect();
    assert_eq!(state.names().collect::<Vec<_>>(), all);
}

#[test]
fn buffers_that_are_not_persistent_stay_out_of_the_state_dict() {
    let store = store();
    store
        .root()
        .buffer("position_ids", Tensor::arange(4, (Kind::Int64, Device::Cpu)), BufferOptions { persistent: false })
        .unwrap();
    assert!(store.state_dict().unwrap().is_empty());
    assert_eq!(store.buffers().len(), 1);
    store.load_state_dict(&StateDict::default(), Default::default()).unwrap();
    let error = store.load_state_dict(&state(&[("position_ids", &[4])]), Default::default()).unwrap_err();
    assert!(error.to_string().contains("1 unexpected: position_ids"), "{error}");
}

#[test]
fn frozen_parameters_are_not_trainable() {
    let store = store();
    let layer = Linear::new(store.root(), 2, 2, Default::default()).unwrap();
    layer.weight.set_requires_grad(false).unwrap();
    assert_eq!(names(&store.trainable_parameters()), ["bias"]);
    layer.weight.set_requires_grad(true).unwrap();
    assert_eq!(names(&store.trainable_parameters()), ["weight", "bias"]);
}

#[test]
fn a_name_is_given_once() {
    let store = store();
    let root = store.root();
    let taken = root.param("weight", ([2, 3], Init::Zeros)).unwrap();
    let errors = [
        root.param("weight", ([1], Init::Zeros)).unwrap_err(),
        root.buffer("weight", ([1], Init::Zeros), Default::default()).unwrap_err(),
        root.alias("weight", &taken).unwrap_err(),
    ];
    for error in errors {
        let text = error.to_string();
        assert!(text.contains("`weight` is taken already, by a tensor of shape [2, 3]"), "{text}");
    }
    assert_eq!(store.parameters().len(), 1);
}

#[test]
fn a_refused_name_draws_no_random_numbers() {
    let root = store().root();
    root.param("weight", ([8], Init::Zeros)).unwrap();
    // Other tests of this file draw from the same generator when they run as threads, hence the retries.
    let unchanged = (0..100).any(|_| {
        tch::manual_seed(3);
        let expected = Tensor::rand([1], CPU);
        tch::manual_seed(3);
        root.param("weight", ([8], Init::Normal { mean: 0.0, std: 1.0 })).unwrap_err();
        Tensor::rand([1], CPU) == expected
    });
    assert!(unchanged);
}

#[test]
fn malformed_names_are_refused() {
    for (path, name) in [("", ""), ("a", ""), ("a..b", "c"), (".a", "b"), ("a", "b.")] {
        let root = store().root();
        let place = if path.is_empty() { root } else { root / path };
        let error = place.param(name, ([1], Init::Zeros)).unwrap_err();
        assert!(error.to_string().contains("cannot name a parameter"), "{path:?} {name:?}: {error}");
    }
}

#[test]
fn integers_are_buffers_and_not_parameters() {
    let ids = Tensor::arange(3, (Kind::Int64, Device::Cpu));
    let error = store().root().param("ids", ids).unwrap_err();
    assert!(error.to_string().contains("`ids` cannot be a parameter: its elements are Int64"), "{error}");
}

#[test]
fn tied_weights_are_one_parameter_with_one_gradient() {
    let store = store();
    let root = store.root();
    let words = Embedding::new(&root / "words", 5, 3, Default::default()).unwrap();
    let decoder =
        Linear::from_params(&root / "decoder", (&root / "decoder").alias("weight", &words.weight).unwrap(), None);
    let hidden = words.forward(&Tensor::from_slice(&[1i64])).unwrap();
    decoder.forward(&hidden).unwrap().sum(Kind::Float).backward();

    assert_eq!(names(&store.parameters()), ["words.weight"]);
    assert!(store.get("decoder.weight").unwrap().is_same(&words.weight));
    // Row 4 is used by the decoder only, row 1 by both.
    let grad = words.weight.grad().unwrap();
    assert_eq!(grad.get(4), hidden.get(0));
    assert_ne!(grad.get(1), hidden.get(0));
    let state = store.state_dict().unwrap();
    assert_eq!(state.names().collect::<Vec<_>>(), ["words.weight"]);
    assert!(state.get("decoder.weight").is_some());
    assert_eq!(state.aliases()["decoder.weight"], "words.weight");
}

#[test]
fn a_tied_weight_loads_under_any_of_its_names() {
    let cases: [&[(&str, &[i64])]; 3] =
        [&[("words", &[2])], &[("decoder", &[2])], &[("decoder", &[2]), ("words", &[2])]];
    for entries in cases {
        let store = store();
        let words = store.root().param("words", ([2], Init::Zeros)).unwrap();
        store.root().alias("decoder", &words).unwrap();
        store.load_state_dict(&state(entries), Default::default()).unwrap();
        assert_eq!(words.get().unwrap().double_value(&[1]), 3.0, "{entries:?}");
    }
}

#[test]
fn where_a_state_dict_has_both_names_of_a_tied_weight_the_first_counts() {
    for order in [["words", "decoder"], ["decoder", "words"]] {
        let store = store();
        let words = store.root().param("words", ([1], Init::Zeros)).unwrap();
        store.root().alias("decoder", &words).unwrap();
        let value = |name: &str| Tensor::from_slice(&[if name == "words" { 1.0f32 } else { 2.0 }]);
        let state = order.iter().map(|name| (name.to_string(), value(name))).collect();
        store.load_state_dict(&state, Default::default()).unwrap();
        assert_eq!(words.get().unwrap().double_value(&[0]), 1.0, "{order:?}");
    }
}

#[test]
fn parameters_of_another_store_cannot_be_tied() {
    let foreign = store().root().param("weight", ([1], Init::Zeros)).unwrap();
    let store = store();
    store.root().param("weight", ([1], Init::Zeros)).unwrap();
    let error = store.root().alias("other", &foreign).unwrap_err();
    assert!(error.to_string().contains("belongs to another store"), "{error}");
}

#[test]
fn loading_lists_everything_that_does_not_fit_and_changes_nothing() {
    let store = store();
    let root = store.root();
    let good = root.param("good", ([2], Init::Zeros)).unwrap();
    for name in ["absent_1", "absent_2", "short", "long"] {
        root.param(name, ([2, 2], Init::Zeros)).unwrap();
    }
    let found = state(&[("good", &[2]), ("stranger", &[1]), ("short", &[2]), ("long", &[2, 3]), ("alien", &[1])]);
    let error = store.load_state_dict(&found, Default::default()).unwrap_err();
    assert!(error.is_weights());
    let text = error.to_string();
    for part in [
        "2 missing: absent_1, absent_2",
        "2 unexpected: alien, stranger",
        "2 of another shape: short is [2] but the model has [2, 2], long is [2, 3] but the model has [2, 2]",
    ] {
        assert!(text.contains(part), "{text} lacks {part}");
    }
    assert_eq!(good.get().unwrap().double_value(&[0]), 0.0);
    // A wrong shape is an error also when names need not agree, as in PyTorch.
    assert!(store.load_state_dict(&found, LoadStateDictOptions { strict: false }).is_err());
}

#[test]
fn a_tolerant_load_reports_what_it_left_out() {
    let store = store();
    let good = store.root().param("good", ([2], Init::Zeros)).unwrap();
    store.root().param("absent", ([2], Init::Zeros)).unwrap();
    let report = store
        .load_state_dict(&state(&[("good", &[2]), ("stranger", &[1])]), LoadStateDictOptions { strict: false })
        .unwrap();
    assert_eq!(report.missing_keys, ["absent"]);
    assert_eq!(report.unexpected_keys, ["stranger"]);
    assert_eq!(good.get().unwrap().double_value(&[0]), 3.0);
}

#[test]
fn loading_casts_and_keeps_the_parameter_trainable() {
    let store = store();
    let weight = store.root().param("weight", ([2], Init::Zeros)).unwrap();
    let half: StateDict =
        [("weight".to_string(), Tensor::full([2], 0.5, (Kind::BFloat16, Device::Cpu)))].into_iter().collect();
    store.load_state_dict(&half, Default::default()).unwrap();
    assert_eq!(weight.get().unwrap(), Tensor::full([2], 0.5, CPU));
    assert!(weight.get().unwrap().is_leaf() && weight.requires_grad());
}

#[test]
fn old_files_without_a_batch_counter_load() {
    let store = store();
    BatchNorm1d::new(store.root(), 2, Default::default()).unwrap();
    let found = state(&[("weight", &[2]), ("bias", &[2]), ("running_mean", &[2]), ("running_var", &[2])]);
    store.load_state_dict(&found, Default::default()).unwrap();
}

#[test]
fn a_state_dict_shares_memory_and_records_no_gradient() {
    let store = store();
    let weight = store.root().param("weight", ([1], Init::Zeros)).unwrap();
    let state = store.state_dict().unwrap();
    weight.copy_(&Tensor::from_slice(&[5f32])).unwrap();
    let saved = state.get("weight").unwrap();
    assert_eq!(saved.double_value(&[0]), 5.0);
    assert!(!saved.requires_grad());
}

#[test]
fn the_mode_reaches_layers_made_before_and_after() {
    let store = store();
    let before = Dropout::new(store.root(), 1.0).unwrap();
    store.eval();
    let after = Dropout::new(store.root() / "deep" / "down", 1.0).unwrap();
    let ones = Tensor::ones([4], CPU);
    for layer in [&before, &after] {
        assert_eq!(layer.forward(&ones).unwrap(), ones);
    }
    store.clone().train();
    for layer in [&before, &after] {
        assert_eq!(layer.forward(&ones).unwrap(), Tensor::zeros([4], CPU));
    }
    assert!(store.is_training());
}

#[test]
fn casting_in_place_reaches_layers_gradients_and_later_layers() {
    let store = store();
    let layer = Linear::new(store.root() / "a", 2, 2, Default::default()).unwrap();
    let held = layer.weight.get().unwrap();
    layer.forward(&Tensor::ones([1, 2], CPU)).unwrap().sum(Kind::Float).backward();
    store.to_kind(Kind::Double).unwrap();

    assert_eq!(held.kind(), Kind::Double);
    assert_eq!(layer.weight.grad().unwrap().kind(), Kind::Double);
    assert!(layer.weight.requires_grad() && layer.weight.get().unwrap().is_leaf());
    layer.forward(&Tensor::ones([1, 2], (Kind::Double, Device::Cpu))).unwrap().sum(Kind::Double).backward();
    assert_eq!(layer.weight.grad().unwrap(), Tensor::full([2, 2], 2.0, (Kind::Double, Device::Cpu)));
    let later = Linear::new(store.root() / "b", 2, 2, Default::default()).unwrap();
    assert_eq!(later.weight.kind(), Kind::Double);
}

#[test]
fn a_plain_var_store_lends_its_variables() {
    let variables = tch::nn::VarStore::new(Device::Cpu);
    let root = variables.root();
    let second = tch::nn::linear(&root / "z", 3, 2, Default::default());
    tch::nn::linear(&root / "a", 2, 2, Default::default());
    tch::nn::batch_norm1d(&root / "norm", 2, Default::default());
    let store = ParamStore::from_var_store(&variables).unwrap();
    // In the order of creation; tch makes the bias first.
    let mut created = names(&store.parameters()).iter().map(|name| name.to_string()).collect::<Vec<_>>();
    let split = |name: &String| name.split('.').next().unwrap().to_owned();
    created.dedup_by_key(|name| split(name));
    assert_eq!(created.iter().map(split).collect::<Vec<_>>(), ["z", "a", "norm"]);
    assert_eq!(names(&store.buffers()), ["norm.running_mean", "norm.running_var"]);

    second.ws.sum(Kind::Float).backward();
    assert_eq!(store.get("z.weight").unwrap().grad().unwrap(), Tensor::ones([2, 3], CPU));
    store.get("z.weight").unwrap().copy_(&Tensor::zeros([2, 3], CPU)).unwrap();
    assert_eq!(second.ws, Tensor::zeros([2, 3], CPU).set_requires_grad(true));
}

#[test]
fn a_variable_under_two_names_is_one_parameter() {
    let variables = tch::nn::VarStore::new(Device::Cpu);
    let weight = variables.root().zeros("words", &[2, 2]);
    let _ = variables.root().add("decoder", weight.shallow_clone(), true);
    let _ = variables.root().zeros("empty_1", &[0]);
    let _ = variables.root().zeros("empty_2", &[0]);
    let store = ParamStore::from_var_store(&variables).unwrap();
    assert_eq!(store.num_parameters(), 4);
    assert_eq!(names(&store.parameters()).len(), 3);
    assert!(store.get("words").unwrap().is_same(&store.get("decoder").unwrap()));
    assert!(!store.get("empty_1").unwrap().is_same(&store.get("empty_2").unwrap()));
}

#[test]
fn values_are_copied_from_a_var_store_by_name() {
    let variables = tch::nn::VarStore::new(Device::Cpu);
    let linear = tch::nn::linear(variables.root() / "head", 2, 3, Default::default());
    let store = store();
    let layer = Linear::new(store.root() / "head", 2, 3, Default::default()).unwrap();
    store.copy_from(&variables).unwrap();
    assert_eq!(layer.weight.get().unwrap(), linear.ws);
    assert_ne!(layer.weight.get().unwrap().data_ptr(), linear.ws.data_ptr());
}

/// Calls that go wrong, and what the message has to say.
#[test]
fn layers_say_which_of_them_refused_what() {
    let store = store();
    let root = store.root();
    let ones = |shape: &[i64]| Tensor::ones(shape, CPU);
    let linear = Linear::new(&root / "linear", 4, 2, Default::default()).unwrap();
    let words = Embedding::new(&root / "words", 10, 4, Default::default()).unwrap();
    let norm = LayerNorm::new(&root / "norm", [4], Default::default()).unwrap();
    let rms = RMSNorm::new(&root / "rms", [4], Default::default()).unwrap();
    let group = GroupNorm::new(&root / "group", 2, 4, Default::default()).unwrap();
    let batch = BatchNorm1d::new(&root / "batch", 4, Default::default()).unwrap();
    let image = BatchNorm2d::new(&root / "image", 4, Default::default()).unwrap();
    let conv = Conv2d::new(&root / "conv", 4, 4, [3, 3], Default::default()).unwrap();
    let attention = MultiheadAttention::new(&root / "attention", 4, 2, Default::default()).unwrap();
    let (x, wide) = (ones(&[2, 3, 4]), ones(&[2, 3, 5]));
    let padding = AttentionMask { key_padding_mask: Some(&x), ..Default::default() };
    let cases: Vec<(accelerate::Result<Tensor>, &[&str])> = vec![
        (linear.forward(&ones(&[2, 3])), &["Linear at `linear.weight`", "[2, 3]", "[.., 4] of Float"]),
        (linear.forward(&ones(&[2, 4]).to_kind(Kind::Double)), &["`linear.weight`", "Double", "of Float"]),
        (words.forward(&Tensor::from_slice(&[10i64])), &["`words.weight`", "indices from 0 to 9"]),
        (words.forward(&ones(&[1])), &["`words.weight`", "element type Float", "int64 or int32"]),
        (norm.forward(&ones(&[2, 3])), &["LayerNorm at `norm.weight`", "last dims [4]"]),
        (rms.forward(&ones(&[2, 3])), &["RMSNorm at `rms.weight`", "last dims [4]"]),
        (group.forward(&ones(&[2, 3])), &["GroupNorm at `group.weight`", "[batch, 4, ..]"]),
        (batch.forward(&ones(&[2, 3])), &["BatchNorm1d at `batch.weight`", "[batch, 4]"]),
        (batch.forward(&ones(&[1, 4])), &["`batch.weight` cannot learn", "one value per channel"]),
        (image.forward(&ones(&[2, 4])), &["BatchNorm2d at `image.weight`", "[batch, 4, size, size]"]),
        (conv.forward(&ones(&[1, 3, 5, 5])), &["Conv2d at `conv.weight`", "[batch, 4, size, size]"]),
        (
            attention.forward(&wide, &wide, &wide, Default::default()),
            &["`attention.out_proj.weight`", "[length, batch, 4]"],
        ),
        (attention.forward(&x.get(0), &x, &x, Default::default()), &["the input has 2 dims"]),
        (attention.forward(&x, &x, &x, padding), &["key_padding_mask [3, 2]"]),
    ];
    for (result, parts) in cases {
        let text = result.unwrap_err().to_string();
        for part in parts {
            assert!(text.contains(part), "{text:?} lacks {part:?}");
        }
    }
}

#[test]
fn a_negative_padding_idx_counts_from_the_last_row() {
    // torch.nn.Embedding(5, 2, padding_idx=-2).padding_idx is 3.
    for (index, row) in [(0, 0), (4, 4), (-1, 4), (-2, 3), (-5, 0)] {
        let store = store();
        let config = EmbeddingConfig { padding_idx: Some(index), ..Default::default() };
        let made = Embedding::new(store.root() / "made", 5, 2, config).unwrap();
        let rows = made.forward(&Tensor::arange(5, (Kind::Int64, Device::Cpu))).unwrap();
        let zeros = |tensor: &Tensor| {
            (0..5).filter(|row| tensor.get(*row).abs().sum(None).double_value(&[]) == 0.0).collect::<Vec<_>>()
        };
        assert_eq!(zeros(&rows), [row], "padding_idx {index}");
        rows.sum(None).backward();
        assert_eq!(zeros(&made.weight.get().unwrap().grad()), [row], "padding_idx {index}");

        // A table that was there already keeps its row, which gets no gradient either.
        let weight = (store.root() / "table").param("weight", ([5, 2], Init::Ones)).unwrap();
        let over = Embedding::from_params(store.root() / "table", weight, config);
        let rows = over.forward(&Tensor::arange(5, (Kind::Int64, Device::Cpu))).unwrap();
        rows.sum(None).backward();
        assert_eq!((zeros(&rows), zeros(&over.weight.get().unwrap().grad())), (vec![], vec![row]));
        over.zero_padding_row().unwrap();
        assert_eq!(zeros(&over.weight.get().unwrap().detach()), [row]);
    }
    let store = store();
    let weight = store.root().param("weight", ([5, 2], Init::Ones)).unwrap();
    let over =
        Embedding::from_params(store.root(), weight, EmbeddingConfig { padding_idx: Some(-6), ..Default::default() });
    let error = over.forward(&Tensor::from_slice(&[0i64])).unwrap_err().to_string();
    assert!(error.contains("no row -6 for padding"), "{error}");
}

#[test]
fn impossible_layers_are_not_made() {
    let root = store().root();
    let padding = |index| EmbeddingConfig { padding_idx: Some(index), ..Default::default() };
    let groups = Conv1dConfig { groups: 3, ..Default::default() };
    let dropout = MultiheadAttentionConfig { dropout: f64::NAN, ..Default::default() };
    let cases = [
        (
            Embedding::new(&root / "e", 5, 2, padding(5)).map(drop),
            "no row 5 for padding; padding_idx goes from -5, which is the first, to 4",
        ),
        (Embedding::new(&root / "f", 5, 2, padding(-6)).map(drop), "the embedding at `f` has no row -6 for padding"),
        (Dropout::new(&root / "d", 1.5).map(drop), "the dropout at `d` has p = 1.5"),
        (GroupNorm::new(&root / "g", 3, 4, Default::default()).map(drop), "num_channels = 4 evenly by num_groups = 3"),
        (Conv1d::new(&root / "c", 4, 6, [1], groups).map(drop), "in_channels = 4 evenly by groups = 3"),
        (
            MultiheadAttention::new(&root / "m", 8, 3, Default::default()).map(drop),
            "embed_dim = 8 evenly by num_heads = 3",
        ),
        (MultiheadAttention::new(&root / "m", 8, 2, dropout).map(drop), "p = NaN"),
        (root.param("v", ([3], Init::XavierUniform { gain: 1.0 })).map(drop), "[3] has no fan-in"),
    ];
    for (result, part) in cases {
        let text = result.unwrap_err().to_string();
        assert!(text.contains(part), "{text:?} lacks {part:?}");
    }
}
