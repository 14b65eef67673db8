//! The same rows in the same order as PyTorch 2.11.0 and Accelerate 1.15.0, and as many draws from the default
//! generator (numbers made by tests/data_golden.py).

use super::*;
use crate::data::{RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler};
use serde_json::Value;
use torch_ext::Generator;

const SEED: i64 = 42;

fn golden() -> Value {
    serde_json::from_str(include_str!("../../../tests/data_golden.json")).unwrap()
}

fn draw() -> i64 {
    torch_ext::generator::random_seed_from_default().unwrap()
}

fn seeded(seed: u64) -> Generator {
    let generator = Generator::new_cpu().unwrap();
    generator.manual_seed(seed).unwrap();
    generator
}

/// Runs the body in a process of its own: nobody else may draw from the default generator.
fn alone(test: &str, body: impl FnOnce()) {
    const ALONE: &str = "ACCELERATE_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return body();
    }
    let test = format!("data::tests::golden::{test}");
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &test, "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let ran = String::from_utf8_lossy(&output.stdout).contains("1 passed");
    assert!(output.status.success() && ran, "{test} alone: {text}");
}

fn check(case: &str, wanted: &Value, epochs: &[Vec<Vec<i64>>], next_draw: i64) {
    assert_eq!(serde_json::json!(epochs), wanted["epochs"], "{case}");
    assert_eq!(serde_json::json!(next_draw), wanted["next_draw"], "draws from the default generator: {case}");
}

#[test]
fn unprepared_loaders_follow_pytorch() {
    alone("unprepared_loaders_follow_pytorch", || {
        let golden = &golden()["plain"];
        let epochs = |loader: &Numbered, limits: &[usize]| -> Vec<_> {
            limits.iter().map(|&limit| pass(loader.iter().unwrap().take(limit))).collect()
        };
        const ALL: usize = usize::MAX;

        tch::manual_seed(SEED);
        let loader = numbered(11).batch_size(4).shuffle(true).build().unwrap();
        check("shuffled", &golden["shuffled"], &epochs(&loader, &[ALL, ALL]), draw());

        tch::manual_seed(SEED);
        let loader = numbered(6).batch_size(4).build().unwrap();
        check("sequential", &golden["sequential"], &epochs(&loader, &[ALL]), draw());

        tch::manual_seed(SEED);
        let loader = numbered(9).batch_size(3).shuffle(true).generator(seeded(7)).build().unwrap();
        // The second pass is broken off: the generator does not move to the end of it.
        check("own_generator", &golden["own_generator"], &epochs(&loader, &[ALL, 1, ALL, ALL]), draw());

        tch::manual_seed(SEED);
        let sampler = RandomSampler::new(10).num_samples(25).generator(seeded(3));
        let loader = numbered(10).batch_size(10).sampler(sampler).build().unwrap();
        check("oversampled", &golden["oversampled"], &epochs(&loader, &[ALL, ALL]), draw());
    });
}

#[test]
fn samplers_follow_pytorch() {
    alone("samplers_follow_pytorch", || {
        let golden = &golden()["plain"];
        let subset = SubsetRandomSampler::new(vec![3, 5, 8, 13, 21]);
        let weighted = WeightedRandomSampler::new(vec![0.1, 0.0, 2.0, 0.5], 12).unwrap();
        let samplers: [(&str, &dyn Sampler); 2] = [("subset", &subset), ("weighted", &weighted)];
        for (case, sampler) in samplers {
            tch::manual_seed(SEED);
            let epochs = [sampler.indices(0).unwrap(), sampler.indices(1).unwrap()];
            assert_eq!(serde_json::json!(epochs), golden[case]["epochs"], "{case}");
            assert_eq!(serde_json::json!(draw()), golden[case]["next_draw"], "{case}");
        }
    });
}

#[test]
fn prepared_loaders_follow_accelerate_on_one_to_three_ranks() {
    alone("prepared_loaders_follow_accelerate_on_one_to_three_ranks", || {
        let golden = golden();
        for (world_size, cases) in golden["prepared"].as_object().unwrap() {
            let world_size: usize = world_size.parse().unwrap();
            for (name, of_ranks) in cases.as_object().unwrap() {
                if golden["cases"][name]["configuration"]["dispatch_batches"] == true && world_size > 1 {
                    continue; // tests/data_ranks.rs: there have to be ranks that rank 0 can send batches to.
                }
                let recording = Recording::default();
                for rank in 0..world_size {
                    let case = format!("{name}, rank {rank} of {world_size}");
                    let (epochs, next_draw) = run_case(name, &golden["cases"][name], rank, world_size, &recording);
                    check(&case, &of_ranks[rank], &epochs, next_draw);
                }
            }
        }
    });
}

fn weighted(rows: usize) -> WeightedRandomSampler {
    WeightedRandomSampler::new((0..rows).map(|row| 1.0 + (row % 3) as f64).collect(), rows).unwrap()
}

fn run_case(
    name: &str,
    case: &Value,
    rank: usize,
    world_size: usize,
    recording: &Recording,
) -> (Vec<Vec<Vec<i64>>>, i64) {
    let configuration: crate::data::DataLoaderConfiguration =
        serde_json::from_value(case["configuration"].clone()).unwrap();
    let configuration = configuration.into();
    let number = |key: &str| case[key].as_u64().unwrap() as usize;
    let own_seed = case["seeds"] == "per rank";
    tch::manual_seed(SEED + if own_seed { rank as i64 } else { 0 });
    let builder = numbered(number("rows")).batch_size(number("batch_size"));
    let builder = builder.drop_last(case["drop_last"].as_bool().unwrap());
    let builder = match name {
        "own_generator" | "own_generator_dispatched" => builder.shuffle(true).generator(seeded(9)),
        "subset_sampler" | "subset_sampler_seedable" => {
            builder.sampler(SubsetRandomSampler::new((0..number("rows")).step_by(2).collect()))
        }
        "weighted_sampler" | "weighted_sampler_seedable" => builder.sampler(weighted(number("rows"))),
        "weighted_sampler_own_generator" => {
            builder.sampler(weighted(number("rows")).generator(seeded(9 + rank as u64)))
        }
        _ => builder.shuffle(true),
    };
    let mut place = place(rank, world_size);
    place.exchange = (world_size > 1).then(|| recording.exchange(rank));
    let loader = builder.build().unwrap().prepare_at(place, &configuration).unwrap();
    let epochs = (0..2).map(|_| pass(loader.iter().unwrap())).collect();
    (epochs, draw())
}

#[test]
fn seedable_shuffles_are_those_of_rank_zero_however_ranks_are_seeded() {
    // Differs from the reference on purpose: there, each rank shuffles by its own seed.
    alone("seedable_shuffles_are_those_of_rank_zero_however_ranks_are_seeded", || {
        let golden = &golden()["prepared"]["2"]["seedable"];
        let recording = Recording::default();
        for rank in 0..2 {
            tch::manual_seed(SEED + 100 * rank as i64);
            let mut place = place(rank, 2);
            place.exchange = Some(recording.exchange(rank));
            let configuration = DataLoaderSettings { use_seedable_sampler: true, ..Default::default() };
            let loader = numbered(22).batch_size(4).shuffle(true).build().unwrap();
            let loader = loader.prepare_at(place, &configuration).unwrap();
            let epochs: Vec<_> = (0..2).map(|_| pass(loader.iter().unwrap())).collect();
            assert_eq!(serde_json::json!(epochs), golden[rank]["epochs"], "rank {rank}");
        }
    });
}
