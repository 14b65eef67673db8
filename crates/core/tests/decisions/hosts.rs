//! Lists of machines: what they say, and what is refused in them.

use accelerate_core::hosts::{Host, Hosts};
use rstest::rstest;

fn shown(hosts: &Hosts) -> String {
    let one = |host: &Host| {
        let number = host.num_processes.map(|number| format!("={number}")).unwrap_or_default();
        let slots = host.slots.as_ref().map(|slots| format!("{slots:?}")).unwrap_or_default();
        format!("{}{number}{slots}", host.name)
    };
    hosts.list.iter().map(one).collect::<Vec<_>>().join(" ")
}

#[rstest]
#[case("a:4,b:2", "a=4 b=2")]
#[case(" a , b:1 ", "a b=1")]
#[case("me@node-1.cluster:3", "me@node-1.cluster=3")]
#[case("10.0.0.1:2,10.0.0.2", "10.0.0.1=2 10.0.0.2")]
#[case::brackets("[fe80::1%eth0]:2,[::1]", "fe80::1%eth0=2 ::1")]
#[case::without_brackets_where_no_number_can_follow(
    "::1,fd78::1,fd78::1:a,fd78::1:0,1:2:3:4:5:6:7:8,me@fd78::2",
    "::1 fd78::1 fd78::1:a fd78::1:0 1:2:3:4:5:6:7:8 me@fd78::2"
)]
#[case::brackets_around_what_could_have_a_number("[fd78::1:2],[fd78::1]:2", "fd78::1:2 fd78::1=2")]
#[case::a_user_before_an_address("me@[::1]:2", "me@::1=2")]
fn what_hosts_says(#[case] text: &str, #[case] expected: &str) {
    assert_eq!(shown(&Hosts::parse(text).unwrap()), expected);
}

#[rstest]
#[case::nothing("", "is no host")]
#[case::empty_entry("a,,b", "is no host")]
#[case::an_option_of_ssh("-oProxyCommand=touch:1", "is no host")]
#[case::an_option_behind_a_user("me@-l:1", "is no host")]
#[case::an_option_as_user("-l@a", "is no host")]
#[case::a_shell("a;reboot", "is no host")]
#[case::two_words("a b", "is no host")]
#[case::control("a\u{1b}[2J:1", "\\u{1b}[2J\" is no host")]
#[case::line("a\nb:1", "a\\nb")]
#[case::no_text("\u{0}:1", "is no host")]
#[case::letters_that_look_alike("n\u{43e}de:1", "is no host")]
#[case::zone_that_is_no_word("[fe80::1%$(x)]:1", "is no host")]
#[case::two_meanings(
    "fd78::1:2",
    "\"fd78::1:2\" may mean the address fd78::1 with 2 processes, or an address without a number; write it with brackets, as \
     [fd78::1]:2 or [fd78::1:2]"
)]
#[case::two_meanings_behind_a_user("a,me@fe80::1:12", "with brackets, as me@[fe80::1]:12 or me@[fe80::1:12]")]
#[case::two_meanings_behind_a_control_character("x\u{7}@fd78::1:2", "\"x\\u{7}@fd78::1:2\" may mean")]
#[case::zero("a:0", "from 1 to")]
#[case::negative("a:-1", "from 1 to")]
#[case::huge("a:99999999999999999999999", "from 1 to")]
#[case::too_large("a:1048577", "from 1 to 1048576")]
#[case::no_number("a:", "from 1 to")]
#[case::word("a:four", "from 1 to")]
#[case::twice("a:1,b:1,a:2", "host a is there twice")]
#[case::twice_with_another_user("me@a:1,a:2", "host a is there twice")]
#[case::twice_in_other_letters("Node1:1,node1:2", "host node1 is there twice")]
#[case::only_a_bracket("[", "is no host")]
#[case::zone_without_address("%eth0:1", "is no host")]
fn what_is_no_list_of_hosts(#[case] text: &str, #[case] words: &str) {
    let error = Hosts::parse(text).unwrap_err();
    assert!(error.is_config() && error.to_string().contains(words), "{error}");
    assert!(error.to_string().contains("--hosts"), "{error}");
}

#[test]
fn a_name_of_256_letters_is_refused() {
    assert!(Hosts::parse(&"a".repeat(255)).is_ok());
    let error = Hosts::parse(&"a".repeat(256)).unwrap_err().to_string();
    assert!(error.contains("is no host") && error.len() < 400, "{error}");
}

#[rstest]
#[case("a slots=4\nb slots=2\n", "a=4 b=2")]
#[case("# all\r\n\r\n  a:4   # the first\r\n\tb\r\n", "a=4 b")]
#[case("a slots=2 max_slots=8\nb max-slots=3", "a=2 b")]
#[case::blanks_around_the_sign("a slots = 4 max_slots =8\nb slots= 2\n", "a=4 b=2")]
#[case::a_mark_of_the_order_of_bytes("\u{feff}localhost slots=2\n", "localhost=2")]
fn what_a_host_file_says(#[case] text: &str, #[case] expected: &str) {
    assert_eq!(shown(&Hosts::parse_file(text, "hosts".as_ref()).unwrap()), expected);
}

#[rstest]
#[case::empty("", "hosts names no machine")]
#[case::comments("# a slots=2\n", "hosts names no machine")]
#[case::zero("a slots=0", "hosts:1: \"slots=0\"")]
#[case::no_number("a slots =", "hosts:1: \"slots=\"")]
#[case::word("\na slot=2", "hosts:2: \"slot=2\" means nothing")]
#[case::two_numbers("a:2 slots=3", "hosts:1: \"slots=3\" means nothing")]
#[case::twice("a slots=1\n\na slots=1", "host a is there twice")]
#[case::option("ok slots=1\n-oProxyCommand=x slots=1", "hosts:2")]
#[case::a_mark_elsewhere("a\n\u{feff}b", "hosts:2: \"\\u{feff}b\" is no host")]
#[case::control("a\u{7}b", "hosts:1: \"a\\u{7}b\" is no host")]
fn what_is_no_host_file(#[case] text: &str, #[case] words: &str) {
    let error = Hosts::parse_file(text, "hosts".as_ref()).unwrap_err();
    assert!(error.to_string().contains(words), "{error}");
}

/// A file of the largest size that is read is understood or refused at once.
#[test]
fn long_host_files_are_read() {
    let text: String = (0..100_000).map(|number| format!("n{number}\n")).collect();
    assert_eq!(Hosts::parse_file(&text, "hosts".as_ref()).unwrap().list.len(), 100_000);
}

#[rstest]
#[case("a@b:0,2", "a=4 b=2[0, 2]")]
#[case("b:3,1,1", "b=2[1, 3]")]
#[case("c", "c")]
#[case("c:0", "c=1[0]")]
fn what_an_inclusion_filter_leaves(#[case] filter: &str, #[case] expected: &str) {
    assert_eq!(shown(&Hosts::parse("a:4,b:4,c").unwrap().included(filter).unwrap()), expected);
}

#[rstest]
#[case("a", "b=4 c")]
#[case("b:0@c", "a=4 b=3[1, 2, 3]")]
#[case("b:0,1,2,3", "a=4 c")]
fn what_an_exclusion_filter_leaves(#[case] filter: &str, #[case] expected: &str) {
    assert_eq!(shown(&Hosts::parse("a:4,b:4,c").unwrap().excluded(filter).unwrap()), expected);
}

#[rstest]
#[case("d", "no such machine")]
#[case("", "no such machine")]
#[case("a@a:1", "a second time")]
#[case("a:4", "counted from 0")]
#[case("c:1", "counted from 0")]
#[case("a:x", "numbers separated by commas")]
#[case("a:", "numbers separated by commas")]
#[case("a:-1", "numbers separated by commas")]
#[case("a\u{1b}[2J", "a\\u{1b}[2J")]
fn what_is_no_filter(#[case] filter: &str, #[case] words: &str) {
    let hosts = Hosts::parse("a:4,b:4,c").unwrap();
    for outcome in [hosts.included(filter), hosts.excluded(filter)] {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_filter_that_leaves_nothing_is_refused() {
    let error = Hosts::parse("a:4,b").unwrap().excluded("a@b").unwrap_err().to_string();
    assert!(error.contains("names no machine"), "{error}");
}

#[rstest]
#[case("a:4,b:2", None, &[4, 2])]
#[case("a:4,b:2", Some(6), &[4, 2])]
#[case("a,b", None, &[8, 8])]
#[case("a,b", Some(6), &[3, 3])]
#[case("a:1,b,c", Some(5), &[1, 2, 2])]
fn how_many_processes_each_machine_gets(#[case] hosts: &str, #[case] total: Option<usize>, #[case] expected: &[usize]) {
    assert_eq!(Hosts::parse(hosts).unwrap().num_processes(total, 8).unwrap(), expected);
}

#[rstest]
#[case("a:4,b:2", 5, "--num_processes is 5, but the hosts have 6 processes;")]
#[case("a:4,b:2", 7, "have 6 processes;")]
#[case("a:4,b", 4, "cannot be shared evenly by 1")]
#[case("a,b", 5, "cannot be shared evenly by 2")]
#[case("a:1048576,b:1048576", 2_097_152, "at most 1048576")]
fn numbers_that_contradict_each_other(#[case] hosts: &str, #[case] total: usize, #[case] words: &str) {
    let error = Hosts::parse(hosts).unwrap().num_processes(Some(total), 1).unwrap_err().to_string();
    assert!(error.contains(words), "{error}");
}
