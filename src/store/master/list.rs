//! One service at several addresses: its master is the only server that says it is one.
//!
//! At each connect of a link all servers are sent ROLE at once. When one has said that it is the
//! master, the others have 500 ms to say the same: two masters are an error for a client that
//! connects for the first time, and later neither of them counts.

use std::{fmt::Write as _, time::Duration};

use futures_util::stream::{FuturesUnordered, StreamExt};
use nestlock_wire::{CloseOnDrop, Dialer, NotConnected, Server, log};
use tokio::time::sleep;

use crate::{
    error::{StoreError, StoreErrorKind},
    store::master::role::{Role, failed, reply_timeout, role, words},
};

/// How long to wait for the other servers once one says that it is the master: a second master must
/// have time to say so, too.
const OTHERS: Duration = Duration::from_millis(500);
/// Advice for addresses that may be those of a cluster.
const FOR_A_CLUSTER: &str =
    "; for the nodes of a cluster, use redis-cluster:// or rediss-cluster://";

/// Queries all servers at once, and returns the master.
pub(super) async fn find(dial: &Dialer, servers: &[Server]) -> Result<Server, NotConnected> {
    let one = |(number, at)| async move { (number, at, ask(dial, at).await) };
    let mut asked: FuturesUnordered<_> = servers.iter().enumerate().map(one).collect();
    let mut heard = Vec::new();
    while let Some(answer) = asked.next().await {
        let is_master = matches!(answer.2, Ok(Role::Master));
        heard.push(answer);
        if is_master {
            break;
        }
    }
    let others = async {
        sleep(OTHERS).await;
        // an address that waits for the program's credentials has not been queried yet
        if dial.wait_for_provider().await {
            sleep(OTHERS).await;
        }
    };
    tokio::pin!(others);
    loop {
        tokio::select! {
            biased;
            answer = asked.next() => match answer {
                Some(answer) => heard.push(answer),
                None => break,
            },
            () = &mut others => break,
        }
    }
    // in the order of the URL
    heard.sort_unstable_by_key(|(number, ..)| *number);
    verdict(
        heard
            .iter()
            .map(|(_, at, answer)| (*at, answer.as_ref().copied())),
    )
}

/// Returns the only master. Fails if there are several or none, with what each server said.
fn verdict<'a>(
    heard: impl Iterator<Item = (&'a Server, Result<Role, &'a NotConnected>)> + Clone,
) -> Result<Server, NotConnected> {
    let mut masters = heard
        .clone()
        .filter(|(_, answer)| matches!(answer, Ok(Role::Master)))
        .map(|(at, _)| at);
    let (first, second) = (masters.next(), masters.next());
    let mut each = String::new();
    for (at, answer) in heard.clone() {
        let _ = match answer {
            Ok(role) => write!(each, "; {at} is {role}"),
            Err(error) => write!(each, "; {}", words(&error.error)),
        };
    }
    match (first, second) {
        (Some(at), None) => Ok(at.clone()),
        (Some(_), Some(_)) => {
            let error = format!(
                "several of the addresses are masters, and it is unknown which one is right; give the addresses of one service only{FOR_A_CLUSTER}{each}"
            );
            log::later!(WARN, error = error; "no connection");
            Err(NotConnected::new(StoreErrorKind::Other, error))
        }
        (None, _) => {
            let nobody_listens = heard
                .clone()
                .all(|(_, answer)| answer.is_err_and(|error| error.nobody_listens));
            let has_sentinel = heard
                .clone()
                .any(|(_, answer)| matches!(answer, Ok(Role::Sentinel)));
            let may_be_nodes = heard.clone().any(|(_, answer)| {
                answer.is_err_and(|failed| failed.error.kind() == StoreErrorKind::NoPermission)
            });
            let advice = if has_sentinel {
                "; for sentinels, use redis-sentinel://<addresses>/<service>"
            } else if may_be_nodes {
                FOR_A_CLUSTER
            } else {
                ""
            };
            let error = format!("none of the addresses is a master{each}{advice}");
            Err(NotConnected {
                error: StoreError::new(kind(heard), false, error),
                nobody_listens,
            })
        }
    }
}

/// Returns the kind of error that all servers have in common, else `Unavailable`.
fn kind<'a>(
    mut heard: impl Iterator<Item = (&'a Server, Result<Role, &'a NotConnected>)>,
) -> StoreErrorKind {
    let of = |(_, answer): (_, Result<Role, &NotConnected>)| {
        answer.err().map(|error| error.error.kind())
    };
    match heard.next().and_then(of) {
        Some(first) if heard.all(|answer| of(answer) == Some(first)) => first,
        _ => StoreErrorKind::Unavailable,
    }
}

async fn ask(dial: &Dialer, at: &Server) -> Result<Role, NotConnected> {
    let limit = reply_timeout(dial);
    // this connection carries no messages
    let mut there = dial.clone().at(at);
    there.settings.driver = None;
    there.settings.sink = None;
    let answer = async {
        let ends = CloseOnDrop::new(there.open(limit).await?);
        Ok(role(&ends.connection, limit).await?)
    };
    let answer = dial.in_time(limit, answer).await;
    answer.map_err(|failure| failed(at, &failure))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(answers: &[Result<Role, StoreErrorKind>]) -> Result<usize, (StoreErrorKind, String)> {
        let servers: Vec<_> = (0..answers.len())
            .map(|n| Server::new("a", n as u16))
            .collect();
        let answers: Vec<_> = servers
            .iter()
            .zip(answers)
            .map(|(at, a)| {
                (
                    at,
                    a.map_err(|kind| failed(at, &NotConnected::new(kind, "why"))),
                )
            })
            .collect();
        let verdict = verdict(
            answers
                .iter()
                .map(|(at, answer)| (*at, answer.as_ref().copied())),
        );
        verdict
            .map(|at| at.port.into())
            .map_err(|refused| (refused.error.kind(), words(&refused.error)))
    }

    #[test]
    fn the_one_master_is_it_and_two_are_none() {
        use StoreErrorKind as K;
        let (master, replica, sentinel) = (Ok(Role::Master), Ok(Role::Replica), Ok(Role::Sentinel));
        assert_eq!(heard(&[replica, master]), Ok(1));
        assert_eq!(heard(&[Err(K::Timeout), master, Err(K::Auth)]), Ok(1));
        let (kind, text) = heard(&[master, replica, master]).unwrap_err();
        assert_eq!(kind, K::Other);
        assert!(
            text.contains("a:0 is a master; a:1 is a replica; a:2 is a master"),
            "{text}"
        );
        let (kind, text) = heard(&[replica, Err(K::Disconnected)]).unwrap_err();
        assert_eq!(kind, K::Unavailable);
        assert!(text.ends_with("a:0 is a replica; a:1: why"), "{text}");
        assert_eq!(heard(&[Err(K::Auth), Err(K::Auth)]).unwrap_err().0, K::Auth);
        assert!(
            heard(&[sentinel, replica])
                .unwrap_err()
                .1
                .contains("redis-sentinel://")
        );
    }
}
