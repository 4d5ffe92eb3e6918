//! What one connection has sent and not received, without I/O.
//!
//! Pings are no proof that a session lives: a follower answers them alone, while the leader decides when the session expires. A
//! leader that was frozen takes a request of the session when it continues, and then expires the session. So a sign of life is a
//! `sync`, which the leader answers, and a connection without that answer ends before the session can.

use std::time::Duration;

use tokio::sync::oneshot;

use crate::backend::zookeeper::exchange::{Exchange, GroupReply};
use crate::backend::zookeeper::protocol::operation::NodeOperation;
use crate::base::clock::Instant;

/// The longest time between two signs of life.
pub(crate) const LONGEST_SIGN_INTERVAL: Duration = Duration::from_millis(500);

/// By how much a sign of life may be late, because the process was not scheduled or the network took no bytes.
const LATENESS: Duration = Duration::from_millis(500);

/// How long a connection may go without an answer, in a pool with this request timeout.
pub(crate) fn longest_silence(request_timeout: Duration) -> Duration {
    const LONGEST: Duration = Duration::from_secs(4);
    request_timeout.min(LONGEST)
}

/// How often a connection gives signs of life, and for how long it may be without an answer.
#[derive(Clone, Copy)]
pub(crate) struct SignsOfLife {
    interval: Duration,
    silence_limit: Duration,
}

impl SignsOfLife {
    /// The pace of a session with this timeout.
    pub(crate) fn new(timeout: Duration, request_timeout: Duration) -> Self {
        Self {
            interval: (timeout / 12).min(LONGEST_SIGN_INTERVAL),
            silence_limit: longest_silence(request_timeout).min(timeout / 3),
        }
    }
}

/// What one connection has sent and not received.
pub(crate) struct OpenExchange {
    pub(crate) exchange: Exchange,
    pub(crate) outgoing: OutgoingFrames,
    signs: SignsOfLife,
    /// When the last bytes arrived.
    pub(crate) heard: Instant,
    /// When the last request to the leader was appended.
    asked_leader: Instant,
    /// The latest time to end, if the pool is closed.
    pub(crate) closing: Option<Instant>,
}

impl OpenExchange {
    pub(crate) fn new(now: Instant, signs: SignsOfLife) -> Self {
        Self {
            exchange: Exchange::default(),
            outgoing: OutgoingFrames { bytes: Vec::new(), first: 0, taken: now },
            signs,
            heard: now,
            asked_leader: now,
            closing: None,
        }
    }

    pub(crate) fn send(&mut self, operations: &[NodeOperation], reply: GroupReply, now: Instant) {
        if operations.iter().any(NodeOperation::needs_leader) {
            self.asked_leader = now;
        }
        self.exchange.send(operations, reply, now, self.outgoing.appended());
    }

    /// When there is something to do without an event.
    pub(crate) fn due(&self) -> Instant {
        let sign = self.asked_leader + self.signs.interval;
        let silence = self.waits_since().map_or(sign, |since| since + self.signs.silence_limit);
        self.closing.unwrap_or(sign).min(silence)
    }

    /// Sends a sign of life if the leader was not asked for a while, whether or not the last request is answered.
    pub(crate) fn give_sign_if_due(&mut self, now: Instant) {
        if self.closing.is_none() && now.since(self.asked_leader) >= self.signs.interval {
            let sync = NodeOperation::Sync { path: "/".to_owned() };
            self.send(&[sync], oneshot::channel().0, now);
        }
    }

    /// Since when an answer is missing.
    fn waits_since(&self) -> Option<Instant> {
        self.exchange.oldest().map(|oldest| oldest.max(self.heard))
    }

    pub(crate) fn is_silent(&self, now: Instant) -> bool {
        self.waits_since().is_some_and(|since| now.since(since) >= self.signs.silence_limit)
    }

    /// Whether the last sign of life was too long ago, because the process was stopped or the network took nothing. The session
    /// may then end right after an answer: only a new connection proves that it lives.
    pub(crate) fn is_late(&self, now: Instant) -> bool {
        self.closing.is_none() && now.since(self.outgoing.taken) > self.signs.interval + LATENESS
    }

    pub(crate) fn is_over(&self, now: Instant) -> bool {
        let is_done = self.exchange.is_empty() && self.outgoing.bytes.is_empty();
        self.closing.is_some_and(|until| is_done || now >= until)
    }
}

/// Frames that the network has not taken yet.
pub(crate) struct OutgoingFrames {
    bytes: Vec<u8>,
    /// How many bytes the rest of the first frame has, once a part of it was taken.
    first: usize,
    /// When the end of a frame was taken.
    taken: Instant,
}

impl OutgoingFrames {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Where whole frames are appended.
    fn appended(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// The network has taken the first `count` bytes.
    pub(crate) fn on_taken(&mut self, count: usize, now: Instant) {
        let mut end = self.first;
        while end <= count {
            if end > 0 {
                self.taken = now;
            }
            let Some(length) = self.bytes.get(end..).and_then(<[u8]>::first_chunk::<4>) else {
                break;
            };
            end += 4 + u32::from_be_bytes(*length) as usize;
        }
        self.bytes.drain(..count);
        self.first = end.saturating_sub(count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIGNS: SignsOfLife = SignsOfLife {
        interval: Duration::from_millis(500),
        silence_limit: Duration::from_millis(1_000),
    };

    fn at(millis: u64) -> Instant {
        Instant::from_nanos(millis * 1_000_000)
    }

    fn take_all(open: &mut OpenExchange, now: Instant) {
        open.outgoing.on_taken(open.outgoing.bytes().len(), now);
    }

    #[test]
    fn signs_of_life_go_on_without_answers() {
        let mut open = OpenExchange::new(at(0), SIGNS);
        for millis in [500, 1_000] {
            assert_eq!(open.due(), at(millis));
            open.give_sign_if_due(at(millis));
            take_all(&mut open, at(millis));
        }
        assert!(!open.is_silent(at(1_499)) && open.is_silent(at(1_500)));
        open.heard = at(1_499);
        assert!(!open.is_silent(at(1_500)) && open.is_silent(at(2_499)));
        open.closing = Some(at(9_000));
        open.give_sign_if_due(at(1_600));
        assert!(open.outgoing.bytes().is_empty(), "the session ends anyway");
    }

    #[test]
    fn only_a_request_to_the_leader_is_a_sign_of_life() {
        let mut open = OpenExchange::new(at(0), SIGNS);
        let path = "/a".to_owned();
        open.send(&[NodeOperation::List { path: path.clone() }], oneshot::channel().0, at(400));
        assert_eq!(open.due(), at(500), "a follower answers it alone");
        open.send(&[NodeOperation::Delete { path }], oneshot::channel().0, at(450));
        assert_eq!(open.due(), at(950));
    }

    #[test]
    fn a_sign_of_life_counts_when_the_network_has_taken_all_of_it() {
        let mut open = OpenExchange::new(at(0), SIGNS);
        let path = "/a".repeat(100);
        let delete = NodeOperation::Delete { path };
        open.send(&[delete.clone(), delete], oneshot::channel().0, at(900));
        assert!(!open.is_late(at(1_000)) && open.is_late(at(1_001)));
        let frame = open.outgoing.bytes().len() / 2;
        open.outgoing.on_taken(frame - 1, at(1_100));
        assert!(open.is_late(at(1_100)), "a part of a frame");
        open.outgoing.on_taken(2, at(1_200));
        assert!(!open.is_late(at(2_200)) && open.is_late(at(2_201)), "the first frame");
        open.outgoing.on_taken(frame - 2, at(2_300));
        assert!(open.is_late(at(2_300)), "a part of the second frame");
        open.outgoing.on_taken(1, at(2_400));
        assert!(!open.is_late(at(3_400)) && open.outgoing.bytes().is_empty());
        // The next frame starts over.
        open.give_sign_if_due(at(3_400));
        open.outgoing.on_taken(4, at(3_500));
        assert!(open.is_late(at(3_500)));
        take_all(&mut open, at(3_600));
        assert!(!open.is_late(at(4_600)) && open.is_late(at(4_601)));
        open.closing = Some(at(9_000));
        assert!(!open.is_late(at(4_601)), "it is ending anyway");
    }
}
