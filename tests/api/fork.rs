//! A fork: the child has none of the parent's locks, and can use pools of its own.

use std::collections::HashSet;
use std::time::Duration;

use lock_tests::{RedisServer, Worker};

const DEADLINE: Duration = Duration::from_secs(100);

/// The text behind `what` on its line.
#[track_caller]
fn value_of<'a>(lines: &'a [String], what: &str) -> &'a str {
    let line = lines.iter().find_map(|line| line.strip_prefix(what)?.strip_prefix(": "));
    line.unwrap_or_else(|| panic!("{what}: {lines:#?}"))
}

#[test]
fn a_child_has_nothing_of_its_parents_locks_and_can_have_its_own() {
    let server = RedisServer::start();
    let program = Worker::start(env!("CARGO_BIN_EXE_forks"), &[&server.url()]);
    let status = program.wait_for_exit(DEADLINE);
    program.wait_for_line(DEADLINE, |line| line == "child, end");
    let lines = program.stdout();
    assert!(status.success(), "{status}: {lines:#?} {:#?}", program.stderr());
    for what in ["acquire", "annotated", "health", "verify", "lost", "release", "body", "several"] {
        let value = value_of(&lines, &format!("child, {what}"));
        assert!(
            value.starts_with("Config: ") && value.contains("connect after the fork"),
            "{what}: {value}"
        );
    }
    assert_eq!(value_of(&lines, "child, is held"), "false");
    assert_eq!(value_of(&lines, "child, shutdown"), "done");
    // The spans of the parent's calls are the parent's.
    assert_eq!(value_of(&lines, "child, spans"), "0");
    assert_eq!(value_of(&lines, "child, the parent's lock is busy"), "true");
    assert_eq!(value_of(&lines, "child, annotated again"), "done");
    assert_eq!(value_of(&lines, "parent, both is busy"), "true");
    assert_eq!(value_of(&lines, "parent, verify"), "done");
    let ends: HashSet<_> = lines.iter().filter(|line| line.ends_with(", end")).collect();
    assert_eq!(ends.len(), 2, "{lines:#?}");
    assert_eq!(server.cli(&["DBSIZE"]).trim(), "0", "{}", server.cli(&["KEYS", "*"]));
}
