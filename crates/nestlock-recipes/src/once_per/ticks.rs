//! The moments at which a job is due, the same for every replica.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nestlock::FencingToken;

/// The most ticks of a pattern to step back over, which takes some milliseconds on the thread of
/// the caller.
#[cfg(feature = "cron")]
const MOST_STEPS: u32 = 10_000;

/// One moment at which a job is due.
///
/// For an example, see [`Ticks`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tick(FencingToken);

impl Tick {
    /// Returns the number of the tick: milliseconds since the epoch. Later ticks have higher
    /// numbers, whatever their pattern, so the number is a fencing token for what the job writes.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0.get()
    }

    /// Returns the moment at which the job is due.
    #[must_use]
    pub fn at(self) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(self.number())
    }

    /// Returns [`number`](Self::number) as a token.
    #[must_use]
    pub fn token(self) -> FencingToken {
        self.0
    }

    /// Creates a tick. Returns `None` at the epoch, which is not a valid token, and beyond the last
    /// token.
    fn new(millis: u64) -> Option<Self> {
        FencingToken::try_from(millis).ok().map(Self)
    }
}

/// The ticks of a job: the moments at which it is due.
///
/// ```no_run
/// # async fn example(client: nestlock::LockClient) -> nestlock::Result<()> {
/// use std::time::Duration;
///
/// use nestlock_recipes::once_per::{Tick, Ticks, once_per};
///
/// let hourly = once_per(&client, "report", Ticks::every(Duration::from_secs(3600)))?;
/// let job = |tick: Tick| async move { tick.at() };
/// println!("{:?}", hourly.run(job).await?);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Ticks(Pattern);

#[derive(Debug, Clone)]
enum Pattern {
    /// The interval in milliseconds, at least 1.
    Every(u64),
    #[cfg(feature = "cron")]
    Cron(Box<croner::Cron>),
}

impl Ticks {
    /// Returns ticks at each multiple of this interval since the epoch, in UTC: `every(3600 s)` is
    /// due on the hour. The interval is rounded down to milliseconds, and is at least 1 ms.
    #[must_use]
    pub fn every(interval: Duration) -> Self {
        Self(Pattern::Every(
            u64::try_from(interval.as_millis())
                .unwrap_or(u64::MAX)
                .max(1),
        ))
    }

    /// Returns ticks at the times of a cron pattern, in UTC: `"30 3 * * MON-FRI"`, with an optional
    /// field for seconds before the others.
    ///
    /// # Errors
    ///
    /// [`InvalidPattern`], with the reason.
    #[cfg(feature = "cron")]
    pub fn cron(pattern: &str) -> Result<Self, InvalidPattern> {
        let cron = pattern
            .parse()
            .map_err(|error: croner::errors::CronError| InvalidPattern {
                pattern: pattern.to_owned(),
                reason: error.to_string(),
            })?;
        Ok(Self(Pattern::Cron(Box::new(cron))))
    }

    /// Returns the last tick at or before this moment, in milliseconds since the epoch.
    pub(super) fn last(&self, millis: u64) -> Option<Tick> {
        match &self.0 {
            Pattern::Every(interval) => Tick::new(millis - millis % interval),
            #[cfg(feature = "cron")]
            Pattern::Cron(cron) => instant(cron.find_previous_occurrence(&seconds(millis)?, true)),
        }
    }

    /// Returns the oldest of the last `most` ticks up to `last` that come after the moment `after`.
    pub(super) fn oldest(&self, last: Tick, after: u64, most: u32) -> Option<Tick> {
        let span = last.number() - after;
        match &self.0 {
            // computed, since this runs for each missed tick: to step back each time took hours for
            // a day of one-second ticks
            Pattern::Every(interval) => {
                let back = ((span - 1) / interval).min(u64::from(most) - 1);
                Tick::new(last.number() - back * interval)
            }
            // a pattern has at most one tick per second, so all missed ticks fit into `most`
            #[cfg(feature = "cron")]
            Pattern::Cron(_) if span.div_ceil(1000) <= u64::from(most) => self.next(after),
            #[cfg(feature = "cron")]
            Pattern::Cron(_) => {
                let earlier =
                    std::iter::successors(Some(last), |tick| self.last(tick.number() - 1));
                earlier
                    .take_while(|tick| tick.number() > after)
                    .take(most.min(MOST_STEPS) as usize)
                    .last()
            }
        }
    }

    /// Returns the first tick after this moment.
    pub(super) fn next(&self, millis: u64) -> Option<Tick> {
        match &self.0 {
            Pattern::Every(interval) => {
                Tick::new((millis / interval).checked_add(1)?.checked_mul(*interval)?)
            }
            #[cfg(feature = "cron")]
            Pattern::Cron(cron) => instant(cron.find_next_occurrence(&seconds(millis)?, false)),
        }
    }
}

/// The error for an invalid cron pattern.
///
/// ```
/// use nestlock_recipes::once_per::Ticks;
///
/// let error = Ticks::cron("every day").unwrap_err();
/// assert_eq!(error.pattern, "every day");
/// println!("{}", error.reason);
/// ```
#[cfg(feature = "cron")]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid cron pattern {pattern:?}: {reason}")]
#[non_exhaustive]
pub struct InvalidPattern {
    /// The pattern as given.
    pub pattern: String,
    /// What is wrong with it.
    pub reason: String,
}

/// Returns the whole second that contains this moment: patterns have no finer times.
#[cfg(feature = "cron")]
fn seconds(millis: u64) -> Option<chrono::DateTime<chrono::Utc>> {
    chrono::DateTime::from_timestamp(i64::try_from(millis / 1000).ok()?, 0)
}

/// Returns the tick at this instant. Returns `None` if the pattern has no such instant.
#[cfg(feature = "cron")]
fn instant(
    found: Result<chrono::DateTime<chrono::Utc>, croner::errors::CronError>,
) -> Option<Tick> {
    Tick::new(u64::try_from(found.ok()?.timestamp_millis()).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The last moment that is a fencing token: the year 287396.
    const MAX: u64 = (1 << 53) - 1;

    fn numbers(ticks: &Ticks, from: u64, to: u64) -> Vec<u64> {
        let after = |millis: u64| {
            ticks
                .next(millis)
                .map(Tick::number)
                .filter(|next| *next <= to)
        };
        std::iter::successors(after(from), |tick| after(*tick)).collect()
    }

    #[test]
    fn a_grid_is_counted_from_the_epoch() {
        let ticks = Ticks::every(Duration::from_secs(10));
        assert_eq!(ticks.last(9_999), None);
        assert_eq!(ticks.last(10_000).map(Tick::number), Some(10_000));
        assert_eq!(ticks.last(19_999).map(Tick::number), Some(10_000));
        assert_eq!(ticks.next(10_000).map(Tick::number), Some(20_000));
        assert_eq!(numbers(&ticks, 0, 35_000), [10_000, 20_000, 30_000]);
    }

    /// Compares the result with a walk over all ticks.
    fn assert_oldest(ticks: &Ticks, now: u64, after: u64, most: u32) {
        let last = ticks.last(now).unwrap();
        let all = numbers(ticks, after, last.number());
        let wanted = all[all.len().saturating_sub(most as usize)];
        assert_eq!(
            ticks.oldest(last, after, most).map(Tick::number),
            Some(wanted),
            "{ticks:?} {now} {after} {most}"
        );
    }

    #[test]
    fn the_oldest_of_those_that_were_missed_is_found() {
        let ticks = Ticks::every(Duration::from_millis(10));
        for most in [1, 2, 3, 99, u32::MAX] {
            for after in [1, 9, 10, 11, 20, 55, 99] {
                assert_oldest(&ticks, 109, after, most);
            }
        }
    }

    #[cfg(feature = "cron")]
    #[test]
    fn the_oldest_of_a_pattern_that_were_missed_is_found() {
        let day = 1_774_742_400_000;
        for pattern in ["* * * * * *", "*/7 * * * * *", "0 * * * *"] {
            let ticks = Ticks::cron(pattern).unwrap();
            for most in [1, 2, 50, 7_200, 10_000, u32::MAX] {
                for after in [1, 999, 1_000, 1_001, 3_599_999, 3_600_000, 7_000_000] {
                    assert_oldest(&ticks, day + 7_200_500, day + after, most);
                }
            }
        }
    }

    #[cfg(feature = "cron")]
    #[test]
    fn no_walk_is_endless() {
        let ticks = Ticks::cron("* * * * * *").unwrap();
        let last = ticks.last(9_223_372_036_000).unwrap();
        let oldest = ticks.oldest(last, 1, u32::MAX).unwrap();
        assert_eq!(oldest.number(), last.number() - 9_999 * 1_000);
    }

    #[test]
    fn extremes_of_a_grid_neither_panic_nor_overflow() {
        for interval in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
            let ticks = Ticks::every(interval);
            for millis in [0, 1, MAX, MAX + 1, u64::MAX] {
                let (last, next) = (ticks.last(millis), ticks.next(millis));
                assert!(
                    last.is_none_or(|tick| tick.number() <= millis)
                        && next.is_none_or(|tick| tick.number() > millis)
                );
            }
        }
    }

    #[cfg(feature = "cron")]
    #[test]
    fn a_pattern_is_read_in_utc() {
        // 2026-03-29 00:00 UTC: in much of Europe an hour is missing on that day
        let (day, hour) = (1_774_742_400_000, 3_600_000);
        let ticks = Ticks::cron("0 * * * *").unwrap();
        let all: Vec<u64> = (1..=24).map(|n| day + n * hour).collect();
        assert_eq!(numbers(&ticks, day, day + 24 * hour), all);
        let nightly = Ticks::cron("30 3 * * *").unwrap();
        assert_eq!(
            nightly.last(day + 4 * hour).map(Tick::number),
            Some(day + hour * 7 / 2)
        );
        assert_eq!(
            nightly.last(day + hour * 7 / 2 + 1).map(Tick::number),
            Some(day + hour * 7 / 2)
        );
        assert_eq!(
            nightly.last(day + hour * 7 / 2).map(Tick::number),
            Some(day + hour * 7 / 2)
        );
        assert_eq!(
            nightly.last(day + hour * 7 / 2 - 1).map(Tick::number),
            Some(day - hour * 41 / 2)
        );
    }

    #[cfg(feature = "cron")]
    #[test]
    fn what_cannot_be_read_or_never_comes_is_said() {
        let error = Ticks::cron("every day").unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("invalid cron pattern \"every day\": "),
            "{error}"
        );
        let never = Ticks::cron("0 0 30 2 *").unwrap();
        assert_eq!(
            (never.last(1_774_742_400_000), never.next(1_774_742_400_000)),
            (None, None)
        );
        assert_eq!(never.next(u64::MAX), None);
    }
}
