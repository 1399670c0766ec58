//! Checks the deployment as a whole: the nodes of a cluster, the sentinels, and where the servers
//! differ.

use std::{
    collections::HashMap,
    rc::Rc,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use nestlock::{NodeRole, TopologyKind};

use super::{
    info::{Of, of_round_trip, of_server, too_soon},
    row::{Row, Verdict, row},
};
use crate::{
    node::{Node, is_denied, is_over, list, pairs},
    raw::{Raw, unserved},
};

/// With fewer masters or sentinels, the loss of one leaves no majority.
const ENOUGH: usize = 3;

pub(super) async fn of_servers(raw: &Raw<'_>) -> Vec<Row> {
    let kind = raw
        .topology()
        .map_or(TopologyKind::Server, |topology| topology.kind);
    let of = match kind {
        TopologyKind::Cluster => Of::Cluster,
        TopologyKind::Sentinel => Of::Sentinels,
        _ => Of::Server,
    };
    let nodes = raw.everyone().unwrap_or_default();
    let looks = join_all(nodes.iter().map(|node| of_node(node, of)));
    let (looks, sentinels) = tokio::join!(looks, of_sentinels(raw));
    let mut rows = of_cluster(raw);
    let (mut told, mut slowest) = (Vec::new(), None);
    for (node, look) in nodes.iter().zip(looks) {
        match look {
            Ok((rows, round_trip)) => {
                told.push((node.address.clone(), rows));
                slowest = slowest.max(Some((round_trip, &*node.address)));
            }
            Err(why) => rows.push(away(raw, &node.address, &why)),
        }
    }
    rows.extend(worst(&told));
    rows.extend(sentinels);
    rows.extend(slowest.map(|(took, at)| of_round_trip(took, (nodes.len() > 1).then_some(at))));
    rows
}

/// Returns what a server reports about itself and its round trip, or why it does not reply.
async fn of_node(node: &Rc<Node>, of: Of) -> Result<(Vec<Row>, Duration), String> {
    let said = |error: fred::error::Error| error.details().to_owned();
    node.client().await.map_err(said)?;
    let began = Instant::now();
    match node.ask(&["PING"]).await {
        Err(error) if is_over(&error) => Err(said(error)),
        _ => {
            let round_trip = began.elapsed();
            Ok((of_server(node, of).await, round_trip))
        }
    }
}

fn away(raw: &Raw<'_>, address: &str, why: &str) -> Row {
    let is_replica = raw.topology().is_some_and(|topology| {
        topology
            .nodes
            .iter()
            .any(|node| node.address == address && node.role == NodeRole::Replica)
    });
    if is_replica {
        row(
            address,
            Verdict::Warn,
            format!("{why}: this replica cannot take over"),
        )
    } else {
        row(
            address,
            Verdict::Bad,
            format!("{why}: its locks can be neither acquired nor renewed"),
        )
    }
}

fn of_cluster(raw: &Raw<'_>) -> Vec<Row> {
    let Some(topology) = raw
        .topology()
        .filter(|topology| topology.kind == TopologyKind::Cluster)
    else {
        return Vec::new();
    };
    let of = |role: NodeRole| topology.nodes.iter().filter(move |node| node.role == role);
    let (masters, replicas) = (of(NodeRole::Master).count(), of(NodeRole::Replica).count());
    let ranges = of(NodeRole::Master).flat_map(|node| &node.slots);
    let unserved = unserved(
        ranges
            .map(|range| (*range.start(), *range.end(), 0))
            .collect(),
    );
    let count = format!("{masters} masters, {replicas} replicas");
    vec![
        if masters < ENOUGH {
            row(
                "cluster",
                Verdict::Warn,
                format!("{count}: with fewer than 3 masters, a master that fails is not replaced"),
            )
        } else {
            row("cluster", Verdict::Ok, count)
        },
        if unserved.is_empty() {
            row("slots", Verdict::Ok, "each slot has a master")
        } else {
            row(
                "slots",
                Verdict::Bad,
                format!(
                    "{} have no master: locks there can be neither acquired nor renewed",
                    unserved.join(", ")
                ),
            )
        },
    ]
}

/// Merges the rows of several servers: for each check the worst result, with the addresses if the
/// servers differ.
pub(super) fn worst(told: &[(String, Vec<Row>)]) -> Vec<Row> {
    let mut order: Vec<&str> = Vec::new();
    for (_, rows) in told {
        for row in rows {
            if !order.contains(&&*row.what) {
                order.push(&row.what);
            }
        }
    }
    let of = |what: &str| {
        let said: Vec<(&str, &Row)> = told
            .iter()
            .filter_map(|(address, rows)| {
                Some((&**address, rows.iter().find(|row| row.what == what)?))
            })
            .collect();
        let verdict = said
            .iter()
            .map(|(_, row)| row.verdict)
            .max()
            .unwrap_or(Verdict::Unknown);
        // each reason, and the servers that gave it
        let mut whys: Vec<(&str, Vec<&str>)> = Vec::new();
        for (address, row) in said.iter().filter(|(_, row)| row.verdict == verdict) {
            match whys.iter_mut().find(|(why, _)| *why == row.why) {
                Some((_, by)) => by.push(address),
                None => whys.push((&row.why, vec![address])),
            }
        }
        let are_one = whys.iter().any(|(_, by)| by.len() == said.len());
        let tell = |(why, by): (&str, Vec<&str>)| {
            if are_one {
                why.to_owned()
            } else {
                format!("{}: {why}", by.join(", "))
            }
        };
        row(
            what,
            verdict,
            whys.into_iter().map(tell).collect::<Vec<_>>().join("; "),
        )
    };
    order.into_iter().map(of).collect()
}

/// What a sentinel reports about the service.
#[derive(Debug, Default)]
struct SentinelReport {
    quorum: usize,
    sentinels: usize,
    down_after: String,
}

async fn of_sentinels(raw: &Raw<'_>) -> Vec<Row> {
    let sentinels = raw.sentinels().unwrap_or_default();
    if sentinels.is_empty() {
        return Vec::new();
    }
    let masters: Vec<String> = raw
        .masters()
        .iter()
        .map(|node| node.address.clone())
        .collect();
    let said = raw.ask_each(&sentinels, &["SENTINEL", "MASTERS"]).await;
    let (mut known, mut answer, mut away) = (Vec::new(), 0, Vec::new());
    let mut unknown = None;
    for (sentinel, said) in sentinels.iter().zip(said) {
        match said {
            Ok(said) => {
                answer += 1;
                let services: Vec<HashMap<String, String>> = list(said)
                    .into_iter()
                    .filter_map(pairs)
                    .map(|pairs| pairs.into_iter().collect())
                    .collect();
                let field = |of: &HashMap<String, String>, name: &str| {
                    of.get(name).cloned().unwrap_or_default()
                };
                let is_it = |of: &&HashMap<String, String>| {
                    masters.contains(&format!("{}:{}", field(of, "ip"), field(of, "port")))
                };
                known.extend(services.iter().find(is_it).map(|of| SentinelReport {
                    quorum: field(of, "quorum").parse().unwrap_or(0),
                    sentinels: field(of, "num-other-sentinels").parse().unwrap_or(0) + 1,
                    down_after: field(of, "down-after-milliseconds"),
                }));
            }
            Err(error) if is_denied(&error) => {
                answer += 1;
                unknown =
                    Some("this user may not query the sentinels; grant it +sentinel|masters there");
            }
            Err(error) => away.push(format!("{}: {}", sentinel.address, error.details())),
        }
    }
    judged(&known, sentinels.len(), answer, &away, unknown)
}

/// Judges the sentinels. `named` are in the URL; `answer` of them reply, and the others are `away`.
fn judged(
    known: &[SentinelReport],
    named: usize,
    answer: usize,
    away: &[String],
    unknown: Option<&str>,
) -> Vec<Row> {
    let (what, away) = (
        "sentinels",
        if away.is_empty() {
            String::new()
        } else {
            format!("; {}", away.join("; "))
        },
    );
    let Some(most) = known.iter().max_by_key(|known| known.sentinels) else {
        let why = unknown.unwrap_or("none of them knows the current master yet");
        return vec![row(
            what,
            Verdict::Unknown,
            format!("{answer} of {named} reply: {why}{away}"),
        )];
    };
    let quorum = known.iter().map(|known| known.quorum).max().unwrap_or(0);
    let needed = quorum.max(most.sentinels / 2 + 1);
    let count = format!(
        "{answer} of {named} reply, there are {}, and {quorum} must agree that the master is down",
        most.sentinels
    );
    let (verdict, why) = if answer + most.sentinels.saturating_sub(named) < needed {
        (Verdict::Bad, ": too few for a failover")
    } else if most.sentinels < ENOUGH {
        (
            Verdict::Warn,
            ": with fewer than 3, the loss of one may prevent all failovers",
        )
    } else if named < most.sentinels {
        (
            Verdict::Warn,
            ": list all of them in the URL, or clients may notice a failover late",
        )
    } else if answer < named {
        (Verdict::Warn, "")
    } else {
        (Verdict::Ok, "")
    };
    let mut rows = vec![row(what, verdict, format!("{count}{why}{away}"))];
    let soonest = known
        .iter()
        .min_by_key(|known| known.down_after.parse::<u64>().unwrap_or(u64::MAX));
    rows.extend(soonest.map(|known| {
        let (verdict, why) = too_soon(&known.down_after);
        row(
            "down-after-milliseconds",
            verdict,
            format!("{}{why}", known.down_after),
        )
    }));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_of_several_servers_is_shown_with_its_address() {
        let of = |address: &str, verdict, why: &str| {
            (address.to_owned(), vec![row("memory", verdict, why)])
        };
        let told = |all: &[(String, Vec<Row>)]| {
            worst(all).pop().map(|row| (row.verdict, row.why)).unwrap()
        };
        let all = [of("a", Verdict::Ok, "fine"), of("b", Verdict::Ok, "fine")];
        assert_eq!(told(&all), (Verdict::Ok, "fine".to_owned()));
        let all = [
            of("a", Verdict::Ok, "fine"),
            of("b", Verdict::Bad, "evicts"),
            of("c", Verdict::Warn, "full"),
        ];
        assert_eq!(told(&all), (Verdict::Bad, "b: evicts".to_owned()));
        let all = [
            of("a", Verdict::Ok, "7.0"),
            of("b", Verdict::Ok, "7.2"),
            of("c", Verdict::Ok, "7.0"),
        ];
        assert_eq!(told(&all), (Verdict::Ok, "a, c: 7.0; b: 7.2".to_owned()));
    }

    #[test]
    fn sentinels_are_judged_by_how_many_are_left() {
        let verdict = |sentinels, quorum, named, answer| {
            let known = [SentinelReport {
                quorum,
                sentinels,
                down_after: "30000".to_owned(),
            }];
            judged(&known, named, answer, &[], None)[0].verdict
        };
        assert_eq!(verdict(3, 2, 3, 3), Verdict::Ok);
        assert_eq!(verdict(3, 2, 3, 2), Verdict::Warn);
        assert_eq!(verdict(3, 2, 3, 1), Verdict::Bad);
        // sentinels that are not in the URL may still reply
        assert_eq!(verdict(5, 3, 2, 2), Verdict::Warn);
        assert_eq!(verdict(3, 3, 3, 2), Verdict::Bad);
        assert_eq!(verdict(1, 1, 1, 1), Verdict::Warn);
        assert_eq!(
            judged(&[], 1, 1, &[], Some("no"))[0].verdict,
            Verdict::Unknown
        );
    }
}
