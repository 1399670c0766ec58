//! Several locks by one request: acquired all or none, and given back.
//!
//! It is a shortcut, never needed: nobody waits here, neither for a lock nor for a turn. Whatever is not plain (a re-entry,
//! a doubt, a turn that is taken, a refusal) is left to the way on which each lock goes by itself.

use std::{pin::pin, sync::Arc};

use futures_util::future::join_all;

use super::{
    attempt::{Acquire, Entered, why_not_entered},
    core::{Core, LOCKS_AT_ONCE},
    failure::{NO_ANSWER, silent, store_error},
    hold::{Hold, Next},
    kind::{Kind, Together, Wake},
    settle::UnderWay,
    state::{Left, Request},
};
use crate::{
    clock::Instant,
    error::{Error, Result, StoreError},
    store::{Acquired, Arg, Call},
};

/// What came of [`Acquire::together`].
pub(crate) enum Outcome {
    Entered(Vec<Entered>),
    /// Somebody else holds this one.
    Busy(usize),
    /// Nothing is held. Each lock by itself may do better, or say what is wrong.
    NotThisWay,
}

/// The scripts, if these locks can be taken by one request.
fn scripts<'a>(core: &Core, kinds: impl ExactSizeIterator<Item = &'a Arc<dyn Kind>> + Clone) -> Option<Together> {
    let first = kinds.clone().next()?;
    let alike = kinds.clone().all(|kind| kind.about().family == first.about().family && kind.together().is_some());
    let together = alike && kinds.len() <= LOCKS_AT_ONCE && core.store.takes_together(kinds.map(|kind| kind.name()));
    first.together().filter(|_| together)
}

impl Acquire<'_> {
    /// Acquires all of these locks, of which this acquire's is the first, if nobody holds any.
    pub(crate) async fn together(&self, kinds: &[Arc<dyn Kind>]) -> Result<Outcome> {
        match self.in_time(self.attempt_deadline(None), pin!(self.attempt_together(kinds))).await {
            Some(outcome) => outcome,
            None => self.no_answer(silent(NO_ANSWER)),
        }
    }

    async fn attempt_together(&self, kinds: &[Arc<dyn Kind>]) -> Result<Outcome> {
        let Self { core, .. } = *self;
        if let Err(error) = core.connected(self.attempt_deadline(None)).await {
            // each by itself waits for as long as an outage may last
            return if error.is_transient() { Ok(Outcome::NotThisWay) } else { Err(error) };
        }
        let Some(scripts) = scripts(core, kinds.iter()) else { return Ok(Outcome::NotThisWay) };
        let under_way: Vec<_> =
            kinds.iter().map(|kind| UnderWay { core, hold: core.holds.get_or_insert(kind, &self.owner) }).collect();
        let (mut turns, mut requests, sent) = (Vec::new(), Vec::new(), Instant::now());
        for (UnderWay { hold, .. }, kind) in under_way.iter().zip(kinds) {
            // also where one lock is named twice
            let Ok(turn) = hold.turn.try_acquire() else { return Ok(Outcome::NotThisWay) };
            turns.push(turn);
            if hold.count() > 0 {
                return Ok(Outcome::NotThisWay);
            }
            let Next::Send(request) = hold.plan(self.door(kind, false), core.holds.around(hold), sent)? else {
                return Ok(Outcome::NotThisWay);
            };
            requests.push((hold, request));
        }
        // names may have been retired meanwhile
        let owner = requests[0].1.owner.clone();
        if requests.iter().any(|(_, request)| request.owner != owner) {
            return Ok(Outcome::NotThisWay);
        }
        let mut route = core.route(requests[0].0, sent);
        route.copies = self.copies;
        for (hold, request) in &requests {
            hold.send(request, self.lease, route.epoch(), sent);
        }
        let not_executed = || {
            for (hold, request) in &requests {
                hold.not_executed(request);
            }
        };
        // looked at after the holds are in doubt: a shutdown that this look misses will wait for these turns
        core.check_open().inspect_err(|_| not_executed())?;
        // one by one, the one that it is about is told
        if requests.iter().any(|(hold, request)| core.holds.rival(hold, request.count).is_some()) {
            not_executed();
            return Ok(Outcome::NotThisWay);
        }

        let names = kinds.iter().map(|kind| Arc::clone(kind.name()));
        let call = Call::new(scripts.acquire, names, vec![Arg::from(&owner), self.lease.millis().into()]);
        match core.store.acquire_together(&mut route, &call).await {
            Ok((None, epoch)) => {
                let replicas = match (self.copies, core.store.acknowledged(&route).await) {
                    (None, _) => None,
                    (Some(copies), Ok(Some(acks))) if acks.suffice(copies) => Some(acks.counted()),
                    // each is given back before it is asked for by itself, which says what is wrong
                    _ => return Ok(Outcome::NotThisWay),
                };
                let (mut entered, mut late) = (Vec::new(), None);
                for (hold, request) in &requests {
                    match self.take_in(hold, request, sent, None, (epoch, replicas))? {
                        Some(ticket) => entered.push((Arc::clone(hold), ticket)),
                        None => late = Some(hold),
                    }
                }
                if let Some(late) = late {
                    for (hold, ticket) in &entered {
                        core.release_later(hold, ticket);
                    }
                    return self.no_answer(why_not_entered(late));
                }
                Ok(Outcome::Entered(entered))
            }
            Ok((Some((at, why)), epoch)) => {
                for (hold, request) in &requests {
                    hold.busy(request, false, epoch);
                }
                match why {
                    Acquired::WrongKind => Err(Error::WrongLockKind { lock: kinds[at].name().to_string() }),
                    _ => Ok(Outcome::Busy(at)),
                }
            }
            Err(error) if error.may_have_executed() => self.no_answer(error),
            Err(_) => {
                not_executed();
                Ok(Outcome::NotThisWay)
            }
        }
    }

    /// Whoever still has time tries again, lock by lock.
    fn no_answer(&self, error: StoreError) -> Result<Outcome> {
        match self.deadline {
            Some(deadline) if deadline <= Instant::now() => Err(store_error(self.kind.name(), error)),
            _ => Ok(Outcome::NotThisWay),
        }
    }
}

impl Core {
    /// Gives up several holds, and waits until the server knows. Dropped midway, the janitor goes on. Reports the first
    /// failure.
    pub(crate) async fn release_together(&self, held: Vec<Entered>) -> Result<()> {
        held.first().map_or(Ok(()), |(hold, _)| self.check_ours(hold.lock_name()))?;
        // before the first await, all of them
        let given_up: Vec<Result<_>> = held
            .into_iter()
            .map(|(hold, ticket)| {
                let under_way = UnderWay { core: self, hold };
                let left = under_way.hold.leave(&ticket, Instant::now())?;
                Ok((under_way, left))
            })
            .collect();
        let deadline = Instant::now() + self.config.command_timeout();
        let here = given_up.iter().flatten().filter(|(_, left)| matches!(left, Left::Here(_)));
        let holds: Vec<&Arc<Hold>> = here.map(|(under_way, _)| &under_way.hold).collect();
        if let Err(error) = self.agree_together(&holds).await
            && Instant::now() >= deadline
        {
            return Err(store_error(holds[0].lock_name(), error));
        }
        let released = given_up.into_iter().map(|given_up| async move {
            let (under_way, left) = given_up?;
            self.left(&under_way.hold, left, Instant::now(), deadline).await
        });
        join_all(released).await.into_iter().collect()
    }

    /// Makes the server agree with holds that nobody awaits, as far as one request can.
    pub(super) async fn settle_together(&self, holds: &[Arc<Hold>]) {
        let can = |hold: &&Arc<Hold>| hold.kind().together().is_some();
        let together: Vec<_> = holds.iter().filter(can).collect();
        if together.len() < 2 {
            return;
        }
        let _slot = self.janitor.slot().await;
        // what is left is settled one by one
        let _ = self.agree_together(&together).await;
    }

    /// Makes the server agree with those of these holds that end with it, if that needs nothing but one request.
    async fn agree_together(&self, holds: &[&Arc<Hold>]) -> Result<(), StoreError> {
        let Some(scripts) = scripts(self, holds.iter().map(|hold| hold.kind())) else { return Ok(()) };
        let (mut turns, mut asked) = (Vec::with_capacity(holds.len()), Vec::with_capacity(holds.len()));
        let now = Instant::now();
        let mut route = self.route(holds[0], now);
        for hold in holds {
            let Ok(turn) = hold.turn.try_acquire() else { continue };
            match hold.send_release(route.epoch(), now) {
                Some(release) if release.ends_a_hold() => {
                    turns.push(turn);
                    asked.push((*hold, release));
                }
                Some(release) => hold.not_executed(&release),
                None => {}
            }
        }
        if asked.is_empty() {
            return Ok(());
        }
        let names = asked.iter().map(|(hold, _)| Arc::clone(hold.kind().name()));
        let of_one = |(hold, release): &(&Arc<Hold>, _)| {
            let release: &Request = release;
            let channel = match hold.kind().wake(&release.owner) {
                Wake::Channel(channel) => Arg::from(&channel),
                Wake::Signal(_) | Wake::Poll(_) => Arg::from(&Arc::from("")),
            };
            [Arg::from(&release.owner), channel]
        };
        let args = asked.iter().flat_map(of_one);
        match self.store.release_together(&mut route, &Call::new(scripts.release, names, args)).await {
            Ok((answers, epoch)) => {
                for ((hold, release), released) in asked.iter().zip(answers) {
                    self.agreed(hold, release, released, epoch);
                }
            }
            Err(error) if error.may_have_executed() => return Err(error),
            Err(_) => asked.iter().for_each(|(hold, release)| hold.not_executed(release)),
        }
        Ok(())
    }
}
