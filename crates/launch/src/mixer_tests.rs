//! The mixer's laws as tables: what arrives, and what then stands in the file or on the screen.

use super::*;
use rstest::rstest;

const FILE: Screens = Screens { stdout: false, stderr: false, has_prefix: true, has_colour: true };
const TERMINAL: Screens = Screens { stdout: true, stderr: true, has_prefix: true, has_colour: false };

fn source(rank: usize, stream: Stream) -> Source {
    Source { rank, local_rank: rank, stream }
}

/// Feeds `(rank, text)` as standard error, then closes the sources, and returns everything written.
fn mixed(screens: Screens, events: &[(usize, &str)]) -> String {
    let mut mixer = Mixer::new(screens);
    let mut written = Vec::new();
    let now = Instant::now();
    for (rank, text) in events {
        written.extend(match *text {
            // A pause long enough for every unfinished line to be shown.
            "PAUSE" => mixer.wake(now + 2 * PAUSE_IN_FILE),
            "MESSAGE" => mixer.message("note"),
            _ => mixer.output(source(*rank, Stream::Stderr), text.as_bytes(), now),
        });
    }
    for rank in 0..3 {
        written.extend(mixer.closed(source(rank, Stream::Stderr)));
    }
    String::from_utf8_lossy(&written.into_iter().flat_map(|(_, bytes)| bytes).collect::<Vec<_>>()).into_owned()
}

#[rstest]
#[case::whole_lines(&[(0, "a\nb\n"), (1, "c\n")], "[rank 0] a\n[rank 0] b\n[rank 1] c\n")]
#[case::pieces_are_put_together(&[(0, "a"), (1, "c\n"), (0, "b\n")], "[rank 1] c\n[rank 0] ab\n")]
#[case::missing_line_end(&[(0, "a"), (1, "b")], "[rank 0] a\n[rank 1] b\n")]
#[case::empty_lines(&[(2, "\n\n")], "[rank 2] \n[rank 2] \n")]
#[case::shown_after_a_pause(&[(0, "sure? "), (0, "PAUSE"), (0, "yes\n")], "[rank 0] sure? yes\n")]
#[case::cut_only_after_a_pause(
    &[(0, "sure? "), (0, "PAUSE"), (1, "x\n"), (0, "yes\n")],
    "[rank 0] sure? \n[rank 1] x\n[rank 0] yes\n"
)]
#[case::no_pause_no_cut(&[(0, "a"), (1, "b"), (0, "A\n"), (1, "B\n")], "[rank 0] aA\n[rank 1] bB\n")]
#[case::bars_in_a_file_stay_as_they_are(&[(0, "\r 1%"), (1, "x\n"), (0, "\r 2%\n")], "[rank 1] x\n[rank 0] \r 1%\r 2%\n")]
#[case::message(&[(0, "a"), (0, "MESSAGE"), (0, "b\n")], "note\n[rank 0] ab\n")]
#[case::message_after_a_pause(&[(0, "a"), (0, "PAUSE"), (0, "MESSAGE"), (0, "b\n")], "[rank 0] a\nnote\n[rank 0] b\n")]
fn in_a_file(#[case] events: &[(usize, &str)], #[case] expected: &str) {
    assert_eq!(mixed(FILE, events), expected);
}

#[rstest]
#[case::a_bar_passes_through(&[(0, "\r 1%"), (0, "\r 2%"), (0, "\n")], "\r 1%\r 2%\n")]
#[case::lines_go_above_the_bar(
    &[(0, "\r 1%"), (1, "x\n"), (0, "\r 2%\n")],
    "\r 1%\r\x1b[2K[rank 1] x\n 1%\r 2%\n"
)]
#[case::messages_too(&[(0, "\r\x1b[2K 1%"), (0, "MESSAGE")], "\r\x1b[2K 1%\r\x1b[2Knote\n\x1b[2K 1%\n")]
#[case::own_lines_end_the_bar(&[(0, "\r 1%"), (0, "\nx\n")], "\r 1%\n[rank 0] x\n")]
#[case::a_bar_may_return_afterwards(&[(0, "1%\r"), (0, "2%\r")], "1%\r2%\r\n")]
#[case::a_bar_may_begin_without_returning(
    &[(0, "1%"), (0, "PAUSE"), (1, "x\n"), (0, "\r2%\n")],
    "1%\r\x1b[2K[rank 1] x\n1%\r2%\n"
)]
#[case::a_bar_lets_its_own_lines_pass(
    &[(0, "\r1%"), (0, "\r\x1b[2Knote\n1%"), (0, "\r2%")],
    "\r1%\r\x1b[2Knote\n1%\r2%\n"
)]
#[case::prompts_have_no_prefix(&[(0, "sure? "), (0, "PAUSE"), (0, "yes\n")], "sure? yes\n")]
#[case::prompts_of_others_have(&[(1, "sure? "), (1, "PAUSE"), (1, "yes\n")], "[rank 1] sure? yes\n")]
#[case::dos_line_ends_in_pieces(&[(0, "a\r"), (0, "\n")], "[rank 0] a\r\n")]
#[case::a_cleared_bar_leaves_nothing(&[(0, "\r 1%"), (0, "\r\x1b[2K")], "\r 1%\r\x1b[2K")]
#[case::others_have_no_bar(&[(1, "\r 1%"), (0, "x\n"), (1, "\r 2%\n")], "[rank 0] x\n[rank 1] \r 1%\r 2%\n")]
#[case::colour_is_not_a_bar(&[(0, "\x1b[1;31mred"), (1, "x\n"), (0, "\n")], "[rank 1] x\n[rank 0] \x1b[1;31mred\n")]
#[case::dos_line_ends_are_not_a_bar(&[(0, "a\r\n\r\n")], "[rank 0] a\r\n[rank 0] \r\n")]
#[case::prompts_wait_for_the_bar(&[(0, "\r 1%"), (1, "ready"), (1, "PAUSE"), (1, "!\n")],
    "\r 1%\r\x1b[2K[rank 1] ready!\n 1%\n")]
fn at_a_terminal(#[case] events: &[(usize, &str)], #[case] expected: &str) {
    assert_eq!(mixed(TERMINAL, events), expected);
}

#[test]
fn ranks_keep_their_colour_at_a_terminal_only() {
    let coloured = Screens { has_colour: true, ..TERMINAL };
    assert_eq!(mixed(coloured, &[(1, "x\n")]), "\x1b[33m[rank 1]\x1b[0m x\n");
    assert_eq!(mixed(FILE, &[(1, "x\n")]), "[rank 1] x\n");
    assert_eq!(mixed(Screens { has_prefix: false, ..coloured }, &[(1, "x\n")]), "x\n");
}

#[test]
fn two_streams_at_one_terminal_share_its_cursor() {
    let now = Instant::now();
    let mut mixer = Mixer::new(TERMINAL);
    mixer.output(source(0, Stream::Stderr), b"\r 1%", now);
    let pieces = mixer.output(source(0, Stream::Stdout), b"loss\n", now);
    let expected: Pieces = vec![
        (Stream::Stderr, CLEAR_LINE.to_vec()),
        (Stream::Stdout, b"[rank 0] loss\n".to_vec()),
        (Stream::Stderr, b" 1%".to_vec()),
    ];
    assert_eq!(pieces, expected);

    let mut apart = Mixer::new(Screens { stdout: false, ..TERMINAL });
    apart.output(source(0, Stream::Stderr), b"\r 1%", now);
    assert_eq!(
        apart.output(source(0, Stream::Stdout), b"loss\n", now),
        [(Stream::Stdout, b"[rank 0] loss\n".to_vec())]
    );
}

#[test]
fn big_lines_wait_for_their_end_but_not_for_ever() {
    let now = Instant::now();
    let mut mixer = Mixer::new(FILE);
    let rank_0 = source(0, Stream::Stdout);
    assert!(mixer.output(rank_0, &vec![b'x'; PROMPT_LIMIT_BYTES + 1], now).is_empty());
    assert_eq!(mixer.wakes_at(), None, "data is no prompt");
    assert!(!mixer.output(rank_0, &vec![b'x'; LINE_LIMIT_BYTES], now).is_empty());
}

#[test]
fn a_line_that_nobody_could_go_on_reading_is_not_cut() {
    let now = Instant::now();
    let mut mixer = Mixer::new(FILE);
    mixer.output(source(0, Stream::Stdout), b"half", now);
    let later = now + 10 * PAUSE_IN_FILE;
    mixer.wait_anew(later);
    assert!(mixer.wake(later).is_empty());
    assert_eq!(mixer.wakes_at(), Some(later + PAUSE_IN_FILE));
}

/// Whatever the chunks, the bytes of each rank come out complete and in order.
#[test]
fn chunk_borders_do_not_matter() {
    let texts = ["alpha\nbe\u{fe}ta\n\r 3%\n\nlast".to_string(), "one\ntwo three\n".to_string()];
    for size in 1..texts[0].len() {
        let mut mixer = Mixer::new(FILE);
        let mut written = Vec::new();
        let now = Instant::now();
        let mut chunks = texts.each_ref().map(|text| text.as_bytes().chunks(size));
        loop {
            let next = [chunks[0].next(), chunks[1].next()];
            if next == [None, None] {
                break;
            }
            for (rank, chunk) in next.into_iter().enumerate() {
                written.extend(mixer.output(source(rank, Stream::Stdout), chunk.unwrap_or_default(), now));
            }
        }
        for rank in 0..2 {
            written.extend(mixer.closed(source(rank, Stream::Stdout)));
        }
        let all = written.into_iter().flat_map(|(_, bytes)| bytes).collect::<Vec<_>>();
        for (rank, text) in texts.iter().enumerate() {
            let prefix = format!("[rank {rank}] ").into_bytes();
            let mut own: Vec<u8> = all
                .split_inclusive(|&byte| byte == b'\n')
                .filter_map(|line| line.strip_prefix(prefix.as_slice()))
                .flatten()
                .copied()
                .collect();
            if !text.ends_with('\n') {
                assert_eq!(own.pop(), Some(b'\n'));
            }
            assert_eq!(own, text.as_bytes(), "chunks of {size}");
        }
    }
}

#[test]
fn a_template_stands_in_the_place_of_the_rank() {
    let mut mixer = Mixer::new(FILE);
    mixer.set_line_prefix(LinePrefix { template: "<${role_name} $rank> ".into(), role: "trainer".into() });
    let pieces = mixer.output(source(1, Stream::Stdout), b"a\nb\n", Instant::now());
    assert_eq!(pieces, [(Stream::Stdout, b"<trainer 1> a\n<trainer 1> b\n".to_vec())]);
}
