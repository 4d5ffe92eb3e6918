//! One of three processes leads at a time. The program kills one of the leaders, and the next one begins at the end of its
//! lease. Kill a member of etcd meanwhile, by hand: the leader stays, or it stops before the next one begins.
//!
//! ```text
//! cargo add lock-runtime --features etcd     # in another program
//! cargo run --example etcd_leader -- etcd://127.0.0.1:2379,127.0.0.1:22379,127.0.0.1:32379/locks    # or by LOCK_URL
//! ```

// The example measures time.
#![allow(clippy::disallowed_methods)]

use std::env;
use std::process::Stdio;
use std::time::{Duration, SystemTime};

use lock_runtime::{LockError, distributed_lock};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::time::{sleep, timeout};

type Failure = Box<dyn std::error::Error>;

/// A leader resigns after this time, so that all of the processes lead.
const TERM: Duration = Duration::from_secs(1);
const TERMS: usize = 8;

/// The leader of this term is killed.
const KILLED: usize = 4;

/// What a candidate says once it has its pool.
const CONNECTED: &str = "connected";

/// Only one process is in here. The body is dropped before its lease ends.
#[distributed_lock(key = "example:leader", ttl = "4s", wait = "forever", guard = lock)]
async fn lead() -> Result<(), LockError> {
    let fence = lock.fence().map_or(0, u64::from);
    println!("begins {fence} {}", now());
    let _end = EndOfTerm { fence };
    sleep(TERM).await;
    Ok(())
}

/// Says when a term has ended: after its time, or with its lease.
struct EndOfTerm {
    fence: u64,
}

impl Drop for EndOfTerm {
    fn drop(&mut self) {
        println!("ends {} {}", self.fence, now());
    }
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let mut args = env::args().skip(1);
    let Some(url) = args.next().or_else(|| env::var("LOCK_URL").ok()) else {
        return Err("name a store: etcd_leader etcd://host1,host2,host3/locks".into());
    };
    match args.next() {
        None => three_candidates(&url).await,
        Some(_) => candidate(&url).await,
    }
}

/// Leads whenever it may, until its input ends.
async fn candidate(url: &str) -> Result<(), Failure> {
    lock_runtime::init(url).await?;
    println!("{CONNECTED}");
    let leading = async {
        loop {
            if let Err(error) = lead().await {
                eprintln!("{error}");
                sleep(Duration::from_millis(100)).await;
            }
        }
    };
    let mut input = Vec::new();
    tokio::select! {
        () = leading => {}
        read = async { tokio::io::stdin().read_to_end(&mut input).await } => drop(read?),
    }
    lock_runtime::shutdown(Duration::from_secs(1)).await;
    Ok(())
}

/// A term of a leader, in nanoseconds since 1970.
struct Term {
    leader: usize,
    fence: u64,
    began: u128,
    ended: Option<u128>,
}

/// Records what a candidate has said. `true` if it leads from now on.
fn record(terms: &mut Vec<Term>, leader: usize, line: &str) -> Result<bool, Failure> {
    if line == CONNECTED {
        println!("candidate {leader} is connected");
    }
    let [event, fence, at] = line.split(' ').collect::<Vec<_>>()[..] else { return Ok(false) };
    let (fence, at) = (fence.parse()?, at.parse()?);
    if event == "begins" {
        println!("candidate {leader} leads with fence {fence}");
        terms.push(Term { leader, fence, began: at, ended: None });
    } else if let Some(term) = terms.iter_mut().find(|term| term.fence == fence) {
        term.ended = Some(at);
    }
    Ok(event == "begins")
}

async fn three_candidates(url: &str) -> Result<(), Failure> {
    let (lines, mut said) = unbounded_channel();
    let mut candidates = Vec::new();
    for number in 0..3 {
        candidates.push(start(url, number, lines.clone())?);
    }
    drop(lines);
    let (mut terms, mut killed) = (Vec::new(), None);
    while terms.len() <= TERMS {
        let next = timeout(Duration::from_secs(60), said.recv()).await?;
        let (leader, line) = next.ok_or("no candidate is left")?;
        if record(&mut terms, leader, &line)? && terms.len() == KILLED {
            candidates[leader].kill().await?;
            killed = Some((KILLED - 1, now()));
            println!("candidate {leader} is killed");
        }
    }
    let (last, at) = killed.ok_or("no leader was killed")?;
    for (number, candidate) in candidates.iter_mut().enumerate() {
        drop(candidate.stdin.take());
        let status = candidate.wait().await?;
        if !status.success() && number != terms[last].leader {
            return Err(format!("candidate {number}: {status}").into());
        }
    }
    while let Some((leader, line)) = said.recv().await {
        record(&mut terms, leader, &line)?;
    }

    terms[last].ended.get_or_insert(at);
    let (last, next) = (&terms[last], &terms[last + 1]);
    let vacant = Duration::from_nanos(u64::try_from(next.began.saturating_sub(at))?);
    println!(
        "candidate {} leads {vacant:.1?} after the death of candidate {}",
        next.leader, last.leader
    );
    let is_in_order = |pair: &[Term]| {
        let ended = pair[0].ended.is_some_and(|ended| ended <= pair[1].began);
        ended && pair[0].fence < pair[1].fence
    };
    let alone = terms.windows(2).all(is_in_order);
    println!("{} terms, one leader at a time: {}", terms.len(), if alone { "yes" } else { "no" });
    if alone { Ok(()) } else { Err("two candidates have led at the same time".into()) }
}

/// A process of this program. `lines` receives what it says.
fn start(
    url: &str,
    number: usize,
    lines: UnboundedSender<(usize, String)>,
) -> Result<Child, Failure> {
    let mut command = Command::new(env::current_exe()?);
    command.args([url, "candidate"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.kill_on_drop(true).spawn()?;
    let output = child.stdout.take().ok_or("the output is piped")?;
    tokio::spawn(async move {
        let mut output = BufReader::new(output).lines();
        while let Ok(Some(line)) = output.next_line().await {
            let _ = lines.send((number, line));
        }
    });
    Ok(child)
}

/// The processes run on one machine, so they have the same clock.
fn now() -> u128 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos()
}
