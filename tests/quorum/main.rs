//! Locks that a majority of independent servers grants (`redlock://`).

mod ballot_model;
mod cluster_nodes;
mod load;
mod quorum;
mod redlock;
