//! How often the client refreshes the map.
//!
//! Every 5 s; at once at any trouble (a redirect, the end of a connection, 500 ms of silence);
//! every 50 ms, for up to 1 min, while a master that has a replica is away, because a failover must
//! be noticed within 100 ms. If no replica can take over, or requests are refused, the pause
//! doubles up to 1 s, until the map changes.

use std::time::Duration;

use nestlock_wire::{clock::Instant, jitter};

/// The interval while all is well.
const CALM: Duration = Duration::from_secs(5);
/// The shortest interval while something is wrong.
pub(super) const AWAY: Duration = Duration::from_millis(50);
/// The longest interval while something is wrong and the maps stay the same.
const AT_MOST: Duration = Duration::from_secs(1);
/// How long a replica is expected to need for a takeover: four times the default of
/// `cluster-node-timeout`.
const FAILOVER: Duration = Duration::from_secs(60);

/// What is wrong. The less serious case compares as smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Trouble {
    /// A master is away, and a replica may take over at any moment.
    Passes,
    /// A master without replicas is away, a slot has no master, or a request failed for an unknown
    /// reason. This may need an operator.
    Stays,
}

/// Decides when to refresh the map.
#[derive(Debug)]
pub(super) struct RefreshSchedule {
    last_refresh: Instant,
    /// The pause before the next refresh, while the trouble lasts.
    pause: Duration,
    /// Since when a replica has been expected to take over.
    expects: Option<Instant>,
    /// How many times slots had changed their masters at the last refresh.
    moves: u64,
}

impl RefreshSchedule {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            last_refresh: now,
            pause: AWAY,
            expects: None,
            moves: 0,
        }
    }

    /// Returns how long to wait until the next refresh.
    pub(super) fn pause(&mut self, trouble: Option<Trouble>, now: Instant) -> Duration {
        if trouble != Some(Trouble::Passes) {
            self.expects = None;
        }
        let since_asked = now.saturating_duration_since(self.last_refresh);
        let pause = match trouble {
            None => CALM,
            Some(Trouble::Passes)
                if now.saturating_duration_since(*self.expects.get_or_insert(now)) < FAILOVER =>
            {
                AWAY
            }
            // nothing was wrong for a while: this is new trouble
            Some(_) if since_asked > 2 * AT_MOST => AWAY,
            Some(_) => self.pause,
        };
        pause.saturating_sub(since_asked)
    }

    pub(super) fn asked(&mut self, trouble: Option<Trouble>, now: Instant) {
        let is_new =
            trouble.is_none() || now.saturating_duration_since(self.last_refresh) > 2 * AT_MOST;
        self.pause = if is_new {
            AWAY
        } else {
            jitter((2 * self.pause).min(AT_MOST), 0.2)
        };
        self.last_refresh = now;
    }

    /// Records the result of a refresh. `moves` is how many times slots have changed their masters;
    /// a change shortens the next pause.
    pub(super) fn refreshed(&mut self, moves: u64) {
        if std::mem::replace(&mut self.moves, moves) != moves {
            self.pause = AWAY;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how many refreshes happen in this time.
    fn times(
        asking: &mut RefreshSchedule,
        now: &mut Instant,
        trouble: Option<Trouble>,
        time: Duration,
    ) -> usize {
        let (until, mut times) = (*now + time, 0);
        loop {
            *now = *now + asking.pause(trouble, *now);
            if *now > until {
                *now = until;
                return times;
            }
            asking.asked(trouble, *now);
            asking.refreshed(asking.moves);
            times += 1;
        }
    }

    #[test]
    fn where_the_answers_stay_the_same_it_asks_ever_less_often() {
        let mut now = Instant::now();
        let mut asking = RefreshSchedule::new(now);
        let second = Duration::from_secs(1);
        assert_eq!(times(&mut asking, &mut now, None, 20 * second), 4);
        let stays = times(&mut asking, &mut now, Some(Trouble::Stays), 60 * second);
        assert!((55..=85).contains(&stays), "{stays}");
        let long = times(&mut asking, &mut now, Some(Trouble::Stays), 60 * second);
        assert!((49..=77).contains(&long), "{long}");
        // the map has changed
        asking.refreshed(asking.moves + 1);
        let soon = times(&mut asking, &mut now, Some(Trouble::Stays), second);
        assert!(soon >= 3, "{soon}");
        // new trouble causes a refresh at once
        assert_eq!(times(&mut asking, &mut now, None, 5 * second), 1);
        now = now + 3 * second;
        assert_eq!(asking.pause(Some(Trouble::Stays), now), Duration::ZERO);
    }

    #[test]
    fn the_map_is_refreshed_often_while_a_replica_may_take_over() {
        let mut now = Instant::now();
        let mut asking = RefreshSchedule::new(now);
        let second = Duration::from_secs(1);
        times(&mut asking, &mut now, Some(Trouble::Stays), 20 * second);
        let often = times(&mut asking, &mut now, Some(Trouble::Passes), 50 * second);
        assert!((950..=1_001).contains(&often), "{often}");
        // no replica takes over
        times(&mut asking, &mut now, Some(Trouble::Passes), 20 * second);
        let seldom = times(&mut asking, &mut now, Some(Trouble::Passes), 20 * second);
        assert!(seldom <= 26, "{seldom}");
        // another outage
        times(&mut asking, &mut now, None, second);
        assert!(times(&mut asking, &mut now, Some(Trouble::Passes), 2 * second) >= 38);
    }
}
