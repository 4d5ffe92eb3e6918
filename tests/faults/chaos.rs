//! Several processes on a few hot keys, under faults.

use lock_tests::RedisServer;
use lock_tests::crowd::Crowd;

/// Freezes of processes, some of them longer than the ttl of 300 ms, and cuts of all connections.
/// `LOCK_CHAOS_SECONDS` and `LOCK_CHAOS_SEED` set the length and the choices. The server keeps its data:
/// one that loses them grants the same lock twice, as the README says.
#[test]
fn frozen_processes_and_cut_connections_never_make_two_valid_leases() {
    let server = RedisServer::start();
    let crowd = Crowd::start(env!("CARGO_BIN_EXE_crowd"), &server.url());
    crowd.survives_faults(6, || server.kill_clients(), || server.kill_clients());
}
