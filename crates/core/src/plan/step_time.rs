//! How long a training step takes at least, from what is computed and what travels.

use super::{MicroBatch, ParameterEntry, Plan};
use crate::Result;
use crate::error::plan::PlanErrorKind as Kind;
use crate::weight_files::parse_size;
use serde::Serialize;

/// What one rank can do in a second.
///
/// ```
/// use accelerate_core::plan::{RankSpeed, parse_bandwidth, parse_flops};
/// let speed = RankSpeed { flops: parse_flops("312T")?, bandwidth: Some(parse_bandwidth("100Gbit")?) };
/// assert_eq!((speed.flops, speed.bandwidth), (312e12, Some(12_500_000_000)));
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RankSpeed {
    /// Floating-point operations.
    pub flops: f64,
    /// Bytes that it can send, and receive at the same time. `None` where nobody knows.
    pub bandwidth: Option<u64>,
}

/// How long a step of one micro-batch takes one rank, as bounds: speeds are those of data sheets, which programs do not reach.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepTime {
    /// Tokens of one rank.
    pub num_tokens: u64,
    /// Floating-point operations of one rank.
    pub floating_point_operations: f64,
    /// What one rank sends.
    pub sent_bytes: u64,
    /// Seconds of computing.
    pub compute_seconds: f64,
    /// Seconds of sending; `None` where something is sent and the bandwidth is not known. The same holds for what follows.
    pub communication_seconds: Option<f64>,
    /// Seconds of the step if all that is sent travels while something is computed: the longer of the two.
    pub overlapped_seconds: Option<f64>,
    /// Seconds of the step if nothing is computed while something travels: the sum of the two.
    pub not_overlapped_seconds: Option<f64>,
}

impl Plan {
    /// How long a step of one micro-batch takes at these speeds.
    ///
    /// The passes compute 6 operations for each parameter that is trained and each token, 2 forward and 4 backward (Kaplan et al.,
    /// "Scaling Laws for Neural Language Models", 2020, §2.1), and 2 more with activation checkpointing, which computes the forward
    /// pass twice. Scores of attention, which matter for long rows, and the optimizer's step are not counted. What is sent is
    /// that of [`collectives`](Self::collectives).
    ///
    /// ```
    /// use accelerate_core::config::DistributedDataParallelSettings;
    /// use accelerate_core::plan::*;
    /// let parameters = vec![ParameterEntry::new("weight", &[1000], "float32", 4)];
    /// let plan = plan_data_parallel(&Inventory { parameters }, &DistributedDataParallelSettings::default(), 2);
    /// let batch = MicroBatch { batch_size: 1, sequence_length: 10, activation_checkpointing: false };
    /// let time = plan.step_time(&batch, &RankSpeed { flops: 60_000.0, bandwidth: Some(2_000) });
    /// assert_eq!((time.compute_seconds, time.communication_seconds), (1.0, Some(2.0)));
    /// assert_eq!((time.overlapped_seconds, time.not_overlapped_seconds), (Some(2.0), Some(3.0)));
    /// ```
    pub fn step_time(&self, batch: &MicroBatch, speed: &RankSpeed) -> StepTime {
        let trained = self.inventory.parameters.iter().filter(|parameter| parameter.requires_grad);
        let num_parameters: f64 = trained.map(|parameter: &ParameterEntry| parameter.num_elements() as f64).sum();
        let for_each = if batch.activation_checkpointing { 8.0 } else { 6.0 };
        let num_tokens = batch.num_tokens();
        let floating_point_operations = for_each * num_parameters * num_tokens as f64;
        let compute_seconds = floating_point_operations / speed.flops;
        let sent_bytes = self.collectives().iter().fold(0, |sum: u64, own| sum.saturating_add(own.sent_bytes() as u64));
        let communication_seconds = match (sent_bytes, speed.bandwidth) {
            (0, _) => Some(0.0),
            (_, bandwidth) => bandwidth.map(|bandwidth| sent_bytes as f64 / bandwidth as f64),
        };
        StepTime {
            num_tokens,
            floating_point_operations,
            sent_bytes,
            compute_seconds,
            communication_seconds,
            overlapped_seconds: communication_seconds.map(|seconds| seconds.max(compute_seconds)),
            not_overlapped_seconds: communication_seconds.map(|seconds| seconds + compute_seconds),
        }
    }
}

/// Reads a bandwidth, and gives bytes in a second. A unit is always needed, because networks are sold in bits and buses in bytes:
/// `Gbit`, `Gbit/s`, `Gbps` and `Gb` are bits, `GB`, `GB/s` and `GiB/s` are bytes (so for K, M, T).
///
/// # Errors
/// [`Error::is_plan`](crate::Error::is_plan): no number, no unit, an unknown one, or nothing at all in a second.
///
/// ```
/// use accelerate_core::plan::parse_bandwidth;
/// assert_eq!(parse_bandwidth("100Gbit")?, 12_500_000_000);
/// assert_eq!(parse_bandwidth("12GB/s")?, 12_000_000_000);
/// assert!(parse_bandwidth("100").is_err());
/// # Ok::<(), accelerate_core::Error>(())
/// ```
pub fn parse_bandwidth(text: &str) -> Result<u64> {
    let wrong = || Kind::Bandwidth { found: text.to_owned() };
    let trimmed = text.trim();
    let amount = ["/s", "ps"].iter().find_map(|suffix| trimmed.strip_suffix(suffix)).unwrap_or(trimmed);
    let of_bits = ["bits", "bit", "b"].iter().find_map(|unit| amount.strip_suffix(unit)).map(|number| (number, 8));
    let of_bytes = amount.strip_suffix('B').map(|number| (number, 1));
    let (number, bits) = of_bits.or(of_bytes).ok_or_else(wrong)?;
    let bytes = parse_size(&format!("{number}B")).map_err(|_| wrong())? / bits;
    if bytes == 0 { Err(wrong().into()) } else { Ok(bytes) }
}

/// Reads a number of floating-point operations in a second: `312T`, `312TFLOPS`, `1.5 PFLOP/s`, `3.12e14`.
///
/// # Errors
/// [`Error::is_plan`](crate::Error::is_plan): not a number above 0, or an unknown unit.
///
/// ```
/// use accelerate_core::plan::parse_flops;
/// assert_eq!(parse_flops("312T")?, 312e12);
/// assert_eq!(parse_flops("1.5PFLOPS")?, 1.5e15);
/// # Ok::<(), accelerate_core::Error>(())
/// ```
pub fn parse_flops(text: &str) -> Result<f64> {
    const UNITS: [(char, f64); 6] = [('K', 1e3), ('M', 1e6), ('G', 1e9), ('T', 1e12), ('P', 1e15), ('E', 1e18)];
    let wrong = || Kind::Flops { found: text.to_owned() };
    let upper = text.trim().to_ascii_uppercase();
    let amount = ["FLOPS", "FLOP/S"].iter().find_map(|suffix| upper.strip_suffix(suffix)).unwrap_or(&upper);
    let unit = UNITS.iter().find_map(|&(unit, size)| amount.strip_suffix(unit).map(|number| (number, size)));
    let (number, size) = unit.unwrap_or((amount, 1.0));
    let number = number.trim();
    let is_number = number.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    let flops = number.parse::<f64>().ok().filter(|_| is_number).map(|number| number * size);
    flops.filter(|flops| flops.is_finite() && *flops > 0.0).ok_or_else(|| wrong().into())
}
