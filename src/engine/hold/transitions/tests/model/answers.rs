//! How a client reacts to a reply, and to a missing one.

use nestlock_wire::clock::Instant;

use crate::{
    engine::{
        hold::{generation::Grant, state::HoldState},
        lease::RenewalReply,
    },
    error::StoreErrorKind,
    store::Renewed,
};

use super::{
    super::server::{Answer, OVERDUE},
    client::{Client, LEASE, Renewal, To, Told, Turn, Wants, is_valid},
};

impl Client {
    /// Reads the oldest reply.
    pub(super) fn hear(&mut self, now: Instant) {
        let (answer, to) = self.answers.remove(0);
        match to {
            To::Unawaited => {}
            To::Watchdog(at, renewal) => {
                self.renewed(at, &renewal, answer, now);
                self.tidy(at);
            }
            To::Turn(at) => {
                let turn = self.holds[at].turn.take().expect("it is heard of once");
                if turn.request.is_release {
                    self.agreed(at, turn, answer, now);
                } else {
                    self.acquired(at, &turn, answer, now);
                    self.tidy(at);
                }
            }
        }
    }

    fn renewed(&mut self, at: usize, renewal: &Renewal, answer: Option<Answer>, now: Instant) {
        let Renewal {
            generation,
            sent,
            lease,
            period,
        } = renewal;
        let confirmed = match answer {
            Some(Answer::Renewed(answer)) => {
                Some(answer).filter(|answer| *answer != Renewed::Unknown)
            }
            _ => None,
        };
        self.change(at, |state, effects| match confirmed {
            Some(renewed) => {
                let reply = RenewalReply {
                    renewed,
                    sent: *sent,
                    ttl: *lease,
                    next: Some(*sent + *period),
                };
                state.renewed(generation, reply, now, effects);
            }
            None => state.not_renewed(generation, now + *period / 10, now, effects),
        });
    }

    fn acquired(&mut self, at: usize, turn: &Turn, answer: Option<Answer>, now: Instant) {
        let (request, epoch) = (&turn.request, self.epoch);
        match answer {
            Some(Answer::Held) => {
                let grant = Grant::of(turn.sent, *LEASE);
                let granted = self.change(at, |state, effects| {
                    state.granted(request, &grant, epoch, now, effects)
                });
                if let Ok(Some(ticket)) = granted {
                    if !is_valid(&ticket.generation, now) {
                        self.wrong("a granted hold is valid");
                    }
                    if ticket.generation.ledger().count == 1 {
                        self.told.push(Told::Begun(ticket.generation.owner.clone()));
                    }
                    self.holds[at].add_guard(ticket);
                }
            }
            Some(Answer::Busy) => self.change(at, |state, _| state.busy(request, false, epoch)),
            Some(Answer::Lost) => self.change(at, HoldState::refused_as_lost),
            None => self.change(at, |state, _| state.not_executed(request)),
            Some(other) => unreachable!("{other:?}"),
        }
    }

    fn agreed(&mut self, at: usize, turn: Turn, answer: Option<Answer>, now: Instant) {
        let (epoch, ends) = (self.epoch, self.holds[at].state.record_ends());
        let held = match answer {
            Some(Answer::Released(released)) => {
                let released = |state: &mut HoldState, effects: &mut _| {
                    state.released(&turn.request, released, epoch, effects)
                };
                let answered = self.change(at, released);
                self.abandon(answered.abandoned);
                self.others_unlocked(at);
                Some(answered.held)
            }
            None => {
                self.change(at, |state, _| state.not_executed(&turn.request));
                None
            }
            other => unreachable!("{other:?}"),
        };
        match (turn.wants, held) {
            (Wants::Acquire { after_loss }, Some(_)) => {
                return self.go_on_acquiring(at, after_loss, now);
            }
            (Wants::Unlock(generation), Some(held)) => {
                self.unlocked(generation, held, turn.request.count == 0);
            }
            (Wants::Unlock(generation), None) => return self.holds[at].unlocks.push(generation),
            (Wants::Settle, None) if now > LEASE.record_ends(turn.sent).max(ends) + OVERDUE => {
                // As in `janitor::settle`: whatever the record was, its lease is over.
                let abandoned = self.change(at, |state, _| state.write_off(StoreErrorKind::Other));
                self.abandon(abandoned);
            }
            (Wants::Acquire { .. } | Wants::Settle, _) => {}
        }
        self.tidy(at);
    }

    /// Drops the future that has the owner lock.
    pub(super) fn cancel(&mut self, at: usize) {
        self.holds[at].turn = None;
        self.nobody_hears(|to| matches!(to, To::Turn(of) if *of == at));
        self.tidy(at);
    }

    fn nobody_hears(&mut self, of: impl Fn(&To) -> bool) {
        let waiting = self
            .sent
            .iter_mut()
            .map(|(_, to)| to)
            .chain(self.answers.iter_mut().map(|(_, to)| to));
        waiting
            .filter(|to| of(to))
            .for_each(|to| *to = To::Unawaited);
    }

    /// Reports to the future that has the owner lock that its request may have been executed.
    pub(super) fn silent(&mut self, at: usize, now: Instant) {
        let Some(turn) = self.holds[at].turn.take() else {
            return self.tidy(at);
        };
        self.nobody_hears(|to| matches!(to, To::Turn(of) if *of == at));
        let nothing_held = self.holds[at].state.wanted() == 0;
        match turn.wants {
            Wants::Unlock(generation) => return self.holds[at].unlocks.push(generation),
            Wants::Acquire { after_loss } if turn.request.is_release && nothing_held => {
                let abandoned = self.change(at, |state, _| state.abandon_name_in_doubt());
                self.abandon(abandoned);
                return self.go_on_acquiring(at, after_loss, now);
            }
            Wants::Settle => {
                let abandoned = self.change(at, |state, _| state.abandon_name_in_doubt());
                self.abandon(abandoned);
            }
            Wants::Acquire { .. } => {}
        }
        self.tidy(at);
    }

    /// Ends the connection. Requests in flight may still be executed, in order, but their replies
    /// are lost.
    pub(super) fn cut(&mut self, now: Instant) {
        let unheard: Vec<To> = self.sent.iter().map(|(_, to)| to.clone()).collect();
        let unheard: Vec<To> = self
            .answers
            .drain(..)
            .map(|(_, to)| to)
            .chain(unheard)
            .collect();
        self.nobody_hears(|_| true);
        self.epoch = self.epoch.next();
        for to in &unheard {
            if let To::Watchdog(at, renewal) = to {
                self.renewed(*at, renewal, None, now);
            }
        }
        for at in (0..self.holds.len()).rev() {
            self.silent(at, now);
        }
    }
}
