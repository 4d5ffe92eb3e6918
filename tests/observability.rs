//! What is told in tracing events, and what never is.
