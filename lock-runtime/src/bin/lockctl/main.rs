//! `lockctl`: shows and tends the locks of a store, from any machine that reaches it.
//!
//! A client of the public API: it imports nothing of the library's layers. `args` is the command line, `failure` its
//! exit codes, `output` text or JSON, and `secret` keeps passwords out of both. `event_lines` prints events. Each
//! command has a file.

mod args;
mod bench;
mod doctor;
mod event_lines;
mod failure;
mod latency;
mod list;
mod output;
mod release;
mod secret;
mod show;
mod watch;

use std::borrow::Cow;
use std::process::ExitCode;

use anstream::eprint;
use clap::{CommandFactory, Parser};

use crate::args::{Command, CommandLine};
use crate::failure::Failure;
use crate::output::{End, Output, printable};

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let line = match CommandLine::try_parse() {
        Ok(line) => line,
        Err(error) => return misused(&error),
    };
    let output = Output::new(line.format());
    match run(&line, &output).await {
        Ok(end) => end.exit_code(),
        Err(failure) => {
            failure.print();
            failure.exit_code()
        }
    }
}

/// Help goes to the standard output, errors without the passwords of the arguments to the standard error.
fn misused(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        error.exit();
    }
    let arguments: Vec<_> =
        std::env::args_os().map(|it| it.to_string_lossy().into_owned()).collect();
    let rendered = error.render();
    // The text quotes arguments, which a terminal could obey.
    let text = if arguments.iter().all(|it| matches!(printable(it), Cow::Borrowed(_))) {
        rendered.ansi().to_string()
    } else {
        rendered.to_string().split('\n').map(printable).collect::<Vec<_>>().join("\n")
    };
    eprint!("{}", arguments.iter().fold(text, |text, it| secret::hidden(&text, it)));
    failure::REFUSED.into()
}

async fn run(line: &CommandLine, output: &Output) -> Result<End, Failure> {
    match &line.command {
        Command::Show { key } => show::run(&line.store.connect().await?, key, output).await,
        Command::Ls(list) => list::run(&line.store.connect().await?, list, output).await,
        Command::Release(release) => {
            release::run(&line.store.connect().await?, release, output).await
        }
        Command::Watch(watch) => watch::run(&line.store.connect().await?, watch, output).await,
        Command::Bench(bench) => {
            let pool = line.store.at(bench.url.as_deref()).connect().await?;
            bench::run(&pool, bench, output).await
        }
        Command::Doctor { url } => doctor::run(&line.store.at(url.as_deref()), output).await,
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut CommandLine::command(), "lockctl", &mut script);
            output.raw(&script)?;
            Ok(End::Done)
        }
    }
}
