//! Acquires several locks with one request, all or none, and releases them with one.
//!
//! This is a shortcut, and never required: it waits neither for a lock nor for an owner lock.
//! Everything that is not plain (a re-entry, a doubt, a taken owner lock, a refusal) is left to the
//! path that acquires each lock by itself.
//!
//! The owner locks are only tried, so they need no order. Each hold is planned, marked as in doubt
//! and entered as in an acquire of its own. The unlock of a multi-lock and the janitor's batches of
//! dropped guards use the same scripts. In a cluster all locks must be in one slot.

use std::{pin::pin, sync::Arc};

use futures_util::future::join_all;
use nestlock_wire::{Arg, Call, Epoch, clock::Instant};
use tokio::sync::SemaphorePermit;

use super::{
    acquire::{
        enter::{AcquireReply, why_not_entered},
        options::Acquire,
    },
    core::{Core, LOCKS_AT_ONCE},
    failure::{NO_REPLY, no_reply, store_error},
    hold::{
        Entered, Hold,
        state::{AcquirePlan, HoldRequest},
    },
    kind::{JointScripts, Kind, Wake},
    settle::CallInFlight,
};

use crate::{
    error::{Error, Result, StoreError},
    store::{Acquired, Route},
};

/// The outcome of [`Acquire::together`].
pub(crate) enum JointOutcome {
    Entered(Vec<Entered>),
    /// Another owner holds the lock at this index.
    Busy(usize),
    /// Nothing is held. Each lock by itself may succeed, or report the error.
    NotThisWay,
}

/// An acquire that is planned, under its owner lock.
struct Planned<'h> {
    hold: &'h Arc<Hold>,
    request: HoldRequest,
    _permit: SemaphorePermit<'h>,
}

/// Returns the scripts, if one request can take all these locks.
fn scripts<'a>(
    core: &Core,
    kinds: impl ExactSizeIterator<Item = &'a Arc<dyn Kind>> + Clone,
) -> Option<JointScripts> {
    let first = kinds.clone().next()?;
    let alike = kinds
        .clone()
        .all(|kind| kind.about().family == first.about().family && kind.together().is_some());
    let together = alike
        && kinds.len() <= LOCKS_AT_ONCE
        && core.store.takes_together(kinds.map(|kind| kind.name()));
    first.together().filter(|_| together)
}

/// Records that the server has not executed the request.
fn not_executed(planned: &[Planned<'_>]) {
    for Planned { hold, request, .. } in planned {
        hold.change(|state, _| state.not_executed(request));
    }
}

/// Records that nothing was granted, because of the lock at this index.
fn busy_together(
    planned: &[Planned<'_>],
    at: usize,
    why: &Acquired,
    epoch: Epoch,
) -> Result<JointOutcome> {
    for Planned { hold, request, .. } in planned {
        hold.change(|state, _| state.busy(request, false, epoch));
    }
    match why {
        Acquired::WrongKind => Err(Error::WrongLockKind {
            lock: planned[at].hold.lock_name().to_string(),
        }),
        _ => Ok(JointOutcome::Busy(at)),
    }
}

impl Acquire<'_> {
    /// Acquires all of these locks, if all are free. The first is the one that this acquire is for.
    pub(crate) async fn together(&self, kinds: &[Arc<dyn Kind>]) -> Result<JointOutcome> {
        match self
            .in_time(
                self.attempt_deadline(None),
                pin!(self.attempt_together(kinds)),
            )
            .await
        {
            Some(outcome) => outcome,
            None => self.no_reply(no_reply(NO_REPLY)),
        }
    }

    async fn attempt_together(&self, kinds: &[Arc<dyn Kind>]) -> Result<JointOutcome> {
        let Self { core, .. } = *self;
        if let Err(error) = core.connected(self.attempt_deadline(None)).await {
            // the attempts for single locks wait for as long as an outage may last
            return if error.is_transient() {
                Ok(JointOutcome::NotThisWay)
            } else {
                Err(error)
            };
        }
        let Some(scripts) = scripts(core, kinds.iter()) else {
            return Ok(JointOutcome::NotThisWay);
        };
        let under_way: Vec<_> = kinds
            .iter()
            .map(|kind| CallInFlight {
                core,
                hold: core.holds.get_or_insert(kind, &self.owner),
            })
            .collect();
        let sent = Instant::now();
        let Some(planned) = self.plan_together(kinds, &under_way, sent)? else {
            return Ok(JointOutcome::NotThisWay);
        };
        let mut route = core.route(planned[0].hold, sent);
        route.copies = self.copies;
        for Planned { hold, request, .. } in &planned {
            hold.send(hold.kind(), request, self.lease, route.epoch(), sent);
        }
        // checked after the holds are in doubt: a shutdown that this check misses waits for the
        // owner locks
        core.check_open().inspect_err(|_| not_executed(&planned))?;
        // the lock that has a rival reports the error in its own attempt
        let has_rival = |one: &Planned<'_>| core.holds.rival(one.hold, one.request.count).is_some();
        if planned.iter().any(has_rival) {
            not_executed(&planned);
            return Ok(JointOutcome::NotThisWay);
        }

        let names = kinds.iter().map(|kind| Arc::clone(kind.name()));
        let owner = Arg::from(&planned[0].request.owner);
        let args = vec![owner, self.lease.millis().into()];
        let call = Call::new(scripts.acquire, names, args);
        match core.store.acquire_together(&mut route, &call).await {
            Ok((None, epoch)) => self.granted_together(&planned, &route, sent, epoch).await,
            Ok((Some((at, why)), epoch)) => busy_together(&planned, at, &why, epoch),
            Err(error) if error.may_have_executed() => self.no_reply(error),
            Err(_) => {
                not_executed(&planned);
                Ok(JointOutcome::NotThisWay)
            }
        }
    }

    /// Plans the acquires, all under one owner. Returns `None` if one of them is not plain.
    fn plan_together<'h>(
        &self,
        kinds: &[Arc<dyn Kind>],
        under_way: &'h [CallInFlight<'_>],
        now: Instant,
    ) -> Result<Option<Vec<Planned<'h>>>> {
        let mut planned: Vec<Planned<'h>> = Vec::with_capacity(kinds.len());
        for (CallInFlight { hold, .. }, kind) in under_way.iter().zip(kinds) {
            // also fails if one lock is named twice
            let Ok(permit) = hold.owner_lock.try_acquire() else {
                return Ok(None);
            };
            if hold.count() > 0 {
                return Ok(None);
            }
            let (mode, siblings) = (
                self.acquire_mode(kind, false),
                self.core.holds.sibling_state(hold),
            );
            let AcquirePlan::Send(request) = hold.plan(mode, siblings, now)? else {
                return Ok(None);
            };
            planned.push(Planned {
                hold,
                request,
                _permit: permit,
            });
        }
        // a name may have been retired since the first plan, but the script takes one owner for all
        // locks
        let owner = &planned[0].request.owner;
        let is_one = planned.iter().all(|one| one.request.owner == *owner);
        Ok(is_one.then_some(planned))
    }

    /// Enters all of these holds, which the server has granted.
    async fn granted_together(
        &self,
        planned: &[Planned<'_>],
        route: &Route,
        sent: Instant,
        epoch: Epoch,
    ) -> Result<JointOutcome> {
        let core = self.core;
        let replicas = match (self.copies, core.store.acknowledged(route).await) {
            (None, _) => None,
            (Some(copies), Ok(Some(acks))) if acks.suffice(copies) => Some(acks.counted()),
            // each lock is released before its own attempt, which reports what is wrong
            _ => return Ok(JointOutcome::NotThisWay),
        };
        let reply = AcquireReply {
            sent,
            token: None,
            epoch,
            replicas,
        };
        let (mut entered, mut late) = (Vec::new(), None);
        for Planned { hold, request, .. } in planned {
            match self.take_in(hold, request, reply)? {
                Some(ticket) => entered.push((Arc::clone(hold), ticket)),
                None => late = Some(hold),
            }
        }
        if let Some(late) = late {
            for (hold, ticket) in &entered {
                core.release_later(hold, ticket);
            }
            return self.no_reply(why_not_entered(late));
        }
        Ok(JointOutcome::Entered(entered))
    }

    /// Returns `NotThisWay` if there is time left to try each lock by itself, and the error
    /// otherwise.
    fn no_reply(&self, error: StoreError) -> Result<JointOutcome> {
        match self.deadline {
            Some(deadline) if deadline <= Instant::now() => {
                Err(store_error(self.kind.name(), error))
            }
            _ => Ok(JointOutcome::NotThisWay),
        }
    }
}

impl Core {
    /// Gives up several holds, and waits until the server has released them. If it is dropped
    /// midway, the janitor finishes. Reports the first failure.
    pub(crate) async fn release_together(&self, held: Vec<Entered>) -> Result<()> {
        held.first()
            .map_or(Ok(()), |(hold, _)| self.check_ours(hold.lock_name()))?;
        // all of them before the first await: a drop midway must not leave some held
        let given_up: Vec<Result<_>> = held
            .into_iter()
            .map(|(hold, ticket)| {
                let under_way = CallInFlight { core: self, hold };
                under_way.hold.leave(&ticket, Instant::now())?;
                Ok((under_way, ticket))
            })
            .collect();
        let deadline = Instant::now() + self.config.command_timeout();
        let holds = given_up.iter().flatten();
        let holds: Vec<&Arc<Hold>> = holds.map(|(under_way, _)| &under_way.hold).collect();
        if let Err(error) = self.agree_together(&holds).await
            && Instant::now() >= deadline
        {
            return Err(store_error(holds[0].lock_name(), error));
        }
        let released = given_up.into_iter().map(|given_up| async move {
            let (under_way, ticket) = given_up?;
            let (of, now) = (&under_way.hold, Instant::now());
            self.released(of, &ticket.generation, now, deadline).await
        });
        join_all(released).await.into_iter().collect()
    }

    /// Makes the server agree with holds that no caller awaits, as far as one request can.
    pub(super) async fn settle_together(&self, holds: &[Arc<Hold>]) {
        let can = |hold: &&Arc<Hold>| hold.kind().together().is_some();
        let together: Vec<_> = holds.iter().filter(can).collect();
        if together.len() < 2 {
            return;
        }
        let _slot = self.janitor.slot().await;
        if let Err(error) = self.agree_together(&together).await {
            // they are settled one by one
            self.janitor.failed(error);
        }
    }

    /// Makes the server agree, by one request, with those of these holds that only have to end.
    /// Returns `Err` if that request may have been executed.
    async fn agree_together(&self, holds: &[&Arc<Hold>]) -> Result<(), StoreError> {
        let Some(scripts) = scripts(self, holds.iter().map(|hold| hold.kind())) else {
            return Ok(());
        };
        let (mut permits, mut asked) = (
            Vec::with_capacity(holds.len()),
            Vec::with_capacity(holds.len()),
        );
        let now = Instant::now();
        let mut route = self.route(holds[0], now);
        for hold in holds {
            let Ok(permit) = hold.owner_lock.try_acquire() else {
                continue;
            };
            match hold.send_release(route.epoch(), now) {
                Some(release) if release.ends_a_hold() => {
                    permits.push(permit);
                    asked.push((*hold, release));
                }
                // more than the plain end of a hold: it is settled by itself
                Some(release) => hold.change(|state, _| state.not_executed(&release)),
                None => {}
            }
        }
        if asked.is_empty() {
            return Ok(());
        }
        let names = asked.iter().map(|(hold, _)| Arc::clone(hold.kind().name()));
        let of_one = |(hold, release): &(&Arc<Hold>, _)| {
            let release: &HoldRequest = release;
            let channel = match hold.kind().wake(&release.owner) {
                Wake::Channel(channel) => Arg::from(&channel),
                Wake::Signal(_) | Wake::Poll(_) => Arg::from(&Arc::from("")),
            };
            [Arg::from(&release.owner), channel]
        };
        let args = asked.iter().flat_map(of_one);
        match self
            .store
            .release_together(&mut route, &Call::new(scripts.release, names, args))
            .await
        {
            Ok((answers, epoch)) => {
                for ((hold, release), released) in asked.iter().zip(answers) {
                    self.agreed(hold, release, released, epoch);
                }
            }
            Err(error) if error.may_have_executed() => return Err(error),
            Err(_) => asked
                .iter()
                .for_each(|(hold, release)| hold.change(|state, _| state.not_executed(release))),
        }
        Ok(())
    }
}
