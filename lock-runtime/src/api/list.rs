//! Lists of the locks in a store.

use crate::api::pool::LockPool;
use crate::backend::KeyPattern;
use crate::base::error::{ErrorKind, LockError};
use crate::base::key::Key;
use crate::base::key_pattern::KeyList;

/// How many answers of the usual time a search may take.
const MOST_ANSWERS: u32 = 30;

impl LockPool {
    /// The keys of locks in the store that match `pattern`, sorted, at most `limit`. They include the locks of other
    /// processes. The pattern applies after the pool's prefix: `*` stands for any characters, `?` for one.
    ///
    /// It is a search, for operators. Redis looks at all of its keys, a thousand per command, and at a million at most. It
    /// blocks the store for none of them. Locks that are taken or released meanwhile may or may not be listed. Locks of
    /// other libraries are left out where the store cannot tell them from other data.
    ///
    /// ```
    /// # use lock_runtime::LockPool;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lock_runtime::LockError> {
    /// let pool = LockPool::connect("memory://").await?;
    /// let guards = pool.lock_all(["order:1", "order:2", "stock:1"]).acquire().await?;
    /// let found = pool.list("order:*", 100).await?;
    /// assert_eq!(found.keys.len(), 2);
    /// assert!(found.is_complete);
    /// # drop(guards);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Cancel safe.
    ///
    /// # Errors
    /// [`ErrorKind::Backend`] if the store does not answer, or does not permit the search to the login;
    /// [`ErrorKind::Config`] if a custom store does not implement [`list`](crate::backend::Backend::list).
    pub async fn list(&self, pattern: &str, limit: usize) -> Result<KeyList, LockError> {
        let core = self.core().clone();
        let pattern = KeyPattern::new(&*core.config.key_prefix, pattern);
        let limit_of_time = core.store_call_timeout().saturating_mul(MOST_ANSWERS);
        let searching = async move {
            let list = core.backend().list(&pattern, limit).await?;
            Ok(list.map(|list| without_prefix(&list, &pattern)))
        };
        let answer = self.core().ask(limit_of_time, searching).await;
        let list = answer.and_then(|list| list.ok_or_else(not_listed));
        list.map_err(|error| error.in_pool(self.core().name()))
    }
}

/// The keys as the pool names them.
fn without_prefix(list: &KeyList, pattern: &KeyPattern) -> KeyList {
    let keys = list.keys.iter().filter_map(|key| pattern.key_of(key.as_str()).map(Key::from));
    KeyList { keys: keys.collect(), is_complete: list.is_complete }
}

#[cold]
fn not_listed() -> LockError {
    LockError::new(ErrorKind::Config, "this store does not list its locks")
        .remedy("implement `Backend::list` for it; `snapshot()` shows the locks of this process")
}
