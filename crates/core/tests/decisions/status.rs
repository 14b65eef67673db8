//! What ranks tell of themselves: written, read while it changes, and summed up.

use accelerate_core::status::{
    BACKWARD, CallEntry, CallRecord, LauncherName, PAGE_BYTES, PAGE_WORDS, Progress, RENDEZVOUS, RankActivity,
    RankStatus, RankSummary, RunInfo, RunPart, StatusPlace, awaited_ranks, exit_word, number_ranges,
    samples_per_second, sentences, words,
};
use proptest::prelude::*;
use rstest::rstest;
use std::time::Duration;

const SECOND: u64 = 1_000_000_000;

/// A page in which words can be set, as bytes.
struct Page([u64; PAGE_WORDS]);

impl Page {
    fn new() -> Self {
        Self([0; PAGE_WORDS])
    }

    fn call(mut self, place: usize, call: CallEntry<'_>) -> Self {
        let first = words::CALLS + place * words::WORDS_OF_CALL;
        self.0[first] += 2;
        self.0[first + 1..first + words::WORDS_OF_CALL].copy_from_slice(&call.encode());
        self
    }

    fn set(mut self, word: usize, value: u64) -> Self {
        self.0[word] = value;
        self
    }

    fn bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn read(&self) -> RankStatus {
        let (status, is_whole) = RankStatus::decode(&self.bytes(), &self.bytes());
        assert!(is_whole);
        status
    }
}

const BARRIER: CallEntry<'_> = CallEntry {
    group: "/fork/2/of/1",
    num_members: 3,
    is_in_background: false,
    op: "barrier",
    sequence: 7,
    site: Some(("src/main.rs", 40)),
    began: 5,
    ended: None,
};

#[test]
fn what_a_rank_writes_is_what_is_read() {
    let page = Page::new()
        .set(words::OWNER, 4711)
        .set(words::STARTED, 4710)
        .set(words::STEPS, 12)
        .set(words::ENDED, exit_word(Err(9)))
        .call(0, BARRIER)
        .call(13, CallEntry { op: "scatter_bytes", is_in_background: true, ended: Some(9), site: None, ..BARRIER });
    let barrier = CallRecord {
        group: "/fork/2/of/1".to_owned(),
        num_members: 3,
        is_in_background: false,
        op: "barrier".to_owned(),
        sequence: 7,
        site: Some(("src/main.rs".to_owned(), 40)),
        began: 5,
        ended: None,
    };
    let scatter = CallRecord {
        op: "scatter_bytes".to_owned(),
        is_in_background: true,
        ended: Some(9),
        site: None,
        ..barrier.clone()
    };
    let wanted = RankStatus {
        owner: Some(4711),
        started: Some(4710),
        ended: Some(Err(9)),
        steps: 12,
        progress: Progress::default(),
        calls: vec![barrier, scatter],
    };
    assert_eq!(page.read(), wanted);
}

#[rstest]
#[case(Ok(0))]
#[case(Ok(-1))]
#[case(Ok(255))]
#[case(Err(15))]
fn every_end_is_told(#[case] end: Result<i32, i32>) {
    assert_eq!(Page::new().set(words::ENDED, exit_word(end)).read().ended, Some(end));
}

/// Of long texts that stays which tells more, and letters stay whole.
#[test]
fn long_texts_are_cut_to_letters() {
    let (group, op, file) =
        ("g".repeat(100) + "/end", "begin".to_owned() + &"ä".repeat(100), "ü".repeat(200) + "/x.rs");
    let call = CallEntry { group: &group, op: &op, site: Some((&file, 1)), ..BARRIER };
    let read = CallEntry::decode(&call.encode()).unwrap();
    assert!(read.group.ends_with("g/end") && read.group.len() == 40, "{}", read.group);
    assert!(read.op.starts_with("beginä") && read.op.ends_with('ä') && read.op.len() <= 48, "{}", read.op);
    let file = read.site.unwrap().0;
    assert!(file.starts_with('ü') && file.ends_with("ü/x.rs") && file.len() <= 128, "{file}");
}

#[rstest]
#[case::none(0, &[])]
#[case::some(3, &[0, 1, 2])]
#[case::full(16, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15])]
#[case::the_oldest_are_replaced(18, &[2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17])]
fn times_are_in_order(#[case] num_times: u64, #[case] wanted: &[u64]) {
    let mut page = Page::new().set(words::PROGRESS + 1, num_times);
    for time in 0..num_times {
        let place = words::PROGRESS + 2 + 2 * (time as usize % words::NUM_TIMES);
        page = page.set(place, time).set(place + 1, 10 * time);
    }
    let times: Vec<(u64, u64)> = wanted.iter().map(|&time| (time, 10 * time)).collect();
    assert_eq!(page.read().progress, Progress { times });
}

/// A rank may write at any moment between the two copies, and while one of them is made.
#[rstest]
#[case::a_call(words::CALLS, |status: &RankStatus| status.calls.is_empty())]
#[case::times(words::PROGRESS, |status: &RankStatus| status.progress.times.is_empty())]
fn what_is_just_being_written_is_left_out(#[case] count: usize, #[case] is_left_out: fn(&RankStatus) -> bool) {
    let page = || Page::new().call(0, BARRIER).call(1, BARRIER).set(words::PROGRESS + 1, 1).set(words::PROGRESS, 2);
    let torn = [
        ("being written all the time", page().set(count, 3), page().set(count, 3)),
        ("written between the copies", page(), page().set(count, 4).set(count + 1, 2)),
        ("the first copy torn", page().set(count + 2, 99), page()),
    ];
    for (name, first, second) in torn {
        let (status, is_whole) = RankStatus::decode(&first.bytes(), &second.bytes());
        let both_calls_are_read = count == words::CALLS && status.calls.len() == 2;
        assert!(
            !is_whole && !both_calls_are_read && (count == words::CALLS || is_left_out(&status)),
            "{name}: {status:?}"
        );
        assert!(count == words::CALLS || status.calls.len() == 2, "what has not changed is read: {name}");
    }
}

#[rstest]
#[case::too_short(PAGE_BYTES - 1)]
#[case::empty(0)]
fn a_page_that_is_cut_says_nothing(#[case] num_bytes: usize) {
    let page = Page::new().set(words::OWNER, 1).bytes();
    assert_eq!(RankStatus::decode(&page[..num_bytes], &page).0, RankStatus::default());
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..PAGE_BYTES + 9), now in any::<u64>()) {
        let mut page = bytes.clone();
        page.resize(PAGE_BYTES, 0xff);
        let (status, _) = RankStatus::decode(&page, &page);
        let summary = RankSummary { rank: 0, activity: status.activity(now), is_stopped: false };
        let _ = (sentences(&[summary]), samples_per_second(&status.progress, now), RunInfo::decode(&bytes));
        let _ = awaited_ranks(&[status.clone(), status], 2, now, Duration::ZERO);
    }

    #[test]
    fn calls_survive(op in "[a-z_]{1,48}", group in "[a-z/0-9]{0,40}", sequence in 1u64.., began in any::<u64>(), line in 1u32..) {
        let call = CallEntry { op: &op, group: &group, sequence, began, site: Some(("a.rs", line)), ..BARRIER };
        let read = CallEntry::decode(&call.encode()).unwrap();
        prop_assert_eq!((read.op, read.group, read.sequence, read.began), (op, group, sequence, began));
        prop_assert_eq!(read.site, Some(("a.rs".to_owned(), line)));
    }

    #[test]
    fn descriptions_of_runs_survive_or_are_shortened(words in prop::collection::vec(".{0,900}", 1..40)) {
        let info = RunInfo {
            version: "1".to_owned(),
            process_id: 7,
            command: words.clone(),
            num_processes: 6,
            first_rank: 2,
            num_local_processes: 4,
            started: 3,
            restart_count: 0,
            max_restarts: 0,
            part: RunPart::Launcher,
        };
        let page = info.encode();
        prop_assert_eq!(page.len(), PAGE_BYTES);
        let read = RunInfo::decode(&page);
        prop_assert!(read.is_some());
        let read = read.unwrap();
        prop_assert_eq!((read.first_rank, read.num_processes, read.started), (2, 6, 3));
        prop_assert!(words.iter().map(String::len).sum::<usize>() > 1000 || read == info);
    }
}

#[rstest]
#[case::no_local_ranks(RunInfo { num_local_processes: 0, ..run() })]
#[case::more_than_there_are(RunInfo { first_rank: 3, ..run() })]
#[case::no_number(RunInfo { first_rank: usize::MAX, ..run() })]
#[case::no_ranks_of_an_agent(RunInfo { num_local_processes: 0, part: of_agent(), ..run() })]
#[case::ranks_in_a_pause(RunInfo { part: in_a_pause(), ..run() })]
#[case::ranks_of_a_launcher_of_agents(RunInfo { part: of_machines(2), ..run() })]
fn runs_that_cannot_be_are_refused(#[case] info: RunInfo) {
    assert!(RunInfo::decode(&run().encode()).is_some());
    assert_eq!(RunInfo::decode(&info.encode()), None);
}

fn run() -> RunInfo {
    let command = vec!["train".to_owned()];
    RunInfo {
        version: "1".to_owned(),
        process_id: 7,
        command,
        num_processes: 4,
        first_rank: 0,
        num_local_processes: 4,
        started: 3,
        restart_count: 0,
        max_restarts: 0,
        part: RunPart::Launcher,
    }
}

fn of_agent() -> RunPart {
    let launcher = LauncherName { host: "head".to_owned(), process_id: 5, id: u64::MAX };
    RunPart::Agent { machine: "node1".to_owned(), launcher }
}

fn of_machines(num_machines: usize) -> RunPart {
    let machines = (0..num_machines).map(|number| format!("node{number}")).collect();
    RunPart::LauncherOfAgents { id: u64::MAX, machines, num_machines }
}

fn in_a_pause() -> RunPart {
    RunPart::Pause { until: u64::MAX, cause: "rank 1 exited with code 3".to_owned() }
}

#[rstest]
#[case::an_agent(RunInfo { part: of_agent(), ..run() })]
#[case::a_launcher_of_agents(RunInfo { num_local_processes: 0, part: of_machines(3), ..run() })]
#[case::a_launcher_in_a_pause(RunInfo { num_local_processes: 0, part: in_a_pause(), ..run() })]
fn what_a_process_has_to_do_with_its_ranks_is_read_as_it_was_written(#[case] info: RunInfo) {
    assert_eq!(RunInfo::decode(&info.encode()), Some(info));
}

/// Whatever is too long for a page is shortened, not lost: its number stays, by which launcher and agents belong together.
#[rstest]
#[case::machines(of_machines(100_000))]
#[case::a_cause(RunPart::Pause { until: 1, cause: "\u{1}".repeat(100_000) })]
fn long_descriptions_are_shortened(#[case] part: RunPart) {
    let version = "x".repeat(100_000);
    let command = vec!["\u{1}".repeat(1000); 5000];
    let info = RunInfo { version, command, num_local_processes: 0, part, ..run() };
    let page = info.encode();
    assert_eq!(page.len(), PAGE_BYTES);
    let read = RunInfo::decode(&page).unwrap();
    match read.part {
        RunPart::LauncherOfAgents { id, machines, num_machines } => {
            assert_eq!((id, num_machines, machines.first().map(String::as_str)), (u64::MAX, 100_000, Some("node0")));
        }
        RunPart::Pause { until, cause } => assert!(until == 1 && cause.starts_with('\u{1}'), "{cause}"),
        other => unreachable!("{other:?}"),
    }
}

/// A launcher of an earlier version says less.
#[test]
fn a_page_without_a_part_is_that_of_an_ordinary_launcher() {
    let text = "{\"version\":\"1\",\"process_id\":7,\"command\":[\"train\"],\"num_processes\":4,\"first_rank\":0,\
                \"num_local_processes\":4,\"started\":3}";
    let mut page = [1_u32.to_ne_bytes(), (text.len() as u32).to_ne_bytes()].concat();
    page.extend(text.as_bytes());
    page.resize(PAGE_BYTES, 0);
    assert_eq!(RunInfo::decode(&page), Some(run()));
}

#[rstest]
#[case("")]
#[case("1:2")]
#[case("1:2:3:4")]
#[case::the_page_of_the_run("1:2:0")]
#[case("-1:2:3")]
#[case("1:2:4294967296")]
#[case("../../etc:2:3")]
fn what_is_no_place_is_refused(#[case] text: &str) {
    assert!(text.parse::<StatusPlace>().is_err());
}

/// Times in seconds.
#[rstest]
#[case::nothing(&[], 9, None)]
#[case::one_batch(&[(0, 8)], 9, None)]
#[case::steady(&[(0, 8), (1, 16), (2, 24)], 2, Some(8.0))]
#[case::in_the_middle_of_the_next(&[(0, 8), (1, 16), (2, 24)], 4, Some(8.0))]
#[case::it_hangs(&[(0, 8), (1, 16), (2, 24)], 10, Some(1.6))]
#[case::clocks_that_go_back(&[(5, 8), (1, 16)], 10, None)]
#[case::counts_that_go_back(&[(0, 16), (1, 8)], 1, None)]
#[case::no_time_at_all(&[(1, 8), (1, 16)], 1, None)]
fn samples_per_second_fall_when_no_batch_comes(
    #[case] times: &[(u64, u64)],
    #[case] now: u64,
    #[case] wanted: Option<f64>,
) {
    let times = times.iter().map(|&(at, samples)| (at * SECOND, samples)).collect();
    assert_eq!(samples_per_second(&Progress { times }, now * SECOND), wanted);
}

/// A rank that is or was in these calls: group, operation, number, since when, until when, in seconds.
fn rank(calls: &[(&str, &str, u64, u64, Option<u64>)]) -> RankStatus {
    let calls = calls.iter().map(|&(group, op, sequence, began, ended)| CallRecord {
        group: group.to_owned(),
        num_members: 2,
        is_in_background: group == "side",
        op: op.to_owned(),
        sequence,
        site: None,
        began: began * SECOND,
        ended: ended.map(|ended| ended * SECOND),
    });
    RankStatus { owner: Some(1), calls: calls.collect(), ..RankStatus::default() }
}

#[rstest]
#[case::nothing_yet(&[("", "", 0, 0, None)], "rank 0 was computing and had made no call to other ranks")]
#[case::in_a_call(&[("", "barrier", 2, 8, None)], "rank 0 was in barrier (collective 2) for 2.0 s")]
#[case::after_a_call(&[("", "barrier", 2, 8, Some(9))], "rank 0 was computing, 1.0 s after barrier (collective 2)")]
#[case::a_backward_pass(&[("", BACKWARD, 250, 8, None)], "rank 0 was in backward (after collective 250) for 2.0 s")]
#[case::a_rendezvous(&[("", RENDEZVOUS, 1, 8, None)], "rank 0 was in init_process_group for 2.0 s")]
#[case::the_later_of_two(&[("", "barrier", 2, 1, Some(3)), ("a", "broadcast", 1, 4, Some(5))], "rank 0 was computing, 5.0 s after broadcast (collective 1)")]
#[case::a_thread_beside_it(&[("", "barrier", 2, 1, Some(3)), ("side", "scatter_bytes", 9, 5, None)], "rank 0 was computing, 7.0 s after barrier (collective 2)")]
fn what_a_rank_does_is_told(#[case] calls: &[(&str, &str, u64, u64, Option<u64>)], #[case] wanted: &str) {
    let summary = RankSummary { rank: 0, activity: rank(calls).activity(10 * SECOND), is_stopped: false };
    assert_eq!(sentences(&[summary]), [wanted]);
}

#[test]
fn only_ranks_that_tell_something_make_sentences() {
    let unknown = |rank| RankSummary { rank, activity: RankActivity::Unknown, is_stopped: false };
    assert!(sentences(&[unknown(0), unknown(1)]).is_empty());
    let known = RankSummary { rank: 1, activity: RankActivity::Computing { after: None }, is_stopped: false };
    let found = sentences(&[unknown(0), known, unknown(2)]);
    assert_eq!(found[0], "ranks 0, 2 were silent about calls to other ranks");
}

/// Whatever they tell.
#[test]
fn ranks_that_are_stopped_are_named() {
    let of = |rank, activity| RankSummary { rank, activity, is_stopped: rank != 1 };
    let unknown = |rank| of(rank, RankActivity::Unknown);
    let wanted = "ranks 0, 2 were stopped by a signal such as SIGSTOP, and did nothing";
    assert_eq!(sentences(&[unknown(0), unknown(1), unknown(2)]), [wanted]);
    let found = sentences(&[of(2, RankActivity::Computing { after: None })]);
    assert_eq!(found.len(), 2);
    assert!(found[1].starts_with("rank 2 was stopped by a signal"), "{found:?}");
}

/// What anybody writes into a page cannot steer a terminal.
#[test]
fn names_are_shown_in_one_line() {
    let mut status = rank(&[("", "a\u{1b}[2J\nb", 1, 0, None)]);
    status.calls[0].site = Some(("x\n.rs".to_owned(), 3));
    let text = sentences(&[RankSummary { rank: 0, activity: status.activity(SECOND), is_stopped: false }]).concat();
    assert!(text.contains("a\\u{1b}[2J\\nb (collective 1) at x\\n.rs:3"), "{text}");
}

#[rstest]
#[case::computes(&[("", "all_reduce", 2, 1, Some(2))], true)]
#[case::has_not_begun(&[("", "", 0, 0, None)], true)]
#[case::strays(&[("", "barrier", 2, 4, None)], true)]
#[case::waits_too(&[("", "all_reduce", 3, 4, None)], false)]
#[case::has_done_it(&[("", "all_reduce", 3, 4, Some(5))], false)]
#[case::is_further(&[("", "all_reduce", 4, 4, Some(5))], false)]
#[case::is_no_member(&[("a", "all_reduce", 1, 1, Some(2))], false)]
#[case::has_not_even_met_the_others(&[], true)]
fn ranks_that_have_not_come_are_waited_for(
    #[case] calls: &[(&str, &str, u64, u64, Option<u64>)],
    #[case] is_awaited: bool,
) {
    let ranks = [rank(&[("", "all_reduce", 3, 4, None)]), rank(calls)];
    let found = awaited_ranks(&ranks, 2, 10 * SECOND, Duration::from_secs(1));
    assert_eq!(found[1], is_awaited);
    assert!(
        !awaited_ranks(&[ranks[0].clone(), rank(&[])], 3, 10 * SECOND, Duration::from_secs(1))[1],
        "a part of the ranks"
    );
    assert!(
        awaited_ranks(&ranks, 2, 4 * SECOND, Duration::from_secs(1)).iter().all(|is_awaited| !is_awaited),
        "not yet"
    );
}

/// Its collectives have no numbers of their own.
#[rstest]
#[case::not_in_it(&[("", "all_reduce", 3, 1, Some(2))], true)]
#[case::in_it(&[("", BACKWARD, 3, 1, None)], false)]
#[case::through_it(&[("", BACKWARD, 3, 1, Some(2))], false)]
fn a_rank_outside_of_the_backward_pass_is_waited_for(
    #[case] calls: &[(&str, &str, u64, u64, Option<u64>)],
    #[case] is_awaited: bool,
) {
    let ranks = [rank(&[("", BACKWARD, 3, 4, None)]), rank(calls)];
    assert_eq!(awaited_ranks(&ranks, 2, 10 * SECOND, Duration::from_secs(1)), [false, is_awaited]);
}

#[rstest]
#[case(&[], "")]
#[case(&[3], "3")]
#[case(&[0, 1], "0-1")]
#[case(&[0, 2, 3, 4, 9], "0, 2-4, 9")]
fn numbers_are_shown_as_ranges(#[case] numbers: &[usize], #[case] wanted: &str) {
    assert_eq!(number_ranges(numbers), wanted);
}
