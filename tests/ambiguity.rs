//! Requests and replies that get lost, late or cut off.
