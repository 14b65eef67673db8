//! Sequence and context parallelism: which tokens of a sequence each rank holds, which parts of attention it computes, and how heads
//! are divided.
//!
//! Methods: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509, where ranks exchange heads; Liu et al., "Ring Attention with
//! Blockwise Transformers for Near-Infinite Context", arXiv 2310.01889, where they exchange keys and values.

use crate::error::Result;
use crate::error::sequence_parallel::SequenceParallelErrorKind as Kind;
use crate::mesh::Axis;
use std::ops::Range;

/// How the tokens of sequences are divided among ranks.
///
/// Along `sp` each rank holds one range of tokens. Along `cp` a sequence is cut into two chunks for each rank, and a rank holds one
/// from the beginning and one from the end: under a causal mask late tokens look at more keys than early ones, and so every rank has
/// the same work.
///
/// ```
/// use accelerate_core::mesh::Axis;
/// use accelerate_core::sequence_parallel::SequenceDivision;
/// let ring = SequenceDivision::new(Axis::Cp, 8, 2)?;
/// assert_eq!((ring.positions(0), ring.positions(1)), (vec![0, 1, 6, 7], vec![2, 3, 4, 5]));
/// let ulysses = SequenceDivision::new(Axis::Sp, 8, 2)?;
/// assert_eq!(ulysses.ranges(1), [4..8]);
/// assert!(SequenceDivision::new(Axis::Cp, 6, 2).is_err());
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceDivision {
    axis: Axis,
    length: usize,
    num_ranks: usize,
}

/// A part of attention: queries of one chunk look at keys of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkPair {
    /// Which of the chunks that this rank holds the queries are.
    pub query: usize,
    /// Which of the chunks that the other rank holds the keys are.
    pub key: usize,
    /// Are they the same tokens, so that a causal mask hides some of them? Otherwise it hides none.
    pub is_diagonal: bool,
}

impl SequenceDivision {
    /// `length` tokens among `num_ranks` ranks along [`Axis::Sp`] or [`Axis::Cp`].
    ///
    /// # Errors
    /// [`Error::is_data`](crate::Error::is_data): a length that is no multiple of the number of chunks, or 0.
    pub fn new(axis: Axis, length: usize, num_ranks: usize) -> Result<Self> {
        let division = Self { axis, length, num_ranks: num_ranks.max(1) };
        let num_chunks = division.num_chunks();
        if length == 0 || !length.is_multiple_of(num_chunks) {
            let cure = length.div_ceil(num_chunks).max(1).saturating_mul(num_chunks);
            let axis = axis.name();
            return Err(Kind::SequenceDoesNotDivide { axis, length, num_ranks, num_chunks, cure }.into());
        }
        Ok(division)
    }

    /// Number of tokens of a whole sequence.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Among how many ranks.
    pub fn num_ranks(&self) -> usize {
        self.num_ranks
    }

    fn chunks_of_a_rank(&self) -> usize {
        if self.axis == Axis::Cp { 2 } else { 1 }
    }

    /// Into how many chunks a sequence is cut.
    pub fn num_chunks(&self) -> usize {
        self.num_ranks * self.chunks_of_a_rank()
    }

    /// Number of tokens of a chunk.
    pub fn chunk_length(&self) -> usize {
        self.length / self.num_chunks()
    }

    /// The chunks that a rank holds, counted from the beginning of the sequence, in the order in which it holds them.
    pub fn chunks(&self, rank: usize) -> Vec<usize> {
        match self.chunks_of_a_rank() {
            1 => vec![rank],
            _ => vec![rank, self.num_chunks() - 1 - rank],
        }
    }

    /// The tokens that a rank holds, in the order in which it holds them.
    pub fn ranges(&self, rank: usize) -> Vec<Range<usize>> {
        let length = self.chunk_length();
        self.chunks(rank).into_iter().map(|chunk| chunk * length..(chunk + 1) * length).collect()
    }

    /// The same, token by token.
    pub fn positions(&self, rank: usize) -> Vec<usize> {
        self.ranges(rank).into_iter().flatten().collect()
    }

    /// Of each chunk of the sequence, in order: the rank that holds it, and which of that rank's chunks it is.
    pub fn holders(&self) -> Vec<(usize, usize)> {
        let mut holders = vec![(0, 0); self.num_chunks()];
        for rank in 0..self.num_ranks {
            for (place, chunk) in self.chunks(rank).into_iter().enumerate() {
                holders[chunk] = (rank, place);
            }
        }
        holders
    }

    /// What queries of a rank look at among the keys that another one holds: all of them, or under a causal mask those that do not
    /// come later.
    ///
    /// ```
    /// use accelerate_core::mesh::Axis;
    /// use accelerate_core::sequence_parallel::SequenceDivision;
    /// let ring = SequenceDivision::new(Axis::Cp, 8, 2)?;
    /// assert_eq!(ring.pairs(0, 1, false).len(), 4);
    /// // Its first chunk comes before both of the other's, and its last one after both.
    /// let pairs = ring.pairs(0, 1, true);
    /// assert!(pairs.iter().all(|pair| pair.query == 1 && !pair.is_diagonal) && pairs.len() == 2);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn pairs(&self, query_rank: usize, key_rank: usize, is_causal: bool) -> Vec<ChunkPair> {
        let (queries, keys) = (self.chunks(query_rank), self.chunks(key_rank));
        let mut pairs = Vec::new();
        for (query, query_chunk) in queries.iter().enumerate() {
            for (key, key_chunk) in keys.iter().enumerate() {
                if !is_causal || key_chunk <= query_chunk {
                    pairs.push(ChunkPair { query, key, is_diagonal: key_chunk == query_chunk });
                }
            }
        }
        pairs
    }
}

/// How heads of attention are divided among the ranks along [`Axis::Sp`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadDivision {
    /// Heads of queries of each rank.
    pub num_heads: usize,
    /// Heads of keys and values of each rank.
    pub num_key_value_heads: usize,
    /// How often each head of keys and values is repeated before that, so that there are enough of them.
    pub repeats: usize,
}

impl HeadDivision {
    /// `num_heads` heads of queries, which share `num_key_value_heads` heads of keys and values, among `num_ranks` ranks. Heads of
    /// keys that do not divide are repeated as often as it takes.
    ///
    /// ```
    /// use accelerate_core::sequence_parallel::HeadDivision;
    /// let all = |division: HeadDivision| (division.num_heads, division.num_key_value_heads, division.repeats);
    /// assert_eq!(all(HeadDivision::new(8, 8, 4)?), (2, 2, 1));
    /// assert_eq!(all(HeadDivision::new(8, 2, 4)?), (2, 1, 2));
    /// assert!(HeadDivision::new(6, 6, 4).unwrap_err().to_string().contains("6 heads"));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::is_data`](crate::Error::is_data): heads of queries that do not divide, or do not share heads of keys evenly.
    pub fn new(num_heads: usize, num_key_value_heads: usize, num_ranks: usize) -> Result<Self> {
        if num_key_value_heads == 0 || !num_heads.is_multiple_of(num_key_value_heads) {
            return Err(Kind::HeadsDoNotShare { num_heads, num_key_value_heads }.into());
        }
        if num_ranks == 0 || num_heads == 0 || !num_heads.is_multiple_of(num_ranks) {
            return Err(Kind::HeadsDoNotDivide { num_heads, num_ranks }.into());
        }
        // The heads of queries are a multiple of both, and so of the least number that both divide.
        let repeats = num_ranks / greatest_common_divisor(num_key_value_heads, num_ranks);
        let num_key_value_heads = num_key_value_heads * repeats / num_ranks;
        Ok(Self { num_heads: num_heads / num_ranks, num_key_value_heads, repeats })
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Is a sequence as long as all sequences are said to be?
///
/// # Errors
/// [`Error::is_data`](crate::Error::is_data): it is not.
pub fn check_length(found: usize, wanted: Option<usize>) -> Result<()> {
    match wanted.filter(|wanted| *wanted != found) {
        Some(wanted) => Err(Kind::OtherLength { found, wanted }.into()),
        None => Ok(()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn ranks_hold_every_token_once_and_attention_has_every_pair_once() {
        for axis in [Axis::Sp, Axis::Cp] {
            for num_ranks in 1..6 {
                for chunk_length in 1..4 {
                    let num_chunks = num_ranks * if axis == Axis::Cp { 2 } else { 1 };
                    let division = SequenceDivision::new(axis, num_chunks * chunk_length, num_ranks).unwrap();
                    let mut held: Vec<usize> = (0..num_ranks).flat_map(|rank| division.positions(rank)).collect();
                    held.sort_unstable();
                    assert_eq!(held, (0..division.length()).collect::<Vec<_>>());
                    for (chunk, (rank, place)) in division.holders().into_iter().enumerate() {
                        assert_eq!(division.chunks(rank)[place], chunk);
                    }
                    for is_causal in [false, true] {
                        assert_eq!(computed(&division, is_causal), seen(division.length(), is_causal));
                    }
                }
            }
        }
    }

    /// Which query looks at which key, made up from pairs of chunks.
    fn computed(division: &SequenceDivision, is_causal: bool) -> BTreeSet<(usize, usize)> {
        let mut computed = BTreeSet::new();
        for query_rank in 0..division.num_ranks() {
            for key_rank in 0..division.num_ranks() {
                for pair in division.pairs(query_rank, key_rank, is_causal) {
                    for query in division.ranges(query_rank)[pair.query].clone() {
                        for key in division.ranges(key_rank)[pair.key].clone() {
                            let is_hidden = is_causal && pair.is_diagonal && query < key;
                            assert!(is_hidden || computed.insert((query, key)), "{pair:?}");
                        }
                    }
                }
            }
        }
        computed
    }

    fn seen(length: usize, is_causal: bool) -> BTreeSet<(usize, usize)> {
        let all = (0..length).flat_map(|query| (0..length).map(move |key| (query, key)));
        all.filter(|(query, key)| !is_causal || key <= query).collect()
    }

    #[test]
    fn every_rank_of_a_ring_has_the_same_work() {
        for num_ranks in 1..7 {
            let division = SequenceDivision::new(Axis::Cp, 4 * num_ranks, num_ranks).unwrap();
            let work = |rank: usize| -> usize {
                let pairs = (0..num_ranks).flat_map(|other| division.pairs(rank, other, true));
                pairs.map(|pair| if pair.is_diagonal { 1 } else { 2 }).sum()
            };
            assert!((0..num_ranks).all(|rank| work(rank) == work(0)), "{num_ranks}");
        }
    }

    #[test]
    fn a_head_of_queries_stays_with_its_head_of_keys() {
        for (num_heads, num_key_value_heads) in [(12, 12), (12, 6), (12, 4), (12, 3), (12, 2), (12, 1), (24, 6)] {
            for num_ranks in [1, 2, 3, 4, 6, 12] {
                let division = HeadDivision::new(num_heads, num_key_value_heads, num_ranks).unwrap();
                assert_eq!(division.num_heads * num_ranks, num_heads);
                assert_eq!(division.num_key_value_heads * num_ranks, num_key_value_heads * division.repeats);
                let of_query = num_heads / num_key_value_heads;
                let on_rank = division.num_heads / division.num_key_value_heads;
                for head in 0..num_heads {
                    let (rank, place) = (head / division.num_heads, head % division.num_heads);
                    let repeated = rank * division.num_key_value_heads + place / on_rank;
                    assert_eq!(
                        repeated / division.repeats,
                        head / of_query,
                        "{num_key_value_heads} {num_ranks} {head}"
                    );
                }
            }
        }
    }

    #[test]
    fn what_does_not_divide_is_named() {
        let sequence = |axis, length, ranks| SequenceDivision::new(axis, length, ranks).map(drop).unwrap_err();
        let heads = |heads, keys, ranks| HeadDivision::new(heads, keys, ranks).map(drop).unwrap_err();
        for (error, words) in [
            (
                sequence(Axis::Sp, 33, 2),
                "a sequence of 33 tokens does not divide into 2 equal parts for 2 ranks (sp_size)",
            ),
            (sequence(Axis::Cp, 6, 2), "for example to 8"),
            (sequence(Axis::Cp, 0, 2), "for example to 4"),
            (heads(5, 5, 2), "5 heads of attention do not divide among 2 ranks"),
            (heads(6, 4, 2), "6 heads of queries do not share 4 heads"),
            (check_length(12, Some(16)).unwrap_err(), "sp_seq_length is 16"),
        ] {
            assert!(error.is_data() && error.to_string().contains(words), "{error}");
        }
        assert!(check_length(12, None).is_ok() && check_length(16, Some(16)).is_ok());
    }
}
