//! One acquire with all its options resolved: what it requests, and how long its steps may take.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nestlock_wire::{Call, Copies, clock::Instant};

use crate::{
    engine::{
        core::{Core, REPLY_GRACE},
        hold::{
            hand_off::relayed_lease,
            state::{AcquireMode, HoldRequest},
        },
        kind::{AcquireTerms, Adopts, Kind, WaitId},
        lease::{Lease, Millis},
    },
    error::Result,
    options::{AcquireOptions, Wait, checked_lease, checked_note},
    owner::OwnerId,
};

/// One call that acquires a lock, with all options resolved.
pub(crate) struct Acquire<'a> {
    pub(crate) core: &'a Core,
    pub(crate) kind: &'a Arc<dyn Kind>,
    pub(crate) owner: OwnerId,
    /// The caller passed an owner, rather than acquiring as itself.
    is_named: bool,
    pub(crate) lease: Lease,
    /// The copies that must exist before the acquire counts.
    pub(crate) copies: Option<Copies>,
    pub(crate) waits: bool,
    /// The number under which the server may grant the lock to this waiter.
    wait_id: Option<WaitId>,
    /// The owner whose hold is adopted.
    pub(crate) from: Option<&'a OwnerId>,
    /// When the first adopt request that may have been executed was sent. While that is in doubt,
    /// attempts send the same request again.
    first_sent: Mutex<Option<Instant>>,
    /// See [`AcquireOptions::after_a_loss`].
    pub(crate) after_loss: bool,
    pub(crate) started: Instant,
    /// When the wait is over; `None`: never.
    pub(crate) deadline: Option<Instant>,
}

impl<'a> Acquire<'a> {
    pub(crate) fn new(
        core: &'a Core,
        kind: &'a Arc<dyn Kind>,
        options: &AcquireOptions,
        wait: Wait,
    ) -> Result<Self> {
        core.check_ours(kind.name())?;
        let started = Instant::now();
        if let Some(note) = &options.rare().note {
            checked_note(kind.name(), note)?;
        }
        let checked = |lease| checked_lease(kind.name(), lease).map(Millis::of);
        let max_hold = options.rare().max_hold.map(checked).transpose()?;
        let asked = options.lease.or(options.rare().watchdog_timeout);
        asked.map(checked).transpose()?;
        let ttl = Millis::of(options.ttl(core.config.watchdog_timeout));
        let lease = match (options.lease, asked) {
            (Some(_), _) => Lease::Fixed(ttl),
            (None, None) if kind.about().endless => max_hold.map_or(Lease::Endless, Lease::Fixed),
            (None, _) => Lease::Watched { ttl, max_hold },
        };
        let (waits, copies) = (
            wait != Wait::No,
            core.config
                .copies(options.rare().replicas.unwrap_or(core.config.replicas)),
        );
        // only a plain acquire may be granted by another release: a fixed lease would start short,
        // and replicas and counted renewals need a request of its own
        let is_plain = copies.is_none() && matches!(lease, Lease::Watched { max_hold: None, .. });
        Ok(Self {
            core,
            kind,
            lease,
            copies,
            waits,
            wait_id: (waits && is_plain && kind.about().own_channel)
                .then(|| WaitId::next(&core.owner_locks_taken)),
            from: None,
            first_sent: Mutex::default(),
            after_loss: options.rare().after_loss,
            started,
            deadline: wait.until(started),
            owner: core.resolve(kind, options)?,
            is_named: options.rare().owner.is_some(),
        })
    }

    /// Returns how this call acquires a lock of this kind.
    pub(crate) fn acquire_mode(&self, kind: &Arc<dyn Kind>, waits: bool) -> AcquireMode<'_> {
        let about = kind.about();
        let max_holds = self.core.config.max_holds.min(about.max_holds);
        AcquireMode {
            about,
            waits,
            adopts: self.adopts(),
            max_holds,
            after_loss: self.after_loss,
            named: self.is_named.then_some(&self.owner),
            turn: self.owner.turn().filter(|_| !self.is_named),
        }
    }

    fn adopts(&self) -> Option<Adopts> {
        self.from.map(|_| match *self.asked() {
            Some(_) => Adopts::Again,
            None => Adopts::First,
        })
    }

    pub(crate) fn asked(&self) -> MutexGuard<'_, Option<Instant>> {
        self.first_sent
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the script call, and the instant from which its lease counts. A retried adoption
    /// counts from its first request, which may have been executed.
    pub(crate) fn call(&self, request: &HoldRequest, sent: Instant) -> (Call, Instant) {
        let Self {
            kind,
            waits,
            wait_id,
            ..
        } = *self;
        let (owner, lease_ms, holds) = (&request.owner, self.lease.millis(), request.count);
        if let Some(from) = self.from {
            return (
                kind.adopt(from, owner, lease_ms),
                *self.asked().get_or_insert(sent),
            );
        }
        (
            kind.acquire(AcquireTerms {
                owner,
                lease_ms,
                holds,
                waits,
                wait_id,
            }),
            sent,
        )
    }

    /// Returns how many replicas must have the record of a hand-off to this acquire. Returns `None`
    /// if it cannot receive one: only an acquire of a mutex with the default lease and without a
    /// given owner can.
    pub(crate) fn takes(&self) -> Option<u32> {
        let config = &self.core.config;
        let is_plain = config.tuning.relay
            && self.kind.about().relayed
            && self.owner.turn().is_some()
            && !self.is_named
            && self.from.is_none()
            && self.lease == relayed_lease(config.watchdog_timeout);
        is_plain.then(|| self.replicas())
    }

    /// Returns how many replicas must have the record.
    pub(crate) fn replicas(&self) -> u32 {
        self.copies.map_or(0, |copies| copies.replicas)
    }

    /// Returns when an attempt is given up. A waiter gets a short grace after its deadline, or, without
    /// one, after the end of a long outage; an attempt that does not wait gets the time that one request
    /// may take.
    pub(crate) fn attempt_deadline(&self, outage: Option<Instant>) -> Option<Instant> {
        let end = self.deadline.or(outage)?;
        Some(if self.waits {
            // in the grace, the reply to the last attempt says what is wrong
            end + self.core.grace()
        } else {
            self.started + self.core.config.command_timeout() + REPLY_GRACE
        })
    }

    /// Extends `deadline` if something of this owner had to be settled first, such as the release
    /// of a dropped guard: the request that is sent at `asked` still gets a round trip.
    pub(crate) fn after_what_came_first(
        &self,
        deadline: Option<Instant>,
        asked: Instant,
    ) -> Option<Instant> {
        let longer = self
            .deadline
            .map(|_| asked + REPLY_GRACE + self.core.grace());
        deadline.max(longer)
    }

    /// Runs a step of an attempt. Returns `None` if it was given up at `deadline`, which counts as
    /// a cancellation.
    ///
    /// Sets no timer if the command timeout ends the request earlier. Takes the step by reference:
    /// by value, the future would store it once for each branch.
    pub(crate) async fn in_time<F: Future>(
        &self,
        deadline: Option<Instant>,
        step: Pin<&mut F>,
    ) -> Option<F::Output> {
        match deadline {
            Some(deadline) if deadline < Instant::now() + self.core.config.command_timeout() => {
                tokio::select! {
                    biased;
                    output = step => Some(output),
                    () = self.core.sleep_until(deadline) => None,
                }
            }
            _ => Some(step.await),
        }
    }
}
