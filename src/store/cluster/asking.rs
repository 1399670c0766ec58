//! How often the map is asked for.

use std::time::Duration;

use crate::{clock::Instant, store::pace::jitter};

/// While all is well.
const CALM: Duration = Duration::from_secs(5);
/// While something is wrong: at first, and at most where the answers stay the same.
pub(super) const AWAY: Duration = Duration::from_millis(50);
const AT_MOST: Duration = Duration::from_secs(1);
/// How long a replica is expected to take over within: four times as long as servers take by default.
const FAILOVER: Duration = Duration::from_secs(60);

/// What is wrong: the better one first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Trouble {
    /// A master is away, and somebody may take over from it any moment.
    Passes,
    /// Somebody must do something about it; or a request was refused, nobody knows why.
    Stays,
}

/// When the map is asked for.
#[derive(Debug)]
pub(super) struct Asking {
    asked: Instant,
    /// The pause before the next time, while trouble stays.
    pause: Duration,
    /// Since when a replica has been expected to take over.
    expects: Option<Instant>,
    /// What the map had counted then.
    moves: u64,
}

impl Asking {
    pub(super) fn new(now: Instant) -> Self {
        Self { asked: now, pause: AWAY, expects: None, moves: 0 }
    }

    /// How long until it is asked for.
    pub(super) fn pause(&mut self, trouble: Option<Trouble>, now: Instant) -> Duration {
        if trouble != Some(Trouble::Passes) {
            self.expects = None;
        }
        let since_asked = now.saturating_duration_since(self.asked);
        let pause = match trouble {
            None => CALM,
            Some(Trouble::Passes) if now.saturating_duration_since(*self.expects.get_or_insert(now)) < FAILOVER => AWAY,
            // it was quiet: this is something new
            Some(_) if since_asked > 2 * AT_MOST => AWAY,
            Some(_) => self.pause,
        };
        pause.saturating_sub(since_asked)
    }

    pub(super) fn asked(&mut self, trouble: Option<Trouble>, now: Instant) {
        let is_new = trouble.is_none() || now.saturating_duration_since(self.asked) > 2 * AT_MOST;
        self.pause = if is_new { AWAY } else { jitter((2 * self.pause).min(AT_MOST), 0.2) };
        self.asked = now;
    }

    /// `moves`: how often slots have changed their masters.
    pub(super) fn answered(&mut self, moves: u64) {
        if std::mem::replace(&mut self.moves, moves) != moves {
            self.pause = AWAY;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often it is asked for in this time.
    fn times(asking: &mut Asking, now: &mut Instant, trouble: Option<Trouble>, time: Duration) -> usize {
        let (until, mut times) = (*now + time, 0);
        loop {
            *now = *now + asking.pause(trouble, *now);
            if *now > until {
                *now = until;
                return times;
            }
            asking.asked(trouble, *now);
            asking.answered(asking.moves);
            times += 1;
        }
    }

    #[test]
    fn where_the_answers_stay_the_same_it_asks_ever_less_often() {
        let mut now = Instant::now();
        let mut asking = Asking::new(now);
        let second = Duration::from_secs(1);
        assert_eq!(times(&mut asking, &mut now, None, 20 * second), 4);
        let stays = times(&mut asking, &mut now, Some(Trouble::Stays), 60 * second);
        assert!((55..=85).contains(&stays), "{stays}");
        let long = times(&mut asking, &mut now, Some(Trouble::Stays), 60 * second);
        assert!((49..=77).contains(&long), "{long}");
        // the map has changed
        asking.answered(asking.moves + 1);
        let soon = times(&mut asking, &mut now, Some(Trouble::Stays), second);
        assert!(soon >= 3, "{soon}");
        // what is new is asked for at once
        assert_eq!(times(&mut asking, &mut now, None, 5 * second), 1);
        now = now + 3 * second;
        assert_eq!(asking.pause(Some(Trouble::Stays), now), Duration::ZERO);
    }

    #[test]
    fn whoever_may_take_over_is_asked_for_all_the_while() {
        let mut now = Instant::now();
        let mut asking = Asking::new(now);
        let second = Duration::from_secs(1);
        times(&mut asking, &mut now, Some(Trouble::Stays), 20 * second);
        let often = times(&mut asking, &mut now, Some(Trouble::Passes), 50 * second);
        assert!((950..=1_001).contains(&often), "{often}");
        // nobody does
        times(&mut asking, &mut now, Some(Trouble::Passes), 20 * second);
        let seldom = times(&mut asking, &mut now, Some(Trouble::Passes), 20 * second);
        assert!(seldom <= 26, "{seldom}");
        // another one
        times(&mut asking, &mut now, None, second);
        assert!(times(&mut asking, &mut now, Some(Trouble::Passes), 2 * second) >= 38);
    }
}
