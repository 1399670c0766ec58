//! Checks what a server reports about itself.

use std::{collections::HashMap, time::Duration};

use fred::error::Error;
use futures_util::future::join_all;

use super::row::{Row, Verdict, row};
use crate::{
    acl::version_of,
    node::{Answer, Node, is_denied, is_unknown, list, text},
};

/// Checked only if there is an append-only file.
const FSYNC: &str = "appendfsync";
const MIN_REPLICAS: &str = "min-replicas-to-write";
const COVERAGE: &str = "cluster-require-full-coverage";
const NODE_TIMEOUT: &str = "cluster-node-timeout";
/// The oldest version of Redis that nestlock supports, as README.md states.
const OLDEST: (u64, u64) = (6, 2);
/// A longer round trip gets a warning.
const SLOW: Duration = Duration::from_millis(50);
/// The default command timeout of nestlock.
const ANSWER: Duration = Duration::from_secs(3);

/// The deployment to which a server belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Of {
    /// A single server, or a service at several addresses.
    Server,
    Sentinels,
    Cluster,
}

type Settings = HashMap<&'static str, Result<String, &'static str>>;

pub(super) async fn of_server(node: &Node, of: Of) -> Vec<Row> {
    let (info, config, wait) = tokio::join!(
        node.ask(&["INFO"]),
        config(node, of),
        // for no replica, so it returns at once
        node.ask(&["WAIT", "0", "1"])
    );
    let (mut rows, mut keeps_a_log) = (Vec::new(), true);
    match info {
        Ok(info) => {
            let info = text(&info).unwrap_or_default();
            keeps_a_log = info.contains("aof_enabled:1");
            rows.extend(of_info(&info, of));
        }
        Err(error) if is_denied(&error) => {
            rows.push(row(
                "server",
                Verdict::Unknown,
                "this user may not send INFO; grant it +info",
            ));
        }
        Err(error) => rows.push(row("server", Verdict::Unknown, error.details().to_owned())),
    }
    rows.extend(
        of_config(&config, of)
            .into_iter()
            .filter(|row| keeps_a_log || row.what != FSYNC),
    );
    rows.extend(wait.err().and_then(|error| of_wait(&error)));
    rows
}

/// Judges an error of WAIT. A replica refuses it, which its role says already.
fn of_wait(error: &Error) -> Option<Row> {
    let (verdict, why) = if is_unknown(error) {
        (
            Verdict::Warn,
            "the server lacks WAIT: the options replicas and fsync cannot be used",
        )
    } else if is_denied(error) {
        (
            Verdict::Unknown,
            "this user may not send WAIT; grant it +wait",
        )
    } else {
        return None;
    };
    Some(row("replicas", verdict, why))
}

/// Checks the reply to INFO, which every user with permissions for locks may send.
fn of_info(info: &str, of: Of) -> Vec<Row> {
    use Verdict::{Bad, Ok, Warn};
    let said: HashMap<&str, &str> = info
        .lines()
        .filter_map(|line| line.trim().split_once(':'))
        .collect();
    let field = |name: &str| said.get(name).copied().unwrap_or_default();
    let number = |name: &str| field(name).parse::<u64>().unwrap_or(0);
    let mut rows = Vec::new();
    let version = version_of(info);
    let named = if field("valkey_version").is_empty() {
        format!("Redis {}", field("redis_version"))
    } else {
        format!("Valkey {}", field("valkey_version"))
    };
    rows.push(match version {
        (major, minor, _) if (major, minor) < OLDEST => row(
            "version",
            Bad,
            format!(
                "{named} is too old: nestlock requires Redis {}.{} or later, or Valkey",
                OLDEST.0, OLDEST.1
            ),
        ),
        _ => row("version", Ok, named),
    });
    let replicas = number("connected_slaves");
    let role = match (field("role"), number("cluster_enabled")) {
        // in a cluster, a replica is not a fault: it can take over from its master
        ("slave", _) if of == Of::Cluster => None,
        ("slave", _) => Some((
            Bad,
            format!(
                "a replica of {}:{}: no lock can be acquired here",
                field("master_host"),
                field("master_port")
            ),
        )),
        (_, 1) if of != Of::Cluster => Some((
            Warn,
            "a node of a cluster: locks in slots of other nodes cannot be acquired through it"
                .to_owned(),
        )),
        _ if replicas > 0 => {
            let told = if replicas == 1 {
                "1 replica".to_owned()
            } else {
                format!("{replicas} replicas")
            };
            Some((
                Warn,
                format!(
                    "{told}: a failover may lose a lock that was just acquired; use fencing tokens where that matters"
                ),
            ))
        }
        _ if of == Of::Server => Some((Ok, "a master without replicas".to_owned())),
        _ => Some((
            Warn,
            "a master without replicas: if it fails, no server takes over".to_owned(),
        )),
    };
    rows.extend(role.map(|(verdict, why)| row("role", verdict, why)));
    if number("loading") == 1 {
        rows.push(row(
            "loading",
            Bad,
            "the server is loading its data, and serves no locks until it has finished",
        ));
    }
    rows.push(match (field("maxmemory_policy"), number("maxmemory")) {
        (_, 0) => row("memory", Ok, "no limit: no keys are evicted"),
        ("noeviction", limit) if number("used_memory") > limit / 10 * 9 => {
            row("memory", Warn, "more than 90 % of maxmemory is used: soon no lock can be acquired")
        }
        ("noeviction", _) => row("memory", Ok, "noeviction: no keys are evicted"),
        (policy, _) => row(
            "memory",
            Bad,
            format!("maxmemory-policy is {policy}: the server may evict the record of a lock, and two clients then hold it; set noeviction"),
        ),
    });
    if number("evicted_keys") > 0 {
        rows.push(row(
            "evicted",
            Warn,
            format!(
                "{} keys were evicted since the server started: records of locks may have been among them",
                number("evicted_keys")
            ),
        ));
    }
    let snapshot = field("rdb_last_bgsave_status");
    if !snapshot.is_empty() && snapshot != "ok" || field("aof_last_write_status") == "err" {
        rows.push(row(
            "disk",
            Bad,
            "the server cannot write to its disk, and may refuse requests for locks",
        ));
    }
    if number("aof_enabled") == 0 {
        rows.push(row(
            "persistence",
            Warn,
            "no append-only file: a restart loses the locks that are held, and other clients acquire them; keep the server down for a lease, or set appendonly yes",
        ));
    }
    rows
}

/// Returns the settings that this user may read; for the others, why not.
async fn config(node: &Node, of: Of) -> Settings {
    let of_cluster: &[&'static str] = if of == Of::Cluster {
        &[COVERAGE, NODE_TIMEOUT]
    } else {
        &[]
    };
    let names: Vec<&'static str> = [FSYNC, MIN_REPLICAS]
        .iter()
        .chain(of_cluster)
        .copied()
        .collect();
    let said = join_all(
        names
            .iter()
            .map(async |name| node.ask(&["CONFIG", "GET", name]).await),
    )
    .await;
    let value = |said: Answer| match said {
        Ok(pair) => match pair.clone().into_map() {
            Ok(map) => map
                .inner()
                .into_values()
                .next()
                .and_then(|value| text(&value))
                .ok_or("the server does not report it"),
            Err(_) => list(pair)
                .get(1)
                .and_then(text)
                .ok_or("the server does not report it"),
        },
        Err(error) if is_denied(&error) => Err("this user may not read it; grant it +config|get"),
        Err(_) => Err("the server does not report it"),
    };
    names.into_iter().zip(said.into_iter().map(value)).collect()
}

fn of_config(config: &Settings, of: Of) -> Vec<Row> {
    use Verdict::{Ok as Good, Unknown, Warn};
    let row_of = |name: &'static str, judge: &dyn Fn(&str) -> (Verdict, &'static str)| match config
        .get(name)
    {
        Some(Ok(value)) => {
            let (verdict, why) = judge(value);
            row(name, verdict, format!("{value}{why}"))
        }
        Some(Err(why)) => row(name, Unknown, *why),
        None => row(name, Unknown, "it was not checked"),
    };
    let mut rows = vec![
        row_of(FSYNC, &|value| match value {
            "always" => (Good, ""),
            _ => (
                Warn,
                ": even with an append-only file, a crash of the machine loses the last second or two; set always where that matters",
            ),
        }),
        row_of(MIN_REPLICAS, &|value| match value {
            "0" => (
                Good,
                ": a master that is cut off from its replicas continues to grant locks",
            ),
            _ => (
                Good,
                ": no lock can be acquired while fewer replicas are connected",
            ),
        }),
    ];
    if of == Of::Cluster {
        rows.push(row_of(COVERAGE, &|value| match value {
            "no" => (
                Good,
                ": while some slots have no master, the locks of all other slots can be acquired",
            ),
            _ => (
                Verdict::Warn,
                ": while any slot has no master, no lock at all can be acquired or renewed; with \"no\", only those of that slot cannot",
            ),
        }));
        rows.push(row_of(NODE_TIMEOUT, &too_soon));
    }
    rows
}

/// Judges the time after which a master is replaced, in milliseconds.
pub(super) fn too_soon(after: &str) -> (Verdict, &'static str) {
    match after.parse::<u128>() {
        Ok(after) if after <= ANSWER.as_millis() => (
            Verdict::Warn,
            " ms: a master that hung may reply after it was replaced, and clients would trust the reply; keep command timeouts, 3 s by default, below that",
        ),
        _ => (
            Verdict::Ok,
            " ms: longer than the default command timeout, as it should be",
        ),
    }
}

/// Judges a round trip. `at`: the address of the slowest server, if there are several.
pub(super) fn of_round_trip(round_trip: Duration, at: Option<&str>) -> Row {
    let took = format!(
        "{:.1} ms{}",
        round_trip.as_secs_f64() * 1e3,
        at.map_or(String::new(), |at| format!(" to {at}"))
    );
    if round_trip > SLOW {
        row(
            "round trip",
            Verdict::Warn,
            format!(
                "{took}: each lock and each unlock takes this long; set the watchdog timeout to 100 times that"
            ),
        )
    } else {
        row("round trip", Verdict::Ok, took)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "redis_version:7.0.15\r\nrole:master\r\nconnected_slaves:0\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n\
        rdb_last_bgsave_status:ok\r\naof_enabled:1\r\nloading:0\r\ncluster_enabled:0\r\n";

    fn verdicts(change: &[(&str, &str)], of: Of) -> Vec<(String, Verdict)> {
        let mut info = GOOD.to_owned();
        for (from, to) in change {
            assert!(info.contains(from), "{from}");
            info = info.replace(from, to);
        }
        let bad = |row: &Row| row.verdict != Verdict::Ok;
        of_info(&info, of)
            .into_iter()
            .filter(bad)
            .map(|row| (row.what, row.verdict))
            .collect()
    }

    #[test]
    fn each_fault_of_a_server_is_reported() {
        assert_eq!(verdicts(&[], Of::Server), []);
        for (change, what, verdict) in [
            (
                ("redis_version:7.0.15", "redis_version:5.0.7"),
                "version",
                Verdict::Bad,
            ),
            (
                ("redis_version:7.0.15", "redis_version:6.0.16"),
                "version",
                Verdict::Bad,
            ),
            (("role:master", "role:slave"), "role", Verdict::Bad),
            (
                ("connected_slaves:0", "connected_slaves:2"),
                "role",
                Verdict::Warn,
            ),
            (
                ("cluster_enabled:0", "cluster_enabled:1"),
                "role",
                Verdict::Warn,
            ),
            (
                ("aof_enabled:1", "aof_enabled:0"),
                "persistence",
                Verdict::Warn,
            ),
            (("loading:0", "loading:1"), "loading", Verdict::Bad),
            (
                ("rdb_last_bgsave_status:ok", "rdb_last_bgsave_status:err"),
                "disk",
                Verdict::Bad,
            ),
            (
                (
                    "maxmemory:0\r\nmaxmemory_policy:noeviction",
                    "maxmemory:9\r\nmaxmemory_policy:volatile-lru",
                ),
                "memory",
                Verdict::Bad,
            ),
            (
                ("maxmemory:0", "used_memory:99\r\nmaxmemory:100"),
                "memory",
                Verdict::Warn,
            ),
            (("loading:0", "evicted_keys:3"), "evicted", Verdict::Warn),
        ] {
            assert_eq!(
                verdicts(&[change], Of::Server),
                [(what.to_owned(), verdict)],
                "{change:?}"
            );
        }
    }

    #[test]
    fn the_oldest_version_is_that_of_the_readme() {
        assert_eq!(
            verdicts(
                &[("redis_version:7.0.15", "redis_version:6.2.0")],
                Of::Server
            ),
            []
        );
        let readme =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md"))
                .unwrap();
        assert!(readme.contains(&format!("Redis {}.{} or later", OLDEST.0, OLDEST.1)));
    }

    /// In a cluster, a replica is not a fault, but a master without replicas is.
    #[test]
    fn a_server_is_judged_by_what_it_is_of() {
        let warned = [("role".to_owned(), Verdict::Warn)];
        for of in [Of::Cluster, Of::Sentinels] {
            assert_eq!(
                verdicts(&[("cluster_enabled:0", "cluster_enabled:1")], Of::Cluster),
                warned
            );
            assert_eq!(verdicts(&[], of), warned);
            assert_eq!(
                verdicts(&[("connected_slaves:0", "connected_slaves:1")], of),
                warned
            );
        }
        assert_eq!(verdicts(&[("role:master", "role:slave")], Of::Cluster), []);
        assert_eq!(
            (too_soon("500").0, too_soon("15000").0),
            (Verdict::Warn, Verdict::Ok)
        );
    }

    #[test]
    fn what_may_not_be_asked_is_unknown_and_never_ok() {
        let rows = of_config(&HashMap::from([("appendfsync", Err("no"))]), Of::Cluster);
        assert!(
            rows.iter().all(|row| row.verdict == Verdict::Unknown),
            "{rows:?}"
        );
    }
}
