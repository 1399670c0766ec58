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

use crate::{
    clock::Instant,
    error::{LossReason, StoreErrorKind},
    options::validity,
    owner::OwnerId,
};

/// A generation is shared by its hold and by its guards. It never comes back: a loss is final, and so is a release.
#[derive(Debug)]
pub(crate) struct Generation {
    /// The name under which the server records it.
    pub(crate) owner: OwnerId,
    /// One fencing token for all holds, if the kind of the first has one.
    pub(crate) token: Option<NonZeroU64>,
    books: Mutex<Books>,
    /// Told when it ends. Never while a mutex is held: wakers are the user's code.
    pub(crate) ended: Notify,
}

/// The books of a generation. Locked after its hold's state, never before.
#[derive(Debug)]
pub(crate) struct Books {
    /// Holds taken and not given back.
    pub(crate) count: u32,
    /// Guards that are alive, also those of a generation that has ended.
    pub(crate) guards: u32,
    /// Until when it may be relied on; only confirmed answers move it.
    pub(crate) deadline: Instant,
    /// How the watchdog renews it: an entry for each hold that it renews.
    watches: Vec<Watched>,
    /// How often a lease is told to the server again, if others may cut it short.
    pub(crate) kept_every: Option<Duration>,
    /// When the watchdog is to renew it, or to ask for it, next.
    pub(crate) renew_at: Option<Instant>,
    /// The next renewal asks whether the record is still there, also where no hold is renewed.
    pub(crate) to_be_checked: bool,
    pub(crate) end: Option<End>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Released,
    Lost(LossReason),
    /// Given up, and the server refused the release.
    Refused(StoreErrorKind),
}

/// How the watchdog renews one hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Watch {
    /// What each renewal sets the TTL to; it is due after a third.
    pub(crate) ttl: Duration,
    /// How many are left; `None`: no limit.
    pub(crate) renewals: Option<u32>,
}

#[derive(Debug)]
struct Watched {
    /// The ticket that it belongs to.
    ticket: NonZeroU32,
    watch: Watch,
}

impl Watched {
    fn goes_on(&self) -> bool {
        self.watch.renewals != Some(0)
    }
}

/// One hold of a generation, as its guard knows it.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) generation: Arc<Generation>,
    /// Its entry in the watchdog's books.
    watch: Option<NonZeroU32>,
    /// Its guard counts no more: it was given up, or what it lost was taken note of.
    is_left: AtomicBool,
}

impl Ticket {
    /// Its hold is not renewed any more.
    pub(crate) fn unwatch(&self) {
        if self.watch.is_some() {
            self.generation.books().watches.retain(|watched| Some(watched.ticket) != self.watch);
        }
    }

    /// Whether its guard counts, for the last time.
    pub(crate) fn leave(&self) -> bool {
        !self.is_left.swap(true, Ordering::AcqRel)
    }
}

/// What an acquire was granted.
pub(crate) struct Grant {
    pub(crate) sent: Instant,
    pub(crate) lease: Duration,
    pub(crate) watch: Option<Watch>,
    /// How often a lease is told to the server again.
    pub(crate) kept_every: Option<Duration>,
    pub(crate) token: Option<NonZeroU64>,
}

impl Generation {
    /// A generation without a hold: the first comes with [`Books::enter`].
    pub(crate) fn new(owner: OwnerId, grant: &Grant) -> Arc<Self> {
        Arc::new(Self {
            owner,
            token: grant.token,
            books: Mutex::new(Books {
                count: 0,
                guards: 0,
                deadline: grant.sent,
                watches: Vec::new(),
                kept_every: grant.kept_every,
                renew_at: None,
                to_be_checked: false,
                end: None,
            }),
            ended: Notify::new(),
        })
    }

    pub(crate) fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One hold more, confirmed by the server.
    pub(crate) fn enter(self: &Arc<Self>, grant: &Grant) -> Ticket {
        let mut books = self.books();
        books.count += 1;
        books.guards += 1;
        books.deadline = books.deadline.max(grant.sent + validity(grant.lease));
        let watch = grant.watch.map(|watch| {
            let last = books.watches.iter().map(|watched| watched.ticket).max();
            let ticket = last.and_then(|last| last.checked_add(1)).unwrap_or(NonZeroU32::MIN);
            books.watches.push(Watched { ticket, watch });
            books.renew_by(grant.sent + watch.ttl / 3);
            ticket
        });
        if watch.is_none()
            && let Some(period) = grant.kept_every
        {
            books.renew_by(grant.sent + period);
        }
        Ticket { generation: Arc::clone(self), watch, is_left: AtomicBool::new(false) }
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
        let ttls = || self.watches.iter().filter(|watched| watched.goes_on()).map(|watched| watched.watch.ttl);
        Some((ttls().max()?, ttls().min()? / 3))
    }

    /// A renewal was confirmed.
    pub(crate) fn count_renewal(&mut self) {
        for watched in &mut self.watches {
            watched.watch.renewals = watched.watch.renewals.map(|left| left.saturating_sub(1));
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
        let at = match ticket {
            Some(ticket) => self.watches.iter().rposition(|watched| Some(watched.ticket) == ticket.watch),
            // nobody knows which one it was
            None if self.watches.len() > self.count as usize => self.watches.len().checked_sub(1),
            None => None,
        };
        if let Some(at) = at {
            self.watches.remove(at);
        }
    }

    /// From here on no hold is renewed.
    pub(crate) fn stop_watching(&mut self) {
        self.watches.clear();
        (self.kept_every, self.renew_at) = (None, None);
    }
}
