//! Sizes as people write them.

use crate::Result;
use crate::error::weight_files::WeightFilesErrorKind as Kind;

/// Multipliers of decimal units, whose lower-case `b` means bits.
const DECIMAL: [(&str, u64); 5] =
    [("TB", 1_000_000_000_000), ("GB", 1_000_000_000), ("MB", 1_000_000), ("KB", 1000), ("B", 1)];
const BINARY: [(&str, u64); 4] = [("TIB", 1 << 40), ("GIB", 1 << 30), ("MIB", 1 << 20), ("KIB", 1 << 10)];

/// Reads a size in bytes (`convert_file_size_to_int` of the reference, `utils/modeling.py`).
///
/// `GB` is decimal and `GiB` binary (so for T, M, K); a decimal unit that ends in a lower-case `b` counts
/// bits (`Gb`). A number alone counts bytes. Fractions are allowed and rounded down.
///
/// # Errors
///
/// [`Error::is_weight_files`](crate::Error::is_weight_files): no number, an unknown unit, a negative or too large size.
///
/// ```
/// use accelerate_core::weight_files::parse_size;
/// assert_eq!(parse_size("10GB")?, 10_000_000_000);
/// assert_eq!(parse_size("1.5 GiB")?, 1_610_612_736);
/// assert_eq!(parse_size("8Gb")?, 1_000_000_000);
/// assert_eq!(parse_size("100")?, 100);
/// # Ok::<(), accelerate_core::Error>(())
/// ```
pub fn parse_size(text: &str) -> Result<u64> {
    read(text.trim()).ok_or_else(|| Kind::Size { found: text.to_owned() }.into())
}

fn read(text: &str) -> Option<u64> {
    let unit_at = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = (text[..unit_at].trim(), &text[unit_at..]);
    let upper = unit.to_ascii_uppercase();
    let find = |table: &[(&str, u64)]| table.iter().find(|(name, _)| *name == upper).map(|&(_, multiplier)| multiplier);
    let (multiplier, divisor) = match (unit, find(&BINARY), find(&DECIMAL)) {
        ("", _, _) => (1, 1),
        (_, Some(binary), _) => (binary, 1),
        // A lone "b" would be a count of bits, which nobody means; "B" is bytes.
        ("b", _, _) => return None,
        (_, _, Some(decimal)) => (decimal, if unit.ends_with('b') { 8 } else { 1 }),
        _ => return None,
    };
    if !number.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
        return None;
    }
    // Whole numbers stay exact where a 64-bit float would round them.
    let units = match number.parse::<u64>() {
        Ok(whole) => whole.checked_mul(multiplier)?,
        Err(_) => {
            let bytes = number.parse::<f64>().ok()? * multiplier as f64;
            (bytes < u64::MAX as f64).then_some(bytes as u64)?
        }
    };
    Some(units / divisor)
}

/// Writes a size in bytes with the largest decimal unit, and at most two digits after the point.
///
/// ```
/// use accelerate_core::weight_files::format_size;
/// assert_eq!(format_size(10_000_000_000), "10 GB");
/// assert_eq!(format_size(1_234_567), "1.23 MB");
/// assert_eq!(format_size(12), "12 B");
/// ```
pub fn format_size(num_bytes: u64) -> String {
    for (unit, multiplier) in DECIMAL {
        if num_bytes >= multiplier && multiplier > 1 {
            let text = format!("{:.2}", num_bytes as f64 / multiplier as f64);
            return format!("{} {unit}", text.trim_end_matches('0').trim_end_matches('.'));
        }
    }
    format!("{num_bytes} B")
}
