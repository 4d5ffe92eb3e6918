//! What renewals cost a client of each store.

use std::thread::sleep;
use std::time::Duration;

use lock_tests::{EtcdServer, MysqlServer, PostgresServer, RedisServer, ZooKeeperServer};

use crate::Plan;
use crate::report::{Bar, Report};
use crate::resources::percent_of_core;
use crate::worker::Worker;

const LOCKS: usize = 10_000;

pub(crate) fn measure(plan: Plan, report: &mut Report) {
    report.begin("held-stores", "10,000 locks with a ttl of 30 s, held by one process");
    let redis = RedisServer::start();
    of_one(plan, report, "Redis", &redis.url());
    drop(redis);
    let postgres = PostgresServer::start();
    of_one(plan, report, "PostgreSQL", &postgres.url());
    drop(postgres);
    let mysql = MysqlServer::start();
    of_one(plan, report, "MariaDB", &mysql.url());
    drop(mysql);
    let etcd = EtcdServer::start();
    of_one(plan, report, "etcd", &etcd.url());
    drop(etcd);
    let zookeeper = ZooKeeperServer::start();
    of_one(plan, report, "ZooKeeper", &zookeeper.url());
}

fn of_one(plan: Plan, report: &mut Report, store: &str, url: &str) {
    let holder = Worker::holder(url, LOCKS, false);
    // Until the first renewals are done.
    sleep(Duration::from_secs(11));
    let window = Duration::from_secs(if plan.quick { 20 } else { 60 });
    let share = percent_of_core(holder.pid(), window);
    let lost = holder.lost() as f64;
    let figure = |what: &str| format!("{store}: {what}");
    report.figure(&figure("processor time"), "% of core", &[share], Bar::AtMost(1.0));
    report.figure(&figure("lost"), "", &[lost], Bar::AtMost(0.0));
}
