//! A generated corpus: which words of a sentence name people, and which name places?
//!
//! Some names are both, so only the words beside them tell.

use accelerate::prelude::*;

/// Other words, people and places.
pub const NUM_TAGS: i64 = 3;

const PEOPLE: [&str; 6] = ["Ada", "Noor", "Tom", "Paris", "Florence", "Chelsea"];
const PLACES: [&str; 6] = ["Lima", "Rome", "Lagos", "Paris", "Florence", "Chelsea"];

/// `PERSON` and `PLACE` stand for any of them. All sentences are equally long.
const SENTENCES: [&str; 4] = [
    "PERSON flies from PLACE to PLACE",
    "PERSON and PERSON live in PLACE",
    "from PLACE to PLACE with PERSON",
    "in PLACE live PERSON and PERSON",
];

/// All words. The number of a word is its place here.
pub fn vocabulary() -> Vec<&'static str> {
    let mut words: Vec<&str> = SENTENCES.iter().flat_map(|text| text.split(' ')).collect();
    words.extend(PEOPLE.iter().chain(&PLACES));
    words.sort_unstable();
    words.dedup();
    words
}

/// Sentences as numbers of words `[count, length]`, and the tag of each word.
pub fn examples(count: i64) -> accelerate::Result<TensorDataset<(Tensor, Tensor)>> {
    let vocabulary = vocabulary();
    let (mut words, mut tags) = (Vec::new(), Vec::new());
    for _ in 0..count {
        for word in choose(&SENTENCES).split(' ') {
            let (word, tag) = match word {
                "PERSON" => (choose(&PEOPLE), 1i64),
                "PLACE" => (choose(&PLACES), 2),
                other => (other, 0),
            };
            words.push(vocabulary.binary_search(&word).unwrap_or_default() as i64);
            tags.push(tag);
        }
    }
    let table = |numbers: &[i64]| Tensor::from_slice(numbers).view([count, -1]);
    TensorDataset::new((table(&words), table(&tags)))
}

/// One of `choices`, drawn from the random numbers that `set_seed` seeds.
fn choose(choices: &[&'static str]) -> &'static str {
    let number = Tensor::randint(choices.len() as i64, [1], (Kind::Int64, Device::Cpu));
    choices[number.int64_value(&[0]) as usize]
}
