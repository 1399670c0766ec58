//! Server commands.

use std::fmt::Write as _;

use super::{call::Call, connection::VERSION, error_text::SYNTAX, glob::glob};
use crate::server::{
    keyspace::DATABASES,
    resp::{Outcome, Reply},
    stats::Stats,
};

pub(super) fn dbsize(call: &mut Call) -> Outcome {
    Ok(Reply::len(call.server.keys.len(call.db)))
}

pub(super) fn flushall(call: &mut Call) -> Outcome {
    check_flush(call)?;
    for db in 0..DATABASES {
        call.server.keys.flush(db);
    }
    Ok(Reply::OK)
}

pub(super) fn flushdb(call: &mut Call) -> Outcome {
    check_flush(call)?;
    call.server.keys.flush(call.db);
    Ok(Reply::OK)
}

fn check_flush(call: &Call) -> Result<(), String> {
    match call.args.len() {
        1 => Ok(()),
        2 if call.is(1, "sync") || call.is(1, "async") => Ok(()),
        _ => Err(SYNTAX.into()),
    }
}

pub(super) fn time(call: &mut Call) -> Outcome {
    let now = call.server.clock.now();
    Ok(Reply::list(
        [now.as_secs().to_string(), now.subsec_micros().to_string()].map(Reply::bulk),
    ))
}

pub(super) fn monitor(call: &mut Call) -> Outcome {
    call.client_mut().monitors = true;
    Ok(Reply::OK)
}

/// Returns the few settings that clients query. None of them can be set.
pub(super) fn config_get(call: &mut Call) -> Outcome {
    let settings = [
        ("appendonly", "no"),
        ("databases", "16"),
        ("maxmemory", "0"),
        ("maxmemory-policy", "noeviction"),
        ("notify-keyspace-events", ""),
        ("save", ""),
        ("timeout", "0"),
    ];
    let asked = |name: &str| {
        call.args[2..]
            .iter()
            .any(|pattern| glob(&pattern.to_ascii_lowercase(), name.as_bytes()))
    };
    let found = settings.into_iter().filter(|(name, _)| asked(name));
    Ok(Reply::Map(
        found
            .map(|(name, value)| (Reply::bulk(name), Reply::bulk(value)))
            .collect(),
    ))
}

pub(super) fn config_resetstat(call: &mut Call) -> Outcome {
    call.server.stats = Stats::default();
    Ok(Reply::OK)
}

pub(super) fn info(call: &mut Call) -> Outcome {
    let sections: Vec<String> = call.args[1..]
        .iter()
        .map(|section| String::from_utf8_lossy(section).to_ascii_lowercase())
        .collect();
    let all = sections
        .iter()
        .any(|section| ["all", "everything"].contains(&section.as_str()));
    let default = sections.is_empty() || sections.iter().any(|section| section == "default");
    let wanted = |section: &str, by_default: bool| {
        all || by_default && default || sections.iter().any(|name| name == section)
    };
    let mut text = String::new();
    let mut section = |name: &str, by_default: bool, lines: Vec<(String, String)>| {
        if wanted(&name.to_ascii_lowercase(), by_default) {
            let _ = write!(
                text,
                "{}# {name}\r\n",
                if text.is_empty() { "" } else { "\r\n" }
            );
            for (key, value) in lines {
                let _ = write!(text, "{key}:{value}\r\n");
            }
        }
    };
    let server = &call.server;
    let line = |key: &str, value: &dyn ToString| (key.to_owned(), value.to_string());
    section(
        "Server",
        true,
        vec![
            line("redis_version", &VERSION),
            line("nestlock_embedded_version", &env!("CARGO_PKG_VERSION")),
            line("redis_mode", &"standalone"),
            line("os", &std::env::consts::OS),
            line("arch_bits", &usize::BITS),
            line("process_id", &std::process::id()),
            line("run_id", &server.run_id),
            line("tcp_port", &server.port),
            line("server_time_usec", &server.clock.now().as_micros()),
            line("uptime_in_seconds", &server.clock.uptime().as_secs()),
        ],
    );
    let blocked = server
        .clients
        .values()
        .filter(|client| client.blocked.is_some())
        .count();
    section(
        "Clients",
        true,
        vec![
            line("connected_clients", &server.clients.len()),
            line("blocked_clients", &blocked),
        ],
    );
    section(
        "Persistence",
        true,
        vec![line("loading", &0), line("aof_enabled", &0)],
    );
    let stats = &server.stats;
    let subscriptions = |kind: &str| {
        let all = server.clients.values().map(|client| &client.subscriptions);
        let mut names: Vec<_> = match kind {
            "channels" => all.flat_map(|all| &all.channels).collect(),
            "patterns" => all.flat_map(|all| &all.patterns).collect(),
            _ => all.flat_map(|all| &all.shards).collect(),
        };
        names.sort_unstable();
        names.dedup();
        names.len()
    };
    section(
        "Stats",
        true,
        vec![
            line("total_connections_received", &stats.connections),
            line("total_commands_processed", &stats.commands),
            line("expired_keys", &stats.expired),
            line("evicted_keys", &0),
            line("pubsub_channels", &subscriptions("channels")),
            line("pubsub_patterns", &subscriptions("patterns")),
            line("pubsubshard_channels", &subscriptions("shards")),
            line("total_error_replies", &stats.errors.values().sum::<u64>()),
        ],
    );
    section(
        "Replication",
        true,
        vec![line("role", &"master"), line("connected_slaves", &0)],
    );
    let calls = stats.calls.iter().map(|(name, calls)| {
        let value = format!(
            "calls={},usec=0,usec_per_call=0.00,rejected_calls={},failed_calls={}",
            calls.executed, calls.rejected, calls.failed
        );
        (format!("cmdstat_{name}"), value)
    });
    section("Commandstats", false, calls.collect());
    let errors = stats
        .errors
        .iter()
        .map(|(code, count)| (format!("errorstat_{code}"), format!("count={count}")));
    section("Errorstats", true, errors.collect());
    section("Cluster", true, vec![line("cluster_enabled", &0)]);
    let databases = (0..DATABASES)
        .filter(|db| server.keys.len(*db) > 0)
        .map(|db| {
            let value = format!(
                "keys={},expires={},avg_ttl=0",
                server.keys.len(db),
                server.keys.volatile(db)
            );
            (format!("db{db}"), value)
        });
    section("Keyspace", true, databases.collect());
    Ok(Reply::Verbatim(text.into_bytes()))
}
