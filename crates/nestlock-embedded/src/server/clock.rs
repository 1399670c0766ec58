//! The server's clock. It drives expiry, TIME and timeouts, and can be advanced.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Wall-clock time that never goes backwards, stands still during a command or script, and can jump
/// forward.
#[derive(Debug)]
pub(crate) struct Clock {
    /// When this clock was created: on the monotonic clock, and since the Unix epoch.
    made: (Instant, Duration),
    jumped: Duration,
    now: Duration,
}

impl Clock {
    pub(crate) fn new() -> Self {
        let epoch = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Self {
            made: (Instant::now(), epoch),
            jumped: Duration::ZERO,
            now: epoch,
        }
    }

    /// Reads the time. It stands still until the next call.
    pub(crate) fn tick(&mut self) {
        self.now = self.made.1 + self.made.0.elapsed() + self.jumped;
    }

    pub(crate) fn advance(&mut self, by: Duration) {
        self.jumped = self.jumped.saturating_add(by);
        self.tick();
    }

    /// Returns the milliseconds since the Unix epoch, as of the last [`Clock::tick`].
    pub(crate) fn now_ms(&self) -> i64 {
        i64::try_from(self.now.as_millis()).unwrap_or(i64::MAX)
    }

    /// Returns the time since the Unix epoch, as of the last [`Clock::tick`].
    pub(crate) fn now(&self) -> Duration {
        self.now
    }

    /// Returns the time since the server started, jumps included.
    pub(crate) fn uptime(&self) -> Duration {
        self.now.saturating_sub(self.made.1)
    }
}
