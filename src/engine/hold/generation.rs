//! A generation: one unbroken period of holding a lock, from the first hold to the last release or
//! the loss. This file has its ledger (hold count, deadline, renewals) and the tickets that its
//! guards keep.
//!
//! The deadline counts from just before the last confirmed request was sent: the lease, less 1 %
//! and 2 ms. Each hold keeps its own settings: a generation is renewed to the longest TTL that a
//! hold asks for, as often as the shortest one asks, while one of them has not reached its maximum
//! hold time. Guards share the generation: a late renewal or an old guard cannot touch a newer one,
//! and each guard learns how its own hold ended.

use std::{
    num::{NonZeroU32, NonZeroU64},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use nestlock_wire::{Epoch, clock::Instant, log};
use tokio::sync::Notify;
use tracing::Level;

use super::watches::{Watched, Watches};

use crate::{
    engine::{
        kind::Kind,
        lease::{Keep, Lease, Millis},
    },
    error::{LossReason, StoreErrorKind},
    meter::{self, HoldEnd, Meter},
    owner::OwnerId,
};

/// A period of holding a lock, shared by its hold and its guards. Its end is final, whether by
/// release or by loss.
#[derive(Debug)]
pub(crate) struct Generation {
    /// The owner as the server records it.
    pub(crate) owner: OwnerId,
    /// The fencing token of all its holds. `None` if the kind of the first hold has none.
    pub(crate) token: Option<NonZeroU64>,
    /// [`Grant::sent`] of the first hold.
    pub(crate) since: Instant,
    /// The server's reply that granted the record. A hand-off keeps it.
    pub(crate) confirmed: Confirmed,
    ledger: Mutex<Ledger>,
    /// One of its holds has a note.
    pub(crate) has_note: AtomicBool,
    /// Notified when it ends. Notify it with no mutex locked: wakers are user code.
    pub(crate) ended: Notify,
}

/// The server's reply that granted a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Confirmed {
    /// When the client received it, over the connection `epoch`.
    pub(crate) at: Instant,
    pub(crate) epoch: Epoch,
    /// The number of replicas that had acknowledged the record by then, as
    /// [`counted`](nestlock_wire::Acks::counted). `None`: not requested, or unknown.
    pub(crate) replicas: Option<u8>,
}

/// The client's account of a generation. Lock order: first the state of its hold, then the ledger.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Ledger {
    /// Holds acquired and not given back.
    pub(crate) count: u32,
    /// Live guards, including those of a generation that has ended.
    pub(crate) guards: u32,
    /// Until when guards may rely on the lock. Only confirmed replies move it.
    pub(crate) deadline: Instant,
    watches: Watches,
    /// How often the lease is sent to the server again, if other holders may shorten its TTL.
    pub(crate) renew_every: Option<Millis>,
    /// When the watchdog must next renew the record, or check that it exists.
    pub(crate) renew_at: Option<Instant>,
    /// The next renewal must check that the record exists, even if no hold is renewed.
    pub(crate) to_be_checked: bool,
    /// How many replicas must acknowledge a renewal before it counts.
    pub(crate) replicas: u32,
    pub(crate) end: Option<GenerationEnd>,
}

/// How a generation has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GenerationEnd {
    Released,
    Lost(LossReason),
    /// Given up, but the server refused the release.
    Refused(StoreErrorKind),
    /// Given up, and its name abandoned because no reply came. The client finds out in the
    /// background whether the lock was released.
    Unconfirmed,
}

/// One hold of a generation, as its guard knows it.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) generation: Arc<Generation>,
    /// Its entry in [`Ledger::watches`]. `None` if the watchdog does not renew it.
    watch: Option<NonZeroU32>,
    /// The number of replicas that had acknowledged the acquire. `None`: not requested, or unknown.
    pub(crate) replicas: Option<u8>,
    /// Set once its guard no longer counts: it was given up, or the caller has seen the loss.
    is_left: AtomicBool,
}

impl Ticket {
    /// Marks the guard as gone. Returns `true` on the first call only, so that the guard is
    /// subtracted once.
    pub(crate) fn leave(&self) -> bool {
        // Relaxed is enough: the flag orders no other data. The guard count is under the ledger's
        // mutex.
        !self.is_left.swap(true, Ordering::Relaxed)
    }
}

/// The result of an acquire that was granted.
pub(crate) struct Grant {
    /// When the request was sent: the lease counts from here. If a release granted the lock: when
    /// the waiter learned of that.
    pub(crate) sent: Instant,
    pub(crate) lease: Lease,
    /// Set if another owner's release granted the lock: then the first deadline and renewal differ
    /// from those of `lease`.
    pub(crate) first: Option<First>,
    /// See [`Ledger::renew_every`].
    pub(crate) kept_every: Option<Millis>,
    pub(crate) token: Option<NonZeroU64>,
    pub(crate) copied: Copied,
}

/// The first deadline and renewal of a hold that was granted by a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct First {
    pub(crate) until: Instant,
    pub(crate) renew_at: Instant,
}

impl Grant {
    /// Returns a grant of this lease without a token, replicas or any other extra.
    pub(crate) fn of(sent: Instant, lease: Lease) -> Self {
        Self {
            sent,
            lease,
            first: None,
            kept_every: None,
            token: None,
            copied: Copied::default(),
        }
    }

    /// Returns until when guards may rely on the hold before its first renewal.
    pub(crate) fn valid_until(&self) -> Instant {
        self.first
            .map_or_else(|| self.lease.valid_until(self.sent), |first| first.until)
    }
}

/// The replicas of an acquire.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Copied {
    /// How many must acknowledge each renewal.
    pub(crate) wanted: u32,
    /// How many had acknowledged the acquire. `None`: not requested, or unknown.
    pub(crate) had: Option<u8>,
}

impl Generation {
    /// Creates a generation without a hold: [`Generation::add`] adds the first.
    pub(crate) fn new(owner: &OwnerId, grant: &Grant, confirmed: Confirmed) -> Arc<Self> {
        Arc::new(Self {
            owner: owner.clone(),
            token: grant.token,
            since: grant.sent,
            confirmed,
            ledger: Mutex::new(Ledger {
                count: 0,
                guards: 0,
                deadline: grant.sent,
                watches: Watches::None,
                renew_every: grant.kept_every,
                renew_at: None,
                to_be_checked: false,
                replicas: 0,
                end: None,
            }),
            has_note: AtomicBool::new(false),
            ended: Notify::new(),
        })
    }

    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a hold that the server has confirmed, and returns its ticket.
    pub(crate) fn add(self: &Arc<Self>, grant: &Grant) -> Ticket {
        let mut ledger = self.ledger();
        ledger.count += 1;
        ledger.guards += 1;
        ledger.replicas = ledger.replicas.max(grant.copied.wanted);
        // If fewer replicas have this acquire than an outer hold requires, keep the deadline: on
        // the others the record may still end with the outer lease.
        if ledger.count == 1 || grant.copied.had.map_or(0, u32::from) >= ledger.replicas {
            ledger.deadline = ledger.deadline.max(grant.valid_until());
        }
        let mut watch = None;
        if let Lease::Watched { ttl, max_hold } = grant.lease {
            let until = max_hold.map(|longest| grant.sent + longest.duration());
            let last = ledger.watches.iter().map(|watched| watched.ticket).max();
            let ticket = last
                .and_then(|last| last.checked_add(1))
                .unwrap_or(NonZeroU32::MIN);
            ledger.watches.push(Watched { ticket, ttl, until });
            ledger.renew_by(
                grant
                    .first
                    .map_or(grant.sent + ttl.duration() / 3, |first| first.renew_at),
            );
            watch = Some(ticket);
        } else if let Some(period) = grant.kept_every {
            ledger.renew_every = Some(period);
            ledger.renew_by(grant.sent + period.duration());
        }
        Ticket {
            generation: Arc::clone(self),
            watch,
            replicas: grant.copied.had,
            is_left: AtomicBool::new(false),
        }
    }

    /// Returns a generation of the holds that were left to the lease, without those that guards
    /// hold. `None` if there are none. `ledger`: its own.
    pub(crate) fn left_over(&self, ledger: &Ledger) -> Option<Arc<Self>> {
        let count = ledger.count.saturating_sub(ledger.guards);
        (count > 0).then(|| {
            Arc::new(Self {
                owner: self.owner.clone(),
                token: self.token,
                since: self.since,
                confirmed: self.confirmed,
                ledger: Mutex::new(Ledger {
                    count,
                    guards: 0,
                    watches: Watches::None,
                    ..*ledger
                }),
                has_note: AtomicBool::new(true),
                ended: Notify::new(),
            })
        })
    }

    /// Notifies its guards that it has ended, and reports the end to the log and the metrics.
    /// `lost`: the reason and the number of holds, if it was lost while a guard was alive.
    pub(crate) fn notify_end(
        &self,
        kind: &Arc<dyn Kind>,
        meter: Meter,
        lost: Option<(LossReason, u32)>,
    ) {
        self.ended.notify_waiters();
        if let Some((reason, holds)) = lost.filter(|(reason, _)| *reason != LossReason::ShutDown) {
            log::later!(WARN, lock = kind.name(), owner = self.owner, holds = holds, reason = reason; "lock lost");
        }
        if !meter::IS_ON && !log::is_heard(Level::DEBUG) {
            return;
        }
        let end = match (lost, self.ledger().end) {
            (Some((reason, _)), _) => HoldEnd::Lost(reason),
            (None, None) => HoldEnd::LeftToLease,
            (None, _) => HoldEnd::Released,
        };
        let held = self.since.elapsed();
        meter.hold(kind.of(), end, held);
        log::later!(
            DEBUG, lock = kind.name(), kind = kind.about().label, owner = self.owner, held_ms = held.as_millis(),
            end = end.name(); "hold ended"
        );
    }

    /// Returns how much longer guards may rely on it, or how it has ended. A deadline that has
    /// passed counts as a loss.
    pub(crate) fn remaining(&self) -> Result<Duration, GenerationEnd> {
        let ledger = self.ledger();
        match ledger.end {
            Some(end) => Err(end),
            None => match ledger.deadline.saturating_duration_since(Instant::now()) {
                Duration::ZERO => Err(GenerationEnd::Lost(LossReason::LeaseExpired)),
                remaining => Ok(remaining),
            },
        }
    }
}

impl Ledger {
    pub(crate) fn is_held(&self) -> bool {
        self.end.is_none()
    }

    /// Schedules the next renewal no later than `at`.
    pub(crate) fn renew_by(&mut self, at: Instant) {
        self.renew_at = Some(self.renew_at.map_or(at, |known| known.min(at)));
    }

    /// Returns what a renewal sent at `now` requests (the most that a hold wants) and the time
    /// until the next renewal (a third of the shortest TTL). Returns `None` if no hold is renewed,
    /// or each has reached its maximum hold time.
    pub(crate) fn watch(&self, now: Instant) -> Option<(Keep, Duration)> {
        let live = || {
            let keep = |watched: &Watched| Some((watched.ttl, watched.keep(now)?));
            self.watches.iter().filter_map(keep)
        };
        let (_, (_, keep)) = live().max_by_key(|(_, (ends, _))| *ends)?;
        let shortest = live().map(|(ttl, _)| ttl).min()?;
        Some((keep, shortest.duration() / 3))
    }

    /// Returns the time between two renewals, if a hold is renewed or its lease is sent again.
    pub(crate) fn period(&self) -> Option<Duration> {
        let shortest = self.watches.iter().map(|watched| watched.ttl).min();
        shortest
            .map(|ttl| ttl.duration() / 3)
            .or(self.renew_every.map(Millis::duration))
    }

    /// Returns the longest TTL that a renewal may have set.
    pub(crate) fn longest_ttl(&self) -> Option<Duration> {
        let longest = self.watches.iter().map(|watched| watched.ttl).max();
        longest.map(Millis::duration)
    }

    /// Returns whether it has exactly one hold that is renewed without limit and with this TTL, and
    /// no renewal is due.
    pub(crate) fn is_watched_alone(&self, ttl: Duration, now: Instant) -> bool {
        let alone =
            self.is_held() && (self.count, self.guards) == (1, 1) && self.renew_every.is_none();
        let plain = |watched: &Watched| watched.until.is_none() && watched.ttl.duration() == ttl;
        alone
            && matches!(&self.watches, Watches::One(one) if plain(one))
            && self.renew_at.is_some_and(|at| now < at)
    }

    /// Gives back the hold of `ticket`, or without a ticket any hold. The last one ends the
    /// generation.
    pub(crate) fn leave(&mut self, ticket: Option<&Ticket>) {
        self.count = self.count.saturating_sub(1);
        let watched = self.watches.iter().len();
        if let Some(ticket) = ticket {
            self.unwatch(ticket);
        } else if watched > self.count as usize {
            // It is unknown which hold this is, so drop the newest watch.
            self.watches.remove(watched - 1);
        }
        if self.count == 0 {
            self.end = Some(GenerationEnd::Released);
        }
    }

    /// Stops the renewal of the hold of `ticket`.
    pub(crate) fn unwatch(&mut self, ticket: &Ticket) {
        let at = self
            .watches
            .iter()
            .rposition(|watched| Some(watched.ticket) == ticket.watch);
        if let Some(at) = at {
            self.watches.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::hash::{Hash, Hasher};

    use super::*;
    use crate::owner::ClientId;

    // For the model checker: see `transitions/tests/model.rs`.

    impl Generation {
        /// Returns a copy with its own ledger.
        pub(in crate::engine) fn copied(&self) -> Arc<Self> {
            let Self {
                owner,
                token,
                since,
                confirmed,
                ledger,
                has_note: _,
                ended: _,
            } = self;
            let ledger = ledger.lock().unwrap().clone();
            Arc::new(Self {
                owner: owner.clone(),
                token: *token,
                since: *since,
                confirmed: *confirmed,
                ledger: Mutex::new(ledger),
                has_note: AtomicBool::new(false),
                ended: Notify::new(),
            })
        }
    }

    impl Ticket {
        /// Returns a copy of the ticket, for a copied generation.
        pub(in crate::engine) fn copied_to(&self, generation: Arc<Generation>) -> Self {
            let Self {
                generation: _,
                watch,
                replicas,
                is_left,
            } = self;
            Self {
                generation,
                watch: *watch,
                replicas: *replicas,
                is_left: is_left.load(Ordering::Relaxed).into(),
            }
        }

        pub(in crate::engine) fn hash_own<H: Hasher>(&self, hasher: &mut H) {
            (self.watch, self.is_left.load(Ordering::Relaxed)).hash(hasher);
        }
    }

    impl Ledger {
        /// Hashes all fields except instants, which go to `instant`.
        pub(in crate::engine) fn hash_by<H: Hasher>(
            &self,
            hasher: &mut H,
            mut instant: impl FnMut(&mut H, Instant),
        ) {
            let Self {
                count,
                guards,
                deadline,
                watches,
                renew_every: kept_every,
                renew_at,
                to_be_checked,
                replicas,
                end,
            } = self;
            let end = end.map(|end| match end {
                GenerationEnd::Released => (0, 0),
                GenerationEnd::Lost(reason) => (1, reason as u8),
                GenerationEnd::Refused(kind) => (2, kind as u8),
                GenerationEnd::Unconfirmed => (3, 0),
            });
            (
                count,
                guards,
                kept_every.map(Millis::get),
                to_be_checked,
                replicas,
                end,
                renew_at.is_some(),
            )
                .hash(hasher);
            [*deadline]
                .iter()
                .chain(renew_at)
                .for_each(|at| instant(hasher, *at));
            (std::mem::discriminant(watches), watches.iter().len()).hash(hasher);
            watches.iter().for_each(|Watched { ticket, ttl, until }| {
                (ticket, ttl.get(), until.is_some()).hash(hasher);
            });
            let untils = watches.iter().filter_map(|watched| watched.until);
            untils.for_each(|until| instant(hasher, until));
        }
    }

    fn confirmed(at: Instant) -> Confirmed {
        Confirmed {
            at,
            epoch: Epoch::FIRST,
            replicas: None,
        }
    }

    /// Each nested hold has its own TTL, in whatever order the holds are released.
    #[test]
    fn each_hold_takes_its_own_watch_along() {
        let ttls = [9, 30, 3].map(|seconds| Millis::of(Duration::from_secs(seconds)));
        let sent = Instant::now();
        let grant = |ttl| {
            Grant::of(
                sent,
                Lease::Watched {
                    ttl,
                    max_hold: None,
                },
            )
        };
        let owner = OwnerId::named(&ClientId::random(), "me").unwrap();
        let generation = Generation::new(&owner, &grant(ttls[0]), confirmed(sent));
        let tickets = ttls.map(|ttl| generation.add(&grant(ttl)));
        let watch = || {
            let watch = generation.ledger().watch(sent);
            watch.map(|(keep, period)| (keep.ttl(sent).as_secs(), period.as_secs()))
        };
        assert_eq!(watch(), Some((30, 1)));
        generation.ledger().leave(Some(&tickets[1]));
        assert_eq!(watch(), Some((9, 1)));
        generation.ledger().leave(Some(&tickets[2]));
        assert_eq!(watch(), Some((9, 3)));
        generation.ledger().leave(Some(&tickets[0]));
        assert_eq!(
            (watch(), generation.ledger().end),
            (None, Some(GenerationEnd::Released))
        );
    }

    /// Renewals set the remainder of the maximum hold time, and end with it.
    #[test]
    fn a_watch_ends_with_its_maximum_hold_time() {
        let seconds = Duration::from_secs;
        let lease = Lease::Watched {
            ttl: Millis::of(seconds(9)),
            max_hold: Some(Millis::of(seconds(20))),
        };
        let grant = Grant::of(Instant::now(), lease);
        let owner = OwnerId::named(&ClientId::random(), "me").unwrap();
        let generation = Generation::new(&owner, &grant, confirmed(grant.sent));
        let ticket = generation.add(&grant);
        let keep = |after| {
            let now = grant.sent + seconds(after);
            let watch = generation.ledger().watch(now);
            watch.map(|(keep, _)| keep.ttl(now).as_secs())
        };
        assert_eq!(
            [0, 11, 12, 19, 20, 21].map(keep),
            [Some(9), Some(9), Some(8), Some(1), None, None]
        );
        // another hold without a limit keeps the record for longer
        let plain = Lease::Watched {
            ttl: Millis::of(seconds(6)),
            max_hold: None,
        };
        let other = generation.add(&Grant::of(grant.sent, plain));
        assert_eq!([0, 12, 15, 21].map(keep), [9, 8, 6, 6].map(Some));
        generation.ledger().leave(Some(&other));
        assert_eq!([12, 21].map(keep), [Some(8), None]);
        drop(ticket);
    }

    /// A client may hold 100,000 locks, so their memory is bounded (see `benches/watchdog.rs`).
    #[test]
    #[cfg(target_pointer_width = "64")]
    fn it_is_small() {
        assert!(size_of::<Watches>() <= 32, "{}", size_of::<Watches>());
        assert!(size_of::<Ledger>() <= 72, "{}", size_of::<Ledger>());
    }
}
