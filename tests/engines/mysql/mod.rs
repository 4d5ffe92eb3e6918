//! `mysql://`

mod conformance;
