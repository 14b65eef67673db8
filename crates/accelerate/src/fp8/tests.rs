//! Casts, scales and products, one at a time.

use super::cast::{Codes, dynamic_scale};
use super::product::{ProductOptions, Products};
use crate::error::Result;
use accelerate_core::fp8::{self, Float8};
use rstest::rstest;
use tch::{Device, Kind, Tensor};
use torch_ext::fp8::largest_number;

const OPTIONS: ProductOptions<'_> = ProductOptions { path: "layer", pad_inner_dim: true, adds_fast: false };

fn numbers(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(&tensor.f_to_kind(Kind::Float).unwrap().f_reshape([-1]).unwrap()).unwrap()
}

/// What is beyond the largest number becomes that, and what is no number stays so; a plain cast of libtorch's makes NaN of both.
#[rstest]
#[case(Float8::E4M3, &[1.0, 449.0, -1e9, f32::INFINITY, f32::NAN, 0.0], &[1.0, 448.0, -448.0, 448.0, f32::NAN, 0.0])]
#[case(Float8::E5M2, &[1.0, 57345.0, -1e9, f32::INFINITY, f32::NAN], &[1.0, 57344.0, -57344.0, 57344.0, f32::NAN])]
fn casts_saturate(#[case] format: Float8, #[case] values: &[f32], #[case] wanted: &[f32]) {
    let codes = Codes::delayed(&Tensor::from_slice(values), format, 1.0).unwrap();
    let found = numbers(&codes.numbers().unwrap());
    let same = |(found, wanted): (&f32, &f32)| found == wanted || (found.is_nan() && wanted.is_nan());
    assert!(found.iter().zip(wanted).all(same), "{found:?}");
}

/// The scale of tensors and the pure function are the same, to the bit.
#[rstest]
fn scales_are_those_of_the_pure_function(
    #[values(0.0, 1e-20, 1.75, 1.750_000_1, 3.0, 448.0, 1e30, f32::INFINITY, f32::NAN)] largest: f32,
    #[values(Float8::E4M3, Float8::E5M2)] format: Float8,
    #[values(false, true)] power_of_two: bool,
) {
    let matrix = Tensor::from_slice(&[0.0, -largest, 0.0]);
    let found = numbers(&dynamic_scale(&matrix, format, None, power_of_two).unwrap())[0];
    let wanted = fp8::dynamic_scale(largest, format, power_of_two);
    assert!(found.to_bits() == wanted.to_bits() || (found.is_nan() && wanted.is_nan()), "{found} {wanted}");
}

#[test]
fn rows_have_scales_of_their_own() {
    let matrix = Tensor::from_slice(&[1.0f32, 7.0, -14.0, 0.5]).f_view([2, 2]).unwrap();
    let scale = |dim| dynamic_scale(&matrix, Float8::E4M3, Some(dim), false).unwrap();
    assert_eq!((scale(1).size(), numbers(&scale(1))), (vec![2, 1], vec![64.0, 32.0]));
    assert_eq!((scale(0).size(), numbers(&scale(0))), (vec![1, 2], vec![32.0, 64.0]));
}

#[test]
fn the_largest_value_passes_over_what_is_no_number() {
    let largest = |values: &[f32]| numbers(&largest_number(&Tensor::from_slice(values)).unwrap())[0];
    assert_eq!(largest(&[1.0, f32::NAN, -3.0]), 3.0);
    assert_eq!(largest(&[f32::NEG_INFINITY, 1.0]), f32::INFINITY);
    assert_eq!(largest(&[f32::NAN]), 0.0);
}

/// The product of a GPU's kernel, as far as a CPU has it: with one scale for each matrix, padded where 16 does not divide.
#[rstest]
fn the_scaled_product_is_that_of_the_numbers(
    #[values([32, 48, 16], [16, 20, 32], [3, 5, 16])] shape: [i64; 3],
    #[values(Float8::E4M3, Float8::E5M2)] format: Float8,
    #[values(Kind::Float, Kind::BFloat16)] kind: Kind,
) -> Result<()> {
    let [m, k, n] = shape;
    tch::manual_seed(1);
    let random = |shape: [i64; 2]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
    let a = Codes::dynamic(&random([m, k]), format, None, false)?;
    let b = Codes::dynamic(&random([n, k]), Float8::E4M3, None, false)?.transposed()?;
    let wanted = Products::OF_NUMBERS.product(&a, &b, kind, OPTIONS)?;
    let found = Products::SCALED.product(&a, &b, kind, OPTIONS)?;
    assert_eq!((found.size(), found.kind()), (vec![m, n], kind));
    // Sums of 32 bits in another order, and for bfloat16 its last digit.
    let tolerance = if kind == Kind::Float { 1e-5 } else { 2f64.powi(-7) };
    let apart = (found.to_kind(Kind::Double) - wanted.to_kind(Kind::Double)).abs().max().double_value(&[]);
    assert!(apart <= tolerance * wanted.abs().max().double_value(&[]), "{apart}");
    Ok(())
}

#[test]
fn rows_that_nobody_pads_are_an_error() {
    let codes = |shape: [i64; 2]| {
        Codes::dynamic(&Tensor::ones(shape, (Kind::Float, Device::Cpu)), Float8::E4M3, None, false).unwrap()
    };
    let options = ProductOptions { pad_inner_dim: false, ..OPTIONS };
    let error = Products::SCALED.product(&codes([16, 20]), &codes([20, 16]), Kind::Float, options).unwrap_err();
    assert!(error.to_string().contains("the layer layer got 20 rows"), "{error}");
    assert!(Products::OF_NUMBERS.product(&codes([16, 20]), &codes([20, 16]), Kind::Float, options).is_ok());
}

/// What torchao makes of a matrix; floats are their bits.
#[derive(serde::Deserialize)]
struct OfTorchao {
    name: String,
    bfloat16: bool,
    format: String,
    dim: Option<i64>,
    shape: Vec<i64>,
    numbers: Vec<i32>,
    scale: Vec<i32>,
    codes: Vec<u8>,
}

#[test]
fn scales_and_codes_are_those_of_torchao_to_the_bit() {
    let text = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../parity/fp8/scales.json"));
    let cases: Vec<OfTorchao> = serde_json::from_str(text).unwrap();
    assert_eq!(cases.len(), 120);
    for case in cases {
        let matrix = Tensor::from_slice(&case.numbers).view_dtype(Kind::Float).reshape(&case.shape);
        let matrix = if case.bfloat16 { matrix.to_kind(Kind::BFloat16) } else { matrix };
        let format = if case.format == "E4M3" { Float8::E4M3 } else { Float8::E5M2 };
        let codes = Codes::dynamic(&matrix, format, case.dim, case.dim.is_some()).unwrap();
        let bits = Vec::<i32>::try_from(codes.scale.contiguous().view_dtype(Kind::Int).reshape([-1])).unwrap();
        let bytes = Vec::<u8>::try_from(codes.data.contiguous().view_dtype(Kind::Uint8).reshape([-1])).unwrap();
        let what = format!("{} bfloat16={} {} dim={:?}", case.name, case.bfloat16, case.format, case.dim);
        // What is not a number has many bits, all of which mean the same.
        let is_nan = |bits: &i32| f32::from_bits(*bits as u32).is_nan();
        let same = |(found, wanted): (&i32, &i32)| found == wanted || (is_nan(found) && is_nan(wanted));
        assert!(bits.iter().zip(&case.scale).all(same) && bits.len() == case.scale.len(), "{what}");
        let numbers = |bytes: &[u8]| {
            let codes = Tensor::from_slice(bytes).view_dtype(codes.data.kind()).to_kind(Kind::Float);
            Vec::<f32>::try_from(codes).unwrap()
        };
        let (found, wanted) = (numbers(&bytes), numbers(&case.codes));
        let same =
            |(found, wanted): (&f32, &f32)| found.to_bits() == wanted.to_bits() || (found.is_nan() && wanted.is_nan());
        assert!(found.len() == wanted.len() && found.iter().zip(&wanted).all(same), "{what}: {found:?} {wanted:?}");
    }
}
