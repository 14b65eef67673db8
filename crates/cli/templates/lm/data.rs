//! Generated text: who does what to whom.

use accelerate::prelude::*;

/// How many letters the model sees at once.
pub const LENGTH: i64 = 24;

/// `a` to `z`, space and full stop.
pub const NUM_LETTERS: i64 = 28;

const ANIMALS: [&str; 5] = ["cat", "dog", "horse", "mouse", "owl"];
const VERBS: [&str; 4] = ["sees", "hears", "chases", "likes"];

/// Pieces of text as numbers of letters `[count, LENGTH]`, and the letter that comes after each.
pub fn examples(count: i64) -> accelerate::Result<TensorDataset<(Tensor, Tensor)>> {
    let (mut letters, mut next_letters) = (Vec::new(), Vec::new());
    let length = LENGTH as usize;
    for _ in 0..count {
        let mut text = Vec::new();
        while text.len() <= length {
            let sentence = format!("the {} {} the {}. ", choose(&ANIMALS), choose(&VERBS), choose(&ANIMALS));
            text.extend(sentence.bytes().map(number));
        }
        letters.extend_from_slice(&text[..length]);
        next_letters.extend_from_slice(&text[1..=length]);
    }
    let table = |numbers: &[i64]| Tensor::from_slice(numbers).view([count, LENGTH]);
    TensorDataset::new((table(&letters), table(&next_letters)))
}

fn number(letter: u8) -> i64 {
    match letter {
        b'a'..=b'z' => i64::from(letter - b'a'),
        b'.' => 27,
        _ => 26,
    }
}

/// One of `choices`, drawn from the random numbers that `set_seed` seeds.
fn choose(choices: &[&'static str]) -> &'static str {
    let number = Tensor::randint(choices.len() as i64, [1], (Kind::Int64, Device::Cpu));
    choices[number.int64_value(&[0]) as usize]
}
