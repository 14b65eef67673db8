//! Equality with what torch, accelerate and huggingface_hub computed; see `tests/golden/generate.py`.

use accelerate_core::config::{
    AutocastKwargs, DDPCommunicationHookType, DataLoaderConfiguration, DistributedDataParallelKwargs, GradScalerKwargs,
    GradientAccumulationPlugin, MixedPrecision, ProjectConfiguration,
};
use accelerate_core::environment::str_to_bool;
use accelerate_core::names::{DistributedType, RngType};
use accelerate_core::plan::{Inventory, ParameterEntry, assign_buckets};
use accelerate_core::sampler::{BatchSamplerShard, IterableDatasetShard, RaggedBatchShard, Row, SlotSource};
use accelerate_core::schedule::{
    OneCycle, cosine_annealing, exponential, multi_step, polynomial_with_warmup, step_decay,
};
use accelerate_core::settings::{Record, Setting};
use accelerate_core::split::split_between_processes;
use accelerate_core::weight_files::{WeightFiles, parse_size};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::HashMap;

fn section<T: DeserializeOwned>(name: &str) -> T {
    let golden: Value = serde_json::from_str(include_str!("../golden/golden.json")).unwrap();
    serde_json::from_value(golden[name].clone()).unwrap()
}

fn indices(batch: Vec<Row>) -> Vec<usize> {
    batch.into_iter().map(|row| row.index).collect()
}

/// (drop_last, even_batches)
fn mode(name: &str) -> (bool, bool) {
    match name {
        "even" => (false, true),
        "uneven" => (false, false),
        "drop_last" => (true, true),
        _ => panic!("unknown mode {name}"),
    }
}

#[test]
fn batch_sampler_shard() {
    type Case = (usize, usize, usize, String, bool, Vec<Vec<Vec<usize>>>);
    let cases: Vec<Case> = section("batch_sampler_shard");
    assert!(cases.len() > 400);
    for (num_rows, batch_size, num_processes, name, split_batches, wanted) in cases {
        let (drop_last, even_batches) = mode(&name);
        let shard = BatchSamplerShard { num_processes, batch_size, drop_last, split_batches, even_batches };
        shard.check().unwrap();
        let order: Vec<usize> = (0..num_rows).collect();
        let mut found = vec![Vec::new(); num_processes];
        for round in shard.rounds(&order) {
            for (rank, batch) in round.into_iter().enumerate() {
                found[rank].extend(batch.map(indices));
            }
        }
        assert_eq!(found, wanted, "{num_rows} rows, {shard:?}");
    }
}

#[test]
fn ragged_batches() {
    type Case = (Vec<Vec<usize>>, usize, String, Vec<Vec<Vec<usize>>>);
    for (batches, num_processes, name, wanted) in section::<Vec<Case>>("ragged_batches") {
        let (drop_last, even_batches) = mode(&name);
        let shard = RaggedBatchShard { num_processes, drop_last, even_batches };
        for (rank, wanted) in wanted.into_iter().enumerate() {
            assert_eq!(shard.num_rounds(batches.len(), rank), wanted.len());
            let found: Vec<Vec<usize>> =
                (0..).map_while(|round| shard.batch(&batches, round, rank)).map(indices).collect();
            assert_eq!(found, wanted, "{} batches, {shard:?}", batches.len());
        }
    }
}

#[test]
fn iterable_dataset_shard() {
    type Case = (usize, usize, usize, bool, bool, Vec<Vec<usize>>);
    for (num_rows, batch_size, num_processes, drop_last, split_batches, wanted) in
        section::<Vec<Case>>("iterable_dataset_shard")
    {
        let shard = IterableDatasetShard { num_processes, batch_size, drop_last, split_batches };
        let stream: Vec<usize> = (0..num_rows).collect();
        let chunks: Vec<&[usize]> = stream.chunks(shard.chunk_rows()).collect();
        for (rank, wanted) in wanted.into_iter().enumerate() {
            let slots = chunks.iter().flat_map(|chunk| {
                let slots = shard.slots(chunk.len(), chunks[0].len(), rank).unwrap_or_default();
                slots.into_iter().map(|slot| match slot.source {
                    SlotSource::Current(position) => chunk[position],
                    SlotSource::First(position) => chunks[0][position],
                })
            });
            assert_eq!(slots.collect::<Vec<_>>(), wanted, "{num_rows} rows, {shard:?}");
        }
    }
}

#[test]
fn split_of_inputs() {
    type Case = (usize, usize, bool, Vec<Vec<usize>>);
    for (num_items, num_processes, apply_padding, wanted) in section::<Vec<Case>>("split_between_processes") {
        let found: Vec<Vec<usize>> = (0..num_processes)
            .map(|rank| split_between_processes(num_items, num_processes, rank, apply_padding))
            .map(|split| split.unwrap().indices().collect())
            .collect();
        assert_eq!(found, wanted, "{num_items} over {num_processes}, padding {apply_padding}");
    }
}

#[track_caller]
fn assert_close(found: f64, wanted: f64, what: &str) {
    assert!((found - wanted).abs() <= 1e-12, "{what}: {found} instead of {wanted}");
}

#[test]
fn schedules() {
    let schedules: Value = section("schedules");
    let plain = |name: &str, schedule: &dyn Fn(usize) -> f64| {
        let wanted = schedules["plain"][name].as_array().unwrap();
        for (step, wanted) in wanted.iter().enumerate() {
            let what = format!("{name} at {step}");
            assert_close(schedule(step), wanted.as_f64().unwrap(), &what);
        }
    };
    plain("step_decay", &|step| step_decay(step, 3, 0.5));
    plain("multi_step", &|step| multi_step(step, &[2, 5, 5], 0.5));
    plain("exponential", &|step| exponential(step, 0.9));
    plain("cosine_annealing", &|step| cosine_annealing(step, 10, 0.1));
    plain("polynomial", &|step| polynomial_with_warmup(step, 0, 8, 2.0, 0.0));

    type Case = (OneCycle, Vec<(f64, f64)>);
    let cycles: Vec<Case> = serde_json::from_value(schedules["one_cycle"].clone()).unwrap();
    assert!(cycles.len() > 3);
    for (cycle, wanted) in cycles {
        for (step, (rate, momentum)) in wanted.into_iter().enumerate() {
            let point = cycle.at(step).unwrap();
            let what = format!("{cycle:?} at {step}");
            assert_close(point.multiplier, rate, &what);
            // Without cycling, the optimizer's own momentum (0.5 in the generator) stays.
            assert_close(point.momentum.unwrap_or(0.5), momentum, &what);
        }
    }
}

#[test]
fn sizes() {
    for (text, bytes) in section::<Vec<(String, u64)>>("sizes") {
        assert_eq!(parse_size(&text).unwrap(), bytes, "{text}");
    }
}

#[test]
fn shards() {
    type Case = (Vec<(String, u64)>, Vec<(String, Vec<String>)>, u64, bool);
    for (tensors, files, total_size, is_sharded) in section::<Vec<Case>>("shards") {
        let found = WeightFiles::plan(&tensors, 10, "model");
        if files.is_empty() {
            // huggingface_hub writes nothing for a model without weights; a reader wants a file.
            assert_eq!(found.files, [("model.safetensors".to_owned(), vec![])]);
            continue;
        }
        assert_eq!(found.files, files);
        assert_eq!(found.index.is_some(), is_sharded);
        if let Some(index) = found.index {
            assert_eq!(index.metadata.total_size, total_size);
        }
    }
}

#[test]
fn buckets() {
    type Case = (Vec<(String, usize)>, Vec<usize>, Vec<Vec<usize>>);
    for (parameters, limits, wanted) in section::<Vec<Case>>("buckets") {
        let entry = |(dtype, num_elements): &(String, usize)| {
            let element_bytes = if dtype == "float16" { 2 } else { 4 };
            ParameterEntry::new("p", &[*num_elements], dtype, element_bytes)
        };
        let inventory = Inventory { parameters: parameters.iter().map(entry).collect() };
        let found: Vec<Vec<usize>> =
            assign_buckets(&inventory, &limits).into_iter().map(|bucket| bucket.parameters).collect();
        assert_eq!(found, wanted, "{parameters:?} {limits:?}");
    }
}

/// Every field of the reference is a field here with the same default.
#[track_caller]
fn check_defaults<R: Record>(name: &str, differing: &[(&str, Value)]) {
    let of_text = |text: String| serde_json::from_str(&text).unwrap_or(Value::String(text));
    let of_setting = |setting: &Setting| (setting.field, setting.default().map_or(Value::Null, of_text));
    let ours: HashMap<_, _> = R::settings().iter().map(of_setting).collect();
    let theirs: serde_json::Map<String, Value> =
        serde_json::from_value(section::<Value>("defaults")[name].clone()).unwrap();
    assert!(!theirs.is_empty());
    for (field, default) in theirs {
        let found = ours.get(field.as_str()).unwrap_or_else(|| panic!("{name} has no field {field}"));
        let differing = differing.iter().find(|(name, _)| *name == field);
        let wanted = differing.map_or(&default, |(_, value)| value);
        match (found.as_f64(), wanted.as_f64()) {
            // JSON of Python has 25 where ours has 25.0.
            (Some(found), Some(wanted)) => assert_eq!(found, wanted, "{name}.{field}"),
            _ => assert_eq!(found, wanted, "{name}.{field}"),
        }
    }
}

#[test]
fn defaults_of_records() {
    check_defaults::<AutocastKwargs>("AutocastKwargs", &[]);
    check_defaults::<DataLoaderConfiguration>("DataLoaderConfiguration", &[]);
    check_defaults::<DistributedDataParallelKwargs>("DistributedDataParallelKwargs", &[]);
    check_defaults::<GradScalerKwargs>("GradScalerKwargs", &[]);
    let ours = [("num_steps", 1.into()), ("adjust_scheduler", Value::Null)];
    check_defaults::<GradientAccumulationPlugin>("GradientAccumulationPlugin", &ours);
    check_defaults::<ProjectConfiguration>("ProjectConfiguration", &[]);
}

#[test]
fn spellings() {
    let names: Value = section("names");
    #[track_caller]
    fn check<T: Copy>(wanted: &Value, all: &[T], spelling: impl Fn(T) -> &'static str) {
        let mut found: Vec<&str> = all.iter().map(|&value| spelling(value)).collect();
        let mut wanted: Vec<String> = serde_json::from_value(wanted.clone()).unwrap();
        found.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(found, wanted);
    }
    check(&names["DistributedType"], DistributedType::ALL, DistributedType::as_str);
    check(&names["RNGType"], RngType::ALL, RngType::as_str);
    check(&names["PrecisionType"], MixedPrecision::ALL, MixedPrecision::as_str);
    check(&names["DDPCommunicationHookType"], DDPCommunicationHookType::ALL, DDPCommunicationHookType::as_str);
    for (key, value) in [("true", true), ("false", false)] {
        let texts: Vec<String> = serde_json::from_value(names[key].clone()).unwrap();
        assert_eq!(texts.len(), 6);
        for text in texts {
            assert_eq!(str_to_bool(&text), Some(value), "{text}");
        }
    }
}
