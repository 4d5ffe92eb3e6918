//! `lockctl`: shows and manages the locks of a store, from any machine that reaches it.
//!
//! A client of the public API: it imports nothing of the library's layers, and includes one file of them. `args` is the
//! command line, `failure` its exit codes, `output` text or JSON, and `secret` keeps passwords out of both. `event_lines`
//! prints events. Each command has a file.

mod args;
mod bench;
mod doctor;
mod event_lines;
mod failure;
mod latency;
mod ls;
mod output;
mod release;
mod secret;
mod show;
#[path = "../../base/unprintable.rs"]
mod unprintable;
mod unused_key;
mod watch;

use std::process::ExitCode;

use anstream::adapter::strip_str;
use clap::{CommandFactory, Parser};

use crate::args::{Command, CommandLine};
use crate::failure::Failure;
use crate::output::{End, Output, error_text, printable};
use crate::unprintable::is_unprintable;

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

/// Help goes to standard output, and errors without the passwords of arguments and variables go to standard error.
fn misused(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        error.exit();
    }
    let variables = args::VARIABLES.into_iter().filter_map(std::env::var_os);
    let arguments = std::env::args_os().chain(variables);
    let arguments = arguments.map(|it| it.to_string_lossy().into_owned());
    let (mut text, mut is_printable) = (error.render().ansi().to_string(), true);
    for argument in arguments {
        // Before any character is escaped: the text still has the argument unchanged.
        text = secret::hidden(&text, &argument);
        is_printable &= !argument.contains(is_unprintable);
    }
    if is_printable {
        error_text(&text);
    } else {
        let text = strip_str(&text).to_string();
        text.lines().for_each(|line| error_text(&format!("{}\n", printable(line))));
    }
    failure::REFUSED.into()
}

async fn run(line: &CommandLine, output: &Output) -> Result<End, Failure> {
    match &line.command {
        Command::Show { key } => show::run(&line.store.connect().await?, key, output).await,
        Command::Ls(list) => ls::run(&line.store.connect().await?, list, output).await,
        Command::Release(release) => {
            release::run(&line.store.connect().await?, release, output).await
        }
        Command::Watch(watch) => watch::run(&line.store.connect().await?, watch, output).await,
        Command::Bench(bench) => {
            bench::run(&line.store.at(bench.url.as_deref()), bench, output).await
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
