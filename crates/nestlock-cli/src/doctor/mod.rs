//! `doctor`: checks whether the servers are configured safely for locks. It writes only scratch
//! locks, and releases them.

mod info;
mod locks;
mod row;
mod service;

use std::time::Duration;

use serde_json::json;
use tokio::time::timeout;

use self::{
    locks::Scratch,
    row::{Row, Verdict, row},
};
use crate::{
    args::{Doctor, Server},
    failure::{Failure, Unusable},
    kind::Kind,
    node::is_over,
    raw::Raw,
    stdout::say,
};

/// Time limit for all checks.
const LIMIT: Duration = Duration::from_secs(5);
/// Time limit for the clean-up.
const TIDY: Duration = Duration::from_secs(1);

pub(crate) async fn doctor(server: &Server, doctor: &Doctor) -> Result<u8, Failure> {
    let kinds: &[Kind] = match &doctor.kinds[..] {
        [] => &locks::KINDS,
        kinds if kinds.contains(&Kind::Semaphore) => {
            let why = "doctor tries no semaphore: try `permits`, which need the same commands";
            return Err(Unusable(why.into()).into());
        }
        kinds => kinds,
    };
    let (mut rows, mut scratch) = (Vec::new(), None);
    let (raw, refused) = reach(server).await?;
    if timeout(
        LIMIT,
        look(&raw, server, kinds, refused, &mut rows, &mut scratch),
    )
    .await
    .is_err()
    {
        rows.push(row(
            "time",
            Verdict::Unknown,
            format!(
                "the server replied too slowly: the checks that are missing here took longer than {LIMIT:?}"
            ),
        ));
    }
    // after a timeout too
    if let Some(scratch) = scratch {
        let _ = timeout(TIDY, scratch.tidy(&raw, server)).await;
    }
    let width = rows
        .iter()
        .map(|row| row.what.chars().count())
        .max()
        .unwrap_or(0);
    for Row { what, verdict, why } in &rows {
        if doctor.json {
            say(json!({ "v": 1, "what": what, "verdict": verdict.name(), "why": why }));
        } else {
            say(format_args!("{:7}  {what:width$}  {why}", verdict.name())
                .to_string()
                .trim_end());
        }
    }
    Ok(match rows.iter().map(|row| row.verdict).max() {
        None | Some(Verdict::Ok) => 0,
        Some(Verdict::Unknown | Verdict::Warn) => 1,
        Some(Verdict::Bad) => 2,
    })
}

/// Connects to the servers. A single server at which no lock can be acquired is checked too, and
/// the reason is returned with it.
async fn reach(server: &Server) -> Result<(Raw<'_>, Option<Failure>), Failure> {
    let refused = match Raw::connect_to_lock(server).await {
        Ok(raw) => return Ok((raw, None)),
        Err(refused) => refused,
    };
    if server.is_cluster_or_service()? != (false, false) {
        return Err(refused);
    }
    let raw = Raw::without(server)?;
    match raw.ask_each(&raw.masters(), &["PING"]).await.pop() {
        None => Err(refused),
        Some(Err(error)) if is_over(&error) => Err(refused),
        Some(_) => Ok((raw, Some(refused))),
    }
}

/// Runs all checks concurrently, as the servers may be far away.
async fn look(
    raw: &Raw<'_>,
    server: &Server,
    kinds: &[Kind],
    refused: Option<Failure>,
    rows: &mut Vec<Row>,
    scratch: &mut Option<Scratch>,
) {
    let facts = async { rows.extend(service::of_servers(raw).await) };
    let locks = async {
        let scratch = match refused {
            Some(refused) => Err(refused),
            None => Scratch::of(server, raw)
                .await
                .map(|made| scratch.insert(made)),
        };
        match scratch {
            Ok(scratch) if raw.is_cluster() => {
                let (masters, mut rows) = tokio::join!(
                    locks::of_masters(scratch, raw, kinds),
                    locks::of_kinds(scratch, kinds)
                );
                rows.extend(service::worst(&masters));
                rows
            }
            Ok(scratch) => locks::of_kinds(scratch, kinds).await,
            Err(error) => vec![row("locks", Verdict::Bad, error.to_string())],
        }
    };
    let ((), of_locks) = tokio::join!(facts, locks);
    rows.extend(of_locks);
}
