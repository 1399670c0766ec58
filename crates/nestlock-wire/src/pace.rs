//! Decides when a client's links to one server try to connect: one at a time, and less often the
//! longer the server is away.
//!
//! An attempt at a closed port costs only a packet. It is made four to five times a second, so that
//! a server that comes back is noticed within 250 ms. A server that accepts connections and then
//! does not serve has work with each attempt, so it is left alone for a quarter of the time that it
//! has been away, up to 2 s.
//!
//! A reply READONLY makes all links reconnect (`Pace::search`), after the replies in flight: the
//! address may lead to another server now, and a subscription would stay with the old one. While
//! the server stays a replica, this is repeated after 0.5 s, then less often, up to every 5 s.
//! Decision 18.
//!
//! A subscription alone that stays with another server than the scripts costs waiters the poll cap,
//! until a request is refused.

use std::{
    future::Future,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use tokio::{
    sync::{Notify, watch},
    time::sleep_until,
};
use uuid::Uuid;

use crate::{failure::NotConnected, log};

/// Time between two attempts: the minimum, the maximum at a closed port, and the maximum elsewhere.
const ATTEMPT_INTERVALS: (Duration, Duration, Duration) = (
    Duration::from_millis(10),
    Duration::from_millis(235),
    Duration::from_secs(2),
);
/// Minimum time between two connections of one link, in case they break at once.
const BETWEEN_CONNECTIONS: Duration = Duration::from_millis(20);
/// Time between two searches for another server at the same address: the first time, and the
/// maximum.
const SEARCHES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));

/// The back-off between attempts to connect, shared by a client's links to one server.
///
/// ```
/// # use std::sync::Arc;
/// # use nestlock_wire::{Dialer, Link, Pace};
/// # fn example(dialer: Dialer) {
/// let pace = Arc::new(Pace::new());
/// // both links to one server
/// let requests = Link::lazy(dialer.clone(), &pace);
/// let pops = Link::blocking(dialer, &pace);
/// # drop((requests, pops));
/// # }
/// ```
#[derive(Debug)]
pub struct Pace {
    /// Locked by the link that may connect now.
    outage: tokio::sync::Mutex<Outage>,
    /// Makes the next attempt due at once.
    is_due: Notify,
    /// Counts the searches for another server.
    searches: watch::Sender<u64>,
    next_search: Mutex<Search>,
}

/// Failed attempts since the last success.
#[derive(Debug, Default)]
struct Outage {
    since: Option<Instant>,
    next: Option<Instant>,
}

#[derive(Debug, Default)]
struct Search {
    pause: Duration,
    not_before: Option<Instant>,
}

impl Default for Pace {
    fn default() -> Self {
        Self::new()
    }
}

impl Pace {
    /// Creates the back-off of a new client.
    #[must_use]
    pub fn new() -> Self {
        Self {
            outage: tokio::sync::Mutex::default(),
            is_due: Notify::new(),
            searches: watch::Sender::new(0),
            next_search: Mutex::default(),
        }
    }

    /// Makes one attempt to connect, when it is due. The first success lets the other links connect
    /// at once. `before`: when this link last connected.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe if the attempt is: the next one may be made at once.
    pub async fn attempt_connect<T>(
        &self,
        before: Option<Instant>,
        attempt: impl Future<Output = Result<T, NotConnected>>,
    ) -> Result<T, NotConnected> {
        if let Some(before) = before {
            sleep_until((before + BETWEEN_CONNECTIONS).into()).await;
        }
        let mut outage = self.outage.lock().await;
        if let Some(next) = outage.next {
            tokio::select! {
                () = sleep_until(next.into()) => {}
                () = self.is_due.notified() => {}
            }
        }
        let began = Instant::now();
        let outcome = attempt.await;
        *outage = match &outcome {
            Ok(_) => Outage::default(),
            Err(error) => {
                let since = *outage.since.get_or_insert(began);
                let pause = pause(since.elapsed(), error.nobody_listens);
                Outage {
                    since: Some(since),
                    next: Some(began + pause),
                }
            }
        };
        outcome
    }

    /// Makes the next attempt due now, because another server is responsible.
    pub fn attempt_now(&self) {
        self.is_due.notify_one();
    }

    /// Makes all links reconnect, unless they did so recently: the server rejects writes, and its
    /// address may lead to another server by now.
    pub(crate) fn search(&self) {
        if self
            .next_search
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_due(Instant::now())
        {
            self.searches.send_modify(|searches| *searches += 1);
            let searches = *self.searches.borrow();
            log::later!(
                WARN, searches = searches;
                "the server is a replica; reconnecting, as its address may lead to another server by now"
            );
        }
    }

    /// Returns a receiver of the search count: when it changes, all links must reconnect.
    pub(crate) fn searches(&self) -> watch::Receiver<u64> {
        self.searches.subscribe()
    }
}

impl Search {
    fn is_due(&mut self, now: Instant) -> bool {
        if self.not_before.is_some_and(|not_before| now < not_before) {
            return false;
        }
        // the last one was long ago: this is another failover
        let fresh = self
            .not_before
            .is_none_or(|not_before| not_before + SEARCHES.1 < now);
        self.pause = if fresh {
            SEARCHES.0
        } else {
            (self.pause * 2).min(SEARCHES.1)
        };
        self.not_before = Some(now + jitter(self.pause, 0.5));
        true
    }
}

/// Returns the time from the start of a failed attempt to the start of the next.
fn pause(outage: Duration, nobody_listens: bool) -> Duration {
    let longest = if nobody_listens {
        ATTEMPT_INTERVALS.1
    } else {
        ATTEMPT_INTERVALS.2
    };
    jitter((outage / 4).clamp(ATTEMPT_INTERVALS.0, longest), 0.2)
}

/// Shortens a pause by up to this share, at random, so that many clients do not connect at once.
///
/// ```
/// use std::time::Duration;
///
/// let pause = nestlock_wire::jitter(Duration::from_secs(2), 0.5);
/// assert!(pause >= Duration::from_secs(1) && pause <= Duration::from_secs(2));
/// ```
#[must_use]
pub fn jitter(pause: Duration, share: f64) -> Duration {
    let chance = f64::from(u32::from_le_bytes(
        *Uuid::new_v4().as_bytes().first_chunk().unwrap_or(&[0; 4]),
    ));
    pause.mul_f64(1.0 - share * chance / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// A pause is a quarter of the outage, and stays short where no server listens.
    #[test]
    fn a_pause_is_a_quarter_of_the_outage_or_short_at_a_closed_port() {
        for (outage, listens, longest) in [
            (ms(0), false, ms(10)),
            (ms(0), true, ms(10)),
            (ms(400), false, ms(100)),
            (ms(400), true, ms(100)),
            (ms(4_000), false, ms(235)),
            (ms(4_000), true, ms(1_000)),
            (ms(600_000), false, ms(235)),
            (ms(600_000), true, ms(2_000)),
        ] {
            for _ in 0..100 {
                let pause = pause(outage, !listens);
                assert!(
                    (longest.mul_f64(0.8)..=longest).contains(&pause),
                    "{outage:?}, {listens}: {pause:?}"
                );
            }
        }
    }

    #[tokio::test]
    async fn another_server_is_tried_at_once() {
        let (pace, now) = (Pace::new(), Instant::now());
        *pace.outage.lock().await = Outage {
            since: Some(now),
            next: Some(now + ms(600_000)),
        };
        pace.attempt_now();
        let knock = pace.attempt_connect(None, async { Ok(()) });
        tokio::time::timeout(ms(60_000), knock)
            .await
            .unwrap()
            .unwrap();
    }

    #[test]
    fn a_server_that_stays_a_replica_is_asked_ever_less_often() {
        let (mut search, start) = (Search::default(), Instant::now());
        let mut searches = |seconds: std::ops::Range<u64>| {
            (seconds.start * 100..seconds.end * 100)
                .filter(|n| search.is_due(start + ms(10 * n)))
                .count()
        };
        let first = searches(0..10);
        assert!((3..=7).contains(&first), "{first} in the first ten seconds");
        let later = searches(10..110);
        assert!((19..=41).contains(&later), "{later} in a hundred seconds");
        // after a quiet time, another failover is noticed as soon as the first
        assert!(searches(200..201) >= 2);
    }
}
