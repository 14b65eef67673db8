//! States of Python's, written and read again, and what they are under the names of this library.

use accelerate_core::checkpoint::python::{
    Left, Origin, Parameters, PythonGroup, PythonOptimizer, fresh_random_states, from_json, name_parameters,
    schedule_from_json, to_json, without_lambdas,
};
use accelerate_core::weight_files::{Pickled, Plain, StoredTensor, TorchArchive};
use rstest::rstest;
use safetensors::Dtype::{self, F32, I64};
use serde_json::json;
use std::io::Cursor;

/// A tensor that is written: its element type, its shape and its bytes.
type Written = (Dtype, Vec<u64>, Vec<u8>);

fn archive(value: &Plain<Written>) -> Vec<u8> {
    let Pickled { bytes, tensors } = Pickled::new(value, |(dtype, shape, _)| (*dtype, shape.clone())).unwrap();
    let mut archive = TorchArchive::new(Vec::new(), "state");
    let mut entry = |name: &str, content: &[u8]| {
        archive.begin(name).unwrap();
        archive.append(content).unwrap();
    };
    entry("data.pkl", &bytes);
    entry("byteorder", b"little");
    tensors.iter().enumerate().for_each(|(number, (.., bytes))| entry(&format!("data/{number}"), bytes));
    entry("version", b"3\n");
    archive.finish().unwrap()
}

fn read(file: &[u8]) -> Plain<StoredTensor> {
    Plain::read(&mut Cursor::new(file)).unwrap()
}

#[rstest]
#[case(Plain::None)]
#[case(Plain::Bool(true))]
#[case(Plain::Int(i64::MIN))]
#[case(Plain::Int(-1))]
#[case(Plain::Int(2_147_483_648))]
#[case(Plain::Int(i64::MAX))]
#[case(Plain::LargeInt(1 << 63))]
#[case(Plain::LargeInt(u64::MAX))]
#[case(Plain::Float(-0.1))]
#[case(Plain::Float(f64::INFINITY))]
#[case(Plain::text("a name, ä"))]
#[case(Plain::List(vec![]))]
#[case(Plain::Tuple(vec![]))]
#[case(Plain::Dict(vec![]))]
#[case(Plain::List(vec![Plain::Tuple(vec![Plain::Int(1), Plain::None]), Plain::dict([("a", Plain::Float(0.5))])]))]
#[case(Plain::Dict(vec![(Plain::Int(0), Plain::dict([("step", Plain::Int(3))])), (Plain::Int(1), Plain::Dict(vec![]))]))]
fn a_value_is_the_same_when_it_is_read_again(#[case] value: Plain<Written>) {
    assert_eq!(format!("{:?}", read(&archive(&value))), format!("{value:?}"));
}

#[rstest]
#[case(Dtype::F32, &[2, 3])]
#[case(Dtype::F64, &[])]
#[case(Dtype::BF16, &[0, 4])]
#[case(Dtype::U8, &[5056])]
#[case(Dtype::BOOL, &[1])]
#[case(Dtype::C64, &[2])]
#[case(Dtype::U16, &[3])]
#[case(Dtype::F8_E4M3, &[2, 2])]
fn a_tensor_is_where_it_was_written(#[case] dtype: Dtype, #[case] shape: &[u64]) {
    let num_bytes = shape.iter().product::<u64>() as usize * dtype.bitsize() / 8;
    let bytes: Vec<u8> = (0..num_bytes).map(|number| number as u8).collect();
    let file = archive(&Plain::List(vec![
        Plain::Tensor((Dtype::F32, vec![1], vec![9; 4])),
        Plain::Tensor((dtype, shape.to_vec(), bytes.clone())),
    ]));
    let Plain::List(found) = read(&file) else { panic!("no list") };
    let Plain::Tensor(stored) = &found[1] else { panic!("{found:?}") };
    assert_eq!((stored.dtype(), stored.shape()), (dtype, shape));
    let range = stored.storage().range.start as usize..stored.storage().range.end as usize;
    assert_eq!(file[range], bytes);
    assert_eq!(stored.storage().range.start % 64, 0, "it can be mapped");
    assert_eq!(stored.storage().crc32, (!bytes.is_empty()).then(|| crc32(&bytes)));
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ (0xedb8_8320 & 0_u32.wrapping_sub(crc & 1)))
    };
    !bytes.iter().fold(u32::MAX, step)
}

#[test]
fn what_is_no_plain_data_is_not_written() {
    let error = Pickled::new(&Plain::<()>::Other("an object".into()), |()| (Dtype::F32, vec![])).unwrap_err();
    assert!(error.to_string().contains("an object cannot be written"), "{error}");
    assert!(Pickled::new(&Plain::Tensor(()), |()| (Dtype::F4, vec![2])).is_err());
    assert!(Pickled::new(&Plain::Tensor(()), |()| (Dtype::F32, vec![u64::MAX, 2])).is_err());
}

#[test]
fn what_json_cannot_say_is_noted_by_its_path() {
    let mut left = Left::default();
    let state: Plain<()> = Plain::dict([
        ("a", Plain::List(vec![Plain::Int(1), Plain::Float(f64::NAN)])),
        ("b", Plain::dict([("c", Plain::Tensor(())), ("d", Plain::Tuple(vec![Plain::Bool(false)]))])),
        ("e", Plain::Dict(vec![(Plain::Int(2), Plain::Int(1))])),
        ("f", Plain::Other("numpy.ndarray".into())),
    ]);
    assert_eq!(to_json(&state, "", &mut left), Some(json!({ "b": { "d": [false] } })));
    assert_eq!(
        left.0,
        [
            "a (the whole list, because of a[1] (NaN))",
            "b.c (a tensor)",
            "e (the whole dictionary, because it has keys that are no texts)",
            "f (numpy.ndarray)"
        ]
    );
}

#[rstest]
#[case(json!({ "a": [1, 2.5, null, true, "x"], "b": { "c": -7 } }))]
#[case(json!([]))]
#[case(json!(0.1))]
#[case(json!([u64::MAX, 9_223_372_036_854_775_808_u64, i64::MIN]))]
fn json_is_the_same_after_both_ways(#[case] value: serde_json::Value) {
    assert_eq!(to_json(&from_json::<()>(&value), "", &mut Left::default()), Some(value));
}

#[rstest]
#[case(json!({ "base_lrs": [0.1], "last_epoch": 1 }))]
#[case(json!({ "base_lrs": [0.1, 0.2], "lr_lambdas": [null, { "w": 5 }] }))]
#[case(json!({ "_schedulers": [{ "base_lrs": [0.1] }, { "base_lrs": [0.1] }], "base_lrs": [0.1] }))]
fn a_schedule_is_the_same_after_both_ways(#[case] state: serde_json::Value) {
    let of_python = to_json(&schedule_from_json::<()>(&state), "", &mut Left::default()).unwrap();
    assert!(of_python["lr_lambdas"].is_array());
    assert_eq!(without_lambdas(of_python), state);
}

/// An optimizer of these groups of numbers, with state of these shapes.
fn optimizer(groups: &[&[i64]], shapes: &[(i64, &[u64])]) -> PythonOptimizer<Vec<u64>> {
    let group = |params: &&[i64]| PythonGroup { params: params.to_vec(), names: None, settings: Vec::new() };
    let state =
        |(number, shape): &(i64, &[u64])| (*number, vec![("exp_avg".to_owned(), Plain::Tensor(shape.to_vec()))]);
    let (groups, state) = (groups.iter().map(group).collect(), shapes.iter().map(state).collect());
    PythonOptimizer { groups, state, others: Vec::new() }
}

fn parameters(tensors: &[(&str, Dtype, &[u64])], is_ordered: bool) -> Parameters {
    let tensors = tensors.iter().map(|(name, dtype, shape)| ((*name).to_owned(), *dtype, shape.to_vec())).collect();
    Parameters { tensors, is_ordered }
}

/// Names, or words of the error.
type Names<'a> = Result<(&'a [&'a str], Origin), &'a str>;

#[rstest]
#[case::by_shapes(&[&[0, 1][..]], &[(0, &[2][..]), (1, &[3][..])], &[("a", F32, &[3][..]), ("b", F32, &[2][..])], false, Ok((&["b", "a"][..], Origin::Shapes)))]
#[case::by_shapes_of_groups(&[&[1][..], &[0][..]], &[(0, &[2][..]), (1, &[3][..])], &[("a", F32, &[3][..]), ("b", F32, &[2][..])], false, Ok((&["a", "b"][..], Origin::Shapes)))]
#[case::two_of_a_shape(&[&[0][..]], &[(0, &[2][..])], &[("a", F32, &[2][..]), ("b", F32, &[2][..])], false, Err("number 0"))]
#[case::one_taken_twice(&[&[0, 1][..]], &[(0, &[2][..]), (1, &[2][..])], &[("a", F32, &[2][..])], false, Err("number 1"))]
#[case::no_such_shape(&[&[0][..]], &[(0, &[5][..])], &[("a", F32, &[2][..])], false, Err("no tensor of the model has"))]
#[case::no_state(&[&[0][..]], &[], &[("a", F32, &[2][..])], false, Err("no state that tells its shape"))]
#[case::by_order(&[&[0, 1][..]], &[(0, &[2][..])], &[("a", F32, &[2][..]), ("b", F32, &[3][..])], true, Ok((&["a", "b"][..], Origin::Order)))]
#[case::an_order_that_could_be_another(&[&[0, 1][..]], &[(0, &[2][..]), (1, &[2][..])], &[("a", F32, &[2][..]), ("b", F32, &[2][..])], true, Err("number 0"))]
#[case::an_order_of_which_one_has_state(&[&[0, 1][..]], &[(1, &[2][..])], &[("a", F32, &[2][..]), ("b", F32, &[2][..])], true, Err("number 0"))]
#[case::by_order_without_state(&[&[0, 1][..]], &[], &[("a", F32, &[2][..]), ("b", F32, &[2][..])], true, Ok((&["a", "b"][..], Origin::Order)))]
#[case::buffers_are_no_parameters(&[&[0, 1][..]], &[(0, &[2][..])], &[("n.weight", F32, &[2][..]), ("n.bias", F32, &[3][..]), ("n.running_mean", F32, &[2][..]), ("n.num_batches_tracked", I64, &[][..])], true, Ok((&["n.weight", "n.bias"][..], Origin::Order)))]
#[case::another_order(&[&[0, 1][..]], &[(0, &[3][..]), (1, &[2][..])], &[("a", F32, &[2][..]), ("b", F32, &[3][..])], true, Ok((&["b", "a"][..], Origin::Shapes)))]
#[case::an_order_of_two_groups(&[&[0][..], &[1][..]], &[(0, &[2][..]), (1, &[2][..])], &[("a", F32, &[2][..]), ("b", F32, &[2][..])], true, Err("number 0"))]
#[case::one_name_in_two_models(&[&[0][..]], &[(0, &[2][..])], &[("a", F32, &[2][..]), ("a", F32, &[2][..])], false, Err("`first.a` and `second.a`"))]
#[case::one_of_two_models(&[&[0][..]], &[(0, &[2][..])], &[("a", F32, &[2][..]), ("a", F32, &[3][..])], false, Ok((&["a"][..], Origin::Shapes)))]
#[case::the_order_of_two_models(&[&[0, 1][..]], &[(0, &[2][..]), (1, &[3][..])], &[("a", F32, &[2][..]), ("a", F32, &[3][..])], true, Err("an optimizer of both"))]
#[case::frozen_parameters(&[&[0][..]], &[(0, &[2][..])], &[("a", F32, &[2][..]), ("b", F32, &[2][..])], true, Err("number 0"))]
fn parameters_are_named_where_only_one_way_is_possible(
    #[case] groups: &[&[i64]],
    #[case] shapes: &[(i64, &[u64])],
    #[case] tensors: &[(&str, Dtype, &[u64])],
    #[case] is_ordered: bool,
    #[case] wanted: Names<'_>,
) {
    let found = name_parameters(&optimizer(groups, shapes), Clone::clone, &parameters(tensors, is_ordered), None);
    match (found, wanted) {
        (Ok((names, origin)), Ok(wanted)) => {
            assert_eq!((names.iter().map(String::as_str).collect::<Vec<_>>().as_slice(), origin), wanted);
        }
        (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{error}"),
        (found, wanted) => panic!("{found:?}, and {wanted:?} is wanted"),
    }
}

#[rstest]
#[case::the_same(&[Some("a"), Some("b")], &["a", "b"], Ok((&["a", "b"][..], Origin::Saved)))]
#[case::nothing_said(&[None, None], &["a", "b"], Ok((&["a", "b"][..], Origin::Given)))]
#[case::another_order(&[Some("a"), Some("b")], &["b", "a"], Err("parameter number 0 is called `a` by the optimizer itself, and `b` by --parameter_names"))]
#[case::of_one_group(&[None, Some("b")], &["b", "a"], Err("parameter number 1 is called `b`"))]
#[case::a_tied_name(&[Some("a"), Some("tied")], &["a", "b"], Ok((&["a", "b"][..], Origin::Given)))]
#[case::too_few(&[Some("a"), Some("b")], &["a"], Err("1 names of parameters are said"))]
#[case::unknown(&[None, None], &["a", "c"], Err("called `c`, and no model"))]
#[case::twice(&[None, None], &["a", "a"], Err("two of its parameters are called `a`"))]
#[case::in_two_models(&[None, None], &["x", "x"], Err("two models have a parameter `x`"))]
fn names_that_an_optimizer_says_are_not_overridden(
    #[case] saved: &[Option<&str>],
    #[case] given: &[&str],
    #[case] wanted: Names<'_>,
) {
    // A group for each parameter: some programs name those of one group only.
    let mut optimizer = optimizer(&[&[0], &[1]], &[]);
    for (group, name) in optimizer.groups.iter_mut().zip(saved) {
        group.names = name.map(|name| vec![name.to_owned()]);
    }
    let tensors = ["a", "b", "x", "x"].map(|name| (name, F32, &[2][..]));
    let given: Vec<String> = given.iter().map(|name| (*name).to_owned()).collect();
    let found = name_parameters(&optimizer, Clone::clone, &parameters(&tensors, false), Some(&given));
    match (found, wanted) {
        (Ok((names, origin)), Ok(wanted)) => {
            assert_eq!((names.iter().map(String::as_str).collect::<Vec<_>>().as_slice(), origin), wanted);
        }
        (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{error}"),
        (found, wanted) => panic!("{found:?}, and {wanted:?} is wanted"),
    }
}

#[test]
fn an_optimizer_that_names_its_parameters_has_numbers_in_the_order_of_its_groups() {
    let texts = |names: &[&str]| Plain::List(names.iter().map(|name| Plain::text(*name)).collect());
    let state = Plain::Dict(vec![(Plain::text("b"), Plain::dict([("step", Plain::Int(2))]))]);
    let group = Plain::dict([("params", texts(&["a", "b"])), ("lr", Plain::Float(0.1))]);
    let state_dict: Plain<()> = Plain::dict([("state", state), ("param_groups", Plain::List(vec![group]))]);
    let optimizer = PythonOptimizer::read(&state_dict).unwrap();
    assert_eq!(optimizer.groups[0].params, [0, 1]);
    assert_eq!(optimizer.groups[0].names.as_deref(), Some(&["a".to_owned(), "b".to_owned()][..]));
    assert_eq!(optimizer.state[0].0, 1);
    let names = ["a".to_owned(), "b".to_owned()];
    assert_eq!(optimizer.named_state(&names).unwrap(), [("step.b".to_owned(), &Plain::Int(2))]);
}

#[rstest]
#[case(json!({ "betas": [0.9, 0.95], "eps": 1e-8 }), 0.9)]
#[case(json!({ "dampening": 0.0, "nesterov": true }), 0.5)]
#[case(json!({ "alpha": 0.99, "eps": 1e-8, "centered": false }), 0.25)]
#[case(json!({ "lr_decay": 0.0, "eps": 1e-10 }), 0.0)]
fn settings_of_a_group_are_the_same_after_both_ways(#[case] options: serde_json::Value, #[case] momentum: f64) {
    let group = json!({
        "name": "decay", "params": ["x.weight", "x.bias"], "lr": 0.1, "initial_lr": 0.2, "weight_decay": 0.01,
        "momentum": momentum, "options": options,
    });
    let values = json!({ "param_groups": [group] });
    let state_dict = PythonOptimizer::state_dict(&values, [("exp_avg.x.bias".to_owned(), 5)]).unwrap();
    let optimizer = PythonOptimizer::read(&state_dict).unwrap();
    assert_eq!(optimizer.state, [(1, vec![("exp_avg".to_owned(), Plain::Tensor(5))])]);
    let names = optimizer.groups[0].names.clone().unwrap();
    assert_eq!(optimizer.to_groups(&names, &mut Left::default()).unwrap(), values);
}

/// A program may put anything into a group.
#[test]
fn settings_of_a_group_that_have_no_place_are_noted() {
    let mut optimizer = optimizer(&[&[]], &[]);
    optimizer.groups[0].settings = vec![
        ("lr".to_owned(), Plain::Float(0.1)),
        ("betas".to_owned(), Plain::Tuple(vec![Plain::Float(0.9), Plain::Float(0.99)])),
        ("momentum".to_owned(), Plain::Float(0.25)),
        ("name".to_owned(), Plain::Int(3)),
    ];
    let mut left = Left::default();
    let groups = optimizer.to_groups(&[], &mut left).unwrap();
    assert_eq!(groups["param_groups"][0]["momentum"], json!(0.9));
    let wanted = [
        "param_groups[0].name (names of groups are texts)",
        "param_groups[0].momentum (an optimizer with betas has none)",
    ];
    assert_eq!(left.0, wanted);
}

#[test]
fn a_fresh_generator_draws_the_numbers_of_its_seed() {
    let [python, numpy]: [Plain<()>; 2] = fresh_random_states(5489);
    let (Plain::Tuple(python), Plain::Tuple(numpy)) = (python, numpy) else { panic!("no tuples") };
    let Plain::Tuple(words) = &python[1] else { panic!("{python:?}") };
    // The state that the authors' program begins with.
    assert_eq!(words[..2], [Plain::Int(5489), Plain::Int(1_301_868_182)]);
    assert_eq!((words.len(), &words[624]), (625, &Plain::Int(624)));
    assert_eq!((python[0].clone(), numpy[0].clone()), (Plain::Int(3), Plain::text("MT19937")));
}

#[rstest]
#[case(&[Some(true)], Ok(Some("AdamW")))]
#[case(&[Some(false), Some(false)], Ok(Some("Adam")))]
#[case(&[None], Ok(None))]
#[case(&[], Ok(None))]
#[case(&[Some(true), Some(false)], Err("`decoupled_weight_decay` is not the same"))]
#[case(&[Some(true), None], Err("`decoupled_weight_decay` is not the same"))]
fn an_adam_whose_weight_decay_is_decoupled_is_adamw(
    #[case] groups: &[Option<bool>],
    #[case] wanted: Result<Option<&str>, &str>,
) {
    let mut optimizer = optimizer(&vec![&[][..]; groups.len()], &[]);
    for (group, is_decoupled) in optimizer.groups.iter_mut().zip(groups) {
        group.settings.extend(is_decoupled.map(|it| ("decoupled_weight_decay".to_owned(), Plain::Bool(it))));
    }
    match (optimizer.class(), wanted) {
        (Ok(found), Ok(wanted)) => assert_eq!(found, wanted),
        (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{error}"),
        (found, wanted) => panic!("{found:?}, and {wanted:?} is wanted"),
    }
}

/// In the place of a number that is not read, 0 would be loaded.
#[rstest]
#[case("weight_decay", Plain::Other("numpy._core.multiarray.scalar".into()), "`weight_decay` of group 0 is no number, but numpy")]
#[case("momentum", Plain::Float(f64::INFINITY), "`momentum` of group 0 is no number, but inf")]
#[case("betas", Plain::Tuple(vec![Plain::Tensor(vec![2]), Plain::Float(0.9)]), "`betas` of group 0 is no number, but a tuple")]
fn settings_that_would_become_zero_are_refused(
    #[case] name: &str,
    #[case] value: Plain<Vec<u64>>,
    #[case] words: &str,
) {
    let mut optimizer = optimizer(&[&[]], &[]);
    optimizer.groups[0].settings = vec![("lr".to_owned(), Plain::Float(0.1)), (name.to_owned(), value)];
    let error = optimizer.to_groups(&[], &mut Left::default()).unwrap_err();
    assert!(error.to_string().contains(words), "{error}");
}

/// What groups of PyTorch 2.11's optimizers have.
#[rstest]
#[case("LBFGS", "lr max_iter max_eval tolerance_grad tolerance_change history_size line_search_fn", false)]
#[case("Rprop", "lr etas step_sizes foreach maximize differentiable capturable", false)]
#[case("ASGD", "lr lambd alpha t0 weight_decay foreach maximize differentiable capturable", false)]
#[case("Adadelta", "lr rho eps weight_decay maximize capturable foreach differentiable", false)]
#[case(
    "NAdam",
    "lr betas eps weight_decay momentum_decay decoupled_weight_decay maximize foreach capturable differentiable",
    false
)]
#[case("Muon", "lr weight_decay momentum nesterov ns_coefficients eps ns_steps adjust_lr_fn", false)]
#[case("RAdam", "lr betas eps weight_decay maximize foreach capturable decoupled_weight_decay differentiable", false)]
#[case("Adamax", "lr betas eps weight_decay foreach maximize differentiable capturable", false)]
#[case("SparseAdam", "lr betas eps maximize", false)]
#[case(
    "Adam and AdamW",
    "lr betas eps weight_decay amsgrad maximize foreach capturable differentiable fused decoupled_weight_decay",
    true
)]
#[case("AdamW of version 1", "lr betas eps weight_decay amsgrad", true)]
#[case("SGD", "lr momentum dampening weight_decay nesterov maximize foreach differentiable fused", true)]
#[case("Adafactor", "lr beta2_decay eps d weight_decay foreach maximize", true)]
#[case("Adagrad", "lr lr_decay eps weight_decay initial_accumulator_value foreach maximize differentiable fused", true)]
#[case("RMSprop", "lr momentum alpha eps centered weight_decay capturable foreach maximize differentiable", true)]
#[case("Lion", "lr betas weight_decay", true)]
fn optimizers_that_are_not_here_are_named(#[case] name: &str, #[case] settings: &str, #[case] is_here: bool) {
    let settings = settings.split(' ').map(|name| (name, Plain::<()>::Float(0.1)));
    let group = Plain::dict(settings.chain([("params", Plain::List(vec![Plain::Int(0)]))]));
    let state_dict = Plain::dict([
        ("state", Plain::Dict(Vec::new())),
        ("param_groups", Plain::List(vec![group])),
        ("epoch", Plain::None),
    ]);
    match PythonOptimizer::read(&state_dict) {
        Ok(optimizer) => assert!(is_here && optimizer.others == ["epoch"]),
        Err(error) => assert!(!is_here && error.to_string().contains(&format!("the state of {name}, an")), "{error}"),
    }
}
