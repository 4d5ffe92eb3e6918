//! `contender <url> <key> [<ttl in ms> <request timeout in ms>]` tries to acquire a lock continuously and prints the
//! outcome of each try: `busy`, or `in` and the time, or the error.

use std::error::Error;
use std::time::Duration;

use lock_runtime::LockPool;
use lock_tests::history::now_ns;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (url, key) = (args.next().ok_or("no url")?, args.next().ok_or("no key")?);
    let mut pool = LockPool::builder(&url).ttl(Duration::from_secs(1));
    if let (Some(ttl), Some(timeout)) = (args.next(), args.next()) {
        let timeout = Duration::from_millis(timeout.parse()?);
        pool = pool.ttl(Duration::from_millis(ttl.parse()?));
        pool = pool.request_timeout(timeout).node_timeout(timeout);
    }
    let pool = pool.connect().await?;
    loop {
        match pool.lock(key.as_str()).try_acquire().await {
            Ok(None) => println!("busy"),
            Ok(Some(guard)) => {
                println!("in {}", now_ns());
                guard.release().await?;
            }
            Err(error) => println!("{error}"),
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
