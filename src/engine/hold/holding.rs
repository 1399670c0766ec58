//! The transitions of a [`HoldState`] that is held: what the watchdog must do, and what its replies
//! change. They are pure, like the state itself.

use std::sync::Arc;

use nestlock_wire::clock::Instant;

use super::{
    generation::Generation,
    state::{Due, DueRenewal, Effects, HoldState, slack},
};

use crate::{
    engine::lease::{Keep, RenewalReply},
    error::LossReason,
    options::validity,
    store::Renewed,
};

impl HoldState {
    /// Returns what the watchdog must do now.
    pub(crate) fn poll(
        &mut self,
        now: Instant,
        overdue: std::time::Duration,
        effects: &mut Effects,
    ) -> Due {
        if self.lose_if_over(now, effects) {
            return Due::Ended;
        }
        if self.is_left && self.is_stuck(now, overdue) {
            return Due::Stuck;
        }
        if let Some((generation, mut ledger)) = self.held() {
            let early = slack(&ledger);
            let Some(due) = ledger.renew_at.filter(|at| *at <= now + early) else {
                return Due::Nothing;
            };
            let checked = std::mem::take(&mut ledger.to_be_checked);
            let (keep, period) = match (ledger.watch(now), ledger.renew_every) {
                (Some((keep, period)), _) => (keep, Some(period)),
                // Request the time that guards rely on, slightly less than the lease. The script
                // only raises a TTL, so one that was not shortened stays as it is.
                (None, Some(period)) => (Keep::Until(ledger.deadline), Some(period.duration())),
                (None, None) if checked => (Keep::AsItIs, None),
                (None, None) => {
                    ledger.renew_at = None;
                    return Due::Nothing;
                }
            };
            // Provisional: the reply sets the next renewal.
            ledger.renew_at = period.map(|period| now + period);
            return Due::Renew(DueRenewal {
                generation: Arc::clone(generation),
                keep,
                due,
                deadline: ledger.deadline,
                period: period.unwrap_or(ledger.deadline.saturating_duration_since(now)),
            });
        }
        if self.is_stuck(now, overdue) {
            Due::Stuck
        } else {
            Due::Nothing
        }
    }

    /// Makes the watchdog check the record at once, by a renewal if the hold is renewed.
    pub(crate) fn check_soon(&mut self, now: Instant) {
        if let Some((_, mut ledger)) = self.held() {
            ledger.to_be_checked = true;
            ledger.renew_by(now);
        }
    }

    /// Makes the watchdog check the record: at once, or when an acquire that is in flight is granted.
    pub(crate) fn check_when_granted(&mut self, now: Instant) {
        self.to_be_checked = self.is_in_doubt();
        self.check_soon(now);
    }

    /// Records the reply to a renewal. The end of a generation is final: a reply that comes after
    /// it, or after the lease has ended, is ignored, because a guard may already have reported the
    /// loss.
    pub(crate) fn renewed(
        &mut self,
        generation: &Arc<Generation>,
        reply: RenewalReply,
        now: Instant,
        effects: &mut Effects,
    ) {
        if !self.is_current(generation) || self.lose_if_over(now, effects) {
            return;
        }
        let Some((_, mut ledger)) = self.held() else {
            return;
        };
        let RenewalReply {
            renewed,
            sent,
            ttl,
            next,
        } = reply;
        match renewed {
            Renewed::Yes | Renewed::Endless => {
                ledger.deadline = ledger.deadline.max(sent + validity(ttl));
            }
            Renewed::Unknown => {}
            Renewed::Gone | Renewed::Taken => {
                drop(ledger);
                let gone = renewed == Renewed::Gone;
                return self.lose(
                    if gone {
                        LossReason::RecordMissing
                    } else {
                        LossReason::TakenOver
                    },
                    effects,
                );
            }
        }
        if let Some(next) = next {
            let goes_on = ledger.watch(now).is_some() || ledger.renew_every.is_some();
            ledger.renew_at = goes_on.then_some(next);
        }
    }

    /// Records that a renewal was not confirmed. It is due again at `next`.
    pub(crate) fn not_renewed(
        &mut self,
        generation: &Arc<Generation>,
        next: Instant,
        now: Instant,
        effects: &mut Effects,
    ) {
        if !self.is_current(generation) || self.lose_if_over(now, effects) {
            return;
        }
        if let Some((_, mut ledger)) = self.held() {
            ledger.renew_at = Some(next);
            // No period would repeat a mere check, so repeat it at `next`.
            ledger.to_be_checked |= ledger.watch(now).is_none() && ledger.renew_every.is_none();
        }
    }
}
