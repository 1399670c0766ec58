//! A client as the transitions meet it: what the engine's futures do between two awaits, and nothing of their own.

use std::sync::{Arc, LazyLock};

use super::super::server::{Answer, LOCK, OVERDUE, Sent, TTL, Verb};
use crate::{
    clock::Instant,
    engine::{
        baton::Baton,
        generation::{End, Generation, Ticket},
        kind::About,
        lease::{Lease, Millis},
        refusal::Refusal,
        state::{Abandoned, Around, Door, Due, Effects, Left, Leftover, Planned, Request, ServerSide, Standing, State},
    },
    error::LossReason,
    owner::OwnerId,
    store::Epoch,
};

pub(super) static LEASE: LazyLock<Lease> = LazyLock::new(|| Lease::Watched { ttl: Millis::of(TTL), times: None });

/// What a future that has the turn wants in the end.
#[derive(Debug, Clone)]
pub(super) enum Wants {
    Acquire {
        after_loss: bool,
    },
    /// To know how the release of its generation went.
    Unlock(Arc<Generation>),
    /// The janitor: that nothing is in doubt.
    Settle,
}

/// A future that has the turn, and waits for the answer to a request.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) request: Request,
    pub(super) sent: Instant,
    pub(super) wants: Wants,
}

/// What is known to those who have a handle of one hold.
#[derive(Debug)]
pub(super) struct Hold {
    /// What its owner is called without a suffix.
    pub(super) caller: OwnerId,
    pub(super) state: State,
    /// Not in the hands of somebody else.
    pub(super) registered: bool,
    pub(super) turn: Option<Turn>,
    pub(super) guards: Vec<Ticket>,
    /// Calls of `unlock` that wait for the turn.
    pub(super) unlocks: Vec<Arc<Generation>>,
}

impl Hold {
    pub(super) fn new(owner: &OwnerId, now: Instant) -> Self {
        let state = State::new(owner.clone(), now);
        Self { caller: owner.clone(), state, registered: true, turn: None, guards: Vec::new(), unlocks: Vec::new() }
    }

    pub(super) fn valid_guards(&self, now: Instant) -> impl Iterator<Item = &Ticket> {
        self.guards.iter().filter(move |guard| is_valid(&guard.generation, now))
    }
}

/// What a guard is told that asks.
pub(super) fn is_valid(generation: &Generation, now: Instant) -> bool {
    let books = generation.books();
    books.end.is_none() && books.deadline > now
}

/// A renewal that is under way.
#[derive(Debug, Clone)]
pub(super) struct Renewal {
    pub(super) generation: Arc<Generation>,
    pub(super) sent: Instant,
    pub(super) lease: std::time::Duration,
    pub(super) period: std::time::Duration,
}

/// Who waits for an answer.
#[derive(Debug, Clone)]
pub(super) enum To {
    Nobody,
    /// The future that has the turn of this hold.
    Turn(usize),
    Watchdog(usize, Renewal),
}

/// What a client tells the world when it has changed.
#[derive(Debug)]
pub(super) enum Told {
    Wrong(&'static str),
    /// How a call of `unlock` ended. `was_last`: nothing was to be left of the record.
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
    /// Names that were retired.
    pub(super) suffix: u64,
    pub(super) epoch: Epoch,
    /// In the order in which they were sent.
    pub(super) sent: Vec<(Sent, To)>,
    /// Of this epoch, in their order. `None`: the server refused it.
    pub(super) answers: Vec<(Option<Answer>, To)>,
    /// Names that the janitor has still to release.
    pub(super) ghosts: Vec<OwnerId>,
    /// What is handed on, and nobody has taken.
    pub(super) baton: Option<Baton>,
    /// Who acquires nothing but what is handed on, and inside that.
    pub(super) another: OwnerId,
    pub(super) told: Vec<Told>,
}

fn door(max_holds: u32, after_loss: bool) -> Door {
    Door { about: About::plain("reentrant"), waits: false, adopts: None, max_holds, after_loss }
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
            baton: None,
            another: format!("{owner}-another").parse().unwrap(),
            told: Vec::new(),
        }
    }

    pub(super) fn wrong(&mut self, what: &'static str) {
        self.told.push(Told::Wrong(what));
    }

    /// As `Hold::change` does.
    pub(super) fn change<T>(&mut self, at: usize, transition: impl FnOnce(&mut State, &mut Effects) -> T) -> T {
        let hold = &mut self.holds[at];
        let live = |hold: &Hold| hold.guards.iter().map(|guard| guard.generation.books().is_held()).collect::<Vec<_>>();
        let (before, mut effects) = (live(hold), Effects::default());
        let outcome = transition(&mut hold.state, &mut effects);
        hold.state.forget_ended();
        let told =
            |generation: &Arc<Generation>| effects.ended.as_ref().is_some_and(|ended| Arc::ptr_eq(ended, generation));
        let ended = hold.guards.iter().zip(before).filter(|(guard, live)| *live && !guard.generation.books().is_held());
        if !ended.map(|(guard, _)| &guard.generation).all(told) {
            self.wrong("its guards are told");
        }
        let hold = &self.holds[at];
        if hold.state.held().is_some() && hold.state.next_look(OVERDUE).is_none() {
            self.wrong("somebody notices its end");
        }
        outcome
    }

    /// The hold that the owner's next call finds.
    pub(super) fn registered(&self) -> Option<usize> {
        self.holds.iter().position(|hold| hold.registered && hold.caller == self.owner)
    }

    pub(super) fn is_anothers(&self, at: usize) -> bool {
        let hold = &self.holds[at];
        hold.registered && hold.caller == self.another && hold.turn.is_none() && hold.state.wanted() > 0
    }

    /// As `Core::hand_on`. `false`: it cannot be.
    pub(super) fn hand_on(&mut self, at: usize, guard: usize, now: Instant) -> bool {
        let (ticket, epoch) = (self.holds[at].guards.remove(guard), self.epoch);
        let handed = self.change(at, |state, effects| state.hand_on(&LOCK, &ticket, epoch, TTL, now, effects));
        if handed.is_some() {
            self.suffix += 1;
            // the record goes on
            let generation = Arc::clone(&ticket.generation);
            self.told.push(Told::Unlocked { generation, was_last: false, how: Ok(()) });
            self.baton = handed;
            self.tidy(at);
        }
        self.baton.is_some()
    }

    /// As `Waiter::take`. `false`: it cannot be.
    pub(super) fn take(&mut self, by_another: bool, now: Instant) -> bool {
        let caller = if by_another { self.another.clone() } else { self.owner.clone() };
        let known = self.holds.iter().position(|hold| hold.registered && hold.caller == caller);
        let at = known.unwrap_or_else(|| {
            self.holds.push(Hold::new(&caller, now));
            self.holds.len() - 1
        });
        if self.holds[at].turn.is_some() {
            return false;
        }
        let (baton, epoch) = (self.baton.take().expect("it is handed on"), self.epoch);
        let around =
            Around { caller: &caller, sibling: None, lost_sibling: None, suffix: self.suffix, value_in_doubt: false };
        let planned = self.change(at, |state, effects| state.plan(self::door(1, false), around, now, effects));
        let Planned::Send(request) = planned else { return false };
        self.change(at, |state, _| state.send(&request, epoch, now));
        let taken = self.change(at, |state, _| state.take(&request, &baton, (*LEASE, 0), epoch, now));
        let Some(ticket) = taken else { return false };
        self.told.push(Told::Begun(ticket.generation.owner.clone()));
        self.holds[at].guards.push(ticket);
        true
    }

    /// Nobody has taken it: it is released.
    pub(super) fn take_back(&mut self) {
        self.ghosts.extend(self.baton.take().map(|baton| baton.owner));
    }

    fn post(&mut self, owner: &OwnerId, verb: Verb, to: To) {
        self.sent.push((Sent { owner: owner.clone(), verb, epoch: self.epoch }, to));
    }

    /// In the turn of a hold: sends what was planned.
    fn send(&mut self, at: usize, request: Request, wants: Wants, now: Instant) {
        let (epoch, holds) = (self.epoch, request.count);
        self.change(at, |state, _| {
            if !request.is_release {
                state.ends = state.ends.max(LEASE.record_ends(now));
            }
            state.send(&request, epoch, now);
        });
        let verb = if request.is_release { Verb::Release { holds } } else { Verb::Acquire { holds } };
        self.post(&request.owner, verb, To::Turn(at));
        self.holds[at].turn = Some(Turn { request, sent: now, wants });
    }

    /// `Core::agree`. `false`: it agrees already.
    fn agree(&mut self, at: usize, wants: Wants, now: Instant) -> bool {
        let Some(request) = self.holds[at].state.plan_release() else { return false };
        self.send(at, request, wants, now);
        true
    }

    /// An attempt to acquire, which finds the turn free.
    pub(super) fn acquire(&mut self, after_loss: bool, now: Instant) {
        let at = self.registered().unwrap_or_else(|| {
            self.holds.push(Hold::new(&self.owner, now));
            self.holds.len() - 1
        });
        // else it waits until the turn is free, which may be later
        if self.holds[at].turn.is_none() {
            self.go_on_acquiring(at, after_loss, now);
        }
    }

    pub(super) fn go_on_acquiring(&mut self, at: usize, after_loss: bool, now: Instant) {
        if self.holds[at].caller == self.another && self.holds[at].state.wanted() == 0 {
            return self.tidy(at);
        }
        let door = door(self.max_holds, after_loss);
        let caller = self.holds[at].caller.clone();
        let around =
            Around { caller: &caller, sibling: None, lost_sibling: None, suffix: self.suffix, value_in_doubt: false };
        let hold = &self.holds[at];
        let lost = |generation| hold.state.is_current(generation) && !is_valid(generation, now);
        let inside_a_loss = hold.guards.iter().any(|guard| lost(&guard.generation));
        match self.change(at, |state, effects| state.plan(door, around, now, effects)) {
            Planned::Send(request) => {
                if inside_a_loss && !after_loss {
                    self.wrong("its owner is inside what it lost");
                }
                let late = |(sent, _): &(Sent, To)| sent.epoch != self.epoch && sent.owner == request.owner;
                if request.count == 1 && self.sent.iter().any(|sent| late(sent) && sent.0.decides()) {
                    self.wrong("a name that a late request may use is not used again");
                }
                self.send(at, request, Wants::Acquire { after_loss }, now);
            }
            Planned::Unsettled => {
                if !self.agree(at, Wants::Acquire { after_loss }, now) {
                    self.wrong("what is unsettled can be settled");
                }
            }
            Planned::Gone => {
                self.holds[at].registered = false;
                self.tidy(at);
                self.acquire(after_loss, now);
            }
            Planned::Refused(refusal) => {
                let lost = matches!(refusal, Refusal::Lost(..)) && inside_a_loss && !after_loss;
                if !lost && !matches!(refusal, Refusal::TooManyHolds(..)) {
                    self.wrong("nothing is refused but what is inside a loss");
                }
                self.tidy(at);
            }
        }
    }

    /// Gives a guard up. `awaited`: by `unlock`.
    pub(super) fn leave(&mut self, at: usize, guard: usize, awaited: bool, now: Instant) {
        let ticket = self.holds[at].guards.remove(guard);
        match self.change(at, |state, effects| state.leave(&ticket, now, effects)) {
            Ok(Left::Here(generation)) if awaited => self.holds[at].unlocks.push(generation),
            Ok(Left::Elsewhere(_)) => unreachable!("nothing is handed over"),
            Err(End::Released | End::Refused(_) | End::Unconfirmed) => self.wrong("what has a guard is not released"),
            Ok(Left::Here(_)) | Err(End::Lost(_)) => {}
        }
        self.tidy(at);
    }

    /// An `unlock` has the turn.
    pub(super) fn unlock(&mut self, at: usize, which: usize, now: Instant) {
        let generation = self.holds[at].unlocks.remove(which);
        if !self.agree(at, Wants::Unlock(Arc::clone(&generation)), now) {
            let was_last = self.holds[at].state.wanted() == 0;
            self.unlocked(generation, true, was_last);
            self.tidy(at);
        }
    }

    /// As `Core::released`. `held`: the server had recorded this owner, or may have.
    pub(super) fn unlocked(&mut self, generation: Arc<Generation>, held: bool, was_last: bool) {
        let how = match generation.books().end {
            _ if !held => Err(LossReason::RecordMissing),
            Some(End::Lost(reason)) => Err(reason),
            Some(End::Refused(_) | End::Unconfirmed) => return,
            Some(End::Released) | None => Ok(()),
        };
        self.told.push(Told::Unlocked { generation, was_last, how });
    }

    /// Other calls of `unlock` find that it is settled, as soon as they have the turn: nothing changes that.
    pub(super) fn others_unlocked(&mut self, at: usize) {
        let hold = &mut self.holds[at];
        if hold.state.plan_release().is_none() {
            let was_last = hold.state.wanted() == 0;
            let settled = hold.unlocks.extract_if(.., |generation| !generation.books().is_held());
            for generation in settled.collect::<Vec<_>>() {
                self.unlocked(generation, true, was_last);
            }
        }
    }

    /// The janitor has the turn. `false`: nothing to do.
    pub(super) fn settle(&mut self, at: usize, now: Instant) -> bool {
        self.holds[at].state.leftover() == Leftover::Doubt && self.agree(at, Wants::Settle, now)
    }

    /// The watchdog looks. `false`: nothing was due.
    pub(super) fn look(&mut self, at: usize, now: Instant) -> bool {
        match self.change(at, |state, effects| state.look(now, OVERDUE, effects)) {
            Due::Nothing => return false,
            Due::Ended => self.tidy(at),
            Due::Renew { generation, keep, period, .. } => {
                let (owner, lease) = (generation.owner.clone(), keep.ttl(now));
                let renewal = Renewal { generation, sent: now, lease, period };
                self.post(&owner, Verb::Renew { lease }, To::Watchdog(at, renewal));
            }
            Due::Stuck => {
                let Some(abandoned) = self.change(at, |state, _| state.orphan()) else { return false };
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

    /// The janitor releases a name that was abandoned.
    pub(super) fn bust(&mut self) {
        let ghost = self.ghosts.remove(0);
        self.post(&ghost, Verb::Release { holds: 0 }, To::Nobody);
    }

    /// Forgets a hold of which nothing is left, and that nobody has a handle of.
    pub(super) fn tidy(&mut self, at: usize) {
        let hold = &self.holds[at];
        let waited_for = |to: &To| matches!(to, To::Watchdog(of, _) if *of == at);
        let mut tos = self.sent.iter().map(|(_, to)| to).chain(self.answers.iter().map(|(_, to)| to));
        let has_handle = hold.turn.is_some() || !hold.guards.is_empty() || !hold.unlocks.is_empty();
        if has_handle || hold.state.leftover() != Leftover::Nothing || tos.any(waited_for) {
            return;
        }
        let nothing = (hold.state.wanted(), hold.state.server, hold.state.late) == (0, ServerSide::Holds(0), None);
        if !nothing && hold.state.standing == Standing::Ours {
            self.wrong("nothing is left");
        }
        self.holds.remove(at);
        let tos = self.sent.iter_mut().map(|(_, to)| to).chain(self.answers.iter_mut().map(|(_, to)| to));
        for to in tos {
            if let To::Turn(of) | To::Watchdog(of, _) = to {
                *of -= usize::from(*of > at);
            }
        }
    }
}
