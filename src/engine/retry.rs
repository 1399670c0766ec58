//! Trying again: after how long.

use std::time::Duration;

use uuid::Uuid;

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
