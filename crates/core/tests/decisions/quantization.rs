//! Quantised weights: tables, names, and what files may say.

use accelerate_core::config::{FloatType, QuantType};
use accelerate_core::quantization::{
    FourBitNames, LayerFacts, NestedState, QuantState, StoredWeight, dynamic_map, four_bit_values, layers_to_quantize,
    recognise,
};

#[test]
fn quantisation_tables_are_those_of_bitsandbytes() {
    let sum = |numbers: &[f32]| numbers.iter().map(|&number| f64::from(number)).sum::<f64>();
    assert!((sum(&four_bit_values(QuantType::Nf4)) - 0.374_373_525_381_088_26).abs() < 1e-12);
    let fp4 = four_bit_values(QuantType::Fp4);
    assert_eq!((fp4[1], fp4[2], fp4[8], fp4[15]), (0.0625 / 12.0, 8.0 / 12.0, 0.0, -0.25));
    let map = dynamic_map();
    assert!(map.windows(2).all(|pair| pair[0] < pair[1]));
    // Of both halves of the highest decade, where a rounding more would show.
    for (place, wanted) in [(18, 0xbf3d_6666_u32), (0, 0xbf7e_3333), (255, 0x3f80_0000), (127, 0)] {
        assert_eq!(map[place].to_bits(), wanted, "{place}: {}", map[place]);
    }
}

#[test]
fn a_quant_state_is_written_as_python_writes_it() {
    let state = |offset: f32| QuantState {
        quant_type: QuantType::Fp4,
        block_size: 64,
        dtype: FloatType::Float16,
        shape: vec![4, 32],
        nested: Some(NestedState { block_size: 256, offset }),
    };
    let rows = [
        (2.596_068_9, "2.596068859100342"),
        (0.0, "0.0"),
        (1.0, "1.0"),
        (0.000_123, "0.0001230000052601099"),
        (0.000_012_3, "1.2299999980314169e-05"),
        (1e20, "1.0000000200408773e+20"),
    ];
    for (offset, wanted) in rows {
        let json = state(offset).to_json();
        assert!(json.ends_with(&format!("\"nested_offset\": {wanted}}}")), "{json}");
        assert_eq!(QuantState::from_json("w", QuantType::Fp4, json.as_bytes()).unwrap(), state(offset));
    }
}

#[test]
fn a_weight_is_recognised_by_its_parts() {
    let four = |nested| FourBitNames::of("a.weight", QuantType::Fp4, nested);
    let names =
        |nested| four(nested).all().into_iter().map(str::to_owned).chain(["a.weight".to_owned()]).collect::<Vec<_>>();
    let recognise = |names: &[String]| recognise("a.weight", |name| names.iter().any(|it| it == name));
    for is_nested in [false, true] {
        let wanted = StoredWeight::FourBit { quant_type: QuantType::Fp4, is_nested };
        assert_eq!(recognise(&names(is_nested)).unwrap(), wanted);
        for missing in 0..names(is_nested).len() {
            let mut some = names(is_nested);
            let name = some.remove(missing);
            let error = recognise(&some).unwrap_err();
            assert!(
                error.is_weight_files() && error.to_string().contains(name.split(".quant_state").next().unwrap()),
                "{error}"
            );
        }
    }
    let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
    assert_eq!(recognise(&words(&["a.weight", "a.SCB"])).unwrap(), StoredWeight::EightBit);
    assert_eq!(recognise(&words(&["a.weight"])).unwrap(), StoredWeight::Plain);
    assert!(recognise(&words(&["a.SCB"])).is_err());
    let both: Vec<String> =
        names(false).into_iter().chain([FourBitNames::of("a.weight", QuantType::Nf4, false).quant_state]).collect();
    assert!(recognise(&both).unwrap_err().to_string().contains("both as nf4 and as fp4"));
}

#[test]
fn layers_are_skipped_as_in_the_reference() {
    let layer = |path, is_linear, is_tied| LayerFacts { path, is_linear, is_tied };
    let model = [
        layer("wte", false, true),
        layer("h.0.attn", true, false),
        layer("h.0.mlp.fc", true, false),
        layer("h.10.mlp.fc", true, false),
        layer("pooler", true, true),
        layer("lm_head", true, false),
    ];
    let none: &[&str] = &[];
    let rows = [
        (None, none, Ok(vec![1, 2, 3])),
        (Some(none), none, Ok(vec![1, 2, 3, 4, 5])),
        (Some(&["lm_head"][..]), none, Ok(vec![1, 2, 3, 4])),
        (Some(&["mlp"]), none, Ok(vec![1, 4, 5])),
        (Some(&["h.0"]), &["pooler"], Ok(vec![3, 5])),
        (Some(&["h.1"]), none, Err("\"h.1\"")),
        (Some(&["fc", "attn", "pooler", "lm_head"]), none, Err("5 linear layers")),
        (None, &["LN"], Err("\"LN\"")),
    ];
    for (skip, keep, wanted) in rows {
        let list = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        let (skip, keep) = (skip.map(list), list(keep));
        match (layers_to_quantize(&model, skip.as_deref(), &keep), wanted) {
            (Ok(found), Ok(wanted)) => assert_eq!(found, wanted, "{skip:?} {keep:?}"),
            (Err(error), Err(wanted)) => assert!(error.to_string().contains(wanted), "{error}"),
            (found, wanted) => panic!("{skip:?} {keep:?}: {found:?}, {wanted:?}"),
        }
    }
    // The only module at the top is the model, not its head.
    let nested = [layer("model.fc", true, false), layer("model.out", true, false)];
    assert_eq!(layers_to_quantize(&nested, None, &[]).unwrap(), [0, 1]);
}
