//! Inspects locks and accesses guarded keys, by one request each; also reports what the client
//! keeps in memory.

use std::{sync::Arc, time::Duration};

use super::{core::Core, failure::store_error, kind::Kind};
#[cfg(feature = "metrics")]
use crate::meter::Levels;
use nestlock_wire::Call;

use crate::{
    error::{Error, Result},
    owner::OwnerId,
    store::{Guarded, Inspected},
    token::FencingToken,
};

/// Counts of what a [`LockClient`](crate::LockClient) keeps in memory.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = nestlock_embedded::EmbeddedServer::start()?;
/// # let client = nestlock::LockClient::connect(server.url()).await?;
/// let guard = client.mutex("stock")?.lock().await?;
/// let stats = client.stats();
/// assert_eq!((stats.holds, stats.waiters), (1, 0));
/// guard.unlock().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ClientStats {
    /// Number of pairs of lock and owner that are held, being acquired or being released.
    pub holds: usize,
    /// Number of channels subscribed to and of lists popped from: those of locks that this client
    /// waits for, or waited for a moment ago.
    pub channels: usize,
    /// Number of acquires that wait for a release.
    pub waiters: usize,
    /// Number of requests in flight; 0 on `Wire::Fred`.
    pub requests: usize,
    /// Number of releases and cancellations that the background thread still has to settle with the
    /// server.
    pub settling: usize,
    /// How long recent requests took, plus a quarter: a wait with a limit ends at most this and
    /// 40 ms after it. Rises at once with a slow reply, and falls slowly. 0 before the first reply.
    pub round_trip: Duration,
}

impl Core {
    /// Queries the holders of a lock.
    pub(crate) async fn inspect(&self, kind: &Arc<dyn Kind>) -> Result<Inspected> {
        self.enter(kind.name()).await?;
        self.send_inspect(kind).await
    }

    /// Returns whether this is the owner of one acquire whose hold has ended or was handed off.
    /// Then the record does not count for it, whatever it says under its name.
    pub(crate) fn has_ended_for(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> bool {
        owner.turn().is_some()
            && self
                .holds
                .get(kind, owner)
                .is_some_and(|hold| hold.has_ended_for(owner))
    }

    /// Queries the holders without checking that the client is open: the janitor works on after a
    /// shutdown has begun.
    pub(super) async fn send_inspect(&self, kind: &Arc<dyn Kind>) -> Result<Inspected> {
        match self.store.inspect(&kind.inspect()).await {
            Ok(Inspected::WrongKind) => Err(Error::WrongLockKind {
                lock: kind.name().to_string(),
            }),
            Ok(inspected) => Ok(inspected),
            Err(error) => Err(store_error(kind.name(), error)),
        }
    }

    /// Reads or writes a guarded key with `token`. Sends one request and does not retry it.
    pub(crate) async fn guarded(
        &self,
        token: FencingToken,
        call: &Call,
    ) -> Result<Option<Vec<u8>>> {
        let key = call
            .keys
            .first()
            .map_or_else(String::new, ToString::to_string);
        self.enter(&key).await?;
        match self.store.guarded(call).await {
            Ok(Guarded::Done(value)) => Ok(value),
            Ok(Guarded::Stale { seen }) => Err(Error::StaleToken { key, token, seen }),
            Err(error) => Err(store_error(&key, error)),
        }
    }

    /// Returns the counts of what is in memory; all 0 in a fork.
    pub(crate) fn stats(&self) -> ClientStats {
        if !self.store.is_ours() {
            return ClientStats::default();
        }
        ClientStats {
            holds: self.holds.len(),
            channels: self.subscriptions.channels() + self.signals.channels(),
            waiters: self.subscriptions.waiters() + self.signals.waiters(),
            requests: self.store.in_flight(),
            settling: self.janitor.pending(),
            round_trip: self.store.free_round_trip(),
        }
    }

    /// Returns the values of the gauges.
    #[cfg(feature = "metrics")]
    pub(super) fn levels(&self) -> Levels {
        let (mut levels, meter) = (Levels::default(), self.config.meter);
        self.holds.for_each(|hold| {
            if hold.count() > 0 {
                levels.held(meter, hold.kind().of());
            }
        });
        for subscriptions in [&*self.subscriptions, &self.signals] {
            subscriptions.for_each(|what, waiters| levels.waiters(meter, what.of(), waiters));
        }
        levels.under_way(self.store.in_flight());
        levels
    }
}
