//! A server with one lock, which is held by one name at a time.

use crate::store::{Epoch, Released};

/// How long a lease is, in milliseconds.
pub(super) const TTL: u64 = 900;

/// A request as the server sees it.
#[derive(Debug, Clone)]
pub(super) struct Sent {
    pub(super) owner: String,
    pub(super) count: u32,
    pub(super) is_release: bool,
    pub(super) epoch: Epoch,
}

impl Sent {
    /// It takes or frees the lock. Others only move the count, which matters where the lock is handed over: see
    /// `State::hand_over`.
    pub(super) fn decides(&self) -> bool {
        self.count == u32::from(!self.is_release)
    }
}

pub(super) enum Answer {
    Held,
    Busy,
    Lost,
    Released(Released),
}

#[derive(Debug, Default)]
pub(super) struct Server {
    pub(super) record: Option<(String, u32)>,
    pub(super) ends: u64,
}

impl Server {
    pub(super) fn execute(&mut self, sent: &Sent, now: u64) -> Answer {
        let held = self.record.as_ref().filter(|(owner, _)| *owner == sent.owner).map(|(_, count)| *count);
        match (sent.is_release, held) {
            (true, None) => Answer::Released(Released::NotHeld),
            (true, Some(_)) if sent.count == 0 => {
                self.record = None;
                Answer::Released(Released::Free)
            }
            (true, Some(held)) => {
                self.record = Some((sent.owner.clone(), held.min(sent.count)));
                Answer::Released(Released::StillHeld)
            }
            (false, None) if sent.count > 1 => Answer::Lost,
            (false, None) if self.record.is_some() => Answer::Busy,
            (false, held) => {
                self.record = Some((sent.owner.clone(), sent.count.max(held.unwrap_or(0))));
                self.ends = self.ends.max(now + TTL);
                Answer::Held
            }
        }
    }
}
