//! Every store passes the published suite.
