//! What majorities have granted to this pool.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::backend::redis::quorum::fence_block::Block;
use crate::backend::redis::quorum::message::Token;
use crate::backend::{LeaseRef, Owner};
use crate::base::clock::Instant;

/// By owner, from the grant until the release is answered.
#[derive(Debug, Default)]
pub(crate) struct Holdings(Mutex<Book>);

#[derive(Debug, Default)]
struct Book {
    by_owner: HashMap<Owner, Holding>,
    /// Those that nobody will ask for again are swept when the book has grown to this.
    sweep_at: usize,
}

/// One grant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Holding {
    pub(crate) token: Token,
    pub(crate) ttl: Duration,
    pub(crate) block: Option<Block>,
    /// Since a release was sent: when the nodes have forgotten it by themselves.
    pub(crate) leaves_until: Option<Instant>,
}

impl Holdings {
    pub(crate) fn get(&self, owner: &Owner) -> Option<Holding> {
        self.book().by_owner.get(owner).copied()
    }

    /// What is known of `lease`: if it is not in the book, no more than its owner.
    pub(crate) fn of(&self, lease: &LeaseRef) -> Holding {
        let (token, ttl) = (Token::of_any_attempt(lease.owner), lease.ttl);
        let unknown = Holding { token, ttl, block: None, leaves_until: None };
        self.get(&lease.owner).unwrap_or(unknown)
    }

    pub(crate) fn note(&self, owner: Owner, holding: Holding, now: Instant) {
        let mut book = self.book();
        if book.by_owner.len() >= book.sweep_at {
            book.by_owner.retain(|_, known| known.leaves_until.is_none_or(|until| until > now));
            book.sweep_at = (2 * book.by_owner.len()).max(1024);
        }
        book.by_owner.insert(owner, holding);
    }

    pub(crate) fn forget(&self, owner: &Owner) {
        self.book().by_owner.remove(owner);
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
