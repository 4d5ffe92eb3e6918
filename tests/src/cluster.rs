//! A private Redis Cluster per test.

use std::collections::HashSet;
use std::process::Stdio;
use std::time::Duration;

use crate::eventually::{eventually, eventually_some};
use crate::process::Process;
use crate::resp::Value;
use crate::server::{Config, RedisServer, free_port};

const DEADLINE: Duration = Duration::from_secs(30);
const SLOTS: u16 = 16_384;

/// Three masters with a third of the slots each, and a replica of each: six child processes. A master that is
/// gone for five seconds is replaced.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
}

/// A slot on its way from one master to another.
#[derive(Debug)]
pub struct Move<'a> {
    cluster: &'a RedisCluster,
    slot: u16,
    from: &'a RedisServer,
    to: &'a RedisServer,
}

impl RedisCluster {
    /// Starts the servers, and waits until they serve all slots and each master has its replica.
    ///
    /// # Panics
    ///
    /// When a server refuses, or the cluster is not complete within 30 s.
    #[track_caller]
    pub fn start() -> Self {
        Self::start_with(|config| config)
    }

    /// [`start`](Self::start) with a configuration of the servers.
    ///
    /// # Panics
    ///
    /// Like [`start`](Self::start).
    #[track_caller]
    pub fn start_with(special: impl Fn(Config) -> Config) -> Self {
        let start = |_| node(special(RedisServer::builder()));
        let cluster = Self { nodes: (0..6).map(start).collect() };
        let (masters, replicas) = cluster.nodes.split_at(3);
        for (node, epoch) in cluster.nodes.iter().zip(1..) {
            must(node, &["CLUSTER", "SET-CONFIG-EPOCH", &format!("{epoch}")]);
        }
        for (master, third) in masters.iter().zip(0..) {
            let [first, end] = [third, third + 1].map(|third| third * u32::from(SLOTS) / 3);
            let (first, last) = (first.to_string(), (end - 1).to_string());
            must(master, &["CLUSTER", "ADDSLOTSRANGE", &first, &last]);
        }
        cluster.until_all_have_met();
        for (replica, master) in replicas.iter().zip(masters) {
            must(replica, &["CLUSTER", "REPLICATE", &id(master)]);
        }
        cluster.until_whole();
        // Longer than a pause by a test, or a stall of a busy machine.
        cluster.replace_masters_after(Duration::from_secs(5));
        cluster
    }

    /// A replica takes the place of a master that is gone for `silence`. Servers that are restarted forget it, and are
    /// back at one second.
    ///
    /// # Panics
    ///
    /// When a server refuses.
    #[track_caller]
    pub fn replace_masters_after(&self, silence: Duration) {
        let silence = silence.as_millis().to_string();
        for node in &self.nodes {
            must(node, &["CONFIG", "SET", "cluster-node-timeout", &silence]);
        }
    }

    /// A cluster of one server with all slots, like an endpoint that checks slots and serves all of them.
    ///
    /// # Panics
    ///
    /// When the server refuses, or does not serve within 30 s.
    #[track_caller]
    pub fn of_one(config: Config) -> RedisServer {
        let node = node(config);
        Self::give_all_slots_to(&node);
        node
    }

    /// Gives all slots to `node`, which knows no other, and waits until it serves.
    ///
    /// # Panics
    ///
    /// When the server refuses, or does not serve within 30 s.
    #[track_caller]
    pub fn give_all_slots_to(node: &RedisServer) {
        let all = (SLOTS - 1).to_string();
        must(node, &["CLUSTER", "ADDSLOTSRANGE", "0", &all]);
        eventually(DEADLINE, "the server serves all slots", || {
            node.cli(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
        });
    }

    /// Starts one more server and has it join, as a master without slots; the last of [`nodes`](Self::nodes).
    ///
    /// # Panics
    ///
    /// When the others do not know it, or not all slots are served, within 30 s.
    #[track_caller]
    pub fn join(&mut self) {
        self.nodes.push(node(RedisServer::builder()));
        self.until_all_have_met();
        self.until_serving();
    }

    /// Introduces the servers to the first one until all know each other. A server forgets one that has not answered within the
    /// node timeout. `redis-cli --cluster create` introduces each once, and then waits for ever on a busy machine.
    #[track_caller]
    fn until_all_have_met(&self) {
        let ids: Vec<_> = self.nodes.iter().map(id).collect();
        let unknown_to = |node: &RedisServer| -> Vec<usize> {
            let table = node.cli(&["CLUSTER", "NODES"]);
            (0..ids.len()).filter(|at| !table.contains(&ids[*at])).collect()
        };
        eventually(DEADLINE, "all servers of the cluster know each other", || {
            let first = &self.nodes[0];
            for other in unknown_to(first).into_iter().map(|at| &self.nodes[at]) {
                let (port, bus) = (other.port().to_string(), bus_port(other));
                must(first, &["CLUSTER", "MEET", "127.0.0.1", &port, &bus]);
            }
            self.nodes.iter().all(|node| unknown_to(node).is_empty())
        });
    }

    /// `redis+cluster://` with all six servers, without TLS.
    pub fn url(&self) -> String {
        self.url_of("")
    }

    /// [`url`](Self::url) with this user and password.
    pub fn url_of(&self, login: &str) -> String {
        let at = if login.is_empty() { "" } else { "@" };
        let addresses: Vec<_> = self.nodes.iter().map(address).collect();
        format!("redis+cluster://{login}{at}{}", addresses.join(","))
    }

    /// All servers, dead ones too.
    pub fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// The servers that have slots.
    ///
    /// # Panics
    ///
    /// When no server reports them within 30 s.
    #[track_caller]
    pub fn masters(&self) -> Vec<&RedisServer> {
        let slots = self.slots();
        let has_slots = |node: &&RedisServer| slots.iter().any(|(_, _, port)| *port == node.port());
        self.nodes.iter().filter(has_slots).collect()
    }

    /// The slot of `key`, as computed by a server.
    #[track_caller]
    pub fn slot(&self, key: &str) -> u16 {
        let node = self.nodes.iter().find(|node| node.is_running()).expect("a server runs");
        node.cli(&["CLUSTER", "KEYSLOT", key]).parse().expect("a slot is a number")
    }

    /// The master that has `slot`.
    #[track_caller]
    pub fn owner(&self, slot: u16) -> &RedisServer {
        let slots = self.slots();
        let range = slots.iter().find(|(first, last, _)| (*first..=*last).contains(&slot));
        let (_, _, port) = range.expect("a master has the slot");
        self.nodes
            .iter()
            .find(|node| node.port() == *port)
            .expect("the master is one of the servers")
    }

    /// A key that begins with `name` and is in a slot of `node`, in no other key's.
    #[track_caller]
    pub fn key_at(&self, name: &str, node: &RedisServer) -> String {
        let port = node.port();
        let slots = self.slots();
        (0..10_000)
            .map(|n| format!("{name}{n}"))
            .find(|key| {
                let slot = self.slot(key);
                slots
                    .iter()
                    .any(|(first, last, it)| *it == port && (*first..=*last).contains(&slot))
            })
            .expect("the server has slots")
    }

    /// Waits until all servers that run agree that all slots are served by servers that run.
    ///
    /// # Panics
    ///
    /// After 30 s.
    #[track_caller]
    pub fn until_serving(&self) {
        eventually(DEADLINE, "the cluster serves all slots", || {
            let running: Vec<_> = self.nodes.iter().filter(|node| node.is_running()).collect();
            running.iter().all(|node| {
                let is_ok = node.cli(&["CLUSTER", "INFO"]).contains("cluster_state:ok");
                let slots = ranges(&node.query(&["CLUSTER", "SLOTS"]));
                let served: u32 = slots
                    .iter()
                    .filter(|(_, _, port)| running.iter().any(|node| node.port() == *port))
                    .map(|(first, last, _)| u32::from(last - first) + 1)
                    .sum();
                is_ok && served == u32::from(SLOTS)
            })
        });
    }

    /// Waits until all slots are served, and each running server without slots is a replica of one that has some, with
    /// all of its data. All running servers know it by then.
    ///
    /// # Panics
    ///
    /// After 30 s.
    #[track_caller]
    pub fn until_whole(&self) {
        self.until_serving();
        eventually(DEADLINE, "each master has its replica", || {
            let running: Vec<_> = self.nodes.iter().filter(|node| node.is_running()).collect();
            let (mut masters, mut replicas) = (0, 0);
            for node in &running {
                let info = node.cli(&["INFO", "replication"]);
                masters += usize::from(info.contains("role:master"));
                replicas += usize::from(info.contains("master_link_status:up"));
            }
            masters == 3 && replicas == 3
        });
        // A master hears of its replica from the next ping, some time after the replica has its data. Until then it
        // has no receiver for the messages of its shard.
        eventually(DEADLINE, "all servers know the master of each replica", || {
            let running: Vec<_> = self.nodes.iter().filter(|node| node.is_running()).collect();
            let ports: Vec<_> = running.iter().map(|node| node.port()).collect();
            let views: HashSet<_> =
                running.iter().map(|node| known_masters(node, &ports)).collect();
            views.len() == 1 && views.iter().flatten().flatten().flatten().count() == 3
        });
    }

    /// Waits until the replica of `master` has all writes of the master so far.
    ///
    /// # Panics
    ///
    /// After 30 s.
    #[track_caller]
    pub fn until_replicated(&self, master: &RedisServer) {
        let number = |info: &str, name: &str| -> Option<u64> {
            info.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
        };
        let info = master.cli(&["INFO", "replication"]);
        let written = number(&info, "master_repl_offset:").expect("a server counts what it writes");
        eventually(DEADLINE, "the replica has it too", || {
            self.nodes.iter().filter(|node| node.is_running()).any(|node| {
                let info = node.cli(&["INFO", "replication"]);
                number(&info, "master_port:") == Some(master.port().into())
                    && number(&info, "slave_repl_offset:").is_some_and(|offset| offset >= written)
            })
        });
    }

    /// SIGKILL for `master`, and waits until a replica has taken its place. Bring it back with
    /// [`RedisServer::restart`].
    ///
    /// # Panics
    ///
    /// After 30 s.
    #[track_caller]
    pub fn kill(&self, master: &RedisServer) {
        master.kill();
        self.until_serving();
    }

    /// Moves `count` slots of `from` to `to`, as an operator does: one after the other.
    ///
    /// # Panics
    ///
    /// With the output of `redis-cli`, when it fails.
    #[track_caller]
    pub fn reshard(&self, count: u16, from: &RedisServer, to: &RedisServer) {
        let (from_id, to_id) = (id(from), id(to));
        redis_cli(&[
            "--cluster",
            "reshard",
            &address(from),
            "--cluster-from",
            &from_id,
            "--cluster-to",
            &to_id,
            "--cluster-slots",
            &count.to_string(),
            "--cluster-yes",
        ]);
    }

    /// Begins to move `slot` to `to`; its keys stay where they are.
    ///
    /// # Panics
    ///
    /// When a server refuses.
    #[track_caller]
    pub fn begin_move<'a>(&'a self, slot: u16, to: &'a RedisServer) -> Move<'a> {
        let from = self.owner(slot);
        let number = slot.to_string();
        must(to, &["CLUSTER", "SETSLOT", &number, "IMPORTING", &id(from)]);
        must(from, &["CLUSTER", "SETSLOT", &number, "MIGRATING", &id(to)]);
        Move { cluster: self, slot, from, to }
    }

    #[track_caller]
    fn slots(&self) -> Vec<(u16, u16, u16)> {
        eventually_some(DEADLINE, "a server reports the owners of the slots", || {
            let node = self.nodes.iter().find(|node| node.is_running())?;
            Some(ranges(&node.query(&["CLUSTER", "SLOTS"])))
        })
    }
}

impl Move<'_> {
    /// Moves one key.
    ///
    /// # Panics
    ///
    /// When the server refuses.
    #[track_caller]
    pub fn migrate(&self, key: &str) {
        let port = self.to.port().to_string();
        must(self.from, &["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]);
    }

    /// Moves all keys that are left, and the slot.
    ///
    /// # Panics
    ///
    /// When a server refuses.
    #[track_caller]
    pub fn finish(self) {
        let slot = self.slot.to_string();
        loop {
            let keys = self.from.query(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
            if keys.items().is_empty() {
                break;
            }
            keys.items().iter().for_each(|key| self.migrate(&key.to_string()));
        }
        let to = id(self.to);
        // The new owner first, so that no moment is without one.
        must(self.to, &["CLUSTER", "SETSLOT", &slot, "NODE", &to]);
        must(self.from, &["CLUSTER", "SETSLOT", &slot, "NODE", &to]);
        eventually(DEADLINE, "all know of the move", || {
            self.cluster.nodes.iter().filter(|node| node.is_running()).all(|node| {
                let slots = ranges(&node.query(&["CLUSTER", "SLOTS"]));
                slots.iter().any(|(first, last, port)| {
                    *port == self.to.port() && (*first..=*last).contains(&self.slot)
                })
            })
        });
    }
}

#[track_caller]
fn node(config: Config) -> RedisServer {
    config
        .arg("cluster-enabled", "yes")
        // By default 10,000 above the port, where outgoing connections are.
        .arg("cluster-port", &free_port().to_string())
        // Servers look at each other at half of this interval, so the cluster is formed soon.
        .arg("cluster-node-timeout", "1000")
        // However long the replica was disconnected.
        .arg("cluster-replica-validity-factor", "0")
        .arg("cluster-allow-replica-migration", "no")
        .arg("repl-diskless-sync-delay", "0")
        .start()
}

fn address(node: &RedisServer) -> String {
    format!("127.0.0.1:{}", node.port())
}

fn id(node: &RedisServer) -> String {
    node.cli(&["CLUSTER", "MYID"])
}

/// The port by which the other servers of a cluster reach `node`.
fn bus_port(node: &RedisServer) -> String {
    let table = node.cli(&["CLUSTER", "NODES"]);
    let own = table.lines().find(|line| line.contains("myself"));
    let address = own.and_then(|line| line.split_whitespace().nth(1));
    let port = address.and_then(|address| address.split_once('@'));
    let (_, port) = port.expect("a server of a cluster has a second port");
    // Names may follow.
    port.split(',').next().unwrap_or(port).to_owned()
}

/// For each of the servers with these ports, in their order, the id of the master it replicates; as `node` knows it.
/// Nothing of a server that `node` does not know, or is not connected to.
fn known_masters(node: &RedisServer, ports: &[u16]) -> Option<Vec<Option<String>>> {
    let table = node.cli(&["CLUSTER", "NODES"]);
    let master = |port: &u16| {
        let entry = table.lines().find(|line| line.contains(&format!(":{port}@")))?;
        let fields: Vec<_> = entry.split_whitespace().collect();
        let is_connected = fields.get(7) == Some(&"connected");
        let master = fields.get(3).filter(|_| is_connected)?;
        Some((*master != "-").then(|| (*master).to_owned()))
    };
    ports.iter().map(master).collect()
}

/// First and last slot, and the port of the master that has them.
fn ranges(slots: &Value) -> Vec<(u16, u16, u16)> {
    let number = |value: &Value| value.as_int().and_then(|n| u16::try_from(n).ok());
    let range = |entry: &Value| match entry.items() {
        [first, last, master, ..] => {
            Some((number(first)?, number(last)?, number(master.items().get(1)?)?))
        }
        _ => None,
    };
    slots.items().iter().filter_map(range).collect()
}

#[track_caller]
fn must(node: &RedisServer, args: &[&str]) {
    let answer = node.cli(args);
    assert!(answer == "OK" || answer == "NOKEY", "{args:?}: {answer}");
}

#[track_caller]
fn redis_cli(args: &[&str]) {
    let mut command = Process::command("redis-cli");
    command.args(args).stdin(Stdio::null());
    let done = command.output().expect("redis-cli can be started");
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "redis-cli {args:?}:\n{out}\n{err}");
}
