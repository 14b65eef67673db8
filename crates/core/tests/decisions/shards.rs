//! Shards from pieces.

use accelerate_core::shards::{Copied, cover};
use proptest::prelude::*;

proptest! {
    /// Every element comes from where it stands in a piece, or the first that is missing is named.
    #[test]
    fn shards_are_what_their_elements_say(
        bounds in prop::collection::vec((0usize..30, 0usize..12), 0..6),
        start in 0usize..30,
        length in 0usize..20,
    ) {
        let pieces: Vec<_> = bounds.iter().map(|&(start, length)| start..start + length).collect();
        let wanted = start..start + length;
        let missing = wanted.clone().find(|element| !pieces.iter().any(|piece| piece.contains(element)));
        match cover(wanted.clone(), &pieces) {
            Ok(copies) => {
                prop_assert_eq!(missing, None);
                let mut found = vec![usize::MAX; wanted.len()];
                for Copied { source, from, to } in copies {
                    for (place, element) in from.enumerate() {
                        prop_assert!(element < pieces[source].len());
                        found[to + place] = pieces[source].start + element;
                    }
                }
                prop_assert_eq!(found, wanted.collect::<Vec<_>>());
            }
            Err(gap) => {
                prop_assert_eq!(missing, Some(gap.start));
                prop_assert!(!gap.is_empty() && gap.end <= wanted.end);
                prop_assert!(gap.clone().all(|element| !pieces.iter().any(|piece| piece.contains(&element))));
            }
        }
    }
}
