//! Trying again: after how long.

use std::time::Duration;

use uuid::Uuid;

use crate::{clock::Instant, error::Error};

/// The first and the longest pause before a request that the server refused for now is repeated; half of it is random.
const REFUSED_FOR_NOW: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// Pauses between tries: each twice as long as the one before, up to a longest.
#[derive(Debug)]
pub(super) struct Retry {
    pause: Duration,
    longest: Duration,
}

impl Retry {
    pub(super) fn new(first: Duration, longest: Duration) -> Self {
        Self { pause: first, longest }
    }

    /// The pause before the next try, without taking it.
    pub(super) fn pause(&self) -> Duration {
        self.pause
    }

    /// The pause before the next try.
    pub(super) fn next(&mut self) -> Duration {
        let pause = self.pause;
        self.pause = (pause * 2).min(self.longest);
        pause
    }
}

/// Requests that fail, though they may succeed a little later.
pub(super) struct Failing {
    pub(super) since: Instant,
    pub(super) retry: Retry,
    /// A try that may have been executed.
    pub(super) unconfirmed: Option<Error>,
}

impl Failing {
    pub(super) fn since(since: Instant) -> Self {
        Self { since, retry: Retry::new(REFUSED_FOR_NOW.0, REFUSED_FOR_NOW.1), unconfirmed: None }
    }

    /// What all tries come to, of which this was the last: where one may have been executed, nobody can say that none was.
    pub(super) fn as_a_whole(&mut self, last: Error) -> Error {
        match last {
            // of what was adopted unheard, and then ended, a later try finds nothing
            Error::Store { .. } | Error::NotHeld { .. } => self.unconfirmed.take().unwrap_or(last),
            _ => last,
        }
    }
}

/// This pause, or down to half of it: those who failed together should not try together.
pub(super) fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + 0.5 * random_fraction())
}

/// A number from 0 to 1, for jitter.
pub(crate) fn random_fraction() -> f64 {
    f64::from(u32::from_le_bytes(*Uuid::new_v4().as_bytes().first_chunk().unwrap_or(&[0; 4]))) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_a_longest() {
        let mut retry = Retry::new(Duration::from_millis(20), Duration::from_millis(100));
        let pauses: Vec<u128> = (0..5).map(|_| retry.next().as_millis()).collect();
        assert_eq!(pauses, [20, 40, 80, 100, 100]);
    }

    #[test]
    fn jitter_takes_up_to_half() {
        let pause = Duration::from_millis(10);
        assert!((0..1000).map(|_| jittered(pause)).all(|jittered| jittered >= pause / 2 && jittered <= pause));
    }
}
