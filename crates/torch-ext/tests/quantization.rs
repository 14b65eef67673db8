//! Kernels for weights of 4 and 8 bits: the same bits with every set of instructions, products beside those of double precision, and
//! arguments that do not fit. The numbers of bitsandbytes are in `crates/accelerate/tests/quant_parity.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Mutex;
use tch::{Device, Kind, Tensor};
use torch_ext::quantization::{
    Blocks4bit, FourBitCode, Vectors, dequantize_4bit, dequantize_blockwise, int8_dequantize, int8_scaled_mm,
    int8_vectorwise_quant, linear_4bit, quantize_4bit, quantize_blockwise, set_widest_vectors,
};

const VECTORS: [Vectors; 4] = [Vectors::Portable, Vectors::Avx2, Vectors::Avx512, Vectors::All];
const CPU_FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// The instructions are those of the whole program.
static NARROWED: Mutex<()> = Mutex::new(());

fn for_all_vectors<R>(mut run: impl FnMut(Vectors) -> R) -> Vec<R> {
    let _alone = NARROWED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let results = VECTORS.map(|vectors| {
        set_widest_vectors(vectors);
        run(vectors)
    });
    set_widest_vectors(Vectors::All);
    results.into()
}

/// Not sorted, and with two codes for zero.
fn code() -> FourBitCode {
    const SIZES: [f32; 8] = [0.0, 0.005, 0.67, 1.0, 0.33, 0.5, 0.17, 0.25];
    FourBitCode::new(std::array::from_fn(|code| if code < 9 { SIZES[code % 8] } else { -SIZES[code - 8] }))
}

#[test]
fn codes_are_the_same_with_all_instructions() {
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        for count in [1, 2, 31, 64, 65, 129, 5000] {
            for block_size in [32, 64, 4096] {
                let numbers = (Tensor::randn([count], CPU_FLOAT) * 0.1).to_kind(kind);
                let found = for_all_vectors(|_| {
                    let (packed, absmax) = quantize_4bit(&numbers, &code(), block_size).unwrap();
                    let blocks = Blocks4bit { packed: &packed, absmax: &absmax, block_size, code: &code() };
                    let back = [Kind::Float, Kind::BFloat16, Kind::Half]
                        .map(|kind| dequantize_4bit(blocks, &[count], kind).unwrap());
                    // The nearest of sixteen is at most half the largest gap away.
                    let error = (&back[0] - numbers.to_kind(Kind::Float)).abs().max().double_value(&[]);
                    assert!(error <= 0.17 * numbers.abs().max().double_value(&[]), "{error}");
                    (packed, absmax, back)
                });
                assert!(found.iter().all(|other| *other == found[0]), "{kind:?} {count} {block_size}");
            }
        }
    }
}

#[test]
fn blocks_without_numbers_come_back_as_such() {
    let mut numbers = Tensor::zeros([160], CPU_FLOAT);
    let _ = numbers.get(70).fill_(f64::NAN);
    let _ = numbers.get(130).fill_(f64::INFINITY);
    let (packed, absmax) = quantize_4bit(&numbers, &code(), 64).unwrap();
    let back = dequantize_4bit(
        Blocks4bit { packed: &packed, absmax: &absmax, block_size: 64, code: &code() },
        &[160],
        Kind::Float,
    );
    let back = Vec::<f32>::try_from(back.unwrap()).unwrap();
    assert!(back[..64].iter().all(|number| *number == 0.0));
    assert!(back[64..].iter().all(|number| !number.is_finite()));
    let _ = numbers.fill_(0.0);
    let (_, absmax) = quantize_4bit(&numbers, &code(), 64).unwrap();
    // bitsandbytes never divides the last block by less, if it is not whole.
    assert_eq!(Vec::<f32>::try_from(absmax).unwrap(), [0.0, 0.0, 1e-38]);
}

#[test]
fn products_of_four_bits_are_those_of_their_numbers() {
    for [rows, columns] in [[1, 64], [70, 128], [130, 1536], [33, 96], [5, 9]] {
        for (inputs, kind) in
            [1, 2, 3, 5, 7, 13].iter().flat_map(|n| [(*n, Kind::Float), (*n, Kind::BFloat16), (*n, Kind::Half)])
        {
            let weight = Tensor::randn([rows, columns], CPU_FLOAT) * 0.05;
            let (packed, absmax) = quantize_4bit(&weight, &code(), 64).unwrap();
            let blocks = Blocks4bit { packed: &packed, absmax: &absmax, block_size: 64, code: &code() };
            let input = Tensor::randn([2, inputs, columns], CPU_FLOAT).to_kind(kind);
            let bias = Tensor::randn([rows], CPU_FLOAT);
            let numbers = dequantize_4bit(blocks, &[rows, columns], Kind::Float).unwrap().to_kind(Kind::Double);
            let wanted = input.to_kind(Kind::Double).linear(&numbers, Some(bias.to_kind(Kind::Double)));
            let scale = wanted.abs().max().double_value(&[]);
            for_all_vectors(|vectors| {
                let found = linear_4bit(&input, blocks, [rows, columns], Some(&bias)).unwrap();
                assert_eq!((found.kind(), found.size()), (kind, vec![2, inputs, rows]));
                let error = (found.to_kind(Kind::Double) - &wanted).abs().max().double_value(&[]) / scale;
                // Roundings of the result and of weights.
                let most = [(Kind::Float, 1e-5), (Kind::BFloat16, 1e-2), (Kind::Half, 1e-3)]
                    .iter()
                    .find(|row| row.0 == kind)
                    .unwrap()
                    .1;
                assert!(error <= most, "[{rows}, {columns}] {inputs} {kind:?} {vectors:?}: {error}");
            });
        }
    }
}

#[test]
fn rows_of_eight_bits_and_their_products() {
    let numbers = (Tensor::randn([6, 40], CPU_FLOAT) * 2.0).to_kind(Kind::Half);
    let _ = numbers.get(2).get(7).fill_(-8.0);
    let _ = numbers.get(4).fill_(0.0);
    let found = for_all_vectors(|_| int8_vectorwise_quant(&numbers, 7.5).unwrap());
    let first = &found[0];
    for other in &found {
        assert_eq!((&other.codes, &other.scales), (&first.codes, &first.scales));
    }
    assert!(Vec::<i64>::try_from(&first.outlier_columns).unwrap().contains(&7));
    assert_eq!(first.codes.get(4).abs().max().int64_value(&[]), 0);
    let plain = int8_vectorwise_quant(&numbers, 0.0).unwrap();
    assert_eq!(plain.outlier_columns.numel(), 0);
    let back = int8_dequantize(&plain.codes, &plain.scales, Kind::Float).unwrap();
    let error = (&back - numbers.to_kind(Kind::Float)).abs().max().double_value(&[]);
    assert!(error <= 0.51 * plain.scales.max().double_value(&[]) / 127.0, "{error}");
    let bias = Tensor::randn([6], CPU_FLOAT);
    let rows = (&plain.codes, &plain.scales);
    let product = int8_scaled_mm(rows, rows, Some(&bias), Kind::Float).unwrap();
    let wanted = back.matmul(&back.tr()) + &bias;
    assert!((product - wanted).abs().max().double_value(&[]) < 1e-3);
}

#[test]
fn sums_of_bytes_are_exact() {
    // Rows around panels of 64, inputs around tiles of 6, columns around units of 4 and 64, and around 1024 of a panel.
    for [inputs, rows, columns] in
        [[1, 1, 4], [7, 66, 100], [6, 64, 1024], [13, 63, 1028], [5, 17, 39], [2, 130, 4096], [770, 3, 8]]
    {
        for range in [(-128, 128), (-128, -127), (127, 128)] {
            let bytes = |rows| Tensor::randint_low(range.0, range.1, [rows, columns], (Kind::Int8, Device::Cpu));
            let (a, b) = (bytes(inputs), bytes(rows));
            let ones = |count| Tensor::ones([count], CPU_FLOAT) * 127.0;
            let wanted = a.to_kind(Kind::Double).matmul(&b.tr().to_kind(Kind::Double)).to_kind(Kind::Float);
            for_all_vectors(|vectors| {
                let found = int8_scaled_mm((&a, &ones(inputs)), (&b, &ones(rows)), None, Kind::Float).unwrap();
                let apart = (&found / &wanted - 1.0).abs().nan_to_num(0.0, 1.0, 1.0).max().double_value(&[]);
                assert!(apart < 1e-6, "{inputs} {rows} {columns} {range:?} {vectors:?}: {apart}");
            });
        }
    }
}

#[test]
fn scales_are_written_in_eight_bits() {
    let table = Tensor::linspace(-1.0, 1.0, 256, CPU_FLOAT);
    let numbers = Tensor::randn([700], CPU_FLOAT);
    let (codes, absmax) = quantize_blockwise(&numbers, &table, 256).unwrap();
    assert_eq!((codes.kind(), absmax.size()), (Kind::Uint8, vec![3]));
    let back = dequantize_blockwise(&codes, &absmax, &table, 256, 0.5).unwrap() - 0.5;
    let error = (back - numbers).abs().max().double_value(&[]);
    assert!(error <= absmax.max().double_value(&[]) / 254.0, "{error}");
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let numbers = Tensor::randn([4, 64], CPU_FLOAT);
    let code = code();
    let (packed, absmax) = quantize_4bit(&numbers, &code, 64).unwrap();
    let blocks = Blocks4bit { packed: &packed, absmax: &absmax, block_size: 64, code: &code };
    let short = Blocks4bit { absmax: &absmax.narrow(0, 0, 3), ..blocks };
    let floats = Blocks4bit { packed: &numbers, ..blocks };
    let x = Tensor::randn([2, 64], CPU_FLOAT);
    let errors = [
        quantize_4bit(&numbers, &code, 48).map(|_| ()),
        quantize_4bit(&numbers, &code, 0).map(|_| ()),
        quantize_4bit(&numbers.to_kind(Kind::Double), &code, 64).map(|_| ()),
        dequantize_4bit(blocks, &[4, 65], Kind::Float).map(|_| ()),
        dequantize_4bit(blocks, &[-4, -64], Kind::Float).map(|_| ()),
        dequantize_4bit(blocks, &[i64::MAX, 64], Kind::Float).map(|_| ()),
        dequantize_4bit(blocks, &[4, 64], Kind::Int64).map(|_| ()),
        dequantize_4bit(short, &[4, 64], Kind::Float).map(|_| ()),
        dequantize_4bit(floats, &[4, 64], Kind::Float).map(|_| ()),
        linear_4bit(&x, blocks, [64, 4], None).map(|_| ()),
        linear_4bit(&x.to_kind(Kind::Double), blocks, [4, 64], None).map(|_| ()),
        linear_4bit(&x, blocks, [4, 64], Some(&x)).map(|_| ()),
        int8_vectorwise_quant(&x, 0.0).map(|_| ()),
        int8_dequantize(&packed, &absmax, Kind::Float).map(|_| ()),
    ];
    for (place, error) in errors.into_iter().enumerate() {
        let error = error.expect_err(&place.to_string());
        assert!(error.is_invalid_argument(), "{place}: {error}");
    }
}
