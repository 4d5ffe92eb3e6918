//! The command before each command of a batch.

use redis::{Cmd, Pipeline};

/// The command before each command of a batch. `CLIENT CACHING YES` and `ASKING` cancel each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Prelude {
    None,
    /// `CLIENT CACHING YES`: the server pushes changes of the keys that the command reads.
    Caching,
    /// `ASKING`: the server to which the slot is being moved serves the command.
    Asking,
}

impl Prelude {
    /// `commands`, each after this prelude.
    pub(super) fn before_each(self, commands: impl ExactSizeIterator<Item = Cmd>) -> Pipeline {
        let mut all = Pipeline::with_capacity(commands.len() * self.commands_for_one());
        for command in commands {
            match self {
                Self::None => {}
                Self::Caching => {
                    let mut caching = redis::cmd("CLIENT");
                    caching.arg("CACHING").arg("YES");
                    all.add_command(caching);
                }
                Self::Asking => {
                    all.add_command(redis::cmd("ASKING"));
                }
            }
            all.add_command(command);
        }
        all
    }

    /// The answers to the commands, without those to the preludes.
    pub(super) fn skip_own<T>(self, answers: Vec<T>) -> impl Iterator<Item = T> {
        let every = self.commands_for_one();
        answers.into_iter().skip(every - 1).step_by(every)
    }

    fn commands_for_one(self) -> usize {
        1 + usize::from(self != Self::None)
    }
}
