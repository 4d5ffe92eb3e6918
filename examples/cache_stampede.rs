//! A page of a cache expires while a hundred requests want it. Without a lock each of them rebuilds it. With the lock one
//! request rebuilds it. The others get the old page immediately, or wait for the first page if there is none. An old page is
//! also served while the store of the locks is down.
//!
//! ```text
//! cargo run --example cache_stampede [-- redis://127.0.0.1:6379]     # the locks in Redis, the cache in this process
//! ```

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lock_runtime::{LockError, distributed_lock};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

const REQUESTS: usize = 100;

#[derive(Clone)]
struct Page {
    text: String,
    expired: bool,
}

/// In place of a cache that several processes share, such as keys `page:<id>` in Redis.
#[derive(Clone)]
struct Cache {
    pages: Arc<Mutex<HashMap<u64, Page>>>,
    /// How often a page was built.
    builds: Arc<AtomicUsize>,
    /// Requests without a lock pass when all of them have looked.
    looked: Arc<Barrier>,
}

impl Cache {
    fn new() -> Self {
        Self {
            pages: Arc::default(),
            builds: Arc::default(),
            looked: Arc::new(Barrier::new(REQUESTS)),
        }
    }

    async fn unlocked(self, id: u64) -> Result<String, LockError> {
        let found = self.find(id);
        self.looked.wait().await;
        match found {
            Some(page) if !page.expired => Ok(page.text),
            _ => Ok(self.build(id).await),
        }
    }

    async fn locked(self, id: u64) -> Result<String, LockError> {
        match self.find(id) {
            Some(page) if !page.expired => Ok(page.text),
            Some(old) => match self.rebuild(id).await {
                Ok(new) => Ok(new.unwrap_or(old.text)),
                Err(error) if !error.body_started() => {
                    eprintln!("page {id} is not rebuilt: {error}");
                    Ok(old.text)
                }
                Err(error) => Err(error),
            },
            None => self.build_first(id).await,
        }
    }

    /// `None` while another request rebuilds the page.
    #[distributed_lock(key = "lock:page:<id>", ttl = "10s", wait = "0s", on_conflict = "skip")]
    async fn rebuild(&self, id: u64) -> Result<Option<String>, LockError> {
        Ok(Some(self.built(id).await))
    }

    #[distributed_lock(key = "lock:page:<id>", ttl = "10s", wait = "10s")]
    async fn build_first(&self, id: u64) -> Result<String, LockError> {
        Ok(self.built(id).await)
    }

    /// Another request may have built the page before this one got the lock.
    async fn built(&self, id: u64) -> String {
        match self.find(id) {
            Some(page) if !page.expired => page.text,
            _ => self.build(id).await,
        }
    }

    async fn build(&self, id: u64) -> String {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let text = format!("page {id}, build {}", self.builds.fetch_add(1, Ordering::Relaxed));
        let page = Page { text: text.clone(), expired: false };
        self.pages.lock().unwrap().insert(id, page);
        text
    }

    fn find(&self, id: u64) -> Option<Page> {
        self.pages.lock().unwrap().get(&id).cloned()
    }

    fn expire(&self, id: u64) {
        if let Some(page) = self.pages.lock().unwrap().get_mut(&id) {
            page.expired = true;
        }
    }

    /// How often the page is built for a hundred concurrent requests, and how many of them get another text than `old`.
    async fn storm<F>(
        &self,
        request: fn(Self, u64) -> F,
        old: &str,
    ) -> Result<(usize, usize), LockError>
    where
        F: Future<Output = Result<String, LockError>> + Send + 'static,
    {
        let before = self.builds.load(Ordering::Relaxed);
        let mut requests = JoinSet::new();
        for _ in 0..REQUESTS {
            requests.spawn(request(self.clone(), 7));
        }
        let mut new = 0;
        for text in requests.join_all().await {
            new += usize::from(text? != old);
        }
        Ok((self.builds.load(Ordering::Relaxed) - before, new))
    }
}

#[tokio::main]
async fn main() -> Result<(), LockError> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory://".to_owned());
    lock_runtime::init(&url).await?;
    let outcome = three_storms().await;
    lock_runtime::shutdown(Duration::from_secs(1)).await;
    outcome
}

async fn three_storms() -> Result<(), LockError> {
    let (builds, _) = Cache::new().storm(Cache::unlocked, "").await?;
    println!("without a lock  {builds} builds for {REQUESTS} requests");

    let cache = Cache::new();
    let (builds, served) = cache.storm(Cache::locked, "").await?;
    println!("an empty cache  {builds} build, {served} requests waited for it");
    assert_eq!((builds, served), (1, REQUESTS));

    cache.expire(7);
    let old = cache.find(7).map(|page| page.text).unwrap_or_default();
    let (builds, new) = cache.storm(Cache::locked, &old).await?;
    println!(
        "an expired page {builds} build, {} requests got the old page immediately",
        REQUESTS - new
    );
    assert_eq!(builds, 1);
    Ok(())
}
