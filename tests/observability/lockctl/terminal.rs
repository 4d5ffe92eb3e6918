//! `lockctl` on a terminal.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::process::Command;

use lock_runtime::ErrorKind;
use lock_tests::RedisServer;
use lock_tests::lockctl::lockctl;
use lock_tests::prelude::*;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

/// Runs `command` on a terminal, types `answer` when it has printed `question`, and returns all that it has printed.
fn on_terminal(command: Command, question: &str, answer: &str) -> (i32, String) {
    on_terminal_of(None, command, question, answer)
}

/// [`on_terminal`] with this many rows of 200 columns.
fn on_terminal_of(
    rows: Option<u16>,
    mut command: Command,
    question: &str,
    answer: &str,
) -> (i32, String) {
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    if let Some(ws_row) = rows {
        let size = Winsize { ws_row, ws_col: 200, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&terminal, size).unwrap();
    }
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    let name = ptsname(&terminal, Vec::new()).unwrap();
    let side = OpenOptions::new().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    command.stdin(side.try_clone().unwrap()).stdout(side.try_clone().unwrap()).stderr(side);
    command.env("TERM", "xterm");
    let mut child = command.spawn().unwrap();
    // Its sides of the terminal close with it.
    drop(command);
    let mut terminal = File::from(terminal);
    let (mut printed, mut has_answered) = (Vec::new(), false);
    let mut bytes = [0; 4096];
    // A terminal without another side is an error.
    while let Ok(count @ 1..) = terminal.read(&mut bytes) {
        printed.extend_from_slice(&bytes[..count]);
        if !has_answered && String::from_utf8_lossy(&printed).contains(question) {
            terminal.write_all(answer.as_bytes()).unwrap();
            has_answered = true;
        }
    }
    let code = child.wait().unwrap().code().unwrap();
    (code, String::from_utf8(printed).unwrap())
}

#[tokio::test]
async fn a_release_asks_and_says_which_holder_it_hits() {
    let server = RedisServer::start();
    let pool = patient(server.url(), ms(3_000)).await;
    let guard = pool.lock("order:1").acquire().await.unwrap();
    let owner = pool.snapshot().held[0].owner.to_string();
    let url = server.url();
    let ask = |answer| {
        let command = lockctl(["release", "order:1", "--force", "--url", &url]);
        on_terminal(command, "[y/N]", answer)
    };
    let (code, printed) = ask("n\n");
    assert_eq!(code, 2, "{printed}");
    assert!(printed.contains(&owner) && printed.contains("nothing was released"), "{printed}");
    guard.verify().await.unwrap();
    let (code, printed) = ask("y\n");
    assert_eq!(code, 0, "{printed}");
    assert!(printed.contains("released"), "{printed}");
    let error = within(DEADLINE, "the holder learns of it", guard.lost()).await;
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
}

#[tokio::test]
async fn text_has_colours_unless_they_are_unwanted() {
    let server = RedisServer::start();
    let pool = patient(server.url(), ms(20_000)).await;
    let guard = pool.lock("order:1").acquire().await.unwrap();
    let url = server.url();
    let show = || lockctl(["show", "order:1", "--url", &url]);
    let (code, printed) = on_terminal(show(), "", "");
    assert_eq!(code, 0, "{printed}");
    assert!(printed.contains("\u{1b}[33mheld\u{1b}[0m"), "{printed:?}");
    let mut plain = show();
    plain.env("NO_COLOR", "1");
    let (_, printed) = on_terminal(plain, "", "");
    assert!(printed.contains("held") && !printed.contains('\u{1b}'), "{printed:?}");
    guard.release().await.unwrap();
}

/// A frame that is longer than the terminal would scroll its head away.
#[tokio::test]
async fn a_watched_table_fits_the_terminal() {
    let server = RedisServer::start();
    let pool = patient(server.url(), ms(20_000)).await;
    let guards = pool.lock_all((10..40).map(|number| format!("order:{number}"))).acquire().await;
    let watch = || lockctl(["watch", "--count", "1", "--url", &server.url()]);
    let (code, printed) = on_terminal_of(Some(12), watch(), "", "");
    assert_eq!(code, 0, "{printed}");
    assert_eq!(printed.matches('\n').count(), 11, "{printed}");
    for shown in ["KEY", "order:10", "order:17", "and 22 more lines", "30 locks"] {
        assert!(printed.contains(shown), "{shown}: {printed}");
    }
    assert!(!printed.contains("order:18"), "{printed}");
    let (_, printed) = on_terminal_of(Some(40), watch(), "", "");
    assert!(printed.contains("order:39") && !printed.contains("more lines"), "{printed}");
    guards.unwrap().release().await.unwrap();
}
