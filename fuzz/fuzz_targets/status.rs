#![no_main]
//! What other processes say of a run and of a rank, in pages of a file in memory. Two copies, of which the second may be another one.

use accelerate_core::status::{
    CallEntry, PAGE_BYTES, RankStatus, RankSummary, RunInfo, awaited_ranks, samples_per_second, sentences,
};
use libfuzzer_sys::fuzz_target;
use std::time::Duration;

fuzz_target!(|input: &[u8]| {
    if let Some(info) = RunInfo::decode(input) {
        let again = RunInfo::decode(&info.encode()).expect("what was written can be read");
        assert_eq!((again.first_rank, again.num_processes), (info.first_rank, info.num_processes));
    }
    let mut first = input.to_vec();
    first.resize(PAGE_BYTES, 0);
    let mut second = input.get(PAGE_BYTES..).unwrap_or_default().to_vec();
    if second.is_empty() {
        second.clone_from(&first);
    }
    second.resize(PAGE_BYTES, 0);
    let (status, _) = RankStatus::decode(&first, &second);
    for call in &status.calls {
        let site = call.site.as_ref().map(|(file, line)| (file.as_str(), *line));
        let entry = CallEntry {
            group: &call.group,
            num_members: call.num_members,
            is_in_background: call.is_in_background,
            op: &call.op,
            sequence: call.sequence,
            site,
            began: call.began,
            ended: call.ended,
        };
        let again = CallEntry::decode(&entry.encode()).expect("what was written can be read");
        assert_eq!(again.sequence, call.sequence);
    }
    let now = u64::from_ne_bytes(first[..8].try_into().expect("there are eight bytes"));
    let summary = RankSummary { rank: 0, activity: status.activity(now) };
    let _texts = sentences(&[summary]);
    let _number = samples_per_second(&status.progress, now);
    let _awaited = awaited_ranks(&[status.clone(), status], 2, now, Duration::from_secs(1));
});
