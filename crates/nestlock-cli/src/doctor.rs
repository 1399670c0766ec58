//! `doctor`: what this server means for locks. It writes nothing but scratch locks, and gives them back.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use fred::types::Value;
use futures_util::future::join_all;
use nestlock::{Error, LockClient, StoreErrorKind};
use serde_json::json;
use tokio::time::timeout;

use crate::{
    Failure,
    acl::version_of,
    args::{Doctor, Server},
    kind::Kind,
    raw::{Raw, is_denied, list, text},
    say,
};

/// All of it takes no longer.
const LIMIT: Duration = Duration::from_secs(5);
/// Nor does it take longer to leave nothing behind.
const TIDY: Duration = Duration::from_secs(1);
/// What is asked where there is an append-only file.
const FSYNC: &str = "appendfsync";
/// A message that comes later than this after a release did not wake: the waiter looked for itself.
const HEARD: Duration = Duration::from_millis(500);
/// What a release by message is tried with: nobody looks before.
const NEVER: Duration = Duration::from_secs(60);
/// A round trip beyond this is worth a word.
const SLOW: Duration = Duration::from_millis(50);

/// What one look came to, worst last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Ok,
    /// It could not be looked at.
    Unknown,
    Warn,
    Bad,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Unknown => "unknown",
            Self::Warn => "warn",
            Self::Bad => "bad",
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Row {
    what: String,
    verdict: Verdict,
    why: String,
}

fn row(what: impl Into<String>, verdict: Verdict, why: impl Into<String>) -> Row {
    Row { what: what.into(), verdict, why: why.into() }
}

pub(crate) async fn doctor(server: &Server, doctor: &Doctor) -> Result<u8, Failure> {
    let (mut rows, mut scratch) = (Vec::new(), None);
    let raw = Raw::connect(server).await?;
    if timeout(LIMIT, look(&raw, server, &mut rows, &mut scratch)).await.is_err() {
        rows.push(row(
            "time",
            Verdict::Unknown,
            format!("the server answered too slowly: what is missing here took longer than {LIMIT:?}"),
        ));
    }
    // also of what took too long
    if let Some(scratch) = scratch {
        let _ = timeout(TIDY, scratch.tidy(&raw, server)).await;
    }
    let width = rows.iter().map(|row| row.what.chars().count()).max().unwrap_or(0);
    for Row { what, verdict, why } in &rows {
        if doctor.json {
            say(json!({ "v": 1, "what": what, "verdict": verdict.name(), "why": why }));
        } else {
            say(format_args!("{:7}  {what:width$}  {why}", verdict.name()).to_string().trim_end());
        }
    }
    Ok(match rows.iter().map(|row| row.verdict).max() {
        None | Some(Verdict::Ok) => 0,
        Some(Verdict::Unknown | Verdict::Warn) => 1,
        Some(Verdict::Bad) => 2,
    })
}

/// All together, as the server may be far away.
async fn look(raw: &Raw, server: &Server, rows: &mut Vec<Row>, scratch: &mut Option<Scratch>) {
    let began = Instant::now();
    let facts = async {
        let _ = raw.ask(&["PING"]).await;
        let round_trip = began.elapsed();
        let (info, config) = tokio::join!(raw.ask(&["INFO"]), config(raw));
        rows.extend(of_server(info, &config));
        rows.push(of_round_trip(round_trip));
    };
    let locks = async {
        match Scratch::of(server).await {
            Ok(made) => of_kinds(scratch.insert(made)).await,
            Err(error) => vec![row("locks", Verdict::Bad, error.to_string())],
        }
    };
    let ((), of_locks) = tokio::join!(facts, locks);
    rows.extend(of_locks);
}

fn of_server(
    info: Result<Value, fred::error::Error>,
    config: &HashMap<&'static str, Result<String, &'static str>>,
) -> Vec<Row> {
    let (mut rows, mut keeps_a_log) = (Vec::new(), true);
    match info {
        Ok(info) => {
            let info = text(&info).unwrap_or_default();
            keeps_a_log = info.contains("aof_enabled:1");
            rows.extend(of_info(&info));
        }
        Err(error) if is_denied(&error) => {
            rows.push(row("server", Verdict::Unknown, "this user may not ask INFO; give it +info"));
        }
        Err(error) => rows.push(row("server", Verdict::Unknown, error.details().to_owned())),
    }
    rows.extend(of_config(config).into_iter().filter(|row| keeps_a_log || row.what != FSYNC));
    rows
}

/// INFO: what every user may ask who may use locks at all.
fn of_info(info: &str) -> Vec<Row> {
    use Verdict::{Bad, Ok, Warn};
    let said: HashMap<&str, &str> = info.lines().filter_map(|line| line.trim().split_once(':')).collect();
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
        (0..6, ..) => row("version", Bad, format!("{named} is too old: Redis 6.0 or later")),
        (6, 0, _) => row("version", Warn, format!("{named} works, and gets no mends any more")),
        _ => row("version", Ok, named),
    });
    rows.push(match (field("role"), number("cluster_enabled")) {
        ("slave", _) => row("role", Bad, format!("a replica of {}:{}: no lock can be taken here", field("master_host"), field("master_port"))),
        (_, 1) => row("role", Warn, "a node of a cluster: locks whose slots are elsewhere cannot be taken through it"),
        _ if number("connected_slaves") > 0 => row(
            "role",
            Warn,
            format!("{} replicas: a failover may forget a lock that was taken a moment ago; use fencing tokens where that matters", number("connected_slaves")),
        ),
        _ => row("role", Ok, "a master without replicas"),
    });
    if number("loading") == 1 {
        rows.push(row("loading", Bad, "it is loading its data, and answers nothing else meanwhile"));
    }
    rows.push(match (field("maxmemory_policy"), number("maxmemory")) {
        (_, 0) => row("memory", Ok, "no limit: nothing is evicted"),
        ("noeviction", limit) if number("used_memory") > limit / 10 * 9 => {
            row("memory", Warn, "nine tenths are used: soon no lock can be taken")
        }
        ("noeviction", _) => row("memory", Ok, "nothing is evicted"),
        (policy, _) => row(
            "memory",
            Bad,
            format!("maxmemory-policy is {policy}: it may evict a lock's record, and let two in; set noeviction"),
        ),
    });
    if number("evicted_keys") > 0 {
        rows.push(row(
            "evicted",
            Warn,
            format!("{} keys were evicted since it started: locks may have been among them", number("evicted_keys")),
        ));
    }
    let snapshot = field("rdb_last_bgsave_status");
    if !snapshot.is_empty() && snapshot != "ok" || field("aof_last_write_status") == "err" {
        rows.push(row("disk", Bad, "it cannot write to its disk, and may refuse to take locks"));
    }
    if number("aof_enabled") == 0 {
        rows.push(row(
            "persistence",
            Warn,
            "no append-only file: a restart forgets what was locked, and others get in; keep it down for a lease, or set appendonly yes",
        ));
    }
    rows
}

/// What of the configuration may be asked; of the rest, why not.
async fn config(raw: &Raw) -> HashMap<&'static str, Result<String, &'static str>> {
    let names = [FSYNC, "min-replicas-to-write"];
    let said = join_all(names.map(async |name| raw.ask(&["CONFIG", "GET", name]).await)).await;
    let value = |said: Result<Value, fred::error::Error>| match said {
        Ok(pair) => match pair.clone().into_map() {
            Ok(map) => map.inner().into_values().next().and_then(|value| text(&value)).ok_or("the server does not say"),
            Err(_) => list(pair).get(1).and_then(text).ok_or("the server does not say"),
        },
        Err(error) if is_denied(&error) => Err("this user may not ask; give it +config|get"),
        Err(_) => Err("the server does not say"),
    };
    names.into_iter().zip(said.into_iter().map(value)).collect()
}

fn of_config(config: &HashMap<&'static str, Result<String, &'static str>>) -> Vec<Row> {
    use Verdict::{Ok as Good, Unknown, Warn};
    let row_of = |name: &'static str, judge: &dyn Fn(&str) -> (Verdict, &'static str)| match config.get(name) {
        Some(Ok(value)) => {
            let (verdict, why) = judge(value);
            row(name, verdict, format!("{value}{why}"))
        }
        Some(Err(why)) => row(name, Unknown, *why),
        None => row(name, Unknown, "it was not asked"),
    };
    vec![
        row_of(FSYNC, &|value| match value {
            "always" => (Good, ""),
            _ => (
                Warn,
                ": with an append-only file, a crash of the machine forgets the last second or two; set always where that matters",
            ),
        }),
        row_of("min-replicas-to-write", &|value| match value {
            "0" => (Good, ": a master that is cut off from its replicas goes on giving locks"),
            _ => (Good, ": no lock can be taken while fewer are connected"),
        }),
    ]
}

fn of_round_trip(round_trip: Duration) -> Row {
    let took = format!("{:.1} ms", round_trip.as_secs_f64() * 1e3);
    if round_trip > SLOW {
        row(
            "round trip",
            Verdict::Warn,
            format!(
                "{took}: each lock and each unlock takes as long; keep the watchdog timeout at a hundred times that"
            ),
        )
    } else {
        row("round trip", Verdict::Ok, took)
    }
}

/// Locks that are tried, and whose they are.
struct Scratch {
    client: LockClient,
    /// Who waits for it, and never looks by itself.
    waits: LockClient,
    name: String,
}

impl Scratch {
    async fn of(server: &Server) -> Result<Self, Failure> {
        let waits = async { Ok(server.build().poll_cap(NEVER).connect(server.url()?).await?) };
        let (client, waits) = tokio::try_join!(server.connect(None), waits)?;
        let id = client.current_owner().to_string();
        let name = format!("nestlock-doctor:{}", id.split(':').next().unwrap_or_default());
        Ok(Self { client, waits, name })
    }

    /// A fenced lock leaves its token behind: it is nobody's any more.
    async fn tidy(self, raw: &Raw, server: &Server) {
        self.client.idle().await;
        let token = format!("redisson_lock_token:{{{}{}:fenced}}", server.prefix, self.name);
        // whoever may not delete it lets it stay: a small key
        let _ = raw.ask(&["DEL", &token]).await;
    }
}

/// What a failure means: of what this user may not do, nothing is known.
fn failed(what: String, kinds: &str, error: &Error) -> Row {
    match error {
        Error::Store { source, .. } if source.kind() == StoreErrorKind::NoPermission => {
            row(what, Verdict::Unknown, format!("{error}; `nestlock acl --kinds {kinds}` says what it takes"))
        }
        _ => row(what, Verdict::Bad, error.to_string()),
    }
}

/// Takes a lock of each kind, and gives it back.
async fn of_kinds(scratch: &Scratch) -> Vec<Row> {
    let Scratch { client, name, .. } = scratch;
    let kinds =
        [Kind::Reentrant, Kind::Fair, Kind::Fenced, Kind::Spin, Kind::Signal, Kind::String, Kind::Read, Kind::Write];
    let tries = kinds.map(|kind| async move {
        let outcome = async {
            let lock = kind.lock(client, &format!("{name}:{}", kind.name()))?;
            let Some(guard) = lock.try_lock().await? else { return Ok(false) };
            guard.unlock().await?;
            Ok(true)
        };
        match outcome.await {
            Ok(true) => row(kind.name(), Verdict::Ok, "taken and given back"),
            Ok(false) => row(kind.name(), Verdict::Unknown, "somebody else holds the scratch lock"),
            Err(error) => failed(kind.name(), &kind.name(), &error),
        }
    });
    let (mut rows, heard) = tokio::join!(join_all(tries), of_messages(scratch));
    rows.push(heard.unwrap_or_else(|error| failed("messages".into(), "reentrant", &error)));
    rows
}

/// Whether a release is heard.
async fn of_messages(scratch: &Scratch) -> nestlock::Result<Row> {
    let lock = |client: &LockClient| client.reentrant_lock(format!("{}:messages", scratch.name));
    let (held, waits) = (lock(&scratch.client)?.lock().await?, lock(&scratch.waits)?);
    let (heard, released) = tokio::join!(waits.try_lock_for(2 * HEARD), async {
        // by then it listens, or may not
        tokio::time::sleep(HEARD / 2).await;
        (Instant::now(), held.unlock().await)
    });
    released.1?;
    let took = released.0.elapsed();
    Ok(match heard? {
        Some(guard) => {
            guard.unlock().await?;
            row("messages", Verdict::Ok, format!("a waiter hears of a release within {} ms", took.as_millis()))
        }
        None => row(
            "messages",
            Verdict::Warn,
            "a waiter does not hear of a release, and looks once a second: may this user subscribe?",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "redis_version:7.0.15\r\nrole:master\r\nconnected_slaves:0\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n\
        rdb_last_bgsave_status:ok\r\naof_enabled:1\r\nloading:0\r\ncluster_enabled:0\r\n";

    fn verdicts(change: &[(&str, &str)]) -> Vec<(String, Verdict)> {
        let mut info = GOOD.to_owned();
        for (from, to) in change {
            assert!(info.contains(from), "{from}");
            info = info.replace(from, to);
        }
        let bad = |row: &Row| row.verdict != Verdict::Ok;
        of_info(&info).into_iter().filter(bad).map(|row| (row.what, row.verdict)).collect()
    }

    #[test]
    fn each_fault_of_a_server_is_told() {
        assert_eq!(verdicts(&[]), []);
        for (change, what, verdict) in [
            (("redis_version:7.0.15", "redis_version:5.0.7"), "version", Verdict::Bad),
            (("role:master", "role:slave"), "role", Verdict::Bad),
            (("connected_slaves:0", "connected_slaves:2"), "role", Verdict::Warn),
            (("cluster_enabled:0", "cluster_enabled:1"), "role", Verdict::Warn),
            (("aof_enabled:1", "aof_enabled:0"), "persistence", Verdict::Warn),
            (("loading:0", "loading:1"), "loading", Verdict::Bad),
            (("rdb_last_bgsave_status:ok", "rdb_last_bgsave_status:err"), "disk", Verdict::Bad),
            (
                ("maxmemory:0\r\nmaxmemory_policy:noeviction", "maxmemory:9\r\nmaxmemory_policy:volatile-lru"),
                "memory",
                Verdict::Bad,
            ),
            (("maxmemory:0", "used_memory:99\r\nmaxmemory:100"), "memory", Verdict::Warn),
            (("loading:0", "evicted_keys:3"), "evicted", Verdict::Warn),
        ] {
            assert_eq!(verdicts(&[change]), [(what.to_owned(), verdict)], "{change:?}");
        }
    }

    #[test]
    fn what_may_not_be_asked_is_unknown_and_never_ok() {
        let rows = of_config(&HashMap::from([("appendfsync", Err("no"))]));
        assert!(rows.iter().all(|row| row.verdict == Verdict::Unknown), "{rows:?}");
    }
}
