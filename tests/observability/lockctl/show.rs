//! `lockctl show`, and what all commands have in common.

use lock_runtime::LockPool;
use lock_tests::lockctl::{lockctl, run};
use lock_tests::prelude::*;
use lock_tests::{MysqlServer, PostgresServer, RedisServer};
use serde_json::{Value, json};

#[tokio::test]
async fn the_holder_and_its_queue_are_shown() {
    let server = RedisServer::start();
    let connect = || LockPool::builder(server.url()).key_prefix("app:").ttl(ms(20_000)).connect();
    let [one, other] = [connect().await.unwrap(), connect().await.unwrap()];
    let guard = one.lock("order:1").acquire().await.unwrap();
    let waiting = acquire_in_task(&other, "order:1");
    until_queued(&server, "app:order:1", 1).await;
    let url = server.url();

    let shown = run(lockctl(["show", "order:1", "--url", &url, "--prefix", "app:"]));
    assert_eq!((shown.code, &*shown.stderr), (0, ""), "{shown:?}");
    let json = shown.json();
    let held = &one.snapshot().held[0];
    assert_eq!(json["key"], "order:1");
    assert_eq!(json["holder"]["owner"], held.owner.to_string());
    assert!(json["holder"]["expires_in_ms"].as_u64().is_some_and(|left| left <= 20_000), "{json}");
    let info = &json["holder"]["info"];
    assert_eq!(
        (&info["process_id"], &info["call_site"]),
        (&json!(std::process::id()), &json!(held.call_site))
    );
    let host = info["host"].as_str().unwrap();
    assert_eq!((&json["waiting"], json["waiters"].as_array().unwrap().len()), (&json!(1), 1));

    // The variables of a pool, and text without colours.
    let mut by_variables = lockctl(["--text", "show", "order:1"]);
    by_variables.env("LOCK_URL", &url).env("LOCK_PREFIX", "app:");
    let shown = run(by_variables);
    let row = |name: &str, value: &str| {
        let value = format!(" {value}");
        shown.stdout.lines().any(|it| it.trim().starts_with(name) && it.ends_with(&value))
    };
    assert!(row("state", "held") && row("waiting", "1"), "{shown:?}");
    assert!(row("process", &format!("{host}/{}", std::process::id())), "{shown:?}");
    assert!(
        row("holder", &held.owner.to_string()) && !shown.stdout.contains('\u{1b}'),
        "{shown:?}"
    );

    // Another key, by another prefix.
    let free = run(lockctl(["show", "order:1", "--url", &url]));
    assert_eq!((free.code, &free.json()["holder"]), (3, &Value::Null), "{free:?}");
    guard.release().await.unwrap();
    joined("the other", waiting).await.1.release().await.unwrap();
}

#[tokio::test]
async fn databases_are_reached_too() {
    let (postgres, mysql) = (PostgresServer::start(), MysqlServer::start());
    for url in [postgres.url(), mysql.url()] {
        let pool = LockPool::connect(&url).await.unwrap();
        let guard = pool.lock("order:1").acquire().await.unwrap();
        let shown = run(lockctl(["show", "order:1", "--url", &url]));
        assert_eq!(shown.code, 0, "{shown:?}");
        let fence = guard.fence().map(|fence| fence.get());
        assert_eq!(shown.json()["holder"]["fence"].as_u64(), fence);
        guard.release().await.unwrap();
    }
}

#[test]
fn what_fails_has_a_code_and_a_remedy() {
    let nowhere = run(lockctl(["show", "order:1"]));
    assert_eq!((nowhere.code, &*nowhere.stdout), (2, ""), "{nowhere:?}");
    assert!(nowhere.stderr.contains("LOCK_URL"), "{nowhere:?}");
    let wrong = run(lockctl(["show", "order:1", "--url", "redis:/secret"]));
    assert_eq!(wrong.code, 2, "{wrong:?}");
    let port = lock_tests::server::another_port();
    let url = format!("redis://user:canary@127.0.0.1:{port}");
    let down = run(lockctl(["show", "order:1", "--url", &url]));
    assert_eq!((down.code, &*down.stdout), (1, ""), "{down:?}");
    assert!(down.stderr.starts_with("error: ") && !down.stderr.contains("canary"), "{down:?}");
    let mut help = lockctl(["--help"]);
    help.env("LOCK_URL", &url);
    let help = run(help);
    assert_eq!(help.code, 0, "{help:?}");
    assert!(help.stdout.contains("Exit codes") && !help.stdout.contains("canary"), "{help:?}");
    // A URL in a wrong place.
    let sentinels = "redis+sentinel://127.0.0.1/orders?sentinel_password=canary";
    for misused in [&["ls", "order:*", &url][..], &["ls", "--limit", &url], &["ls", "a", sentinels]]
    {
        let misused = run(lockctl(misused.iter().copied()));
        assert_eq!((misused.code, &*misused.stdout), (2, ""), "{misused:?}");
        let names_it = misused.stderr.contains("redis://***") || misused.stderr.contains("?***");
        assert!(names_it && !misused.stderr.contains("canary"), "{misused:?}");
    }
    // Up to the `=`, as an option has it.
    let misused = run(lockctl(["--redis://user:can=ary@127.0.0.1", "ls"]));
    assert!(misused.code == 2 && misused.stderr.contains("redis://***"), "{misused:?}");
    assert!(!misused.stderr.contains("can") && !misused.stderr.contains("ary@"), "{misused:?}");
    // In a variable.
    let mut misused = lockctl(["ls"]);
    misused.env("LOCK_REQUEST_TIMEOUT", &url);
    let misused = run(misused);
    assert!(misused.code == 2 && misused.stderr.contains("redis://***"), "{misused:?}");
    assert!(!misused.stderr.contains("canary"), "{misused:?}");
    // With characters that a terminal obeys, or that hide others.
    for url in ["redis://user:can\u{1b}[31mary@127.0.0.1", "redis://user:can\u{202e}ary@127.0.0.1"]
    {
        let misused = run(lockctl(["ls", "order:\u{202e}*", url]));
        assert!(misused.stderr.contains("redis://***"), "{misused:?}");
        assert!(!misused.stderr.contains("can") && !misused.stderr.contains("ary"), "{misused:?}");
    }
    let hides = run(lockctl(["ls", "order:1", "order:\u{202e}2"]));
    assert!(hides.code == 2 && hides.stderr.contains("order:\\u{202e}2"), "{hides:?}");
    let unknown = run(lockctl(["shw", "order:1"]));
    assert_eq!(unknown.code, 2);
    assert!(unknown.stderr.contains("'show'"), "{unknown:?}");
}

/// The code tells the failure.
#[cfg(target_os = "linux")]
#[test]
fn a_standard_error_that_is_full_changes_no_code() {
    let url = format!("redis://127.0.0.1:{}", lock_tests::server::another_port());
    for (arguments, code) in [(&["show", "order:1", "--url", &url][..], 1), (&["shw"], 2)] {
        let mut command = lockctl(arguments.iter().copied());
        command.stderr(std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap());
        let status = command.status().unwrap();
        assert_eq!(status.code(), Some(code), "{arguments:?}");
    }
}

#[test]
fn each_shell_has_completions() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let completions = run(lockctl(["completions", shell]));
        assert_eq!(completions.code, 0, "{completions:?}");
        for command in ["show", "ls", "watch", "release", "doctor", "bench", "completions"] {
            assert!(completions.stdout.contains(command), "{shell}: {command}");
        }
    }
}
