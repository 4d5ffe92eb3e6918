//! The votes of a quorum as a model: what one node does, what one attempt knows, and every step that the world may take.

// Each variant is named after the rule or the event that it stands for.
#![allow(missing_docs)]

mod attempt;
mod checked;
mod claims;
mod node;
mod rules;
mod story;
mod world;

pub use checked::{Checked, check, counterexample};
pub use claims::Claim;
pub use rules::{
    Back, Faults, LateRenewal, Low, Registers, Release, Retake, Rules, States, Token, Ttl,
    Withdrawal,
};
