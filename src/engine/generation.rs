//! What a guard stands for: one unbroken stretch of holding a lock, from the first hold to the last, or to the loss.

use std::{
    num::{NonZeroU32, NonZeroU64},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::sync::Notify;
use tracing::Level;

use super::{
    kind::Kind,
    lease::{Lease, Millis},
    watches::{Watched, Watches},
};
use crate::{
    clock::Instant,
    error::{LossReason, StoreErrorKind},
    log,
    meter::{self, HoldEnd, Meter},
    owner::OwnerId,
    store::Epoch,
};

/// A generation is shared by its hold and by its guards. It never comes back: a loss is final, and so is a release.
#[derive(Debug)]
pub(crate) struct Generation {
    /// The name under which the server records it.
    pub(crate) owner: OwnerId,
    /// One fencing token for all holds, if the kind of the first has one.
    pub(crate) token: Option<NonZeroU64>,
    /// When it was asked for.
    pub(crate) since: Instant,
    /// Which leg of a relay it is.
    pub(crate) leg: Leg,
    books: Mutex<Books>,
    /// Told when it ends. Never while a mutex is held: wakers are the user's code.
    pub(crate) ended: Notify,
}

/// When the server confirmed the record of a generation, and how often that has changed hands since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Leg {
    /// When its answer was heard, and over which connection.
    pub(crate) confirmed: Instant,
    pub(crate) epoch: Epoch,
    pub(crate) number: u32,
    /// How many replicas had it then, if that was asked: see [`counted`](crate::store::Acks::counted).
    pub(crate) replicas: Option<u8>,
}

impl Leg {
    pub(crate) fn first(confirmed: Instant, epoch: Epoch, replicas: Option<u8>) -> Self {
        Self { confirmed, epoch, number: 0, replicas }
    }
}

/// The books of a generation. Locked after its hold's state, never before.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Books {
    /// Holds taken and not given back.
    pub(crate) count: u32,
    /// Guards that are alive, also those of a generation that has ended.
    pub(crate) guards: u32,
    /// Until when it may be relied on; only confirmed answers move it.
    pub(crate) deadline: Instant,
    watches: Watches,
    /// How often a lease is told to the server again, if others may cut it short.
    pub(crate) kept_every: Option<Millis>,
    /// When the watchdog is to renew it, or to ask for it, next.
    pub(crate) renew_at: Option<Instant>,
    /// The next renewal asks whether the record is still there, also where no hold is renewed.
    pub(crate) to_be_checked: bool,
    /// How many replicas must have a renewal before it counts.
    pub(crate) replicas: u32,
    pub(crate) end: Option<End>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Released,
    Lost(LossReason),
    /// Given up, and the server refused the release.
    Refused(StoreErrorKind),
    /// Given up, and the name with it, as no reply came: whether it is released is found out in the background.
    Unconfirmed,
}

/// One hold of a generation, as its guard knows it.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) generation: Arc<Generation>,
    /// Its entry in the watchdog's books.
    watch: Option<NonZeroU32>,
    /// How many replicas had it when it was acquired, if that was asked.
    pub(crate) replicas: Option<u8>,
    /// Its guard counts no more: it was given up, or what it lost was taken note of.
    is_left: AtomicBool,
}

impl Ticket {
    /// Its hold is not renewed any more.
    pub(crate) fn unwatch(&self) {
        let mut books = self.generation.books();
        let at = books.watches.iter().position(|watched| Some(watched.ticket) == self.watch);
        if let Some(at) = at {
            books.watches.remove(at);
        }
    }

    /// Whether its guard counts, for the last time.
    pub(crate) fn leave(&self) -> bool {
        // only the flag itself is asked about: what it counts for is in the books, which have a mutex
        !self.is_left.swap(true, Ordering::Relaxed)
    }
}

/// What an acquire was granted.
pub(crate) struct Grant {
    pub(crate) sent: Instant,
    pub(crate) lease: Lease,
    /// Where somebody else's release granted it: until when it may be relied on at first, and when it is to be renewed.
    pub(crate) first: Option<First>,
    /// How often a lease is told to the server again.
    pub(crate) kept_every: Option<Millis>,
    pub(crate) token: Option<NonZeroU64>,
    pub(crate) copied: Copied,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct First {
    pub(crate) until: Instant,
    pub(crate) renew_at: Instant,
}

impl Grant {
    /// With nothing besides.
    pub(crate) fn of(sent: Instant, lease: Lease) -> Self {
        Self { sent, lease, first: None, kept_every: None, token: None, copied: Copied::default() }
    }

    /// Until when it may be relied on, before any renewal.
    pub(crate) fn valid_until(&self) -> Instant {
        self.first.map_or_else(|| self.lease.valid_until(self.sent), |first| first.until)
    }
}

/// To how many replicas.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Copied {
    /// So many must have each renewal.
    pub(crate) wanted: u32,
    /// So many had the acquire, if that was asked.
    pub(crate) had: Option<u8>,
}

impl Generation {
    /// A generation without a hold: the first comes with [`Generation::add`].
    pub(crate) fn new(owner: &OwnerId, grant: &Grant, leg: Leg) -> Arc<Self> {
        Arc::new(Self {
            owner: owner.clone(),
            token: grant.token,
            since: grant.sent,
            leg,
            books: Mutex::new(Books {
                count: 0,
                guards: 0,
                deadline: grant.sent,
                watches: Watches::None,
                kept_every: grant.kept_every,
                renew_at: None,
                to_be_checked: false,
                replicas: 0,
                end: None,
            }),
            ended: Notify::new(),
        })
    }

    pub(crate) fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One hold more, confirmed by the server.
    pub(crate) fn add(self: &Arc<Self>, grant: &Grant) -> Ticket {
        let mut books = self.books();
        books.count += 1;
        books.guards += 1;
        books.replicas = books.replicas.max(grant.copied.wanted);
        // the copies of an outer hold may end before
        if books.count == 1 || grant.copied.had.map_or(0, u32::from) >= books.replicas {
            books.deadline = books.deadline.max(grant.valid_until());
        }
        let mut watch = None;
        if let Lease::Watched { ttl, times } = grant.lease {
            let last = books.watches.iter().map(|watched| watched.ticket).max();
            let ticket = last.and_then(|last| last.checked_add(1)).unwrap_or(NonZeroU32::MIN);
            books.watches.push(Watched { ticket, ttl, times }, grant.sent);
            books.renew_by(grant.first.map_or(grant.sent + ttl.duration() / 3, |first| first.renew_at));
            watch = Some(ticket);
        } else if let Some(period) = grant.kept_every {
            books.kept_every = Some(period);
            books.renew_by(grant.sent + period.duration());
        }
        Ticket { generation: Arc::clone(self), watch, replicas: grant.copied.had, is_left: AtomicBool::new(false) }
    }

    /// Tells its guards that it has ended, and whoever counts. `lost`: why, and how many holds its guards had.
    pub(crate) fn tell_end(&self, kind: &Arc<dyn Kind>, meter: Meter, lost: Option<(LossReason, u32)>) {
        self.ended.notify_waiters();
        if let Some((reason, holds)) = lost.filter(|(reason, _)| *reason != LossReason::ShutDown) {
            log::later!(WARN, lock = kind.name(), owner = self.owner, holds = holds, reason = reason; "lock lost");
        }
        if !meter::IS_ON && !log::is_heard(Level::DEBUG) {
            return;
        }
        let end = match (lost, self.books().end) {
            (Some((reason, _)), _) => HoldEnd::Lost(reason),
            // nobody was left to lose it
            (None, Some(End::Lost(_))) => HoldEnd::Forgotten,
            (None, _) => HoldEnd::Released,
        };
        let held = self.since.elapsed();
        meter.hold(kind.of(), end, held);
        log::later!(
            DEBUG, lock = kind.name(), kind = kind.about().label, owner = self.owner, held_ms = held.as_millis(),
            end = end.name(); "hold ended"
        );
    }

    /// How much longer it may be relied on; `Err`: no longer.
    pub(crate) fn remaining(&self) -> Result<Duration, End> {
        let books = self.books();
        match books.end {
            Some(end) => Err(end),
            None => match books.deadline.saturating_duration_since(Instant::now()) {
                Duration::ZERO => Err(End::Lost(LossReason::LeaseExpired)),
                remaining => Ok(remaining),
            },
        }
    }
}

impl Books {
    pub(crate) fn is_held(&self) -> bool {
        self.end.is_none()
    }

    /// Renews no later than this.
    pub(crate) fn renew_by(&mut self, at: Instant) {
        self.renew_at = Some(self.renew_at.map_or(at, |known| known.min(at)));
    }

    /// What a renewal sets the TTL to, and after how long it is due again: the longest and the shortest that a hold
    /// asked for. `None`: no hold is renewed, or not any more.
    pub(crate) fn watch(&self) -> Option<(Duration, Duration)> {
        let ttls = || self.watches.iter().filter(|watched| watched.goes_on()).map(|watched| watched.ttl);
        Some((ttls().max()?.duration(), ttls().min()?.duration() / 3))
    }

    /// Whether it has one hold, which is renewed without end and with this TTL, and no renewal is due.
    pub(crate) fn is_watched_alone(&self, ttl: Duration, now: Instant) -> bool {
        let alone = self.is_held() && (self.count, self.guards) == (1, 1) && self.kept_every.is_none();
        let plain = |watched: &Watched| watched.times.is_none() && watched.ttl.duration() == ttl;
        alone && matches!(&self.watches, Watches::One(one) if plain(one)) && self.renew_at.is_some_and(|at| now < at)
    }

    /// A renewal sent at this instant was confirmed. It counts for those that were due.
    pub(crate) fn count_renewal(&mut self, sent: Instant) {
        match &mut self.watches {
            Watches::None => {}
            Watches::One(watched) => watched.count(),
            Watches::Many(many) => {
                for (watched, due) in many.iter_mut().filter(|(_, due)| *due <= sent) {
                    watched.count();
                    *due = watched.counts_from(sent);
                }
            }
        }
    }

    /// A hold is given back: by its ticket, or without one.
    pub(crate) fn leave(&mut self, ticket: Option<&Ticket>) {
        self.leave_watch(ticket);
        if self.count == 0 {
            self.end = Some(End::Released);
        }
    }

    /// The same, where somebody else still has a hold.
    pub(crate) fn leave_watch(&mut self, ticket: Option<&Ticket>) {
        self.count = self.count.saturating_sub(1);
        let count = self.watches.iter().len();
        let at = match ticket {
            Some(ticket) => self.watches.iter().rposition(|watched| Some(watched.ticket) == ticket.watch),
            // nobody knows which one it was
            None => count.checked_sub(1).filter(|_| count > self.count as usize),
        };
        if let Some(at) = at {
            self.watches.remove(at);
        }
    }

    /// From here on no hold is renewed.
    pub(crate) fn stop_watching(&mut self) {
        self.watches = Watches::None;
        (self.kept_every, self.renew_at) = (None, None);
    }
}

#[cfg(test)]
mod tests {
    use std::hash::{Hash, Hasher};

    use super::*;
    use crate::owner::ClientId;

    // what a model checker needs: see `transitions/tests/model.rs`

    impl Generation {
        /// Another one, which is the same.
        pub(in crate::engine) fn copied(&self) -> Arc<Self> {
            let Self { owner, token, since, leg, books, ended: _ } = self;
            let books = books.lock().unwrap().clone();
            Arc::new(Self {
                owner: owner.clone(),
                token: *token,
                since: *since,
                leg: *leg,
                books: Mutex::new(books),
                ended: Notify::new(),
            })
        }
    }

    impl Ticket {
        /// The same ticket of a generation that was copied.
        pub(in crate::engine) fn copied_to(&self, generation: Arc<Generation>) -> Self {
            let Self { generation: _, watch, replicas, is_left } = self;
            Self { generation, watch: *watch, replicas: *replicas, is_left: is_left.load(Ordering::Relaxed).into() }
        }

        pub(in crate::engine) fn hash_own<H: Hasher>(&self, hasher: &mut H) {
            (self.watch, self.is_left.load(Ordering::Relaxed)).hash(hasher);
        }
    }

    impl Books {
        /// Hashes what is not an instant, and hands those over.
        pub(in crate::engine) fn hash_by<H: Hasher>(&self, hasher: &mut H, mut instant: impl FnMut(&mut H, Instant)) {
            let Self { count, guards, deadline, watches, kept_every, renew_at, to_be_checked, replicas, end } = self;
            let end = end.map(|end| match end {
                End::Released => (0, 0),
                End::Lost(reason) => (1, reason as u8),
                End::Refused(kind) => (2, kind as u8),
                End::Unconfirmed => (3, 0),
            });
            (count, guards, kept_every.map(Millis::get), to_be_checked, replicas, end, renew_at.is_some()).hash(hasher);
            [*deadline].iter().chain(renew_at).for_each(|at| instant(hasher, *at));
            (std::mem::discriminant(watches), watches.iter().len()).hash(hasher);
            watches.iter().for_each(|Watched { ticket, ttl, times }| (ticket, ttl.get(), times).hash(hasher));
            if let Watches::Many(many) = watches {
                for (_, from) in many {
                    instant(hasher, *from);
                }
            }
        }
    }

    /// Nested holds keep their own settings, whichever goes first, and one needs no allocation of its own.
    #[test]
    fn each_hold_takes_its_own_watch_along() {
        let ttls = [9, 30, 3].map(|seconds| Millis::of(Duration::from_secs(seconds)));
        let sent = Instant::now();
        let grant = |ttl| Grant::of(sent, Lease::Watched { ttl, times: None });
        let owner = OwnerId::named(&ClientId::random(), "me").unwrap();
        let generation = Generation::new(&owner, &grant(ttls[0]), Leg::first(sent, Epoch::FIRST, None));
        let tickets = ttls.map(|ttl| generation.add(&grant(ttl)));
        let watch = || generation.books().watch().map(|(ttl, period)| (ttl.as_secs(), period.as_secs()));
        assert_eq!(watch(), Some((30, 1)));
        generation.books().leave(Some(&tickets[1]));
        assert_eq!(watch(), Some((9, 1)));
        generation.books().leave(Some(&tickets[2]));
        assert_eq!(watch(), Some((9, 3)));
        generation.books().leave(Some(&tickets[0]));
        assert_eq!((watch(), generation.books().end), (None, Some(End::Released)));
    }

    #[test]
    fn a_watch_ends_with_its_last_renewal() {
        let lease = Lease::Watched { ttl: Millis::of(Duration::from_secs(9)), times: NonZeroU32::new(3) };
        let grant = Grant::of(Instant::now(), lease);
        let generation = Generation::new(
            &OwnerId::named(&ClientId::random(), "me").unwrap(),
            &grant,
            Leg::first(grant.sent, Epoch::FIRST, None),
        );
        let _ticket = generation.add(&grant);
        for renewals_left in [2, 1] {
            assert!(generation.books().watch().is_some(), "{renewals_left} left");
            generation.books().count_renewal(Instant::now());
        }
        assert!(generation.books().watch().is_none());
        generation.books().count_renewal(Instant::now());
        assert!(generation.books().watch().is_none(), "it does not begin anew");
    }

    /// A client may hold a hundred thousand locks: what one costs is a promise (see `benches/watchdog.rs`).
    #[test]
    #[cfg(target_pointer_width = "64")]
    fn it_is_small() {
        assert!(size_of::<Watches>() <= 24, "{}", size_of::<Watches>());
        assert!(size_of::<Books>() <= 64, "{}", size_of::<Books>());
    }
}
