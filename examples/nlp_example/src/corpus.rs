//! A small labelled corpus that the program makes by itself: short film reviews from a grammar.
//!
//! It lets the example run without any file or network. Most reviews say what they mean, so single words tell something, and a
//! model that starts from nothing learns from its first epoch. Counting friendly and unfriendly words does not solve it, because
//! sentiments are negated (`not dull`, `anything but funny`) and set against each other (`the plot is weak but the acting is
//! superb`, where only the main clause decides). The same seed gives the same sentences on every machine, and no development
//! sentence occurs in the training split.

use crate::readers::{Position, Row, Table};
use std::collections::HashSet;
use std::path::PathBuf;

mod words;

use words::{INTENSIFIERS, NEGATIVE, NOUNS, PADDING_AFTER, PADDING_BEFORE, POSITIVE, SUBJECTS};

/// Number of training sentences.
pub const NUM_TRAIN: usize = 6000;

/// Number of development sentences.
pub const NUM_DEV: usize = 800;

/// Never changed: the corpus is part of what the project promises to learn.
const SEED: u64 = 0x5eed_0f0f_11e5_7a11;

/// The two parts of the corpus.
#[derive(Clone, Debug)]
pub struct Corpus {
    /// What the model learns from.
    pub train: Table,
    /// What it is judged by; no sentence of it is in `train`.
    pub dev: Table,
}

/// Makes the corpus. Label 1 means a friendly review, label 0 an unfriendly one; each split holds as many of
/// one as of the other.
///
/// ```
/// let corpus = nlp_example::corpus::generate();
/// assert_eq!(corpus.train.rows.len(), 6000);
/// assert_eq!(corpus.dev.rows.len(), 800);
/// assert_eq!(corpus.train.num_labels()?, 2);
/// # Ok::<(), nlp_example::readers::DataError>(())
/// ```
pub fn generate() -> Corpus {
    let mut random = Random { state: SEED };
    let mut seen = HashSet::new();
    let mut rows = Vec::with_capacity(NUM_DEV + NUM_TRAIN);
    while rows.len() < NUM_DEV + NUM_TRAIN {
        // The label alternates with accepted sentences, so both splits are balanced.
        let label = rows.len() % 2;
        let text = sentence(&mut random, label == 1);
        if seen.insert(text.clone()) {
            rows.push((text, label));
        }
    }
    let train = rows.split_off(NUM_DEV);
    Corpus { train: table("embedded training corpus", train), dev: table("embedded development corpus", rows) }
}

fn table(source: &str, rows: Vec<(String, usize)>) -> Table {
    let rows = (1..).zip(rows).map(|(line, (text, label))| Row { text, label, position: Position::Line(line) });
    Table { source: PathBuf::from(source), rows: rows.collect() }
}

fn sentence(random: &mut Random, friendly: bool) -> String {
    // Where these shares cancel out what each single word tells, as at 40, 22 and 38, no gradient shows the way until words are
    // combined, and the loss stays at its start for one and a half epochs.
    let core = match random.below(100) {
        0..60 => affirmed(random, friendly),
        60..75 => negated(random, friendly),
        _ => contrast(random, friendly),
    };
    match random.below(10) {
        0..2 => format!("{} , {core}", random.pick(&PADDING_BEFORE)),
        2..4 => format!("{core} , {}", random.pick(&PADDING_AFTER)),
        _ => core,
    }
}

/// A clause that says what it means.
fn affirmed(random: &mut Random, friendly: bool) -> String {
    let subject = random.pick(&SUBJECTS);
    let adjective = adjective(random, friendly);
    match random.below(8) {
        0 | 1 => format!("{subject} is {adjective}"),
        2 => format!("{subject} feels {adjective}"),
        3 => format!("i found {subject} {adjective}"),
        4 => format!("everyone called {subject} {adjective}"),
        5 => format!("{subject} stays {adjective} to the end"),
        6 => format!("{subject} is {adjective} and {}", bare_adjective(random, friendly)),
        _ => format!("what makes this film {adjective} is {subject}"),
    }
}

/// A clause whose adjective says the opposite of what it means.
fn negated(random: &mut Random, friendly: bool) -> String {
    let subject = random.pick(&SUBJECTS);
    let opposite = bare_adjective(random, !friendly);
    match random.below(10) {
        0 | 1 => format!("{subject} is not {opposite}"),
        2 => format!("{subject} is never {opposite}"),
        3 => format!("{subject} is hardly {opposite}"),
        4 => format!("{subject} is far from {opposite}"),
        5 => format!("{subject} is anything but {opposite}"),
        6 => format!("{subject} does not feel {opposite}"),
        7 => format!("nobody could call {subject} {opposite}"),
        8 => format!("there is nothing {opposite} about {subject}"),
        _ => format!("{subject} is neither {opposite} nor {}", bare_adjective(random, !friendly)),
    }
}

fn clause(random: &mut Random, friendly: bool) -> String {
    if random.below(5) == 0 { negated(random, friendly) } else { affirmed(random, friendly) }
}

/// Two clauses that disagree; the main clause decides, the one that is conceded does not.
fn contrast(random: &mut Random, friendly: bool) -> String {
    let main = clause(random, friendly);
    let conceded = clause(random, !friendly);
    match random.below(9) {
        0 | 1 => format!("{conceded} , but {main}"),
        2 => format!("{conceded} , yet {main}"),
        3 => format!("{conceded} ; still , {main}"),
        4 => format!("although {conceded} , {main}"),
        5 => format!("{main} , although {conceded}"),
        6 => format!("{main} , even if {conceded}"),
        7 => {
            let (adjective, noun) = (bare_adjective(random, !friendly), random.pick(&NOUNS));
            format!("despite the {adjective} {noun} , {main}")
        }
        _ => {
            let (adjective, noun) = (bare_adjective(random, !friendly), random.pick(&NOUNS));
            format!("{main} despite the {adjective} {noun}")
        }
    }
}

fn adjective(random: &mut Random, friendly: bool) -> String {
    let adjective = bare_adjective(random, friendly);
    match random.below(3) {
        0 => format!("{} {adjective}", random.pick(&INTENSIFIERS)),
        _ => adjective.to_owned(),
    }
}

fn bare_adjective(random: &mut Random, friendly: bool) -> &'static str {
    random.pick(if friendly { &POSITIVE } else { &NEGATIVE })
}

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): its numbers
/// must be the same for all time, which no crate promises.
struct Random {
    state: u64,
}

impl Random {
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number from 0 to `limit - 1`; the bias of the short cut is below 2^-50 for the limits used here.
    fn below(&mut self, limit: usize) -> usize {
        ((u128::from(self.next()) * limit as u128) >> 64) as usize
    }

    fn pick(&mut self, words: &[&'static str]) -> &'static str {
        words[self.below(words.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_sentences_come_out_on_every_machine() {
        let corpus = generate();
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for row in corpus.train.rows.iter().chain(&corpus.dev.rows) {
            for byte in row.text.bytes().chain([row.label as u8]) {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
        }
        assert_eq!(hash, CORPUS_HASH, "the corpus has changed: {hash:#x}");
    }

    const CORPUS_HASH: u64 = 0x31d2_412d_7a9a_1f48;

    #[test]
    fn no_development_sentence_is_in_the_training_split() {
        let corpus = generate();
        let train: HashSet<&str> = corpus.train.rows.iter().map(|row| row.text.as_str()).collect();
        assert_eq!(train.len(), NUM_TRAIN, "training sentences repeat");
        assert!(corpus.dev.rows.iter().all(|row| !train.contains(row.text.as_str())));
    }

    #[test]
    fn both_labels_are_equally_frequent() {
        let corpus = generate();
        for table in [&corpus.train, &corpus.dev] {
            let friendly = table.rows.iter().filter(|row| row.label == 1).count();
            assert_eq!(2 * friendly, table.rows.len());
        }
    }

    #[test]
    fn no_adjective_is_both_friendly_and_unfriendly() {
        assert!(POSITIVE.iter().all(|word| !NEGATIVE.contains(word)));
    }

    /// The majority of sentiment words decides; a tie counts as half right.
    #[test]
    fn counting_sentiment_words_does_not_solve_it() {
        let corpus = generate();
        let rows = &corpus.dev.rows;
        let right: f64 = rows
            .iter()
            .map(|row| {
                let count = |list: &[&str]| row.text.split(' ').filter(|word| list.contains(word)).count();
                match count(&POSITIVE).cmp(&count(&NEGATIVE)) {
                    std::cmp::Ordering::Equal => 0.5,
                    order => f64::from(u8::from(order.is_gt() == (row.label == 1))),
                }
            })
            .sum();
        let accuracy = right / rows.len() as f64;
        assert!((0.5..0.8).contains(&accuracy), "the rule reaches {accuracy}");
    }

    /// Naive Bayes on single words: the best that can be learned without word order, nearly. It is where a model begins, too: with
    /// nothing to be learned from single words, the first epoch ends where it began.
    #[test]
    fn single_words_are_a_beginning_and_do_not_solve_it() {
        let corpus = generate();
        let mut counts = std::collections::HashMap::<&str, [f64; 2]>::new();
        for row in &corpus.train.rows {
            for word in row.text.split(' ') {
                counts.entry(word).or_insert([1.0, 1.0])[row.label] += 1.0;
            }
        }
        let score = |text: &str| -> f64 {
            text.split(' ').filter_map(|word| counts.get(word)).map(|[no, yes]| (yes / no).ln()).sum()
        };
        let rows = &corpus.dev.rows;
        let right = rows.iter().filter(|row| (score(&row.text) > 0.0) == (row.label == 1)).count();
        let accuracy = right as f64 / rows.len() as f64;
        assert!((0.65..0.8).contains(&accuracy), "naive Bayes reaches {accuracy}");
    }
}
