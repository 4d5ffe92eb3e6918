//! The model itself: what one node does, what one attempt knows, and every step that the world may take.

mod attempt;
mod checked;
mod claims;
mod node;
mod rules;
mod story;
mod world;

pub(crate) use checked::{check, counterexample};
pub(crate) use claims::Claim;
pub(crate) use rules::{
    Back, Faults, LateRenewal, Low, Registers, Release, Retake, Rules, States, Token, Ttl,
    Withdrawal,
};
