//! How a release grants a fair lock to the next waiter, which then needs no request.
//!
//! The release makes the first waiter in the queue the holder, at first for as long as its place
//! would have been kept, and publishes a message. The message may come late, so it names the place
//! in the queue, and counts only for the waiter at that very place. A poll whose reply was "busy"
//! came before the grant. So the record lives at least for the TTL in the message, counted from
//! when that poll was sent, whatever the clocks of the servers say. A waiter that cannot rely on
//! its message sends a request, as if the lock were free, and the reply says that it holds the
//! lock.
//!
//! Decision 12 lists what makes this safe.

use std::time::Duration;

use nestlock_wire::{Epoch, clock::Instant};

use super::{
    generation::{First, Grant, Ticket},
    state::{Effects, HoldRequest, HoldState, ServerSide},
};

use crate::{
    engine::lease::{Lease, Millis},
    store::Score,
};

/// The message that the lock was granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Granted {
    score: Score,
    /// The TTL of the record at that time.
    ttl: Millis,
}

impl Granted {
    /// Parses a message. Returns `None` if it does not grant the lock.
    pub(crate) fn parse(message: &[u8]) -> Option<Self> {
        let (place, ttl) = std::str::from_utf8(message).ok()?.split_once(' ')?;
        let ttl = ttl.parse().ok().filter(|ttl| *ttl > 0)?;
        Some(Self {
            score: Score::parse(place.as_bytes())?,
            ttl: Millis::of(Duration::from_millis(ttl)),
        })
    }
}

/// A waiter's place in the queue, as of its last poll.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LastLook {
    pub(crate) place: Score,
    /// When that poll was sent, and over which connection.
    pub(crate) sent: Instant,
    pub(crate) epoch: Epoch,
}

impl LastLook {
    /// Returns the grant for this waiter, which requested `lease`. Returns `None` if the message is
    /// about another place, if its TTL is longer than the lease, if the link has a new connection
    /// since the poll, or if less than `renewal` is left: the time of a renewal that fails and is
    /// retried.
    pub(crate) fn grant(
        self,
        granted: Granted,
        lease: Lease,
        epoch: Epoch,
        now: Instant,
        renewal: Duration,
    ) -> Option<Grant> {
        let Granted { score: place, ttl } = granted;
        let is_mine = place == self.place && epoch == self.epoch && ttl.get() <= lease.millis();
        let until = Lease::Fixed(ttl).valid_until(self.sent);
        let left = until
            .saturating_duration_since(now)
            .checked_sub(renewal)
            .filter(|_| is_mine)?;
        // after a third of the TTL, as always, but early enough that `renewal` is left
        let renew_at = (self.sent + ttl.duration() / 3).min(now + left);
        let first = Some(First { until, renew_at });
        Some(Grant {
            first,
            ..Grant::of(now, lease)
        })
    }
}

impl HoldState {
    /// Enters a hold that another owner's release granted, in place of the planned request. Returns
    /// `None`, with nothing changed, if the server may record more about this owner than its place
    /// in the queue, or if the grant is over.
    pub(crate) fn take_granted(
        &mut self,
        request: &HoldRequest,
        grant: &Grant,
        epoch: Epoch,
        now: Instant,
        effects: &mut Effects,
    ) -> Option<Ticket> {
        let waits = request.before == ServerSide::Waits
            && request.count == 1
            && self.late_request.is_none();
        if !waits || self.current.is_some() || grant.valid_until() <= now {
            return None;
        }
        self.granted(request, grant, epoch, now, effects)
            .ok()
            .flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(9);
    /// The time of a renewal that fails and is retried.
    const RENEWAL: Duration = Duration::from_secs(2);

    fn granted(message: &str) -> Option<Granted> {
        Granted::parse(message.as_bytes())
    }

    /// Returns how a waiter uses a message that comes this long after its last poll: until when it
    /// relies on the grant, and when it renews it, both counted from that poll.
    fn made_of(message: &str, lease: Lease, after: Duration) -> Option<(Duration, Duration)> {
        let sent = Instant::now();
        let look = LastLook {
            place: Score::parse(b"1764099690123.5").unwrap(),
            sent,
            epoch: Epoch::FIRST,
        };
        let grant = look.grant(
            granted(message)?,
            lease,
            Epoch::FIRST,
            sent + after,
            RENEWAL,
        )?;
        assert_eq!((grant.sent, grant.lease), (sent + after, lease));
        let First { until, renew_at } = grant.first.unwrap();
        Some((
            until.saturating_duration_since(sent),
            renew_at.saturating_duration_since(sent),
        ))
    }

    fn watched(ttl: Duration) -> Lease {
        Lease::Watched {
            ttl: Millis::of(ttl),
            max_hold: None,
        }
    }

    #[test]
    fn a_message_counts_for_its_place_alone() {
        let mine = "1764099690123.5 9000";
        let lease = watched(2 * TTL);
        assert!(made_of(mine, lease, Duration::ZERO).is_some());
        assert!(
            made_of("1764099690123.50000 9000", lease, Duration::ZERO).is_some(),
            "printed by another version"
        );
        assert_eq!(
            made_of("1764099690123.5009766 9000", lease, Duration::ZERO),
            None,
            "another turn"
        );
        assert_eq!(
            made_of("1764099690124.5 9000", lease, Duration::ZERO),
            None,
            "another time"
        );
        for nonsense in [
            "0",
            "1",
            "",
            " ",
            "1764099690123.5",
            "1764099690123.5 0",
            "1764099690123.5 -1",
            "nan 9000",
        ] {
            assert_eq!(granted(nonsense), None, "{nonsense:?}");
        }
    }

    #[test]
    fn it_counts_from_the_last_look_and_is_renewed_in_time() {
        let (mine, lease) = ("1764099690123.5 9000", watched(2 * TTL));
        let (until, third, enough) = (
            Duration::from_millis(8_908),
            TTL / 3,
            Duration::from_millis(6_908),
        );
        assert_eq!(made_of(mine, lease, Duration::ZERO), Some((until, third)));
        assert_eq!(
            made_of(mine, lease, TTL / 2),
            Some((until, third)),
            "the third has passed: renewed at once"
        );
        assert_eq!(
            made_of(mine, lease, enough),
            Some((until, third)),
            "just enough time for a renewal"
        );
        assert_eq!(
            made_of(mine, lease, enough + Duration::from_millis(1)),
            None,
            "too late to be renewed"
        );
        assert_eq!(
            made_of(mine, watched(TTL / 2), Duration::ZERO),
            None,
            "longer than the requested lease"
        );
        // after a third of the TTL, a renewal could not be retried
        let soon = Duration::from_millis(968);
        assert_eq!(
            made_of("1764099690123.5 3000", lease, Duration::ZERO),
            Some((soon + RENEWAL, soon))
        );
    }

    #[test]
    fn another_connection_is_asked() {
        let look = LastLook {
            place: Score::parse(b"2.5").unwrap(),
            sent: Instant::now(),
            epoch: Epoch::FIRST,
        };
        let granted = granted("2.5 9000").unwrap();
        let grant = |epoch| look.grant(granted, watched(TTL), epoch, look.sent, RENEWAL);
        assert!(grant(Epoch::FIRST).is_some());
        assert!(grant(Epoch::FIRST.next()).is_none());
    }
}
