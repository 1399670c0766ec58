//! How a release grants a fair lock to the next waiter, which need not ask for it then.
//!
//! The release makes the first in the queue the holder, at first for as long as it would have kept its place, and tells it.
//! Between them is nothing but a message, which may come late: so it names the place in the queue that it is about, and counts for
//! whoever waits at that very place. A look that was answered "busy" was answered before the lock was granted: so the record lives
//! for as long at least as the message says, from when that look was sent, whatever the clocks of servers say. Whoever does not
//! believe its message asks, as if it had heard that the lock is free, and is told that it holds it.

use std::time::Duration;

use super::{
    generation::{First, Grant, Ticket},
    lease::{Lease, Millis},
    state::{Effects, Request, ServerSide, State},
};
use crate::{
    clock::Instant,
    store::{Epoch, Score},
};

/// That the lock was granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Granted {
    place: Score,
    /// The TTL of the record then.
    ttl: Millis,
}

impl Granted {
    /// `None`: this message is another one.
    pub(super) fn parse(message: &[u8]) -> Option<Self> {
        let (place, ttl) = std::str::from_utf8(message).ok()?.split_once(' ')?;
        let ttl = ttl.parse().ok().filter(|ttl| *ttl > 0)?;
        Some(Self { place: Score::parse(place.as_bytes())?, ttl: Millis::of(Duration::from_millis(ttl)) })
    }
}

/// What a waiter knows of its place by the last answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LastLook {
    pub(super) place: Score,
    /// When that look was sent, and over which connection.
    pub(super) sent: Instant,
    pub(super) epoch: Epoch,
}

impl LastLook {
    /// What this waiter has, which asked for `lease`. `None`: the message is not about its place; the link has another connection
    /// since, of which nobody has asked about it; or it has less time than a renewal takes that fails and is repeated.
    pub(super) fn grant(
        self,
        granted: Granted,
        lease: Lease,
        epoch: Epoch,
        now: Instant,
        renewal: Duration,
    ) -> Option<Grant> {
        let Granted { place, ttl } = granted;
        let is_mine = place == self.place && epoch == self.epoch && ttl.get() <= lease.millis();
        let until = Lease::Fixed(ttl).valid_until(self.sent);
        let left = until.saturating_duration_since(now).checked_sub(renewal).filter(|_| is_mine)?;
        // in a third of its time, as always, if that leaves as much
        let renew_at = (self.sent + ttl.duration() / 3).min(now + left);
        let first = Some(First { until, renew_at });
        Some(Grant { first, ..Grant::of(now, lease) })
    }
}

impl State {
    /// Takes in that somebody else's release granted the lock, instead of what was planned. `None`: it was not this owner's place
    /// alone that the server knew of; nothing has changed.
    pub(super) fn take_granted(
        &mut self,
        request: &Request,
        grant: &Grant,
        epoch: Epoch,
        now: Instant,
        effects: &mut Effects,
    ) -> Option<Ticket> {
        let waits = request.before == ServerSide::Waits && request.count == 1 && self.late.is_none();
        if !waits || self.current.is_some() || grant.valid_until() <= now {
            return None;
        }
        self.granted(request, grant, epoch, now, effects).ok().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(9);
    /// What a renewal takes that fails and is repeated.
    const RENEWAL: Duration = Duration::from_secs(2);

    fn granted(message: &str) -> Option<Granted> {
        Granted::parse(message.as_bytes())
    }

    /// What a waiter makes of a message so long after its last look, if it asks for the lease: until when it relies on it, and when
    /// it is renewed, from that look on.
    fn made_of(message: &str, lease: Lease, after: Duration) -> Option<(Duration, Duration)> {
        let sent = Instant::now();
        let look = LastLook { place: Score::parse(b"1764099690123.5").unwrap(), sent, epoch: Epoch::FIRST };
        let grant = look.grant(granted(message)?, lease, Epoch::FIRST, sent + after, RENEWAL)?;
        assert_eq!((grant.sent, grant.lease), (sent + after, lease));
        let First { until, renew_at } = grant.first.unwrap();
        Some((until.saturating_duration_since(sent), renew_at.saturating_duration_since(sent)))
    }

    fn watched(ttl: Duration) -> Lease {
        Lease::Watched { ttl: Millis::of(ttl), times: None }
    }

    #[test]
    fn a_message_counts_for_its_place_alone() {
        let mine = "1764099690123.5 9000";
        let lease = watched(2 * TTL);
        assert!(made_of(mine, lease, Duration::ZERO).is_some());
        assert!(made_of("1764099690123.50000 9000", lease, Duration::ZERO).is_some(), "printed by another version");
        assert_eq!(made_of("1764099690123.5009766 9000", lease, Duration::ZERO), None, "another turn");
        assert_eq!(made_of("1764099690124.5 9000", lease, Duration::ZERO), None, "another time");
        for nonsense in ["0", "1", "", " ", "1764099690123.5", "1764099690123.5 0", "1764099690123.5 -1", "nan 9000"] {
            assert_eq!(granted(nonsense), None, "{nonsense:?}");
        }
    }

    #[test]
    fn it_counts_from_the_last_look_and_is_renewed_in_time() {
        let (mine, lease) = ("1764099690123.5 9000", watched(2 * TTL));
        let (until, third, enough) = (Duration::from_millis(8_908), TTL / 3, Duration::from_millis(6_908));
        assert_eq!(made_of(mine, lease, Duration::ZERO), Some((until, third)));
        assert_eq!(made_of(mine, lease, TTL / 2), Some((until, third)), "which was long ago: at once");
        assert_eq!(made_of(mine, lease, enough), Some((until, third)), "as long as a renewal takes");
        assert_eq!(made_of(mine, lease, enough + Duration::from_millis(1)), None, "too late to be renewed");
        assert_eq!(made_of(mine, watched(TTL / 2), Duration::ZERO), None, "longer than it was asked to live");
        // a third later a renewal could not be repeated
        let soon = Duration::from_millis(968);
        assert_eq!(made_of("1764099690123.5 3000", lease, Duration::ZERO), Some((soon + RENEWAL, soon)));
    }

    #[test]
    fn another_connection_is_asked() {
        let look = LastLook { place: Score::parse(b"2.5").unwrap(), sent: Instant::now(), epoch: Epoch::FIRST };
        let granted = granted("2.5 9000").unwrap();
        let grant = |epoch| look.grant(granted, watched(TTL), epoch, look.sent, RENEWAL);
        assert!(grant(Epoch::FIRST).is_some());
        assert!(grant(Epoch::FIRST.next()).is_none());
    }
}
