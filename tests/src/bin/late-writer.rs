//! `late-writer <url> <key> <ttl in ms> <lock delay in ms>` holds this lock, and prints `holding`. After a stop of the process
//! that is longer than half of the ttl it prints `wrote` at once. After a line of input it releases the lock.

#![allow(clippy::disallowed_methods)]

use std::error::Error;
use std::time::{Duration, Instant};

use lock_runtime::LockPool;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (url, key) = (args.next().ok_or("no url")?, args.next().ok_or("no key")?);
    let mut span = || -> Result<Duration, Box<dyn Error>> {
        Ok(Duration::from_millis(args.next().ok_or("no time")?.parse()?))
    };
    let (ttl, delay) = (span()?, span()?);
    let pool = LockPool::builder(url).ttl(ttl).connect().await?;
    let guard = pool.lock(key).lock_delay(delay).acquire().await?;
    println!("holding");
    let mut last = Instant::now();
    while last.elapsed() <= ttl / 2 {
        last = Instant::now();
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("wrote");
    std::io::stdin().read_line(&mut String::new())?;
    println!("{:?}", guard.release().await.map_err(|error| error.kind()));
    pool.shutdown(Duration::from_secs(5)).await;
    Ok(())
}
