//! What the parts of a quantised weight are called in files and state dicts.

use crate::Result;
use crate::config::QuantType;
use crate::error::quantization::QuantizationErrorKind as Kind;
use crate::weight_files::shown;

const STATE: &str = ".quant_state.bitsandbytes__";

/// The parts of a weight of four bits. The weight's own name is that of its codes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FourBitNames {
    /// Scales: float32, or uint8 where they are nested.
    pub absmax: String,
    /// The sixteen numbers: float32.
    pub quant_map: String,
    /// Scales of the scales, float32, and the 256 numbers of those.
    pub nested: Option<[String; 2]>,
    /// JSON as bytes.
    pub quant_state: String,
}

impl FourBitNames {
    /// The names that bitsandbytes gives them.
    ///
    /// ```
    /// use accelerate_core::{config::QuantType, quantization::FourBitNames};
    /// let names = FourBitNames::of("proj.weight", QuantType::Nf4, false);
    /// assert_eq!(names.quant_state, "proj.weight.quant_state.bitsandbytes__nf4");
    /// ```
    pub fn of(weight: &str, quant_type: QuantType, is_nested: bool) -> Self {
        let part = |part: &str| format!("{weight}.{part}");
        Self {
            absmax: part("absmax"),
            quant_map: part("quant_map"),
            nested: is_nested.then(|| [part("nested_absmax"), part("nested_quant_map")]),
            quant_state: format!("{weight}{STATE}{quant_type}"),
        }
    }

    /// All of them, in the order in which bitsandbytes lists them.
    pub fn all(&self) -> Vec<&str> {
        let nested = self.nested.iter().flatten();
        let front = [&self.absmax, &self.quant_map].into_iter();
        front.chain(nested).chain([&self.quant_state]).map(String::as_str).collect()
    }
}

/// The parts of a weight of eight bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Int8Names {
    /// A scale for each row: float32.
    pub scb: String,
    /// The number 0 as uint8: rows follow each other.
    pub weight_format: String,
}

impl Int8Names {
    /// The names that bitsandbytes gives them: they are parts of the layer.
    ///
    /// ```
    /// use accelerate_core::quantization::Int8Names;
    /// assert_eq!(Int8Names::of("proj.weight").scb, "proj.SCB");
    /// ```
    pub fn of(weight: &str) -> Self {
        let layer = weight.strip_suffix("weight").unwrap_or(weight);
        Self { scb: format!("{layer}SCB"), weight_format: format!("{layer}weight_format") }
    }
}

/// What a file has of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredWeight {
    /// Numbers.
    Plain,
    /// Codes of four bits.
    FourBit {
        /// What they stand for.
        quant_type: QuantType,
        /// Are the scales nested?
        is_nested: bool,
    },
    /// Codes of eight bits.
    EightBit,
}

impl StoredWeight {
    /// In words.
    pub fn text(self) -> String {
        match self {
            Self::Plain => "numbers".to_owned(),
            Self::FourBit { quant_type, is_nested: false } => format!("4 bits ({quant_type})"),
            Self::FourBit { quant_type, is_nested: true } => format!("4 bits ({quant_type}, double)"),
            Self::EightBit => "8 bits".to_owned(),
        }
    }
}

/// How a file that has tensors of these names stores `weight`.
///
/// # Errors
/// A quantised weight of which a part is missing; one that is there in two kinds.
pub fn recognise(weight: &str, has: impl Fn(&str) -> bool) -> Result<StoredWeight> {
    let missing = |missing: &str| Kind::Missing { weight: shown(weight), missing: shown(missing) };
    let states: Vec<QuantType> = QuantType::ALL
        .iter()
        .copied()
        .filter(|quant_type| has(&FourBitNames::of(weight, *quant_type, false).quant_state))
        .collect();
    let parts = FourBitNames::of(weight, QuantType::Nf4, true);
    let is_nested = parts.nested.iter().flatten().any(|name| has(name));
    match states[..] {
        [quant_type] => {
            let names = FourBitNames::of(weight, quant_type, is_nested);
            let absent = names.all().into_iter().chain([weight]).find(|name| !has(name));
            absent.map_or(Ok(StoredWeight::FourBit { quant_type, is_nested }), |name| Err(missing(name).into()))
        }
        [] if is_nested || has(&parts.absmax) || has(&parts.quant_map) => {
            Err(missing(&format!("{weight}.quant_state")).into())
        }
        [] if has(&Int8Names::of(weight).scb) => match has(weight) {
            true => Ok(StoredWeight::EightBit),
            false => Err(missing(weight).into()),
        },
        [] => Ok(StoredWeight::Plain),
        _ => Err(Kind::TwoKinds { weight: shown(weight) }.into()),
    }
}

/// The weight that a tensor of this name is a part of, if its name says that it is one.
///
/// ```
/// use accelerate_core::quantization::weight_of_part;
/// assert_eq!(weight_of_part("a.weight.nested_absmax").as_deref(), Some("a.weight"));
/// assert_eq!(weight_of_part("a.SCB").as_deref(), Some("a.weight"));
/// assert_eq!(weight_of_part("a.weight"), None);
/// ```
pub fn weight_of_part(name: &str) -> Option<String> {
    const PARTS: [&str; 4] = [".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"];
    let part = PARTS.iter().find_map(|part| name.strip_suffix(part));
    let state = || name.split_once(STATE).map(|(weight, _)| weight);
    if let Some(weight) = part.or_else(state) {
        return Some(weight.to_owned());
    }
    let (layer, part) = name.rsplit_once('.').unwrap_or(("", name));
    let prefix = if layer.is_empty() { String::new() } else { format!("{layer}.") };
    matches!(part, "SCB" | "weight_format").then(|| format!("{prefix}weight"))
}
