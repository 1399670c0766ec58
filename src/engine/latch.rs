//! Waits for a latch: until its count is zero.
//!
//! A waiter reads the count, joins the wait queue, and reads it again whenever the queue wakes it: a
//! message that the count is zero or was set again, a reconnect, or its poll; and once more when its wait
//! is over. Reading changes nothing, so nothing is ever in doubt, and a waiter may be dropped at any
//! time.

use std::sync::Arc;

use nestlock_wire::{Call, clock::Instant};

use super::{
    core::Core,
    failure::{NO_REPLY, no_reply, store_error},
    retry::Failing,
    wait::waiter::{Waiter, Woken},
};

use crate::error::{Error, Result};

/// A latch, as its waiters see it.
#[derive(Debug)]
pub(crate) struct Awaiting<'a> {
    pub(crate) name: &'a Arc<str>,
    pub(crate) channel: &'a Arc<str>,
    /// Reads the count.
    pub(crate) count: Call,
    pub(crate) deadline: Option<Instant>,
}

impl Core {
    /// Waits until the count is zero. Returns `false` if the wait was over before that.
    pub(crate) async fn wait_for_zero(&self, awaiting: Awaiting<'_>) -> Result<bool> {
        let Awaiting {
            name,
            channel,
            deadline,
            ..
        } = awaiting;
        let (mut waiter, mut failing) = (None::<Waiter<'_>>, None::<Failing>);
        // what led to the next look: if that brings no reply, dropping it wakes another waiter
        let (mut woken, mut is_counted) = (None, false);
        loop {
            self.check_open()?;
            let tried = Instant::now();
            match self.look(&awaiting).await {
                Ok(Some(0)) => {
                    forget(woken.take());
                    waiter.iter().for_each(Waiter::pass_on);
                    return Ok(true);
                }
                Ok(Some(_)) => (failing, is_counted) = (None, true),
                // the wait is over: the last count is all that is known
                Ok(None) if is_counted => return Ok(false),
                Ok(None) => return Err(store_error(name, no_reply(NO_REPLY).of_a_read())),
                Err(error) => {
                    let failing = failing.get_or_insert_with(|| Failing::since(tried));
                    let patience = failing.since + self.config.outage_patience;
                    let end = deadline.unwrap_or(patience);
                    if !error.is_transient() || Instant::now() >= end {
                        return Err(error);
                    }
                    let pause = failing.retry.next();
                    self.pause(name, pause, end).await;
                    continue;
                }
            }
            forget(woken.take());
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Ok(false);
            }
            let waiter = waiter.get_or_insert_with(|| self.join_latch(name, channel));
            waiter.poll_after(None);
            if waiter.was_notified_since(tried) {
                woken = waiter.take_permit().map(Woken::Notified);
                continue;
            }
            match waiter.wait(deadline).await {
                // a message may have been lost: the last look is the answer
                Woken::TimedOut => {}
                Woken::Closed => return Err(Error::Closed),
                next => woken = Some(next),
            }
        }
    }

    /// Reads the count. A bounded wait gives up a round trip and 40 ms after its end: then `None`.
    async fn look(
        &self,
        Awaiting {
            name,
            count,
            deadline,
            ..
        }: &Awaiting<'_>,
    ) -> Result<Option<u32>> {
        let end = deadline.map(|deadline| deadline + self.grace());
        tokio::select! {
            count = self.count(name, count) => count.map(Some),
            () = self.sleep_until(end.unwrap_or(Instant::NEVER)), if end.is_some() => Ok(None),
        }
    }
}

/// The look has brought a reply: another waiter would look in vain.
fn forget(woken: Option<Woken>) {
    match woken {
        Some(Woken::Notified(permit)) => permit.forget(),
        Some(Woken::Poll(turn)) => turn.forget(),
        _ => {}
    }
}
