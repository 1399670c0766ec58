//! Keeps a connection logged in: replaces its credentials before they expire.

use std::{convert::Infallible, future::pending, pin::pin, time::Duration};

use tokio::time::{sleep, timeout};

use crate::{
    clock::Instant, connection::Connection, credentials::Login, expiring::Expiring,
    failure::NotConnected, log, request::Request, until::Until,
};

/// How long to wait before the next try, if credentials could not be refreshed: a tenth of their
/// time, within these limits.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(10));

/// How often to look at the clock that counts while the machine is suspended.
const LOOK: Duration = Duration::from_secs(5);

/// Replaces the credentials of a connection again and again, if they expire. Never completes.
pub(super) async fn keep_logged_in(connection: &Connection) -> Infallible {
    match connection.credentials() {
        Some(credentials) => credentials.refresh(connection).await,
        None => pending().await,
    }
}

impl Expiring {
    async fn refresh(&self, connection: &Connection) -> Infallible {
        let address = self.settings.server.address.to_string();
        let (mut due, mut time) = (self.at + self.refresh_after, self.refresh_after);
        loop {
            sleep_until(due, Instant::now).await;
            let limit = self.settings.connect_timeout;
            // not dropped before the error is made: it may wait for the provider
            let mut replaced = pin!(self.replace(connection));
            let why = match timeout(limit, &mut replaced).await {
                Ok(Ok(Some(next))) => {
                    // a function that takes longer than its credentials live gets a pause, too
                    let soonest = Instant::now() + RETRY.0;
                    (due, time) = (
                        soonest.max(next.at + next.refresh_after),
                        next.refresh_after,
                    );
                    continue;
                }
                // the new ones do not expire
                Ok(Ok(None)) => return pending().await,
                Ok(Err(NotConnected { error, .. })) => error.to_string(),
                Err(_) => format!("no reply within {limit:?}{}", self.source.why_late(limit)),
            };
            log::later!(WARN, address = address, error = why; "cannot refresh the credentials of a connection");
            due = Instant::now() + retry(time);
        }
    }

    /// Replaces the credentials of a connection. Returns what replaces the new ones, if they expire.
    async fn replace(&self, connection: &Connection) -> Result<Option<Self>, NotConnected> {
        let log_in = |login| self.log_in(connection, login);
        let address = &self.settings.server.address;
        let ((), fetched) = self
            .source
            .log_in(address, self.settings.hangs(), log_in)
            .await?;
        Ok(Self::new(&self.source, &self.settings, &fetched))
    }

    async fn log_in(&self, connection: &Connection, login: Login) -> Result<(), NotConnected> {
        let Some(password) = login.password else {
            return Ok(());
        };
        let user = login.user.as_deref().unwrap_or("default");
        let until = Until::new(Instant::now(), self.settings.command_timeout);
        let words = ["AUTH", user, &password];
        let answer = connection.call(Request::Words(&words), until).await;
        answer.map(drop).map_err(NotConnected::of_login)
    }
}

/// Waits until `due`. The timer stops while the machine is suspended, and this clock does not: so it
/// is looked at every few seconds.
async fn sleep_until(due: Instant, now: impl Fn() -> Instant) {
    loop {
        match due.saturating_duration_since(now()) {
            Duration::ZERO => return,
            left => sleep(left.min(LOOK)).await,
        }
    }
}

/// Returns how long to wait after a failed refresh of credentials that live for this time.
fn retry(time: Duration) -> Duration {
    (time / 10).clamp(RETRY.0, RETRY.1)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// A machine that is suspended for an hour: the timer does not see it, and the clock does.
    #[tokio::test(start_paused = true)]
    async fn credentials_are_due_soon_after_a_suspension() {
        let (start, looks) = (Instant::now(), Cell::new(0));
        let now = || {
            looks.set(looks.get() + 1);
            let suspended = Duration::from_secs(if looks.get() > 1 { 3_600 } else { 0 });
            start + suspended
        };
        let began = tokio::time::Instant::now();
        sleep_until(start + Duration::from_secs(1_800), now).await;
        assert!(began.elapsed() <= LOOK + Duration::from_millis(10));
        assert_eq!(looks.get(), 2);
    }
}
