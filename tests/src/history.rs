//! Recorded leases with their validity, and a check of their safety.
//!
//! Every process writes its events to a file of its own. The clock is CLOCK_BOOTTIME, which all
//! processes of a machine share, so the order of events is exact.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds since boot, suspend included; the same in all processes of this machine.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let now = Duration::new(now.tv_sec.cast_unsigned(), now.tv_nsec as u32);
    u64::try_from(now.as_nanos()).expect("584 years of uptime")
}

/// An event of a grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The process's name, without blanks.
    pub process: String,
    /// The grant's number, unique in its process.
    pub grant: u64,
    /// When it happened.
    pub at_ns: u64,
    /// What happened.
    pub kind: Kind,
}

/// What happened to a grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The acquire has returned.
    Granted {
        /// The task.
        task: u64,
        /// When the acquire was called.
        invoked_ns: u64,
        /// The end of the validity without a renewal.
        deadline_ns: u64,
        /// The fencing token.
        fence: Option<u64>,
        /// The lock's key, without line breaks.
        key: String,
    },
    /// A renewal has moved the deadline.
    Renewed {
        /// The new end of the validity.
        deadline_ns: u64,
    },
    /// The loss of the lock was reported to the task.
    Lost,
    /// The release is about to be called.
    Release,
}

/// Writes the events of one process.
#[derive(Debug)]
pub struct Recorder {
    process: String,
    file: Mutex<File>,
    grants: AtomicU64,
}

impl Recorder {
    /// A new file `<process>.history` in `dir`.
    pub fn create(dir: &Path, process: &str) -> io::Result<Self> {
        let file = File::create_new(dir.join(format!("{process}.history")))?;
        Ok(Self { process: process.into(), file: Mutex::new(file), grants: AtomicU64::new(0) })
    }

    /// An acquire has returned just now, valid for `valid_for()`. Returns the number of the grant.
    pub fn granted(
        &self,
        key: &str,
        task: u64,
        invoked_ns: u64,
        valid_for: impl FnOnce() -> Duration,
        fence: Option<u64>,
    ) -> u64 {
        let grant = self.grants.fetch_add(1, Ordering::Relaxed);
        let (now_ns, valid_ns) = sample(valid_for);
        let deadline_ns = now_ns + valid_ns;
        let key = key.into();
        self.write(grant, Kind::Granted { task, invoked_ns, deadline_ns, fence, key });
        grant
    }

    /// The grant is now valid for `valid_for()`; records nothing if that is zero.
    pub fn renewed(&self, grant: u64, valid_for: impl FnOnce() -> Duration) {
        let (now_ns, valid_ns) = sample(valid_for);
        if valid_ns > 0 {
            self.write(grant, Kind::Renewed { deadline_ns: now_ns + valid_ns });
        }
    }

    /// The loss of the grant was signalled.
    pub fn lost(&self, grant: u64) {
        self.write(grant, Kind::Lost);
    }

    /// To be called before the release.
    pub fn release(&self, grant: u64) {
        self.write(grant, Kind::Release);
    }

    fn write(&self, grant: u64, kind: Kind) {
        let event = Event { process: self.process.clone(), grant, at_ns: now_ns(), kind };
        // One write call, so that a killed process leaves at most one torn line.
        let line = format!("{event}\n");
        self.file.lock().unwrap().write_all(line.as_bytes()).expect("the history can be written");
    }
}

/// The clock comes first: a process that is frozen between the two must not get a longer validity
/// longer than it did.
fn sample(valid_for: impl FnOnce() -> Duration) -> (u64, u64) {
    let now_ns = now_ns();
    (now_ns, u64::try_from(valid_for().as_nanos()).expect("584 years of validity"))
}

/// `process grant at_ns kind ...`, the key last.
impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { process, grant, at_ns, kind } = self;
        write!(f, "{process} {grant} {at_ns} ")?;
        match kind {
            Kind::Granted { task, invoked_ns, deadline_ns, fence, key } => {
                let fence = fence.map_or_else(|| "-".into(), |fence| fence.to_string());
                write!(f, "granted {task} {invoked_ns} {deadline_ns} {fence} {key}")
            }
            Kind::Renewed { deadline_ns } => write!(f, "renewed {deadline_ns}"),
            Kind::Lost => f.write_str("lost"),
            Kind::Release => f.write_str("release"),
        }
    }
}

impl Event {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.splitn(9, ' ');
        let process = words.next()?.into();
        let mut number = || words.next()?.parse().ok();
        let (grant, at_ns) = (number()?, number()?);
        let kind = match words.next()? {
            "granted" => {
                let mut number = || words.next()?.parse().ok();
                let (task, invoked_ns, deadline_ns) = (number()?, number()?, number()?);
                let fence = match words.next()? {
                    "-" => None,
                    fence => Some(fence.parse().ok()?),
                };
                let key = words.next()?.into();
                Kind::Granted { task, invoked_ns, deadline_ns, fence, key }
            }
            "renewed" => Kind::Renewed { deadline_ns: words.next()?.parse().ok()? },
            "lost" => Kind::Lost,
            "release" => Kind::Release,
            _ => return None,
        };
        Some(Self { process, grant, at_ns, kind })
    }
}

/// One grant, from the acquire to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The lock's key.
    pub key: String,
    /// The process that held it.
    pub process: String,
    /// The task that held it.
    pub task: u64,
    /// When the acquire was called.
    pub invoked_ns: u64,
    /// When it returned.
    pub granted_ns: u64,
    /// The last deadline.
    pub deadline_ns: u64,
    /// When the loss was signalled.
    pub lost_ns: Option<u64>,
    /// When the release was called; never by a killed process.
    pub release_ns: Option<u64>,
    /// The fencing token.
    pub fence: Option<u64>,
}

impl Grant {
    /// The end of the validity: release, reported loss or deadline, whichever comes first.
    pub fn valid_until(&self) -> u64 {
        let ends = [self.release_ns, self.lost_ns, Some(self.deadline_ns)];
        ends.into_iter().flatten().min().unwrap_or(self.deadline_ns)
    }

    /// The end of a hold that only a release ends. A killed process holds nothing.
    pub fn held_until_release(&self) -> u64 {
        self.release_ns.unwrap_or(self.deadline_ns)
    }
}

/// Two leases of one lock that were valid at the same time.
#[derive(Clone, Debug)]
pub struct Overlap {
    /// The one that began first.
    pub first: Grant,
    /// The one that began before the first had ended.
    pub second: Grant,
}

/// A fencing token that is not above the tokens of all grants that had returned before its acquire began, or that was
/// granted twice.
#[derive(Clone, Debug)]
pub struct FenceFault {
    /// The grant with the higher or the same token.
    pub before: Grant,
    /// The grant at fault.
    pub after: Grant,
}

/// All grants of a run.
#[derive(Clone, Debug, Default)]
pub struct History {
    grants: Vec<Grant>,
}

impl History {
    /// Merges the files of all recorders in `dir`. The torn last line of a killed process is left
    /// out; anything else that is unreadable is an error. Processes may run meanwhile: their grants from now on are left out.
    pub fn read(dir: &Path) -> io::Result<Self> {
        Self::read_before(dir, now_ns())
    }

    /// The grants before `end_ns`, a time before this call. A later grant may follow a release that is missing here, because its
    /// file was read earlier. It would overlap the hold that ended with that release.
    fn read_before(dir: &Path, end_ns: u64) -> io::Result<Self> {
        let mut events = Vec::new();
        for entry in fs::read_dir(dir)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "history") {
                continue;
            }
            let text = fs::read_to_string(&path)?;
            let whole = text.rfind('\n').map_or("", |end| &text[..end]);
            for line in whole.lines() {
                let unreadable = || io::Error::other(format!("{}: {line:?}", path.display()));
                let event = Event::parse(line).ok_or_else(unreadable)?;
                if event.at_ns < end_ns || !matches!(event.kind, Kind::Granted { .. }) {
                    events.push(event);
                }
            }
        }
        Ok(Self::of(events))
    }

    /// The history of events in any order.
    pub fn of(mut events: Vec<Event>) -> Self {
        // A watcher may sample a deadline before the task has written its grant.
        events.sort_by_key(|event| (!matches!(event.kind, Kind::Granted { .. }), event.at_ns));
        let mut grants: BTreeMap<(String, u64), Grant> = BTreeMap::new();
        for Event { process, grant, at_ns, kind } in events {
            let id = (process, grant);
            if let Kind::Granted { task, invoked_ns, deadline_ns, fence, key } = kind {
                let grant = Grant {
                    key,
                    process: id.0.clone(),
                    task,
                    invoked_ns,
                    granted_ns: at_ns,
                    deadline_ns,
                    lost_ns: None,
                    release_ns: None,
                    fence,
                };
                grants.insert(id, grant);
                continue;
            }
            let Some(grant) = grants.get_mut(&id) else { continue };
            match kind {
                Kind::Renewed { deadline_ns } => grant.deadline_ns = deadline_ns,
                Kind::Lost => grant.lost_ns = grant.lost_ns.or(Some(at_ns)),
                Kind::Release => grant.release_ns = grant.release_ns.or(Some(at_ns)),
                Kind::Granted { .. } => {}
            }
        }
        Self { grants: grants.into_values().collect() }
    }

    /// All grants.
    pub fn grants(&self) -> &[Grant] {
        &self.grants
    }

    /// Valid leases that overlap (invariant I1); at most one per grant.
    pub fn overlaps(&self) -> Vec<Overlap> {
        self.overlaps_until(Grant::valid_until)
    }

    /// Overlaps if only a release ended a hold: the negative control. A run with pauses and without any has tested
    /// nothing.
    pub fn naive_overlaps(&self) -> Vec<Overlap> {
        self.overlaps_until(Grant::held_until_release)
    }

    fn overlaps_until(&self, end: impl Fn(&Grant) -> u64) -> Vec<Overlap> {
        let mut overlaps = Vec::new();
        for mut grants in self.by_key() {
            grants.retain(|grant| grant.granted_ns < end(grant));
            grants.sort_by_key(|grant| grant.granted_ns);
            let mut last: Option<&Grant> = None;
            for grant in grants {
                if let Some(first) = last.filter(|last| grant.granted_ns < end(last)) {
                    overlaps.push(Overlap { first: first.clone(), second: grant.clone() });
                }
                if last.is_none_or(|last| end(last) < end(grant)) {
                    last = Some(grant);
                }
            }
        }
        overlaps
    }

    /// Fencing tokens out of order or given twice (invariant I2); at most two per grant.
    pub fn fence_faults(&self) -> Vec<FenceFault> {
        let mut faults = Vec::new();
        let mut fault = |before: &Grant, after: &Grant| {
            faults.push(FenceFault { before: before.clone(), after: after.clone() });
        };
        for mut grants in self.by_key() {
            grants.retain(|grant| grant.fence.is_some());
            let mut returned = grants.clone();
            returned.sort_by_key(|grant| grant.granted_ns);
            grants.sort_by_key(|grant| grant.invoked_ns);
            let mut returned = returned.into_iter().peekable();
            let mut highest: Option<&Grant> = None;
            for grant in &grants {
                while let Some(before) =
                    returned.next_if(|before| before.granted_ns < grant.invoked_ns)
                {
                    if highest.is_none_or(|highest| highest.fence < before.fence) {
                        highest = Some(before);
                    }
                }
                if let Some(before) = highest.filter(|before| before.fence > grant.fence) {
                    fault(before, grant);
                }
            }
            grants.sort_by_key(|grant| (grant.fence, grant.granted_ns));
            for pair in grants.windows(2).filter(|pair| pair[0].fence == pair[1].fence) {
                fault(pair[0], pair[1]);
            }
        }
        faults
    }

    /// # Panics
    ///
    /// With the first faults, when there is an overlap or a fence fault.
    #[track_caller]
    pub fn assert_safe(&self) {
        let (overlaps, faults) = (self.overlaps(), self.fence_faults());
        assert!(
            overlaps.is_empty() && faults.is_empty(),
            "{} grants, {} overlaps, {} fence faults\n{:#?}\n{:#?}",
            self.grants.len(),
            overlaps.len(),
            faults.len(),
            &overlaps[..overlaps.len().min(5)],
            &faults[..faults.len().min(5)],
        );
    }

    fn by_key(&self) -> impl Iterator<Item = Vec<&Grant>> {
        let mut keys: BTreeMap<&str, Vec<&Grant>> = BTreeMap::new();
        for grant in &self.grants {
            keys.entry(&grant.key).or_default().push(grant);
        }
        keys.into_values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastrand::Rng;

    const MS: u64 = 1_000_000;

    /// Grants of a correct lock: tasks of three processes take turns on two keys, wait long, exceed their deadline, are
    /// killed, renew.
    fn good_history(rng: &mut Rng) -> Vec<Grant> {
        let mut grants = Vec::new();
        for key in ["a", "b c"] {
            let mut fence = rng.u64(1..1000);
            let mut now = rng.u64(100 * MS..200 * MS);
            for _ in 0..rng.usize(3..20) {
                let granted_ns = now;
                let invoked_ns = now - rng.u64(1..80 * MS);
                let deadline_ns = granted_ns + rng.u64(10 * MS..50 * MS);
                let mut grant = Grant {
                    key: key.into(),
                    process: format!("p{}", rng.u8(0..3)),
                    task: rng.u64(0..4),
                    invoked_ns,
                    granted_ns,
                    deadline_ns,
                    lost_ns: None,
                    release_ns: None,
                    fence: Some(fence),
                };
                match rng.u8(0..4) {
                    0 => {}
                    1 => grant.release_ns = Some(deadline_ns + rng.u64(1..500 * MS)),
                    2 => grant.lost_ns = Some(rng.u64(granted_ns + 1..deadline_ns)),
                    _ => grant.release_ns = Some(rng.u64(granted_ns + 1..deadline_ns)),
                }
                now = grant.valid_until() + rng.u64(1..5 * MS);
                fence += rng.u64(1..10);
                grants.push(grant);
            }
        }
        grants
    }

    fn events_of(grants: &[Grant]) -> Vec<Event> {
        let mut events = Vec::new();
        for (number, grant) in grants.iter().enumerate() {
            let process = grant.process.clone();
            let mut event = |at_ns, kind| {
                let process = process.clone();
                events.push(Event { process, grant: number as u64, at_ns, kind });
            };
            event(
                grant.granted_ns,
                Kind::Granted {
                    task: grant.task,
                    invoked_ns: grant.invoked_ns,
                    deadline_ns: grant.granted_ns + 1,
                    fence: grant.fence,
                    key: grant.key.clone(),
                },
            );
            event(grant.granted_ns + 1, Kind::Renewed { deadline_ns: grant.deadline_ns });
            if let Some(at_ns) = grant.lost_ns {
                event(at_ns, Kind::Lost);
            }
            if let Some(at_ns) = grant.release_ns {
                event(at_ns, Kind::Release);
            }
        }
        events
    }

    /// By way of the text, so that it is tested too.
    fn check(rng: &mut Rng, grants: &[Grant]) -> History {
        let mut events = events_of(grants);
        rng.shuffle(&mut events);
        let reread = events.iter().map(|event| Event::parse(&event.to_string()).unwrap());
        let history = History::of(reread.collect());
        assert_eq!(history.grants().len(), grants.len());
        history
    }

    /// Two grants that follow each other on one key.
    fn neighbours(rng: &mut Rng, grants: &[Grant]) -> (usize, usize) {
        loop {
            let second = rng.usize(1..grants.len());
            if grants[second - 1].key == grants[second].key {
                return (second - 1, second);
            }
        }
    }

    #[test]
    fn a_thousand_good_histories_raise_no_alarm() {
        let mut naive = 0;
        for seed in 0..1000 {
            let mut rng = Rng::with_seed(seed);
            let grants = good_history(&mut rng);
            let history = check(&mut rng, &grants);
            history.assert_safe();
            naive += history.naive_overlaps().len();
        }
        assert!(naive > 1000, "the negative control works: {naive}");
    }

    #[test]
    fn a_thousand_double_grants_raise_a_thousand_alarms() {
        for seed in 0..1000 {
            let mut rng = Rng::with_seed(seed);
            let mut grants = good_history(&mut rng);
            let (first, second) = neighbours(&mut rng, &grants);
            let during = grants[first].granted_ns..grants[first].valid_until();
            grants[second].granted_ns = rng.u64(during);
            grants[second].invoked_ns = grants[second].granted_ns - 1;
            let overlaps = check(&mut rng, &grants).overlaps();
            assert!(!overlaps.is_empty(), "seed {seed}");
            assert!(overlaps.iter().all(|overlap| overlap.first.key == grants[first].key));
        }
    }

    #[test]
    fn a_thousand_repeated_fences_raise_a_thousand_alarms() {
        for seed in 0..1000 {
            let mut rng = Rng::with_seed(seed);
            let mut grants = good_history(&mut rng);
            let (first, second) = neighbours(&mut rng, &grants);
            grants[second].fence = grants[first].fence;
            let history = check(&mut rng, &grants);
            assert_eq!(history.fence_faults().len(), 1, "seed {seed}");
            assert!(history.overlaps().is_empty());
        }
    }

    #[test]
    fn a_thousand_regressed_fences_raise_a_thousand_alarms() {
        for seed in 0..1000 {
            let mut rng = Rng::with_seed(seed);
            let mut grants = good_history(&mut rng);
            let (first, second) = neighbours(&mut rng, &grants);
            // Requested after the other was granted; otherwise the order is free.
            grants[second].invoked_ns = grants[second].granted_ns - 1;
            grants[second].fence = grants[first].fence.map(|fence| fence - 1);
            let history = check(&mut rng, &grants);
            assert!(!history.fence_faults().is_empty(), "seed {seed}");
        }
    }

    #[test]
    fn the_fences_of_concurrent_acquires_may_come_in_any_order() {
        let mut rng = Rng::with_seed(1);
        let mut grants = good_history(&mut rng);
        grants.truncate(2);
        grants[1].invoked_ns = grants[0].granted_ns - 1;
        grants[1].fence = Some(5);
        grants[0].fence = Some(6);
        assert!(check(&mut rng, &grants).fence_faults().is_empty());
    }

    #[test]
    fn files_of_several_processes_are_merged_without_torn_lines() {
        let dir = tempfile::tempdir().unwrap();
        let valid = Duration::from_secs(10);
        for process in ["p1", "p2"] {
            let recorder = Recorder::create(dir.path(), process).unwrap();
            let grant = recorder.granted("order:1 2", 7, now_ns(), || valid, Some(3));
            recorder.renewed(grant, || 2 * valid);
            recorder.renewed(grant, || Duration::ZERO);
            recorder.release(grant);
        }
        let torn = dir.path().join("p2.history");
        let whole = fs::read_to_string(&torn).unwrap();
        fs::write(&torn, whole + "p2 1 12345 gran").unwrap();
        let history = History::read(dir.path()).unwrap();
        assert_eq!(history.grants().len(), 2);
        assert_eq!(history.grants()[0].key, "order:1 2");
        assert!(history.grants().iter().all(|grant| grant.release_ns.is_some()));
        assert!(history.overlaps().is_empty());
        assert_eq!(history.fence_faults().len(), 1);
    }

    /// The file of `p1` is as it was when it was read, before its release.
    #[test]
    fn a_grant_during_the_read_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let valid = || Duration::from_secs(10);
        let recorder = |process| Recorder::create(dir.path(), process).unwrap();
        recorder("p1").granted("order:1", 0, now_ns(), valid, None);
        let begun = now_ns();
        recorder("p2").granted("order:1", 0, now_ns(), valid, None);
        assert_eq!(History::read(dir.path()).unwrap().overlaps().len(), 1);
        let history = History::read_before(dir.path(), begun).unwrap();
        assert_eq!((history.grants().len(), history.overlaps().len()), (1, 0));
    }

    #[test]
    fn a_million_grants_are_checked_in_seconds() {
        let grant = |n: u64| Grant {
            key: format!("k{}", n % 4),
            process: "p".into(),
            task: 0,
            invoked_ns: n * 10 + 1,
            granted_ns: n * 10 + 2,
            deadline_ns: n * 10 + 30,
            lost_ns: None,
            release_ns: Some(n * 10 + 9),
            fence: Some(n),
        };
        let history = History { grants: (1..=1_000_000).map(grant).collect() };
        // Of a core: the wall time depends on what else the machine does.
        let spent = || {
            let spent = clock_gettime(ClockId::ThreadCPUTime);
            Duration::new(spent.tv_sec.cast_unsigned(), spent.tv_nsec as u32)
        };
        let start = spent();
        history.assert_safe();
        let took = spent() - start;
        assert!(took < Duration::from_secs(30), "{took:?}");
    }
}
