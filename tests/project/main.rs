//! The attribute's diagnostics, the examples, the test bench, and what has to agree between files.

mod axum_orders;
mod consistency;
mod examples;
mod readme;
mod test_bench;
mod ui;
