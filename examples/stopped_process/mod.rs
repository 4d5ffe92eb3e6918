//! A second process of an example, which is stopped after its first line, as in a pause of its machine.

use std::env;
use std::error::Error;
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

/// Dropping it ends the process.
pub(crate) struct StoppedProcess {
    child: Child,
    output: Lines<BufReader<ChildStdout>>,
}

impl StoppedProcess {
    /// Starts this example as the holder of the lock, waits for its first line, and stops it.
    pub(crate) fn start(url: &str) -> Result<Self, Box<dyn Error>> {
        let mut child = Command::new(env::current_exe()?)
            .args([url, "holder"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take().ok_or("the output of the child")?;
        let mut first = Self { child, output: BufReader::new(output).lines() };
        first.show_line()?;
        first.signal("STOP")?;
        Ok(first)
    }

    /// Lets it continue after its first line, and waits for its end. A failure of the process is an error.
    pub(crate) fn go_on(mut self) -> Result<(), Box<dyn Error>> {
        self.child.stdin.take().ok_or("the input of the child")?.write_all(b"go on\n")?;
        self.signal("CONT")?;
        self.show_line()?;
        let status = self.child.wait()?;
        if status.success() { Ok(()) } else { Err(format!("the first process: {status}").into()) }
    }

    fn show_line(&mut self) -> Result<(), Box<dyn Error>> {
        println!("first:  {}", self.output.next().ok_or("the child ended")??);
        Ok(())
    }

    fn signal(&self, name: &str) -> Result<(), Box<dyn Error>> {
        let sent = Command::new("kill")
            .args([&format!("-{name}"), &self.child.id().to_string()])
            .status()?;
        if sent.success() { Ok(()) } else { Err(format!("kill -{name} failed").into()) }
    }
}

impl Drop for StoppedProcess {
    fn drop(&mut self) {
        // An error means that it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
