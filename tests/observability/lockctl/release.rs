//! `lockctl release` where nothing can be asked.

use std::process::Stdio;

use lock_runtime::ErrorKind;
use lock_tests::RedisServer;
use lock_tests::lockctl::{Ended, lockctl, run};
use lock_tests::prelude::*;

fn release(server: &RedisServer, more: &[&str]) -> Ended {
    let url = server.url();
    let mut command = lockctl(["release", "order:1", "--url", &url].iter().chain(more).copied());
    command.stdin(Stdio::null());
    run(command)
}

#[tokio::test]
async fn a_lock_is_taken_from_the_holder_that_is_named() {
    let server = RedisServer::start();
    let pool = patient(server.url(), ms(3_000)).await;
    let free = release(&server, &["--force", "--yes"]);
    assert_eq!((free.code, &free.json()["released"]), (3, &false.into()), "{free:?}");

    let guard = pool.lock("order:1").acquire().await.unwrap();
    let owner = pool.snapshot().held[0].owner.to_string();
    for (more, says) in [
        (&[][..], "Pass `--force`"),
        (&["--yes"], "Pass `--force`"),
        (&["--force"], "pass `--yes`"),
    ] {
        let refused = release(&server, more);
        assert_eq!((refused.code, &*refused.stdout), (2, ""), "{refused:?}");
        assert!(refused.stderr.contains(says) && refused.stderr.contains(&owner), "{refused:?}");
        let by = format!("/{} {}:", std::process::id(), file!());
        assert!(refused.stderr.contains(&by), "{refused:?}");
    }
    let another = release(&server, &["--force", "--yes", "--owner", "00000000"]);
    assert_eq!((another.code, &another.json()["released"]), (3, &false.into()), "{another:?}");
    guard.verify().await.unwrap();

    let url = server.url();
    let mut command = lockctl(["release", "order:1", "--url", &url, "--force", "--yes"]);
    // The event has the user of the login, in one line.
    command.args(["--owner", &owner]).env_remove("SUDO_USER").env("USER", "alice\u{9b}31m");
    let taken = run(command);
    assert_eq!((taken.code, &taken.json()["released"]), (0, &true.into()), "{taken:?}");
    let by = "by=alice\\u{9b}31m at ";
    let begin = format!("event: released by force pool=unnamed owner={owner} was_held=true {by}");
    assert!(taken.stderr.starts_with(&begin) && taken.stderr.lines().count() == 1, "{taken:?}");
    assert_eq!(taken.json()["holder"]["owner"], owner);
    let error = within(DEADLINE, "the holder learns of it", guard.lost()).await;
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
}

#[test]
fn a_lock_of_another_library_is_refused() {
    let server = RedisServer::start();
    server.cli(&["SET", "order:1", "worker-7", "PX", "60000"]);
    let refused = release(&server, &["--force", "--yes"]);
    assert_eq!(refused.code, 2, "{refused:?}");
    assert!(refused.stderr.contains("another library"), "{refused:?}");
    assert_eq!(server.cli(&["GET", "order:1"]), "worker-7");
}
