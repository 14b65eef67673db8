//! The launcher at a terminal.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::process::Command;

use rstest::rstest;
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{OptionalActions, OutputModes, Winsize, tcgetattr, tcsetattr, tcsetwinsize};

use crate::support::{launch, launch_script, named_pipe};

/// Runs the command with standard output and error at a terminal of 40 x 100; what appears there, and the
/// exit code.
fn at_terminal(command: Command) -> (String, Option<i32>) {
    at_terminal_of(command, 100)
}

/// The same at one of so many columns.
pub(crate) fn at_terminal_of(mut command: Command, columns: u16) -> (String, Option<i32>) {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let near = openpt(flags).unwrap();
    unlockpt(&near).unwrap();
    let far: OwnedFd = ioctl_tiocgptpeer(&near, flags).unwrap();
    let mut modes = tcgetattr(&far).unwrap();
    modes.output_modes.remove(OutputModes::OPOST);
    tcsetattr(&far, OptionalActions::Now, &modes).unwrap();
    tcsetwinsize(&near, Winsize { ws_row: 40, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();

    let mut child = command.stdout(far.try_clone().unwrap()).stderr(far).spawn().unwrap();
    // The command holds copies of the far end; with them the terminal would never end.
    drop(command);
    let mut screen = Vec::new();
    // The end of a terminal is reported as an error.
    let _ = File::from(near).read_to_end(&mut screen);
    (String::from_utf8(screen).unwrap(), child.wait().unwrap().code())
}

#[test]
fn the_first_rank_has_a_terminal_of_the_same_size_and_the_others_have_pipes() {
    let script = "if [ -t 2 ]; then echo terminal $(stty size <&2); else echo pipe; fi";
    let (screen, code) = at_terminal(launch_script(2, &[], script));
    assert_eq!(code, Some(0));
    let mut lines: Vec<_> = screen.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["\x1b[33m[rank 1]\x1b[0m pipe", "\x1b[36m[rank 0]\x1b[0m terminal 40 100"]);
}

#[test]
fn a_progress_bar_passes_unchanged_and_lines_go_above_it() {
    let (_folder, fifo) = named_pipe();
    // Rank 1 speaks between two states of the bar.
    let script = format!(
        "if [ $RANK = 0 ]; then printf '\\r 50%%' >&2; sleep 0.2; echo >{0}; cat {0} >/dev/null; sleep 2; \
         printf '\\r100%%\\n' >&2; else cat {0} >/dev/null; echo note; echo >{0}; fi",
        fifo
    );
    let (screen, code) = at_terminal(launch_script(2, &[], &script));
    assert_eq!(code, Some(0));
    assert_eq!(screen, "\r 50%\r\x1b[2K\x1b[33m[rank 1]\x1b[0m note\n 50%\r100%\n");
}

#[test]
fn colours_can_be_refused() {
    let mut command = launch_script(2, &[], "echo x; exit $RANK");
    command.env("NO_COLOR", "1");
    let (screen, code) = at_terminal(command);
    assert_eq!(code, Some(1));
    assert!(screen.contains("[rank 1] x\n") && !screen.contains('\x1b'), "{screen:?}");
}

/// A session of its own with a controlling terminal, where keys become signals: what is typed comes when the
/// program has printed `ready`, and what follows after a space when it has printed that once more. Python brings what this needs.
const SESSION: &str = "
import os, pty, sys
child, terminal = pty.fork()
if child == 0:
    os.execvp(sys.argv[2], sys.argv[2:])
seen = b''
typed = 0
parts = sys.argv[1].split(' ')
while True:
    try:
        chunk = os.read(terminal, 4096)
    except OSError:
        break
    if not chunk:
        break
    seen += chunk
    for part in parts[:1] if seen.count(b'ready') >= int(os.environ['READY']) + typed else []:
        typed += 1
        parts.pop(0)
        os.write(terminal, part.encode().decode('unicode_escape').encode())
sys.stdout.buffer.write(seen)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
";

fn in_session(typed: &str, num_ready: usize, inner: &Command) -> (String, Option<i32>) {
    let output = Command::new("python3")
        .args(["-c", SESSION, typed])
        .arg(inner.get_program())
        .args(inner.get_args())
        .env("READY", num_ready.to_string())
        .output()
        .unwrap();
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.code())
}

#[test]
fn control_c_ends_every_rank() {
    let (screen, code) = in_session("\\x03", 2, &launch_script(2, &[], "echo ready; exec sleep 30"));
    assert_eq!(code, Some(130), "{screen}");
    assert!(screen.contains("SIGINT received") && !screen.contains("survived"), "{screen}");
}

/// The program reads what is typed, and gets the key's signal once. What it does with it is its own affair for the grace period.
/// With copies of its output in files as well. It writes each line by one call, since the launcher writes to the same terminal.
#[rstest]
#[case::alone(&[])]
#[case::copied(&["--tee", "3"])]
fn one_process_owns_the_terminal_and_has_time_after_control_c(#[case] flags: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let script = "import signal, sys, time\n\
                  seen = []\n\
                  signal.signal(signal.SIGINT, lambda *_: seen.append(1))\n\
                  print('ready', flush=True)\n\
                  while not seen: time.sleep(0.01)\n\
                  print('interrupted', flush=True)\n\
                  sys.stdout.write(f'read {input()} {len(seen)} time\\n')\n\
                  sys.exit(int(sys.argv[1]))";
    for (program_ends_with, trouble) in [("0", None), ("3", Some("told to stop, rank 0 exited with code 3"))] {
        let mut command = launch(1, flags);
        command.arg("--log_dir").arg(folder.path()).args(["python3", "-c", script, program_ends_with]);
        let (screen, code) = in_session("\\x03answer\\n", 1, &command);
        assert_eq!(code, Some(130), "{screen}");
        assert!(screen.contains("interrupted") && screen.contains("read answer 1 time"), "{screen}");
        assert!(
            screen.contains("SIGINT received") && screen.contains(trouble.unwrap_or("stopped by SIGINT")),
            "{screen}"
        );
    }
}

const GOES_ON: &str =
    "trap 'echo ready' INT; echo ready; i=0; while [ $i -lt 400 ]; do sleep 0.05; i=$((i+1)); done; echo survived";

#[rstest]
#[case::after_the_grace_period("\\x03", "0.3", "did not end within 0.3 s and was killed")]
#[case::by_a_second_one("\\x03 \\x03", "3600", "stopped by SIGINT")]
fn control_c_ends_one_process_that_goes_on(#[case] typed: &str, #[case] seconds: &str, #[case] words: &str) {
    let command = launch_script(1, &["--shutdown_grace_period", seconds], GOES_ON);
    let (screen, code) = in_session(typed, 1, &command);
    assert_eq!(code, Some(130), "{screen}");
    assert!(screen.contains(words) && !screen.contains("survived"), "{screen}");
}

/// Whatever the program makes of the key, whoever presses it does not want it again.
#[test]
fn a_program_that_was_interrupted_at_its_terminal_is_not_restarted() {
    let script = "trap 'exit 1' INT; echo ready; while :; do sleep 0.05; done";
    let (screen, code) = in_session("\\x03", 1, &launch_script(1, &["--max_restarts", "3"], script));
    assert_eq!(code, Some(130), "{screen}");
    assert!(!screen.contains("begins"), "{screen}");
}
