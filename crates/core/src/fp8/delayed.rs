//! Delayed scaling: a scale is made of the largest values of the passes before.
//!
//! Definition: TransformerEngine, `DelayedScaling` in `common/recipe/__init__.py` and the kernel that updates scales,
//! `common/recipe/delayed_scaling.cu`. Arithmetic is that of 32 bits, step by step, so results are equal to the bit.

use super::Float8;
use serde_json::{Value, json};
use std::collections::VecDeque;

/// How scales follow the largest values of tensors (`DelayedScaling` of TransformerEngine).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DelayedScaling {
    /// So many powers of two lie between the largest value and the largest number of the format.
    pub margin: i32,
    /// A scale is computed anew at every `interval`-th update. TransformerEngine took this setting away in 2025 and computes one each time,
    /// as is done here by default.
    pub interval: usize,
    /// Are gradients E5M2? All else is E4M3.
    pub is_hybrid: bool,
    /// Number of passes whose largest values are remembered.
    pub amax_history_len: usize,
    /// Does the last of them count? Otherwise the largest.
    pub is_most_recent: bool,
    /// Is evaluation in FP8, too?
    pub during_eval: bool,
    /// Pad what a product on a GPU adds up along.
    pub pad_inner_dim: bool,
}

impl DelayedScaling {
    /// The format of gradients of outputs.
    pub fn gradient_format(&self) -> Float8 {
        if self.is_hybrid { Float8::E5M2 } else { Float8::E4M3 }
    }

    /// The scale that `amax` asks for: `previous`, if that is zero or not finite; else the largest number over it, by `margin` powers
    /// of two less, and finite.
    fn scale(&self, amax: f32, format: Float8, previous: f32) -> f32 {
        let scaled_max = format.max() * 2f32.powi(-self.margin);
        let scale = if amax.is_finite() && amax > 0.0 { scaled_max / amax } else { previous };
        if scale.is_infinite() { f32::MAX } else { scale }
    }
}

/// What is remembered of one tensor of a layer: its scale, and the largest values of the passes before.
///
/// ```
/// use accelerate_core::config::{FP8BackendType, FP8Settings};
/// use accelerate_core::fp8::{Float8, Fp8Recipe, ScalingState};
///
/// let settings = FP8Settings { backend: Some(FP8BackendType::TE), amax_history_len: 2, ..Default::default() };
/// let Fp8Recipe::Delayed(recipe) = Fp8Recipe::of_settings(&settings)? else { panic!("not delayed") };
/// let mut state = ScalingState::new(2);
/// assert_eq!(state.scale(), 1.0);
/// state.update(&recipe, Float8::E4M3, 2.0);
/// assert_eq!(state.scale(), 224.0);
/// assert_eq!(state.amax_history().collect::<Vec<_>>(), [0.0, 2.0]);
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ScalingState {
    scale: f32,
    /// The first is the place of the pass that is under way; then they follow from the oldest to the newest.
    amax_history: VecDeque<f32>,
    num_updates: u64,
}

impl ScalingState {
    /// A scale of one, and a history of zeros. A length of 0 is as good as 1.
    pub fn new(amax_history_len: usize) -> Self {
        Self { scale: 1.0, amax_history: vec![0.0; amax_history_len.max(1)].into(), num_updates: 0 }
    }

    /// What the tensor is multiplied by before it is rounded.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// The remembered largest values as TransformerEngine has them: a zero for the pass that is under way, then from the oldest to the
    /// newest.
    pub fn amax_history(&self) -> impl Iterator<Item = f32> + '_ {
        self.amax_history.iter().copied()
    }

    /// Takes over `amax`, the largest absolute value of the pass over all ranks, at its end. A value of zero is that of a layer that
    /// was not used, and changes nothing.
    pub fn update(&mut self, recipe: &DelayedScaling, format: Float8, amax: f32) {
        if amax == 0.0 {
            return;
        }
        // What is not a number is passed over, as by `fmaxf`.
        let largest = self.amax_history.iter().skip(1).fold(amax, |largest, past| largest.max(*past));
        self.amax_history.pop_front();
        self.amax_history.push_back(amax);
        if let Some(place) = self.amax_history.front_mut() {
            *place = 0.0;
        }
        let counts = if recipe.is_most_recent { amax } else { largest };
        if self.num_updates.is_multiple_of(recipe.interval.max(1) as u64) {
            self.scale = recipe.scale(counts, format, self.scale);
        }
        self.num_updates += 1;
    }

    /// As JSON, from which [`of_json`](Self::of_json) makes the same to the bit.
    pub fn to_json(&self) -> Value {
        let past = self.amax_history.iter().skip(1).skip_while(|amax| **amax == 0.0);
        json!({
            "scale": number(self.scale),
            "num_updates": self.num_updates,
            "amax_history": past.copied().map(number).collect::<Vec<_>>(),
        })
    }

    /// What [`to_json`](Self::to_json) has written, for a history of this length: of a longer one the newest values. `None` of
    /// anything else.
    ///
    /// ```
    /// use accelerate_core::fp8::ScalingState;
    /// let state = ScalingState::new(4);
    /// assert_eq!(ScalingState::of_json(&state.to_json(), 4), Some(state));
    /// assert_eq!(ScalingState::of_json(&serde_json::json!({}), 4), None);
    /// ```
    pub fn of_json(value: &Value, amax_history_len: usize) -> Option<Self> {
        let scale = number_of(value.get("scale")?).filter(|scale| scale.is_finite() && *scale > 0.0)?;
        let num_updates = value.get("num_updates")?.as_u64()?;
        let past = value.get("amax_history")?.as_array()?;
        let past: Vec<f32> = past.iter().map(number_of).collect::<Option<_>>()?;
        let mut state = Self { scale, num_updates, ..Self::new(amax_history_len) };
        let places = state.amax_history.iter_mut().skip(1).rev();
        places.zip(past.iter().rev()).for_each(|(place, amax)| *place = *amax);
        Some(state)
    }
}

/// JSON has no infinity.
const INFINITE: &str = "inf";

fn number(value: f32) -> Value {
    if value.is_finite() { json!(f64::from(value)) } else { json!(INFINITE) }
}

fn number_of(value: &Value) -> Option<f32> {
    match value {
        Value::String(text) if text == INFINITE => Some(f32::INFINITY),
        // It was a number of 32 bits, of which the shortest text that means one of 64 bits is exact.
        value => value.as_f64().map(|number| number as f32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const RECIPE: DelayedScaling = DelayedScaling {
        margin: 0,
        interval: 1,
        is_hybrid: true,
        amax_history_len: 3,
        is_most_recent: true,
        during_eval: false,
        pad_inner_dim: true,
    };

    /// Scales after each pass, and the history after the last, written down by hand from TransformerEngine's kernel.
    #[rstest]
    #[case::most_recent(RECIPE, &[2.0, 4.0, 1.0], &[224.0, 112.0, 448.0], &[0.0, 4.0, 1.0])]
    #[case::largest(
        DelayedScaling { is_most_recent: false, ..RECIPE },
        &[2.0, 4.0, 1.0, 1.0, 1.0],
        &[224.0, 112.0, 112.0, 112.0, 448.0],
        &[0.0, 1.0, 1.0]
    )]
    #[case::margin(DelayedScaling { margin: 3, ..RECIPE }, &[2.0], &[28.0], &[0.0, 0.0, 2.0])]
    #[case::every_second(
        DelayedScaling { interval: 2, ..RECIPE },
        &[2.0, 4.0, 1.0, 7.0],
        &[224.0, 224.0, 448.0, 448.0],
        &[0.0, 1.0, 7.0]
    )]
    // A layer that was not used, and overflow.
    #[case::zero(RECIPE, &[2.0, 0.0], &[224.0, 224.0], &[0.0, 0.0, 2.0])]
    #[case::infinite(RECIPE, &[2.0, f32::INFINITY, 4.0], &[224.0, 224.0, 112.0], &[0.0, f32::INFINITY, 4.0])]
    #[case::infinite_stays_the_largest(
        DelayedScaling { is_most_recent: false, ..RECIPE },
        &[2.0, f32::INFINITY, 4.0, 4.0, 4.0],
        &[224.0, 224.0, 224.0, 224.0, 112.0],
        &[0.0, 4.0, 4.0]
    )]
    #[case::tiny(RECIPE, &[1e-40], &[f32::MAX], &[0.0, 0.0, 1e-40])]
    fn scales_follow_the_largest_values(
        #[case] recipe: DelayedScaling,
        #[case] amaxes: &[f32],
        #[case] scales: &[f32],
        #[case] history: &[f32],
    ) {
        let mut state = ScalingState::new(recipe.amax_history_len);
        for (amax, wanted) in amaxes.iter().zip(scales) {
            state.update(&recipe, Float8::E4M3, *amax);
            assert_eq!(state.scale().to_bits(), wanted.to_bits(), "after {amax}");
        }
        assert_eq!(state.amax_history().collect::<Vec<_>>(), history);
        assert_eq!(ScalingState::of_json(&state.to_json(), recipe.amax_history_len), Some(state));
    }

    #[test]
    fn a_history_of_one_remembers_nothing_but_the_scale() {
        let mut state = ScalingState::new(1);
        let recipe = DelayedScaling { is_most_recent: false, amax_history_len: 1, ..RECIPE };
        for (amax, wanted) in [(4.0, 112.0), (2.0, 224.0)] {
            state.update(&recipe, Float8::E4M3, amax);
            assert_eq!((state.scale(), state.amax_history().collect::<Vec<_>>()), (wanted, vec![0.0]));
        }
    }

    /// Two models that are trained in turn: each is unused in every second pass.
    #[test]
    fn passes_in_which_a_tensor_is_not_used_do_not_count() {
        let recipe = DelayedScaling { interval: 2, amax_history_len: 4, ..RECIPE };
        let (mut alone, mut in_turn) = (ScalingState::new(4), ScalingState::new(4));
        for amax in [1.0, 2.0, 3.0, 4.0, 5.0] {
            alone.update(&recipe, Float8::E4M3, amax);
            in_turn.update(&recipe, Float8::E4M3, amax);
            in_turn.update(&recipe, Float8::E4M3, 0.0);
        }
        assert_eq!(alone, in_turn);
        assert_ne!(alone.scale(), 1.0);
    }

    #[test]
    fn a_saved_history_of_another_length_gives_its_newest_values() {
        let mut state = ScalingState::new(5);
        (1..=4).for_each(|amax| state.update(&RECIPE, Float8::E4M3, amax as f32));
        let of_length = |length| {
            ScalingState::of_json(&state.to_json(), length).map(|state| state.amax_history().collect::<Vec<_>>())
        };
        assert_eq!(of_length(3), Some(vec![0.0, 3.0, 4.0]));
        assert_eq!(of_length(7), Some(vec![0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0]));
        for broken in [json!(null), json!({"scale": 0.0, "num_updates": 1, "amax_history": []}), json!({"scale": 1.0})]
        {
            assert_eq!(ScalingState::of_json(&broken, 3), None, "{broken}");
        }
    }
}
