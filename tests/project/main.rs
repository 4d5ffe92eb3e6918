//! The diagnostics of the attribute, and what a language server shows of it. The examples, the test bench, the
//! structure of the runtime, and what must agree between files.

mod compiled_units;
mod consistency;
mod examples;
mod language_server;
mod layers;
mod readme;
mod test_bench;
mod ui;
mod web_orders;
