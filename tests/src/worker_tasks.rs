//! Tasks of a worker process that go on until its standard input ends.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::task::JoinError;

/// Whether standard input has ended.
#[derive(Clone, Debug, Default)]
pub struct InputEnd(Arc<AtomicBool>);

impl InputEnd {
    /// Whether it has.
    #[must_use]
    pub fn is_reached(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Starts `count` tasks, prints `working`, and returns what the tasks return, in their order. Each task ends by itself when
/// standard input has ended.
///
/// # Errors
///
/// When one of the tasks has panicked.
pub async fn until_input_ends<T: Send + 'static, F: Future<Output = T> + Send + 'static>(
    count: u64,
    mut task: impl FnMut(u64, InputEnd) -> F,
) -> Result<Vec<T>, JoinError> {
    let end = InputEnd::default();
    let tasks: Vec<_> = (0..count).map(|n| tokio::spawn(task(n, end.clone()))).collect();
    println!("working");
    // A task that fails ends the process without waiting for this thread.
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        end.0.store(true, Ordering::SeqCst);
    });
    let mut returned = Vec::new();
    for task in tasks {
        returned.push(task.await?);
    }
    Ok(returned)
}
