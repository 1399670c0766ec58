//! The route of one request: its link, its epoch, and its deadline.
//!
//! The epoch is noted with the doubt before the request is sent, and the reply names the connection
//! that brought it. ASK is followed only for a moment: see decision 19.
//!
//! A blocked runtime makes round trips look long, hence its limit of 500 ms. What a renewal does
//! not find behind ASK may be elsewhere, and is sent again.

use std::{sync::Arc, time::Duration};

use nestlock_wire::{Copies, Epoch, Link, Receipt, Until, clock::Instant};

use crate::store::next_hop::RedirectTo;

/// A migration moves a key in about 40 us. A request that waits longer than this may be waiting for
/// an operator.
const HELD_UP: Duration = Duration::from_millis(100);

/// How long after it was sent, plus a round trip, a request still follows an ASK redirect. A later
/// ASK may be stale: if the slot has come back and migrates again, the new master does not know the
/// holder at the old one, and could grant the lock a second time.
const FRESH: Duration = Duration::from_millis(200);

/// Upper bound for [`FRESH`] and the round trip: a blocked runtime reads replies late, which makes
/// round trips look long.
const FRESH_AT_MOST: Duration = Duration::from_millis(500);

/// What a request does on a late ASK redirect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AskPolicy {
    /// Sends the request to the slot's master again.
    Retry,
    /// Follows it: a renewal grants no lock.
    Follow,
    /// Has followed it: a record that was not found there may be elsewhere.
    Followed,
}

/// The route of a request, found once for each attempt, so that the request goes where its doubt
/// was recorded.
#[derive(Debug)]
pub(crate) struct Route {
    pub(super) link: Arc<Link>,
    epoch: Epoch,
    pub(super) until: Until,
    /// The slot of the request, in a cluster.
    pub(super) slot: u16,
    /// True if the request goes to a node that imports its slot.
    pub(super) asking: bool,
    /// How many times the request was sent elsewhere.
    hops: u32,
    /// How many times the request was refused because its keys are migrating, and since when.
    waits: u32,
    held_up: Option<Instant>,
    /// Whether the request has just waited for the map, and how: see [`RedirectTo::Elsewhere`].
    waited_for_map: Option<bool>,
    /// True if the request has paused, and goes to the slot's master again. If that redirects it,
    /// it follows at once.
    pub(super) has_rested: bool,
    policy: AskPolicy,
    /// Where the request goes after a refusal.
    pub(super) next: Option<RedirectTo>,
    /// The copies that its write must have before it counts.
    pub(crate) copies: Option<Copies>,
    /// The receipt of the last request, with which those copies are counted.
    pub(super) receipt: Option<Receipt>,
}

impl Route {
    pub(super) fn new(link: Arc<Link>, until: Until, slot: u16) -> Self {
        let epoch = link.epoch();
        Self {
            link,
            epoch,
            until,
            slot,
            asking: false,
            hops: 0,
            waits: 0,
            held_up: None,
            waited_for_map: None,
            has_rested: false,
            policy: AskPolicy::Retry,
            next: None,
            copies: None,
            receipt: None,
        }
    }

    /// Returns whether its keys have been migrating long enough that the migration may have
    /// stopped.
    pub(crate) fn is_held_up(&self) -> bool {
        self.held_up.is_some_and(|since| since.elapsed() >= HELD_UP)
    }

    /// Sets the time from which on the request waits for no connection and follows no redirect.
    pub(crate) fn give_up(&mut self, at: Option<Instant>) {
        self.until = self.until.giving_up(at);
    }

    /// Returns whether the request goes to another node after a refusal.
    pub(crate) fn goes_elsewhere(&self) -> bool {
        matches!(self.next, Some(RedirectTo::To(_) | RedirectTo::Asking(_)))
    }

    /// Schedules another try at the slot's master, a little later.
    pub(crate) fn wait(&mut self) {
        self.next = Some(RedirectTo::Later);
    }

    /// Returns where the request goes now, and the pause before it. Returns `None` if it goes
    /// nowhere, or if the pause would leave less time than the last reply took, plus `spare`.
    pub(super) fn go_on(&mut self, spare: Duration) -> Option<(RedirectTo, Duration)> {
        let (next, now) = (self.next.take()?, Instant::now());
        // waiting for the map twice in a row, in the same way, would lead nowhere
        let looks = if let RedirectTo::Elsewhere { or_there } = next {
            Some(or_there)
        } else {
            None
        };
        if std::mem::replace(&mut self.waited_for_map, looks) == looks && looks.is_some() {
            return None;
        }
        let times = if matches!(next, RedirectTo::Later) {
            self.held_up.get_or_insert(now);
            &mut self.waits
        } else {
            &mut self.hops
        };
        *times += 1;
        let at_once = matches!(next, RedirectTo::Asking(_)) && std::mem::take(&mut self.has_rested);
        let pause = if at_once {
            Duration::ZERO
        } else {
            next.pause(*times)
        };
        (pause.is_zero() || self.until.has_time(now + pause, self.took(now) + spare))
            .then_some((next, pause))
    }

    /// Lets the request follow a late ASK redirect. Only for renewals, which grant no lock.
    pub(super) fn lets_nobody_in(&mut self) {
        self.policy = AskPolicy::Follow;
    }

    /// Returns whether a record that was not found may be elsewhere, after a late ASK redirect.
    pub(super) fn may_have_missed(&self) -> bool {
        self.policy == AskPolicy::Followed
    }

    /// Returns whether the request follows an ASK redirect now, after this pause.
    pub(super) fn goes_with_asking(&mut self, pause: Duration) -> bool {
        let fresh = (self.link.round_trip() + FRESH).min(FRESH_AT_MOST);
        let is_fresh = pause.is_zero() && Instant::now() <= self.until.asked() + fresh;
        if self.policy != AskPolicy::Retry {
            self.policy = if is_fresh {
                AskPolicy::Follow
            } else {
                AskPolicy::Followed
            };
        }
        is_fresh || self.policy != AskPolicy::Retry
    }

    /// Returns how long the request may wait and still have `spare` for its reply. If the server
    /// `is_slow` to accept connections, the request keeps as much time as it waits, plus what the
    /// last reply took.
    pub(super) fn waits(&self, spare: Duration, is_slow: bool) -> Duration {
        let now = Instant::now();
        let left = self.until.remaining(now);
        let waits = left.saturating_sub(spare).min(self.until.patience(now));
        if is_slow {
            waits.min(left.saturating_sub(self.took(now)) / 2)
        } else {
            waits
        }
    }

    /// Returns whether a reply as slow as the last one, plus `spare`, would arrive in time. Without
    /// that much time, a request that was only refused could end as unconfirmed.
    pub(super) fn has_time_again(&self, spare: Duration) -> bool {
        let now = Instant::now();
        self.until.has_time(now, self.took(now) + spare)
    }

    /// Returns how long the last reply took.
    fn took(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.until.asked())
    }

    /// Returns the epoch of the connection for a request that is sent now. If that connection has
    /// ended by then, the link's next one carries the request, and the reply has another epoch.
    pub(crate) fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Moves the request to another link.
    pub(super) fn redirect_to(&mut self, link: Arc<Link>, asking: bool) {
        (self.epoch, self.asking) = (link.epoch(), asking);
        if !asking && self.may_have_missed() {
            self.policy = AskPolicy::Follow;
        }
        self.link = link;
    }
}
