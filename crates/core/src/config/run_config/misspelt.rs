//! Variables that look like those of settings and are none.

use super::settings;
use strsim::damerau_levenshtein;

/// What the variables of settings begin with.
const PREFIXES: [&str; 2] = ["ACCELERATE_", "FSDP_"];
/// The most letters that are missing, too many, wrong or exchanged.
const MOST_SLIPS: usize = 2;

/// Variables whose names are a slip or two away from those of settings, each with the name that was probably meant. Whatever
/// they say has no effect.
///
/// ```
/// use accelerate_core::config::misspelt_variables;
/// let names = ["PATH", "ACCELERATE_MIXED_PRECISON", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_OF_MY_OWN"];
/// let found: Vec<_> = misspelt_variables(names).collect();
/// assert_eq!(found, [("ACCELERATE_MIXED_PRECISON", "ACCELERATE_MIXED_PRECISION".to_owned())]);
/// ```
pub fn misspelt_variables<'a>(names: impl IntoIterator<Item = &'a str>) -> impl Iterator<Item = (&'a str, String)> {
    let known: Vec<String> = settings().filter_map(|setting| setting.variable()).collect();
    let is_ours = |name: &&str| PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    names.into_iter().filter(is_ours).filter_map(move |name| {
        // Names of other lengths have more slips, and to count them takes time.
        let near = known.iter().filter(|known| known.len().abs_diff(name.len()) <= MOST_SLIPS);
        let scored = near.map(|known| (damerau_levenshtein(known, name), known));
        let (slips, meant) = scored.min()?;
        (0 < slips && slips <= MOST_SLIPS).then(|| (name, meant.clone()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_variable_of_a_setting_is_taken_for_another_one() {
        let names: Vec<String> = settings().filter_map(|setting| setting.variable()).collect();
        assert_eq!(misspelt_variables(names.iter().map(String::as_str)).count(), 0);
    }

    #[test]
    fn slips_are_found_and_other_names_are_left_alone() {
        for (name, meant) in [
            ("ACCELERATE_USE_FDSP", Some("ACCELERATE_USE_FSDP")),
            ("FSDP_SHARDING_STRATEGIE", Some("FSDP_SHARDING_STRATEGY")),
            ("ACCELERATE_MIXED", None),
            ("ACCELERATE_RUN_SECRET", None),
            ("MIXED_PRECISON", None),
        ] {
            let found = misspelt_variables([name]).next().map(|(_, meant)| meant);
            assert_eq!(found.as_deref(), meant, "{name}");
        }
    }
}
