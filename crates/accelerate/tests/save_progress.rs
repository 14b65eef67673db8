//! What is seen of a long save at a terminal.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use accelerate::nn::{Init, ParamStore};
use accelerate::optim::Sgd;
use accelerate::{Accelerator, testing};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{OptionalActions, OutputModes, Winsize, tcgetattr, tcsetattr, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};

/// The folder into which the process at the terminal saves.
const FOLDER: &str = "ACCELERATE_TEST_SAVE_PROGRESS";

/// The far end of a terminal of 40 x 100, for a process, and the near one, which sees what is written there.
fn terminal() -> (File, OwnedFd) {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let near = openpt(flags).unwrap();
    unlockpt(&near).unwrap();
    let far = ioctl_tiocgptpeer(&near, flags).unwrap();
    let mut modes = tcgetattr(&far).unwrap();
    modes.output_modes.remove(OutputModes::OPOST);
    tcsetattr(&far, OptionalActions::Now, &modes).unwrap();
    tcsetwinsize(&near, Winsize { ws_row: 40, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    (near.into(), far)
}

/// Two ranks save, and rank 1 is slow: it goes on when somebody types a line.
fn save_at_the_terminal(folder: &Path) {
    testing::ranks(2, Accelerator::builder().cpu(true), |accelerator| {
        let store = ParamStore::new(accelerator.device());
        store.root().param("weight", ([4], Init::Ones))?;
        let _optimizer = accelerator.prepare(Sgd::new(&store, 0.1)?)?;
        eprint!("a bar of the program's");
        accelerator.save_state_async(folder)?;
        if accelerator.process_index() == 1 {
            std::io::stdin().read_line(&mut String::new()).unwrap();
        }
        accelerator.wait_for_save()
    })
    .unwrap();
    eprintln!("saved");
}

#[test]
fn who_waits_for_a_save_sees_how_far_it_is_and_the_line_is_empty_afterwards() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        return save_at_the_terminal(Path::new(&folder));
    }
    let folder = tempfile::tempdir().unwrap();
    let (mut near, far) = terminal();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([
        "--exact",
        "--nocapture",
        "who_waits_for_a_save_sees_how_far_it_is_and_the_line_is_empty_afterwards",
    ]);
    command.env(FOLDER, folder.path().join("checkpoint_3")).env("TERM", "xterm");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(far).spawn().unwrap();
    // It holds a copy of the far end; with that the terminal would never end.
    drop(command);

    let mut stdin = child.stdin.take();
    let (mut screen, mut piece) = (String::new(), [0; 4096]);
    // The end of a terminal is reported as an error.
    while let Ok(length @ 1..) = near.read(&mut piece) {
        screen.push_str(&String::from_utf8_lossy(&piece[..length]));
        if screen.contains("processes")
            && let Some(mut stdin) = stdin.take()
        {
            stdin.write_all(b"\n").unwrap();
        }
    }
    assert!(child.wait().unwrap().success(), "{screen:?}");
    let (before, bar) = screen.split_once("\r\x1b[2K").unwrap();
    assert!(before.ends_with("a bar of the program's"), "{screen:?}");
    assert!(bar.starts_with("saving checkpoint_3"), "{screen:?}");
    assert!(bar.ends_with("\r\x1b[2Ksaved\n"), "{screen:?}");
}
