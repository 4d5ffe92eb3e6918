//! Starts a server, prints its pid, port and directory, and ends as requested: `panic`, or `wait` to be
//! killed. For the test that no server outlives its test.

use lock_tests::RedisServer;

fn main() {
    let server = RedisServer::start();
    println!("{} {} {}", server.pid(), server.port(), server.dir().display());
    match std::env::args().nth(1).as_deref() {
        Some("panic") => panic!("as told"),
        _ => std::thread::park(),
    }
}
