//! Every operation on tensors for every dtype and shape: nothing panics, dtypes and shapes are kept, and what a dtype cannot
//! hold is an error.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::data::{
    SendToDeviceOptions, concatenate, find_batch_size, pad_input_tensors, send_to_device, slice_tensors,
};
use accelerate::nn::ParamStore;
use accelerate::optim::{ClipGradNorm, clip_grad_norm_, clip_grad_value_};
use accelerate::testing::ranks;
use accelerate::{Accelerator, PadOptions, ReduceOp, ReduceOptions, Result};
use std::f64::consts::FRAC_1_SQRT_2;
use tch::{Device, Kind, Tensor};

const KINDS: [Kind; 12] = [
    Kind::Bool,
    Kind::Uint8,
    Kind::Int8,
    Kind::Int16,
    Kind::Int,
    Kind::Int64,
    Kind::Half,
    Kind::BFloat16,
    Kind::Float,
    Kind::Double,
    Kind::ComplexFloat,
    Kind::ComplexDouble,
];

const NUMBERS: [f64; 7] = [-1.0, 0.0, 1.0, 2.5, 300.0, f64::NAN, f64::INFINITY];

fn is_complex(kind: Kind) -> bool {
    matches!(kind, Kind::ComplexFloat | Kind::ComplexDouble)
}

fn is_float(kind: Kind) -> bool {
    matches!(kind, Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double)
}

/// Of [`NUMBERS`].
fn holds(kind: Kind, number: f64) -> bool {
    match kind {
        Kind::Bool => number == 0.0 || number == 1.0,
        Kind::Uint8 => number == 0.0 || number == 1.0,
        Kind::Int8 => [-1.0, 0.0, 1.0].contains(&number),
        Kind::Int16 | Kind::Int | Kind::Int64 => [-1.0, 0.0, 1.0, 300.0].contains(&number),
        _ => true,
    }
}

/// A scalar, no rows, rows, rows of nothing, rows of rows, and three that are not contiguous.
fn tensors(kind: Kind) -> Vec<Tensor> {
    let ones = |shape: &[i64]| Tensor::ones(shape, (kind, Device::Cpu));
    vec![
        ones(&[]),
        ones(&[0]),
        ones(&[3]),
        ones(&[2, 0]),
        ones(&[2, 2]),
        ones(&[3, 2]).transpose(0, 1),
        ones(&[6]).slice(0, 0, 6, 2),
        ones(&[1, 2]).expand([3, 2], false),
        ones(&[2]).conj(),
    ]
}

/// One call: what it gives, or what its error has to contain.
fn check(call: &str, tensor: &Tensor, outcome: Result<Tensor>, expected: std::result::Result<Vec<i64>, &str>) {
    let what = format!("{call} of {:?} {:?}", tensor.size(), tensor.kind());
    match (outcome, expected) {
        (Ok(found), Ok(shape)) => assert_eq!((found.kind(), found.size()), (tensor.kind(), shape), "{what}"),
        (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{what}: {error}"),
        (Ok(found), Err(words)) => panic!("{what} gives {found:?}, not an error with {words:?}"),
        (Err(error), Ok(_)) => panic!("{what}: {error}"),
    }
}

/// What is the same for every shape is tried with one of them.
fn numbers_for(tensor: &Tensor) -> Vec<f64> {
    if tensor.dim() == 1 && tensor.size() != [0] && tensor.is_contiguous() { NUMBERS.to_vec() } else { vec![1.0] }
}

fn check_collectives(accelerator: &Accelerator, tensor: &Tensor) {
    let (kind, shape, world_size) = (tensor.kind(), tensor.size(), accelerator.num_processes());
    let mut gathered = if shape.is_empty() { vec![1] } else { shape.clone() };
    gathered[0] *= world_size as i64;
    check("gather", tensor, accelerator.gather(tensor), Ok(gathered.clone()));
    check("gather_for_metrics", tensor, accelerator.gather_for_metrics(tensor), Ok(gathered));
    check("broadcast", tensor, accelerator.broadcast(tensor, world_size - 1), Ok(shape.clone()));
    for reduction in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min] {
        for scale in numbers_for(tensor) {
            let has_mean = is_float(kind) || is_complex(kind);
            let has_order = !is_complex(kind);
            let expected = match reduction {
                _ if !holds(kind, scale) => Err("which this dtype cannot hold"),
                ReduceOp::Mean if world_size > 1 && !has_mean => Err("cannot give the mean of"),
                ReduceOp::Max | ReduceOp::Min if world_size > 1 && !has_order => Err("complex numbers have no order"),
                _ => Ok(shape.clone()),
            };
            let outcome = accelerator.reduce(tensor, ReduceOptions { reduction, scale });
            check(&format!("reduce({reduction:?}, {scale})"), tensor, outcome, expected);
        }
    }
    check_padding(accelerator, tensor);
}

/// Rank r's tensor has r rows more.
fn check_padding(accelerator: &Accelerator, tensor: &Tensor) {
    let more = accelerator.process_index() as i64;
    for dim in [0, 1, -1, 5] {
        let mut shape = tensor.size();
        let index = if dim < 0 { dim + shape.len() as i64 } else { dim };
        let is_there = (0..shape.len() as i64).contains(&index);
        let mut own = tensor.shallow_clone();
        if is_there {
            let mut added = shape.clone();
            added[index as usize] = more;
            own = Tensor::cat(&[own, Tensor::ones(&added, (tensor.kind(), Device::Cpu))], index);
            shape[index as usize] += accelerator.num_processes() as i64 - 1;
        }
        for (pad_index, pad_first) in
            numbers_for(tensor).into_iter().flat_map(|number| [(number, false), (number, true)])
        {
            let options = PadOptions { dim, pad_index, pad_first };
            let expected = match is_there && !holds(tensor.kind(), pad_index) {
                true => Err("which this dtype cannot hold"),
                false => Ok(shape.clone()),
            };
            check(&format!("{options:?}"), &own, accelerator.pad_across_processes(&own, options), expected);
        }
    }
}

#[test]
fn collectives_keep_every_dtype_and_shape() {
    for world_size in 1..=3 {
        ranks(world_size, Default::default(), |accelerator| {
            KINDS.iter().flat_map(|kind| tensors(*kind)).for_each(|tensor| check_collectives(&accelerator, &tensor));
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn operations_of_one_process_keep_every_dtype_and_shape() {
    for tensor in KINDS.iter().flat_map(|kind| tensors(*kind)) {
        let (shape, options) = (tensor.size(), SendToDeviceOptions::default());
        check(
            "send_to_device",
            &tensor,
            send_to_device(tensor.shallow_clone(), Device::Cpu, options),
            Ok(shape.clone()),
        );
        assert_eq!(find_batch_size(&tensor).is_ok(), !shape.is_empty());
        let Some(&rows) = shape.first() else {
            let _ = slice_tensors(&tensor, 0..1);
            assert!(concatenate(&[tensor.shallow_clone(), tensor.shallow_clone()], 0).is_err());
            assert!(pad_input_tensors(&tensor, 2, 0).is_err());
            continue;
        };
        let with_rows = |rows: i64| [&[rows], &shape[1..]].concat();
        check("slice_tensors", &tensor, slice_tensors(&tensor, 0..1), Ok(with_rows(rows.min(1))));
        let twice = concatenate(&[tensor.shallow_clone(), tensor.shallow_clone()], 0);
        check("concatenate", &tensor, twice, Ok(with_rows(2 * rows)));
        check("pad_input_tensors", &tensor, pad_input_tensors(&tensor, 2, 0), Ok(with_rows(rows + rows % 2)));
    }
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    let real = if is_complex(tensor.kind()) { tensor.real() } else { tensor.shallow_clone() };
    Vec::try_from(&real.to_kind(Kind::Double).contiguous()).unwrap()
}

/// What Accelerate 1.15.0 with torch 2.11.0 gives on two ranks, by `python -m torch.distributed.run --nproc_per_node 2` of
///
/// ```text
/// rank = PartialState(cpu=True).process_index
/// mine = torch.tensor([rank + 1, 2], dtype=dtype)
/// print(dtype, gather(mine).tolist(), reduce(mine, "sum").tolist(), reduce(mine, "mean").tolist())
/// print(pad_across_processes(torch.ones(rank + 1, dtype=dtype), 0, -1).tolist())
/// ```
///
/// Rows: the dtype, the gathered, the sum, the mean where there is one, and what rank 0 has after padding. Int16 fails there
/// ("Invalid scalar type"), the padded bool is an integer, and -1 in uint8 is 255.
type Reference = (Kind, [f64; 4], [f64; 2], Option<[f64; 2]>, Option<[f64; 2]>);
const REFERENCE: [Reference; 10] = [
    (Kind::Bool, [1.0, 1.0, 1.0, 1.0], [1.0, 1.0], None, None),
    (Kind::Uint8, [1.0, 2.0, 2.0, 2.0], [3.0, 4.0], None, None),
    (Kind::Int8, [1.0, 2.0, 2.0, 2.0], [3.0, 4.0], None, Some([1.0, -1.0])),
    (Kind::Int, [1.0, 2.0, 2.0, 2.0], [3.0, 4.0], None, Some([1.0, -1.0])),
    (Kind::Int64, [1.0, 2.0, 2.0, 2.0], [3.0, 4.0], None, Some([1.0, -1.0])),
    (Kind::Half, [1.0, 2.0, 2.0, 2.0], [3.0, 4.0], Some([1.5, 2.0]), Some([1.0, -1.0])),
    (Kind::BFloat16, [1.0, 2.0, 2.0, 2.0], [3.0, 4.0], Some([1.5, 2.0]), Some([1.0, -1.0])),
    (Kind::Float, [1.0, 2.0, 2.0, 2.0], [3.0, 4.0], Some([1.5, 2.0]), Some([1.0, -1.0])),
    (Kind::Double, [1.0, 2.0, 2.0, 2.0], [3.0, 4.0], Some([1.5, 2.0]), Some([1.0, -1.0])),
    (Kind::ComplexFloat, [1.0, 2.0, 2.0, 2.0], [3.0, 4.0], Some([1.5, 2.0]), Some([1.0, -1.0])),
];

#[test]
fn values_are_those_of_the_reference() {
    ranks(2, Default::default(), |accelerator| {
        let rank = accelerator.process_index() as i64;
        for (kind, gathered, sum, mean, padded) in REFERENCE {
            let mine = Tensor::from_slice(&[rank + 1, 2]).to_kind(kind);
            assert_eq!(numbers(&accelerator.gather(&mine)?), gathered, "{kind:?}");
            let total = accelerator.reduce(&mine, ReduceOp::Sum)?;
            assert_eq!(numbers(&total), sum, "{kind:?}");
            assert_eq!(accelerator.reduce(&mine, ReduceOp::Mean).ok().map(|mean| numbers(&mean)), mean.map(Vec::from));
            let rows = Tensor::ones([rank + 1], (kind, Device::Cpu));
            let options = PadOptions { pad_index: -1.0, ..Default::default() };
            let found = accelerator.pad_across_processes(&rows, options).ok().map(|padded| numbers(&padded));
            let expected = if rank == 0 { padded } else { padded.map(|_| [1.0, 1.0]) };
            assert_eq!(found, expected.map(Vec::from), "{kind:?}");
            let options = ReduceOptions { scale: 3.0, ..Default::default() };
            if kind != Kind::Bool {
                assert_eq!(numbers(&accelerator.reduce(&mine, options)?), sum.map(|sum| 3.0 * sum), "{kind:?}");
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn the_sum_of_bools_is_a_bool() {
    let sums = ranks(3, Default::default(), |accelerator| {
        let mine = Tensor::from_slice(&[false, accelerator.is_main_process(), true]);
        let sum = accelerator.reduce(&mine, ReduceOp::Sum)?;
        let none = accelerator.reduce(&mine, ReduceOptions { scale: 0.0, ..Default::default() })?;
        Ok([sum, none].map(|tensor| Vec::<u8>::try_from(&tensor.view_dtype(Kind::Uint8)).unwrap()))
    });
    assert_eq!(sums.unwrap(), [[[0, 1, 1], [0, 0, 0]]; 3]);
}

#[test]
fn conjugated_and_negated_views_travel_as_what_they_are() {
    let outcome = ranks(2, Default::default(), |accelerator| {
        let mine = Tensor::complex(&Tensor::from_slice(&[1.0, 2.0]), &Tensor::from_slice(&[3.0, 4.0])).conj();
        for (view, wanted) in [(mine.imag(), [-3.0, -4.0]), (mine.internal_neg_view().real(), [-1.0, -2.0])] {
            assert_eq!(numbers(&accelerator.broadcast(&view, 0)?), wanted);
            assert_eq!(numbers(&accelerator.gather(&view)?), [wanted, wanted].concat());
            assert_eq!(numbers(&accelerator.reduce(&view, ReduceOp::Mean)?), wanted);
        }
        assert_eq!(numbers(&accelerator.gather(&mine)?.imag()), [-3.0, -4.0, -3.0, -4.0]);
        assert_eq!(numbers(&accelerator.reduce(&mine, ReduceOp::Sum)?.imag()), [-6.0, -8.0]);
        Ok(())
    });
    outcome.unwrap();
}

#[test]
fn other_options_on_another_rank_are_an_error_on_all() {
    let errors = ranks(2, Default::default(), |accelerator| {
        let tensor = Tensor::from_slice(&[1i64]);
        let number = [1.0, 2.5][accelerator.process_index()];
        let scaled = accelerator.reduce(&tensor, ReduceOptions { scale: number, ..Default::default() });
        let padded = accelerator.pad_across_processes(&tensor, PadOptions { pad_index: number, ..Default::default() });
        Ok([scaled.unwrap_err().to_string(), padded.unwrap_err().to_string()])
    });
    for [scaled, padded] in errors.unwrap() {
        assert!(scaled.contains("scale 1)") && scaled.contains("scale 2.5)"), "{scaled}");
        assert!(padded.contains("pad_index 1)") && padded.contains("pad_index 2.5)"), "{padded}");
    }
}

/// A parameter of this dtype and shape whose gradient is full of `gradient`.
fn with_gradient(kind: Kind, shape: &[i64], gradient: f64) -> ParamStore {
    let store = ParamStore::with_kind(Device::Cpu, kind);
    let weight = store.root().param("weight", Tensor::ones(shape, (kind, Device::Cpu))).unwrap();
    let product = weight.get().unwrap() * gradient;
    let loss = if is_complex(kind) { product.real() } else { product };
    torch_ext::autograd::backward(&[&loss.sum(None)], None, Default::default()).unwrap();
    store
}

/// `torch.nn.utils.clip_grad_value_` and `clip_grad_norm_` of torch 2.11.0 on a gradient of [3, 3], whose norm is 4.2426.
const CLIPPED: [(f64, f64, f64); 5] = [
    (0.0, 0.0, 0.0),
    (-1.0, -1.0, -FRAC_1_SQRT_2),
    (1.0, 1.0, FRAC_1_SQRT_2),
    (f64::NAN, f64::NAN, f64::NAN),
    (f64::INFINITY, 3.0, 3.0),
];

#[test]
fn gradients_are_clipped_in_every_dtype() {
    for kind in KINDS.into_iter().filter(|kind| is_float(*kind) || is_complex(*kind)) {
        for (limit, by_value, by_norm) in CLIPPED {
            for shape in [&[][..], &[0], &[2], &[2, 0], &[2, 2]] {
                let gradient = |store: &ParamStore| store.trainable_parameters()[0].get().unwrap().grad();
                let check = |store: &ParamStore, wanted: f64| {
                    let found = gradient(store);
                    assert_eq!((found.kind(), found.size().as_slice()), (kind, shape));
                    if shape != [2] {
                        return;
                    }
                    for number in numbers(&found) {
                        let is_close = (number - wanted).abs() < 4e-3 || number.is_nan() && wanted.is_nan();
                        assert!(is_close, "{kind:?} {limit}: {number} in place of {wanted}");
                    }
                };
                let store = with_gradient(kind, shape, 3.0);
                let clipped = clip_grad_value_(&store.trainable_parameters(), limit);
                assert_eq!(clipped.is_ok(), !is_complex(kind), "{kind:?}");
                check(&store, if clipped.is_ok() { by_value } else { 3.0 });
                for norm_type in [2.0, 1.0, 0.5, f64::INFINITY] {
                    let store = with_gradient(kind, shape, 3.0);
                    let clipping = ClipGradNorm { max_norm: limit, norm_type, error_if_nonfinite: false };
                    let clipped = clip_grad_norm_(&store.trainable_parameters(), clipping);
                    if norm_type == 2.0 {
                        let _norm = clipped.unwrap();
                        check(&store, by_norm);
                    }
                }
            }
        }
    }
}

/// Rank `r` puts in 1 where `r` is 0 and 0 elsewhere in the first column, and the other way round in the second.
#[test]
fn reductions_have_the_right_values_in_every_dtype() {
    for world_size in [1, 2, 3] {
        let check = |accelerator: Accelerator| -> Result<()> {
            let is_first = accelerator.process_index() == 0;
            let others = (world_size - 1) as f64;
            for kind in KINDS {
                let own =
                    Tensor::from_slice(&[f64::from(u8::from(is_first)), f64::from(u8::from(!is_first))]).to_kind(kind);
                let most = f64::from(u8::from(others > 0.0));
                // The sum of bools says whether any is true.
                let sum = if kind == Kind::Bool { most } else { others };
                let mut wanted = vec![(ReduceOp::Sum, [1.0, sum])];
                if !is_complex(kind) {
                    wanted.push((ReduceOp::Max, [1.0, most]));
                    wanted.push((ReduceOp::Min, if others > 0.0 { [0.0, 0.0] } else { [1.0, 0.0] }));
                }
                for (op, wanted) in wanted {
                    let reduced = own.copy();
                    accelerator.group().all_reduce(&reduced, op)?;
                    let wanted = Tensor::from_slice(&wanted).to_kind(kind);
                    assert!(reduced.equal(&wanted), "{op:?} of {kind:?} on {world_size} ranks: {reduced:?} {wanted:?}");
                }
            }
            Ok(())
        };
        ranks(world_size, Accelerator::builder().cpu(true), check).unwrap();
    }
}
