//! The server's clock: one for expiry, TIME and timeouts, which a user can put forward.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Wall-clock time that never goes back, stands still within a command or script, and jumps on order.
#[derive(Debug)]
pub(crate) struct Clock {
    /// When this clock was made, on the monotonic clock and since the epoch.
    made: (Instant, Duration),
    jumped: Duration,
    now: Duration,
}

impl Clock {
    pub(crate) fn new() -> Self {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { made: (Instant::now(), epoch), jumped: Duration::ZERO, now: epoch }
    }

    /// Looks at the time. Until the next look, it stands still.
    pub(crate) fn tick(&mut self) {
        self.now = self.made.1 + self.made.0.elapsed() + self.jumped;
    }

    pub(crate) fn advance(&mut self, by: Duration) {
        self.jumped = self.jumped.saturating_add(by);
        self.tick();
    }

    /// Milliseconds since the epoch, when last looked at.
    pub(crate) fn now_ms(&self) -> i64 {
        i64::try_from(self.now.as_millis()).unwrap_or(i64::MAX)
    }

    /// Time since the epoch, when last looked at.
    pub(crate) fn now(&self) -> Duration {
        self.now
    }

    /// Time since the server started, jumps included.
    pub(crate) fn uptime(&self) -> Duration {
        self.now.saturating_sub(self.made.1)
    }
}
