//! The way of one request: over which link, under which number, until when.

use std::{sync::Arc, time::Duration};

use super::{
    acks::Receipt,
    cluster::Next,
    link::{Epoch, Link},
    wire::Until,
};
use crate::{clock::Instant, options::Copies};

/// A migration moves a key in some 40 us: whoever waits for longer than this may wait for a person.
const HELD_UP: Duration = Duration::from_millis(100);

/// For so long, and a round trip, after it was asked is it sent where an answer says that it is asked for this time only. What
/// the old master has said may be true no more: a slot that has come back since, and goes once more, has two owners for
/// whoever is late.
const FRESH: Duration = Duration::from_millis(200);

/// And for no longer than this: how long a request takes is not known where a runtime that is blocked takes its answers late.
const FRESH_AT_MOST: Duration = Duration::from_millis(500);

/// What a request does where it is asked for this time only, and that is said late.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Late {
    AsksAgain,
    /// A renewal lets nobody in, and goes on.
    Goes,
    /// It has: what is not where it went may be elsewhere.
    HasGone,
}

/// Found once for each attempt: what is sent goes where its doubt was noted.
#[derive(Debug)]
pub(crate) struct Route {
    pub(super) link: Arc<Link>,
    epoch: Epoch,
    pub(super) until: Until,
    /// The slot that it is about, in a cluster.
    pub(super) slot: u16,
    /// For a node that is about to have its slot.
    pub(super) asking: bool,
    /// How often it was sent elsewhere.
    hops: u32,
    /// How often it was told that its keys are on their way, and when first.
    waits: u32,
    held_up: Option<Instant>,
    /// Whether it has just waited for the map, and how: see [`Next::Elsewhere`].
    looked: Option<bool>,
    /// It has paused, and asks the slot's master once more: where that sends it, it goes at once.
    pub(super) has_rested: bool,
    late: Late,
    /// Where it goes, after it was refused.
    pub(super) next: Option<Next>,
    /// Who must have what it writes, before that counts.
    pub(crate) copies: Option<Copies>,
    /// What to ask that by, of the last request.
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
            looked: None,
            has_rested: false,
            late: Late::AsksAgain,
            next: None,
            copies: None,
            receipt: None,
        }
    }

    /// Whether its keys have been on their way for so long that whoever moves them may have stopped.
    pub(crate) fn is_held_up(&self) -> bool {
        self.held_up.is_some_and(|since| since.elapsed() >= HELD_UP)
    }

    /// From then on it waits for no connection, and is sent nowhere else.
    pub(crate) fn give_up(&mut self, at: Option<Instant>) {
        self.until = self.until.giving_up(at);
    }

    /// Whether it goes to another node, after it was refused.
    pub(crate) fn goes_elsewhere(&self) -> bool {
        matches!(self.next, Some(Next::To(_) | Next::Asking(_)))
    }

    /// Refused again, it goes there again a little later.
    pub(crate) fn wait(&mut self) {
        self.next = Some(Next::Later);
    }

    /// Where it goes now, and the pause before it; `None`: nowhere. What is sent last has for its answer what the last one took, and
    /// `spare`.
    pub(super) fn go_on(&mut self, spare: Duration) -> Option<(Next, Duration)> {
        let (next, now) = (self.next.take()?, Instant::now());
        // once in each way, until it has been sent somewhere
        let looks = if let Next::Elsewhere { or_there } = next { Some(or_there) } else { None };
        if std::mem::replace(&mut self.looked, looks) == looks && looks.is_some() {
            return None;
        }
        let times = if matches!(next, Next::Later) {
            self.held_up.get_or_insert(now);
            &mut self.waits
        } else {
            &mut self.hops
        };
        *times += 1;
        let at_once = matches!(next, Next::Asking(_)) && std::mem::take(&mut self.has_rested);
        let pause = if at_once { Duration::ZERO } else { next.pause(*times) };
        (pause.is_zero() || self.until.has_time(now + pause, self.took(now) + spare)).then_some((next, pause))
    }

    /// It goes also where it is asked for this time only, and that is said late.
    pub(super) fn lets_nobody_in(&mut self) {
        self.late = Late::Goes;
    }

    /// Whether what it did not find where it went may be elsewhere.
    pub(super) fn may_have_missed(&self) -> bool {
        self.late == Late::HasGone
    }

    /// Whether it goes now, after this pause, where it is asked for this time only.
    pub(super) fn goes_asking(&mut self, pause: Duration) -> bool {
        let fresh = (self.link.round_trip() + FRESH).min(FRESH_AT_MOST);
        let is_fresh = pause.is_zero() && Instant::now() <= self.until.asked() + fresh;
        if self.late != Late::AsksAgain {
            self.late = if is_fresh { Late::Goes } else { Late::HasGone };
        }
        is_fresh || self.late != Late::AsksAgain
    }

    /// How long it may wait, and have `spare` for its answer; or, for whoever `is_slow` to let it in, as long as that took.
    pub(super) fn waits(&self, spare: Duration, is_slow: bool) -> Duration {
        let now = Instant::now();
        let left = self.until.left(now);
        let waits = left.saturating_sub(spare).min(self.until.patience(now));
        if is_slow { waits.min(left.saturating_sub(self.took(now)) / 2) } else { waits }
    }

    /// Whether an answer that takes as long as the last one, and `spare`, would come in time: what was only refused is not told as
    /// unconfirmed.
    pub(super) fn has_time_again(&self, spare: Duration) -> bool {
        let now = Instant::now();
        self.until.has_time(now, self.took(now) + spare)
    }

    /// What the last answer took.
    fn took(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.until.asked())
    }

    /// The connection that a request goes over which is sent now. Should that have ended by then, it goes over the link's next
    /// one, and the answer has another number.
    pub(crate) fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Goes on over another link.
    pub(super) fn turn(&mut self, link: Arc<Link>, asking: bool) {
        (self.epoch, self.asking) = (link.epoch(), asking);
        if !asking && self.may_have_missed() {
            self.late = Late::Goes;
        }
        self.link = link;
    }
}
