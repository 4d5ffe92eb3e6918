//! Processes that contend for a few locks while they are frozen, cut off, or without a server.

use lock_tests::FaultProxy;
use lock_tests::crowd::Crowd;

mod etcd {
    #[test]
    fn faults_never_make_two_valid_leases() {
        let server = lock_tests::EtcdServer::start();
        let url = |port| lock_tests::etcd::url_at(port, "/locks");
        super::survive_long_freezes(server.port(), url, || server.restart());
    }
}

mod zookeeper {
    #[test]
    fn faults_never_make_two_valid_leases() {
        let server = lock_tests::ZooKeeperServer::builder().setting("tickTime", 100).start();
        let url = |port| lock_tests::zookeeper::url_at(port, "/locks");
        super::survive_long_freezes(server.port(), url, || server.restart());
    }
}

/// Freezes of processes, some of them longer than their leases or sessions, cuts of all connections, and kills of the server at
/// `port`.
fn survive_long_freezes(port: u16, url: impl Fn(u16) -> String, restart: impl Fn()) {
    let proxy = FaultProxy::to_port(port);
    let crowd = Crowd::start(env!("CARGO_BIN_EXE_crowd"), &url(proxy.port()));
    crowd.survives_long_freezes(|| proxy.cut(), restart);
}
