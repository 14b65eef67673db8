//! Random numbers for a Python that has none of a run's.

use crate::weight_files::Plain;

/// Words of the state of a Mersenne Twister.
pub const FRESH_WORDS: usize = 624;

/// The states of Python's and of NumPy's generators, begun with this seed, as `random.setstate` and
/// `numpy.random.set_state` take them. Both need one before `load_state` of Python goes on to PyTorch's.
///
/// ```
/// use accelerate_core::checkpoint::python::fresh_random_states;
/// let [python, numpy] = fresh_random_states::<()>(5489);
/// assert_ne!(python, numpy);
/// ```
pub fn fresh_random_states<T>(seed: u32) -> [Plain<T>; 2] {
    // How every implementation of the generator makes its state of a seed (Matsumoto and Nishimura, 1998).
    let mut words = vec![seed];
    for place in 1..FRESH_WORDS as u32 {
        let before = words.last().copied().unwrap_or(seed);
        words.push(1_812_433_253_u32.wrapping_mul(before ^ before >> 30).wrapping_add(place));
    }
    let words: Vec<Plain<T>> = words.into_iter().map(|word| Plain::Int(word.into())).collect();
    let place = || Plain::Int(FRESH_WORDS as i64);
    let again = words.iter().map(|word| if let Plain::Int(word) = word { Plain::Int(*word) } else { Plain::None });
    let numpy = vec![Plain::text("MT19937"), Plain::List(again.collect()), place(), Plain::Int(0), Plain::Float(0.0)];
    let python = Plain::Tuple(words.into_iter().chain([place()]).collect());
    [Plain::Tuple(vec![Plain::Int(3), python, Plain::None]), Plain::Tuple(numpy)]
}
