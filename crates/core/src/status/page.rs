//! The page of a rank, word by word.

use super::rate::Progress;

/// Words of a page.
pub const PAGE_WORDS: usize = super::PAGE_BYTES / 8;

/// Where what is in a page. Words of the launcher are written by it alone, all others by the rank.
pub mod words {
    /// The process that writes the page, in its lower half; 0 as long as none does.
    pub const OWNER: usize = 0;
    /// Steps that an optimizer has taken, of the one that has taken most.
    pub const STEPS: usize = 1;
    /// Of the launcher: the process that it has started.
    pub const STARTED: usize = 2;
    /// Of the launcher: how that process has ended; see [`exit_word`](super::exit_word).
    pub const ENDED: usize = 3;
    /// Of the launcher: which rank of the run was the first to end with code 0; see [`rank_word`](super::rank_word).
    pub const FIRST_ENDED: usize = 4;
    /// Which times samples were handed out: a count that is odd while the words after it change, then how many times there have
    /// been, then pairs of a time and of all samples until then, each pair in the place of the oldest.
    pub const PROGRESS: usize = 8;
    /// Pairs of times and samples.
    pub const NUM_TIMES: usize = 16;
    /// Where the places of calls begin: one for each group of processes.
    pub const CALLS: usize = 48;
    /// Words of such a place. The first is a count that is odd while the others change.
    pub const WORDS_OF_CALL: usize = 33;
    /// How many places there are.
    pub const NUM_CALLS: usize = 14;
}

const NUM_PAIR_WORDS: usize = 2 * words::NUM_TIMES;
const GROUP_BYTES: usize = 40;
const OP_BYTES: usize = 48;
const FILE_BYTES: usize = 128;

/// The last call of a group that a rank has made or is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallRecord {
    /// The group's name: the same on all ranks of it.
    pub group: String,
    /// Ranks of the group.
    pub num_members: usize,
    /// Its calls are made by a thread of their own, beside the program.
    pub is_in_background: bool,
    /// The operation; empty where the group has made none.
    pub op: String,
    /// Which call of the group it is, from 1; 0 where there has been none.
    pub sequence: u64,
    /// The file and the line of the program that has called, where they are known.
    pub site: Option<(String, u32)>,
    /// When it began, in nanoseconds of the machine's clock.
    pub began: u64,
    /// When it ended; `None` while it goes on.
    pub ended: Option<u64>,
}

impl CallRecord {
    /// Is the rank in the call?
    pub fn is_running(&self) -> bool {
        self.sequence > 0 && self.ended.is_none()
    }
}

/// What a rank writes of a call: as [`CallRecord`], without owning anything.
///
/// ```
/// use accelerate_core::status::CallEntry;
/// let call = CallEntry { group: "/fork/0", num_members: 2, op: "barrier", sequence: 3, began: 10, ..Default::default() };
/// let read = CallEntry::decode(&call.encode()).unwrap();
/// assert_eq!((read.op.as_str(), read.sequence, read.is_running()), ("barrier", 3, true));
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct CallEntry<'a> {
    /// See [`CallRecord::group`]. Of a long name, the end.
    pub group: &'a str,
    /// See [`CallRecord::num_members`].
    pub num_members: usize,
    /// See [`CallRecord::is_in_background`].
    pub is_in_background: bool,
    /// See [`CallRecord::op`].
    pub op: &'a str,
    /// See [`CallRecord::sequence`].
    pub sequence: u64,
    /// See [`CallRecord::site`]. Of a long path, the end.
    pub site: Option<(&'a str, u32)>,
    /// See [`CallRecord::began`].
    pub began: u64,
    /// See [`CallRecord::ended`].
    pub ended: Option<u64>,
}

/// Words of a place without its count, in order. The first three are those of every call, the next ones say how long texts are.
const SEQUENCE: usize = 0;
const BEGAN: usize = 1;
const CALL_ENDED: usize = 2;
/// The number of members, whether the group is in the background, and the length of its name.
const GROUP_WORD: usize = 3;
/// The line, and the lengths of the operation and of the file.
const CALL_WORD: usize = 4;
const GROUP: usize = 5;
const OP: usize = GROUP + GROUP_BYTES / 8;
const FILE: usize = OP + OP_BYTES / 8;
const NUM_WORDS: usize = words::WORDS_OF_CALL - 1;

const _: () = assert!(FILE + FILE_BYTES / 8 == NUM_WORDS);
const _: () = assert!(words::PROGRESS + 2 + NUM_PAIR_WORDS <= words::CALLS);
const _: () = assert!(words::CALLS + words::NUM_CALLS * words::WORDS_OF_CALL <= PAGE_WORDS);

impl CallEntry<'_> {
    /// The word of a place that says when a call began, counted from the place's first.
    pub const BEGAN_IN_PLACE: usize = 1 + BEGAN;
    /// The word of a place that says when a call ended.
    pub const ENDED_IN_PLACE: usize = 1 + CALL_ENDED;

    /// Gives the words by which a place, which begins with its count, becomes that of this group; no call of it is there then.
    pub fn write_group(&self, mut store: impl FnMut(usize, u64)) {
        let group = tail(self.group, GROUP_BYTES);
        write_text(1 + GROUP, group, &mut store);
        let flags = u64::from(self.is_in_background) << 8 | group.len() as u64;
        store(1 + GROUP_WORD, (self.num_members as u64) << 9 | flags);
        [SEQUENCE, BEGAN, CALL_ENDED, CALL_WORD].into_iter().for_each(|word| store(1 + word, 0));
    }

    /// Gives the words by which the group's place tells of this call. Texts are as long as they are, so that there are few words.
    #[inline]
    pub fn write_call(&self, mut store: impl FnMut(usize, u64)) {
        let (file, line) = self.site.map_or(("", 0), |(file, line)| (tail(file, FILE_BYTES), line));
        let op = head(self.op, OP_BYTES);
        write_text(1 + OP, op, &mut store);
        write_text(1 + FILE, file, &mut store);
        store(1 + SEQUENCE, self.sequence);
        store(1 + BEGAN, self.began);
        store(1 + CALL_ENDED, self.ended.unwrap_or(0));
        store(1 + CALL_WORD, u64::from(line) << 32 | (op.len() as u64) << 8 | file.len() as u64);
    }

    /// All words of a place after its count.
    pub fn encode(&self) -> [u64; words::WORDS_OF_CALL - 1] {
        let mut encoded = [0; NUM_WORDS];
        self.write_group(|word, value| encoded[word - 1] = value);
        self.write_call(|word, value| encoded[word - 1] = value);
        encoded
    }

    /// What such words say; `None` for a place that nobody uses, and for what no rank writes.
    pub fn decode(encoded: &[u64; words::WORDS_OF_CALL - 1]) -> Option<CallRecord> {
        let (group, call) = (encoded[GROUP_WORD], encoded[CALL_WORD]);
        let num_members = usize::try_from(group >> 9).ok().filter(|&number| number > 0)?;
        let file = read_text(&encoded[FILE..], call & 0xff)?;
        Some(CallRecord {
            group: read_text(&encoded[GROUP..OP], group & 0xff)?,
            num_members,
            is_in_background: group >> 8 & 1 == 1,
            op: read_text(&encoded[OP..FILE], call >> 8 & 0xff)?,
            sequence: encoded[SEQUENCE],
            site: (!file.is_empty()).then_some((file, (call >> 32) as u32)),
            began: encoded[BEGAN],
            ended: (encoded[CALL_ENDED] > 0).then_some(encoded[CALL_ENDED]),
        })
    }
}

/// The word by which the launcher says how a rank ended: by its exit code, or else the signal.
pub fn exit_word(end: Result<i32, i32>) -> u64 {
    match end {
        Ok(code) => 1 << 32 | u64::from(code.cast_unsigned()),
        Err(signal) => 2 << 32 | u64::from(signal.cast_unsigned()),
    }
}

/// The exit code, or the signal.
fn exit_of(word: u64) -> Option<Result<i32, i32>> {
    let number = (word as u32).cast_signed();
    match word >> 32 {
        1 => Some(Ok(number)),
        2 => Some(Err(number)),
        _ => None,
    }
}

/// The word by which the launcher names a rank: a page begins with zeros, and names nobody.
///
/// ```
/// use accelerate_core::status::{rank_of_word, rank_word};
/// assert_eq!((rank_of_word(rank_word(0)), rank_of_word(0)), (Some(0), None));
/// ```
pub fn rank_word(rank: usize) -> u64 {
    (rank as u64).saturating_add(1)
}

/// The rank of a [`rank_word`].
pub fn rank_of_word(word: u64) -> Option<usize> {
    usize::try_from(word.checked_sub(1)?).ok()
}

/// At most so many bytes from the beginning of a text.
fn head(text: &str, most: usize) -> &str {
    &text[..text.floor_char_boundary(most)]
}

/// At most so many bytes from the end of a text.
fn tail(text: &str, most: usize) -> &str {
    &text[text.ceil_char_boundary(text.len().saturating_sub(most))..]
}

#[inline]
fn write_text(from: usize, text: &str, store: &mut impl FnMut(usize, u64)) {
    let (whole, rest) = text.as_bytes().as_chunks::<8>();
    for (number, &bytes) in whole.iter().enumerate() {
        store(from + number, u64::from_ne_bytes(bytes));
    }
    if !rest.is_empty() {
        let mut padded = [0; 8];
        padded[..rest.len()].copy_from_slice(rest);
        store(from + whole.len(), u64::from_ne_bytes(padded));
    }
}

fn read_text(from: &[u64], num_bytes: u64) -> Option<String> {
    let mut bytes: Vec<u8> = from.iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.truncate(usize::try_from(num_bytes).ok().filter(|&number| number <= bytes.len())?);
    String::from_utf8(bytes).ok()
}

/// What a rank has told of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankStatus {
    /// The process that writes the page; `None` if none has, because the program does not use the library, or not yet.
    pub owner: Option<u32>,
    /// The process that the launcher has started.
    pub started: Option<u32>,
    /// The exit code with which that process ended, or the signal that ended it; `None` while it runs.
    pub ended: Option<Result<i32, i32>>,
    /// Steps that an optimizer has taken, of the one that has taken most.
    pub steps: u64,
    /// When samples were handed out.
    pub progress: Progress,
    /// The last call of each group.
    pub calls: Vec<CallRecord>,
}

impl RankStatus {
    /// What a page says of which two copies were made one after the other, and whether that is all. Something that the rank was
    /// just writing is left out then, and is there in copies that are made again. A page that is too short says nothing.
    ///
    /// ```
    /// use accelerate_core::status::{PAGE_BYTES, RankStatus};
    /// let page = [0; PAGE_BYTES];
    /// assert_eq!(RankStatus::decode(&page, &page), (RankStatus::default(), true));
    /// ```
    pub fn decode(first: &[u8], second: &[u8]) -> (Self, bool) {
        let (Some(first), Some(second)) = (page_of(first), page_of(second)) else { return (Self::default(), true) };
        let number = |word: usize| Some(second[word] as u32).filter(|&number| number > 0);
        let mut is_whole = true;
        // Whatever a rank was writing when the first copy was made, has been written or is being written in the second.
        let mut settled = |from: usize, num_words: usize| {
            let (before, after) = (&first[from..from + num_words], &second[from..from + num_words]);
            let is_settled = before == after && after[0].is_multiple_of(2);
            is_whole &= is_settled;
            is_settled.then(|| &after[1..])
        };
        let progress = settled(words::PROGRESS, 2 + NUM_PAIR_WORDS).map(progress_of).unwrap_or_default();
        let places = (0..words::NUM_CALLS).map(|place| words::CALLS + place * words::WORDS_OF_CALL);
        let calls = places
            .filter_map(|place| CallEntry::decode(settled(place, words::WORDS_OF_CALL)?.try_into().ok()?))
            .collect();
        let (owner, started) = (number(words::OWNER), number(words::STARTED));
        let (ended, steps) = (exit_of(second[words::ENDED]), second[words::STEPS]);
        (Self { owner, started, ended, steps, progress, calls }, is_whole)
    }
}

fn page_of(bytes: &[u8]) -> Option<Vec<u64>> {
    let words = bytes.get(..super::PAGE_BYTES)?.chunks_exact(8);
    Some(words.map(|word| word.try_into().map_or(0, u64::from_ne_bytes)).collect())
}

/// The pairs that are in use, the oldest first.
fn progress_of(encoded: &[u64]) -> Progress {
    let [num_times, pairs @ ..] = encoded else { return Progress::default() };
    let pairs: Vec<(u64, u64)> = pairs.as_chunks::<2>().0.iter().map(|&[at, samples]| (at, samples)).collect();
    let capacity = words::NUM_TIMES as u64;
    let times = num_times.saturating_sub(capacity)..*num_times;
    let times = times.filter_map(|time| pairs.get((time % capacity) as usize).copied()).collect();
    Progress { times }
}
