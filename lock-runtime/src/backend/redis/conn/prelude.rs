//! The command before each command of a batch.

use crate::backend::redis::net::command::{WriteCommand, WriteNthCommand};

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
    /// Passes `count` commands to `add`, each after this prelude. `command` writes one.
    pub(super) fn before_each(
        self,
        count: usize,
        command: &WriteNthCommand<'_>,
        mut add: impl FnMut(&WriteCommand<'_>),
    ) {
        for at in 0..count {
            match self {
                Self::None => {}
                Self::Caching => add(&|out| {
                    out.arg("CLIENT").arg("CACHING").arg("YES");
                }),
                Self::Asking => add(&|out| {
                    out.arg("ASKING");
                }),
            }
            add(&|out| command(at, out));
        }
    }

    /// The answers to the commands, without those to the preludes.
    pub(super) fn skip_own<T>(self, answers: Vec<T>) -> impl Iterator<Item = T> {
        let every = self.commands_for_one();
        answers.into_iter().skip(every - 1).step_by(every)
    }

    pub(super) fn commands_for_one(self) -> usize {
        1 + usize::from(self != Self::None)
    }
}
