//! Tasks that answer parts of one call.

use tokio::task::JoinSet;

/// Waits for all tasks. Each returns answers with their positions in the call, which has `absent` in all other positions.
///
/// # Panics
///
/// If a task has panicked, with the same payload.
pub(crate) async fn in_positions<T: 'static>(
    mut tasks: JoinSet<Vec<(usize, T)>>,
    mut absent: Vec<T>,
) -> Vec<T> {
    while let Some(ended) = tasks.join_next().await {
        match ended {
            Ok(answers) => {
                for (at, answer) in answers {
                    if let Some(slot) = absent.get_mut(at) {
                        *slot = answer;
                    }
                }
            }
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => {}
        }
    }
    absent
}
