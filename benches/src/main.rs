//! The cost of a lock, compared with other Rust libraries and with the two plain commands that any such lock needs.
//!
//! ```text
//! cargo run --release -p lock-benches                      # everything, some ten minutes
//! cargo run --release -p lock-benches -- hot between       # some scenarios
//! cargo run --release -p lock-benches -- --quick --no-peers
//! ```
//!
//! Starts its own servers. Bound and subject alternate run by run, so that their ratios survive a noisy machine; a
//! figure is the median of its runs. Prints a table for each scenario with the bar beside each figure, and appends
//! every run as a line of JSON to `target/bench/results.jsonl`. Draws `benches/results.svg` when the peers' hand-off
//! was measured.
//!
//! The *bound* is `SET NX PX` and a compare-and-delete script on one multiplexed connection of the same
//! client library. A *section* is one body under the lock. *Busy* is the share of wall time spent in
//! bodies. A *command* is one that a client has sent; those inside scripts do not count.

#![allow(clippy::disallowed_methods)]

mod chart;
mod clock;
mod lockers;
mod report;
mod resources;
mod scenarios;
mod shedlock;
mod stats;
mod worker;

use std::time::Duration;

use crate::report::Report;
use crate::scenarios::{
    annotated, between, cost, crowd, first_renewal, handoff, held, held_stores, hot, low_load,
    memory, quorum, stores, uncontended,
};

const SCENARIOS: [&str; 14] = [
    "low-load",
    "uncontended",
    "hot",
    "between",
    "handoff",
    "held",
    "crowd",
    "memory",
    "quorum",
    "first-renewal",
    "cost",
    "annotated",
    "stores",
    "held-stores",
];

const OPTIONS: [&str; 2] = ["--quick", "--no-peers"];

/// The extent of the measurements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) runs: usize,
    pub(crate) quick: bool,
    pub(crate) peers: bool,
}

impl Plan {
    /// The length of one run.
    pub(crate) fn run(self) -> Duration {
        Duration::from_millis(if self.quick { 400 } else { 1500 })
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().is_some_and(|arg| arg == worker::ROLE) {
        return worker::main(&args[1..]);
    }
    let quick = args.iter().any(|arg| arg == "--quick");
    let plan = Plan {
        runs: if quick { 3 } else { 5 },
        quick,
        peers: !args.iter().any(|arg| arg == "--no-peers"),
    };
    let chosen: Vec<&str> =
        SCENARIOS.into_iter().filter(|name| args.iter().any(|arg| arg == name)).collect();
    let is_known = |arg: &str| OPTIONS.contains(&arg) || SCENARIOS.contains(&arg);
    if let Some(unknown) = args.iter().find(|arg| !is_known(arg)) {
        let (scenarios, options) = (SCENARIOS.join(", "), OPTIONS.join(" and "));
        eprintln!("there is no `{unknown}`; the scenarios are {scenarios}; the options {options}");
        std::process::exit(2);
    }
    let chosen = if chosen.is_empty() { SCENARIOS.to_vec() } else { chosen };
    let mut report = Report::create();
    for name in chosen {
        match name {
            "low-load" => low_load::measure(plan, &mut report),
            "uncontended" => uncontended::measure(plan, &mut report),
            "hot" => hot::measure(plan, &mut report),
            "between" => between::measure(plan, &mut report),
            "handoff" => handoff::measure(plan, &mut report),
            "held" => held::measure(plan, &mut report),
            "crowd" => crowd::measure(plan, &mut report),
            "memory" => memory::measure(plan, &mut report),
            "quorum" => quorum::measure(plan, &mut report),
            "first-renewal" => first_renewal::measure(plan, &mut report),
            "annotated" => annotated::measure(plan, &mut report),
            "stores" => stores::measure(plan, &mut report),
            "held-stores" => held_stores::measure(plan, &mut report),
            _ => cost::measure(plan, &mut report),
        }
    }
    if plan.peers {
        chart::draw(&report);
    }
}

/// The runtime of every measured process.
pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime can be started")
}
