//! A small corpus that the program makes by itself: very short stories from a grammar.
//!
//! It lets the example run without any file or network. What a sentence says has to agree with the sentences before it: who it is
//! about, and what was found. So a model that looks back further does better. The same stories come out on every machine.

const NAMES: [&str; 12] =
    ["Anna", "Ben", "Clara", "David", "Emma", "Finn", "Greta", "Hugo", "Ida", "Jonas", "Klara", "Leo"];
const ANIMALS: [&str; 8] = ["cat", "dog", "fox", "owl", "mouse", "horse", "rabbit", "duck"];
const COLOURS: [&str; 8] = ["red", "blue", "green", "golden", "silver", "white", "black", "yellow"];
const THINGS: [&str; 10] = ["ball", "key", "lamp", "boat", "drum", "hat", "bell", "kite", "cup", "stone"];
const PLACES: [&str; 8] = [
    "in the garden",
    "by the river",
    "under a tree",
    "on the hill",
    "in the old barn",
    "near the lake",
    "behind the house",
    "at the market",
];
const WISHES: [&str; 6] = ["keep", "hide", "paint", "show", "give away", "take home"];

/// How many stories there are.
pub const NUM_STORIES: usize = 2400;

/// All stories, one in each line.
///
/// ```
/// let text = causal_lm::corpus::text();
/// assert_eq!(text.lines().count(), causal_lm::corpus::NUM_STORIES);
/// assert!(text.is_ascii());
/// ```
pub fn text() -> String {
    let mut random = Random(0x5eed_0f0f_11e5_7a11);
    (0..NUM_STORIES).map(|_| story(&mut random) + "\n").collect()
}

fn story(random: &mut Random) -> String {
    let (name, animal) = (random.one_of(&NAMES), random.one_of(&ANIMALS));
    let (colour, thing) = (random.one_of(&COLOURS), random.one_of(&THINGS));
    let (place, wish) = (random.one_of(&PLACES), random.one_of(&WISHES));
    match random.below(3) {
        0 => format!(
            "{name} has a {animal}. One day {name} and the {animal} found a {colour} {thing} {place}. \
             \"Let us {wish} the {thing},\" said {name}. The {animal} looked at the {colour} {thing} and was happy."
        ),
        1 => format!(
            "There was a {animal} {place}. The {animal} had lost a {colour} {thing}. Then {name} came and helped the {animal}. \
             They found the {thing} and {name} wanted to {wish} the {colour} {thing}."
        ),
        _ => format!(
            "{name} went for a walk. A {colour} {thing} lay {place}. \"Whose {thing} is it?\" asked {name}. \
             \"It is mine,\" said a {animal}, and {name} gave the {colour} {thing} to the {animal}."
        ),
    }
}

/// SplitMix64 (Steele et al. 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn one_of(&mut self, words: &[&'static str]) -> &'static str {
        words[self.below(words.len())]
    }
}
