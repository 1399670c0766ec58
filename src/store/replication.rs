//! Checks at connect that the servers have enough replicas.

use std::{sync::Arc, time::Duration};

use nestlock_wire::{Acks, Copies, Link, clock::Instant, send_wait};
use tokio::time::sleep;

use crate::error::{Error, Result, StoreError, StoreErrorKind};

/// How long to wait for replicas that may have been connecting when the client did.
const REPLICA_GRACE: Duration = Duration::from_secs(1);
/// Interval between two counts of the replicas until then.
const POLL: Duration = Duration::from_millis(50);

/// Checks whether these servers have enough replicas for any lock to be acquired. Returns an error
/// before `limit` is over.
pub(crate) async fn check(
    links: &[Arc<Link>],
    copies: Copies,
    address: &str,
    limit: Duration,
) -> Result<()> {
    let until = Instant::now() + REPLICA_GRACE.min(limit / 3);
    let copies = Copies {
        // at least 1 ms: WAIT treats 0 as no limit
        timeout: copies.timeout.min(limit / 6).max(Duration::from_millis(1)),
        ..copies
    };
    let refuse = |reason| Err(Error::InvalidConfig { reason });
    for link in links {
        loop {
            let acks = match count_replicas(link, copies).await {
                Ok(acks) => acks,
                Err(error)
                    if copies.fsync
                        && matches!(
                            error.kind(),
                            StoreErrorKind::Other | StoreErrorKind::UnknownCommand
                        ) =>
                {
                    return refuse(format!(
                        "fsync requires Redis 7.2 or Valkey, with `appendonly yes`; {address} replied: {}",
                        error.said()
                    ));
                }
                Err(source) => {
                    return Err(Error::Connect {
                        address: address.to_owned(),
                        source: source.of_a_read(),
                    });
                }
            };
            if acks.replicas >= copies.replicas {
                // the disk may be slow, and each acquire checks it again
                break;
            }
            if Instant::now() >= until {
                return refuse(format!(
                    "the option `replicas` is {}, but of the replicas of {} only {} acknowledged: every acquire would fail; lower it, or add replicas",
                    copies.replicas,
                    link.address(),
                    acks.replicas
                ));
            }
            sleep(POLL).await;
        }
    }
    Ok(())
}

/// Sends a WAIT that belongs to no script, and returns what the server counts.
async fn count_replicas(link: &Link, copies: Copies) -> Result<Acks, StoreError> {
    let (_, connection) = link.up().await?;
    // a WAIT prompts replicas that have not acknowledged yet
    send_wait(&connection, copies, link.limit())
        .await
        .map_err(|failure| link.failed(failure))
}
