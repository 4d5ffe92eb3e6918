//! Locks that a majority of independent servers grants (`redlock://`).

mod ballot_model;
mod cluster_nodes;
mod quorum;
mod redlock;
