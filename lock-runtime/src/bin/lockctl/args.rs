//! The command line.

use std::io::IsTerminal;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use lock_runtime::{LockPool, PoolBuilder};

use crate::failure::Failure;
use crate::output::Format;

const EXIT_CODES: &str = "\
Exit codes: 0 done; 1 the store failed; 2 wrong usage, or refused; 3 the key is free, or its holder is another one;\n4 a check has led to a warning, or a holder is not known.

On a terminal the output is text, elsewhere JSON.";

/// Shows and manages the locks of a store.
#[derive(Debug, Parser)]
#[command(name = "lockctl", version, after_help = EXIT_CODES)]
pub(crate) struct CommandLine {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Print JSON, the default where the output is not a terminal
    #[arg(long, global = true)]
    json: bool,
    /// Print text, the default on a terminal
    #[arg(long, global = true, conflicts_with = "json")]
    text: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show the holder of a key and its wait queue
    Show {
        /// The key, without the prefix
        key: String,
    },
    /// List the locks of the store with their holders
    Ls(ListArgs),
    /// Show the table of `ls`, and read it again when the store reports a change, and at intervals
    Watch(WatchArgs),
    /// Take a lock away from its holder
    Release(ReleaseArgs),
    /// Check a store: settings and states that could lose locks, and what to do about each
    Doctor {
        /// The store, instead of `--url`
        #[arg(id = "store", value_name = "URL")]
        url: Option<String>,
    },
    /// Measure what locks cost on this store, from here
    Bench(BenchArgs),
    /// Print the completions for a shell
    Completions {
        /// Which shell
        shell: Shell,
    },
}

const REQUEST_TIMEOUT: &str = "2s";

/// The variables that are read. An error may quote them.
pub(crate) const VARIABLES: [&str; 3] = ["LOCK_URL", "LOCK_PREFIX", "LOCK_REQUEST_TIMEOUT"];

/// The store, and the prefix of its keys.
#[derive(Args, Clone, Debug)]
pub(crate) struct StoreArgs {
    /// The store, as for a pool; the variable keeps a password out of the list of processes
    #[arg(long, global = true, env = "LOCK_URL", hide_env_values = true)]
    url: Option<String>,
    /// The prefix of the keys, the same as the pool's
    #[arg(long, global = true, env = "LOCK_PREFIX")]
    prefix: Option<String>,
    /// How long the store may take for one answer, such as 500ms or 5s
    #[arg(long, global = true, env = "LOCK_REQUEST_TIMEOUT", default_value = REQUEST_TIMEOUT, value_parser = request_timeout)]
    request_timeout: Duration,
}

#[derive(Args, Debug)]
pub(crate) struct ListArgs {
    /// The keys, without the prefix: `*` stands for any characters, `?` for one
    pattern: Option<String>,
    /// The maximum number of locks
    #[arg(long, default_value_t = 100)]
    pub(crate) limit: usize,
}

#[derive(Args, Debug)]
pub(crate) struct WatchArgs {
    #[command(flatten)]
    pub(crate) list: ListArgs,
    /// The longest time between two readings
    #[arg(long, default_value = "500ms", value_parser = duration)]
    pub(crate) interval: Duration,
    /// End after this many readings
    #[arg(long)]
    pub(crate) count: Option<u64>,
}

#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    /// The store, instead of `--url`
    #[arg(id = "store", value_name = "URL")]
    pub(crate) url: Option<String>,
    /// How many tasks lock at the same time
    #[arg(long, default_value_t = 16, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub(crate) tasks: usize,
    /// How long each of the three parts takes
    #[arg(long, default_value = "2s", value_parser = duration)]
    pub(crate) time: Duration,
}

#[derive(Args, Debug)]
pub(crate) struct ReleaseArgs {
    /// The key, without the prefix
    pub(crate) key: String,
    /// Confirm taking a lock from an owner that has not released it
    #[arg(long)]
    pub(crate) force: bool,
    /// Do not ask for confirmation
    #[arg(long)]
    pub(crate) yes: bool,
    /// Only if the holder has this tag, as `show` prints it
    #[arg(long, value_name = "TAG")]
    pub(crate) owner: Option<String>,
    /// The name of the operator for the event, instead of the user of this login
    #[arg(long, value_name = "NAME", default_value_t = user(), hide_default_value = true)]
    pub(crate) operator: String,
}

/// The user that has logged in, from the variables of the login.
fn user() -> String {
    let names = ["SUDO_USER", "USER", "LOGNAME", "USERNAME"];
    let named = |name| std::env::var(name).ok().filter(|user| !user.is_empty());
    names.into_iter().find_map(named).unwrap_or_else(|| "an unknown user".to_owned())
}

impl ListArgs {
    /// All keys, unless a pattern is given.
    pub(crate) fn pattern(&self) -> &str {
        self.pattern.as_deref().unwrap_or("*")
    }
}

impl CommandLine {
    pub(crate) fn format(&self) -> Format {
        let is_text = self.text || (!self.json && std::io::stdout().is_terminal());
        if is_text { Format::Text } else { Format::Json }
    }
}

impl StoreArgs {
    /// The same arguments with the URL of a command, if it has one.
    pub(crate) fn at(&self, url: Option<&str>) -> Self {
        let url = url.map(str::to_owned).or_else(|| self.url.clone());
        Self { url, ..self.clone() }
    }

    pub(crate) async fn connect(&self) -> Result<LockPool, Failure> {
        Ok(self.builder()?.connect().await?)
    }

    pub(crate) fn builder(&self) -> Result<PoolBuilder, Failure> {
        let url = self.url.as_deref().filter(|url| !url.is_empty());
        let url = url.ok_or_else(|| {
            Failure::Refused(
                "no store is named; pass `--url redis://host:6379`, or set LOCK_URL".to_owned(),
            )
        })?;
        Ok(LockPool::builder(url)
            .key_prefix(self.prefix.as_deref().unwrap_or_default())
            .request_timeout(self.request_timeout))
    }

    pub(crate) const fn request_timeout(&self) -> Duration {
        self.request_timeout
    }
}

/// An empty text means a variable that is not set, as for a pool.
fn request_timeout(text: &str) -> Result<Duration, String> {
    duration(if text.is_empty() { REQUEST_TIMEOUT } else { text })
}

fn duration(text: &str) -> Result<Duration, String> {
    let at = text.find(|it: char| !it.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let unit = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => {
            return Err("write a whole number of `ms`, `s`, `m` or `h`, such as `500ms`".to_owned());
        }
    };
    let number: u64 =
        number.parse().map_err(|_| "the number is too large or missing".to_owned())?;
    number.checked_mul(unit).map(Duration::from_millis).ok_or_else(|| "it is too long".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn durations_have_a_unit() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(duration("1h"), Ok(Duration::from_secs(3_600)));
        assert_eq!(request_timeout(""), Ok(Duration::from_secs(2)));
        for wrong in ["", "5", "s", "5d", "-1s", "99999999999999999999s", "99999999999999999m"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }
}
