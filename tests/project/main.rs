//! The diagnostics of the attribute, the examples, the test bench, the structure of the runtime, and what must agree
//! between files.

mod consistency;
mod examples;
mod layers;
mod readme;
mod test_bench;
mod ui;
mod web_orders;
