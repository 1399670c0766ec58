//! A client as the transitions see it. It does what the engine's futures do between two awaits, and
//! nothing else.

use std::sync::{Arc, LazyLock};

use nestlock_wire::{Epoch, clock::Instant};

use super::super::server::{Answer, OVERDUE, Sent, TTL, Verb};

use crate::{
    engine::{
        hold::{
            generation::{Generation, GenerationEnd, Ticket},
            refusal::Refusal,
            state::{
                Abandoned, AcquireMode, AcquirePlan, Due, DueRenewal, Effects, HoldRequest,
                HoldState, Ownership, Residue, ServerSide, SiblingState,
            },
        },
        kind::KindInfo,
        lease::{Lease, Millis},
    },
    error::LossReason,
    owner::OwnerId,
};

pub(super) static LEASE: LazyLock<Lease> = LazyLock::new(|| Lease::Watched {
    ttl: Millis::of(TTL),
    max_hold: None,
});

/// The goal of a future that has the owner lock.
#[derive(Debug, Clone)]
pub(super) enum Wants {
    Acquire {
        after_loss: bool,
    },
    /// Learn how the release of its generation went.
    Unlock(Arc<Generation>),
    /// For the janitor: leave nothing in doubt.
    Settle,
}

/// A future that has the owner lock and waits for a reply.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) request: HoldRequest,
    pub(super) sent: Instant,
    pub(super) wants: Wants,
}

/// One hold, and the futures and guards that have a handle of it.
#[derive(Debug)]
pub(super) struct Hold {
    /// The owner's name without a suffix.
    pub(super) caller: OwnerId,
    pub(super) state: HoldState,
    /// The owner's next call finds this hold.
    pub(super) registered: bool,
    pub(super) turn: Option<Turn>,
    pub(super) guards: Vec<Ticket>,
    /// The generation that began last.
    pub(super) newest: Option<Arc<Generation>>,
    /// Calls of `unlock` that wait for the owner lock.
    pub(super) unlocks: Vec<Arc<Generation>>,
}

impl Hold {
    pub(super) fn new(owner: &OwnerId, now: Instant) -> Self {
        let state = HoldState::new(owner.clone(), now);
        Self {
            caller: owner.clone(),
            state,
            registered: true,
            turn: None,
            guards: Vec::new(),
            newest: None,
            unlocks: Vec::new(),
        }
    }

    /// Adds the guard of a new generation, or of a nested hold.
    pub(super) fn add_guard(&mut self, guard: Ticket) {
        self.newest = Some(Arc::clone(&guard.generation));
        self.guards.push(guard);
    }

    /// Returns whether the record was to go with this generation. If a nested acquire was granted
    /// after it was given up, the record goes with the newer one, whose own `unlock` reports that.
    fn was_last(&self, generation: &Arc<Generation>) -> bool {
        let newest = self.newest.as_ref();
        self.state.wanted() == 0 && newest.is_some_and(|newest| Arc::ptr_eq(newest, generation))
    }

    pub(super) fn valid_guards(&self, now: Instant) -> impl Iterator<Item = &Ticket> {
        self.guards
            .iter()
            .filter(move |guard| is_valid(&guard.generation, now))
    }
}

/// Returns whether a guard of this generation reports itself as valid.
pub(super) fn is_valid(generation: &Generation, now: Instant) -> bool {
    let ledger = generation.ledger();
    ledger.end.is_none() && ledger.deadline > now
}

/// A renewal in flight.
#[derive(Debug, Clone)]
pub(super) struct Renewal {
    pub(super) generation: Arc<Generation>,
    pub(super) sent: Instant,
    pub(super) lease: std::time::Duration,
    pub(super) period: std::time::Duration,
}

/// The receiver of a reply.
#[derive(Debug, Clone)]
pub(super) enum To {
    Unawaited,
    /// The future that has the owner lock of this hold.
    Turn(usize),
    Watchdog(usize, Renewal),
}

/// What a client reports to the world after a change.
#[derive(Debug)]
pub(super) enum Told {
    Wrong(&'static str),
    /// How a call of `unlock` ended. `was_last`: the record was to have no hold left.
    Unlocked {
        generation: Arc<Generation>,
        was_last: bool,
        how: Result<(), LossReason>,
    },
    /// The first hold of a generation.
    Begun(OwnerId),
}

#[derive(Debug)]
pub(super) struct Client {
    pub(super) owner: OwnerId,
    pub(super) max_holds: u32,
    pub(super) holds: Vec<Hold>,
    /// Number of names that were retired.
    pub(super) suffix: u64,
    pub(super) epoch: Epoch,
    /// Requests that the server has not executed, in the order in which they were sent.
    pub(super) sent: Vec<(Sent, To)>,
    /// Replies of this epoch, in order. `None`: the server refused the request.
    pub(super) answers: Vec<(Option<Answer>, To)>,
    /// Names that the janitor has yet to release.
    pub(super) ghosts: Vec<OwnerId>,
    pub(super) told: Vec<Told>,
}

fn mode(max_holds: u32, after_loss: bool, named: Option<&OwnerId>) -> AcquireMode<'_> {
    AcquireMode {
        about: KindInfo::plain("reentrant"),
        waits: false,
        adopts: None,
        max_holds,
        after_loss,
        named,
        turn: None,
    }
}

impl Client {
    pub(super) fn new(owner: &OwnerId, max_holds: u32) -> Self {
        Self {
            owner: owner.clone(),
            max_holds,
            holds: Vec::new(),
            suffix: 0,
            epoch: Epoch::FIRST,
            sent: Vec::new(),
            answers: Vec::new(),
            ghosts: Vec::new(),
            told: Vec::new(),
        }
    }

    pub(super) fn wrong(&mut self, what: &'static str) {
        self.told.push(Told::Wrong(what));
    }

    /// Changes a hold as `Hold::change` does, and checks the effects.
    pub(super) fn change<T>(
        &mut self,
        at: usize,
        transition: impl FnOnce(&mut HoldState, &mut Effects) -> T,
    ) -> T {
        let hold = &mut self.holds[at];
        let live = |hold: &Hold| {
            hold.guards
                .iter()
                .map(|guard| guard.generation.ledger().is_held())
                .collect::<Vec<_>>()
        };
        let (before, mut effects) = (live(hold), Effects::default());
        let outcome = transition(&mut hold.state, &mut effects);
        hold.state.forget_ended();
        let told = |generation: &Arc<Generation>| {
            effects
                .ended
                .as_ref()
                .is_some_and(|ended| Arc::ptr_eq(ended, generation))
        };
        let ended = hold
            .guards
            .iter()
            .zip(before)
            .filter(|(guard, live)| *live && !guard.generation.ledger().is_held());
        if !ended.map(|(guard, _)| &guard.generation).all(told) {
            self.wrong("its guards are notified");
        }
        let hold = &self.holds[at];
        if hold.state.held().is_some() && hold.state.next_poll(OVERDUE).is_none() {
            self.wrong("its end is noticed");
        }
        outcome
    }

    /// Returns the hold that the owner's next call finds.
    pub(super) fn registered(&self) -> Option<usize> {
        self.holds
            .iter()
            .position(|hold| hold.registered && hold.caller == self.owner)
    }

    /// Hands a hold off, as `Core::hand_off` does: from here on its guard is another acquire's.
    /// Returns `false` if that is not possible.
    pub(super) fn hand_off(&mut self, at: usize, guard: usize, now: Instant) -> bool {
        let (ticket, epoch) = (self.holds[at].guards.remove(guard), self.epoch);
        let handed = self.change(at, |state, effects| {
            state.hand_off(&ticket, epoch, TTL, now, effects)
        });
        let Some(next) = handed else { return false };
        // The record stays.
        self.told.push(Told::Unlocked {
            generation: Arc::clone(&ticket.generation),
            was_last: false,
            how: Ok(()),
        });
        self.told.push(Told::Begun(next.generation.owner.clone()));
        self.holds[at].add_guard(next);
        true
    }

    fn post(&mut self, owner: &OwnerId, verb: Verb, to: To) {
        self.sent.push((
            Sent {
                owner: owner.clone(),
                verb,
                epoch: self.epoch,
            },
            to,
        ));
    }

    /// Sends a planned request. The caller has the owner lock.
    fn send(&mut self, at: usize, request: HoldRequest, wants: Wants, now: Instant) {
        let (epoch, holds) = (self.epoch, request.count);
        self.change(at, |state, _| {
            if !request.is_release {
                state.ends = state.ends.max(LEASE.record_ends(now));
            }
            state.send(&request, epoch, now);
        });
        let verb = if request.is_release {
            Verb::Release { holds }
        } else {
            Verb::Acquire { holds }
        };
        self.post(&request.owner, verb, To::Turn(at));
        self.holds[at].turn = Some(Turn {
            request,
            sent: now,
            wants,
        });
    }

    /// Sends a release, as `Core::agree` does. Returns `false` if no release is needed.
    fn agree(&mut self, at: usize, wants: Wants, now: Instant) -> bool {
        let Some(request) = self.holds[at].state.plan_release() else {
            return false;
        };
        self.send(at, request, wants, now);
        true
    }

    /// Attempts to acquire, if the owner lock is free.
    pub(super) fn acquire(&mut self, after_loss: bool, now: Instant) {
        let at = self.registered().unwrap_or_else(|| {
            self.holds.push(Hold::new(&self.owner, now));
            self.holds.len() - 1
        });
        // Otherwise it waits for the owner lock. That is the same as an attempt that begins later.
        if self.holds[at].turn.is_none() {
            self.go_on_acquiring(at, after_loss, now);
        }
    }

    pub(super) fn go_on_acquiring(&mut self, at: usize, after_loss: bool, now: Instant) {
        let (caller, inside) = (
            self.holds[at].caller.clone(),
            self.holds[at]
                .guards
                .iter()
                .find(|guard| guard.generation.ledger().is_held()),
        );
        // Inside a hold of a mutex, its owner is named: it may be another one than the first.
        let inside = inside.map(|guard| guard.generation.owner.clone());
        let named = inside.as_ref().filter(|_| caller.turn().is_some());
        let mode = mode(self.max_holds, after_loss, named);
        let siblings = SiblingState {
            caller: &caller,
            sibling: None,
            lost_sibling: None,
            suffix: self.suffix,
            value_in_doubt: false,
        };
        let hold = &self.holds[at];
        let lost = |generation| hold.state.is_current(generation) && !is_valid(generation, now);
        let inside_a_loss = hold.guards.iter().any(|guard| lost(&guard.generation));
        match self.change(at, |state, effects| {
            state.plan(mode, siblings, now, effects)
        }) {
            Ok(AcquirePlan::Send(request)) => {
                if inside_a_loss && !after_loss {
                    self.wrong("its owner is inside what it lost");
                }
                let late = |(sent, _): &(Sent, To)| {
                    sent.epoch != self.epoch && sent.owner == request.owner
                };
                if request.count == 1 && self.sent.iter().any(|sent| late(sent) && sent.0.decides())
                {
                    self.wrong("a name that a late request may use is not used again");
                }
                self.send(at, request, Wants::Acquire { after_loss }, now);
            }
            Ok(AcquirePlan::Agree) => {
                if !self.agree(at, Wants::Acquire { after_loss }, now) {
                    self.wrong("an unsettled hold can be settled");
                }
            }
            Ok(AcquirePlan::Forget) => {
                self.holds[at].registered = false;
                self.tidy(at);
                self.acquire(after_loss, now);
            }
            Err(refusal) => {
                let lost = matches!(refusal, Refusal::Lost(..)) && inside_a_loss && !after_loss;
                // The owner of one acquire whose hold has ended: it was handed off, or a caller that
                // knows of its loss has named it.
                let is_over = matches!(refusal, Refusal::AcquireEnded(..))
                    && (self.holds[at].state.owner.turn() != caller.turn()
                        || named.is_some() && after_loss)
                    && self.holds[at].state.wanted() == 0;
                if !lost && !is_over && !matches!(refusal, Refusal::TooManyHolds(..)) {
                    self.wrong("only acquires inside a loss are refused");
                }
                self.tidy(at);
            }
        }
    }

    /// Gives up a guard. `awaited`: by `unlock`.
    pub(super) fn leave(&mut self, at: usize, guard: usize, awaited: bool, now: Instant) {
        let ticket = self.holds[at].guards.remove(guard);
        match self.change(at, |state, effects| state.leave(&ticket, now, effects)) {
            Ok(()) if awaited => {
                let generation = Arc::clone(&ticket.generation);
                self.holds[at].unlocks.push(generation);
            }
            Err(
                GenerationEnd::Released | GenerationEnd::Refused(_) | GenerationEnd::Unconfirmed,
            ) => self.wrong("a hold with a guard is not released"),
            Ok(()) | Err(GenerationEnd::Lost(_)) => {}
        }
        self.tidy(at);
    }

    /// Continues a call of `unlock` that has got the owner lock.
    pub(super) fn unlock(&mut self, at: usize, which: usize, now: Instant) {
        let generation = self.holds[at].unlocks.remove(which);
        if !self.agree(at, Wants::Unlock(Arc::clone(&generation)), now) {
            self.found_settled(at, generation);
            self.tidy(at);
        }
    }

    /// Ends an `unlock` that has nothing to send. If the hold is orphaned, it reports that nothing
    /// is confirmed.
    fn found_settled(&mut self, at: usize, generation: Arc<Generation>) {
        let hold = &self.holds[at];
        if hold.state.ownership == Ownership::Ours {
            let was_last = hold.was_last(&generation);
            self.unlocked(generation, true, was_last);
        }
    }

    /// Reports how an `unlock` ended, as `Core::released` does. `held`: the server had recorded
    /// this owner, or may have.
    pub(super) fn unlocked(&mut self, generation: Arc<Generation>, held: bool, was_last: bool) {
        let how = match generation.ledger().end {
            _ if !held => Err(LossReason::RecordMissing),
            Some(GenerationEnd::Lost(reason)) => Err(reason),
            Some(GenerationEnd::Refused(_) | GenerationEnd::Unconfirmed) => return,
            Some(GenerationEnd::Released) | None => Ok(()),
        };
        self.told.push(Told::Unlocked {
            generation,
            was_last,
            how,
        });
    }

    /// Ends the other calls of `unlock` if the release is settled. They would find the same once
    /// they have the owner lock, because nothing changes it.
    pub(super) fn others_unlocked(&mut self, at: usize) {
        let hold = &mut self.holds[at];
        if hold.state.plan_release().is_none() {
            let settled = hold
                .unlocks
                .extract_if(.., |generation| !generation.ledger().is_held());
            for generation in settled.collect::<Vec<_>>() {
                self.found_settled(at, generation);
            }
        }
    }

    /// Settles the hold, as the janitor does with the owner lock. Returns `false` if there is
    /// nothing to do.
    pub(super) fn settle(&mut self, at: usize, now: Instant) -> bool {
        self.holds[at].state.residue() == Residue::Doubt && self.agree(at, Wants::Settle, now)
    }

    /// Polls the hold, as the watchdog does. Returns `false` if nothing was due.
    pub(super) fn look(&mut self, at: usize, now: Instant) -> bool {
        match self.change(at, |state, effects| state.poll(now, OVERDUE, effects)) {
            Due::Nothing => return false,
            Due::Ended => self.tidy(at),
            Due::Renew(DueRenewal {
                generation,
                keep,
                period,
                ..
            }) => {
                let (owner, lease) = (generation.owner.clone(), keep.ttl(now));
                let renewal = Renewal {
                    generation,
                    sent: now,
                    lease,
                    period,
                };
                self.post(&owner, Verb::Renew { lease }, To::Watchdog(at, renewal));
            }
            Due::Stuck => {
                let Some(abandoned) = self.change(at, |state, _| state.orphan()) else {
                    return false;
                };
                self.abandon(Some(abandoned));
                self.holds[at].registered = false;
                self.tidy(at);
            }
        }
        true
    }

    pub(super) fn abandon(&mut self, abandoned: Option<Abandoned>) {
        if let Some(Abandoned { owner, .. }) = abandoned {
            self.suffix += 1;
            self.ghosts.push(owner);
        }
    }

    /// Sends the janitor's release of an abandoned name.
    pub(super) fn bust(&mut self) {
        let ghost = self.ghosts.remove(0);
        self.post(&ghost, Verb::Release { holds: 0 }, To::Unawaited);
    }

    /// Forgets a hold that has no residue and no handle.
    pub(super) fn tidy(&mut self, at: usize) {
        let hold = &self.holds[at];
        let waited_for = |to: &To| matches!(to, To::Watchdog(of, _) if *of == at);
        let mut tos = self
            .sent
            .iter()
            .map(|(_, to)| to)
            .chain(self.answers.iter().map(|(_, to)| to));
        let has_handle = hold.turn.is_some() || !hold.guards.is_empty() || !hold.unlocks.is_empty();
        if has_handle || hold.state.residue() != Residue::Nothing || tos.any(waited_for) {
            return;
        }
        let nothing = (
            hold.state.wanted(),
            hold.state.server,
            hold.state.late_request,
        ) == (0, ServerSide::Holds(0), None);
        if !nothing && hold.state.ownership == Ownership::Ours {
            self.wrong("nothing is left");
        }
        self.holds.remove(at);
        let tos = self
            .sent
            .iter_mut()
            .map(|(_, to)| to)
            .chain(self.answers.iter_mut().map(|(_, to)| to));
        for to in tos {
            if let To::Turn(of) | To::Watchdog(of, _) = to {
                *of -= usize::from(*of > at);
            }
        }
    }
}
