//! Sizes, shards, names and the index.

use accelerate_core::weight_files::*;
use proptest::prelude::*;
use rstest::rstest;
use safetensors::Dtype;
use std::collections::BTreeMap;

#[rstest]
#[case::spaces(" 5 MB ", 5_000_000)]
#[case::bytes("12B", 12)]
#[case::only_a_number("1500", 1500)]
#[case::fractions_are_rounded_down("0.0000015MB", 1)]
#[case::terabytes("2TB", 2_000_000_000_000)]
#[case::exact_where_floats_are_not("9007199254740993", 9_007_199_254_740_993)]
fn sizes(#[case] text: &str, #[case] wanted: u64) {
    assert_eq!(parse_size(text).unwrap(), wanted);
}

#[rstest]
#[case::empty("")]
#[case::no_number("GB")]
#[case::negative("-1GB")]
#[case::signed("+1GB")]
#[case::unknown_unit("10XB")]
#[case::a_lone_bit("8b")]
#[case::two_numbers("1 2GB")]
#[case::not_a_number("nanGB")]
#[case::unbounded("infGB")]
#[case::too_large("99999999999TB")]
#[case::exponent("1e3")]
#[case::trailing("10GB!")]
#[case::other_alphabet("١٠GB")]
fn no_sizes(#[case] text: &str) {
    let error = parse_size(text).unwrap_err();
    assert!(error.is_weight_files());
    assert!(error.to_string().starts_with(&format!("{text:?} is not a size")), "{error}");
}

#[rstest]
#[case("model.safetensors", true)]
#[case("model.safetensors.index.json", true)]
#[case("model-00001-of-00003.safetensors", true)]
#[case("model-100000-of-100001.safetensors", true)]
#[case("model-1-of-3.safetensors", false)]
#[case("model-00001-of-.safetensors", false)]
#[case("model-00001-of-00003-of-00004.safetensors", false)]
#[case("model_1.safetensors", false)]
#[case("my-model.safetensors", false)]
#[case("model-00001-of-00003.bin", false)]
#[case("modelsafetensors", false)]
#[case("model.safetensors.tmp", false)]
fn names_of_a_save(#[case] name: &str, #[case] wanted: bool) {
    assert_eq!(is_weight_file_of(name, "model"), wanted, "{name}");
}

#[test]
fn what_an_earlier_save_left_is_stale() {
    let tensors = [("a".to_owned(), 10), ("b".to_owned(), 10)];
    let sharded = WeightFiles::plan(&tensors, 10, "model");
    let stale: Vec<&str> = [
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model-00002-of-00003.safetensors",
        "model.safetensors.index.json",
        "config.json",
    ]
    .into_iter()
    .filter(|name| sharded.is_stale(name, "model"))
    .collect();
    assert_eq!(stale, ["model.safetensors", "model-00002-of-00003.safetensors"]);
}

#[test]
fn an_index_reads_back_and_keeps_what_it_does_not_know() {
    let json = r#"{"metadata": {"total_size": 7, "total_parameters": 3}, "weight_map": {"w": "f"}, "extra": 1}"#;
    let index = Index::from_json(json).unwrap();
    assert_eq!(index.metadata.total_size, 7);
    let written = index.to_json().unwrap();
    assert!(written.contains("total_parameters") && written.ends_with("}\n"));
    assert_eq!(Index::from_json(&written).unwrap(), index);
    assert_eq!(Index::from_json(r#"{"weight_map": {}}"#).unwrap(), Index::default());
}

/// Python reads the weight map alone, and writers put there what they like.
#[rstest]
#[case::a_float(r#""metadata": {"total_size": 20.0}, "#, 20)]
#[case::a_fraction(r#""metadata": {"total_size": 0.5}, "#, 0)]
#[case::a_negative_number(r#""metadata": {"total_size": -1}, "#, 0)]
#[case::more_than_64_bits(r#""metadata": {"total_size": 18446744073709551616}, "#, 0)]
#[case::a_text(r#""metadata": {"total_size": "20"}, "#, 0)]
#[case::null(r#""metadata": {"total_size": null}, "#, 0)]
#[case::no_size(r#""metadata": {}, "#, 0)]
#[case::no_metadata(r#""metadata": null, "#, 0)]
#[case::absent("", 0)]
fn an_index_needs_no_size(#[case] metadata: &str, #[case] total_size: u64) {
    let index = Index::from_json(&format!(r#"{{{metadata}"weight_map": {{"w": "f"}}}}"#)).unwrap();
    assert_eq!((index.metadata.total_size, index.weight_map["w"].as_str()), (total_size, "f"));
}

#[rstest]
#[case::no_json("{", "EOF")]
#[case::no_map("{}", "weight_map")]
#[case::a_path(r#"{"weight_map": {"w": "/etc/passwd"}}"#, "\"/etc/passwd\"")]
#[case::upwards(r#"{"weight_map": {"w": ".."}}"#, "\"..\"")]
#[case::other_separator(r#"{"weight_map": {"w": "a\\b"}}"#, "without a path")]
#[case::nothing(r#"{"weight_map": {"w": ""}}"#, "\"\"")]
fn a_hostile_index_is_refused(#[case] json: &str, #[case] message: &str) {
    let error = Index::from_json(json).unwrap_err();
    assert!(error.is_weight_files());
    assert!(error.to_string().contains(message), "{error}");
}

#[test]
fn numbers_of_an_index_stay_the_same_when_it_is_written() {
    for number in ["123456788.123456615", "0.7976931348623157e308", "-0.0", "5e-324", "18446744073709551615"] {
        let index = Index::from_json(&format!(r#"{{"metadata": {{"x": {number}}}, "weight_map": {{}}}}"#)).unwrap();
        let read: f64 = number.parse().unwrap();
        assert_eq!(index.metadata.other["x"].as_f64().map(f64::to_bits), Some(read.to_bits()), "{number}");
        assert_eq!(Index::from_json(&index.to_json().unwrap()).unwrap(), index, "{number}");
    }
}

#[test]
fn sizes_are_written_for_people() {
    let texts = [0, 999, 1000, 1_500_000, 10_000_000_000, 1_999_999].map(format_size);
    assert_eq!(texts, ["0 B", "999 B", "1 KB", "1.5 MB", "10 GB", "2 MB"]);
}

fn entry(name: &str, bytes: u64, element_bytes: u64, unit: Option<usize>) -> TensorEntry {
    TensorEntry { name: name.to_owned(), bytes, element_bytes, unit }
}

#[rstest]
#[case::a_unit_is_dealt_to_all(
    vec![entry("a", 8, 4, Some(0)), entry("b", 4, 4, Some(0)), entry("c", 4, 4, Some(0))], 2, 100,
    vec![vec![0, 1, 2]], vec![(0, vec!["a"]), (1, vec!["b", "c"])],
)]
#[case::wide_elements_first_then_large_units(
    vec![entry("half", 80, 2, Some(0)), entry("small", 4, 4, Some(1)), entry("large", 12, 4, Some(2))], 1, 1000,
    vec![vec![2], vec![1], vec![0]], vec![(0, vec!["large", "small", "half"])],
)]
#[case::what_is_whole_comes_by_element_size(
    vec![entry("count", 8, 8, None), entry("mean", 8, 4, None), entry("weight", 4, 4, Some(0))], 1, 1000,
    vec![vec![0], vec![2], vec![1]], vec![(0, vec!["count", "weight", "mean"])],
)]
#[case::a_limit_on_files(
    vec![entry("a", 8, 4, Some(0)), entry("b", 8, 4, Some(1)), entry("c", 8, 4, Some(2))], 1, 16,
    vec![vec![0], vec![1], vec![2]], vec![(0, vec!["a", "b"]), (0, vec!["c"])],
)]
#[case::a_tensor_beyond_the_limit(
    vec![entry("a", 8, 4, Some(0)), entry("huge", 40, 4, Some(0)), entry("b", 8, 4, Some(0))], 1, 16,
    vec![vec![0, 1, 2]], vec![(0, vec!["huge"]), (0, vec!["a", "b"])],
)]
#[case::more_ranks_than_tensors(
    vec![entry("a", 8, 4, Some(0)), entry("b", 0, 4, Some(0))], 4, 100,
    vec![vec![0, 1]], vec![(0, vec!["a"]), (1, vec!["b"])],
)]
#[case::nothing(vec![], 3, 100, vec![], vec![(0, vec![])])]
fn ranks_that_write_together(
    #[case] tensors: Vec<TensorEntry>,
    #[case] num_writers: usize,
    #[case] max_shard_bytes: u64,
    #[case] groups: Vec<Vec<usize>>,
    #[case] wanted: Vec<(usize, Vec<&str>)>,
) {
    let plan = ParallelFiles::plan(&tensors, num_writers, max_shard_bytes, "model");
    assert_eq!(plan.groups, groups);
    let found: Vec<(usize, Vec<&str>)> = std::iter::zip(&plan.writers, &plan.files.files)
        .map(|(&writer, (_, names))| (writer, names.iter().map(String::as_str).collect()))
        .collect();
    assert_eq!(found, wanted);
    assert_eq!(plan.files.index.is_some(), plan.files.files.len() > 1);
}

proptest! {
    #[test]
    fn files_of_several_ranks_are_balanced_aligned_and_in_the_order_of_arrival(
        tensors in prop::collection::vec((0..40_u64, 0..4_u32, prop::option::of(0..5_usize)), 0..40),
        num_writers in 1..6_usize,
        max_shard_bytes in 1..2000_u64,
    ) {
        let tensors: Vec<TensorEntry> = tensors
            .into_iter()
            .enumerate()
            .map(|(position, (elements, width, unit))| {
                // The tensors of a unit have one element type.
                let element_bytes = 1 << unit.map_or(width, |unit| unit as u32 % 4);
                entry(&format!("t{position}"), elements * element_bytes, element_bytes, unit)
            })
            .collect();
        let plan = ParallelFiles::plan(&tensors, num_writers, max_shard_bytes, "model");
        let arrival: Vec<usize> = plan.groups.concat();
        let mut all = arrival.clone();
        all.sort_unstable();
        prop_assert_eq!(all, (0..tensors.len()).collect::<Vec<_>>());
        for group in &plan.groups {
            prop_assert!(group.iter().all(|&position| tensors[position].unit == tensors[group[0]].unit));
        }

        let arrives_at = |name: &String| arrival.iter().position(|&it| tensors[it].name == *name).unwrap();
        let (mut bytes_of, mut count_of) = (vec![0; num_writers], vec![0; num_writers]);
        let mut written = 0;
        for ((_, names), &writer) in std::iter::zip(&plan.files.files, &plan.writers) {
            prop_assert!(names.is_sorted_by_key(arrives_at), "{names:?}");
            let mut offset = 0;
            for name in names {
                let tensor = &tensors[arrival[arrives_at(name)]];
                prop_assert_eq!(offset % tensor.element_bytes, 0, "{} in {:?}", name, names);
                offset += tensor.bytes;
            }
            prop_assert!(offset <= max_shard_bytes || names.len() == 1);
            bytes_of[writer] += offset;
            count_of[writer] += names.len();
            written += names.len();
        }
        prop_assert_eq!(written, tensors.len());
        let largest = tensors.iter().map(|tensor| tensor.bytes).max().unwrap_or(0);
        prop_assert!(bytes_of.iter().max().unwrap() - bytes_of.iter().min().unwrap() <= largest, "{:?}", bytes_of);
        prop_assert!(tensors.len() < num_writers || count_of.iter().all(|&count| count > 0), "{:?}", count_of);
        if plan.files.files.len() > 1 {
            prop_assert!(plan.files.files.len() >= num_writers.min(tensors.len()));
        }
    }

    #[test]
    fn no_text_is_too_strange(text in ".{0,12}") {
        let _ = parse_size(&text);
        let _ = is_weight_file_of(&text, "model");
        let _ = Index::from_json(&text);
    }

    #[test]
    fn every_tensor_is_in_one_shard_that_is_not_too_large(
        sizes in prop::collection::vec(0..40_u64, 0..30), max in 1..30_u64,
    ) {
        let tensors: Vec<(String, u64)> =
            sizes.iter().enumerate().map(|(k, &size)| (format!("t{k}"), size)).collect();
        let shards = plan_shards(&tensors, max);
        let bytes_of = |name: &String| tensors.iter().find(|(known, _)| known == name).unwrap().1;
        for shard in &shards {
            let bytes: u64 = shard.iter().map(bytes_of).sum();
            prop_assert!(!shard.is_empty() && (bytes <= max || shard.len() == 1));
        }
        let mut names: Vec<String> = shards.concat();
        names.sort();
        let mut wanted: Vec<String> = tensors.into_iter().map(|(name, _)| name).collect();
        wanted.sort();
        prop_assert_eq!(names, wanted);
    }
}

#[rstest]
#[case(&["b.safetensors", "model.safetensors", "model.safetensors.index.json"], Some("model.safetensors"))]
#[case(&["b.safetensors", "model.safetensors.index.json"], Some("model.safetensors.index.json"))]
#[case(&["b.safetensors", "x.safetensors.index.json"], Some("x.safetensors.index.json"))]
#[case(&["b.safetensors", ".hidden.safetensors", "config.json"], Some("b.safetensors"))]
#[case(&["a.safetensors", "b.safetensors"], None)]
#[case(&["a.safetensors.index.json", "b.safetensors.index.json", "c.safetensors"], None)]
#[case(&["pytorch_model.bin", "safetensors"], None)]
#[case(&[], None)]
fn the_file_to_begin_with_is_the_usual_or_the_only_one(#[case] names: &[&str], #[case] wanted: Option<&str>) {
    assert_eq!(choose_weight_file(names), wanted);
}

type Described<'a> = (&'a str, Dtype, Vec<usize>);

fn notes(notes: &[(&str, &str)]) -> BTreeMap<String, String> {
    notes.iter().map(|(key, note)| ((*key).to_owned(), (*note).to_owned())).collect()
}

#[rstest]
#[case::nothing(&[], &[], "{}")]
#[case::only_notes(&[], &[("format", "pt")], r#"{"__metadata__":{"format":"pt"}}"#)]
#[case::in_their_order(
    &[("b", Dtype::I64, vec![2]), ("a", Dtype::F16, vec![]), ("c", Dtype::U8, vec![0, 3])],
    &[("b", "\u{e9}\""), ("a", "")],
    r#"{"__metadata__":{"a":"","b":"é\""},"b":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},"a":{"dtype":"F16","shape":[],"data_offsets":[16,18]},"c":{"dtype":"U8","shape":[0,3],"data_offsets":[18,18]}}"#
)]
fn a_header_is_written_as_it_is_read(
    #[case] tensors: &[Described<'_>],
    #[case] noted: &[(&str, &str)],
    #[case] wanted: &str,
) {
    let mut file = Header::write(tensors.iter().cloned(), &notes(noted)).unwrap();
    assert_eq!((file.len() % 8, std::str::from_utf8(&file[8..]).unwrap().trim_end()), (0, wanted));
    let num_bytes = tensors.iter().map(|(_, dtype, shape)| dtype.bitsize() / 8 * shape.iter().product::<usize>());
    file.resize(file.len() + num_bytes.sum::<usize>(), 0);
    let (header, found) = Header::read_with_notes(&mut &file[..], file.len() as u64).unwrap();
    assert_eq!(found, notes(noted));
    assert_eq!(Header::read(&mut &file[..], file.len() as u64).unwrap(), header);
    let found: Vec<_> = header.entries().iter().map(|it| (it.name.as_str(), it.dtype, it.shape.clone())).collect();
    assert_eq!(found, tensors);
}

#[rstest]
#[case::the_key_of_notes(&[("a", Dtype::F32, vec![1]), ("__metadata__", Dtype::F32, vec![1])], "a tensor that is called `__metadata__`")]
#[case::a_name_twice(&[("a", Dtype::F32, vec![1]), ("a", Dtype::F32, vec![2])], "two tensors that are called `a`")]
#[case::parts_of_bytes(&[("a", Dtype::F4, vec![3])], "no countable number of whole bytes as F4")]
#[case::more_than_there_is(&[("a", Dtype::F32, vec![1 << 40, 1 << 40])], "no countable number of whole bytes")]
fn what_no_safetensors_file_can_have_is_not_written(#[case] tensors: &[Described<'_>], #[case] words: &str) {
    let error = Header::write(tensors.iter().cloned(), &notes(&[("format", "pt")])).unwrap_err();
    assert!(error.is_weight_files());
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn more_tensors_and_longer_headers_than_are_read_are_not_written() {
    let names: Vec<String> = (0..=Header::MAX_TENSORS).map(|number| format!("t{number}")).collect();
    let tensors = |number: usize| names[..number].iter().map(|name| (name.as_str(), Dtype::U8, vec![0]));
    assert!(Header::write(tensors(Header::MAX_TENSORS), &BTreeMap::new()).is_ok());
    let error = Header::write(tensors(Header::MAX_TENSORS + 1), &BTreeMap::new()).unwrap_err();
    assert!(error.to_string().contains("150001 tensors"), "{error}");
    let long = [("long".to_owned(), " ".repeat(Header::MAX_BYTES as usize))].into();
    let error = Header::write([], &long).unwrap_err();
    assert!(error.to_string().contains("at most 100000000 are read"), "{error}");
}

#[rstest]
#[case::no_text(r#"{"__metadata__":{"a":1}}"#, "expected a string")]
#[case::a_list(r#"{"__metadata__":[]}"#, "texts by name as __metadata__")]
#[case::twice(r#"{"__metadata__":{"a":"1","a":"2"}}"#, "the key `a` is there twice")]
#[case::a_tensor(r#"{"__metadata__":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#, "expected a string")]
fn hostile_notes_are_refused_where_they_are_kept_and_where_not(#[case] json: &str, #[case] words: &str) {
    let file = [&(json.len() as u64).to_le_bytes()[..], json.as_bytes()].concat();
    let error = Header::read_with_notes(&mut &file[..], file.len() as u64).unwrap_err();
    assert!(error.to_string().contains(words), "{error}");
    assert!(Header::read(&mut &file[..], file.len() as u64).is_err());
}

#[rstest]
#[case::no_file(&[], &[("format", "pt")], &[])]
#[case::nothing_said(&[&[][..]], &[("format", "pt")], &[])]
#[case::a_format(&[&[("format", "mlx")][..]], &[("format", "mlx")], &[])]
#[case::alike(&[&[("a", "1")][..], &[("a", "1"), ("format", "pt")]], &[("a", "1"), ("format", "pt")], &[])]
#[case::another_text(&[&[("a", "1")][..], &[("a", "2")]], &[("format", "pt")], &["a"])]
#[case::another_text_of_the_last(&[&[("a", "1")][..], &[("a", "1")], &[("a", "")]], &[("format", "pt")], &["a"])]
#[case::not_everywhere(&[&[("a", "1")][..], &[], &[("a", "1"), ("b", "1")]], &[("format", "pt")], &["a", "b"])]
#[case::formats(&[&[("format", "tf")][..], &[("format", "pt")]], &[("format", "pt")], &["format"])]
#[case::formats_not_said(&[&[][..], &[("format", "tf")], &[("format", "tf")]], &[("format", "pt")], &["format"])]
fn notes_are_what_all_files_say_alike(
    #[case] files: &[&[(&str, &str)]],
    #[case] agreed: &[(&str, &str)],
    #[case] differing: &[&str],
) {
    let mut together = Notes::default();
    files.iter().for_each(|file| together.add(notes(file)));
    assert_eq!(
        (together.agreed(), together.differing()),
        (notes(agreed), differing.iter().map(|it| (*it).to_owned()).collect())
    );
}
