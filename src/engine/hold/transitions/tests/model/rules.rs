//! The rules: what no step may break, and what must hold in every state.

use std::sync::Arc;

use super::{
    super::server::{Answer, Sent, Verb},
    Action,
    client::{Hold, Told, is_valid},
    world::{World, number},
};
use crate::{
    engine::hold::{
        generation::{Generation, GenerationEnd},
        state::ServerSide,
    },
    error::LossReason,
    store::{Released, Renewed, tests::scripts::Record},
};

impl World {
    fn must(&mut self, holds: bool, rule: &'static str) {
        if !holds && self.wrong.is_none() {
            self.wrong = Some(rule);
        }
    }

    /// Checks what the clients have reported.
    pub(super) fn hear_of(&mut self) {
        for client in 0..2 {
            for told in std::mem::take(&mut self.clients[client].told) {
                match told {
                    Told::Wrong(rule) => self.must(false, rule),
                    Told::Begun(owner) if client == 0 => {
                        let holds = &self.clients[client].holds;
                        let left = holds
                            .iter()
                            .flat_map(|hold| &hold.unlocks)
                            .any(|left| left.owner == owner);
                        let (history, name) = (&mut self.history, number(&owner));
                        history.missed.remove(&name);
                        history.doubted.remove(&name);
                        history.released.remove(&name);
                        // A nested request acquired it after the outer hold was given up: the outer
                        // release is never sent.
                        history.doubted.extend(left.then_some(name));
                    }
                    Told::Begun(_) => {}
                    Told::Unlocked {
                        generation,
                        was_last,
                        how,
                    } => {
                        let (history, name) = (&self.history, number(&generation.owner));
                        let missed = client == 0 && history.missed.contains(&name);
                        let doubted = client == 0 && history.doubted.contains(&name);
                        if how.is_ok() {
                            let is_gone =
                                client != 0 || self.server.count(&generation.owner).is_none();
                            let done = !was_last || is_gone || history.released.contains(&name);
                            self.must(!missed || doubted, "a confirmed release had a record");
                            self.must(done, "a confirmed release was executed");
                        } else {
                            // The lease of the outer hold may have ended since.
                            let over = generation.ledger().deadline <= self.now;
                            self.must(
                                missed || over || history.tampered,
                                "a release that reports a loss had no record",
                            );
                        }
                    }
                }
            }
        }
    }

    /// Checks what the scripts promise: a confirmed request took effect, and any other changed
    /// nothing.
    pub(super) fn check_answer(&mut self, sent: &Sent, answer: Answer, record: Option<&Record>) {
        let before = record
            .filter(|record| *record.owner == *sent.owner.as_str())
            .map(|record| record.count);
        let after = self.server.count(&sent.owner);
        let stands = match (sent.verb, answer) {
            (Verb::Acquire { holds }, Answer::Held) => after >= Some(holds).max(before),
            (Verb::Release { .. }, Answer::Released(Released::Free)) => {
                before.is_some() && after.is_none()
            }
            (Verb::Release { holds }, Answer::Released(Released::StillHeld)) => {
                after == before.min(Some(holds))
            }
            (Verb::Renew { .. }, Answer::Renewed(Renewed::Yes)) => {
                after.is_some() && after == before
            }
            _ => self.server.record.as_ref() == record,
        };
        self.must(
            stands,
            "a confirmed request took effect, and any other changed nothing",
        );
    }

    /// Checks what became of generations that had a guard.
    pub(super) fn check_ends(&mut self, before: &[(bool, Option<GenerationEnd>, Arc<Generation>)]) {
        for (was_valid, end, generation) in before {
            let (valid, ended) = (is_valid(generation, self.now), generation.ledger().end);
            self.must(*was_valid || !valid, "a loss is final");
            self.must(
                !matches!(end, Some(GenerationEnd::Lost(_))) || ended == *end,
                "a loss is final",
            );
            let taken = matches!(
                ended,
                Some(GenerationEnd::Lost(
                    LossReason::RecordMissing | LossReason::TakenOver
                ))
            );
            let over = generation.ledger().deadline <= self.now;
            let known = end.is_some() || !taken || over || self.history.tampered;
            self.must(
                known,
                "a hold is lost only if its lease ended or another client took it",
            );
        }
    }

    /// Returns a rule that does not hold in this state.
    pub(super) fn broken(&self) -> Option<&'static str> {
        let valid = |client: usize| {
            let holds = self.clients[client].holds.iter();
            holds
                .flat_map(|hold| hold.valid_guards(self.now))
                .map(|guard| &guard.generation.owner)
                .collect::<Vec<_>>()
        };
        // After the record was deleted, guards stay valid until the client notices, so they do not
        // count.
        let (one, other) = (
            if self.history.tampered {
                Vec::new()
            } else {
                valid(0)
            },
            valid(1),
        );
        let holders = self.clients[0]
            .holds
            .iter()
            .filter(|hold| hold.valid_guards(self.now).next().is_some())
            .count();
        if !one.is_empty() && (!other.is_empty() || holders > 1) {
            return Some("one owner");
        }
        if !one
            .iter()
            .chain(&other)
            .all(|owner| self.server.count(owner).is_some())
        {
            return Some("each valid guard has a record");
        }
        if !self.clients[0].holds.iter().all(|hold| self.counts(hold)) {
            return Some("the server and the client agree on the count");
        }
        let one = &self.clients[0];
        let under_way =
            one.sent.iter().any(|(sent, _)| sent.epoch == one.epoch) || !one.answers.is_empty();
        (!under_way && !self.empties()).then_some("the ledgers empty, and the record goes")
    }

    /// Returns whether the server records the count that the client knows, where nothing is in
    /// doubt.
    fn counts(&self, hold: &Hold) -> bool {
        let (state, history) = (&hold.state, &self.history);
        let ServerSide::Holds(known @ 1..) = state.server else {
            return true;
        };
        let late = state.late_request.is_some()
            || self.clients[0]
                .sent
                .iter()
                .any(|(sent, _)| sent.owner == state.owner);
        if late || history.tampered || !state.is_valid(self.now) {
            return true;
        }
        let count = self.server.count(&state.owner);
        count.is_some() && (history.blurred || count == Some(known))
    }

    /// Returns whether the ledgers empty and the record goes if only the engine itself acts from
    /// here on, and late requests are never executed.
    fn empties(&self) -> bool {
        let mut world = self.clone();
        for _ in 0..100 {
            let one = &world.clients[0];
            let settle = || {
                one.holds
                    .iter()
                    .position(|hold| hold.turn.is_none() && hold.state.plan_release().is_some())
            };
            let action = if !one.answers.is_empty() {
                Action::Hear
            } else if one.sent.iter().any(|(sent, _)| sent.epoch == one.epoch) {
                Action::Execute(one.epoch)
            } else if let Some(hold) = one.holds.iter().position(|hold| !hold.guards.is_empty()) {
                Action::Leave {
                    hold,
                    guard: 0,
                    awaited: false,
                }
            } else if let Some(hold) = one.holds.iter().position(|hold| !hold.unlocks.is_empty()) {
                Action::Unlock { hold, which: 0 }
            } else if !one.ghosts.is_empty() {
                Action::Bust
            } else if let Some(hold) = settle() {
                Action::Settle(hold)
            } else {
                let left = world
                    .server
                    .record
                    .as_ref()
                    .filter(|record| record.owner.contains("/one"));
                let retired = |owner: &str| number(&owner.parse().unwrap()) < one.suffix;
                return one.holds.is_empty() && left.is_none_or(|record| retired(&record.owner));
            };
            if !world.apply(action) {
                return false;
            }
        }
        false
    }
}
